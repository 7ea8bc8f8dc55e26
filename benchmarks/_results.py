"""Result files: one JSON per benchmark and machine; a newer run replaces the rows it measured and keeps the rest."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent


def machine() -> str:
    """A short name for this machine: the GPU's, or the number of CPUs."""
    if not torch.cuda.is_available():
        return f"cpu{os.cpu_count()}"
    return torch.cuda.get_device_name().split()[-1].lower()


def results_folder() -> Path:
    """Where result files go: this folder's results/ in a source tree, else GRAPHOPT_RESULTS or ./graphopt-results."""
    if "GRAPHOPT_RESULTS" in os.environ:
        return Path(os.environ["GRAPHOPT_RESULTS"])
    return ROOT / "results" if (ROOT.parent / "pyproject.toml").is_file() else Path("graphopt-results")


def commit() -> str:
    """The commit measured (GRAPHOPT_COMMIT where there is no git)."""
    if os.environ.get("GRAPHOPT_COMMIT"):
        return os.environ["GRAPHOPT_COMMIT"]
    done = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def triton_version() -> str | None:
    """Triton's version, None where it is not installed."""
    try:
        import triton
    except ImportError:
        return None
    return triton.__version__


def save(name: str, rows: list[dict[str, Any]], keys: tuple[str, ...], ceilings: dict[str, float],
         folder: Path | None = None, where: str | None = None) -> Path:
    """Merge rows into <folder>/<name>.json (results/<where>/ by default, where: this machine).  `keys` identify a row.

    Several processes may save into one file.
    """
    where = where or machine()
    folder = folder or results_folder() / where
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / f".{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _merge(folder / f"{name}.json", rows, keys, ceilings, where)


def command(argv: list[str]) -> str:
    """What was typed, without where its rows go: they stand in that file."""
    words = [w for i, w in enumerate(argv[1:], 1) if not {w, argv[i - 1]} & {"--out", "--state"}]
    return " ".join(["python", f"benchmarks/{Path(argv[0]).name}", *words])


def _merge(path: Path, rows: list[dict[str, Any]], keys: tuple[str, ...], ceilings: dict[str, float],
           where: str) -> Path:
    old = json.loads(path.read_text()) if path.exists() else {"rows": [], "ceilings": {}}
    now = commit()
    rows = [{**r, "commit": now} for r in rows]
    identity = lambda r: json.dumps([r.get(k) for k in keys])
    fresh = {identity(r) for r in rows}
    result = {
        "name": path.stem, "machine": where, "commit": now, "torch": torch.__version__, "triton": triton_version(),
        "command": command(sys.argv),
        "date": datetime.date.today().isoformat(), "ceilings": {**old["ceilings"], **ceilings},
        "rows": [r for r in old["rows"] if identity(r) not in fresh] + rows,
    }
    part = path.with_suffix(".json.part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    os.replace(part, path)
    return path


def kept_times(name: str, rows: list[dict[str, Any]], keys: tuple[str, ...], folder: Path | None = None) -> list[dict]:
    """Rows with the times of systems that were measured earlier and not now; `us_commit` says when."""
    path = (folder or results_folder() / machine()) / f"{name}.json"
    old = json.loads(path.read_text())["rows"] if path.exists() else []
    out = []
    for row in rows:
        same = [o for o in old if [o.get(k) for k in keys] == [row.get(k) for k in keys]]
        before = same[-1] if same else {"us": {}}
        kept = {s: t for s, t in before["us"].items() if s not in row["us"]}
        commits = {s: before.get("us_commit", {}).get(s, before.get("commit")) for s in kept}
        extra = {k: before[k] for k in ("roofline",) if k in before and k not in row}
        out.append({**extra, **row, "us": {**row["us"], **kept}, **({"us_commit": commits} if commits else {})})
    return out


def copy_tb_per_s() -> float:
    """Device-to-device copy of 2.1 GB, bytes read plus bytes written."""
    from triton.testing import do_bench

    a = torch.empty(1 << 30, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a)
    ms = do_bench(lambda: b.copy_(a), warmup=20, rep=200, return_mode="median")
    return 2 * a.nbytes / ms / 1e9
