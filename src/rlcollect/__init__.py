"""Experience collection for reinforcement learning: a policy and environments in, TensorDict batches out."""

from __future__ import annotations

from rlcollect.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from rlcollect.collectors.single import Collector
from rlcollect.envs.process.env import ProcessVectorEnv
from rlcollect.errors import (
    ClosedError,
    DatasetError,
    EnvError,
    InvalidBatchError,
    OptionError,
    PolicyError,
    RlcollectError,
    SharedMemoryError,
    SpaceError,
    WorkerDied,
    WorkerError,
    WorkerRestarted,
    WorkerTimeout,
)
from rlcollect.memory.trajectories import split_trajectories
from rlcollect.options import ExplorationType, exploration_type, set_exploration_type
from rlcollect.rollout.policy.intake import RandomPolicy
from rlcollect.rollout.policy.recurrent import RecurrentModule
from rlcollect.stats import Late, Spread, Stats, Threads, TimeShares, WorkerStats
from rlcollect.workers.interruptor import Interruptor

__all__ = [
    "AsyncCollector",
    "ClosedError",
    "Collector",
    "DatasetError",
    "EnvError",
    "ExplorationType",
    "Interruptor",
    "InvalidBatchError",
    "Late",
    "MultiAsyncCollector",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "OptionError",
    "PolicyError",
    "ProcessVectorEnv",
    "RandomPolicy",
    "RecurrentModule",
    "RlcollectError",
    "SharedMemoryError",
    "SpaceError",
    "Spread",
    "Stats",
    "SyncDataCollector",
    "Threads",
    "TimeShares",
    "WorkerDied",
    "WorkerError",
    "WorkerRestarted",
    "WorkerStats",
    "WorkerTimeout",
    "aSyncDataCollector",
    "exploration_type",
    "set_exploration_type",
    "split_trajectories",
]

# TorchRL's older names for them
SyncDataCollector = Collector
MultiSyncDataCollector = MultiSyncCollector
MultiaSyncDataCollector = MultiAsyncCollector
aSyncDataCollector = AsyncCollector  # noqa: N816

__version__ = "0.1.0"
