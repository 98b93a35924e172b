"""Recording entries of the info dictionaries under ("next", "info", key).

Absent unless asked for: a lane's `step` is wrapped at construction, and the loop that calls it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from rlcollect.envs.spaces import check_value, fits, space_leaf
from rlcollect.errors import EnvError, SpaceError
from rlcollect.layout import Key, Leaf, show_key, torch_dtype

__all__ = ["MISSING", "PATIENCE", "InfoRecorder", "Step", "fill_of", "info_entry", "info_leaves"]

Array = np.ndarray[Any, Any]
Step = Callable[[Any], tuple[Any, Any, Any, Any, dict[str, Any]]]
MISSING = object()
PATIENCE = 100  # episodes that an entry whose form was stated may fail to come


def info_entry(info: Mapping[str, Any], key: Key) -> Any:
    """The entry, or MISSING."""
    value: Any = info
    for part in key:
        if not isinstance(value, Mapping) or part not in value:
            return MISSING
        value = value[part]
    return value


def info_leaves(keys: Mapping[Key, gym.Space[Any] | None], first_info: Mapping[str, Any]) -> tuple[Leaf, ...]:
    """The form of each entry: as stated, else as the first reset shows it, else a float32 scalar.

    Raises:
        SpaceError: an entry that is not numeric.
    """
    return tuple(
        _leaf_of(key, info_entry(first_info, key)) if space is None else space_leaf(space, key)
        for key, space in keys.items()
    )


def _leaf_of(key: Key, value: Any) -> Leaf:
    if value is MISSING or value is None:
        return Leaf(key, (), torch.float32)
    try:
        array = np.asarray(value)
    except ValueError:  # ragged
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise SpaceError(f"info_keys: the reset's info has {show_key(key)} = {value!r}, which is not numeric.")
    if array.dtype == np.float64:
        return Leaf(key, array.shape, torch.get_default_dtype())
    return Leaf(key, array.shape, torch_dtype(array.dtype))


def fill_of(dtype: torch.dtype) -> float | int | bool:
    """What stands where an environment left the entry out."""
    if dtype.is_floating_point:
        return float("nan")
    return -1 if dtype.is_signed and dtype is not torch.bool else 0


class InfoRecorder:
    """Writes the asked entries of every step's info; wraps the `step` of each lane.

    Args:
        leaves: the entries' forms; keys as in the info.
        stated: the keys whose form the user stated.
        num_lanes: N.
    """

    def __init__(self, leaves: Sequence[Leaf], stated: Collection[Key], num_lanes: int) -> None:
        self._leaves = leaves
        self._stated = frozenset(stated)
        self._episodes = 0
        self._fills = [fill_of(leaf.dtype) for leaf in leaves]
        self._arrays: list[Array] = []
        self._t = [0] * num_lanes
        self._unseen = {leaf.key for leaf in leaves}

    def bind(self, arrays: Mapping[Key, Array]) -> None:
        """Takes the memory of the next rollout; what is not written stays at the fill."""
        self._arrays = [arrays["next", "info", *leaf.key] for leaf in self._leaves]
        for array, fill in zip(self._arrays, self._fills, strict=True):
            array.fill(fill)
        self._t = [0] * len(self._t)

    def release(self) -> None:
        """Lets the memory go."""
        self._arrays = []

    def wrap(self, lane: int, step: Step) -> Step:
        """A step that records."""

        def recording(action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
            result = step(action)
            self._record(lane, result[-1])
            return result

        return recording

    def _record(self, lane: int, info: Mapping[str, Any]) -> None:
        t = self._t[lane]
        self._t[lane] = t + 1
        for leaf, array in zip(self._leaves, self._arrays, strict=True):
            value = info_entry(info, leaf.key)
            if value is MISSING or value is None:
                continue
            if not fits(value, leaf):
                check_value(f"The info's {show_key(leaf.key)}", value, leaf)
            array[lane, t] = value
            self._unseen.discard(leaf.key)

    def episode_ended(self, *, by_env: bool) -> None:
        """Called at the end of every episode.

        Args:
            by_env: whether the environment ended it, and not a limit of ours.

        Raises:
            EnvError: an entry that no step has had, in an episode that was whole; in PATIENCE episodes where a limit
                cuts them off, or where the entry's form was stated, since then it is known to be rare.
        """
        self._episodes += 1
        for key in sorted(self._unseen):
            if self._episodes >= (PATIENCE if key in self._stated or not by_env else 1):
                raise EnvError(
                    f"info_keys asks for {show_key(key)}, and no step has had it in {self._episodes} episode(s). "
                    "Leave it out, have the environment put it into its info, or, if it is rare, state its form: "
                    f"info_keys={{{show_key(key)}: space}}."
                )
