"""What users name workers, lanes and seeds by, as numbers."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.errors import OptionError

__all__ = ["lane_indices", "seeds_of", "worker_numbers"]


def seeds_of(seed: Any, lanes: int) -> int | list[int]:
    """A seed as an int, or seeds as a list of one for each lane."""
    try:
        one = np.ndim(seed) == 0
        seeds = [operator.index(seed)] if one else [operator.index(each) for each in seed]
    except (TypeError, ValueError) as error:
        raise OptionError(f"Seeds are non-negative integers, one or one a lane; {seed!r} came.") from error
    if not one and len(seeds) != lanes:
        raise OptionError(f"A list of seeds needs one a lane: {lanes}, not {len(seeds)}.")
    if min(seeds, default=0) < 0:
        raise OptionError(f"Seeds are non-negative integers; {seed!r} came.")
    return seeds[0] if one else seeds


def lane_indices(index: Any, num_lanes: int) -> list[int]:
    """Lanes as the user names them.

    Raises:
        OptionError: there is no such lane.
    """
    if index is None:
        return list(range(num_lanes))
    if isinstance(index, slice):
        return list(range(num_lanes))[index]
    try:
        values = torch.as_tensor(index).reshape(-1)
    except (RuntimeError, TypeError, ValueError) as error:
        raise OptionError(f"reset takes lanes as integers, or one bool a lane; {index!r} came.") from error
    if not len(values):
        return []
    if values.dtype.is_floating_point or values.dtype.is_complex:
        raise OptionError(f"reset takes lanes as integers, or one bool a lane; {index!r} came.")
    if values.dtype is torch.bool:
        if len(values) != num_lanes:
            raise OptionError(f"reset takes one bool a lane: {num_lanes}, not {len(values)}.")
        return [int(lane) for lane in values.nonzero()]
    lanes = [int(lane) for lane in values]
    if wrong := [lane for lane in lanes if not 0 <= lane < num_lanes]:
        raise OptionError(f"There are lanes 0 to {num_lanes - 1}; reset was asked for lane {wrong[0]}.")
    return list(dict.fromkeys(lanes))


def worker_numbers(worker_ids: Any, devices: Sequence[torch.device]) -> list[int] | None:
    """Workers as the user names them: a number, a device (all whose policies compute there), several; None for all.

    Args:
        worker_ids: see above.
        devices: of each worker.

    Raises:
        OptionError: there is no such worker.
    """
    if worker_ids is None:
        return None
    count = len(devices)
    is_one = isinstance(worker_ids, str | torch.device) or np.ndim(worker_ids) == 0
    numbers: list[int] = []
    for each in [worker_ids] if is_one else list(worker_ids):
        if isinstance(each, str | torch.device):
            numbers += _there(each, devices)
        elif isinstance(each, bool | np.bool_) or not hasattr(each, "__index__"):
            raise OptionError(f"worker_ids takes numbers of workers, or devices, not {worker_ids!r}.")
        elif not 0 <= operator.index(each) < count:
            raise OptionError(f"There are workers 0 to {count - 1}; worker_ids has {operator.index(each)}.")
        else:
            numbers.append(operator.index(each))
    return list(dict.fromkeys(numbers))


def _there(device: Any, devices: Sequence[torch.device]) -> list[int]:
    try:
        wanted = torch.device(device)
    except RuntimeError as error:
        raise OptionError(f"worker_ids has {device!r}, which is neither a number nor a device.") from error
    found = [
        worker for worker, each in enumerate(devices) if each.type == wanted.type and wanted.index in (None, each.index)
    ]
    if not found:
        told = ", ".join(dict.fromkeys(map(str, devices)))
        raise OptionError(f"No worker's policy computes on {wanted}; they do on {told}.")
    return found
