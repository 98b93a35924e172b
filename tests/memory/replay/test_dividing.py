"""`dividing`: what was there before stays, whole trajectories first."""

from __future__ import annotations

import numpy as np
import pytest

from rlcollect import ReplayBuffer
from rlcollect.memory.replay.dividing import Deal, pieces_of, ring_size

from .helpers import batch, full, values


def dealt(buffer, lanes, rings=None, size=None):
    rings = rings or lanes
    return Deal(
        buffer._cursors.moment(), buffer._view[1], rings=rings, lanes=lanes, size=size or buffer.capacity // rings
    )


class TestPieces:
    def test_they_end_where_a_trajectory_or_a_ring_does(self):
        """Two lanes of 4 + 3 frames, the first of which ended."""
        buffer = ReplayBuffer(20)
        buffer.extend(batch(2, 7, ends=(3,)))
        firsts, lengths, whole = pieces_of(buffer._cursors.moment(), buffer._view[1])
        assert firsts.tolist() == [0, 4, 7, 11]
        assert lengths.tolist() == [4, 3, 4, 3]
        assert whole.tolist() == [True, False, True, False]


class TestDeal:
    def test_every_frame_has_a_place_where_there_is_room(self):
        """No two have the same."""
        buffer = full()
        for lanes in (1, 2, 5, 8, 40):
            deal = dealt(buffer, lanes)
            assert deal.lost == 0
            assert sorted(deal.rows.tolist()) == sorted(deal.places.tolist()) == [*range(40)]
            assert deal.counts.tolist() == [40 // lanes] * lanes

    def test_trajectories_that_ended_come_first(self):
        """Of 2 x (4 ended + 3 going on), 10 find room: both that ended, and the newest two of one that goes on."""
        buffer = ReplayBuffer(20)
        buffer.extend(batch(2, 7, ends=(3,)))
        deal = dealt(buffer, 2, size=5)
        assert deal.lost == 4
        assert buffer.frames()["value"][deal.rows % 10 + deal.rows // 10 * 7].tolist() == [
            0, 1, 2, 3, 6, 5, 1000, 1001, 1002, 1003
        ]  # fmt: skip
        assert deal.positions.tolist() == [0, 1, 2, 3, 0, 0, 0, 1, 2, 3]
        assert deal.places.tolist() == [*range(10)]

    def test_spare_lanes_get_none(self):
        """They are for others."""
        deal = dealt(full(), 2, rings=4, size=10)
        assert deal.counts.tolist() == [10, 10, 0, 0]
        assert deal.lost == 20

    def test_nothing_else_is_said_of_a_slice(self):
        """After several divisions: slices are of frames that follow each other."""
        with ReplayBuffer(48, sampler="slice", slice_len=3, batch_size=300, seed=0) as buffer:
            buffer.extend(batch(4, 10, ends=(3, 8)))
            for lanes in (3, 6, 2, 1, 4):
                buffer.claim(buffer.leaves, lanes).let_go()
                assert len(buffer) == 40
                rows = buffer.sample()["value"]
                assert (rows.diff(dim=1) == 1).all()
                assert {*(rows[:, 0] % 1000).tolist()} <= {0, 1, 4, 5, 6}

    def test_what_finds_no_room_is_warned_of(self):
        """With the number of frames."""
        saved = full().state_dict()
        buffer = ReplayBuffer(40, spare_lanes=1)
        buffer.load_state_dict(saved)
        with pytest.warns(UserWarning, match="20 of 40 frames found no room .* among 2 lanes, 20 each"):
            buffer.claim(buffer.leaves, 1)

    @pytest.mark.timeout(30)
    def test_many_small_pieces_are_dealt_in_time(self):
        """100,000 frames in 50,000 trajectories."""
        buffer = ReplayBuffer(100_000)
        buffer.extend(batch(10, 10_000, ends=range(1, 10_000, 2)))
        buffer.claim(buffer.leaves, 16)
        assert len(np.unique(values(buffer))) == len(np.unique(batch(10, 10_000)["value"]))


class TestRingSize:
    def test_what_is_left_over_is_warned_of(self):
        with pytest.warns(UserWarning, match="no multiple of 3 lanes: each keeps 3"):
            assert ring_size(10, 3) == 3
        assert ring_size(9, 3) == 3
