"""`collector_class`: workers that hold a collector, and drive it by its public methods."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn

from rlcollect import Collector, MultiAsyncCollector, MultiSyncCollector, OptionError
from rlcollect.testing import Counter, Echo, Tagged

both = pytest.mark.parametrize("kind", [MultiSyncCollector, MultiAsyncCollector])
pytestmark = pytest.mark.timeout(60)


class Noting(Collector):
    """Says how often it was driven."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.rollouts = 0

    def rollout(self):
        batch = super().rollout()
        self.rollouts += 1
        batch["driven"] = torch.full(batch.batch_size, self.rollouts)
        return batch


class Same(nn.Module):
    """Its action is its parameter."""

    def __init__(self, value=0.0):
        super().__init__()
        self.value = nn.Parameter(torch.tensor(value))

    def forward(self, observation):
        return self.value.expand(*observation.shape[:-1], 1)


class Silent:
    def __init__(self, *_, **__):
        pass


@both
def test_its_batches_are_delivered(kind):
    with kind(
        [lambda: Counter(None)] * 2, collector_class=Noting, frames_per_batch=8, total_frames=32, num_envs=2
    ) as collector:
        batches = list(collector)
    lead = (2, 2, 2) if kind is MultiSyncCollector else (2, 4)
    assert [batch.batch_size for batch in batches] == [torch.Size(lead)] * 4
    assert sorted(int(batch["driven"].max()) for batch in batches) == ([1, 2, 3, 4] if len(lead) == 3 else [1, 1, 2, 2])
    ids = [set(batch["collector", "traj_ids"].flatten().tolist()) for batch in batches]
    assert len(set.union(*ids)) == 4  # of two lanes in each of two workers, none of which ends


def test_frames_are_those_of_its_engine():
    options = {"frames_per_batch": 12, "total_frames": 36, "num_envs": 3, "max_frames_per_traj": 5}
    make = functools.partial(Tagged, 0, 4)
    with (
        MultiSyncCollector([make], collector_class=Collector, **options) as hosted,
        MultiSyncCollector([make], **options) as plain,
    ):
        for ours, theirs in zip(hosted, plain, strict=True):
            assert sorted(map(str, ours.keys(True, True))) == sorted(map(str, theirs.keys(True, True)))
            for key in ("observation", ("next", "observation"), ("next", "done"), "step_count"):
                assert torch.equal(ours[key], theirs[key])


@both
def test_weights_and_versions_reach_it(kind):
    policy = Same()
    with kind([Echo] * 2, policy, collector_class=Noting, frames_per_batch=4) as collector:
        for k in range(1, 4):
            with torch.no_grad():
                policy.value.fill_(k / 4)
            assert collector.update_policy_weights_() == k
            for _ in range(6 if kind is MultiAsyncCollector else 1):
                batch = collector.next()
                versions = batch["collector", "policy_version"]
                assert torch.equal(batch["action"][..., 0], versions / 4)
            assert versions.unique().tolist() == [k]


def test_weights_reach_a_module_that_a_function_uses():
    value = Same()
    with MultiSyncCollector(
        [Echo],
        lambda observation: value(observation),  # noqa: PLW0108 - a function is what is meant
        collector_class=Noting,
        frames_per_batch=4,
    ) as collector:
        with torch.no_grad():
            value.value.fill_(0.5)
        collector.update_policy_weights_()
        assert (collector.next()["action"] == 0.5).all()


def test_one_seed_gives_one_sequence():
    def first(seed):
        with MultiSyncCollector(["CartPole-v1"] * 2, collector_class=Noting, frames_per_batch=64) as collector:
            collector.set_seed(seed)
            return collector.next()

    one, again, other = first(0), first(0), first(1)
    assert (one == again).all()
    assert not torch.equal(one["observation"], other["observation"])
    assert not torch.equal(one["observation"][0], one["observation"][1])


def test_a_state_goes_on():
    options = {"collector_class": Noting, "frames_per_batch": 8, "total_frames": 40}
    with MultiSyncCollector([Counter] * 2, **options) as collector:
        for _ in range(3):
            last = collector.next()
        state = collector.state_dict()
    with MultiSyncCollector([Counter] * 2, **options) as collector:
        collector.load_state_dict(state)
        batches = list(collector)
    assert len(batches) == 2
    assert batches[0]["collector", "traj_ids"].min() > last["collector", "traj_ids"][0].max()
    assert collector.collected_frames == 40


def test_functions_run_on_its_environments():
    with MultiSyncCollector([Counter] * 2, collector_class=Noting, frames_per_batch=12, num_envs=3) as collector:
        assert collector.map_fn(len) == [3, 3]


def test_random_frames_are_split_over_workers():
    with MultiSyncCollector(
        [Echo] * 2, Same(), collector_class=Collector, frames_per_batch=8, total_frames=24, init_random_frames=5
    ) as collector:
        batch = torch.cat([batch.flatten() for batch in collector])
    assert (batch["collector", "policy_version"] == -1).sum() == 5


def test_a_class_that_is_no_collector_is_refused():
    with pytest.raises(OptionError, match=r"collector_class.*Silent.*lacks the method 'rollout'"):
        MultiSyncCollector([Counter], collector_class=Silent, frames_per_batch=8)
