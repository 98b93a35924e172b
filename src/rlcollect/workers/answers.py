"""What a worker answers: one class each, frozen. Bulk data never crosses as a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium as gym
from tensordict import TensorDictBase

from rlcollect.errors import OptionError
from rlcollect.layout import Leaf
from rlcollect.memory.flat import Flat
from rlcollect.stats import TimeShares
from rlcollect.weights.form import WeightsForm

__all__ = ["Collected", "Facts", "Report", "Saved", "Withdrawn"]

RECENT = 100  # episodes whose returns and lengths are told


@dataclass(frozen=True)
class Facts:
    """What a worker says of itself when it is built.

    Attributes:
        num_lanes: N.
        lead: the dimensions of its batches before time.
        leaves: what a frame holds; None: batches cross as they are.
        action_space: of one lane.
        may_deliver_short: whether some lanes of a batch may be shorter than others.
        refuses_lane_resets, refuses_lane_seeds, refuses_options, largest_seed: see `EnvDriver`.
        state_keys: what a state of it holds.
        env_state_keys: what that holds of its environments.
        policy: how the policy is called, in words.
        policy_device: where it computes.
        forms: what weights its models take: "policy", and those whose paths it was given.
        processes: how many the environments have started.
        warmup: random frames that each lane owes.
    """

    num_lanes: int
    lead: tuple[int, ...]
    leaves: tuple[Leaf, ...] | None
    action_space: gym.Space[Any] | None
    may_deliver_short: bool
    refuses_lane_resets: str | None
    refuses_lane_seeds: str | None
    refuses_options: str | None
    largest_seed: int | None
    state_keys: tuple[str, ...]
    env_state_keys: tuple[str, ...]
    policy: str
    policy_device: str
    forms: Mapping[str, WeightsForm]
    processes: int
    warmup: tuple[int, ...] = ()

    def check_reset(self, lanes: Sequence[int], *, seeded: bool, with_options: bool) -> None:
        """Whether these lanes can be reset.

        Args:
            lanes: which.
            seeded: whether seeds are given for them.
            with_options: whether options are given.

        Raises:
            OptionError: they cannot be reset or seeded without the others, or take no options.
        """
        are_all = len({*lanes}) == self.num_lanes
        if self.refuses_lane_resets is not None and not are_all:
            raise OptionError(f"reset of some lanes: {self.refuses_lane_resets}")
        if self.refuses_lane_seeds is not None and seeded and not are_all:
            raise OptionError(f"reset of some lanes with a seed: {self.refuses_lane_seeds}")
        if self.refuses_options is not None and with_options:
            raise OptionError(f"reset with options: {self.refuses_options}")

    def check_seeds(self, seeds: Sequence[int]) -> None:
        """Whether the environments take these seeds.

        Raises:
            OptionError: one is too large.
        """
        largest = self.largest_seed
        if largest is not None and (wrong := [seed for seed in seeds if seed > largest]):
            raise OptionError(f"These environments take seeds up to {largest}; {wrong[0]} came.")

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Whether it is one that can be loaded.

        Raises:
            OptionError: it lacks something, or is of another number of lanes.
        """
        if lacking := [key for key in self.state_keys if key not in state]:
            raise OptionError(f"This is no state of a collector: it lacks {lacking[0]!r}.")
        lanes = len(state.get("warmup_left", range(self.num_lanes)))
        if lanes != self.num_lanes:
            raise OptionError(f"The state is of {lanes} lanes, this collector has {self.num_lanes}.")
        theirs = tuple(state.get("env_state_dict", self.env_state_keys))
        if {*theirs} != {*self.env_state_keys}:
            raise OptionError(
                f"The state is of environments of another kind: it has {', '.join(theirs) or 'nothing'} of them, where "
                f"these have {', '.join(self.env_state_keys) or 'nothing'}."
            )


@dataclass(frozen=True)
class Report:
    """How a worker is doing.

    Attributes:
        episodes: how many have ended.
        returns, lengths: of the last hundred.
        dropped: frames that were made and will not be delivered.
        surplus: frames that were made and wait.
        steps: of every lane, so far.
        seconds: spent making rollouts.
        sampled: steps that were measured.
        env, policy, writing: seconds of those, together.
        warmup: random frames that each lane still owes.
        numbers: of the open episode of each lane.
    """

    episodes: int = 0
    returns: tuple[float, ...] = ()
    lengths: tuple[int, ...] = ()
    dropped: int = 0
    surplus: int = 0
    steps: int = 0
    seconds: float = 0.0
    sampled: int = 0
    env: float = 0.0
    policy: float = 0.0
    writing: float = 0.0
    warmup: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def after(self, before: Report) -> Report:
        """This one's figures together with those of the workers that it was put in the place of."""
        both = {
            name: getattr(before, name) + getattr(self, name)
            for name in ("episodes", "dropped", "steps", "seconds", "sampled", "env", "policy", "writing")
        }
        recent = {name: (getattr(before, name) + getattr(self, name))[-RECENT:] for name in ("returns", "lengths")}
        return replace(self, **both, **recent)

    def shares(self) -> TimeShares | None:
        """Where its time goes."""
        parts = self.sampled, self.env, self.policy, self.writing
        return TimeShares.of(*parts, steps=self.steps, seconds=self.seconds)


@dataclass(frozen=True)
class Collected:
    """A rollout.

    Attributes:
        steps: T, as far as it was made.
        room: the steps that its memory is divided for.
        frames: in all lanes.
        batch: where it does not lie in memory that the program sees, or is in a buffer; flat where its tensors are
            beside.
        report: how the worker is doing.
        number: how many rollouts the worker has made, with this one.
        version: of the weights that it was made with, the last.
        versions: how many frames each version made; -1: chance.
        finished: when it was done, by the machine's monotonic clock, in nanoseconds.
        found: steps of it that stood in a buffer, where a worker that died had written them, beyond `Collect.start`.
    """

    steps: int
    room: int
    frames: int
    batch: TensorDictBase | Flat | None
    report: Report
    number: int
    version: int
    versions: tuple[tuple[int, int], ...]
    finished: int
    found: int = 0

    @property
    def is_plain(self) -> bool:
        """Whether it holds nothing of the user's."""
        return self.batch is None


@dataclass(frozen=True)
class Saved:
    """A worker's state.

    Attributes:
        state: as `Load` takes it.
        rollouts: how many had been made by then.
    """

    state: Mapping[str, Any]
    rollouts: int


@dataclass(frozen=True)
class Withdrawn:
    """A rollout that was not begun, since nobody wants it any more."""
