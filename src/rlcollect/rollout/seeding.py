"""Random streams of policies, and what of the program's own a rollout changes; seeds are in `rlcollect.seeds`."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tensordict.nn import set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from rlcollect.devices import CPU
from rlcollect.seeds import ACTIONS, POLICY, Seed, lane_seed, seed_globals, word

__all__ = [
    "FreeStream",
    "ProgramState",
    "TorchStream",
    "action_generator",
    "globals_state",
    "lane_seed",
    "seed_globals",
    "set_globals_state",
    "torch_seed",
    "untouched_randomness",
]


def torch_seed(seed: Seed, worker: int, generation: int = 0) -> int:
    """The seed of a worker's torch stream, which stochastic policies draw from."""
    return word(seed, worker, POLICY, generation)


def action_generator(seed: Seed, worker: int, generation: int = 0) -> np.random.Generator:
    """Where a worker's random actions come from."""
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(worker, ACTIONS, generation)))


class TorchStream:
    """A state of torch's global generators that is the collector's own: inside `with stream:` draws come from it.

    The learner's draws change no data, and collection changes none of the learner's.

    Args:
        seed: of both generators.
        device: where the policy computes; for a CUDA device its generator has such a state too.
    """

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        self.device = device
        self.state = torch.Generator().manual_seed(seed).get_state()
        self.device_state = torch.Generator(device).manual_seed(seed).get_state() if device.type == "cuda" else None
        self._outside = self.state
        self._outside_device = self.device_state

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Where the stream is."""
        on_device = {} if self.device_state is None else {"torch_device": self.device_state.clone()}
        return {"torch": self.state.clone(), **on_device}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Goes on where `state_dict` was taken; the part of another kind of device is left as it is."""
        self.state = state["torch"].clone()
        if self.device_state is not None and "torch_device" in state:
            self.device_state = state["torch_device"].clone()

    def __enter__(self) -> None:
        self._outside = torch.get_rng_state()
        torch.set_rng_state(self.state)
        if self.device_state is not None:
            self._outside_device = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(self.device_state, self.device)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.state = torch.get_rng_state()
        torch.set_rng_state(self._outside)
        if self.device_state is not None and self._outside_device is not None:
            self.device_state = torch.cuda.get_rng_state(self.device)
            torch.cuda.set_rng_state(self._outside_device, self.device)


class FreeStream(TorchStream):
    """No state of its own: draws are from torch's global generators as they are, which other threads draw from too."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass


class ProgramState:
    """What of the program's own a rollout changes while it is made: torch's random state, gradients, exploration.

    Each is put back where it was changed; this puts them back once more when that was broken off.

    Args:
        device: whose generator is among them, beside the CPU's.
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self._gradients = torch.is_grad_enabled()
        self._exploration = interaction_type()
        self._random = torch.get_rng_state()
        self._device = device
        self._device_random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None

    def put_back(self) -> None:
        """Safe to call again."""
        torch.set_grad_enabled(self._gradients)
        set_interaction_type(self._exploration).__enter__()
        torch.set_rng_state(self._random)
        if self._device_random is not None:
            torch.cuda.set_rng_state(self._device_random, self._device)


def globals_state() -> dict[str, Any]:
    """The global generators of `random`, numpy and torch (the CPU's)."""
    return {"random": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}


def set_globals_state(state: Mapping[str, Any]) -> None:
    """Puts back what `globals_state` gave."""
    random.setstate(state["random"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])


@contextmanager
def untouched_randomness(generators: Sequence[torch.Generator] = ()) -> Iterator[None]:
    """Puts the global generators of `random`, numpy and torch back as they were, and these others."""
    own = [(generator, generator.get_state()) for generator in generators]
    before = globals_state()
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        set_globals_state(before)
        for index, state in enumerate(on_cuda):
            torch.cuda.set_rng_state(state, index)
        for generator, state in own:
            generator.set_state(state)
