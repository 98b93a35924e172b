"""`ProcessVectorEnv`: the lanes of a vector environment in worker processes."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Literal

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from rlcollect.envs.make import EnvSource, space_difference
from rlcollect.envs.process.checks import (
    count,
    entropy_of,
    fresh_seed,
    lane_seeds,
    masked,
    restarts_of,
    seconds,
)
from rlcollect.envs.process.crew import Crew, Limits, raised
from rlcollect.envs.process.memory import Plan, starts
from rlcollect.envs.process.messages import Build, Call, Facts, Reset, SetAttr
from rlcollect.envs.process.results import Infos, Results
from rlcollect.envs.process.sources import packed_makers
from rlcollect.envs.process.worker import start_pool
from rlcollect.errors import ClosedError, OptionError, SpaceError
from rlcollect.failures import is_interrupt
from rlcollect.processes.channel import Held
from rlcollect.processes.launch import default_method

__all__ = ["ProcessVectorEnv"]

Array = np.ndarray[Any, Any]
Step = tuple[Any, Array, Array, Array, dict[str, Any]]
CLOSING = 1.0  # seconds that environments have to close before their processes are ended


class ProcessVectorEnv(VectorEnv[Any, Any, Any]):
    """Environments in worker processes, several to each, as one vector environment of Gymnasium.

    It does what `gymnasium.vector.SyncVectorEnv` does with `autoreset_mode=SAME_STEP`, value for value: a lane that
    ends is reset in the same step; its last observation and info are `infos["final_obs"]` and `infos["final_info"]`.

        with ProcessVectorEnv("CartPole-v1", num_envs=16, num_workers=2) as envs:
            observations, infos = envs.reset(seed=0)
            observations, rewards, terminations, truncations, infos = envs.step(envs.action_space.sample())

    Observations and actions lie in memory that the processes share. Spaces without a fixed form (`Text`, `Sequence`,
    `Graph`, `OneOf`, your own) have none there: such parts of an observation cross by value at each step, and such
    actions as a command, which takes longer. Environments get actions in the dtype of their space.

    **Groups.** With `num_groups=2`, `send(group, actions)` begins a step of half of the lanes and returns at once, and
    `recv(group)` waits for it: the policy acts for one group while the other steps.

    **Failures.** What an environment raises comes out as itself, from a `WorkerError` that tells worker, lane and step;
    a worker that is killed is a `WorkerDied`; then the vector environment is closed. With `on_worker_failure="restart"`
    another process takes the worker's place instead, and its lanes begin anew. The step under way gives for them the
    new episode's first observation, reward 0, terminated False, truncated True, and `infos["restarted"]`; there is no
    `final_obs`, since nobody knows it. If the lanes were not being stepped then, their next step gives that, and its
    actions are not used. What `set_attr` has set there is lost. Each time, a `WorkerRestarted` warning carries the
    cause. While environments are made for the first time, a failure is raised in any case.

    **Time limits.** When a wait took `timeout` seconds, `WorkerTimeout` is raised and nothing is lost: the next
    `step_wait` or `recv` gives what came. A Ctrl-C leaves a step under way likewise; another `step` drops it.

    Args:
        make_env: an id, a spec, a callable that makes a `gymnasium.Env`, or a sequence of these, one a lane. They cross
            by value, so lambdas, and classes of a script, will do.
        num_envs: how many lanes.
        num_workers: how many processes; lanes are shared out evenly.
        num_groups: into how many parts the workers are divided.
        start_method: how processes are started: "forkserver", "spawn" or "fork".
        start_timeout: seconds that making the environments may take; None: any.
        timeout: seconds that any other wait may take; None: any.
        on_worker_failure: "raise" or "restart".
        max_restarts: of each worker; None: any number. Past it, the last failure is raised, with a note of the others.
        worker_timeout: seconds that a worker may take for a step or a reset, until it counts as failed; None: any.
        num_sub_threads: threads that torch has in a worker.
        create_env_kwargs: keyword arguments for what makes the environments; or a sequence of such, one a lane.
        copy: whether observations are copies. With False they are the same arrays each time, and the next step writes
            into them.

    Raises:
        OptionError, SpaceError: they do not fit.
        SharedMemoryError: there is too little.
        What is raised while environments are made, from a `WorkerError`; WorkerDied, WorkerTimeout.
    """

    def __init__(
        self,
        make_env: EnvSource | Sequence[EnvSource],
        num_envs: int,
        num_workers: int,
        *,
        num_groups: int = 1,
        start_method: str | None = None,
        start_timeout: float | None = 300.0,
        timeout: float | None = None,
        on_worker_failure: Literal["raise", "restart"] = "raise",
        max_restarts: int | None = 10,
        worker_timeout: float | None = None,
        num_sub_threads: int = 1,
        create_env_kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        copy: bool = True,
    ) -> None:
        self.closed = True  # until it is open
        self.on_worker_failure = on_worker_failure
        self.copy = bool(copy)
        self.num_envs = count("num_envs", num_envs)
        workers, groups = count("num_workers", num_workers), count("num_groups", num_groups)
        if workers > self.num_envs:
            raise OptionError(f"num_workers={workers} is more than there are lanes (num_envs={self.num_envs}).")
        if workers % groups:
            raise OptionError(f"num_workers={workers} cannot be divided into num_groups={groups} of equal size.")
        limits = Limits(
            seconds("start_timeout", start_timeout),
            seconds("timeout", timeout),
            seconds("worker_timeout", worker_timeout),
        )
        restarts = restarts_of(on_worker_failure, max_restarts, workers)
        makers = packed_makers(make_env, self.num_envs, create_env_kwargs)
        bounds = starts(self.num_envs, workers)
        self._spans = [slice(*bounds[worker : worker + 2]) for worker in range(workers)]
        size = workers // groups
        self._groups = [range(group * size, (group + 1) * size) for group in range(groups)]
        self._numbers = [0] * groups
        self._pending = [False] * groups
        self._is_broken_off = False
        self._has_begun = False
        entropy = fresh_seed()
        builds = [Build(makers[span], span.start, entropy, 0) for span in self._spans]
        method, threads = start_method or default_method(), count("num_sub_threads", num_sub_threads)
        ending = ExitStack()
        self._abandoned = weakref.finalize(self, _close_abandoned, ending.close, type(self).__name__)
        try:
            with Held():  # they have their owner before a Ctrl-C comes
                self._crew = Crew(start_pool(workers, method, threads), builds, limits, restarts)
                ending.callback(self._crew.close, CLOSING)
            facts = self._crew.build()
            self._take(facts)
            plan = Plan.of(self.single_observation_space, self.single_action_space, self.num_envs, workers)
            memory = self._crew.attach(plan)
            self._results: Results | None = Results(
                memory, self.single_observation_space, self.single_action_space, copy=self.copy
            )
        except BaseException:
            self._abandoned.detach()
            ending.close()
            raise
        self.closed = False

    def _take(self, facts: Sequence[Facts]) -> None:
        first = facts[0]
        for worker, other in enumerate(facts):
            difference = space_difference(
                first.observation_space, other.observation_space, True, "observation"
            ) or space_difference(first.action_space, other.action_space, True, "action")
            if difference:
                lane = self._spans[worker].start
                raise SpaceError(f"All lanes need the same spaces; lane {lane} differs from lane 0: {difference}")
        self.metadata = {**first.metadata, "autoreset_mode": AutoresetMode.SAME_STEP}
        self.render_mode = first.render_mode
        self.spec = first.spec
        self.single_observation_space = first.observation_space
        self.single_action_space = first.action_space
        self.observation_space = batch_space(first.observation_space, self.num_envs)
        self.action_space = batch_space(first.action_space, self.num_envs)
        sizes = [self._span([group]) for group in range(len(self._groups))]
        self._group_action_spaces = [batch_space(first.action_space, span.stop - span.start) for span in sizes]

    # --- what there is ---

    @property
    def num_groups(self) -> int:
        """Parts that `send` and `recv` know."""
        return len(self._groups)

    @property
    def restarts(self) -> list[int]:
        """How often each worker was replaced."""
        return list(self._crew.restarts.counts)

    def lanes(self, group: int) -> range:
        """The lanes of a group."""
        span = self._span([self._checked_group(group)])
        return range(span.start, span.stop)

    @property
    def np_random_seed(self) -> Any:
        """Those of the environments."""
        return self.get_attr("np_random_seed")

    @property  # type: ignore[misc] # as in Gymnasium's own, it cannot be set
    def np_random(self) -> Any:
        """Copies of the generators of the environments."""
        return self.get_attr("np_random")

    # --- steps ---

    def step(self, actions: Any) -> Step:
        """Makes a step of every lane.

        Args:
            actions: of all lanes, batched.

        Returns:
            Observations, rewards (float64), terminations, truncations, infos.

        Raises:
            OptionError: actions that do not fit, no reset before it, or a step that took too long is still under way.
            WorkerTimeout, WorkerDied, and what an environment raises.
        """
        try:
            self.step_async(actions)
            return self.step_wait()
        except KeyboardInterrupt:
            self._is_broken_off = any(self._pending)
            raise

    def step_async(self, actions: Any) -> None:
        """Begins a step of every lane."""
        self._check_ready()
        if any(self._pending):
            if not self._is_broken_off:
                raise OptionError("A step is under way; take what comes of it first (step_wait, recv), or reset.")
            for group, is_pending in enumerate(self._pending):
                if is_pending:
                    self.recv(group)
        self._is_broken_off = False
        self._begin(range(len(self._groups)), self.action_space, actions)

    def step_wait(self) -> Step:
        """What comes of it."""
        self._check_open()
        for group in range(len(self._groups)):
            self._check_pending(group)
        return self._finish(range(len(self._groups)))

    def send(self, group: int, actions: Any) -> None:
        """Begins a step of the lanes of a group, and does not wait for it.

        Args:
            group: its number.
            actions: of its lanes, batched.
        """
        self._check_ready()
        if self._pending[self._checked_group(group)]:
            raise OptionError(f"A step of group {group} is under way; take what comes of it first (recv), or reset.")
        self._begin([group], self._group_action_spaces[group], actions)

    def recv(self, group: int = 0) -> Step:
        """Waits for a step of a group; what comes of it, of its lanes alone."""
        self._check_open()
        self._check_pending(self._checked_group(group))
        return self._finish([group])

    def _begin(self, groups: Sequence[int], space: gym.Space[Any], actions: Any) -> None:
        assert self._results is not None
        span = self._span(groups)
        if self._results.takes_arrays:
            self._results.write(span, actions)
        else:
            given = self._results.split(space, actions, span.stop - span.start)
            for group in groups:
                for worker in self._groups[group]:
                    own = self._spans[worker]
                    self._crew.give(worker, given[own.start - span.start : own.stop - span.start])
        for group in groups:
            self._pending[group], number = True, self._numbers[group] + 1
            self._numbers[group] = number
            self._crew.begin(self._groups[group], number)

    def _finish(self, groups: Sequence[int]) -> Step:
        with _Closing(self):
            deadline = self._crew.deadline()
            for group in groups:
                self._crew.finish(self._groups[group], self._numbers[group], deadline)
            span = self._span(groups)
            infos = Infos(span)
            for group in groups:
                self._gather(group, infos)
            assert self._results is not None
            results = (self._results.observations(span), *self._results.flags(span), infos.gathered)
            for group in groups:
                self._pending[group] = False
                for worker in self._groups[group]:
                    self._crew.replaced.pop(worker, None)
            return results

    def _gather(self, group: int, infos: Infos) -> None:
        assert self._results is not None
        for worker in self._groups[group]:
            span = self._spans[worker]
            if (started := self._crew.replaced.get(worker)) is not None:
                self._results.started(started, span.start, infos)
                self._results.cut(span, infos)
            elif told := self._crew.told(worker, self._numbers[group]):
                self._results.told(told, span.start, infos)

    # --- all else ---

    def reset(
        self, *, seed: int | Sequence[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begins a new episode in every lane, or in those of `options["reset_mask"]`. A step under way is dropped.

        Args:
            seed: lane i gets `seed + i`; or one for each, in a sequence. The generators of `random`, numpy and torch in
                each worker are seeded too, each differently.
            options: for each environment, without `reset_mask`: bool `[lanes]`.

        Returns:
            Observations and infos. `infos["restarted"]` marks all lanes of a worker that was replaced, then or since
            the last step of its lanes; those of them that the mask leaves out have begun anew, too.
        """
        self._check_open()
        seeds = lane_seeds(seed, self.num_envs)
        mask, options = masked(options, self.num_envs)
        given = entropy_of(seed)
        commands = {}
        for worker, span in enumerate(self._spans):
            own = {lane - span.start: seeds[lane] for lane in range(span.start, span.stop) if mask[lane]}
            if own:
                commands[worker] = Reset(own, options, given, self.restarts[worker])
        self._pending, self._is_broken_off = [False] * len(self._groups), False
        if mask.all():
            self._crew.replaced.clear()
        with _Closing(self):
            self._crew.seed = self._crew.seed if given is None else given
            self._crew.options = options
            self._has_begun = True
            try:
                answers = self._crew.ask(commands, is_vital=True)
            finally:
                self._crew.options = None
            return self._begun(answers)

    def _begun(self, answers: Mapping[int, Any]) -> tuple[Any, dict[str, Any]]:
        replaced = self._crew.replaced
        raised({worker: answer for worker, answer in answers.items() if worker not in replaced})
        assert self._results is not None
        everything = slice(0, self.num_envs)
        infos = Infos(everything)
        for worker, span in enumerate(self._spans):
            started = {each.lane: each for each in replaced.get(worker, ())}
            if isinstance(answer := answers.get(worker), list):
                started |= {each.lane: each for each in answer}
            self._results.started([started[lane] for lane in sorted(started)], span.start, infos)
            if worker in replaced:
                self._results.cut(span, infos)
        observations = self._results.observations(everything)
        replaced.clear()
        return observations, infos.gathered

    def call(self, name: str, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Calls a method of each environment, or reads an attribute.

        Args:
            name: of it.
            *args: for a method; by value.
            **kwargs: likewise.

        Returns:
            What came, by lane.

        Raises:
            What the first environment that failed raised; it stays open.
        """
        self._check_open()
        command = Call(name, args, kwargs)
        with _Closing(self):
            answers = raised(self._crew.ask(dict.fromkeys(range(len(self._spans)), command), is_vital=False))
        return tuple(value for answer in answers.values() for value in answer)

    def get_attr(self, name: str) -> tuple[Any, ...]:
        """An attribute of each environment, by lane."""
        return self.call(name)

    def set_attr(self, name: str, values: Any) -> None:
        """Sets an attribute of each environment.

        Args:
            name: of it.
            values: a list or tuple of one for each lane, or one for all.
        """
        self._check_open()
        each = list(values) if isinstance(values, list | tuple) else [values] * self.num_envs
        if len(each) != self.num_envs:
            raise OptionError(f"values should be one for each of {self.num_envs} lanes; {len(each)} came.")
        commands = {worker: SetAttr(name, each[span]) for worker, span in enumerate(self._spans)}
        with _Closing(self):
            raised(self._crew.ask(commands, is_vital=False))

    def render(self) -> tuple[Any, ...]:
        """What each environment renders, by lane."""
        return self.call("render")

    def close_extras(self, *, timeout: float | None = CLOSING, terminate: bool = False) -> None:
        """Ends the processes; see `close`.

        Args:
            timeout: seconds that they may take to finish what they are doing, and to close their environments.
            terminate: whether they are ended at once.
        """
        self._results = None
        self._crew.close(0.0 if terminate else CLOSING if timeout is None else timeout)
        self._abandoned.detach()  # not before: what a Ctrl-C broke off is done by the next call, or at the end

    def __enter__(self) -> ProcessVectorEnv:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- checks ---

    def _span(self, groups: Sequence[int]) -> slice:
        """The lanes of neighbouring groups."""
        return slice(self._spans[self._groups[groups[0]][0]].start, self._spans[self._groups[groups[-1]][-1]].stop)

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError("This ProcessVectorEnv is closed. Make a new one.")

    def _check_ready(self) -> None:
        self._check_open()
        if not self._has_begun:
            raise OptionError("There is no episode yet; call reset() first.")

    def _check_pending(self, group: int) -> None:
        if not self._pending[group]:
            raise OptionError(f"No step of group {group} is under way; begin one first (step_async, send).")

    def _checked_group(self, group: int) -> int:
        if group not in range(len(self._groups)):
            raise OptionError(f"group must be one of 0 to {len(self._groups) - 1} (num_groups), not {group!r}.")
        return group


class _Closing:
    """Around what waits for workers: what is not made good closes the vector environment."""

    def __init__(self, env: ProcessVectorEnv) -> None:
        self._env = env

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and self._env._crew.is_over and not is_interrupt(error):
            self._env.close()


def _close_abandoned(close: Callable[[], None], name: str) -> None:
    close()
    warnings.warn(f"A {name} was never closed; use `with`, or call close().", ResourceWarning, stacklevel=2)
