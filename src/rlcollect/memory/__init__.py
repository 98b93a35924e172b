"""Memory of experience: what batches lie in, and how they are cut into trajectories."""

from __future__ import annotations

from rlcollect.memory.trajectories import split_trajectories

__all__ = ["split_trajectories"]
