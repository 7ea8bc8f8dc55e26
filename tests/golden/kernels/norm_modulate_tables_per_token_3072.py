import triton
import triton.language as tl


@triton.jit
def norm_modulate_forward(X, SCALE, SCALE_TABLE, SHIFT, SHIFT_TABLE, Y, MEAN, RSTD, N):
    row = tl.program_id(0).to(tl.int64)
    c_0 = tl.arange(0, 1024)
    c_1 = 1024 + tl.arange(0, 1024)
    c_2 = 2048 + tl.arange(0, 1024)
    x_0 = tl.load(X + row * 3072 + c_0).to(tl.float32)
    x_1 = tl.load(X + row * 3072 + c_1).to(tl.float32)
    x_2 = tl.load(X + row * 3072 + c_2).to(tl.float32)
    whole = tl.sum(x_0 + x_1 + x_2, 0)
    mean = whole * 0.0003255208333333333
    mean = tl.fma(tl.fma(mean, -3072.0, whole), 0.0003255208333333333, mean)
    centred_0 = x_0 - mean
    centred_1 = x_1 - mean
    centred_2 = x_2 - mean
    variance = (tl.sum(centred_0 * centred_0 + centred_1 * centred_1 + centred_2 * centred_2, 0)) * 0.0003255208333333333
    around = variance + 1e-06
    rough = 1.0 / tl.sqrt(around)
    nearly = around * rough
    lost = tl.fma(around, rough, -nearly)
    better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
    rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
    gain_0 = 1.0 + tl.load(SCALE + row * 3072 + c_0).to(tl.float32) + tl.load(SCALE_TABLE + c_0).to(tl.float32)
    shift_0 = tl.load(SHIFT + row * 3072 + c_0).to(tl.float32) + tl.load(SHIFT_TABLE + c_0).to(tl.float32)
    tl.store(Y + row * 3072 + c_0, (centred_0 * rstd * gain_0 + shift_0).to(tl.bfloat16))
    gain_1 = 1.0 + tl.load(SCALE + row * 3072 + c_1).to(tl.float32) + tl.load(SCALE_TABLE + c_1).to(tl.float32)
    shift_1 = tl.load(SHIFT + row * 3072 + c_1).to(tl.float32) + tl.load(SHIFT_TABLE + c_1).to(tl.float32)
    tl.store(Y + row * 3072 + c_1, (centred_1 * rstd * gain_1 + shift_1).to(tl.bfloat16))
    gain_2 = 1.0 + tl.load(SCALE + row * 3072 + c_2).to(tl.float32) + tl.load(SCALE_TABLE + c_2).to(tl.float32)
    shift_2 = tl.load(SHIFT + row * 3072 + c_2).to(tl.float32) + tl.load(SHIFT_TABLE + c_2).to(tl.float32)
    tl.store(Y + row * 3072 + c_2, (centred_2 * rstd * gain_2 + shift_2).to(tl.bfloat16))
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@triton.jit
def norm_modulate_backward(DY, H, SCALE, SCALE_TABLE, DX, DSCALE, DSHIFT, MEAN, RSTD, PARTIAL, N, P):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.arange(0, 1024)
    c_1 = 1024 + tl.arange(0, 1024)
    c_2 = 2048 + tl.arange(0, 1024)
    sum_scale_0 = tl.zeros([1024], tl.float32)
    sum_shift_0 = tl.zeros([1024], tl.float32)
    sum_scale_1 = tl.zeros([1024], tl.float32)
    sum_shift_1 = tl.zeros([1024], tl.float32)
    sum_scale_2 = tl.zeros([1024], tl.float32)
    sum_shift_2 = tl.zeros([1024], tl.float32)
    for step in tl.range(tl.program_id(0) % P, N, P, num_stages=4):
        row = group * N + tl.cast(step, tl.int64)
        dy_0 = tl.load(DY + row * 3072 + c_0).to(tl.float32)
        dy_1 = tl.load(DY + row * 3072 + c_1).to(tl.float32)
        dy_2 = tl.load(DY + row * 3072 + c_2).to(tl.float32)
        h_0 = tl.load(H + row * 3072 + c_0).to(tl.float32)
        h_1 = tl.load(H + row * 3072 + c_1).to(tl.float32)
        h_2 = tl.load(H + row * 3072 + c_2).to(tl.float32)
        mean = tl.load(MEAN + row)
        rstd = tl.load(RSTD + row)
        gain_0 = 1.0 + tl.load(SCALE + row * 3072 + c_0).to(tl.float32) + tl.load(SCALE_TABLE + c_0).to(tl.float32)
        gain_1 = 1.0 + tl.load(SCALE + row * 3072 + c_1).to(tl.float32) + tl.load(SCALE_TABLE + c_1).to(tl.float32)
        gain_2 = 1.0 + tl.load(SCALE + row * 3072 + c_2).to(tl.float32) + tl.load(SCALE_TABLE + c_2).to(tl.float32)
        xhat_0 = (h_0 - mean) * rstd
        sum_scale_0 += dy_0 * xhat_0
        tl.store(DSCALE + row * 3072 + c_0, (dy_0 * xhat_0).to(tl.float32))
        sum_shift_0 += dy_0
        tl.store(DSHIFT + row * 3072 + c_0, (dy_0).to(tl.float32))
        w_0 = dy_0 * gain_0
        xhat_1 = (h_1 - mean) * rstd
        sum_scale_1 += dy_1 * xhat_1
        tl.store(DSCALE + row * 3072 + c_1, (dy_1 * xhat_1).to(tl.float32))
        sum_shift_1 += dy_1
        tl.store(DSHIFT + row * 3072 + c_1, (dy_1).to(tl.float32))
        w_1 = dy_1 * gain_1
        xhat_2 = (h_2 - mean) * rstd
        sum_scale_2 += dy_2 * xhat_2
        tl.store(DSCALE + row * 3072 + c_2, (dy_2 * xhat_2).to(tl.float32))
        sum_shift_2 += dy_2
        tl.store(DSHIFT + row * 3072 + c_2, (dy_2).to(tl.float32))
        w_2 = dy_2 * gain_2
        mean_w, mean_wx = tl.split((tl.sum(tl.join(w_0 + w_1 + w_2, w_0 * xhat_0 + w_1 * xhat_1 + w_2 * xhat_2), 0)) * 0.0003255208333333333)
        total_0 = (w_0 - mean_w - xhat_0 * mean_wx) * rstd
        total_1 = (w_1 - mean_w - xhat_1 * mean_wx) * rstd
        total_2 = (w_2 - mean_w - xhat_2 * mean_wx) * rstd
        tl.store(DX + row * 3072 + c_0, (total_0).to(tl.bfloat16))
        tl.store(DX + row * 3072 + c_1, (total_1).to(tl.bfloat16))
        tl.store(DX + row * 3072 + c_2, (total_2).to(tl.bfloat16))
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 6144
    tl.store(partial + c_0, sum_scale_0)
    tl.store(partial + c_1, sum_scale_1)
    tl.store(partial + c_2, sum_scale_2)
    tl.store(partial + 3072 + c_0, sum_shift_0)
    tl.store(partial + 3072 + c_1, sum_shift_1)
    tl.store(partial + 3072 + c_2, sum_shift_2)


@triton.jit
def norm_modulate_sums(PARTIAL, DSCALE, DSHIFT, P):
    tile = tl.program_id(0) % 96
    which = tl.program_id(0) // 96 % 2
    group = tl.program_id(0).to(tl.int64) // 192
    c = tile * 32 + tl.arange(0, 32)
    r = tl.arange(0, 128).to(tl.int64)
    start = PARTIAL + group * P * 6144 + tl.where(which == 1, 3072, 0)
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, P, 128):
        inside = (first + r < P)[:, None] & (c < 3072)[None, :]
        total += tl.load(start + (first + r)[:, None] * 6144 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DSCALE + group * 3072 + c, value.to(tl.float32), mask=c < 3072)
    if which == 1:
        tl.store(DSHIFT + group * 3072 + c, value.to(tl.float32), mask=c < 3072)
