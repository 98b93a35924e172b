"""Which lanes begin anew before the next rollout, and with which seeds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from rlcollect.interfaces import EnvDriver
from rlcollect.options import What
from rlcollect.rollout.episodes import Episodes
from rlcollect.rollout.seeding import TorchStream, lane_seed
from rlcollect.seeds import Root, Seed

__all__ = ["Resets"]


class Resets:
    """Resets lanes: each a CUT.

    Attributes:
        due: lanes that are to be reset before the next rollout.

    Args:
        driver: of the lanes.
        episodes: bookkeeping of the lanes' episodes.
        what: whether all are reset before each rollout, and whether each episode has a seed of its own.
        worker: number of the worker, for seeds.
        located: around what may be raised in this step of the rollout.
    """

    def __init__(
        self,
        driver: EnvDriver,
        episodes: Episodes,
        *,
        what: What,
        worker: int,
        located: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        self.due: set[int] = set()
        self._seeds: dict[int, int] = {}  # for the next reset of a lane
        self._driver = driver
        self._episodes = episodes
        self._worker = worker
        self._located = located
        self._at_each_iter = what.reset_at_each_iter
        self._seeds_episodes = what.seed_per_episode

    @property
    def lanes(self) -> range:
        """All of them."""
        return range(self._driver.num_lanes)

    def reset(
        self,
        lanes: Sequence[int],
        stream: TorchStream,
        seeds: Sequence[int] | int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Begins a new episode in these lanes.

        Args:
            lanes: which.
            stream: that environments draw from, if they draw from torch's.
            seeds: one a lane, or a single one: for several lanes its children. None: seeds that wait are used up.
            options: for the environments' `reset`; None: `reset_options`.
        """
        if isinstance(seeds, int):
            seeds = [seeds] if len(lanes) == 1 else [lane_seed(seeds, self._worker, lane) for lane in lanes]
        waiting = {**self._seeds, **dict(zip(lanes, seeds or (), strict=bool(seeds)))}
        if self._seeds and self._driver.refuses_lane_seeds is not None:
            lanes = self.lanes  # all are due, with a seed
        kwargs = {} if options is None else {"options": dict(options)}
        self.number(lanes)
        try:
            with stream:
                self._reset_groups(lanes, waiting, kwargs)
        except BaseException:
            self.due |= set(lanes)  # some were reset, and are to be again
            raise
        self._episodes.cut(lanes)
        self.due -= set(lanes)
        for lane in lanes:
            self._seeds.pop(lane, None)

    def number(self, lanes: Collection[int]) -> None:
        """The environments know which episode begins next in these lanes."""
        self._driver.number_episodes({lane: int(self._episodes.numbers[lane]) + 1 for lane in lanes})

    def _reset_groups(self, lanes: Sequence[int], seeds: Mapping[int, int], kwargs: Mapping[str, Any]) -> None:
        """Those that have a seed together, and the others."""
        for group in ([lane for lane in lanes if (lane in seeds) is seeded] for seeded in (True, False)):
            if group:
                given = [seeds[lane] for lane in group] if group[0] in seeds else None
                with self._located(0):
                    self._driver.reset(group, given, kwargs)

    def reset_due(self, stream: TorchStream) -> None:
        """Resets what is due before a rollout."""
        if self._at_each_iter:
            self.due |= set(np.flatnonzero(self._episodes.ages).tolist())
        if self.due:
            self.reset(sorted(self.due), stream)

    def cut(self) -> None:
        """All are due."""
        self.due = set(self.lanes)

    def seed(self, seed: int | Sequence[int], *, static: bool, generation: int) -> None:
        """Seeds the lanes, at their next reset, which is due. See `Engine.seed`."""
        roots = self._roots(seed, static=static, generation=generation)
        if self._seeds_episodes:
            self._driver.seed_episodes(roots)
        elif isinstance(seed, Sequence) and not generation:
            self._seeds = dict(zip(self.lanes, seed, strict=True))
        else:
            self._seeds = {lane: lane_seed(*root) for lane, root in zip(self.lanes, roots, strict=True)}
        self.cut()

    def _roots(self, seed: Seed, *, static: bool, generation: int) -> list[Root]:
        """Of each lane's seeds."""
        if isinstance(seed, Sequence):
            return [(own, self._worker, lane, generation) for lane, own in enumerate(seed)]
        if static:
            return [(seed, 0, 0, generation)] * len(self.lanes)
        return [(seed, self._worker, lane, generation) for lane in self.lanes]

    @property
    def seeds(self) -> dict[int, int]:
        """Those that wait for the next reset of a lane."""
        return dict(self._seeds)

    def go_on(self, seeds: Mapping[int, int], going_on: Collection[int]) -> None:
        """A state was loaded: these seeds wait, and lanes whose episodes do not go on are due."""
        self._seeds = dict(seeds)
        self.number(self.lanes)
        self.due = {*self.lanes} - {*going_on}
