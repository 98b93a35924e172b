"""What agents are given to do: how the actions of groups are stored, decoded and drawn."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space

from rlcollect.envs.calls import MASK
from rlcollect.envs.pettingzoo.games import Agent
from rlcollect.envs.pettingzoo.groups import Group
from rlcollect.envs.sampling import MaskedActionSampler, draw_space
from rlcollect.errors import EnvError, SpaceError
from rlcollect.layout import Key, Leaf, show_key

__all__ = ["GroupActions"]

Array = np.ndarray[Any, Any]


class GroupActions:
    """How the actions of groups are stored.

    Attributes:
        space: of the actions of the one group, or of each group by its name.
        leaves: the tensors of all groups' actions.
        parts: the space of each.
        is_masked: whether some agents observe which actions they may take.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        whole = {group.name: _of_all(group.actions.space, len(group.agents)) for group in groups}
        self.space: gym.Space[Any] = whole[groups[0].name] if len(groups) == 1 else spaces.Dict(whole)
        self.leaves: Sequence[Leaf] = tuple(group.of_all(leaf) for group in groups for leaf in group.actions.leaves)
        self.parts: Sequence[gym.Space[Any]] = tuple(
            _of_all(part, len(group.agents)) for group in groups for part in group.actions.parts
        )
        self.is_masked = any(group.allowed is not None for group in groups)

    def _by_group(self, values: Sequence[Any]) -> Iterator[Sequence[Any]]:
        """Values, one a leaf, for each group."""
        start = 0
        for group in self._groups:
            stop = start + len(group.actions.leaves)
            yield values[start:stop]
            start = stop

    def decode(
        self, rows: Sequence[Array], masks: Sequence[Array], acting: Sequence[Sequence[Sequence[Agent]]]
    ) -> list[dict[Agent, Any]]:
        """For each lane, the actions of those who act, in the form that their spaces have.

        Args:
            rows: `[N, A, *shape]`, one a leaf.
            masks: for each group bool `[N, A]`, who acts.
            acting: for each lane and group, who acts, in the same order.

        Raises:
            PolicyError: an action is not in a Discrete space.
        """
        given: list[dict[Agent, Any]] = [{} for _ in acting]
        for number, (values, mask) in enumerate(zip(self._by_group(rows), masks, strict=True)):
            actions = iter(self._groups[number].actions.decode([value[mask] for value in values]))
            for lane, agents in zip(given, acting, strict=True):
                for agent in agents[number]:
                    lane[agent] = next(actions)
        return given

    def draw(self, shown: Mapping[Key, Array], masks: Sequence[Array], rng: np.random.Generator) -> list[Array]:
        """Random actions `[N, A, *shape]`, one a leaf, among those that action masks allow.

        Agents that do not act are often shown masks that allow nothing: they get any action of their space.

        Args:
            shown: `[N, *shape]` by key, what the lanes show.
            masks: for each group bool `[N, A]`, who acts.
            rng: where actions are drawn from.

        Raises:
            EnvError: an agent is to act, and may do nothing.
            SpaceError: action masks mean nothing for an action space, or have another shape.
        """
        drawn: list[Array] = []
        for group, parts, acts in zip(self._groups, self._by_group(self.parts), masks, strict=True):
            if group.allowed is None:
                leaves = [group.of_all(leaf) for leaf in group.actions.leaves]
                drawn += [draw_space(part, leaf, acts.shape[:1], rng) for part, leaf in zip(parts, leaves, strict=True)]
            else:
                drawn.append(_draw_allowed(group, group.allowed, shown, acts, rng))
        return drawn


def _draw_allowed(group: Group, leaf: Leaf, shown: Mapping[Key, Array], acts: Array, rng: np.random.Generator) -> Array:
    if leaf.key != MASK:
        raise SpaceError(
            f"The action masks of {group.name!r} have parts, which random actions cannot respect: one array is due, "
            "the parts in a row. Wrap the environment, or rename them: "
            f"rename_keys={{{show_key((group.name, *MASK))}: ...}}."
        )
    allowed = shown[group.name, *leaf.key] != 0
    stuck = acts & ~allowed.reshape(*acts.shape, -1).any(-1)
    if stuck.any():
        lane, place = (int(index) for index in np.argwhere(stuck)[0])
        raise EnvError(f'lane {lane}: {group.agents[place]!r} is to act, and its "action_mask" allows nothing.')
    allowed[~acts] = True
    sampler = MaskedActionSampler(group.actions, leaf, acts.size, rng)
    (actions,) = sampler.sample(allowed.reshape(acts.size, *allowed.shape[2:]))
    return actions.reshape(*acts.shape, *actions.shape[1:])


def _of_all(space: gym.Space[Any], count: int) -> gym.Space[Any]:
    """The space of `count` agents at once, of a kind whose actions can be checked and drawn as those of one are."""
    if isinstance(space, spaces.Dict):
        return spaces.Dict({name: _of_all(part, count) for name, part in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple([_of_all(part, count) for part in space.spaces])
    if isinstance(space, spaces.Discrete):
        return spaces.MultiDiscrete(np.full(count, space.n), start=np.full(count, space.start))
    if isinstance(space, spaces.MultiDiscrete):
        return spaces.MultiDiscrete(np.stack([space.nvec] * count), start=np.stack([space.start] * count))
    if isinstance(space, spaces.MultiBinary):
        return spaces.MultiBinary((count, *space.shape))
    return batch_space(space, count)
