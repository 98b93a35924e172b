"""One suite over every kind of collector: the class says where frames are made, and never what they are.

Sync kinds have two workers here, and a batch of both; an asynchronous batch is one worker's.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
import time
import warnings

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

import rlcollect
from rlcollect import (
    AsyncCollector,
    Collector,
    ExplorationType,
    Interruptor,
    MultiAsyncCollector,
    MultiSyncCollector,
    NoWeightSyncScheme,
    OptionError,
    PolicyError,
    ReplayBuffer,
    Stats,
    VanillaWeightUpdater,
)
from rlcollect.testing import Counter, Echo, Reuser, Tagged, check_batch
from tests.workers.helpers import (
    KINDS,
    PREFIX,
    PROCESSES,
    Constant,
    Endless,
    GloballyRandom,
    Noisy,
    Rich,
    Starts,
    Swinging,
    TaggedLanes,
    assert_same,
    bits,
    by_worker,
    forms,
    frames_seen,
    lanes_of,
    leaves,
    length_of,
    of,
    remembering,
    tagged_frames,
    tagged_lane,
    take,
    talkative,
    whole,
)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:No weights were sent"),  # tests of factories collect without an update
]

every_kind, every_kind_and_one_async = of(KINDS), of(KINDS, slow=())
process_kinds, process_kinds_and_one_async = of(PROCESSES), of(PROCESSES, slow=())
async_kinds = of(["async", "one async"])
single_and_lanes = pytest.mark.parametrize("lanes", [None, 3], ids=["one lane", "lanes"])
lanes_soon = pytest.mark.parametrize(
    "lanes", [pytest.param(None, marks=pytest.mark.slow), 3], ids=["one lane", "lanes"]
)

ALL = ("is_init", "step_count", "worker")


def every(maker):
    """The same maker for each worker."""
    return lambda worker: maker


def asked(collector, fn):
    return collector.map_fn(fn)


def until(collector, holds, fn):
    """Waits for what a function tells of each worker to be so."""
    for _ in range(2000):
        if holds(collector.map_fn(fn)):
            return
        time.sleep(0.005)
    raise AssertionError(collector.map_fn(fn))


def in_order(kind, batches):
    """Sizes of batches; of several asynchronous workers the one with the last grant need not be the last to deliver."""
    sizes = [batch.numel() for batch in batches]
    return sizes if kind.is_sync or kind.workers == 1 else sorted(sizes, reverse=True)


def steps_made(envs):
    return envs[0].steps


def till_full(kind, collector, steps, delivered):
    """Waits for an asynchronous kind to have made all that it makes ahead: two rollouts a worker."""
    total = (2 * kind.workers + delivered) * steps
    until(collector, lambda each: sum(each) == total, steps_made)


# --- what a batch is --------------------------------------------------------------------------------------------------

FORMS = {
    "box": functools.partial(Counter, 3),
    "float64": functools.partial(Counter, 3, dtype=np.float64),
    "uint8": functools.partial(Counter, 3, dtype=np.uint8),
    "scalar": functools.partial(Counter, 3, observation="scalar"),
    "discrete": functools.partial(Counter, 3, observation="discrete"),
    "dict": functools.partial(Counter, 3, observation="dict", end="truncated"),
    "tuple": functools.partial(Counter, 3, observation="tuple", end="both"),
    "reused": functools.partial(Reuser, 3),
    "reused dict": functools.partial(Reuser, 3, observation="dict"),
}
QUICK = "uint8", "scalar", "dict", "tuple", "reused"


class TestForm:
    @pytest.mark.parametrize(
        ("form", "lanes"),
        [
            pytest.param(FORMS[name], [None, 3][place % 2], id=name, marks=() if name in QUICK else pytest.mark.slow)
            for place, name in enumerate(FORMS)
        ],
    )
    def test_keys_dtypes_names_and_values_are_those_of_one_process(self, form, lanes):
        """FAULTS 10, 69, 80: whatever the observation is, and whatever the policy writes."""
        runs = {}
        options = {"lanes": lanes, "record": ALL, "max_frames_per_traj": 100, "total_frames": 48 * (lanes or 1)}
        for name, kind in KINDS.items():
            with kind.open(every(form), talkative, **options) as collector:
                runs[name] = take(kind, collector, 2)
        (expected,) = runs.pop("single")
        assert forms(expected[0])["heads", "deep", "flag"] == (torch.bool, (1,))
        for parts in runs.values():
            assert_same(parts[0], expected)
            for part in parts:
                assert [forms(batch) for batch in part] == [forms(batch) for batch in expected]
                assert [batch.names for batch in part] == [batch.names for batch in expected]

    @every_kind_and_one_async
    @single_and_lanes
    def test_the_last_dimension_is_time_and_workers_come_first(self, kind, lanes):
        with kind.open(every(Counter), lanes=lanes, steps=5) as collector:
            batch = collector.next()
            lead = [2] if kind.together == 2 else []
            shape = [*lead, *([] if lanes is None else [lanes])]
            assert list(batch.batch_size) == [*shape, 5]
            assert batch.names == [*[None] * len(shape), "time"]
            assert collector.num_envs == (lanes or 1)
            assert collector.num_workers == kind.workers
            check_batch(batch)

    @every_kind_and_one_async
    @single_and_lanes
    def test_every_frame_is_there_once_and_in_order(self, kind, lanes):
        """Frame by frame what the environments did, over batches and episodes, to the very last."""
        with kind.open(TaggedLanes, lanes=lanes, steps=4, total_frames=39 * 2 * (lanes or 1)) as collector:
            parts = by_worker(kind, collector)
        frames = 0
        for worker, part in enumerate(parts):
            for lane, made in enumerate(lanes_of(part) if part else []):
                assert frames_seen(made) == tagged_frames(10 * worker + lane, len(made))
                frames += len(made)
        assert frames == 78 * (lanes or 1)

    @every_kind
    def test_next_observations_of_reused_arrays_are_one_more(self, kind):
        """FAULTS 69: in every row, whatever the environment does to its arrays."""
        with kind.open(every(functools.partial(Reuser, 3, observation="dict")), lanes=2, info_keys=["t"]) as collector:
            for part in take(kind, collector, 3):
                for batch in part:
                    for key in ("t", ("nested", "grid")):
                        before, after = batch[key], batch["next"][key]
                        assert (after - before == 1).all()
                    assert torch.equal(batch["next", "info", "t"].double(), batch["next", "t"].double())

    @every_kind
    @single_and_lanes
    def test_recurrent_state_is_the_step_of_the_episode(self, kind, lanes):
        """FAULTS 32: over the borders of batches, and zero at each beginning."""
        with kind.open(TaggedLanes, remembering, lanes=lanes, steps=3) as collector:
            for part in take(kind, collector, 4):
                frames = whole(part)
                assert torch.equal(frames["hidden"].squeeze(-1), frames["observation"][..., 2])
                assert torch.equal(frames["next", "hidden"], frames["hidden"] + 1)

    @every_kind
    def test_policies_of_modules_with_nested_keys(self, kind):
        policy = TensorDictModule(nn.Linear(3, 2), in_keys=["observation"], out_keys=[("net", "out")])
        act = TensorDictModule(lambda out: out.argmax(-1), in_keys=[("net", "out")], out_keys=["action"])
        with kind.open(TaggedLanes, TensorDictSequential(policy, act), lanes=2) as collector:
            for part in take(kind, collector, 2):
                frames = whole(part)
                torch.testing.assert_close(frames["net", "out"], policy.module(frames["observation"]))
                assert torch.equal(frames["action"], frames["net", "out"].argmax(-1))

    @every_kind
    def test_without_buffers_nothing_else_changes(self, kind):
        """There batches cross by value."""
        runs = []
        for use_buffers in (True, False):
            with kind.open(
                TaggedLanes, talkative, lanes=3, steps=4, use_buffers=use_buffers, total_frames=56 * 3
            ) as collector:
                runs.append(take(kind, collector, 2))
                by_worker(kind, collector)
                assert collector.collected_frames == 56 * 3
        for one, other in zip(*runs, strict=True):
            assert_same(one, other)


class TestCat:
    @pytest.mark.parametrize("cat", [0, -1])
    def test_a_single_lane_is_joined_in_time(self, cat):
        with (
            MultiSyncCollector(
                [TaggedLanes(0), TaggedLanes(1)], frames_per_batch=8, total_frames=22, cat_results=cat
            ) as c,
            KINDS["sync"].open(TaggedLanes, lanes=None, total_frames=22) as stacked,
        ):
            for batch, parts in zip(c, stacked, strict=True):
                assert batch.names == ["time"]
                assert_same([batch.exclude("action")], [torch.cat(list(parts.unbind(0)), 0).exclude("action")])

    @pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 3])
    def test_workers_are_joined_in_any_dimension(self, lanes):
        """FAULTS 80. Batches are the user's there too."""
        options = {"lanes": lanes, "total_frames": 22 * lanes}
        with KINDS["sync"].open(TaggedLanes, talkative, **options) as stacked:
            batches = list(stacked)
        for cat in (0, 1, -1, -2):
            with KINDS["sync"].open(TaggedLanes, talkative, cat_results=cat, **options) as collector:
                expected = [torch.cat(list(batch.unbind(0)), cat) for batch in batches]
                assert_same(list(collector), expected)
                assert [batch.names for batch in expected] == [[None, "time"]] * 3

    def test_one_worker_joined_keeps_nothing_of_the_shared_memory(self):
        """FAULTS 67: however its dimension is put."""
        for cat in ("stack", 0, 1):
            with MultiSyncCollector(
                [TaggedLanes(0)], talkative, frames_per_batch=6, num_envs=2, cat_results=cat
            ) as collector:
                kept = [collector.next() for _ in range(3)]
                copies = [batch.clone() for batch in kept]
                collector.next()
                assert_same(kept, copies)

    @pytest.mark.parametrize("cat", [2, -3, True, "cat", 1.0])
    def test_other_dimensions_are_refused_by_name(self, cat):
        with pytest.raises(OptionError, match="cat_results"):
            MultiSyncCollector([Counter] * 2, frames_per_batch=8, num_envs=2, cat_results=cat)


