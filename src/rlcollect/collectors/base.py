"""What every collector is: one constructor, iteration, counts, delivery, lifecycle.

The constructor is flat, and made from the fields of the value objects in `options`: nothing is declared here twice.
A kind says which of them it takes (`option_kinds`), and where its workers are and how their rollouts become batches
(`_start`). Nothing here asks which kind it is.
"""

from __future__ import annotations

import abc
import dataclasses
import enum
import inspect
import math
import operator
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from rlcollect.collectors.crew import Crew
from rlcollect.collectors.gather import Gather, Made
from rlcollect.errors import ClosedError, OptionError, WorkerDied, WorkerTimeout
from rlcollect.failures import is_interrupt, relayed
from rlcollect.memory.slots import SameBatch
from rlcollect.memory.trajectories import split_trajectories
from rlcollect.options import How, Sink, What, Where, option_fields, parse_options
from rlcollect.processes.crossing import Parcel
from rlcollect.rollout.build import whole_steps
from rlcollect.rollout.policy.intake import module_of, weights_of
from rlcollect.stats import Spread, Stats, Threads, TimeShares
from rlcollect.workers.messages import Facts, Load, Report, Reset, Run, Save, Saved, Seed

__all__ = ["BaseCollector", "Started", "lane_indices", "worker_numbers"]


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
        close: ends everything.
        threads: that torch computes with; None: as the program has it.
    """

    crew: Crew
    facts: Sequence[Facts]
    gather: Gather
    share: int
    devices: Sequence[torch.device | None]
    close: Callable[[], None]
    threads: Threads | None = None


class BaseCollector(IterableDataset[TensorDictBase], abc.ABC):
    """The one constructor, iteration, counts and lifecycle."""

    option_kinds: ClassVar[tuple[type, ...]] = (What, Where, How, Sink)
    _about: ClassVar[str] = ""  # the docstring as written

    def __init_subclass__(cls) -> None:
        """Gives a kind its signature and the description of its options, from their declarations."""
        super().__init_subclass__()
        cls.__signature__ = _signature(cls.option_kinds)  # type: ignore[attr-defined]
        if "__doc__" in vars(cls) and cls.__doc__:
            cls._about = inspect.cleandoc(cls.__doc__)
        cls.__doc__ = f"{cls._about}\n\nOptions:\n{_described(cls.option_kinds)}"

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        parsed = parse_options(type(self).__name__, self.option_kinds, options)
        self._options = parsed
        self._what: What = parsed[What]
        self._where: Where = parsed[Where]
        self._how: How = parsed[How]
        self._sink: Sink = parsed[Sink]
        self._frames = 0
        self._batches = 0
        self._seconds = 0.0
        self._pending: tuple[Made, ...] = ()  # made, and not delivered
        self._is_touched = False  # whether the first of these may have been changed by a post-processing
        self._stored = SameBatch[TensorDictBase]()  # on a storing device, with return_same_td
        self._version = 0
        self.policy: Any = policy
        started = self._start(create_env_fn, policy)
        self._started = started
        self._crew = started.crew
        self._facts = started.facts
        self._gather = started.gather
        try:
            self.num_envs = self._facts[0].num_lanes
            self._lanes = self.num_envs * started.share  # that make a batch together
            self._steps = whole_steps("frames_per_batch", self._what.frames_per_batch, self._lanes)
            self._total_steps = self._counted_total()
        except BaseException:
            started.close()
            raise
        self._state = _State.OPEN
        self._abandoned = weakref.finalize(self, _close_abandoned, started.close, type(self).__name__)

    @abc.abstractmethod
    def _start(self, create_env_fn: Any, policy: Any) -> Started:
        """Starts the workers. What is open is closed again if that fails."""

    @abc.abstractmethod
    def _load_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        """Puts the policy's weights of a state back into it."""

    def _publish_loaded(self) -> None:
        """Gives the workers the weights that were put back, if they do not have them."""

    def _counted_total(self) -> int | None:
        if self._what.total_frames == -1:
            return None
        return whole_steps("total_frames", self._what.total_frames, self._lanes)

    # --- iterating ---

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch, over all lanes."""
        return self._steps * self._lanes

    @property
    def total_frames(self) -> int:
        """Frames after which the collector is exhausted; -1 for never."""
        return -1 if self._total_steps is None else self._total_steps * self._lanes

    @property
    def collected_frames(self) -> int:
        """Frames delivered so far."""
        return self._frames

    @property
    def exhausted(self) -> bool:
        """Whether all frames that were asked for have been delivered."""
        return self._total_steps is not None and self._frames >= self.total_frames

    @property
    def num_workers(self) -> int:
        """How many workers make frames."""
        return len(self._facts)

    @property
    def policy_device(self) -> torch.device:
        """Where the policy computes; the first worker's, if there are several."""
        return torch.device(self._facts[0].policy_device)

    @property
    def policy_version(self) -> int:
        """How many times the weights were updated."""
        return self._version

    def next(self) -> TensorDictBase | None:
        """The next batch; None when the frames are exhausted.

        Raises:
            ClosedError: after `shutdown`.
            What an environment, the policy or a post-processing raised; the collector is then closed. A Ctrl-C (or
                what a signal handler of the program raises) leaves it open: in one process the batch under way is
                dropped, and new episodes begin with the next; batches of worker processes come at the next call.
            WorkerDied: a worker process ended; the collector is then closed.
            WorkerTimeout: `timeout=` was not enough; the batch comes at the next call.
        """
        self._check_open()
        self._recover()
        if self.exhausted:
            return None
        start = time.perf_counter()
        with _Guard(self):
            self._before_batch()
            made = self._made()
            placed, self._is_touched = self._placed(made), bool(self._sink.postproc)
            frames, batch = self._frames + made.frames, self._processed(placed)
        self._crew.tally.note_late(made.late, self._version)
        seconds, rest = self._seconds + time.perf_counter() - start, self._pending[1:]
        # no call from here on: an interrupt comes before all of it or after
        self._frames, self._batches, self._seconds = frames, self._batches + 1, seconds
        self._gather.is_under_way, self._pending, self._is_touched = False, rest, False
        return batch

    def _before_batch(self) -> None:
        """What is to be done before each batch that is delivered."""

    def _made(self, *, extra: bool = False) -> Made:
        """The batch to be delivered. Where it can be kept it is, until it was."""
        if self._pending:
            return self._pending[0]
        steps, left = self._steps, None
        if self._total_steps is not None:
            left = self.total_frames - self._frames
            steps = steps if extra else min(steps, math.ceil(left / self._lanes))
        made = self._gather.next(steps, left, extra=extra)
        if self._gather.keeps:
            self._pending, self._gather.finished = (made,), None  # at once, for a Ctrl-C
        return made

    def _recover(self) -> None:
        """Where an interrupt came between a batch's beginning and its delivery, it is kept, or never was."""
        if self._is_touched and self._pending:  # a post-processing was broken off, and may have changed it
            self._pending = ()
            self._gather.lose()
        self._is_touched = False
        if self._gather.is_under_way:
            self._gather.recover()
            self._gather.is_under_way = False
        if self.exhausted:
            self._gather.forget()

    def _processed(self, batch: Any) -> Any:
        if self._sink.split_trajs:
            batch = split_trajectories(batch)
        for step in self._sink.postproc:  # type: ignore[union-attr]
            try:
                batch = step(batch)
            except BaseException as error:
                raise relayed(  # noqa: B904 - it has a cause
                    error, worker=0, lane=None, step=self._crew.reports[0].steps
                )
            if batch is None:
                raise OptionError(f"postproc {step!r} returned None; it should return the batch.")
        return batch

    def _placed(self, made: Made) -> TensorDictBase:
        """The batch on the device where it is delivered."""
        device = self._started.devices[made.worker or 0]
        if device is None or device == made.batch.device:
            return made.batch
        moved = made.batch.to(device)
        return self._stored.holding(moved) if self._sink.return_same_td else moved

    def rollout(self) -> TensorDictBase:
        """A full rollout as it is made: not post-processed, not counted in `total_frames`.

        Episodes, ids and a warm-up go on from batch to rollout to batch.

        Returns:
            `[N, T]`, or `[T]` for a single lane; of several workers together as their batches are.
        """
        self._check_open()
        self._recover()
        with _Guard(self):
            batch = self._placed(self._made(extra=True))
        rest = self._pending[1:]
        self._gather.is_under_way, self._pending = False, rest
        return batch

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Batches until the frames are exhausted. Breaking off and iterating again goes on.

        Raises:
            OptionError: in a worker of a DataLoader, which has a copy of the collector, and would repeat its frames.
        """
        if get_worker_info() is not None:
            raise OptionError(
                f"A {type(self).__name__} cannot be iterated over in workers of a DataLoader: each would make the same "
                "frames, with weights of its own. Use num_workers=0 (with batch_size=None, collate_fn=lambda b: b)."
            )
        while (batch := self.next()) is not None:
            yield batch

    def __bool__(self) -> bool:
        """True: a collector is there, whatever its length."""
        return True

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"A {type(self).__name__} holds running environments and cannot be pickled or copied. Save state_dict(), "
            "and load it into a new one."
        )

    def __len__(self) -> int:
        """The number of batches, delivered ones included.

        Raises:
            TypeError: it is not known, as collection is endless or an interruptor may cut batches short.
        """
        unknown = {
            "total_frames is -1": self._total_steps is None,
            "an interruptor may cut batches short": self._how.interruptor is not None,
            "lanes that are far behind others are delivered short": any(
                facts.may_deliver_short for facts in self._facts
            ),
            str(self._gather.cuts_short): self._gather.cuts_short is not None,
        }
        if why := next((why for why, holds in unknown.items() if holds), None):
            raise TypeError(f"The number of batches is not known: {why}.")
        assert self._total_steps is not None
        return math.ceil(self._total_steps / self._steps)

    # --- talking to it ---

    @abc.abstractmethod
    def update_policy_weights_(self, policy_or_weights: Any = None, *, worker_ids: Any = None) -> int:
        """Gives the workers new weights; the frames that follow carry the new version."""

    def map_fn(self, fn: Callable[[Sequence[Any]], Any]) -> list[Any]:
        """Runs a function where the environments are, between two rollouts.

        Args:
            fn: called with the list of a worker's environments, once a worker.

        Returns:
            What it returned, one a worker.

        Raises:
            What it raises; the collector stays open.
        """
        self._check_open()
        answers = self._asked({worker: Run(fn) for worker in range(self.num_workers)})
        return [answer.opened() if isinstance(answer, Parcel) else answer for answer in answers]

    def set_seed(self, seed: int | Sequence[int], static_seed: bool = False) -> int:
        """Seeds environments, the policy's randomness and random actions. Lanes are reset with the next batch.

        Without it environments are seeded by themselves, and the other streams from torch's seed: two collectors in
        one program then draw alike, so seed at least one of them.

        Args:
            seed: an integer, of which every stream becomes an independent child; or one seed a lane, used as given:
                those of the first worker's lanes first.
            static_seed: every lane gets the same stream.

        Returns:
            A seed for whatever is seeded next: `seed + 1`; `seed` itself with `static_seed`; the largest of a list,
            plus 1.

        Raises:
            OptionError: a negative seed, or a list of another length than there are lanes.
        """
        self._check_open()
        workers, lanes = range(self.num_workers), self.num_envs
        given = _seeds(seed, lanes * self.num_workers)
        if isinstance(given, int):
            self._asked({worker: Seed(given, static_seed) for worker in workers})
            return given if static_seed else given + 1
        for facts in self._facts:
            facts.check_seeds(given)
        if static_seed:
            raise OptionError("static_seed=True gives every lane the stream of one seed; a list has one for each.")
        self._asked({worker: Seed(given[worker * lanes : (worker + 1) * lanes]) for worker in workers})
        return max(given) + 1

    def _reset_lanes(self, lanes: Mapping[int, Sequence[int]], seed: Any, options: Any) -> None:
        """Begins a new episode in these lanes, by worker."""
        count = sum(map(len, lanes.values()))
        seeds = None if seed is None else _seeds(seed, count)
        if not (options is None or isinstance(options, Mapping)):
            raise OptionError(f"options must be a mapping or None, not {options!r}.")
        commands, first = {}, 0
        for worker, chosen in lanes.items():
            facts = self._facts[worker]
            own = seeds[first : first + len(chosen)] if isinstance(seeds, list) else seeds
            first += len(chosen)
            if isinstance(own, list) or len(chosen) == 1:
                facts.check_seeds(own if isinstance(own, list) else [own or 0])
            facts.check_reset(chosen, seeded=seeds is not None, with_options=options is not None)
            commands[worker] = Reset(tuple(chosen), own, options)
        self._recover()
        with _Guard(self, spares=OptionError):
            self._asked(commands)

    def _asked(self, commands: Mapping[int, Any]) -> list[Any]:
        """What workers answer; the death of one closes the collector."""
        try:
            return self._crew.ask(commands)
        except BaseException as error:
            if isinstance(error, WorkerDied) or self._crew.pool.is_spent:
                self.shutdown()
            raise

    def stats(self) -> Stats:
        """Figures so far: frames, speed, episodes, where the time goes."""
        reports = self._reports()
        dropped = [report.dropped + (report.surplus if self.exhausted else 0) for report in reports]
        return Stats(
            frames=self._frames,
            batches=self._batches,
            dropped=sum(dropped) + sum(self._crew.tally.dropped),
            seconds=self._seconds,
            frames_per_second=self._frames / self._seconds if self._seconds else 0.0,
            episodes=sum(report.episodes for report in reports),
            episode_return=Spread.of([value for report in reports for value in report.returns]),
            episode_length=Spread.of([value for report in reports for value in report.lengths]),
            policy_version=self._version,
            time=TimeShares.mean([report.shares() for report in reports]),
            threads=self._started.threads,
            workers=() if self._started.threads is None else self._crew.tally.workers(dropped),
            late=self._crew.tally.late() if self._gather.can_be_late else None,
        )

    def _reports(self) -> Sequence[Report]:
        """The newest of each worker."""
        return self._crew.reports

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on: counts, ids, random states, the policy's and the environments' own states.

        The policy's weights are in it if the policy is a module or a method of one (where `policy_device` made a copy:
        those of your module); not those that a function uses. Batches that are made and not delivered are in it too.

        Tensors are copies on the CPU. Environments of Gymnasium save their random generator, and what a
        `state_dict` method of theirs returns; open episodes are not saved: a load begins new ones.
        """
        self._check_open()
        self._recover()
        with _Guard(self):
            self._gather.pause()
            saved: list[Saved] = self._crew.ask({worker: Save() for worker in range(self.num_workers)})
            made = [*self._pending, *self._gather.made([each.rollouts for each in saved])]
        states = self._state_of([dict(each.state) for each in saved])
        state = {"frames": self._frames, "iter": self._batches, "seconds": self._seconds, **states}
        if made:
            state["pending"] = [each.as_state() for each in made]
        if (weights := weights_of(self.policy)) is not None:
            state["policy_state_dict"] = weights
        copied: dict[str, Any] = _on_cpu(state)
        return copied

    def _state_of(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The workers' states in that of the collector."""
        workers = {f"worker{worker}": state for worker, state in enumerate(states)}
        return {"policy_version": self._version, **workers}

    def _states_in(self, state: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        """The workers' states again."""
        workers = [key for key in state if key.startswith("worker")]
        if len(workers) != self.num_workers:
            raise OptionError(f"The state is of {len(workers)} workers, this collector has {self.num_workers}.")
        return [state[f"worker{worker}"] for worker in range(self.num_workers)]

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Goes on where `state_dict` was taken: exactly the remaining batches come, with new episodes.

        What was made and not delivered is dropped, and made again if it is wanted.

        Args:
            state: what `state_dict` returned.
            strict: the policy's weights must be there, and fit exactly.

        Raises:
            OptionError: something else than a state, one of another number of lanes or workers, or without weights for
                the policy (or with weights for none).
            RuntimeError: torch's, for weights that do not fit.
        """
        self._check_open()
        if lacking := [key for key in ("frames", "iter", "seconds", "policy_version") if key not in state]:
            raise OptionError(f"This is no state of a collector: it lacks {lacking[0]!r}.")
        states = self._states_in(state)
        for facts, own in zip(self._facts, states, strict=True):
            facts.check_state(own)
        module = module_of(self.policy)
        if strict and ("policy_state_dict" in state) is not (module is not None):
            why = "is in the state, and the policy is no module" if module is None else "is not in the state"
            raise OptionError(f"policy_state_dict {why}. (With strict=False weights are left out.)")
        has_weights = module is not None and "policy_state_dict" in state
        if has_weights:
            self._load_weights(state["policy_state_dict"], strict=strict)
        with _Guard(self):
            self._gather.drop()
            reports = self._crew.ask({worker: Load(own) for worker, own in enumerate(states)})
        self._crew.reports[:] = reports
        self._gather.is_under_way = False
        self._pending = tuple(Made.of_state(each) for each in state.get("pending", ()))
        self._version = int(state["policy_version"])
        if has_weights:
            self._publish_loaded()
        self._frames, self._batches, self._seconds = state["frames"], state["iter"], state["seconds"]

    # --- lifecycle ---

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._state is _State.CLOSED

    def shutdown(self) -> None:
        """Ends the workers and closes the environments that were made for this collector. Safe to call again."""
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._abandoned.detach()
        self._gather.forget()
        self._started.close()

    def _check_open(self) -> None:
        if self._state is _State.CLOSED:
            raise ClosedError(f"This {type(self).__name__} was shut down, and makes no more frames. Make a new one.")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        workers = "" if self.num_workers == 1 else f"num_workers={self.num_workers}, "
        return (
            f"{type(self).__name__}({workers}num_envs={self.num_envs}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, collected_frames={self._frames}, policy=<{self._facts[0].policy}>, "
            f"{self._state.value})"
        )


class _Guard:
    """Around all that makes frames: an error closes the collector; a time-out or a Ctrl-C does not.

    A class: a generator, interrupted in `contextlib`, would be closed like one that failed.
    """

    def __init__(self, collector: BaseCollector, spares: type[Exception] = WorkerTimeout) -> None:
        self._collector = collector
        self._spares = WorkerTimeout, spares  # errors after which it stays open

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, self._spares) or is_interrupt(error)):
            self._collector.shutdown()


def _close_abandoned(close: Callable[[], None], name: str) -> None:
    close()
    warnings.warn(f"A {name} was never shut down; use `with`, or call shutdown().", ResourceWarning, stacklevel=2)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    if isinstance(value, TensorDictBase):
        return value.detach().clone()  # made on the host
    if isinstance(value, Mapping):
        return {key: _on_cpu(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_on_cpu(part) for part in value)
    return value


def _seeds(seed: Any, lanes: int) -> int | list[int]:
    """A seed as an int, or seeds as a list of one for each lane."""
    try:
        one = np.ndim(seed) == 0
        seeds = [operator.index(seed)] if one else [operator.index(each) for each in seed]
    except (TypeError, ValueError) as error:
        raise OptionError(f"Seeds are non-negative integers, one or one a lane; {seed!r} came.") from error
    if not one and len(seeds) != lanes:
        raise OptionError(f"A list of seeds needs one a lane: {lanes}, not {len(seeds)}.")
    if min(seeds, default=0) < 0:
        raise OptionError(f"Seeds are non-negative integers; {seed!r} came.")
    return seeds[0] if one else seeds


def worker_numbers(worker_ids: Any, count: int) -> list[int] | None:
    """Workers as the user names them: a number, several, or None for all.

    Raises:
        OptionError: there is no such worker.
    """
    if worker_ids is None:
        return None
    given = [worker_ids] if np.ndim(worker_ids) == 0 else list(worker_ids)
    if any(isinstance(each, bool | np.bool_) or not hasattr(each, "__index__") for each in given):
        raise OptionError(f"worker_ids takes numbers of workers, not {worker_ids!r}.")
    given = [operator.index(each) for each in given]
    if wrong := [each for each in given if not 0 <= each < count]:
        raise OptionError(f"There are workers 0 to {count - 1}; worker_ids has {wrong[0]}.")
    return given


def lane_indices(index: Any, num_lanes: int) -> list[int]:
    """Lanes as the user names them.

    Raises:
        OptionError: there is no such lane.
    """
    if index is None:
        return list(range(num_lanes))
    if isinstance(index, slice):
        return list(range(num_lanes))[index]
    try:
        values = torch.as_tensor(index).reshape(-1)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"reset takes lanes as integers, or one bool a lane; {index!r} came.") from error
    if not len(values):
        return []
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise OptionError(f"reset takes lanes as integers, or one bool a lane; {index!r} came.")
    if values.dtype is torch.bool:
        if len(values) != num_lanes:
            raise OptionError(f"reset takes one bool a lane: {num_lanes}, not {len(values)}.")
        return [int(lane) for lane in values.nonzero()]
    lanes = [int(lane) for lane in values]
    if wrong := [lane for lane in lanes if not 0 <= lane < num_lanes]:
        raise OptionError(f"There are lanes 0 to {num_lanes - 1}; reset was asked for lane {wrong[0]}.")
    return list(dict.fromkeys(lanes))


def _signature(kinds: Sequence[type]) -> inspect.Signature:
    positional, keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("create_env_fn", positional),
        inspect.Parameter("policy", positional, default=None),
    ]
    for name, field in option_fields(kinds).items():
        default = field.default if _has_default(field) else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, keyword, default=default, annotation=field.type))
    return inspect.Signature(parameters)


def _described(kinds: Sequence[type]) -> str:
    lines = []
    for name, field in option_fields(kinds).items():
        default = f" (default: {field.default!r})" if _has_default(field) else ""
        lines.append(f"    {name}{default}: {field.metadata['doc']}")
    return "\n".join(lines)


def _has_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is not dataclasses.MISSING
