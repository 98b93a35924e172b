"""From Gymnasium spaces to tensors: which leaves a space has, how its values are written to rows and read from them.

Nothing here steps an environment. Everything is worked out once, from the spaces; what the step loop uses are plain
arrays, or objects that take `rows[lane] = observation` as an array does.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces

from rlcollect.errors import EnvError, OptionError, PolicyError, SpaceError
from rlcollect.layout import Key, Leaf, numpy_dtype, show_key, torch_dtype
from rlcollect.options import What

__all__ = [
    "REWARD",
    "ActionCodec",
    "Batcher",
    "ObservationCodec",
    "Rows",
    "check_known",
    "check_names",
    "check_value",
    "codec_of",
    "fits",
    "observation_codec",
    "renamed",
    "rows_in_time",
    "space_leaf",
    "walk",
]

Array = np.ndarray[Any, Any]
Path = tuple[Any, ...]  # how to get from a raw observation to a leaf: dict keys and tuple indices

TENSOR_SPACES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)
REWARD = Leaf(("reward",), (1,), torch.float32)
ALWAYS_OURS = ("action", "reward", "done", "terminated", "truncated", "next", "collector")


class Rows(Protocol):
    """Takes raw observations: `rows[lane] = observation`, or `rows[lane, t] = observation`, as the arrays are."""

    def __setitem__(self, place: Any, observation: Any, /) -> None: ...


# --- leaves -----------------------------------------------------------------------------------------------------------


def space_leaf(space: gym.Space[Any], key: Key) -> Leaf:
    """The one tensor that a space without parts is stored as, in the space's own dtype.

    Raises:
        SpaceError: the space has no tensor form.
    """
    if not isinstance(space, TENSOR_SPACES):
        remedy = "W" if key[0] == "action" else f"Leave it out (exclude_keys=[{show_key(key)}]) or w"
        raise SpaceError(
            f"The space of {show_key(key)} has no tensor form: {space}. Supported are Box, Discrete, MultiDiscrete, "
            f"MultiBinary, Dict and Tuple. {remedy}rap the environment."
        )
    assert space.shape is not None
    try:
        return Leaf(key, tuple(space.shape), torch_dtype(np.dtype(space.dtype)))
    except TypeError as error:
        raise SpaceError(
            f"The space of {show_key(key)} has dtype {space.dtype}, and torch has no such dtype. "
            "Wrap the environment to give another."
        ) from error


def walk(space: gym.Space[Any], key: Key, path: Path) -> Iterator[tuple[gym.Space[Any], Key, Path]]:
    """The parts of a space that have no parts themselves: with the key they are stored under, and the way there."""
    if isinstance(space, spaces.Dict):
        for name, part in space.spaces.items():
            yield from walk(part, (*key, str(name)), (*path, name))
    elif isinstance(space, spaces.Tuple):
        for index, part in enumerate(space.spaces):
            yield from walk(part, (*key, str(index)), (*path, index))
    else:
        yield space, key, path


def _starts_with(key: Key, prefix: Key) -> bool:
    return key[: len(prefix)] == prefix


def check_known(option: str, asked: Sequence[Key], keys: Sequence[Key]) -> None:
    """Whether an option names keys, or beginnings of keys, that there are.

    Raises:
        OptionError: naming the one that there is not, and the nearest.
    """
    for prefix in asked:
        if not any(_starts_with(key, prefix) for key in keys):
            names = [show_key(key) for key in keys]
            near = difflib.get_close_matches(show_key(prefix), names, n=1)
            hint = f"Did you mean {near[0]}?" if near else f"It has {', '.join(names)}."
            raise OptionError(f"{option} names {show_key(prefix)}, which the observation space does not have. {hint}")


def renamed(key: Key, renames: Mapping[Key, Key]) -> Key:
    """The key under its new name, if it or a level above it has one."""
    for old in sorted(renames, key=len, reverse=True):
        if _starts_with(key, old):
            return (*renames[old], *key[len(old) :])
    return key


def check_names(keys: Sequence[Key], ours: Sequence[str]) -> None:
    """Whether observation keys are none of ours, and do not lie below one another.

    Raises:
        SpaceError: naming the key.
    """
    for i, key in enumerate(keys):
        if key[0] in (*ALWAYS_OURS, *ours):
            raise SpaceError(
                f"The observation space has a key {show_key(key)}, which is a name of ours (or named in info_keys). "
                f"Give it another: rename_keys={{{show_key(key)}: ...}}."
            )
        for other in keys[:i]:
            if _starts_with(key, other) or _starts_with(other, key):
                raise SpaceError(
                    f"Two parts of the observation space would be stored under {show_key(other)} and {show_key(key)}. "
                    "Rename one with rename_keys=."
                )


# --- observations -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ObservationCodec:
    """How raw observations are stored.

    Attributes:
        leaves: the tensors of one observation.
        paths: for each leaf, the way to it in a raw observation.
    """

    leaves: tuple[Leaf, ...]
    paths: tuple[Path, ...]

    def rows(self, arrays: Mapping[Key, Array]) -> Rows:
        """One object to store observations in, over arrays `[N, *shape]` or `[N, T, *shape]`, one a leaf."""
        if self.paths == ((),):
            return arrays[self.leaves[0].key]
        return _NestedRows([(path, arrays[leaf.key]) for leaf, path in zip(self.leaves, self.paths, strict=True)])

    def checker(self) -> Callable[[Any], None]:
        """`check`, as quick as it can be."""
        if self.paths != ((),):
            return self.check
        shape, dtype = self.leaves[0].shape, numpy_dtype(self.leaves[0].dtype)

        def check(observation: Any) -> None:
            if not (type(observation) is np.ndarray and observation.shape == shape and observation.dtype == dtype):
                self.check(observation)

        return check

    def check(self, observation: Any) -> None:
        """Holds one raw observation against the space: structure, shapes, dtypes; not the bounds.

        Raises:
            EnvError: naming the key, what was expected and what came.
        """
        for leaf, path in zip(self.leaves, self.paths, strict=True):
            value = observation
            for part in path:
                try:
                    value = value[part]
                except (KeyError, IndexError, TypeError) as error:
                    raise EnvError(
                        f"The observation lacks {show_key(leaf.key)}, which its space has; it is {_describe(value)}."
                    ) from error
            if not fits(value, leaf):
                check_value(f"The observation {show_key(leaf.key)}", value, leaf)


class _NestedRows:
    """Rows of an observation with parts; takes observations as a plain array does."""

    __slots__ = ("_leaves",)

    def __init__(self, leaves: list[tuple[Path, Array]]) -> None:
        self._leaves = leaves

    def __setitem__(self, place: Any, observation: Any) -> None:
        for path, array in self._leaves:
            value = observation
            for part in path:
                value = value[part]
            array[place] = value


def observation_codec(
    space: gym.Space[Any],
    *,
    exclude: Sequence[Key] = (),
    rename: Mapping[Key, Key] | None = None,
    ours: Sequence[str] = (),
    keep_float64: bool = False,
    action_mask: Leaf | None = None,
) -> ObservationCodec:
    """Plans how observations of `space` are stored.

    Args:
        space: the observation space of one lane.
        exclude: keys (or prefixes of keys) to leave out.
        rename: new names, by key or prefix.
        ours: names that a key may not have, beside those that are always ours.
        keep_float64: leave float64 as it is; else it becomes torch's default float.
        action_mask: stored beside the observation; raw observations are then pairs `(observation, mask)`.

    Raises:
        SpaceError: a part without tensor form, a key that is one of ours, or no key at all.
        OptionError: `exclude` or `rename` name what is not there.
    """
    root: Key = () if isinstance(space, spaces.Dict) else ("observation",)
    parts = list(walk(space, root, ()))
    keys = [key for _, key, _ in parts]
    check_known("exclude_keys", exclude, keys)
    check_known("rename_keys", list(rename or {}), keys)
    kept = [part for part in parts if not any(_starts_with(part[1], prefix) for prefix in exclude)]
    if not kept:
        raise SpaceError(f"Nothing is left of the observation space {space}.")
    leaves = [space_leaf(part, renamed(key, rename or {})) for part, key, _ in kept]
    paths = [path for _, _, path in kept]
    if not keep_float64:
        leaves = [
            Leaf(leaf.key, leaf.shape, torch.get_default_dtype()) if leaf.dtype == torch.float64 else leaf
            for leaf in leaves
        ]
    check_names([leaf.key for leaf in leaves], ours)
    if action_mask is not None:
        paths = [(0, *path) for path in paths]
        leaves, paths = [*leaves, action_mask], [*paths, (1,)]
    return ObservationCodec(tuple(leaves), tuple(paths))


def codec_of(space: gym.Space[Any], what: What, names: Sequence[str], mask: Leaf | None) -> ObservationCodec:
    """How observations are stored, as the options ask for it.

    Args:
        space: the observation space of one lane.
        what: keys, names and dtypes are taken from here.
        names: names that a key may not have, beside those that are always ours.
        mask: the form of an action mask that comes in the info; None: none does.
    """
    ours = [*names, *(["info"] if what.info_forms else []), *(["action_mask"] if mask else [])]
    return observation_codec(
        space,
        exclude=what.exclude_keys,  # type: ignore[arg-type]
        rename=what.rename_keys,  # type: ignore[arg-type]
        ours=ours,
        keep_float64=what.obs_dtype == "env",
        action_mask=mask,
    )


def rows_in_time(codec: ObservationCodec, arrays: Mapping[Key, Array]) -> list[Rows]:
    """Row objects for each time of arrays `[N, T, *shape]`."""
    if len(arrays) == 1 and codec.paths == ((),):
        return list(next(iter(arrays.values())).swapaxes(0, 1))
    in_time = [array.swapaxes(0, 1) for array in arrays.values()]
    return [codec.rows(dict(zip(arrays, rows, strict=True))) for rows in zip(*in_time, strict=True)]


# --- actions ----------------------------------------------------------------------------------------------------------

Decoder = Callable[[Sequence[Array]], Sequence[Any]]
Batcher = Callable[[Sequence[Array]], Any]


class ActionCodec:
    """How actions are stored, and given to the environments.

    Attributes:
        space: the action space of one lane.
        leaves: the tensors of one action, under "action".
        decode: from rows `[N, *shape]`, one a leaf, to the N actions that the environments receive, in the form that
            `space.sample()` has: scalars and arrays of the space's dtype that nobody else holds, in dicts and tuples.
        batch: from the same rows to one action of all lanes: arrays `[N, *shape]` in dicts and tuples.

    Raises:
        SpaceError: a part of the space has no tensor form.
    """

    def __init__(self, space: gym.Space[Any]) -> None:
        self.space = space
        self.parts: Sequence[gym.Space[Any]] = tuple(part for part, _, _ in walk(space, ("action",), ()))
        self.leaves: Sequence[Leaf] = tuple(_action_leaf(part, key) for part, key, _ in walk(space, ("action",), ()))
        if not self.leaves:
            raise SpaceError(f"The action space {space} has no parts.")
        self.decode = _decoder(space, iter(range(len(self.leaves))))
        self.batch = _batcher(space, iter(range(len(self.leaves))))


def _action_leaf(space: gym.Space[Any], key: Key) -> Leaf:
    leaf = space_leaf(space, key)
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete):
        return Leaf(key, leaf.shape, torch.int64)
    if leaf.dtype.is_floating_point:
        return Leaf(key, leaf.shape, torch.float32)
    return leaf


def _decoder(space: gym.Space[Any], indices: Iterator[int]) -> Decoder:
    if isinstance(space, spaces.Dict):
        parts = {name: _decoder(part, indices) for name, part in space.spaces.items()}
        return lambda rows: [
            dict(zip(parts, values, strict=True)) for values in zip(*(d(rows) for d in parts.values()), strict=True)
        ]
    if isinstance(space, spaces.Tuple):
        decoders = [_decoder(part, indices) for part in space.spaces]
        return lambda rows: list(zip(*(decode(rows) for decode in decoders), strict=True))
    index, dtype = next(indices), np.dtype(space.dtype)
    if isinstance(space, spaces.Discrete):
        scalar = _Scalars(space).__getitem__
        return lambda rows: list(map(scalar, rows[index].tolist()))
    return lambda rows: list(rows[index].astype(dtype))


def _batcher(space: gym.Space[Any], indices: Iterator[int]) -> Batcher:
    if isinstance(space, spaces.Dict):
        parts = {name: _batcher(part, indices) for name, part in space.spaces.items()}
        return lambda rows: {name: batch(rows) for name, batch in parts.items()}
    if isinstance(space, spaces.Tuple):
        batchers = [_batcher(part, indices) for part in space.spaces]
        return lambda rows: tuple([batch(rows) for batch in batchers])
    index, dtype = next(indices), np.dtype(space.dtype)
    return lambda rows: rows[index].astype(dtype)


class _Scalars(dict[int, Any]):
    """The actions of a Discrete space as the scalars that `sample()` gives, each made once.

    numpy takes ten times as long to make them from an array, and Gymnasium's own checks take longer for an int.
    """

    KEPT = 4096

    def __init__(self, space: spaces.Discrete) -> None:
        super().__init__()
        self._space = space
        self._scalar = np.dtype(space.dtype).type

    def __missing__(self, action: int) -> Any:
        if not int(self._space.start) <= action < int(self._space.start) + int(self._space.n):
            raise PolicyError(f"The action {action} is not in {self._space}.")
        scalar = self._scalar(action)
        if len(self) < self.KEPT:
            self[action] = scalar
        return scalar


# --- checks -----------------------------------------------------------------------------------------------------------


def fits(value: Any, leaf: Leaf) -> bool:
    """Whether a value is exactly what its leaf is stored as; where not, `check_value` tells whether that matters."""
    return isinstance(value, np.ndarray) and value.shape == leaf.shape and value.dtype == numpy_dtype(leaf.dtype)


def check_value(what: str, value: Any, leaf: Leaf) -> None:
    """Holds one value against the leaf it is stored as.

    Raises:
        EnvError: another shape, or a dtype that loses meaning when cast (float to int, text).
    """
    if isinstance(value, Mapping):
        below = f" Ask for one of them, ({show_key(leaf.key)}, {next(iter(value))!r}) say." if value else ""
        raise EnvError(f"{what} should be {leaf}; {_describe(value)} came.{below}")
    try:
        array = np.asarray(value)
    except ValueError as error:  # ragged
        raise EnvError(f"{what} should be {leaf}; it has no array form: {error}.") from error
    if array.shape != leaf.shape:
        raise EnvError(f"{what} should have shape {list(leaf.shape)}; {_describe(value)} came.")
    wanted = numpy_dtype(leaf.dtype)
    whole = wanted.kind in "iu" and array.dtype.kind in "iu" and bool((array.astype(wanted) == array).all())
    if not whole and not (np.can_cast(array.dtype, wanted, "same_kind") and wanted.kind not in "iu"):
        raise EnvError(f"{what} should have dtype {wanted}; {_describe(value)} came.")


def _describe(value: Any) -> str:
    """What came, in a few words: arrays by shape and dtype, the rest by type."""
    if isinstance(value, Mapping):
        return f"a mapping with the keys {list(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array of shape {list(value.shape)} and dtype {value.dtype}"
    return f"{value!r} ({type(value).__name__})"