# --- counts and cuts --------------------------------------------------------------------------------------------------


class TestCounts:
    @every_kind_and_one_async
    @pytest.mark.parametrize(("steps", "lanes"), [(12, None), (10, 3), (3, None), (1, 3)])
    def test_the_total_is_exact_and_the_last_batch_shorter(self, kind, lanes, steps):
        """FAULTS 78."""
        per_step = (lanes or 1) * kind.together
        with kind.open(every(Counter), lanes=lanes, steps=4, total_frames=steps * per_step) as collector:
            assert collector.frames_per_batch == 4 * per_step
            sizes = [min(4, steps - start) * per_step for start in range(0, steps, 4)]
            assert len(collector) == len(sizes)
            assert not collector.exhausted
            batches = list(collector)
            assert in_order(kind, batches) == sizes
            assert collector.collected_frames == steps * per_step == collector.total_frames == collector.stats().frames
            assert collector.stats().batches == len(sizes) == len(collector)
            assert collector.exhausted
            assert collector.next() is None
            assert not collector.closed
            assert list(collector) == []

    @every_kind
    def test_no_frame_is_made_that_is_not_delivered(self, kind):
        """Frames are real steps; resets are episodes (FAULTS 86)."""
        with kind.open(every(functools.partial(Counter, 3)), lanes=2, total_frames=44) as collector:
            batches = list(collector)
            steps = collector.map_fn(lambda envs: sum(env.steps for env in envs))
            resets = collector.map_fn(lambda envs: sum(env.resets for env in envs))
        assert sum(batch.numel() for batch in batches) == 44 == sum(steps)
        episodes = sum(1 + (count // 2) // 3 for count in steps for _ in range(2))
        assert sum(resets) == episodes

    @every_kind
    def test_what_lanes_cannot_divide_is_rounded_up_with_a_warning_each(self, kind):
        """FAULTS 77."""
        lanes = 3 * kind.together
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            collector = kind.cls(
                kind.source(every(Counter)), frames_per_batch=4 * lanes - 1, total_frames=9 * lanes - 2, num_envs=3
            )
        with collector:
            said = sorted(str(warning.message).split("=")[0] for warning in caught)
            assert said == ["frames_per_batch", "total_frames"]
            assert (collector.frames_per_batch, collector.total_frames) == (4 * lanes, 9 * lanes)
            assert sum(batch.numel() for batch in collector) == 9 * lanes

    @every_kind
    def test_without_a_total_there_is_no_length(self, kind):
        with kind.open(every(Counter), lanes=None) as collector:
            with pytest.raises(TypeError, match="total_frames"):
                len(collector)
            assert collector.total_frames == -1
            assert bool(collector)
            for _, _batch in zip(range(5), collector, strict=False):
                pass
            assert not collector.exhausted
            assert collector.next() is not None  # broken off, and taken up again

    @every_kind
    @pytest.mark.parametrize(
        ("random_frames", "lanes"), [(7, None), pytest.param(1, 3, marks=pytest.mark.slow), (22, 3)]
    )
    def test_random_frames_are_exact_over_all_workers(self, kind, lanes, random_frames):
        """FAULTS 74: so many, the first of each lane, in shares that differ by one at most; version -1."""
        with kind.open(TaggedLanes, always_one, lanes=lanes, steps=4, init_random_frames=random_frames) as collector:
            parts = take(kind, collector, 7)
        versions = [lane["collector", "policy_version"] for part in parts for lane in lanes_of(part)]
        actions = [lane["action"] for part in parts for lane in lanes_of(part)]
        counts = [int((version == -1).sum()) for version in versions]
        assert sum(counts) == random_frames
        assert max(counts) - min(counts) <= 1
        for count, version, action in zip(counts, versions, actions, strict=True):
            assert version.tolist() == [-1] * count + [0] * (len(version) - count)
            assert (action[count:] == 1).all()

    @every_kind
    @lanes_soon
    def test_episodes_are_limited_lane_by_lane(self, kind, lanes):
        with kind.open(TaggedLanes, lanes=lanes, steps=5, max_frames_per_traj=3) as collector:
            parts = take(kind, collector, 3)
        for worker, part in enumerate(parts):
            for lane, made in enumerate(lanes_of(part)):
                tag = 10 * worker + lane
                own = min(3, length_of(tag))
                times = [frame % own for frame in range(len(made))]
                assert made["step_count"].flatten().tolist() == times
                assert made["next", "step_count"].flatten().tolist() == [t + 1 for t in times]
                assert made["observation"][:, 2].tolist() == times
                cut = made["step_count"].flatten() == 2
                assert made["next", "truncated"].flatten()[cut].all()
                assert made["next", "done"].flatten().tolist() == [t == own - 1 for t in times]

    @every_kind
    @lanes_soon
    def test_soft_truncation_marks_the_last_frame_and_the_episode_goes_on(self, kind, lanes):
        """FAULTS 2."""
        runs = []
        for marked in (False, True):
            with kind.open(TaggedLanes, lanes=lanes, steps=5, set_truncated=marked) as collector:
                runs.append(take(kind, collector, 3))
        for plain, soft in zip(*runs, strict=True):
            for one, other in zip(plain, soft, strict=True):
                for key in ("terminated", "truncated", "done"):
                    assert torch.equal(one["next", key][..., :-1, :], other["next", key][..., :-1, :])
                assert other["next", "truncated"][..., -1, :].all()
                assert other["next", "done"][..., -1, :].all()
                assert torch.equal(one["next", "terminated"], other["next", "terminated"])
                for key in ("observation", ("collector", "traj_ids")):
                    assert torch.equal(one[key], other[key])

    @every_kind
    @lanes_soon
    def test_every_batch_can_begin_with_new_episodes(self, kind, lanes):
        with kind.open(Endless, lanes=lanes, steps=4, reset_at_each_iter=True) as collector:
            for part in take(kind, collector, 3):
                assert all(
                    batch["observation"][..., 2].reshape(-1, 4).tolist() == [[0, 1, 2, 3]] * (lanes or 1)
                    for batch in part
                )
                ids = [batch["collector", "traj_ids"].unique().tolist() for batch in part]
                assert len({name for each in ids for name in each}) == 3 * (lanes or 1)


def always_one(observation):
    return torch.ones(observation.shape[:-1], dtype=torch.int64)


class TestIds:
    @every_kind
    @pytest.mark.parametrize(("seed", "lanes"), [(None, 3), pytest.param(3, 3, marks=pytest.mark.slow), (3, None)])
    def test_ids_and_episodes_are_one_to_one_over_batches_and_workers(self, kind, lanes, seed):
        """FAULTS 20: seeded or not; an id stays the same over batches and when weights change."""
        with kind.open(TaggedLanes, always_one, lanes=lanes, steps=3, record="worker") as collector:
            if seed is not None:
                collector.set_seed(seed)
            batches = []
            for _ in range(8):
                batches.append(collector.next())
                collector.update_policy_weights_()
        parts = by_worker(kind, batches)
        pairs = set()
        for worker, part in enumerate(parts):
            for frames in lanes_of(part) if part else []:
                ids = frames["collector", "traj_ids"].tolist()
                pairs |= {(name, *seen[:2]) for name, seen in zip(ids, frames["observation"].tolist(), strict=True)}
                assert {name >> PREFIX for name in ids} == {worker}
                assert frames["collector", "worker"].tolist() == [worker] * len(frames)
                assert set((frames["observation"][:, 0] // 10).tolist()) == {worker}
        names, episodes = [name for name, *_ in pairs], [episode for _, *episode in pairs]
        assert len({*names}) == len(names)
        assert len({tuple(episode) for episode in episodes}) == len(episodes)

    @every_kind
    def test_without_ids_there_are_none(self, kind):
        with kind.open(every(Counter), lanes=2, track_traj_ids=False) as collector:
            assert ("collector", "traj_ids") not in leaves(collector.next())


# --- weights ----------------------------------------------------------------------------------------------------------


def echoes(worker=0):
    return functools.partial(Echo, (1,), 5)


def versions_and_actions(batch):
    return batch["collector", "policy_version"].flatten().tolist(), batch["action"].flatten().tolist()


class TestVersions:
    @every_kind
    @lanes_soon
    def test_the_version_of_a_row_is_that_of_the_weights_that_made_it(self, kind, lanes):
        """The parameter is the number of the update: what a row holds says which weights made it."""
        policy = Constant()
        seen = set()
        with kind.open(echoes, policy, lanes=lanes, steps=3) as collector:
            assert collector.policy_version == 0
            for number in range(1, 31):
                batch = collector.next()
                versions, actions = versions_and_actions(batch)
                assert [float(version) for version in versions] == actions
                assert actions == batch["next", "reward"].flatten().tolist()
                assert actions == batch["next", "observation"].flatten().tolist()
                assert len(set(versions)) == 1
                if kind.is_sync:
                    assert versions[0] == number - 1
                assert versions[0] < number
                seen.add(versions[0])
                policy.become(float(number))
                assert collector.update_policy_weights_() == number == collector.policy_version
            assert collector.stats().policy_version == 30
        assert len(seen) > 5

    @every_kind
    def test_weights_come_in_every_form_parameters_and_buffers(self, kind):
        """FAULTS 39, 40: a module, a TensorDict, a state dict, the last of two in a row."""
        policy = Constant()

        def made(value, shift):
            other = Constant(value)
            other.shift.fill_(shift)
            return other

        given = [
            made(10.0, 1.0),
            TensorDict.from_module(made(20.0, 2.0)),
            made(30.0, 3.0).state_dict(),
            TensorDict(dict(made(40.0, 4.0).state_dict())),
        ]
        with kind.open(echoes, policy, lanes=2, steps=3) as collector:
            take(kind, collector, 1)
            for number, weights in enumerate(given):
                collector.update_policy_weights_(made(-1.0, 0.0).state_dict())
                version = collector.update_policy_weights_(weights)
                assert version == 2 * (number + 1)
                parts = take(kind, collector, 4)
                for part in parts:
                    assert {*part[-1]["action"].flatten().tolist()} == {11.0 * (number + 1)}
                    assert {*part[-1]["collector", "policy_version"].flatten().tolist()} == {version}

    @process_kinds
    def test_an_unpublished_change_is_not_seen(self, kind):
        """FAULTS 42: workers have copies."""
        policy = Constant(1.0)
        with kind.open(echoes, policy, lanes=None) as collector:
            policy.become(5.0)
            for part in take(kind, collector, 3):
                assert {*whole(part)["action"].flatten().tolist()} == {1.0}
            collector.update_policy_weights_()
            policy.become(9.0)  # after they were copied
            for part in take(kind, collector, 4):
                assert {*part[-1]["action"].flatten().tolist()} == {5.0}

    @every_kind
    def test_what_does_not_fit_is_refused_and_nothing_published(self, kind):
        with kind.open(echoes, Constant(1.0), lanes=None) as collector:
            collector.next()
            for wrong in ({"value": torch.ones(2), "shift": torch.zeros(1)}, {"valu": torch.ones(1)}, nn.Linear(2, 2)):
                with pytest.raises(PolicyError, match=r"value|valu|weight"):
                    collector.update_policy_weights_(wrong)
            assert collector.policy_version == 0
            assert not collector.closed
            for part in take(kind, collector, 3):
                assert {*whole(part)["action"].flatten().tolist()} == {1.0}
                assert {*whole(part)["collector", "policy_version"].flatten().tolist()} == {0}

    @pytest.mark.parametrize("name", ["sync", "async"])
    @pytest.mark.parametrize("worker", [0, 1])
    def test_an_addressed_update_changes_that_worker_alone(self, name, worker):
        """FAULTS 35, 40: the last one too."""
        kind, policy = KINDS[name], Constant(1.0)
        other = 1 - worker

        def newest(collector):
            parts = take(kind, collector, 4)
            return {
                number: (
                    {*part[-1]["action"].flatten().tolist()},
                    {*part[-1]["collector", "policy_version"].flatten().tolist()},
                )
                for number, part in enumerate(parts)
            }

        with kind.open(echoes, policy, lanes=2, steps=3) as collector:
            assert newest(collector) == {0: ({1.0}, {0}), 1: ({1.0}, {0})}
            policy.become(2.0)
            assert collector.update_policy_weights_(worker_ids=[worker]) == 1
            assert newest(collector) == {worker: ({2.0}, {1}), other: ({1.0}, {0})}
            assert collector.update_policy_weights_(Constant(3.0), worker_ids=worker) == 2
            assert newest(collector) == {worker: ({3.0}, {2}), other: ({1.0}, {0})}
            assert collector.update_policy_weights_(Constant(4.0), worker_ids=[other]) == 3
            assert newest(collector) == {worker: ({3.0}, {2}), other: ({4.0}, {3})}
            assert collector.update_policy_weights_(Constant(5.0)) == 4
            assert newest(collector) == dict.fromkeys([0, 1], ({5.0}, {4}))
            assert collector.update_policy_weights_(Constant(6.0), worker_ids=(0, 1)) == 5
            assert newest(collector) == dict.fromkeys([0, 1], ({6.0}, {5}))

    @every_kind_and_one_async
    def test_workers_that_are_not_there_are_refused(self, kind):
        with kind.open(echoes, Constant(1.0), lanes=None) as collector:
            for wrong in ([kind.workers], [-1], kind.workers, [True], ["0"]):
                with pytest.raises(OptionError, match="worker"):
                    collector.update_policy_weights_(worker_ids=wrong)
            assert collector.policy_version == 0
            assert collector.update_policy_weights_(worker_ids=0) == 1
            assert collector.update_policy_weights_(worker_ids=[0]) == 2
            assert collector.next() is not None

    @pytest.mark.parametrize("name", ["update_at_each_batch", "update_after_each_batch"])
    @process_kinds_and_one_async
    def test_weights_can_be_published_with_each_batch(self, kind, name):
        """Sync: before each collection; async: at the call of `next` that follows a batch."""
        policy = Constant(100.0)
        with kind.open(echoes, policy, lanes=None, steps=3, **{name: True}) as collector:
            for number in range(1, 9):
                policy.become(100.0 + number)
                batch = collector.next()
                first = 1 if kind.is_sync else 0
                assert collector.policy_version == number - 1 + first
                versions, actions = versions_and_actions(batch)
                assert len(set(versions)) == 1
                if kind.is_sync:
                    assert versions[0] == number
                    assert actions[0] == 100.0 + number
                else:
                    assert versions[0] < number
                    assert actions[0] == (100.0 + versions[0] + 1 if versions[0] else 100.0)

    @every_kind
    def test_the_mode_of_the_policy_is_the_callers(self, kind):
        """FAULTS 85."""
        for training in (True, False):
            policy = Swinging().train(training)
            with kind.open(every(Counter), policy, lanes=None, steps=64) as collector:
                frames = whole(take(kind, collector, 1)[0])
                assert policy.training is training
                assert ((frames["action"] == 0).any()).item() is training


# --- randomness -------------------------------------------------------------------------------------------------------


def firsts(parts):
    """The first observation of every lane."""
    return [tuple(lane["observation"][0].tolist()) for part in parts for lane in lanes_of(part)]


class TestSeeds:
    @every_kind
    def test_without_a_seed_all_first_observations_differ(self, kind):
        """FAULTS 100."""
        with kind.open(every(Starts), lanes=3) as collector:
            seen = firsts(take(kind, collector, 1))
        assert len({*seen}) == 3 * kind.workers

    @every_kind
    def test_a_seed_gives_each_lane_a_stream_of_its_own_and_again_the_same(self, kind):
        with kind.open(every(Starts), lanes=3) as collector:
            assert collector.set_seed(5) == 6
            runs = [take(kind, collector, 2)]
        with kind.open(every(Starts), lanes=3) as collector:
            assert collector.set_seed(5) == 6
            runs.append(take(kind, collector, 2))
        with kind.open(every(Starts), lanes=3) as collector:
            assert collector.set_seed(6) == 7
            other = take(kind, collector, 2)
        assert len({*firsts(runs[0])}) == 3 * kind.workers
        assert {*firsts(runs[0])}.isdisjoint(firsts(other))
        for one, two in zip(*runs, strict=True):
            assert_same(one, two)

    @every_kind
    def test_a_static_seed_gives_all_lanes_one_stream(self, kind):
        with kind.open(every(Starts), lanes=3) as collector:
            assert collector.set_seed(5, static_seed=True) == 5
            parts = take(kind, collector, 2)
        lanes = [lane["observation"].tolist() for part in parts for lane in lanes_of(part)]
        assert len(lanes) == 3 * kind.workers
        assert all(lane == lanes[0] for lane in lanes)

    @every_kind_and_one_async
    def test_a_list_is_used_as_it_is_given(self, kind):
        """FAULTS 102: one a lane, the first worker's first."""
        seeds = [int(seed) for seed in np.arange(3 * kind.workers) * 7 + 100]
        expected = []
        for seed in seeds:
            env = Starts()
            env.reset(seed=seed)
            expected.append((float(env.start),))
        with kind.open(every(Starts), lanes=3) as collector:
            assert collector.set_seed(seeds) == max(seeds) + 1
            assert firsts(take(kind, collector, 1)) == expected
            for wrong in (seeds[1:], [*seeds, 1], [-1] * len(seeds), -1, 1.5, "one"):
                with pytest.raises(OptionError):
                    collector.set_seed(wrong)
            assert not collector.closed

    @every_kind
    def test_seeding_resets_nothing_by_itself(self, kind):
        """FAULTS 103: lanes are reset with the next batch."""
        with kind.open(every(functools.partial(Starts, None)), lanes=2) as collector:
            before = collector.map_fn(lambda envs: [env.resets for env in envs])
            collector.set_seed(1)
            collector.set_seed(2)
            assert collector.map_fn(lambda envs: [env.resets for env in envs]) == before == [[1, 1]] * kind.workers
            take(kind, collector, 1)
            assert collector.map_fn(lambda envs: [env.resets for env in envs]) == [[2, 2]] * kind.workers

    @process_kinds
    def test_generators_that_belong_to_nobody_differ_from_worker_to_worker(self, kind):
        """FAULTS 100: `random`, numpy's and torch's; and are seeded with the rest."""
        runs = []
        for _ in range(2):
            with kind.open(every(GloballyRandom), lanes=None) as collector:
                collector.set_seed(4)
                runs.append(take(kind, collector, 2))
        first = firsts(runs[0])
        assert all(len({*column}) == len(first) for column in zip(*first, strict=True))
        for one, other in zip(*runs, strict=True):
            assert_same(one, other)

    @lanes_soon
    def test_one_seed_gives_one_sequence_and_each_worker_the_same_in_every_kind(self, lanes):
        """FAULTS 105, with a stochastic policy; worker 0 is the single process, to the bit."""
        runs = []
        for kind in [*KINDS.values(), KINDS["sync"]]:
            with kind.open(every(functools.partial(Rich, 4)), Noisy(), lanes=lanes, steps=3, record=ALL) as collector:
                collector.set_seed(8)
                torch.manual_seed(len(runs))  # what the program draws is no part of it
                runs.append(take(kind, collector, 4))
        first, second = runs[1][:2]  # of the sync one
        for parts in runs:
            assert_same(parts[0], first)
            if len(parts) > 1:
                assert_same(parts[1], second)
        for key in ("x", "action"):
            assert bits(first[0])[key] != bits(second[0])[key]

    @pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector, AsyncCollector])
    @single_and_lanes
    @pytest.mark.parametrize("seed", [None, 12])
    def test_one_worker_is_the_single_process_bit_for_bit(self, cls, lanes, seed):
        """With a stochastic policy, a random warm-up, limits, and episodes over the borders of batches."""
        frames = 5 * (lanes or 1)
        options = {
            "frames_per_batch": frames,
            "total_frames": 4 * frames - 2 * (lanes or 1),
            "num_envs": lanes,
            "init_random_frames": frames + 2,
            "max_frames_per_traj": 4,
            "record": ALL,
            "info_keys": ["t"],
        }
        make = functools.partial(Rich, 6) if seed is not None else functools.partial(Counter, 6)
        policy = Noisy() if seed is not None else talkative
        runs = []
        for kind in (Collector, cls):
            torch.manual_seed(77)
            with kind(make if kind in (Collector, AsyncCollector) else [make], policy, **options) as collector:
                if seed is not None:
                    collector.set_seed(seed)
                runs.append(list(collector))
        single, one = runs
        if cls is MultiSyncCollector:
            assert all(batch.batch_size[0] == 1 for batch in one)
            one = [batch[0] for batch in one]
        assert_same(one, single)
        assert sum(int((batch["collector", "policy_version"] == -1).sum()) for batch in one) == frames + 2


# --- whose memory -----------------------------------------------------------------------------------------------------


class TestMemory:
    @every_kind
    @pytest.mark.parametrize(
        ("use_buffers", "lanes"), [pytest.param(True, None, marks=pytest.mark.slow), (True, 3), (False, 3)]
    )
    def test_batches_that_are_kept_never_change(self, kind, lanes, use_buffers):
        """FAULTS 67."""
        with kind.open(TaggedLanes, talkative, lanes=lanes, use_buffers=use_buffers) as collector:
            kept = [collector.next() for _ in range(5)]
            copies = [batch.clone() for batch in kept]
            views = [batch["observation"].numpy()[..., -1, :] for batch in kept]
            seen = [view.copy() for view in views]
            for _ in range(12):
                collector.next()
            assert_same(kept, copies)
        assert_same(kept, copies)
        assert all((view == copy).all() for view, copy in zip(views, seen, strict=True))

    @every_kind
    def test_a_batch_that_was_changed_changes_no_other(self, kind):
        """FAULTS 68."""
        runs = []
        for spoil in (False, True):
            with kind.open(TaggedLanes, talkative, lanes=2, steps=3) as collector:
                seen = []
                while len(seen) < 10 or not all(by_worker(kind, seen)):
                    batch = collector.next()
                    seen.append(batch.clone())
                    runs.append((spoil, seen[-1]))
                    if spoil:
                        for value in leaves(batch).values():
                            value.zero_()
                        batch["collector", "extra"] = torch.ones(batch.batch_size)
                        del batch["observation"]
        plain, spoilt = (by_worker(kind, [batch for was, batch in runs if was is spoil]) for spoil in (False, True))
        for one, other in zip(plain, spoilt, strict=True):
            count = min(len(one), len(other))
            assert count
            assert_same(other[:count], one[:count])

    @every_kind
    @lanes_soon
    def test_the_same_tensordict_can_be_had_each_time(self, kind, lanes):
        runs = []
        for same in (False, True):
            with kind.open(
                TaggedLanes, talkative, lanes=lanes, return_same_td=same, total_frames=52 * (lanes or 1)
            ) as collector:
                batches, copies = [], []
                for batch in collector:
                    batches.append(batch)
                    copies.append(batch.clone())
                runs.append((batches, by_worker(kind, copies)))
                assert collector.collected_frames == 52 * (lanes or 1)
        full = [batch for batch in runs[1][0] if batch.batch_size == runs[1][0][0].batch_size]
        assert len(full) >= 6
        assert all(batch is full[0] for batch in full)
        assert len({id(batch) for batch in runs[0][0]}) == len(runs[0][0])
        for mine, plain in zip(runs[1][1], runs[0][1], strict=True):
            count = min(len(mine), len(plain)) - 1
            assert_same(mine[:count], plain[:count])

    @process_kinds
    def test_a_batch_with_the_user_is_left_alone_until_the_next(self, kind):
        """With `return_same_td` workers go on, but not in the memory that the user has."""
        with kind.open(Endless, lanes=None, steps=4, return_same_td=True) as collector:
            for _ in range(6):
                batch = collector.next()
                copy = batch.clone()
                for _ in range(5):
                    collector.map_fn(steps_made)
                assert_same([batch], [copy])


# --- vector environments ----------------------------------------------------------------------------------------------


class VectorLanes:
    """A vector environment of three `TaggedLanes` of a worker."""

    def __init__(self, worker, mode=AutoresetMode.NEXT_STEP, kind=SyncVectorEnv, **options):
        self.worker, self.mode, self.kind, self.options = worker, mode, kind, options

    def __call__(self):
        tags = [10 * self.worker + lane for lane in range(3)]
        return self.kind(
            [functools.partial(tagged_lane, tag) for tag in tags], autoreset_mode=self.mode, **self.options
        )


class TestVectorEnvironments:
    @every_kind
    @pytest.mark.parametrize(
        ("mode", "masked_reset"), [*((mode, None) for mode in AutoresetMode), (AutoresetMode.NEXT_STEP, False)]
    )
    def test_lanes_are_those_of_the_environments_themselves(self, kind, mode, masked_reset):
        """FAULTS 7, in every mode; without masked resets NEXT_STEP lanes run ahead, and rows can be none."""
        make = functools.partial(VectorLanes, mode=mode)
        frames = 4 * 3 * kind.together
        options = {"frames_per_batch": frames, "total_frames": 6 * 24, "masked_reset": masked_reset}
        with kind.cls(kind.source(make), always_one, **options) as collector:
            parts = by_worker(kind, collector)
            assert collector.collected_frames == 144
            assert collector.exhausted
        counted = 0
        for worker, part in enumerate(parts):
            for lane, made in enumerate(lanes_of(part) if part else []):
                assert frames_seen(made) == tagged_frames(10 * worker + lane, len(made))
                counted += len(made)
        assert counted == 144
        is_scratch = masked_reset is False and mode is AutoresetMode.NEXT_STEP
        assert (("collector", "mask") in leaves(parts[0][0])) is is_scratch

    @every_kind
    def test_rows_that_are_none_are_empty(self, kind):
        """On the scratch path; `len` is not known there."""
        lanes = (1, 30)  # one falls behind: its episodes end with every step
        make = every(lambda: SyncVectorEnv([lambda n=n: Tagged(n, n) for n in lanes]))
        frames = 8 * kind.together * 2
        with kind.cls(
            kind.source(make), always_one, frames_per_batch=frames, total_frames=frames * 8, masked_reset=False
        ) as collector:
            with pytest.raises(TypeError):
                len(collector)
            batches = list(collector)
            assert collector.exhausted
        masks = [batch["collector", "mask"] for batch in batches]
        assert sum(int(mask.sum()) for mask in masks) == frames * 8 == collector.collected_frames
        by_worker(kind, batches)
        assert any(not mask.all() for mask in masks)
        for batch, mask in zip(batches, masks, strict=True):
            assert (batch["collector", "traj_ids"][~mask] == -1).all()
            for key, value in leaves(batch).items():
                assert key == ("collector", "traj_ids") or not value[~mask].any(), key

    @process_kinds
    def test_environments_with_processes_of_their_own(self, kind):
        """FAULTS 88: they are counted."""
        make = functools.partial(VectorLanes, kind=AsyncVectorEnv, context="fork")
        with kind.cls(kind.source(make), always_one, frames_per_batch=12 * kind.together, total_frames=72) as collector:
            parts = by_worker(kind, collector)
            assert collector.stats().threads.workers == (1 + 3,) * kind.workers
        for worker, part in enumerate(parts):
            for lane, made in enumerate(lanes_of(part) if part else []):
                assert frames_seen(made) == tagged_frames(10 * worker + lane, len(made))


# --- before, after, beside --------------------------------------------------------------------------------------------


class TestProcessing:
    @every_kind
    def test_trajectories_are_split_here_and_once_and_processed_after(self, kind):
        """FAULTS 72: in the program, exactly once, in order."""
        calls = []

        def first(batch):
            calls.append(os.getpid())
            assert batch.names == [None, "time"]
            return batch.set("count", torch.ones(batch.batch_size))

        def second(batch):
            calls.append("second")
            return batch.set("count", batch["count"] + 1)

        with kind.open(
            TaggedLanes, lanes=2, steps=6, split_trajs=True, postproc=[first, second], total_frames=96
        ) as collector:
            batches = list(collector)
            assert collector.collected_frames == 96
        assert calls == [os.getpid(), "second"] * len(batches)
        for batch in batches:
            mask = batch["collector", "mask"]
            assert (batch["count"] == 2).all()
            assert not batch["observation"][~mask].any()
            for row, valid in zip(batch, mask, strict=True):
                assert len(row["collector", "traj_ids"][valid].unique()) == 1
                times = row["observation"][valid][:, 2]
                assert (times.diff() == 1).all()
        assert sum(int(batch["collector", "mask"].sum()) for batch in batches) == 96

    @every_kind
    def test_hooks_run_where_frames_are_made(self, kind, tmp_path):
        """FAULTS 83: once before and after each rollout, with its batch; closures cross."""
        file = tmp_path / "log"

        def log(*words):
            with file.open("a") as out:
                out.write(" ".join(map(str, words)) + "\n")

        def pre():
            log(os.getpid(), "before")

        def post(batch):
            log(os.getpid(), "after", list(batch.batch_size), batch["observation"].sum().item())

        with kind.open(
            TaggedLanes, lanes=3, steps=4, pre_collect_hook=pre, post_collect_hook=post, total_frames=96
        ) as c:
            pids = c.map_fn(lambda envs: os.getpid())
            parts = by_worker(kind, c)
        lines = [line.split(" ", 1) for line in file.read_text().splitlines()]
        assert {int(pid) for pid, _ in lines} == {*pids}
        for pid, part in zip(pids, parts, strict=True):
            mine = [text for who, text in lines if int(who) == pid]
            told = [f"after [3, {len(batch[0])}] {batch['observation'].sum().item()}" for batch in part]
            assert mine == [text for each in told for text in ("before", each)]

    @every_kind_and_one_async
    def test_functions_run_where_the_environments_are(self, kind):
        """FAULTS 83."""
        with kind.open(TaggedLanes, lanes=2) as collector:
            pids = collector.map_fn(lambda envs: os.getpid())
            assert len({*pids}) == len(pids) == kind.workers
            assert (os.getpid() in pids) is not kind.is_process
            tags = [[10 * worker, 10 * worker + 1] for worker in range(kind.workers)]
            assert collector.map_fn(lambda envs: [env.worker for env in envs]) == tags
            with pytest.raises(ZeroDivisionError):
                collector.map_fn(lambda envs: 1 / 0)
            assert not collector.closed
            take(kind, collector, 1)
            collector.map_fn(lambda envs: [setattr(env, "worker", 5) for env in envs])
            assert {*whole(take(kind, collector, 4)[0])["observation"][..., -1, 0].flatten().tolist()} == {5.0}

    @every_kind
    def test_a_rollout_is_not_counted(self, kind):
        with kind.open(Endless, lanes=2, steps=3, total_frames=36) as collector:
            extra = collector.rollout()
            assert extra.batch_size[-1] == 3
            assert collector.collected_frames == 0
            batches = list(collector)
        assert sum(batch.numel() for batch in batches) == 36
        by_worker(kind, [extra, *batches])


class TestReset:
    @pytest.mark.parametrize("name", ["sync", "async"])
    def test_workers_are_reset_by_one_bool_each(self, name):
        kind = KINDS[name]
        with kind.open(Endless, lanes=2, steps=3) as collector:
            take(kind, collector, 1)
            collector.reset([False, True])
            later = collector.map_fn(lambda envs: [env.resets for env in envs])
            assert later == [[1, 1], [2, 2]]
            parts = take(kind, collector, 5)
            assert {*whole(parts[0])["observation"][..., 1].flatten().tolist()} == {0.0}
            assert {*parts[1][-1]["observation"][..., 1].flatten().tolist()} == {1.0}
            for wrong in ([True], [True] * 3):
                with pytest.raises(OptionError, match="one bool for each of the 2 workers"):
                    collector.reset(wrong)
            assert collector.map_fn(lambda envs: [env.resets for env in envs]) == [[1, 1], [2, 2]]
            collector.reset([False, False])
            collector.reset(np.array([True, False]))
            collector.reset(torch.tensor([True, False]))
            assert collector.map_fn(lambda envs: [env.resets for env in envs]) == [[3, 3], [2, 2]]

    @every_kind
    def test_all_are_reset_with_seeds_and_options(self, kind):
        make = every(functools.partial(Rich, 50))
        with kind.open(make, lanes=2, steps=3) as collector:
            collector.reset(seed=4, options={"option": 9})
            parts = take(kind, collector, 2)
            starts = [tuple(lane["x"][0].tolist()) for part in parts for lane in lanes_of(part)]
            assert len({*starts}) == 2 * kind.workers
            assert all(lane["option"][0] == 9 for part in parts for lane in lanes_of(part))
            seeds = list(range(50, 50 + 2 * kind.workers))
            collector.reset(seed=seeds)
            assert [
                env for each in collector.map_fn(lambda envs: [env.seeds[-1] for env in envs]) for env in each
            ] == seeds
            with pytest.raises(OptionError, match="seeds"):
                collector.reset(seed=seeds[1:])
            with pytest.raises(OptionError, match="options"):
                collector.reset(options=3)
            assert not collector.closed

    @async_kinds
    @pytest.mark.parametrize("command", ["reset", "set_seed"])
    def test_what_was_made_before_comes_first_and_in_order(self, kind, command):
        """DESIGN 9.12."""
        with kind.open(Endless, lanes=None, steps=4) as collector:
            before = [collector.next()]
            till_full(kind, collector, 4, 1)
            getattr(collector, command)(*([] if command == "reset" else [3]))
            before += [collector.next() for _ in range(2 * kind.workers)]
            after = take(kind, collector, 1)
            parts = by_worker(kind, before)
        for part in parts:
            frames = whole(part)[0]
            assert frames["observation"][:, 1].tolist() == [0.0] * len(frames)
            assert frames["observation"][:, 2].tolist() == [float(t) for t in range(len(frames))]
        for part in after:
            assert part[0]["observation"][:, 2].tolist() == [0.0, 1.0, 2.0, 3.0]
            assert part[0]["observation"][:, 1].tolist() == [1.0] * 4
        old = {name for part in parts for name in whole(part)["collector", "traj_ids"].flatten().tolist()}
        assert old.isdisjoint(name for part in after for name in part[0]["collector", "traj_ids"].tolist())


# --- makers, policies, places -----------------------------------------------------------------------------------------


class TestSources:
    @process_kinds
    def test_lambdas_local_classes_closures_and_partials(self, kind):
        """FAULTS 95."""
        length, offset = 4, {"shift": 2}

        class Local(Counter):
            def _observe(self):
                return super()._observe() + offset["shift"]

        class LocalPolicy(nn.Module):
            def __init__(self):
                super().__init__()
                self.fn = lambda seen: (seen[..., 0] % 2).long()

            def forward(self, observation):
                return self.fn(observation)

        def maker():
            return Local(length)

        makers = [
            maker,
            lambda: Local(length),
            functools.partial(Local, length),
            functools.partial(lambda n: Local(n + 1), n=length - 1),
        ]
        with kind.cls(makers, LocalPolicy(), frames_per_batch=24) as collector:
            while collector.collected_frames < 240:
                batch = collector.next()
                assert {*batch["observation"].flatten().tolist()} == {2.0, 3.0, 4.0, 5.0}
                assert torch.equal(batch["action"], (batch["observation"][..., 0] % 2).long())
        for policy in (LocalPolicy().fn, functools.partial(lambda k, seen: (seen[..., 0] % 2).long() * k, 1)):
            with kind.open(every(maker), policy, lanes=2) as collector:
                frames = take(kind, collector, 1)[0][0]
                assert torch.equal(frames["action"], (frames["observation"][..., 0] % 2).long())

    @every_kind_and_one_async
    def test_ids_of_gymnasium(self, kind):
        with kind.open(every("CartPole-v1"), lanes=2, total_frames=64) as collector:
            parts = by_worker(kind, collector)
        assert sum(whole(part).numel() for part in parts if part) == 64

    @process_kinds_and_one_async
    def test_instances_are_refused(self, kind):
        env = Counter()
        with pytest.raises(OptionError, match="worker 0"):
            kind.cls([env] if kind.takes_several else env, frames_per_batch=4)
        assert env.closed == 0

    @process_kinds_and_one_async
    def test_what_cannot_cross_is_named(self, kind):
        lock = threading.Lock()
        with pytest.raises(OptionError, match=r"create_env_fn.*lock"):
            kind.open(every(lambda: (lock, Counter())[1]), lanes=None)

        class Locked(nn.Module):
            def __init__(self):
                super().__init__()
                self.lock = threading.Lock()

            def forward(self, observation):
                return observation

        with pytest.raises(OptionError, match=r"policy.*lock"):
            kind.open(every(Counter), Locked(), lanes=None)
        with pytest.raises(OptionError, match="pre_collect_hook"):
            kind.open(every(Counter), lanes=None, pre_collect_hook=lambda: lock)
        with pytest.raises(OptionError, match="create_env_kwargs"):
            kind.open(every(Counter), lanes=None, create_env_kwargs={"length": lock})

    @pytest.mark.parametrize("name", ["num_workers", "num_collectors"])
    @pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
    def test_one_maker_for_so_many_workers(self, cls, name):
        with cls(Starts, frames_per_batch=12, **{name: 3}) as collector:
            assert collector.num_workers == 3
            assert len({*collector.map_fn(lambda envs: os.getpid())}) == 3
            assert len({each for (each,) in collector.map_fn(lambda envs: [env.start for env in envs])}) == 3
        with pytest.raises(OptionError, match="num_workers"):
            cls([Counter] * 2, frames_per_batch=12, **{name: 3})
        with pytest.raises(OptionError, match="empty"):
            cls([], frames_per_batch=12)

    def test_a_sequence_is_the_lanes_of_the_kinds_with_one_worker(self):
        for cls in (Collector, AsyncCollector):
            with cls([functools.partial(Tagged, 4), functools.partial(Tagged, 7)], frames_per_batch=6) as collector:
                assert collector.num_workers == 1
                assert collector.next()["observation"][..., 0].tolist() == [[4.0] * 3, [7.0] * 3]

    @pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
    def test_lists_are_one_for_each_worker(self, cls):
        factories = [functools.partial(Constant, 2.0), lambda: Constant(3.0)]
        kind = KINDS["sync" if cls is MultiSyncCollector else "async"]
        with kind.open(
            every(Echo),
            lanes=2,
            create_env_kwargs=[{"length": 2}, {"length": 4}],
            policy_factory=factories,
            device=["cpu", "cpu"],
            policy_device=[None, "cpu"],
            env_device=["cpu", None],
            storing_device=["cpu", torch.device("cpu")],
        ) as collector:
            parts = take(kind, collector, 2)
        for worker, part in enumerate(parts):
            frames = whole(part)
            assert {*frames["action"].flatten().tolist()} == {2.0 + worker}
            ends = frames["next", "done"][0].flatten().nonzero().flatten().tolist()
            assert ends == list(range(1, 8, 2)) if worker == 0 else [3, 7]
            assert frames.device == torch.device("cpu")

    @pytest.mark.parametrize("cls", [MultiSyncCollector, MultiAsyncCollector])
    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("create_env_kwargs", [{}]),
            ("policy_factory", [Constant] * 3),
            *((name, ["cpu"] * 3) for name in ("device", "policy_device", "env_device", "storing_device")),
        ],
    )
    def test_lists_of_another_length_are_refused_by_name(self, cls, name, value):
        with pytest.raises(OptionError, match=f"{name}.*{len(value)}.*2 workers"):
            cls([Echo] * 2, frames_per_batch=4, **{name: value})

    @every_kind
    def test_a_factory_makes_the_policy_where_frames_are_made(self, kind):
        def factory():
            pid = os.getpid()
            return lambda observation: torch.full((*observation.shape[:-1], 1), float(pid % 2**20))

        with kind.open(echoes, lanes=2, policy_factory=factory) as collector:
            pids = collector.map_fn(lambda envs: os.getpid())
            for pid, part in zip(pids, take(kind, collector, 1), strict=True):
                assert {*part[0]["action"].flatten().tolist()} == {float(pid % 2**20)}

    @process_kinds
    def test_factories_policies_take_weights_too(self, kind):
        with kind.open(echoes, lanes=None, policy_factory=Constant) as collector:
            with pytest.raises(PolicyError, match="policy_factory"):
                collector.update_policy_weights_()
            assert collector.policy_version == 0
            assert collector.update_policy_weights_(Constant(6.0)) == 1
            for part in take(kind, collector, 4):
                assert {*part[-1]["action"].flatten().tolist()} == {6.0}

    @every_kind
    def test_arguments_for_makers(self, kind):
        with kind.open(every(Rich), lanes=2, create_env_kwargs={"offset": 0.5, "length": 2}) as collector:
            for part in take(kind, collector, 2):
                assert (whole(part)["x"][..., 0] % 1 == 0.5).all()


