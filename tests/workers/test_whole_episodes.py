"""`trajs_per_batch` where workers make the rollouts: whole episodes in order, however and whenever these come."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import time
from collections import Counter as Tally
from collections import defaultdict

import pytest
import torch

from rlcollect import (
    AsyncCollector,
    Collector,
    EnvError,
    MultiAsyncCollector,
    MultiSyncCollector,
    OptionError,
    WorkerError,
    WorkerTimeout,
)
from rlcollect.testing import Tagged
from tests.collectors.helpers import WholeEpisodes, episodes_of
from tests.workers.fault_helpers import kill_worker
from tests.workers.helpers import PREFIX, PROCESSES, Kind, length_of, of, tagged_lane
from tests.workers.test_interrupts import interrupting
from tests.workers.test_restarts import LENGTH, RESTART, Life
from tests.workers.test_stragglers import Uneven

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted")]
every_process_kind = of(PROCESSES)
both = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
LANES = 2


class TaggedLanes:
    """Makes lane after lane of a worker: tag `10 * worker + lane`, of a length of its own."""

    def __init__(self, worker):
        self.tags = itertools.count(10 * worker)

    def __call__(self):
        return tagged_lane(next(self.tags))


class LongLanes:
    """The same with lengths of which none divides the steps of a few rollouts: an episode is open after each."""

    def __init__(self, worker):
        self.lanes = zip(itertools.count(10 * worker), [(11, 13), (17, 19)][worker], strict=False)

    def __call__(self):
        return Tagged(*next(self.lanes))


def opened(kind: Kind, lanes=TaggedLanes, **options):
    return kind.open(lanes, lanes=LANES, **{"trajs_per_batch": 3, "timeout": 30, **options})


def steps_of(collector):
    """Frames that the environments have made, when nothing is under way any more."""
    before, made = -1, 0
    while made != before:
        time.sleep(0.03)
        before, made = made, sum(sum(each) for each in collector.map_fn(lambda envs: [env.steps for env in envs]))
    return made


class TestEveryKind:
    @every_process_kind
    @pytest.mark.parametrize("traj_order", ["started", "lanes"])
    def test_whole_episodes_in_order(self, kind, traj_order):
        seen = WholeEpisodes(3)
        with opened(kind, traj_order=traj_order, steps=5, total_frames=400) as collector:
            for batch in collector:
                seen.add(batch)
                collector.update_policy_weights_()
            assert collector.collected_frames == seen.frames >= 400
            assert sum(collector.policy_lag.values()) == 0, "random frames do not count"
            with pytest.raises(TypeError, match="episodes have any length"):
                len(collector)
            made = steps_of(collector)
            assert collector.stats().frames + collector.stats().dropped == made
        assert {(tag, count) for tag, _, count in seen.episodes} == {
            (tag, length_of(tag)) for worker in range(kind.workers) for tag in range(10 * worker, 10 * worker + LANES)
        }
        if traj_order == "started":
            seen.check_none_is_missing()
        else:
            tags = [tag for tag, _, _ in seen.episodes]
            round_of_all = sorted({*tags})
            assert tags == [round_of_all[number % len(round_of_all)] for number in range(len(tags))]

    @every_process_kind
    @pytest.mark.parametrize(
        "options", [{"use_buffers": False, "traj_format": "cat"}, {"traj_format": "nested"}], ids=str
    )
    def test_however_rollouts_come(self, kind, options):
        seen, kept = WholeEpisodes(3), []
        with opened(kind, steps=5, record="worker", **options) as collector:
            for _ in range(20):
                batch = seen.add(collector.next())
                for episode in episodes_of(batch):
                    worker = int(episode["observation"][0, 0]) // 10
                    assert set(episode["collector", "worker"].tolist()) == {worker}
                    assert set((episode["collector", "traj_ids"] >> PREFIX).tolist()) == {worker}
                kept.append((batch, batch.clone()) if "nested" not in options.values() else (batch, batch))
        seen.check_none_is_missing()
        assert all((batch == copy).all() for batch, copy in kept if batch is not copy)

    def test_workers_make_what_one_process_makes(self):
        """By start, of sync workers: the same episodes as lanes of one process, in the same order."""
        lengths = (2, 7, 3, 5)
        runs = []
        for cls, sources in (
            (Collector, [functools.partial(Tagged, tag, length) for tag, length in enumerate(lengths)]),
            (
                MultiSyncCollector,
                [[functools.partial(Tagged, 2 * w + i, lengths[2 * w + i]) for i in (0, 1)] for w in (0, 1)],
            ),
        ):
            seen = WholeEpisodes(3)
            with cls(sources, frames_per_batch=24, total_frames=300, trajs_per_batch=3) as collector:
                for batch in collector:
                    seen.add(batch)
            runs.append(seen.episodes)
        assert runs[0] == runs[1]

    def test_an_asynchronous_learner_knows_the_lag(self):
        class Policy(torch.nn.Linear):
            def forward(self, observation):
                return super().forward(observation).argmax(-1)

        lags, versions = Tally(), 0
        with AsyncCollector(
            TaggedLanes(0), Policy(3, 2), num_envs=2, frames_per_batch=20, trajs_per_batch=4, timeout=30
        ) as collector:
            for _ in range(20):
                batch = collector.next()
                mask = batch["collector", "mask"]
                lags.update((versions - batch["collector", "policy_version"][mask]).tolist())
                versions = collector.update_policy_weights_()
            assert collector.policy_lag == dict(sorted(lags.items()))


class TestStragglers:
    @pytest.mark.parametrize(
        ("stragglers", "options"),
        [
            ("stop", {"record": ("worker", "mask")}),
            ("continue", {}),
            ("continue", {"use_buffers": False}),
            pytest.param("stop", {}, marks=pytest.mark.slow),
            pytest.param("stop", {"use_buffers": False}, marks=pytest.mark.slow),
            pytest.param("continue", {"record": ("worker", "mask")}, marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_none_is_lost_whoever_is_late(self, stragglers, options):
        """Rows that a late worker has not made are marked, at the end of its rollout; or it comes later."""
        seen = WholeEpisodes(4)
        with MultiSyncCollector(
            [functools.partial(Uneven, worker, wait) for worker, wait in enumerate([(0,), (1, 0), (4, 0, 0)])],
            frames_per_batch=3 * 12,
            trajs_per_batch=4,
            preemptive_threshold=0.5,
            stragglers=stragglers,
            timeout=30,
            **options,
        ) as collector:
            while len({tag for tag, _, _ in seen.episodes}) < 3 or len(seen.episodes) < 60:
                seen.add(collector.next())
            stats = collector.stats()
            assert (stats.workers[2].preempted > 0) == (stragglers == "stop")
            assert (stats.late is not None) == (stragglers == "continue")
        seen.check_none_is_missing()


class TestHosted:
    @both
    def test_collectors_in_workers(self, kind):
        """Their ids and numbers of workers are made the pool's."""
        seen = WholeEpisodes(3)
        with kind(
            [TaggedLanes(0), TaggedLanes(1)],
            collector_class=Collector,
            num_envs=2,
            frames_per_batch=40,
            trajs_per_batch=3,
            record="worker",
            max_frames_per_traj=5,
            timeout=30,
        ) as collector:
            while len({tag for tag, _, _ in seen.episodes}) < 4:
                seen.add(collector.next())
        seen.check_none_is_missing()
        assert {tag for tag, _, _ in seen.episodes} == {0, 1, 10, 11}
        assert max(count for _, _, count in seen.episodes) == 5


