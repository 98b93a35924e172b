"""Workers of different speed: those that are late are ended early, or go on and come later. No frame gets lost."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcollect import (
    AsyncCollector,
    Collector,
    Interruptor,
    MultiAsyncCollector,
    MultiSyncCollector,
    OptionError,
    WorkerTimeout,
)
from rlcollect.testing import Tagged, check_batch
from tests.workers.test_interrupts import interrupting

pytestmark = pytest.mark.timeout(120)
LENGTH = 5  # of every episode
FEW = settings(max_examples=10, deadline=None)
waits = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=5), min_size=3, max_size=3)


class Uneven(Tagged):
    """Waits before each step, for milliseconds that come round again."""

    def __init__(self, worker, waits=(0,), length=LENGTH):
        super().__init__(worker, length)
        self.waits = waits

    def step(self, action):
        time.sleep(self.waits[self.steps % len(self.waits)] / 1000)
        return super().step(action)


def makers(waits):
    return [lambda worker=worker, own=own: Uneven(worker, own) for worker, own in enumerate(waits)]


def counting(observation, hidden=None):
    """Its state is the number of steps since the episode began, if it is carried as it should be."""
    hidden = torch.zeros(*observation.shape[:-1], 1) if hidden is None else hidden
    return {"action": hidden[..., 0].long() % 2, ("next", "hidden"): hidden + 1}


def rows_of(batch):
    """Its lanes `[T]`, with the rows that are frames, whatever is in front of time."""
    for lane in batch.reshape(-1, batch.shape[-1]).unbind(0) if batch.ndim > 1 else [batch]:
        mask = lane.get(("collector", "mask"), None)
        yield lane if mask is None else lane[mask]


class Seen:
    """What was delivered, lane by lane, in the order in which it came; a lane is known by what it observes."""

    def __init__(self):
        self.frames = defaultdict(list)

    def add(self, batch):
        for lane in rows_of(batch):
            for row, hidden in zip(lane["observation"].int().tolist(), lane["hidden"].flatten().tolist(), strict=True):
                self.frames[row[0]].append((row[1], row[2], hidden))

    def check(self):
        """Each lane's frames, one after the other, none missing and none twice; with the policy's state."""
        for lane, frames in self.frames.items():
            expected = [(k // LENGTH, k % LENGTH, k % LENGTH) for k in range(len(frames))]
            assert frames == expected, f"lane {lane}"


def mask_is_a_suffix(batch):
    mask = batch["collector", "mask"]
    made = mask.sum(-1)
    assert (mask == (torch.arange(mask.shape[-1]) < made[..., None])).all()
    ids = batch["collector", "traj_ids"]
    assert (ids[~mask] == -1).all()
    assert (ids[mask] >= 0).all()
    return made


class TestStop:
    @given(
        waits=waits,
        threshold=st.sampled_from([0.2, 0.5, 0.67, 1.0]),
        total=st.integers(1, 30).map(lambda count: 3 * count),
    )
    @FEW
    @pytest.mark.slow
    def test_no_frame_is_lost_whoever_is_late(self, waits, threshold, total):
        seen, previous, versions = Seen(), None, []
        options = {"frames_per_batch": 3 * 8, "total_frames": total, "preemptive_threshold": threshold}
        with MultiSyncCollector(makers(waits), counting, timeout=60, **options) as collector:
            wanted = collector.total_frames
            for batch in collector:
                check_batch(batch, previous=previous)
                made = mask_is_a_suffix(batch)
                seen.add(batch)
                versions.append(made)
                left = wanted - sum(int(each.sum()) for each in versions[:-1])
                if left >= 24:
                    assert batch.shape == (3, 8)
                    assert int((made == 8).sum()) >= math.ceil(threshold * 3 - 1e-9), "so many are waited for"
                    assert (made >= 1).all()
                previous = batch
            assert collector.collected_frames == wanted == sum(len(frames) for frames in seen.frames.values())
        seen.check()

    def test_lanes_of_a_worker_stop_together(self):
        with MultiSyncCollector(
            [lambda: Uneven(0), lambda: Uneven(1, (20,))],
            frames_per_batch=80,
            num_envs=2,
            preemptive_threshold=0.5,
            timeout=60,
        ) as collector:
            for batch in (collector.next() for _ in range(3)):
                check_batch(batch)
                made = mask_is_a_suffix(batch)
                assert made[0].tolist() == [20, 20]
                assert made[1, 0] == made[1, 1] < 20
            late = collector.stats().workers
            assert late[0].preempted == 0
            assert late[1].preempted >= 3 * 2 * 10

    def test_joined_in_time_they_are_left_out(self):
        seen = Seen()
        with MultiSyncCollector(
            makers([(0,), (0,), (10,)]),
            counting,
            frames_per_batch=3 * 20,
            total_frames=198,
            preemptive_threshold=0.6,
            cat_results=-1,
            timeout=60,
        ) as collector:
            first = collector.next()
            assert 41 <= first.shape[0] < 60
            assert first.names == ["time"]
            assert first["collector", "mask"].all()
            for batch in (first, *collector):
                seen.add(batch)
            assert collector.collected_frames == 198
        seen.check()

    @pytest.mark.parametrize("dim", [0, pytest.param(-1, marks=pytest.mark.slow)])
    def test_joined_with_lanes(self, dim):
        with MultiSyncCollector(
            [lambda: Uneven(0), lambda: Uneven(1, (20,))],
            frames_per_batch=80,
            num_envs=2,
            preemptive_threshold=0.5,
            cat_results=dim,
            timeout=60,
        ) as collector:
            batch = collector.next()
            mask = batch["collector", "mask"]
            if dim == 0:
                assert batch.shape == (4, 20)
                assert mask[:2].all()
                assert not mask[2:].all()
            else:
                assert batch.shape[0] == 2
                assert 20 < batch.shape[1] < 40
                assert mask.all()

    @pytest.mark.parametrize("options", [{"use_buffers": False}, {"return_same_td": True}], ids=str)
    def test_however_the_batch_is_stored(self, options):
        seen = Seen()
        with MultiSyncCollector(
            makers([(0,), (10,)]),
            counting,
            frames_per_batch=40,
            total_frames=100,
            preemptive_threshold=0.5,
            timeout=60,
            **options,
        ) as collector:
            for batch in collector:
                mask_is_a_suffix(batch)
                seen.add(batch)
            assert collector.collected_frames == 100
        seen.check()

    def test_a_warm_up_goes_on_where_it_was_ended(self):
        versions = defaultdict(list)
        with MultiSyncCollector(
            makers([(0,), (5,)]),
            counting,
            frames_per_batch=20,
            total_frames=400,
            init_random_frames=40,
            preemptive_threshold=0.5,
            timeout=60,
        ) as collector:
            for batch in collector:
                for worker, lane in enumerate(rows_of(batch)):
                    versions[worker] += lane["collector", "policy_version"].tolist()
        for made in versions.values():
            assert len(made) > 20
            assert made == [-1] * 20 + [0] * (len(made) - 20)

    def test_a_soft_truncation_stands_on_the_last_frame_there_is(self):
        with MultiSyncCollector(
            makers([(0,), (5,)]), frames_per_batch=40, set_truncated=True, preemptive_threshold=0.5, timeout=60
        ) as collector:
            batch = collector.next()
            made = mask_is_a_suffix(batch)
            for lane, steps in enumerate(made.tolist()):
                assert batch["next", "truncated"][lane, steps - 1]
                assert not batch["next", "done"][lane, steps:].any()

    def test_between_two_batches_nothing_is_stepped(self):
        with MultiSyncCollector(
            makers([(0,), (5,)]), counting, frames_per_batch=40, preemptive_threshold=0.5, timeout=60
        ) as collector:
            collector.next()
            steps = collector.map_fn(lambda envs: envs[0].steps)
            time.sleep(0.1)
            assert collector.map_fn(lambda envs: envs[0].steps) == steps

    def test_the_number_of_batches_is_not_known(self):
        with (
            MultiSyncCollector(
                makers([(0,), (0,)]), frames_per_batch=40, total_frames=80, preemptive_threshold=0.5
            ) as collector,
            pytest.raises(TypeError, match="pre-empted"),
        ):
            len(collector)
        with MultiSyncCollector(
            makers([(0,)]), frames_per_batch=40, total_frames=80, preemptive_threshold=1.0
        ) as collector:
            assert len(collector) == 2

    def test_waiting_costs_nothing(self):
        with MultiSyncCollector(
            makers([(0,), (0,), (200,)]), frames_per_batch=300, preemptive_threshold=1.0, timeout=1
        ) as collector:
            before, start = time.process_time(), time.monotonic()
            with pytest.raises(WorkerTimeout):
                collector.next()
            assert time.monotonic() - start >= 1
            assert time.process_time() - before < 0.5


class TestContinue:
    @given(
        waits=waits,
        threshold=st.sampled_from([0.2, 0.5, 0.67, 1.0]),
        total=st.integers(1, 40).map(lambda count: 3 * count),
    )
    @FEW
    @pytest.mark.slow
    def test_every_rollout_comes_whole_and_once(self, waits, threshold, total):
        self.check(waits, threshold, total)

    def test_rollouts_come_whole_and_once(self):
        self.check([[0], [0, 3], [2]], 0.5, 81)

    def check(self, waits, threshold, total):
        seen, shapes = Seen(), []
        options = {"frames_per_batch": 3 * 8, "total_frames": total, "preemptive_threshold": threshold}
        with MultiSyncCollector(makers(waits), counting, stragglers="continue", timeout=60, **options) as collector:
            wanted = collector.total_frames
            for batch in collector:
                check_batch(batch)
                workers = batch["collector", "worker"]
                assert (workers == workers[:, :1]).all()
                assert (workers == batch["observation"][..., 0]).all()
                assert len({*workers[:, 0].tolist()}) == batch.shape[0], "one rollout of a worker"
                shapes.append(batch.shape)
                seen.add(batch)
            assert collector.collected_frames == wanted == sum(len(frames) for frames in seen.frames.values())
        seen.check()
        short = [shape for shape in shapes if shape[1] != 8]
        assert short == shapes[len(shapes) - len(short) :], "short ones come last"
        assert len(short) <= 1
        assert all(shape[0] >= math.ceil(threshold * 3 - 1e-9) for shape in shapes[:-3])

    def test_nobody_waits_for_the_slow_one_and_nothing_of_it_is_lost(self):
        seen, slow = Seen(), 0
        with MultiSyncCollector(
            makers([(1,), (1,), (1,), (8,)]),
            counting,
            frames_per_batch=4 * 10,
            total_frames=1200,
            preemptive_threshold=0.75,
            stragglers="continue",
            timeout=60,
        ) as collector:
            for number, batch in enumerate(collector):
                seen.add(batch)
                slow += 3 in batch["collector", "worker"]
                collector.update_policy_weights_() if number % 2 else None
            stats = collector.stats()
        seen.check()
        assert 0 < slow < stats.batches / 2
        assert stats.workers[3].late > 0
        assert stats.late.rollouts > 0
        assert stats.late.batches.max >= 2
        assert stats.late.versions.max >= 1
        assert all(each.preempted == 0 for each in stats.workers)
        assert stats.as_dict()["workers/3/late"] == stats.workers[3].late

    def test_versions_are_those_that_made_the_frames(self):
        with MultiSyncCollector(
            makers([(0,), (0,), (10,)]),
            counting,
            frames_per_batch=30,
            preemptive_threshold=0.6,
            stragglers="continue",
            timeout=60,
        ) as collector:
            newest = defaultdict(int)
            for number in range(30):
                batch = collector.next()
                for worker, version in zip(
                    batch["collector", "worker"][:, 0].tolist(),
                    batch["collector", "policy_version"].tolist(),
                    strict=True,
                ):
                    assert len({*version}) == 1
                    assert newest[worker] <= version[0] <= number
                    newest[worker] = version[0]
                collector.update_policy_weights_()
            assert max(newest.values()) >= 28

    @pytest.mark.parametrize(
        "options",
        [
            *({"use_buffers": False}, {"cat_results": -1}),
            *(pytest.param(each, marks=pytest.mark.slow) for each in ({"return_same_td": True}, {"num_envs": 2})),
        ],
        ids=str,
    )
    def test_however_the_batch_is_stored(self, options):
        frames = 0
        with MultiSyncCollector(
            makers([(0,), (0,), (5,)]),
            frames_per_batch=60,
            total_frames=300,
            preemptive_threshold=0.5,
            stragglers="continue",
            timeout=60,
            **options,
        ) as collector:
            for batch in collector:
                frames += batch.numel()
                assert batch.names[-1] == "time"
        assert frames == 300

    def test_batches_are_the_users(self):
        kept = []
        with MultiSyncCollector(
            makers([(0,), (0,), (3,)]),
            counting,
            frames_per_batch=30,
            total_frames=600,
            preemptive_threshold=0.5,
            stragglers="continue",
            timeout=60,
        ) as collector:
            kept += [(batch, batch.clone()) for batch in collector]
        assert all((batch == copy).all() for batch, copy in kept)

    def test_a_state_has_what_was_not_delivered(self):
        options = {"frames_per_batch": 30, "total_frames": 300, "preemptive_threshold": 0.5, "timeout": 60}
        with MultiSyncCollector(makers([(0,), (0,), (20,)]), counting, stragglers="continue", **options) as first:
            frames = sum(first.next().numel() for _ in range(4))
            state = first.state_dict()
            frames_then = first.collected_frames
            assert frames == frames_then
            seen = [first.next() for _ in range(2)]
        with MultiSyncCollector(makers([(0,), (0,), (20,)]), counting, stragglers="continue", **options) as second:
            second.load_state_dict(state)
            pending = len(state.get("pending", ()))
            assert pending >= 1
            again = [second.next() for _ in range(pending)]
            slow = [batch for batch in again if 2 in batch["collector", "worker"]]
            assert slow, "its rollout was under way"
            for batch in second:
                frames += batch.numel()
            assert frames + sum(batch.numel() for batch in again) == 300
        assert seen

    def test_a_new_seed_and_resets(self):
        with MultiSyncCollector(
            makers([(0,), (2,)]), frames_per_batch=20, preemptive_threshold=0.5, stragglers="continue", timeout=60
        ) as collector:
            collector.next()
            collector.set_seed(3)
            collector.reset([True, False])
            for _ in range(4):
                check_batch(collector.next())

    def test_extra_rollouts_are_not_counted(self):
        with MultiSyncCollector(
            makers([(0,), (2,)]),
            frames_per_batch=20,
            total_frames=100,
            preemptive_threshold=0.5,
            stragglers="continue",
            timeout=60,
        ) as collector:
            collector.rollout()
            collector.next()
            collector.rollout()
            for _ in collector:
                pass
            assert collector.collected_frames == 100

    @pytest.mark.parametrize("mode", ["stop", "continue"])
    def test_ctrl_c_in_any_call_of_next(self, mode):
        seen, interrupted = Seen(), 0
        with MultiSyncCollector(
            makers([(0,), (1,)]),
            counting,
            frames_per_batch=8,
            preemptive_threshold=0.5,
            stragglers=mode,
            timeout=30,
        ) as collector:
            for number in range(1, 220, 2):
                with contextlib.suppress(KeyboardInterrupt), interrupting(number) as places:
                    batch = collector.next()
                    seen.add(batch)
                interrupted += places.calls >= number
            for _ in range(4):
                seen.add(collector.next())
        assert interrupted > 20
        seen.check()


class Foreign:
    """An interruptor of the user's own making."""

    def __init__(self):
        self.is_stopped = False
        self.asked = 0

    def start_collection(self):
        self.is_stopped = False

    def stop_collection(self):
        self.is_stopped = True

    def collection_stopped(self):
        self.asked += 1
        return self.is_stopped


