"""Everything too long for CI: the tests marked `nightly`, then the benchmarks that need no GPU.

    python benchmarks/nightly.py [PART ...]

Writes results/<machine>/nightly.json: per part the exit code and the seconds.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from _results import save

ROOT = Path(__file__).resolve().parent.parent
NIGHTLY = [sys.executable, "-m", "pytest", "-q", "--nightly", "-m", "nightly"]
PARTS = {
    "graphopt": [*NIGHTLY, "tests/graphopt"],
    "passes": [*NIGHTLY, "tests/passes"],
    "schedule": [*NIGHTLY, "tests/schedule"],
    "codegen": [*NIGHTLY, "tests/codegen"],
    "kernels": ["env", "TRITON_INTERPRET=1", *NIGHTLY, "tests/codegen"],
    "kernel_matrix": ["env", "TRITON_INTERPRET=1", sys.executable, "benchmarks/kernel_matrix.py"],
    "inspect": [sys.executable, "benchmarks/inspect_zoo.py"],
    "zoo": [sys.executable, "benchmarks/zoo_matrix.py"],
    "zoo_count": [sys.executable, "benchmarks/zoo_count.py"],
    "match": [sys.executable, "benchmarks/match.py"],
}


def main() -> None:
    rows = []
    for name in sys.argv[1:] or PARTS:
        command = PARTS[name]
        start = time.perf_counter()
        done = subprocess.run(command, cwd=ROOT, check=False)
        rows.append(dict(part=name, exit_code=done.returncode, seconds=round(time.perf_counter() - start, 1)))
        save("nightly", rows, ("part",), {})
    sys.exit(any(r["exit_code"] for r in rows))


if __name__ == "__main__":
    main()