class LivesWatched(WholeEpisodes):
    """Episodes of `Life`: which life it is stands where the tag does."""


class TestRestarts:
    @pytest.mark.timeout(120)
    @both
    def test_what_was_cut_is_dropped_and_all_else_is_whole(self, kind):
        seen = LivesWatched(4)
        with kind(
            [functools.partial(Life, rate=0.01), Life],
            frames_per_batch=30,
            trajs_per_batch=4,
            max_restarts=None,
            **RESTART,
        ) as collector:
            while len({life for life, _, _ in seen.episodes}) < 4 or not collector.stats().dropped:
                seen.add(collector.next())
            assert collector.stats().workers[0].restarts >= 2
            assert collector.collected_frames == seen.frames
        assert {count for _, _, count in seen.episodes} == {LENGTH}
        by_life = defaultdict(list)
        for life, number, _ in seen.episodes:
            by_life[life].append(number)
        for numbers in by_life.values():
            assert numbers == list(range(numbers[0], numbers[0] + len(numbers))), "in order"

    @both
    def test_killed_twice_between_two_batches(self, kind):
        seen = LivesWatched(2)
        with kind([Life] * 2, frames_per_batch=20, trajs_per_batch=2, **RESTART) as collector:
            for _ in range(2):
                kill_worker(1)
                for _ in range(4):
                    seen.add(collector.next())
            assert collector.stats().workers[1].restarts == 2
        assert {count for _, _, count in seen.episodes} == {LENGTH}


