"""TorchRL's replay buffers, given to collectors: what they get, in which shape, and who may fill them."""

from __future__ import annotations

import functools

import pytest
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from rlcollect import AsyncCollector, Collector, MultiSyncCollector, OptionError, ReplayBuffer
from rlcollect.testing import Tagged

WHY = "TorchRL is not installed: `make interop` installs it, and runs these"
rl = pytest.importorskip("torchrl.modules", reason=WHY)
data = pytest.importorskip("torchrl.data", reason=WHY)

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::DeprecationWarning")]
MAKERS = [functools.partial(Tagged, worker, 5) for worker in range(2)]
KINDS = {"single": (Collector, MAKERS), "sync": (MultiSyncCollector, MAKERS), "one async": (AsyncCollector, MAKERS)}
every_kind = pytest.mark.parametrize(("cls", "source"), KINDS.values(), ids=KINDS)


def stored(buffer):
    """All frames, in the order in which they came."""
    return buffer[:] if hasattr(buffer, "__getitem__") else buffer.sample()


class TestShapes:
    """FAULTS 75: `[lanes, T]`, where the storage has several dimensions."""

    @pytest.mark.parametrize("cls", [Collector, MultiSyncCollector], ids=["single", "sync"])
    def test_several_dimensions(self, cls):
        buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(100, ndim=2), batch_size=32)
        with cls(MAKERS, frames_per_batch=16, total_frames=80, replay_buffer=buffer) as collector:
            for _ in collector:
                pass
        assert len(buffer) == 80
        rows = stored(buffer).reshape(2, -1) if stored(buffer).batch_dims == 1 else stored(buffer)
        assert {int(number) for number in rows["observation"][0, :, 0]} == {0}

    def test_slices_are_of_one_trajectory(self):
        sampler = data.SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=True)
        buffer = data.TensorDictReplayBuffer(
            storage=data.LazyTensorStorage(100, ndim=2), sampler=sampler, batch_size=32
        )
        with Collector(MAKERS, frames_per_batch=16, total_frames=160, replay_buffer=buffer) as collector:
            for _ in collector:
                pass
        slices = buffer.sample()["observation"].reshape(8, 4, 3)
        assert (slices[:, 1:, 2] - slices[:, :-1, 2] == 1).all()
        assert (slices[:, 1:, :2] == slices[:, :-1, :2]).all()


class TestInTheBackground:
    @every_kind
    def test_it_is_filled_meanwhile(self, cls, source):
        """`write_count` is the buffer's own."""
        buffer = data.TensorDictReplayBuffer(storage=data.LazyTensorStorage(10_000), batch_size=32)
        with cls(source, frames_per_batch=16, total_frames=1600, replay_buffer=buffer) as collector:
            collector.start()
            collector.wait_for(write_count=64, timeout=30)
            for _ in range(10):
                assert buffer.sample().numel() == 32
            collector.wait_for(frames=1600, timeout=30)
            assert len(buffer) == collector.collected_frames == buffer.write_count == 1600

    def test_exploration_modules_act_in_processes(self):
        """They look at the exploration type, which is the program's: an `AsyncCollector` has one of its own."""
        net = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=["action_value"])
        policy = TensorDictSequential(
            rl.QValueActor(net, spec=data.Categorical(2), in_keys=["observation"]),
            rl.EGreedyModule(data.Categorical(2), eps_init=0.5),
        )
        options = {"frames_per_batch": 16, "total_frames": 160}
        with Collector(MAKERS, policy, replay_buffer=ReplayBuffer(1000), **options) as collector:
            with pytest.raises(OptionError, match="AsyncCollector"):
                collector.start()
            collector.next()
        buffer = ReplayBuffer(1000, storage="shared")
        with AsyncCollector(MAKERS, policy, replay_buffer=buffer, **options) as collector:
            collector.start()
            collector.wait_for(frames=160, timeout=30)
        assert len(buffer) == 160
        assert len({*buffer.frames()["action"].tolist()}) == 2
        buffer.close()
