import triton
import triton.language as tl


@triton.jit
def gate_forward(X, BRANCH, GATE, H, N, gate_g):
    row = tl.program_id(0).to(tl.int64)
    group = row // N
    c_0 = tl.arange(0, 64)
    x_0 = tl.load(X + row * 64 + c_0).to(tl.float32)
    branch_0 = tl.load(BRANCH + row * 64 + c_0).to(tl.float32)
    gate_0 = tl.load(GATE + group * gate_g + c_0).to(tl.float32)
    h_0 = (x_0 + branch_0 * gate_0).to(tl.bfloat16).to(tl.float32)
    tl.store(H + row * 64 + c_0, (h_0).to(tl.bfloat16))


@triton.jit
def gate_backward(DH, BRANCH, GATE, DBRANCH, PARTIAL, N, P, gate_g):
    group = tl.program_id(0).to(tl.int64) // P
    c_0 = tl.arange(0, 64)
    gate_0 = tl.load(GATE + group * gate_g + c_0).to(tl.float32)
    sum_gate_0 = tl.zeros([64], tl.float32)
    for step in tl.range(tl.program_id(0) % P, N, P, num_stages=6):
        row = group * N + tl.cast(step, tl.int64)
        dh_0 = tl.load(DH + row * 64 + c_0).to(tl.float32)
        branch_0 = tl.load(BRANCH + row * 64 + c_0).to(tl.float32)
        total_0 = dh_0
        sum_gate_0 += total_0 * branch_0
        tl.store(DBRANCH + row * 64 + c_0, (total_0 * gate_0).to(tl.bfloat16))
    partial = PARTIAL + tl.program_id(0).to(tl.int64) * 64
    tl.store(partial + c_0, sum_gate_0)


@triton.jit
def gate_sums(PARTIAL, DGATE, P):
    tile = tl.program_id(0) % 2
    which = tl.program_id(0) // 2 % 1
    group = tl.program_id(0).to(tl.int64) // 2
    c = tile * 32 + tl.arange(0, 32)
    r = tl.arange(0, 128).to(tl.int64)
    start = PARTIAL + group * P * 64 + 0
    total = tl.zeros([128, 32], tl.float32)
    for first in range(0, P, 128):
        inside = (first + r < P)[:, None] & (c < 64)[None, :]
        total += tl.load(start + (first + r)[:, None] * 64 + c[None, :], mask=inside, other=0.0)
    value = tl.sum(total, 0)
    if which == 0:
        tl.store(DGATE + group * 64 + c, value.to(tl.float32), mask=c < 64)
