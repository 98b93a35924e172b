"""Memory for steps of which not every row is a frame: written step by step, read out lane by lane.

It lies time-major, one block a key: rows of one step stand beside each other. `[M, S, *shape]` views make it a
rollout's memory for those that write to it. Behind the rows of all steps there are some more: one for each lane, for
rows whose result is still to come when the memory is used again.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from rlcollect.layout import Arrays, Key, Layout, has_numpy

__all__ = ["Scratch"]

Array = np.ndarray[Any, Any]


class Scratch:
    """The memory of S steps of M rows, and of one row a lane behind it.

    Attributes:
        tensors: `[M, S, *shape]` by key, or `[S, *shape]` for a single row without a dimension for it.
        arrays: the same memory as arrays `[M, S, *shape]`.
        flat: the same memory and the rows behind it, `[S * M + N, *shape]` by key: step t of row j is row t * M + j.

    Args:
        layout: what a row holds.
        steps: S.
        rows: M.
        lanes: N.
    """

    def __init__(self, layout: Layout, steps: int, rows: int, lanes: int) -> None:
        self.steps = steps
        block = np.zeros(layout.nbytes(steps * rows + lanes), np.uint8)
        self._block = block
        self.flat: dict[Key, torch.Tensor] = layout.carve(block, steps * rows + lanes)
        self.tensors = {
            key: flat[: steps * rows].view(steps, rows, *flat.shape[1:]).transpose(0, 1)
            for key, flat in self.flat.items()
        }
        self.arrays = Arrays(
            {key: tensor.numpy() for key, tensor in self.tensors.items() if has_numpy(tensor.dtype)}, remember=True
        )

    def read(self, key: Key, rows: Array, to: torch.Tensor, places: Array) -> None:
        """Copies rows of `flat` to places of another tensor `[K, *shape]`."""
        flat = self.flat[key]
        if has_numpy(flat.dtype):
            to.numpy()[places] = flat.numpy()[rows]
        else:
            to[torch.from_numpy(places)] = flat[torch.from_numpy(rows)]

    def copy_rows(self, rows: Array, to: Array) -> None:
        """Copies rows to other rows, all keys of them."""
        if len(rows):
            for key, flat in self.flat.items():
                self.read(key, rows, flat, to)
