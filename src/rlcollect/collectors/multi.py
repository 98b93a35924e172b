"""Collection in worker processes: synchronous, where a batch is made of a rollout of each, and asynchronous."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch

from rlcollect.collectors.as_ready import AHEAD, FirstReady, Quorum
from rlcollect.collectors.base import BaseCollector, Started, lane_indices, worker_numbers
from rlcollect.collectors.crew import Crew
from rlcollect.collectors.gather import Gather
from rlcollect.collectors.posting import Posting
from rlcollect.collectors.together import AllOf
from rlcollect.devices import CPU
from rlcollect.envs.make import is_sequence, space_difference
from rlcollect.envs.open import is_environment
from rlcollect.errors import OptionError, SpaceError, WorkerDied
from rlcollect.memory.shared import Groups, SlotPlan
from rlcollect.options import How, Sink, Stacking, What, Where, Workers, option_fields
from rlcollect.processes.arena import Arena
from rlcollect.processes.channel import Held
from rlcollect.processes.launch import default_method
from rlcollect.rollout.policy.intake import module_of
from rlcollect.stats import Threads
from rlcollect.workers.interruptor import Interruptor
from rlcollect.workers.lasting import LastingPool
from rlcollect.workers.messages import AttachInterruptor, AttachSlots, Build, Command, Facts
from rlcollect.workers.process import packed_builds, start_pool
from rlcollect.workers.revival import Attachment, Revival

__all__ = ["AsyncCollector", "MultiAsyncCollector", "MultiSyncCollector"]

START_HINT = "Allow more time (start_timeout=), or look at what it does there."
ADVICE_OF_RESTARTS = "Look at its standard error for what native code wrote."
NOT_HOSTED = frozenset(  # options that a hosted collector does not get: they are the pool's, or the worker's
    [
        *("frames_per_batch", "total_frames", "storing_device", "device"),
        *("policy_factory", "pre_collect_hook", "post_collect_hook"),
    ]
)
CLOSING = 1.0  # seconds that environments have to close before their processes are ended


class _Processes(BaseCollector):
    """What all kinds with worker processes are."""

    option_kinds: ClassVar[tuple[type, ...]] = (What, Where, How, Sink, Workers)
    _rests = False  # whether workers wait between two batches

    def _start(self, create_env_fn: Any, policy: Any) -> Started:
        options: Workers = self._options[Workers]
        self._workers = options
        self._check_hosted()
        sources = self._sources(create_env_fn)
        builds = self._builds(sources, policy)
        packed = packed_builds(builds)
        method = options.start_method or default_method()
        advice = {"advice": ADVICE_OF_RESTARTS} if options.restarts else {}
        pool = LastingPool(start_pool(len(sources), method, options.num_sub_threads, **advice))
        crew = Crew(pool, options.timeout, is_stopped=self._is_stopped)
        self._attachments: dict[int, list[Attachment]] = {}
        self._memory = ExitStack()  # that is shared
        self._revival: Revival | None = None
        ending = ExitStack()  # what is begun last is ended first
        ending.callback(self._memory.close)
        ending.callback(pool.shutdown)
        ending.callback(_dismiss, crew, os.getpid())
        try:
            facts = crew.ask(dict(enumerate(packed)), timeout=options.start_timeout, hint=START_HINT)
            _check_alike(facts)
            self._attach_interruptor(crew)
            gather = self._gathered(crew, facts)
            ending.callback(gather.let_go)
            self._posting = Posting(crew, facts, policy)
            ending.callback(self._posting.let_go)
            if options.restarts:
                self._revival = self._revived(packed, facts)
                pool.last_by(self._revival, facts)
                crew.tally.restarts, crew.tally.dropped = pool.restarts, pool.dropped
            threads = self._threads(facts)
            ending.callback(_restore_threads, threads.main, torch.get_num_threads())
            torch.set_num_threads(threads.main)
        except BaseException:
            ending.close()
            raise
        return Started(
            crew=crew,
            facts=facts,
            gather=gather,
            share=self._share(len(facts)),
            devices=self._delivery_devices(len(facts)),
            close=ending.close,
            threads=threads,
        )

    def _revived(self, builds: Sequence[Build], facts: Sequence[Facts]) -> Revival:
        """How workers that fail are made anew."""
        options, posting = self._workers, self._posting

        def attachments(worker: int) -> list[Attachment]:
            return [*self._attachments.get(worker, ()), posting.attachment(worker)]

        def check(worker: int, other: Facts) -> None:
            _check_like(facts[0], worker, other)

        return Revival(
            builds,
            limit=options.max_restarts,
            worker_timeout=options.worker_timeout,
            start_timeout=options.start_timeout,
            attachments=attachments,
            check=check,
        )

    def _attach(self, crew: Crew, worker: int, command: Command, fd: int) -> None:
        """Has a worker take a piece of shared memory; whoever comes in its place gets it too."""
        crew.ask({worker: command}, descriptors=[fd])
        self._attachments.setdefault(worker, []).append((command, fd))

    def _check_hosted(self) -> None:
        if self._workers.collector_class is None:
            return
        for name, given in (
            ("interruptor", self._how.interruptor is not None),
            ("preemptive_threshold", self._pre_empts()),
        ):
            if given:
                raise OptionError(f"{name} does not go with collector_class=: what it holds cannot be stopped midway.")

    @property
    def _is_stopped(self) -> Callable[[], bool] | None:
        """What is to be asked here: an interruptor that workers cannot see."""
        interruptor = self._how.interruptor
        return None if interruptor is None or isinstance(interruptor, Interruptor) else interruptor.collection_stopped

    def _attach_interruptor(self, crew: Crew) -> None:
        if isinstance(self._how.interruptor, Interruptor):
            shared = self._how.interruptor.shared
            for worker in range(len(crew.pool)):
                self._attach(crew, worker, AttachInterruptor(shared.nbytes), shared.fd)

    # --- what differs from kind to kind ---

    def _pre_empts(self) -> bool:
        """Whether workers may be told to end a rollout early."""
        return False

    def _needs_recorded(self) -> tuple[str, ...]:
        """Optional keys that batches of this kind need."""
        return ()

    def _sources(self, create_env_fn: Any) -> Sequence[Any]:
        """What each worker makes its environments of."""
        if is_sequence(create_env_fn):
            sources = list(create_env_fn)
            if self._workers.num_workers not in (None, len(sources)):
                raise OptionError(
                    f"create_env_fn is a sequence of {len(sources)}, one worker each, and num_workers="
                    f"{self._workers.num_workers} was given too. Leave it out, or pass one maker."
                )
        else:
            sources = [create_env_fn] * (self._workers.num_workers or 1)
        if not sources:
            raise OptionError("create_env_fn is an empty sequence; it needs one maker a worker.")
        for worker, source in enumerate(sources):
            _check_maker(worker, source)
        return sources

    def _share(self, workers: int) -> int:
        """How many workers make a batch together."""
        raise NotImplementedError

    def _gathered(self, crew: Crew, facts: Sequence[Facts]) -> Gather:
        """How rollouts become batches; with the memory they lie in."""
        raise NotImplementedError

    # --- starting ---

    _kwargs_by_worker = True

    def _builds(self, sources: Sequence[Any], policy: Any) -> list[Build]:
        count, sent = len(sources), dict[Any, Any]()
        builds = []
        for worker, (source, where) in enumerate(zip(sources, self._wheres(count), strict=True)):
            device = where.placement.policy
            if device not in sent:
                sent[device] = _sent_to(policy, device)
            builds.append(self._build(source, sent[device], where, worker, count))
        return builds

    def _wheres(self, workers: int) -> list[Where]:
        own_kwargs = self._kwargs_by_worker
        return [self._where.of_worker(worker, workers, own_kwargs=own_kwargs) for worker in range(workers)]

    def _build(self, source: Any, policy: Any, where: Where, worker: int, workers: int) -> Build:
        kind = self._workers.collector_class
        return Build(
            source,
            policy,
            replace(self._what, record=(*self._what.record, *self._needs_recorded())),
            replace(where, storing_device=None, device=None, policy_device=where.policy_device or where.device),
            replace(self._how.of_worker(worker, workers), interruptor=None),
            reuse=self._sink.use_buffers,
            same=False,
            worker=worker,
            workers=workers,
            share=self._share(workers),
            seed=torch.initial_seed(),
            kind=kind,
            hosted=None if kind is None else self._hosted_options(where, worker, workers),
            keeps=self._workers.restarts,
            can_stop=self._pre_empts() or self._how.interruptor is not None,
        )

    def _hosted_options(self, where: Where, worker: int, workers: int) -> dict[str, Any]:
        """What a collector that a worker holds is made with."""
        given: dict[str, Any] = {}
        for options in (self._what, where, self._how):
            for name, field in option_fields([type(options)]).items():
                value = getattr(options, name)
                if name not in NOT_HOSTED and value != field.default and value != {}:
                    given[name] = value
        if (random := self._what.init_random_frames) is not None:
            given["init_random_frames"] = random // workers + (worker < random % workers)
        return given

    def _slots(
        self, crew: Crew, facts: Sequence[Facts], *, groups: int, together: bool, most: int = 1
    ) -> Groups | None:
        """Shared memory for rollouts, which workers write to from now on; None: they cross as they are."""
        leaves = facts[0].leaves
        if leaves is None:
            return None
        plan = SlotPlan(
            leaves,
            groups=groups,
            members=len(facts) if together else 1,
            lead=facts[0].lead,
            num_lanes=facts[0].num_lanes if facts[0].lead else None,
            steps=self._full_steps(facts),
        )
        arena = Arena(plan.nbytes)
        self._memory.callback(arena.let_go)
        told = CPU if {where.placement.storing for where in self._wheres(len(facts))} == {CPU} else None
        for worker in range(len(facts)):
            self._attach(crew, worker, AttachSlots(plan, worker if together else 0), arena.fd)
        return Groups(plan, arena.buffer, reuse=self._sink.use_buffers, device=told, most=most)

    def _full_steps(self, facts: Sequence[Facts]) -> int:
        """T of a full rollout."""
        return -(-self._what.frames_per_batch // (facts[0].num_lanes * self._share(len(facts))))

    def _full_frames(self, facts: Sequence[Facts]) -> int:
        """Frames of a full rollout of one worker."""
        return self._full_steps(facts) * facts[0].num_lanes

    def _delivery_devices(self, workers: int) -> list[torch.device | None]:
        wheres = self._wheres(workers)
        devices = [where.placement.storing for where in wheres]
        if self._share(workers) > 1 and len({*devices}) > 1:
            return [CPU] * workers
        return [None if device == CPU else device for device in devices]

    def _threads(self, facts: Sequence[Facts]) -> Threads:
        """How many threads there are to be here, and are in the workers."""
        workers = tuple(self._workers.num_sub_threads + each.processes for each in facts)
        there = torch.get_num_threads()
        here = there if self._rests else max(1, there - sum(workers))
        return Threads(self._workers.num_threads or here, workers)

    # --- talking to it ---

    def update_policy_weights_(self, policy_or_weights: Any = None, *, worker_ids: Any = None) -> int:
        """Publishes new weights: workers take them, whole, when they begin their next rollout. Waits for nobody.

        Parameters and buffers are copied at once; what the learner does to them afterwards is not seen. Buffers that
        the policy itself changes while it acts stay each worker's own.

        Args:
            policy_or_weights: a module, a TensorDict of parameters (nested or flat) or a state dict; None: the policy
                that the collector was made with.
            worker_ids: for whom: numbers of workers. None: for all.

        Returns:
            The new version, which the frames that these weights make carry as their `policy_version`.

        Raises:
            PolicyError: they do not fit; names the first difference. Nothing was published.
            OptionError: no such worker.
        """
        self._check_open()
        workers = worker_numbers(worker_ids, self.num_workers)
        with _DeathCloses(self), Held():
            self._posting.publish(policy_or_weights, self._version + 1, workers)
            self._version += 1
        return self._version

    def _before_batch(self) -> None:
        is_due = self._rests or self._batches > 0
        if self._workers.update_at_each_batch and is_due and not self._pending and self._is_between:
            self.update_policy_weights_()

    @property
    def _is_between(self) -> bool:
        """Whether no batch is being waited for."""
        return True

    def reset(
        self,
        reset_idx: Any = None,
        *,
        seed: int | Sequence[int] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a new episode now in all lanes of some workers, or of all: a CUT in their data.

        What was made before and is not delivered yet comes first.

        Args:
            reset_idx: one bool a worker; None: all.
            seed: for the workers' lanes its children; or a list of one for each of these lanes.
            options: for the environments' `reset`, in the place of `reset_options`.

        Raises:
            OptionError: another number of bools, or of seeds.
        """
        self._check_open()
        count = self.num_workers
        chosen = [True] * count if reset_idx is None else np.atleast_1d(np.asarray(reset_idx)).tolist()
        if len(chosen) != count or not all(isinstance(each, bool) for each in chosen):
            raise OptionError(f"reset takes one bool for each of the {count} workers, not {reset_idx!r}.")
        lanes = {worker: range(self.num_envs) for worker, is_chosen in enumerate(chosen) if is_chosen}
        self._reset_lanes(lanes, seed, options)

    def _load_weights(self, weights: Mapping[str, Any], *, strict: bool) -> None:
        module = module_of(self.policy)
        assert module is not None
        module.load_state_dict(dict(weights), strict=strict)

    def _state_of(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        prefixes = {} if self._revival is None else {"prefixes": self._revival.prefixes}
        return {**super()._state_of(states), **prefixes}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """See `BaseCollector`. Workers that come in the place of others get ids that none had before the state."""
        super().load_state_dict(state, strict)
        if self._revival is not None:
            if self._how.policy_factory is not None:  # each worker's weights are its own, and of the state
                self._posting.begin_anew()
            self._revival.prefixes = max(self._revival.prefixes, state.get("prefixes", 0))

    def _publish_loaded(self) -> None:
        self._posting.publish(None, self._version, None)


class MultiSyncCollector(_Processes):
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

    option_kinds = (What, Where, How, Sink, Workers, Stacking)
    _rests = True

    def _share(self, workers: int) -> int:
        return workers

    @property
    def _stacking(self) -> Stacking:
        stacking: Stacking = self._options[Stacking]
        return stacking

    @property
    def _goes_on(self) -> bool:
        return self._stacking.stragglers == "continue"

    def _pre_empts(self) -> bool:
        return self._stacking.preemptive_threshold is not None and not self._goes_on

    def _needs_recorded(self) -> tuple[str, ...]:
        if self._goes_on:
            return ("worker",)
        return ("mask",) if self._pre_empts() or self._how.interruptor is not None else ()

    @property
    def _is_between(self) -> bool:
        assert isinstance(self._gather, AllOf | Quorum)
        return self._gather.is_idle

    def _gathered(self, crew: Crew, facts: Sequence[Facts]) -> Gather:
        stacking = self._stacking
        dim, dims = None, len(facts[0].lead) + 1
        if stacking.cat_results != "stack":
            dim = stacking.cat_results + dims if stacking.cat_results < 0 else stacking.cat_results
            if not 0 <= dim < dims:
                raise OptionError(
                    f"cat_results={stacking.cat_results}: a worker's batches have {dims} dimension(s), time last."
                )
        form: dict[str, Any] = {"full": self._full_frames(facts), "dim": dim, "same": self._sink.return_same_td}
        quorum = stacking.preemptive_threshold or 1.0
        if self._goes_on:
            groups = self._slots(crew, facts, groups=AHEAD * len(facts), together=False, most=len(facts))
            return Quorum(crew, facts, groups, quorum=quorum, **form)
        groups = self._slots(crew, facts, groups=1, together=True)
        return AllOf(crew, facts, groups, quorum=quorum, may_stop=self._how.interruptor is not None, **form)


class MultiAsyncCollector(_Processes):
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

    def _share(self, workers: int) -> int:  # noqa: ARG002
        return 1

    def _gathered(self, crew: Crew, facts: Sequence[Facts]) -> Gather:
        groups = self._slots(crew, facts, groups=AHEAD * len(facts), together=False)
        return FirstReady(crew, facts, groups, full=self._full_frames(facts), same=self._sink.return_same_td)


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
            _check_maker(0, source)
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


class _DeathCloses:
    """What goes wrong with workers closes the collector; a refused argument does not."""

    def __init__(self, collector: BaseCollector) -> None:
        self._close: Callable[[], None] = collector.shutdown

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, WorkerDied):
            self._close()


