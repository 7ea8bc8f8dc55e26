"""Runs a command or a script so that Ctrl-C at any moment, also while it imports torch, ends it with exit code 130.

    python _script.py SCRIPT ARGUMENTS ..        or    python _script.py -m MODULE ARGUMENTS ..

`graphopt bench` starts its scripts so; `graphopt` itself is run by `answering`.  While a module is imported,
KeyboardInterrupt is not to be relied on: import statements in `try` swallow it, an extension module turns it into
ImportError.  So there the process ends at once: nothing is written while a module is imported.  Later the program gets
its KeyboardInterrupt, and whatever it ends with counts as interrupted.
Who starts it may hold SIGINT back (`signal.pthread_sigmask`): it is let through here, where it is caught.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from types import FrameType

INTERRUPTED = 130


def importing(frame: FrameType | None) -> bool:
    """Whether an import statement is being run somewhere below this frame."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            return True
        frame = frame.f_back
    return False


def leave(line: str) -> None:
    """One line, and out: modules that were half imported have exit handlers that fail."""
    print(line, file=sys.stderr, flush=True)
    os._exit(INTERRUPTED)


def answering(run: Callable[[], None], line: str) -> None:
    """Call `run`; after a Ctrl-C the process ends with 130 and the line, unless `run` itself ended with 130."""
    came = False

    def on_interrupt(signum: int, frame: FrameType | None) -> None:
        nonlocal came
        came = True
        if importing(frame):
            leave(line)
        raise KeyboardInterrupt

    try:
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # started in the background
            signal.signal(signal.SIGINT, on_interrupt)
        if hasattr(signal, "pthread_sigmask"):
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        run()
    except BaseException as end:
        code = end.code if isinstance(end, SystemExit) else None
        if not came or code == INTERRUPTED:  # the program's own answer to Ctrl-C stands
            raise
        leave(line)
    if came:
        leave(line)


def main() -> None:
    """Run what the command line names as `__main__`."""
    sys.argv = sys.argv[1:]
    if sys.argv[0] == "-m":
        sys.argv, sys.path[0] = sys.argv[1:], os.getcwd()
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    answering(main, "interrupted; rows saved so far stay")
