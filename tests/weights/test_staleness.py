"""`max_policy_lag=`: no delivered frame is older than that, nothing is thrown away, and nothing waits for ever."""

from __future__ import annotations

import functools
import os
import random
import signal
import time
from collections import Counter
from threading import Timer

import gymnasium as gym
import pytest
import torch

from rlcollect import AsyncCollector, MultiAsyncCollector, MultiSyncCollector, NoWeightSyncScheme
from rlcollect.collectors.admission import Admission
from rlcollect.errors import OptionError, WorkerTimeout
from rlcollect.testing import Echo
from tests.weights.helpers import One
from tests.workers.helpers import bits

pytestmark = pytest.mark.timeout(60)
STEPS = 4  # frames of a batch
STALLED = "max_policy_lag={} lets no rollout begin before new weights are published"


class Learner:
    """Takes a batch after the other and publishes after every so many, as an `Admission` expects it of one."""

    def __init__(self, lag, batches, workers, chance):
        self.admission = Admission(lag, batches)
        self.batches, self.workers, self.chance = batches, workers, chance
        self.version, self.taken, self.number = 0, 0, 0
        self.made = {}  # the version of each rollout that is under way, or has arrived
        self.lags = Counter()

    def begin(self):
        while self.admission.admits() and len(self.made) < 2 * self.workers:
            self.number += 1
            self.admission.begin(self.number)
            self.made[self.number] = self.version

    def take(self):
        """A batch of those that may come; others are made meanwhile, at whatever pace."""
        self.begin()
        assert self.made, "nothing is under way, and nothing may begin"
        ready = [number for number in self.made if self.admission.may_come(number)]
        assert ready, "everything has arrived, and nothing may be delivered"
        number = self.chance.choice(ready)
        self.admission.deliver(number)
        self.lags[self.version - self.made.pop(number)] += 1
        self.taken += 1
        if self.chance.random() < 0.5:
            self.begin()
        if self.taken % self.batches == 0:
            self.version += 1
            self.admission.published(self.version)


def number_admitted(admission, first=1):
    count = 0
    while admission.admits():
        admission.begin(first + count)
        count += 1
    return count


class TestAdmission:
    @pytest.mark.parametrize("lag", [0, 1, 3])
    @pytest.mark.parametrize("batches", [1, 2, 3])
    def test_lets_so_many_begin_as_can_be_delivered_in_time(self, lag, batches):
        admission = Admission(lag, batches)
        assert number_admitted(admission) == (lag + 1) * batches
        for number in range(1, batches + 1):
            admission.deliver(number)
            assert not admission.admits()
        admission.published(1)
        assert number_admitted(admission, 100) == batches

    @pytest.mark.parametrize("workers", [1, 2, 5])
    @pytest.mark.parametrize("batches", [1, 2, 3])
    @pytest.mark.parametrize("lag", [0, 1, 2, 5])
    def test_keeps_the_lag_and_never_gets_stuck(self, lag, batches, workers):
        """Whatever is ready first, and whatever of it is taken."""
        for seed in range(20):
            learner = Learner(lag, batches, workers, random.Random(seed))
            for _ in range(100):
                learner.take()
            assert max(learner.lags) <= lag
            assert sum(learner.lags.values()) == 100

    def test_lets_others_overtake_as_long_as_it_comes_in_time(self):
        admission = Admission(1, 1)
        assert number_admitted(admission) == 2  # rollouts 1 and 2, of version 0
        assert admission.may_come(2)  # as version 0; 1 then comes as version 1, of lag 1
        admission.deliver(2)
        admission.published(1)
        admission.begin(3)
        assert not admission.may_come(3)  # 1 would be two versions old
        assert admission.may_come(1)
        admission.deliver(1)
        assert admission.may_come(3)

    def test_does_not_count_versions_before_the_first_rollout(self):
        admission = Admission(0, 1)
        for version in range(1, 4):
            admission.published(version)
        assert number_admitted(admission) == 1
        admission.deliver(1)
        admission.published(4)
        assert number_admitted(admission, 2) == 1

    def test_warns_once_of_versions_that_come_too_often(self):
        admission = Admission(1, 2)
        number_admitted(admission)
        for number in (1, 2):
            admission.deliver(number)
        admission.published(1)  # after two batches: as agreed
        with pytest.warns(UserWarning, match=r"2 versions were published for 2 batches.*one for each 2"):
            admission.published(2)
        admission.published(3)

    def test_lets_others_begin_in_the_place_of_what_was_lost(self):
        admission = Admission(1, 2)
        assert number_admitted(admission) == 4
        admission.deliver(1)
        admission.lose()
        assert admission.behind == 1
        assert number_admitted(admission, 5) == 3
        for number in (5, 6, 7):
            assert admission.may_come(number), "it overtakes none of those that were lost"

    def test_goes_on_with_the_version_of_a_state(self):
        admission = Admission(0, 1)
        admission.published(5)
        assert number_admitted(admission) == 1
        admission.go_on(2, 0)
        assert number_admitted(admission) == 1
        admission.deliver(1)
        assert not admission.admits()
        admission.published(3)
        assert admission.admits()

    @pytest.mark.parametrize("behind", [0, 1, 2])
    def test_goes_on_in_the_middle_of_a_version(self, behind):
        admission = Admission(1, 3)
        number_admitted(admission)
        for number in range(1, 4 + behind):
            admission.deliver(number)
            if number == 3:
                admission.published(1)
        assert admission.behind == behind
        other = Admission(1, 3)
        other.go_on(1, behind)
        assert other.behind == behind
        assert number_admitted(other) == 6 - behind
        for number in range(1, 4 - behind):
            other.deliver(number)
        other.published(2)  # no warning: it comes when it should
        assert other.behind == 0
        assert number_admitted(other, 100) == 3

    def test_a_spare_rollout_is_none_of_the_batches(self):
        admission = Admission(0, 1)
        assert number_admitted(admission) == 1
        admission.deliver(1)
        admission.spare = 1
        assert number_admitted(admission, 2) == 1
        admission.deliver(2)
        assert admission.spare == 0
        assert admission.behind == 1
        assert not admission.admits()
        admission.published(1)
        assert number_admitted(admission, 3) == 1

    def test_a_spare_rollout_that_is_lost_is_not_wanted_any_more(self):
        admission = Admission(0, 1)
        number_admitted(admission)
        admission.deliver(1)
        admission.spare = 1
        assert number_admitted(admission, 2) == 1
        admission.lose()
        assert not admission.admits()

    def test_says_why_none_may_begin(self):
        admission = Admission(2, 3)
        assert STALLED.format(2) in admission.why_none
        number_admitted(admission)
        for number in range(1, 5):
            admission.deliver(number)
            if number == 3:
                admission.published(1)
        assert "1 batches were delivered since version 1 was due" in admission.why_none
        assert "after every 3 batch(es)" in admission.why_none


