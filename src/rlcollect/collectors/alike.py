"""Whether workers are alike, as batches of them all have to be."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym

from rlcollect.envs.make import space_difference
from rlcollect.errors import SpaceError
from rlcollect.workers.answers import Facts

__all__ = ["check_alike", "check_like"]


def check_alike(facts: Sequence[Facts]) -> None:
    """Batches of all workers have one form."""
    for worker, other in enumerate(facts):
        check_like(facts[0], worker, other)


def check_like(first: Facts, worker: int, other: Facts) -> None:
    """Whether a worker is like the first.

    Raises:
        SpaceError: it has other lanes, or other spaces.
    """
    if other.num_lanes != first.num_lanes or other.lead != first.lead:
        raise SpaceError(
            f"All workers need the same number of lanes; worker {worker} has {other.num_lanes} "
            f"({list(other.lead)}) and worker 0 has {first.num_lanes} ({list(first.lead)})."
        )
    if other.leaves != first.leaves:
        raise SpaceError(
            f"All workers need the same spaces; worker {worker} differs from worker 0: {_difference(first, other)}."
        )
    if isinstance(first.action_space, gym.Space) and isinstance(other.action_space, gym.Space):
        difference = space_difference(first.action_space, other.action_space, True, "action", "worker 0")
        if difference:
            raise SpaceError(f"All workers need the same spaces; worker {worker} differs from worker 0: {difference}")


def _difference(ours: Facts, theirs: Facts) -> str:
    first, other = ({leaf.key: str(leaf) for leaf in each.leaves or ()} for each in (ours, theirs))
    key = next((key for key in [*first, *other] if first.get(key) != other.get(key)), None)
    if key is None:
        return "the order of its keys"
    return f"{other.get(key, f'no {key}')} where worker 0 has {first.get(key, f'no {key}')}"
