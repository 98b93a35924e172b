"""What an environment says of itself, read once: which tensors it gives and takes, and where it says what has ended.

Specs are used by what they have in common: a leaf has `shape`, `dtype`, `rand` and `is_in`; a composite one has
`keys(include_nested, leaves_only)` and items. Nothing here steps an environment.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces

from rlcollect.envs.spaces import ALWAYS_OURS, renamed
from rlcollect.envs.tensordicts.loose import Loose
from rlcollect.errors import OptionError, SpaceError
from rlcollect.layout import Key, Leaf, as_key, has_numpy, nested, numpy_dtype, overlap, show_key

__all__ = ["NEEDS", "Actions", "Form", "Source", "SpecSpace", "forms_agree", "is_tensordict_env", "read_form", "td_key"]

NEEDS = "reset, step, step_and_maybe_reset, batch_size, full_action_spec, full_observation_spec"
FLAGS = ("done", "terminated", "truncated")
NEXT_SPECS = ("full_observation_spec", "full_done_spec", "full_reward_spec")
ROOT_SPECS = ("full_observation_spec", "full_state_spec", "full_action_spec", "full_done_spec")


def is_tensordict_env(made: Any) -> bool:
    """Whether it is an environment from TensorDict to TensorDict. Nothing of it is evaluated: some start workers."""
    kind, own = type(made), getattr(made, "__dict__", {})
    return all(hasattr(kind, name) or name in own for name in NEEDS.split(", "))


def td_key(key: Key) -> Any:
    """A key as a TensorDict takes it most quickly."""
    return key[0] if len(key) == 1 else key


@dataclass(frozen=True)
class Source:
    """A tensor that an environment gives.

    Attributes:
        leaf: how it is recorded, for one lane.
        key: where it stands in the environment's TensorDict, as that takes it.
    """

    leaf: Leaf
    key: Any


class SpecSpace(gym.Space[Any]):
    """A space of Gymnasium around the spec of one lane: for checks and texts.

    Args:
        spec: of TorchRL's kind.
    """

    def __init__(self, spec: Any) -> None:
        self.spec = spec
        numbers = isinstance(spec.dtype, torch.dtype) and has_numpy(spec.dtype)
        super().__init__(tuple(spec.shape), numpy_dtype(spec.dtype) if numbers else None)

    def sample(self, mask: Any = None, probability: Any = None) -> torch.Tensor:  # noqa: ARG002
        """A random value, drawn from torch's generator."""
        value: torch.Tensor = self.spec.rand()
        return value

    def contains(self, x: Any) -> bool:
        """Whether the spec holds this value."""
        return bool(self.spec.is_in(torch.as_tensor(x)))

    def __eq__(self, other: object) -> bool:
        """Whether the specs are equal."""
        return isinstance(other, SpecSpace) and bool(self.spec == other.spec)

    __hash__ = None  # type: ignore[assignment] # specs have none

    def __repr__(self) -> str:
        values = getattr(getattr(self.spec, "space", None), "n", None)
        count = "" if values is None else f"n={values}, "
        dtype = str(self.spec.dtype).removeprefix("torch.")
        return f"{type(self.spec).__name__}({count}shape={list(self.spec.shape)}, dtype={dtype})"


@dataclass
class Actions:
    """The `ActionForm` of an environment: leaves by its own action keys, in its own shapes and dtypes."""

    space: gym.Space[Any]
    leaves: Sequence[Leaf]
    parts: Sequence[gym.Space[Any]]


@dataclass(frozen=True)
class Ends:
    """Where an environment says that a lane has ended: keys under "next" of which any may be True.

    Attributes:
        done: what its own resets go by.
        masks: for each of these, the key that tells which parts to reset.
        terminated, truncated: those beside them, if there are.
    """

    done: Sequence[Any]
    masks: Sequence[Any]
    terminated: Sequence[Any]
    truncated: Sequence[Any]


@dataclass(frozen=True)
class Form:
    """The form of what one environment gives and takes.

    Attributes:
        batch: its batch dimensions.
        observed: tensors that stand at the root, before a step, and below "next" too.
        constant: recorded keys of those among them that no step gives: they stay as they are.
        primed: recorded keys of those among them that it takes in again with the action, as a primer has it.
        after: tensors that steps alone give.
        rewards: recorded keys of those among `after` that are rewards.
        truncated: recorded keys of nested truncations that stand beside a "done".
        flags: recorded keys of all nested done, terminated and truncated.
        ends: where it says that a lane has ended.
        masks: for each key that tells which parts to reset, the shape of its mask.
        actions: what it takes.
        names: of its observations, as recorded, without flags.
        is_loose: whether it gives anything that has no fixed form.
        levels: of nested levels that have batch dimensions of their own (of agents, say), these; "next" too.
    """

    batch: tuple[int, ...]
    observed: Sequence[Source]
    constant: frozenset[Key]
    primed: frozenset[Key]
    after: Sequence[Source]
    rewards: Sequence[Key]
    truncated: Sequence[Key]
    flags: frozenset[Key]
    ends: Ends
    masks: Mapping[Any, tuple[int, ...]]
    actions: Actions
    names: Sequence[Key]
    is_loose: bool
    levels: Mapping[Key, tuple[int, ...]]

    def without(self, keys: Collection[Key]) -> Form:
        """The form where nobody looks at these observations, by recorded key."""
        observed = [source for source in self.observed if source.leaf.key not in keys]
        return replace(self, observed=observed, names=[name for name in self.names if name not in keys])


