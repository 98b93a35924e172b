"""What the user passes to a `ProcessVectorEnv`, checked."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlcollect.errors import OptionError
from rlcollect.processes.restarts import Restarts

__all__ = ["count", "entropy_of", "fresh_seed", "lane_seeds", "masked", "restarts_of", "seconds"]

Array = np.ndarray[Any, Any]


def count(name: str, value: Any) -> int:
    """A positive integer, of whatever integer type it came."""
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1 or isinstance(value, bool):
        raise OptionError(f"{name} must be a positive integer, not {value!r}.")
    return number


def seconds(name: str, value: Any) -> float | None:
    """A positive number of seconds; None: no limit."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise OptionError(f"{name} must be a positive number of seconds, or None for no limit, not {value!r}.")
    return float(value)


def restarts_of(on_worker_failure: Any, max_restarts: Any, workers: int) -> Restarts | None:
    """Which workers may be replaced; None: none."""
    if on_worker_failure not in ("raise", "restart"):
        raise OptionError(f'on_worker_failure must be "raise" or "restart", not {on_worker_failure!r}.')
    is_number = isinstance(max_restarts, int) and not isinstance(max_restarts, bool) and max_restarts >= 0
    if not (max_restarts is None or is_number):
        raise OptionError(f"max_restarts must be a number, or None for no limit, not {max_restarts!r}.")
    return Restarts(workers, max_restarts) if on_worker_failure == "restart" else None


def fresh_seed() -> int:
    """One that nobody has."""
    return int(np.random.SeedSequence().generate_state(1, np.uint64)[0])


def lane_seeds(seed: Any, lanes: int) -> Sequence[int | None]:
    """As Gymnasium gives them."""
    if seed is None:
        return [None] * lanes
    if isinstance(seed, int | np.integer):
        return [int(seed) + lane for lane in range(lanes)]
    if len(seed) != lanes:
        raise OptionError(f"seed should be one number, or one for each of {lanes} lanes; {len(seed)} came.")
    return list(seed)


def entropy_of(seed: Any) -> int | Sequence[int] | None:
    """What other streams are made from."""
    if seed is None or isinstance(seed, int | np.integer):
        return None if seed is None else abs(int(seed))
    return [abs(int(each)) for each in seed if each is not None] or None


def masked(options: dict[str, Any] | None, lanes: int) -> tuple[Array, dict[str, Any] | None]:
    """The lanes to reset, and the options without that."""
    if options is None or "reset_mask" not in options:
        return np.ones(lanes, np.bool_), options
    options = dict(options)
    mask = options.pop("reset_mask")
    if not (isinstance(mask, np.ndarray) and mask.shape == (lanes,) and mask.dtype == np.bool_ and mask.any()):
        raise OptionError(
            f'options["reset_mask"] should be a bool array of shape [{lanes}] that is True somewhere, not {mask!r}.'
        )
    return mask, options
