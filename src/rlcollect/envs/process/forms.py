"""What of a space has a fixed form, and so a place in shared memory; the rest is loose, and crosses by value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlcollect.errors import EnvError

__all__ = ["Leaf", "Writer", "leaves", "parts", "whole"]

Array = np.ndarray[Any, Any]
FIXED = spaces.Box | spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary


@dataclass(frozen=True)
class Leaf:
    """A part of a space that has no parts.

    Attributes:
        space: itself.
        name: the way to it, as the user would write it.
        is_fixed: whether its values are arrays of one shape and dtype.
    """

    space: gym.Space[Any]
    name: str
    is_fixed: bool


def leaves(space: gym.Space[Any], name: str = "observation") -> list[Leaf]:
    """All leaves, in the order of `parts`."""
    if isinstance(space, spaces.Dict):
        return [leaf for key, part in space.spaces.items() for leaf in leaves(part, f"{name}[{key!r}]")]
    if isinstance(space, spaces.Tuple):
        return [leaf for place, part in enumerate(space.spaces) for leaf in leaves(part, f"{name}[{place}]")]
    return [Leaf(space, name, isinstance(space, FIXED))]


def parts(space: gym.Space[Any], value: Any) -> Iterator[Any]:
    """The leaves of a value, of a space or of a batch of it."""
    if isinstance(space, spaces.Dict):
        for key, part in space.spaces.items():
            yield from parts(part, value[key])
    elif isinstance(space, spaces.Tuple):
        for place, part in enumerate(space.spaces):
            yield from parts(part, value[place])
    else:
        yield value


def whole(space: gym.Space[Any], values: Iterator[Any]) -> Any:
    """The value that has these leaves."""
    if isinstance(space, spaces.Dict):
        return {key: whole(part, values) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(whole(part, values) for part in space.spaces)
    return next(values)


class Writer:
    """Writes observations of a lane to where they belong.

    Args:
        space: of a lane.
        arrays: of the leaves that have a fixed form, `[lanes, *shape]` each.
    """

    def __init__(self, space: gym.Space[Any], arrays: Sequence[Array]) -> None:
        left = iter(arrays)
        self._space = space
        self._leaves = [_row_writer(leaf, next(left)) if leaf.is_fixed else None for leaf in leaves(space)]

    def compiled(self) -> Callable[[int, Any], Sequence[Any]]:
        """A function of lane and observation; it returns the loose leaves."""
        if (
            len(self._leaves) == 1
            and self._leaves[0] is not None
            and not isinstance(self._space, spaces.Dict | spaces.Tuple)
        ):
            return self._leaves[0]
        return self._write

    def _write(self, lane: int, observation: Any) -> Sequence[Any]:
        loose = []
        for write, part in zip(self._leaves, parts(self._space, observation), strict=True):
            if write is None:
                loose.append(part)
            else:
                write(lane, part)
        return loose


def _row_writer(leaf: Leaf, array: Array) -> Callable[[int, Any], Sequence[Any]]:
    shape, dtype, name = array.shape[1:], array.dtype, leaf.name

    def write(lane: int, value: Any) -> Sequence[Any]:
        if type(value) is np.ndarray and value.shape == shape and value.dtype is dtype:
            array[lane] = value
        else:
            array[lane] = _fitting(value, shape, dtype, name)
        return ()

    return write


def _fitting(value: Any, shape: tuple[int, ...], dtype: np.dtype[Any], name: str) -> Array:
    """As NumPy casts where Gymnasium gathers observations; nothing is broadcast."""
    array = np.asarray(value)
    if array.shape != shape or not np.can_cast(array.dtype, dtype, "same_kind"):
        raise EnvError(
            f"{name} should be an array of shape {list(shape)} and dtype {dtype}, by its space; one of shape "
            f"{list(array.shape)} and dtype {array.dtype} came."
        )
    return array
