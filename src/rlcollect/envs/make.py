"""From what the user passed to N lanes: environments, made or taken, whose spaces agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from rlcollect.errors import OptionError, SpaceError

__all__ = ["EnvSource", "close_all", "is_sequence", "lane_sources", "make_env", "space_difference", "spaces_agree"]

Env = gym.Env[Any, Any]
EnvSource = str | EnvSpec | Callable[..., Any] | Any
IsEnvironment = Callable[[Any], bool]
ACCEPTED = (
    "an environment id or spec, a callable that returns an environment, an environment, or a sequence of these "
    "(one lane each)"
)


def is_sequence(create_env_fn: object) -> bool:
    """Whether these are several sources, one a lane (be it one), and not a single one."""
    return isinstance(create_env_fn, Sequence) and not isinstance(create_env_fn, str)


def lane_sources(
    create_env_fn: EnvSource | Sequence[EnvSource],
    num_envs: int | None,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    is_environment: IsEnvironment,
) -> list[tuple[EnvSource, Mapping[str, Any]]]:
    """What each lane is made of: a source and its keyword arguments.

    Raises:
        OptionError: a source of no known kind, one instance for several lanes, a sequence together with `num_envs`.
    """
    if is_sequence(create_env_fn):
        sources = list(cast(Sequence[EnvSource], create_env_fn))
        if num_envs is not None:
            raise OptionError(
                f"create_env_fn is a sequence of {len(sources)}, one lane each, and num_envs={num_envs} was "
                "given too. Leave num_envs out, or pass one maker."
            )
    else:
        sources = [cast(EnvSource, create_env_fn)] * (1 if num_envs is None else num_envs)
    if not sources:
        raise OptionError("create_env_fn is an empty sequence; it needs one maker a lane.")
    for lane, source in enumerate(sources):
        _check_source(lane, source, sources, is_environment)
    return list(zip(sources, _lane_kwargs(kwargs, len(sources)), strict=True))


def _check_source(lane: int, source: object, sources: Sequence[object], is_environment: IsEnvironment) -> None:
    if is_environment(source):
        if (twin := next(i for i, other in enumerate(sources) if other is source)) != lane:
            raise OptionError(
                f"Lanes {twin} and {lane} are the same environment instance. Pass a callable that makes a new one."
            )
    elif not (isinstance(source, str | EnvSpec) or callable(source)):
        raise OptionError(f"create_env_fn must be {ACCEPTED}; lane {lane} is {source!r}.")


def _lane_kwargs(
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, lanes: int
) -> Sequence[Mapping[str, Any]]:
    if kwargs is None:
        return [{}] * lanes
    if isinstance(kwargs, Mapping):
        return [kwargs] * lanes
    if len(kwargs) != lanes:
        raise OptionError(f"create_env_kwargs has {len(kwargs)} entries, and there are {lanes} lanes.")
    return kwargs


def make_env(source: EnvSource, kwargs: Mapping[str, Any], is_environment: IsEnvironment) -> Any:
    """One environment. An instance is taken as it is; one that is still to make others hands arguments on to them.

    Raises:
        OptionError: keyword arguments for another instance.
    """
    if is_environment(source):
        if kwargs:
            _hand_on(source, kwargs)
        return source
    return gym.make(source, **kwargs) if isinstance(source, str | EnvSpec) else source(**kwargs)


def _hand_on(env: Any, kwargs: Mapping[str, Any]) -> None:
    update = getattr(type(env), "update_kwargs", None)  # of its own: some forward what they lack to what they wrap
    if update is None or not getattr(env, "is_closed", False):
        why = "" if update is None else ", and it has made its environments already"
        raise OptionError(f"create_env_kwargs={dict(kwargs)!r} were given for an environment instance{why}.")
    update(env, dict(kwargs))


def spaces_agree(envs: Sequence[Env]) -> None:
    """Checks that observations of all lanes have one tensor form, and that their action spaces are equal.

    Raises:
        SpaceError: naming the first lane that differs from lane 0, and how.
    """
    first = envs[0]
    for lane, env in enumerate(envs[1:], start=1):
        for kind, ours, theirs, exact in (
            ("observation", first.observation_space, env.observation_space, False),
            ("action", first.action_space, env.action_space, True),
        ):
            if difference := space_difference(ours, theirs, exact, kind):
                raise SpaceError(f"All lanes need the same spaces; lane {lane} differs from lane 0: {difference}")


def space_difference(
    ours: gym.Space[Any], theirs: gym.Space[Any], exact: bool, name: str, first: str = "lane 0"
) -> str | None:
    """Where two spaces differ: in structure, shape or dtype, and with `exact` in bounds too; `first` has ours."""
    if ours == theirs:
        return None
    if isinstance(ours, spaces.Dict) and isinstance(theirs, spaces.Dict):
        parts: dict[Any, gym.Space[Any]] = dict(ours.spaces)
        others: dict[Any, gym.Space[Any]] = dict(theirs.spaces)
    elif isinstance(ours, spaces.Tuple) and isinstance(theirs, spaces.Tuple):
        parts, others = dict(enumerate(ours.spaces)), dict(enumerate(theirs.spaces))
    else:
        same_form = type(ours) is type(theirs) and ours.shape == theirs.shape and ours.dtype == theirs.dtype
        return None if same_form and not exact else f"{name} space {theirs} where {first} has {ours}."
    if parts.keys() != others.keys():
        return f"{name} space with the keys {list(others)} where {first} has {list(parts)}."
    differences = (space_difference(parts[key], others[key], exact, f"{name}[{key!r}]", first) for key in parts)
    return next((difference for difference in differences if difference), None)


def close_all(envs: Sequence[Env]) -> list[BaseException]:
    """Closes every environment, whatever the others do; the errors that came."""
    return [error for env in envs if (error := _close(env)) is not None]


def _close(env: Env) -> BaseException | None:
    try:
        env.close()
    except BaseException as error:  # a Ctrl-C too: the others are closed before it goes on
        return error
    return None
