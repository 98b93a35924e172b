"""What comes in the infos of agents: entries that are recorded, and action masks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlcollect.envs.calls import MASK
from rlcollect.envs.info import MISSING, InfoRecorder, info_entry, info_leaves
from rlcollect.envs.pettingzoo.games import Game, Infos, Observations
from rlcollect.envs.pettingzoo.groups import Group
from rlcollect.envs.spaces import check_value, fits
from rlcollect.errors import EnvError
from rlcollect.layout import Key, Leaf, numpy_dtype, show_key
from rlcollect.options import What

__all__ = ["AgentInfo", "InfoMasks", "agent_info"]


class InfoMasks:
    """Makes pairs of observations and the action masks that come in the infos.

    Attributes:
        are_there: whether any come.

    Args:
        groups: those of them that have a `mask` get pairs.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._blanks = {
            agent: np.zeros(group.mask.shape, numpy_dtype(group.mask.dtype))
            for group in groups
            if group.mask is not None
            for agent in group.agents
        }
        self.are_there = bool(self._blanks)

    def wrap(self, game: Game, call: Callable[..., Any]) -> Callable[..., Any]:
        """A step or reset whose observations are such pairs."""

        def paired(*args: Any, **kwargs: Any) -> Any:
            observations, *rest, infos = call(*args, **kwargs)
            return self.paired(game, observations, infos), *rest, infos

        return paired

    def paired(self, game: Game, observations: Observations, infos: Infos) -> Observations:
        """The observations with their masks; one that leaves need not have one any more."""
        pairs = {}
        for agent, observation in observations.items():
            blank = self._blanks.get(agent)
            if blank is not None and observation is not None:
                mask = info_entry(infos.get(agent, {}), MASK)
                if mask is MISSING and agent in game.alive():
                    raise EnvError(f'{agent!r}: the first infos had an "action_mask", and now there is none.')
                observation = observation, blank if mask is MISSING else mask
            pairs[agent] = observation
        return pairs


def agent_info(groups: Sequence[Group], what: What, infos: Infos, num_lanes: int) -> AgentInfo | None:
    """Records what is asked for of the agents' infos; None: nothing is.

    Args:
        groups: whose.
        what: the entries, each in the form that was stated, or in which the first reset shows it.
        infos: of the first reset.
        num_lanes: N.

    Raises:
        SpaceError: an entry is not numeric.
    """
    places = []
    for key, form in what.info_forms.items():
        shown = next((info for info in infos.values() if info_entry(info, key) is not MISSING), {})
        (leaf,) = info_leaves({key: form}, shown)
        for group in groups:
            above = () if len(groups) == 1 else (group.name,)
            places.append((group, leaf, Leaf((*above, *key), (len(group.agents), *leaf.shape), leaf.dtype)))
    stated = {key for key, form in what.info_forms.items() if form is not None}
    return AgentInfo(places, stated, num_lanes) if places else None


class AgentInfo(InfoRecorder):
    """Writes the asked entries of every agent's info.

    Attributes:
        leaves: what is recorded, below "info".

    Args:
        places: for each tensor: whose entries stand there, the form of one, and that of all.
        stated: the keys whose form the user stated.
        num_lanes: N.
    """

    def __init__(self, places: Sequence[tuple[Group, Leaf, Leaf]], stated: set[Key], num_lanes: int) -> None:
        self.leaves = tuple(whole for _, _, whole in places)
        super().__init__(self.leaves, stated, num_lanes)
        self._places = [(group.agents, leaf) for group, leaf, _ in places]
        self._unseen = {leaf.key for _, leaf in self._places}

    def _record(self, lane: int, info: Infos) -> None:
        t = self._t[lane]
        self._t[lane] = t + 1
        for (agents, leaf), array in zip(self._places, self._arrays, strict=True):
            for place, agent in enumerate(agents):
                value = info_entry(info.get(agent, {}), leaf.key)
                if value is MISSING or value is None:
                    continue
                if not fits(value, leaf):
                    check_value(f"{agent!r}: the info's {show_key(leaf.key)}", value, leaf)
                array[lane, t, place] = value
                self._unseen.discard(leaf.key)
