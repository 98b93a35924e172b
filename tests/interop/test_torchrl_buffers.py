"""TorchRL's replay buffers, wherever ours is taken."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlcollect import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector, OptionError, ReplayBuffer
from rlcollect.testing import Tagged

pytest.importorskip("torchrl", reason="TorchRL is not installed: `make interop` installs it, and runs these")

from torchrl.data import LazyMemmapStorage, LazyTensorStorage, ListStorage, TensorDictReplayBuffer
from torchrl.data import ReplayBuffer as TheirBuffer
from torchrl.data.replay_buffers.samplers import PrioritizedSampler, SliceSampler

from tests.interop.trees import lend_trees

pytestmark = [pytest.mark.timeout(100), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
KINDS = [Collector, AsyncCollector, MultiSyncCollector, MultiAsyncCollector]
IDS = ("collector", "traj_ids")


def slices(**options):
    return SliceSampler(slice_len=4, traj_key=IDS, strict_length=False, **options)


BUFFERS = {
    "plain": lambda: TheirBuffer(storage=LazyTensorStorage(2_000), batch_size=32),
    "tensordict": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(2_000), batch_size=32),
    "memmap": lambda: TensorDictReplayBuffer(storage=LazyMemmapStorage(2_000), batch_size=32),
    "list": lambda: TheirBuffer(storage=ListStorage(2_000), collate_fn=torch.stack, batch_size=32),
    "slices": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(2_000), sampler=slices(), batch_size=32),
    "grid": lambda: TensorDictReplayBuffer(storage=LazyTensorStorage(2_000, ndim=2), sampler=slices(), batch_size=32),
    "priorities": lambda: TensorDictReplayBuffer(
        storage=LazyTensorStorage(2_000), sampler=PrioritizedSampler(2_000, alpha=0.7, beta=0.5), batch_size=32
    ),
}


@pytest.fixture(autouse=True)
def _trees(monkeypatch):
    lend_trees(monkeypatch)


def options_of(kind, **more):
    workers = {"num_workers": 2} if kind in (MultiSyncCollector, MultiAsyncCollector) else {}
    return {"frames_per_batch": 60, "num_envs": 3, "total_frames": 240, **workers, **more}


def episodes(frames):
    """The observed steps of each trajectory, in the order in which they lie."""
    return {
        number: frames["observation"][frames[IDS] == number][:, 2].tolist() for number in frames[IDS].unique().tolist()
    }


@pytest.mark.parametrize("name", BUFFERS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
class TestTheirBuffers:
    def test_they_get_each_frame_once_and_in_order(self, kind, name):
        """FAULTS 74, 75: frames are counted, and those of a trajectory lie in the order of time."""
        buffer = BUFFERS[name]()
        with kind(Tagged, **options_of(kind), replay_buffer=buffer) as collector:
            assert [*collector] == [None] * (240 // collector.frames_per_batch)
        frames = buffer[:]
        frames = TensorDict.maybe_dense_stack(frames) if isinstance(frames, list) else frames
        frames = frames.reshape(-1)
        assert len(frames) == 240
        for steps in episodes(frames).values():
            assert steps == [*range(len(steps))]
        assert buffer.sample().numel() == 32

    def test_single_steps(self, kind, name):
        if name == "grid":
            pytest.skip("TorchRL does not add single steps to a storage of two dimensions; refused, see below")
        buffer = BUFFERS[name]()
        with kind(Tagged, **options_of(kind), replay_buffer=buffer, extend_buffer=False) as collector:
            for _ in collector:
                pass
        assert len(buffer) == buffer.write_count == 240

    def test_whole_episodes(self, kind, name):
        buffer = BUFFERS[name]()
        with kind(Tagged, **options_of(kind), replay_buffer=buffer, trajs_per_batch=2) as collector:
            for _ in collector:
                pass
            count = collector.collected_frames
        frames = buffer[:]
        frames = TensorDict.maybe_dense_stack(frames) if isinstance(frames, list) else frames
        frames = frames.reshape(-1)
        assert len(frames) == count
        for number in frames[IDS].unique().tolist():
            done = frames["next", "done"][frames[IDS] == number][:, 0].tolist()
            assert done == [False] * (len(done) - 1) + [True]


class TestTheirStorages:
    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
    def test_a_lazy_one_has_its_memory_before_the_first_rollout(self, kind):
        buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(500), batch_size=8)
        with kind(Tagged, **options_of(kind), replay_buffer=buffer):
            assert buffer._storage.initialized
            assert len(buffer) == 0

    def test_single_steps_for_several_dimensions_are_refused(self):
        buffer = TheirBuffer(storage=LazyTensorStorage(500, ndim=2))
        with pytest.raises(OptionError, match="several dimensions"):
            Collector(Tagged, **options_of(Collector), replay_buffer=buffer, extend_buffer=False)

    def test_what_is_in_it_stays(self):
        """FAULTS 110."""
        buffer = TheirBuffer(storage=LazyTensorStorage(500))
        for total in (60, 120):
            with Collector(Tagged, frames_per_batch=60, num_envs=3, total_frames=60, replay_buffer=buffer) as collector:
                assert len(buffer) == total - 60
                collector.next()
            assert len(buffer) == total


class TestTheSameFrames:
    def test_theirs_and_ours_hold_the_same(self):
        ours, theirs = ReplayBuffer(300), TheirBuffer(storage=LazyTensorStorage(300))
        for buffer in (ours, theirs):
            with Collector(
                "CartPole-v1", frames_per_batch=60, num_envs=3, total_frames=240, replay_buffer=buffer
            ) as it:
                it.set_seed(0)
                for _ in it:
                    pass
        one, other = ours.frames(), theirs[:]
        for number in one[IDS].unique().tolist():
            pair = [frames[frames[IDS] == number] for frames in (one, other)]
            assert (pair[0] == pair[1]).all()


@pytest.mark.timeout(200)
def test_the_example_of_prioritised_replay_learns():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "prioritized.py"))
    assert example["main"](example["Arguments"](total_frames=3_000)) < 2.0
