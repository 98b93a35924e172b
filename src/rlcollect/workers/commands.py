"""What a worker can be asked: one class each, frozen. Bulk data never crosses as a message."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rlcollect.memory.replay.claims import Share
from rlcollect.memory.shared import SlotPlan
from rlcollect.options import How, What, Where

__all__ = [
    "Abandon",
    "AttachBuffer",
    "AttachInterruptor",
    "AttachRemoteBuffer",
    "AttachSlots",
    "Build",
    "Close",
    "Collect",
    "Command",
    "Execute",
    "Load",
    "Reset",
    "Run",
    "Save",
    "SchemeMessage",
    "Seed",
    "Take",
]


@dataclass(frozen=True)
class Command:
    """Something a worker can be asked.

    Attributes:
        title: what it is called in errors.
        is_plain: whether it holds nothing of the user's.
        is_news: whether one that was not sent yet is made up for by the next.
        is_cut: whether new episodes begin with it, though nothing has ended those before.
    """

    title: ClassVar[str] = "command"
    is_plain: ClassVar[bool] = False
    is_news: ClassVar[bool] = False
    is_cut: ClassVar[bool] = False


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

    is_cut: ClassVar[bool] = True
    number: int


@dataclass(frozen=True)
class Seed(Command):
    """Seed all streams. Answer: None.

    Attributes:
        seed: one, whose children they are; or one a lane, as they are.
        static: all lanes, of all workers, get the same child.
        generation: how many workers of this number were seeded so before.
    """

    is_cut: ClassVar[bool] = True
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

    is_cut: ClassVar[bool] = True
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
