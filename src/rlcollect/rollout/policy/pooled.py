"""The state of a policy that is called on some of the lanes at a time: kept by lane, shown by row."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Key
from rlcollect.rollout.policy.carried import Carried, PolicyState, alike, whole

__all__ = ["PooledState"]

Array = np.ndarray[Any, Any]


class PooledState(PolicyState):
    """A `PolicyState` whose M rows stand for other ones of the N lanes at each step.

    `enter` is called before every step that the policy acts in.

    Args:
        carried: the parts.
        num_rows: M.
        num_lanes: N.
        device: where the policy computes.
        given: initial values that the user gave, by key.
    """

    def __init__(
        self,
        carried: Sequence[Carried],
        num_rows: int,
        num_lanes: int,
        device: torch.device,
        given: Mapping[Key, torch.Tensor] | None = None,
    ) -> None:
        super().__init__(carried, num_rows, device, given)
        self._by_lane = [initial[0].expand(num_lanes, *initial.shape[1:]).clone() for initial in self._initial]
        self._row_lanes: Array = np.zeros((0, num_rows), np.int64)
        self._memory: RolloutMemory | None = None
        self._lanes = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def bind_rows(self, memory: RolloutMemory, row_lanes: Array) -> None:
        """A rollout begins.

        Args:
            memory: where the state of each row is recorded.
            row_lanes: int64 `[S, M]`, whose row it is; it grows.
        """
        self._memory, self._row_lanes = memory, row_lanes
        self._forget(row_lanes[0, self._fresh])

    def enter(self, t: int) -> None:
        """Frame t is next, and the policy acts: it is shown the state of the lanes whose rows there are."""
        for start, row in self._starts[self._seen :]:
            self._forget(self._row_lanes[start + 1, [row]])
        self._seen = len(self._starts)
        self._lanes = torch.from_numpy(self._row_lanes[t].astype(np.int64)).to(self._lanes.device)
        for kept, state in zip(self._by_lane, self._kept[self.turn], strict=True):
            state.copy_(kept[self._lanes])
        newest = itertools.takewhile(lambda start: start[0] == t - 1, reversed(self._starts))
        self._mark([row for _, row in newest] if t else self._fresh)
        self._entered = True
        assert self._memory is not None
        for part, state in zip(self._carried, self._kept[self.turn], strict=True):
            if part.is_recorded:
                now = whole(self._memory, part.key, batched=True)
                now[:, t] = alike(state, now)

    def _forget(self, lanes: Array) -> None:
        """Episodes begin in these lanes."""
        for kept, initial in zip(self._by_lane, self._initial, strict=True):
            kept[torch.from_numpy(lanes.astype(np.int64)).to(kept.device)] = initial[0]

    def keep(self, written: Sequence[Any]) -> None:
        """Takes the next state, in the order of `sources`."""
        super().keep(written)
        self._put_away()

    def blank_lanes(self, lanes: list[int]) -> None:
        """Chance acted in these rows: their state stays as it was in the beginning."""
        super().blank_lanes(lanes)
        self._put_away()

    def _put_away(self) -> None:
        for kept, state in zip(self._by_lane, self._kept[self.turn], strict=True):
            kept[self._lanes] = state

    def fill(self, memory: RolloutMemory, made: int) -> None:  # noqa: ARG002
        """All is recorded already."""
        self._memory = None
