"""What every collector is before it makes anything: one constructor, workers that are started once and ended once.

The constructor is flat, and made from the fields of the value objects in `options`: nothing is declared here twice.
A kind says which of them it takes (`option_kinds`), and where its workers are and how their rollouts become batches
(`_start`).
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import functools
import inspect
import threading
import warnings
import weakref
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any, ClassVar, Concatenate, ParamSpec, Self, TypeVar, cast

import torch
from torch import nn

from rlcollect.collectors.background import Background, Turn
from rlcollect.collectors.crew import USUAL, Crew
from rlcollect.collectors.filling import Filling
from rlcollect.collectors.gather import Gather
from rlcollect.collectors.posting import Poster
from rlcollect.collectors.schemes import Schemes
from rlcollect.collectors.signature import described, signature_of
from rlcollect.collectors.updates import Updates
from rlcollect.errors import ClosedError, WorkerDied, WorkerTimeout
from rlcollect.failures import is_interrupt
from rlcollect.options import How, Sink, Sync, What, Where, parse_options
from rlcollect.rollout.build import whole_steps
from rlcollect.stats import Threads
from rlcollect.weights.scheme import WeightSyncScheme
from rlcollect.weights.shared import SharedMemWeightSyncScheme
from rlcollect.workers.answers import Facts

__all__ = ["DeathCloses", "Guard", "Opened", "Started", "in_turn"]

Args = ParamSpec("Args")
Result = TypeVar("Result")


class _State(enum.Enum):
    OPEN = "open"
    CLOSED = "closed"


@dataclasses.dataclass(frozen=True)
class Started:
    """What a kind has when its workers are there.

    Attributes:
        crew: the workers.
        facts: what each said of itself.
        gather: how their rollouts become batches.
        share: how many of them make a batch together.
        devices: where batches of each worker are delivered; None: where they are made.
        poster: how weights get to them.
        filling: writes batches to a buffer; None: they are the user's.
        made_of: of each worker what its environments are made of, and its options.
        threads: that torch computes with; None: as the program has it.
    """

    crew: Crew
    facts: list[Facts]
    gather: Gather
    share: int
    devices: list[torch.device | None]
    poster: Poster
    filling: Filling | None
    made_of: list[tuple[Any, Where, How]]
    threads: Threads | None = None


class Opened(abc.ABC):
    """Constructed, open, closed.

    Attributes:
        policy: as it was passed, or the one that a factory made here.
        num_envs: lanes of a worker.
        worker_idx: the number of the worker that holds this collector; None: none does.
    """

    option_kinds: ClassVar[tuple[type, ...]] = (What, Where, How, Sink, Sync)
    _usual_scheme: ClassVar[type[WeightSyncScheme]] = SharedMemWeightSyncScheme  # where none is given
    _about: ClassVar[str] = ""  # the docstring as written

    def __init_subclass__(cls) -> None:
        """Gives a kind its signature and the description of its options, from their declarations."""
        super().__init_subclass__()
        cls.__signature__ = signature_of(cls.option_kinds)  # type: ignore[attr-defined]
        if "__doc__" in vars(cls) and cls.__doc__:
            cls._about = inspect.cleandoc(cls.__doc__)
        cls.__doc__ = f"{cls._about}\n\nOptions:\n{described(cls.option_kinds)}"

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        parsed = parse_options(type(self).__name__, self.option_kinds, options)
        self._options = parsed
        self._what: What = parsed[What]
        self._where: Where = parsed[Where]
        self._how: How = parsed[How]
        self._sink: Sink = parsed[Sink]
        self._sync: Sync = parsed[Sync]
        self._schemes = Schemes(self._sync, self._usual_scheme)
        self.policy: Any = policy
        self.worker_idx: int | None = None
        self._state = _State.CLOSED  # it is not open yet
        self._closing = threading.RLock()  # held by who closes it
        self._background: Background | None = None
        self._failure: BaseException | None = None  # in the background, until somebody was told
        self._ending = ExitStack()  # has an end for all that is begun, from the moment it is begun
        self._abandoned = weakref.finalize(self, _close_abandoned, self._ending.close, type(self).__name__)
        try:
            started = self._started = self._start(create_env_fn, policy)
            self._crew = started.crew
            self._facts = started.facts
            self._gather = started.gather
            self._filling = started.filling
            self.num_envs = self._facts[0].num_lanes
            self._lanes = self.num_envs * started.share  # that make a batch together
            self._steps = whole_steps("frames_per_batch", self._what.frames_per_batch, self._lanes)
            self._total = self._counted_total()
            self._move_postproc()
            self._updates = self._synchronised(started.poster)
        except BaseException:
            self._abandoned.detach()
            self._ending.close()
            raise
        self._state = _State.OPEN

    def _move_postproc(self) -> None:
        """Modules among the post-processings go where batches are delivered, if the user says where that is."""
        device = None if self._where.is_split else self._where.placement.storing
        for step in self._sink.postproc:  # type: ignore[union-attr]
            if device is not None and isinstance(step, nn.Module):
                step.to(device)

    def _synchronised(self, poster: Poster) -> Updates:
        """What brings new weights to the workers."""
        devices = [torch.device(facts.policy_device) for facts in self._facts]
        return Updates(
            self._schemes,
            poster,
            postproc=self._sink.postproc,  # type: ignore[arg-type] # a tuple, by now
            devices=devices,
            published=self._gather.published,
            refuses_worker_ids=self._gather.refuses_worker_ids,
        )

    @abc.abstractmethod
    def _start(self, create_env_fn: Any, policy: Any) -> Started:
        """Starts the workers; what it begins it leaves to `_ending`, what is begun last is ended first."""

    def _counted_total(self) -> int | None:
        """Frames that are wanted; None: there is no end. Rollouts have whole steps of all lanes."""
        if self._what.total_frames == -1:
            return None
        if self._sink.trajs_per_batch:
            return self._what.total_frames
        return whole_steps("total_frames", self._what.total_frames, self._lanes) * self._lanes

    @property
    def num_workers(self) -> int:
        """How many workers make frames."""
        return len(self._facts)

    @property
    def batch_lead(self) -> tuple[int, ...]:
        """The dimensions of a batch of rollouts before time."""
        return tuple(self._facts[0].lead)

    def _asked(self, commands: Mapping[int, Any], timeout: float | None = USUAL) -> list[Any]:
        """What workers answer. The death of one closes the collector, and so does a rollout that fails meanwhile."""
        try:
            return self._crew.ask(commands, timeout=timeout)
        except BaseException as error:
            if isinstance(error, WorkerDied) or self._crew.pool.is_spent or self._crew.has_failed:
                self._close()
            raise

    # --- closing ---

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._state is _State.CLOSED

    def shutdown(self) -> None:
        """Ends the workers and closes the environments that were made for this collector.

        Safe to call again: what a Ctrl-C broke off is done then.

        Raises:
            What collection in the background failed by, if nobody was told yet; it is closed by then.
        """
        self._close()
        self._tell_failure()

    def _close(self) -> None:
        """See `shutdown`."""
        if self._background is not None:
            self._background.end()
        with self._closing:
            if not self._abandoned.alive:
                return
            self._state = _State.CLOSED
            try:
                self._gather.forget()
                self._updates.close()
            finally:
                self._ending.close()
            self._abandoned.detach()

    def _note(self, error: BaseException) -> None:
        """What is about to close it is known before, to whoever calls a method meanwhile."""
        if self._background is not None and self._background.is_mine:
            self._background.fail(error)

    def _turn(self) -> Turn:
        """Around what talks to the workers."""
        return Turn(self._background)

    def _tell_failure(self) -> None:
        """Raises what collection in the background failed by, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _check_open(self) -> None:
        self._tell_failure()
        if self._state is _State.CLOSED:
            with self._turn():  # what closes it in the background says why when it is done
                self._tell_failure()
            raise ClosedError(f"This {type(self).__name__} was shut down, and makes no more frames. Make a new one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._close()
        if error is None:
            self._tell_failure()


def in_turn(method: Callable[Concatenate[Any, Args], Result]) -> Callable[Concatenate[Any, Args], Result]:
    """A method that talks to the workers: it waits for the batch that is made in the background, if one is."""

    @functools.wraps(method)
    def waits(self: Any, *args: Args.args, **kwargs: Args.kwargs) -> Result:
        with self._turn():
            self._tell_failure()
            return method(self, *args, **kwargs)

    return cast(Callable[Concatenate[Any, Args], Result], waits)


class Guard:
    """Around all that makes frames: an error closes the collector; a time-out or a Ctrl-C does not.

    A class: a generator, interrupted in `contextlib`, would be closed like one that failed.
    """

    def __init__(self, collector: Opened, spares: type[Exception] = WorkerTimeout) -> None:
        self._collector = collector
        self._spares = WorkerTimeout, spares  # errors after which it stays open

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, self._spares) or is_interrupt(error)):
            self._collector._note(error)
            self._collector._close()


class DeathCloses:
    """What goes wrong with workers closes the collector; a refused argument does not.

    Where it was closed meanwhile by what failed in the background, that is raised.
    """

    def __init__(self, collector: Opened) -> None:
        self._collector = collector

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, WorkerDied):
            self._collector._close()
        elif isinstance(error, ClosedError):
            self._collector._tell_failure()


def _close_abandoned(close: Callable[[], None], name: str) -> None:
    close()
    warnings.warn(f"A {name} was never shut down; use `with`, or call shutdown().", ResourceWarning, stacklevel=2)
