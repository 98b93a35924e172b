"""Collectors whose workers are processes of this machine: rollouts and weights lie in memory that all of them share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

from rlcollect.collectors.apart import Apart
from rlcollect.collectors.crew import Crew
from rlcollect.collectors.filling import (
    ByWorkers,
    Filling,
    are_written_there,
    check_buffer,
    filled_here,
    prepare_other,
)
from rlcollect.errors import OptionError
from rlcollect.memory.replay.buffer import ReplayBuffer
from rlcollect.memory.shared import Groups
from rlcollect.options import How, Processes, Sink, Sync, What, Where, Workers
from rlcollect.processes.arena import Arena
from rlcollect.processes.channel import Held
from rlcollect.processes.launch import default_method
from rlcollect.workers.answers import Facts
from rlcollect.workers.commands import AttachBuffer, AttachInterruptor, AttachSlots, Build
from rlcollect.workers.filling import kept_leaves
from rlcollect.workers.interruptor import Interruptor
from rlcollect.workers.lasting import LastingPool
from rlcollect.workers.process import start_pool

__all__ = ["InProcesses"]

ADVICE_OF_RESTARTS = "Look at its standard error for what native code wrote."


class InProcesses(Apart):
    """What all kinds with worker processes are."""

    option_kinds: ClassVar[tuple[type, ...]] = (What, Where, How, Sink, Sync, Workers, Processes)

    @property
    def _processes(self) -> Processes:
        processes: Processes = self._options[Processes]
        return processes

    @property
    def _by_step(self) -> bool:  # type: ignore[override]
        return self._processes.weights_update == "step"

    def _pool(self, builds: Sequence[Build]) -> LastingPool:
        method = self._processes.start_method or default_method()
        advice = {"advice": ADVICE_OF_RESTARTS} if self._workers.restarts else {}
        return LastingPool(start_pool(len(builds), method, self._workers.num_sub_threads, **advice))

    def _check_schemes(self) -> None:
        carrier = self._schemes.carrier
        if self._by_step and carrier is not None and not carrier.is_seen_midway:
            raise OptionError(
                f'weights_update="step" needs weights in shared memory (SharedMemWeightSyncScheme); {carrier!r} brings '
                "them between two rollouts."
            )

    @property
    def _is_stopped(self) -> Callable[[], bool] | None:
        return None if isinstance(self._how.interruptor, Interruptor) else super()._is_stopped

    def _attach_interruptor(self, crew: Crew) -> None:
        if isinstance(self._how.interruptor, Interruptor):
            shared = self._how.interruptor.shared
            for worker in range(len(crew.pool)):
                self._attach(crew, worker, AttachInterruptor(shared.nbytes), shared.fd)

    def _slots(
        self, crew: Crew, facts: Sequence[Facts], *, groups: int, together: bool, most: int = 1
    ) -> Groups | None:
        plan = self._plan(facts, groups=groups, members=len(facts) if together else 1)
        if plan is None:
            return None
        with Held():
            arena = Arena(plan.nbytes)
            self._memory.callback(arena.let_go)
        for worker in range(len(facts)):
            self._attach(crew, worker, AttachSlots(plan, worker if together else 0), arena.fd)
        told = self._told_device(len(facts))
        return Groups(plan, arena.buffer, reuse=self._sink.use_buffers, device=told, most=most)

    def _check_buffer(self) -> None:
        check_buffer(self._sink)

    def _filled(self, crew: Crew, facts: Sequence[Facts]) -> Filling | None:
        """How frames get into the buffer, if there is one."""
        sink, lanes = self._sink, facts[0].num_lanes
        buffer = sink.replay_buffer
        self._fills_there = are_written_there(sink, facts, self._delivery_devices(len(facts)))
        if not self._fills_there:
            if buffer is not None and not isinstance(buffer, ReplayBuffer):
                prepare_other(sink, facts)
            return filled_here(sink, lanes, len(facts), self._ending.callback)
        claim = buffer.claim(kept_leaves(facts[0].leaves or ()), lanes * len(facts))
        self._ending.callback(claim.let_go)
        for worker in range(len(facts)):
            share, attached = claim.share(worker * lanes, lanes)
            self._attach(crew, worker, AttachBuffer(share, by_step=not sink.extend_buffer), *attached)
        return ByWorkers(claim.writer(0, claim.lanes))
