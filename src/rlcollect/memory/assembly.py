"""Whole episodes, out of batches in which they lie in pieces.

Knows the keys of a batch, and nothing of who made it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from tensordict import TensorDictBase

from rlcollect.errors import EnvError, OptionError
from rlcollect.layout import show_key
from rlcollect.memory.episodes import Episode, Source
from rlcollect.memory.gathering import MASK, Cat, Gathering
from rlcollect.memory.orders import Order

__all__ = ["Assembly"]

Array = np.ndarray[Any, Any]
IDS, DONE = ("collector", "traj_ids"), ("next", "done")
TIDY = 4  # frames that are kept for each that is wanted, at most


class Assembly:
    """Takes batches, gives whole episodes.

    Attributes:
        lanes: how many there are, over all workers.
        dropped: frames that will not be delivered: of episodes that were cut, or not admitted.
        held: frames that are kept: with the last batch, at most `TIDY` times those that are wanted.
        wanted: frames of episodes that will be delivered, as far as they are there.

    Args:
        lanes: how many there are.
        order: in which they are delivered.
        longest: frames that an episode may have without having ended; None: any number.
    """

    def __init__(self, lanes: int, order: Order, *, longest: int | None) -> None:
        self.lanes = lanes
        self.dropped = self.held = self.wanted = 0
        self._order = order
        self._longest = longest
        self._open: list[Episode | None] = [None] * lanes
        self._loaded: Source | None = None  # of a state, until frames that came later were held against it

    def take(self, batch: TensorDictBase, lanes: Sequence[int]) -> None:
        """Takes the next frames of some lanes.

        Args:
            batch: `[*lead, T]`, time last, with ids and done; kept, and to be left as it is.
            lanes: which each of its lanes is: each stands there once.

        Raises:
            EnvError: an episode is too long.
            OptionError: other keys than those of the frames of a state that was loaded.
        """
        steps = batch.shape[-1]
        source = Source.of(batch)
        self._check_keys(source)
        ids, done, valid = [source.values(key) for key in (IDS, DONE, MASK)]
        assert ids is not None
        assert done is not None
        first, length = _pieces(ids, done, valid, steps)
        places, times = np.divmod(first, steps)
        in_time = np.lexsort((places, times))  # episodes begin in this order
        columns = [each[in_time].tolist() for each in (places, ids[first], first, length, done[first + length - 1])]
        under_way, kept = self._open, 0
        for place, number, start, count, has_ended in zip(*columns, strict=True):
            lane = lanes[place]
            episode = under_way[lane]
            if episode is None or episode.id != number:
                episode = self._begun(lane, number)
            episode.frames += count
            if episode.is_wanted:
                episode.pieces.append((source, start, count))
                kept += count
            elif has_ended:
                self.dropped += episode.frames
            if has_ended:
                episode.is_whole = True
                under_way[lane] = None
        self._keep(source, kept)
        self._tidy(source.size)
        self._check_lengths()

    def _check_keys(self, source: Source) -> None:
        loaded, self._loaded = self._loaded, None
        if loaded is None or loaded.columns is None or source.columns is None:
            return
        if differ := ({*loaded.columns} ^ {*source.columns}) - {MASK}:
            key = show_key(min(differ))
            there = "is in" if min(differ) in loaded.columns else "is not in"
            raise OptionError(
                f"{key} {there} the frames of the state, which episodes go on from: load it with the same options "
                "(record, info_keys, policy)."
            )

    def _begun(self, lane: int, number: int) -> Episode:
        """The episode that begins in a lane now; the one before it was cut, if it did not end."""
        before = self._open[lane]
        if before is not None:
            self.dropped += before.frames
            if before.is_wanted:
                self._order.give_up(before)
                for source, _, count in before.pieces:
                    self._let_go(source, count)
        self._open[lane] = episode = Episode(lane, number)
        episode.is_wanted = self._order.admit(episode)
        return episode

    def _keep(self, source: Source, frames: int) -> None:
        """So many of its frames are needed; of some that may be known by now to be needed no more."""
        self.wanted += frames
        source.wanted += frames
        if source.wanted:
            self.held += source.size

    def _let_go(self, source: Source, frames: int) -> None:
        """So many of its frames are not needed any more."""
        self.wanted -= frames
        source.wanted -= frames
        if not source.wanted:
            self.held -= source.size

    def _tidy(self, frames: int) -> None:
        """Copies what is wanted of the batches that are kept, where that is the smaller part of them.

        Args:
            frames: that came last, which are not looked at so soon.
        """
        if self.held > frames + TIDY * self.wanted:
            episodes = [*self._order]
            source, start = Source.of(Gathering(episodes).formed(Cat())), 0
            source.wanted = self.wanted
            for episode in episodes:
                episode.pieces[:] = [(source, start, episode.frames)]
                start += episode.frames
            self.held = self.wanted

    def _check_lengths(self) -> None:
        if self._longest is None:
            return
        for episode in self._open:
            if episode is not None and episode.frames > self._longest:
                raise EnvError(
                    f"The episode under way in lane {episode.lane} (counted over all workers) has {episode.frames} "
                    f"frames and has not ended; whole episodes are kept in memory until they have, of {self._longest} "
                    "frames at most (max_open_frames). Set max_frames_per_traj, which truncates them, or allow more."
                )

    def ready(self, count: int) -> Gathering | None:
        """The frames of the next episodes, if so many are whole. They stay here until they were delivered."""
        episodes = self._order.first(count)
        lacking = [episode for episode in episodes if not episode.is_whole]  # no generator: one would swallow a Ctrl-C
        return None if lacking or len(episodes) < count else Gathering(episodes)

    def delivered(self, frames: Gathering) -> None:
        """These, which were ready, are not needed any more."""
        self._order.take_out(frames.episodes)
        for source, count in frames.sources:
            self._let_go(source, count)

    @property
    def waiting(self) -> int:
        """Frames that are here, of which no one was delivered or dropped."""
        return self.wanted + sum(each.frames for each in self._open if each is not None and not each.is_wanted)

    # --- saving ---

    def state_dict(self) -> dict[str, Any]:
        """What is here, as plain values; "frames", where there are any, is a TensorDict `[F]` of its own."""
        wanted = [*self._order]
        skipped = [episode for episode in self._open if episode is not None and not episode.is_wanted]
        told = [(each.lane, each.id, each.frames, each.is_whole, each.is_wanted) for each in (*wanted, *skipped)]
        state = {"episodes": told, "dropped": self.dropped, "order": self._order.state_dict()}
        return {**state, "frames": Gathering(wanted).formed(Cat())} if wanted else state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there, in the place of what is here. Without a state: from nothing."""
        self.dropped = state.get("dropped", 0)
        self.held = self.wanted = 0
        self._open = [None] * len(self._open)
        self._order.load_state_dict(state.get("order", {}))
        if "episodes" in state:
            self._load_episodes(state["episodes"], state.get("frames"))

    def _load_episodes(self, told: Sequence[tuple[int, int, int, bool, bool]], joined: TensorDictBase | None) -> None:
        source, start, kept = None if joined is None else Source.of(joined), 0, 0
        for lane, number, frames, is_whole, is_wanted in told:
            episode = Episode(lane, number)
            episode.frames, episode.is_whole, episode.is_wanted = frames, is_whole, is_wanted
            if is_wanted:
                assert source is not None
                episode.is_wanted = self._order.admit(episode)
                if episode.is_wanted:
                    episode.pieces.append((source, start, frames))
                    kept += frames
                start += frames
            if not is_whole:
                self._open[lane] = episode
            elif not episode.is_wanted:
                self.dropped += frames
        if source is not None:
            self._keep(source, kept)
        self._loaded = source


def _pieces(ids: Array, done: Array, valid: Array | None, steps: int) -> tuple[Array, Array]:
    """Frames of one episode that stand side by side.

    Args:
        ids: int64 `[F]`, lane after lane.
        done: bool `[F]`.
        valid: bool `[F]`; None: all are.
        steps: of a lane.

    Returns:
        The first row of each, and how many there are: int64 `[P]` each.
    """
    count = len(ids)
    begins = np.ones(count + 1, bool)
    begins[1:-1] = (ids[1:] != ids[:-1]) | done[:-1]
    begins[:-1:steps] = True
    if valid is None:
        first = np.flatnonzero(begins)
        return first[:-1], np.diff(first)
    begins[1:-1] |= valid[1:] != valid[:-1]
    first = np.flatnonzero(begins)
    is_piece = valid[first[:-1]]
    return first[:-1][is_piece], np.diff(first)[is_piece]
