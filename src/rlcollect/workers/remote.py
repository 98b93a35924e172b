"""A worker in an actor of a Ray cluster: as one in a process, but that its rollouts lie in its own memory.

Each travels as one piece of bytes, beside the word of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlcollect.cluster.pool import ActorPool
from rlcollect.cluster.service import Line
from rlcollect.memory.flat import flattened
from rlcollect.memory.shared import SlotPlan
from rlcollect.memory.slots import Block
from rlcollect.processes.board import Row
from rlcollect.processes.messages import Beside
from rlcollect.workers.answers import Collected
from rlcollect.workers.commands import AttachRemoteBuffer, AttachSlots, Collect, Command
from rlcollect.workers.process import Handling
from rlcollect.workers.sending import Sending
from rlcollect.workers.worker import STAGES, Worker

__all__ = ["start_actors"]

Array = np.ndarray[Any, Any]


def start_actors(configs: Sequence[Mapping[str, Any]], sub_threads: int) -> ActorPool:
    """Actors for so many workers, all created at once.

    Args:
        configs: of each what `ray.remote` takes.
        sub_threads: that torch computes with in each.
    """
    return ActorPool(_Maker(sub_threads), configs, stages=STAGES)


class _Maker:
    """Makes what handles the commands of one worker; crosses to its actor."""

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def __call__(self, worker: int, row: Row) -> _Remote:
        return _Remote(worker, row, self._threads)


class _Remote(Handling):
    """Handles the commands of a worker that has this actor for itself."""

    def __init__(self, number: int, row: Row, threads: int) -> None:
        super().__init__(number, row, threads)
        self._memory: tuple[SlotPlan, Array] | None = None

    def handle(self, command: Command, attached: Sequence[Any]) -> Any:
        """The answer to a command."""
        if isinstance(command, Collect) and self._memory is not None:  # those of all remotes are numbered through
            command = replace(command, group=command.group % self._memory[0].groups)
        result = super().handle(command, attached)
        if not (isinstance(command, Collect) and isinstance(result, Collected)):
            return result
        if self._memory is not None:
            plan, memory = self._memory
            return Beside(result, plan.group(memory, command.group)[: plan.bytes_of(result.room)])
        if result.batch is None:
            return result
        flat, data = flattened(result.batch)
        return Beside(replace(result, batch=flat), data)

    def _handled(self, command: Command, attached: Sequence[Any]) -> Any:
        if not isinstance(command, AttachRemoteBuffer):
            return super()._handled(command, attached)
        worker = self._worker
        assert isinstance(worker, Worker)
        line = Line(attached[0], command.told)
        put = Sending(line, command.writer, worker.engine.leaves, worker.driver.num_lanes, by_step=command.by_step)
        return worker.attach_buffer(put, by_step=command.by_step)

    def _memory_for(self, command: AttachSlots, attached: Sequence[Any]) -> Array:  # noqa: ARG002
        """Where rollouts are to lie: here."""
        memory = Block(command.plan.nbytes).buffer
        self._memory = command.plan, memory
        return memory
