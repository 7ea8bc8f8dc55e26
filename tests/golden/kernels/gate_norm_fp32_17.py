import triton
import triton.language as tl


@triton.jit
def gate_norm_affine_forward(X, BRANCH, GATE, WEIGHT, BIAS, H, Y, MEAN, RSTD, N, gate_g):
    row = tl.program_id(0).to(tl.int64)
    group = row // N
    c_0 = tl.arange(0, 32)
    x_0 = tl.load(X + row * 17 + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
    branch_0 = tl.load(BRANCH + row * 17 + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
    gate_0 = tl.load(GATE + group * gate_g + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
    h_0 = (x_0 + branch_0 * gate_0).to(tl.float32).to(tl.float32)
    tl.store(H + row * 17 + c_0, (h_0).to(tl.float32), mask=c_0 < 17)
    mean = (tl.sum(h_0, 0)) * 0.058823529411764705
    centred_0 = tl.where(c_0 < 17, h_0 - mean, 0.0)
    rest = (tl.sum(centred_0, 0)) * 0.058823529411764705
    centred_0 = tl.where(c_0 < 17, centred_0 - rest, 0.0)
    mean += rest
    variance = (tl.sum(centred_0 * centred_0, 0)) * 0.058823529411764705
    around = variance + 1e-06
    rough = 1.0 / tl.sqrt(around)
    nearly = around * rough
    lost = tl.fma(around, rough, -nearly)
    better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
    rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
    weight_0 = tl.load(WEIGHT + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
    bias_0 = tl.load(BIAS + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
    tl.store(Y + row * 17 + c_0, (centred_0 * rstd * weight_0 + bias_0).to(tl.float32), mask=c_0 < 17)
    tl.store(MEAN + row, mean)
    tl.store(RSTD + row, rstd)


@triton.jit
def gate_norm_affine_backward(DY, DH, H, BRANCH, GATE, WEIGHT, DX, DBRANCH, MEAN, RSTD, PARTIAL, N, P, gate_g):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.arange(0, 32)
    gate_0 = tl.load(GATE + group * gate_g + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
    weight_0 = tl.load(WEIGHT + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
    sum_gate_0 = tl.zeros([32], tl.float32)
    sum_weight_0 = tl.zeros([32], tl.float32)
    sum_bias_0 = tl.zeros([32], tl.float32)
    for step in tl.range(tl.program_id(0) % P, N, P, num_stages=6):
        row = group * N + tl.cast(step, tl.int64)
        dy_0 = tl.load(DY + row * 17 + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
        dh_0 = tl.load(DH + row * 17 + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
        h_0 = tl.load(H + row * 17 + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
        branch_0 = tl.load(BRANCH + row * 17 + c_0, mask=c_0 < 17, other=0.0).to(tl.float32)
        mean = tl.load(MEAN + row)
        rstd = tl.load(RSTD + row)
        xhat_0 = tl.where(c_0 < 17, (h_0 - mean) * rstd, 0.0)
        w_0 = dy_0
        sum_weight_0 += w_0 * xhat_0
        sum_bias_0 += w_0
        w_0 = w_0 * weight_0
        mean_w, mean_wx = tl.split((tl.sum(tl.join(w_0, w_0 * xhat_0), 0)) * 0.058823529411764705)
        total_0 = (w_0 - mean_w - xhat_0 * mean_wx) * rstd + dh_0
        sum_gate_0 += total_0 * branch_0
        tl.store(DX + row * 17 + c_0, (total_0).to(tl.float32), mask=c_0 < 17)
        tl.store(DBRANCH + row * 17 + c_0, (total_0 * gate_0).to(tl.float32), mask=c_0 < 17)
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 51
    tl.store(partial + c_0, sum_gate_0, mask=c_0 < 17)
    tl.store(partial + 17 + c_0, sum_weight_0, mask=c_0 < 17)
    tl.store(partial + 34 + c_0, sum_bias_0, mask=c_0 < 17)


@triton.jit
def gate_norm_affine_sums(PARTIAL, DGATE, DWEIGHT, DBIAS, P):
    tile = tl.program_id(0) % 1
    which = tl.program_id(0) // 1 % 3
    group = tl.program_id(0).to(tl.int64) // 3
    c = tile * 32 + tl.arange(0, 32)
    r = tl.arange(0, 128).to(tl.int64)
    start = PARTIAL + group * P * 51 + tl.where(which == 2, 34, tl.where(which == 1, 17, 0))
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, P, 128):
        inside = (first + r < P)[:, None] & (c < 17)[None, :]
        total += tl.load(start + (first + r)[:, None] * 51 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DGATE + group * 17 + c, value.to(tl.float32), mask=c < 17)
    if which == 1:
        tl.store(DWEIGHT + group * 17 + c, value.to(tl.float32), mask=c < 17)
    if which == 2:
        tl.store(DBIAS + group * 17 + c, value.to(tl.float32), mask=c < 17)