class Counted(gym.Wrapper):
    """Pays the number of the step, and takes up to so many seconds for it."""

    def __init__(self, longest=0.0):
        super().__init__(Echo(length=None))
        self.longest, self.steps = longest, 0

    def step(self, action):
        time.sleep(random.random() * self.longest)
        observation, _, *rest = self.env.step(action)
        self.steps += 1
        return observation, float(self.steps), *rest


FAST, SLOW = Counted, functools.partial(Counted, 0.005)


def collecting(kind, lag, policy=None, makers=None, **options):
    makers = makers or ([SLOW, FAST] if kind is MultiAsyncCollector else SLOW)
    policy = One() if policy is None else policy
    return kind(makers, policy, frames_per_batch=STEPS, max_policy_lag=lag, record=("worker",), **options)


def publish(collector, value=None):
    """The next version, whose weights are its number; those of the policy here too, which a state has."""
    number = collector.policy_version + 1
    with torch.no_grad():
        collector.policy.weight.fill_(float(number))
    assert collector.update_policy_weights_() == number


def lags(collector, batch):
    """How old each frame is, as it is delivered now."""
    versions = batch["collector", "policy_version"].flatten()
    assert batch["action"].flatten().tolist() == versions.tolist(), "a frame has the version of other weights"
    return (collector.policy_version - versions).tolist()


def patient(collector):
    """The next batch, however long it takes; None: none may be begun."""
    while True:
        try:
            return collector.next()
        except WorkerTimeout as error:
            if not error.workers:  # there is nobody to wait for
                return None


@pytest.mark.parametrize("kind", [MultiAsyncCollector, AsyncCollector])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("lag", [0, 1, 3])
class TestAnAsyncRun:
    @pytest.mark.slow
    def test_delivers_nothing_older_and_all_that_was_asked_for(self, kind, batches, lag):
        frames, seen, rewards = 30 * STEPS, Counter(), {0: [], 1: []}
        with collecting(kind, lag, batches_per_version=batches, total_frames=frames) as collector:
            for number, batch in enumerate(collector, 1):
                assert batch.numel() == STEPS
                seen.update(lags(collector, batch))
                (worker,) = set(batch["collector", "worker"].tolist())
                rewards[worker] += batch["next", "reward"].flatten().tolist()
                if number % batches == 0:
                    publish(collector)
            assert collector.collected_frames == frames
            assert collector.policy_lag == seen
        assert max(seen) <= lag
        assert sum(seen.values()) == frames
        for own in rewards.values():  # each worker's frames came, in order
            assert own == list(range(1, len(own) + 1))


