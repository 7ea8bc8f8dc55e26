"""The plan: every optimizer step's microbatches, per rank, with what was left over.

On disk it is a folder: `manifest.json` (schema version, data-set fingerprint, layout of ranks, limits, cost model,
totals, sha256 of each part), `steps.parquet` (one row per step) and `part-00000.parquet`, ... (one row per microbatch,
sorted by step, rank, k).  Everything in it follows from the inputs: no dates, no host names, so that equal inputs give
equal bytes.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from graphopt.errors import ConfigError, PlanInfeasible
from graphopt.schedule.dataset import Samples
from graphopt.schedule.problem import FLAG_NAMES
from graphopt.schedule.shapes import ShapeTable

SCHEMA_VERSION = 1
PART = pa.schema(
    [
        ("step", pa.int32()),
        ("rank", pa.int32()),
        ("k", pa.int32()),
        ("microbatches", pa.int32()),
        ("shape", pa.int32()),
        ("batch", pa.int32()),
        ("tokens", pa.int64()),
        ("cost_s", pa.float64()),
        ("bytes", pa.int64()),
        ("flags", pa.uint8()),
        ("samples", pa.list_(pa.uint32())),
    ]
)
STEPS = pa.schema(
    [
        ("step", pa.int32()),
        ("tokens", pa.int64()),
        ("samples", pa.int64()),
        ("microbatches", pa.int32()),
        ("mean_s", pa.float64()),
        ("max_s", pa.float64()),
        ("bytes_max", pa.int64()),
    ]
)


@dataclass(frozen=True)
class Microbatch:
    """One microbatch: k-th of K (`microbatches`) of its rank in a step; `samples` are row numbers of the data set."""

    step: int
    rank: int
    k: int
    microbatches: int
    shape: int
    samples: list[int]
    tokens: int
    cost_s: float
    bytes: int | None
    flags: int

    @property
    def flag(self) -> str:
        """The flags in words, empty where there are none."""
        return ", ".join(name for bit, name in FLAG_NAMES.items() if self.flags & bit)


@dataclass
class Plan:
    """A batch plan.

    Args:
        manifest: what `manifest.json` holds.
        parts: Arrow tables of microbatches (schema `PART`), in step order.
        step_table: one row per step (schema `STEPS`): tokens, samples, microbatches, mean and largest predicted seconds
            over ranks, largest predicted bytes of a microbatch (null without a memory fit).
    """

    manifest: dict[str, Any]
    parts: list[pa.Table] = field(repr=False)
    step_table: pa.Table = field(repr=False)

    def __len__(self) -> int:
        """Optimizer steps; the same on every rank."""
        return int(self.manifest["steps"])

    @property
    def ranks(self) -> int:
        """Ranks of the job, sequence-parallel ones included."""
        return int(self.manifest["layout"]["ranks"])

    @property
    def groups(self) -> int:
        """Data-parallel groups: ranks / sp."""
        return int(self.manifest["layout"]["groups"])

    @property
    def shapes(self) -> ShapeTable:
        """The data set's shapes, [T, H, W, L] each."""
        return ShapeTable.of(self.manifest["shapes"])

    @property
    def dropped(self) -> list[int]:
        """Rows that are not in this plan and not owed to the next."""
        return list(self.manifest["dropped"])

    @property
    def carried(self) -> list[int]:
        """Rows owed to the next epoch: give them to `plan_batches(carry_in=...)`."""
        return list(self.manifest["carried"])

    @property
    def repeated(self) -> list[int]:
        """Rows used once more than asked, to fill the tail."""
        return list(self.manifest["repeated"])

    @property
    def warnings(self) -> list[str]:
        """What the planner wants the reader to know."""
        return list(self.manifest["warnings"])

    @property
    def hash(self) -> str:
        """sha256 of the manifest, which holds a digest of every microbatch.  Ranks compare it at the start.

        How the parts are stored does not enter: a plan keeps its hash when it is saved and loaded.
        """
        return hashlib.sha256(_dump({k: v for k, v in self.manifest.items() if k != "parts"})).hexdigest()

    def table(self) -> pa.Table:
        """All microbatches as one Arrow table."""
        return pa.concat_tables(self.parts) if self.parts else PART.empty_table()

    def column(self, name: str) -> np.ndarray:
        """One column of all microbatches (not `samples`)."""
        parts = [p.column(name).to_numpy() for p in self.parts]
        return np.concatenate(parts) if parts else np.zeros(0)

    def samples(self) -> tuple[np.ndarray, np.ndarray]:
        """(rows, offsets): microbatch i holds `rows[offsets[i]:offsets[i + 1]]`; uint32 and int64."""
        lists = [p.column("samples").combine_chunks() for p in self.parts]
        rows = [x.flatten().to_numpy() for x in lists]
        batch = self.column("batch").astype(np.int64)
        return np.concatenate(rows) if rows else np.zeros(0, np.uint32), np.r_[0, np.cumsum(batch)].astype(np.int64)

    def steps(self, rank: int) -> list[list[Microbatch]]:
        """The microbatches of one rank, step by step.

        Args:
            rank: 0 <= rank < ranks; ranks of one sequence-parallel group get the same microbatches.
        """
        if not 0 <= rank < self.ranks:
            raise ConfigError(
                f"rank {rank} is not in the plan's {self.ranks} ranks", remedy="plan again for this world size"
            )
        out: list[list[Microbatch]] = [[] for _ in range(len(self))]
        for mb in self.microbatches(rank=rank // (self.ranks // self.groups)):
            out[mb.step].append(mb)
        return out

    def microbatches(self, *, rank: int | None = None) -> Iterator[Microbatch]:
        """All microbatches, or those of one data-parallel group, in order."""
        for part in self.parts:
            kept = part if rank is None else part.filter(pa.compute.equal(part.column("rank"), rank))
            for r in kept.to_pylist():
                yield Microbatch(
                    r["step"],
                    r["rank"],
                    r["k"],
                    r["microbatches"],
                    r["shape"],
                    r["samples"],
                    r["tokens"],
                    r["cost_s"],
                    r["bytes"],
                    r["flags"],
                )

    def remaining(self, step: int) -> np.ndarray:
        """Rows of the steps from `step` on, ascending: what a re-plan for another world size has to cover."""
        rows, offsets = self.samples()
        first = int(np.searchsorted(self.column("step"), step))
        return np.sort(rows[offsets[first] :]).astype(np.int64)

    def check_dataset(self, samples: Samples) -> None:
        """Raise PlanInfeasible if this plan was made for another data set."""
        if samples.fingerprint != self.manifest["dataset"]["fingerprint"]:
            made = self.manifest["dataset"]
            raise PlanInfeasible(
                f"the plan was made for another data set ({made['rows']} rows, fingerprint "
                f"{made['fingerprint'][:12]}); this one "
                f"has {len(samples)} rows and fingerprint {samples.fingerprint[:12]}",
                where=samples.where,
                remedy="plan again, with the same layout and caption_bin if the file is the same",
            )

    def save(self, path: str | Path, *, overwrite: bool = False) -> Path:
        """Write the plan folder: all of it or nothing."""
        with PlanWriter(path, overwrite=overwrite) as writer:
            for part in self.parts:
                writer.add(part)
            writer.finish(self.manifest, self.step_table)
        return Path(path)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan folder; every part is compared with its sha256.

        Raises:
            PlanInfeasible: a part is missing, truncated or changed. ConfigError: not a plan, or of another schema
                version.
        """
        folder = Path(path)
        manifest = read_manifest(folder)
        tables = {name: _read_part(folder / name, digest) for name, digest in sorted(manifest["parts"].items())}
        return Plan(manifest, [t for name, t in tables.items() if name != "steps.parquet"], tables["steps.parquet"])


def _dump(manifest: dict[str, Any]) -> bytes:
    """Canonical JSON."""
    return (json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def read_manifest(folder: Path) -> dict[str, Any]:
    """`manifest.json` of a plan folder, its version checked."""
    file = folder / "manifest.json"
    if not file.is_file():
        raise ConfigError(
            "this is not a plan folder: it has no manifest.json",
            where=str(folder),
            remedy="give the folder that `graphopt plan` or plan.save wrote",
        )
    try:
        manifest = json.loads(file.read_bytes())
    except ValueError as e:
        raise PlanInfeasible(f"manifest.json is not valid JSON: {e}", where=str(file), remedy="plan again") from e
    if not isinstance(manifest, dict) or manifest.get("schema_version") != SCHEMA_VERSION:
        raise ConfigError(
            f"the plan has schema version {manifest.get('schema_version') if isinstance(manifest, dict) else None}; "
            f"this graphopt reads version {SCHEMA_VERSION}",
            where=str(file),
            remedy="plan again",
        )
    return manifest


def _read_part(file: Path, digest: str) -> pa.Table:
    """One Parquet file, compared with the manifest."""
    if not file.is_file():
        raise PlanInfeasible(
            "a part of the plan is missing", where=str(file), remedy="copy the whole folder, or plan again"
        )
    data = file.read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise PlanInfeasible(
            "a part of the plan is corrupt: its sha256 is not the manifest's",
            where=str(file),
            remedy="copy the folder again, or plan again",
        )
    return pq.read_table(pa.BufferReader(data))


class PlanWriter:
    """Writes a plan folder part by part into a temporary folder beside it; only `finish` makes it appear."""

    def __init__(self, path: str | Path, *, overwrite: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not (
            overwrite and ((self.path / "manifest.json").is_file() or not any(self.path.iterdir()))
        ):
            raise ConfigError(
                "the plan's folder exists",
                where=str(path),
                remedy="choose another path" if overwrite else "choose another path, or overwrite=True",
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.digests: dict[str, str] = {}

    def __enter__(self) -> PlanWriter:
        self.temporary = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.", dir=self.path.parent))
        return self

    def __exit__(self, *exc: object) -> None:
        shutil.rmtree(self.temporary, ignore_errors=True)

    def _write(self, name: str, table: pa.Table) -> None:
        # Sample ids are random and do not compress; dictionaries would only cost time.
        pq.write_table(
            table,
            self.temporary / name,
            compression="zstd",
            use_dictionary=["step", "rank", "k", "shape"] if "k" in table.schema.names else False,
            write_statistics=["step", "rank"] if "k" in table.schema.names else False,
            row_group_size=1 << 18,
        )
        self.digests[name] = hashlib.sha256((self.temporary / name).read_bytes()).hexdigest()

    def add(self, part: pa.Table, number: int | None = None) -> None:
        """Write microbatches (schema `PART`): part `number` of the plan, the next one by default."""
        self._write(f"part-{len(self.digests) if number is None else number:05d}.parquet", part)

    def finish(self, manifest: dict[str, Any], step_table: pa.Table) -> dict[str, Any]:
        """Write the step table and the manifest, and rename the folder into place.  Returns the manifest with the
        digests."""
        parts = self.digests
        self.digests = {}
        self._write("steps.parquet", step_table)
        manifest["parts"] = {**self.digests, **parts}
        (self.temporary / "manifest.json").write_bytes(_dump(manifest))
        self.temporary.chmod(0o755)
        if self.path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{self.path.name}.old.", dir=self.path.parent))
            self.path.replace(old)
            self.temporary.replace(self.path)
            shutil.rmtree(old)
        else:
            self.temporary.replace(self.path)
        return manifest
