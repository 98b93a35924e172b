"""What the user passed, on its way to the worker processes: one maker a lane, packed, each thing once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec

from rlcollect.envs.make import EnvSource, is_sequence
from rlcollect.errors import OptionError
from rlcollect.processes.crossing import packed

__all__ = ["packed_makers"]


def packed_makers(
    make_env: EnvSource | Sequence[EnvSource],
    lanes: int,
    kwargs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
) -> list[bytes]:
    """By lane: what makes its environment and the keyword arguments for it, packed. Those that are one are one here.

    Raises:
        OptionError: there are not as many as lanes, they are of no known kind, or cannot be sent.
    """
    makers: list[Any] = list(cast(Sequence[Any], make_env)) if is_sequence(make_env) else [make_env] * lanes
    if len(makers) != lanes:
        raise OptionError(f"make_env is a sequence of {len(makers)}, one lane each, and num_envs={lanes}.")
    each = list(kwargs) if isinstance(kwargs, Sequence) else [kwargs] * lanes
    if len(each) != lanes:
        raise OptionError(f"create_env_kwargs has {len(each)} entries, and there are {lanes} lanes.")
    done: dict[tuple[int, int], bytes] = {}
    for lane, (maker, own) in enumerate(zip(makers, each, strict=True)):
        key = id(maker), id(own)
        if key not in done:
            done[key] = _packed(_checked(lane, maker), own or {})
    return [done[id(maker), id(own)] for maker, own in zip(makers, each, strict=True)]


def _checked(lane: int, maker: Any) -> Any:
    if isinstance(maker, gym.Env | gym.vector.VectorEnv) or not (isinstance(maker, str | EnvSpec) or callable(maker)):
        raise OptionError(
            "make_env must be an environment id or spec, a callable that returns an environment, or a sequence of "
            f"these (one lane each); for lane {lane} it is {maker!r}. An environment that is made already lives in "
            "this process; pass what makes it (lambda: ...)."
        )
    # what a program has registered is not known in its workers, which do not run it
    return gym.registry.get(maker, maker) if isinstance(maker, str) else maker


def _packed(maker: Any, kwargs: Mapping[str, Any]) -> bytes:
    try:
        return packed((maker, dict(kwargs)), "make_env")
    except OptionError:
        packed(maker, "make_env")  # each by its own name
        packed(dict(kwargs), "create_env_kwargs")
        raise
