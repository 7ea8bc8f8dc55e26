"""Runs a script so that Ctrl-C at any moment, also while it imports torch, ends it with exit code 130 and one line.

    python _script.py SCRIPT ARGUMENTS ..        or    python _script.py -m MODULE ARGUMENTS ..

`graphopt bench` starts its scripts by it.  An import that is interrupted may fail with another exception (an extension
module turns KeyboardInterrupt into ImportError), so whatever ends the script after a Ctrl-C counts as interrupted.
Who starts it may hold SIGINT back (`signal.pthread_sigmask`): it is let through here, where it is caught.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from types import FrameType

INTERRUPTED = 130


def main() -> None:
    """Run what the command line names as `__main__`."""
    came = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        raise KeyboardInterrupt

    try:
        signal.signal(signal.SIGINT, on_interrupt)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        sys.argv = sys.argv[1:]
        if sys.argv[0] == "-m":
            sys.argv, sys.path[0] = sys.argv[1:], os.getcwd()
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
            runpy.run_path(sys.argv[0], run_name="__main__")
    except BaseException as end:
        code = end.code if isinstance(end, SystemExit) else None
        if not came or code == INTERRUPTED:  # the script's own answer to Ctrl-C stands
            raise
        print("interrupted; rows saved so far stay", file=sys.stderr, flush=True)
        os._exit(INTERRUPTED)  # modules that were half imported have exit handlers that fail


if __name__ == "__main__":
    main()