KINDS = [Collector, MultiSyncCollector, MultiAsyncCollector, AsyncCollector]


def opened(kind, interruptor, waits=(2,), steps=1000):
    two = kind in (MultiSyncCollector, MultiAsyncCollector)
    sources = makers([waits] * 2) if two else makers([waits])[0]
    frames = steps * 2 if kind is MultiSyncCollector else steps
    options = {} if kind is Collector else {"timeout": 60}
    return kind(sources, counting, frames_per_batch=frames, interruptor=interruptor, **options)


class TestInterruptor:
    @pytest.mark.parametrize(
        ("kind", "make"),
        [
            *((kind, Interruptor) for kind in KINDS[:3]),
            *((kind, Foreign) for kind in (Collector, MultiSyncCollector, AsyncCollector)),
            pytest.param(AsyncCollector, Interruptor, marks=pytest.mark.slow),
            pytest.param(MultiAsyncCollector, Foreign, marks=pytest.mark.slow),
        ],
    )
    def test_ends_what_is_under_way_in_every_kind(self, kind, make):
        interruptor, seen = make(), Seen()
        with opened(kind, interruptor) as collector:
            timer = threading.Timer(0.1, interruptor.stop_collection)
            timer.start()
            batch = collector.next()  # 2 s, if nobody stopped it
            timer.join()
            seen.add(batch)
            assert 1 <= batch.shape[-1] < 900
            assert collector.collected_frames == sum(len(frames) for frames in seen.frames.values())
            interruptor.start_collection()
            timer = threading.Timer(0.1, interruptor.stop_collection)
            timer.start()
            for _ in range(2):
                seen.add(collector.next())
            timer.join()
        seen.check()

    @pytest.mark.parametrize("kind", KINDS)
    def test_while_it_is_stopped_each_rollout_has_a_frame(self, kind):
        interruptor = Interruptor()
        interruptor.stop_collection()
        assert interruptor.collection_stopped()
        with opened(kind, interruptor, steps=20) as collector:
            assert [collector.next().shape[-1] for _ in range(3)] == [1, 1, 1]
            interruptor.start_collection()
            assert not interruptor.collection_stopped()
            for _ in range(5):  # an asynchronous one may have made some before
                batch = collector.next()
            assert batch.shape[-1] == 20

    def test_a_foreign_one_is_asked_while_workers_are_waited_for_and_seldom(self):
        interruptor = Foreign()
        with opened(MultiSyncCollector, interruptor, waits=(5,), steps=100) as collector:
            start = time.monotonic()
            collector.next()
            waited = time.monotonic() - start
            assert 2 <= interruptor.asked <= waited / 0.01 + 20

    def test_one_for_two_collectors(self):
        interruptor = Interruptor()
        with (
            opened(MultiSyncCollector, interruptor, steps=10) as one,
            opened(AsyncCollector, interruptor, steps=10) as other,
        ):
            interruptor.stop_collection()
            one.next()
            assert one.next().shape[-1] == 1
            shapes = [other.next().shape[-1] for _ in range(4)]
            assert shapes[-1] == 1

    def test_cannot_be_copied(self):
        with pytest.raises(TypeError, match="interruptor="):
            Interruptor().__reduce__()

    def test_what_a_foreign_one_raises_comes_out(self):
        class Failing(Foreign):
            def collection_stopped(self):
                raise LookupError("it is lost")

        with opened(AsyncCollector, Failing()) as collector, pytest.raises(LookupError, match="lost"):
            collector.next()


