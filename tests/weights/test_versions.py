"""Versions: which frames each made, how old they were, who has which, and for whom an update is."""

from __future__ import annotations

import threading
import time
from collections import Counter
from contextlib import contextmanager

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from torch import nn

from rlcollect import AsyncCollector, Collector, MultiAsyncCollector, MultiSyncCollector
from rlcollect.errors import OptionError, PolicyError, WorkerTimeout
from rlcollect.testing import Echo
from tests.weights.helpers import One

pytestmark = pytest.mark.timeout(60)
LONG = 30  # seconds in which every worker gets its turn, however busy the machine is
KINDS = {
    "single": Collector,
    "sync": MultiSyncCollector,
    "async": MultiAsyncCollector,
    "one async": AsyncCollector,
}
kinds = pytest.mark.parametrize("kind", KINDS)


class Remembering(One):
    """Acts as its parameter, and counts the steps of an episode in a recurrent state."""

    def forward(self, observation, hidden=None):
        hidden = torch.zeros(*observation.shape[:-1], 1) if hidden is None else hidden
        return {"action": self.weight.expand(observation.shape), ("next", "hidden"): hidden + 1}


def weights(value):
    return {"weight": torch.tensor([float(value)])}


class Slow(gym.Wrapper):
    """Takes so many seconds for a step."""

    def __init__(self, seconds, length=None):
        super().__init__(Echo(length=length))
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds)
        return self.env.step(action)


def of_kind(kind, policy=None, makers=None, **options):
    kind = KINDS[kind]
    makers = makers or [Echo, Echo]
    source = makers if kind in (MultiSyncCollector, MultiAsyncCollector) else makers[0]
    frames = 8 if kind is MultiSyncCollector else 4
    options = {"frames_per_batch": frames, "record": ("worker",), **options}
    return kind(source, One() if policy is None else policy, **options)


def frames(batch):
    """(worker, version, action) of each frame."""
    keys = (("collector", "worker"), ("collector", "policy_version"), "action")
    return list(zip(*(batch[key].flatten().tolist() for key in keys), strict=True))


class TestLag:
    @kinds
    def test_counts_the_frames_that_were_delivered(self, kind):
        with of_kind(kind) as collector:
            assert collector.policy_lag == {}
            expected = Counter()
            for number in range(6):
                batch = collector.next()
                expected.update(number - version for _, version, _ in frames(batch))
                assert collector.policy_lag == expected
                collector.update_policy_weights_(weights(number))
                assert collector.policy_lag == expected, "what was delivered does not grow older"
            assert list(collector.policy_lag) == sorted(expected)
            if kind in ("single", "sync"):
                assert collector.policy_lag == {0: collector.collected_frames}

    def test_is_that_of_each_worker(self):
        with of_kind("sync") as collector:
            collector.next()
            for _ in range(3):
                collector.update_policy_weights_(weights(1), worker_ids=0)
            collector.next()
            assert collector.policy_lag == {0: 8 + 4, 3: 4}
            collector.update_policy_weights_(weights(2), worker_ids=1)
            collector.next()
            assert collector.policy_lag == {0: 8 + 4 + 4, 1: 4, 3: 4}

    def test_is_counted_up_to_1024(self):
        with of_kind("sync") as collector:
            for _ in range(1023):
                collector.update_policy_weights_(weights(1), worker_ids=0)
            collector.next()
            assert collector.policy_lag == {0: 4, 1023: 4}
            for _ in range(3):
                collector.update_policy_weights_(weights(1), worker_ids=0)
                collector.next()
            assert collector.policy_lag == {0: 16, 1023: 4, 1024: 12}

    @pytest.mark.parametrize("kind", ["single", "sync"])
    def test_is_not_that_of_random_frames(self, kind):
        with of_kind(kind, frames_per_batch=8, init_random_frames=10) as collector:
            collector.next()
            assert collector.policy_lag == {}
            batch = collector.next()
            versions = Counter(version for _, version, _ in frames(batch))
            assert versions == {-1: 2, 0: 6}
            assert collector.policy_lag == {0: 6}


def acting(collector):
    """The version that each worker acts with."""
    state = collector.state_dict()
    if isinstance(collector, Collector):
        return [state["policy_version"]]
    return [state[f"worker{worker}"]["policy_version"] for worker in range(collector.num_workers)]


