"""Single environments with several agents: how they are known, converted, compared and saved."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces

from rlcollect.errors import OptionError

__all__ = ["Agent", "Game", "Infos", "Observations", "Spaces", "has_state", "is_pettingzoo"]

Agent = Any  # whatever an environment knows its agents by: names, most often
Observations = Mapping[Agent, Any]
Infos = Mapping[Agent, Mapping[str, Any]]

CALLABLES = ("reset", "step", "observation_space", "action_space")


def is_pettingzoo(made: Any) -> bool:
    """Whether it has the Parallel API of PettingZoo, or its AEC API."""
    return (
        hasattr(made, "possible_agents")
        and all(callable(getattr(made, name, None)) for name in CALLABLES)
        and (not hasattr(made, "agent_iter") or hasattr(made, "last"))
    )


def has_state(env: Any) -> bool:
    """Whether an environment shows a state of its own, beside what its agents observe."""
    return isinstance(getattr(env, "state_space", None), gym.Space) and callable(getattr(env, "state", None))


class Game:
    """One environment, by the Parallel API.

    Attributes:
        source: what was made.
        env: what is stepped.
        takes_turns: whether its agents act one after the other, one a step.

    Raises:
        OptionError: it has the AEC API, and PettingZoo is not there to convert it.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self.env, self.takes_turns = _converted(source) if hasattr(source, "agent_iter") else (source, False)

    def alive(self) -> list[Agent]:
        """The agents that are there."""
        return list(self.env.agents)

    def acting(self) -> list[Agent]:
        """The agents that act in the next step."""
        alive = self.alive()
        return [self.source.agent_selection] if self.takes_turns and alive else alive

    def state_dict(self) -> dict[str, Any]:
        """The environment's random generator, and what a `state_dict` of its own gives, as far as it has them."""
        state: dict[str, Any] = {}
        if (generator := self._generator()) is not None:
            state["generator"] = generator.bit_generator.state
        if callable(own := getattr(self.source, "state_dict", None)):
            state["env"] = own()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts back what `state_dict` gave."""
        if "generator" in state and (generator := self._generator()) is not None:
            generator.bit_generator.state = state["generator"]
        if "env" in state:
            self.source.load_state_dict(state["env"])

    def _generator(self) -> np.random.Generator | None:
        generator = getattr(getattr(self.source, "unwrapped", self.source), "np_random", None)
        return generator if isinstance(generator, np.random.Generator) else None


def _converted(source: Any) -> tuple[Any, bool]:
    """An environment of the AEC API by the Parallel one, and whether its agents take turns.

    Where its metadata says that it "is_parallelizable", all agents act in one step.
    """
    try:
        conversions = importlib.import_module("pettingzoo.utils.conversions")
    except ImportError as error:
        raise OptionError(
            f"{source} has the AEC API of PettingZoo, whose own conversion is needed: pip install pettingzoo. Or pass "
            "an environment that has the Parallel API."
        ) from error
    at_once = bool(getattr(source, "metadata", {}).get("is_parallelizable", False))
    convert = conversions.aec_to_parallel if at_once else conversions.turn_based_aec_to_parallel
    return convert(source), not at_once


@dataclass(frozen=True)
class Spaces:
    """The spaces of all agents as those of one environment: so they are compared over lanes."""

    observation_space: spaces.Dict
    action_space: spaces.Dict

    @classmethod
    def of(cls, env: Any) -> Spaces:
        """The spaces of an environment of the Parallel API."""
        agents = list(env.possible_agents)
        observed: dict[str, gym.Space[Any]] = {str(agent): env.observation_space(agent) for agent in agents}
        if has_state(env):
            observed["the state"] = env.state_space
        return cls(spaces.Dict(observed), spaces.Dict({str(agent): env.action_space(agent) for agent in agents}))
