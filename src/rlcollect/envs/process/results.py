"""What the workers have written, as Gymnasium's vector environments give it; and actions, as workers read them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import VectorEnv
from gymnasium.vector.utils import iterate

from rlcollect.envs.process.forms import Leaf, leaves, parts, whole
from rlcollect.envs.process.memory import Memory
from rlcollect.envs.process.messages import Started
from rlcollect.errors import OptionError

__all__ = ["Infos", "Results"]

Array = np.ndarray[Any, Any]


class Infos:
    """The infos of some lanes, gathered into one as Gymnasium does.

    Args:
        span: the lanes.
    """

    def __init__(self, span: slice) -> None:
        self.gathered: dict[str, Any] = {}
        self._span = span
        self._adder: VectorEnv[Any, Any, Any] = VectorEnv()
        self._adder.num_envs = span.stop - span.start

    def add(self, lane: int, info: dict[str, Any]) -> None:
        """Adds those of a lane, counted from the first of all."""
        self.gathered = self._adder._add_info(self.gathered, info, lane - self._span.start)


class Results:
    """Reads what the workers have written, and writes actions.

    Args:
        memory: of all lanes.
        observation_space, action_space: of a lane.
        copy: whether observations are copies.
    """

    def __init__(
        self, memory: Memory, observation_space: gym.Space[Any], action_space: gym.Space[Any], *, copy: bool
    ) -> None:
        self._memory = memory
        self._space = observation_space
        self._action_space = action_space
        self._copy = copy
        self._leaves = leaves(observation_space)
        lanes = len(memory.rewards)
        self._loose = [[None] * lanes for leaf in self._leaves if not leaf.is_fixed]  # by leaf
        self._is_plain = len(self._leaves) == 1 and self._leaves[0].space is observation_space and not self._loose
        self._action_leaves = leaves(action_space, "actions")
        self.takes_arrays = all(leaf.is_fixed for leaf in self._action_leaves)
        self._views: dict[tuple[int, int], list[Array]] = {}

    def write(self, span: slice, actions: Any) -> None:
        """Puts actions of some lanes where workers read them.

        Raises:
            OptionError: they do not fit.
        """
        for leaf, array, part in zip(
            self._action_leaves, self._memory.actions, parts(self._action_space, actions), strict=True
        ):
            _put(leaf, array[span], part)

    def split(self, batched: gym.Space[Any], actions: Any, lanes: int) -> list[Any]:
        """Actions by lane, where they have no fixed form.

        Raises:
            OptionError: they are not as many.
        """
        each = list(iterate(batched, actions))
        if len(each) != lanes:
            raise OptionError(f"actions should be one for each of {lanes} lanes; {len(each)} came.")
        return each

    def observations(self, span: slice) -> Any:
        """Those of some lanes, batched."""
        views = self._views_of(span)
        arrays = [view.copy() for view in views] if self._copy else views
        if self._is_plain:
            return arrays[0]
        fixed, loose = iter(arrays), iter(self._loose)
        values = (next(fixed) if leaf.is_fixed else tuple(next(loose)[span]) for leaf in self._leaves)
        return whole(self._space, values)

    def _views_of(self, span: slice) -> list[Array]:
        key = span.start, span.stop
        if key not in self._views:
            self._views[key] = [array[span] for array in self._memory.observations]
        return self._views[key]

    def flags(self, span: slice) -> tuple[Array, Array, Array]:
        """Rewards, terminations and truncations of some lanes."""
        memory = self._memory
        return memory.rewards[span].copy(), memory.terminations[span].copy(), memory.truncations[span].copy()

    def told(self, packed: bytes, first: int, infos: Infos) -> None:
        """Takes in what a worker has to say about a step.

        Args:
            packed: see `worker.Ended`.
            first: its first lane.
            infos: to add to.
        """
        for lane, final, info, loose in pickle.loads(packed):
            if final is not None:
                infos.add(first + lane, {"final_obs": final[0], "final_info": final[1]})
            infos.add(first + lane, info)
            self._keep(first + lane, loose)

    def started(self, started: Sequence[Started], first: int, infos: Infos) -> None:
        """Takes in how lanes of a worker began."""
        for each in started:
            infos.add(first + each.lane, each.info)
            self._keep(first + each.lane, each.loose)

    def cut(self, span: slice, infos: Infos) -> None:
        """Marks lanes as begun anew by another process: what was under way there is cut."""
        self._memory.rewards[span] = 0.0
        self._memory.terminations[span] = False
        self._memory.truncations[span] = True
        for lane in range(span.start, span.stop):
            infos.add(lane, {"restarted": True})

    def _keep(self, lane: int, loose: Sequence[Any]) -> None:
        for kept, value in zip(self._loose, loose, strict=True):
            kept[lane] = value


def _put(leaf: Leaf, array: Array, value: Any) -> None:
    given = np.asarray(value)
    if given.shape != array.shape:
        raise OptionError(f"{leaf.name} should have shape {list(array.shape)}, not {list(given.shape)}.")
    try:
        np.copyto(array, given, casting="same_kind")
    except TypeError as error:
        raise OptionError(f"{leaf.name} should have dtype {array.dtype}, not {given.dtype}.") from error