class TestWaiting:
    @kinds
    def test_ends_when_all_workers_have_the_version(self, kind):
        with of_kind(kind) as collector:
            collector.wait_for_version(0)
            for number in range(1, 4):
                assert collector.update_policy_weights_(weights(number)) == number
                collector.wait_for_version(number, timeout=LONG)
                assert acting(collector) == [number] * collector.num_workers
                for older in range(number):
                    collector.wait_for_version(older)
                collector.next()

    def test_is_for_what_was_sent_to_each(self):
        with of_kind("sync") as collector:
            collector.update_policy_weights_(weights(1), worker_ids=0)
            collector.wait_for_version(1, timeout=LONG)
            assert acting(collector) == [1, 0]
            collector.update_policy_weights_(weights(2), worker_ids=1)
            collector.wait_for_version(1, timeout=LONG)
            assert acting(collector) == [1, 2]

    @kinds
    def test_needs_a_version_that_is_published(self, kind):
        with of_kind(kind) as collector:
            collector.update_policy_weights_(weights(1))
            with pytest.raises(OptionError, match=r"Version 2 was not published yet; the newest is 1"):
                collector.wait_for_version(2)
            with pytest.raises(TimeoutError, match=r"Version 2 was not published in 0\.05 s; the newest is 1"):
                collector.wait_for_version(2, timeout=0.05)
            timer = threading.Timer(0.05, collector.update_policy_weights_, [weights(2)])
            timer.start()
            collector.wait_for_version(2, timeout=LONG)
            timer.join()
            assert acting(collector) == [2] * collector.num_workers
            assert not collector.closed

    @kinds
    def test_is_for_the_weights_and_not_for_their_number(self, kind, monkeypatch):
        """The number is given before the weights are sent: who waits must not go on between the two."""
        with of_kind(kind) as collector:
            post = collector._updates._poster.post

            def slowly(fitted, version):
                time.sleep(0.1)
                post(fitted, version)

            monkeypatch.setattr(collector._updates._poster, "post", slowly)
            timer = threading.Timer(0.02, collector.update_policy_weights_, [weights(1)])
            timer.start()
            collector.wait_for_version(1, timeout=LONG)
            assert acting(collector) == [1] * collector.num_workers
            timer.join()


class TestAWorkerThatSleeps:
    def test_holds_up_neither_an_update_nor_the_others_and_is_named_when_it_is_late(self):
        with of_kind("async", makers=[Echo, lambda: Slow(0.4)]) as collector:
            assert {worker for worker, *_ in frames(collector.next())} == {0}
            collector.update_policy_weights_(weights(7))
            while (seen := frames(collector.next())) != [(0, 1, 7)] * 4:
                assert {worker for worker, *_ in seen} == {0}, "the update waited for worker 1"
            with pytest.raises(WorkerTimeout, match="worker 1") as raised:
                collector.wait_for_version(1, timeout=0.1)
            assert raised.value.workers == (1,)
            collector.wait_for_version(1, timeout=LONG)
            assert acting(collector) == [1, 1]


class TestForWhom:
    @pytest.mark.parametrize("everyone", ["cpu", torch.device("cpu"), ["cpu"], [torch.device("cpu"), 0]])
    def test_a_device_stands_for_those_who_compute_there(self, everyone):
        with of_kind("sync") as collector:
            assert collector.update_policy_weights_(weights(3), worker_ids=everyone) == 1
            assert frames(collector.next()) == [(0, 1, 3)] * 4 + [(1, 1, 3)] * 4

    @kinds
    def test_devices_where_nobody_computes_are_refused(self, kind):
        with of_kind(kind) as collector:
            for wrong in ("meta", torch.device("meta"), ["cpu", "meta"]):
                with pytest.raises(OptionError, match=r"No worker's policy computes on meta; they do on cpu"):
                    collector.update_policy_weights_(weights(3), worker_ids=wrong)
            with pytest.raises(OptionError, match="'nowhere', which is neither a number nor a device"):
                collector.update_policy_weights_(weights(3), worker_ids="nowhere")
            assert collector.policy_version == 0
            assert {action for *_, action in frames(collector.next())} == {0}


class TestWeightsOfEachWorker:
    def test_are_one_version(self):
        with of_kind("sync") as collector:
            assert collector.update_policy_weights_({0: weights(5), 1: One(6)}) == 1
            assert frames(collector.next()) == [(0, 1, 5)] * 4 + [(1, 1, 6)] * 4
            assert collector.update_policy_weights_({1: weights(7)}) == 2
            assert frames(collector.next()) == [(0, 1, 5)] * 4 + [(1, 2, 7)] * 4
            assert collector.update_policy_weights_(weights(8)) == 3
            assert frames(collector.next()) == [(0, 3, 8)] * 4 + [(1, 3, 8)] * 4

    def test_are_all_taken_or_none(self):
        with of_kind("sync") as collector:
            with pytest.raises(PolicyError, match="'weight'"):
                collector.update_policy_weights_({0: weights(5), 1: {"weight": torch.ones(2)}})
            with pytest.raises(OptionError, match="workers 0 to 1"):
                collector.update_policy_weights_({0: weights(5), 2: weights(6)})
            with pytest.raises(OptionError, match="worker_ids= does not go with weights for each worker"):
                collector.update_policy_weights_({0: weights(5), 1: weights(6)}, worker_ids=0)
            assert collector.policy_version == 0
            assert frames(collector.next()) == [(0, 0, 0)] * 4 + [(1, 0, 0)] * 4

    def test_are_those_of_the_one_there_is(self):
        with of_kind("single") as collector:
            assert collector.update_policy_weights_({0: weights(5)}) == 1
            assert frames(collector.next()) == [(0, 1, 5)] * 4


