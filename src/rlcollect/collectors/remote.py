"""Collection on a Ray cluster: the same workers, in actors that Ray places; the same batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from rlcollect.cluster.needed import needed
from rlcollect.collectors.apart import unwhole
from rlcollect.collectors.arguments import worker_numbers
from rlcollect.collectors.crew import Crew
from rlcollect.collectors.filling import ByRemotes, Filling, can_be_sent, filled_here, prepare_other
from rlcollect.collectors.gather import Made
from rlcollect.collectors.growing import Growing
from rlcollect.collectors.multi import MultiAsyncCollector, MultiSyncCollector
from rlcollect.collectors.opened import in_turn
from rlcollect.collectors.ways import AsReady, Together, Way
from rlcollect.errors import OptionError
from rlcollect.memory.replay.buffer import ReplayBuffer
from rlcollect.memory.shared import Groups
from rlcollect.options import How, Remotes, Sink, Stacking, Staleness, Sync, What, Where, Workers
from rlcollect.processes.crossing import opened
from rlcollect.stats import Stats
from rlcollect.weights.objects import RayWeightSyncScheme
from rlcollect.weights.scheme import WeightSyncScheme
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import AttachRemoteBuffer, AttachSlots, Build, Execute
from rlcollect.workers.filling import kept_leaves
from rlcollect.workers.lasting import LastingPool
from rlcollect.workers.models import POLICY

__all__ = ["RayCollector"]

KINDS = {"single": None, "sync": MultiSyncCollector, "async": MultiAsyncCollector}


class RayCollector(Growing):
    """Runs a policy in environments on a Ray cluster.

    One option says whether batches are made of a rollout of each remote, as a `MultiSyncCollector` makes them
    (`sync=True`), or of the first that is ready, as a `MultiAsyncCollector` does; all else is as there::

        with RayCollector(
            ["CartPole-v1"] * 8, policy, frames_per_batch=2048, total_frames=1_000_000, num_envs=16, sync=True
        ) as collector:
            for batch in collector:  # TensorDict, batch_size [8, 16, 16]
                train(batch)
                collector.update_policy_weights_()

    Each remote is an actor with its own environments and a copy of the policy. A rollout goes once through Ray's object
    store, and is then the user's own; weights are put there once for all.

    Args:
        create_env_fn: a sequence of what a `Collector` takes but for instances, one a remote; or one such, with
            `num_collectors=`.
        policy: see `Collector`.
        **options: as below; each is declared in `rlcollect.options`.

    Raises:
        ImportError: Ray is not installed.
        OptionError: remotes ask for more than the cluster has.
        What a `MultiSyncCollector` raises.
    """

    option_kinds: ClassVar[tuple[type, ...]] = (
        *(What, Where, How, Sink, Sync, Workers),
        *(Remotes, Stacking, Staleness),
    )
    _usual_scheme: ClassVar[type[WeightSyncScheme]] = RayWeightSyncScheme
    _lie_apart = True

    def __init__(self, create_env_fn: Any, policy: Any = None, **options: Any) -> None:
        self._since: Counter[int] = Counter()  # batches that each has delivered since it was sent weights
        self._sent: dict[int, int] = {}  # the version of those
        super().__init__(create_env_fn, policy, **options)

    @property
    def _ahead(self) -> int:  # type: ignore[override]
        return self._remotes.max_in_flight

    def _chosen_way(self) -> Way:
        sync, stacking, staleness = self._remotes.sync, self._options[Stacking], self._options[Staleness]
        for is_off, options, name in ((sync, staleness, "sync=True"), (not sync, stacking, "sync=False")):
            if is_off and options != type(options)():
                raise OptionError(f"{_changed(options)} does not go with {name}.")
        if sync:
            return Together(stacking)
        return AsReady(staleness, counts_versions=POLICY in self._schemes.moving)

    def _held_kind(self) -> Any:
        given = self._workers.collector_class
        if isinstance(given, str):
            if given not in KINDS:
                raise OptionError(f"collector_class must be one of {', '.join(map(repr, KINDS))} or a class.")
            return KINDS[given]
        return given

    def _held(self, worker: int, workers: int) -> dict[str, Any]:
        remotes = self._remotes
        given = self._own_kwargs[worker] if self._own_kwargs else remotes.kwargs_of(worker, workers)
        if remotes.num_workers_per_collector > 1 or self._kind in (MultiSyncCollector, MultiAsyncCollector):
            given.setdefault("num_workers", remotes.num_workers_per_collector)
        return given

    def _check_hosted(self) -> None:
        super()._check_hosted()
        remotes = self._remotes
        if self._kind is None and (remotes.collector_kwargs or remotes.num_workers_per_collector > 1):
            name = "collector_kwargs" if remotes.collector_kwargs else "num_workers_per_collector"
            raise OptionError(
                f"{name}={getattr(remotes, name)!r} is for the collectors that remotes hold; it needs collector_class= "
                '("sync", "async" or a class). Options of single ones are given to RayCollector itself.'
            )

    def _pool(self, builds: Sequence[Build]) -> LastingPool:
        with needed("RayCollector"):
            from rlcollect.cluster.connection import Connection, check_demand, end_ray
            from rlcollect.workers.remote import start_actors
        configs = self._remotes.configs(len(builds))
        connection = Connection(self._remotes.ray_init_config or {})
        self._end_ray: Callable[[], None] = end_ray
        self._ending.callback(connection.close)
        self._check_room = check_demand
        check_demand(configs)
        self._actors = start_actors(configs, self._workers.num_sub_threads)
        return LastingPool(self._actors)

    def _check_schemes(self) -> None:
        carrier = self._schemes.carrier
        if carrier is not None and carrier.is_seen_midway:
            raise OptionError(
                f"{carrier!r} needs workers of this machine; use a RayWeightSyncScheme, or a "
                "MultiProcessWeightSyncScheme."
            )

    # --- weights, remote by remote ---

    def _go_apart(self) -> None:
        super()._go_apart()
        if self._remotes.max_weight_update_interval != -1:
            raise unwhole("max_weight_update_interval=")

    def _note_delivered(self, made: Made) -> None:
        for remote in range(self.num_workers) if made.worker is None else [made.worker]:  # whole episodes are of many
            if not self._has_seen_newest(remote):
                self._sent[remote], self._since[remote] = self._updates.sent_to(remote), 0
            self._since[remote] += 1

    def _has_seen_newest(self, remote: int) -> bool:
        """Whether it was sent nothing since batches of it are counted."""
        return self._sent.get(remote) == self._updates.sent_to(remote)

    def _before_batch(self) -> None:
        interval = self._remotes.max_weight_update_interval
        if self._remotes.sync:
            super()._before_batch()
            return
        is_each = self._workers.update_at_each_batch
        enough = 1 if is_each else interval
        due = [each for each, count in self._since.items() if 0 < enough <= count and self._has_seen_newest(each)]
        if due and not (self._rollouts.kept or self._supply.kept):
            self.update_policy_weights_(worker_ids=None if self._gather.refuses_worker_ids else due)
            for remote in due:
                self._since[remote] = 0

    # --- remotes ---

    @property
    def remote_collectors(self) -> list[Any]:
        """The actors' handles, in order. They are the collector's: what it does not ask them is not to be asked."""
        actors: list[Any] = self._actors.actors
        return actors

    def local_policy(self) -> Any:
        """The policy here, whose weights are sent."""
        return self.policy

    def stop_remote_collectors(self) -> None:
        """Ends all remotes. The collector then makes no more frames; what it says of them stays."""
        self.shutdown()

    @in_turn
    def cascade_execute(self, attr_path: str, /, *args: Any, worker_ids: Any = None, **kwargs: Any) -> list[Any]:
        """Uses what a path names, of the collectors that remotes hold (`collector_class=`).

        Args:
            attr_path: from the collector on: `"worker_idx"`, `"map_fn"`, `"some_list[0].method"`.
            *args: for what stands there, if it can be called.
            worker_ids: of which remotes; None: all.
            **kwargs: the same.

        Returns:
            What it gave, one a remote.

        Raises:
            OptionError: remotes hold no collectors; or the path leads nowhere.
        """
        self._check_open()
        chosen = worker_numbers(worker_ids, [torch.device(facts.policy_device) for facts in self._facts])
        remotes = range(self.num_workers) if chosen is None else chosen
        return [*map(opened, self._asked({remote: Execute(attr_path, args, kwargs) for remote in remotes}))]

    def stats(self) -> Stats:
        """See `BaseCollector`; with what is in Ray's object store for this collector."""
        waiting = [arrival.beside for arrival in self._crew.arrived if arrival.beside is not None]
        nbytes = self._actors.nbytes + sum(data.nbytes for data in waiting) + self._posting.nbytes
        return replace(super().stats(), object_store_bytes=nbytes)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]], strict: bool = True) -> None:
        """See `BaseCollector`. A list with one state, as TorchRL's collector takes it, is that state.

        Raises:
            OptionError: a list of several: the state of all remotes is one. And what `BaseCollector` raises.
        """
        if not isinstance(state, Mapping):
            if len(state) != 1:
                raise OptionError(f"load_state_dict takes one state, of all remotes; {len(state)} came.")
            (state,) = state
        super().load_state_dict(state, strict)

    def shutdown(self, timeout: float | None = None, *, shutdown_ray: bool = False) -> None:
        """Ends the remotes, and Ray, if it was started here and nothing else of this program uses it.

        Args:
            timeout: seconds that remotes have to be gone; None: three.
            shutdown_ray: whether to shut Ray down in any case, whoever else uses it.

        Raises:
            See `Opened.shutdown`.
        """
        if timeout is not None:
            self._actors.patience = timeout
        try:
            super().shutdown()
        finally:
            if shutdown_ray:
                self._end_ray()

    # --- where rollouts lie ---

    def _slots(
        self,
        crew: Crew,
        facts: Sequence[Facts],
        *,
        groups: int,
        together: bool,  # noqa: ARG002
        most: int = 1,
    ) -> Groups | None:
        plan = self._plan(facts, groups=max(1, groups // len(facts)), members=1)  # each has its own
        if plan is None:
            return None
        for worker in range(len(facts)):
            self._attach(crew, worker, AttachSlots(plan, 0))
        nowhere = np.empty(0, np.uint8)
        told = self._told_device(len(facts))
        return Groups(plan, nowhere, reuse=self._sink.use_buffers, device=told, most=most)

    def _filled(self, crew: Crew, facts: Sequence[Facts]) -> Filling | None:
        sink, buffer = self._sink, self._sink.replay_buffer
        if buffer is not None and not isinstance(buffer, ReplayBuffer):
            prepare_other(sink, facts)
        self._fills_there = can_be_sent(sink, facts, self._delivery_devices(len(facts)))
        if not self._fills_there:
            return filled_here(sink, facts[0].num_lanes, len(facts), self._ending.callback)
        own = facts[0]
        claim = buffer.claim(kept_leaves(own.leaves or ()), own.lead, own.num_lanes, len(facts))
        self._ending.callback(claim.let_go)
        for worker, number in enumerate(claim.writers):
            attach = AttachRemoteBuffer(number, claim.told, by_step=not sink.extend_buffer)
            self._attach(crew, worker, attach, claim.actor)
        return ByRemotes(claim)


def _changed(options: Any) -> str:
    """The first option that is not as it is by itself, as the user wrote it."""
    usual = vars(type(options)())
    return next(f"{name}={value!r}" for name, value in vars(options).items() if value != usual[name])