class TestOptions:
    @pytest.mark.parametrize("share", [0, -0.5, 1.5, True, "half"], ids=str)
    def test_a_share_of_workers(self, share):
        with pytest.raises(OptionError, match=r"preemptive_threshold .*\(0, 1\]"):
            MultiSyncCollector(makers([(0,)]), frames_per_batch=10, preemptive_threshold=share)

    def test_what_stragglers_do(self):
        with pytest.raises(OptionError, match="stragglers"):
            MultiSyncCollector(makers([(0,)]), frames_per_batch=10, preemptive_threshold=0.5, stragglers="wait")
        with pytest.raises(OptionError, match=r"preemptive_threshold="):
            MultiSyncCollector(makers([(0,)]), frames_per_batch=10, stragglers="continue")

    @pytest.mark.parametrize("kind", [Collector, MultiAsyncCollector, AsyncCollector])
    def test_of_a_kind_that_does_not_wait_for_all(self, kind):
        with pytest.raises(OptionError, match="preemptive_threshold"):
            kind(makers([(0,)])[0], frames_per_batch=10, preemptive_threshold=0.5)

    def test_workers_that_hold_collectors_cannot_be_stopped(self):
        for options in ({"preemptive_threshold": 0.5}, {"interruptor": Interruptor()}):
            with pytest.raises(OptionError, match="collector_class"):
                MultiSyncCollector(makers([(0,)]), frames_per_batch=10, collector_class=Collector, **options)


