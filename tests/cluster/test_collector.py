"""`RayCollector`: batches of processes, from a cluster. Few tests, each with much in it: every remote takes seconds."""

from __future__ import annotations

import functools
import os
import signal
import threading
import time

import pytest
import torch
from torch import nn

from rlcollect import (
    Collector,
    MultiAsyncCollector,
    MultiSyncCollector,
    OptionError,
    RayCollector,
    RayWeightSyncScheme,
    SharedMemWeightSyncScheme,
    WorkerDied,
    WorkerError,
    WorkerTimeout,
)
from rlcollect.testing import Breaker, Counter, Echo, check_batch
from tests.cluster.test_connection import ran
from tests.workers.helpers import Kind, TaggedLanes, assert_same, by_worker, lanes_of, tagged_frames

pytestmark = [
    pytest.mark.usefixtures("here"),
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted"),
]
SMALL = {"num_cpus": 0.1}
LANES = 2


class Net(nn.Module):
    """Logits of `Tagged`'s actions, drawn from with torch's generator."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, observation):
        return torch.distributions.Categorical(logits=self.layer(observation / 10)).sample()


class One(nn.Module):
    """Acts as its parameter."""

    def __init__(self, value=1.0):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([float(value)]))

    def forward(self, observation):
        return self.weight.expand(observation.shape)


def checked(batch):
    check_batch(batch)
    return batch


def made(policy=None, *, remotes=2, make=TaggedLanes, sync=False, steps=6, **options):
    frames = steps * LANES * (remotes if sync else 1)
    own = {"remote_configs": SMALL, "num_envs": LANES, "frames_per_batch": frames, "timeout": 60, "sync": sync}
    return RayCollector([make(remote) for remote in range(remotes)], policy, **{**own, **options})


def actions_by_version(batch):
    """What each version of the weights did, as rows show it."""
    versions = batch["collector", "policy_version"].flatten().tolist()
    actions = batch["action"].reshape(len(versions), -1)[:, 0].tolist()
    return set(zip(versions, actions, strict=True))


class TestSync:
    def test_batches_are_bit_for_bit_those_of_processes(self):
        """With weights that change, a reset, seeds, and a state that is loaded into another."""
        runs, ends = [], []
        for kind, own in ((MultiSyncCollector, {}), (RayCollector, {"sync": True, "remote_configs": SMALL})):
            torch.manual_seed(0)
            policy, batches = Net(), []
            form = {"frames_per_batch": 24, "num_envs": LANES, "timeout": 60, "total_frames": 240}
            with kind([TaggedLanes(0), TaggedLanes(1)], policy, **form, **own) as collector:
                assert collector.set_seed(5) == 6
                for number in range(4):
                    batches.append(checked(collector.next()).clone())
                    with torch.no_grad():
                        policy.layer.weight += 0.1
                    assert collector.update_policy_weights_() == number + 1
                collector.reset([False, True])
                batches.append(collector.next().clone())
                state = collector.state_dict()
                ends.append([collector.next().clone() for _ in range(2)])
                assert collector.collected_frames == 7 * 24
            with kind([TaggedLanes(0), TaggedLanes(1)], policy, **form, **own) as other:
                other.load_state_dict(state if kind is MultiSyncCollector else [state])
                assert other.collected_frames == 5 * 24
                batches += [other.next().clone() for _ in range(2)]
                assert len(list(other)) == 3
                assert other.exhausted
                assert other.next() is None
            runs.append(batches)
        for ours, theirs in zip(*runs, strict=True):
            assert_same([ours], [theirs])
        assert_same(*ends)

    @pytest.mark.cluster
    def test_the_same_memory_can_be_had_each_time(self):
        with made(sync=True, return_same_td=True) as collector:
            first, second = collector.next(), collector.next()
            assert first is second
            assert first.batch_size == (2, LANES, 6)
            check_batch(first)
            assert collector.stats().object_store_bytes == 0

    @pytest.mark.cluster
    @pytest.mark.parametrize("options", [{"preemptive_threshold": 0.5}, {"cat_results": -1}], ids=str)
    def test_batches_are_joined_as_those_of_processes(self, options):
        with made(sync=True, **options) as collector:
            for _ in range(4):
                check_batch(collector.next())


class TestAsync:
    @pytest.mark.cluster
    def test_each_remotes_frames_are_those_of_a_process(self):
        parts = []
        for cls, own in ((MultiAsyncCollector, {}), (RayCollector, {"remote_configs": SMALL})):
            torch.manual_seed(0)
            kind = Kind(cls, 2, False)
            with cls(
                [TaggedLanes(0), TaggedLanes(1)], Net(), frames_per_batch=12, num_envs=LANES, timeout=60, **own
            ) as collector:
                collector.set_seed(3)
                batches = []
                while min(map(len, by_worker(kind, batches))) < 5:
                    batches.append(collector.next())
                parts.append([own[:5] for own in by_worker(kind, batches)])
        for ours, theirs in zip(*parts, strict=True):
            assert_same(ours, theirs)

    @pytest.mark.cluster
    def test_counts_are_exact_and_iteration_goes_on(self):
        """FAULTS 60: break, iterate again; then another collector in the same program."""
        for _ in range(2):
            with made(total_frames=200, max_in_flight=3, init_random_frames=50) as collector:
                frames, random = 0, 0
                for batch in collector:
                    frames += batch.numel()
                    random += int((batch["collector", "policy_version"] < 0).sum())
                    if frames > 100:
                        break
                for batch in collector:
                    frames += batch.numel()
                assert frames == collector.collected_frames == 200
                assert collector.exhausted
                assert collector.map_fn(len) == [LANES, LANES]

    @pytest.mark.cluster
    def test_what_lies_in_the_store_is_bounded_and_what_is_kept_stays(self):
        with made(steps=400, max_in_flight=2) as collector:
            first = collector.next()
            copy, most = first.clone(), 0
            for _ in range(30):
                collector.next()
                most = max(most, collector.stats().object_store_bytes)
            assert (first == copy).all()
            nbytes = sum(leaf.nbytes for leaf in first.values(True, True))
            assert most <= 2 * 2 * 1.1 * nbytes

    @pytest.mark.cluster
    def test_views_of_the_store(self):
        with made(steps=2000, return_same_td=True, remotes=1) as collector:
            first = collector.next()
            check_batch(first)
            before = first["observation"].data_ptr()
            assert collector.next() is first
            assert first["observation"].data_ptr() != before
            check_batch(first)


class TestWeights:
    @pytest.mark.cluster
    def test_versions_are_exact_and_an_update_is_for_whom_it_says(self):
        """FAULTS 35: the index is the remote's own; the last one works."""
        policy = One()
        with made(policy, make=lambda remote: Echo, sync=True, remotes=3) as collector:
            assert actions_by_version(collector.next()) == {(0, 1.0)}
            for remote in (1, 2, 0):
                assert collector.update_policy_weights_(One(10 * (remote + 1)), worker_ids=remote) > 0
            batch = collector.next()
            assert [actions_by_version(batch[remote]) for remote in range(3)] == [{(3, 10.0)}, {(1, 20.0)}, {(2, 30.0)}]
            collector.update_policy_weights_({0: One(7), 2: One(9)})
            batch = collector.next()
            assert [actions_by_version(batch[remote]) for remote in range(3)] == [{(4, 7.0)}, {(1, 20.0)}, {(4, 9.0)}]
            with pytest.raises(OptionError, match="worker_ids"):
                collector.update_policy_weights_(worker_ids=3)
            collector.update_policy_weights_()
            assert actions_by_version(collector.next()) == {(5, 1.0)}

    @pytest.mark.cluster
    def test_by_themselves(self):
        policy = One(5)
        with made(policy, make=lambda remote: Echo, update_after_each_batch=True) as collector:
            for _ in range(6):
                batch = collector.next()
                versions = {version for version, _ in actions_by_version(batch)}
                assert versions <= {*range(collector.policy_version + 1)}
            assert collector.policy_version >= 5

    @pytest.mark.cluster
    def test_now_and_then_and_from_a_factory(self):
        policy = One(5)
        with made(policy, make=lambda remote: Echo, max_weight_update_interval=2) as collector:
            for _ in range(9):
                collector.next()
            assert 2 <= collector.policy_version <= 4
        with made(policy_factory=One, make=lambda remote: Echo, sync=True) as collector:
            with pytest.warns(UserWarning, match="No weights were sent"):
                batch = collector.next()
            assert actions_by_version(batch) == {(0, 1.0)}
            collector.update_policy_weights_(policy)
            assert actions_by_version(collector.next()) == {(1, 5.0)}

    def test_which_schemes_go_with_it(self):
        with pytest.raises(OptionError, match="workers of this machine"):
            made(One(), weight_sync_schemes={"policy": SharedMemWeightSyncScheme()})
        with pytest.raises(OptionError, match="works in a RayCollector"):
            RayWeightSyncScheme().init_on_sender("policy", model=One())


