import triton
import triton.language as tl


@triton.jit
def norm_modulate_forward(X, SCALE, SHIFT, Y, MEAN, RSTD, N, P, scale_g, shift_g):
    group = tl.program_id(0).to(tl.int64) // P
    first = (tl.program_id(0) % P) * 3
    c_0 = tl.arange(0, 256)
    c_1 = 256 + tl.arange(0, 256)
    c_2 = 512 + tl.arange(0, 256)
    c_3 = 768 + tl.arange(0, 256)
    c_4 = 1024 + tl.arange(0, 128)
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    shift_0 = tl.load(SHIFT + group * shift_g + c_0).to(tl.float32)
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    shift_1 = tl.load(SHIFT + group * shift_g + c_1).to(tl.float32)
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2).to(tl.float32)
    shift_2 = tl.load(SHIFT + group * shift_g + c_2).to(tl.float32)
    gain_3 = 1.0 + tl.load(SCALE + group * scale_g + c_3).to(tl.float32)
    shift_3 = tl.load(SHIFT + group * shift_g + c_3).to(tl.float32)
    gain_4 = 1.0 + tl.load(SCALE + group * scale_g + c_4).to(tl.float32)
    shift_4 = tl.load(SHIFT + group * shift_g + c_4).to(tl.float32)
    for step in tl.range(first, tl.minimum(first + 3, N), num_stages=3):
        row = group * N + tl.cast(step, tl.int64)
        x_0 = tl.load(X + row * 1152 + c_0).to(tl.float32)
        x_1 = tl.load(X + row * 1152 + c_1).to(tl.float32)
        x_2 = tl.load(X + row * 1152 + c_2).to(tl.float32)
        x_3 = tl.load(X + row * 1152 + c_3).to(tl.float32)
        x_4 = tl.load(X + row * 1152 + c_4).to(tl.float32)
        whole = tl.sum(x_0 + x_1 + x_2 + x_3, 0) + tl.sum(x_4, 0)
        mean = whole * 0.0008680555555555555
        mean = tl.fma(tl.fma(mean, -1152.0, whole), 0.0008680555555555555, mean)
        centred_0 = x_0 - mean
        centred_1 = x_1 - mean
        centred_2 = x_2 - mean
        centred_3 = x_3 - mean
        centred_4 = x_4 - mean
        variance = (tl.sum(centred_0 * centred_0 + centred_1 * centred_1 + centred_2 * centred_2 + centred_3 * centred_3, 0) + tl.sum(centred_4 * centred_4, 0)) * 0.0008680555555555555
        around = variance + 1e-06
        rough = 1.0 / tl.sqrt(around)
        nearly = around * rough
        lost = tl.fma(around, rough, -nearly)
        better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
        rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
        tl.store(Y + row * 1152 + c_0, (centred_0 * rstd * gain_0 + shift_0).to(tl.bfloat16))
        tl.store(Y + row * 1152 + c_1, (centred_1 * rstd * gain_1 + shift_1).to(tl.bfloat16))
        tl.store(Y + row * 1152 + c_2, (centred_2 * rstd * gain_2 + shift_2).to(tl.bfloat16))
        tl.store(Y + row * 1152 + c_3, (centred_3 * rstd * gain_3 + shift_3).to(tl.bfloat16))
        tl.store(Y + row * 1152 + c_4, (centred_4 * rstd * gain_4 + shift_4).to(tl.bfloat16))
        tl.store(MEAN + row, mean)
        tl.store(RSTD + row, rstd)


