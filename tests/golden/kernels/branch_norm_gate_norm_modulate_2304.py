import triton
import triton.language as tl


@triton.jit
def branch_norm_gate_norm_modulate_forward(X, BRANCH, GATE, BRANCH_WEIGHT, SCALE, SHIFT, H, Y, RSTD, BRANCH_RSTD, N, P, gate_g, scale_g, shift_g):
    group = tl.program_id(0).to(tl.int64) // P
    first = (tl.program_id(0) % P) * 4
    c_0 = tl.arange(0, 1024)
    c_1 = 1024 + tl.arange(0, 1024)
    c_2 = 2048 + tl.arange(0, 256)
    gate_0 = tl.load(GATE + group * gate_g + c_0).to(tl.float32)
    square = gate_0 * gate_0
    near = gate_0 + gate_0 * square * (-0.33333296 + square * (0.13332345 + square * (-0.053879805 + square * (0.021486662 + square * (-0.007946114 + square * (0.0023013705 + square * -0.00035845384))))))
    size = tl.minimum(tl.abs(gate_0), 20.0)
    turns = size * -2.8853900817779268 + 12582912.0
    part = tl.fma(size, -2.8853900817779268, 12582912.0 - turns)
    power = (1.0 + part * (0.6931472 + part * (0.24022652 + part * (0.05550327 + part * (0.009617995 + part * (0.0013400431 + part * 0.00015478022))))))
    power = power.to(tl.int32, bitcast=True) + (turns.to(tl.int32, bitcast=True) << 23)
    shrunk = power.to(tl.float32, bitcast=True)
    far = 1.0 + shrunk * (-1.9999986 + shrunk * (1.9998484 + shrunk * (-1.994599 + shrunk * (1.9152243 + shrunk * -1.3731011))))
    far = (far.to(tl.int32, bitcast=True) | (gate_0.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    gate_0 = tl.where(square >= 1.0, far, near)
    branch_weight_0 = tl.load(BRANCH_WEIGHT + c_0).to(tl.float32)
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    shift_0 = tl.load(SHIFT + group * shift_g + c_0).to(tl.float32)
    gate_1 = tl.load(GATE + group * gate_g + c_1).to(tl.float32)
    square = gate_1 * gate_1
    near = gate_1 + gate_1 * square * (-0.33333296 + square * (0.13332345 + square * (-0.053879805 + square * (0.021486662 + square * (-0.007946114 + square * (0.0023013705 + square * -0.00035845384))))))
    size = tl.minimum(tl.abs(gate_1), 20.0)
    turns = size * -2.8853900817779268 + 12582912.0
    part = tl.fma(size, -2.8853900817779268, 12582912.0 - turns)
    power = (1.0 + part * (0.6931472 + part * (0.24022652 + part * (0.05550327 + part * (0.009617995 + part * (0.0013400431 + part * 0.00015478022))))))
    power = power.to(tl.int32, bitcast=True) + (turns.to(tl.int32, bitcast=True) << 23)
    shrunk = power.to(tl.float32, bitcast=True)
    far = 1.0 + shrunk * (-1.9999986 + shrunk * (1.9998484 + shrunk * (-1.994599 + shrunk * (1.9152243 + shrunk * -1.3731011))))
    far = (far.to(tl.int32, bitcast=True) | (gate_1.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    gate_1 = tl.where(square >= 1.0, far, near)
    branch_weight_1 = tl.load(BRANCH_WEIGHT + c_1).to(tl.float32)
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    shift_1 = tl.load(SHIFT + group * shift_g + c_1).to(tl.float32)
    gate_2 = tl.load(GATE + group * gate_g + c_2).to(tl.float32)
    square = gate_2 * gate_2
    near = gate_2 + gate_2 * square * (-0.33333296 + square * (0.13332345 + square * (-0.053879805 + square * (0.021486662 + square * (-0.007946114 + square * (0.0023013705 + square * -0.00035845384))))))
    size = tl.minimum(tl.abs(gate_2), 20.0)
    turns = size * -2.8853900817779268 + 12582912.0
    part = tl.fma(size, -2.8853900817779268, 12582912.0 - turns)
    power = (1.0 + part * (0.6931472 + part * (0.24022652 + part * (0.05550327 + part * (0.009617995 + part * (0.0013400431 + part * 0.00015478022))))))
    power = power.to(tl.int32, bitcast=True) + (turns.to(tl.int32, bitcast=True) << 23)
    shrunk = power.to(tl.float32, bitcast=True)
    far = 1.0 + shrunk * (-1.9999986 + shrunk * (1.9998484 + shrunk * (-1.994599 + shrunk * (1.9152243 + shrunk * -1.3731011))))
    far = (far.to(tl.int32, bitcast=True) | (gate_2.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    gate_2 = tl.where(square >= 1.0, far, near)
    branch_weight_2 = tl.load(BRANCH_WEIGHT + c_2).to(tl.float32)
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2).to(tl.float32)
    shift_2 = tl.load(SHIFT + group * shift_g + c_2).to(tl.float32)
    for step in tl.range(first, tl.minimum(first + 4, N), num_stages=3):
        row = group * N + tl.cast(step, tl.int64)
        x_0 = tl.load(X + row * 2304 + c_0).to(tl.float32)
        branch_0 = tl.load(BRANCH + row * 2304 + c_0).to(tl.float32)
        x_1 = tl.load(X + row * 2304 + c_1).to(tl.float32)
        branch_1 = tl.load(BRANCH + row * 2304 + c_1).to(tl.float32)
        x_2 = tl.load(X + row * 2304 + c_2).to(tl.float32)
        branch_2 = tl.load(BRANCH + row * 2304 + c_2).to(tl.float32)
        centred_0 = branch_0
        centred_1 = branch_1
        centred_2 = branch_2
        variance = (tl.sum(centred_0 * centred_0 + centred_1 * centred_1, 0) + tl.sum(centred_2 * centred_2, 0)) * 0.00043402777777777775
        around = variance + 1e-06
        rough = 1.0 / tl.sqrt(around)
        nearly = around * rough
        lost = tl.fma(around, rough, -nearly)
        better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
        branch_rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
        h_0 = (x_0 + centred_0 * branch_rstd * branch_weight_0 * gate_0).to(tl.bfloat16).to(tl.float32)
        tl.store(H + row * 2304 + c_0, (h_0).to(tl.bfloat16))
        h_1 = (x_1 + centred_1 * branch_rstd * branch_weight_1 * gate_1).to(tl.bfloat16).to(tl.float32)
        tl.store(H + row * 2304 + c_1, (h_1).to(tl.bfloat16))
        h_2 = (x_2 + centred_2 * branch_rstd * branch_weight_2 * gate_2).to(tl.bfloat16).to(tl.float32)
        tl.store(H + row * 2304 + c_2, (h_2).to(tl.bfloat16))
        tl.store(BRANCH_RSTD + row, branch_rstd)
        centred_0 = h_0
        centred_1 = h_1
        centred_2 = h_2
        variance = (tl.sum(centred_0 * centred_0 + centred_1 * centred_1, 0) + tl.sum(centred_2 * centred_2, 0)) * 0.00043402777777777775
        around = variance + 1e-06
        rough = 1.0 / tl.sqrt(around)
        nearly = around * rough
        lost = tl.fma(around, rough, -nearly)
        better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)
        rstd = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN
        tl.store(Y + row * 2304 + c_0, (centred_0 * rstd * gain_0 + shift_0).to(tl.bfloat16))
        tl.store(Y + row * 2304 + c_1, (centred_1 * rstd * gain_1 + shift_1).to(tl.bfloat16))
        tl.store(Y + row * 2304 + c_2, (centred_2 * rstd * gain_2 + shift_2).to(tl.bfloat16))
        tl.store(RSTD + row, rstd)


@triton.jit
def branch_norm_gate_norm_modulate_backward(DY, DH, H, BRANCH, GATE, BRANCH_WEIGHT, SCALE, DX, DBRANCH, RSTD, BRANCH_RSTD, PARTIAL, N, P, gate_g, scale_g):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.arange(0, 1024)
    c_1 = 1024 + tl.arange(0, 1024)
    c_2 = 2048 + tl.arange(0, 256)
    gate_0 = tl.load(GATE + group * gate_g + c_0).to(tl.float32)
    square = gate_0 * gate_0
    near = gate_0 + gate_0 * square * (-0.33333296 + square * (0.13332345 + square * (-0.053879805 + square * (0.021486662 + square * (-0.007946114 + square * (0.0023013705 + square * -0.00035845384))))))
    size = tl.minimum(tl.abs(gate_0), 20.0)
    turns = size * -2.8853900817779268 + 12582912.0
    part = tl.fma(size, -2.8853900817779268, 12582912.0 - turns)
    power = (1.0 + part * (0.6931472 + part * (0.24022652 + part * (0.05550327 + part * (0.009617995 + part * (0.0013400431 + part * 0.00015478022))))))
    power = power.to(tl.int32, bitcast=True) + (turns.to(tl.int32, bitcast=True) << 23)
    shrunk = power.to(tl.float32, bitcast=True)
    far = 1.0 + shrunk * (-1.9999986 + shrunk * (1.9998484 + shrunk * (-1.994599 + shrunk * (1.9152243 + shrunk * -1.3731011))))
    far = (far.to(tl.int32, bitcast=True) | (gate_0.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    gate_0 = tl.where(square >= 1.0, far, near)
    branch_weight_0 = tl.load(BRANCH_WEIGHT + c_0).to(tl.float32)
    gain_0 = 1.0 + tl.load(SCALE + group * scale_g + c_0).to(tl.float32)
    sum_gate_0 = tl.zeros([1024], tl.float32)
    sum_branch_weight_0 = tl.zeros([1024], tl.float32)
    sum_scale_0 = tl.zeros([1024], tl.float32)
    sum_shift_0 = tl.zeros([1024], tl.float32)
    gate_1 = tl.load(GATE + group * gate_g + c_1).to(tl.float32)
    square = gate_1 * gate_1
    near = gate_1 + gate_1 * square * (-0.33333296 + square * (0.13332345 + square * (-0.053879805 + square * (0.021486662 + square * (-0.007946114 + square * (0.0023013705 + square * -0.00035845384))))))
    size = tl.minimum(tl.abs(gate_1), 20.0)
    turns = size * -2.8853900817779268 + 12582912.0
    part = tl.fma(size, -2.8853900817779268, 12582912.0 - turns)
    power = (1.0 + part * (0.6931472 + part * (0.24022652 + part * (0.05550327 + part * (0.009617995 + part * (0.0013400431 + part * 0.00015478022))))))
    power = power.to(tl.int32, bitcast=True) + (turns.to(tl.int32, bitcast=True) << 23)
    shrunk = power.to(tl.float32, bitcast=True)
    far = 1.0 + shrunk * (-1.9999986 + shrunk * (1.9998484 + shrunk * (-1.994599 + shrunk * (1.9152243 + shrunk * -1.3731011))))
    far = (far.to(tl.int32, bitcast=True) | (gate_1.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    gate_1 = tl.where(square >= 1.0, far, near)
    branch_weight_1 = tl.load(BRANCH_WEIGHT + c_1).to(tl.float32)
    gain_1 = 1.0 + tl.load(SCALE + group * scale_g + c_1).to(tl.float32)
    sum_gate_1 = tl.zeros([1024], tl.float32)
    sum_branch_weight_1 = tl.zeros([1024], tl.float32)
    sum_scale_1 = tl.zeros([1024], tl.float32)
    sum_shift_1 = tl.zeros([1024], tl.float32)
    gate_2 = tl.load(GATE + group * gate_g + c_2).to(tl.float32)
    square = gate_2 * gate_2
    near = gate_2 + gate_2 * square * (-0.33333296 + square * (0.13332345 + square * (-0.053879805 + square * (0.021486662 + square * (-0.007946114 + square * (0.0023013705 + square * -0.00035845384))))))
    size = tl.minimum(tl.abs(gate_2), 20.0)
    turns = size * -2.8853900817779268 + 12582912.0
    part = tl.fma(size, -2.8853900817779268, 12582912.0 - turns)
    power = (1.0 + part * (0.6931472 + part * (0.24022652 + part * (0.05550327 + part * (0.009617995 + part * (0.0013400431 + part * 0.00015478022))))))
    power = power.to(tl.int32, bitcast=True) + (turns.to(tl.int32, bitcast=True) << 23)
    shrunk = power.to(tl.float32, bitcast=True)
    far = 1.0 + shrunk * (-1.9999986 + shrunk * (1.9998484 + shrunk * (-1.994599 + shrunk * (1.9152243 + shrunk * -1.3731011))))
    far = (far.to(tl.int32, bitcast=True) | (gate_2.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)
    gate_2 = tl.where(square >= 1.0, far, near)
    branch_weight_2 = tl.load(BRANCH_WEIGHT + c_2).to(tl.float32)
    gain_2 = 1.0 + tl.load(SCALE + group * scale_g + c_2).to(tl.float32)
    sum_gate_2 = tl.zeros([256], tl.float32)
    sum_branch_weight_2 = tl.zeros([256], tl.float32)
    sum_scale_2 = tl.zeros([256], tl.float32)
    sum_shift_2 = tl.zeros([256], tl.float32)
    for step in tl.range(tl.program_id(0) % P, N, P, num_stages=3):
        row = group * N + tl.cast(step, tl.int64)
        dy_0 = tl.load(DY + row * 2304 + c_0).to(tl.float32)
        dy_1 = tl.load(DY + row * 2304 + c_1).to(tl.float32)
        dy_2 = tl.load(DY + row * 2304 + c_2).to(tl.float32)
        dh_0 = tl.load(DH + row * 2304 + c_0).to(tl.float32)
        dh_1 = tl.load(DH + row * 2304 + c_1).to(tl.float32)
        dh_2 = tl.load(DH + row * 2304 + c_2).to(tl.float32)
        h_0 = tl.load(H + row * 2304 + c_0).to(tl.float32)
        h_1 = tl.load(H + row * 2304 + c_1).to(tl.float32)
        h_2 = tl.load(H + row * 2304 + c_2).to(tl.float32)
        branch_0 = tl.load(BRANCH + row * 2304 + c_0).to(tl.float32)
        branch_1 = tl.load(BRANCH + row * 2304 + c_1).to(tl.float32)
        branch_2 = tl.load(BRANCH + row * 2304 + c_2).to(tl.float32)
        rstd = tl.load(RSTD + row)
        branch_rstd = tl.load(BRANCH_RSTD + row)
        xhat_0 = h_0 * rstd
        sum_scale_0 += dy_0 * xhat_0
        sum_shift_0 += dy_0
        w_0 = dy_0 * gain_0
        xhat_1 = h_1 * rstd
        sum_scale_1 += dy_1 * xhat_1
        sum_shift_1 += dy_1
        w_1 = dy_1 * gain_1
        xhat_2 = h_2 * rstd
        sum_scale_2 += dy_2 * xhat_2
        sum_shift_2 += dy_2
        w_2 = dy_2 * gain_2
        mean_wx = (tl.sum(w_0 * xhat_0 + w_1 * xhat_1, 0) + tl.sum(w_2 * xhat_2, 0)) * 0.00043402777777777775
        total_0 = (w_0 - xhat_0 * mean_wx) * rstd + dh_0
        bhat_0 = branch_0 * branch_rstd
        added_0 = bhat_0 * branch_weight_0
        sum_gate_0 += total_0 * added_0 * (1.0 - gate_0 * gate_0)
        total_1 = (w_1 - xhat_1 * mean_wx) * rstd + dh_1
        bhat_1 = branch_1 * branch_rstd
        added_1 = bhat_1 * branch_weight_1
        sum_gate_1 += total_1 * added_1 * (1.0 - gate_1 * gate_1)
        total_2 = (w_2 - xhat_2 * mean_wx) * rstd + dh_2
        bhat_2 = branch_2 * branch_rstd
        added_2 = bhat_2 * branch_weight_2
        sum_gate_2 += total_2 * added_2 * (1.0 - gate_2 * gate_2)
        v_0 = total_0 * gate_0
        sum_branch_weight_0 += v_0 * bhat_0
        v_0 = v_0 * branch_weight_0
        v_1 = total_1 * gate_1
        sum_branch_weight_1 += v_1 * bhat_1
        v_1 = v_1 * branch_weight_1
        v_2 = total_2 * gate_2
        sum_branch_weight_2 += v_2 * bhat_2
        v_2 = v_2 * branch_weight_2
        branch_mean_wx = (tl.sum(v_0 * bhat_0 + v_1 * bhat_1, 0) + tl.sum(v_2 * bhat_2, 0)) * 0.00043402777777777775
        tl.store(DX + row * 2304 + c_0, (total_0).to(tl.bfloat16))
        tl.store(DBRANCH + row * 2304 + c_0, ((v_0 - bhat_0 * branch_mean_wx) * branch_rstd).to(tl.bfloat16))
        tl.store(DX + row * 2304 + c_1, (total_1).to(tl.bfloat16))
        tl.store(DBRANCH + row * 2304 + c_1, ((v_1 - bhat_1 * branch_mean_wx) * branch_rstd).to(tl.bfloat16))
        tl.store(DX + row * 2304 + c_2, (total_2).to(tl.bfloat16))
        tl.store(DBRANCH + row * 2304 + c_2, ((v_2 - bhat_2 * branch_mean_wx) * branch_rstd).to(tl.bfloat16))
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 9216
    tl.store(partial + c_0, sum_gate_0)
    tl.store(partial + c_1, sum_gate_1)
    tl.store(partial + c_2, sum_gate_2)
    tl.store(partial + 2304 + c_0, sum_branch_weight_0)
    tl.store(partial + 2304 + c_1, sum_branch_weight_1)
    tl.store(partial + 2304 + c_2, sum_branch_weight_2)
    tl.store(partial + 4608 + c_0, sum_scale_0)
    tl.store(partial + 4608 + c_1, sum_scale_1)
    tl.store(partial + 4608 + c_2, sum_scale_2)
    tl.store(partial + 6912 + c_0, sum_shift_0)
    tl.store(partial + 6912 + c_1, sum_shift_1)
    tl.store(partial + 6912 + c_2, sum_shift_2)


@triton.jit
def branch_norm_gate_norm_modulate_sums(PARTIAL, DGATE, DBRANCH_WEIGHT, DSCALE, DSHIFT, P):
    tile = tl.program_id(0) % 72
    which = tl.program_id(0) // 72 % 4
    group = tl.program_id(0).to(tl.int64) // 288
    c = tile * 32 + tl.arange(0, 32)
    r = tl.arange(0, 128).to(tl.int64)
    start = PARTIAL + group * P * 9216 + tl.where(which == 3, 6912, tl.where(which == 2, 4608, tl.where(which == 1, 2304, 0)))
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, P, 128):
        inside = (first + r < P)[:, None] & (c < 2304)[None, :]
        total += tl.load(start + (first + r)[:, None] * 9216 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DGATE + group * 2304 + c, value.to(tl.float32), mask=c < 2304)
    if which == 1:
        tl.store(DBRANCH_WEIGHT + group * 2304 + c, value.to(tl.float32), mask=c < 2304)
    if which == 2:
        tl.store(DSCALE + group * 2304 + c, value.to(tl.float32), mask=c < 2304)
    if which == 3:
        tl.store(DSHIFT + group * 2304 + c, value.to(tl.float32), mask=c < 2304)
