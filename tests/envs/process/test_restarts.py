"""`on_worker_failure="restart"`: another process takes a worker's place, no episodes are joined, counts are told."""

from __future__ import annotations

import os
import random
import signal
import time
import warnings
from contextlib import contextmanager

import numpy as np
import pytest

from rlcollect import OptionError, WorkerDied, WorkerRestarted, WorkerTimeout
from tests.envs.process.helpers import Steps, processes
from tests.workers.fault_helpers import Belongings, check_nothing_is_left, within

pytestmark = pytest.mark.timeout(60)
ACTIONS = np.arange(4)


@pytest.fixture(scope="module", autouse=True)
def _nothing_is_left():
    before = Belongings.now()
    yield
    check_nothing_is_left(before)


@contextmanager
def restarting(make, **options):
    envs = processes(make, on_worker_failure="restart", **options)
    with warnings.catch_warnings(record=True) as found, envs:
        warnings.simplefilter("always")
        envs.told = found
        yield envs


def stepped(envs, times):
    for _ in range(times):
        envs.step(ACTIONS)


def troubled(tmp_path, how, at=2, lane=2):
    """Trouble in one lane, once."""
    file = str(tmp_path / "happened")
    return [(lambda: Steps((how, at), file)) if each == lane else Steps for each in range(4)]


@pytest.mark.parametrize("how", ["raise", "kill", "hang", "deaf"])
class TestAStep:
    def test_is_cut_for_the_lanes_of_that_worker(self, tmp_path, how):
        with restarting(troubled(tmp_path, how), worker_timeout=0.5) as envs:
            first = envs.reset(seed=3)[0]
            envs.step(ACTIONS)
            with within(6):
                observations, rewards, terminations, truncations, infos = envs.step(ACTIONS)
            assert observations[:, 1].tolist() == [2.0, 2.0, 0.0, 0.0]
            assert (observations[:, 0] == first[:, 0]).tolist() == [True, True, False, False]
            assert rewards.tolist() == [0.0, 1.0, 0.0, 0.0]
            assert terminations.tolist() == [False] * 4
            assert truncations.tolist() == [False, False, True, True]
            assert infos["restarted"].tolist() == [False, False, True, True]
            assert "final_obs" not in infos
            assert envs.unwrapped.restarts == [0, 1]
            observations, rewards, _, truncations, infos = envs.step(ACTIONS)
            assert observations[:, 1].tolist() == [3.0, 3.0, 1.0, 1.0]
            assert rewards.tolist() == [0.0, 1.0, 2.0, 3.0]
            assert not truncations.any()
            assert not infos
        (warning,) = envs.told
        assert warning.category is WorkerRestarted
        assert warning.filename == __file__
        kinds = {"raise": LookupError, "kill": WorkerDied, "hang": WorkerTimeout, "deaf": WorkerTimeout}
        assert isinstance(warning.message.cause, kinds[how])
        assert warning.message.worker == 1


class TestSeeds:
    def test_are_fresh_children(self, tmp_path):
        found = []
        for run in range(2):
            (tmp_path / str(run)).mkdir()
            with restarting(troubled(tmp_path / str(run), "raise", 1)) as envs:
                envs.reset(seed=3)
                envs.step(ACTIONS)
                found.append(envs.get_attr("seed"))
        assert found[0] == found[1]
        assert found[0][:2] == (3, 4)
        assert len({*found[0], 5, 6}) == 6

    def test_are_not_made_where_none_was_given(self, tmp_path):
        with restarting(troubled(tmp_path, "raise", 1)) as envs:
            envs.reset()
            envs.step(ACTIONS)
            assert envs.get_attr("seed") == (None,) * 4


class TestWithoutAStep:
    def kill(self, envs, lane=2):
        os.kill(pid := envs.call("pid")[lane], signal.SIGKILL)
        return pid

    def test_the_next_is_the_cut(self):
        with restarting(Steps, num_groups=2) as envs:
            envs.reset()
            envs.step(ACTIONS)
            self.kill(envs)
            observations, rewards, _, truncations, infos = envs.step(ACTIONS)
            assert observations[:, 1].tolist() == [2.0, 2.0, 0.0, 0.0]
            assert truncations.tolist() == infos["restarted"].tolist() == [False, False, True, True]
            assert rewards[2:].tolist() == [0.0, 0.0]

    def test_found_by_another_group(self):
        with restarting(Steps, num_groups=2) as envs:
            envs.reset()
            self.kill(envs)
            deadline = time.monotonic() + 10
            while envs.restarts == [0, 0] and time.monotonic() < deadline:
                envs.send(0, ACTIONS[:2])
                envs.recv(0)
                with pytest.raises(AttributeError):
                    envs.get_attr("nothing")
            assert envs.restarts == [0, 1]
            envs.send(1, ACTIONS[2:])
            observations, _, _, truncations, infos = envs.recv(1)
            assert observations[:, 1].tolist() == [0.0, 0.0]
            assert truncations.all()
            assert infos["restarted"].all()
            envs.send(1, ACTIONS[2:])
            assert envs.recv(1)[0][:, 1].tolist() == [1.0, 1.0]

    def test_a_reset_of_all_begins_anew_anyway(self):
        with restarting(Steps) as envs:
            envs.reset()
            self.kill(envs)
            observations, infos = envs.reset(seed=1)
            assert observations[:, 1].tolist() == [0.0] * 4
            assert infos.get("restarted", np.zeros(4)).tolist() in ([False] * 4, [False, False, True, True])
            assert envs.step(ACTIONS)[0][:, 1].tolist() == [1.0] * 4

    def test_a_reset_of_some_tells_of_the_others(self):
        with restarting(Steps) as envs:
            envs.reset()
            envs.step(ACTIONS)
            self.kill(envs)
            observations, infos = envs.reset(options={"reset_mask": np.array([True, False, True, False])})
            assert observations[:, 1].tolist() == [0.0, 1.0, 0.0, 0.0]
            assert infos["restarted"].tolist() == [False, False, True, True]
            assert not envs.step(ACTIONS)[3].any()

    def test_a_call_raises_it(self):
        with restarting(Steps) as envs:
            envs.reset()
            old = self.kill(envs)
            with pytest.raises(WorkerDied):
                envs.call("pid")
            assert old not in envs.call("pid")
            assert envs.step(ACTIONS)[3].tolist() == [False, False, True, True]