class TestLagZero:
    def test_gives_the_batches_of_a_sync_collector(self):
        class Noisy(One):
            def forward(self, observation):
                return self.weight + torch.randn(observation.shape)

        def run(kind, source, **options):
            policy, batches = Noisy(), []
            with kind(source, policy, frames_per_batch=6, total_frames=36, **options) as collector:
                collector.set_seed(3)
                for batch in collector:
                    batches.append(batch)
                    policy.weight.data += batch["next", "reward"].mean()
                    collector.update_policy_weights_()
            return batches

        ours = run(AsyncCollector, functools.partial(Echo, length=4), max_policy_lag=0)
        theirs = run(MultiSyncCollector, [functools.partial(Echo, length=4)])
        assert len(ours) == len(theirs) == 6
        for one, other in zip(ours, theirs, strict=True):
            assert bits(one) == bits(other[0])


class TestALearnerThatStops:
    @pytest.mark.parametrize("lag", [0, 2])
    def test_is_told_why_no_batch_comes_and_goes_on_when_it_publishes(self, lag):
        with collecting(MultiAsyncCollector, lag, makers=[FAST] * 2, batches_per_version=2, timeout=0.5) as collector:
            batches = list(iter(lambda: patient(collector), None))
            assert len(batches) == (lag + 1) * 2
            with pytest.raises(WorkerTimeout, match=STALLED.format(lag)):
                collector.next()
            assert not collector.closed
            publish(collector)
            for _ in range(2):
                assert max(lags(collector, patient(collector))) <= lag
            assert patient(collector) is None
            publish(collector)
            assert max(lags(collector, patient(collector))) <= lag

    def test_is_waited_for_if_another_thread_publishes(self):
        with collecting(AsyncCollector, 0, timeout=30) as collector:
            collector.next()
            timer = Timer(0.1, publish, [collector])
            timer.start()
            assert lags(collector, collector.next()) == [0] * STEPS
            timer.join()


class TestALearnerThatPublishesMoreOften:
    def test_is_warned_once(self):
        with collecting(MultiAsyncCollector, 1, makers=[FAST] * 2) as collector:
            collector.next()
            publish(collector)
            with pytest.warns(UserWarning, match=r"2 versions were published for 1 batches") as told:
                publish(collector)
            assert len(told) == 1
            for _ in range(5):  # warnings are errors
                collector.next()
                publish(collector)
                publish(collector)

    def test_is_free_to_do_so_before_the_first_batch(self):
        with collecting(AsyncCollector, 0, timeout=0.5) as collector:
            for _ in range(3):
                publish(collector)
            assert lags(collector, patient(collector)) == [0] * STEPS
            assert patient(collector) is None
            publish(collector)
            assert lags(collector, patient(collector)) == [0] * STEPS


class TestUpdates:
    def test_are_for_all_workers(self):
        with collecting(MultiAsyncCollector, 1, makers=[FAST] * 2) as collector:
            one = One(5)
            for arguments in ((one, {"worker_ids": 0}), (one, {"worker_ids": [1]}), ({0: one, 1: one}, {})):
                with pytest.raises(OptionError, match="max_policy_lag="):
                    collector.update_policy_weights_(arguments[0], **arguments[1])
            assert collector.policy_version == 0
            assert collector.next()["action"].flatten().tolist() == [0] * STEPS

    def test_at_each_batch_keep_the_lag(self):
        policy = One()
        with collecting(MultiAsyncCollector, 0, policy, update_at_each_batch=True) as collector:
            for number in range(6):
                policy.weight.data.fill_(number)
                assert lags(collector, collector.next()) == [0] * STEPS
                assert collector.policy_version == number


@pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted")
class TestWorkersThatFail:
    def test_keep_the_lag_and_the_counts(self):
        frames, seen = 24 * STEPS, []
        with collecting(
            MultiAsyncCollector, 1, on_worker_failure="restart", total_frames=frames, timeout=30
        ) as collector:
            pids = collector.map_fn(lambda envs: os.getpid())
            for number, batch in enumerate(collector):
                seen += lags(collector, batch)
                publish(collector)
                if number in (5, 11):
                    os.kill(pids[number == 11], signal.SIGKILL)
            assert [worker.restarts for worker in collector.stats().workers] == [1, 1]
        assert max(seen) <= 1
        assert len(seen) == frames


