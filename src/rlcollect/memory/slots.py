"""Memory for rollouts, used again once nobody holds a batch in it.

Memory just allocated costs five times memory used before (page faults), so blocks are recycled. A block is free when
the last tensor, view or array on it is gone: the storages of a batch keep a *lease* alive, an array that wraps the
block, and the pool is told when that dies. Whatever the user keeps of a batch keeps its memory.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.layout import ALIGNMENT, Arrays, Key, Layout, has_numpy, is_private, nested
from rlcollect.processes.channel import Held

__all__ = ["Block", "BlockPool", "SameBatch", "SameSlot", "Slot", "SlotSource", "Source"]

Array = np.ndarray[Any, Any]
Batch = TypeVar("Batch", bound=TensorDictBase)
REMEMBERED_STEPS = 4096  # views of longer rollouts are not kept: they would weigh more than the data


class Block:
    """A piece of memory, and its arrays by their leading dimensions.

    Attributes:
        buffer: uint8 `[nbytes]`, aligned.
        arrays: by leading dimensions.
    """

    def __init__(self, nbytes: int) -> None:
        raw = np.empty(nbytes + ALIGNMENT, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        self.buffer: Array = raw[start : start + nbytes]
        self.arrays: dict[tuple[int, ...], Arrays] = {}


class BlockPool:
    """Hands out blocks of one size; takes them back when they are let go.

    Args:
        nbytes: size of a block in bytes.
        keep: how many free blocks are kept for reuse. 0: none, ever.
    """

    def __init__(self, nbytes: int, *, keep: int = 2) -> None:
        self.nbytes = max(nbytes, 1)
        self._keep = keep
        self._free: list[Block] = []
        self._out: dict[int, tuple[weakref.ref[Array], Block]] = {}  # by the id of the reference
        # appended to by the interpreter itself, from any thread: no code of ours runs where a Ctrl-C would be lost
        self._returned: deque[weakref.ref[Array]] = deque()

    def take(self) -> tuple[Array, Block]:
        """A lease, uint8 `[nbytes]`, and the block that it is on, whose contents are whatever was there before."""
        self._sort_returned()
        block = self._free.pop() if self._free else Block(self.nbytes)
        lease = np.frombuffer(block.buffer.data, np.uint8)
        if self._keep:
            with Held():  # or one would come back that nobody knows
                reference = weakref.ref(lease, self._returned.append)
                self._out[id(reference)] = reference, block
        return lease, block

    def _sort_returned(self) -> None:
        while self._returned:
            _, block = self._out.pop(id(self._returned.popleft()))
            if len(self._free) < self._keep:
                self._free.append(block)

    def forget(self) -> None:
        """No block will be asked for: those that are let go from now on go back to the system at once."""
        self._out.clear()
        self._returned.clear()
        self._free.clear()


class Slot:
    """The memory of one rollout.

    Attributes:
        tensors: `[N, T, *shape]` by key, or `[T, *shape]` for a single lane.
        arrays: the same memory as numpy arrays `[N, T, *shape]`, a single lane too; keys whose dtype numpy lacks
            are missing.
        lead: the dimensions of the batch before time, which make N.
    """

    def __init__(
        self, tensors: dict[Key, torch.Tensor], arrays: Arrays, *, lead: tuple[int, ...], device: torch.device | None
    ) -> None:
        self.tensors = tensors
        self.arrays = arrays
        self.lead = lead
        self._device = device
        self._flat: dict[Key, torch.Tensor] | None = None

    def flat(self) -> dict[Key, torch.Tensor]:
        """The tensors as `[N * T, *shape]`, lane after lane."""
        if self._flat is None:
            self._flat = {key: tensor.flatten(0, 1) for key, tensor in self.tensors.items()}
        return self._flat

    def part(self, start: int, stop: int) -> Slot:
        """The memory of some of its steps."""
        time = 1 if self.lead else 0
        tensors = {key: tensor.narrow(time, start, stop - start) for key, tensor in self.tensors.items()}
        arrays = Arrays({key: array[:, start:stop] for key, array in self.arrays.items()}, remember=False)
        return Slot(tensors, arrays, lead=self.lead, device=self._device)

    def batch(self, made: int) -> TensorDict:
        """The first `made` steps as a TensorDict around this memory. Keys that begin with `_` stay behind."""
        time = 1 if self.lead else 0
        first = next(iter(self.tensors.values()))
        tensors: Mapping[Key, torch.Tensor] = self.tensors
        if made != first.shape[time]:
            tensors = {key: tensor.narrow(time, 0, made) for key, tensor in tensors.items()}
        if len(self.lead) > 1:
            tensors = {key: tensor.view(*self.lead, *tensor.shape[1:]) for key, tensor in tensors.items()}
        kept = nested((key, tensor) for key, tensor in tensors.items() if not is_private(key))
        names = [*[None] * len(self.lead), "time"]
        return TensorDict(kept, batch_size=[*self.lead, made], names=names, device=self._device)


class SlotSource:
    """Where rollouts get their memory from.

    Args:
        layout: what a frame holds.
        num_lanes: N; None for a single lane, whose tensors are `[T, *shape]`.
        steps: T of a full rollout; a shorter one uses the beginning of a block.
        reuse: whether blocks that were let go are used again.
        device: what the batches say their device is: None, or the CPU.
        lead: the dimensions of batches before time, which make N; None: N itself.
    """

    def __init__(
        self,
        layout: Layout,
        num_lanes: int | None,
        steps: int,
        *,
        reuse: bool = True,
        device: torch.device | None = None,
        lead: tuple[int, ...] | None = None,
    ) -> None:
        self._layout = layout
        self._lead = () if num_lanes is None else (num_lanes,)
        self._shape = self._lead if lead is None else lead
        self._steps = steps
        self._device = device
        self._pool = BlockPool(layout.nbytes(*self._lead, steps), keep=2 if reuse else 0)

    def take(self, steps: int) -> Slot:
        """Memory for `steps` steps. A rollout longer than a full one gets memory of its own."""
        lead = (*self._lead, steps)
        pool = self._pool if steps <= self._steps else BlockPool(self._layout.nbytes(*lead), keep=0)
        lease, block = pool.take()
        if lead not in block.arrays:
            block.arrays[lead] = self._arrays(block, lead)
        tensors = self._layout.carve(lease, *lead)
        return Slot(tensors, block.arrays[lead], lead=self._shape, device=self._device)

    def _arrays(self, block: Block, lead: tuple[int, ...]) -> Arrays:
        """Arrays on the block itself, for our own use while a rollout is made: they are no lease."""
        tensors = self._layout.carve(block.buffer, *lead)
        arrays = {key: tensor.numpy() for key, tensor in tensors.items() if has_numpy(tensor.dtype)}
        whole = {key: array if self._lead else array[None] for key, array in arrays.items()}
        return Arrays(whole, remember=lead[-1] <= REMEMBERED_STEPS)

    def forget(self) -> None:
        """No more memory will be asked for."""
        self._pool.forget()


class Source(Protocol):
    """Gives the memory of rollouts."""

    def take(self, steps: int) -> Slot:
        """Memory for `steps` steps."""

    def forget(self) -> None:
        """No more memory will be asked for."""


class SameSlot:
    """A source that gives the same memory, and the same TensorDict, each time.

    Args:
        source: where the memory comes from, once for each number of steps.
    """

    def __init__(self, source: Source) -> None:
        self._source = source
        self._slots: dict[int, _Kept] = {}

    def take(self, steps: int) -> Slot:
        """The one slot of `steps` steps; only the last length that was asked for is kept."""
        if steps not in self._slots:
            self._slots = {steps: _Kept(self._source.take(steps))}
        return self._slots[steps]

    def forget(self) -> None:
        """No more memory will be asked for."""
        self._source.forget()


class SameBatch(Generic[Batch]):
    """One TensorDict that holds what each batch does, in turn; another one where the shape is another."""

    def __init__(self) -> None:
        self._batch: Batch | None = None

    def holding(self, fresh: Batch) -> Batch:
        """The one TensorDict, with the tensors of this batch."""
        if self._batch is None or self._batch.batch_size != fresh.batch_size:
            self._batch = fresh
        else:  # the user may have put other tensors in the place of ours
            self._batch.update(fresh)
        return self._batch


class _Kept(Slot):
    def __init__(self, slot: Slot) -> None:
        super().__init__(slot.tensors, slot.arrays, lead=slot.lead, device=slot._device)
        self._slot = slot
        self._same = SameBatch[TensorDict]()

    def batch(self, made: int) -> TensorDict:
        return self._same.holding(self._slot.batch(made))