class TestResets:
    def test_that_fail_count(self, tmp_path):
        with restarting(troubled(tmp_path, "reset", 0)) as envs:
            observations, infos = envs.reset(seed=1)
            assert observations[:, 1].tolist() == [0.0] * 4
            assert infos["restarted"].tolist() == [False, False, True, True]
            assert envs.restarts == [0, 1]
            assert envs.step(ACTIONS)[0][:, 1].tolist() == [1.0] * 4

    def test_with_wrong_options_do_not(self):
        class Choosy(Steps):
            def reset(self, *, seed=None, options=None):
                if options:
                    raise OptionError("no such option")
                return super().reset(seed=seed)

        with restarting(Choosy) as envs:
            envs.reset()
            with pytest.raises(OptionError, match="no such option"):
                envs.reset(options={"a": 1})
            assert envs.restarts == [0, 0]
            envs.reset()
            envs.step(ACTIONS)


class TestTheLimit:
    def test_past_it_the_last_error_comes_with_all_causes(self):
        makers = [Steps, Steps, lambda: Steps(("raise", 2)), Steps]
        with restarting(makers, max_restarts=2) as envs:
            envs.reset(seed=1)
            with pytest.raises(LookupError, match="broken") as caught:
                stepped(envs, 20)
            assert envs.restarts == [0, 2]
            assert envs.closed
        (note,) = caught.value.__notes__
        assert "replaced 2 times" in note
        assert note.count("LookupError: broken") == 2
        assert len(envs.told) == 2

    def test_none_at_all(self):
        with restarting([Steps, Steps, lambda: Steps(("kill", 1)), Steps], max_restarts=0) as envs:
            envs.reset()
            with pytest.raises(WorkerDied):
                envs.step(ACTIONS)

    def test_replacements_that_cannot_be_made_count(self, tmp_path):
        def made():
            if (tmp_path / "made").exists():
                raise LookupError("cannot be made again")
            (tmp_path / "made").touch()
            return Steps(("kill", 1))

        with restarting([Steps, Steps, made, Steps], max_restarts=3) as envs:
            envs.reset()
            start = time.monotonic()
            with pytest.raises(LookupError, match="made again") as caught:
                envs.step(ACTIONS)
            assert 0.3 < time.monotonic() - start < 5  # 0, 0.1 and 0.2 seconds apart
            assert "WorkerDied" in caught.value.__notes__[0]
            assert envs.closed

    def test_a_time_limit_holds_meanwhile(self, tmp_path):
        def made():
            if (tmp_path / "made").exists():
                time.sleep(0.5)
            (tmp_path / "made").touch()
            return Steps()

        with restarting([Steps, Steps, made, Steps], timeout=0.2) as envs:
            envs.reset()
            os.kill(envs.call("pid")[2], signal.SIGKILL)
            late = 0
            envs.step_async(ACTIONS)
            while True:
                try:
                    result = envs.step_wait()
                except WorkerTimeout:
                    late += 1
                    continue
                break
            assert late
            assert envs.restarts == [0, 1]
            assert result[3].tolist() == [False, False, True, True]


@pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_whenever_workers_are_killed_no_episodes_are_joined(groups):
    """Each lane counts up within a life; a new life begins with a truncation, or in a reset."""
    choose = random.Random(groups)
    options = {"max_restarts": None, "num_groups": groups, "worker_timeout": 20}
    with restarting(lambda: Steps(length=50), **options) as envs:
        before = envs.reset(seed=0)[0].copy()
        killed, end = 0, time.monotonic() + 2.5
        pids = list(envs.call("pid"))
        while time.monotonic() < end or killed < 6:
            if choose.random() < 0.02:
                worker = choose.randrange(2)
                os.kill(pids[2 * worker], signal.SIGKILL)
                killed += 1
            observations, rewards, _, truncations, infos = envs.step(ACTIONS)
            restarted = infos.get("restarted", np.zeros(4, bool))
            ended = truncations & ~restarted
            same = observations[:, 0] == before[:, 0]
            assert (same == ~restarted).all()
            assert (observations[:, 1] == np.where(truncations, 0, before[:, 1] + 1)).all()
            assert (rewards == np.where(restarted, 0, ACTIONS)).all()
            assert ("final_obs" in infos) == ended.any()
            if restarted.any():
                pids = list(envs.call("pid"))
            before = observations.copy()
        assert sum(envs.restarts) >= killed - 2
        assert all(each.category is WorkerRestarted for each in envs.told)