def read_form(
    env: Any,
    shown: set[Key],
    loose: Sequence[Loose],
    *,
    exclude: Sequence[Key],
    rename: Mapping[Key, Key],
    ours: Sequence[str],
) -> Form:
    """The form of an environment.

    Args:
        env: the environment.
        shown: keys of what its first reset gave.
        loose: what has no fixed form.
        exclude: observation keys (or prefixes of keys) to leave out.
        rename: new names, by key or prefix.
        ours: names that an observation may not have, beside those that are always ours.

    Raises:
        OptionError: `exclude` or `rename` name what is not there.
        SpaceError: a key that is one of ours, actions or rewards without tensor form, or no observation at all.
    """
    batch = tuple(env.batch_size)
    dones = _tensors("flag", env.full_done_spec, batch)
    rewards = _tensors("reward", env.full_reward_spec, batch)
    observations = dict(_leaves(env.full_observation_spec, batch))
    state_spec = getattr(env, "full_state_spec", None)
    states = {key: leaf for key, leaf in _leaves(state_spec, batch) if key in shown}
    given = {**states, **observations}
    given = {key: leaf for key, leaf in given.items() if key not in rewards}
    names = [as_key(name) for spec in (env.full_observation_spec, state_spec) for name in _names(spec)]
    _check_known("exclude_keys", exclude, names)
    _check_known("rename_keys", list(rename), names)
    whole = [*exclude, *(node.key for node in loose if not node.parts)]
    kept = {key: leaf for key, leaf in given.items() if not any(_is_below(key, prefix) for prefix in whole)}
    own = {key: Leaf(renamed(key, rename), leaf.shape, leaf.dtype) for key, leaf in kept.items()}
    flags = {key: leaf for key, leaf in dones.items() if not (len(key) == 1 and key[0] in FLAGS)}
    observed = [*(leaf.key for key, leaf in own.items() if key in shown), *(node.key for node in loose)]
    if not observed:
        raise SpaceError(f"Nothing is left of the observations: the environment gives {_listed(given) or 'none'}.")
    _check_names([leaf.key for leaf in own.values()], [node.key for node in loose], ours)
    sources = {key: Source(leaf, td_key(key)) for key, leaf in {**own, **flags}.items()}
    ended = {leaf.key for leaf in flags.values()}
    return Form(
        batch=batch,
        observed=[source for key, source in sources.items() if key in shown],
        constant=frozenset(own[key].key for key in own if key in states and key not in observations),
        primed=frozenset(own[key].key for key in own if key in states and key in observations),
        after=[
            *(Source(leaf, td_key(key)) for key, leaf in rewards.items()),
            *(source for key, source in sources.items() if key not in shown),
        ],
        rewards=tuple(rewards),
        truncated=[key for key in ended if key[-1] == "truncated" and (*key[:-1], "done") in ended],
        flags=frozenset(ended),
        ends=_ends(list(dones)),
        masks=_masks(env, list(dones)),
        actions=_actions(env, batch),
        names=observed,
        is_loose=bool(loose),
        levels={**_levels(env, batch, ROOT_SPECS), **_levels(env, batch, NEXT_SPECS, "next")},
    )


def _names(spec: Any) -> Iterator[Any]:
    if spec is not None:
        yield from spec.keys(True, True)


def _leaves(spec: Any, batch: tuple[int, ...]) -> Iterator[tuple[Key, Leaf]]:
    """The leaves of a composite spec that are tensors of a fixed form, for one lane."""
    for name in _names(spec):
        leaf, key = spec[name], as_key(name)
        if leaf is not None and isinstance(leaf.dtype, torch.dtype) and -1 not in leaf.shape:
            yield key, Leaf(key, tuple(leaf.shape[len(batch) :]), leaf.dtype)


def _tensors(what: str, spec: Any, batch: tuple[int, ...]) -> dict[Key, Leaf]:
    """The leaves of a spec, each of which has to be a tensor."""
    leaves = dict(_leaves(spec, batch))
    if wrong := next((key for key in map(as_key, _names(spec)) if key not in leaves), None):
        raise SpaceError(
            f"The {what} {show_key(wrong)} has no tensor form of a fixed shape: {spec[td_key(wrong)]}. Wrap the "
            "environment to have another (agents that differ in shape: padded, or under keys of their own)."
        )
    return leaves


