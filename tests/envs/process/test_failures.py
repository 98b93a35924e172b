"""Failures in workers, time limits, and the end: what reaches the caller, and that nothing is left."""

from __future__ import annotations

import functools
import gc
import os
import signal
import threading
import time
import warnings

import numpy as np
import pytest

from rlcollect import ClosedError, OptionError, WorkerDied, WorkerError, WorkerTimeout
from tests.envs.process.helpers import Random, Steps, check_same, processes, sync
from tests.workers.fault_helpers import Belongings, check_nothing_is_left, is_alive, raised_by, within

pytestmark = pytest.mark.timeout(60)
ACTIONS = np.zeros(4, np.int64)


def one_that(*trouble, lane=2):
    return [(lambda: Steps(trouble)) if each == lane else Steps for each in range(4)]


def stepped(envs, times):
    for _ in range(times):
        envs.step(ACTIONS)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left():
    before = Belongings.now()
    yield
    check_nothing_is_left(before)


class TestExceptions:
    def test_come_as_themselves_with_worker_lane_and_step(self):
        envs = processes(one_that("raise", 3))
        envs.reset(seed=0)
        envs.step(ACTIONS), envs.step(ACTIONS)
        with pytest.raises(LookupError, match="broken") as caught:
            envs.step(ACTIONS)
        report = caught.value.__cause__
        assert isinstance(report, WorkerError)
        assert (report.worker, report.lane, report.step) == (1, 2, 2)
        assert "in act" in report.worker_traceback
        assert envs.closed
        with pytest.raises(ClosedError, match="Make a new one"):
            envs.step(ACTIONS)
        envs.close()

    def test_in_a_reset(self):
        envs = processes(one_that("reset", 0))
        with pytest.raises(LookupError, match="broken"):
            envs.reset()
        assert envs.closed

    def test_while_environments_are_made(self):
        def fails():
            raise LookupError("no file")

        with pytest.raises(LookupError, match="no file") as caught:
            processes([Steps, Steps, Steps, fails])
        assert (caught.value.__cause__.worker, caught.value.__cause__.lane) == (1, 3)

    def test_in_a_call_leave_it_open(self):
        with processes(Steps) as envs:
            envs.reset()
            with pytest.raises(LookupError, match="asked for"):
                envs.call("fail")
            with pytest.raises(AttributeError):
                envs.get_attr("nothing")
            envs.step(ACTIONS)

    def test_an_observation_that_does_not_fit(self):
        class Odd(Steps):
            def shown(self):
                return np.zeros(3)

        envs = processes(Odd)
        with pytest.raises(RuntimeError, match=r"lane [0-3].*shape \[2\]"):
            envs.reset()
        assert envs.closed

    def test_lanes_with_other_spaces(self):
        with pytest.raises(ValueError, match="lane 2 differs from lane 0"):
            processes([Random, Random, Steps, Steps])
        with pytest.raises(ValueError, match="lane 3 has"):
            processes([Random, Random, Random, Steps])

    def test_of_one_group_do_not_lose_the_others_step(self):
        envs = processes(one_that("raise", 1), num_groups=2)
        envs.reset()
        envs.send(0, ACTIONS[:2])
        envs.send(1, ACTIONS[:2])
        time.sleep(0.2)
        error = raised_by(lambda: (envs.recv(0), envs.recv(1)))
        assert isinstance(error, LookupError)
        assert envs.closed


class TestDeaths:
    @pytest.mark.parametrize("at", [1, 4])
    def test_of_a_worker_in_a_step(self, at):
        envs = processes(one_that("kill", at))
        envs.reset()
        with within(5), pytest.raises(WorkerDied, match="SIGKILL") as caught:
            stepped(envs, 5)
        assert caught.value.worker == 1
        assert envs.closed

    def test_between_steps(self):
        envs = processes(Steps)
        envs.reset()
        envs.step(ACTIONS)
        os.kill(envs.call("pid")[0], signal.SIGKILL)
        with within(5), pytest.raises(WorkerDied):
            stepped(envs, 3)
        assert envs.closed

    def test_before_a_call(self):
        envs = processes(Steps)
        envs.reset()
        os.kill(envs.call("pid")[0], signal.SIGKILL)
        with within(5), pytest.raises(WorkerDied):
            envs.call("pid")
        assert envs.closed

    def test_while_it_is_made(self):
        with within(5), pytest.raises(WorkerDied):
            processes([Steps, Steps, lambda: os._exit(3), Steps])


class TestTimeLimits:
    def test_nothing_is_lost(self):
        ours, theirs = processes(one_that("nap", 2), timeout=0.15), sync([Steps] * 4)
        with ours:
            ours.reset(), theirs.reset()
            ours.step(ACTIONS)
            with pytest.raises(WorkerTimeout, match=r"worker 1.*stepping") as caught:
                ours.step(ACTIONS + 7)
            assert caught.value.workers == (1,)
            with pytest.raises(OptionError, match="under way"):
                ours.step(ACTIONS)
            while True:
                try:
                    observations, rewards, *_ = ours.step_wait()
                except WorkerTimeout:
                    continue
                break
            assert rewards.tolist() == [7.0] * 4
            assert observations[:, 1].tolist() == [2.0] * 4
            assert ours.step(ACTIONS)[0][:, 1].tolist() == [3.0] * 4

    def test_a_reset_drops_it(self):
        with processes(one_that("nap", 2), timeout=0.15) as ours:
            ours.reset()
            ours.step(ACTIONS)
            with pytest.raises(WorkerTimeout):
                ours.step(ACTIONS)
            time.sleep(0.6)
            assert ours.reset()[0][:, 1].tolist() == [0.0] * 4
            assert ours.step(ACTIONS)[0][:, 1].tolist() == [1.0] * 4

    def test_of_a_worker(self):
        envs = processes(one_that("hang", 2), worker_timeout=0.3)
        envs.reset()
        envs.step(ACTIONS)
        with within(5), pytest.raises(WorkerTimeout, match="broken down"):
            envs.step(ACTIONS)
        assert envs.closed

    def test_at_the_start(self):
        with within(5), pytest.raises(WorkerTimeout, match="start_timeout"):
            processes(lambda: time.sleep(60), start_timeout=0.3)


