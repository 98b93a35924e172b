"""Groups of agents: who belongs together, which tensors they have, and under which keys.

The agents of a group have spaces of one form, and share tensors with a dimension of agents. Nothing here steps an
environment: all is worked out once, from the spaces and the first infos.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces

from rlcollect.envs.calls import MASK
from rlcollect.envs.info import MISSING, info_entry, info_leaves
from rlcollect.envs.make import space_difference
from rlcollect.envs.pettingzoo.games import Agent, Infos, has_state
from rlcollect.envs.spaces import (
    ALWAYS_OURS,
    REWARD,
    ActionCodec,
    ObservationCodec,
    check_known,
    observation_codec,
    renamed,
    walk,
)
from rlcollect.errors import OptionError, SpaceError
from rlcollect.layout import Key, Leaf, show_key
from rlcollect.options import What

__all__ = ["FLAGS", "Group", "plan_groups", "state_codec"]

FLAGS = ("done", "terminated", "truncated")
STATE = "state"
TAKEN = (*ALWAYS_OURS, "mask")  # names that are ours inside a group


@dataclass(frozen=True)
class Group:
    """Agents that are stored together.

    Attributes:
        name: the key that all of theirs stands under.
        agents: in the order of their dimension.
        codec: how the observation of one of them is stored.
        actions: how the action of one of them is stored.
        whole: where the whole observation of one stands, below the name: () where that is a Dict.
        mask: the form of an action mask that comes in the infos: observations are then pairs `(observation, mask)`.
    """

    name: str
    agents: tuple[Agent, ...]
    codec: ObservationCodec
    actions: ActionCodec
    whole: Key
    mask: Leaf | None

    def of_all(self, leaf: Leaf) -> Leaf:
        """A tensor of one agent as that of all."""
        return Leaf((self.name, *leaf.key), (len(self.agents), *leaf.shape), leaf.dtype)

    @property
    def observed(self) -> tuple[Leaf, ...]:
        """What they observe."""
        return tuple(map(self.of_all, self.codec.leaves))

    @property
    def standing(self) -> tuple[Leaf, ...]:
        """Where they stand: who acts in the next step, and who has ended, and how."""
        flags = [Leaf((name,), (1,), torch.bool) for name in FLAGS]
        return tuple(map(self.of_all, [Leaf(("mask",), (), torch.bool), *flags]))

    @property
    def reward(self) -> Leaf:
        """What they are paid."""
        return self.of_all(REWARD)

    @property
    def allowed(self) -> Leaf | None:
        """The action mask among what one agent observes."""
        return next((leaf for leaf in self.codec.leaves if leaf.key[0] == MASK[0]), None)


def plan_groups(env: Any, what: What, names: Sequence[str], infos: Infos) -> tuple[Group, ...]:
    """The groups of an environment's agents: one, "agents", if all spaces have one form, else by name.

    Args:
        env: has the Parallel API.
        what: keys, names, dtypes and infos asked for.
        names: names that a group may not have, beside those that are always ours.
        infos: of the first reset: they show whether action masks come there.

    Raises:
        SpaceError: agents of one name differ, a space has no tensor form, or a name is one of ours.
        OptionError: `exclude_keys` or `rename_keys` name what is not there, or cannot be named so.
    """
    members = _members(env)
    observed = {name: env.observation_space(agents[0]) for name, agents in members.items()}
    state = _keys(spaces.Dict({STATE: env.state_space})) if has_state(env) else []
    in_infos = [(name, *MASK) for name, agents in members.items() if _mask_in(infos, agents)]
    known = [*((name, *key) for name, space in observed.items() for key in _keys(space)), *in_infos, *state]
    check_known("exclude_keys", what.exclude_keys, known)  # type: ignore[arg-type]
    check_known("rename_keys", list(what.rename_keys or {}), known)  # type: ignore[arg-type]
    groups = tuple(
        _planned(name, tuple(agents), observed[name], env.action_space(agents[0]), what, infos)
        for name, agents in members.items()
    )
    _check_outside(groups, [*names, *(["info"] if what.info_forms else []), *([STATE] if state else [])])
    return groups


def _planned(
    name: str,
    agents: tuple[Agent, ...],
    space: gym.Space[Any],
    action_space: gym.Space[Any],
    what: What,
    infos: Infos,
) -> Group:
    renames: Mapping[Key, Key] = what.rename_keys or {}  # type: ignore[assignment]
    inside = {old[1:]: _inside(old, new) for old, new in renames.items() if old[0] == name and len(old) > 1}
    excluded: list[Key] = [key[1:] for key in what.exclude_keys if key[0] == name]  # type: ignore[misc]
    _check_inside(name, space, excluded, inside)
    keys = _keys(space)
    mask = None if MASK in (*keys, *excluded) else _mask_in(infos, agents)
    codec = observation_codec(
        space,
        exclude=[key for key in excluded if key != MASK or MASK in keys],
        rename={old: new for old, new in inside.items() if old != MASK or MASK in keys},
        ours=TAKEN,
        keep_float64=what.obs_dtype == "env",
        action_mask=mask and Leaf(renamed(mask.key, inside), mask.shape, mask.dtype),
    )
    whole: Key = () if isinstance(space, spaces.Dict) else renamed(("observation",), inside)
    return Group(_renamed(name, renames), agents, codec, ActionCodec(action_space), whole, mask)


def state_codec(env: Any, what: What, names: Sequence[str]) -> ObservationCodec | None:
    """How the state is stored, of raw ones in the form `{"state": state}`; None: there is none, or it is left out.

    Args:
        env: has the Parallel API.
        what: keys, names and dtypes.
        names: names that its keys may not have, beside those that are always ours.
    """
    if not has_state(env) or (STATE,) in what.exclude_keys:
        return None
    return observation_codec(
        spaces.Dict({STATE: env.state_space}),
        exclude=[key for key in what.exclude_keys if key[0] == STATE],  # type: ignore[misc]
        rename={old: new for old, new in (what.rename_keys or {}).items() if old[0] == STATE},  # type: ignore[misc]
        ours=names,
        keep_float64=what.obs_dtype == "env",
    )


# --- who belongs together ---------------------------------------------------------------------------------------------


def _members(env: Any) -> dict[str, list[Agent]]:
    agents = list(env.possible_agents)
    if not agents:
        raise SpaceError(f"{env} has no possible_agents: there is nobody to act.")
    if not any(_unlike(env, agents[0], agent) for agent in agents):
        return {"agents": agents}
    members: dict[str, list[Agent]] = {}
    for agent in agents:
        members.setdefault(str(agent).rpartition("_")[0] or str(agent), []).append(agent)
    for name, group in members.items():
        for agent in group[1:]:
            if difference := _unlike(env, group[0], agent):
                raise SpaceError(
                    f"The agents of a group need spaces of one form; {agent!r} differs from {group[0]!r}, both of "
                    f"{name!r}: {difference} Groups go by what stands before the last underscore of a name: name these "
                    "agents differently, or wrap the environment to pad their spaces."
                )
    return members


def _unlike(env: Any, one: Agent, other: Agent) -> str | None:
    """How the spaces of two agents differ: those of observations in their form, those of actions in anything."""
    for name, space_of, exact in (("observation", env.observation_space, False), ("action", env.action_space, True)):
        if space_difference(space_of(one), space_of(other), exact, name):
            return f"its {name} space is {space_of(other)}, and not {space_of(one)}."
    return None


def _keys(space: gym.Space[Any]) -> list[Key]:
    """The keys that an observation is stored under."""
    return [key for _, key, _ in walk(space, () if isinstance(space, spaces.Dict) else ("observation",), ())]


def _mask_in(infos: Infos, agents: Sequence[Agent]) -> Leaf | None:
    """The form of the action masks in the infos, if there are any."""
    shown = [info for agent in agents if info_entry(info := infos.get(agent, {}), MASK) is not MISSING]
    return info_leaves({MASK: None}, shown[0])[0] if shown else None


# --- names ------------------------------------------------------------------------------------------------------------


def _renamed(name: str, renames: Mapping[Key, Key]) -> str:
    new = renames.get((name,), (name,))
    if len(new) > 1:
        raise OptionError(f"rename_keys maps the group {name!r} to {show_key(new)}; a group has one name, at the root.")
    return new[0]


def _inside(old: Key, new: Key) -> Key:
    """The new name of what agents observe, below that of their group."""
    if len(new) < 2 or new[0] != old[0]:
        raise OptionError(
            f"rename_keys maps {show_key(old)} to {show_key(new)}; what agents observe stays in their group: "
            f"({old[0]!r}, ...)."
        )
    return new[1:]


def _check_inside(name: str, space: gym.Space[Any], excluded: Sequence[Any], renames: Mapping[Key, Key]) -> None:
    for key in _keys(space):
        is_left_out = any(key[: len(prefix)] == prefix for prefix in excluded)
        if not is_left_out and renamed(key, renames)[0] in TAKEN:
            raise SpaceError(
                f"The agents of {name!r} observe {show_key(key)}, which is a name of ours. Give it another: "
                f"rename_keys={{{show_key((name, *key))}: {show_key((name, '...'))}}}."
            )


def _check_outside(groups: Sequence[Group], names: Sequence[str]) -> None:
    taken = [*ALWAYS_OURS, *names]
    for group in groups:
        if group.name in taken:
            raise SpaceError(
                f"A group of agents would have the name {group.name!r}, which is one of ours, or of another group. "
                f"Give it another: rename_keys={{{group.name!r}: ...}}."
            )
        taken.append(group.name)
