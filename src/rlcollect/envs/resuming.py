"""An environment in the middle of an episode: what it will do next, saved and put back.

An environment, or a wrapper, says it itself by two methods of its class, `get_state()` and `set_state(state)`, for
itself and all that is inside it. For others this module knows how: Gymnasium's own wrappers, its classic control and
its MuJoCo environments. Whoever has neither has no such state.
"""

from __future__ import annotations

import copy
import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np

from rlcollect.envs.saving import env_state, load_env_state
from rlcollect.options.checks import takes

__all__ = ["middle_state", "put_in_the_middle"]

Env = gym.Env[Any, Any]
WRAPPERS = "gymnasium.wrappers."
CLASSIC = "gymnasium.envs.classic_control."
MUJOCO = "gymnasium.envs.mujoco."
SAYS, TAKES = "get_state", "set_state"
USERS = ("TransformObservation", "TransformReward", "TransformAction")  # by a function of the user's
CLASSIC_STATE = ("state", "steps_beyond_terminated", "last_u")


def middle_state(env: Env) -> list[Any] | None:
    """What an environment will do next, layer by layer; None: it cannot be told.

    Raises:
        What a `get_state` raises.
    """
    layers: list[Any] = []
    for layer in _layers(env):
        kept = _keeper(layer)
        if kept is None:
            return None
        layers.append([_name(layer), kept[0]()])
        if _says_itself(layer):
            return layers
    return layers


def put_in_the_middle(env: Env, layers: list[Any]) -> bool:
    """Puts back what `middle_state` gave; whether it is an environment of the same kind."""
    own, names = [], []
    for layer in _layers(env):
        kept = _keeper(layer)
        if kept is None:
            return False
        own.append(kept[1])
        names.append(_name(layer))
        if _says_itself(layer):
            break
    if names != [name for name, _ in layers]:
        return False
    for put_back, (_, state) in zip(own, layers, strict=True):
        put_back(state)
    return True


def _layers(env: Any) -> Iterator[Any]:
    """The wrappers from the outermost on, and then the environment itself."""
    while isinstance(env, gym.Wrapper):
        yield env
        env = env.env
    yield env


def _says_itself(layer: Any) -> bool:
    found = [getattr(layer, name) if hasattr(type(layer), name) else None for name in (SAYS, TAKES)]
    return all(callable(method) and takes(method, count) for count, method in enumerate(found))


def _keeper(layer: Any) -> tuple[Callable[[], Any], Callable[[Any], None]] | None:
    """How the state of a layer is taken, and put back; None: nobody knows."""
    if _says_itself(layer):
        return layer.get_state, layer.set_state
    home = type(layer).__module__
    if home.startswith(WRAPPERS) and type(layer).__name__ not in USERS:
        return lambda: _plain_attributes(layer), lambda state: _set_attributes(layer, state)
    if home.startswith(CLASSIC):
        return lambda: _own_state(layer, CLASSIC_STATE), lambda state: _set_own_state(layer, state)
    if home.startswith(MUJOCO) and hasattr(layer, "data"):
        return lambda: _simulated(layer), lambda state: _set_simulated(layer, state)
    return None


def _name(layer: Any) -> str:
    return f"{type(layer).__module__}.{type(layer).__qualname__}"


# --- attributes ---


def _plain_attributes(thing: Any) -> dict[str, Any]:
    """Its attributes that are data: numbers, arrays, and what holds nothing else. The rest does not change.

    Nor do those that it was made with.
    """
    own = {"env", "np_random", "render_mode", "metadata", "spec"}
    for kind in type(thing).__mro__[:-1]:
        own |= {*inspect.signature(vars(kind)["__init__"]).parameters} if "__init__" in vars(kind) else set()
    return {
        name: _copied(value)
        for name, value in vars(thing).items()
        if name.removeprefix("_") not in own and _is_data(value)
    }


def _is_data(value: Any) -> bool:
    if isinstance(value, Mapping):
        return all(map(_is_data, value.values()))
    if isinstance(value, list | tuple | deque):
        return all(map(_is_data, value))
    if _is_statistic(value):
        return True
    is_array = isinstance(value, np.ndarray) and value.dtype != object
    return is_array or value is None or isinstance(value, bool | int | float | str | bytes | np.generic)


def _is_statistic(value: Any) -> bool:
    """Gymnasium's running mean and variance."""
    return type(value).__name__ == "RunningMeanStd" and type(value).__module__.startswith("gymnasium.")


def _copied(value: Any) -> Any:
    if isinstance(value, deque):
        return [*copy.deepcopy(value)]
    return copy.deepcopy(vars(value) if _is_statistic(value) else value)


def _set_attributes(thing: Any, state: Mapping[str, Any]) -> None:
    for name, value in state.items():
        own = vars(thing).get(name)
        if isinstance(own, deque):
            own.clear()
            own.extend(_copied(value))
        elif _is_statistic(own):
            _set_attributes(own, value)
        else:
            setattr(thing, name, _copied(value))


# --- environments ---


def _own_state(env: Any, names: Sequence[str] | None = None) -> dict[str, Any]:
    """Attributes, all or some, and the random generator."""
    attributes = (
        _plain_attributes(env) if names is None else {n: _copied(vars(env)[n]) for n in names if n in vars(env)}
    )
    return {"attributes": attributes, **env_state(env)}


def _set_own_state(env: Any, state: Mapping[str, Any]) -> None:
    _set_attributes(env, state["attributes"])
    load_env_state(env, state)


def _simulated(env: Any) -> dict[str, Any]:
    """With all arrays of the simulation: some of what is observed lags behind the positions, and follows from none."""
    data = env.data
    names = [name for name in dir(data) if not name.startswith("_")]
    arrays = {name: value.copy() for name in names if isinstance(value := getattr(data, name), np.ndarray)}
    return {"arrays": arrays, "time": float(data.time), **_own_state(env)}


def _set_simulated(env: Any, state: Mapping[str, Any]) -> None:
    data = env.data
    for name, value in state["arrays"].items():
        own = getattr(data, name)
        if own.shape == value.shape:  # contacts, as many as there are: they are worked out anew
            own[...] = value
    data.time = state["time"]
    _set_own_state(env, state)
