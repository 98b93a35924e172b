"""What it takes to play the open episode of each lane again: how it began, and the actions since."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np

from rlcollect.envs.saving import env_state, load_env_state

__all__ = ["Journal", "Played", "checksum"]

Array = np.ndarray[Any, Any]
Env = gym.Env[Any, Any]
LONGEST = 1_000_000  # frames of an episode whose actions are kept; beyond it is cut after a load


@dataclass
class _Open:
    """An open episode.

    Attributes:
        before: what was saved of the environment before its reset.
        kwargs: of that.
        length: frames so far.
        actions: as they are stored, `[K, *shape]` a leaf, in parts.
        shown: a checksum of each leaf of the observations that these answered, and of the rewards.
    """

    before: Mapping[str, Any]
    kwargs: Mapping[str, Any]
    length: int = 0
    actions: list[Sequence[Array]] = field(default_factory=list)
    shown: tuple[int, ...] = ()


@dataclass(frozen=True)
class Played:
    """What playing an episode again showed.

    Attributes:
        observation: the last.
        info: the last.
        shown: checksums of those before, leaf by leaf, and of the rewards.
        has_ended: whether the episode ended on the way.
    """

    observation: Any
    info: dict[str, Any]
    shown: tuple[int, ...]
    has_ended: bool


class Journal:
    """Kept by who steps the lanes.

    Args:
        envs: one a lane.
    """

    def __init__(self, envs: Sequence[Env]) -> None:
        self._envs = envs
        self._open: list[_Open | None] = [None] * len(envs)

    def noting(self, lane: int, reset: Callable[..., Any]) -> Callable[..., Any]:
        """A lane's reset, which begins its page anew."""

        def noted(**kwargs: Any) -> Any:
            env = self._envs[lane]
            env.unwrapped.np_random  # noqa: B018 - it is made when it is asked for
            self._open[lane] = _Open(env_state(env), kwargs)
            return reset(**kwargs)

        return noted

    def go_on(self, lane: int, actions: Sequence[Array], shown: Sequence[Array]) -> None:
        """The open episode of a lane has so many further frames.

        Args:
            lane: which.
            actions: `[K, *shape]` a leaf; copied.
            shown: the observations that they answered, `[K, *shape]` a leaf; and the rewards, float32 `[K]`.
        """
        page = self._open[lane]
        if page is not None and page.length > LONGEST:
            page = self._open[lane] = None
        if page is not None and len(actions[0]):
            page.length += len(actions[0])
            page.actions.append([each.copy() for each in actions])
            page.shown = checksum(page.shown, shown)

    def told(self, lane: int) -> dict[str, Any] | None:
        """All that is known of a lane's open episode; None: nothing."""
        page = self._open[lane]
        if page is None:
            return None
        parts = zip(*page.actions, strict=True)
        actions = [np.concatenate(leaf) for leaf in parts]
        return {"before": page.before, "kwargs": dict(page.kwargs), "actions": actions, "shown": page.shown}

    def play(
        self,
        lane: int,
        told: Mapping[str, Any],
        decode: Callable[[Sequence[Array]], Sequence[Any]],
        stored: Callable[[Any, dict[str, Any]], Sequence[Array]],
    ) -> Played:
        """Plays an episode again, in a lane's environment, which is then where the episode was when it was told.

        Args:
            lane: which.
            told: by `told`.
            decode: from stored actions to those of the environment.
            stored: from an observation and its info to what is stored of it, `[1, *shape]` a leaf.

        Raises:
            What the environment raises.
        """
        env, actions = self._envs[lane], told["actions"]
        load_env_state(env, told["before"])
        observation, info = env.reset(**told["kwargs"])
        shown: tuple[int, ...] = ()
        has_ended = False
        for action in decode(actions) if actions else ():
            before = [leaf.copy() for leaf in stored(observation, info)]
            observation, reward, terminated, truncated, info = env.step(action)
            shown = checksum(shown, [*before, np.asarray(reward, np.float32).reshape(1)])
            if terminated or truncated:
                has_ended = True
                break
        parts: list[Sequence[Array]] = [list(actions)] if actions else []
        length = len(actions[0]) if actions else 0
        self._open[lane] = _Open(told["before"], told["kwargs"], length, parts, shown)
        return Played(observation, info, shown, has_ended)


def checksum(before: tuple[int, ...], leaves: Sequence[Array]) -> tuple[int, ...]:
    """Of all rows so far, leaf by leaf: those before, and these, `[K, *shape]` each."""
    sums = before or (0,) * len(leaves)
    return tuple(zlib.crc32(np.ascontiguousarray(leaf).data, own) for own, leaf in zip(sums, leaves, strict=True))
