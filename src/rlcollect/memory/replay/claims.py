"""Which rings of a buffer belong to somebody, and what that somebody writes to them by."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlcollect.errors import OptionError
from rlcollect.memory.replay.cursors import Cursors
from rlcollect.memory.replay.places import Opening, Place
from rlcollect.memory.replay.rows import Table
from rlcollect.memory.replay.writing import Pieces, Writer

__all__ = ["Claim", "Claims", "Share"]


class Claims:
    """Which rings belong to somebody."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def __bool__(self) -> bool:
        """Whether any does."""
        return bool(self._taken)

    def free(self, rings: int) -> list[int]:
        """Those of so many rings that belong to nobody."""
        return [ring for ring in range(rings) if ring not in self._taken]

    def take(self, lanes: int, rings: int) -> int:
        """The first of so many rings side by side, which are somebody's from now on.

        Raises:
            OptionError: there are not so many.
        """
        free = self.free(rings)
        for place in range(len(free) - lanes + 1):
            if free[place + lanes - 1] == free[place] + lanes - 1:
                self._taken |= {*range(free[place], free[place] + lanes)}
                return free[place]
        raise OptionError(
            f"{lanes} more lanes were to write to this buffer. It is divided among {rings}, of which "
            f"{len(self._taken)} are somebody's: make it with spare_lanes={lanes}, or more."
        )

    def let_go(self, first: int, lanes: int) -> None:
        """These rings are nobody's."""
        self._taken -= {*range(first, first + lanes)}


@dataclass(frozen=True)
class Share:
    """By what another process writes to some rings.

    Attributes:
        opening: opens the place where they are.
        first: the ring of its first lane.
        lanes: how many it has.
    """

    opening: Opening
    first: int
    lanes: int

    def open(self, descriptors: Sequence[int]) -> Writer:
        """What writes to them there."""
        place = self.opening.open(descriptors)
        return Writer(Cursors(place.words), Table(place.columns, place.positions), self.first, self.lanes)


class Claim:
    """Rings of somebody.

    Attributes:
        lanes: how many there are.

    Args:
        place: where they are.
        claims: what they are taken from.
        first: the first of them.
        lanes: how many.
        writer_of: what writes to some rings, in this process.
    """

    def __init__(
        self, place: Place, claims: Claims, first: int, lanes: int, writer_of: Callable[[int, int], Writer]
    ) -> None:
        self.lanes = lanes
        self._place = place
        self._claims = claims
        self._first = first
        self._writer_of = writer_of
        self._is_over = False

    def writer(self, lane: int, lanes: int) -> Writer:
        """What writes frames of some lanes, in this process."""
        return self._writer_of(self._first + lane, lanes)

    def share(self, lane: int, lanes: int) -> tuple[Share, Sequence[int]]:
        """By what another process writes frames of some lanes, and file descriptors that go with it."""
        opening, descriptors = self._place.opening()
        return Share(opening, self._first + lane, lanes), descriptors

    def deal(self, pieces: Pieces) -> None:
        """Writes trajectories, each to the ring to which the least was written, or that it goes on in."""
        self._writer_of(self._first, self.lanes).deal(pieces, range(self.lanes))

    def let_go(self) -> None:
        """They are nobody's. Safe to call again."""
        if not self._is_over:
            self._is_over = True
            self._claims.let_go(self._first, self.lanes)