class TestFailures:
    @pytest.mark.cluster
    def test_what_an_environment_raises_comes_out_as_it_is(self):
        def breaking(remote):
            return functools.partial(Breaker, "raise", "step", at=7 if remote else 10**9)

        collector = made(make=breaking, sync=True)
        with pytest.raises(Exception) as caught:
            list(collector)
        report = caught.value.__cause__
        assert isinstance(report, WorkerError)
        assert report.worker == 1
        assert "step" in report.worker_traceback
        assert collector.closed

    @pytest.mark.cluster
    def test_a_remote_that_is_killed_is_noticed(self):
        with made() as collector:
            collector.next()
            pids = [pid for (pid,) in collector.map_fn(lambda envs: (os.getpid(),))]
            os.kill(pids[1], signal.SIGKILL)
            start = time.monotonic()
            with pytest.raises(WorkerDied) as caught:
                list(collector)
            assert time.monotonic() - start < 30
            assert caught.value.worker == 1
            assert "Ray says" in str(caught.value)
            assert collector.closed

    @pytest.mark.parametrize("sync", [pytest.param(True, marks=pytest.mark.cluster), False], ids=["sync", "async"])
    def test_another_comes_in_its_place(self, sync):
        """Counts stay exact, episodes whole, the weights the newest."""
        policy = One()
        own = {"on_worker_failure": "restart", "total_frames": 600}
        with made(policy, make=lambda remote: Echo, sync=sync, **own) as collector:
            frames, killed, versions = 0, False, set()
            collector.update_policy_weights_(One(2))
            for batch in collector:
                frames += batch.numel()
                versions |= actions_by_version(batch)
                if not killed and frames > 100:
                    killed = True
                    os.kill(collector.map_fn(lambda envs: os.getpid())[1], signal.SIGKILL)
                    assert collector.map_fn(len) == [LANES] * 2  # another one answers
            assert frames == collector.collected_frames == 600
            assert versions <= {(0, 1.0), (1, 2.0)}
            assert [each.restarts for each in collector.stats().workers] == [0, 1]

    @pytest.mark.cluster
    def test_time_outs_say_where_it_is(self):
        def slow(remote):
            return functools.partial(Breaker, "sleep", "step", at=5, seconds=4.5) if remote else Counter

        with made(make=slow, sync=True, timeout=6.0) as collector:
            with pytest.raises(WorkerTimeout, match=r"worker 1 .collecting.* on node") as caught:
                collector.next()
            assert caught.value.workers == (1,)
            assert collector.next().batch_size == (2, LANES, 6)


