"""A table of clips for the tests of this folder."""

import numpy as np
import pyarrow as pa


def rows(n=300, seed=0):
    rng = np.random.default_rng(seed)
    video = rng.random(n) < 0.5
    return pa.table(
        {
            "id": [f"clip{i}" for i in range(n)],
            "frames": np.where(video, rng.choice([17, 49, 81], n), 1),
            "height": np.where(video, 480, 512),
            "width": np.where(video, 832, 512),
        }
    )
