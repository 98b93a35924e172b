"""What can be saved of an environment of Gymnasium: its random generator, and what a `state_dict` of its own gives.

Values are saved as what any loader takes: numbers, texts, tensors, and lists and mappings of these.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle
import gymnasium as gym
import numpy as np
import torch

__all__ = ["as_plain", "as_was", "env_state", "load_env_state"]

Env = gym.Env[Any, Any]
NUMBERS = ("b1", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8")  # that torch has


def env_state(env: Env) -> dict[str, Any]:
    """The state of one environment."""
    state: dict[str, Any] = {}
    generator = getattr(env.unwrapped, "_np_random", None)
    if isinstance(generator, np.random.Generator):
        state["generator"] = generator.bit_generator.state
    if env.has_wrapper_attr("state_dict") and callable(own := env.get_wrapper_attr("state_dict")):
        state["env"] = copy.deepcopy(own())
    return state


def load_env_state(env: Env, state: Mapping[str, Any]) -> None:
    """Puts back what `env_state` gave."""
    if "generator" in state:
        env.unwrapped.np_random.bit_generator.state = state["generator"]
    if "env" in state:
        env.get_wrapper_attr("load_state_dict")(state["env"])


def as_plain(value: Any) -> Any:
    """A value as any loader takes it. What is neither a number, a text, an array nor made of these is pickled."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) in (list, tuple):
        return type(value)(map(as_plain, value))
    if type(value) is dict and all(isinstance(key, str) for key in value):
        return {"dict": {key: as_plain(part) for key, part in value.items()}}
    if isinstance(value, torch.Tensor) and type(value) is torch.Tensor:
        return {"tensor": value.detach().cpu().clone()}
    if (type(value) is np.ndarray or isinstance(value, np.generic)) and value.dtype.str[1:] in NUMBERS:
        kind = "array" if isinstance(value, np.ndarray) else "number"
        if value.dtype.isnative:  # tensors of wide unsigned types cannot be pickled
            stored = value.dtype.str.replace("u", "i")
            return {kind: (value.dtype.str, torch.from_numpy(np.array(value).view(stored)))}
    return {"pickled": torch.frombuffer(bytearray(cloudpickle.dumps(value)), dtype=torch.uint8)}


def as_was(value: Any) -> Any:
    """What `as_plain` was given: a copy."""
    if isinstance(value, list | tuple):
        return type(value)(map(as_was, value))
    if not isinstance(value, Mapping):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {key: as_was(part) for key, part in content.items()}
    if kind == "pickled":
        return pickle.loads(content.cpu().numpy().tobytes())
    if kind == "tensor":
        return content.clone()
    dtype, stored = content
    array = stored.cpu().numpy().copy().view(dtype)
    return array if kind == "array" else array[()]
