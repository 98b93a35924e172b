"""What can be saved of an environment of Gymnasium: its random generator, and what a `state_dict` of its own gives."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np

__all__ = ["env_state", "load_env_state"]

Env = gym.Env[Any, Any]


def env_state(env: Env) -> dict[str, Any]:
    """The state of one environment."""
    state: dict[str, Any] = {}
    generator = getattr(env.unwrapped, "_np_random", None)
    if isinstance(generator, np.random.Generator):
        state["generator"] = generator.bit_generator.state
    if env.has_wrapper_attr("state_dict") and callable(own := env.get_wrapper_attr("state_dict")):
        state["env"] = own()
    return state


def load_env_state(env: Env, state: Mapping[str, Any]) -> None:
    """Puts back what `env_state` gave."""
    if "generator" in state:
        env.unwrapped.np_random.bit_generator.state = state["generator"]
    if "env" in state:
        env.get_wrapper_attr("load_state_dict")(state["env"])
