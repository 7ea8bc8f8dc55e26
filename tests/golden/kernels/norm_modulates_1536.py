import triton
import triton.language as tl


@triton.jit
def norm_modulates_forward(X, SCALE, SHIFT, SCALE2, Y, Y2, Y3, MEAN, RSTD, N, P, scale_g, shift_g, scale2_g):
    group = tl.program_id(0).to(tl.int64) // P
    first = (tl.program_id(0) % P) * 2
    c_0 = tl.arange(0, 512)
    c_1 = 512 + tl.arange(0, 512)
    c_2 = 1024 + tl.arange(0, 512)
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    shift_0 = tl.load(SHIFT + group * shift_g + c_0).to(tl.float32)
    gain2_0 = 1.0 + tl.load(SCALE2 + group * scale2_g + c_0).to(tl.float32)
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    shift_1 = tl.load(SHIFT + group * shift_g + c_1).to(tl.float32)
    gain2_1 = 1.0 + tl.load(SCALE2 + group * scale2_g + c_1).to(tl.float32)
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2).to(tl.float32)
    shift_2 = tl.load(SHIFT + group * shift_g + c_2).to(tl.float32)
    gain2_2 = 1.0 + tl.load(SCALE2 + group * scale2_g + c_2).to(tl.float32)
    for step in tl.range(first, tl.minimum(first + 2, N), num_stages=3):
        row = group * N + tl.cast(step, tl.int64)
        x_0 = tl.load(X + row * 1536 + c_0).to(tl.float32)
        x_1 = tl.load(X + row * 1536 + c_1).to(tl.float32)
        x_2 = tl.load(X + row * 1536 + c_2).to(tl.float32)
        whole = tl.sum(x_0 + x_1 + x_2, 0)
        mean = whole * 0.0006510416666666666
        mean = tl.fma(tl.fma(mean, -1536.0, whole), 0.0006510416666666666, mean)
        centred_0 = x_0 - mean
        centred_1 = x_1 - mean
        centred_2 = x_2 - mean
        variance = (tl.sum(centred_0 * centred_0 + centred_1 * centred_1 + centred_2 * centred_2, 0)) * 0.0006510416666666666
        around = variance + 1e-06
        rough = 1.0 / tl.sqrt(around)
        nearly = around * rough
        lost = tl.fma(around, rough, -nearly)
        better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
        rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
        n_0 = centred_0 * rstd
        tl.store(Y + row * 1536 + c_0, (n_0 * gain_0 + shift_0).to(tl.bfloat16))
        tl.store(Y2 + row * 1536 + c_0, (n_0 * gain2_0).to(tl.bfloat16))
        tl.store(Y3 + row * 1536 + c_0, (n_0).to(tl.bfloat16))
        n_1 = centred_1 * rstd
        tl.store(Y + row * 1536 + c_1, (n_1 * gain_1 + shift_1).to(tl.bfloat16))
        tl.store(Y2 + row * 1536 + c_1, (n_1 * gain2_1).to(tl.bfloat16))
        tl.store(Y3 + row * 1536 + c_1, (n_1).to(tl.bfloat16))
        n_2 = centred_2 * rstd
        tl.store(Y + row * 1536 + c_2, (n_2 * gain_2 + shift_2).to(tl.bfloat16))
        tl.store(Y2 + row * 1536 + c_2, (n_2 * gain2_2).to(tl.bfloat16))
        tl.store(Y3 + row * 1536 + c_2, (n_2).to(tl.bfloat16))
        tl.store(MEAN + row, mean)
        tl.store(RSTD + row, rstd)


