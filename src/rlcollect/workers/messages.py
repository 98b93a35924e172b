"""What a worker can be asked, and what it answers: one class each, frozen. Bulk data never crosses as a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from tensordict import TensorDictBase

from rlcollect.errors import OptionError
from rlcollect.layout import Leaf
from rlcollect.memory.flat import Flat
from rlcollect.memory.replay.claims import Share
from rlcollect.memory.shared import SlotPlan
from rlcollect.options import How, What, Where
from rlcollect.stats import TimeShares
from rlcollect.weights.form import WeightsForm

__all__ = [
    "Abandon",
    "AttachBuffer",
    "AttachInterruptor",
    "AttachRemoteBuffer",
    "AttachSlots",
    "Build",
    "Close",
    "Collect",
    "Collected",
    "Command",
    "Execute",
    "Facts",
    "Load",
    "Report",
    "Reset",
    "Run",
    "Save",
    "Saved",
    "SchemeMessage",
    "Seed",
    "Take",
    "Withdrawn",
]

Array = np.ndarray[Any, Any]
RECENT = 100  # episodes whose returns and lengths are told


@dataclass(frozen=True)
class Command:
    """Something a worker can be asked.

    Attributes:
        title: what it is called in errors.
        is_plain: whether it holds nothing of the user's.
        is_news: whether one that was not sent yet is made up for by the next.
    """

    title: ClassVar[str] = "command"
    is_plain: ClassVar[bool] = False
    is_news: ClassVar[bool] = False


@dataclass(frozen=True)
class Build(Command):
    """Make environments, policy and engine. Answer: `Facts`.

    Attributes:
        create_env_fn, policy: as the user passed them.
        what, where, how: options.
        reuse: whether a worker that makes its own memory uses it again.
        same: whether it gives the same batch each time.
        worker: its number.
        workers: of how many.
        share: how many workers make a batch together.
        seed: torch's in the program, of which streams are children when nothing else is said.
        kind: a collector to hold in the place of an engine; None: an engine.
        hosted: the options of that collector.
        can_stop: whether its rollouts may have to end early.
        keeps: whether what it makes is to stand, part by part, if it dies; it then gives signs of life as often.
        generation: how many workers of this number there were before.
        prefix: of the ids of its episodes; None: its number.
        skipped: ids of episodes with that prefix which somebody else may have had.
        warmup: random frames that each of its lanes still owes; None: its share of them all.
        numbers: of the episode that each of its lanes begins with; None: 0.
        weights: that were loaded into a worker's policy from a state; None: none were.
        version: of the weights that it begins with.
        receiver: by which weights come to it; None: they do not.
        models: paths of what takes weights beside the policy.
        by_step: whether it takes weights between two steps too.
    """

    create_env_fn: Any
    policy: Any
    what: What
    where: Where
    how: How
    reuse: bool
    same: bool
    worker: int
    workers: int
    share: int
    seed: int
    kind: Any = None
    hosted: Mapping[str, Any] | None = None
    can_stop: bool = False
    keeps: bool = False
    generation: int = 0
    prefix: int | None = None
    skipped: int = 0
    warmup: tuple[int, ...] | None = None
    numbers: tuple[int, ...] | None = None
    weights: Mapping[str, Any] | None = None
    version: int = 0
    receiver: Any = None
    models: tuple[str, ...] = ()
    by_step: bool = False


@dataclass(frozen=True)
class AttachSlots(Command):
    """Write rollouts to shared memory. Answer: None.

    Attributes:
        plan: how it is divided.
        member: which part of each group is this worker's.
    """

    plan: SlotPlan
    member: int


@dataclass(frozen=True)
class AttachBuffer(Command):
    """Write frames to a replay buffer. Answer: None.

    Attributes:
        share: by which its lanes' rings are opened.
        by_step: whether each step goes there at once.
    """

    share: Share
    by_step: bool


@dataclass(frozen=True)
class AttachRemoteBuffer(Command):
    """Write frames to a replay buffer in an actor, whose handle goes with this. Answer: None.

    Attributes:
        writer: its number there.
        told: what the buffer is, in words.
        by_step: whether each step goes there at once.
    """

    writer: int
    told: str
    by_step: bool


@dataclass(frozen=True)
class SchemeMessage(Command):
    """A message of a scheme's sender. Answer: None; nobody waits for it, and the next may come in its place.

    Attributes:
        content: for the receiver.
    """

    title: ClassVar[str] = "weights"
    is_news: ClassVar[bool] = True
    content: Any


@dataclass(frozen=True)
class Take(Command):
    """Take the newest weights now. Answer: the version of those that act."""


@dataclass(frozen=True)
class AttachInterruptor(Command):
    """Look at the user's `Interruptor` in shared memory. Answer: None.

    Attributes:
        nbytes: how large it is.
    """

    nbytes: int


@dataclass(frozen=True)
class Collect(Command):
    """Make a rollout. Answer: `Collected`.

    Attributes:
        steps: T.
        at_most: frames over all lanes, where that is fewer; None: no limit.
        group: where it goes in shared memory.
        number: which it is, for who may have to stop it, or to call it lost.
        start: steps of it that stand in shared memory already, made by a worker that died.
    """

    is_plain: ClassVar[bool] = True
    steps: int
    at_most: int | None = None
    group: int = 0
    number: int = 0
    start: int = 0


@dataclass(frozen=True)
class Abandon(Command):
    """A rollout is lost: new episodes begin with the next, and its warm-up is still to come. Answer: None.

    Attributes:
        number: of the `Collect`; where that had not begun, no warm-up was used.
    """

    number: int


@dataclass(frozen=True)
class Seed(Command):
    """Seed all streams. Answer: None.

    Attributes:
        seed: one, whose children they are; or one a lane, as they are.
        static: all lanes, of all workers, get the same child.
        generation: how many workers of this number were seeded so before.
    """

    seed: int | Sequence[int]
    static: bool = False
    generation: int = 0


@dataclass(frozen=True)
class Reset(Command):
    """Begin new episodes now. Answer: None.

    Attributes:
        lanes: where; None: everywhere.
        seeds: for them.
        options: for the environments' `reset`.
    """

    title: ClassVar[str] = "options"
    lanes: Sequence[int] | None
    seeds: int | Sequence[int] | None = None
    options: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Save(Command):
    """Answer: `Saved`."""


@dataclass(frozen=True)
class Load(Command):
    """Go on from a state. Answer: a `Report`.

    Attributes:
        state: that of a `Saved`.
    """

    title: ClassVar[str] = "state"
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Run(Command):
    """Call a function with the list of the worker's environments. Answer: what it returns.

    Attributes:
        fn: the function.
    """

    title: ClassVar[str] = "map_fn"
    fn: Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Execute(Command):
    """Use what a path names, of the collector that a worker holds. Answer: what it gives.

    Attributes:
        path: from the collector on, by attributes and indices.
        args, kwargs: for what stands there, which is called with them; an attribute that is no function is the answer.
    """

    title: ClassVar[str] = "cascade_execute"
    path: str
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Close(Command):
    """Close the environments. Answer: None."""


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
