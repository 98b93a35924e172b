"""Recording entries of the infos of a vector environment, which come by key and then by lane."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rlcollect.envs.info import MISSING, PATIENCE, fill_of, info_entry
from rlcollect.envs.spaces import check_value
from rlcollect.errors import EnvError
from rlcollect.layout import Arrays, Key, Leaf, show_key

__all__ = ["VectorInfos", "first_of", "present"]

Array = np.ndarray[Any, Any]


def present(info: Mapping[str, Any], key: Key) -> Any:
    """Which lanes have the entry: bool `[N]`, as what stands beside it, or beside what it is in, says.

    None where nothing is said, and all do.
    """
    masks = [info_entry(info, (*key[:level], f"_{key[level]}")) for level in range(len(key))]
    told = [np.asarray(mask, bool) for mask in masks if mask is not MISSING]
    return np.logical_and.reduce(told) if told else None


def first_of(info: Mapping[str, Any]) -> dict[str, Any]:
    """The info as one lane would give it: the first that has each entry."""
    one: dict[str, Any] = {}
    for name, value in info.items():
        if str(name).startswith("_"):
            continue
        if isinstance(value, Mapping):
            one[name] = first_of(value)
        elif isinstance(value, Sequence | np.ndarray) and len(value):
            lanes = present(info, (name,))
            if lanes is None or lanes.any():
                one[name] = value[0 if lanes is None else int(lanes.argmax())]
    return one


class VectorInfos:
    """Writes the asked entries of every step's infos.

    Attributes:
        leaves: as below.
        of_resets: the keys of those that resets give too.

    Args:
        leaves: the entries' forms, of one lane; keys as in the info.
        first: the info of the first reset.
    """

    def __init__(self, leaves: Sequence[Leaf], first: Mapping[str, Any]) -> None:
        self.leaves = leaves
        self.of_resets = [leaf.key for leaf in leaves if info_entry(first, leaf.key) is not MISSING]
        self._fills = [fill_of(leaf.dtype) for leaf in leaves]
        self._arrays: list[Array] = []
        self._unseen = {leaf.key for leaf in leaves}
        self._episodes = 0

    def bind(self, arrays: Arrays) -> None:
        """Takes the memory of the next rollout; what is not written stays at the fill."""
        self._arrays = [arrays["next", "info", *leaf.key] for leaf in self.leaves]
        for array, fill in zip(self._arrays, self._fills, strict=True):
            array.fill(fill)

    def release(self) -> None:
        """Lets the memory go."""
        self._arrays = []

    def record(
        self, t: int, info: Mapping[str, Any], lanes: Array | None = None, only: Collection[Key] | None = None
    ) -> None:
        """Writes the entries of one step.

        Args:
            t: of the rollout.
            info: of all lanes.
            lanes: bool `[N]`, those that it is taken of; None: all.
            only: the entries that are taken; None: all.
        """
        for leaf, array in zip(self.leaves, self._arrays, strict=True):
            value = info_entry(info, leaf.key)
            if value is MISSING or (only is not None and leaf.key not in only):
                continue
            there = present(info, leaf.key)
            if lanes is not None:
                there = lanes if there is None else there & lanes
            which = np.arange(len(array)) if there is None else np.flatnonzero(there)
            if not len(which):
                continue
            if isinstance(value, Mapping):
                check_value(f"The info's {show_key(leaf.key)}", value, leaf)
            for lane in which.tolist():
                check_value(f"The info's {show_key(leaf.key)}", value[lane], leaf)
                array[lane, t] = value[lane]
            self._unseen.discard(leaf.key)

    def record_ends(self, t: int, info: Mapping[str, Any], ended: Array) -> None:
        """The same, of a step that has reset some lanes itself: of these what their last step said is in the info.

        Args:
            t: of the rollout.
            info: of all lanes.
            ended: bool `[N]`, which were reset.
        """
        self.record(t, info, ~ended)
        last = info.get("final_info")
        last = last if isinstance(last, Mapping) else {}
        lacking = [leaf.key for leaf in self.leaves if info_entry(last, leaf.key) is MISSING]
        beside = [key for key in lacking if key not in self.of_resets]
        self.record(t, last, ended)
        self.record(t, info, ended, only=beside)  # what a wrapper has put there, of the step too

    def episodes_ended(self, count: int) -> None:
        """So many episodes have ended.

        Raises:
            EnvError: an entry that no step has had in whole episodes.
        """
        self._episodes += count
        for key in sorted(self._unseen):
            if self._episodes >= PATIENCE:
                raise EnvError(
                    f"info_keys asks for {show_key(key)}, and no step has had it in {self._episodes} episodes. "
                    "Leave it out, or have the environment put it into its info."
                )
