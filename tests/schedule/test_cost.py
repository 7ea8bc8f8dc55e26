"""Symbolic cost against counting runs: FLOPs equal, saved bytes within 2 %, unknown ops named, algebra and files."""

import sys
from pathlib import Path

import pytest
import sympy
import torch
from torch import nn

from graphopt.errors import ConfigError, GraphoptError
from graphopt.schedule.cost import trace_cost
from graphopt.schedule.formulas import computes
from graphopt.schedule.symbolic import SymbolicCost, symbol

sys.path[:0] = [str(Path(__file__).parents[1] / "models"), str(Path(__file__).parents[2] / "benchmarks")]
import schedule_cost  # noqa: E402 - found through the path above

B, S, L = (symbol(x) for x in "BSL")


class Block(nn.Module):
    """Self-attention, cross-attention, gated MLP, modulated norms."""

    def __init__(self, d=32, heads=2):
        super().__init__()
        self.heads, self.modulation = heads, nn.Linear(d, 6 * d)
        self.q, self.kv, self.out = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d)
        self.qkv, self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def attend(self, q, k, v):
        q, k, v = (x.unflatten(-1, (self.heads, -1)).transpose(1, 2) for x in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    def forward(self, x, text, time, return_dict=True):
        a, b, c, d, e, f = self.modulation(nn.functional.silu(time))[:, None].chunk(6, -1)
        norm = lambda y, s, t: nn.functional.layer_norm(y, y.shape[-1:]) * (1 + s) + t
        x = x + c * self.attend(*self.qkv(norm(x, a, b)).chunk(3, -1))
        x = x + self.out(self.attend(self.q(x), *self.kv(text).chunk(2, -1)))
        return (x + f * self.down(nn.functional.gelu(self.up(norm(x, d, e)))),)


DIMS = {"B": ("x", 0), "S": ("x", 1), "L": ("text", 1)}


def inputs(b, s, n, d=32):
    torch.manual_seed(0)
    return {"x": torch.randn(b, s, d, requires_grad=True), "text": torch.randn(b, n, d), "time": torch.randn(b, d)}


@pytest.fixture(scope="module")
def cost():
    return trace_cost(Block(), inputs(2, 12, 5), DIMS)


def test_polynomial_by_hand(cost):
    d = 32
    linear = 2 * B * S * (3 * d * d + d * d + d * d + 8 * d * d) + 2 * B * L * 2 * d * d + 2 * B * 6 * d * d
    assert sympy.expand(cost.flops_forward - linear - 4 * B * S * S * d - 4 * B * S * L * d) == 0
    assert sympy.expand(cost.attention_flops - 7 * (2 * B * S * S * d + 2 * B * S * L * d)) == 0
    assert cost.parameter_bytes == 4 * sum(p.numel() for p in Block().parameters())


@pytest.mark.parametrize("size", [(2, 12, 5), (1, 7, 3), (3, 1, 4), (1, 40, 2), (4, 33, 17)])
def test_block_equals_counting_runs(cost, size):
    sizes = dict(zip("BSL", size))
    forward, backward, saved = schedule_cost.counted(Block(), inputs(*size))
    assert cost.at("flops_forward", **sizes) == forward
    assert cost.at("flops_backward", **sizes) == backward
    if size[0] > 1 and size[1] > 1:  # with a size of 1 some copies become views
        assert abs(cost.at("saved_bytes", **sizes) / saved - 1) <= 0.02
    assert cost.lambdify()(**sizes) == forward + backward


class Stack(nn.Module):
    """N blocks and a head."""

    def __init__(self, n):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(n)), nn.Linear(32, 4)

    def forward(self, x, text, time):
        for b in self.blocks:
            x = b(x, text, time)[0]
        return self.head(x)


def test_one_traced_block_times_its_count():
    one, two, four = (trace_cost(Stack(n), inputs(2, 12, 5), DIMS) for n in (1, 2, 4))
    made = one + (two - one) * 3
    for what in SymbolicCost.EXPRESSIONS:
        assert sympy.expand(getattr(made, what) - getattr(four, what)) == 0, what


