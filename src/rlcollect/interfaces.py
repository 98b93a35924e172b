"""The seams of the house, each as small as it can be.

`EnvDriver` steps lanes and writes what they give into the memory of a rollout. `Actor` chooses actions and writes
them. The step loop (`rollout.engine`) knows only these two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from rlcollect.layout import Arrays, Key, Leaf

__all__ = ["Actor", "EnvDriver", "Interruptor", "RolloutMemory"]

Array = np.ndarray[Any, Any]


class RolloutMemory(Protocol):
    """The memory of one rollout: tensors, and the same memory as arrays `[N, T, *shape]`."""

    tensors: dict[Key, torch.Tensor]
    arrays: Arrays


class EnvDriver(Protocol):
    """N lanes, stepped together.

    The engine calls, for each rollout: `bind(arrays)`; for each window of it `view(start, stop)`, and then for each t,
    counted from the window's start, `step(t, actions)`; `truncate(t, lanes)` where a limit ends episodes that the
    environments would have gone on with; then `finish(made)`. Between rollouts it may call `reset`. A lane whose
    episode ended is reset before `step` returns. Times are those of the rollout, except in the steps themselves.

    Attributes:
        ends: (t, lane) of every episode that ended in this rollout, in order of time.
        failed_lane: the lane whose environment raised, else None.
    """

    ends: list[tuple[int, int]]
    failed_lane: int | None

    @property
    def env_seconds(self) -> float:
        """Time spent inside environments during `audit_step`, in total."""

    @property
    def num_lanes(self) -> int:
        """N."""

    @property
    def leaves(self) -> Sequence[Leaf]:
        """The tensors of an observation, by the key they have at the root of a batch."""

    @property
    def action_leaves(self) -> Sequence[Leaf]:
        """The tensors of an action."""

    @property
    def info_leaves(self) -> Sequence[Leaf]:
        """What is recorded of the infos, under ("next", "info")."""

    @property
    def current(self) -> Mapping[Key, Array]:
        """The newest observation of every lane, `[N, *shape]` by key; valid between rollouts."""

    def reset(
        self, lanes: Sequence[int], seeds: Sequence[int] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode in these lanes; `current` holds their first observations."""

    def bind(self, arrays: Arrays) -> None:
        """Takes the memory of the next rollout, and writes the current observations into its first row."""

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout."""

    def step(self, t: int, actions: Sequence[Array]) -> None:
        """Steps every lane; row t of the window then holds a true frame of each."""

    def audit_step(self, t: int, actions: Sequence[Array]) -> None:
        """`step`, with the time in the environments measured and their answers held against their spaces."""

    def truncate(self, t: int, lanes: Sequence[int]) -> None:
        """Marks frame t of these lanes as the truncated last of its episode, and resets them."""

    def finish(self, made: int) -> None:
        """The rollout has `made` steps: fills in what follows from the frames, lets the memory go."""

    def state_dict(self) -> dict[str, Any]:
        """What can be saved of the environments."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` saved."""

    def close(self) -> list[BaseException]:
        """Closes the environments that are ours, once; the errors that came."""


class Actor(Protocol):
    """Chooses the actions of every lane; the loop calls `write(t, call(*observations[t]))`, t in a window of a rollout.

    All three may be other ones in each window.
    """

    @property
    def observations(self) -> Sequence[tuple[Any, ...]]:
        """For each t, the arguments of `call`."""

    @property
    def call(self) -> Callable[..., Any]:
        """From observations to outputs."""

    @property
    def write(self) -> Callable[[int, Any], Sequence[Array]]:
        """`write(t, outputs)` stores the outputs in row t, and gives the actions as stored: `[N, *shape]` a leaf."""

    def check(self, outputs: Any) -> None:
        """Holds outputs against the first ones there were; called for sampled steps."""


class Interruptor(Protocol):
    """Asked after each step whether to stop a rollout short; what starts and stops it is the user."""

    def start_collection(self) -> None:
        """Lets rollouts run."""

    def stop_collection(self) -> None:
        """Asks for the rollout under way to end at its next frame."""

    def collection_stopped(self) -> bool:
        """Whether it was asked to stop."""
