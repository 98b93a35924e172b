"""Rollouts that crossed as they are, put together to a batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack, pad

from rlcollect.collectors.crew import Arrival
from rlcollect.layout import Key
from rlcollect.memory.flat import Flat

__all__ = ["ELSEWHERE", "IDS", "NO_EPISODE", "batch_of", "put_together"]

IDS: Key = ("collector", "traj_ids")
NO_EPISODE = -1
ELSEWHERE: TensorDictBase = TensorDict({}, [])
"""In the place of a batch that is in a buffer."""


def put_together(batches: Sequence[TensorDictBase], dim: int | None, *, in_time: bool) -> TensorDictBase:
    """Rollouts that crossed as they are, as one batch.

    Args:
        batches: of each worker.
        dim: the dimension in which they are joined; None: they are stacked.
        in_time: whether that is time: they may then be of any length, and are else filled up with marked rows.
    """
    if batches[0] is ELSEWHERE:
        return ELSEWHERE
    if not in_time:
        most = max(batch.batch_size[-1] for batch in batches)
        batches = [_filled_up(batch, most) for batch in batches]
    if dim is not None:
        return torch.cat(list(batches), dim)
    try:
        return torch.stack(list(batches), 0)
    except RuntimeError:  # shapes differ from worker to worker
        return lazy_stack(list(batches), 0)


def _filled_up(batch: TensorDictBase, steps: int) -> TensorDictBase:
    """A batch of so many steps; those that it lacks are marked."""
    if (lacking := steps - batch.batch_size[-1]) == 0:
        return batch
    filled: TensorDictBase = pad(batch, [*[0, 0] * (batch.ndim - 1), 0, lacking])
    filled.names = batch.names
    if (ids := filled.get(IDS, None)) is not None:
        ids[..., -lacking:] = NO_EPISODE
    return filled


def batch_of(arrival: Arrival) -> TensorDictBase:
    """The batch that a rollout brought with it; `ELSEWHERE`, if its worker has put it into a buffer."""
    batch = arrival.rollout.batch
    if isinstance(batch, Flat):
        whole: TensorDictBase = batch.opened(arrival.beside.copy())
        return whole
    return ELSEWHERE if batch is None else batch