@triton.jit
def norm_modulate_backward(DY, H, SCALE, DX, MEAN, RSTD, PARTIAL, N, P, scale_g):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.arange(0, 128)
    c_1 = 128 + tl.arange(0, 128)
    c_2 = 256 + tl.arange(0, 128)
    c_3 = 384 + tl.arange(0, 128)
    c_4 = 512 + tl.arange(0, 128)
    c_5 = 640 + tl.arange(0, 128)
    c_6 = 768 + tl.arange(0, 128)
    c_7 = 896 + tl.arange(0, 128)
    c_8 = 1024 + tl.arange(0, 128)
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    sum_scale_0 = tl.zeros([128], tl.float32)
    sum_shift_0 = tl.zeros([128], tl.float32)
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    sum_scale_1 = tl.zeros([128], tl.float32)
    sum_shift_1 = tl.zeros([128], tl.float32)
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2).to(tl.float32)
    sum_scale_2 = tl.zeros([128], tl.float32)
    sum_shift_2 = tl.zeros([128], tl.float32)
    gain_3 = 1.0 + tl.load(SCALE + group * scale_g + c_3).to(tl.float32)
    sum_scale_3 = tl.zeros([128], tl.float32)
    sum_shift_3 = tl.zeros([128], tl.float32)
    gain_4 = 1.0 + tl.load(SCALE + group * scale_g + c_4).to(tl.float32)
    sum_scale_4 = tl.zeros([128], tl.float32)
    sum_shift_4 = tl.zeros([128], tl.float32)
    gain_5 = 1.0 + tl.load(SCALE + group * scale_g + c_5).to(tl.float32)
    sum_scale_5 = tl.zeros([128], tl.float32)
    sum_shift_5 = tl.zeros([128], tl.float32)
    gain_6 = 1.0 + tl.load(SCALE + group * scale_g + c_6).to(tl.float32)
    sum_scale_6 = tl.zeros([128], tl.float32)
    sum_shift_6 = tl.zeros([128], tl.float32)
    gain_7 = 1.0 + tl.load(SCALE + group * scale_g + c_7).to(tl.float32)
    sum_scale_7 = tl.zeros([128], tl.float32)
    sum_shift_7 = tl.zeros([128], tl.float32)
    gain_8 = 1.0 + tl.load(SCALE + group * scale_g + c_8).to(tl.float32)
    sum_scale_8 = tl.zeros([128], tl.float32)
    sum_shift_8 = tl.zeros([128], tl.float32)
    for step in tl.range(tl.program_id(0) % P, N, P, num_stages=4):
        row = group * N + tl.cast(step, tl.int64)
        dy_0 = tl.load(DY + row * 1152 + c_0).to(tl.float32)
        dy_1 = tl.load(DY + row * 1152 + c_1).to(tl.float32)
        dy_2 = tl.load(DY + row * 1152 + c_2).to(tl.float32)
        dy_3 = tl.load(DY + row * 1152 + c_3).to(tl.float32)
        dy_4 = tl.load(DY + row * 1152 + c_4).to(tl.float32)
        dy_5 = tl.load(DY + row * 1152 + c_5).to(tl.float32)
        dy_6 = tl.load(DY + row * 1152 + c_6).to(tl.float32)
        dy_7 = tl.load(DY + row * 1152 + c_7).to(tl.float32)
        dy_8 = tl.load(DY + row * 1152 + c_8).to(tl.float32)
        h_0 = tl.load(H + row * 1152 + c_0).to(tl.float32)
        h_1 = tl.load(H + row * 1152 + c_1).to(tl.float32)
        h_2 = tl.load(H + row * 1152 + c_2).to(tl.float32)
        h_3 = tl.load(H + row * 1152 + c_3).to(tl.float32)
        h_4 = tl.load(H + row * 1152 + c_4).to(tl.float32)
        h_5 = tl.load(H + row * 1152 + c_5).to(tl.float32)
        h_6 = tl.load(H + row * 1152 + c_6).to(tl.float32)
        h_7 = tl.load(H + row * 1152 + c_7).to(tl.float32)
        h_8 = tl.load(H + row * 1152 + c_8).to(tl.float32)
        mean = tl.load(MEAN + row)
        rstd = tl.load(RSTD + row)
        xhat_0 = (h_0 - mean) * rstd
        sum_scale_0 += dy_0 * xhat_0
        sum_shift_0 += dy_0
        w_0 = dy_0 * gain_0
        xhat_1 = (h_1 - mean) * rstd
        sum_scale_1 += dy_1 * xhat_1
        sum_shift_1 += dy_1
        w_1 = dy_1 * gain_1
        xhat_2 = (h_2 - mean) * rstd
        sum_scale_2 += dy_2 * xhat_2
        sum_shift_2 += dy_2
        w_2 = dy_2 * gain_2
        xhat_3 = (h_3 - mean) * rstd
        sum_scale_3 += dy_3 * xhat_3
        sum_shift_3 += dy_3
        w_3 = dy_3 * gain_3
        xhat_4 = (h_4 - mean) * rstd
        sum_scale_4 += dy_4 * xhat_4
        sum_shift_4 += dy_4
        w_4 = dy_4 * gain_4
        xhat_5 = (h_5 - mean) * rstd
        sum_scale_5 += dy_5 * xhat_5
        sum_shift_5 += dy_5
        w_5 = dy_5 * gain_5
        xhat_6 = (h_6 - mean) * rstd
        sum_scale_6 += dy_6 * xhat_6
        sum_shift_6 += dy_6
        w_6 = dy_6 * gain_6
        xhat_7 = (h_7 - mean) * rstd
        sum_scale_7 += dy_7 * xhat_7
        sum_shift_7 += dy_7
        w_7 = dy_7 * gain_7
        xhat_8 = (h_8 - mean) * rstd
        sum_scale_8 += dy_8 * xhat_8
        sum_shift_8 += dy_8
        w_8 = dy_8 * gain_8
        mean_w, mean_wx = tl.split((tl.sum(tl.join(w_0 + w_1 + w_2 + w_3 + w_4 + w_5 + w_6 + w_7 + w_8, w_0 * xhat_0 + w_1 * xhat_1 + w_2 * xhat_2 + w_3 * xhat_3 + w_4 * xhat_4 + w_5 * xhat_5 + w_6 * xhat_6 + w_7 * xhat_7 + w_8 * xhat_8), 0)) * 0.0008680555555555555)
        total_0 = (w_0 - mean_w - xhat_0 * mean_wx) * rstd
        total_1 = (w_1 - mean_w - xhat_1 * mean_wx) * rstd
        total_2 = (w_2 - mean_w - xhat_2 * mean_wx) * rstd
        total_3 = (w_3 - mean_w - xhat_3 * mean_wx) * rstd
        total_4 = (w_4 - mean_w - xhat_4 * mean_wx) * rstd
        total_5 = (w_5 - mean_w - xhat_5 * mean_wx) * rstd
        total_6 = (w_6 - mean_w - xhat_6 * mean_wx) * rstd
        total_7 = (w_7 - mean_w - xhat_7 * mean_wx) * rstd
        total_8 = (w_8 - mean_w - xhat_8 * mean_wx) * rstd
        tl.store(DX + row * 1152 + c_0, (total_0).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_1, (total_1).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_2, (total_2).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_3, (total_3).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_4, (total_4).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_5, (total_5).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_6, (total_6).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_7, (total_7).to(tl.bfloat16))
        tl.store(DX + row * 1152 + c_8, (total_8).to(tl.bfloat16))
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 2304
    tl.store(partial + c_0, sum_scale_0)
    tl.store(partial + c_1, sum_scale_1)
    tl.store(partial + c_2, sum_scale_2)
    tl.store(partial + c_3, sum_scale_3)
    tl.store(partial + c_4, sum_scale_4)
    tl.store(partial + c_5, sum_scale_5)
    tl.store(partial + c_6, sum_scale_6)
    tl.store(partial + c_7, sum_scale_7)
    tl.store(partial + c_8, sum_scale_8)
    tl.store(partial + 1152 + c_0, sum_shift_0)
    tl.store(partial + 1152 + c_1, sum_shift_1)
    tl.store(partial + 1152 + c_2, sum_shift_2)
    tl.store(partial + 1152 + c_3, sum_shift_3)
    tl.store(partial + 1152 + c_4, sum_shift_4)
    tl.store(partial + 1152 + c_5, sum_shift_5)
    tl.store(partial + 1152 + c_6, sum_shift_6)
    tl.store(partial + 1152 + c_7, sum_shift_7)
    tl.store(partial + 1152 + c_8, sum_shift_8)


@triton.jit
def norm_modulate_sums(PARTIAL, DSCALE, DSHIFT, P):
    tile = tl.program_id(0) % 36
    which = tl.program_id(0) // 36 % 2
    group = tl.program_id(0).to(tl.int64) // 72
    c = tile * 32 + tl.arange(0, 32)
    r = tl.arange(0, 128).to(tl.int64)
    start = PARTIAL + group * P * 2304 + tl.where(which == 1, 1152, 0)
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, P, 128):
        inside = (first + r < P)[:, None] & (c < 1152)[None, :]
        total += tl.load(start + (first + r)[:, None] * 2304 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DSCALE + group * 1152 + c, value.to(tl.float32), mask=c < 1152)
    if which == 1:
        tl.store(DSHIFT + group * 1152 + c, value.to(tl.float32), mask=c < 1152)
