"""An open environment, stepped by random actions; each answer as all checks look at it.

One environment is a lane without a dimension: what has shape `(N,)` for N lanes has shape `()` for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import getitem
from typing import Any, Final, TypeAlias

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import concatenate, create_empty_array, iterate
from numpy.typing import NDArray

from rlcollect.testing._contract.actions import MASK, RandomActions, mask_in
from rlcollect.testing._contract.report import BrokenError, Finding
from rlcollect.testing._contract.subject import Subject, guarded
from rlcollect.testing._contract.values import Fingerprint, as_array, described, fingerprint

__all__ = ["Answer", "LanesSession", "Session", "SingleSession", "rows_of"]

Flags: TypeAlias = NDArray[np.bool_]
_AGREE: Final = "Return what gymnasium.Env says."


@dataclass(frozen=True)
class Answer:
    """What one call of `reset` or `step` returned.

    Attributes:
        steps: taken so far in this run, this one included.
        observation: as it came.
        info: as it came.
        begun: `(N,)`, where the observation is the first of an episode, and no frame was made.
        done: `(N,)`, where a frame is the last of its episode.
        reward: as it came.
        terminated: as it came.
        truncated: as it came.
        actions: of each lane.
        is_step: whether it is `step`'s.
    """

    steps: int
    observation: Any
    info: Any
    begun: Flags
    done: Flags
    reward: Any = 0.0
    terminated: Any = False
    truncated: Any = False
    actions: Sequence[Any] = ()
    is_step: bool = False

    @property
    def where(self) -> str:
        """For texts."""
        if self.is_step:
            return f"step {self.steps}"
        return f"the reset after step {self.steps}" if self.steps else "the first reset"

    def mark(self) -> Fingerprint:
        """Its bits, without the info's."""
        return (
            *fingerprint(self.observation, "observation"),
            *fingerprint(self.reward, "reward"),
            *fingerprint(self.terminated, "terminated"),
            *fingerprint(self.truncated, "truncated"),
        )


class Session:
    """What both kinds share: guarded calls, counted and timed.

    Attributes:
        steps: calls of `step`.
        resets: calls of `reset`.
        step_seconds: of each call of `step`.
        reset_seconds: of all resets together.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.steps = self.resets = 0
        self.step_seconds: list[float] = []
        self.reset_seconds = 0.0

    def run(self, steps: int, seed: int | None) -> Iterator[Answer]:
        """Resets, then takes so many steps with random actions, through as many episodes as it takes.

        Raises:
            BrokenError: what came cannot be gone on with.
        """
        raise NotImplementedError

    def _reset(self, **kwargs: Any) -> tuple[Any, Any]:
        start = time.perf_counter()
        result = guarded("reset", f"at reset {self.resets + 1}, after {self.steps} steps", self.env.reset, **kwargs)
        self.reset_seconds += time.perf_counter() - start
        self.resets += 1
        if not (isinstance(result, tuple) and len(result) == 2):
            raise _broken("reset", f"it returned {_listed(result)}; (observation, info) is expected")
        return result

    def _step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        start = time.perf_counter()
        result = guarded("step", f"at step {self.steps + 1}", self.env.step, action)
        self.step_seconds.append(time.perf_counter() - start)
        self.steps += 1
        if not (isinstance(result, tuple) and len(result) == 5):
            expected = "(observation, reward, terminated, truncated, info) is expected"
            raise _broken("step", f"it returned {_listed(result)}; {expected}")
        return result


class SingleSession(Session):
    """One `gymnasium.Env`.

    Args:
        subject: under check.
        env: open.
    """

    def __init__(self, subject: Subject, env: gym.Env[Any, Any]) -> None:
        super().__init__(env)
        self._actions = RandomActions(env.action_space, subject.seed)

    def run(self, steps: int, seed: int | None) -> Iterator[Answer]:
        """Resets, then takes so many steps; resets after each end."""
        answer = self._begun(seed=seed)
        yield answer
        for _ in range(steps):
            answer = self.step(answer)
            yield answer
            if answer.done:
                answer = self._begun()
                yield answer

    def step(self, before: Answer) -> Answer:
        """One step after another answer, be it an episode's end."""
        mask = None if before.done else mask_in(before.observation, before.info)
        action = self._actions.draw(mask)
        observation, reward, terminated, truncated, info = self._step(action)
        flags = [as_array(flag) for flag in (terminated, truncated)]
        if any(flag.size != 1 for flag in flags):
            raise _broken("flags", f"terminated is {described(terminated)}, truncated is {described(truncated)}")
        done = np.asarray(any(bool(flag.item()) for flag in flags))
        return Answer(
            self.steps,
            observation,
            info,
            np.zeros((), np.bool_),
            done,
            reward,
            terminated,
            truncated,
            (action,),
            is_step=True,
        )

    def _begun(self, **kwargs: Any) -> Answer:
        observation, info = self._reset(**kwargs)
        return Answer(self.steps, observation, info, np.ones((), np.bool_), np.zeros((), np.bool_))