class TestOptions:
    def test_more_than_there_is_is_refused(self):
        with pytest.raises(OptionError, match="no node of the cluster has more than 4"):
            made(remote_configs={"num_cpus": 64})
        with pytest.raises(OptionError, match=r"3 remotes ask for 6 CPU in all, and the cluster has 4"):
            made(remotes=3, remote_configs={"num_cpus": 2})
        with pytest.raises(OptionError, match="remote_configs is a list of 3, and there are 2"):
            made(remote_configs=[SMALL] * 3)

    def test_what_makes_no_sense_is_refused_by_name(self):
        for options, text in (
            ({"cat_results": 0}, "cat_results=0 does not go with sync=False"),
            ({"sync": True, "max_policy_lag": 1}, "max_policy_lag=1 does not go with sync=True"),
            ({"start_method": "spawn"}, "workers are actors of a cluster"),
            ({"collector_kwargs": {"num_envs": 2}}, "collector_class="),
            ({"collector_class": "many"}, "collector_class must be one of"),
            ({"num_workers_per_collector": 2}, "collector_class="),
            ({"max_in_flight": 0}, "max_in_flight"),
            ({"sync": True, "max_in_flight": 3}, "max_in_flight=3 does not go with sync=True"),
            ({"remote_configs": {"max_concurrency": 1}}, "remote_configs has 'max_concurrency'"),
            ({"remote_configs": {"num_cpu": 1}}, "is not what ray.remote takes"),
            ({"remote_configs": {"num_cpus": "one"}}, "remote_configs has num_cpus='one'"),
            ({"remote_configs": {"resources": ["simulator"]}}, "resources=.* they are a mapping"),
            ({"remote_configs": {"resources": {"simulator": None}}}, "remote_configs has simulator=None"),
            ({"ray_init_config": {"address": "127.0.0.1:9"}}, "connected to the cluster at .* already"),
            ({"ray_init_config": {"address": "ray://127.0.0.1:9"}}, "connected to the cluster at .* already"),
        ):
            with pytest.raises(OptionError, match=text):
                made(**options)

    @pytest.mark.cluster
    def test_nothing_that_was_passed_is_changed(self):
        configs, kwargs, init = [{"num_cpus": 0.1}, {"num_cpus": 0.2}], {"use_buffers": True}, {"num_cpus": 9}
        given = [dict(each) for each in configs], dict(kwargs), dict(init)
        with made(
            remote_configs=configs, collector_class="sync", collector_kwargs=kwargs, ray_init_config=init
        ) as collector:
            collector.next()
        assert (configs, kwargs, init) == given


