"""What crosses between a vector environment and its worker processes, beside what lies in shared memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import gymnasium as gym

from rlcollect.envs.process.memory import Plan

__all__ = ["Attach", "Attend", "Build", "Call", "Command", "Facts", "Fetch", "Give", "Reset", "SetAttr", "Started"]


class Command:
    """Something to be done.

    Attributes:
        title: what the user knows it by, for errors.
    """

    title: ClassVar[str] = "command"


@dataclass(frozen=True)
class Build(Command):
    """Make environments; the answer is `Facts`.

    Attributes:
        makers: by lane, what makes it and its keyword arguments, packed.
        first: number of the first lane.
        seed: of the process's own generators.
        generation: how many processes have had these lanes before.
    """

    is_plain: ClassVar[bool] = True
    makers: Sequence[bytes]
    first: int
    seed: int
    generation: int


@dataclass(frozen=True)
class Facts:
    """What a worker says of its environments; all that is one thing is lane 0's.

    Attributes:
        observation_space, action_space: of each lane.
        metadata, render_mode, spec: as an environment has them; what cannot cross is left out.
    """

    observation_space: gym.Space[Any]
    action_space: gym.Space[Any]
    metadata: Mapping[str, Any]
    render_mode: str | None
    spec: Any


@dataclass(frozen=True)
class Attach(Command):
    """Use this memory, and this bell; two descriptors come with it.

    Attributes:
        plan: how it is carved.
        stop: number of the lane after the last.
        looks: how often to look for a step before it sleeps.
    """

    is_plain: ClassVar[bool] = True
    plan: Plan
    stop: int
    looks: int


@dataclass(frozen=True)
class Attend(Command):
    """Step whenever the shared words ask for it, until the board says stop.

    Attributes:
        number: of this command.
        since: number of a step; it and those before it are not to be made.
    """

    is_plain: ClassVar[bool] = True
    number: int
    since: int


@dataclass(frozen=True)
class Reset(Command):
    """Begin new episodes; the answer is a list of `Started`.

    Attributes:
        seeds: by lane, counted from the worker's first.
        options: for each.
        seed: of the process's own generators; None: they go on.
        generation: as in `Build`.
    """

    title: ClassVar[str] = "options"
    seeds: Mapping[int, int | None]
    options: Any
    seed: int | Sequence[int] | None
    generation: int


@dataclass(frozen=True)
class Started:
    """An episode that has begun.

    Attributes:
        lane: counted from the worker's first.
        info: of its reset.
        loose: what of its observation has no fixed form, leaf by leaf.
    """

    lane: int
    info: dict[str, Any]
    loose: Sequence[Any]


@dataclass(frozen=True)
class Give(Command):
    """These are the actions of the next step: they have no fixed form.

    Attributes:
        actions: by lane.
    """

    title: ClassVar[str] = "actions"
    actions: Sequence[Any]


@dataclass(frozen=True)
class Fetch(Command):
    """Say what there is to say about the last step: it was too long for the page."""

    is_plain: ClassVar[bool] = True


@dataclass(frozen=True)
class Call(Command):
    """Call a method of each environment, or read an attribute; the answer is what came, by lane.

    Attributes:
        name: of it.
        args, kwargs: for a method.
    """

    title: ClassVar[str] = "call"
    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True)
class SetAttr(Command):
    """Set an attribute of each environment.

    Attributes:
        name: of it.
        values: by lane.
    """

    title: ClassVar[str] = "values"
    name: str
    values: Sequence[Any]
