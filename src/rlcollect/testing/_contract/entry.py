"""`check_env`: which kind of environment it is, and so which checks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import gymnasium as gym

from rlcollect.envs.vector.envpool import is_envpool
from rlcollect.errors import OptionError
from rlcollect.testing._contract.report import BrokenError, Finding, Report, merged
from rlcollect.testing._contract.single import check_single
from rlcollect.testing._contract.subject import ACCEPTED, Subject, subject_of
from rlcollect.testing._contract.vector import check_vector

__all__ = ["KINDS", "check_env"]

Kind: TypeAlias = Callable[[Subject], Iterator[Finding]]

KINDS: Final[dict[type, Kind]] = {gym.vector.VectorEnv: check_vector, gym.Env: check_single}
"""All checks of each kind of environment. A new kind is a line here, its class in `ACCEPTED`, and its function."""


def check_env(
    make: Any,
    *,
    steps: int = 2000,
    seed: int = 0,
    seconds: float = 10.0,
    num_envs: int | None = None,
    create_env_kwargs: Mapping[str, Any] | None = None,
) -> Report:
    """Checks that an environment keeps the contract that every collector leans on.

    It is stepped with random actions, through as many episodes as it takes; actions that an `"action_mask"` forbids
    (in a Dict observation or in the info) are not taken. What it returns is held against its spaces; seeds, ends of
    episodes, reused memory and, of vector environments, the autoreset mode, final observations and masked resets
    are looked at. What it raises on the way is a finding.

    Args:
        make: an environment id or spec, a callable that makes a new `gymnasium.Env` or `gymnasium.vector.VectorEnv`
            each time, or an instance of one, which is reset and stepped and left open. Some checks need a maker.
        steps: how many calls of `step` the longest run has; the others have some hundreds, or what an episode takes.
        seed: of resets and actions; one seed, one report, but for times.
        seconds: after which the longest run ends, be there steps left or not.
        num_envs: check so many lanes: of an id or a spec, what `gymnasium.make_vec` makes, with its vector entry
            point if it has one; of a maker, a `SyncVectorEnv`.
        create_env_kwargs: for the maker, for `gymnasium.make`, or with `num_envs` for `gymnasium.make_vec`
            (`{"vectorization_mode": "async"}`, say).

    Returns:
        A finding for each check.

    Raises:
        OptionError: `make` is none of these or makes none of these, nobody registered the id, or an option makes no
            sense.

    Example:
        >>> from rlcollect.testing import Counter, check_env
        >>> report = check_env(Counter, steps=100)
        >>> assert not report.broken, report
        >>> print(report["episodes"])
        ok: episodes: 20 episodes of 5 to 5 steps, mean 5; ends: 20 terminated
    """
    _check_bounds(steps, seconds, seed, num_envs)
    subject = subject_of(make, create_env_kwargs, num_envs, steps=steps, seconds=seconds, seed=seed)
    try:
        made = subject.peek()
    except BrokenError as broken:
        return Report(subject.name, broken.findings)
    try:
        return _checked(made, subject, num_envs)
    except OptionError:
        subject.discard()
        raise


def _checked(made: Any, subject: Subject, num_envs: int | None) -> Report:
    if num_envs is not None and any(isinstance(lane, gym.vector.VectorEnv) for lane in getattr(made, "envs", ())):
        raise OptionError(
            f"num_envs={num_envs} was given, and {subject.name} makes vector environments. Leave num_envs out, or tell "
            "the maker by create_env_kwargs."
        )
    if is_envpool(made):
        raise OptionError(
            f"{subject.name} is a pool of EnvPool, whose spaces and resets are of a form of their own: check_env "
            "does not know them. A Collector takes it as it is."
        )
    for kind, check in KINDS.items():
        if isinstance(made, kind):
            return Report(subject.name, merged(check(subject)))
    raise OptionError(f"check_env takes {ACCEPTED}; {subject.name} made {made!r}.")


def _check_bounds(steps: int, seconds: float, seed: int, num_envs: int | None) -> None:
    if steps < 1 or seconds <= 0:
        raise OptionError(f"steps and seconds must be positive, not {steps} and {seconds}")
    if seed < 0:
        raise OptionError(f"seed must not be negative; {seed} came")
    if num_envs is not None and num_envs < 1:
        raise OptionError(f"num_envs must be a positive integer, not {num_envs}")
