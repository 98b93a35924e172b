"""Experience collection for reinforcement learning: a policy and environments in, TensorDict batches out."""

from __future__ import annotations

from rlcollect.collectors.single import Collector
from rlcollect.errors import (
    ClosedError,
    DatasetError,
    EnvError,
    InvalidBatchError,
    OptionError,
    PolicyError,
    RlcollectError,
    SpaceError,
    WorkerError,
)
from rlcollect.interfaces import Interruptor
from rlcollect.memory.trajectories import split_trajectories
from rlcollect.options import ExplorationType, exploration_type, set_exploration_type
from rlcollect.rollout.policy.intake import RandomPolicy
from rlcollect.rollout.policy.recurrent import RecurrentModule
from rlcollect.stats import Spread, Stats, TimeShares

__all__ = [
    "ClosedError",
    "Collector",
    "DatasetError",
    "EnvError",
    "ExplorationType",
    "Interruptor",
    "InvalidBatchError",
    "OptionError",
    "PolicyError",
    "RandomPolicy",
    "RecurrentModule",
    "RlcollectError",
    "SpaceError",
    "Spread",
    "Stats",
    "SyncDataCollector",
    "TimeShares",
    "WorkerError",
    "exploration_type",
    "set_exploration_type",
    "split_trajectories",
]

SyncDataCollector = Collector  # TorchRL's older name for it

__version__ = "0.1.0"
