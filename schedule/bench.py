"""A user's step function in, measured seconds and peak bytes per shape out.

Runs on one device or under torchrun: every rank runs the same shapes and the slowest rank's time counts.  Results are
saved after every shape, so that an interrupted sweep goes on where it stopped.
"""

from __future__ import annotations

import gc
import logging
import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from graphopt.errors import ConfigError, GraphoptError
from graphopt.schedule.costmodel import read_json, write_json
from graphopt.schedule.gpu_queue import GpuQueue

log = logging.getLogger(__name__)
SCHEMA_VERSION = 1


class Shape(NamedTuple):
    """One microbatch shape: B samples of T x H x W latent tokens (after patching) with L caption tokens."""

    B: int
    T: int
    H: int
    W: int
    L: int = 0

    @property
    def S(self) -> int:
        """Latent tokens of one sample."""
        return self.T * self.H * self.W


@dataclass
class Runs:
    """What a shape benchmark measured.

    Args:
        rows: one dict per shape: B, T, H, W, L, S, status ("ok", "oom", "skipped"), and for "ok": seconds (median over
            repeats of the slowest rank), times (all repeats), spread (standard error of the median over it), bytes
            (peak, largest over ranks; None on CPU).
        key: settings the times hold for; a resumed file must have the same.
        complete: False where the time budget or a signal ended the sweep.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    key: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    def save(self, path: str | Path) -> None:
        """Write JSON, whole or not at all."""
        write_json(
            path, {"schema_version": SCHEMA_VERSION, "rows": self.rows, "key": self.key, "complete": self.complete}
        )

    @staticmethod
    def load(path: str | Path) -> Runs:
        """Read what `save` wrote."""
        data = read_json(path)
        if not isinstance(data, dict) or data.get("schema_version") != SCHEMA_VERSION or "rows" not in data:
            raise ConfigError(
                "this is not a shape benchmark of this version of graphopt", where=str(path), remedy="measure again"
            )
        return Runs(data["rows"], data["key"], data["complete"])


def sweep_order(shapes: Iterable[Sequence[int]]) -> list[Shape]:
    """Shapes so ordered that any prefix covers the range: ends first, then middles (bit-reversed by tokens)."""
    ordered = sorted({Shape(*s) for s in shapes}, key=lambda s: (s.B * s.S, s))
    if any(min(s[:4]) < 1 or s.L < 0 for s in ordered):
        raise ConfigError(
            "every shape needs positive B, T, H, W", where=str([tuple(s) for s in ordered if min(s[:4]) < 1][:3])
        )
    bits = max(1, (len(ordered) - 1).bit_length())
    turn = sorted(range(len(ordered)), key=lambda i: int(f"{i:0{bits}b}"[::-1], 2))
    return (
        [ordered[i] for i in turn if i == 0]
        + ([ordered[-1]] if len(ordered) > 1 else [])
        + [ordered[i] for i in turn if i not in (0, len(ordered) - 1)]
    )


def shape_benchmark(
    step_fn: Callable[[Shape], Any],
    shapes: Iterable[Sequence[int]],
    *,
    budget_s: float = 300,
    warmup: int = 2,
    repeats: int = 5,
    most_repeats: int = 20,
    spread: float = 0.01,
    device: str | torch.device | None = None,
    path: str | Path | None = None,
    key: dict[str, Any] | None = None,
    reset: Callable[[], Any] | None = None,
    queued: bool = False,
    progress: bool = True,
) -> Runs:
    """Measure a training step over a sweep of synthetic shapes.

    Args:
        step_fn: runs one microbatch of the given shape as training does: forward, backward, and what else a microbatch
            costs. Called on every rank with the same shape.
        shapes: (B, T, H, W) or (B, T, H, W, L) each.  Twelve over the range of the data set determine every form of
            fit.
        budget_s: no shape is started after this many seconds.
        warmup, repeats: calls not timed (compilation, autotuning), and timed.
        most_repeats, spread: a shape is timed on, up to `most_repeats` calls, until the standard error of its median is
            below this fraction of it: short eager steps wait for the host and vary by a third.
        device: where step_fn runs; CUDA if there is one.
        path: JSON file, written after every shape; measured shapes in it are not measured again.
        key: settings the times hold for (model, remat, dtype); torch, device and world size are added.
        reset: called after running out of memory, to free what step_fn left behind (gradients: `model.zero_grad`).
        queued: on a GPU, time each call behind other work in its queue, as in the middle of an optimizer step, where
            the host is ahead and launching kernels costs nothing; rows then also hold host_s, the seconds the host
            takes.  Only for a step_fn without collectives.  Elsewhere there is no such queue and no difference.
        progress: show a progress bar on rank 0.

    Returns:
        The runs.  A shape that runs out of memory on any rank is recorded as "oom", and shapes that are at least as
        large in B * S and in B * L are skipped.

    Raises:
        ConfigError: a results file with other settings. Errors of step_fn other than out-of-memory pass through.
    """
    if repeats < 1 or warmup < 0 or not budget_s > 0 or not spread > 0:
        raise ConfigError(
            f"repeats = {repeats}, warmup = {warmup}, budget_s = {budget_s}, spread = {spread}: need at least 1, 0 and "
            "more than 0"
        )
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    queue = GpuQueue(place) if queued and place.type == "cuda" else None
    if queue and not warmup:
        raise ConfigError("queued=True needs a warm-up call, to see how long the host takes", remedy="give warmup=1")
    calls = Calls(warmup, repeats, max(repeats, most_repeats), spread, queue)
    together = dist.is_available() and dist.is_initialized()
    first = not together or dist.get_rank() == 0
    settings = {
        **(key or {}),
        **({"queued": True} if queue else {}),
        "torch": torch.__version__,
        "world_size": dist.get_world_size() if together else 1,
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
    }
    runs = _resume(path, settings)
    done = {tuple(r[d] for d in "BTHWL") for r in runs.rows if r["status"] != "skipped"}
    runs.rows = [r for r in runs.rows if r["status"] != "skipped"]
    todo = [s for s in sweep_order(shapes) if tuple(s) not in done]
    start = time.perf_counter()
    runs.complete = False  # so says the file of a sweep that is killed
    with _bar(progress and first, len(todo)) as advance:
        for i, shape in enumerate(todo):
            if _agree(time.perf_counter() - start > budget_s, place, together):
                log.warning("the time budget of %g s ended the sweep with %d shapes left", budget_s, len(todo) - i)
                break
            row: dict[str, Any] = {**shape._asdict(), "S": shape.S}
            smaller = next(
                (
                    r
                    for r in runs.rows
                    if r["status"] == "oom"
                    and r["B"] * r["S"] <= shape.B * shape.S
                    and r["B"] * r["L"] <= shape.B * shape.L
                ),
                None,
            )
            row |= (
                {"status": "skipped", "seconds": None}
                if smaller
                else _measure(step_fn, shape, calls, place, together, reset)
            )
            runs.rows.append(row)
            if path and first:
                runs.save(path)
            advance(
                f"{shape.B} x {shape.S} tokens: {row['status']}"
                + (f" {row['seconds']:.3g} s" if row["seconds"] else "")
            )
        else:
            runs.complete = True
    if path and first:
        runs.save(path)
    return runs


def _resume(path: str | Path | None, settings: dict[str, Any]) -> Runs:
    """Earlier runs of the same settings, or none."""
    if path is None or not Path(path).exists():
        return Runs(key=settings)
    runs = Runs.load(path)
    if runs.key != settings:
        other = sorted(k for k in {*runs.key, *settings} if runs.key.get(k) != settings.get(k))
        raise ConfigError(
            f"the results file was measured with other settings: {', '.join(other)}",
            where=str(path),
            remedy="give another path, or delete the file",
        )
    return runs


def _agree(flag: bool, place: torch.device, together: bool) -> bool:
    """True on every rank if it is on any."""
    return _largest(float(flag), place, together) > 0


def _largest(value: float, place: torch.device, together: bool) -> float:
    """The largest over ranks."""
    if not together:
        return value
    backend = dist.get_backend()
    t = torch.tensor([value], dtype=torch.float64, device=place if "nccl" in backend else "cpu")
    dist.all_reduce(t, op=dist.ReduceOp.MAX)
    return float(t.item())


def _synchronize(place: torch.device) -> None:
    if place.type == "cuda":
        torch.cuda.synchronize(place)


def _out_of_memory(e: BaseException) -> bool:
    """Is this an allocation failure, of the GPU or of the host?"""
    return isinstance(e, (torch.OutOfMemoryError, MemoryError)) or (
        isinstance(e, RuntimeError) and ("not enough memory" in str(e) or "can't allocate memory" in str(e))
    )


class Calls(NamedTuple):
    """How a shape is run: untimed calls, timed calls at least and at most, the spread to stop at, and what is queued
    in front of a timed call."""

    warmup: int
    least: int
    most: int
    spread: float
    queue: GpuQueue | None = None


def standard_error(times: list[float]) -> float:
    """Relative standard error of the median, from the middle half of the times (1.35 sigma wide, if normal)."""
    if len(times) < 2:
        return math.inf
    low, middle, high = statistics.quantiles(times, n=4)
    return 1.2533 * (high - low) / 1.349 / math.sqrt(len(times)) / middle


def _measure(
    step_fn: Callable[[Shape], Any],
    shape: Shape,
    calls: Calls,
    place: torch.device,
    together: bool,
    reset: Callable[[], Any] | None,
) -> dict[str, Any]:
    """One shape on all ranks."""
    times: list[float] = []
    host = 0.5  # seconds until the host has launched everything; the first call may compile
    if place.type == "cuda":
        torch.cuda.reset_peak_memory_stats(place)
    for i in range(calls.warmup + calls.most):
        # Every rank holds the same times, so all stop at the same call.
        if len(times) >= calls.least and standard_error(times) < calls.spread:
            break
        _synchronize(place)
        if together:
            dist.barrier()
        start = calls.queue.start(1.3 * host + 1e-3) if calls.queue and i >= calls.warmup else None
        begin = time.perf_counter()
        failed = False
        try:
            step_fn(shape)
            if i < calls.warmup:  # behind a long queue the host may have to wait for room
                host = min(host, time.perf_counter() - begin)
            seconds = calls.queue.since(start) if calls.queue and start else None
            _synchronize(place)
        except Exception as e:
            if not _out_of_memory(e):
                raise
            failed, seconds = True, None
        seconds = time.perf_counter() - begin if seconds is None else seconds
        # Outside the handler: the exception's frames, which hold the activations, are gone by now.
        if _agree(failed, place, together):
            if reset:
                reset()
            gc.collect()
            if place.type == "cuda":
                torch.cuda.empty_cache()
            return {"status": "oom", "seconds": None}
        slowest = _largest(seconds, place, together)
        if i >= calls.warmup:
            times.append(slowest)
    peak = None
    if place.type == "cuda":
        peak = int(_largest(float(torch.cuda.max_memory_allocated(place)), place, together))
        peak -= calls.queue.bytes if calls.queue else 0
    error = standard_error(times)
    return {
        "status": "ok",
        "seconds": statistics.median(times),
        "times": times,
        "spread": error if math.isfinite(error) else None,
        "bytes": peak,
        **({"host_s": _largest(host, place, together)} if calls.queue else {}),
    }


def largest_batch(
    step_fn: Callable[[Shape], Any],
    shape: Sequence[int],
    *,
    most: int = 1024,
    device: str | torch.device | None = None,
    reset: Callable[[], Any] | None = None,
) -> int:
    """The largest B of a shape that does not run out of memory, by doubling and bisection (0: not even one sample).

    Args:
        shape: (B, T, H, W[, L]); its B is not used.
        most: stop looking there.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    together = dist.is_available() and dist.is_initialized()

    def fits(b: int) -> bool:
        one = Calls(0, 1, 1, 1.0)
        return _measure(step_fn, Shape(*shape)._replace(B=b), one, place, together, reset)["status"] == "ok"

    low, high = 0, 1
    while high <= most and fits(high):
        low, high = high, high * 2
    high = min(high, most + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


class _bar:
    """A rich progress bar, or nothing."""

    def __init__(self, shown: bool, total: int) -> None:
        self.shown, self.total = shown, total

    def __enter__(self) -> Callable[[str], None]:
        if not self.shown:
            return lambda text: None
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.bar = Progress(
            TextColumn("measuring"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.description}"),
        )
        self.bar.start()
        task = self.bar.add_task("", total=self.total)
        return lambda text: self.bar.update(task, advance=1, description=text)

    def __exit__(self, *exc: object) -> None:
        if self.shown:
            self.bar.stop()


def sweep(tokens: Sequence[int], *, caption: int = 0, most_tokens: int | None = None) -> list[Shape]:
    """A sweep over token counts: B = 1 everywhere, and B = 2 and 4 where they stay under `most_tokens` (the longest by
    default).

    Sizes are (1, 1, S); use the data set's own grids where the model needs them.
    """
    if not len(tokens):
        raise GraphoptError("a sweep needs at least one token count")
    limit = most_tokens or max(tokens)
    return [Shape(b, 1, 1, int(s), caption) for s in tokens for b in (1, 2, 4) if b == 1 or b * s <= limit]
