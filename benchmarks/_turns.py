"""Jobs that share a machine: they compile beside one another, and wait for one another before they measure."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path


def wait_for(files: list[Path], seconds: float) -> None:
    """Return when all files are there.

    SystemExit after `seconds`: whoever makes the missing ones has died, or is still at it and may hold the memory.
    """
    end = time.monotonic() + seconds
    while missing := [str(f) for f in files if not f.exists()]:
        if time.monotonic() > end:
            raise SystemExit(f"--after: {', '.join(missing)} not there after {seconds:.0f} s: the job that makes it "
                             "has ended without, or goes on; nothing measured, run this one alone, without --after")
        time.sleep(0.05)


def compile_beside(command: list[str], workers: int) -> None:
    """Run `command i/n` for every share i of n at once, until all are through.  SystemExit if one fails."""
    for process in [subprocess.Popen([*command, f"{i}/{workers}"]) for i in range(workers)]:
        if process.wait():
            raise SystemExit(f"a process that compiles ended with {process.returncode}")
