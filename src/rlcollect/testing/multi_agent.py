"""A probe with several agents, by PettingZoo's Parallel API: its rows say whose they are, and from when.

PettingZoo is not needed: the API is a matter of names. This module knows nothing of collectors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeAlias, get_args

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.error import ClosedEnvironmentError, ResetNeeded
from numpy.typing import NDArray

from rlcollect.errors import OptionError
from rlcollect.testing.environments import End

__all__ = ["Life", "MaskedIn", "TaggedAgents"]

MaskedIn: TypeAlias = Literal["observation", "info"]
"""Where the action masks of `TaggedAgents` come."""

_ACTIONS = 3


@dataclass(frozen=True)
class Life:
    """When an agent is there, and how it leaves.

    Attributes:
        joins: the t of its first observation: 0 for the reset's.
        ends: the t of its last one; None for an agent that never leaves.
        end: which flags its last step raises.

    Raises:
        OptionError: it would end before it has acted, or `end` is not one of the three.
    """

    joins: int = 0
    ends: int | None = 5
    end: End = "terminated"

    def __post_init__(self) -> None:
        if self.joins < 0 or (self.ends is not None and self.ends <= self.joins):
            raise OptionError(f"an agent joins at t = 0 or later, and ends after that; got {self}")
        if self.end not in get_args(End):
            raise OptionError(f"end must be one of {get_args(End)}; got {self.end!r}")


class TaggedAgents:
    """Each agent observes (lane, episode, its number, t), so that mixed-up rows and agents show at once.

    An agent's number is its place in `lives`. It is paid 10 times its number, plus the t before the step. Its `info`
    has its observation's t. Nobody is told anything of an agent that has left, or has not joined. An episode is over
    when nobody is there. Actions, of `Discrete(3)`, change nothing; one is due from each agent that is there.

    Args:
        lives: when each agent is there, by its name.
        lane: the number that stands first in every observation.
        masked: where action masks come, as int8 `[3]`: the one action that is allowed is t + the agent's number, modulo
            3, and another is refused. With "observation", observations are `{"observation": ..., "action_mask": ...}`.
            None: all are allowed.
        random_ends: draw each agent's end evenly from its first step to `ends`, from the stream that `reset(seed=)`
            seeds.
        has_state: whether there is a `state()`, of (lane, episode, t).

    Attributes:
        agents: who is there.
        t: steps taken in this episode.
        resets, steps, closed: calls over the environment's life.
        received: the actions of every step, as they were given.
        seeds: every seed that a reset was given.
        options: the options of every reset.

    Example:
        >>> env = TaggedAgents({"cat_0": Life(ends=1), "cat_1": Life(ends=2, end="truncated")})
        >>> observations, infos = env.reset(seed=0)
        >>> observations, rewards, terminations, truncations, infos = env.step({"cat_0": 0, "cat_1": 2})
        >>> env.agents, terminations, rewards
        (['cat_1'], {'cat_0': True, 'cat_1': False}, {'cat_0': 0.0, 'cat_1': 10.0})
        >>> observations["cat_1"].tolist()
        [0.0, 0.0, 1.0, 1.0]
    """

    metadata: ClassVar[dict[str, Any]] = {"name": "tagged_agents", "render_modes": []}
    render_mode: str | None = None

    def __init__(
        self,
        lives: Mapping[str, Life],
        lane: int = 0,
        *,
        masked: MaskedIn | None = None,
        random_ends: bool = False,
        has_state: bool = False,
    ) -> None:
        if masked is not None and masked not in get_args(MaskedIn):
            raise OptionError(f"masked must be None or one of {get_args(MaskedIn)}; got {masked!r}")
        self.lives = dict(lives)
        self.lane = lane
        self.masked = masked
        self.random_ends = random_ends
        self.possible_agents = list(lives)
        self.agents: list[str] = []
        self.t = self.resets = self.steps = self.closed = 0
        self.received: list[dict[str, Any]] = []
        self.seeds: list[int] = []
        self.options: list[dict[str, Any] | None] = []
        self.np_random = np.random.default_rng()
        self._ends: dict[str, int | None] = {}
        self._observed = {agent: self._observation_space_of(agent) for agent in lives}
        self._acted = {agent: self._action_space_of(agent) for agent in lives}
        if has_state:
            self.state_space: gym.Space[Any] = spaces.Box(0, np.inf, (3,), np.float32)

    @property
    def unwrapped(self) -> TaggedAgents:
        """This environment."""
        return self

    def observation_space(self, agent: str) -> gym.Space[Any]:
        """What this agent observes."""
        return self._observed[agent]

    def action_space(self, agent: str) -> gym.Space[Any]:
        """What this agent may do."""
        return self._acted[agent]

    def reset(
        self, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Begins an episode at t = 0.

        Raises:
            gymnasium.error.ClosedEnvironmentError: after `close`.
        """
        self._refuse_if_closed()
        if seed is not None:
            self.seeds.append(seed)
            self.np_random = np.random.default_rng(seed)
        self.options.append(options)
        self.resets += 1
        self.t = 0
        self._ends = {agent: self._end_of(life) for agent, life in self.lives.items()}
        self.agents = [agent for agent, life in self.lives.items() if life.joins == 0]
        return self._observations(self.agents), self._infos(self.agents)

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Moves the clock by one.

        Returns:
            Observations, rewards, terminations, truncations and infos, of those who were there, and who join.

        Raises:
            ValueError: actions of others than those who are there, or one that is not allowed.
            gymnasium.error.ResetNeeded: before the first reset, or when nobody is there.
            gymnasium.error.ClosedEnvironmentError: after `close`.
        """
        self._refuse_if_closed()
        if not self.agents:
            raise ResetNeeded(f"step() at t = {self.t} of episode {self.resets - 1}, where nobody is there")
        if {*actions} != {*self.agents}:
            raise ValueError(f"expected actions of {self.agents}, got {[*actions]}")
        for agent, action in actions.items():
            if self.masked is not None and not self._mask(agent)[int(action)]:
                raise ValueError(f"{agent} may not take the action {action} at t = {self.t}")
        self.received.append(dict(actions))
        self.steps += 1
        before, paid = self.agents, {agent: 10.0 * self._number(agent) + self.t for agent in self.agents}
        self.t += 1
        joined = [agent for agent, life in self.lives.items() if life.joins == self.t]
        told = [*before, *joined]
        ended = [agent for agent in before if self._ends[agent] == self.t]
        self.agents = [agent for agent in told if agent not in ended]
        terminations = {agent: agent in ended and self.lives[agent].end != "truncated" for agent in told}
        truncations = {agent: agent in ended and self.lives[agent].end != "terminated" for agent in told}
        rewards = {**dict.fromkeys(joined, 0.0), **paid}
        return self._observations(told), rewards, terminations, truncations, self._infos(told)

    def state(self) -> NDArray[Any]:
        """(lane, episode, t)."""
        return np.array([self.lane, self.resets - 1, self.t], np.float32)

    def close(self) -> None:
        """Counts the call; the environment refuses to go on afterwards."""
        self.closed += 1

    def _refuse_if_closed(self) -> None:
        if self.closed:
            raise ClosedEnvironmentError("the environment was closed; make a new one")

    def _number(self, agent: str) -> int:
        return self.possible_agents.index(agent)

    def _end_of(self, life: Life) -> int | None:
        if not self.random_ends or life.ends is None:
            return life.ends
        return int(self.np_random.integers(life.joins + 1, life.ends + 1))

    def _mask(self, agent: str) -> NDArray[Any]:
        mask = np.zeros(_ACTIONS, np.int8)
        mask[(self.t + self._number(agent)) % _ACTIONS] = 1
        return mask

    def _observations(self, agents: list[str]) -> dict[str, Any]:
        return {agent: self._observe(agent) for agent in agents}

    def _infos(self, agents: list[str]) -> dict[str, dict[str, Any]]:
        masks = {agent: {"action_mask": self._mask(agent)} for agent in agents if self.masked == "info"}
        return {agent: {"t": self.t, **masks.get(agent, {})} for agent in agents}

    # --- to make more of it ---

    def _observation_space_of(self, agent: str) -> gym.Space[Any]:  # noqa: ARG002 - others may differ
        tag = spaces.Box(0, np.inf, (4,), np.float32)
        if self.masked != "observation":
            return tag
        return spaces.Dict({"observation": tag, "action_mask": spaces.Box(0, 1, (_ACTIONS,), np.int8)})

    def _action_space_of(self, agent: str) -> gym.Space[Any]:  # noqa: ARG002 - others may differ
        return spaces.Discrete(_ACTIONS)

    def _observe(self, agent: str) -> Any:
        """What an agent observes at `t`, in memory of its own."""
        tag = np.array([self.lane, self.resets - 1, self._number(agent), self.t], np.float32)
        return {"observation": tag, "action_mask": self._mask(agent)} if self.masked == "observation" else tag
