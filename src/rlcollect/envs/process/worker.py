"""A worker process of a vector environment: makes its lanes, and steps, resets and calls them."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector.utils import batch_space, iterate

from rlcollect.envs.lanes import is_gymnasium
from rlcollect.envs.make import close_all, make_env, space_difference
from rlcollect.envs.process.forms import Writer, leaves, whole
from rlcollect.envs.process.memory import Memory
from rlcollect.envs.process.messages import (
    Attach,
    Attend,
    Build,
    Call,
    Command,
    Facts,
    Fetch,
    Give,
    Reset,
    SetAttr,
    Started,
)
from rlcollect.errors import OptionError, SpaceError
from rlcollect.failures import relayed
from rlcollect.processes.arena import Arena
from rlcollect.processes.board import Row
from rlcollect.processes.crossing import unpacked
from rlcollect.processes.lockstep import Follower
from rlcollect.processes.pool import ProcessPool
from rlcollect.seeds import seed_globals

__all__ = ["Ended", "start_pool"]

STAGES = (
    *("starting", "waiting for a command", "making its environments", "resetting its environments"),
    *("waiting for a step", "stepping its environments", "calling its environments", "closing its environments"),
)

ADVICE = (
    "Look at its standard error for what native code wrote; step the same environments in a SyncVectorEnv, which needs "
    "no process, to find out more."
)

Ended = tuple[int, tuple[Any, dict[str, Any]] | None, dict[str, Any], Sequence[Any]]
"""What a lane has to say about a step: its number in the worker, the last observation and info of an episode that has
ended, the info, and what of the observation has no fixed form."""


def start_pool(workers: int, method: str, threads: int) -> ProcessPool:
    """Processes for so many workers, all started at once."""
    return ProcessPool(
        workers,
        _Maker(threads),
        method=method,
        stages=STAGES,
        name="rlcollect-env",
        preload=__name__,
        advice=ADVICE,
    )


class _Maker:
    """Makes what handles the commands of one worker; crosses to its process."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __call__(self, worker: int, row: Row) -> _Worker:
        return _Worker(worker, row, self._threads)


