"""Experience collection for reinforcement learning: a policy and environments in, TensorDict batches out."""

from __future__ import annotations

from rlcollect.collectors.multi import AsyncCollector, MultiAsyncCollector, MultiSyncCollector
from rlcollect.collectors.remote import RayCollector
from rlcollect.collectors.single import Collector
from rlcollect.collectors.updaters import (
    MultiProcessedWeightUpdate,
    RayWeightUpdater,
    VanillaWeightUpdater,
    WeightUpdaterBase,
)
from rlcollect.envs.process.env import ProcessVectorEnv
from rlcollect.errors import (
    BufferDied,
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
from rlcollect.memory.compact import CompactBatch
from rlcollect.memory.multistep import MultiStep
from rlcollect.memory.replay.buffer import ReplayBuffer
from rlcollect.memory.replay.remote import RayReplayBuffer
from rlcollect.memory.trajectories import split_trajectories
from rlcollect.options import ExplorationType, exploration_type, set_exploration_type
from rlcollect.rollout.policy.intake import RandomPolicy
from rlcollect.rollout.policy.recurrent import RecurrentModule
from rlcollect.stats import Late, Spread, Stats, Threads, TimeShares, WorkerStats
from rlcollect.weights.objects import RayWeightSyncScheme
from rlcollect.weights.scheme import NoWeightSyncScheme, WeightSyncScheme
from rlcollect.weights.shared import SharedMemWeightSyncScheme
from rlcollect.weights.strategy import WeightStrategy
from rlcollect.weights.values import MultiProcessWeightSyncScheme
from rlcollect.workers.interruptor import Interruptor

__all__ = [
    "AsyncCollector",
    "BufferDied",
    "ClosedError",
    "Collector",
    "CompactBatch",
    "DatasetError",
    "EnvError",
    "ExplorationType",
    "Interruptor",
    "InvalidBatchError",
    "Late",
    "MultiAsyncCollector",
    "MultiProcessWeightSyncScheme",
    "MultiProcessedWeightUpdate",
    "MultiProcessedWeightUpdater",
    "MultiStep",
    "MultiSyncCollector",
    "MultiSyncDataCollector",
    "MultiaSyncDataCollector",
    "NoWeightSyncScheme",
    "OptionError",
    "PolicyError",
    "ProcessVectorEnv",
    "RandomPolicy",
    "RayCollector",
    "RayReplayBuffer",
    "RayWeightSyncScheme",
    "RayWeightUpdater",
    "RecurrentModule",
    "ReplayBuffer",
    "RlcollectError",
    "SharedMemWeightSyncScheme",
    "SharedMemoryError",
    "SpaceError",
    "Spread",
    "Stats",
    "SyncDataCollector",
    "Threads",
    "TimeShares",
    "VanillaWeightUpdater",
    "WeightStrategy",
    "WeightSyncScheme",
    "WeightUpdaterBase",
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
MultiProcessedWeightUpdater = MultiProcessedWeightUpdate

__version__ = "0.1.0"
