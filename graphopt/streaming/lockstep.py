"""Layer-major micro-batches: every micro-batch goes through a layer before any goes through the next.

    micro-batch 0: glue, layer 0 | 1: glue, layer 0 | .. | 0: glue, layer 1 | 1: glue, layer 1 | ..

Each micro-batch is called in a thread of its own, and one thread runs at a time: it hands over after every layer.  A
layer's weights are uploaded once for all of them; autograd's order (last layer first) does the same for the backward.
The threads end with the forward.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, TypeVar

import torch

from graphopt.errors import ConfigError

In = TypeVar("In")
Out = TypeVar("Out")
_here = threading.local()


class Abandoned(BaseException):
    """Another micro-batch has failed: this one stops where it is."""


class Group:
    """Micro-batches that take turns.  walks: for each order of layers, the places in its schedule that all share."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.walks: dict[tuple[str, ...], Any] = {}
        self.error: BaseException | None = None
        self._gates = [threading.Semaphore(0) for _ in range(size)]
        self._running = [True] * size

    def start(self) -> None:
        """Let the first one run."""
        self._gates[0].release()

    def await_turn(self, member: int) -> None:
        """Block until this one may go on."""
        self._gates[member].acquire()
        if self.error is not None:
            raise Abandoned

    def hand_over(self, member: int) -> bool:
        """Let the next one run; False if there is no other."""
        for step in range(1, self.size):
            other = (member + step) % self.size
            if self._running[other]:
                self._gates[other].release()
                return True
        return False

    def end(self, member: int, error: BaseException | None) -> None:
        """This one is done."""
        self._running[member] = False
        if error is not None and not isinstance(error, Abandoned):
            self.error = self.error or error
        self.hand_over(member)


def current() -> tuple[Group, int] | None:
    """The group and the place in it of the running thread."""
    return getattr(_here, "place", None)


def turn_over() -> None:
    """A layer has been called: the other micro-batches come first, until it is this one's turn again."""
    place = current()
    if place is not None and place[0].hand_over(place[1]):
        place[0].await_turn(place[1])


def layer_major(function: Callable[[In], Out], batches: Sequence[In]) -> list[Out]:
    """Call a function on each micro-batch, layer by layer; returns what it returned for each.

        losses = graphopt.layer_major(lambda batch: loss_of(step, batch) / len(batches), batches)
        sum(losses).backward()

    With a streamed model weights cross the link as often as for one batch, and gradients are added up in fp32 on the
    device and come down once: for HostAdamW this is one backward (`accumulate=1`).  Every micro-batch's layer inputs
    are kept until its backward.  Results are those of one micro-batch after the other, random numbers excepted: those
    are drawn in another order.  The function must not change state that its calls share.
    Raises ConfigError for no batches or inside another layer_major, and whatever the function raises.
    """
    batches = list(batches)
    if not batches:
        raise ConfigError("layer_major was given no micro-batches", remedy="pass at least one")
    if current() is not None:
        raise ConfigError("layer_major inside layer_major", remedy="use one for all micro-batches")
    if len(batches) == 1:
        return [function(batches[0])]
    group, results = Group(len(batches)), [None] * len(batches)
    settings = _settings()

    def run(member: int) -> None:
        _here.place = (group, member)
        error: BaseException | None = None
        try:
            group.await_turn(member)
            with settings():
                results[member] = function(batches[member])  # type: ignore[call-overload]
        except BaseException as e:
            error = e
        group.end(member, error)
        del error  # it holds this frame, and the other way round: what the failed forwards kept would stay

    threads = [threading.Thread(target=contextvars.copy_context().run, args=(run, m), name=f"graphopt-micro-{m}")
               for m in range(len(batches))]
    for t in threads:
        t.start()
    group.start()
    for t in threads:
        t.join()
    failed, group.error = group.error, None
    if failed is not None:
        try:
            raise failed
        finally:
            del failed
    return results  # type: ignore[return-value]


def _settings() -> Callable[[], AbstractContextManager[Any]]:
    """The calling thread's settings, for another thread: grad mode, autocast, device and stream."""
    grad, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    stream = torch.cuda.current_stream() if torch.cuda.is_available() and torch.cuda.is_initialized() else None

    def enter() -> AbstractContextManager[Any]:
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(grad))
        for device, enabled, dtype in casts:
            if enabled:
                stack.enter_context(torch.autocast(device, dtype=dtype, cache_enabled=cache))
        if stream is not None:
            stack.enter_context(torch.cuda.stream(stream))
        return stack

    return enter
