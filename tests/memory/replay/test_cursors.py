"""`cursors`: which frames stand, as its words say."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from rlcollect.errors import OptionError
from rlcollect.memory.replay import cursors as module
from rlcollect.memory.replay.cursors import MOVED, Cursors


def cursors_of(capacity=12, rings=3, counts=None):
    cursors = Cursors(np.zeros(Cursors.words_of(capacity), np.int64))
    cursors.divide(rings, capacity // rings, None if counts is None else np.array(counts))
    return cursors


class TestMoment:
    def test_frames_are_counted_ring_after_ring(self):
        """Of 3 rings of 4 rows: 2, 0 and 4 frames, numbers 5, 6 and 8 to 11."""
        cursors = cursors_of()
        cursors.commit(slice(0, 1), 7)
        cursors.retire(slice(0, 1), 5)
        cursors.commit(slice(2, 3), 12)
        cursors.retire(slice(2, 3), 8)
        moment = cursors.moment()
        rings, numbers = moment.all()
        assert moment.total == 6
        assert rings.tolist() == [0, 0, 2, 2, 2, 2]
        assert numbers.tolist() == [5, 6, 8, 9, 10, 11]
        assert moment.rows(rings, numbers).tolist() == [1, 2, 8, 9, 10, 11]
        assert cursors.written == 19

    def test_even_rings_are_found_as_uneven_ones_are(self):
        """By division, or by looking."""
        even = cursors_of(counts=[2, 2, 2]).moment()
        assert [each.tolist() for each in even.all()] == [[0, 0, 1, 1, 2, 2], [0, 1, 0, 1, 0, 1]]

    def test_as_long_as_nothing_is_written_it_is_the_same(self):
        """What it knows of itself is kept; what is written makes another."""
        cursors = cursors_of(counts=[2, 2, 2])
        moment = cursors.moment()
        assert cursors.moment() is moment
        cursors.commit(slice(0, 3), 3)
        assert cursors.moment() is not moment
        assert cursors.moment().total == 9

    def test_words_that_do_not_count_any_more_have_no_frames(self):
        cursors = cursors_of(counts=[2, 2, 2])
        moment = cursors.moment()
        cursors.move()
        assert (cursors.moment().total, cursors.moment().division) == (0, MOVED)
        assert cursors.lost(moment, *moment.all()).all()

    def test_it_waits_until_rings_are_divided(self):
        """By whoever began to."""
        cursors = cursors_of()
        cursors.begin_to_divide()
        threading.Timer(0.05, lambda: cursors.divide(2, 6, np.array([6, 1]))).start()
        assert cursors.moment().counts.tolist() == [6, 1]

    def test_an_owner_that_was_killed_at_dividing_is_told(self, monkeypatch):
        monkeypatch.setattr(module, "PATIENCE", 0.05)
        cursors = cursors_of()
        cursors.begin_to_divide()
        with pytest.raises(OptionError, match="killed meanwhile"):
            cursors.moment()
        cursors.recover()
        assert cursors.moment().total == 0


class TestLost:
    def test_frames_that_were_retired_are(self):
        cursors = cursors_of(counts=[4, 4, 4])
        moment = cursors.moment()
        cursors.retire(slice(1, 2), 2)
        assert cursors.lost(moment, np.array([0, 1, 1, 2]), np.array([0, 1, 2, 0])).tolist() == [
            False,
            True,
            False,
            False,
        ]

    @pytest.mark.parametrize("change", ["divide", "begin_to_divide", "replace"])
    def test_all_are_when_rings_are_others(self, change):
        """Whatever their words say by then."""
        cursors, other = cursors_of(counts=[4, 4, 4]), cursors_of(counts=[4, 4, 4])
        other.divide(3, 4, np.array([4, 4, 4]))
        moment = cursors.moment()
        arguments = {"divide": (3, 4), "begin_to_divide": (), "replace": (other._words,)}[change]
        getattr(cursors, change)(*arguments)
        assert cursors.lost(moment, *moment.all()).all()

    def test_words_are_replaced_with_the_division_last(self):
        """Who reads meanwhile would else take old cursors for new ones."""
        cursors, other = cursors_of(counts=[4, 4, 4]), cursors_of(rings=2, counts=[1, 2])
        other.divide(2, 6, np.array([1, 2]))
        division = cursors.division
        seen = []
        cursors.in_order = lambda: seen.append((cursors.division % 2, cursors.rings))
        cursors.replace(other._words)
        assert seen == [(1, 3), (1, 2)]
        assert cursors.division > division


class TestHold:
    def test_who_would_write_over_frames_waits(self):
        """Until they are let go of, or for as long as was said."""
        cursors = cursors_of(counts=[4, 4, 4])
        cursors.hold(30)
        threading.Timer(0.1, cursors.release).start()
        start = time.monotonic()
        cursors.retire(slice(0, 3), 1)
        assert 0.05 < time.monotonic() - start < 5
        cursors.hold(0.1)
        start = time.monotonic()
        cursors.retire(slice(0, 3), 2)
        assert 0.05 < time.monotonic() - start < 5
        assert not cursors.is_held


class TestRings:
    def test_count_goes_on_when_they_are_divided(self):
        """With what stands, and what did."""
        cursors = cursors_of()
        cursors.commit(slice(0, 3), 9)
        cursors.divide(2, 6, np.array([6, 3]))
        assert cursors.written == 27
        cursors.commit(slice(0, 1), 8)
        assert cursors.written == 29

    def test_there_are_no_more_than_frames(self):
        with pytest.raises(OptionError, match="room for 12"):
            cursors_of().check_rings(13, 12)
