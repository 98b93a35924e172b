"""`RayReplayBuffer`: what remotes write is what would have been delivered. Few tests, each with much in it."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import threading
import time

import pytest
import torch
from tensordict import TensorDict

from rlcollect import (
    BufferDied,
    ClosedError,
    Collector,
    MultiStep,
    MultiSyncCollector,
    OptionError,
    RayCollector,
    RayReplayBuffer,
    ReplayBuffer,
    SpaceError,
    WorkerTimeout,
)
from rlcollect.testing import Breaker, Tagged
from tests.workers.helpers import TaggedLanes
from tests.workers.test_buffers import check_counts, check_same, check_tagged

pytestmark = [
    pytest.mark.usefixtures("here"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted"),
]
SMALL = {"num_cpus": 0.1}
LANES = 2
IDS = ("collector", "traj_ids")


def made(buffer=None, *, remotes=2, make=TaggedLanes, sync=True, steps=6, policy=None, **options):
    frames = steps * LANES * (remotes if sync else 1)
    own = {"remote_configs": SMALL, "num_envs": LANES, "frames_per_batch": frames, "timeout": 60, "sync": sync}
    given = {**own, **options}
    return RayCollector([make(remote) for remote in range(remotes)], policy, replay_buffer=buffer, **given)


def make_tagged(remote):
    return functools.partial(Tagged, remote, 6, random_length=True)


class Listed:
    """Somebody else's buffer: frames in a list, some of which are more important."""

    def __init__(self, capacity, *, about):
        self.about = about
        self.capacity = capacity
        self.parts = []
        self.priorities = {}

    def __len__(self):
        return sum(len(part) for part in self.parts)

    @property
    def write_count(self):
        return len(self)

    def extend(self, batch):
        assert batch.batch_dims == 1
        before = len(self)
        self.parts.append(batch)  # it keeps what it is given
        return torch.arange(before, len(self))

    def update_priority(self, index, priority):
        self.priorities.update(zip(index.tolist(), priority.tolist(), strict=True))

    def sample(self, batch_size=4):
        best = sorted(self.priorities, key=self.priorities.get)[-batch_size:]
        return {"frames": torch.cat(self.parts)[best], "about": self.about}

    def frames(self):
        return torch.cat(self.parts)


class SlowOnce(list):
    """Takes long over the second batch."""

    def extend(self, batch):
        if len(self) == 1:
            time.sleep(1.5)
        self.append(batch)

    def sample(self):
        return self[-1]

    @property
    def written(self):
        return sum(part.numel() for part in self)


class Slow:
    def extend(self, batch):
        time.sleep(1.0)

    def sample(self):
        return 7


def sampled_in_bits(buffer, size):
    sample = buffer.sample(size)
    return {key: value.tolist() for key, value in sample.items(True, True)}