class _Worker:
    """Handles the commands of a worker.

    Attributes:
        is_over: never: it is ended from outside.

    Args:
        number: of the worker.
        row: where it tells what it is doing.
        threads: for torch to compute with, if it is used here.
    """

    def __init__(self, number: int, row: Row, threads: int) -> None:
        self.is_over = False
        self._number = number
        self._row = row
        self._threads = threads
        self._envs: list[gym.Env[Any, Any]] = []
        self._first = 0
        self._steps = 0
        self._stepper: _Stepper | None = None
        self._follower: Follower | None = None
        self._handlers: dict[type[Command], Callable[[Any, Sequence[int]], Any]] = {
            Build: self._build,
            Attach: self._attach,
            Attend: self._attend,
            Reset: self._reset,
            Give: self._give,
            Fetch: self._fetch,
            Call: self._call,
            SetAttr: self._set_attr,
        }

    def handle(self, command: Command, attached: Sequence[int]) -> Any:
        """The answer to a command."""
        try:
            return self._handlers[type(command)](command, attached)
        finally:
            self._row.enter("waiting for a command")

    def withdraw(self, command: Command) -> None:
        """Nothing is withdrawn here."""

    def close(self) -> None:
        """Closes the environments. What is raised there has nobody left to hear it."""
        self._row.enter("closing its environments")
        envs, self._envs = self._envs, []
        close_all(envs)
        if self._follower is not None:
            self._follower.close()

    # --- starting ---

    def _build(self, command: Build, _: Sequence[int]) -> Facts:
        self._row.enter("making its environments")
        seed_globals(command.seed, self._number, command.generation)
        self._first = command.first
        made: dict[bytes, Any] = {}
        for lane, packed in enumerate(command.makers):
            try:
                if packed not in made:
                    made[packed] = unpacked(packed)
                source, kwargs = made[packed]
                self._envs.append(_checked(make_env(source, kwargs, is_gymnasium)))
                self._check_spaces(lane)
            except BaseException as error:
                raise self._relayed(error, lane)  # noqa: B904 - it has a cause of its own
        if (torch := sys.modules.get("torch")) is not None:
            torch.set_num_threads(self._threads)
        first = self._envs[0]
        return Facts(
            first.observation_space,
            first.action_space,
            {key: value for key, value in first.metadata.items() if _crosses(value)},
            first.render_mode,
            first.spec if _crosses(first.spec) else None,
        )

    def _check_spaces(self, lane: int) -> None:
        first, other = self._envs[0], self._envs[lane]
        difference = space_difference(
            first.observation_space, other.observation_space, True, "observation", f"lane {self._first}"
        ) or space_difference(first.action_space, other.action_space, True, "action", f"lane {self._first}")
        if difference:
            raise SpaceError(f"All lanes need the same spaces; lane {self._first + lane} has {difference}")

    def _attach(self, command: Attach, attached: Sequence[int]) -> None:
        memory = Memory(command.plan, Arena.attached(attached[0], command.plan.nbytes))
        self._stepper = _Stepper(self._envs, memory, self._number, slice(self._first, command.stop))
        self._follower = Follower(memory.words[self._number], attached[1], command.looks)

    # --- stepping ---

    def _attend(self, command: Attend, _: Sequence[int]) -> None:
        assert self._follower is not None
        follower, stepper, row = self._follower, self._stepper, self._row
        assert stepper is not None
        is_over = functools.partial(row.is_to_stop, command.number)
        follower.resume(command.since)
        row.enter("waiting for a step")
        while follower.waits(is_over):
            row.enter("stepping its environments")
            try:
                note = stepper.step()
            except BaseException as error:
                raise self._relayed(error, stepper.lane)  # noqa: B904
            self._steps += 1
            row.enter("waiting for a step")
            follower.answer(note)

    def _give(self, command: Give, _: Sequence[int]) -> None:
        assert self._stepper is not None
        self._stepper.given = command.actions

    def _fetch(self, command: Fetch, _: Sequence[int]) -> bytes:  # noqa: ARG002
        assert self._stepper is not None
        return self._stepper.told

    # --- all else ---

    def _reset(self, command: Reset, _: Sequence[int]) -> list[Started]:
        self._row.enter("resetting its environments")
        assert self._stepper is not None
        if command.seed is not None:
            seed_globals(command.seed, self._number, command.generation)
        started = []
        for lane, seed in command.seeds.items():
            try:
                observation, info = self._envs[lane].reset(seed=seed, options=command.options)
                started.append(Started(lane, info, self._stepper.write(lane, observation)))
            except BaseException as error:
                raise self._relayed(error, lane)  # noqa: B904
        return started

    def _call(self, command: Call, _: Sequence[int]) -> list[Any]:
        self._row.enter("calling its environments")
        return [
            self._at(lane, functools.partial(_called, env, command.name, command.args, command.kwargs))
            for lane, env in enumerate(self._envs)
        ]

    def _set_attr(self, command: SetAttr, _: Sequence[int]) -> None:
        self._row.enter("calling its environments")
        for lane, (env, value) in enumerate(zip(self._envs, command.values, strict=True)):
            self._at(lane, functools.partial(env.set_wrapper_attr, command.name, value))

    def _at(self, lane: int, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except BaseException as error:
            raise self._relayed(error, lane)  # noqa: B904

    def _relayed(self, error: BaseException, lane: int) -> BaseException:
        return relayed(error, worker=self._number, lane=self._first + lane, step=self._steps)


class _Stepper:
    """Steps the lanes of a worker, and writes what comes of it.

    Attributes:
        lane: the one that is stepped, or was stepped last.
        given: actions of the next step, by lane, where they have no fixed form.
        told: what there is to say about the last step beside what is written, packed: a list of `Ended`.
        write: a function of lane and observation, which returns what of it has no fixed form.

    Args:
        envs: one a lane.
        memory: of all lanes.
        worker: the number of this one.
        span: its lanes, of all.
    """

    def __init__(self, envs: Sequence[gym.Env[Any, Any]], memory: Memory, worker: int, span: slice) -> None:
        self.lane = 0
        self.given: Sequence[Any] = ()
        self.told = b""
        self.write = Writer(envs[0].observation_space, [array[span] for array in memory.observations]).compiled()
        self._steps = [env.step for env in envs]
        self._resets = [env.reset for env in envs]
        self._space = envs[0].action_space
        self._batched = batch_space(self._space, len(envs))
        self._is_given = not all(leaf.is_fixed for leaf in leaves(self._space))
        self._actions = [array[span] for array in memory.actions]
        self._rewards = memory.rewards[span]
        self._terminations = memory.terminations[span]
        self._truncations = memory.truncations[span]
        self._page = memory.pages[worker].data

    def step(self) -> int:
        """Makes a step of each lane, and resets those that have ended.

        Returns:
            How many bytes there are to say beside what is written.
        """
        ended: list[Ended] = []
        for lane, action in enumerate(self._taken()):
            self.lane = lane
            observation, reward, terminated, truncated, info = self._steps[lane](action)
            final = None
            self._rewards[lane] = reward
            self._terminations[lane] = terminated
            self._truncations[lane] = truncated
            if terminated or truncated:
                final = _kept(observation), _kept(info)  # before the reset, which may use their memory again
                observation, info = self._resets[lane]()
            loose = self.write(lane, observation)
            if info or loose or final is not None:
                ended.append((lane, final, info, loose))
        self.told = _packed(ended) if ended else b""
        if 0 < len(self.told) <= len(self._page):
            self._page[: len(self.told)] = self.told
        return len(self.told)

    def _taken(self) -> Iterator[Any]:
        """The actions, by lane. They are copies: an environment may keep one."""
        if self._is_given:
            return iter(self.given)
        if isinstance(self._space, spaces.Dict | spaces.Tuple):
            actions: Iterator[Any] = iterate(self._batched, whole(self._space, (each.copy() for each in self._actions)))
            return actions
        return iter(self._actions[0].copy())


def _kept(value: Any) -> Any:
    return value.copy() if type(value) is np.ndarray else copy.deepcopy(value)


def _packed(value: Any) -> bytes:
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # whatever is not known by name here crosses by value
        data: bytes = cloudpickle.dumps(value)
        return data


def _checked(env: Any) -> gym.Env[Any, Any]:
    if not is_gymnasium(env):
        raise OptionError(f"make_env should make a gymnasium.Env, one lane each; it made {env!r}.")
    made: gym.Env[Any, Any] = env
    return made


def _called(env: gym.Env[Any, Any], name: str, args: Sequence[Any], kwargs: Any) -> Any:
    function = env.get_wrapper_attr(name)
    return function(*args, **kwargs) if callable(function) else function


def _crosses(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever it raises, it does not cross
        return False
    return True
