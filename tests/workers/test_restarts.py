"""Workers that fail are started again: counts stay right, no episode is joined to another, and nothing hangs."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from collections import defaultdict
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from rlcollect import (
    AsyncCollector,
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    OptionError,
    SpaceError,
    WorkerDied,
    WorkerError,
    WorkerRestarted,
    WorkerTimeout,
)
from rlcollect.testing import Breaker, Counter, check_batch
from tests.workers.fault_helpers import is_alive, kill_worker, within, worker_process
from tests.workers.test_interrupts import interrupting

pytestmark = [pytest.mark.timeout(120), pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted")]
KINDS = [MultiSyncCollector, MultiAsyncCollector]
RESTART = {"on_worker_failure": "restart", "timeout": 60}
LENGTH = 7
PREFIX = 40
LIVES = itertools.count()  # of this process


class Life(gym.Env):
    """Observes which life it is in (a number of its own), its episode and t. Fails as it is told.

    Args:
        rate: the share of steps in which it raises.
        once: a file; in the life that makes it, `how` happens at step `at`.
        every: whether it fails in every life instead.
        wait: seconds of a step.
    """

    observation_space = spaces.Box(0, 2**24, (3,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, *, rate=0.0, once=None, at=0, how=None, wait=0.0):
        self.life = os.getpid() % 2**20 * 16 + next(LIVES) % 16  # drawn at random, a thousand would meet by chance
        self.random = random.Random(self.life)
        self.rate, self.at, self.how, self.wait = rate, at, how, wait
        self.is_first = once is None
        if once is not None:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(once, os.O_CREAT | os.O_EXCL))
                self.is_first = True
        self.episode, self.steps, self.seed = -1, 0, None

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.seed = self.seed if seed is None else seed
        self.episode += 1
        self.t = 0
        return self._observed(), {}

    def _observed(self):
        return np.array([self.life, self.episode, self.t], np.float32)

    def step(self, action):
        time.sleep(self.wait)
        self.steps += 1
        if self.how is not None and self.is_first and self.steps > self.at:
            self.how()
        if self.random.random() < self.rate:
            raise ValueError("it is unstable")
        self.t += 1
        return self._observed(), 1.0, self.t == LENGTH, False, {}


def fail():
    raise LookupError("it fell")


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def hang():
    time.sleep(600)


class Watch:
    """Looks at all batches: what came is whole episodes of one life each, in order, but for the last of a life."""

    def __init__(self, kind):
        self.kind = kind
        self.previous = None
        self.frames = 0
        self.episodes = defaultdict(list)  # by id
        self.lanes_of = {}
        self.order = []

    def add(self, batch):
        check_batch(batch, previous=self.previous if self.kind is MultiSyncCollector else None)
        self.previous = batch
        flat = batch.reshape(-1, batch.shape[-1]) if batch.ndim > 1 else batch[None]
        for lane in flat.unbind(0):
            mask = lane.get(("collector", "mask"), None)
            lane = lane if mask is None else lane[mask]
            self.frames += len(lane)
            for trajectory, now, after in zip(
                lane["collector", "traj_ids"].tolist(),
                lane["observation"].tolist(),
                lane["next", "observation"].tolist(),
                strict=True,
            ):
                assert after == [now[0], now[1], now[2] + 1], "the next observation is of the same episode"
                self.episodes[trajectory].append(tuple(now))
        return batch

    def check(self):
        seen = set()
        for trajectory, frames in self.episodes.items():
            life, episode, _ = frames[0]
            assert frames == [(life, episode, float(t)) for t in range(len(frames))], trajectory
            assert len(frames) <= LENGTH
            assert (life, episode) not in seen, "an episode has one id"
            seen.add((life, episode))

    @property
    def lives(self):
        return {frames[0][0] for frames in self.episodes.values()}


@contextlib.contextmanager
def killing(seconds=0.8, times=6):
    """Kills one of the workers now and then; so often at most, lest on a busy machine none ever gets on."""
    stop = threading.Event()

    def kill():
        for _ in range(times):
            if stop.wait(random.uniform(0.3, 1.0) * seconds):
                return
            with contextlib.suppress(StopIteration, ProcessLookupError, ValueError):
                process = worker_process(random.randrange(2))
                os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def run(kind, makers, frames, *, each=100, meanwhile=contextlib.nullcontext, **options):
    watch = Watch(kind)
    with kind(makers, frames_per_batch=each, total_frames=frames, **{**RESTART, **options}) as collector, meanwhile():
        for batch in collector:
            watch.add(batch)
        assert collector.collected_frames == collector.total_frames == watch.frames
        stats = collector.stats()
    watch.check()
    return watch, stats


def in_short(soon):
    """Both kinds, of which the other is for the long run: what is of its own in it is seen in the tests beside."""
    return pytest.mark.parametrize(
        "kind", [pytest.param(kind, marks=() if kind is soon else pytest.mark.slow) for kind in KINDS]
    )


sync_soon, async_soon = in_short(MultiSyncCollector), in_short(MultiAsyncCollector)


class TestUnstableOnes:
    @pytest.mark.parametrize(
        ("kind", "lanes", "steps", "frames"),
        [
            (MultiAsyncCollector, None, 500, 5000),
            pytest.param(MultiSyncCollector, None, 500, 5000, marks=pytest.mark.slow),
            *(
                pytest.param(kind, *each, marks=pytest.mark.slow)
                for kind in KINDS
                for each in ((3, 300, 3000), (None, 1000, 20_000), (3, 1000, 6000))
            ),
        ],
    )
    def test_that_raise_in_one_step_of_many(self, kind, lanes, steps, frames):
        """FAULTS 62 and 64."""
        makers = [lambda: Life(rate=1 / steps)] * 2
        watch, stats = run(kind, makers, frames, each=300, num_envs=lanes, max_restarts=None)
        restarts = sum(each.restarts for each in stats.workers)
        assert restarts > 1
        assert len(watch.lives) <= (2 + restarts) * (lanes or 1)
        assert sum(each.dropped for each in stats.workers) == 0, "but for the steps that failed nothing is lost"

    @sync_soon
    def test_that_are_killed_meanwhile(self, kind):
        makers = [lambda: Life(rate=0.001, wait=0.001)] * 2
        watch, stats = run(kind, makers, 4000, each=200, max_restarts=None, meanwhile=killing)
        assert sum(each.restarts for each in stats.workers) > 1
        assert len(watch.lives) > 3

    @async_soon
    def test_breakers(self, kind):
        makers = [lambda: Breaker(share=0.01)] * 2
        frames, previous = 0, None
        with kind(makers, frames_per_batch=40, total_frames=1000, max_restarts=None, **RESTART) as collector:
            for batch in collector:
                check_batch(batch, previous=previous if kind is MultiSyncCollector else None)
                frames, previous = frames + batch.numel(), batch
            assert sum(each.restarts for each in collector.stats().workers) > 0
        assert frames == 1000

    @pytest.mark.slow
    @pytest.mark.timeout(900)
    @pytest.mark.parametrize("kind", KINDS)
    def test_that_raise_in_one_step_of_a_hundred(self, kind):
        makers = [lambda: Life(rate=0.01)] * 2
        _, stats = run(kind, makers, 100_000, each=1000, max_restarts=None, meanwhile=lambda: killing(2.0, 10_000))
        assert sum(each.restarts for each in stats.workers) > 500

    @pytest.mark.parametrize("options", [{}, {"stragglers": "continue"}, {"cat_results": -1}], ids=str)
    @pytest.mark.slow
    def test_with_workers_that_are_late(self, options):
        makers = [lambda: Life(rate=0.004), lambda: Life(rate=0.004, wait=0.002)]
        frames = 0
        with MultiSyncCollector(
            makers, frames_per_batch=100, total_frames=1600, max_restarts=None, preemptive_threshold=0.5,
            **RESTART, **options,
        ) as collector:  # fmt: skip
            watch = Watch(None)
            for batch in collector:
                watch.add(batch) if "cat_results" not in options else None
                frames += int(batch.get(("collector", "mask"), torch.ones(batch.shape)).sum())
            assert collector.collected_frames == frames == 1600
        watch.check()

    @sync_soon
    def test_of_which_not_every_step_is_a_frame(self, kind):
        """Of vector environments that reset at the next step nothing stands but whole rollouts."""

        def vector():
            class Plain(SyncVectorEnv):  # no class that is known to take a reset mask
                pass

            return Plain([lambda: Life(rate=0.005)] * 3, autoreset_mode=AutoresetMode.NEXT_STEP)

        watch = Watch(None)
        with kind([vector] * 2, frames_per_batch=60, total_frames=1500, max_restarts=None, **RESTART) as collector:
            for batch in collector:
                watch.add(batch)
            assert collector.collected_frames == watch.frames == 1500
            assert sum(each.restarts for each in collector.stats().workers) > 0
        watch.check()

    @pytest.mark.parametrize("kind", KINDS)
    def test_ctrl_c_in_any_call_of_next(self, kind):
        makers, watch, interrupted = [lambda: Life(rate=0.01)] * 2, Watch(None), 0
        with kind(makers, frames_per_batch=8, max_restarts=None, **RESTART) as collector:
            for number in range(1, 200, 2):
                with contextlib.suppress(KeyboardInterrupt), interrupting(number) as places:
                    batch = collector.next()
                    watch.add(batch)
                interrupted += places.calls >= number
            for _ in range(10):
                watch.add(collector.next())
        assert interrupted > 20
        watch.check()


class TestWhatStands:
    def test_frames_that_were_made_before_a_kill(self, tmp_path):
        """DESIGN 9.10: at most the frame under way is lost where steps take longer than a part does."""
        makers = [lambda: Life(once=tmp_path / "it", at=12, how=die, wait=0.05)]
        with pytest.warns(WorkerRestarted, match=r"worker 0 .*1 of at most 10.*SIGKILL") as warned:
            watch, stats = run(MultiSyncCollector, makers, 30, each=30)
        (note,) = [each.message for each in warned if isinstance(each.message, WorkerRestarted)]
        assert note.worker == 0
        assert isinstance(note.cause, WorkerDied)
        first, second = (
            [frame for frames in watch.episodes.values() for frame in frames if frame[0] == life]
            for life in dict.fromkeys(frames[0][0] for frames in watch.episodes.values())
        )
        assert (len(first), len(second)) == (12, 18)
        assert stats.workers[0].restarts == 1

    @pytest.mark.parametrize("kind", KINDS)
    def test_the_unfinished_episode_is_cut(self, kind, tmp_path):
        makers = [lambda: Life(once=tmp_path / "it", at=10, how=fail)] * 2
        watch, _ = run(kind, makers, 80, each=40)
        ended = [len(frames) for frames in watch.episodes.values()]
        assert 3 in ended, "the second episode of the life that failed"
        prefixes = {trajectory >> PREFIX for trajectory in watch.episodes}
        assert prefixes == {0, 1, 2}, "a fresh prefix for the worker that came in its place"

    def test_a_warm_up_goes_on(self, tmp_path):
        makers = [lambda: Life(once=tmp_path / "it", at=10, how=fail)]

        def policy(observation):
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

        versions = []
        with MultiSyncCollector(
            makers, policy, frames_per_batch=20, total_frames=60, init_random_frames=24, **RESTART
        ) as collector:
            for batch in collector:
                versions += batch["collector", "policy_version"].flatten().tolist()
        assert versions == [-1] * 24 + [0] * 36

    def test_what_was_counted_of_those_before(self, tmp_path):
        makers = [lambda: Life(once=tmp_path / "it", at=70, how=fail)]
        _, stats = run(MultiSyncCollector, makers, 140, each=35)
        assert stats.episodes == 20
        assert stats.episode_length.mean == LENGTH


class TestWeights:
    @pytest.mark.parametrize(
        ("kind", "alone"),
        [
            (MultiSyncCollector, False),
            (MultiAsyncCollector, True),
            pytest.param(MultiSyncCollector, True, marks=pytest.mark.slow),
            pytest.param(MultiAsyncCollector, False, marks=pytest.mark.slow),
        ],
    )
    def test_the_newest_that_were_addressed_to_it(self, kind, alone):
        class Says(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.value = torch.nn.Parameter(torch.zeros(()))

            def forward(self, observation):
                action = torch.zeros(observation.shape[:-1], dtype=torch.int64)
                return {"action": action, "said": self.value.expand(action.shape)}

        policy = Says()
        with kind([Life] * 2, policy, frames_per_batch=20, **RESTART) as collector:
            collector.next()
            with torch.no_grad():
                policy.value.fill_(5)
            collector.update_policy_weights_()
            if alone:
                with torch.no_grad():
                    policy.value.fill_(9)
                collector.update_policy_weights_(worker_ids=1)
            kill_worker(1)
            expected = {0: (1, 5.0), 1: (2, 9.0) if alone else (1, 5.0)}
            seen, end = {}, time.monotonic() + 30
            while not {0, 2} <= {*seen} or seen[0] != expected[0]:
                assert time.monotonic() < end
                batch = collector.next()
                for part in batch.unbind(0) if kind is MultiSyncCollector else [batch]:
                    prefix = int(part["collector", "traj_ids"][-1]) >> PREFIX
                    seen[prefix] = (int(part["collector", "policy_version"][-1]), float(part["said"].flatten()[-1]))
            assert seen[2] == expected[1]


class TestSeeds:
    def seeds(self, static=False, given=7):
        with MultiSyncCollector([Life] * 2, frames_per_batch=20, **RESTART) as collector:
            collector.set_seed(given, static_seed=static) if static else collector.set_seed(given)
            collector.next()
            before = collector.map_fn(lambda envs: envs[0].seed)
            kill_worker(0)
            collector.next()
            return before, collector.map_fn(lambda envs: envs[0].seed)

    @pytest.mark.parametrize("given", [7, [3, 4]])
    def test_are_fresh_children_and_the_same_run_after_run(self, given):
        before, after = self.seeds(given=given)
        assert before[1] == after[1]
        assert after[0] not in before
        assert (before, after) == self.seeds(given=given)

    def test_static_ones(self):
        before, after = self.seeds(static=True)
        assert before[0] == before[1] == after[1] != after[0]


class TestHangs:
    @sync_soon
    def test_a_step_that_never_ends(self, kind, tmp_path):
        makers = [lambda: Life(once=tmp_path / "it", at=10, how=hang)] * 2
        with within(40), pytest.warns(WorkerRestarted, match="no sign of life"):
            _, stats = run(kind, makers, 120, each=40, worker_timeout=1.0)
        assert sum(each.restarts for each in stats.workers) == 1

    def test_a_slow_one_is_no_hung_one(self):
        _, stats = run(MultiSyncCollector, [lambda: Life(wait=0.1)], 20, each=10, worker_timeout=1.0)
        assert stats.workers[0].restarts == 0

    def test_one_that_rests_is_no_hung_one(self):
        with MultiSyncCollector([Life] * 2, frames_per_batch=20, worker_timeout=0.5, **RESTART) as collector:
            collector.next()
            time.sleep(1)
            collector.next()
            assert [each.restarts for each in collector.stats().workers] == [0, 0]

    def test_one_that_is_stopped_by_a_signal(self):
        with MultiSyncCollector([Life] * 2, frames_per_batch=20, worker_timeout=1.0, **RESTART) as collector:
            collector.next()
            os.kill(worker_process(1).pid, signal.SIGSTOP)
            with within(40):
                collector.next()
            assert [each.restarts for each in collector.stats().workers] == [0, 1]


class TestLimit:
    @sync_soon
    def test_past_it_the_error_comes_with_all_causes(self, kind):
        with (
            kind([lambda: Life(at=3, how=fail)] * 2, frames_per_batch=40, max_restarts=2, **RESTART) as collector,
            warnings.catch_warnings(record=True) as warned,
        ):
            warnings.simplefilter("always")
            with within(30), pytest.raises(LookupError, match="it fell") as raised:
                list(collector)
            assert isinstance(raised.value.__cause__, WorkerError)
            (note,) = raised.value.__notes__
            assert "max_restarts=2" in note
            assert note.count("it fell") == 2, "and the error itself"
            assert collector.closed
        assert sum(issubclass(each.category, WorkerRestarted) for each in warned) in (2, 3, 4)

    def test_a_death(self):
        with MultiSyncCollector(
            [lambda: Life(at=3, how=die)], frames_per_batch=40, max_restarts=1, **RESTART
        ) as collector:
            with within(30), pytest.raises(WorkerDied, match="SIGKILL"):
                collector.next()
            assert collector.closed

    def test_attempts_in_a_row_wait_longer_each_time(self):
        """No progress is made in between: the first step fails."""
        with MultiSyncCollector(
            [lambda: Life(at=0, how=fail)], frames_per_batch=40, max_restarts=4, **RESTART
        ) as collector:
            start = time.monotonic()
            with pytest.raises(LookupError):
                collector.next()
            assert time.monotonic() - start >= 0.1 + 0.2 + 0.4

    def test_one_that_cannot_be_made_again(self, tmp_path):
        def maker():
            if (tmp_path / "it").exists():
                raise ConnectionError("the licence is taken")
            return Life(once=tmp_path / "it", at=3, how=fail)

        with MultiSyncCollector([maker], frames_per_batch=40, max_restarts=2, **RESTART) as collector:
            with within(30), pytest.raises(ConnectionError, match="licence") as raised:
                collector.next()
            assert "it fell" in raised.value.__notes__[0]

    def test_one_that_becomes_another(self, tmp_path):
        def maker():
            return Counter(5) if (tmp_path / "it").exists() else Life(once=tmp_path / "it", at=3, how=fail)

        with MultiSyncCollector([maker], frames_per_batch=40, **RESTART) as collector:
            with within(30), pytest.raises(SpaceError, match="differs"):
                collector.next()
            assert collector.closed

    def test_at_construction_nothing_is_tried_again(self):
        def maker():
            raise ConnectionError("no licence")

        with pytest.raises(ConnectionError):
            MultiSyncCollector([maker], frames_per_batch=40, **RESTART)


class TestOtherCommands:
    @async_soon
    def test_to_one_that_died_are_answered_by_the_next(self, kind):
        with kind([Life] * 2, frames_per_batch=20, **RESTART) as collector:
            for _ in range(4):
                collector.next()
            for command in (
                lambda: collector.map_fn(lambda envs: envs[0].steps),
                lambda: collector.set_seed(3),
                collector.reset,
                collector.state_dict,
            ):
                kill_worker(0)
                command()
                collector.next()
            assert [each.restarts for each in collector.stats().workers] == [4, 0]

    def test_what_a_function_raises_is_only_raised(self):
        with MultiSyncCollector([Life], frames_per_batch=20, **RESTART) as collector:
            with pytest.raises(ZeroDivisionError):
                collector.map_fn(lambda envs: 1 / 0)
            collector.next()
            assert collector.stats().workers[0].restarts == 0

    def test_ids_after_a_load_are_new(self):
        with MultiSyncCollector([Life] * 2, frames_per_batch=20, **RESTART) as collector:
            kill_worker(1)
            ids = {*collector.next()["collector", "traj_ids"].flatten().tolist()}
            state = collector.state_dict()
        with MultiSyncCollector([Life] * 2, frames_per_batch=20, **RESTART) as collector:
            collector.load_state_dict(state)
            kill_worker(0)
            for _ in range(3):
                assert not ids & {*collector.next()["collector", "traj_ids"].flatten().tolist()}

    @pytest.mark.parametrize("kind", [*KINDS, pytest.param(AsyncCollector, marks=pytest.mark.slow)])
    def test_nothing_is_left_behind(self, kind):
        makers = Life if kind is AsyncCollector else [Life] * 2
        with kind(makers, frames_per_batch=20, **RESTART) as collector:
            collector.next()
            worker = worker_process(0).pid
            kill_worker(0)
            while collector.stats().workers[0].restarts == 0:
                collector.next()
            workers = [worker, *(each.pid for each in multiprocessing.active_children())]
            collector.map_fn(len)  # all that was sent has come
            descriptors = len([*Path("/proc/self/fd").iterdir()])
            kill_worker(0)
            while collector.stats().workers[0].restarts == 1:
                collector.next()
            collector.map_fn(len)
            assert len([*Path("/proc/self/fd").iterdir()]) == descriptors
        assert not any(is_alive(pid) for pid in workers)

    def test_one_that_died_while_the_program_learned(self):
        with MultiAsyncCollector([Life] * 2, frames_per_batch=20, **RESTART) as collector:
            collector.next()
            kill_worker(0)
            kill_worker(1)
            for _ in range(8):
                collector.next()
            assert [each.restarts for each in collector.stats().workers] == [1, 1]


class TestOptions:
    def test_what_is_done(self):
        with pytest.raises(OptionError, match="on_worker_failure"):
            MultiSyncCollector([Life], frames_per_batch=20, on_worker_failure="ignore")

    def test_a_time_needs_restarts(self):
        with pytest.raises(OptionError, match=r"worker_timeout.*timeout="):
            MultiSyncCollector([Life], frames_per_batch=20, worker_timeout=1.0)

    @pytest.mark.parametrize("name", ["on_worker_failure", "max_restarts", "worker_timeout"])
    def test_are_of_worker_processes(self, name):
        with pytest.raises(OptionError, match=name):
            Collector(Life, frames_per_batch=20, **{name: "restart"})

    def test_workers_that_hold_collectors(self):
        with pytest.raises(OptionError, match="collector_class"):
            MultiSyncCollector([Life], frames_per_batch=20, collector_class=Collector, **RESTART)


class TestWhatAReviewFound:
    @pytest.mark.parametrize("wait", [0.0, pytest.param(0.004, marks=pytest.mark.slow)])
    def test_random_frames_are_exact_after_one_that_hangs(self, wait, tmp_path):
        """What a worker still makes while it is ended stands too, and is counted."""

        class Hangs(Life):
            def step(self, action):
                try:
                    return super().step(action)
                finally:
                    if self.is_first and self.steps == 40:
                        time.sleep(600)

        with MultiSyncCollector(
            [lambda: Hangs(once=tmp_path / "it", wait=wait)],
            lambda observation: torch.zeros(observation.shape[:-1], dtype=torch.int64),
            frames_per_batch=100,
            total_frames=200,
            init_random_frames=150,
            worker_timeout=1.0,
            **RESTART,
        ) as collector:
            versions = [version for batch in collector for version in batch["collector", "policy_version"].flatten()]
        assert [int(version) for version in versions] == [-1] * 150 + [0] * 50

    @pytest.mark.parametrize("start_timeout", [None, pytest.param(30.0, marks=pytest.mark.slow)])
    def test_a_slow_start_is_no_hang(self, start_timeout, tmp_path):
        def maker():
            if (tmp_path / "it").exists():
                time.sleep(1.5)
            return Life(once=tmp_path / "it", at=5, how=fail)

        _, stats = run(
            MultiSyncCollector, [maker], 20, each=10, worker_timeout=0.5, start_timeout=start_timeout, max_restarts=1
        )
        assert stats.workers[0].restarts == 1

    def test_batches_that_cross_give_signs_of_life_too(self):
        _, stats = run(
            MultiSyncCollector, [lambda: Life(wait=0.03)], 60, each=60, worker_timeout=0.6, use_buffers=False
        )
        assert stats.workers[0].restarts == 0

    def test_a_death_is_not_told_as_a_hang(self):
        with MultiSyncCollector([Life] * 3, frames_per_batch=30, worker_timeout=0.3, **RESTART) as collector:
            collector.next()
            time.sleep(0.5)
            kill_worker(2)
            with pytest.warns(WorkerRestarted) as warned:
                collector.next()
            assert [each.restarts for each in collector.stats().workers] == [0, 0, 1]
        (note,) = [each.message for each in warned if isinstance(each.message, WorkerRestarted)]
        assert "SIGKILL" in str(note.cause)

    def test_asking_again_and_again_hides_no_hang(self, tmp_path):
        with MultiAsyncCollector(
            [lambda: Life(once=tmp_path / "it", at=10, how=hang)],
            frames_per_batch=100,
            worker_timeout=1.5,
            on_worker_failure="restart",
            timeout=0.5,
        ) as collector:
            with pytest.raises(WorkerTimeout):
                collector.next()
            end = time.monotonic() + 30
            while collector.stats().workers[0].restarts == 0:
                with contextlib.suppress(WorkerTimeout):
                    collector.state_dict()
                assert time.monotonic() < end

    def test_a_state_in_the_middle_of_a_restart_is_whole(self, tmp_path):
        makers = [lambda: Life(once=tmp_path / "it", at=150, how=die, wait=0.001)]

        def policy(observation):
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

        def count(batches):
            return sum(int((batch["collector", "policy_version"] == -1).sum()) for batch in batches)

        options = {"frames_per_batch": 100, "total_frames": 600, "init_random_frames": 300, **RESTART}
        with MultiAsyncCollector(makers, policy, **options) as collector:
            made = count([collector.next()])
            living = [each for each in multiprocessing.active_children() if each.name == "rlcollect-0"]
            while not (tmp_path / "it").exists() or any(each.is_alive() for each in living):
                time.sleep(0.01)  # it has died in its second rollout
            state = collector.state_dict()
        with MultiAsyncCollector(makers, policy, **options) as collector:
            collector.load_state_dict(state)
            assert made + count(collector) == 300

    def test_weights_of_a_state_are_for_those_that_come_after_too(self):
        class Says(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.value = torch.nn.Parameter(torch.zeros(()))

            def forward(self, observation):
                action = torch.zeros(observation.shape[:-1], dtype=torch.int64)
                return {"action": action, "said": self.value.expand(action.shape)}

        learned = Says()
        with torch.no_grad():
            learned.value.fill_(7)
        with MultiSyncCollector([Life], policy_factory=Says, frames_per_batch=10, **RESTART) as collector:
            collector.update_policy_weights_(learned)
            collector.next()
            state = collector.state_dict()
            with torch.no_grad():
                learned.value.fill_(3)
            collector.update_policy_weights_(learned)
            assert (collector.next()["said"] == 3).all()
            collector.load_state_dict(state)
            for _ in range(2):
                batch = collector.next()
                assert (batch["said"] == 7).all()
                assert (batch["collector", "policy_version"] == 1).all()
                kill_worker(0)

    def test_a_state_has_the_episodes_of_those_before(self):
        with MultiSyncCollector([Life], frames_per_batch=70, **RESTART) as collector:
            collector.next()
            kill_worker(0)
            collector.next()
            state = collector.state_dict()
            assert collector.stats().episodes == 20
        with MultiSyncCollector([Life], frames_per_batch=70, **RESTART) as collector:
            collector.load_state_dict(state)
            assert collector.stats().episodes == 20

    def test_once_too_often_while_another_command_is_waited_for(self):
        with MultiAsyncCollector(
            [lambda: Life(at=30, how=fail, wait=0.01)], frames_per_batch=100, max_restarts=1, **RESTART
        ) as collector:
            with contextlib.suppress(LookupError):
                collector.next()
            if not collector.closed:
                with pytest.raises(LookupError):
                    collector.map_fn(len)
            assert collector.closed

    def test_what_cannot_cross_to_one_that_is_not_there_yet(self):
        with MultiAsyncCollector(
            [lambda: Life(at=0, how=fail)] * 2, frames_per_batch=20, max_restarts=None, on_worker_failure="restart",
            timeout=1.0,
        ) as collector:  # fmt: skip
            with pytest.raises(WorkerTimeout):
                collector.next()  # both wait for their next attempt by now
            lock = threading.Lock()
            with pytest.raises(OptionError, match="map_fn"):
                collector.map_fn(lambda envs: lock.locked())

    def test_batches_of_a_state_are_not_the_users(self):
        with MultiSyncCollector(
            [lambda: Life(wait=0.0), lambda: Life(wait=0.02)], frames_per_batch=20, return_same_td=True,
            preemptive_threshold=0.5, stragglers="continue", timeout=60,
        ) as collector:  # fmt: skip
            batch = collector.next()
            kept = batch.clone()
            collector.state_dict()
            assert (batch == kept).all()
