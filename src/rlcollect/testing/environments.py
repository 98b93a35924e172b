"""Probe environments: tiny, exact, and built so that wrong data shows itself.

Each observation says which step (and episode, and worker) it comes from, so a row that was dropped, doubled, mixed up
or joined across two episodes is seen by looking at the numbers. They count what is done to them, and they refuse
what a collector must not do: a step before a reset, after an episode's end or after `close`.

Bounds of the spaces do not depend on `length` or `worker`, so that lanes of different lengths still have equal
spaces. This module knows nothing of collectors; a probe is an ordinary `gymnasium.Env`.
"""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, get_args

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from numpy.typing import DTypeLike, NDArray

from rlcollect.errors import OptionError

__all__ = ["Counter", "Echo", "End", "ObservationKind", "Probe", "Reuser", "Tagged"]

End: TypeAlias = Literal["terminated", "truncated", "both"]
"""Which flags an episode's last step raises."""

ObservationKind: TypeAlias = Literal["box", "scalar", "discrete", "dict", "tuple"]
"""The form of a `Counter`'s observation."""

_DISCRETE_SIZE: Final = 1024
_LARGEST: Final = 2**53


class Probe(gymnasium.Env[Any, Any]):
    """What the probes share: a clock, an end, and counts of all that was done to them.

    A subclass sets its two spaces and says what is observed in `_observe()`; `_inform()`, `_reward_for()` and
    `_draw_limit()` are there to be changed as well.

    Args:
        length: how many steps an episode has; None for episodes that never end.
        end: which flags the last step raises.

    Attributes:
        t: steps taken in this episode.
        resets: calls of `reset` over the environment's life.
        steps: calls of `step` over its life: the number of real frames that it made.
        closed: calls of `close`.
        last_action: the action of the newest step of this episode, the very object; None right after a reset.
        last_seed: `seed` of the newest reset; None where it had none.
        last_options: `options` of the newest reset, the very object; None where it had none.
        seeds: every seed that a reset was given, in order; a reset without one leaves no entry.

    Raises:
        OptionError: `length` is below 1, or `end` is not one of the three.
    """

    def __init__(self, length: int | None = 5, *, end: End = "terminated") -> None:
        if length is not None and length < 1:
            raise OptionError(f"length must be a number of steps of at least 1, or None; got {length!r}")
        if end not in get_args(End):
            raise OptionError(f"end must be one of {get_args(End)}; got {end!r}")
        self.length = length
        self.end = end
        self.t = self.resets = self.steps = self.closed = 0
        self.last_action: Any = None
        self.last_seed: int | None = None
        self.last_options: dict[str, Any] | None = None
        self.seeds: list[int] = []
        self._limit = length
        self._running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Begins an episode at t = 0.

        Args:
            seed: starts the environment's random stream anew.
            options: kept as `last_options`, without effect.

        Returns:
            The first observation, and `info`.

        Raises:
            gymnasium.error.ClosedEnvironmentError: after `close`.
        """
        self._refuse_if_closed()
        super().reset(seed=seed)
        self._note_reset(seed, options)
        self.t = 0
        self.last_action = None
        self._limit = self._draw_limit()
        self._running = True
        return self._observe(), self._inform()

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Moves the clock by one.

        Args:
            action: kept as `last_action`; only `Echo` looks at it.

        Returns:
            Observation after the step, reward, terminated, truncated, `info`.

        Raises:
            gymnasium.error.ResetNeeded: before the first reset, or after an episode's end.
            gymnasium.error.ClosedEnvironmentError: after `close`.
        """
        self._refuse_if_closed()
        if not self._running:
            raise ResetNeeded(f"step() of {self!s} at t = {self.t} of episode {self.resets - 1}, which is not running")
        self.last_action = action
        reward = self._reward_for(action)
        self.t += 1
        self.steps += 1
        ended = self.t == self._limit
        self._running = not ended
        terminated, truncated = ended and self.end != "truncated", ended and self.end != "terminated"
        return self._observe(), reward, terminated, truncated, self._inform()

    def close(self) -> None:
        """Counts the call; the environment refuses to go on afterwards."""
        self.closed += 1
        super().close()

    def _note_reset(self, seed: int | None, options: dict[str, Any] | None) -> None:
        self.resets += 1
        self.last_seed = seed
        self.last_options = options
        if seed is not None:
            self.seeds.append(seed)

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError(f"{self!s} was closed; make a new one")

    def _observe(self) -> Any:
        """The observation at `t`, in memory of its own."""
        raise NotImplementedError

    def _inform(self) -> dict[str, Any]:
        """The `info` that belongs to the observation at `t`."""
        return {"t": self.t}

    def _reward_for(self, action: Any) -> float:  # noqa: ARG002 - `Echo` reads it
        """The reward of the step about to be taken; the clock has not moved yet."""
        return float(self.t)

    def _draw_limit(self) -> int | None:
        """The length of the episode that begins now; called after the random stream was seeded."""
        return self.length


