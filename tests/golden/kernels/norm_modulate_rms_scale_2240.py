import triton
import triton.language as tl


@triton.jit
def norm_modulate_forward(X, SCALE, Y, RSTD, N, scale_g):
    row = tl.program_id(0).to(tl.int64)
    group = row // N
    c_0 = tl.arange(0, 512)
    c_1 = 512 + tl.arange(0, 512)
    c_2 = 1024 + tl.arange(0, 512)
    c_3 = 1536 + tl.arange(0, 512)
    c_4 = 2048 + tl.arange(0, 256)
    x_0 = tl.load(X + row * 2240 + c_0).to(tl.float32)
    x_1 = tl.load(X + row * 2240 + c_1).to(tl.float32)
    x_2 = tl.load(X + row * 2240 + c_2).to(tl.float32)
    x_3 = tl.load(X + row * 2240 + c_3).to(tl.float32)
    x_4 = tl.load(X + row * 2240 + c_4, mask=c_4 < 2240, other=0.0).to(tl.float32)
    centred_0 = x_0
    centred_1 = x_1
    centred_2 = x_2
    centred_3 = x_3
    centred_4 = x_4
    variance = (tl.sum(centred_0 * centred_0 + centred_1 * centred_1 + centred_2 * centred_2 + centred_3 * centred_3, 0) + tl.sum(centred_4 * centred_4, 0)) * 0.0004464285714285714
    around = variance + 1e-06
    rough = 1.0 / tl.sqrt(around)
    nearly = around * rough
    lost = tl.fma(around, rough, -nearly)
    better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
    rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    tl.store(Y + row * 2240 + c_0, (centred_0 * rstd * gain_0).to(tl.bfloat16))
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    tl.store(Y + row * 2240 + c_1, (centred_1 * rstd * gain_1).to(tl.bfloat16))
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2).to(tl.float32)
    tl.store(Y + row * 2240 + c_2, (centred_2 * rstd * gain_2).to(tl.bfloat16))
    gain_3 = 1.0 + tl.load(SCALE + group * scale_g + c_3).to(tl.float32)
    tl.store(Y + row * 2240 + c_3, (centred_3 * rstd * gain_3).to(tl.bfloat16))
    gain_4 = 1.0 + tl.load(SCALE + group * scale_g + c_4, mask=c_4 < 2240, other=0.0).to(tl.float32)
    tl.store(Y + row * 2240 + c_4, (centred_4 * rstd * gain_4).to(tl.bfloat16), mask=c_4 < 2240)
    tl.store(RSTD + row, rstd)


@triton.jit
def norm_modulate_backward(DY, H, SCALE, DX, RSTD, PARTIAL, N, P, scale_g):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.arange(0, 1024)
    c_1 = 1024 + tl.arange(0, 1024)
    c_2 = 2048 + tl.arange(0, 256)
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    sum_scale_0 = tl.zeros([1024], tl.float32)
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    sum_scale_1 = tl.zeros([1024], tl.float32)
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2, mask=c_2 < 2240, other=0.0).to(tl.float32)
    sum_scale_2 = tl.zeros([256], tl.float32)
    for step in tl.range(tl.program_id(0) % P, N, P, num_stages=4):
        row = group * N + tl.cast(step, tl.int64)
        dy_0 = tl.load(DY + row * 2240 + c_0).to(tl.float32)
        dy_1 = tl.load(DY + row * 2240 + c_1).to(tl.float32)
        dy_2 = tl.load(DY + row * 2240 + c_2, mask=c_2 < 2240, other=0.0).to(tl.float32)
        h_0 = tl.load(H + row * 2240 + c_0).to(tl.float32)
        h_1 = tl.load(H + row * 2240 + c_1).to(tl.float32)
        h_2 = tl.load(H + row * 2240 + c_2, mask=c_2 < 2240, other=0.0).to(tl.float32)
        rstd = tl.load(RSTD + row)
        xhat_0 = h_0 * rstd
        sum_scale_0 += dy_0 * xhat_0
        w_0 = dy_0 * gain_0
        xhat_1 = h_1 * rstd
        sum_scale_1 += dy_1 * xhat_1
        w_1 = dy_1 * gain_1
        xhat_2 = tl.where(c_2 < 2240, h_2 * rstd, 0.0)
        sum_scale_2 += dy_2 * xhat_2
        w_2 = dy_2 * gain_2
        mean_wx = (tl.sum(w_0 * xhat_0 + w_1 * xhat_1, 0) + tl.sum(w_2 * xhat_2, 0)) * 0.0004464285714285714
        total_0 = (w_0 - xhat_0 * mean_wx) * rstd
        total_1 = (w_1 - xhat_1 * mean_wx) * rstd
        total_2 = (w_2 - xhat_2 * mean_wx) * rstd
        tl.store(DX + row * 2240 + c_0, (total_0).to(tl.bfloat16))
        tl.store(DX + row * 2240 + c_1, (total_1).to(tl.bfloat16))
        tl.store(DX + row * 2240 + c_2, (total_2).to(tl.bfloat16), mask=c_2 < 2240)
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 2240
    tl.store(partial + c_0, sum_scale_0)
    tl.store(partial + c_1, sum_scale_1)
    tl.store(partial + c_2, sum_scale_2, mask=c_2 < 2240)


@triton.jit
def norm_modulate_sums(PARTIAL, DSCALE, P):
    tile = tl.program_id(0) % 70
    which = tl.program_id(0) // 70 % 1
    group = tl.program_id(0).to(tl.int64) // 70
    c = tile * 32 + tl.arange(0, 32)
    r = tl.arange(0, 128).to(tl.int64)
    start = PARTIAL + group * P * 2240 + 0
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, P, 128):
        inside = (first + r < P)[:, None] & (c < 2240)[None, :]
        total += tl.load(start + (first + r)[:, None] * 2240 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DSCALE + group * 2240 + c, value.to(tl.float32), mask=c < 2240)
