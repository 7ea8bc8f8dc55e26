"""What a streamed step moves, holds and takes, before it is run.

    bound = max(forward terms) + max(backward terms), and at least every total of the step

Terms: compute (weights' products and self-attention; the backward recomputes), upload (weights, once per pass, less
what stays in the ring at the turn), download (gradients), the CPU optimizer (26 bytes read or written per parameter of
the split layout).  Where the optimizer stands depends on the order of the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# reads and writes of a bf16 [tokens, width] tensor outside products and attention, and seconds that do not depend on
# the tokens (about 2 us a kernel), in the forward and in the backward: fitted on compiled layers of Wan 1.3B with 7,800
# and 32,760 tokens on an H200 (docs/streaming.md)
FORWARD_UNITS, FORWARD_S = 15, 0.11e-3
BACKWARD_UNITS, BACKWARD_S = 131, 0.57e-3
# what one layer's recomputation and backward hold at once: tensors as wide as a token, and as its inner product; fitted
# on the peaks of Wan 1.3B (7,800 and 32,760 tokens) and of the 14B's width (7,800), with the libraries' workspaces
HELD_UNITS = 19.0
HELD_INNER_UNITS = 2.2
WORKSPACE_BYTES = 2 * (32 << 20)  # cuBLAS on a Hopper, for each of the two threads that launch
# beside it, where layers are replayed as CUDA graphs: the same workspaces for the stream that records, buffers of
# inputs, the pool's waste, and what runs between layers, which cannot use the pool: as wide as a token, fitted on one
# peak of Wan 1.3B (7,800 tokens)
GRAPH_UNITS = 7.5
# the optimizer's rate in a step, beside copies and launches that use the same memory, over its rate alone; seconds in
# which the host launches a layer's backward, and how many layers it gets ahead of the device at most (a stream holds
# about a thousand launches): so `step()` of a deferred update comes before the device is there.  Fitted on 16 steps of
# Wan 1.3B on hosts of 16 and 32 cores (docs/streaming.md): in the loop itself 0.79 to 0.88 of the rate alone, 0.98
# once; launches of 5 to 9 ms in timelines
BESIDE = 0.84
LAUNCH_BACKWARD_S = 5.0e-3
LAYERS_AHEAD = 9
ADAMW_BYTES = 26  # gradient 2, weight 2 + 2, residual 2 + 2, two moments 8 + 8
ADAMW_BYTES_FP32 = 28  # gradient 4, weight 4 + 4, two moments 8 + 8


@dataclass(frozen=True)
class Rates:
    """What the machine sustains, in bytes/s and FLOP/s.

    h2d, d2h: copies of one layer between pinned host memory and the device.  adamw: bytes the optimizer's loop reads
    and writes, with nothing beside it.  matmul, attention, attention_backward: bf16 FLOP/s.  memory: bytes/s of the
    device's own memory, read and written.  origin: where the numbers are from.
    """

    h2d: float = 51.7e9
    d2h: float = 51.4e9
    adamw: float = 180.8e9
    matmul: float = 6.84e14
    attention: float = 5.69e14
    attention_backward: float = 5.26e14
    memory: float = 4.27e12
    origin: str = "one H200 box, PCIe Gen5, 32 cores (benchmarks/results/h200/stream.json)"


@dataclass(frozen=True)
class LayerCost:
    """One layer: bytes on the link, what the optimizer touches, seconds of its forward and of its backward.

    The backward recomputes the forward.
    """

    name: str
    weight_bytes: int
    grad_bytes: int
    adamw_bytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Bound:
    """Seconds of each resource in each phase, and the bound they give."""

    forward: dict[str, float]
    backward: dict[str, float]
    step: dict[str, float]

    @property
    def seconds(self) -> float:
        """No schedule on this machine is faster."""
        phases = max(self.forward.values()) + max(self.backward.values())
        return max(phases, *self.step.values())

    @property
    def binds(self) -> str:
        """What to make faster."""
        phases = max(self.forward.values()) + max(self.backward.values())
        if max(self.step.values()) > phases + 1e-12:
            return f"{max(self.step, key=lambda k: self.step[k])} of the whole step"
        first, second = (max(d, key=lambda k, d=d: d[k]) for d in (self.forward, self.backward))  # type: ignore[misc]
        return first if first == second else f"{first} in the forward, {second} in the backward"


def layer_seconds(parameters: int, width: int, tokens: int, sequence: int, rates: Rates) -> tuple[float, float]:
    """Seconds of a transformer layer's forward, and of its recomputation and backward.

    parameters: of its matrices; width: of a token's vector; sequence: tokens that attend to each other.
    """
    products = 2 * parameters * tokens / rates.matmul
    scores = 4 * tokens * sequence * width
    unit = 2 * tokens * width / rates.memory
    forward = products + scores / rates.attention + FORWARD_UNITS * unit + FORWARD_S
    backward = 2 * products + 2.5 * scores / rates.attention_backward + BACKWARD_UNITS * unit + BACKWARD_S
    return forward, forward + backward


def bound(layers: Sequence[LayerCost], rates: Rates, slots: int, update: str) -> Bound:
    """The least time of a step; update: "deferred", "priority" or "in_backward"."""
    total = sum(x.weight_bytes for x in layers)
    moved = [x.weight_bytes for x in layers if x.weight_bytes]
    turn = sum(moved[len(moved) - min(slots, len(moved)):])
    up, up_back = total / rates.h2d, (total - turn) / rates.h2d
    down = sum(x.grad_bytes for x in layers) / rates.d2h
    adamw = sum(x.adamw_bytes for x in layers) / rates.adamw
    forward = {"compute": sum(x.forward_s for x in layers), "upload": up}
    backward = {"compute": sum(x.backward_s for x in layers), "upload": up_back, "download": down}
    if update == "deferred":
        forward["optimizer"] = adamw
    elif update == "in_backward":
        backward["optimizer"] = adamw
    return Bound(forward, backward, {"optimizer": adamw, "upload": up + up_back, "download": down})


def prefetch_distance(layers: Sequence[LayerCost], rates: Rates) -> int:
    """How many layers ahead an upload must start to be over in time: slots - 1 of a ring that hides it.

    One where a layer's forward takes longer than its upload.  More does not help a ring that is short of bandwidth, so
    the answer is at most the number of layers.
    """
    need = 1
    for x in layers:
        if x.forward_s > 0:
            need = max(need, -(-int(1e9 * x.weight_bytes / rates.h2d) // max(1, int(1e9 * x.forward_s))))
    return min(need, len(layers))


def resident_layers(layers: Sequence[LayerCost], rates: Rates, update: str = "deferred") -> int:
    """First layers to keep on the device.

    At least as many that the turn to the next forward does not wait for the first update.  Where AdamW may work all
    step long ("priority"), as many that it takes no longer than compute, less the turn in which it has nothing to do:
    from the end of the forward to the first gradient that lands.  If a quarter of the layers is not enough, the first
    answer stands.
    """
    streamed = [y for y in layers if y.weight_bytes]
    if not streamed:
        return 0
    x = streamed[0]
    chain = x.grad_bytes / rates.d2h + x.adamw_bytes / rates.adamw + x.weight_bytes / rates.h2d
    need = -(-int(1e9 * chain) // max(1, int(1e9 * (x.forward_s + x.backward_s))))
    if update == "priority":
        work: dict[str, int] = {}  # resident ones, which have none now, are taken for layers like the first streamed
        for y in layers:
            work.setdefault(y.name, y.adamw_bytes if y.weight_bytes else x.adamw_bytes)
        idle = streamed[-1].backward_s + streamed[-1].grad_bytes / rates.d2h
        room = (sum(y.forward_s + y.backward_s for y in layers) - idle) * rates.adamw * BESIDE
        need = max(need, next((k for k in range(len(work) // 4 + 1) if sum(list(work.values())[k:]) <= room), 0))
    return min(len(layers) - 1, need)
