"""Collection in worker processes: synchronous, where a batch is made of a rollout of each, and asynchronous."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlcollect.collectors.arguments import lane_indices
from rlcollect.collectors.processes import InProcesses
from rlcollect.collectors.sent import check_maker
from rlcollect.collectors.ways import AsReady, Together, Way
from rlcollect.envs.make import is_sequence
from rlcollect.errors import OptionError
from rlcollect.options import How, Processes, Sink, Stacking, Staleness, Sync, What, Where, Workers
from rlcollect.workers.models import POLICY

__all__ = ["AsyncCollector", "MultiAsyncCollector", "MultiSyncCollector"]


class MultiSyncCollector(InProcesses):
    """Runs a policy in environments in several processes, and delivers batches of a rollout of each.

    No environment is stepped between two batches, so all frames of a batch are made with the same weights, and one
    seed gives the same batches, run after run::

        with MultiSyncCollector(
            ["CartPole-v1"] * 2, policy, frames_per_batch=2048, total_frames=1_000_000, num_envs=16
        ) as collector:
            for batch in collector:  # TensorDict, batch_size [2, 16, 64]
                train(batch)
                collector.update_policy_weights_()

    Workers have copies of the policy. Environments are made, and reset, in their processes alone; the policy is called
    there once at construction. Makers, policies and hooks cross by value: lambdas and what a script or notebook defines
    too.

    Args:
        create_env_fn: a sequence of what a `Collector` takes but for instances, one a worker; or one such, with
            `num_workers=`.
        policy: see `Collector`.
        **options: as below; each is declared in `rlcollect.options`.

    Raises:
        OptionError, SpaceError, PolicyError, EnvError: see `rlcollect.errors`.
        WorkerDied, WorkerTimeout: a worker process ended, or took too long.
        SharedMemoryError: batches need more shared memory than there is.
        What an environment raises, from a `WorkerError`.
    """

    option_kinds = (What, Where, How, Sink, Sync, Workers, Processes, Stacking)

    def _chosen_way(self) -> Way:
        return Together(self._options[Stacking])


class MultiAsyncCollector(InProcesses):
    """Runs a policy in environments in several processes, which go on while the program learns.

    Each batch is one worker's rollout of `frames_per_batch` frames, the first that is ready. A worker makes at most two
    ahead. Weights are taken at the beginning of a rollout; `policy_version` says which each frame was made with.
    `update_at_each_batch` publishes at the `next()` that follows a batch. See `MultiSyncCollector` for the rest.

    Args:
        create_env_fn: a sequence of what a `Collector` takes but for instances, one a worker; or one such, with
            `num_workers=`.
        policy: see `Collector`.
        **options: as below; each is declared in `rlcollect.options`.

    Raises:
        What a `MultiSyncCollector` raises.
    """

    option_kinds = (What, Where, How, Sink, Sync, Workers, Processes, Staleness)

    def _chosen_way(self) -> Way:
        return AsReady(self._options[Staleness], counts_versions=POLICY in self._schemes.moving)


class AsyncCollector(MultiAsyncCollector):
    """Runs a policy in environments in one other process, which goes on while the program learns.

    As `MultiAsyncCollector` with a single worker; a sequence of makers are its lanes.

    Args:
        create_env_fn: what a `Collector` takes, but for instances.
        policy: see `Collector`.
        **options: as below; each is declared in `rlcollect.options`.

    Raises:
        What a `MultiSyncCollector` raises.
    """

    _kwargs_by_worker = False

    def _sources(self, create_env_fn: Any) -> Sequence[Any]:
        if self._workers.num_workers not in (None, 1):
            raise OptionError(
                f"An AsyncCollector has one worker, num_workers={self._workers.num_workers} came; MultiAsyncCollector "
                "has several."
            )
        for source in create_env_fn if is_sequence(create_env_fn) else [create_env_fn]:
            check_maker(0, source)
        return [create_env_fn]

    def reset(
        self,
        reset_idx: Any = None,
        *,
        seed: int | Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a new episode now, in all lanes or in some: a CUT in their data. What was made before comes first.

        Args:
            reset_idx: a lane, several, a slice, or one bool a lane; None: all.
            seed: for one lane as it is, for several its children; or a list of one for each of them.
            options: for the environments' `reset`, in the place of `reset_options`.

        Raises:
            OptionError: an index that names no lane, or a list of seeds of another length.
        """
        self._check_open()
        self._reset_lanes({0: lane_indices(reset_idx, self.num_envs)}, seed, options)
