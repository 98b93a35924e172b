"""What all collectors do whose workers are apart from the program: start them, tell them what to make, gather.

Where they are, and how rollouts come from there, is said by `processes` and `remote`.
"""

from __future__ import annotations

import abc
import functools
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from rlcollect.collectors.alike import check_alike, check_like
from rlcollect.collectors.as_ready import AHEAD
from rlcollect.collectors.base import BaseCollector
from rlcollect.collectors.crew import Crew
from rlcollect.collectors.filling import Filling, ids_in
from rlcollect.collectors.gather import Gather
from rlcollect.collectors.opened import Started
from rlcollect.collectors.posting import Posting
from rlcollect.collectors.sent import check_maker, hosted_options, sent_to
from rlcollect.collectors.ways import Form, Way
from rlcollect.devices import CPU
from rlcollect.envs.make import is_sequence
from rlcollect.errors import OptionError
from rlcollect.memory.shared import Groups, SlotPlan
from rlcollect.options import How, Sink, Sync, What, Where, Workers
from rlcollect.processes.channel import Held
from rlcollect.stats import Threads
from rlcollect.weights.naming import load_weights, module_of
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import Build, Command
from rlcollect.workers.lasting import LastingPool
from rlcollect.workers.process import packed_builds
from rlcollect.workers.revival import Attachment, Prefixes, Revival

__all__ = ["START_HINT", "Apart", "unwhole"]

START_HINT = "Allow more time (start_timeout=), or look at what it does there."
CLOSING = 1.0  # seconds that environments have to close before their workers are ended


