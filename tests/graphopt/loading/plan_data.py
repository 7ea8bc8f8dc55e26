"""The data set and the plans of the loader's tests."""

import numpy as np
import torch

from graphopt.schedule.costmodel import CostFit
from graphopt.schedule.dataset import Samples
from graphopt.schedule.planner import plan_batches

FIT = CostFit.two_term(0.5, 2.43e-4, 9.2e-9)
ROWS = 300
TOKENS = np.random.default_rng(0).choice([256, 500, 1024, 4096, 9000, 20000], ROWS)


class Data(torch.utils.data.Dataset):
    def __init__(self, rows=ROWS, bad=(), missing=(), short=()):
        self.rows, self.bad, self.missing, self.short = rows, set(bad), set(missing), set(short)

    def __len__(self):
        return self.rows

    def __getitem__(self, row):
        if row in self.bad:
            raise OSError(f"truncated file {row}")
        if row in self.missing:
            return None
        return {"row": row, "tokens": int(TOKENS[row]) - (row in self.short)}


def make(ranks=2, **kw):
    return plan_batches(Samples.of_tokens(TOKENS), FIT, **{"ranks": ranks, "m_mem": 21000, **kw})


def read(loader):
    return [(mb.epoch, mb.step, loader.sampler.rank, mb.k, mb.samples) for _, mb in loader]