def test_print_save_load_substitute(cost, tmp_path):
    cost.save(tmp_path / "cost.json")
    again = SymbolicCost.load(tmp_path / "cost.json")
    assert again == cost
    assert "flops_forward" in str(cost)
    merged = cost.subs(S="2*h*w", L=7)
    assert set(merged.dims) == {"B", "h", "w"}
    assert merged.at(B=2, h=3, w=5) == cost.at(B=2, S=30, L=7)
    with pytest.raises(ConfigError, match="no dimension 'Q'"):
        cost.subs(Q=1)
    with pytest.raises(ConfigError, match="the cost needs B, S, L"):
        cost.at(B=1)
    with pytest.raises(ConfigError, match="unknown quantity"):
        cost.lambdify("joules")
    (tmp_path / "cost.json").write_text("[]")
    with pytest.raises(ConfigError, match="not a symbolic cost"):
        SymbolicCost.load(tmp_path / "cost.json")


@torch.library.custom_op("graphopt_test::secret", mutates_args=())
def secret(x: torch.Tensor) -> torch.Tensor:
    return x * 2


secret.register_fake(lambda x: torch.empty_like(x))
secret.register_autograd(lambda ctx, g: g * 2)


class Custom(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        return secret(self.fc(x))


def test_an_op_without_a_formula_is_named_never_zero():
    x = torch.randn(3, 8)
    with pytest.raises(GraphoptError, match=r"graphopt_test.secret.default computes and has no FLOP formula"):
        trace_cost(Custom(), {"x": x}, {"B": ("x", 0)})
    op = torch.ops.graphopt_test.secret
    got = trace_cost(Custom(), {"x": x}, {"B": ("x", 0)}, formulas={op: lambda x, out_val, **kw: 100 * x.shape[0]})
    assert got.flops_forward == (2 * 8 * 8 + 100) * B


@pytest.mark.parametrize(
    ("op", "needs"),
    [
        (torch.ops.aten.mm.default, True),
        (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default, True),
        (torch.ops.aten.convolution.default, True),
        (torch.ops.aten._fft_c2c.default, True),
        (torch.ops.aten.linalg_qr.default, True),
        (torch.ops.aten._grouped_mm.default, True),
        (torch.ops.aten._int_mm.default, True),
        (torch.ops.aten.grid_sampler_3d.default, True),
        (torch.ops.aten.add.Tensor, False),
        (torch.ops.aten.comm_marker if hasattr(torch.ops.aten, "comm_marker") else torch.ops.aten.sum.default, False),
        (torch.ops.aten.native_layer_norm.default, False),
        (torch.ops.prims.convert_element_type.default, False),
        (torch.ops.graphopt_test.secret.default, True),
    ],
)
def test_which_ops_must_have_a_formula(op, needs):
    assert computes(op) == needs


class Breaks(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x):
        y = self.fc(x)
        return y * 2 if y.sum().item() > 0 else y


def test_what_cannot_be_traced_says_so():
    x = torch.randn(3, 8)
    with pytest.raises(GraphoptError, match="could not be traced"):
        trace_cost(Breaks(), {"x": x}, {"B": ("x", 0)})
    with pytest.raises(ConfigError, match=r"no tensor input 'y'"):
        trace_cost(nn.Linear(8, 8), {"input": x}, {"B": ("y", 0)})
    with pytest.raises(ConfigError, match=r"dimension C \(input, dimension 1\) is constant"):
        trace_cost(nn.Linear(8, 8), {"input": x}, {"C": ("input", 1)})
    with pytest.raises(ConfigError, match="needs a gradient"):
        trace_cost(nn.Linear(8, 8).requires_grad_(False), {"input": x}, {"B": ("input", 0)})
    with pytest.raises(ConfigError, match="there is no dimension 5"):
        trace_cost(nn.Linear(8, 8), {"input": x}, {"B": ("input", 5)})
    with pytest.raises(ConfigError, match="at least one named dimension"):
        trace_cost(nn.Linear(8, 8), {"input": x}, {})


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(schedule_cost.CASES))
def test_zoo_models(name):
    rows = schedule_cost.compare(name)
    assert len(rows) >= 5  # sd3 is costed at L = 1 besides
    for row in rows:
        assert row["flops_forward"][0] == row["flops_forward"][1]
        assert row["flops_backward"][0] == row["flops_backward"][1]
        assert abs(row["saved_bytes"][0] / row["saved_bytes"][1] - 1) <= 0.02, row
