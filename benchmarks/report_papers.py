"""The papers' figures beside ours, row by row, from the result files: docs/papers.md (written by report.py)."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Protocol

import report_clips
from report_parts import Results, source

Row = dict
MISSING = "not measured"
HEAD = """# The papers' figures beside ours

graphopt implements two papers: AdaptiveLoad (mixed data, fused norms) and MegaSlide-DiT (layer streaming, 3D
deformable sliding attention). Neither released its kernels, models or data, so a row compares a published figure with
what the same idea gives here, on our machine, at the size named. Made by `python benchmarks/report.py` from the files
of `benchmarks/results` named in the last column; their commands, machines and versions stand at the [end](#where-from).
"""


class Rows(Protocol):
    """What this needs of report.Results."""

    def rows(self, name: str, **where: object) -> Iterator[tuple[str, Row]]:
        """Rows of a benchmark, with their file."""


class Recorded:
    """Rows of `results`, and the files of those that were taken."""

    def __init__(self, results: Rows) -> None:
        self.results = results
        self.files: set[str] = set()

    def rows(self, name: str, **where: object) -> Iterator[tuple[str, Row]]:
        """As `results` gives them."""
        for file, row in self.results.rows(name, **where):
            self.files.add(file)
            yield file, row


def first(results: Rows, name: str, **where: object) -> Row | None:
    """The first row with these values."""
    return next((r for _, r in results.rows(name, **where)), None)


def ratio(results: Rows, direction: str) -> str:
    """Eager's time over graphopt's for the norm at N = 64,000, per width."""
    parts = []
    for _, eager in results.rows("papers", figure="norm", system="eager", direction=direction):
        ours = first(results, "papers", figure="norm", system="graphopt", direction=direction, shape=eager["shape"])
        if ours:
            parts.append(f"{eager['us'] / ours['us']:.2f}x at D = {eager['shape'][2]}")
    return ", ".join(parts) or MISSING


def activations(results: Rows) -> str:
    """What the norm leaves for its backward, against eager."""
    parts = []
    for _, eager in results.rows("papers", figure="norm", system="eager", direction="backward"):
        ours = first(results, "papers", figure="norm", system="graphopt", direction="backward", shape=eager["shape"])
        if ours:
            gain = 1 - ours["saved_bytes"] / eager["saved_bytes"]
            parts.append(f"-{100 * gain:.2f} % at D = {eager['shape'][2]} ({eager['saved_bytes'] / 1e9:.2f} to "
                         f"{ours['saved_bytes'] / 1e9:.4f} GB)")
    return ", ".join(parts) or MISSING


def peak(results: Rows) -> str:
    """Peak of a training step against eager and against Inductor."""
    by = {r["system"]: r for _, r in results.rows("step", model="wan-1.3b", batch=1, layers=4) if r.get("step_ms")}
    if not {"eager", "graphopt"} <= set(by):
        return MISSING
    text = f"-{100 * (1 - by['graphopt']['peak_gib'] / by['eager']['peak_gib']):.1f} % of eager"
    if "inductor_no_mix_order" in by:
        gain = by["graphopt"]["peak_gib"] / by["inductor_no_mix_order"]["peak_gib"] - 1
        text += f"; {100 * gain:+.1f} % of Inductor"
    return text + " (Wan 1.3B x 4)"


def longest(results: Rows) -> str:
    """Tokens at eager's peak."""
    by = {r["system"]: r for _, r in results.rows("papers", figure="longest")}
    if not {"eager", "graphopt"} <= set(by):
        return MISSING
    base = by["eager"]["tokens"]
    rival = by.get("inductor_no_mix_order", by["eager"])["tokens"] > by["graphopt"]["tokens"]
    return f"{base:,} in eager; " + ", ".join(
        ("" if by[s].get("exact", True) else "at least ")
        + f"{by[s]['tokens']:,} ({by[s]['tokens'] / base - 1:+.0%}) {name}"
        for s, name in (("inductor_no_mix_order", "Inductor"), ("graphopt", "graphopt")) if s in by) + (
            ": Inductor alone holds more" if rival else "")


def simulated(results: Rows, before: str, after: str | None, gain: bool) -> str:
    """A figure of the data recipe that meets the paper's (benchmarks/schedule.py paper), simulated."""
    row = first(results, "schedule", check="paper_figures")
    if row is None:
        return MISSING
    f = row["figures"]
    value = f"+{100 * f[before]:.1f} %" if gain else f"{100 * f[before]:.1f} -> {100 * f[str(after)]:.1f} %"
    return f"{value} by the paper's rule, simulated on data like its own"


def measured(results: Rows) -> str:
    """Policies in a real loop, all machines that ran it."""
    parts = []
    for file, row in results.rows("schedule", check="step", simulated=False):
        if row.get("tokens_per_s") is None:
            continue
        tau = "" if row.get("tau") is None else f" tau {row['tau']}"
        parts.append(f"{row['tokens_per_s']:,.0f} {row['policy']}{tau} on {row['ranks']} ranks ({file.split('/')[0]})")
    return ", ".join(parts) or MISSING


def in_turn(results: Rows) -> str:
    """Gains over equal_token of 8 ranks that ran in turn on one GPU."""
    parts = []
    for _, r in results.rows("schedule_in_turn", mode="in turn", ranks=8, system="graphopt"):
        if r["policy"] != "equal_token" and not r.get("same_plan_as") and r.get("planned_gain_corrected") is not None:
            low, high = (100 * x for x in r["planned_gain_interval"])
            memory = "" if r["memory"] == 1 else f", memory {r['memory']:g} x the longest sample"
            parts.append(f"{100 * r['planned_gain_corrected']:+.1f} % ({low:.1f} to {high:.1f}) {r['policy']} "
                         f"tau {r['tau']:g}, data {r['data']}{memory}")
    return "; ".join(parts) or MISSING


def spread(results: Rows, key: str) -> str:
    """A coefficient of variation, of 8 ranks that ran in turn on one GPU, tau 1.3."""
    parts = []
    for _, r in results.rows("schedule_in_turn", mode="in turn", ranks=8, system="graphopt", tau=1.3, memory=1.0):
        if r.get(key) is not None and r["policy"] != "adaptive_load":
            parts.append(f"{100 * r[key]:.1f} % {r['policy']}, data {r['data']}")
    return "; ".join(sorted(parts)) or MISSING


def correlation(results: Rows) -> str:
    """Correlation of step time with tokens and with S^2 over the shape benchmark's runs."""
    runs = [r for name in ("schedule_shape_runs_eager", "schedule_shape_runs_graphopt") for _, r in results.rows(name)
            if r.get("status") == "ok"]
    if len(runs) < 5:
        return MISSING
    seconds = [r["seconds"] for r in runs]
    by = {"`B*S`": [r["B"] * r["S"] for r in runs], "`S^2`": [r["S"] ** 2 for r in runs],
          "`B*S^2`": [r["B"] * r["S"] ** 2 for r in runs]}
    return ", ".join(f"R = {statistics.correlation(x, seconds):.2f} with {name}" for name, x in by.items()) + (
        f" over {len(runs)} shapes (their range decides it)")


def same_loss(results: Rows) -> str:
    """Final loss against eager's."""
    parts = [f"{r['dtype']} {r['model']}: {100 * r['final_gap']:.3g} % after {r['steps']} steps"
             for _, r in results.rows("same_loss") if r.get("final_gap") is not None]
    return ", ".join(parts) or MISSING


def clip_rows(results: Rows) -> list[Row]:
    """Rows of papers_clips.py."""
    return [r for _, r in results.rows("papers", figure="clip")]


def clips(results: Rows) -> str:
    """The largest clip at 1080p of each system, and the first that ran out of memory."""
    return report_clips.largest(clip_rows(results)) or MISSING


def clip_steps(results: Rows) -> str:
    """Seconds of a dense and of a sliding step at the largest clip that both ran."""
    text = report_clips.dense_over_sliding(clip_rows(results))
    if text is None:  # then resident, without an optimizer
        rows = [r for _, r in results.rows("dsa_step", system="graphopt_dsa") if r.get("ratio")]
        parts = [f"{1 / r['ratio']:.1f}x at {r['tokens']:,} tokens" for r in sorted(rows, key=lambda r: r["tokens"])]
        text = ", ".join(parts) + " (Wan 1.3B x 4, resident; streamed: not measured)" if parts else MISSING
    return text


WAN = {"1.3b": (1536, 8960), "14b": (5120, 13824)}  # width, FFN
PEAK = 989e12  # dense bf16 of an H100 or H200


def wan_flops(width: str, layers: int, tokens: int, text: int = 512) -> float:
    """FLOPs of the layers' forward for one sample: matrix products alone, as torch's counter counts them."""
    D, F = WAN[width]
    products = 2 * tokens * (6 * D * D + 2 * D * F) + 2 * text * 2 * D * D
    return layers * (products + 4 * tokens * (tokens + text) * D)


def mfu(results: Rows) -> str:
    """MFU of the second paper's three set-ups; what its own script has not measured, of the streamed steps: forward
    three times."""
    parts: dict[int, list[str]] = {}
    own: set[str] = set()
    for _, r in results.rows("papers", figure="mfu"):
        order = f", {r['direction']}" if r["system"] == "prefetch" else ""
        model = f"({r['params_b']:.1f} B, {r['layers']} layers of Wan 14B's width)"
        parts.setdefault(r["tokens"], []).append(f"{100 * r['mfu']:.0f} % {r['system']}{order} {model}")
        own.add(r["system"])
    best: dict[tuple[int, str], float] = {}  # of several numbers of threads and of layers that stay
    for _, r in results.rows("stream"):
        kind = "prefetch" if r.get("overlap") else "no prefetch"
        if kind not in own and r.get("width") in WAN and r.get("step_ms") and r["system"] in ("graphopt", "serial"):
            share = 3 * wan_flops(r["width"], r["layers"], r["tokens"]) / (r["step_ms"] / 1e3) / PEAK
            graphs = " as CUDA graphs" if r.get("graphs") else ""
            how = f"{kind}, {r['update']}{graphs}" if r["overlap"] else kind
            host = f", {r['cores']} cores" if r.get("cores") else ""
            name = r["tokens"], f"{how} ({r['params_b']:.1f} B{host})"
            best[name] = max(share, best.get(name, 0.0))
    for (tokens, name), share in best.items():
        parts.setdefault(tokens, []).append(f"{100 * share:.0f} % {name}")
    if parts and "optimizer on the GPU" not in own:
        parts[max(parts)].append("optimizer on the GPU not measured")
    text = "; ".join(f"{tokens:,} tokens: " + ", ".join(found) for tokens, found in sorted(parts.items()))
    return text or MISSING


def overlap(results: Rows) -> str:
    """Forward with overlap against forward on one stream, by size; or of one streamed step without an update beside."""
    by = {(r["params_b"], r["system"]): r for _, r in results.rows("papers", figure="forward")}
    parts = [f"{by[size, 'serial']['forward_ms'] / r['forward_ms']:.2f}x at {size:.1f} B ({r['tokens']:,} tokens)"
             for (size, system), r in sorted(by.items()) if system == "asynchronous" and (size, "serial") in by]
    if not parts:
        serial = {(r["params_b"], r["tokens"], r.get("cores")): r for _, r in results.rows("stream", system="serial")}
        for _, r in results.rows("stream", system="graphopt", update="in_backward"):
            other = serial.get((r["params_b"], r["tokens"], r.get("cores")))
            if other and r.get("forward_ms") and other.get("forward_ms"):
                gain = other["forward_ms"] / r["forward_ms"]
                parts.append(f"{gain:.2f}x at {r['params_b']:.1f} B, {r['tokens']:,} tokens; other sizes not measured "
                             "(`python benchmarks/papers_stream.py forward`)")
    return ", ".join(parts) or MISSING


TURN = "8 ranks in turn on one GPU, no communication"
TABLES: dict[str, list[tuple[str, str, Callable[[Rows], str]]]] = {
    "AdaptiveLoad": [
        ("fused forward over eager, N = 64,000", "3.21-3.39x", lambda r: ratio(r, "forward")),
        ("fused backward over eager, N = 64,000", "up to 1.42x", lambda r: ratio(r, "backward")),
        ("activation memory of the norm, N = 64,000", "-61.9 %", activations),
        ("peak memory of a step", "-22.7 %", peak),
        ("longest sequence at the same peak", "48,000 -> 52,800 (+10 %)", longest),
        ("tokens/s, 8 GPUs", "+25.6 %", lambda r: simulated(r, "gain_8", None, True)),
        ("tokens/s, 16 GPUs", "+27.2 %", lambda r: simulated(r, "gain_16", None, True)),
        ("tokens/s, GPUs at hand", "-", measured),
        (f"gain over equal_token at one global batch, {TURN}", "-", in_turn),
        ("CV of compute load over ranks", "39 -> 18.9 %",
         lambda r: simulated(r, "load_cv_before", "load_cv_after", False)),
        (f"the same, {TURN}", "-", lambda r: spread(r, "load_cv")),
        ("CV of step time", "18.7 -> 10.4 %", lambda r: simulated(r, "step_cv_before", "step_cv_after", False)),
        (f"the same, {TURN}", "-", lambda r: spread(r, "step_cv")),
        ("correlation of step time", "0.35 with `B*S`, 0.92 with `S^2`", correlation),
        ("loss curve", "identical", same_loss),
    ],
    "MegaSlide-DiT": [
        ("largest clip at 1080p", "256 frames at 115 GB, dense out of memory at 64", clips),
        ("a dense step over a sliding one", "-", clip_steps),
        ("MFU", "61 % with prefetch, 28 % without, 15 % with the optimizer on the GPU", mfu),
        ("forward, asynchronous over serial", "2.11x at 28.4 B", overlap),
    ],
}
CANNOT = """## What cannot be compared

- Quality figures (text alignment, temporal consistency): they need the authors' weights and data.
- 105 B parameters at 3.1 s a step over PCIe 5: it needs 135 GB/s up and 948 GB/s of host memory; x16 gives 64
  ([streaming](streaming.md)).
- Wall time on 8 and 16 GPUs: not run, they were not lent. Rows `in turn` are composed: one GPU ran all ranks'
  microbatches one after the other, without collectives, and a step takes as long as its slowest rank.
- 10 M samples of the authors' data: our recipe is a mix that meets the published figures, found by a search
  ([planning](planning.md)); it shows that such a regime exists.
"""


CLIPS = """1088 x 1920; T latent frames of 68 x 120 tokens are 4 T - 3 frames. A step is forward, backward and update,
where that is on the host to its end. `allocated` and `reserved` are the most that torch's tensors and its allocator
held, `host` is the most that the process has held so far. A streamed layer is recomputed in the backward. Neither
attention keeps a matrix of tokens x tokens, so a window shortens the step and not the memory: a learned one adds its
offsets. Where dense attention wrote that matrix, it would end far earlier.
"""


COMMANDS = {
    "longest sequence at the same peak": "python benchmarks/papers.py longest",
    f"gain over equal_token at one global batch, {TURN}": "python benchmarks/schedule_in_turn.py",
    f"the same, {TURN}": "python benchmarks/schedule_in_turn.py",
    "largest clip at 1080p": "python benchmarks/papers_clips.py",
    "a dense step over a sliding one": "python benchmarks/papers_clips.py",
    "MFU": "python benchmarks/papers_stream.py mfu",
    "forward, asynchronous over serial": "python benchmarks/papers_stream.py forward",
}


def cell(name: str, text: str) -> str:
    """A figure, or that it is missing and the command that measures it."""
    return f"{text} (`{COMMANDS[name]}`)" if text == MISSING and name in COMMANDS else text


def papers(results: Results) -> str:
    """docs/papers.md."""
    parts, files = [HEAD], set()
    for paper, rows in TABLES.items():
        parts.append(f"## {paper}\n")
        parts.append("| figure | paper | here | from |\n| --- | --- | --- | --- |")
        for name, published, ours in rows:
            taken = Recorded(results)
            text = cell(name, ours(taken))
            found = set() if text.startswith(MISSING) else taken.files
            files |= found
            parts.append(f"| {name} | {published} | {text} | " + ", ".join(f"`{f}`" for f in sorted(found)) + " |")
        parts.append("")
    tried = report_clips.every(clip_rows(results))
    if tried:
        parts += [f"## Every clip that was tried\n\n{CLIPS}\n{tried}\n"]
    if any(MISSING in part for part in parts):
        parts.append("A row without a figure has not run on a GPU yet; the command that measures it stands there.\n")
    parts.append(CANNOT)
    if files:
        parts.append("## Where from\n\n" + "\n".join(f"- {source(results, f)}" for f in sorted(files)) + "\n")
    return "\n".join(parts)