class TestContent:
    @pytest.mark.parametrize(
        "mode",
        ["rollouts", *[pytest.param(mode, marks=pytest.mark.cluster) for mode in ("steps", "made by the program")]],
    )
    @pytest.mark.cluster
    def test_it_has_the_frames_that_are_delivered_without(self, mode):
        """Of both kinds, for buffers of ours and others; in the background, with a pause in which counts agree."""
        options = {
            "rollouts": {},
            "steps": {"extend_buffer": False},
            "made by the program": {"postproc": MultiStep(0.9, 2)},
        }[mode]
        delivered = {key: value for key, value in options.items() if key == "postproc"}
        makers, form = [make_tagged(0), make_tagged(1)], {"frames_per_batch": 24, "num_envs": LANES}
        with MultiSyncCollector(makers, **form, total_frames=240, **delivered) as collector:
            collector.set_seed(3)
            expected = [batch.clone() for batch in collector]
        for kind in ({}, {"replay_buffer_cls": Listed, "about": "them"}):
            with RayReplayBuffer(960, **kind) as buffer:
                with made(buffer, total_frames=240, make=make_tagged, **options) as collector:
                    collector.set_seed(3)
                    collector.start()
                    collector.wait_for(write_count=48, timeout=30)
                    with collector.pause():
                        assert collector.collected_frames == buffer.write_count
                    collector.wait_for(frames=240, timeout=30)
                check_counts(buffer, collector, 240)
                check_same(buffer, expected)
                if mode != "made by the program":
                    check_tagged(buffer)

    @pytest.mark.cluster
    def test_single_lanes_of_the_asynchronous_kind(self):
        with RayReplayBuffer(1000) as buffer:
            options = {"num_envs": None, "frames_per_batch": 7, "sync": False, "total_frames": 140}
            with made(buffer, **options) as collector:
                while not collector.exhausted:
                    assert collector.next() is None
            check_counts(buffer, collector, 140)
            check_tagged(buffer)

    @pytest.mark.cluster
    @pytest.mark.parametrize("cls", [Collector, MultiSyncCollector])
    def test_every_other_kind_writes_to_it(self, cls):
        """By rollouts, by steps, and whole episodes; lanes keep their rings."""
        source = [make_tagged(0), make_tagged(1)] if cls is MultiSyncCollector else make_tagged(0)
        form = {"frames_per_batch": 24, "num_envs": 2, "total_frames": 120}
        for options in ({}, {"extend_buffer": False}, {"split_trajs": True}):
            delivered = {key: value for key, value in options.items() if key != "extend_buffer"}
            with cls(source, **form, **delivered) as collector:
                collector.set_seed(3)
                expected = [batch.clone() for batch in collector]
            with RayReplayBuffer(1000) as buffer:
                with cls(source, **form, **options, replay_buffer=buffer) as collector:
                    collector.set_seed(3)
                    list(collector)
                check_counts(buffer, collector, 120)
                check_same(buffer, expected)
                check_tagged(buffer)