def _levels(env: Any, batch: tuple[int, ...], specs: Sequence[str], *above: str) -> dict[Key, tuple[int, ...]]:
    found: dict[Key, tuple[int, ...]] = {}
    for spec in filter(None, (getattr(env, name, None) for name in specs)):
        for name in spec.keys(True, False):
            if hasattr(spec[name], "keys"):
                found.setdefault((*above, *as_key(name)), tuple(spec[name].shape[len(batch) :]))
    return {key: dims for key, dims in sorted(found.items(), key=lambda item: len(item[0])) if dims}


def _is_below(key: Key, prefix: Key) -> bool:
    return key[: len(prefix)] == prefix


def _listed(keys: Any) -> str:
    return ", ".join(map(show_key, keys))


def _check_known(option: str, asked: Sequence[Key], keys: Sequence[Key]) -> None:
    for prefix in asked:
        if not any(_is_below(key, prefix) for key in keys):
            near = difflib.get_close_matches(show_key(prefix), map(show_key, keys), n=1)
            hint = f"Did you mean {near[0]}?" if near else f"They are {_listed(keys)}."
            raise OptionError(f"{option} names {show_key(prefix)}, which is none of the observations. {hint}")


def _check_names(keys: Sequence[Key], loose: Sequence[Key], ours: Sequence[str]) -> None:
    for key in (*keys, *loose):
        if key[0] in (*ALWAYS_OURS, *ours):
            optional = (
                "max_frames_per_traj= and record= write it; leave them out, or the transform, or g"
                if key[0] in ours
                else "It is a name of ours; g"
            )
            raise SpaceError(
                f"The environment gives an observation {show_key(key)}. {optional}ive it another name: "
                f"rename_keys={{{show_key(key)}: ...}}."
            )
    for place, key in enumerate(keys):
        if clash := next((other for other in keys[:place] if overlap(key, other)), None):
            raise SpaceError(
                f"Two observations would be stored under {show_key(clash)} and {show_key(key)}. Rename one with "
                "rename_keys=."
            )


# --- ends -------------------------------------------------------------------------------------------------------------


def _ends(dones: Sequence[Key]) -> Ends:
    """At the root, if anything there says so, since this is what the resets of such environments go by; else anywhere.

    As TorchRL has it: a lane of which only parts end (agents, say) ends with the first of them.
    """
    root: list[Key] = [key for key in dones if len(key) == 1]
    told: list[Key] = root or list(dones)
    done: list[Key] = [("done",)] if ("done",) in root and ("terminated",) in root else told
    return Ends(
        done=[td_key(key) for key in done],
        masks=[td_key((*key[:-1], "_reset")) for key in done],
        terminated=[td_key(key) for key in told if key[-1] == "terminated"],
        truncated=[td_key(key) for key in told if key[-1] == "truncated"],
    )


def _masks(env: Any, dones: Sequence[Key]) -> dict[Any, tuple[int, ...]]:
    shapes: dict[Any, tuple[int, ...]] = {}
    for key in dones:
        shapes.setdefault(td_key((*key[:-1], "_reset")), tuple(env.full_done_spec[td_key(key)].shape))
    return shapes


# --- actions ----------------------------------------------------------------------------------------------------------


def _actions(env: Any, batch: tuple[int, ...]) -> Actions:
    spec = env.full_action_spec
    keys = [as_key(key) for key in spec.keys(True, True)]
    if not keys:
        raise SpaceError("The environment takes no action: full_action_spec has no keys.")
    leaves = _tensors("action", spec, batch)
    of_lane = spec[(0,) * len(batch)] if batch else spec
    parts = {key: SpecSpace(of_lane[td_key(key)]) for key in keys}
    whole = parts[keys[0]] if len(keys) == 1 else _dict_space(nested(parts.items()))
    return Actions(whole, [leaves[key] for key in keys], list(parts.values()))


def _dict_space(parts: Mapping[str, Any]) -> gym.Space[Any]:
    return spaces.Dict({name: _dict_space(part) if isinstance(part, Mapping) else part for name, part in parts.items()})


def forms_agree(forms: Sequence[Form]) -> None:
    """Checks that all lanes give and take the same.

    Raises:
        SpaceError: naming the first lane that differs from lane 0, and how.
    """
    for lane, form in enumerate(forms[1:], start=1):
        for kind in ("observed", "after", "actions"):
            ours, theirs = (_signature(each, kind) for each in (forms[0], form))
            if ours != theirs:
                other = next((leaf for leaf in theirs if leaf not in ours), "nothing else")
                mine = next((leaf for leaf in ours if leaf not in theirs), "nothing else")
                raise SpaceError(
                    f"All lanes need the same specs; lane {lane} differs from lane 0: {kind} {other} where lane 0 has "
                    f"{mine}."
                )


def _signature(form: Form, kind: str) -> list[str]:
    if kind == "actions":
        leaves = zip(form.actions.leaves, form.actions.parts, strict=True)
        return [f"{show_key(leaf.key)} {part}" for leaf, part in leaves]
    return [str(source.leaf) for source in getattr(form, kind)]
