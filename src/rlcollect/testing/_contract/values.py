"""Values that environments give: held against a space, compared bit by bit, told in a few words."""

from __future__ import annotations

import reprlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlcollect.envs.spaces import check_value, space_leaf
from rlcollect.errors import EnvError, SpaceError
from rlcollect.testing._contract.report import Level
from rlcollect.testing._contract.subject import guarded

__all__ = ["Fingerprint", "Misfit", "as_array", "as_stored", "described", "difference", "fingerprint", "misfits"]

Array: TypeAlias = np.ndarray[Any, Any]
Space: TypeAlias = gym.Space[Any]
Fingerprint: TypeAlias = tuple[tuple[str, int], ...]
"""For each part of a value: the way to it, and a number that is equal for equal bits."""

_NUMBERS = "biufc"
_CONTENT = _NUMBERS + "mMSU"


def described(value: Any) -> str:
    """What came: arrays by shape and dtype, the rest by a short text and type."""
    if isinstance(value, np.ndarray):
        return f"an array of shape {list(value.shape)} and dtype {value.dtype}"
    return f"{reprlib.repr(value)} ({type(value).__name__})"


def as_array(value: Any) -> Array:
    """As an array; one of objects where it has no other form."""
    try:
        return np.asarray(value)
    except ValueError:  # ragged
        return np.array(None)


# --- bits -------------------------------------------------------------------------------------------------------------


def fingerprint(value: Any, path: str) -> Fingerprint:
    """The bits of everything in a value. Objects that are no numbers or text count as equal."""
    return tuple((at, _bits(part)) for at, part in _parts(value, path))


def difference(one: Fingerprint, other: Fingerprint) -> str | None:
    """The first part in which two values differ."""
    if one == other:
        return None
    ours, theirs = dict(one), dict(other)
    return next(path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path))


def as_stored(space: Space, value: Any) -> Any:
    """A value as it is when written to arrays of the space's dtypes: so vector environments give it."""
    if isinstance(space, spaces.Dict):
        return {key: as_stored(part, value[key]) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(as_stored(part, item) for part, item in zip(space.spaces, value, strict=True))
    return value if space.dtype is None or space.shape is None else np.asarray(value).astype(space.dtype)


def _parts(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield from _parts(value[key], f"{path}[{key!r}]")
    elif isinstance(value, tuple | list) or (isinstance(value, np.ndarray) and value.dtype == object and value.ndim):
        for index, part in enumerate(value):
            yield from _parts(part, f"{path}[{index}]")
    else:
        yield path, value


def _bits(value: Any) -> int:
    array = as_array(value)
    if array.dtype.kind not in _CONTENT:
        return hash(None)
    return hash((array.dtype.str, array.shape, array.tobytes()))


# --- against a space --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Misfit:
    """How a value does not fit its space.

    Attributes:
        aspect: "form" (structure, shape, dtype) or "values".
        level: of a finding about it.
        text: what came, and what was expected.
        remedy: what to do.
    """

    aspect: Literal["form", "values"]
    level: Level
    text: str
    remedy: str


def misfits(space: Space, value: Any, path: str = "observation") -> Iterator[Misfit]:
    """Everything in which a value does not fit its space; of one array, the first only."""
    if isinstance(space, spaces.Dict):
        yield from _dict_misfits(space, value, path)
    elif isinstance(space, spaces.Tuple):
        if not isinstance(value, tuple) or len(value) != len(space.spaces):
            yield _form(f"{path} should be a tuple of {len(space.spaces)}; {described(value)} came")
            return
        for index, (part, item) in enumerate(zip(space.spaces, value, strict=True)):
            yield from misfits(part, item, f"{path}[{index}]")
    elif (misfit := _leaf_misfit(space, value, path)) is not None:
        yield misfit


def _dict_misfits(space: spaces.Dict, value: Any, path: str) -> Iterator[Misfit]:
    if not isinstance(value, Mapping):
        yield _form(f"{path} should be a dict with the keys {list(space.spaces)}; {described(value)} came")
        return
    for key in (key for key in value if key not in space.spaces):
        yield _form(f"{path} has the key {key!r}, which its space has not")
    for key, part in space.spaces.items():
        if key in value:
            yield from misfits(part, value[key], f"{path}[{key!r}]")
        else:
            yield _form(f"{path} lacks the key {key!r}, which its space has")


def _form(text: str) -> Misfit:
    return Misfit("form", "broken", text, "Make observation_space and what reset and step return agree.")


def _leaf_misfit(space: Space, value: Any, path: str) -> Misfit | None:
    try:
        leaf = space_leaf(space, ("observation",))
    except SpaceError:  # told of once, by "spaces"
        if guarded("observation values", "in contains() of its space", space.contains, value):
            return None
        return Misfit("values", "broken", f"{path} is {described(value)}, not in {space}", _WIDEN)
    try:
        check_value(path, value, leaf)
    except EnvError as error:
        return _form(str(error).removesuffix("."))
    array = as_array(value)
    return _value_misfit(space, array, path) or _cast(space, value, array, path)


_WIDEN = "Widen the space, or bring the value into its bounds (np.clip)."


def _value_misfit(space: Space, array: Array, path: str) -> Misfit | None:
    if array.dtype.kind in "fc" and (at := _first(np.isnan(array))) is not None:
        remedy = "Find where it is computed: one NaN ruins the weights of what learns from it."
        return Misfit("values", "broken", f"{_element(path, at)} is NaN", remedy)
    low, high = _limits(space)
    with np.errstate(all="ignore"):
        array = array.astype(space.dtype)
    if (at := _first((array < low) | (array > high))) is not None:
        bounds = f"[{np.broadcast_to(low, array.shape)[at]}, {np.broadcast_to(high, array.shape)[at]}]"
        return Misfit("values", "broken", f"{_element(path, at)} is {array[at]}, outside {bounds}", _WIDEN)
    if array.dtype.kind == "f" and (at := _first(np.isinf(array))) is not None:
        remedy = "Its space allows it, and networks turn it into NaN: clip it."
        return Misfit("values", "warning", f"{_element(path, at)} is {array[at]}", remedy)
    return None


def _cast(space: Space, value: Any, array: Array, path: str) -> Misfit | None:
    if isinstance(value, np.ndarray | np.generic) and array.dtype == space.dtype:
        return None
    if isinstance(space, spaces.Discrete):  # an int as good as any
        return None
    remedy = f"rlcollect casts it. Others may not: return np.asarray(..., dtype=np.{space.dtype})."
    came = array.dtype if isinstance(value, np.ndarray | np.generic) else f"of type {type(value).__name__}"
    return Misfit("form", "warning", f"{path} is {came}, where its space says {space.dtype}", remedy)


def _limits(space: Any) -> tuple[Any, Any]:
    """The least and the greatest value, of each element."""
    if isinstance(space, spaces.Box):
        return space.low, space.high
    if isinstance(space, spaces.Discrete):
        return space.start, space.start + space.n - 1
    if isinstance(space, spaces.MultiDiscrete):
        return space.start, space.start + space.nvec - 1
    return 0, 1


def _first(wrong: Any) -> tuple[int, ...] | None:
    places = np.argwhere(wrong)
    return tuple(int(index) for index in places[0]) if len(places) else None


def _element(path: str, at: tuple[int, ...]) -> str:
    return f"{path}[{', '.join(map(str, at))}]" if at else path
