"""What every collector is: one constructor, iteration, counts, delivery, lifecycle.

The constructor is flat, and made from the fields of the value objects in `options`: nothing is declared here twice.
A kind says which of them it takes (`option_kinds`). The engine is made here, in this process.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import math
import operator
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch.utils.data import IterableDataset, get_worker_info

from rlcollect.errors import ClosedError, OptionError
from rlcollect.failures import is_interrupt, relayed, warn
from rlcollect.interfaces import EnvDriver
from rlcollect.memory.trajectories import split_trajectories
from rlcollect.options import How, Sink, What, Where, option_fields, parse_options
from rlcollect.rollout.build import build_engine, make_driver, whole_steps
from rlcollect.rollout.policy.intake import module_of, take_in, weights_of
from rlcollect.rollout.seeding import ProgramState
from rlcollect.stats import Spread, Stats

__all__ = ["BaseCollector"]


class _State(enum.Enum):
    OPEN = "open"
    CLOSED = "closed"


class BaseCollector(IterableDataset[TensorDictBase]):
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
        self._what: What = parsed[What]
        self._where: Where = parsed[Where]
        self._how: How = parsed[How]
        self._sink: Sink = parsed[Sink]
        self._frames = 0
        self._batches = 0
        self._seconds = 0.0
        # the warm-up left before a rollout that is not delivered yet
        self._under_way: np.ndarray[Any, Any] | None = None
        self._stored: TensorDictBase | None = None  # on a storing device, with return_same_td
        self._acting = take_in(policy, self._how, self._where.placement.policy)
        self.policy = self._acting.given
        driver = make_driver(create_env_fn, self._what, self._where)
        try:
            self.num_envs = driver.num_lanes
            self._steps = whole_steps("frames_per_batch", self._what.frames_per_batch, self.num_envs)
            self._total_steps = self._counted_total()
            self._engine, self._plan = build_engine(
                driver, self._acting, self._what, self._where, self._how, self._sink, steps=self._steps
            )
        except BaseException:
            driver.close()
            raise
        self._state = _State.OPEN
        self._abandoned = weakref.finalize(self, _close_abandoned, driver, type(self).__name__)
        self._driver = driver

    def _counted_total(self) -> int | None:
        if self._what.total_frames == -1:
            return None
        return whole_steps("total_frames", self._what.total_frames, self.num_envs)

    # --- iterating ---

    @property
    def frames_per_batch(self) -> int:
        """Frames of a full batch, over all lanes."""
        return self._steps * self.num_envs

    @property
    def total_frames(self) -> int:
        """Frames after which the collector is exhausted; -1 for never."""
        return -1 if self._total_steps is None else self._total_steps * self.num_envs

    @property
    def collected_frames(self) -> int:
        """Frames delivered so far."""
        return self._frames

    @property
    def exhausted(self) -> bool:
        """Whether all frames that were asked for have been delivered."""
        return self._total_steps is not None and self._frames >= self.total_frames

    @property
    def policy_device(self) -> torch.device:
        """Where the policy computes."""
        return self._acting.device

    @property
    def policy_version(self) -> int:
        """How many times the weights were updated."""
        return self._engine.policy_version

    def next(self) -> TensorDictBase | None:
        """The next batch; None when the frames are exhausted.

        Raises:
            ClosedError: after `shutdown`.
            What an environment, the policy or a post-processing raised; the collector is then closed. A Ctrl-C (or
                what a signal handler of the program raises) leaves it open: the batch under way is dropped, and new
                episodes begin with the next.
        """
        self._check_open()
        self._recover()
        if self.exhausted:
            return None
        steps, left = self._steps, None
        if self._total_steps is not None:
            left = self.total_frames - self._frames
            steps = min(steps, math.ceil(left / self.num_envs))
        start = time.perf_counter()
        self._under_way = self._engine.warmup_owed
        with _Guard(self):
            made = self._make(steps, left)
            frames, batch = self._frames + self._engine.frames, self._processed(made)
        seconds = self._seconds + time.perf_counter() - start
        # no call from here on: an interrupt comes before all of it or after
        self._frames, self._batches, self._seconds, self._under_way = frames, self._batches + 1, seconds, None
        return batch

    def _recover(self) -> None:
        """Where an interrupt came between a rollout's beginning and its delivery, that rollout never was."""
        if self._under_way is not None:
            self._engine.abandon(self._under_way)
            self._under_way = None
        if self.exhausted:
            self._engine.forget_memory()

    def _processed(self, batch: Any) -> Any:
        if self._sink.split_trajs:
            batch = split_trajectories(batch)
        for step in self._sink.postproc:  # type: ignore[union-attr]
            try:
                batch = step(batch)
            except BaseException as error:
                raise relayed(error, worker=0, lane=None, step=self._engine.steps)  # noqa: B904 - it has a cause
            if batch is None:
                raise OptionError(f"postproc {step!r} returned None; it should return the batch.")
        return batch

    def _make(self, steps: int, at_most: int | None = None) -> TensorDictBase:
        batch = self._engine.rollout(steps, at_most)
        device = self._where.placement.storing
        if device is None or device == self._driver.device:
            return batch
        moved = batch.to(device)
        if not self._sink.return_same_td:
            return moved
        if self._stored is None or self._stored.batch_size != moved.batch_size:
            self._stored = moved
        return self._stored.update(moved)

    def rollout(self) -> TensorDictBase:
        """A full rollout as it is made: not post-processed, not counted in `total_frames`.

        Episodes, ids and a warm-up go on from batch to rollout to batch.

        Returns:
            `[N, T]`, or `[T]` for a single lane.
        """
        self._check_open()
        self._recover()
        self._under_way = self._engine.warmup_owed
        with _Guard(self):
            batch = self._make(self._steps)
        self._under_way = None
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
            "lanes that are far behind others are delivered short": self._engine.may_deliver_short,
        }
        if why := next((why for why, holds in unknown.items() if holds), None):
            raise TypeError(f"The number of batches is not known: {why}.")
        assert self._total_steps is not None
        return math.ceil(self._total_steps / self._steps)

    # --- talking to it ---

    def update_policy_weights_(self) -> int:
        """Says that the policy has new weights; the frames that follow carry the new version.

        In one process the policy is the user's own module, so there is nothing to copy: the version counts. Only where
        `policy_device` made a copy on another device are the weights, parameters and buffers, copied to it.

        Returns:
            The new version.

        Raises:
            PolicyError: the user's module has other weights by now than those that were copied.
        """
        self._check_open()
        self._acting.update()
        self._engine.policy_version += 1
        return self._engine.policy_version

    def set_seed(self, seed: int | Sequence[int], static_seed: bool = False) -> int:
        """Seeds environments, the policy's randomness and random actions. Lanes are reset with the next batch.

        Without it environments are seeded by themselves, and the other streams from torch's seed: two collectors in
        one program then draw alike, so seed at least one of them.

        Args:
            seed: an integer, of which every stream becomes an independent child; or one seed a lane, used as given.
            static_seed: every lane gets the same stream.

        Returns:
            A seed for whatever is seeded next: `seed + 1`; `seed` itself with `static_seed`; the largest of a list,
            plus 1.

        Raises:
            OptionError: a negative seed, or a list of another length than there are lanes.
        """
        self._check_open()
        given = _seeds(seed, self.num_envs)
        if not isinstance(given, int):
            self._engine.check_seeds(given)
            if static_seed:
                raise OptionError("static_seed=True gives every lane the stream of one seed; a list has one for each.")
            self._engine.seed(given)
            return max(given) + 1
        self._engine.seed(given, static=static_seed)
        return given if static_seed else given + 1

    def reset(
        self, index: Any = None, *, seed: int | Sequence[int] | None = None, options: Mapping[str, Any] | None = None
    ) -> None:
        """Begins a new episode now, in all lanes or in some: a CUT in their data.

        Args:
            index: a lane, several, a slice, or one bool a lane; None: all.
            seed: for one lane as it is, for several its children; or a list of one for each of them.
            options: for the environments' `reset`, in the place of `reset_options`.

        Raises:
            OptionError: an index that names no lane, or a list of seeds of another length; some lanes of environments
                that can only be reset all together.
        """
        self._check_open()
        lanes = _lane_indices(index, self.num_envs)
        seeds = None if seed is None else _seeds(seed, len(lanes))
        if not (options is None or isinstance(options, Mapping)):
            raise OptionError(f"options must be a mapping or None, not {options!r}.")
        if isinstance(seeds, list) or len(lanes) == 1:
            self._engine.check_seeds(seeds if isinstance(seeds, list) else [seeds or 0])
        self._engine.check_reset(lanes, seeded=seeds is not None, with_options=options is not None)
        self._recover()
        with _Guard(self):
            self._engine.reset(lanes, seeds, options)

    def stats(self) -> Stats:
        """Figures so far: frames, speed, episodes, where the time goes."""
        engine = self._engine
        return Stats(
            frames=self._frames,
            batches=self._batches,
            dropped=engine.dropped + (engine.surplus if self.exhausted else 0),
            seconds=self._seconds,
            frames_per_second=self._frames / self._seconds if self._seconds else 0.0,
            episodes=engine.episodes.finished,
            episode_return=Spread.of([*engine.episodes.returns]),
            episode_length=Spread.of([*engine.episodes.lengths]),
            policy_version=engine.policy_version,
            time=engine.sampler.shares(self._frames // self.num_envs, self._seconds),
        )

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on: counts, ids, random states, the policy's and the environments' own states.

        The policy's weights are in it if the policy is a module or a method of one (where `policy_device` made a copy:
        those of your module); not those that a function uses.

        Tensors are copies on the CPU. Environments of Gymnasium save their random generator, and what a
        `state_dict` method of theirs returns; open episodes are not saved: a load begins new ones.
        """
        self._check_open()
        self._recover()
        state = {"frames": self._frames, "iter": self._batches, "seconds": self._seconds, **self._engine.state_dict()}
        if (weights := weights_of(self._acting.given)) is not None:
            state["policy_state_dict"] = weights
        copied: dict[str, Any] = _on_cpu(state)
        return copied

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """Goes on where `state_dict` was taken: exactly the remaining batches come, with new episodes.

        Args:
            state: what `state_dict` returned.
            strict: the policy's weights must be there, and fit exactly.

        Raises:
            OptionError: something else than a state, one of another number of lanes, or without weights for the policy
                (or with weights for none).
            RuntimeError: torch's, for weights that do not fit.
        """
        self._check_open()
        self._engine.check_state_dict(state)
        if lacking := [key for key in ("frames", "iter", "seconds") if key not in state]:
            raise OptionError(f"This is no state of a collector: it lacks {lacking[0]!r}.")
        module = module_of(self.policy)
        if strict and ("policy_state_dict" in state) is not (module is not None):
            why = "is in the state, and the policy is no module" if module is None else "is not in the state"
            raise OptionError(f"policy_state_dict {why}. (With strict=False weights are left out.)")
        if module is not None and "policy_state_dict" in state:
            self._acting.load(state["policy_state_dict"], strict=strict)
        self._engine.load_state_dict(state)
        self._under_way = None
        self._frames, self._batches, self._seconds = state["frames"], state["iter"], state["seconds"]

    # --- lifecycle ---

    @property
    def closed(self) -> bool:
        """Whether it was shut down."""
        return self._state is _State.CLOSED

    def shutdown(self) -> None:
        """Closes the environments that the collector made. Safe to call again."""
        if self._state is _State.CLOSED:
            return
        self._state = _State.CLOSED
        self._abandoned.detach()
        self._engine.forget_memory()
        errors = self._driver.close()
        for error in errors:
            if not is_interrupt(error):
                warn(f"An environment failed to close: {type(error).__name__}: {error}")
        if interrupt := next(filter(is_interrupt, errors), None):
            raise interrupt

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
        path = "random actions" if self._plan is None else f"{self._plan.path} path: {self._plan.reason}"
        return (
            f"{type(self).__name__}(num_envs={self.num_envs}, frames_per_batch={self.frames_per_batch}, "
            f"total_frames={self.total_frames}, collected_frames={self._frames}, policy=<{path}>, "
            f"{self._state.value})"
        )


class _Guard:
    """Around all that makes frames: an error closes the collector, and the program's own state is put back.

    A class: a generator, interrupted in `contextlib`, would be closed like one that failed.
    """

    def __init__(self, collector: BaseCollector) -> None:
        self._collector = collector
        self._state = ProgramState(collector.policy_device)

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._state.put_back()
            if not is_interrupt(error):
                self._collector.shutdown()


def _close_abandoned(driver: EnvDriver, name: str) -> None:
    driver.close()
    warnings.warn(f"A {name} was never shut down; use `with`, or call shutdown().", ResourceWarning, stacklevel=2)


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
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


def _lane_indices(index: Any, num_lanes: int) -> list[int]:
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