# --- options ----------------------------------------------------------------------------------------------------------


def history(lane, episode, info):
    """Options for a reset, of what it is told (FAULTS 84)."""
    return {"option": 100 * (lane + 1) + 10 * episode + info.get("t", 9)}


def shifted(batch):
    return batch.set("shifted", batch["x"] + 1)


def stopped():
    interruptor = Interruptor()
    interruptor.stop_collection()
    return interruptor


OPTIONS = {
    "frames_per_batch": {"frames_per_batch": 6},
    "total_frames": {"total_frames": 22},
    "max_frames_per_traj": {"max_frames_per_traj": 2},
    "init_random_frames": {"init_random_frames": 11},
    "reset_at_each_iter": {"reset_at_each_iter": True},
    "set_truncated": {"set_truncated": True},
    "track_traj_ids": {"track_traj_ids": False},
    "record": {"record": ALL},
    "info_keys": {"info_keys": {"t": spaces.Discrete(9)}},
    "rename_keys": {"rename_keys": {"option": "choice"}},
    "exclude_keys": {"exclude_keys": ["option"]},
    "obs_dtype": {"obs_dtype": "env"},
    "reset_options": {"reset_options": history},
    "seed_per_episode": {"seed_per_episode": True},
    "resume": {"resume": "replay"},
    "num_envs": {"num_envs": 4},
    "env_workers": {"env_workers": 2},
    "env_groups": {"env_workers": 2, "env_groups": 2},
    "create_env_kwargs": {"create_env_kwargs": {"offset": 0.25}},
    "masked_reset": {"masked_reset": True},
    "device": {"device": "cpu"},
    "policy_device": {"policy_device": "cpu"},
    "env_device": {"env_device": "cpu"},
    "storing_device": {"storing_device": "cpu"},
    "no_cuda_sync": {"no_cuda_sync": True},
    "exploration_type": {"exploration_type": ExplorationType.DETERMINISTIC},
    "policy_factory": {"policy_factory": Noisy},
    "trust_policy": {"trust_policy": True},
    "initial_policy_state": {"initial_policy_state": {"hidden": torch.full((1,), 4.0)}},
    "check_actions": {"check_actions": True},
    "compile_policy": {"compile_policy": {"backend": "eager"}},
    "cudagraph_policy": {"cudagraph_policy": True},
    "pre_collect_hook": {"pre_collect_hook": lambda: torch.rand(3)},
    "post_collect_hook": {"post_collect_hook": lambda batch: torch.rand(3)},
    "interruptor": {"interruptor": stopped()},
    "postproc": {"postproc": shifted},
    "split_trajs": {"split_trajs": True},
    "trajs_per_batch": {"trajs_per_batch": 3},
    "traj_format": {"trajs_per_batch": 3, "traj_format": "cat"},
    "traj_order": {"trajs_per_batch": 3, "traj_order": "lanes"},
    "max_open_frames": {"trajs_per_batch": 3, "max_open_frames": 2},
    "fragment_len": {"fragment_len": 3},
    "return_same_td": {"return_same_td": True},
    "use_buffers": {"use_buffers": False},
    "replay_buffer": {"replay_buffer": functools.partial(ReplayBuffer, 36, storage="shared")},
    "extend_buffer": {
        "replay_buffer": functools.partial(ReplayBuffer, 36, storage="shared"),
        "extend_buffer": False,
    },
    "compact_obs": {"compact_obs": True},
    "weight_sync_schemes": {"weight_sync_schemes": {"policy": NoWeightSyncScheme()}},
    "weight_recv_schemes": {"weight_recv_schemes": {}},
    "weight_updater": {"weight_updater": VanillaWeightUpdater},
}
"""Every option of a single process, with a value that is not its default; for a buffer what makes one."""

