"""Device time of one call, without the host's launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def replayed(f: Callable[[], Any], stream: torch.cuda.Stream | None = None, *, warmup: int = 5, rep: int = 40) -> float:
    """Median microseconds of one call, replayed from a CUDA graph; warmup and rep in milliseconds.

    A backward runs on the stream of its forward, so both must be captured on the same one: give it as `stream`.
    """
    from triton.testing import do_bench

    stream = stream or torch.cuda.Stream()
    with torch.cuda.stream(stream):
        f()
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        keep = f()
    us = 1e3 * do_bench(graph.replay, warmup=warmup, rep=rep, return_mode="median")
    del keep
    return us
