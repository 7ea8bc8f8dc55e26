"""Sample shapes: pixels in, latent tokens out.

A sample's *shape* is its token grid (T, H, W) after the VAE and the patch embedding, and the caption length L its
batch is padded to.  Two samples can share a microbatch only if all four agree, so every cost, memory and batch limit
of a plan is a
column over shapes and never over samples: a hundred shapes describe ten million rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from graphopt.errors import ConfigError


@dataclass(frozen=True)
class LatentLayout:
    """How pixels become tokens.

    Args:
        vae: downsampling of the VAE in (frames, height, width).  Frames are causal: F frames give 1 + (F - 1) //
            vae[0].
        patch: patch size of the transformer in (frames, height, width).

    The defaults are those of Wan 2.1 and HunyuanVideo.
    """

    vae: tuple[int, int, int] = (4, 8, 8)
    patch: tuple[int, int, int] = (1, 2, 2)

    def __post_init__(self) -> None:
        for name, triple in (("vae", self.vae), ("patch", self.patch)):
            if len(triple) != 3 or any(int(x) != x or x < 1 for x in triple):
                raise ConfigError(
                    f"{name} must be three positive integers (frames, height, width), not {triple!r}",
                    where=f"LatentLayout({name}=...)",
                )

    def grid(
        self, frames: np.ndarray, height: np.ndarray, width: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Token grid (T, H, W) of each sample; what does not fill a patch is cut off, as the trainers do.

        Args:
            frames, height, width: int64 arrays of pixels sizes, [rows].
        """
        t = (1 + (frames - 1) // self.vae[0]) // self.patch[0]
        return t, height // (self.vae[1] * self.patch[1]), width // (self.vae[2] * self.patch[2])


@dataclass(frozen=True)
class ShapeTable:
    """The distinct shapes of a data set.

    Args:
        t, h, w: token grid, int64 [shapes].
        caption: padded caption tokens L, int64 [shapes] (0 when the data set has none).
    """

    t: np.ndarray
    h: np.ndarray
    w: np.ndarray
    caption: np.ndarray

    def __len__(self) -> int:
        return len(self.t)

    @property
    def tokens(self) -> np.ndarray:
        """S = T * H * W, int64 [shapes]."""
        return self.t * self.h * self.w

    def name(self, i: int) -> str:
        """`T x H x W` of shape i, with its caption length if it has one."""
        grid = f"{self.t[i]}x{self.h[i]}x{self.w[i]}"
        return f"{grid}+{self.caption[i]}" if self.caption[i] else grid

    def to_json(self) -> list[list[int]]:
        """One [T, H, W, L] per shape."""
        return np.stack([self.t, self.h, self.w, self.caption], 1).tolist()

    @staticmethod
    def of(rows: list | np.ndarray) -> ShapeTable:
        """From [T, H, W, L] rows, as `to_json` gives them."""
        a = np.asarray(rows, dtype=np.int64).reshape(-1, 4)
        return ShapeTable(*(np.ascontiguousarray(a[:, i]) for i in range(4)))

    @staticmethod
    def of_tokens(tokens: list[int] | np.ndarray, caption: int = 0) -> ShapeTable:
        """Shapes known by their token count only (T = S, H = W = 1)."""
        s = np.asarray(tokens, dtype=np.int64)
        one = np.ones_like(s)
        return ShapeTable(s, one, one, np.full_like(s, caption))
