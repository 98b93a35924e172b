"""What environments with several agents give, held against what they should."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rlcollect.envs.pettingzoo.games import Infos, Observations
from rlcollect.envs.pettingzoo.groups import Group
from rlcollect.errors import EnvError

__all__ = ["Checker", "checked_reset", "with_checked_rewards"]


def checked_reset(result: Any) -> tuple[Observations, Infos]:
    """What a first reset gave.

    Raises:
        EnvError: it is not observations and infos, by agent.
    """
    if not (isinstance(result, tuple) and len(result) == 2 and all(isinstance(part, Mapping) for part in result)):
        raise EnvError(f"reset should return (observations, infos), each by agent; {type(result).__name__} came.")
    return result


class Checker:
    """Holds the observations of agents against their spaces.

    Args:
        groups: of all agents.
    """

    def __init__(self, groups: Sequence[Group]) -> None:
        self._checks = {agent: group.codec.checker() for group in groups for agent in group.agents}

    def check(self, observations: Observations) -> None:
        """Checks those that are there.

        Raises:
            EnvError: naming the agent, the key, what was expected and what came.
        """
        if not isinstance(observations, Mapping):
            raise EnvError(f"Observations should be a mapping by agent; {type(observations).__name__} came.")
        for agent, check in self._checks.items():
            if (observation := observations.get(agent)) is not None:
                try:
                    check(observation)
                except EnvError as error:
                    raise EnvError(f"{agent!r}: {error}") from error


def with_checked_rewards(step: Callable[..., Any]) -> Callable[..., Any]:
    """A step whose rewards should be numbers."""

    def checked(actions: Any) -> Any:
        result = step(actions)
        for agent, reward in result[1].items():
            if not isinstance(reward, int | float | np.number | np.bool_) and np.shape(reward) != ():
                raise EnvError(f"{agent!r}: the reward should be a number; {reward!r} came.")
        return result

    return checked
