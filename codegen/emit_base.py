"""What every generated kernel is made of: lines, columns, masks, addresses, loads, stores, means over a row.

Only `tl.*` names and literals appear in a kernel, because Inductor copies the source of a user's kernel into its own
module.  Tensors are named as in form.py, in capitals; `x_3` is what sub-block 3 holds of x, in fp32.

Three shapes share the same formulas:

    unrolled   one row at a time, cut into sub-blocks that stay in registers
    chunked    one row at a time, walked in chunks, several passes (rows too wide for registers)
    tile       many rows, a few columns (sums over rows)
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from graphopt.codegen.configure import Configuration
from graphopt.codegen.spec import KernelSpec

TL = {torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16", torch.float32: "tl.float32"}
# what `tanh` is made of, polynomials of least maximum error in fp32: (tanh x - x) / x^3 in powers of x^2 up to 1;
# beyond, 2^f for |f| <= 1/2, and ((1 - s) / (1 + s) - 1) / s for s = exp(-2 |x|)
NEAR = (-0.33333296, 0.13332345, -0.053879805, 0.021486662, -0.007946114, 0.0023013705, -0.00035845384)
POWER = (1.0, 0.6931472, 0.24022652, 0.05550327, 0.009617995, 0.0013400431, 0.00015478022)
FAR = (-1.9999986, 1.9998484, -1.994599, 1.9152243, -1.3731011)
HEADER = "import triton\nimport triton.language as tl\n\n\n"


def horner(x: str, coefficients: tuple[float, ...]) -> str:
    """A polynomial in x, the constant first."""
    value = repr(coefficients[-1])
    for c in coefficients[-2::-1]:
        value = f"({c!r} + {x} * {value})"
    return value


def variable(index: str) -> str:
    """What an index of a row is called in a kernel."""
    return "group" if index == "g" else index


class Base:
    """An emitter: a spec, a configuration, and the lines written so far."""

    def __init__(self, spec: KernelSpec, config: Configuration) -> None:
        self.spec, self.config = spec, config
        self.lines: list[str] = []
        self.depth = 0
        self.starts = [sum(config.blocks[:i]) for i in range(len(config.blocks))]
        self.tile = spec.part == "columns"

    def __call__(self, line: str) -> None:
        """Write one line."""
        self.lines.append("    " * self.depth + line)

    def source(self) -> str:
        """The lines as a module of their own."""
        return HEADER + "\n".join(self.lines) + "\n"

    @property
    def blocks(self) -> range:
        """Sub-blocks in registers at once."""
        return range(len(self.config.blocks))

    # -- arguments -------------------------------------------------------------------------------

    def define(self, tensors: tuple[str, ...], sizes: tuple[str, ...]) -> None:
        """`@triton.jit def ...` with the arguments in the one order kernels.py passes them in."""
        s = self.spec
        strides = [f"{t}_{index}" for t, index in s.stride_arguments]
        self("@triton.jit")
        self(f"def {s.function}({', '.join([*(t.upper() for t in tensors), *sizes, *s.size_arguments, *strides])}):")
        self.depth = 1

    # -- which row -------------------------------------------------------------------------------

    def group_index(self) -> None:
        """The indices of a modulation group, where one does not do."""
        s = self.spec
        if s.group_dims > 1 and any(index.startswith("g") for _, index in s.stride_arguments):
            self.take_apart("group", s.group_indices)

    def take_apart(self, whole: str, indices: tuple[str, ...]) -> None:
        """One index as several, the last the fastest; the sizes of all but the first are arguments."""
        for k in range(len(indices) - 1, 1, -1):
            self(f"{indices[k]} = {whole} % {indices[k].upper()}")
            self(f"above_{indices[k]} = {whole} // {indices[k].upper()}")
            whole = f"above_{indices[k]}"
        size = indices[1].upper()
        self(f"{indices[0]} = {whole} // {size}")
        self(f"{indices[1]} = {whole} % {size}")

    def row_index(self, n: str) -> None:
        """`row`, the place of row n of this group, and the indices that strides are multiplied with."""
        s = self.spec
        used = any(index.startswith("n") for _, index in s.stride_arguments)
        if used:
            self(f"n = {n}")
            if s.row_dims > 1:
                self.take_apart("n", s.row_indices)
        if s.permuted:
            self(f"row = {' + '.join(f'{variable(i)} * row_{i}' for i in s.indices)}")
        elif not n.startswith("row"):
            self(f"row = group * N + {'n' if used else n}")

    # -- columns ---------------------------------------------------------------------------------

    def columns(self) -> None:
        """`c_i`, the columns of every sub-block."""
        for i in self.blocks:
            start = f"{self.starts[i]} + " if self.starts[i] else ""
            self(f"c_{i} = {start}tl.arange(0, {self.config.blocks[i]})")

    @contextmanager
    def over_chunks(self) -> Iterator[None]:
        """A loop over the chunks of one row; sub-block 0 is the current one."""
        width = self.config.blocks[0]
        self(f"for start in range(0, {self.spec.D}, {width}):")
        self.depth += 1
        self(f"c_0 = start + tl.arange(0, {width})")
        yield
        self.depth -= 1

    def inside(self, i: int) -> str:
        """The condition that a column (and, in a tile, a row) exists; "" where it always does."""
        D = self.spec.D
        if self.tile:
            return f"(r < N)[:, None] & (c_{i} < {D})[None, :]"
        overhangs = D % self.config.blocks[0] != 0 if self.config.chunked else (
            self.starts[i] + self.config.blocks[i] > D)
        return f"c_{i} < {D}" if overhangs else ""

    def mask(self, i: int, load: bool) -> str:
        """The mask arguments of a load or a store."""
        inside = self.inside(i)
        return "" if not inside else f", mask={inside}" + (", other=0.0" if load else "")

    def zero_outside(self, i: int, value: str) -> str:
        """A value that padded lanes must not add to a sum."""
        inside = self.inside(i)
        return f"tl.where({inside}, {value}, 0.0)" if inside else value

    def column_of(self, tensor: str, i: int) -> str:
        """Offsets of the columns of a tensor."""
        column = self.column(tensor, i)
        return f"({column})[None, :]" if self.tile and " " in column else f"{column}[None, :]" if self.tile else column

    def column(self, tensor: str, i: int) -> str:
        """Offsets of the columns of a row; times a stride they need 64 bits."""
        return f"c_{i}.to(tl.int64) * {tensor}_column" if "+column" in self.spec.layout(tensor) else f"c_{i}"

    # -- loads and stores ------------------------------------------------------------------------

    def address(self, tensor: str, i: int) -> str:
        """Pointers to sub-block i of the current row of a tensor."""
        s = self.spec
        place = s.layout(tensor).partition("+")[0]
        name = tensor.upper()
        if place == "dense":
            offset = f"row[:, None] * {s.D}" if self.tile else f"row * {s.D}"
        elif place == "vector":
            return f"{name} + {self.column(tensor, i)}"
        else:
            indices = [x for x in s.indices if place == "rows" or x.startswith("g")]
            named = {x: f"{x}[:, None]" if self.tile and x.startswith("n") else variable(x) for x in indices}
            offset = " + ".join(f"{named[x]} * {tensor}_{x}" for x in indices)
            if place == "group":
                return f"{name} + {offset} + {self.column(tensor, i)}"
        return f"{name} + {offset} + {self.column_of(tensor, i)}"

    def load(self, tensor: str, i: int) -> str:
        """The current row of an activation or of a per-token factor, in fp32."""
        return f"tl.load({self.address(tensor, i)}{self.mask(i, True)}).to(tl.float32)"

    def load_streams(self, streams: tuple[str, ...], i: int) -> None:
        """`t_i` of every stream; one that arrives as several addends is summed in fp32."""
        for t in streams:
            self(f"{t}_{i} = {' + '.join(self.load(n, i) for n in self.spec.addends(t))}")

    def load_factor(self, factor: str, i: int) -> str:
        """A factor: one value per column, or per row and column."""
        if self.spec.per_token(factor):
            return self.load(factor, i)
        inside = f", mask=c_{i} < {self.spec.D}, other=0.0" if self.inside(i) else ""
        value = f"tl.load({self.address(factor, i)}{inside}).to(tl.float32)"
        return f"{value}[None, :]" if self.tile else value

    def store(self, tensor: str, i: int, value: str) -> None:
        """Round a value to the tensor's dtype and store it."""
        kind = TL[self.spec.dtype(tensor)]
        self(f"tl.store({self.address(tensor, i)}, ({value}).to({kind}){self.mask(i, False)})")

    def statistic(self, name: str) -> str:
        """The pointer to a statistic of the current row."""
        return f"{name.upper()} + row"

    # -- arithmetic ------------------------------------------------------------------------------

    def by_width(self, part: str) -> list[str]:
        """The sum of an expression, {i} for the sub-block, per width: so there is one reduction for each."""
        found: dict[int, list[str]] = {}
        for i in self.blocks:
            found.setdefault(self.config.blocks[i], []).append(part.format(i=i))
        return [" + ".join(parts) for parts in found.values()]

    def mean_over_row(self, name: str, part: str) -> None:
        """`name` = mean over D of an expression."""
        self(f"{name} = ({self.sum_over_row(part)}) * {1.0 / self.spec.D!r}")

    def sum_over_row(self, part: str) -> str:
        """The sum over D of an expression."""
        return " + ".join(f"tl.sum({sums}, 0)" for sums in self.by_width(part))

    def centre_of_row(self, name: str, total: str) -> None:
        """`name` = a sum over D, divided by D to the last bit.

        A row of one 16-bit value has an exact sum, and must lose nothing when its mean is taken away: 1/D is rounded
        where D is no power of two, and the compiler contracts `x - sum * (1/D)` into one fma, so that not even rounding
        the product helps.  With eps = 1e-6 a constant row of 1000 would become 0.03.
        """
        D = self.spec.D
        if D & (D - 1) == 0:
            self(f"{name} = ({total}) * {1.0 / D!r}")
            return
        self(f"whole = {total}")
        self(f"{name} = whole * {1.0 / D!r}")
        self(f"{name} = tl.fma(tl.fma({name}, {-float(D)!r}, whole), {1.0 / D!r}, {name})")

    def inverse_root(self, name: str, variance: str, eps: float) -> None:
        """`name` = 1 / sqrt(variance + eps), to the last bit.

        `/` and `tl.sqrt` are the hardware's (div.full, sqrt.approx), up to three ulp off together; eager is not, and it
        shows where the result is taken away from a number of its size.  One Newton step mends that; `tl.div_rn` and
        `tl.sqrt_rn` call a subroutine for rare operands, and what lives across the call takes 8 to 40 registers.
        """
        self(f"around = {variance} + {eps!r}")
        self("rough = 1.0 / tl.sqrt(around)")
        self("nearly = around * rough")
        self("lost = tl.fma(around, rough, -nearly)")
        self("better = tl.fma(0.5 * rough, tl.fma(-nearly, rough, 1.0) - lost * rough, rough)")
        self(f"{name} = tl.where(around > 3e38, rough, better)  # of inf the step makes NaN")

    def two_means(self, name: str, part: str, other: str, other_part: str) -> None:
        """Two means over D from one reduction tree."""
        pairs = zip(self.by_width(part), self.by_width(other_part))
        terms = " + ".join(f"tl.sum(tl.join({a}, {b}), 0)" for a, b in pairs)
        self(f"{name}, {other} = tl.split(({terms}) * {1.0 / self.spec.D!r})")

    def rounded(self, value: str, point: str) -> str:
        """A value after the rounding of numerics="eager", fp32 again."""
        dtype = self.spec.points.get(point)
        if dtype is None or dtype == torch.float32:
            return value
        value = value if value.startswith("(") and value.endswith(")") and value.count("(") == 1 else f"({value})"
        return f"{value}.to({TL[dtype]}).to(tl.float32)"

    def product(self, value: str, point: str) -> str:
        """A product that numerics="eager" rounds before anything is added to it.

        The compiler would contract the two into one fma, also across a rounding to bf16 (it computes in bf16 then), so
        the bits take a detour through an integer addition of a zero that only the hardware knows.
        """
        if not self.spec.rounding:
            return value
        return f"({self.rounded(f'({value})', point)}.to(tl.int32, bitcast=True) + zero).to(tl.float32, bitcast=True)"

    def declare_zero(self) -> None:
        """The zero `product` needs."""
        if self.spec.rounding:
            self("zero = tl.program_id(2)  # the grid has one dimension")

    def factor(self, name: str, i: int) -> None:
        """`name_i`: a factor plus its table; a gate after its activation, a scale as the gain it stands for."""
        s = self.spec
        value = " + ".join(self.load_factor(m, i) for m in s.members(name))
        stem = name.rstrip("0123456789")
        if stem == "scale":
            gain = name.replace("scale", "gain")
            self(f"{gain}_{i} = {self.rounded(f'{s.offset!r} + {value}' if s.offset else value, 'gain')}")
        elif stem == "gate" and s.activation == "tanh":
            self(f"gate_{i} = {value}")
            self.tanh(f"gate_{i}")
        else:
            self(f"{name}_{i} = {value}")

    def tanh(self, name: str) -> None:
        """`name` becomes its tanh, within one ulp, from products and sums alone.

        What a GPU approximates in hardware (exp, a quotient) is off by one to two ulp each, eager's tanh by one: behind
        the norm of a row of one channel that is all there is (docs/kernels.md, "Checked").  NaN stays NaN.
        """
        self(f"square = {name} * {name}")
        self(f"near = {name} + {name} * square * {horner('square', NEAR)}")
        # 2^y, y = -2 log2(e) |x|: the nearest integer is left in the low bits of `turns`, and goes into the exponent
        self(f"size = tl.minimum(tl.abs({name}), 20.0)")
        rate, integers = -2 * math.log2(math.e), 1.5 * 2**23
        self(f"turns = size * {rate!r} + {integers!r}")
        self(f"part = tl.fma(size, {rate!r}, {integers!r} - turns)")
        self(f"power = {horner('part', POWER)}")
        self("power = power.to(tl.int32, bitcast=True) + (turns.to(tl.int32, bitcast=True) << 23)")
        self("shrunk = power.to(tl.float32, bitcast=True)")
        self(f"far = 1.0 + shrunk * {horner('shrunk', FAR)}")
        sign = f"({name}.to(tl.int32, bitcast=True) & {-2**31})"
        self(f"far = (far.to(tl.int32, bitcast=True) | {sign}).to(tl.float32, bitcast=True)")
        value = "tl.where(square >= 1.0, far, near)"
        self(f"{name} = {self.rounded(value, 'activated')}")

    @property
    def once(self) -> list[str]:
        """Factors that are the same for all rows of a group: they live in registers."""
        return [f for f in self._heads if not any(self.spec.per_token(m) for m in self.spec.members(f))]

    @property
    def each_row(self) -> list[str]:
        """Factors with a row of their own per row of x."""
        return [f for f in self._heads if f not in self.once]

    @property
    def _heads(self) -> list[str]:
        return [f for f in self.spec.factors if "_table" not in f]

