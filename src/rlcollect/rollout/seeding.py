"""Seeds and random streams.

Every stream is a child of `SeedSequence(seed, spawn_key=(worker, who, generation))`, never `seed + i`: streams of
lanes, workers and neighbouring seeds are independent.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tensordict.nn import set_interaction_type
from tensordict.nn.probabilistic import interaction_type

__all__ = ["ProgramState", "TorchStream", "action_generator", "lane_seed", "torch_seed", "untouched_randomness"]

Seed = int | Sequence[int]

# "who" of streams that are no lane's; lanes count from 0
POLICY = 2**31
ACTIONS = 2**31 + 1


def lane_seed(seed: Seed, worker: int, lane: int, generation: int = 0) -> int:
    """The seed of a lane's environment: 31 bits, since some simulators take a C int."""
    return _word(seed, worker, lane, generation) & 0x7FFF_FFFF


def torch_seed(seed: Seed, worker: int, generation: int = 0) -> int:
    """The seed of a worker's torch stream, which stochastic policies draw from."""
    return _word(seed, worker, POLICY, generation)


def action_generator(seed: Seed, worker: int, generation: int = 0) -> np.random.Generator:
    """Where a worker's random actions come from."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(worker, ACTIONS, generation)))


def _word(seed: Seed, worker: int, who: int, generation: int) -> int:
    child = np.random.SeedSequence(seed, spawn_key=(worker, who, generation))
    return int(child.generate_state(1, np.uint64)[0]) & 0x7FFF_FFFF_FFFF_FFFF


class TorchStream:
    """A state of torch's global generator that is the collector's own: inside `with stream:` draws come from it.

    The learner's draws change no data, and collection changes none of the learner's.
    """

    def __init__(self, seed: int) -> None:
        self.state = torch.Generator().manual_seed(seed).get_state()
        self._outside = self.state

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self.state)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self._outside)


class ProgramState:
    """What of the program's own a rollout changes while it is made: torch's random state, gradients, exploration.

    Each is put back where it was changed; this puts them back once more when that was broken off.
    """

    def __init__(self) -> None:
        self._gradients = torch.is_grad_enabled()
        self._exploration = interaction_type()
        self._random = torch.get_rng_state()

    def put_back(self) -> None:
        """Safe to call again."""
        torch.set_grad_enabled(self._gradients)
        set_interaction_type(self._exploration).__enter__()
        torch.set_rng_state(self._random)


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Puts the global generators of `random`, numpy and torch back as they were."""
    states: tuple[Any, Any, torch.Tensor] = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
