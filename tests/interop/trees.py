"""Sum and minimum trees in numpy, in the place of TorchRL's where its compiled part cannot be loaded.

TorchRL's wheels are built for one release of torch; with another they import without their C++, and prioritised
samplers cannot be made. All else of them is Python, and runs on these.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torchrl.data.replay_buffers.samplers import prioritized

__all__ = ["lend_trees"]


class _Tree:
    neutral = 0.0
    dtype: Any = np.float32

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._values = np.full(capacity, self.neutral, self.dtype)

    def __getitem__(self, index: Any) -> Any:
        found = self._values[np.asarray(index)]
        return torch.as_tensor(found) if np.ndim(found) else float(found)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._values[np.asarray(index)] = np.asarray(value)


class _Sum(_Tree):
    def query(self, left: int, right: int) -> float:
        return float(self._values[left:right].sum())

    def scan_lower_bound(self, mass: Any) -> Any:
        found = np.searchsorted(np.cumsum(self._values, dtype=np.float64), np.asarray(mass))
        return torch.as_tensor(np.minimum(found, self.capacity - 1))


class _Min(_Tree):
    neutral = np.inf

    def query(self, left: int, right: int) -> float:
        return float(self._values[left:right].min(initial=np.inf))


def lend_trees(monkeypatch: Any) -> None:
    """Puts these where TorchRL's own are missing."""
    if prioritized.SumSegmentTreeFp32 is not None:
        return
    for name, kind in (("SumSegmentTree", _Sum), ("MinSegmentTree", _Min)):
        for width, dtype in (("Fp32", np.float32), ("Fp64", np.float64)):
            monkeypatch.setattr(prioritized, f"{name}{width}", type(name, (kind,), {"dtype": dtype}))
