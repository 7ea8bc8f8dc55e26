"""Jobs that share a machine take turns: each waits for the files that the others make when they are through."""

from __future__ import annotations

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