class TestTheEnd:
    def test_closing_twice(self):
        envs = processes(Steps)
        envs.reset()
        envs.close()
        with within(0.1):
            envs.close()
        for use in (
            envs.reset,
            lambda: envs.step(ACTIONS),
            envs.recv,
            lambda: envs.call("pid"),
            lambda: envs.set_attr("a", 1),
        ):
            with pytest.raises(ClosedError):
                use()

    def test_without_a_reset(self):
        processes(Steps).close()

    def test_with_a_dead_worker(self):
        envs = processes(Steps)
        envs.reset()
        os.kill(envs.call("pid")[3], signal.SIGKILL)
        with within(3):
            envs.close()

    @pytest.mark.parametrize("how", ["hang", "deaf"])
    def test_while_a_worker_hangs(self, how):
        envs = processes(one_that(how, 1))
        envs.reset()
        envs.step_async(ACTIONS)
        with within(5):
            envs.close()

    def test_with_a_step_under_way(self):
        envs = processes(Steps)
        envs.reset()
        envs.step_async(ACTIONS)
        with within(2):
            envs.close()

    def test_environments_are_closed(self, tmp_path):
        class Telling(Steps):
            def close(self):
                (tmp_path / str(id(self))).touch()

        envs = processes(Telling, 3, 1)
        envs.reset()
        envs.step(ACTIONS[:3])
        envs.close()
        assert len(list(tmp_path.iterdir())) == 3

    def test_forgotten(self):
        envs = processes(Steps)
        envs.reset()
        pids = envs.call("pid")
        kept = [envs]
        del envs
        with pytest.warns(ResourceWarning, match="never closed") as found:
            kept.clear()
        gc.collect()
        assert len(found) == 1
        assert not any(map(is_alive, pids))

    def test_a_copy_of_the_program_ends_nothing(self):
        envs = processes(Steps)
        envs.reset()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pid = os.fork()
            if pid == 0:
                try:
                    envs.close()
                finally:
                    os._exit(0)
        os.waitpid(pid, 0)
        for _ in range(3):
            envs.step(ACTIONS)
        envs.close()


class TestInterrupts:
    def interrupted(self, call, seconds=0.2):
        timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
        timer.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            timer.join()

    def test_a_step_goes_on_and_can_be_taken(self):
        with processes(one_that("nap", 1)) as envs:
            envs.reset()
            self.interrupted(lambda: envs.step(ACTIONS + 3))
            assert envs.step_wait()[1].tolist() == [3.0] * 4

    def test_another_step_drops_it(self):
        with processes(one_that("nap", 1)) as envs:
            envs.reset()
            self.interrupted(lambda: envs.step(ACTIONS + 3))
            observations, rewards, *_ = envs.step(ACTIONS + 4)
            assert rewards.tolist() == [4.0] * 4
            assert observations[:, 1].tolist() == [2.0] * 4

    def test_then_closing(self):
        envs = processes(one_that("hang", 1))
        envs.reset()
        self.interrupted(lambda: envs.step(ACTIONS))
        assert not envs.closed
        with within(5):
            envs.close()

    @pytest.mark.parametrize("space", ["box", "text"])
    def test_in_any_call_of_a_step(self, space):
        """Whatever it breaks off, the lanes go on together, and each step is made once."""
        from tests.workers.test_interrupts import interrupting

        make = (lambda: Random(space, infos=False)) if space == "text" else Steps
        interrupts = 0
        with processes(make, 2, 2) as envs:
            envs.reset(seed=0)
            made = 0
            for number in range(1, 90):
                try:
                    with interrupting(number):
                        envs.step(ACTIONS[:2])
                        made += 1
                except KeyboardInterrupt:
                    interrupts += 1
                    made += any(envs._pending)
                observations = envs.step(ACTIONS[:2])[0]
                made += 1
                if space == "box":
                    lanes = observations[:, 1].tolist()
                    assert lanes[0] == lanes[1]
                    made = max(made, int(lanes[0]))  # the last call of all may be after the step was taken
                    assert lanes[0] == made
        assert interrupts > 20

    @pytest.mark.parametrize("space", ["box", "text"])
    def test_in_any_call_of_a_reset_or_of_another_command(self, space):
        from tests.workers.test_interrupts import interrupting

        interrupts = 0
        theirs = sync([functools.partial(Random, "mixed", space)] * 2)
        with processes(functools.partial(Random, "mixed", space), 2, 2) as envs:
            envs.reset(seed=0)
            for number in range(1, 200, 2):
                for call in (lambda: envs.reset(seed=1), lambda: envs.get_attr("t")):
                    try:
                        with interrupting(number):
                            call()
                    except KeyboardInterrupt:
                        interrupts += 1
                check_same(envs.reset(seed=number), theirs.reset(seed=number))
                actions = envs.action_space.sample()
                check_same(envs.step(actions), theirs.step(actions))
        assert interrupts > 20
