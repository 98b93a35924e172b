"""Random actions of one lane, among those that its action mask allows."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlcollect.testing._contract.report import BrokenError, Finding
from rlcollect.testing._contract.subject import guarded
from rlcollect.testing._contract.values import as_array, described, fingerprint

__all__ = ["MASK", "RandomActions", "mask_in"]

Space: TypeAlias = gym.Space[Any]
MASK: Final = "action_mask"
_TRIES: Final = 16


def mask_in(observation: Any, info: Any) -> Any:
    """The action mask that comes in a Dict observation or in the info; None where there is none."""
    for place in (observation, info):
        if isinstance(place, Mapping) and place.get(MASK) is not None:
            return place[MASK]
    return None


class RandomActions:
    """Draws actions of a space, from a stream of its own: the environment's own space is left alone.

    Args:
        space: of one lane.
        seed: the seeds of environments.
        lane: its number; lanes draw from independent streams.
    """

    def __init__(self, space: Space, seed: int, lane: int = 0) -> None:
        own, others = np.random.SeedSequence(seed, spawn_key=(lane,)).generate_state(2)
        self._space, self._others = copy.deepcopy(space), copy.deepcopy(space)
        self._space.seed(int(own))
        self._others.seed(int(others))

    def draw(self, mask: Any = None) -> Any:
        """The next action; one that the mask allows, in the spaces where masks mean something.

        Raises:
            BrokenError: the mask has another shape than actions have, or allows none.
        """
        if mask is None or not isinstance(self._space, spaces.Discrete | spaces.MultiDiscrete):
            return guarded("spaces", "while an action was drawn", self._space.sample)
        return self._space.sample(mask=_checked(self._space, mask))

    def another(self, action: Any) -> Any:
        """Any action but this one, unless it is the only one; takes nothing from the stream of `draw`."""
        for _ in range(_TRIES):
            other = self._others.sample()
            if fingerprint(other, "") != fingerprint(action, ""):
                return other
        return action


def _checked(space: Any, mask: Any) -> Any:
    """The mask as `sample` takes it."""
    sizes = [int(space.n)] if isinstance(space, spaces.Discrete) else [int(size) for size in space.nvec.flat]
    array = as_array(mask)
    if array.shape != (sum(sizes),):
        raise _broken(f"it is {described(mask)}; for {space} it should have the shape [{sum(sizes)}]")
    parts = np.split((array != 0).astype(np.int8), np.cumsum(sizes)[:-1])
    if not all(part.any() for part in parts):
        raise _broken(f"it allows no action at all, and the episode goes on: {array.tolist()}")
    return parts[0] if isinstance(space, spaces.Discrete) else tuple(parts)


def _broken(text: str) -> BrokenError:
    return BrokenError(
        Finding("action mask", "broken", text, "Give one entry an action, 1 for those that may be taken; or end there.")
    )
