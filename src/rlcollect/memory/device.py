"""Memory for rollouts whose frames are made on another device: tensors there, what is worked out about them here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlcollect.layout import Arrays, Key, Layout, Leaf, numpy_dtype
from rlcollect.memory.slots import Slot

__all__ = ["DeviceSlot", "DeviceSource"]

Array = np.ndarray[Any, Any]


class DeviceSlot(Slot):
    """A slot whose tensors are on a device, and whose arrays are copied into some of them when the batch is made."""

    def batch(self, made: int) -> TensorDict:
        """See `Slot`."""
        for key, array in self.arrays.items():
            tensor = self.tensors[key]
            tensor.copy_(torch.from_numpy(array if self.lead else array[0]))
        return super().batch(made)


class DeviceSource:
    """Where rollouts on a device get their memory from. The device's own allocator uses it again.

    Args:
        layout: what a frame holds.
        on_host: the keys that are written here, as arrays, and copied to the device with the batch.
        num_lanes: N; None for a single lane.
        lead: the dimensions of batches before time.
        device: where the frames are made.
    """

    def __init__(
        self,
        layout: Layout,
        on_host: Collection[Key],
        *,
        num_lanes: int | None,
        lead: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self._leaves = layout.leaves
        self._on_host = frozenset(on_host)
        self._lead = () if num_lanes is None else (num_lanes,)
        self._shape = lead
        self._device = device

    def take(self, steps: int) -> DeviceSlot:
        """Memory for `steps` steps."""
        tensors = {leaf.key: self._new(leaf, steps) for leaf in self._leaves}
        arrays = {
            leaf.key: np.zeros((*(self._lead or (1,)), steps, *leaf.shape), numpy_dtype(leaf.dtype))
            for leaf in self._leaves
            if leaf.key in self._on_host
        }
        return DeviceSlot(tensors, Arrays(arrays, remember=False), lead=self._shape, device=self._device)

    def _new(self, leaf: Leaf, steps: int) -> torch.Tensor:
        return torch.empty((*self._lead, steps, *leaf.shape), dtype=leaf.dtype, device=self._device)

    def forget(self) -> None:
        """Nothing is kept here."""