def _dismiss(crew: Crew, owner: int) -> None:
    if os.getpid() == owner:  # else this is a copy, in a process that was forked from the program
        crew.dismiss(CLOSING)


def _restore_threads(here: int, before: int) -> None:
    if torch.get_num_threads() == here:  # else somebody else has a say by now
        torch.set_num_threads(before)


def _check_maker(worker: int, source: Any) -> None:
    if is_environment(source):
        raise OptionError(
            f"create_env_fn has an environment that is made already for worker {worker}: {source!r}. It lives in this "
            "process; pass what makes it (lambda: ..., or its id), to be called in the worker's."
        )


def _check_alike(facts: Sequence[Facts]) -> None:
    """Batches of all workers have one form."""
    for worker, other in enumerate(facts):
        _check_like(facts[0], worker, other)


def _check_like(first: Facts, worker: int, other: Facts) -> None:
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


def _sent_to(policy: Any, device: torch.device | None) -> Any:
    """The policy as it crosses: on the host, where it is not to compute on the device that it is on."""
    module = module_of(policy)
    tensors = [] if module is None else [*module.parameters(), *module.buffers()]
    foreign = [tensor for tensor in tensors if tensor.device.type not in ("cpu", "meta")]
    if not foreign or (foreign[0].device.type == "cuda" and device is None):
        return policy
    copied = copy.deepcopy(policy)
    made = module_of(copied)
    assert made is not None
    made.to(CPU)
    return copied
