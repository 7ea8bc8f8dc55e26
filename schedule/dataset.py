"""Metadata files in, one shape id per row out.

Accepted: Parquet, CSV, JSONL, or an Arrow table, with columns `frames`, `height`, `width` and optionally a caption
length; or with a column of token counts.  Read in batches, so that ten million rows need a few hundred megabytes.  A
WebDataset folder is indexed first (webdataset.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet as pq

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.shapes import LatentLayout, ShapeTable

ALIASES = {
    "frames": ("frames", "num_frames", "n_frames", "length_frames"),
    "height": ("height", "h"),
    "width": ("width", "w"),
    "caption": ("caption_length", "caption_len", "caption_tokens", "text_tokens"),
    "tokens": ("tokens", "num_tokens", "seq_len"),
    "id": ("id", "sample_id"),
}
LIMIT = {"frames": 1 << 20, "height": 1 << 15, "width": 1 << 15, "caption": 1 << 13, "tokens": 1 << 40}
BATCH_ROWS = 1 << 20


@dataclass(frozen=True)
class Samples:
    """A data set as the planner sees it.

    Args:
        shape_id: int32 [rows], index into `shapes`.
        shapes: the distinct shapes.
        fingerprint: sha256 over the row count and the columns used; a plan is bound to it.
        where: file name, for messages.
        ids: the user's own ids, [rows], if there is such a column.
    """

    shape_id: np.ndarray
    shapes: ShapeTable
    fingerprint: str
    where: str = "samples"
    ids: pa.ChunkedArray | None = None
    layout: LatentLayout = field(default_factory=LatentLayout)

    def __len__(self) -> int:
        return len(self.shape_id)

    def name(self, row: int) -> str:
        """`row 17 (id 'clip_17')`, for messages."""
        return f"row {row}" + (f" (id {self.ids[row].as_py()!r})" if self.ids is not None else "")

    @staticmethod
    def of_shapes(shape_id: np.ndarray, shapes: ShapeTable, where: str = "samples") -> Samples:
        """From arrays made in memory (generators, tests)."""
        shape_id = np.ascontiguousarray(shape_id, dtype=np.int32)
        digest = hashlib.sha256(f"{len(shape_id)};{shapes.to_json()}".encode())
        digest.update(shape_id.tobytes())
        return Samples(shape_id, shapes, digest.hexdigest(), where)

    @staticmethod
    def of_tokens(tokens: list[int] | np.ndarray, where: str = "samples") -> Samples:
        """From one token count per sample."""
        values, shape_id = np.unique(np.asarray(tokens, dtype=np.int64), return_inverse=True)
        if len(values) and values[0] < 1:
            row = int(np.argmin(tokens))
            raise PlanInfeasible(
                f"token count {values[0]} is not positive",
                where=f"{where}, row {row}",
                remedy="remove the row or correct its size",
            )
        return Samples.of_shapes(shape_id.reshape(-1), ShapeTable.of_tokens(values), where)


def read_samples(
    source: str | Path | pa.Table | Samples,
    *,
    layout: LatentLayout | None = None,
    caption_bin: int = 512,
    columns: dict[str, str] | None = None,
) -> Samples:
    """Read a data set's metadata.

    Args:
        source: a Parquet, CSV or JSONL file, an Arrow table, or `Samples` (returned as they are).
        layout: VAE and patch factors; not used when the file gives token counts.
        caption_bin: caption lengths are rounded up to a multiple of this (trainers pad to a fixed length; 512 is
            Wan's).
        columns: the file's own column names, e.g. `{"frames": "nf"}`; the usual spellings are found without it.

    Raises:
        PlanInfeasible: empty data set, a size that is null, zero, negative or absurd, a duplicate id (with row and
            file).
        ConfigError: a missing column, an unreadable file, an unknown file type.
    """
    if isinstance(source, Samples):
        return source
    layout = layout or LatentLayout()
    if caption_bin < 1:
        raise ConfigError(f"caption_bin must be positive, not {caption_bin}")
    where = "table" if isinstance(source, pa.Table) else str(source)
    schema, batches = _open(source, where, set((columns or {}).values()))
    names = _columns(schema, columns or {}, where)
    digest = hashlib.sha256(f"{layout.vae}{layout.patch}{caption_bin}{sorted(names)}".encode())
    table: dict[tuple[int, ...], int] = {}
    shape_ids: list[np.ndarray] = []
    ids: list[pa.Array] = []
    rows = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        values = {key: _sizes(batch.column(name), key, name, rows, where) for key, name in names.items() if key != "id"}
        for key in sorted(values):
            digest.update(values[key].astype("<i8").tobytes())
        shape_ids.append(_shape_ids(values, table, layout, caption_bin, rows, where))
        if "id" in names:
            ids.append(batch.column(names["id"]))
        rows += batch.num_rows
    if not rows:
        raise PlanInfeasible(
            "the data set has no rows", where=where, remedy="check the path or the filter that made it"
        )
    digest.update(str(rows).encode())
    chunked = pa.chunked_array(ids) if ids else None
    if chunked is not None:
        _refuse_duplicates(chunked, where)
    return Samples(np.concatenate(shape_ids), ShapeTable.of(list(table)), digest.hexdigest(), where, chunked, layout)


def _open(
    source: str | Path | pa.Table, where: str, named: set[str]
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Schema and record batches of any accepted source; `named` are columns that the user names."""
    if isinstance(source, pa.Table):
        return source.schema, iter(source.to_batches(max_chunksize=BATCH_ROWS))
    path = Path(source)
    if not path.is_file():
        raise ConfigError(
            "the data set's metadata file does not exist",
            where=where,
            remedy="give a Parquet, CSV or JSONL file (index WebDataset shards with `graphopt plan index`)",
        )
    if not path.stat().st_size:
        raise PlanInfeasible("the metadata file is empty", where=where, remedy="check how it was written")
    try:
        if path.suffix in (".parquet", ".pq"):
            parquet = pq.ParquetFile(path)
            return parquet.schema_arrow, _parquet_batches(parquet, where, named)
        if path.suffix in (".csv", ".tsv"):
            options = pa.csv.ParseOptions(delimiter="\t" if path.suffix == ".tsv" else ",")
            table = pa.csv.read_csv(path, parse_options=options)
        elif path.suffix in (".jsonl", ".ndjson"):
            table = pa.json.read_json(path)
        else:
            raise ConfigError(
                f"unknown metadata file type {path.suffix!r}", where=where, remedy="use .parquet, .csv, .tsv or .jsonl"
            )
    except (pa.ArrowInvalid, OSError) as e:
        raise ConfigError(f"the metadata file cannot be read: {e}", where=where, remedy="rewrite the file") from e
    return table.schema, iter(table.to_batches(max_chunksize=BATCH_ROWS))


def _parquet_batches(parquet: pq.ParquetFile, where: str, named: set[str]) -> Iterator[pa.RecordBatch]:
    """Batches of the columns a plan can use; captions and paths are never read."""
    wanted = {a for names in ALIASES.values() for a in names}
    keep = [n for n in parquet.schema_arrow.names if n in named or n.lower() in wanted]
    try:
        yield from parquet.iter_batches(batch_size=BATCH_ROWS, columns=keep)
    except (pa.ArrowInvalid, OSError) as e:
        raise ConfigError(
            f"a row group of the metadata file cannot be read: {e}", where=where, remedy="rewrite the file"
        ) from e


def _columns(schema: pa.Schema, given: dict[str, str], where: str) -> dict[str, str]:
    """Which column holds what: {"frames": its name, ...}."""
    unknown = set(given) - set(ALIASES)
    if unknown:
        raise ConfigError(f"unknown column roles {sorted(unknown)}", remedy=f"roles are {', '.join(ALIASES)}")
    lower = {n.lower(): n for n in schema.names}
    found: dict[str, str] = {}
    for role, aliases in ALIASES.items():
        if role in given:
            if given[role] not in schema.names:
                raise ConfigError(
                    f"there is no column {given[role]!r} (for {role})",
                    where=where,
                    remedy=f"the file has: {', '.join(schema.names)}",
                )
            found[role] = given[role]
        else:
            hit = next((lower[a] for a in aliases if a in lower), None)
            if hit is not None:
                found[role] = hit
    if "tokens" in found and not {"frames", "height", "width"} <= set(found):
        return {k: v for k, v in found.items() if k in ("tokens", "caption", "id")}
    missing = [k for k in ("frames", "height", "width") if k not in found]
    if missing:
        raise ConfigError(
            f"missing column{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
            where=where,
            remedy=f"the file has: {', '.join(schema.names)}; name yours with columns={{...}} "
            "or --columns frames=nf,... (images have frames = 1), or give a column `tokens`",
        )
    found.pop("tokens", None)
    return found


def _sizes(column: pa.Array, role: str, name: str, first_row: int, where: str) -> np.ndarray:
    """One column as int64, every value checked."""
    least = 0 if role == "caption" else 1
    if column.null_count:
        row = first_row + int(np.argmax(column.is_null().to_numpy(zero_copy_only=False)))
        raise PlanInfeasible(f"column {name!r} is empty", where=f"{where}, row {row}", remedy="fill or remove the row")
    try:
        values = column.cast(pa.int64()).to_numpy(zero_copy_only=False)
    except pa.ArrowInvalid as e:
        raise PlanInfeasible(
            f"column {name!r} ({column.type}) does not hold whole numbers: {e}",
            where=where,
            remedy="convert it to integers",
        ) from e
    bad = (values < least) | (values >= LIMIT[role])
    if bad.any():
        row = int(np.argmax(bad))
        raise PlanInfeasible(
            f"{name} = {values[row]} is outside [{least}, {LIMIT[role]})",
            where=f"{where}, row {first_row + row} ({int(bad.sum())} such rows in its batch)",
            remedy="remove or correct these rows",
        )
    return values


def _shape_ids(
    values: dict[str, np.ndarray],
    table: dict[tuple[int, ...], int],
    layout: LatentLayout,
    caption_bin: int,
    first_row: int,
    where: str,
) -> np.ndarray:
    """Shape id of each row; new shapes are appended to `table`."""
    caption = values.get("caption")
    padded = np.zeros(1, np.int64) if caption is None else -(-caption // caption_bin) * caption_bin
    if "tokens" in values:
        t = values["tokens"]
        keyed = (t << 13) | (padded // caption_bin)
    else:
        # One int64 key per pixel shape: Arrow's hash finds the distinct ones far faster than sorting four columns.
        key = (values["frames"] << 43) | (values["height"] << 28) | (values["width"] << 13)
        # caption <= 2^13, in bins, so its bin number fits the low 13 bits.
        keyed = key | (padded // caption_bin)
    encoded = pa.array(
        np.ascontiguousarray(np.broadcast_to(keyed, (len(next(iter(values.values()))),)))
    ).dictionary_encode()
    index = encoded.indices.to_numpy()
    _, at = np.unique(index, return_index=True)  # dictionary order is order of first appearance
    if "tokens" in values:
        grid = (t[at], np.ones(len(at), np.int64), np.ones(len(at), np.int64))
    else:
        grid = layout.grid(values["frames"][at], values["height"][at], values["width"][at])
    tokens = grid[0] * grid[1] * grid[2]
    if (tokens < 1).any():
        row = first_row + int(at[np.argmax(tokens < 1)])
        raise PlanInfeasible(
            "a sample is smaller than one patch: it has no tokens",
            where=f"{where}, row {row}",
            remedy=f"remove it (VAE {layout.vae}, patch {layout.patch})",
        )
    caption_at = np.broadcast_to(padded, (len(index),))[at]
    local = np.empty(len(at), np.int32)
    for i, shape in enumerate(zip(*(g.tolist() for g in grid), caption_at.tolist())):
        local[i] = table.setdefault(shape, len(table))
    return local[index]


def _refuse_duplicates(ids: pa.ChunkedArray, where: str) -> None:
    """Ids must be distinct: a plan promises each sample exactly once."""
    if ids.null_count:
        raise PlanInfeasible("the id column has empty entries", where=where, remedy="fill or drop the column")
    if pc.count_distinct(ids).as_py() == len(ids):
        return
    counts: Any = pc.value_counts(ids)
    twice = pc.filter(counts, pc.greater(pc.struct_field(counts, "counts"), 1))
    first = twice[0].as_py()
    raise PlanInfeasible(
        f"{len(twice)} ids occur more than once; the first is {first['values']!r} ({first['counts']} times)",
        where=f"{where}, row {pc.index(ids, twice[0]['values']).as_py()}",
        remedy="make ids distinct",
    )
