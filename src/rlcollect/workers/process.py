"""A worker in a process of its own: what was packed is unpacked, memory is attached; the rest is the worker's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from rlcollect.processes.arena import Arena
from rlcollect.processes.board import Row
from rlcollect.processes.crossing import Parcel, packed, unpacked
from rlcollect.processes.pool import ProcessPool
from rlcollect.workers.answers import Collected, Withdrawn
from rlcollect.workers.commands import (
    AttachBuffer,
    AttachInterruptor,
    AttachSlots,
    Build,
    Collect,
    Command,
    Execute,
    Run,
    SchemeMessage,
)
from rlcollect.workers.filling import Rings
from rlcollect.workers.hosted import HostedWorker
from rlcollect.workers.interruptor import Stops
from rlcollect.workers.keeping import Keeping
from rlcollect.workers.worker import STAGES, Worker

__all__ = ["Handling", "packed_builds", "start_pool"]

CALLED_THERE = ("policy_factory", "pre_collect_hook", "post_collect_hook")


def start_pool(workers: int, method: str, sub_threads: int, **options: Any) -> ProcessPool:
    """Processes for so many workers, all started at once.

    Args:
        workers: how many.
        method: how they are started.
        sub_threads: that torch computes with in each.
        **options: of `ProcessPool`.
    """
    make = _Maker(sub_threads)
    return ProcessPool(workers, make, method=method, stages=STAGES, name="rlcollect", preload=__name__, **options)


def packed_builds(builds: Sequence[Build]) -> list[Build]:
    """Commands whose parts are packed one by one, so that an error names the option; each thing once.

    Raises:
        OptionError: one cannot be sent to another process.
    """
    done: dict[int, bytes] = {}

    def once(value: Any, name: str) -> bytes | None:
        if value is not None and id(value) not in done:
            done[id(value)] = packed(value, name)
        return done.get(id(value))

    for build in builds:
        for options, names in ((build.what, ("reset_options",)), (build.how, CALLED_THERE)):
            for name in names:
                once(getattr(options, name), name)
    return [
        replace(
            build,
            create_env_fn=once(build.create_env_fn, "create_env_fn"),
            policy=once(build.policy, "policy"),
            receiver=once(build.receiver, "weight_sync_schemes"),
        )
        for build in builds
    ]


class _Maker:
    """Makes what handles the commands of one worker; crosses to its process."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __call__(self, worker: int, row: Row) -> Handling:
        return Handling(worker, row, self._threads)


class Handling:
    """Handles the commands of a worker that has this process for itself.

    Attributes:
        is_over: whether the process is to end: another is put in its place when a rollout fails.

    Args:
        number: of the worker.
        row: where it tells what it is doing.
        threads: for torch to compute with.
    """

    def __init__(self, number: int, row: Row, threads: int) -> None:
        self._number = number
        self._row = row
        self._worker: Worker | HostedWorker | None = None
        self._stops = Stops(row.is_to_stop, row.live)
        self._early: list[tuple[SchemeMessage, Sequence[Any]]] = []
        self.is_over = False
        self._ends_by_failure = False
        torch.set_num_threads(threads)
        row.enter("importing what it was sent")

    def handle(self, command: Command, attached: Sequence[Any]) -> Any:
        """The answer to a command."""
        try:
            return self._handled(command, attached)
        except BaseException:
            self.is_over = self._ends_by_failure and isinstance(command, Collect)
            raise
        finally:
            self._row.enter("waiting for a command")

    def _memory_for(self, command: AttachSlots, attached: Sequence[Any]) -> Any:
        """Where rollouts are to lie: shared memory that the program has given."""
        return Arena.attached(attached[0], command.plan.nbytes)

    def _handled(self, command: Command, attached: Sequence[Any]) -> Any:
        if isinstance(command, Build):
            self._row.enter("importing what it was sent")
            sent = {name: getattr(command, name) for name in ("create_env_fn", "policy", "receiver")}
            made: dict[str, Any] = {name: None if data is None else unpacked(data) for name, data in sent.items()}
            build = replace(command, **made)
            kind: Any = Worker if build.kind is None else HostedWorker
            self._worker = kind(
                build,
                self._row.enter,
                beat=self._row.beat,
                is_alone=True,
                stops=self._stops,
                keeping=Keeping(self._row),
            )
            self._ends_by_failure = build.keeps
            for early, attached in self._early:
                self._worker.taking.accept(early.content, attached)
            return self._worker.facts
        if isinstance(command, SchemeMessage) and self._worker is None:
            self._early.append((command, attached))  # from another thread, before this worker is built
            return None
        assert self._worker is not None
        if isinstance(command, AttachSlots):
            return self._worker.attach_slots(command, self._memory_for(command, attached))
        if isinstance(command, AttachBuffer):
            assert isinstance(self._worker, Worker)
            put = Rings(command.share.open(attached), self._worker.engine.leaves, self._worker.keeping)
            return self._worker.attach_buffer(put, by_step=command.by_step)
        if isinstance(command, SchemeMessage):
            return self._worker.taking.accept(command.content, attached)
        if isinstance(command, AttachInterruptor):
            return self._stops.attach(Arena.attached(attached[0], command.nbytes))
        result = self._worker.handle(command)
        if isinstance(command, Run | Execute):  # opened where somebody waits for it
            return Parcel.of(result)
        if isinstance(result, Collected):
            self._row.beat(result.report.steps)
        return result

    def withdraw(self, command: Command) -> Any:
        """The answer to one that is not to be done."""
        assert isinstance(command, Collect)
        return Withdrawn()

    def close(self) -> None:
        """Closes the environments."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()
