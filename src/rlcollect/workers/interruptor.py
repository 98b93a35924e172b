"""Who may stop a rollout under way: the user, by a word that processes share, and the program, by the number it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rlcollect.processes.arena import Arena

__all__ = ["Interruptor", "Stops"]

Array = np.ndarray[Any, Any]


class Interruptor:
    """Stops collection, in this process and in worker processes: from another thread, a hook, a signal handler.

    While it is stopped each rollout ends with the frame under way, so it has one frame of each lane at least. What was
    made is delivered, and the episodes go on with the next rollout::

        interruptor = Interruptor()
        collector = MultiSyncCollector(makers, policy, frames_per_batch=4096, interruptor=interruptor)
        threading.Timer(1.0, interruptor.stop_collection).start()
        batch = collector.next()  # within a second and one step
        interruptor.start_collection()

    It may serve several collectors. Copies of this process (`os.fork`) share it.
    """

    def __init__(self) -> None:
        self._arena = Arena(8)
        self._word = self._arena.buffer.view(np.int64).data

    def start_collection(self) -> None:
        """Lets rollouts run."""
        self._word[0] = 0

    def stop_collection(self) -> None:
        """Has rollouts end at their next frame, until they are let run again."""
        self._word[0] = 1

    def collection_stopped(self) -> bool:
        """Whether they are stopped."""
        return bool(self._word[0])

    @property
    def shared(self) -> Arena:
        """What it lies in."""
        return self._arena

    def __reduce__(self) -> Any:
        """Refuses to be pickled or copied: a copy would stop nothing.

        Raises:
            TypeError: always.
        """
        raise TypeError("An Interruptor cannot be pickled or copied: pass it to the collector as interruptor=.")


class Stops:
    """Whether a worker is to stop the rollout under way.

    Attributes:
        command: the number of what is under way.

    Args:
        is_to_stop: whether the program wants no more of what has this number.
        alive: called at each question: the worker gives a sign of life.
    """

    def __init__(self, is_to_stop: Callable[[int], bool], alive: Callable[[], None]) -> None:
        self.command = 0
        self._is_to_stop = is_to_stop
        self._alive = alive
        self._word = np.zeros(1, np.int64).data  # the user's; this one is never set

    def attach(self, buffer: Array) -> None:
        """The memory of the user's `Interruptor`."""
        self._word = buffer.view(np.int64)[:1].data

    def collection_stopped(self) -> bool:
        """Whether the rollout is to end with the frame that was made."""
        self._alive()
        return bool(self._word[0]) or self._is_to_stop(self.command)

    def start_collection(self) -> None:
        """Nothing: it is the program that says so."""

    def stop_collection(self) -> None:
        """Nothing: it is the program that says so."""
