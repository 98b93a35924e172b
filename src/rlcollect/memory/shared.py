"""Slots in memory that processes share, and how a batch is taken out of them.

A *group* is the memory of one rollout of several workers, its *members*, key by key: `[M, N, T, *shape]`. Each worker
writes its own member in place. A group that is full is a batch of all of them, as it stands; or it is copied, in one
piece, to memory that is the user's. Knows nothing of processes: the memory is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from rlcollect.layout import Arrays, Key, Layout, Leaf, has_numpy, is_private, nested
from rlcollect.memory.slots import REMEMBERED_STEPS, BlockPool, Slot

__all__ = ["Form", "Groups", "MemberSource", "SlotPlan"]

Array = np.ndarray[Any, Any]
Form = Callable[[dict[Key, torch.Tensor], int], TensorDict]


@dataclass(frozen=True)
class SlotPlan:
    """How shared memory is divided.

    Attributes:
        leaves: what a frame holds.
        groups: how many there are.
        members: M, of each.
        lead: the dimensions of a worker's batch before time.
        num_lanes: N, their product; None: a single lane, without a dimension for it.
        steps: T of a full rollout; a shorter one uses the beginning of a group.
    """

    leaves: Sequence[Leaf]
    groups: int
    members: int
    lead: tuple[int, ...]
    num_lanes: int | None
    steps: int

    @property
    def group_bytes(self) -> int:
        """Bytes of a group."""
        return self.bytes_of(self.steps)

    def bytes_of(self, steps: int) -> int:
        """Bytes of a group that holds so many steps."""
        return Layout(self.leaves).nbytes(*self._shape(steps))

    @property
    def nbytes(self) -> int:
        """Bytes of all groups."""
        return self.groups * self.group_bytes

    def group(self, buffer: Array, number: int) -> Array:
        """The bytes of a group."""
        return buffer[number * self.group_bytes : (number + 1) * self.group_bytes]

    def carve(self, group: Array, steps: int) -> dict[Key, torch.Tensor]:
        """`[M, N, steps, *shape]` by key (`[M, steps, *shape]` for a single lane), on these bytes."""
        return Layout(self.leaves).carve(group, *self._shape(steps))

    def _shape(self, steps: int) -> tuple[int, ...]:
        return (self.members, *(() if self.num_lanes is None else (self.num_lanes,)), steps)


class _MemberSlot(Slot):
    """A slot whose TensorDict is made once: its memory stays the same."""

    def __init__(self, tensors: dict[Key, torch.Tensor], arrays: Arrays, *, lead: tuple[int, ...]) -> None:
        super().__init__(tensors, arrays, lead=lead, device=None)
        self._made: tuple[int, TensorDict] | None = None

    def batch(self, made: int) -> TensorDict:
        if self._made is None or self._made[0] != made:
            self._made = made, super().batch(made)
        return self._made[1]


class MemberSource:
    """Gives a worker the memory of its member, in the group that was chosen.

    Attributes:
        taken: how many steps the memory that was given last is divided for.

    Args:
        plan: how the memory is divided.
        buffer: the memory.
        member: which of each group.
    """

    def __init__(self, plan: SlotPlan, buffer: Array, member: int) -> None:
        self._plan = plan
        self._buffer = buffer
        self.taken = plan.steps
        self._member = member
        self._group = 0
        self._slots: dict[tuple[int, int], _MemberSlot] = {}

    def choose(self, group: int) -> None:
        """The next rollout goes there."""
        self._group = group

    def take(self, steps: int) -> Slot:
        """The memory for `steps` steps."""
        at, self.taken = (self._group, steps), steps
        if at not in self._slots:
            if steps != self._plan.steps:  # only full ones are kept
                self._slots = {key: slot for key, slot in self._slots.items() if key[1] == self._plan.steps}
            self._slots[at] = self._new(steps)
        return self._slots[at]

    def _new(self, steps: int) -> _MemberSlot:
        group = self._plan.group(self._buffer, self._group)
        tensors = {key: tensor[self._member] for key, tensor in self._plan.carve(group, steps).items()}
        arrays = {key: tensor.numpy() for key, tensor in tensors.items() if has_numpy(tensor.dtype)}
        if self._plan.num_lanes is None:
            arrays = {key: array[None] for key, array in arrays.items()}
        kept = Arrays(arrays, remember=steps <= REMEMBERED_STEPS)
        return _MemberSlot(tensors, kept, lead=self._plan.lead)

    def forget(self) -> None:
        """Nothing is kept here that the pool does not keep."""


@dataclass(frozen=True)
class _Prepared:
    steps: int
    lease: Array
    tensors: dict[Key, torch.Tensor]
    batch: TensorDict


class Groups:
    """What a collector makes batches of.

    Args:
        plan: how the memory is divided.
        buffer: the memory; empty where rollouts come beside the word of them.
        reuse: whether memory that the user let go of is used again.
        device: what batches say their device is.
        most: members of the largest batch that is made of several groups.
    """

    def __init__(
        self, plan: SlotPlan, buffer: Array, *, reuse: bool, device: torch.device | None, most: int = 1
    ) -> None:
        self._plan = plan
        self._buffer = buffer
        self._device = device
        self._pool = BlockPool(max(plan.group_bytes, replace(plan, members=most).group_bytes), keep=2 if reuse else 0)
        self._prepared: _Prepared | None = None

    def bytes_of(self, group: int, beside: Array | None) -> Array:
        """Where a rollout lies: in what came beside the word of it, or else in its group."""
        return self._plan.group(self._buffer, group) if beside is None else beside

    def shown(self, data: Array, steps: int) -> dict[Key, torch.Tensor]:
        """The tensors of these bytes as they are: overwritten when they are used again."""
        return self._plan.carve(data, steps)

    def prepare(self, steps: int, form: Form) -> None:
        """Makes a batch of somebody's own ahead, while there is nothing else to do: only its values are lacking.

        Args:
            steps: T.
            form: `stacked`, `single`, or a way to be `joined`.
        """
        if self._prepared is None or self._prepared.steps != steps:
            lease, _ = self._pool.take()
            tensors = self._plan.carve(lease, steps)
            self._prepared = _Prepared(steps, lease[: self._plan.bytes_of(steps)], tensors, form(tensors, steps))

    def owned(self, data: Array, steps: int, made: int, form: Form) -> tuple[dict[Key, torch.Tensor], TensorDict]:
        """A copy of these bytes, in memory that belongs to who holds it.

        Args:
            data: of a group.
            steps: that they are divided for.
            made: how many of them are in the batch.
            form: see `prepare`.

        Returns:
            Its tensors, all steps of them, and the batch on the same memory.
        """
        self.prepare(steps, form)
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        np.copyto(prepared.lease, data[: len(prepared.lease)])
        return prepared.tensors, prepared.batch if made == steps else form(prepared.tensors, made)

    def stacked(self, tensors: dict[Key, torch.Tensor], made: int) -> TensorDict:
        """As a batch `[M, *lead, made]`; keys that begin with `_` stay behind."""
        members = len(next(iter(tensors.values())))
        return self._batch(tensors, (members, *self._plan.lead), made)

    def single(self, tensors: dict[Key, torch.Tensor], made: int) -> TensorDict:
        """Of a group with one member: as its batch `[*lead, made]`."""
        return self._batch({key: tensor[0] for key, tensor in tensors.items()}, self._plan.lead, made)

    def joined(self, tensors: dict[Key, torch.Tensor], made: Sequence[int], dim: int) -> TensorDict:
        """As a batch of all members one after the other, in a dimension of their batches: a copy, but in the first.

        Args:
            tensors: `[M, N, T, *shape]` by key.
            made: steps of each member: so many are in the batch where they are joined in time, else the most of all.
            dim: counted from 0; that of time comes last.
        """
        lead, members, most = self._plan.lead, len(made), max(made)
        split = {key: tensor.view(members, *lead, *self._behind(tensor)) for key, tensor in tensors.items()}
        shape = [*lead, most]
        if dim == len(lead):
            shape[dim] = sum(made)
        else:
            shape[dim] *= members
        if dim == len(lead) and min(made) < most:
            joined = {
                key: torch.cat([part.narrow(dim, 0, steps) for part, steps in zip(tensor, made, strict=True)], dim)
                for key, tensor in split.items()
            }
            return self._named(joined, shape)
        cut = {key: tensor.narrow(1 + len(lead), 0, most) for key, tensor in split.items()}
        if dim:
            joined = {key: torch.cat(tensor.unbind(0), dim) for key, tensor in cut.items()}
        else:
            joined = {key: tensor.flatten(0, 1) for key, tensor in cut.items()}
        return self._named(joined, shape)

    def picked(self, parts: Sequence[Array | None], steps: int) -> dict[Key, torch.Tensor]:
        """Copies of several groups with one member each, as those of one with several: `[M, N, T, *shape]` by key.

        Args:
            parts: the bytes of each, in order; None: what is there in its place is to be written yet.
            steps: that all are divided for.
        """
        lease, _ = self._pool.take()
        plan = replace(self._plan, members=len(parts))
        tensors = plan.carve(lease, steps)
        for member, data in enumerate(parts):
            if data is not None:
                for key, tensor in self.shown(data, steps).items():
                    tensors[key][member].copy_(tensor[0])
        return tensors

    def _behind(self, tensor: torch.Tensor) -> torch.Size:
        return tensor.shape[1:] if self._plan.num_lanes is None else tensor.shape[2:]

    def _batch(self, tensors: dict[Key, torch.Tensor], lead: tuple[int, ...], made: int) -> TensorDict:
        count = 0 if self._plan.num_lanes is None else 1
        count += len(lead) - len(self._plan.lead)  # members
        first = next(iter(tensors.values()))
        if first.shape[count] != made:
            tensors = {key: tensor.narrow(count, 0, made) for key, tensor in tensors.items()}
        if len(lead) != count:
            tensors = {key: tensor.view(*lead, *tensor.shape[count:]) for key, tensor in tensors.items()}
        return self._named(tensors, [*lead, made])

    def _named(self, tensors: dict[Key, torch.Tensor], shape: Sequence[int]) -> TensorDict:
        kept = nested((key, tensor) for key, tensor in tensors.items() if not is_private(key))
        names = [*[None] * (len(shape) - 1), "time"]
        return TensorDict(kept, batch_size=list(shape), names=names, device=self._device)

    def forget(self) -> None:
        """No more batches will be asked for soon."""
        self._prepared = None
        self._pool.forget()

    def let_go(self) -> None:
        """No more batches will be asked for: no view of the memory is kept."""
        self.forget()
        self._buffer = np.zeros(0, np.uint8)