@triton.jit
def norm_modulates_backward(DY, DY2, DY3, H, SCALE, SCALE2, DX, MEAN, RSTD, PARTIAL, N, P, scale_g, scale2_g):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.arange(0, 512)
    c_1 = 512 + tl.arange(0, 512)
    c_2 = 1024 + tl.arange(0, 512)
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    gain2_0 = 1.0 + tl.load(SCALE2 + group * scale2_g + c_0).to(tl.float32)
    sum_scale_0 = tl.zeros([512], tl.float32)
    sum_shift_0 = tl.zeros([512], tl.float32)
    sum_scale2_0 = tl.zeros([512], tl.float32)
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    gain2_1 = 1.0 + tl.load(SCALE2 + group * scale2_g + c_1).to(tl.float32)
    sum_scale_1 = tl.zeros([512], tl.float32)
    sum_shift_1 = tl.zeros([512], tl.float32)
    sum_scale2_1 = tl.zeros([512], tl.float32)
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2).to(tl.float32)
    gain2_2 = 1.0 + tl.load(SCALE2 + group * scale2_g + c_2).to(tl.float32)
    sum_scale_2 = tl.zeros([512], tl.float32)
    sum_shift_2 = tl.zeros([512], tl.float32)
    sum_scale2_2 = tl.zeros([512], tl.float32)
    for step in tl.range(tl.program_id(0) % P, N, P, num_stages=4):
        row = group * N + tl.cast(step, tl.int64)
        dy_0 = tl.load(DY + row * 1536 + c_0).to(tl.float32)
        dy_1 = tl.load(DY + row * 1536 + c_1).to(tl.float32)
        dy_2 = tl.load(DY + row * 1536 + c_2).to(tl.float32)
        dy2_0 = tl.load(DY2 + row * 1536 + c_0).to(tl.float32)
        dy2_1 = tl.load(DY2 + row * 1536 + c_1).to(tl.float32)
        dy2_2 = tl.load(DY2 + row * 1536 + c_2).to(tl.float32)
        dy3_0 = tl.load(DY3 + row * 1536 + c_0).to(tl.float32)
        dy3_1 = tl.load(DY3 + row * 1536 + c_1).to(tl.float32)
        dy3_2 = tl.load(DY3 + row * 1536 + c_2).to(tl.float32)
        h_0 = tl.load(H + row * 1536 + c_0).to(tl.float32)
        h_1 = tl.load(H + row * 1536 + c_1).to(tl.float32)
        h_2 = tl.load(H + row * 1536 + c_2).to(tl.float32)
        mean = tl.load(MEAN + row)
        rstd = tl.load(RSTD + row)
        xhat_0 = (h_0 - mean) * rstd
        sum_scale_0 += dy_0 * xhat_0
        sum_shift_0 += dy_0
        sum_scale2_0 += dy2_0 * xhat_0
        w_0 = dy_0 * gain_0 + dy2_0 * gain2_0 + dy3_0
        xhat_1 = (h_1 - mean) * rstd
        sum_scale_1 += dy_1 * xhat_1
        sum_shift_1 += dy_1
        sum_scale2_1 += dy2_1 * xhat_1
        w_1 = dy_1 * gain_1 + dy2_1 * gain2_1 + dy3_1
        xhat_2 = (h_2 - mean) * rstd
        sum_scale_2 += dy_2 * xhat_2
        sum_shift_2 += dy_2
        sum_scale2_2 += dy2_2 * xhat_2
        w_2 = dy_2 * gain_2 + dy2_2 * gain2_2 + dy3_2
        mean_w, mean_wx = tl.split((tl.sum(tl.join(w_0 + w_1 + w_2, w_0 * xhat_0 + w_1 * xhat_1 + w_2 * xhat_2), 0)) * 0.0006510416666666666)
        total_0 = (w_0 - mean_w - xhat_0 * mean_wx) * rstd
        total_1 = (w_1 - mean_w - xhat_1 * mean_wx) * rstd
        total_2 = (w_2 - mean_w - xhat_2 * mean_wx) * rstd
        tl.store(DX + row * 1536 + c_0, (total_0).to(tl.bfloat16))
        tl.store(DX + row * 1536 + c_1, (total_1).to(tl.bfloat16))
        tl.store(DX + row * 1536 + c_2, (total_2).to(tl.bfloat16))
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 4608
    tl.store(partial + c_0, sum_scale_0)
    tl.store(partial + c_1, sum_scale_1)
    tl.store(partial + c_2, sum_scale_2)
    tl.store(partial + 1536 + c_0, sum_shift_0)
    tl.store(partial + 1536 + c_1, sum_shift_1)
    tl.store(partial + 1536 + c_2, sum_shift_2)
    tl.store(partial + 3072 + c_0, sum_scale2_0)
    tl.store(partial + 3072 + c_1, sum_scale2_1)
    tl.store(partial + 3072 + c_2, sum_scale2_2)


@triton.jit
def norm_modulates_sums(PARTIAL, DSCALE, DSHIFT, DSCALE2, P):
    tile = tl.program_id(0) % 48
    which = tl.program_id(0) // 48 % 3
    group = tl.program_id(0).to(tl.int64) // 144
    c = tile * 32 + tl.arange(0, 32)
    r = tl.arange(0, 128).to(tl.int64)
    start = PARTIAL + group * P * 4608 + tl.where(which == 2, 3072, tl.where(which == 1, 1536, 0))
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, P, 128):
        inside = (first + r < P)[:, None] & (c < 1536)[None, :]
        total += tl.load(start + (first + r)[:, None] * 4608 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DSCALE + group * 1536 + c, value.to(tl.float32), mask=c < 1536)
    if which == 1:
        tl.store(DSHIFT + group * 1536 + c, value.to(tl.float32), mask=c < 1536)
    if which == 2:
        tl.store(DSCALE2 + group * 1536 + c, value.to(tl.float32), mask=c < 1536)
