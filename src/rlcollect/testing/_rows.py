"""The rows of a batch, lane by lane, each with the row before it.

Everything that the invariants look at comes from here as tensors `[lanes, time, ...]`. Where a batch before this one
is given, its rows stand in front, so the border between the two is a pair like any other. Rows that the mask
calls invalid are stepped over: the row before one is the newest *valid* one of its lane.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Final, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = [
    "DONE",
    "IDS",
    "INIT",
    "MASK",
    "NEXT_DONE",
    "NEXT_STEPS",
    "NEXT_TERMINATED",
    "STEPS",
    "VERSION",
    "Key",
    "Rows",
    "quoted",
    "stack_rows",
]

Key: TypeAlias = tuple[str, ...]

DONE: Final[Key] = ("done",)
NEXT_DONE: Final[Key] = ("next", "done")
NEXT_TERMINATED: Final[Key] = ("next", "terminated")
IDS: Final[Key] = ("collector", "traj_ids")
VERSION: Final[Key] = ("collector", "policy_version")
MASK: Final[Key] = ("collector", "mask")
STEPS: Final[Key] = ("step_count",)
NEXT_STEPS: Final[Key] = ("next", "step_count")
INIT: Final[Key] = ("is_init",)


def quoted(key: Key) -> str:
    """The key as a user writes it: `'done'`, `('next', 'done')`."""
    return repr(key[0]) if len(key) == 1 else repr(key)


@dataclass(frozen=True)
class Rows:
    """Rows of all lanes, in time order.

    Attributes:
        leaves: key -> tensor `[lanes, time, *shape]`, on the CPU.
        observed: the observation keys, each of which is a leaf and, below "next", another.
        valid: `[lanes, time]`, which rows are frames.
        border: how many rows of each lane belong to the batch before.
    """

    leaves: Mapping[Key, Tensor]
    observed: tuple[Key, ...]
    valid: Tensor
    border: int

    def column(self, key: Key) -> Tensor:
        """A leaf that has one value a row, as `[lanes, time]`."""
        return self.leaves[key].reshape(self.valid.shape)

    def before(self, values: Tensor) -> Tensor:
        """The values `[lanes, time, ...]` of the row before each row; meaningless where `pairs` is False."""
        lanes = torch.arange(values.shape[0]).unsqueeze(1)
        return values[lanes, self.row_before.clamp(min=0)]

    @cached_property
    def row_before(self) -> Tensor:
        """Time index `[lanes, time]` of the newest valid row before each row; -1 where there is none."""
        times = torch.arange(self.valid.shape[1]).expand_as(self.valid)
        newest = torch.where(self.valid, times, -1).cummax(dim=1).values
        return torch.cat([torch.full_like(newest[:, :1], -1), newest[:, :-1]], dim=1)

    @cached_property
    def pairs(self) -> Tensor:
        """Valid rows that have a valid row before them."""
        return self.valid & (self.row_before >= 0)

    @cached_property
    def across(self) -> Tensor:
        """Pairs of which the row before belongs to the batch before."""
        times = torch.arange(self.valid.shape[1])
        return self.pairs & (self.row_before < self.border) & (times >= self.border)

    @cached_property
    def after_done(self) -> Tensor:
        """Pairs of which the row before is done."""
        return self.pairs & self.before(self.column(NEXT_DONE))

    @cached_property
    def same_id(self) -> Tensor:
        """Pairs of one trajectory id; needs ids."""
        ids = self.column(IDS)
        return self.pairs & (ids == self.before(ids))

    @cached_property
    def continues(self) -> Tensor:
        """Rows known to go on with the episode of the row before."""
        return self.same_id if IDS in self.leaves else self.pairs & ~self.after_done

    @cached_property
    def begins(self) -> Tensor:
        """Rows known to be the first of an episode, because the row before belongs to another.

        Without ids, a done frame at the border does not tell: it may be a soft truncation.
        """
        return self.pairs & ~self.same_id if IDS in self.leaves else self.after_done & ~self.across


def stack_rows(batches: Iterable[TensorDictBase], keys: Iterable[Key], observed: tuple[Key, ...]) -> Rows:
    """Rows of one batch, or of two neighbours in time order.

    Args:
        batches: one or two batches with the same lanes.
        keys: the leaves to take; all but the mask must be there in each batch.
        observed: the observation keys among them.
    """
    batches = tuple(batches)
    leaves = {key: _joined([batch.get(key) for batch in batches], batches) for key in keys if key != MASK}
    valid = _joined([_mask(batch) for batch in batches], batches)
    return Rows(leaves, observed, valid, border=sum(batch.batch_size[-1] for batch in batches[:-1]))


def _mask(batch: TensorDictBase) -> Tensor:
    mask: Tensor | None = batch.get(MASK, None)
    return torch.ones(batch.batch_size, dtype=torch.bool) if mask is None else mask


def _joined(values: list[Tensor], batches: tuple[TensorDictBase, ...]) -> Tensor:
    """Values of neighbouring batches as one tensor `[lanes, time, *shape]`."""
    parts = [_by_lane(value, batch.batch_size) for value, batch in zip(values, batches, strict=True)]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def _by_lane(value: Tensor, batch_size: torch.Size) -> Tensor:
    *lanes, time = batch_size
    return value.detach().cpu().reshape(math.prod(lanes), time, *value.shape[len(batch_size) :])
