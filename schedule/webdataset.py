"""WebDataset shards in, a Parquet index out: one row per sample with its shard, key, offset and sizes.

A plan is random access, so shards are indexed once: tar headers are walked, and each sample's `.json` member is read
for its sizes; videos are never read.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.dataset import ALIASES

SIZES = ("frames", "height", "width", "caption", "tokens")


def index_webdataset(
    shards: Iterable[str | Path],
    out: str | Path,
    *,
    columns: dict[str, str] | None = None,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Write an index that `read_samples` takes.

    Args:
        shards: tar files, in the order their samples get row numbers.
        columns: keys of the `.json` members, e.g. `{"frames": "num_frames"}`; usual spellings are found without it.  A
            caption that is text is counted in words times 1.3, as an estimate of tokens.

    Returns:
        How many samples were indexed.

    Raises:
        PlanInfeasible: a sample without a `.json` member or without sizes (shard and key named). ConfigError: an
            unreadable shard.
    """
    rows: list[dict[str, Any]] = []
    for shard in map(str, shards):
        try:
            rows += _shard(shard, columns or {})
        except (tarfile.TarError, OSError) as e:
            raise ConfigError(f"the shard cannot be read: {e}", where=shard, remedy="download it again") from e
        if progress:
            progress(len(rows))
    if not rows:
        raise PlanInfeasible(
            "the shards hold no samples", where=", ".join(map(str, shards)) or "no shards", remedy="check the pattern"
        )
    names = [
        n
        for n in ("id", "shard", "key", "offset", "frames", "height", "width", "caption_length", "tokens")
        if n in rows[0]
    ]
    temporary = Path(out).with_name(f".{Path(out).name}.writing")
    try:
        pq.write_table(pa.table({n: [r.get(n) for r in rows] for n in names}), temporary, compression="zstd")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return len(rows)


def _shard(shard: str, columns: dict[str, str]) -> list[dict[str, Any]]:
    """Rows of one tar file."""
    found: dict[str, dict[str, Any]] = {}
    with tarfile.open(shard) as tar:
        for member in tar:
            if not member.isfile():
                continue
            folder, _, base = member.name.rpartition("/")
            stem, _, suffix = base.partition(".")
            key = f"{folder}/{stem}" if folder else stem
            row = found.setdefault(
                key, {"id": f"{Path(shard).name}/{key}", "shard": shard, "key": key, "offset": member.offset}
            )
            if suffix == "json":
                handle = tar.extractfile(member)
                try:
                    row["meta"] = json.loads(handle.read()) if handle else None
                except ValueError as e:
                    raise PlanInfeasible(
                        f"the .json member of {key} is not valid JSON", where=shard, remedy="rewrite the shard"
                    ) from e
    for key, row in found.items():
        meta = row.pop("meta", None)
        if not isinstance(meta, dict):
            raise PlanInfeasible(
                f"sample {key} has no .json member with its sizes",
                where=shard,
                remedy="write frames, height and width into a .json member of each sample",
            )
        lower = {k.lower(): v for k, v in meta.items()}
        for size in SIZES:
            name = columns.get(size) or next((a for a in ALIASES[size] if a in lower), None)
            value = meta.get(name, lower.get(name)) if name else None
            if size == "caption" and value is None and isinstance(meta.get("caption"), str):
                value = round(1.3 * len(meta["caption"].split()))
            if value is not None:
                row["caption_length" if size == "caption" else size] = value
        if "tokens" not in row and not {"frames", "height", "width"} <= set(row):
            missing = [s for s in ("frames", "height", "width") if s not in row]
            raise PlanInfeasible(
                f"sample {key} has no {', '.join(missing)}",
                where=shard,
                remedy=f"its .json has: {', '.join(map(str, meta))}; name yours with columns={{...}}",
            )
    return list(found.values())
