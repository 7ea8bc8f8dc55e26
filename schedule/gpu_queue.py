"""Other work in front of a GPU's queue, so that what is timed behind it does not wait for the host to launch it.

In the middle of an optimizer step the host is ahead of the GPU: a small microbatch behind a large one takes its
kernels' time, not its launches'.  Timed alone it takes the longer of the two.
"""

from __future__ import annotations

import math

import torch

SIZE = 8192  # of a square product: about 1.5 ms on an H200, so that a queue needs few launches of its own


class GpuQueue:
    """Matrix products to keep a GPU busy with.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self.a = torch.randn(SIZE, SIZE, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.a)
        self.bytes = self.a.nbytes + self.out.nbytes
        self.each_s = 1e-3
        self.fill(3e-3)  # the library chooses its kernel
        start = self.start(0.0)
        self.fill(5e-3)
        self.each_s = self.since(start) / 5

    def start(self, seconds: float) -> torch.cuda.Event:
        """Fill the queue, and mark its end."""
        self.fill(seconds)
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def since(self, start: torch.cuda.Event) -> float:
        """Seconds the GPU takes from the mark to the end of what is queued now; waits for it."""
        end = torch.cuda.Event(enable_timing=True)
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def fill(self, seconds: float) -> None:
        """Queue work of about so many seconds."""
        for _ in range(math.ceil(seconds / self.each_s)):
            torch.mm(self.a, self.a, out=self.out)