class Counter(Probe):
    """Observes nothing but t: 0 at the reset, t + 1 after step t.

    The reward of a step is the t before it (0, 1, 2, ...), so it equals the observation that the action was chosen
    on. `info["t"]` is an int and belongs to the observation that it comes with. The action space is `Discrete(2)`;
    actions change nothing.

    Args:
        length: steps an episode has; None for episodes that never end.
        end: which flags the last step raises.
        observation: what form t comes in; t stands in every element of it:

            - "box": an array of shape `(1,)`;
            - "scalar": an array of shape `()`;
            - "discrete": a numpy int64 below 1024;
            - "dict": `{"t": (1,), "nested": {"grid": (2, 3) int64}}`;
            - "tuple": `((1,), (2, 3) int64)`.
        dtype: of the arrays whose dtype is not named above; an integer or floating type.

    Raises:
        OptionError: an option is not one of those named, or `length` cannot be counted to in `dtype`.

    Example:
        >>> env = Counter(length=2)
        >>> env.reset(seed=0)
        (array([0.], dtype=float32), {'t': 0})
        >>> env.step(1)
        (array([1.], dtype=float32), 0.0, False, False, {'t': 1})
        >>> env.step(1)
        (array([2.], dtype=float32), 1.0, True, False, {'t': 2})
    """

    def __init__(
        self,
        length: int | None = 5,
        *,
        end: End = "terminated",
        observation: ObservationKind = "box",
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(length, end=end)
        if observation not in get_args(ObservationKind):
            raise OptionError(f"observation must be one of {get_args(ObservationKind)}; got {observation!r}")
        largest = _DISCRETE_SIZE - 1 if observation == "discrete" else _largest_count(dtype)
        if length is not None and length > largest:
            raise OptionError(f"observation={observation!r} of {np.dtype(dtype)} counts to {largest}; got {length=}")
        self.observation_space = _counter_space(observation, dtype)
        self.action_space = spaces.Discrete(2)

    def _observe(self) -> Any:
        return _filled(self.observation_space, self.t)


class Tagged(Probe):
    """Observes (worker, episode, t), so that mixed-up rows and pairs across two episodes show at once.

    The episode number is 0 after the first reset and counts resets, seeded ones too: no two episodes of one
    environment look alike. Reward, `info` and actions are `Counter`'s.

    Args:
        worker: the number that stands first in every observation.
        length: steps an episode has (the most it can have, with `random_length`); None for episodes that never end.
        end: which flags the last step raises.
        random_length: draw each episode's length evenly from 1 to `length`, from the stream that `reset(seed=)` seeds.
        dtype: of the observation, an array of shape `(3,)`.

    Raises:
        OptionError: `random_length` without a `length`, or an option of `Counter`'s that is wrong.
    """

    def __init__(
        self,
        worker: int = 0,
        length: int | None = 5,
        *,
        end: End = "terminated",
        random_length: bool = False,
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(length, end=end)
        if random_length and length is None:
            raise OptionError("random_length=True draws from 1 to `length`: give a length")
        self.worker = worker
        self.random_length = random_length
        self.observation_space = _box((3,), 0, dtype)
        self.action_space = spaces.Discrete(2)

    def _observe(self) -> NDArray[Any]:
        return np.array([self.worker, self.resets - 1, self.t], dtype=self.observation_space.dtype)

    def _draw_limit(self) -> int | None:
        if not self.random_length or self.length is None:
            return self.length
        return int(self.np_random.integers(1, self.length + 1))


class Reuser(Counter):
    """A `Counter` that returns the same objects from every call, changed in place.

    The observation's arrays (and the dict or tuple around them), the `info` dict and the array of shape `(1,)` and
    int64 under `info["t"]` are made once. Whatever keeps them without a copy sees them change. Gymnasium forbids
    this; environments do it all the same.

    Args:
        length: steps an episode has; None for episodes that never end.
        end: which flags the last step raises.
        observation: as for `Counter`, without "discrete", whose ints cannot be changed in place.
        dtype: as for `Counter`.

    Raises:
        OptionError: as for `Counter`, or `observation="discrete"`.
    """

    def __init__(
        self,
        length: int | None = 5,
        *,
        end: End = "terminated",
        observation: ObservationKind = "box",
        dtype: DTypeLike = np.float32,
    ) -> None:
        if observation == "discrete":
            raise OptionError("observation='discrete' is an int, which cannot be reused; take 'scalar'")
        super().__init__(length, end=end, observation=observation, dtype=dtype)
        self._observation = _filled(self.observation_space, 0)
        self._info = {"t": np.zeros(1, dtype=np.int64)}

    def _observe(self) -> Any:
        _overwrite(self._observation, self.t)
        return self._observation

    def _inform(self) -> dict[str, Any]:
        _overwrite(self._info, self.t)
        return self._info


class Echo(Probe):
    """Observes its last action, and pays its first component: each transition shows which weights produced it.

    The observation is zeros at the reset. The action space is a wide `Box`: as far as `dtype` counts in whole
    numbers, both ways (2**24 for float32).

    Args:
        shape: of the action, and of the observation.
        length: steps an episode has; None for episodes that never end.
        end: which flags the last step raises.
        dtype: of both.

    Raises:
        OptionError: an option is wrong.
    """

    def __init__(
        self,
        shape: tuple[int, ...] = (1,),
        length: int | None = 5,
        *,
        end: End = "terminated",
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(length, end=end)
        self.observation_space = _box(shape, _smallest_count(dtype), dtype)
        self.action_space = _box(shape, _smallest_count(dtype), dtype)

    def step(self, action: Any) -> tuple[NDArray[Any], float, bool, bool, dict[str, Any]]:
        """Takes the action over into the observation.

        Args:
            action: an array of the shape of the action space.

        Returns:
            A copy of the action, its first component, terminated, truncated, `info`.

        Raises:
            ValueError: the action has another shape.
            gymnasium.error.ResetNeeded: before the first reset, or after an episode's end.
            gymnasium.error.ClosedEnvironmentError: after `close`.
        """
        if np.shape(action) != self.action_space.shape:
            raise ValueError(f"expected an action of shape {self.action_space.shape}, got {np.shape(action)}")
        return super().step(action)

    def _observe(self) -> NDArray[Any]:
        if self.last_action is None:
            return np.zeros(self.observation_space.shape or (), dtype=self.observation_space.dtype)
        return np.array(self.last_action, dtype=self.observation_space.dtype)

    def _reward_for(self, action: Any) -> float:
        return float(np.asarray(action).flat[0])


def _counter_space(observation: ObservationKind, dtype: DTypeLike) -> spaces.Space[Any]:
    """The space of one form of counting."""
    grid = _box((2, 3), 0, np.int64)
    forms: dict[str, spaces.Space[Any]] = {
        "box": _box((1,), 0, dtype),
        "scalar": _box((), 0, dtype),
        "discrete": spaces.Discrete(_DISCRETE_SIZE),
        "dict": spaces.Dict({"t": _box((1,), 0, dtype), "nested": spaces.Dict({"grid": grid})}),
        "tuple": spaces.Tuple((_box((1,), 0, dtype), grid)),
    }
    return forms[observation]


def _box(shape: tuple[int, ...], low: int, dtype: DTypeLike) -> spaces.Box:
    """A box from `low` to the largest whole number that `dtype` counts to."""
    kind: Any = np.dtype(dtype).type
    return spaces.Box(low, _largest_count(dtype), shape=shape, dtype=kind)


def _largest_count(dtype: DTypeLike) -> int:
    """The largest n such that 0, 1, ..., n are all exact in `dtype`; no more than float64's, which spaces sample in."""
    kind = np.dtype(dtype)
    if kind.kind in "iu":
        return min(int(np.iinfo(kind).max), _LARGEST)
    if kind.kind == "f":
        return int(min(2 ** (np.finfo(kind).nmant + 1), _LARGEST))
    raise OptionError(f"dtype must be an integer or floating type; got {kind}")


def _smallest_count(dtype: DTypeLike) -> int:
    """The other end of `_largest_count`: 0 for unsigned types."""
    return 0 if np.dtype(dtype).kind == "u" else -_largest_count(dtype)


def _filled(space: spaces.Space[Any], t: int) -> Any:
    """A new element of `space` with `t` in every place."""
    if isinstance(space, spaces.Dict):
        return {key: _filled(part, t) for key, part in space.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(_filled(part, t) for part in space)
    if isinstance(space, spaces.Discrete):
        return np.int64(t)
    return np.full(space.shape or (), t, dtype=space.dtype)


def _overwrite(observation: Any, t: int) -> None:
    """Puts `t` in every place of what `_filled` made."""
    if isinstance(observation, np.ndarray):
        observation[...] = t
        return
    for part in observation.values() if isinstance(observation, dict) else observation:
        _overwrite(part, t)
