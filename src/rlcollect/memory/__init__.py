"""Memory of experience: what batches lie in, and how they are cut into trajectories and several steps made one."""

from __future__ import annotations

from rlcollect.memory.multistep import MultiStep
from rlcollect.memory.trajectories import split_trajectories

__all__ = ["MultiStep", "split_trajectories"]