class TestTheEnd:
    @pytest.mark.cluster
    def test_ray_that_is_shut_down_is_told_and_not_started_anew(self):
        code = """
            import os, sys
            os.environ["RAY_AUTH_MODE"] = "disabled"
            import ray
            from rlcollect import RayCollector, WorkerDied
            own = {"frames_per_batch": 4, "remote_configs": {"num_cpus": 0.1}, "ray_init_config": {"address": "local"}}
            for failure in ("raise", "restart"):
                with RayCollector("CartPole-v1", on_worker_failure=failure, **own) as collector:
                    collector.next()
                    ray.shutdown()
                    try:
                        while True:
                            collector.next()
                    except WorkerDied as error:
                        assert "Ray was shut down" in str(error), error
                    assert not ray.is_initialized()
                    assert collector.closed
            sys.stdout.write("done")
        """
        assert ran(code) == "done"

    @pytest.mark.cluster
    def test_another_ray_is_not_taken_for_the_one_that_was_shut_down(self):
        """Clusters number their jobs from one on: the next one's first has the same number."""
        code = """
            import os, sys
            os.environ["RAY_AUTH_MODE"] = "disabled"
            import ray
            from rlcollect import BufferDied, RayCollector, RayReplayBuffer, WorkerDied
            ours = {"address": "local", "num_cpus": 2, "include_dashboard": False, "log_to_driver": False}
            collector = RayCollector(
                "CartPole-v1", frames_per_batch=4, remote_configs={"num_cpus": 0.1}, ray_init_config=ours
            )
            buffer = RayReplayBuffer(10, prefetch=1)
            collector.next()
            ray.shutdown()
            ray.init(**ours)
            for use, death in ((collector.next, WorkerDied), (buffer.sample, BufferDied)):
                try:
                    use()
                except death as error:
                    assert "Ray was shut down" in str(error), error
            collector.shutdown()
            buffer.close()
            assert ray.is_initialized(), "it is the program's own"
            sys.stdout.write("done")
        """
        assert ran(code) == "done"