@contextmanager
def publishing(collector, every=0.003):
    """A thread publishes version after version meanwhile: their number is their weight."""
    is_over, errors = threading.Event(), []

    def publish():
        try:
            version = 0
            while not is_over.wait(every):
                version += 1
                assert collector.update_policy_weights_(weights(version)) == version
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=publish)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
    assert errors == []


def next_step():
    """Lanes whose steps are not all frames: those in which they are reset are none."""
    makers = [lambda: Slow(0.001, 3), lambda: Slow(0.001, 4)]
    return SyncVectorEnv(makers, autoreset_mode=AutoresetMode.NEXT_STEP)


PATHS = {"dense": lambda: Slow(0.002, 5), "scratch": next_step}


@pytest.mark.parametrize("path", PATHS)
class TestWeightsOfTheStep:
    """`weights_update="step"`: they change within a rollout, and each frame has the version that made it."""

    def collected(self, path, policy, **options):
        """Batches until one has several versions."""
        options = {"frames_per_batch": 60, "weights_update": "step", "record": ("step_count",), **options}
        deadline, batches, lag = time.monotonic() + LONG, [], 0
        with AsyncCollector(PATHS[path], policy, **options) as collector, publishing(collector):
            while not batches or len(set(batches[-1]["collector", "policy_version"].flatten().tolist()) - {-1}) < 5:
                assert time.monotonic() < deadline
                batches.append(collector.next())
            lag = sum(collector.policy_lag.values())
        batch = torch.cat(batches, -1)
        batch = batch if batch.ndim == 2 else batch[None]
        mask = batch.get(("collector", "mask"), torch.ones(batch.batch_size, dtype=torch.bool))
        lanes = [lane[has] for lane, has in zip(batch.unbind(0), mask.unbind(0), strict=True)]
        for lane in lanes:
            versions = lane["collector", "policy_version"]
            assert (versions.diff() >= 0).all()
            by_policy = versions >= 0
            assert torch.equal(lane["action"].squeeze(-1)[by_policy], versions[by_policy].float())
            lag -= int(by_policy.sum())
        assert lag == 0, "as many frames count as policies have made"
        return lanes

    def test_are_those_of_the_version(self, path):
        lanes = self.collected(path, One())
        assert min(lane["collector", "policy_version"].min() for lane in lanes) >= 0

    def test_are_not_those_of_random_frames(self, path):
        lanes = self.collected(path, One(), init_random_frames=21)
        versions = torch.cat([lane["collector", "policy_version"] for lane in lanes])
        assert int((versions == -1).sum()) == 21
        actions = torch.cat([lane["action"].squeeze(-1) for lane in lanes])
        assert len(set(actions[versions == -1].tolist())) == 21, "these are drawn"

    def test_leave_a_recurrent_state_alone(self, path):
        lanes = self.collected(path, Remembering())
        for lane in lanes:
            assert torch.equal(lane["hidden"], lane["step_count"].float())
            assert torch.equal(lane["next", "hidden"], lane["step_count"].float() + 1)


class TestLazyPolicies:
    @pytest.mark.parametrize("kind", ["sync", "async"])
    def test_begin_with_the_same_values_here_and_in_all_workers(self, kind):
        policy = nn.Sequential(nn.LazyLinear(3), nn.Tanh(), nn.LazyLinear(1))
        with of_kind(kind, policy) as collector:
            workers, batches = set(), []
            while len(workers) < 2:
                batches.append(collector.next())
                workers |= {worker for worker, *_ in frames(batches[-1])}
            for batch in batches:
                assert batch["observation"].abs().sum() > 0
                torch.testing.assert_close(batch["action"], policy(batch["observation"]).detach())
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.fill_(0.5)
            version = collector.update_policy_weights_()
            collector.wait_for_version(version, timeout=LONG)
            seen = set()
            while seen != {0, 1}:
                batch = collector.next()
                if (batch["collector", "policy_version"] == version).all():
                    torch.testing.assert_close(batch["action"], policy(batch["observation"]).detach())
                    seen |= {worker for worker, *_ in frames(batch)}
