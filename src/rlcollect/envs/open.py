"""From what the user passed to a driver: environments are made, known by what they can do, and opened.

A kind of environment is a line in `KINDS`, and a module with its driver. Nothing else in the package tells them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlcollect.envs.lanes import is_gymnasium, open_lanes
from rlcollect.envs.make import close_all, is_sequence, lane_sources, make_env
from rlcollect.envs.opening import Opening, at_lane
from rlcollect.envs.pettingzoo import is_pettingzoo, open_pettingzoo
from rlcollect.envs.process.driver import is_process_env, made_of, open_process_env
from rlcollect.envs.tensordicts import NEEDS as TENSORDICT_NEEDS
from rlcollect.envs.tensordicts import is_tensordict_env, open_tensordicts
from rlcollect.envs.vector.envpool import is_envpool, open_envpool
from rlcollect.envs.vector.open import NEEDS as VECTOR_NEEDS
from rlcollect.envs.vector.open import is_vector, open_vector
from rlcollect.errors import OptionError
from rlcollect.interfaces import EnvDriver
from rlcollect.options import What, Where

__all__ = ["open_driver"]


@dataclass(frozen=True)
class Kind:
    """A kind of environment.

    Attributes:
        name: what its environments are called.
        is_one: whether an object is of this kind.
        open: makes a driver of environments of this kind.
        several: whether there may be several, one a lane; else there is one, which holds all lanes.
        needs: what an object needs to be of this kind, in words.
    """

    name: str
    is_one: Callable[[Any], bool]
    open: Callable[[Opening], EnvDriver]
    several: bool
    needs: str


KINDS = (  # the first that fits
    Kind("rlcollect.ProcessVectorEnv", is_process_env, open_process_env, False, "a class of ours"),
    # known by its class: asked for attributes, as the others do, some of these start workers or forward to others
    Kind("TensorDict environment", is_tensordict_env, open_tensordicts, True, TENSORDICT_NEEDS),
    Kind("EnvPool", is_envpool, open_envpool, False, "reset, step, num_envs, async_reset, recv, send, config"),
    Kind("gymnasium.vector.VectorEnv", is_vector, open_vector, False, ", ".join(VECTOR_NEEDS)),
    Kind("gymnasium.Env", is_gymnasium, open_lanes, True, "reset, step, observation_space, action_space"),
    Kind(
        "pettingzoo.ParallelEnv or AECEnv",
        is_pettingzoo,
        open_pettingzoo,
        True,
        "reset, step, possible_agents, observation_space, action_space",
    ),
)


def open_driver(
    create_env_fn: Any,
    what: What,
    where: Where,
    *,
    names: Sequence[str] = (),
    worker: int = 0,
    seed: int = 0,
    generation: int = 0,
    before_reset: Callable[[], None] | None = None,
) -> EnvDriver:
    """Makes the environments of a worker, resets them, and plans how they are stepped and stored.

    Args:
        create_env_fn: what the user passed.
        what: info keys, names, dtypes and reset options are taken from here.
        where: how many lanes, and how their environments are made.
        names: names that observation keys may not have, beside those that are always ours.
        worker: number of the worker, for errors and seeds.
        seed: whose children the seeds of single episodes are, until others are asked for.
        generation: how many workers of this number there were before.
        before_reset: called when all are made, and before the first is reset.

    Raises:
        OptionError, SpaceError, EnvError: what was made does not fit, or is no environment.
        What a maker or a first reset raises, from a `WorkerError`. The environments made so far are closed.
    """
    batched = where.num_envs is not None or is_sequence(create_env_fn)
    if where.env_workers is not None:
        return _opened_in_processes(create_env_fn, what, where, tuple(names), worker, before_reset)
    number = None if _holds_lanes(create_env_fn) else where.num_envs
    sources = lane_sources(create_env_fn, number, where.create_env_kwargs, is_environment)
    envs: list[Any] = []
    owned: list[Any] = []  # instances that were passed in are their owner's to close
    try:
        for lane, (source, kwargs) in enumerate(sources):
            with at_lane(worker, lane):
                envs.append(make_env(source, kwargs, is_environment))
            _check_distinct(envs)
            if envs[lane] is not source:
                owned.append(envs[lane])
            if not is_sequence(create_env_fn) and _holds_lanes(envs[lane]):  # one has all lanes that were asked for
                break
        kind = _kind_of(envs)
        if before_reset is not None:
            before_reset()
        return kind.open(Opening(envs, owned, what, where, batched, tuple(names), worker, seed, generation))
    except BaseException:
        close_all(owned)
        raise


def _opened_in_processes(
    create_env_fn: Any,
    what: What,
    where: Where,
    names: tuple[str, ...],
    worker: int,
    before_reset: Callable[[], None] | None,
) -> EnvDriver:
    """The same, with lanes in worker processes of their own."""
    with at_lane(worker, None):
        env = made_of(create_env_fn, where)
    made: list[Any] = [env]
    try:
        if before_reset is not None:
            before_reset()
        return open_process_env(Opening(made, made, what, where, True, names, worker))
    except BaseException:
        close_all(made)
        raise


def _holds_lanes(made: Any) -> bool:
    """Whether an object is an environment that has several lanes of its own."""
    return is_environment(made) and not next(kind for kind in KINDS if kind.is_one(made)).several


def is_environment(made: Any) -> bool:
    """Whether an object is an environment that can be stepped, and not what makes one."""
    return not isinstance(made, type) and any(kind.is_one(made) for kind in KINDS)


def _kind_of(envs: Sequence[Any]) -> Kind:
    kinds = [next((kind for kind in KINDS if kind.is_one(env)), None) for env in envs]
    for lane, (kind, env) in enumerate(zip(kinds, envs, strict=True)):
        if kind is None:
            raise OptionError(_unknown(env))
        if kind is not kinds[0]:
            raise OptionError(
                f"Lane 0 is a {getattr(kinds[0], 'name', None)} and lane {lane} a {kind.name}; all "
                "lanes should be of one kind."
            )
    first = kinds[0]
    assert first is not None
    if len(envs) > 1 and not first.several:
        raise OptionError(
            f"create_env_fn is a sequence of {len(envs)}, and makes a {first.name}, which holds several lanes itself. "
            "Pass one of them, with as many lanes as you want."
        )
    return first


def _unknown(env: Any) -> str:
    accepted = "\n".join(f"  {kind.name}: {kind.needs}{_lacking(env, kind)}" for kind in KINDS)
    return f"{env!r} ({type(env).__name__}) is no environment. What is accepted:\n{accepted}"


def _lacking(env: Any, kind: Kind) -> str:
    lacking = [name for name in kind.needs.split(", ") if not hasattr(env, name)]
    return f" (this has no {', no '.join(lacking)})" if lacking else ""


def _check_distinct(envs: Sequence[Any]) -> None:
    twin = next(lane for lane, env in enumerate(envs) if env is envs[-1])
    if twin != len(envs) - 1:
        raise OptionError(
            f"Lanes {twin} and {len(envs) - 1} are the same environment: create_env_fn returned it twice. "
            "It should make a new one each time."
        )
