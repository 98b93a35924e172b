"""Memory for rollouts, used again once nobody holds a batch in it.

Memory just allocated costs five times memory used before (page faults), so blocks are recycled. A block is free when
the last tensor, view or array on it is gone: the storages of a batch keep a *lease* alive, an array that wraps the
block, and a finaliser on the lease gives the block back. Whatever the user keeps of a batch keeps its memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlcollect.layout import ALIGNMENT, Key, Layout, has_numpy

__all__ = ["BlockPool", "SameSlot", "Slot", "SlotSource"]

Array = np.ndarray[Any, Any]


class BlockPool:
    """Hands out blocks of one size; takes them back when they are let go.

    Args:
        nbytes: size of a block in bytes.
        keep: how many free blocks are kept for reuse; more than that are given back to the system. 0: none, ever.
    """

    def __init__(self, nbytes: int, *, keep: int = 2) -> None:
        self.nbytes = max(nbytes, 1)
        # a full deque drops its oldest block on append, and append is atomic: a finaliser may run in any thread
        self._free: deque[Array] = deque(maxlen=keep)

    def take(self) -> Array:
        """A lease on a block, uint8 `[nbytes]`. Its contents are whatever was there before."""
        try:
            block = self._free.pop()
        except IndexError:
            block = _aligned_block(self.nbytes)
        lease = np.frombuffer(block.data, np.uint8)
        weakref.finalize(lease, self._free.append, block).atexit = False
        return lease

    @property
    def num_free(self) -> int:
        """Blocks that wait for reuse."""
        return len(self._free)


def _aligned_block(nbytes: int) -> Array:
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes]


class Slot:
    """The memory of one rollout.

    Attributes:
        tensors: `[N, T, *shape]` by key, or `[T, *shape]` for a single lane.
        arrays: the same memory as numpy arrays `[N, T, *shape]`, a single lane too; keys whose dtype numpy lacks
            are missing.
    """

    def __init__(self, tensors: dict[Key, torch.Tensor], *, batched: bool, device: torch.device | None = None) -> None:
        self.tensors = tensors
        self._device = device
        self.arrays: dict[Key, Array] = {}
        for key, tensor in tensors.items():
            if has_numpy(tensor.dtype):
                array = tensor.numpy()
                self.arrays[key] = array if batched else array[None]
        self._batched = batched

    def batch(self, made: int) -> TensorDict:
        """The first `made` steps as a TensorDict around this memory. Keys that begin with `_` stay behind."""
        time = 1 if self._batched else 0
        first = next(iter(self.tensors.values()))
        tensors: Mapping[Key, torch.Tensor] = self.tensors
        if made != first.shape[time]:
            tensors = {key: tensor.narrow(time, 0, made) for key, tensor in tensors.items()}
        batch_size = [*first.shape[:time], made]
        nested: dict[str, Any] = {}
        for key, tensor in tensors.items():
            if not any(part.startswith("_") for part in key):
                level = nested
                for part in key[:-1]:
                    level = level.setdefault(part, {})
                level[key[-1]] = tensor
        return TensorDict(nested, batch_size=batch_size, names=[*[None] * time, "time"], device=self._device)


class SlotSource:
    """Where rollouts get their memory from.

    Args:
        layout: what a frame holds.
        num_lanes: N; None for a single lane, whose tensors are `[T, *shape]`.
        steps: T of a full rollout; a shorter one uses the beginning of a block.
        reuse: whether blocks that were let go are used again.
        device: what the batches say their device is: None, or the CPU.
    """

    def __init__(
        self,
        layout: Layout,
        num_lanes: int | None,
        steps: int,
        *,
        reuse: bool = True,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._layout = layout
        self._lead = () if num_lanes is None else (num_lanes,)
        self._steps = steps
        self._pool = BlockPool(layout.nbytes(*self._lead, steps), keep=2 if reuse else 0)

    def take(self, steps: int) -> Slot:
        """Memory for `steps` steps. A rollout longer than a full one gets memory of its own."""
        lead = (*self._lead, steps)
        pool = self._pool if steps <= self._steps else BlockPool(self._layout.nbytes(*lead), keep=0)
        return Slot(self._layout.carve(pool.take(), *lead), batched=bool(self._lead), device=self._device)


class SameSlot:
    """A source that gives the same memory, and the same TensorDict, each time.

    Args:
        source: where the memory comes from, once for each number of steps.
    """

    def __init__(self, source: SlotSource) -> None:
        self._source = source
        self._slots: dict[int, _Kept] = {}

    def take(self, steps: int) -> Slot:
        """The one slot of `steps` steps; only the last length that was asked for is kept."""
        if steps not in self._slots:
            self._slots = {steps: _Kept(self._source.take(steps))}
        return self._slots[steps]


class _Kept(Slot):
    def __init__(self, slot: Slot) -> None:
        self.tensors, self.arrays, self._batched, self._device = slot.tensors, slot.arrays, slot._batched, slot._device
        self._batch: TensorDict | None = None

    def batch(self, made: int) -> TensorDict:
        fresh = super().batch(made)
        if self._batch is None or self._batch.batch_size != fresh.batch_size:
            self._batch = fresh
        else:  # the user may have put other tensors in the place of ours
            self._batch.update(fresh)
        return self._batch