PROCESSES = "env_workers", "env_groups"  # options that start others: seconds each
HERE = (
    "frames_per_batch",
    "total_frames",
    "init_random_frames",
    "interruptor",
    "postproc",
    "split_trajs",
    "trajs_per_batch",
    "traj_order",
    "return_same_td",
    "use_buffers",
    "replay_buffer",
    "extend_buffer",
    "compact_obs",
    "weight_sync_schemes",
    "weight_updater",
)
"""Options with a part in the program, which may depend on the kind; the others are the worker's alone."""


def is_slow(name, cls):
    return name in PROCESSES or (cls is AsyncCollector and name not in HERE)


def actor():
    """Stochastic, by tensordict's own parts: what it does depends on the exploration type."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(2, 2), NormalParamExtractor())
    return ProbabilisticTensorDictSequential(
        TensorDictModule(net, in_keys=["x"], out_keys=["loc", "scale"]),
        ProbabilisticTensorDictModule(
            in_keys=["loc", "scale"],
            out_keys=["action"],
            distribution_class=torch.distributions.Normal,
            return_log_prob=True,
        ),
    )


def counting(x, hidden=None):
    hidden = torch.zeros(*x.shape[:-1], 1) if hidden is None else hidden
    return {"action": hidden.clone(), ("next", "hidden"): hidden + 1}


def policy_for(name):
    if name == "policy_factory":
        return None
    if name == "initial_policy_state":
        return counting
    if name == "obs_dtype":
        return Noisy()
    return actor()


def outcome(cls, name):
    """The batches that come with an option, or what is in a buffer in their place; or the error."""
    options = {"frames_per_batch": 8, "total_frames": 36, "num_envs": 2, **OPTIONS[name]}
    if "replay_buffer" in options:
        options["replay_buffer"] = options["replay_buffer"]()
    if cls is MultiSyncCollector and "trajs_per_batch" not in options:
        options["cat_results"] = 0
    source = functools.partial(Rich, 4)
    try:
        torch.manual_seed(9)
        with cls([source] if cls is MultiSyncCollector else source, policy_for(name), **options) as c:
            c.set_seed(2)
            if "replay_buffer" in options:
                assert list(c) == [None] * 5
                return [options["replay_buffer"].frames()]
            return [batch.expand() if name == "compact_obs" else batch.clone() for batch in c]
    except Exception as error:
        return error


class TestOptions:
    def test_the_table_has_every_option_of_a_single_process(self):
        """FAULTS 61."""
        assert [*inspect.signature(Collector).parameters][2:] == [*OPTIONS]
        for cls in (MultiSyncCollector, MultiAsyncCollector, AsyncCollector):
            assert {*OPTIONS} <= {*inspect.signature(cls).parameters}

    @pytest.mark.parametrize(
        ("name", "cls"),
        [
            pytest.param(name, cls, marks=pytest.mark.slow if is_slow(name, cls) else ())
            for name in OPTIONS
            for cls in (MultiSyncCollector, AsyncCollector)
        ],
    )
    def test_an_option_does_what_it_does_in_one_process_or_is_refused_by_name(self, name, cls):
        """FAULTS 61: with one worker, to the bit."""
        expected, came = outcome(Collector, name), outcome(cls, name)
        if isinstance(expected, Exception):
            assert name == "cudagraph_policy"
            assert type(came) is type(expected)
            assert name in str(came)
        else:
            assert isinstance(came, list), came
            if name == "interruptor" and cls is MultiSyncCollector:  # its rollouts may end apart
                assert all(batch.pop(("collector", "mask")).all() for batch in came)
            assert_same(came, expected)

    def test_options_of_workers_are_refused_by_name_where_there_are_none(self):
        own = {*inspect.signature(MultiSyncCollector).parameters} - {*inspect.signature(Collector).parameters}
        assert "cat_results" in own
        assert "start_method" in own
        for name in own:
            with pytest.raises(OptionError, match=name):
                Collector(Counter, frames_per_batch=4, **{name: 1})
        for cls in (MultiAsyncCollector, AsyncCollector):
            with pytest.raises(OptionError, match="cat_results"):
                cls([Counter], frames_per_batch=4, cat_results=0)

    @every_kind_and_one_async
    def test_what_is_no_option_is_refused_with_the_nearest(self, kind):
        with pytest.raises(OptionError, match=r"frame_per_batch.*frames_per_batch"):
            kind.cls(kind.source(every(Counter)), frames_per_batch=4, frame_per_batch=4)
        with pytest.raises(OptionError, match="needs frames_per_batch"):
            kind.cls(kind.source(every(Counter)))

    @process_kinds_and_one_async
    @pytest.mark.parametrize(
        "options",
        [
            {"num_workers": 0},
            {"num_sub_threads": 0},
            {"num_threads": 1.5},
            {"timeout": 0},
            {"start_timeout": -1},
            {"start_method": "thread"},
            {"update_at_each_batch": 1},
            {"collector_class": "Collector"},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_wrong_values_are_refused_by_name(self, kind, options):
        (name,) = options
        make = kind.source(every(Counter))
        with pytest.raises(OptionError, match=name):
            kind.cls(make, frames_per_batch=4, **options)

    @pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
    def test_every_start_method_gives_the_same(self, method):
        """FAULTS 53."""
        runs = []
        makers = [Rich] * (1 if method == "spawn" else 2)  # each takes seconds
        for options in ({}, {"start_method": method}):
            with MultiSyncCollector(
                makers, Noisy(), frames_per_batch=8 * len(makers), num_envs=2, **options
            ) as collector:
                collector.set_seed(1)
                runs.append([collector.next() for _ in range(2)])
        assert_same(*runs)


# --- the same face ----------------------------------------------------------------------------------------------------


OF_REMOTES = {"add_collectors", "cascade_execute", "local_policy", "remote_collectors", "stop_remote_collectors"}


class TestFace:
    def test_old_names_are_aliases(self):
        assert rlcollect.SyncDataCollector is Collector
        assert rlcollect.MultiSyncDataCollector is MultiSyncCollector
        assert rlcollect.MultiaSyncDataCollector is MultiAsyncCollector
        assert rlcollect.aSyncDataCollector is AsyncCollector

    @pytest.mark.on_ray
    def test_what_is_public_is_public_on_every_kind(self):
        """FAULTS 82."""
        seen = {}
        for name, kind in KINDS.items():
            with kind.open(every(Counter), lanes=2, total_frames=16) as collector:
                seen[name] = {key for key in dir(collector) if not key.startswith("_")}
                values = {key: getattr(collector, key) for key in seen[name] if not callable(getattr(collector, key))}
                assert values["num_workers"] == kind.workers
                assert values["policy_device"] == torch.device("cpu")
                assert isinstance(collector, torch.utils.data.IterableDataset)
                assert type(collector).__name__ in repr(collector)
        assert {"next", "rollout", "map_fn", "set_seed", "reset", "state_dict", "stats", "closed"} <= seen["single"]
        for name, names in seen.items():
            assert names == seen["single"] | (OF_REMOTES if KINDS[name].is_on_ray else set())

    @every_kind_and_one_async
    def test_after_shutdown_all_is_refused_and_shutdown_is_not(self, kind):
        with kind.open(every(Counter), lanes=2) as collector:
            collector.next()
        assert collector.closed
        collector.shutdown()
        for call in (
            collector.next,
            collector.rollout,
            collector.reset,
            collector.state_dict,
            collector.update_policy_weights_,
            lambda: collector.set_seed(1),
            lambda: collector.map_fn(len),
            lambda: list(collector),
            lambda: collector.load_state_dict({}),
        ):
            with pytest.raises(rlcollect.ClosedError):
                call()
        assert collector.policy_version == 0
        assert collector.collected_frames > 0

    @every_kind
    def test_figures(self, kind):
        before = torch.get_num_threads()
        with kind.open(every(functools.partial(Counter, 4)), lanes=2, steps=4, total_frames=64) as collector:
            assert collector.stats().episodes == 0
            batches = list(collector)
            stats = collector.stats()
            ended = sum(int(batch["next", "done"].sum()) for batch in batches)
            assert isinstance(stats, Stats)
            assert (stats.frames, stats.batches, stats.episodes) == (64, len(batches), ended) == (64, len(batches), 16)
            assert (stats.episode_length.min, stats.episode_length.max) == (4, 4)
            assert (stats.episode_return.mean, stats.episode_return.min) == (6.0, 6.0)
            assert stats.dropped == 0
            if kind.is_process:
                assert stats.threads.main == torch.get_num_threads()
                assert stats.threads.workers == (1,) * kind.workers
            else:
                assert stats.threads is None
            assert all(
                isinstance(value, (int, float)) or key.startswith("threads") for key, value in stats.as_dict().items()
            )
        assert torch.get_num_threads() == before

    @process_kinds
    def test_threads_are_as_asked_and_put_back(self, kind):
        """FAULTS 88."""
        before = torch.get_num_threads()
        torch.set_num_threads(3)
        try:
            with kind.open(every(Counter), lanes=None, num_threads=2, num_sub_threads=2) as collector:
                assert torch.get_num_threads() == 2
                assert collector.map_fn(lambda envs: torch.get_num_threads()) == [2] * kind.workers
                assert (collector.stats().threads.main, collector.stats().threads.workers) == (2, (2,) * kind.workers)
            assert torch.get_num_threads() == 3
            with kind.open(every(Counter), lanes=None) as collector:
                assert collector.map_fn(lambda envs: torch.get_num_threads()) == [1] * kind.workers
                assert torch.get_num_threads() == (3 if kind.is_sync else 3 - kind.workers)
            assert torch.get_num_threads() == 3
        finally:
            torch.set_num_threads(before)

    @every_kind
    def test_what_collection_draws_is_no_part_of_the_program(self, kind):
        torch.manual_seed(5)
        expected = torch.rand(3)
        torch.manual_seed(5)
        with kind.open(every(Rich), Noisy(), lanes=2) as collector:
            collector.next()
            collector.next()
        assert torch.equal(torch.rand(3), expected)


# --- states -----------------------------------------------------------------------------------------------------------


class TestStates:
    @every_kind
    @pytest.mark.parametrize(
        ("saved_after", "lanes"),
        [*(pytest.param(after, 3, marks=pytest.mark.slow) for after in (0, 5)), (5, None), (7, 3), (8, None)],
    )
    def test_exactly_the_remaining_batches_come(self, kind, lanes, saved_after):
        """FAULTS 106."""
        per_step = (lanes or 1) * kind.together
        options = {"lanes": lanes, "steps": 3, "total_frames": 22 * per_step}
        sizes = [3 * per_step] * 7 + [per_step]
        with kind.open(TaggedLanes, always_one, **options) as collector:
            first = [collector.next() for _ in range(saved_after)]
            state = collector.state_dict()
        assert {"frames", "iter"} <= state.keys()
        if kind.is_process:
            assert {f"worker{worker}" for worker in range(kind.workers)} <= state.keys()
        with kind.open(TaggedLanes, always_one, **options) as collector:
            collector.load_state_dict(state)
            assert collector.collected_frames == sum(batch.numel() for batch in first)
            assert collector.stats().batches == saved_after
            assert collector.exhausted is (saved_after == 8)
            rest = list(collector)
            assert len(collector) == 8
            assert collector.collected_frames == 22 * per_step
        assert in_order(kind, [*first, *rest]) == sizes
        by_worker(kind, [*first, *rest])  # no id comes back

    @every_kind_and_one_async
    def test_a_state_can_be_loaded_twice_and_is_not_changed(self, kind):
        policy = Noisy()
        with kind.open(every(Rich), policy, lanes=2, init_random_frames=9, steps=2) as collector:
            collector.set_seed(3)
            collector.next()
            state = collector.state_dict()
            before = repr(state)
            for _ in range(5):
                collector.next()
                collector.update_policy_weights_()
            assert repr(state) == before
            collector.load_state_dict(state)
            assert collector.policy_version == 0
            runs = [take(kind, collector, 4)]
        with kind.open(every(Rich), Noisy(), lanes=2, init_random_frames=9, steps=2) as collector:
            collector.next()
            collector.load_state_dict(state)
            runs.append(take(kind, collector, 4))
            assert repr(state) == before
        for one, other in zip(*runs, strict=True):
            assert_same(one, other)

    @every_kind
    def test_weights_and_versions_are_in_it(self, kind):
        """FAULTS 107."""
        policy = Constant(1.0)
        with kind.open(echoes, policy, lanes=None, steps=3) as collector:
            policy.become(7.0)
            collector.update_policy_weights_()
            take(kind, collector, 4)
            state = collector.state_dict()
        fresh = Constant(0.0)
        with kind.open(echoes, fresh, lanes=None, steps=3) as collector:
            collector.load_state_dict(state)
            assert collector.policy_version == 1
            assert fresh.value.item() == 7.0
            for part in take(kind, collector, 4):
                assert {*whole(part)["action"].flatten().tolist()} == {7.0}
                assert {*whole(part)["collector", "policy_version"].flatten().tolist()} == {1}
            fresh.become(8.0)
            assert collector.update_policy_weights_() == 2
            for part in take(kind, collector, 4):
                assert {*part[-1]["action"].flatten().tolist()} == {8.0}
                assert {*part[-1]["collector", "policy_version"].flatten().tolist()} == {2}

    @every_kind
    def test_an_addressed_worker_has_the_weights_of_the_state_as_well(self, kind):
        """A load publishes to all, whoever was addressed before."""
        policy = Constant(1.0)
        with kind.open(echoes, policy, lanes=None, steps=3) as collector:
            collector.update_policy_weights_(Constant(2.0), worker_ids=[kind.workers - 1])
            policy.become(1.0)
            take(kind, collector, 3)
            collector.update_policy_weights_()
            take(kind, collector, 3)
            state = collector.state_dict()
            collector.update_policy_weights_(Constant(3.0), worker_ids=[kind.workers - 1])
            take(kind, collector, 3)
            collector.load_state_dict(state)
            assert collector.policy_version == 2
            for part in take(kind, collector, 4):
                assert {*part[-1]["action"].flatten().tolist()} == {1.0}
                assert {*part[-1]["collector", "policy_version"].flatten().tolist()} == {2}

    @async_kinds
    @lanes_soon
    def test_pending_batches_are_in_it_and_come_first(self, kind, lanes):
        """DESIGN 9.12: those that this collector delivers next, and the loaded one too."""
        options = {"lanes": lanes, "steps": 4, "total_frames": 4 * 12 * (lanes or 1)}
        with kind.open(Endless, **options) as collector:
            before = [collector.next()]
            till_full(kind, collector, 4, 1)
            state = collector.state_dict()
            rest = [collector.next() for _ in range(2 * kind.workers)]
            rest += list(collector)
            assert collector.collected_frames == 48 * (lanes or 1)
        assert len(state["pending"]) == 2 * kind.workers
        with kind.open(Endless, **options) as collector:
            collector.next()
            collector.load_state_dict(state)
            loaded = list(collector)
            assert collector.collected_frames == 48 * (lanes or 1)
        assert sum(batch.numel() for batch in loaded) == 44 * (lanes or 1)
        pending = 2 * kind.workers
        assert_same(loaded[:pending], rest[:pending])
        by_worker(kind, [*before, *loaded])  # each id once

    def test_what_is_made_while_others_are_saved_is_in_no_state_twice(self):
        """A worker that was saved goes on while another is waited for: what it makes is made again after a load."""
        makers = [functools.partial(Slow, 0, 0.03), functools.partial(Slow, 1, 0.2)]
        with MultiAsyncCollector(makers, frames_per_batch=2) as collector:
            batches = [collector.next() for _ in range(2)]
            state = collector.state_dict()
        with MultiAsyncCollector(makers, frames_per_batch=2) as collector:
            collector.load_state_dict(state)
            loaded = [collector.next() for _ in range(6)]
        by_worker(KINDS["async"], [*batches, *loaded])
        for worker in (0, 1):
            ids = [each["collector", "traj_ids"][0].item() for each in [*batches, *loaded]]
            mine = [name for name in ids if name >> PREFIX == worker]
            assert mine == sorted(mine)

    @every_kind
    def test_a_load_into_one_that_runs_drops_what_it_has_made(self, kind):
        per_step = kind.together
        with kind.open(TaggedLanes, lanes=None, steps=3, total_frames=30 * per_step) as collector:
            for _ in range(2):
                collector.next()
            state = collector.state_dict()
            for _ in range(5):
                collector.next()
            collector.load_state_dict(state)
            assert collector.collected_frames == 6 * per_step
            rest = list(collector)
        assert [batch.numel() for batch in rest] == [3 * per_step] * 8

    @every_kind
    def test_states_that_do_not_fit_are_refused_and_change_nothing(self, kind):
        with kind.open(every(Counter), lanes=3) as collector:
            lanes = collector.state_dict()
        with kind.open(every(Counter), lanes=2) as collector:
            good = collector.state_dict()
            before = collector.next()
            for wrong in (
                lanes,
                {},
                {key: value for key, value in good.items() if not key.startswith(("worker", "steps"))},
            ):
                with pytest.raises(OptionError):
                    collector.load_state_dict(wrong)
            with pytest.raises(OptionError, match="policy_state_dict"):
                collector.load_state_dict({**good, "policy_state_dict": {}})
            assert not collector.closed
            assert collector.collected_frames == before.numel()
            assert collector.next() is not None

    @process_kinds
    def test_states_of_other_numbers_of_workers_are_refused(self, kind):
        if not kind.takes_several:
            return
        with kind.cls([Counter] * 3, frames_per_batch=3) as collector:
            state = collector.state_dict()
        with (
            kind.open(every(Counter), lanes=None) as collector,
            pytest.raises(OptionError, match=r"3 workers.* 2"),
        ):
            collector.load_state_dict(state)

    @process_kinds
    def test_a_state_crosses_to_a_file(self, kind, tmp_path):
        with kind.open(every(Rich), Noisy(), lanes=2) as collector:
            collector.set_seed(1)
            collector.next()
            expected = collector.state_dict()
            torch.save(expected, tmp_path / "state")
        loaded = torch.load(tmp_path / "state", weights_only=False)
        assert loaded.keys() == expected.keys()
        with kind.open(every(Rich), Noisy(), lanes=2) as collector:
            collector.load_state_dict(loaded)
            assert collector.next() is not None


class Slow(Tagged):
    """Takes its time."""

    def __init__(self, worker, seconds):
        super().__init__(worker, 2)
        self.seconds = seconds

    def step(self, action):
        time.sleep(self.seconds / 2)
        return super().step(action)
