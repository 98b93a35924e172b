"""In which order whole episodes are delivered, so that short ones are not preferred."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice, zip_longest
from typing import Any, Protocol

from rlcollect.memory.episodes import Episode

__all__ = ["ByStart", "ByTurns", "Order"]


class Order(Protocol):
    """In which order episodes are delivered. None of them looks at how long an episode is."""

    def admit(self, episode: Episode) -> bool:
        """This one begins now; whether it is to be delivered."""

    def give_up(self, episode: Episode) -> None:
        """This one was admitted, and will not end."""

    def first(self, count: int) -> list[Episode]:
        """Those to be delivered next, in order; fewer, where not all of them have begun."""

    def take_out(self, count: int) -> None:
        """The first so many were delivered."""

    def __iter__(self) -> Iterator[Episode]:
        """All that were admitted, and not delivered."""

    def state_dict(self) -> dict[str, Any]:
        """What it goes by, beside the episodes."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, without an episode."""


class ByStart:
    """The one that began first comes first."""

    def __init__(self) -> None:
        self._queue = deque[Episode]()

    def admit(self, episode: Episode) -> bool:
        """See `Order`: all are."""
        self._queue.append(episode)
        return True

    def give_up(self, episode: Episode) -> None:
        """See `Order`."""
        self._queue.remove(episode)

    def first(self, count: int) -> list[Episode]:
        """See `Order`."""
        return list(islice(self._queue, count))

    def take_out(self, count: int) -> None:
        """See `Order`."""
        for _ in range(count):
            self._queue.popleft()

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._queue)

    def state_dict(self) -> dict[str, Any]:
        """See `Order`: nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:  # noqa: ARG002
        """See `Order`."""
        self._queue.clear()


class ByTurns:
    """Each lane in turn gives one.

    Args:
        lanes: how many there are.
        waiting: episodes of a lane that may wait for the others' turns; further ones are not delivered.
    """

    def __init__(self, lanes: int, waiting: int) -> None:
        self._turn = 0
        self._waiting = waiting
        self._queues = [deque[Episode]() for _ in range(lanes)]

    def admit(self, episode: Episode) -> bool:
        """See `Order`: unless too many of its lane wait."""
        queue = self._queues[episode.lane]
        if len(queue) >= self._waiting:
            return False
        queue.append(episode)
        return True

    def give_up(self, episode: Episode) -> None:
        """See `Order`."""
        self._queues[episode.lane].remove(episode)

    def first(self, count: int) -> list[Episode]:
        """See `Order`."""
        each = [islice(queue, share) for queue, share in self._shares(count)]
        return [episode for round_ in zip_longest(*each) for episode in round_ if episode is not None]

    def take_out(self, count: int) -> None:
        """See `Order`."""
        for queue, share in self._shares(count):
            for _ in range(share):
                queue.popleft()
        self._turn = (self._turn + count) % len(self._queues)

    def _shares(self, count: int) -> list[tuple[deque[Episode], int]]:
        """How many of so many each lane gives, in the order of turns."""
        lanes = len(self._queues)
        turns = [*self._queues[self._turn :], *self._queues[: self._turn]]
        return [(queue, (count - place + lanes - 1) // lanes) for place, queue in enumerate(turns[:count])]

    def __iter__(self) -> Iterator[Episode]:
        for queue in self._queues:
            yield from queue

    def state_dict(self) -> dict[str, Any]:
        """See `Order`: whose turn it is."""
        return {"turn": self._turn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `Order`."""
        self._turn = state.get("turn", 0)
        for queue in self._queues:
            queue.clear()