class Apart(BaseCollector):
    """What all kinds are whose workers are not in the program's own process."""

    option_kinds: ClassVar[tuple[type, ...]] = (What, Where, How, Sink, Sync, Workers)
    _ahead: int = AHEAD  # rollouts that a worker holds at most
    _lie_apart: ClassVar[bool] = False  # whether each worker's rollouts lie in memory of its own

    def _start(self, create_env_fn: Any, policy: Any) -> Started:
        options: Workers = self._options[Workers]
        self._workers = options
        self._kind = self._held_kind()
        self._way = self._chosen_way()
        self._check_hosted()
        self._check_schemes()
        self._check_buffer()
        builds = self._builds(self._sources(create_env_fn), policy)
        packed = packed_builds(builds)
        self._attachments: dict[int, list[Attachment]] = {}
        self._fills_there = False  # whether workers write to the buffer
        self._revival: Revival | None = None
        self._prefixes = Prefixes(len(builds))
        self._memory = self._ending.enter_context(ExitStack())  # that is shared
        with Held():  # it has its owner before a Ctrl-C comes
            pool = self._pool(packed)
            self._ending.callback(pool.shutdown)
        crew = Crew(pool, options.timeout, is_stopped=self._is_stopped)
        self._ending.callback(crew.lose)  # rollouts that nobody will take keep memory
        self._ending.callback(_dismiss, crew, os.getpid())
        facts = crew.ask(dict(enumerate(packed)), timeout=options.start_timeout, hint=START_HINT)
        check_alike(facts)
        self._attach_interruptor(crew)
        filling = self._filled(crew, facts)
        gather = self._gathered(crew, facts)
        self._ending.callback(gather.let_go)
        self._posting = self._posted(crew, facts, policy)
        self._ending.callback(self._posting.let_go)
        if options.restarts:
            self._revival = self._revived(packed, facts)
            pool.last_by(self._revival, facts)
            crew.tally.restarts, crew.tally.dropped = pool.restarts, pool.dropped
        threads = self._threads(facts)
        self._ending.callback(_restore_threads, threads.main, torch.get_num_threads())
        torch.set_num_threads(threads.main)
        return Started(
            crew=crew,
            facts=facts,
            gather=gather,
            share=self._share(len(facts)),
            devices=self._delivery_devices(len(facts)),
            poster=self._posting,
            filling=filling,
            made_of=[(build.create_env_fn, build.where, build.how) for build in builds],
            threads=threads,
        )

    @abc.abstractmethod
    def _pool(self, builds: Sequence[Build]) -> LastingPool:
        """Workers for these, on their way."""

    def _posted(self, crew: Crew, facts: Sequence[Facts], policy: Any) -> Posting:
        """How weights get to them."""
        return Posting(
            crew,
            facts,
            policy,
            scheme=self._schemes.carrier,
            strategies=self._schemes.strategies,
            is_made_there=self._how.policy_factory is not None,
        )

    def _revived(self, builds: Sequence[Build], facts: Sequence[Facts]) -> Revival:
        """How workers that fail are made anew."""
        options, posting = self._workers, self._posting

        def attachments(worker: int) -> list[Attachment]:
            return [*self._attachments.get(worker, ()), *posting.attachments(worker)]

        def check(worker: int, other: Facts) -> None:
            check_like(facts[0], worker, other)
            posting.check_like(worker, other)

        return Revival(
            builds,
            limit=options.max_restarts,
            worker_timeout=options.worker_timeout,
            start_timeout=options.start_timeout,
            attachments=attachments,
            check=check,
            prefixes=self._prefixes,
        )

    def _attach(self, crew: Crew, worker: int, command: Command, *attached: Any) -> None:
        """Tells a worker, at the start, where it is to write to; whoever comes in its place is told too."""
        crew.ask({worker: command}, timeout=self._workers.start_timeout, attached=attached, hint=START_HINT)
        self._attachments.setdefault(worker, []).append((command, attached))

    def _check_buffer(self) -> None:
        """Whether frames can get from the workers to the buffer.

        Raises:
            OptionError: they cannot.
        """

    @abc.abstractmethod
    def _filled(self, crew: Crew, facts: Sequence[Facts]) -> Filling | None:
        """How frames get into the buffer, if there is one."""

    def _check_hosted(self) -> None:
        if self._kind is None:
            return
        for name, given in (
            ("interruptor", self._how.interruptor is not None),
            ("preemptive_threshold", self._way.may_pre_empt),
        ):
            if given:
                raise OptionError(f"{name} does not go with collector_class=: what it holds cannot be stopped midway.")
        if self._schemes.paths:
            raise OptionError(
                f"weight_sync_schemes has {self._schemes.paths[0]!r}; with collector_class= only the policy takes "
                "weights."
            )

    def _check_schemes(self) -> None:
        """Whether weights can come when they are wanted."""

    @property
    def _is_stopped(self) -> Callable[[], bool] | None:
        """What is to be asked here: an interruptor that workers cannot see."""
        return None if self._how.interruptor is None else self._how.interruptor.collection_stopped

    def _attach_interruptor(self, crew: Crew) -> None:
        """Has workers see the user's interruptor, where they can."""

    # --- what differs from kind to kind ---

    @abc.abstractmethod
    def _chosen_way(self) -> Way:
        """How rollouts become batches."""

    def _held_kind(self) -> Any:
        """The collectors that workers hold; None: they have engines."""
        return self._workers.collector_class

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
            check_maker(worker, source)
        return sources

    @property
    def batch_lead(self) -> tuple[int, ...]:
        """See `Opened`."""
        return self._way.lead(self._facts)

    def _share(self, workers: int) -> int:
        """How many workers make a batch together."""
        return self._way.share(workers)

    def _gathered(self, crew: Crew, facts: Sequence[Facts]) -> Gather:
        """How rollouts become batches; with the memory they lie in."""
        form = Form(
            full=self._full_frames(facts),
            same=self._sink.return_same_td,
            may_stop=self._how.interruptor is not None,
            ahead=self._ahead,
            lie_apart=self._lie_apart,
        )
        return self._way.gather(crew, facts, form, functools.partial(self._slots, crew, facts))

    # --- starting ---

    _kwargs_by_worker = True
    _by_step = False  # whether workers take weights between two steps too

    def _builds(self, sources: Sequence[Any], policy: Any) -> list[Build]:
        count, sent = len(sources), dict[Any, Any]()
        builds = []
        for worker, (source, where) in enumerate(zip(sources, self._wheres(count), strict=True)):
            device = where.placement.policy
            if device not in sent:
                sent[device] = sent_to(policy, device)
            builds.append(self._build(source, sent[device], where, worker, count))
        return builds

    def _wheres(self, workers: int) -> list[Where]:
        own_kwargs = self._kwargs_by_worker
        return [self._where.of_worker(worker, workers, own_kwargs=own_kwargs) for worker in range(workers)]

    def _build(self, source: Any, policy: Any, where: Where, worker: int, workers: int) -> Build:
        kind, may_stop = self._kind, self._how.interruptor is not None
        recorded = self._way.recorded(may_stop=may_stop)
        return Build(
            source,
            policy,
            replace(self._what, record=(*self._what.record, *recorded)),
            replace(where, storing_device=None, device=None, policy_device=where.policy_device or where.device),
            replace(self._how.of_worker(worker, workers), interruptor=None),
            reuse=self._sink.use_buffers,
            same=False,
            worker=worker,
            workers=workers,
            share=self._share(workers),
            seed=torch.initial_seed(),
            skipped=ids_in(self._sink.replay_buffer),
            kind=kind,
            hosted=None
            if kind is None
            else {**hosted_options(self._what, where, self._how, worker, workers), **self._held(worker, workers)},
            keeps=self._workers.restarts,
            can_stop=self._way.may_pre_empt or may_stop,
            receiver=None if self._schemes.carrier is None else self._schemes.carrier.receiver(),
            models=self._schemes.paths,
            by_step=self._by_step,
        )

    def _held(self, worker: int, workers: int) -> dict[str, Any]:  # noqa: ARG002
        """More options of the collector that a worker holds."""
        return {}

    @abc.abstractmethod
    def _slots(
        self, crew: Crew, facts: Sequence[Facts], *, groups: int, together: bool, most: int = 1
    ) -> Groups | None:
        """Memory for rollouts, which workers write to from now on; None: they cross as they are.

        Args:
            crew: the workers.
            facts: what they said of themselves.
            groups: rollouts that there is to be room for.
            together: whether those of all workers lie side by side.
            most: members of the largest batch that is made of several.
        """

    def _plan(self, facts: Sequence[Facts], *, groups: int, members: int) -> SlotPlan | None:
        """How that memory is divided; None: there is none."""
        leaves = facts[0].leaves
        if leaves is None or self._fills_there:
            return None
        return SlotPlan(
            leaves,
            groups=groups,
            members=members,
            lead=facts[0].lead,
            num_lanes=facts[0].num_lanes if facts[0].lead else None,
            steps=self._full_steps(facts),
        )

    def _told_device(self, workers: int) -> torch.device | None:
        """What batches say their device is."""
        return CPU if {where.placement.storing for where in self._wheres(workers)} == {CPU} else None

    def _full_steps(self, facts: Sequence[Facts]) -> int:
        """T of a full rollout."""
        return -(-self._what.frames_per_batch // (facts[0].num_lanes * self._share(len(facts))))

    def _full_frames(self, facts: Sequence[Facts]) -> int:
        """Frames of a full rollout of one worker."""
        return self._full_steps(facts) * facts[0].num_lanes

    def _delivery_devices(self, workers: int) -> list[torch.device | None]:
        wheres = self._wheres(workers)
        devices = [where.placement.storing for where in wheres]
        if (self._share(workers) > 1 or self._sink.trajs_per_batch) and len({*devices}) > 1:
            return [CPU] * workers
        return [None if device == CPU else device for device in devices]

    def _threads(self, facts: Sequence[Facts]) -> Threads:
        """How many threads there are to be here, and are in the workers."""
        workers = tuple(self._workers.num_sub_threads + each.processes for each in facts)
        there = torch.get_num_threads()
        here = there if self._way.rests else max(1, there - sum(workers))
        return Threads(self._workers.num_threads or here, workers)

    # --- talking to it ---

    def _go_apart(self) -> None:
        """See `Running`.

        Raises:
            OptionError: weights are to be published before each batch, whatever the program does to them meanwhile.
        """
        if self._workers.update_at_each_batch:
            raise unwhole("update_at_each_batch=True")

    def _before_batch(self) -> None:
        is_due = self._way.rests or self._batches > 0
        is_kept = bool(self._rollouts.kept or self._supply.kept)
        if self._workers.update_at_each_batch and is_due and not is_kept and self._is_between:
            self.update_policy_weights_()

    @property
    def _is_between(self) -> bool:
        """Whether no batch is being waited for."""
        return not self._way.rests or getattr(self._gather, "is_idle", True)

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
        load_weights(module, weights, strict=strict)

    def _state_of(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {**super()._state_of(states), "prefixes": self._prefixes.given}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True) -> None:
        """See `BaseCollector`. Workers that come later, or in the place of others, get ids that none had before it."""
        super().load_state_dict(state, strict)
        if self._how.policy_factory is not None:  # each worker's weights are its own, and of the state
            self._posting.forget_policy(self._updates.version)
        self._prefixes.skip(state.get("prefixes", 0))


def _dismiss(crew: Crew, owner: int) -> None:
    if os.getpid() == owner:  # else this is a copy, in a process that was forked from the program
        crew.dismiss(CLOSING)


def _restore_threads(here: int, before: int) -> None:
    if torch.get_num_threads() == here:  # else somebody else has a say by now
        torch.set_num_threads(before)


def unwhole(option: str) -> OptionError:
    """Why `start()` does not go with an option that publishes the policy by itself."""
    return OptionError(
        f"start() does not go with {option}: the policy would be published in the midst of a step of its optimiser. "
        "Call update_policy_weights_() where it is whole."
    )