class TestAStateThatIsLoaded:
    def test_goes_on_with_the_lag_and_without_losing_a_batch(self):
        frames = 12 * STEPS
        with collecting(AsyncCollector, 1, total_frames=frames, timeout=30) as collector:
            for _ in range(5):
                assert max(lags(collector, collector.next())) <= 1
                publish(collector)
            state = collector.state_dict()
        for _ in range(2):  # into a new one, and into one that has gone on
            with collecting(AsyncCollector, 1, total_frames=frames, timeout=30) as collector:
                collector.next()
                for _ in range(2):
                    collector.load_state_dict(state)
                    assert collector.policy_version == 5
                    count = 0
                    for batch in collector:
                        versions = batch["collector", "policy_version"]
                        assert int((collector.policy_version - versions).max()) <= 1
                        count += 1
                        publish(collector)
                    assert count == 7
                    assert collector.collected_frames == frames


class TestAStateInTheMiddleOfAVersion:
    def test_goes_on_with_the_batches_that_are_left_of_it(self):
        with collecting(AsyncCollector, 1, batches_per_version=3, timeout=30) as collector:
            for number in range(1, 10):
                assert max(lags(collector, collector.next())) <= 1
                if number in (1, 5, 6):
                    collector.load_state_dict(collector.state_dict())
                if number % 3 == 0:
                    publish(collector)  # no warning: it comes when it should

    def test_gives_the_batches_that_it_holds_in_their_turn(self, tmp_path):
        """Those of the second worker have come first, and were not to overtake those of the first."""
        gate = tmp_path / "open"
        makers = [functools.partial(Gated, str(gate)), FAST]
        with collecting(MultiAsyncCollector, 1, makers=makers, batches_per_version=2, timeout=1) as collector:
            for _ in range(2):
                assert collector.next()["collector", "worker"].unique().tolist() == [1]
            publish(collector)
            with pytest.raises(WorkerTimeout):
                collector.next()
            gate.touch()
            state = collector.state_dict()
        assert len(state["pending"]) >= 3  # one of the first worker's at least
        seen = []
        with collecting(MultiAsyncCollector, 1, batches_per_version=2, timeout=30) as collector:
            collector.load_state_dict(state)
            for number in range(3, 9):
                batch = collector.next()
                seen.append((batch["collector", "worker"][0].item(), max(lags(collector, batch))))
                if number % 2 == 0:
                    publish(collector)
        assert seen[0] == (0, 1)
        assert max(lag for _, lag in seen) <= 1


class Gated(Counted):
    """Waits with each step until there is a file."""

    def __init__(self, gate):
        super().__init__()
        self.gate = gate

    def step(self, action):
        deadline = time.monotonic() + 30
        while not os.path.exists(self.gate):  # noqa: PTH110
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return super().step(action)


class TestRollouts:
    """`rollout()` gives frames that are none of the learner's batches."""

    @pytest.mark.parametrize("kind", [MultiAsyncCollector, pytest.param(AsyncCollector, marks=pytest.mark.slow)])
    @pytest.mark.parametrize("lag", [0, 1])
    def test_use_up_no_admission(self, kind, lag):
        with collecting(kind, lag, timeout=0.5) as collector:
            for number in range(1, 5):
                assert max(lags(collector, patient(collector))) <= lag
                collector.rollout()  # where no batch may begin, too
                publish(collector)
                collector.rollout()
                assert collector.collected_frames == number * STEPS
            batches = list(iter(lambda: patient(collector), None))
            assert len(batches) == lag + 1


class TestOptions:
    @pytest.mark.parametrize("lag", [-1, 0.5, True, "1"])
    def test_lags_are_whole_numbers(self, lag):
        with pytest.raises(OptionError, match="max_policy_lag"):
            collecting(AsyncCollector, lag)

    @pytest.mark.parametrize("batches", [0, -1, 1.5])
    def test_batches_are_whole_numbers(self, batches):
        with pytest.raises(OptionError, match="batches_per_version"):
            collecting(AsyncCollector, 1, batches_per_version=batches)

    def test_batches_need_a_lag(self):
        with pytest.raises(OptionError, match=r"batches_per_version=2 needs max_policy_lag="):
            AsyncCollector(Echo, One(), frames_per_batch=4, batches_per_version=2)

    def test_weights_have_to_be_sent(self):
        with pytest.raises(OptionError, match=r"max_policy_lag= needs a policy whose weights are sent"):
            collecting(AsyncCollector, 1, weight_sync_schemes={"policy": NoWeightSyncScheme()})

    def test_kinds_that_rest_have_no_lag(self):
        with pytest.raises(OptionError, match="max_policy_lag"):
            MultiSyncCollector([Echo], One(), frames_per_batch=4, max_policy_lag=1)
