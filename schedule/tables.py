"""Bucket tables of other trainers, in and out.

- Open-Sora: `bucket_config = {"480p": {51: (probability, batch)}}`, a Python dict
- finetrainers: `--video_resolution_buckets 49x512x768 ...`, frames x height x width, no batch sizes
- NeMo: `bucket_duration_bins: [...]` and `bucket_batch_size: [...]`, upper ends in seconds
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.errors import ConfigError
from graphopt.schedule.shapes import LatentLayout, ShapeTable

# Open-Sora's resolution names by pixels of the frame.
RESOLUTIONS = {
    "144p": 144 * 256,
    "256": 256 * 256,
    "240p": 240 * 426,
    "360p": 360 * 640,
    "512": 512 * 512,
    "480p": 480 * 854,
    "720p": 720 * 1280,
    "768px": 768 * 768,
    "1024": 1024 * 1024,
    "1080p": 1080 * 1920,
    "2k": 1440 * 2560,
    "2048": 2048 * 2048,
    "256px": 256 * 256,
    "512px": 512 * 512,
    "1024px": 1024 * 1024,
}


@dataclass(frozen=True)
class Bucket:
    """One bucket in pixels.

    Args:
        frames: most frames. pixels: height * width. height, width: None where the table only names a resolution.
        batch: samples per microbatch, None where the table has none. probability: of keeping a sample for this bucket.
        seconds: longest duration (NeMo), else None.
    """

    frames: int | None
    pixels: int | None
    height: int | None = None
    width: int | None = None
    batch: int | None = None
    probability: float = 1.0
    seconds: float | None = None


@dataclass(frozen=True)
class BucketTable:
    """Buckets with the format they came from."""

    buckets: tuple[Bucket, ...]
    origin: str

    def limits(self, shapes: ShapeTable, layout: LatentLayout, *, fps: float = 16.0) -> np.ndarray:
        """The table's batch size for each shape of a data set, int64 [shapes]: to be given to
        `plan_batches(limits=...)`.

        A shape belongs to the smallest bucket that holds it: explicit sizes must match its token grid, resolution
            names are
        matched to the nearest area, and frames or seconds are upper ends.

        Raises:
            ConfigError: a shape that no bucket holds, or a table without batch sizes.
        """
        if any(b.batch is None for b in self.buckets):
            raise ConfigError(f"this {self.origin} table has no batch sizes", remedy="plan with m_mem instead")
        frames = (shapes.t * layout.patch[0] - 1) * layout.vae[0] + 1
        area = shapes.h * shapes.w * (layout.vae[1] * layout.patch[1]) * (layout.vae[2] * layout.patch[2])
        out = np.zeros(len(shapes), np.int64)
        for i in range(len(shapes)):
            held = [b for b in self.buckets if self._holds(b, shapes, i, int(frames[i]), float(area[i]), layout, fps)]
            if not held:
                raise ConfigError(
                    f"no bucket of the {self.origin} table holds shape {shapes.name(i)} "
                    f"({frames[i]} frames, {area[i]} pixels)",
                    remedy="add a bucket, or remove these samples",
                )
            best = min(
                held, key=lambda b: (abs(np.log((b.pixels or area[i]) / area[i])), b.frames or 0, b.seconds or 0.0)
            )
            out[i] = best.batch or 0
        return out

    @staticmethod
    def _holds(
        b: Bucket, shapes: ShapeTable, i: int, frames: int, area: float, layout: LatentLayout, fps: float
    ) -> bool:
        """Does shape i fit bucket b?"""
        if b.seconds is not None:
            return frames / fps <= b.seconds
        if b.height is not None and b.width is not None:
            t, h, w = layout.grid(np.array([b.frames or 1]), np.array([b.height]), np.array([b.width]))
            return (int(h[0]), int(w[0])) == (int(shapes.h[i]), int(shapes.w[i])) and int(shapes.t[i]) <= int(t[0])
        return b.frames is not None and frames <= b.frames and b.pixels is not None and 0.6 < b.pixels / area < 1.7


def read_table(path: str | Path) -> BucketTable:
    """Read a table, its format told by its content.

    Raises:
        ConfigError: none of the three formats, or entries that make no sense (with the entry).
    """
    file = Path(path)
    if not file.is_file():
        raise ConfigError("the bucket table does not exist", where=str(path))
    content = file.read_text()
    try:
        if "bucket_duration_bins" in content:
            return nemo(_literal(content, "bucket_duration_bins"), _literal(content, "bucket_batch_size"))
        if re.search(r"\d+x\d+x\d+", content):
            return finetrainers(re.findall(r"\d+x\d+x\d+", content))
        return open_sora(
            _literal(content, "bucket_config") if "bucket_config" in content else ast.literal_eval(content)
        )
    except (ValueError, SyntaxError, TypeError) as e:
        raise ConfigError(
            f"the bucket table cannot be read: {e}",
            where=str(path),
            remedy="formats: Open-Sora bucket_config, finetrainers FxHxW, NeMo bucket_duration_bins",
        ) from e


def _literal(content: str, name: str) -> Any:
    """The Python or YAML-flow literal assigned to a name."""
    found = re.search(rf"^[ \t]*['\"]?{name}['\"]?\s*[:=]\s*", content, re.MULTILINE)
    if not found:
        raise ValueError(f"there is no {name}")
    rest = content[found.end() :]
    depth = 0
    for i, c in enumerate(rest):
        depth += (c in "[{(") - (c in "]})")
        if depth == 0 and c in "]})":
            return ast.literal_eval(rest[: i + 1])
    raise ValueError(f"{name} is not a complete literal")


def open_sora(config: dict[str, dict[int, Any]]) -> BucketTable:
    """From `{"480p": {51: (probability, batch)}}`; a batch of None (bucket switched off) is left out."""
    buckets = []
    for resolution, by_frames in config.items():
        if resolution not in RESOLUTIONS:
            raise ConfigError(f"unknown Open-Sora resolution {resolution!r}", remedy=f"known: {', '.join(RESOLUTIONS)}")
        for frames, entry in by_frames.items():
            probability, batch = entry
            probability = float(
                np.prod(probability)
            )  # newer tables give (keep at this length, keep at this resolution)
            if batch is None or probability == 0:
                continue
            if int(frames) < 1 or int(batch) < 1:
                raise ConfigError(
                    f"bucket {resolution} with {frames} frames: frames and batch must be positive, not {entry!r}"
                )
            buckets.append(Bucket(int(frames), RESOLUTIONS[resolution], batch=int(batch), probability=probability))
    return BucketTable(tuple(buckets), "Open-Sora")


def finetrainers(buckets: Iterable[str]) -> BucketTable:
    """From `49x512x768` strings: frames x height x width."""
    out = []
    for text in buckets:
        try:
            f, h, w = (int(x) for x in text.split("x"))
        except ValueError as e:
            raise ConfigError(f"{text!r} is not frames x height x width") from e
        if min(f, h, w) < 1:
            raise ConfigError(f"bucket {text!r} has a size that is not positive")
        out.append(Bucket(f, h * w, h, w))
    return BucketTable(tuple(out), "finetrainers")


def nemo(bins: list[Any], batches: list[int]) -> BucketTable:
    """From upper ends in seconds (or [seconds, tokens] pairs) and batch sizes."""
    if len(bins) != len(batches):
        raise ConfigError(f"{len(bins)} bucket_duration_bins but {len(batches)} bucket_batch_size")
    ends = [float(b[0] if isinstance(b, (list, tuple)) else b) for b in bins]
    if any(e <= 0 for e in ends) or any(int(n) < 1 for n in batches):
        raise ConfigError("bucket_duration_bins and bucket_batch_size must be positive")
    return BucketTable(tuple(Bucket(None, None, batch=int(n), seconds=e) for e, n in zip(ends, batches)), "NeMo")


def write_table(kind: str, shapes: ShapeTable, batch: np.ndarray, layout: LatentLayout, *, fps: float = 16.0) -> str:
    """Batch sizes per shape as another trainer's table.

    Args:
        kind: "open-sora", "finetrainers" or "nemo".
        batch: int64 [shapes], samples per microbatch.
        fps: frames per second, for NeMo's durations.

    Returns:
        The table as text.  Where a format's bucket covers several shapes it gets the smallest of their batch sizes, so
        that memory holds for all.
    """
    frames = (shapes.t * layout.patch[0] - 1) * layout.vae[0] + 1
    height, width = shapes.h * layout.vae[1] * layout.patch[1], shapes.w * layout.vae[2] * layout.patch[2]
    if kind == "finetrainers":
        return (
            "--video_resolution_buckets "
            + " ".join(
                sorted(
                    {f"{f}x{h}x{w}" for f, h, w in zip(frames, height, width)},
                    key=lambda s: [int(x) for x in s.split("x")],
                )
            )
            + "\n"
        )
    if kind == "open-sora":
        table: dict[str, dict[int, tuple[float, int]]] = {}
        known = {k: v for k, v in RESOLUTIONS.items() if not k.endswith("px")}
        for f, h, w, b in zip(frames.tolist(), height.tolist(), width.tolist(), batch.tolist()):
            name = min(known, key=lambda k: abs(np.log(known[k] / (h * w))))
            old = table.setdefault(name, {}).get(f, (1.0, b))
            table[name][f] = (1.0, min(old[1], b))
        lines = ["bucket_config = {"]
        for name in sorted(table, key=lambda k: known[k]):
            lines.append(f'    "{name}": {{' + ", ".join(f"{f}: {table[name][f]}" for f in sorted(table[name])) + "},")
        return "\n".join([*lines, "}", ""])
    if kind == "nemo":
        by_frames: dict[int, int] = {}
        for f, b in zip(frames.tolist(), batch.tolist()):
            by_frames[f] = min(by_frames.get(f, b), b)
        ends = sorted(by_frames)
        return (
            f"bucket_duration_bins: {[round(f / fps, 4) for f in ends]}\n"
            f"bucket_batch_size: {[by_frames[f] for f in ends]}\n"
        )
    raise ConfigError(f"unknown table format {kind!r}", remedy="use open-sora, finetrainers or nemo")