class TestSamples:
    @pytest.mark.cluster
    def test_slices_go_on_over_rollouts_and_end_with_an_episode(self):
        own = {"sampler": "slice", "slice_len": 5, "batch_size": 40, "strict_length": False, "seed": 0}
        with RayReplayBuffer(4000, **own) as buffer:
            with made(buffer, total_frames=960, make=make_tagged, sync=False, steps=3) as collector:
                list(collector)
            lengths = set()
            for _ in range(50):
                sample = buffer.sample()
                assert sample.batch_size == (8, 5)
                assert sample.names[-1] == "time"
                mask = sample["collector", "mask"]
                ids, t = sample[IDS], sample["observation"][..., 2]
                assert ((ids == ids[:, :1]) | ~mask).all()
                assert ((t - t[:, :1] == torch.arange(5)) | ~mask).all()
                assert not (sample["next", "done"][..., 0][:, :-1] & mask[:, 1:]).any()
                lengths |= set(mask.sum(1).tolist())
            assert 5 in lengths, "rollouts have three frames: slices go on over them"

    @pytest.mark.cluster
    def test_none_is_torn_while_remotes_write(self):
        """A small ring is written over again and again; samples that are kept stay as they are."""
        with RayReplayBuffer(64, batch_size=32, prefetch=3) as buffer:
            with made(buffer, make=make_tagged, sync=False, steps=8) as collector:
                collector.start()
                collector.wait_for(frames=64, timeout=30)
                kept, until = [], time.monotonic() + 3
                while time.monotonic() < until:
                    sample = buffer.sample()
                    before, after = sample["observation"], sample["next", "observation"]
                    assert torch.equal(before[:, :2], after[:, :2])
                    assert torch.equal(before[:, 2] + 1, after[:, 2])
                    assert torch.equal(sample["next", "reward"][:, 0], before[:, 2])
                    kept = [*kept, (sample, sample.clone())][-5:]
                assert all((one == other).all() for one, other in kept)
                assert collector.collected_frames > 200
            check_counts_of_rings(buffer, collector)

    @pytest.mark.cluster
    def test_those_made_ahead_are_the_same_draws(self):
        frames = TensorDict({"x": torch.arange(50.0), "big": torch.rand(50, 3000)}, [50])
        runs = []
        for prefetch in (0, 4):
            with RayReplayBuffer(50, seed=3, prefetch=prefetch) as buffer:
                buffer.extend(frames)
                runs.append([sampled_in_bits(buffer, 5) for _ in range(12)])
                assert buffer.sample(3).batch_size == (3,)
        assert runs[0] == runs[1]

    @pytest.mark.cluster
    def test_several_threads_sample(self):
        with RayReplayBuffer(50, prefetch=2, batch_size=8) as buffer:
            buffer.extend(TensorDict({"x": torch.arange(50.0)}, [50]))
            results = []

            def sample():
                results.extend(buffer.sample()["x"] for _ in range(20))

            threads = [threading.Thread(target=sample) for _ in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(30)
            assert len(results) == 60
            assert all(torch.equal(each, each.long().float()) for each in results)


class TestBuffers:
    @pytest.mark.cluster
    def test_it_is_a_buffer_like_ours(self, tmp_path):
        """Written to, saved, put back, emptied; what that refuses is refused as it is there."""
        frames = TensorDict(
            {"x": torch.arange(30.0).view(3, 10), "t": torch.ones(3, 10, dtype=torch.bfloat16)}, [3, 10]
        )
        config = {"num_cpus": 0}
        with RayReplayBuffer(60, batch_size=4, seed=1, remote_config=config, ray_init_config={}) as buffer:
            assert config == {"num_cpus": 0}
            assert bool(buffer)
            assert len(buffer) == 0
            with pytest.raises(OptionError, match="There are no frames to sample from"):
                buffer.sample()
            buffer.extend(frames)
            buffer.add(frames[0, 0])
            assert len(buffer) == buffer.write_count == 31
            with pytest.raises(SpaceError, match="lacks 't'"):
                buffer.extend(frames.select("x"))
            with pytest.raises(OptionError, match="no update_priority"):
                buffer.update_priority(torch.zeros(1), torch.ones(1))
            state = buffer.state_dict()
            buffer.dumps(tmp_path / "saved")
            after = sampled_in_bits(buffer, 4)
            assert sampled_in_bits(buffer, 4) != after
            buffer.load_state_dict(state)
            assert sampled_in_bits(buffer, 4) == after
            buffer.loads(tmp_path / "saved")
            assert sampled_in_bits(buffer, 4) == after
            buffer.empty()
            assert len(buffer) == 0
            assert buffer.write_count == 31
            ours = ReplayBuffer(60)
            ours.load_state_dict(state)
            assert ours.write_count == 31
            with pytest.raises(TypeError, match="cannot be pickled"):
                pickle.dumps(buffer)

    @pytest.mark.cluster
    def test_it_may_be_somebody_elses(self):
        with RayReplayBuffer(100, replay_buffer_cls=functools.partial(Listed, about="x")) as buffer:
            index = buffer.extend(TensorDict({"x": torch.arange(10.0)}, [10]))
            assert index.tolist() == list(range(10))
            buffer.update_priority(index, torch.arange(10.0).flip(0))
            sample = buffer.sample(2)
            assert sample["about"] == "x"
            assert sorted(sample["frames"]["x"].tolist()) == [0, 1]

    @pytest.mark.cluster
    def test_what_makes_no_sense_is_refused_and_leaves_nothing(self):
        for options, text in (
            ({"capacity": -1}, "capacity"),
            ({"replay_buffer_cls": 3}, "replay_buffer_cls must be"),
            ({"replay_buffer_cls": dict}, "should make a buffer"),
            ({"capacity": 3, "prefetch": -1}, "prefetch"),
            ({"capacity": 3, "timeout": 0}, "timeout"),
            ({"capacity": 3, "transform": threading.Lock()}, "transform=.* cannot be sent"),
            ({"capacity": 3, "remote_config": {"num_cpus": 64}}, "asks for 64 CPU"),
            ({"capacity": 3, "remote_config": {"num_cpus": "one"}}, "remote_config has num_cpus='one'"),
            ({"capacity": 3, "remote_config": {"num_cpu": 1}}, "is not what ray.remote takes"),
        ):
            with pytest.raises(OptionError, match=text):
                RayReplayBuffer(**options)

    @pytest.mark.cluster
    def test_warnings_come_here(self):
        with RayReplayBuffer(7) as buffer, pytest.warns(UserWarning, match="7"):
            buffer.extend(TensorDict({"x": torch.zeros(2, 3)}, [2, 3]))


class TestEnds:
    @pytest.mark.cluster
    def test_a_closed_one_says_so_and_leaves_ray(self, cluster):
        buffer = RayReplayBuffer(50)
        actor = buffer.line.actor
        buffer.close()
        buffer.shutdown()
        for call in (buffer.sample, lambda: len(buffer), lambda: buffer.extend(TensorDict({"x": torch.ones(1)}, [1]))):
            with pytest.raises(ClosedError, match="was closed"):
                call()
        with pytest.raises(cluster.exceptions.RayActorError):
            cluster.get(actor.do.remote("length", b""), timeout=30)
        assert cluster.is_initialized()

    @pytest.mark.cluster
    def test_one_that_is_killed_says_so_to_everybody(self, cluster):
        """To who samples, and to who waits for a collector, whose workers write to it."""
        with RayReplayBuffer(500, batch_size=4, prefetch=2) as buffer:
            options = {"on_worker_failure": "restart", "max_restarts": 100}
            with made(buffer, make=make_tagged, sync=False, **options) as collector:
                collector.start()
                collector.wait_for(frames=48, timeout=30)
                buffer.sample()
                cluster.kill(buffer.line.actor)
                start = time.monotonic()
                with pytest.raises(BufferDied, match=r"RayReplayBuffer\(ReplayBuffer\) is gone.*Ray says"):
                    several_samples(buffer)  # some may have been made before
                with pytest.raises(BufferDied):
                    collector.wait_for(frames=10**9, timeout=30)
                assert time.monotonic() - start < 30
                assert collector.closed

    @pytest.mark.cluster
    def test_one_that_takes_longer_than_it_may(self):
        with RayReplayBuffer(replay_buffer_cls=Slow, timeout=0.5) as buffer:
            with pytest.raises(WorkerTimeout, match=r"0.5 s were not enough for RayReplayBuffer\(Slow\)"):
                buffer.extend(TensorDict({"x": torch.ones(1)}, [1]))
            time.sleep(1.0)
            assert buffer.sample() == 7

    @pytest.mark.cluster
    @pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
    @pytest.mark.parametrize("postproc", [None, TensorDict.clone])
    def test_a_batch_over_which_it_takes_too_long_is_written_once(self, kind, postproc):
        own = {"frames_per_batch": 4, "total_frames": 16, "postproc": postproc}
        make = make_tagged(0) if kind is Collector else [make_tagged(0)]
        with RayReplayBuffer(replay_buffer_cls=SlowOnce, timeout=0.5) as buffer:
            with kind(make, replay_buffer=buffer, **own) as collector:
                late = 0
                while not collector.exhausted:
                    try:
                        collector.next()
                    except WorkerTimeout:
                        late += 1
                        assert (collector.collected_frames, collector.closed) == (4, False)
                assert late >= 2
                assert (collector.collected_frames, collector.stats().batches) == (16, 4)
            assert buffer.line.call("get", "written") == 16

    @pytest.mark.cluster
    @pytest.mark.parametrize("kind", [Collector, MultiSyncCollector])
    def test_a_ctrl_c_while_it_takes_long_comes_at_once(self, kind):
        make = make_tagged(0) if kind is Collector else [make_tagged(0)]
        with RayReplayBuffer(replay_buffer_cls=SlowOnce) as buffer:
            with kind(make, replay_buffer=buffer, frames_per_batch=4, total_frames=16) as collector:
                collector.next()
                timer, start = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT)), time.monotonic()
                timer.start()
                with pytest.raises(KeyboardInterrupt):
                    collector.next()
                assert time.monotonic() - start < 1.2
                assert (collector.collected_frames, collector.closed) == (4, False)
                while not collector.exhausted:
                    collector.next()
                assert (collector.collected_frames, collector.stats().batches) == (16, 4)
            assert buffer.line.call("get", "written") == 16


