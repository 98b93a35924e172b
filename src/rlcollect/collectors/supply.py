"""Where the batches that are delivered come from: as rollouts made them, or whole episodes out of these."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from tensordict import TensorDictBase

from rlcollect.collectors.filling import lanes_of
from rlcollect.collectors.gather import Gather, Made
from rlcollect.layout import Key
from rlcollect.memory.assembly import Assembly
from rlcollect.memory.compact import CompactBatch, CompactMemory
from rlcollect.memory.gathering import Cat, Form, Gathering, Nested, Padded
from rlcollect.memory.trajectories import split_trajectories
from rlcollect.options import Sink
from rlcollect.processes.channel import Held
from rlcollect.rollout.engine import counts_of

__all__ = ["AsMade", "Supply", "WholeEpisodes", "change_of", "form_of"]

VERSION: Key = ("collector", "policy_version")


class Supply(Protocol):
    """What the next batch is, until it was delivered.

    Whoever delivers a batch says so by plain assignments, which no Ctrl-C can come between: `kept` without its first,
    and `is_touched` no more.

    Attributes:
        kept: made, and not delivered.
        is_touched: whether the first of these may have been changed by a post-processing.
        unknown: why the number of batches is not known, in words; None: it is.
    """

    kept: tuple[Made, ...]
    is_touched: bool
    unknown: str | None

    def first(self, left: int | None) -> Made:
        """The batch to be delivered.

        Args:
            left: frames that are still wanted; None: no end.
        """

    def recover(self) -> None:
        """Where an interrupt came between a batch's beginning and its delivery, it is kept, or never was."""

    @property
    def dropped(self) -> int:
        """Frames that were made, and will not be delivered."""

    @property
    def waiting(self) -> int:
        """Frames that were made, and wait."""

    def state_dict(self) -> dict[str, Any]:
        """What is here, beside what `AsMade` keeps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""


class AsMade:
    """Batches as they are made. Where they can be kept they are, until they were delivered. See `Supply`.

    Args:
        gather: makes them.
        steps: T of a full one.
        lanes: that make one together.
    """

    unknown: str | None = None
    dropped = 0
    waiting = 0

    def __init__(self, gather: Gather, steps: int, lanes: int) -> None:
        self.kept: tuple[Made, ...] = ()
        self.is_touched = False
        self._gather = gather
        self._steps = steps
        self._lanes = lanes

    def first(self, left: int | None, *, extra: bool = False) -> Made:
        """See `Supply`.

        Args:
            left: as there.
            extra: a full one, whatever is left.
        """
        if self.kept:
            return self.kept[0]
        steps = self._steps
        if left is not None and not extra:
            steps = min(steps, math.ceil(left / self._lanes))
        made = self._gather.next(steps, left, extra=extra)
        if self._gather.keeps:
            self.kept, self._gather.finished = (made,), None  # at once, for a Ctrl-C
        return made

    def recover(self) -> None:
        """See `Supply`."""
        if self.is_touched and self.kept:  # a post-processing was broken off, and may have changed it
            self.kept = ()
            self._gather.lose()
        self.is_touched = False
        if self._gather.is_under_way:
            self._gather.recover()
            self._gather.is_under_way = False

    def state_dict(self) -> dict[str, Any]:
        """See `Supply`: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Supply`."""


class WholeEpisodes:
    """So many whole episodes a batch. See `Supply`.

    Args:
        rollouts: of which they are made.
        gather: makes these.
        assembly: puts them together.
        form: how they are laid out.
        count: episodes of a batch.
        num_envs: lanes of a worker.
        note: told of each rollout that is taken.
    """

    unknown: str | None = "episodes have any length (trajs_per_batch)"

    def __init__(
        self,
        rollouts: AsMade,
        gather: Gather,
        assembly: Assembly,
        form: Form,
        *,
        count: int,
        num_envs: int,
        note: Callable[[Made], None],
    ) -> None:
        self.kept: tuple[Made, ...] = ()
        self.is_touched = False
        self._rollouts = rollouts
        self._gather = gather
        self._assembly = assembly
        self._form = form
        self._count = count
        self._num_envs = num_envs
        self._note = note
        self._out: Gathering | None = None  # the next episodes, if the batch that was made last is of them

    def first(self, left: int | None) -> Made:  # noqa: ARG002
        """See `Supply`: rollouts are made until there are enough episodes."""
        if self.kept:
            return self.kept[0]
        self._settle()
        while (frames := self._assembly.ready(self._count)) is None:
            made = self._rollouts.first(None)
            with Held():  # a rollout is taken once
                self._assembly.take(made.batch, lanes_of(made, self._num_envs, self._assembly.lanes))
                self._note(made)
                self._rollouts.kept, self._gather.is_under_way = self._rollouts.kept[1:], False
        versions = frames.values(VERSION)
        counts = () if versions is None else counts_of(versions)
        made = Made(frames.formed(self._form), frames.frames, versions=counts, is_rollouts=False)
        self.kept, self._out = (made,), frames
        return made

    def _settle(self) -> None:
        """Episodes that were delivered are not needed any more."""
        if self._out is not None and not self.kept:
            with Held():
                self._assembly.delivered(self._out)
                self._out = None

    def recover(self) -> None:
        """See `Supply`."""
        if self.is_touched and self.kept:  # it is made again
            self.kept, self._out = (), None
        self.is_touched = False
        self._settle()
        self._rollouts.recover()

    @property
    def dropped(self) -> int:
        """See `Supply`."""
        return self._assembly.dropped

    @property
    def waiting(self) -> int:
        """See `Supply`."""
        self._settle()
        kept = sum(made.frames for made in self._rollouts.kept)
        return self._assembly.waiting + kept + self._gather.waiting

    def state_dict(self) -> dict[str, Any]:
        """See `Supply`: episodes that are not delivered, as far as they are there."""
        state = self._assembly.state_dict()
        if "frames" in state:
            state["frames"] = Made(state["frames"], 0).as_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Supply`."""
        self.kept, self._out = (), None
        frames = {"frames": Made.of_state(state["frames"]).batch} if "frames" in state else {}
        self._assembly.load_state_dict({**state, **frames})


def form_of(sink: Sink) -> Form:
    """How whole episodes are laid out."""
    if sink.traj_format == "cat" or (sink.replay_buffer is not None and not sink.postproc):
        return Cat()  # a buffer keeps frames, and no padding
    return (Nested if sink.traj_format == "nested" else Padded)(sink.fragment_len)


def change_of(sink: Sink, memory: CompactMemory) -> Callable[[TensorDictBase], Any]:
    """What becomes of a batch before the post-processings.

    Args:
        sink: says it.
        memory: for the observations of compact batches.
    """
    if sink.compact_obs:
        return functools.partial(CompactBatch.of, memory=memory)
    if sink.trajs_per_batch or not (sink.split_trajs or sink.fragment_len):
        return _as_it_is
    return functools.partial(split_trajectories, fragment_len=sink.fragment_len)


def _as_it_is(batch: TensorDictBase) -> TensorDictBase:
    return batch
