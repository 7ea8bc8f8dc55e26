"""Objects in processes of their own: they compile beside one another and are timed one after the other."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any


class Child:
    """The parent's end: `ask` sends a call of one of the object's methods, `answer` waits for what it returns.

    make(*args) builds the object in the process, when it is first asked something.  An answer is a dict with the key
    "error" where a method raised or the process died.
    """

    def __init__(self, make: Callable[..., Any], *args: Any) -> None:
        context = get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, make, args), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, method: str, *args: Any) -> None:
        """Start a call."""
        with contextlib.suppress(OSError):  # it is gone: the answer says so
            self.pipe.send((method, *args))

    def answer(self) -> Any:
        """What the call returned."""
        try:
            return self.pipe.recv()
        except (EOFError, OSError):
            return {"error": "the process died"}

    def call(self, method: str, *args: Any) -> Any:
        """Ask and wait."""
        self.ask(method, *args)
        return self.answer()

    def end(self) -> None:
        """Let it go."""
        with contextlib.suppress(OSError):
            self.pipe.send(None)
        self.process.join()


def _serve(pipe: Connection, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    mine = None
    while (message := pipe.recv()) is not None:
        method, *rest = message
        try:
            if mine is None:
                mine = make(*args)
            pipe.send(getattr(mine, method)(*rest))
        except Exception as error:  # a system that raises is a result
            traceback.print_exc()
            text = str(error).splitlines() or [""]
            pipe.send({"error": f"{type(error).__name__}: {text[0][:300]}"})