class TestGrowing:
    @pytest.mark.cluster
    def test_remotes_that_are_added_are_like_the_others(self):
        """With the newest weights that all were sent, ids and seeds of their own; and are made anew if they fail."""
        policy = One()
        with made(
            policy, make=lambda remote: Echo, on_worker_failure="restart", remotes=1, total_frames=600
        ) as collector:
            collector.set_seed(1)
            frames = collector.next().numel()
            collector.update_policy_weights_(One(2))
            collector.update_policy_weights_(One(3), worker_ids=0)
            collector.add_collectors([Echo, Echo])
            assert collector.num_workers == 3
            assert len(collector.remote_collectors) == 3
            assert collector.stats().threads.workers == (1, 1, 1)
            seen, owners = set(), set()
            while (batch := collector.next()) is not None:
                frames += batch.numel()
                owner = int(batch["collector", "traj_ids"].max()) >> 40
                seen |= {(owner, *row) for row in actions_by_version(batch) if row[0] > 0}
                if not owners and {1, 2} <= {each[0] for each in seen}:
                    owners = {1, 2}
                    os.kill(collector.map_fn(lambda envs: os.getpid())[2], signal.SIGKILL)
                    assert collector.map_fn(len) == [LANES] * 3  # another one answers
            assert frames == collector.collected_frames == 600
            assert {each for each in seen if 0 < each[0] < 3} == {(1, 1, 2.0), (2, 1, 2.0)}
            assert (0, 2, 3.0) in seen
            assert [each.restarts for each in collector.stats().workers] == [0, 0, 1]
            with pytest.raises(OptionError, match="no node of the cluster"):
                collector.add_collectors(Echo, remote_configs={"num_cpus": 99})
            with pytest.raises(RuntimeError, match="broke"):
                collector.add_collectors(functools.partial(Breaker, "raise", "constructor"))
            assert collector.num_workers == 3
            assert len(collector.map_fn(len)) == 3

    @pytest.mark.cluster
    def test_those_that_come_before_any_update_have_weights_with_a_version(self):
        """Theirs are the policy as it is by then, not what the others began with."""
        policy = One()
        with made(policy, make=lambda remote: Echo, remotes=1) as collector:
            collector.next()
            with torch.no_grad():
                policy.weight.fill_(4.0)
            collector.add_collectors(Echo, remote_configs={"num_cpus": 0.1})
            seen = set()
            while not any(owner == 1 for owner, *_ in seen):
                batch = collector.next()
                owner = int(batch["collector", "traj_ids"].max()) >> 40
                seen |= {(owner, *row) for row in actions_by_version(batch)}
            assert seen == {(0, 0, 1.0), (1, 1, 4.0)}

    @pytest.mark.cluster
    def test_not_where_their_number_is_settled(self):
        with made(sync=True) as collector, pytest.raises(OptionError, match="sync=True"):
            collector.add_collectors(Echo)

    @pytest.mark.cluster
    def test_ids_are_none_that_others_had_before_a_state(self):
        """Of a collector whose remotes were put in the place of others; this one's are not."""
        with made(remotes=1) as collector:
            state = {**collector.state_dict(), "prefixes": 5}
            collector.load_state_dict(state)
            assert collector.state_dict()["prefixes"] == 5
            collector.add_collectors(TaggedLanes(1))
            assert collector.state_dict()["prefixes"] == 6
            prefixes = {int(collector.next()["collector", "traj_ids"].min()) >> 40 for _ in range(12)}
            assert prefixes == {0, 5}


class TestNested:
    @pytest.mark.cluster
    def test_remotes_that_have_workers(self):
        """Ids are unique over all of them; weights are handed on; what they hold can be reached."""
        policy = One()
        with made(
            policy, make=lambda remote: Echo, collector_class="sync", num_workers_per_collector=2, steps=8
        ) as collector:
            owners = {}
            for number in range(8):
                batch = collector.next()
                check_batch(batch)
                assert batch.batch_size == (2, LANES, 4)
                holder = int(batch["collector", "traj_ids"].min()) >> 52
                for worker, ids in enumerate(batch["collector", "traj_ids"].flatten(1).tolist()):
                    assert {owners.setdefault(identity, (holder, worker)) for identity in ids} == {(holder, worker)}
                assert actions_by_version(batch) <= {(0, 1.0), (1, 3.0)}
                if number == 2:
                    collector.update_policy_weights_(One(3))
            assert actions_by_version(batch) == {(1, 3.0)}
            assert collector.cascade_execute("worker_idx") == [0, 1]
            assert collector.cascade_execute("num_workers", worker_ids=1) == [2]
            assert collector.cascade_execute("map_fn", len) == [[LANES, LANES]] * 2
            with pytest.raises(OptionError, match="there is no 'nothing'"):
                collector.cascade_execute("nothing")

    @pytest.mark.cluster
    def test_what_was_given_for_remotes_that_could_not_be_added_is_not_for_others(self):
        lock = threading.Lock()
        own = {"collector_class": Collector, "collector_kwargs": {"max_frames_per_traj": 50}}
        with made(remotes=1, make=lambda remote: Echo, **own) as collector:
            with pytest.raises(OptionError, match="cannot be sent"):
                collector.add_collectors(lambda: Echo(lock), collector_kwargs={"max_frames_per_traj": 3})
            collector.add_collectors(Echo, collector_kwargs={"max_frames_per_traj": 9})
            assert collector.cascade_execute("_what.max_frames_per_traj") == [50, 9]


@pytest.mark.cluster
def test_no_frame_is_lost():
    with made(total_frames=480) as collector:
        parts = by_worker(Kind(RayCollector, 2, False), list(collector))
    for worker, part in enumerate(parts):
        for lane, frames in enumerate(lanes_of(part)):
            tag = 10 * worker + lane
            assert frames_in(frames) == tagged_frames(tag, len(frames))


def frames_in(lane):
    step = lane["next"]
    columns = (lane["observation"], step["observation"], step["reward"], step["terminated"], step["truncated"])
    flat = [value if value.shape[1:] == (3,) else value.squeeze(-1) for value in columns]
    return list(zip(*(value.tolist() for value in flat), strict=True))
