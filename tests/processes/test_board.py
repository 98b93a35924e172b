"""`Board`: what each worker is doing, for anybody to read."""

from __future__ import annotations

import os
import time

import pytest

from rlcollect.processes.arena import Arena
from rlcollect.processes.board import Board

STAGES = ("starting", "working", "resting")


@pytest.fixture
def board():
    arena = Arena(Board.nbytes(3))
    arena.close()
    return Board(arena.buffer, STAGES)


class TestRows:
    def test_at_first_all_do_what_comes_first(self, board):
        assert [board.stage(worker) for worker in range(3)] == ["starting"] * 3
        assert [board.count(worker) for worker in range(3)] == [0] * 3

    def test_each_worker_has_its_own(self, board):
        board.row(1).enter("working")
        board.row(2).enter("resting")
        board.row(2).beat(17)
        assert [board.stage(worker) for worker in range(3)] == ["starting", "working", "resting"]
        assert [board.count(worker) for worker in range(3)] == [0, 0, 17]

    def test_the_newest_counts(self, board):
        row = board.row(0)
        for stage in ("working", "resting", "working"):
            row.enter(stage)
            assert board.stage(0) == stage
        for count in (3, 2**40):
            row.beat(count)
            assert board.count(0) == count

    def test_a_stage_that_nobody_knows(self, board):
        board.row(0).enter("working")
        with pytest.raises(KeyError):
            board.row(0).enter("sleeping")
        assert board.stage(0) == "working"

    def test_is_seen_from_another_process(self, board):
        pid = os.fork()
        if not pid:
            board.row(1).enter("resting")
            board.row(1).beat(5)
            os._exit(0)
        os.waitpid(pid, 0)
        assert (board.stage(1), board.count(1)) == ("resting", 5)

    def test_rows_share_no_cache_line(self):
        assert Board.nbytes(1) % 128 == 0
        assert Board.nbytes(5) == 5 * Board.nbytes(1)


class TestWords:
    def test_before_it_has_said_anything(self, board):
        assert board.told(0) == "starting"

    def test_since_when(self, board, monkeypatch):
        now = 10**9
        monkeypatch.setattr("time.monotonic_ns", lambda: now)
        board.row(0).enter("working")
        now += 2_500_000_000
        assert board.told(0) == "working, for 2.5 s"

    def test_when_it_was_last_heard_of(self, board, monkeypatch):
        now = 10**9
        monkeypatch.setattr("time.monotonic_ns", lambda: now)
        board.row(0).enter("working")
        now += 2_000_000_000
        board.row(0).beat(4)
        now += 500_000_000
        assert board.told(0) == "working, for 2.5 s; last sign of life 0.5 s ago"

    def test_a_new_stage_is_a_sign_of_life(self, board, monkeypatch):
        now = 10**9
        monkeypatch.setattr("time.monotonic_ns", lambda: now)
        board.row(0).enter("working")
        now += 1_000_000_000
        board.row(0).beat(4)
        now += 1_000_000_000
        board.row(0).enter("resting")
        assert board.told(0) == "resting, for 0.0 s"
        assert board.count(0) == 4


class TestStops:
    def test_are_of_a_command_and_those_before_it(self, board):
        row = board.row(1)
        assert not row.is_to_stop(1)
        board.stop(1, 5)
        assert [row.is_to_stop(number) for number in (4, 5, 6)] == [True, True, False]
        assert not board.row(0).is_to_stop(5)

    def test_a_late_one_takes_nothing_back(self, board):
        board.stop(0, 5)
        board.stop(0, 3)
        assert board.row(0).is_to_stop(5)


class TestKept:
    def test_is_of_one_command(self, board):
        board.row(2).keep(7, 40)
        assert [board.kept(2, number) for number in (6, 7, 8)] == [0, 40, 0]
        assert board.kept(0, 7) == 0

    def test_of_large_numbers(self, board):
        board.row(0).keep(2**31 - 1, 2**32 - 1)
        assert board.kept(0, 2**31 - 1) == 2**32 - 1

    def test_when_it_was_last_heard_of(self, board):
        before = time.monotonic()
        board.row(0).beat(1)
        assert before - 1e-3 <= board.beat(0) <= time.monotonic()
