import triton
import triton.language as tl


@triton.jit
def gate_norm_modulate_forward(X, BRANCH, GATE, SCALE, SHIFT, H, Y, MEAN, RSTD, N, gate_g, scale_g, shift_g):
    row = tl.program_id(0).to(tl.int64)
    group = row // N
    total = tl.zeros([4096], tl.float32)
    for start in range(0, 20000, 4096):
        c_0 = start + tl.arange(0, 4096)
        x_0 = tl.load(X + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        branch_0 = tl.load(BRANCH + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        gate_0 = tl.load(GATE + group * gate_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        h_0 = (x_0 + branch_0 * gate_0).to(tl.bfloat16).to(tl.float32)
        total += tl.where(c_0 < 20000, h_0, 0.0)
    whole = tl.sum(total, 0)
    mean = whole * 5e-05
    mean = tl.fma(tl.fma(mean, -20000.0, whole), 5e-05, mean)
    total = tl.zeros([4096], tl.float32)
    squares = tl.zeros([4096], tl.float32)
    for start in range(0, 20000, 4096):
        c_0 = start + tl.arange(0, 4096)
        x_0 = tl.load(X + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        branch_0 = tl.load(BRANCH + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        gate_0 = tl.load(GATE + group * gate_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        h_0 = (x_0 + branch_0 * gate_0).to(tl.bfloat16).to(tl.float32)
        centred_0 = tl.where(c_0 < 20000, h_0 - mean, 0.0)
        total += centred_0
        squares += centred_0 * centred_0
    variance = tl.sum(squares, 0) * 5e-05
    rest = tl.sum(total, 0) * 5e-05
    variance -= rest * rest
    around = variance + 1e-06
    rough = 1.0 / tl.sqrt(around)
    nearly = around * rough
    lost = tl.fma(around, rough, -nearly)
    better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
    rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
    for start in range(0, 20000, 4096):
        c_0 = start + tl.arange(0, 4096)
        x_0 = tl.load(X + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        branch_0 = tl.load(BRANCH + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        gate_0 = tl.load(GATE + group * gate_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        h_0 = (x_0 + branch_0 * gate_0).to(tl.bfloat16).to(tl.float32)
        tl.store(H + row * 20000 + c_0, (h_0).to(tl.bfloat16), mask=c_0 < 20000)
        centred_0 = h_0 - mean - rest
        gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        shift_0 = tl.load(SHIFT + group * shift_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
        tl.store(Y + row * 20000 + c_0, (centred_0 * rstd * gain_0 + shift_0).to(tl.bfloat16), mask=c_0 < 20000)
    mean += rest
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@triton.jit
def gate_norm_modulate_backward_rows(DY, DH, H, BRANCH, GATE, SCALE, DX, DBRANCH, MEAN, RSTD, MEAN_W, MEAN_WX, N, P, gate_g, scale_g):
    group = tl.program_id(0).to(tl.int64) // P
    for step in tl.range(tl.program_id(0) % P, N, P):
        row = group * N + tl.cast(step, tl.int64)
        mean = tl.load(MEAN + row)
        rstd = tl.load(RSTD + row)
        sum_w = tl.zeros([4096], tl.float32)
        sum_wx = tl.zeros([4096], tl.float32)
        for start in range(0, 20000, 4096):
            c_0 = start + tl.arange(0, 4096)
            dy_0 = tl.load(DY + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            dh_0 = tl.load(DH + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            h_0 = tl.load(H + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            xhat_0 = tl.where(c_0 < 20000, (h_0 - mean) * rstd, 0.0)
            w_0 = dy_0 * gain_0
            sum_w += w_0
            sum_wx += w_0 * xhat_0
        mean_w = tl.sum(sum_w, 0) * 5e-05
        mean_wx = tl.sum(sum_wx, 0) * 5e-05
        for start in range(0, 20000, 4096):
            c_0 = start + tl.arange(0, 4096)
            dy_0 = tl.load(DY + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            dh_0 = tl.load(DH + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            h_0 = tl.load(H + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            branch_0 = tl.load(BRANCH + row * 20000 + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            gate_0 = tl.load(GATE + group * gate_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)
            xhat_0 = tl.where(c_0 < 20000, (h_0 - mean) * rstd, 0.0)
            w_0 = dy_0 * gain_0
            total_0 = (w_0 - mean_w - xhat_0 * mean_wx) * rstd + dh_0
            tl.store(DX + row * 20000 + c_0, (total_0).to(tl.bfloat16), mask=c_0 < 20000)
            tl.store(DBRANCH + row * 20000 + c_0, (total_0 * gate_0).to(tl.bfloat16), mask=c_0 < 20000)
        tl.store(MEAN_W + row, mean_w)
        tl.store(MEAN_WX + row, mean_wx)


@triton.jit
def gate_norm_modulate_backward_columns(DY, DH, H, BRANCH, GATE, SCALE, MEAN, RSTD, MEAN_W, MEAN_WX, PARTIAL, N, P, gate_g, scale_g):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.program_id(1) * 512 + tl.arange(0, 512)
    gate_0 = tl.load(GATE + group * gate_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)[None, :]
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0, mask=c_0 < 20000, other=0.0).to(tl.float32)[None, :]
    sum_gate_0 = tl.zeros([4, 512], tl.float32)
    sum_scale_0 = tl.zeros([4, 512], tl.float32)
    sum_shift_0 = tl.zeros([4, 512], tl.float32)
    for step in tl.range((tl.program_id(0) % P) * 4, N, P * 4):
        r = tl.cast(step, tl.int64) + tl.arange(0, 4)
        row = group * N + r
        dy_0 = tl.load(DY + row[:, None] * 20000 + c_0[None, :], mask=(r < N)[:, None] & (c_0 < 20000)[None, :], other=0.0).to(tl.float32)
        dh_0 = tl.load(DH + row[:, None] * 20000 + c_0[None, :], mask=(r < N)[:, None] & (c_0 < 20000)[None, :], other=0.0).to(tl.float32)
        h_0 = tl.load(H + row[:, None] * 20000 + c_0[None, :], mask=(r < N)[:, None] & (c_0 < 20000)[None, :], other=0.0).to(tl.float32)
        branch_0 = tl.load(BRANCH + row[:, None] * 20000 + c_0[None, :], mask=(r < N)[:, None] & (c_0 < 20000)[None, :], other=0.0).to(tl.float32)
        mean = tl.load(MEAN + row, mask=r < N, other=0.0)[:, None]
        rstd = tl.load(RSTD + row, mask=r < N, other=0.0)[:, None]
        mean_w = tl.load(MEAN_W + row, mask=r < N, other=0.0)[:, None]
        mean_wx = tl.load(MEAN_WX + row, mask=r < N, other=0.0)[:, None]
        xhat_0 = tl.where((r < N)[:, None] & (c_0 < 20000)[None, :], (h_0 - mean) * rstd, 0.0)
        sum_scale_0 += dy_0 * xhat_0
        sum_shift_0 += dy_0
        w_0 = dy_0 * gain_0
        total_0 = (w_0 - mean_w - xhat_0 * mean_wx) * rstd + dh_0
        sum_gate_0 += total_0 * branch_0
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 60000
    tl.store(partial + c_0, tl.sum(sum_gate_0, 0), mask=c_0 < 20000)
    tl.store(partial + 20000 + c_0, tl.sum(sum_scale_0, 0), mask=c_0 < 20000)
    tl.store(partial + 40000 + c_0, tl.sum(sum_shift_0, 0), mask=c_0 < 20000)


@triton.jit
def gate_norm_modulate_sums(PARTIAL, DGATE, DSCALE, DSHIFT, P):
    tile = tl.program_id(0) % 79
    which = tl.program_id(0) // 79 % 3
    group = tl.program_id(0).to(tl.int64) // 237
    c = tile * 256 + tl.arange(0, 256)
    r = tl.arange(0, 16).to(tl.int64)
    start = PARTIAL + group * P * 60000 + tl.where(which == 2, 40000, tl.where(which == 1, 20000, 0))
    total = tl.zeros([16, 256], tl.float32)
    for first in range(0, P, 16):
        inside = (first + r < P)[:, None] & (c < 20000)[None, :]
        total += tl.load(start + (first + r)[:, None] * 60000 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DGATE + group * 20000 + c, value.to(tl.float32), mask=c < 20000)
    if which == 1:
        tl.store(DSCALE + group * 20000 + c, value.to(tl.float32), mask=c < 20000)
    if which == 2:
        tl.store(DSHIFT + group * 20000 + c, value.to(tl.float32), mask=c < 20000)