class LanesSession(Session):
    """One `gymnasium.vector.VectorEnv`, driven as its autoreset mode asks for.

    Args:
        subject: under check.
        env: open.
        mode: of autoreset.
        by_mask: reset ended lanes by `reset_mask`, whatever the mode.
        alter: take other actions in steps that only reset a lane: they should change nothing.
    """

    def __init__(
        self,
        subject: Subject,
        env: VectorEnv[Any, Any, Any],
        mode: AutoresetMode,
        *,
        by_mask: bool = False,
        alter: bool = False,
    ) -> None:
        super().__init__(env)
        self.lanes = env.num_envs
        self._space = env.single_action_space
        self._mode = mode
        self._by_mask = by_mask or mode is AutoresetMode.DISABLED
        self._alter = alter
        self._actions = [RandomActions(self._space, subject.seed, lane) for lane in range(self.lanes)]
        self._masks: list[Any] = [None] * self.lanes

    def run(self, steps: int, seed: int | None) -> Iterator[Answer]:
        """Resets, then takes so many steps; resets ended lanes by mask, where they do not reset themselves."""
        yield self.reset(seed=seed)
        pending = np.zeros(self.lanes, np.bool_)
        for _ in range(steps):
            answer = self.step(pending)
            yield answer
            pending = answer.done
            if self._mode is AutoresetMode.SAME_STEP:
                pending = np.zeros(self.lanes, np.bool_)
            elif self._by_mask and pending.any():
                yield self.reset_lanes(pending)
                pending = np.zeros(self.lanes, np.bool_)

    def reset(self, **kwargs: Any) -> Answer:
        """Resets every lane."""
        return self._begun(np.ones(self.lanes, np.bool_), **kwargs)

    def reset_lanes(self, lanes: Flags) -> Answer:
        """Resets some lanes, by mask."""
        return self._begun(lanes, options={"reset_mask": lanes.copy()})  # the call takes the key out

    def step(self, pending: Flags) -> Answer:
        """One step of every lane; those that pend a reset only take that."""
        actions = [
            draw.draw(None if pend else mask)
            for draw, mask, pend in zip(self._actions, self._masks, pending, strict=True)
        ]
        if self._alter:
            actions = [
                draw.another(action) if pend else action
                for draw, action, pend in zip(self._actions, actions, pending, strict=True)
            ]
        empty: Any = create_empty_array(self._space, self.lanes)
        batch = concatenate(self._space, actions, empty)
        observation, reward, terminated, truncated, info = self._step(batch)
        if (array := as_array(reward)).shape != (self.lanes,) or array.dtype.kind not in "biuf":
            raise _broken("rewards", f"it is {described(reward)}; {self.lanes} numbers are expected, one a lane")
        done = self._flags("terminated", terminated) | self._flags("truncated", truncated)
        self._note_masks(observation, info, np.ones(self.lanes, np.bool_))
        return Answer(
            self.steps,
            observation,
            info,
            pending,
            done,
            reward,
            terminated,
            truncated,
            actions,
            is_step=True,
        )

    def _begun(self, lanes: Flags, **kwargs: Any) -> Answer:
        observation, info = self._reset(**kwargs)
        self._note_masks(observation, info, lanes)
        return Answer(self.steps, observation, info, lanes, np.zeros(self.lanes, np.bool_))

    def _flags(self, name: str, value: Any) -> Flags:
        array = as_array(value)
        if array.shape != (self.lanes,):
            raise _broken("flags", f"{name} is {described(value)}; an array of shape [{self.lanes}] is expected")
        return array.astype(np.bool_)

    def _note_masks(self, observation: Any, info: Any, lanes: Flags) -> None:
        """The masks of these lanes, for their next actions."""
        masks = mask_in(observation, info)
        in_observation = isinstance(observation, Mapping) and MASK in observation
        told = info.get(f"_{MASK}") if isinstance(info, Mapping) and not in_observation else None
        for lane in map(int, np.flatnonzero(lanes)):
            self._masks[lane] = None
            if masks is not None and (told is None or told[lane]):
                self._masks[lane] = guarded("action mask", f"while lane {lane} of it was read", getitem, masks, lane)


def rows_of(space: gym.Space[Any], lanes: int, batch: Any) -> list[Any]:
    """What each lane observes.

    Raises:
        BrokenError: the batch cannot be taken apart.
    """
    rows: Callable[[], list[Any]] = lambda: list(iterate(space, batch))  # noqa: E731 - guarded as a whole
    parts = guarded("observation form", "while the batch was taken apart by lane", rows)
    if len(parts) != lanes:
        raise _broken("observation form", f"a batch of {len(parts)} observations came from {lanes} lanes")
    return parts


def _broken(name: str, text: str) -> BrokenError:
    return BrokenError(Finding(name, "broken", text, _AGREE))


def _listed(result: Any) -> str:
    return f"a tuple of {len(result)}" if isinstance(result, tuple) else described(result)