class Gated(Tagged):
    """Waits before one step until a file is there; makes one with the name of a number of steps when it has made them.

    So what is late is late whatever the machine does, and what is made is made.
    """

    def __init__(self, worker, folder, at, gate):
        super().__init__(worker, LENGTH)
        self.folder, self.at, self.gate = folder, at, folder / gate

    def step(self, action):
        while self.steps == self.at and not self.gate.exists():
            time.sleep(0.002)
        answer = super().step(action)
        (self.folder / f"{self.worker} made {self.steps}").touch()
        return answer


def test_a_state_has_one_rollout_of_a_worker_in_each_batch(tmp_path):
    """A worker that was late may have made another one; with those of all there are more than a batch has room for."""
    gates = [(0, 4, "others"), (1, 4, "others"), (2, 0, "late")]
    makers = [functools.partial(Gated, worker, tmp_path, at, gate) for worker, at, gate in gates]
    options = {"frames_per_batch": 12, "preemptive_threshold": 0.6, "stragglers": "continue", "start_timeout": 60}
    with MultiSyncCollector(makers, counting, timeout=0.6, **options) as collector:
        while (batch := next_of(collector)) is None:
            pass
        assert batch["collector", "worker"][:, 0].tolist() == [0, 1]
        (tmp_path / "late").touch()
        while not (tmp_path / "2 made 8").exists():
            assert next_of(collector) is None
        (tmp_path / "others").touch()
        while True:
            with contextlib.suppress(WorkerTimeout):
                state = collector.state_dict()
                break
        pending = [made["batch"]["collector"]["worker"][:, 0].tolist() for made in state["pending"]]
        assert pending == [[0, 1, 2], [2]]


def next_of(collector):
    """None where it takes too long."""
    with contextlib.suppress(WorkerTimeout):
        return collector.next()