class TestRestarts:
    @pytest.mark.cluster
    @pytest.mark.parametrize(
        ("sync", "mode"),
        [
            pytest.param(True, {"extend_buffer": False}, id="sync, steps"),
            pytest.param(False, {}, id="async, rollouts"),
            pytest.param(True, {}, id="sync, rollouts", marks=pytest.mark.slow),
            pytest.param(False, {"extend_buffer": False}, id="async, steps", marks=pytest.mark.slow),
        ],
    )
    def test_counts_are_exact_whoever_dies(self, sync, mode, tmp_path):
        """Killed in its own step, and from outside; successors write to the same rings, and nothing twice."""

        def breaking(remote):
            own = {"length": 9, "once": tmp_path / f"{remote}"}
            return functools.partial(Breaker, "kill", "step", at=23 if remote else 10**9, **own)

        with RayReplayBuffer(2000) as buffer:
            own = {"on_worker_failure": "restart", "total_frames": 720}
            with made(buffer, make=breaking, sync=sync, **own, **mode) as collector:
                while collector.collected_frames < 300:
                    collector.next()
                os.kill(collector.map_fn(lambda envs: os.getpid())[0], signal.SIGKILL)
                while not collector.exhausted:
                    collector.next()
                restarts = [each.restarts for each in collector.stats().workers]
            check_counts(buffer, collector, 720)
            check_counted_up(buffer.frames())
            assert min(restarts) >= 1, restarts

    @pytest.mark.cluster
    def test_one_that_dies_before_it_could_say_what_it_wrote(self):
        """The rollout is in the buffer: its successor makes what is left of it, and no more."""
        with RayReplayBuffer(2000) as buffer:
            own = {"on_worker_failure": "restart", "total_frames": 240}
            with made(buffer, post_collect_hook=DiesOnce(2), record=("episode",), **own) as collector:
                list(collector)
                stats = collector.stats()
                assert [each.restarts for each in stats.workers] == [1, 1]
                assert stats.dropped == 0  # all that they had made is there
            check_counts(buffer, collector, 240)
            check_tagged(buffer)
            frames = buffer.frames()
            tags, numbers = frames["observation"][:, 0].tolist(), frames["collector", "episode"].tolist()
            episodes = {*zip(frames[IDS].tolist(), tags, numbers, strict=True)}
            assert len({(tag, number) for _, tag, number in episodes}) == len(episodes), "a number twice"


class DiesOnce:
    """After the rollout of this number, in the first life."""

    def __init__(self, at):
        self.left = at

    def __call__(self, batch):
        self.left -= 1
        if self.left == 0 and int(batch[IDS].max()) >> 40 < 2:
            os.kill(os.getpid(), signal.SIGKILL)


def several_samples(buffer):
    for _ in range(10):
        buffer.sample()


def check_counts_of_rings(buffer, collector):
    assert buffer.write_count == collector.collected_frames
    assert len(buffer) <= 64


def check_counted_up(frames):
    """Frames of a `Counter`: each once, and those of a trajectory in order."""
    ids, t = frames[IDS].tolist(), frames["observation"].flatten().tolist()
    assert len({*zip(ids, t, strict=True)}) == len(ids), "a frame twice"
    last = {}
    for number, step in zip(ids, t, strict=True):
        assert step == last.get(number, step - 1) + 1
        last[number] = step
