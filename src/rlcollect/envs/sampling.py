"""Random actions, for all lanes at once, in the exact bounds of the space.

The distributions are Gymnasium's: uniform where both bounds are finite, a shifted exponential where one is, normal
where none is. Draws come in blocks of a fixed number of steps, so that a stream does not depend on how it is cut
into batches.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from rlcollect.errors import EnvError, SpaceError
from rlcollect.interfaces import ActionForm
from rlcollect.layout import Leaf, numpy_dtype

__all__ = ["ActionSampler", "DrivenSampler", "MaskedActionSampler", "draw_space"]

Array = np.ndarray[Any, Any]
BLOCK = 64  # steps drawn at once


class ActionSampler:
    """Draws random actions ahead of their use.

    Args:
        codec: how actions are stored.
        num_lanes: N.
        rng: where the draws come from; the sampler is its only user.
    """

    def __init__(self, codec: ActionForm, num_lanes: int, rng: np.random.Generator) -> None:
        self._codec = codec
        self._num_lanes = num_lanes
        self._rng = rng
        self._blocks: deque[tuple[Mapping[str, Any], list[Array]]] = (
            deque()
        )  # each with the generator's state before it
        self._used = 0  # steps of the first block

    def peek(self, steps: int, skip: int = 0) -> list[Array]:
        """The next `steps` actions of every lane, after some: `[T, N, *shape]` for each leaf. They stay the next."""
        start = self._used + skip
        stop = start + steps
        while len(self._blocks) * BLOCK < stop:
            self._draw()
        first = start // BLOCK
        blocks = (block for _, block in itertools.islice(self._blocks, first, -(-stop // BLOCK)))
        return [
            np.concatenate(leaf)[start - first * BLOCK : stop - first * BLOCK] for leaf in zip(*blocks, strict=True)
        ]

    def advance(self, steps: int) -> None:
        """Passes over the next `steps` actions."""
        self._used += steps
        while self._used >= BLOCK:
            self._blocks.popleft()
            self._used -= BLOCK

    def _draw(self) -> None:
        before = self._rng.bit_generator.state
        lead = (BLOCK, self._num_lanes)
        leaves = zip(self._codec.parts, self._codec.leaves, strict=True)
        self._blocks.append((before, [draw_space(space, leaf, lead, self._rng) for space, leaf in leaves]))

    def state_dict(self) -> dict[str, Any]:
        """The generator's state before the block in use, and how much of that is used."""
        before = self._blocks[0][0] if self._blocks else self._rng.bit_generator.state
        return {"generator": before, "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self._rng.bit_generator.state = state["generator"]
        self._blocks.clear()
        self._used = state["used"]


class MaskedActionSampler:
    """Draws random actions among those that a mask allows.

    Masks have one entry an action for Discrete (`[N, n]`), and one an action of each part, in a row, for
    MultiDiscrete (`[N, sum(nvec)]`); an entry that is not zero allows the action.

    Raises:
        SpaceError: masks mean nothing for this space, or have another shape.
    """

    def __init__(self, codec: ActionForm, mask: Leaf, num_lanes: int, rng: np.random.Generator) -> None:
        space = codec.space
        if isinstance(space, spaces.Discrete):
            self._sizes, self._start, self._flat = [int(space.n)], np.array([int(space.start)]), True
        elif isinstance(space, spaces.MultiDiscrete) and space.nvec.ndim == 1:
            self._sizes, self._start, self._flat = space.nvec.tolist(), space.start.astype(np.int64), False
        else:
            raise SpaceError(
                f'Random actions cannot respect "action_mask" in the action space {space}: only Discrete and flat '
                'MultiDiscrete. Rename the key (rename_keys={"action_mask": ...}), or pass a policy.'
            )
        if mask.shape != (sum(self._sizes),):
            raise SpaceError(
                f'"action_mask" has shape {list(mask.shape)}; for the action space {space} it should be '
                f"[{sum(self._sizes)}], one entry an action."
            )
        self._num_lanes = num_lanes
        self._rng = rng
        self._splits = np.cumsum(self._sizes)[:-1].tolist()

    def sample(self, masks: Array) -> list[Array]:
        """One allowed action a lane: an array `[N, *shape]` for each leaf.

        Args:
            masks: `[N, *mask shape]`.

        Raises:
            EnvError: a mask allows nothing.
        """
        allowed = masks != 0
        keys = np.where(allowed, self._rng.random(allowed.shape), -1.0)
        actions = []
        for part in np.split(keys, self._splits, axis=1):
            best = part.argmax(1)
            if (part[np.arange(self._num_lanes), best] < 0).any():
                lane = int((part[np.arange(self._num_lanes), best] < 0).argmax())
                raise EnvError(f'lane {lane}: "action_mask" allows no action at all: {masks[lane].tolist()}.')
            actions.append(best)
        return [actions[0] + self._start[0]] if self._flat else [np.stack(actions, 1) + self._start]

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"generator": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self._rng.bit_generator.state = state["generator"]


class DrivenSampler:
    """Random actions of the environments' own making.

    Args:
        draw: the driver's; it may draw from the generator it is given, or from torch's.
        rng: the generator.
    """

    def __init__(self, draw: Callable[[np.random.Generator], Sequence[Any]], rng: np.random.Generator) -> None:
        self._draw = draw
        self._rng = rng

    def sample(self) -> Sequence[Any]:
        """One action a lane: `[N, *shape]` for each leaf."""
        return self._draw(self._rng)

    def state_dict(self) -> dict[str, Any]:
        """The generator's state."""
        return {"generator": self._rng.bit_generator.state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self._rng.bit_generator.state = state["generator"]


def draw_space(space: Any, leaf: Leaf, lead: Sequence[int], rng: np.random.Generator) -> Array:
    """Random actions `[*lead, *shape]` of a space without parts, in the dtype of its leaf."""
    shape = (*lead, *leaf.shape)
    if isinstance(space, spaces.Discrete):
        return rng.integers(int(space.start), int(space.start) + int(space.n) - 1, size=shape, endpoint=True)
    if isinstance(space, spaces.MultiDiscrete):
        first = space.start.astype(np.int64)
        return rng.integers(first, first + (space.nvec.astype(np.int64) - 1), size=shape, endpoint=True)
    if isinstance(space, spaces.MultiBinary):
        return rng.integers(0, 2, size=shape, dtype=np.int8)
    if space.dtype.kind == "f":
        return _rounded(_draw_reals(space, shape, rng), space, numpy_dtype(leaf.dtype))
    if space.dtype.kind == "b":
        return rng.integers(space.low, space.high, size=shape, endpoint=True, dtype=np.bool_)
    return rng.integers(space.low, space.high, size=shape, endpoint=True, dtype=space.dtype)


def _rounded(reals: Array, space: spaces.Box, dtype: np.dtype[Any]) -> Array:
    """In the precision that actions are stored in, and still within bounds of a higher one."""
    limits = np.finfo(dtype)
    stored = np.clip(reals, limits.min, limits.max).astype(dtype)
    stored = np.where(stored < space.low.astype(np.float64), np.nextafter(stored, limits.max), stored)
    return np.where(stored > space.high.astype(np.float64), np.nextafter(stored, limits.min), stored).astype(dtype)


def _draw_reals(space: spaces.Box, shape: Sequence[int], rng: np.random.Generator) -> Array:
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    above, below = np.isfinite(low), np.isfinite(high)
    unit = rng.random(shape)
    bounded = np.where(above, low, 0) * (1 - unit) + np.where(below, high, 0) * unit
    tail = rng.exponential(size=shape) if (above ^ below).any() else unit
    normal = rng.normal(size=shape) if (~above & ~below).any() else unit
    reals = np.where(above & below, bounded, np.where(above, low + tail, np.where(below, high - tail, normal)))
    return np.clip(reals, low, high)
