"""The shared memory of a vector environment: which arrays there are, and where they lie.

Each side carves it in the same way, from a plan that has numbers in it and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np

from rlcollect.envs.process.forms import leaves
from rlcollect.layout import ALIGNMENT
from rlcollect.processes.lockstep import WORDS

__all__ = ["Memory", "Plan", "starts"]

Array = np.ndarray[Any, Any]
PAGE, LANE = 16384, 4096  # bytes of a worker, and more of each of its lanes, for what crosses by value at each step


@dataclass(frozen=True)
class Plan:
    """What is to be carved.

    Attributes:
        lanes: how many.
        workers: how many.
        observations, actions: shape and dtype of each leaf that has a fixed form.
        page: bytes that a worker has for what crosses by value.
    """

    lanes: int
    workers: int
    observations: Sequence[tuple[tuple[int, ...], str]]
    actions: Sequence[tuple[tuple[int, ...], str]]
    page: int

    @classmethod
    def of(cls, observation_space: gym.Space[Any], action_space: gym.Space[Any], lanes: int, workers: int) -> Plan:
        """The plan for these spaces of a lane. Pages have room for the last observation of every lane at once."""
        observations, actions = _fixed(observation_space), _fixed(action_space)
        frame = sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in observations)
        return cls(lanes, workers, observations, actions, PAGE + -(-lanes // workers) * (LANE + frame))

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(_aligned(math.prod(shape) * np.dtype(dtype).itemsize) for shape, dtype in self._arrays())

    def carve(self, buffer: Array) -> Iterator[Array]:
        """The arrays, one after the other, as views of `buffer`."""
        start = 0
        for shape, dtype in self._arrays():
            nbytes = math.prod(shape) * np.dtype(dtype).itemsize
            yield buffer[start : start + nbytes].view(dtype).reshape(shape)
            start += _aligned(nbytes)

    def _arrays(self) -> Iterator[tuple[tuple[int, ...], str]]:
        yield (self.workers, WORDS), "<i8" if np.little_endian else ">i8"
        yield (self.lanes,), np.dtype(np.float64).str
        yield (self.lanes,), np.dtype(np.bool_).str
        yield (self.lanes,), np.dtype(np.bool_).str
        yield (self.workers, self.page), np.dtype(np.uint8).str
        for shape, dtype in (*self.observations, *self.actions):
            yield (self.lanes, *shape), dtype


class Memory:
    """The arrays.

    Attributes:
        words: int64 `[workers, 16]`, see `lockstep`.
        rewards: float64 `[lanes]`.
        terminations, truncations: bool `[lanes]`.
        pages: uint8 `[workers, bytes]`, for what crosses by value at each step.
        observations, actions: a leaf each, `[lanes, *shape]`.

    Args:
        plan: says how many.
        buffer: uint8, `plan.nbytes` of them.
    """

    def __init__(self, plan: Plan, buffer: Array) -> None:
        arrays = plan.carve(buffer)
        self.words = next(arrays)
        self.rewards = next(arrays)
        self.terminations = next(arrays)
        self.truncations = next(arrays)
        self.pages = next(arrays)
        self.observations = [next(arrays) for _ in plan.observations]
        self.actions = [next(arrays) for _ in plan.actions]


def _fixed(space: gym.Space[Any]) -> tuple[tuple[tuple[int, ...], str], ...]:
    return tuple(_of(each) for each in leaves(space) if each.is_fixed)


def _of(leaf: Any) -> tuple[tuple[int, ...], str]:
    return tuple(leaf.space.shape), np.dtype(leaf.space.dtype).str


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def starts(lanes: int, parts: int) -> list[int]:
    """Where each part begins, and the last one ends, if lanes are dealt out evenly."""
    return [lanes * part // parts for part in range(parts + 1)]
