"""What all drivers have in common: attributes with the values that most have, and closing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.envs.make import close_all
from rlcollect.envs.opening import Opening
from rlcollect.layout import Key
from rlcollect.seeds import Root

__all__ = ["Driver", "fill_next"]

Array = np.ndarray[Any, Any]


def fill_next(
    now: Mapping[Key, Array],
    after: Mapping[Key, Array],
    current: Mapping[Key, Array],
    ends: Sequence[tuple[int, int]],
    made: int,
) -> None:
    """Copies what follows from the observations of a rollout: the next ones.

    Args:
        now: observations `[N, T, *shape]` by key.
        after: next observations; those at the ends of episodes are there already.
        current: what the lanes show after the last step, `[N, *shape]`.
        ends: (t, lane) of the episodes that ended.
        made: steps.
    """
    times, lanes = np.asarray(ends, np.int64).reshape(-1, 2).T
    for key, shown in now.items():
        last = after[key][lanes, times]
        after[key][:, : made - 1] = shown[:, 1:made]
        after[key][:, made - 1] = current[key]
        after[key][lanes, times] = last


class Driver:
    """Attributes of an `EnvDriver`, see there.

    Args:
        opening: which environments are to be closed.
    """

    def __init__(self, opening: Opening) -> None:
        self.ends: list[tuple[int, int]] = []
        self.failed_lane: int | None = None
        self.failed_step: int | None = None
        self.num_rows: int | None = None
        self.truncated_keys: Sequence[Key] = ()
        self.draw: Callable[[np.random.Generator], Sequence[Any]] | None = None
        self.loose: Mapping[Key, Sequence[Any]] = {}
        self.refuses_lane_resets: str | None = None
        self.refuses_lane_seeds: str | None = None
        self.refuses_options: str | None = None
        self.largest_seed: int | None = None
        self.steps_one_by_one = False
        self.envs: Sequence[Any] = list(opening.envs)
        self._owned = list(opening.owned)

    @property
    def primed(self) -> Mapping[Key, torch.Tensor]:
        """Nothing: what is observed is the environment's own."""
        return {}

    def leave_to_policy(self, keys: Collection[Key]) -> None:
        """None of the `primed`, since there are none."""

    def open_episodes(self) -> dict[str, Any]:
        """None can be told."""
        return {}

    def reopen(self, episodes: Mapping[str, Any]) -> Collection[int]:  # noqa: ARG002
        """None can be."""
        return ()

    def seed_episodes(self, roots: Sequence[Root]) -> None:
        """They have no seeds of their own."""

    def number_episodes(self, numbers: Mapping[int, int]) -> None:
        """Nothing depends on it."""

    def loose_batch(self, made: int) -> Mapping[Key, Any]:  # noqa: ARG002
        """Nothing: every observation has a form."""
        return {}

    def close(self) -> list[BaseException]:
        """Closes the environments that were made here; instances that were passed in are their owner's."""
        owned, self._owned = self._owned, []
        return close_all(owned)
