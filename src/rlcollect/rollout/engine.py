"""Policy and driver make rollouts: the only step loop of the package.

A rollout is cut into *stretches* in which nothing needs deciding, and the loop runs one stretch after the other. What
has to happen between two steps (an episode's limit, the end of a warm-up, a sampled step, an interruptor) ends a
stretch; so the loop holds no question. It knows no workers, sinks or devices.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import set_interaction_type

from rlcollect.errors import OptionError, PolicyError
from rlcollect.failures import relayed
from rlcollect.interfaces import Actor, EnvDriver, Interruptor
from rlcollect.layout import Key
from rlcollect.memory.slots import Slot
from rlcollect.options import How, What
from rlcollect.rollout.actors import MixedActor, PolicyActor, RandomActor
from rlcollect.rollout.episodes import Episodes
from rlcollect.rollout.seeding import TorchStream, action_generator, lane_seed, torch_seed
from rlcollect.rollout.timing import StepSampler

__all__ = ["Engine"]

Array = np.ndarray[Any, Any]
RANDOM_VERSION = -1
STATE_KEYS = ("env_state_dict", "episodes", "random", "seeds", "policy_version", "steps", "warmup_left")
WINDOW = 256  # steps for which views are made at once: few enough to die young, or the garbage collector walks the heap


class Memory(Protocol):
    """Gives the memory of a rollout."""

    def take(self, steps: int) -> Slot:
        """Memory for so many steps."""

    def forget(self) -> None:
        """No more memory will be asked for."""


class Engine:
    """Makes rollouts.

    Attributes:
        policy_version: written on every frame whose action the policy computes.
        warmup_left: int64 `[N]`, random frames that each lane still has to make.
        steps: steps of every lane made so far.
        episodes: bookkeeping of the lanes' episodes.
        sampler: where the time went.
        stream: the torch stream of stochastic policies.

    Args:
        driver: steps the environments.
        memory: gives the memory of each rollout.
        policy: computes actions; None: they are random.
        random: draws actions, for warm-up or for good.
        what: limits and marks.
        how: exploration, interruptor.
        stream: the torch stream of stochastic policies.
        worker: number of the worker, for errors and ids.
    """

    def __init__(
        self,
        driver: EnvDriver,
        memory: Memory,
        *,
        policy: PolicyActor | None,
        random: RandomActor,
        what: What,
        how: How,
        stream: TorchStream,
        worker: int = 0,
    ) -> None:
        self.policy_version = 0
        self.steps = 0
        self.episodes = Episodes(driver.num_lanes, prefix=worker, record=what.recorded)
        self.sampler = StepSampler()
        self.stream = stream
        self.warmup_left = _shares(what.init_random_frames or 0, driver.num_lanes)
        self._driver = driver
        self._memory = memory
        self._policy = policy
        self._random = random
        self._how = how
        self._worker = worker
        self._set_truncated = what.set_truncated
        self._recorded = what.recorded
        self._limit = what.max_frames_per_traj
        self._interruptor: Interruptor | None = how.interruptor
        self._mixed: MixedActor | None = None
        self._births = np.zeros(driver.num_lanes, np.int64)  # the step with which each open episode began
        self._seen_ends = 0
        self._window = (0, 0)  # the steps of the rollout under way for which there are views
        self._ended_at_limit: list[tuple[int, int]] = []  # by the environment itself: both flags, as TimeLimit has it
        self._reset_at_each_iter = what.reset_at_each_iter
        self._due: set[int] = set()  # lanes to be reset before the next rollout
        self._seeds: dict[int, int] = {}  # for the next reset of a lane

    # --- a rollout ---

    def rollout(self, steps: int) -> TensorDict:
        """Makes `steps` steps of every lane, or fewer if the interruptor says so; at least one.

        Returns:
            The frames, `[N, T]`, or `[T]` for a single lane.

        Raises:
            What an environment or the policy raised, from a `WorkerError`.
        """
        self._prepare()
        slot = self._memory.take(steps)
        try:
            self._bind(slot)
            with self.stream, set_interaction_type(self._how.exploration_type), torch.no_grad():
                made = self._run(steps)
            self._driver.finish(made)
            if self._policy is not None:
                self._finish_policy(self._policy, made)
            self._fill(slot.arrays, made)
            self._random.finish(made if self._policy is None else min(made, int(self.warmup_left.max())))
        except BaseException:
            self.abandon()
            raise
        finally:
            self._release()
        self.steps += made
        self.warmup_left = np.maximum(self.warmup_left - made, 0)
        return slot.batch(made)

    def _bind(self, slot: Slot) -> None:
        self._driver.bind(slot.arrays)
        warmup = int(self.warmup_left.max())
        if self._policy is not None:
            self._policy.bind(slot, self.episodes.ages.copy(), self._driver.ends, warming=warmup > 0)
            if warmup:
                self._policy.blank(slot)
        if self._policy is None or warmup:
            self._random.bind(slot)
        self._seen_ends = 0
        self._ended_at_limit = []
        self._window = (0, 0)

    def _finish_policy(self, policy: PolicyActor, made: int) -> None:
        with self._located(made):
            policy.finish(made)
        if (wrong := policy.first_invalid(self.warmup_left, made)) is not None:
            t, text = wrong
            with self._located(t):
                raise PolicyError(text)

    def _open_window(self, start: int, stop: int) -> None:
        """Has views made for the steps that follow: not for a whole long rollout at once, which would cost memory."""
        self._window = (start, stop)
        self._driver.view(start, stop)
        warmup = int(self.warmup_left.max())
        if self._policy is not None:
            self._policy.view(start, stop)
        if self._policy is None or start < warmup:
            self._random.view(start, stop)
        if self._policy is not None and start < warmup:
            self._mixed = MixedActor(self._policy, self._random, self.warmup_left == warmup)

    def _release(self) -> None:
        if self._policy is not None:
            self._policy.release()
        self._mixed = None

    def _run(self, steps: int) -> int:
        t = 0
        while t < steps:
            if t == self._window[1]:
                self._open_window(t, min(steps, t + WINDOW))
            actor, stop = self._stretch(t, self._window[1])
            first = t - self._window[0]
            if self.sampler.countdown == 0:
                stop = t + 1
                with self._located(t):
                    self.sampler.step(first, actor, self._driver)
            else:
                stop = min(stop, t + self.sampler.countdown)
                self._loop(actor, first, first + stop - t)
                self.sampler.countdown -= stop - t
            t = stop
            if self._limit is not None:
                self._truncate(t, self._limit)
            if self._interruptor is not None and self._stopped(self._interruptor, t):
                break
        return t

    def _stopped(self, interruptor: Interruptor, t: int) -> bool:
        with self._located(t):
            return interruptor.collection_stopped()

    def _stretch(self, t: int, steps: int) -> tuple[Actor, int]:
        """Who acts from step t on, and the step before which something needs deciding."""
        stop = t + 1 if self._interruptor is not None else steps
        if self._limit is not None:
            stop = min(stop, int(self._births.min()) + self._limit - self.steps)
        if self._policy is None:
            return self._random, stop
        random_in_all, random_in_some = int(self.warmup_left.min()), int(self.warmup_left.max())
        if t < random_in_all:
            return self._random, min(stop, random_in_all)
        self._policy.enter(t)
        if t < random_in_some:
            assert self._mixed is not None
            return self._mixed, min(stop, random_in_some)
        return self._policy, stop

    def _loop(self, actor: Actor, start: int, stop: int) -> None:
        """The step loop: act, write, step. Times are those of the window."""
        observations, call, write, step = actor.observations, actor.call, actor.write, self._driver.step
        t = start
        try:
            for t in range(start, stop):
                step(t, write(t, call(*observations[t])))
        except BaseException as error:
            raise self.relayed(error, self._window[0] + t)  # noqa: B904 - it has a cause of its own

    def _located(self, t: int) -> _Located:
        """What is raised inside comes out with who and where: as in the loop, where a context would cost."""
        return _Located(self, t)

    def _truncate(self, t: int, limit: int) -> None:
        """Ends the episodes that have reached their limit with frame t - 1."""
        ends = self._driver.ends
        for end, lane in ends[self._seen_ends :]:
            if self._births[lane] + limit == self.steps + end + 1:
                self._ended_at_limit.append((lane, end))
            self._births[lane] = self.steps + end + 1
        due = np.flatnonzero(self._births + limit <= self.steps + t).tolist()
        if due:
            with self._located(t - 1):
                self._driver.truncate(t - 1, due)
            self._births[due] = self.steps + t
        self._seen_ends = len(ends)

    def _fill(self, arrays: Mapping[Key, Array], made: int) -> None:
        """What follows from the frames, for all of them at once."""
        for name in ("terminated", "truncated", "done"):
            arrays[name,].fill(False)  # ended lanes were reset at once
        next_done, truncated = arrays["next", "done"], arrays["next", "truncated"]
        for lane, t in self._ended_at_limit:
            truncated[lane, t] = True
        if self._set_truncated:
            truncated[:, made - 1] = True
        np.logical_or(arrays["next", "terminated"], truncated, out=next_done)
        versions = arrays["collector", "policy_version"]
        versions.fill(RANDOM_VERSION if self._policy is None else self.policy_version)
        if self._policy is not None and self.warmup_left.any():
            versions[:, :made][np.arange(made) < self.warmup_left[:, None]] = RANDOM_VERSION
        if "worker" in self._recorded:
            arrays["collector", "worker"].fill(self._worker)
        self.episodes.fill(arrays, made, self._driver.ends)

    # --- between rollouts ---

    def reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int] | int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a new episode in these lanes: a CUT.

        Args:
            lanes: which.
            seeds: one a lane, or a single one: for several lanes its children. None: seeds that wait are used up.
            options: for the environments' `reset`; None: `reset_options`.
        """
        if isinstance(seeds, int):
            seeds = [seeds] if len(lanes) == 1 else [lane_seed(seeds, self._worker, lane) for lane in lanes]
        waiting = {**self._seeds, **dict(zip(lanes, seeds or (), strict=bool(seeds)))}
        kwargs = {} if options is None else {"options": dict(options)}
        try:
            with self.stream:
                self._reset_groups(lanes, waiting, kwargs)
        except BaseException:
            self._due |= set(lanes)  # some were reset, and are to be again
            raise
        self.episodes.cut(lanes)
        self._births[list(lanes)] = self.steps
        self._due -= set(lanes)
        for lane in lanes:
            self._seeds.pop(lane, None)

    def forget_memory(self) -> None:
        """No rollout may come for long: memory that the user lets go of goes back to the system at once."""
        self._memory.forget()

    def _prepare(self) -> None:
        """Resets what is due before a rollout."""
        if self._reset_at_each_iter:
            self._due |= set(np.flatnonzero(self.episodes.ages).tolist())
        if self._due:
            self.reset(sorted(self._due))

    def _reset_groups(self, lanes: Sequence[int], seeds: Mapping[int, int], kwargs: Mapping[str, Any]) -> None:
        """Those that have a seed together, and the others."""
        for group in ([lane for lane in lanes if (lane in seeds) is seeded] for seeded in (True, False)):
            if group:
                given = [seeds[lane] for lane in group] if group[0] in seeds else None
                with self._located(0):
                    self._driver.reset(group, given, kwargs)

    def abandon(self, warmup_left: Array | None = None) -> None:
        """The last rollout is lost: new episodes begin with the next, a CUT.

        Args:
            warmup_left: what was left before it, of which nothing was delivered.
        """
        self._due = set(range(self._driver.num_lanes))
        if warmup_left is not None:
            self.warmup_left = warmup_left

    def seed(self, seed: int | Sequence[int], *, static: bool = False) -> None:
        """Seeds the lanes, at their next reset, which comes with the next rollout; the policy's and random streams now.

        Args:
            seed: one integer, whose children seed the lanes; or one seed a lane, used as they are.
            static: every lane gets the same child.
        """
        lanes = range(self._driver.num_lanes)
        if isinstance(seed, Sequence):
            self._seeds = dict(zip(lanes, seed, strict=True))
        else:
            self._seeds = {lane: lane_seed(seed, self._worker, 0 if static else lane) for lane in lanes}
        self._due = set(lanes)
        self.stream = TorchStream(torch_seed(seed, self._worker), self.stream.device)
        self._random.reseed(action_generator(seed, self._worker))

    def state_dict(self) -> dict[str, Any]:
        """Counters, ids and random states, and what the environments can save of themselves."""
        return {
            "env_state_dict": self._driver.state_dict(),
            "episodes": self.episodes.state_dict(),
            "random": {**self.stream.state_dict(), "actions": self._random.sampler.state_dict()},
            "seeds": dict(self._seeds),
            "policy_version": self.policy_version,
            "steps": self.steps,
            "warmup_left": self.warmup_left.tolist(),
        }

    def check_state_dict(self, state: Mapping[str, Any]) -> None:
        """Whether it is one that can be loaded.

        Raises:
            OptionError: it lacks something, or is of another number of lanes.
        """
        if lacking := [key for key in STATE_KEYS if key not in state]:
            raise OptionError(f"This is no state of a collector: it lacks {lacking[0]!r}.")
        if len(state["warmup_left"]) != self._driver.num_lanes:
            raise OptionError(
                f"The state is of {len(state['warmup_left'])} lanes, this collector has {self._driver.num_lanes}."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken, with new episodes: a CUT, at the next rollout."""
        self._driver.load_state_dict(state["env_state_dict"])
        self.episodes.load_state_dict(state["episodes"])
        self.stream.load_state_dict(state["random"])
        self._random.sampler.load_state_dict(state["random"]["actions"])
        self._seeds = dict(state["seeds"])
        self.policy_version = state["policy_version"]
        self.steps = state["steps"]
        self.warmup_left = np.asarray(state["warmup_left"], np.int64)
        self._due = set(range(self._driver.num_lanes))

    def relayed(self, error: BaseException, t: int) -> BaseException:
        """What to raise in the place of an exception that came in step t."""
        return relayed(error, worker=self._worker, lane=self._driver.failed_lane, step=self.steps + t)


class _Located:
    # a class, since contextlib's generators let a StopIteration through in the place of what is raised for it

    def __init__(self, engine: Engine, t: int) -> None:
        self._engine = engine
        self._t = t

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            raise self._engine.relayed(error, self._t)


def _shares(total: int, lanes: int) -> Array:
    """`total` split over the lanes; shares differ by at most one."""
    return np.array([total // lanes + (lane < total % lanes) for lane in range(lanes)], np.int64)
