"""`lockstep`: steps are asked for and answered once each, whoever sleeps; waits end when something else happens."""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from rlcollect.processes.arena import Arena
from rlcollect.processes.lockstep import LOOK, WORDS, Follower, Leader, turns
from tests.processes.helpers import descriptors

pytestmark = pytest.mark.timeout(60)
NEVER = lambda: False  # noqa: E731
LONG = 20.0


def words(workers=1):
    arena = Arena(workers * WORDS * 8)
    arena.close()
    return arena.buffer.view(np.int64).reshape(workers, WORDS)


@contextmanager
def pair(looks=0):
    """A leader and its only follower, in one process."""
    memory = words()
    leader = Leader(memory, looks)
    follower = Follower(memory[0], leader.new_bell(0).detach(), looks)
    try:
        yield leader, follower
    finally:
        leader.close()
        follower.close()


@contextmanager
def processes(count, looks, work=0.0):
    """A leader and followers in other processes, which note each number that they were asked for."""
    memory, notes = words(count), words(count)
    leader, pids = Leader(memory, looks), []
    for worker in range(count):
        bell = leader.new_bell(worker)
        if (pid := os.fork()) == 0:
            follower = Follower(memory[worker], bell.detach(), looks)
            while follower.waits(NEVER):
                time.sleep(work) if work else None
                notes[worker, 0] += 1
                follower.answer(int(notes[worker, 0]))
            os._exit(0)
        pids.append(pid)
        bell.close()
    try:
        yield leader, notes
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        leader.close()


def wait(leader, worker, number):
    deadline = time.monotonic() + LONG
    while not leader.wait(worker, number, LONG):
        assert time.monotonic() < deadline


def sockets():
    return {each for each in descriptors() if each[1].startswith("socket:")}


class TestSteps:
    @pytest.mark.parametrize("looks", [0, 3, 1000])
    @pytest.mark.parametrize("workers", [1, 3])
    def test_each_is_made_once(self, workers, looks):
        with processes(workers, looks) as (leader, notes):
            for number in range(1, 2000):
                for worker in range(workers):
                    leader.ask(worker, number)
                for worker in range(workers):
                    wait(leader, worker, number)
                    assert notes[worker, 0] == leader.note(worker) == number

    @pytest.mark.parametrize("looks", [0, 50])
    def test_at_any_distance_no_bell_is_missed(self, looks):
        """Whether the other looks, is about to sleep or sleeps: none takes as long as a lost bell would."""
        late = 0
        with processes(1, looks) as (leader, _):
            for number in range(1, 1500):
                time.sleep(number % 50 * 1e-5)
                start = time.perf_counter()
                leader.ask(0, number)
                wait(leader, 0, number)
                late += time.perf_counter() - start > LOOK * 0.9
        assert late < 15

    def test_asking_again_changes_nothing(self):
        with pair() as (leader, follower):
            leader.ask(0, 1)
            leader.ask(0, 1)
            assert follower.waits(NEVER)
            follower.answer(7)
            assert leader.has_answered(0, 1)
            assert (leader.note(0), leader.asked(0)) == (7, 1)
            assert not leader.wait(0, 2, 0.01)
            leader.ask(0, 2)
            assert follower.waits(NEVER)

    def test_those_that_are_void_are_not_made(self):
        with pair() as (leader, follower):
            leader.ask(0, 3)
            follower.resume(3)
            leader.ring(0)
            stop = time.monotonic() + 0.01
            assert not follower.waits(lambda: time.monotonic() > stop)
            leader.ask(0, 4)
            assert follower.waits(NEVER)

    @pytest.mark.parametrize("looks", [0, 100])
    def test_none_is_begun_when_it_is_over(self, looks):
        with pair(looks) as (leader, follower):
            leader.ask(0, 1)
            assert not follower.waits(lambda: True)
            assert follower.waits(NEVER)


class TestWaits:
    def test_of_a_follower_end_when_it_is_rung_for(self):
        with pair() as (leader, follower):
            over = threading.Event()

            def end():
                time.sleep(0.1)
                over.set()
                leader.ring(0)

            thread = threading.Thread(target=end)
            thread.start()
            start = time.monotonic()
            assert not follower.waits(over.is_set)
            assert 0.05 < time.monotonic() - start < 0.4
            thread.join()

    def test_of_a_follower_end_when_nobody_is_there(self):
        with pair() as (leader, follower):
            leader.close()
            assert not follower.waits(NEVER)

    def test_of_the_leader_end_after_the_time(self):
        with pair() as (leader, _):
            leader.ask(0, 1)
            start = time.monotonic()
            assert not leader.wait(0, 1, 0.1)
            assert 0.09 < time.monotonic() - start < 1

    def test_of_the_leader_end_with_what_is_watched(self):
        read, write = os.pipe()
        with pair() as (leader, _):
            leader.watch([read])
            timer = threading.Timer(0.1, lambda: os.write(write, b"x"))
            timer.start()
            start = time.monotonic()
            assert not leader.wait(0, 1, LONG)
            assert time.monotonic() - start < 1
            timer.join()
        os.close(read), os.close(write)

    def test_of_the_leader_end_when_nobody_is_there(self):
        with pair() as (leader, follower):
            follower.close()
            start = time.monotonic()
            assert not leader.wait(0, 1, LONG)
            assert time.monotonic() - start < 1

    def test_of_the_leader_are_not_ended_by_an_old_bell(self):
        with pair() as (leader, follower):
            follower._bell.send(b"\0")
            start = time.monotonic()
            assert not leader.wait(0, 1, 0.1)
            assert time.monotonic() - start > 0.09

    def test_cost_no_time_while_the_other_works(self):
        with processes(2, turns(2), work=0.02) as (leader, _):
            used, start = time.process_time(), time.monotonic()
            for number in range(1, 20):
                leader.ask(0, number), leader.ask(1, number)
                wait(leader, 0, number), wait(leader, 1, number)
            assert (time.process_time() - used) / (time.monotonic() - start) < 0.2


class TestBells:
    def test_that_ring_too_often_do_not_block(self):
        with pair() as (leader, follower):
            for _ in range(5000):
                leader.ring(0)
            leader.ask(0, 1)
            assert follower.waits(NEVER)
            follower.close()
            leader.ring(0)

    def test_a_new_one_takes_the_place_of_the_old(self):
        before = sockets()
        with pair() as (leader, follower):
            there = leader.new_bell(0)
            assert not follower.waits(NEVER)
            leader.ring(0)
            assert select.select([there], [], [], 1)[0]
            there.close()
        assert sockets() == before
