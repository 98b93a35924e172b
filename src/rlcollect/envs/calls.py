"""The callables that a lane is stepped and reset by, as plain as what is asked for allows.

`env.step` and `env.reset` themselves, unless something has to happen around them: reset options, recorded infos, an
action mask that comes in the info. Each is a wrapper put on at construction; the loop that calls them does not know.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlcollect.envs.info import MISSING, InfoRecorder, Step, info_entry
from rlcollect.envs.journal import Journal
from rlcollect.envs.spaces import ObservationCodec
from rlcollect.errors import EnvError, OptionError
from rlcollect.layout import Key
from rlcollect.seeds import Root, episode_seed

__all__ = ["MASK", "LaneCalls", "mask_of"]

Reset = Callable[..., tuple[Any, dict[str, Any]]]
ResetOptions = Mapping[str, Any] | Callable[[int, int, dict[str, Any]], Mapping[str, Any] | None] | None

MASK: Key = ("action_mask",)
REMEMBERED = 1000  # episodes of a lane that were given a seed of their own


class LaneCalls:
    """Steps and resets of every lane.

    Attributes:
        steps, resets: what to call, by lane. `resets` take keyword arguments of `gymnasium.Env.reset`.
        episodes: how many each lane has begun, where reset options or seeds are given by their number.
        roots: of the seeds of each lane's episodes; None: they get none.
        env_seconds: time spent in the environments while the audited calls were used.

    Args:
        envs: one a lane.
        reset_options: for the reset of every episode.
        roots: as above.
        journal: told of every reset; None: nobody is.
    """

    def __init__(
        self,
        envs: Sequence[gym.Env[Any, Any]],
        reset_options: ResetOptions = None,
        *,
        roots: Sequence[Root] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.steps: list[Step] = [env.step for env in envs]
        self.resets: list[Reset] = [env.reset for env in envs]
        self.roots = None if roots is None else list(roots)
        self._since = [0] * len(envs)  # the first episode of each lane that its root is of
        self._otherwise: list[list[int]] = [[] for _ in envs]  # those that were given a seed since
        self.env_seconds = 0.0
        self._reset_options = reset_options
        self.episodes = [0] * len(envs)
        self._last_info: list[dict[str, Any]] = [{} for _ in envs]
        if journal is not None:
            self.resets = [journal.noting(lane, reset) for lane, reset in enumerate(self.resets)]
        if roots is not None:
            self.resets = [self._with_seed(lane, reset) for lane, reset in enumerate(self.resets)]
        if callable(reset_options):
            self.steps = [self._remembering(lane, step) for lane, step in enumerate(self.steps)]
        if reset_options is not None:
            self.resets = [self._with_options(lane, reset) for lane, reset in enumerate(self.resets)]
        if not (reset_options is None and roots is None):
            self.resets = [self._counted(lane, reset) for lane, reset in enumerate(self.resets)]

    def seed_by(self, roots: Sequence[Root]) -> None:
        """Seeds of episodes are children of these from the next on."""
        self.roots, self._since = list(roots), list(self.episodes)
        self._otherwise = [[] for _ in roots]

    def number(self, lane: int, number: int) -> None:
        """The next episode of a lane has this number; what is left out was not begun here."""
        if number > self.episodes[lane]:
            self._since[lane] = number
        self.episodes[lane] = number

    def seeds(self, lane: int) -> dict[str, Any]:
        """What a lane's episodes are seeded by, as plain values."""
        if self.roots is None:
            return {}
        return {"root": self.roots[lane], "since": self._since[lane], "otherwise": list(self._otherwise[lane])}

    def load_seeds(self, lane: int, state: Mapping[str, Any]) -> None:
        """Goes on with what `seeds` gave."""
        if self.roots is not None and "root" in state:
            self.roots[lane] = state["root"]
            self._since[lane], self._otherwise[lane] = state["since"], list(state["otherwise"])

    def was_told(self, lane: int, info: dict[str, Any]) -> None:
        """The last step of a lane said this."""
        self._last_info[lane] = info

    def last_info(self, lane: int) -> dict[str, Any]:
        """What the last step of a lane said, where reset options depend on it."""
        return self._last_info[lane]

    def record(self, recorder: InfoRecorder) -> None:
        """From now on steps record their infos."""
        self.steps = [recorder.wrap(lane, step) for lane, step in enumerate(self.steps)]

    def pair_with_mask(self) -> None:
        """From now on observations are pairs `(observation, action mask)`, the mask taken from the info."""
        self.steps = [_paired_step(step) for step in self.steps]
        self.resets = [_paired_reset(reset) for reset in self.resets]

    def audited(self, codec: ObservationCodec) -> tuple[list[Step], list[Reset]]:
        """The same calls, timed, and with their answers held against the spaces."""
        return (
            [self._audited_step(lane, step, codec) for lane, step in enumerate(self.steps)],
            [self._audited_reset(reset, codec) for reset in self.resets],
        )

    def _remembering(self, lane: int, step: Step) -> Step:
        def remembering(action: Any) -> Any:
            result = step(action)
            self._last_info[lane] = result[-1]
            return result

        return remembering

    def _with_options(self, lane: int, reset: Reset) -> Reset:
        def with_options(**kwargs: Any) -> Any:
            options = kwargs.pop("options", self._reset_options)
            if options is self._reset_options and callable(options):
                options = options(lane, self.episodes[lane], self._last_info[lane])
            if not (options is None or isinstance(options, Mapping)):
                raise OptionError(f"reset_options should return a mapping or None; it returned {options!r}.")
            return reset(**{"options": None if options is None else dict(options), **kwargs})

        return with_options

    def _with_seed(self, lane: int, reset: Reset) -> Reset:
        def with_seed(**kwargs: Any) -> Any:
            if kwargs.get("seed") is None:
                assert self.roots is not None
                kwargs["seed"] = episode_seed(self.roots[lane], self.episodes[lane])
            else:
                self._otherwise[lane] = [*self._otherwise[lane], self.episodes[lane]][-REMEMBERED:]
            return reset(**kwargs)

        return with_seed

    def _counted(self, lane: int, reset: Reset) -> Reset:
        def counted(**kwargs: Any) -> Any:
            result = reset(**kwargs)
            self.episodes[lane] += 1
            return result

        return counted

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = call(*args, **kwargs)
            self.env_seconds += time.perf_counter() - start
            return result

        return timed

    def _audited_reset(self, reset: Reset, codec: ObservationCodec) -> Reset:
        timed = self._timed(reset)

        def audited(**kwargs: Any) -> Any:
            result = timed(**kwargs)
            codec.check(result[0])
            return result

        return audited

    def _audited_step(self, lane: int, step: Step, codec: ObservationCodec) -> Step:
        timed = self._timed(step)

        def audited(action: Any) -> Any:
            result = timed(action)
            if not (isinstance(result, tuple) and len(result) == 5):
                length = f" of length {len(result)}" if isinstance(result, tuple | list) else ""
                raise EnvError(
                    "step should return (observation, reward, terminated, truncated, info); "
                    f"{type(result).__name__}{length} came."
                )
            codec.check(result[0])
            if isinstance(result[1], float) or np.shape(result[1]) == ():
                return result
            self.steps[lane] = _scalar_reward(step)  # from now on
            return _scalar_reward(lambda _: result)(action)

        return audited


def mask_of(info: Mapping[str, Any]) -> Any:
    """The action mask in an info.

    Raises:
        EnvError: there is none.
    """
    value = info_entry(info, MASK)
    if value is MISSING:
        raise EnvError('info_keys names "action_mask", and this info has none.')
    return value


def _paired_step(step: Step) -> Step:
    def paired(action: Any) -> Any:
        observation, reward, terminated, truncated, info = step(action)
        return (observation, mask_of(info)), reward, terminated, truncated, info

    return paired


def _paired_reset(reset: Reset) -> Reset:
    def paired(**kwargs: Any) -> Any:
        observation, info = reset(**kwargs)
        return (observation, mask_of(info)), info

    return paired


def _scalar_reward(step: Step) -> Step:
    """A step whose reward is a scalar; some environments give an array of one element."""

    def scalar(action: Any) -> Any:
        observation, reward, *rest = step(action)
        value = np.asarray(reward)
        if value.size != 1:
            raise EnvError(f"The reward should be one number; an array of shape {list(value.shape)} came.")
        return observation, value.item(), *rest

    return scalar
