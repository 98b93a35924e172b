"""Policy and driver make rollouts: the only step loop of the package.

A rollout is cut into *stretches* in which nothing needs deciding, and the loop runs one stretch after the other. What
has to happen between two steps (an episode's limit, the end of a warm-up, a sampled step, an interruptor) ends a
stretch; so the loop holds no question. It knows no workers, sinks or devices.

What is the same for all drivers is here. How frames get into a batch is in the two kinds of engine: `dense`, where
every step is a frame of every lane, and `scratch`, where it is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase
from tensordict.nn import set_interaction_type

from rlcollect.errors import PolicyError
from rlcollect.failures import relayed
from rlcollect.interfaces import Actor, EnvDriver, Interruptor, RolloutMemory
from rlcollect.layout import Leaf
from rlcollect.options import How, What
from rlcollect.rollout.actors import PolicyActor
from rlcollect.rollout.chance import RandomActor
from rlcollect.rollout.episodes import Episodes
from rlcollect.rollout.parts import Memory, Parts, Whole
from rlcollect.rollout.resets import Resets
from rlcollect.rollout.seeding import FreeStream, TorchStream, action_generator, torch_seed
from rlcollect.rollout.timing import StepSampler

__all__ = ["RANDOM_VERSION", "STATE_KEYS", "WINDOW", "Engine", "counts_of", "shares_of"]

Array = np.ndarray[Any, Any]
RANDOM_VERSION = -1
STATE_KEYS = ("env_state_dict", "open", "episodes", "random", "seeds", "policy_version", "steps", "warmup_left")
WINDOW = 256  # steps for which views are made at once: few enough to die young, or the garbage collector walks the heap


class Engine:
    """Makes rollouts.

    Attributes:
        beat: told now and then how many steps were made: a sign of life.
        interruptor: asked after each step whether to stop; None: nobody is.
        newer: asked before each step for newer weights, which it puts into the policy: their version, or None for none;
            None: nobody is.
        policy_version: written on every frame whose action the policy computes.
        versions: how many frames of the last rollout each version made.
        warmup_left: int64 `[N]`, random frames that each lane still has to make.
        steps: steps of every lane made so far.
        frames: in the last rollout.
        dropped: frames that were made and will not be delivered.
        interrupted: whether the interruptor stopped the steps that were made last.
        episodes: bookkeeping of the lanes' episodes.
        sampler: where the time went.
        stream: the torch stream of stochastic policies.
        leaves: what a frame holds.
        parts: how many steps are finished at a time.

    Args:
        driver: steps the environments.
        memory: gives the memory of each rollout.
        policy: computes actions; None: they are random.
        random: draws actions, for warm-up or for good.
        what: limits and marks.
        how: exploration, interruptor.
        stream: the torch stream of stochastic policies.
        worker: number of the worker, for errors and seeds.
        prefix: of the ids of its episodes.
        leaves: what a frame holds.
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
        prefix: int = 0,
        leaves: Sequence[Leaf] = (),
    ) -> None:
        self.parts: Parts = Whole()
        self.beat: Callable[[int], None] = _unheard
        self.newer: Callable[[], int | None] | None = None
        self.policy_version = 0
        self.versions: tuple[tuple[int, int], ...] = ()
        self.leaves = tuple(leaves)
        self.steps = 0
        self.frames = 0
        self.dropped = 0
        self.interrupted = False
        self.episodes = Episodes(driver.num_lanes, prefix=prefix)
        self.sampler = StepSampler()
        self.stream = stream
        self.warmup_left = shares_of(what.init_random_frames or 0, driver.num_lanes)
        self._driver = driver
        self._memory = memory
        self._policy = policy
        self._random = random
        self._how = how
        self._worker = worker
        self._set_truncated = what.set_truncated
        self._recorded = what.recorded
        self.interruptor: Interruptor | None = how.interruptor
        self._window = (0, 0)  # the steps of the rollout under way for which there are views
        self._failure: BaseException | None = None  # to be raised when the steps before it are stored
        self._failed_at = 0  # the step that was relayed last
        self._resets = Resets(driver, self.episodes, what=what, worker=worker, located=self._located)
        self._exploring: Callable[[], AbstractContextManager[Any]] = partial(set_interaction_type, how.exploration_type)

    may_deliver_short = False  # lanes beside others

    # --- a rollout ---

    def rollout(self, steps: int, at_most: int | None = None, start: int = 0) -> TensorDictBase:
        """Makes `steps` frames of every lane, or fewer if the interruptor says so; at least one.

        Args:
            steps: T.
            at_most: frames over all lanes, where that is fewer. None: no limit.
            start: steps of it that stand in memory already.

        Returns:
            The frames, `[*lead, T]`.

        Raises:
            What an environment or the policy raised, from a `WorkerError`.
        """
        raise NotImplementedError

    def _make(self, memory: RolloutMemory, steps: int) -> int:
        """Steps the environments so often, or fewer times; what came of it stands in memory.

        Args:
            memory: of so many steps at least.
            steps: how many at most.
        """
        try:
            self._bind(memory)
            made = self._stepped(steps)
            with self._located(made):
                self._driver.finish(made)
            if self._policy is not None:
                self._finish_policy(self._policy, made)
        finally:
            self._release()
        return made

    def _stepped(self, steps: int) -> int:
        """Steps the environments; how often. Where what was made before a failure is wanted, that is raised later."""
        try:
            with self.stream, self._exploring(), torch.no_grad():
                return self._run(steps)
        except BaseException as error:
            driver, made = self._driver, self._failed_at
            if not (self.parts.keeps and made and driver.failed_lane is not None and driver.failed_step is None):
                raise
            driver.ends[:] = [end for end in driver.ends if end[0] < made]
            self._failure = error
            return made

    def _raise_failure(self) -> None:
        """Raises what an environment raised, now that the steps before it are stored."""
        if self._failure is not None:
            raise self._failure

    def _bind(self, memory: RolloutMemory) -> None:
        self._driver.bind(memory)
        warmup = int(self.warmup_left.max())
        if self._policy is not None:
            self._policy.bind(
                memory,
                self._fresh(),
                self._starts(),
                self._driver.loose,
                warming=warmup > 0,
                row_lanes=self._row_lanes(),
            )
            if warmup:
                self._policy.blank(memory)
        if self._policy is None or warmup:
            self._random.bind(memory)
        self._window = (0, 0)

    def _row_lanes(self) -> Array | None:
        """Whose row each is, by step; None: the lanes' own."""
        return None

    def _fresh(self) -> list[int]:
        """The rows whose episode begins with the first step."""
        raise NotImplementedError

    def _starts(self) -> Sequence[tuple[int, int]]:
        """(t, row) after which a row shows the first observation of an episode; it grows."""
        return self._driver.ends

    def _finish_policy(self, policy: PolicyActor, made: int) -> None:
        with self._located(made):
            policy.finish(made)
        if (wrong := policy.first_invalid(self._policy_acts_from(made), made)) is not None:
            t, text = wrong
            with self._located(t):
                raise PolicyError(text)

    def _policy_acts_from(self, made: int) -> Array:
        """int64 `[rows]`, the first of the steps that were made in which the policy acted."""
        raise NotImplementedError

    def _open_window(self, start: int, stop: int) -> None:
        """Has views made for the steps that follow: not for a whole long rollout at once, which would cost memory."""
        self._window = (start, stop)
        self._driver.view(start, stop)
        warmup = int(self.warmup_left.max())
        if self._policy is not None:
            self._policy.view(start, stop)
        if self._policy is None or start < warmup:
            self._random.view(start, stop)

    def _release(self) -> None:
        if self._policy is not None:
            self._policy.release()
        self._random.release()

    def _run(self, steps: int) -> int:
        t, self.interrupted = 0, False
        while t < (goal := self._goal(t, steps)):
            if t == self._window[1]:
                self._open_window(t, self._window_after(t, steps))
            if self.newer is not None and (version := self.newer()) is not None:
                self._act_by(version, t)
            actor, stop = self._stretch(t, min(goal, self._window[1]))
            first = t - self._window[0]
            if self.sampler.countdown == 0:
                stop = t + 1
                self.beat(self.steps + t)
                with self._located(t):
                    self.sampler.step(first, actor, self._driver)
            else:
                stop = min(stop, t + self.sampler.countdown)
                self._loop(actor, first, first + stop - t)
                self.sampler.countdown -= stop - t
            t = stop
            self._after(t)
            if self.interruptor is not None and self._stopped(self.interruptor, t):
                self.interrupted = True
                break
        return t

    def _act_by(self, version: int, t: int) -> None:
        """The policy has weights of this version from step t on."""
        raise NotImplementedError

    @property
    def _is_asked(self) -> bool:
        """Whether something is to be asked between any two steps."""
        return self.interruptor is not None or self.newer is not None

    def _goal(self, t: int, steps: int) -> int:  # noqa: ARG002
        """How many steps are to be made, as far as is known after t of them; `steps` at most."""
        return steps

    def _window_after(self, t: int, steps: int) -> int:
        """Where the views that are made at step t end."""
        return min(steps, t + WINDOW)

    def _after(self, t: int) -> None:
        """What is to be done before step t."""

    def _stopped(self, interruptor: Interruptor, t: int) -> bool:
        with self._located(t):
            return interruptor.collection_stopped()

    def _stretch(self, t: int, steps: int) -> tuple[Actor, int]:
        """Who acts from step t on, and the step before which something needs deciding, `steps` at the latest."""
        raise NotImplementedError

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

    # --- between rollouts ---

    def reset(
        self,
        lanes: Sequence[int],
        seeds: Sequence[int] | int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a new episode in these lanes: see `Resets.reset`."""
        self._resets.reset(lanes, self.stream, seeds, options)

    def go_apart(self, policy: PolicyActor | None) -> None:
        """Rollouts are made beside other threads from now on: nothing of the program's own is changed meanwhile.

        Args:
            policy: in the place of the one there is, whose past it takes over.
        """
        if policy is not None and self._policy is not None:
            policy.load_state_dict(self._policy.state_dict())
        self._policy = policy
        self.stream = FreeStream(0, self.stream.device)
        self._exploring = nullcontext

    @property
    def surplus(self) -> int:
        """Frames that were made and wait for the next batch."""
        return 0

    @property
    def warmup_owed(self) -> Array:
        """int64 `[N]`, random frames that are still to be delivered."""
        return self.warmup_left

    def deliver_to(self, memory: Memory) -> bool:  # noqa: ARG002
        """Has batches made in memory of somebody else's, if that can be; whether it can."""
        return False

    def forget_memory(self) -> None:
        """No rollout may come for long: memory that the user lets go of goes back to the system at once."""
        self._memory.forget()

    def _prepare(self) -> None:
        """What is to be done before a rollout."""
        self._resets.reset_due(self.stream)

    def abandon(self, warmup_left: Array | None = None) -> None:
        """The last rollout is lost: new episodes begin with the next, a CUT.

        Args:
            warmup_left: what was left before it, of which nothing was delivered.
        """
        self._resets.cut()
        if warmup_left is not None:
            self.warmup_left = warmup_left

    def seed(self, seed: int | Sequence[int], *, static: bool = False, generation: int = 0) -> None:
        """Seeds the lanes, at their next reset, which comes with the next rollout; the policy's and random streams now.

        Args:
            seed: one integer, whose children seed the lanes; or one seed a lane, used as they are (by a first
                generation; by a later one their children are).
            static: every lane, of every worker, gets the same child.
            generation: how many workers of this number were seeded so before.
        """
        self._resets.seed(seed, static=static, generation=generation)
        self.stream = type(self.stream)(torch_seed(seed, self._worker, generation), self.stream.device)
        self._random.reseed(action_generator(seed, self._worker, generation))

    def state_dict(self) -> dict[str, Any]:
        """Counters, ids and random states, and what the environments can save of themselves."""
        return {
            "open": {
                "episodes": self._driver.open_episodes(),
                "due": sorted(self._resets.due),
                "policy": [] if self._policy is None else self._policy.state_dict(),
            },
            "env_state_dict": self._driver.state_dict(),
            "episodes": self.episodes.state_dict(),
            "random": {**self.stream.state_dict(), "actions": self._random.sampler.state_dict()},
            "seeds": self._resets.seeds,
            "policy_version": self.policy_version,
            "steps": self.steps,
            "warmup_left": self.warmup_owed.tolist(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Lanes whose episodes cannot begin new ones, a CUT."""
        self._resets.cut()  # in case it is broken off
        self._driver.load_state_dict(state["env_state_dict"])
        going_on = {*self._driver.reopen(state["open"]["episodes"])} - {*state["open"]["due"]}
        if self._policy is not None and not self._policy.load_state_dict(state["open"]["policy"]):
            going_on = set()
        self.episodes.load_state_dict(state["episodes"])
        self.stream.load_state_dict(state["random"])
        self._random.sampler.load_state_dict(state["random"]["actions"])
        self.policy_version = state["policy_version"]
        self.steps = state["steps"]
        self.warmup_left = np.asarray(state["warmup_left"], np.int64)
        self._resets.go_on(state["seeds"], going_on)

    def relayed(self, error: BaseException, t: int) -> BaseException:
        """What to raise in the place of an exception that came in step t."""
        self._failed_at = t
        t = t if self._driver.failed_step is None else self._driver.failed_step
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


def counts_of(versions: Array) -> tuple[tuple[int, int], ...]:
    """How many frames there are of each version: of one, most of the time."""
    if versions.size and versions.min() == (newest := versions.max()):
        return ((int(newest), versions.size),)
    found, counts = np.unique(versions, return_counts=True)
    return tuple(zip(found.tolist(), counts.tolist(), strict=True))


def _unheard(steps: int) -> None:
    """Nobody asks for signs of life."""


def shares_of(total: int, lanes: int) -> Array:
    """`total` split over the lanes; shares differ by at most one."""
    return np.array([total // lanes + (lane < total % lanes) for lane in range(lanes)], np.int64)