class TestBrokenOff:
    @both
    def test_a_time_out_in_the_middle_of_a_batch(self, kind):
        """Some rollouts of it have come, and stay."""
        seen, late = WholeEpisodes(6), 0
        with kind(
            [functools.partial(Uneven, worker, (12,)) for worker in range(2)],
            frames_per_batch=4,
            trajs_per_batch=6,
            timeout=0.02,
            start_timeout=30,
        ) as collector:
            deadline = time.monotonic() + 30
            while len(seen.episodes) < 18 and time.monotonic() < deadline:
                try:
                    seen.add(collector.next())
                except WorkerTimeout:
                    late += 1
                    assert collector.collected_frames == seen.frames
        assert late > 3
        assert len(seen.episodes) >= 18
        seen.check_none_is_missing()

    @both
    def test_ctrl_c_in_any_call_of_next(self, kind):
        seen, interrupted = WholeEpisodes(2), 0
        with kind(
            [functools.partial(Tagged, 0, 3), functools.partial(Tagged, 1, 5)],
            frames_per_batch=8,
            trajs_per_batch=2,
            traj_format="cat",
            timeout=20,
        ) as collector:
            for number in range(1, 320, 2):
                with contextlib.suppress(KeyboardInterrupt), interrupting(number) as calls:
                    batch = collector.next()
                    seen.add(batch)
                interrupted += calls.calls >= number
                seen.add(collector.next())
            assert collector.collected_frames == seen.frames
            assert collector.stats().dropped == 0
        assert interrupted > 60
        seen.check_none_is_missing()

    def test_ctrl_c_while_a_rollout_is_taken(self, monkeypatch):
        """It is taken once."""
        seen = WholeEpisodes(2)
        with MultiSyncCollector([functools.partial(Tagged, 0, 3)], frames_per_batch=8, trajs_per_batch=2) as collector:
            seen.add(collector.next())
            order = collector._supply._assembly._order
            admit, calls = order.admit, itertools.count()

            def interrupted(episode):
                if next(calls) == 1:
                    signal.raise_signal(signal.SIGINT)
                return admit(episode)

            monkeypatch.setattr(order, "admit", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(collector)
            for _ in range(4):
                seen.add(collector.next())
            assert next(calls) > 4
        seen.check_none_is_missing()

    @both
    def test_ctrl_c_in_a_postprocessing(self, kind):
        calls = itertools.count()

        def spoiled(batch):
            if next(calls) % 2 == 0:
                batch.zero_()
                signal.raise_signal(signal.SIGINT)
            return batch

        seen = WholeEpisodes(2)
        with kind(
            [functools.partial(Tagged, 0, 3), functools.partial(Tagged, 1, 5)],
            frames_per_batch=8,
            trajs_per_batch=2,
            postproc=spoiled,
            timeout=20,
        ) as collector:
            for _ in range(20):
                with contextlib.suppress(KeyboardInterrupt):
                    seen.add(collector.next())
            assert collector.stats().dropped == 0
        assert len(seen.episodes) == 20
        seen.check_none_is_missing()

    @both
    def test_a_postprocessing_that_raises_closes_it(self, kind):
        with kind(
            [functools.partial(Tagged, 0, 3)] * 2, frames_per_batch=8, trajs_per_batch=2, postproc=len
        ) as collector:
            assert collector.next() == 2
        with kind(
            [functools.partial(Tagged, 0, 3)] * 2, frames_per_batch=8, trajs_per_batch=2, postproc=lambda batch: 1 / 0
        ) as collector:
            with pytest.raises(ZeroDivisionError) as caught:
                collector.next()
            assert isinstance(caught.value.__cause__, WorkerError)
            assert collector.closed

    @both
    def test_one_that_never_ends(self, kind):
        with kind(
            [functools.partial(Tagged, 0, 3), functools.partial(Tagged, 1, None)],
            frames_per_batch=40,
            trajs_per_batch=2,
            max_open_frames=200,
            timeout=20,
        ) as collector:
            with pytest.raises(EnvError, match=r"lane 1 \(counted over all workers\)"):
                list(collector)
            assert collector.closed


class TestTalkingToIt:
    @every_process_kind
    def test_cuts(self, kind):
        seen = WholeEpisodes(2)
        with opened(kind, LongLanes, steps=7, trajs_per_batch=2) as collector:
            for number in range(24):
                seen.add(collector.next())
                if number % 4 == 3:
                    collector.reset()
                if number % 8 == 5:
                    collector.set_seed(number)
            assert collector.stats().dropped > 0
        for tag in {tag for tag, _, _ in seen.episodes}:
            numbers = [each for other, each, _ in seen.episodes if other == tag]
            assert numbers == sorted(set(numbers)), "in order"

    @every_process_kind
    def test_a_state_in_the_middle(self, kind):
        """Rollouts that were made and not taken are in it, and so are episodes that wait."""
        with opened(kind, steps=20, trajs_per_batch=2) as first:
            seen = WholeEpisodes(2)
            seen.add(first.next())
            frames, state = first.collected_frames, first.state_dict()
        assert state["supply"]["frames"]
        with opened(kind, steps=20, trajs_per_batch=2) as second:
            second.load_state_dict(state)
            for number in range(1, 12):
                seen.add(second.next())
                if number == 1:
                    assert second.collected_frames == frames + sum(count for _, _, count in seen.episodes[2:])
        first_two = defaultdict(list)
        for tag, number, _ in seen.episodes:
            first_two[tag].append(number)
        for numbers in first_two.values():
            # of a worker that is late there may be only one by now
            assert numbers[:2] == [0, 1][: len(numbers)], "those that were made before come first"

    def test_weights_are_published_once_a_batch(self, monkeypatch):
        """Also where the delivery of one is broken off, and made up for."""
        policy = torch.nn.Linear(3, 2)
        with MultiSyncCollector(
            [functools.partial(Tagged, 0, 3)] * 2,
            lambda observation: policy(observation).argmax(-1),
            frames_per_batch=12,
            trajs_per_batch=2,
            update_at_each_batch=True,
            timeout=20,
        ) as collector:
            collector.next()
            with monkeypatch.context() as patched:
                patched.setattr(collector, "_placed", lambda made: signal.raise_signal(signal.SIGINT))
                with pytest.raises(KeyboardInterrupt):
                    collector.next()
            assert collector.policy_version == 2
            collector.next()
            assert collector.policy_version == 2
            collector.next()
            assert collector.policy_version == 3

    def test_what_does_not_go_with_it_is_named(self):
        with pytest.raises(OptionError, match="cat_results"):
            MultiSyncCollector([Tagged] * 2, frames_per_batch=4, trajs_per_batch=1, cat_results=0)
        with pytest.raises(OptionError, match="max_policy_lag"):
            MultiAsyncCollector([Tagged] * 2, frames_per_batch=4, trajs_per_batch=1, max_policy_lag=1)
