"""How many frames, batches, episodes and resets there are, and where episodes are cut."""

from __future__ import annotations

import functools
import math
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.wrappers import TimeLimit
from rich.progress import track
from tensordict import TensorDict

from rlcollect import Collector, OptionError, PolicyError, SpaceError
from rlcollect.testing import Counter, Probe, Tagged, check_batch
from tests.collectors.helpers import after, checked, counters, flag, ids, joined, seen


def zero(observation: torch.Tensor) -> torch.Tensor:
    """Action 0, whatever is seen."""
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class TestTotalFrames:
    @pytest.mark.parametrize("lanes", [None, 1, 4])
    @pytest.mark.parametrize(
        ("per_batch", "total", "sizes"),
        [(40, 120, [40, 40, 40]), (40, 100, [40, 40, 20]), (40, 16, [16]), (40, 44, [40, 4]), (4, 8, [4, 4])],
    )
    def test_the_total_is_exact_and_the_last_batch_shorter(self, lanes, per_batch, total, sizes):
        """FAULTS 78."""
        with Collector(Counter, num_envs=lanes, frames_per_batch=per_batch, total_frames=total) as collector:
            batches = list(checked(collector))
            assert [batch.numel() for batch in batches] == sizes
            assert collector.collected_frames == total == collector.total_frames
            assert collector.exhausted
            assert len(collector) == len(batches)
            shape = [] if lanes is None else [lanes]
            assert [list(batch.batch_size) for batch in batches] == [[*shape, size // (lanes or 1)] for size in sizes]
            assert all(batch.names == [*[None] * len(shape), "time"] for batch in batches)

    def test_frames_are_real_env_steps(self):
        envs = counters(2, 3, 5)
        with Collector(envs, frames_per_batch=12, total_frames=99) as collector:
            frames = sum(batch.numel() for batch in collector)
        assert frames == 99 == sum(env.steps for env in envs)

    def test_145_frames_on_10_lanes_are_150_and_one_warning_says_so(self):
        """FAULTS 77."""
        with pytest.warns(UserWarning, match=r"total_frames=145 .*10 lanes.* 150") as caught:
            collector = Collector(Counter, num_envs=10, frames_per_batch=50, total_frames=145)
        with collector:
            assert len(caught) == 1
            assert collector.total_frames == 150
            assert sum(batch.numel() for batch in collector) == 150 == collector.collected_frames
            assert len(collector) == 3

    def test_frames_per_batch_is_rounded_up_and_one_warning_says_so(self):
        """FAULTS 77."""
        with pytest.warns(UserWarning, match=r"frames_per_batch=145 .*10 lanes.* 150") as caught:
            collector = Collector(Counter, num_envs=10, frames_per_batch=145, total_frames=200)
        with collector:
            assert len(caught) == 1
            assert collector.frames_per_batch == 150
            assert [batch.numel() for batch in collector] == [150, 50]

    def test_both_rounded_up_are_two_warnings_one_each(self):
        with pytest.warns(UserWarning, match="rounded up") as caught:
            collector = Collector(Counter, num_envs=4, frames_per_batch=1, total_frames=9)
        with collector:
            options = sorted(str(warning.message).split("=")[0] for warning in caught)
            assert options == ["frames_per_batch", "total_frames"]
            assert [batch.numel() for batch in collector] == [4, 4, 4]

    def test_divisible_frames_warn_of_nothing(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            Collector(Counter, num_envs=10, frames_per_batch=150, total_frames=1000).shutdown()

    def test_a_warning_points_at_the_line_that_made_the_collector(self):
        with pytest.warns(UserWarning, match="rounded up") as caught:
            Collector(Counter, num_envs=10, frames_per_batch=145).shutdown()
        assert caught[0].filename == __file__

    def test_an_env_that_never_ends_gives_its_frames_at_once(self):
        """FAULTS 31."""
        env = Counter(None)
        with Collector(env, frames_per_batch=32, total_frames=32) as collector:
            assert seen(collector.next()) == list(range(32))
        assert env.steps == 32

    def test_endless_collection_goes_on(self):
        with Collector(Counter, frames_per_batch=3) as collector:
            for _, batch in zip(range(100), checked(collector), strict=False):
                assert batch.numel() == 3
            assert not collector.exhausted
            assert collector.total_frames == -1


class TestNext:
    def test_it_gives_none_when_the_frames_are_exhausted_and_stays_open(self):
        with Collector(Counter, frames_per_batch=5, total_frames=10) as collector:
            assert not collector.exhausted
            assert [collector.next().numel() for _ in range(2)] == [5, 5]
            assert collector.exhausted
            assert not collector.closed
            assert collector.next() is None
            assert collector.next() is None
            assert list(collector) == []
            assert collector.collected_frames == 10
            assert collector.state_dict()["frames"] == 10

    def test_breaking_off_and_iterating_again_goes_on(self):
        """FAULTS 60."""
        with Collector(Counter(7), frames_per_batch=4, total_frames=20) as collector:
            batches = []
            for batch in collector:
                batches.append(batch)
                break
            batches.append(collector.next())
            for batch in collector:
                batches.append(batch)
                if len(batches) == 4:
                    break
            batches += list(collector)
            assert len(batches) == 5
        list(checked(batches))
        assert seen(joined(batches)) == [t % 7 for t in range(20)]

    def test_two_collectors_one_after_the_other(self):
        """FAULTS 60."""
        for _ in range(2):
            with Collector(Counter, frames_per_batch=4, total_frames=8) as collector:
                assert len(list(checked(collector))) == 2

    def test_two_iterators_share_the_frames(self):
        with Collector(Counter(None), frames_per_batch=2, total_frames=8) as collector:
            one, other = iter(collector), iter(collector)
            batches = [next(one), next(other), next(one), next(other)]
            assert seen(joined(batches)) == list(range(8))
            assert next(one, None) is None


class TestLength:
    @pytest.mark.parametrize(("per_batch", "total"), [(5, 5), (5, 6), (5, 10), (5, 1), (1, 7)])
    def test_it_is_the_number_of_batches_delivered_ones_included(self, per_batch, total):
        with Collector(Counter, frames_per_batch=per_batch, total_frames=total) as collector:
            expected = math.ceil(total / per_batch)
            assert len(collector) == expected
            collector.next()
            assert len(collector) == expected
            assert 1 + len(list(collector)) == expected

    def test_it_is_not_known_when_endless(self):
        with Collector(Counter, frames_per_batch=5) as collector, pytest.raises(TypeError, match="total_frames"):
            len(collector)

    def test_it_is_not_known_with_an_interruptor(self):
        interruptor = After(10**9)
        with (
            Collector(Counter, frames_per_batch=5, total_frames=10, interruptor=interruptor) as collector,
            pytest.raises(TypeError, match="interruptor"),
        ):
            len(collector)

    def test_list_and_progress_bars_work_where_it_is_not_known(self):
        with Collector(Counter, frames_per_batch=5, total_frames=10, interruptor=After(10**9)) as collector:
            assert len(list(collector)) == 2
        with Collector(Counter, frames_per_batch=5) as collector:
            for count, batch in enumerate(track(collector, disable=True)):
                assert batch.numel() == 5
                if count == 2:
                    break

    def test_a_data_loader_takes_it(self):
        with Collector(Counter, frames_per_batch=5, total_frames=15) as collector:
            loader = torch.utils.data.DataLoader(collector, batch_size=None, collate_fn=lambda batch: batch)
            assert [batch.numel() for batch in loader] == [5, 5, 5]

    def test_it_is_an_iterable_dataset(self):
        with Collector(Counter, frames_per_batch=5, total_frames=15) as collector:
            assert isinstance(collector, torch.utils.data.IterableDataset)


class TestRollout:
    def test_it_is_not_counted_and_not_post_processed(self):
        calls = []
        with Collector(
            Counter(None), frames_per_batch=4, total_frames=8, postproc=lambda batch: calls.append(1) or batch
        ) as collector:
            rollout = collector.rollout()
            assert list(rollout.batch_size) == [4]
            assert (collector.collected_frames, calls, collector.exhausted) == (0, [], False)
            assert [batch.numel() for batch in collector] == [4, 4]
            assert len(calls) == 2
            assert collector.rollout().numel() == 4  # exhausted collectors still roll out
            assert collector.collected_frames == 8

    def test_episodes_ids_and_warm_up_go_on_through_it(self):
        with Collector(Counter(3), zero, frames_per_batch=4, init_random_frames=6) as collector:
            batches = [collector.next(), collector.rollout(), collector.next()]
        list(checked(batches))
        assert seen(joined(batches)) == [t % 3 for t in range(12)]
        assert joined(batches)["collector", "policy_version"].tolist() == [-1] * 6 + [0] * 6


class TestInitRandomFrames:
    @pytest.mark.parametrize("none", [None, -1, 0])
    def test_none_minus_one_and_zero_mean_none(self, none):
        with Collector(Counter, zero, frames_per_batch=4, init_random_frames=none) as collector:
            assert collector.next()["collector", "policy_version"].tolist() == [0] * 4

    @pytest.mark.parametrize("random", [1, 3, 4, 7, 8, 9, 23, 24, 1000])
    @pytest.mark.parametrize("lanes", [None, 2, 3, 4])
    def test_exactly_so_many_actions_are_random(self, random, lanes):
        """Not divisible by the lanes, in the middle of a batch, more than there are frames at all."""
        calls = []

        def policy(observation):
            calls.append(1)
            return zero(observation)

        with Collector(
            Counter, policy, num_envs=lanes, frames_per_batch=12, total_frames=24, init_random_frames=random
        ) as collector:
            versions = joined(list(checked(collector)))["collector", "policy_version"].reshape(lanes or 1, -1)
        assert int((versions == -1).sum()) == min(random, 24)
        per_lane = (versions == -1).sum(1)
        assert int(per_lane.max() - per_lane.min()) <= 1
        assert (versions.diff(dim=1) >= 0).all()  # random first, then the policy for good
        assert len(calls) - 1 == 24 // (lanes or 1) - int(per_lane.min())  # the first call was the probe

    def test_random_frames_are_random_and_the_others_are_the_policys(self):
        with Collector(Counter, zero, num_envs=3, frames_per_batch=300, init_random_frames=200) as collector:
            collector.set_seed(0)
            batch = collector.next()
        random = batch["collector", "policy_version"] == -1
        assert set(batch["action"][random].tolist()) == {0, 1}
        assert set(batch["action"][~random].tolist()) == {0}

    def test_every_batch_has_the_same_keys(self):
        """FAULTS 33: keys the policy writes are there in the first batch too; it gets no made-up input."""
        inputs = []

        def policy(td: TensorDict) -> TensorDict:
            inputs.append(td["observation"].clone())
            return td.set("action", zero(td["observation"])).set("value", td["observation"] + 1)

        with Collector(counters(None, None), policy, frames_per_batch=4, init_random_frames=5) as collector:
            batches = [collector.next() for _ in range(3)]
        keys = [set(batch.keys(include_nested=True, leaves_only=True)) for batch in batches]
        assert keys[0] == keys[1] == keys[2]
        whole = joined(batches)
        by_policy = whole["collector", "policy_version"] == 0
        assert (whole["value"][by_policy] == whole["observation"][by_policy] + 1).all()
        assert (whole["value"][~by_policy] == 0).all()
        assert [value.flatten().tolist() for value in inputs] == [[0, 0], [2, 2], [3, 3], [4, 4], [5, 5]]

    def test_without_a_policy_every_frame_is_random_anyway(self):
        with Collector(Counter, frames_per_batch=4, total_frames=8, init_random_frames=4) as collector:
            assert joined(list(collector))["collector", "policy_version"].tolist() == [-1] * 8


class TestMaxFramesPerTraj:
    @pytest.mark.parametrize("limit", [1, 2, 3, 5])
    def test_it_truncates_and_resets_that_lane_only(self, limit):
        """FAULTS 4: lanes of 2, 3 and 5 steps keep their own counts."""
        envs = counters(2, 3, 5)
        with Collector(envs, frames_per_batch=21, total_frames=63, max_frames_per_traj=limit) as collector:
            batch = joined(list(checked(collector)))
        for lane, length in enumerate([2, 3, 5]):
            cut = min(limit, length)
            steps = list(range(cut)) * 21
            assert seen(batch)[lane] == steps[:21]
            assert after(batch)[lane] == [step + 1 for step in steps[:21]]
            assert batch["step_count"][lane].flatten().tolist() == steps[:21]
            assert batch["next", "step_count"][lane].flatten().tolist() == [step + 1 for step in steps[:21]]
            last = [int(step == cut - 1) for step in steps[:21]]
            assert flag(batch, "done")[lane] == last
            assert flag(batch, "truncated")[lane] == (last if limit <= length else [0] * 21)
            assert flag(batch, "terminated")[lane] == (last if length <= limit else [0] * 21)
            assert envs[lane].resets == 1 + sum(last)

    def test_both_flags_stand_where_the_env_ends_on_that_very_step(self):
        with Collector(Counter(3), frames_per_batch=7, max_frames_per_traj=3) as collector:
            batch = collector.next()
        assert flag(batch, "terminated") == flag(batch, "truncated") == flag(batch, "done") == [0, 0, 1, 0, 0, 1, 0]

    def test_it_holds_across_batches_and_rollouts(self):
        env = Counter(None)
        with Collector(env, frames_per_batch=3, max_frames_per_traj=5) as collector:
            batches = [collector.next(), collector.rollout(), collector.next(), collector.next()]
        list(checked(batches))
        assert seen(joined(batches)) == [t % 5 for t in range(12)]
        assert env.resets == 3

    def test_a_reset_begins_the_count_anew(self):
        with Collector(counters(None, None), frames_per_batch=6, max_frames_per_traj=5) as collector:
            first = collector.next()
            collector.reset(0)
            second = collector.next()
        list(checked([first, second]))
        assert seen(second) == [[0, 1, 2], [3, 4, 0]]
        assert flag(second, "truncated") == [[0, 0, 0], [0, 1, 0]]

    @pytest.mark.parametrize("ours", [3, 4, 5])
    def test_it_works_beside_a_time_limit(self, ours):
        env = Counter(None)
        with Collector(TimeLimit(env, 4), frames_per_batch=20, max_frames_per_traj=ours) as collector:
            batch = collector.next()
        check_batch(batch)
        length = min(4, ours)
        assert seen(batch) == [t % length for t in range(20)]
        assert flag(batch, "truncated") == [int(t % length == length - 1) for t in range(20)]
        assert not any(flag(batch, "terminated"))
        assert env.resets == 1 + 20 // length

    @pytest.mark.parametrize("none", [None, 0, -1])
    def test_none_minus_one_and_zero_mean_no_limit(self, none):
        with Collector(Counter(None), frames_per_batch=50, max_frames_per_traj=none) as collector:
            batch = collector.next()
            assert not any(flag(batch, "done"))
            assert "step_count" not in batch.keys()  # noqa: SIM118 - a TensorDict iterates over its batch

    def test_a_key_of_the_users_named_step_count_is_an_error_only_then(self):
        """FAULTS 4: it survives untouched."""
        with Collector(OwnStepCount, frames_per_batch=4) as collector:
            batch = collector.next()
            assert batch["step_count"].tolist() == [[1000], [1001], [1002], [1003]]
            assert batch["next", "step_count"].tolist() == [[1001], [1002], [1003], [1004]]
        with pytest.raises(SpaceError, match=r"step_count.*rename_keys"):
            Collector(OwnStepCount, frames_per_batch=4, max_frames_per_traj=3)
        with pytest.raises(SpaceError, match="step_count"):
            Collector(OwnStepCount, frames_per_batch=4, record="step_count")
        with Collector(
            OwnStepCount, frames_per_batch=4, max_frames_per_traj=3, rename_keys={"step_count": "theirs"}
        ) as collector:
            batch = collector.next()
            assert batch["theirs"].flatten().tolist() == [1000, 1001, 1002, 1000]
            assert batch["step_count"].flatten().tolist() == [0, 1, 2, 0]

    def test_check_batch_lets_a_step_count_of_the_users_pass(self):
        """It is theirs, in a form of theirs: no reason to call the batch wrong."""
        with Collector(OwnStepCount, frames_per_batch=4, total_frames=8) as collector:
            list(checked(collector))

    @pytest.mark.parametrize("name", ["step_count", "is_init"])
    def test_what_the_policy_writes_under_such_a_name_survives_too(self, name):
        def policy(td: TensorDict) -> TensorDict:
            return td.set("action", zero(td["observation"])).set(name, td["observation"] + 1000)

        with Collector(Counter(None), policy, frames_per_batch=4) as collector:
            assert collector.next()[name].flatten().tolist() == [1000, 1001, 1002, 1003]
        with pytest.raises(PolicyError, match=name):
            Collector(Counter(None), policy, frames_per_batch=4, record=name)

    def test_a_key_of_the_users_named_is_init_survives_untouched(self):
        class OwnMark(Counter):
            def __init__(self):
                super().__init__(None)
                self.observation_space = spaces.Dict({"is_init": spaces.Box(0, 1e6, (1,), np.float32)})

            def _observe(self):
                return {"is_init": np.array([1000 + self.t], np.float32)}

        with Collector(OwnMark, frames_per_batch=4) as collector:
            batch = collector.next()
            assert batch["is_init"].flatten().tolist() == [1000, 1001, 1002, 1003]
            assert batch["next", "is_init"].flatten().tolist() == [1001, 1002, 1003, 1004]


class OwnStepCount(Counter):
    """Observes a key that a collector with a limit would write, as a float of its own."""

    def __init__(self) -> None:
        super().__init__(None)
        self.observation_space = spaces.Dict({"step_count": spaces.Box(0, 1e6, (1,), np.float32)})

    def _observe(self):
        return {"step_count": np.array([1000 + self.t], np.float32)}


class TestResetAtEachIter:
    def test_every_batch_begins_with_new_episodes_without_done(self):
        envs = counters(None, None)
        with Collector(envs, frames_per_batch=6, total_frames=18, reset_at_each_iter=True) as collector:
            batches = list(checked(collector))
        for batch in batches:
            assert seen(batch) == [[0, 1, 2]] * 2
            assert flag(batch, "done") == [[0, 0, 0]] * 2
        lanes_and_ids = [(lane, i) for batch in batches for lane, row in enumerate(ids(batch)) for i in set(row)]
        assert len({i for _, i in lanes_and_ids}) == 6 == len(lanes_and_ids)

    def test_fresh_lanes_are_not_reset_again(self):
        """FAULTS 86: resets = episodes that began."""
        envs = counters(3, None)
        with Collector(envs, frames_per_batch=6, total_frames=18, reset_at_each_iter=True) as collector:
            list(checked(collector))
        assert [env.resets for env in envs] == [4, 3]

    def test_an_explicit_reset_is_not_repeated(self):
        env = Counter(None)
        with Collector(env, frames_per_batch=3, reset_at_each_iter=True) as collector:
            collector.next()
            collector.reset()
            collector.next()
        assert env.resets == 2

    def test_limits_count_from_the_reset(self):
        with Collector(
            Counter(None), frames_per_batch=3, total_frames=9, reset_at_each_iter=True, max_frames_per_traj=2
        ) as collector:
            for batch in checked(collector):
                assert seen(batch) == [0, 1, 0]


class TestSetTruncated:
    def test_it_ors_and_the_episode_goes_on_with_its_id(self):
        """FAULTS 2."""
        options = {"frames_per_batch": 8, "total_frames": 24}
        with Collector(counters(3, 5), set_truncated=True, **options) as collector:
            marked = list(checked(collector))
        with Collector(counters(3, 5), **options) as collector:
            plain = list(collector)
        for with_mark, without in zip(marked, plain, strict=True):
            assert ids(with_mark) == ids(without)
            assert seen(with_mark) == seen(without)
            assert flag(with_mark, "terminated") == flag(without, "terminated")
            expected = [[*row[:-1], 1] for row in flag(without, "done")]
            assert flag(with_mark, "done") == expected
            assert flag(with_mark, "truncated") == [[0, 0, 0, 1]] * 2
            assert not with_mark["done"].any()
        assert seen(joined(marked)) == [[t % 3 for t in range(12)], [t % 5 for t in range(12)]]

    def test_resets_statistics_and_counts_do_not_know_of_it(self):
        env = Counter(5)
        with Collector(env, frames_per_batch=3, total_frames=12, set_truncated=True, record="step_count") as collector:
            batch = joined(list(checked(collector)))
            assert collector.stats().episodes == 2
            assert collector.stats().episode_length.mean == 5
        assert env.resets == 3
        assert batch["step_count"].flatten().tolist() == [t % 5 for t in range(12)]

    def test_a_shorter_last_batch_has_it_on_its_last_frame(self):
        with Collector(Counter(None), frames_per_batch=4, total_frames=6, set_truncated=True) as collector:
            assert [flag(batch, "truncated") for batch in collector] == [[0, 0, 0, 1], [0, 1]]

    def test_an_interrupted_batch_has_it_on_its_last_frame(self):
        with Collector(Counter(None), frames_per_batch=8, set_truncated=True, interruptor=After(3)) as collector:
            assert flag(collector.next(), "truncated") == [0, 0, 1]


class After:
    """An interruptor that stops a rollout after so many steps."""

    def __init__(self, steps: int) -> None:
        self.steps, self.asked = steps, 0

    def start_collection(self) -> None:
        self.asked = 0

    def stop_collection(self) -> None:
        self.steps = 0

    def collection_stopped(self) -> bool:
        self.asked += 1
        return self.asked % self.steps == 0 if self.steps else True


class TestInterruptor:
    def test_batches_are_short_and_the_total_stays_exact(self):
        with Collector(Counter(5), frames_per_batch=8, total_frames=30, interruptor=After(3)) as collector:
            batches = list(checked(collector))
            assert collector.collected_frames == 30
            assert collector.exhausted
        assert [len(batch) for batch in batches] == [3] * 10
        assert seen(joined(batches)) == [t % 5 for t in range(30)]

    def test_with_lanes_limits_and_a_warm_up(self):
        envs = counters(4, None)
        with Collector(
            envs,
            zero,
            frames_per_batch=16,
            total_frames=44,
            interruptor=After(3),
            max_frames_per_traj=6,
            init_random_frames=9,
        ) as collector:
            batches = list(checked(collector))
        assert sum(batch.numel() for batch in batches) == 44 == sum(env.steps for env in envs)
        whole = joined(batches)
        assert seen(whole) == [[t % 4 for t in range(22)], [t % 6 for t in range(22)]]
        assert int((whole["collector", "policy_version"] == -1).sum()) == 9

    def test_random_actions_do_not_depend_on_where_it_stops(self):
        actions = []
        for interruptor in (None, After(3), After(7)):
            with Collector(Counter, frames_per_batch=50, total_frames=100, interruptor=interruptor) as collector:
                collector.set_seed(1)
                actions.append(joined(list(collector))["action"].tolist())
        assert actions[0] == actions[1] == actions[2]

    def test_one_that_is_stopped_gives_at_least_one_step(self):
        interruptor = After(5)
        interruptor.stop_collection()
        with Collector(Counter, frames_per_batch=8, total_frames=3, interruptor=interruptor) as collector:
            assert [len(batch) for batch in collector] == [1, 1, 1]

    def test_a_hook_in_the_environment_can_stop_it(self):
        interruptor = After(10**9)

        class Stopper(Counter):
            def step(self, action):
                if self.t == 2:
                    interruptor.stop_collection()
                return super().step(action)

        with Collector(Stopper, frames_per_batch=8, interruptor=interruptor) as collector:
            assert len(collector.next()) == 3


class TestOptionalKeys:
    def test_ids_can_be_left_out(self):
        with Collector(Counter(3), frames_per_batch=6, track_traj_ids=False) as collector:
            batch = collector.next()
            check_batch(batch)
            assert list(batch["collector"].keys()) == ["policy_version"]
            assert collector.stats().episodes == 2

    @pytest.mark.parametrize("record", [("is_init", "worker", "step_count"), ["is_init", "worker", "step_count"]])
    def test_all_that_can_be_recorded(self, record):
        with Collector(counters(2, 3), frames_per_batch=8, total_frames=16, record=record) as collector:
            batch = joined(list(checked(collector)))
        steps = torch.tensor([[t % 2 for t in range(8)], [t % 3 for t in range(8)]])
        assert torch.equal(batch["step_count"], steps[..., None])
        assert torch.equal(batch["next", "step_count"], steps[..., None] + 1)
        assert torch.equal(batch["is_init"], steps[..., None] == 0)
        assert batch["is_init"].dtype is torch.bool
        assert torch.equal(batch["collector", "worker"], torch.zeros(2, 8, dtype=torch.int64))

    def test_one_name_is_one_key(self):
        with Collector(Counter(3), frames_per_batch=6, record="is_init") as collector:
            assert collector.next()["is_init"].flatten().tolist() == [True, False, False] * 2

    def test_nothing_more_is_there_than_was_asked_for(self):
        with Collector(Counter(3), frames_per_batch=6) as collector:
            keys = set(collector.next().keys(include_nested=True, leaves_only=True))
        flags = {"done", "terminated", "truncated"}
        after_step = {("next", name) for name in flags | {"observation", "reward"}}
        assert keys == {"observation", "action", *flags, *after_step} | {
            ("collector", name) for name in ("traj_ids", "policy_version")
        }


class TestPostproc:
    def test_it_runs_once_a_batch(self):
        """FAULTS 72."""

        def add_one(batch):
            batch["count"] = batch.get("count", torch.zeros(batch.batch_size)) + 1
            return batch

        with Collector(Counter, frames_per_batch=4, total_frames=10, postproc=add_one) as collector:
            for batch in collector:
                assert (batch["count"] == 1).all()

    def test_modules_are_moved_once_to_where_batches_are_stored(self):
        class Counting(torch.nn.BatchNorm1d):
            moves = 0

            def to(self, *args, **kwargs):
                self.moves += 1
                return super().to(*args, **kwargs)

            def forward(self, batch):
                assert batch.device == self.running_mean.device
                return batch

        module, other = Counting(1), Counting(1)
        with Collector(Counter, frames_per_batch=4, storing_device="meta", postproc=[module, len]) as collector:
            assert [collector.next(), collector.next()] == [4, 4]
        assert (module.running_mean.device.type, module.moves) == ("meta", 1)
        with Collector(Counter, frames_per_batch=4, postproc=lambda batch: other(batch.to("cpu"))) as collector:
            assert collector.next() is not None
            assert other.moves == 0

    def test_several_run_in_order_after_split_trajs(self):
        shapes = []

        def look(batch):
            shapes.append(list(batch.batch_size))
            return batch

        with Collector(
            Counter(2), frames_per_batch=5, split_trajs=True, postproc=[look, lambda batch: batch["observation"], len]
        ) as collector:
            assert collector.next() == 3
        assert shapes == [[3, 2]]

    @pytest.mark.parametrize("postproc", [None, [], ()])
    def test_none_at_all(self, postproc):
        with Collector(Counter(2), frames_per_batch=5, postproc=postproc) as collector:
            check_batch(collector.next())

    def test_frames_are_counted_before_it(self):
        with Collector(
            Counter, frames_per_batch=4, total_frames=8, postproc=lambda batch: torch.cat([batch, batch])
        ) as collector:
            assert [len(batch) for batch in collector] == [8, 8]
            assert collector.collected_frames == 8

    def test_one_that_returns_nothing_does_not_end_the_loop_in_silence(self):
        """`next()` gives None when the frames are exhausted: nobody would see that it stopped after one batch."""

        def forgot_to_return(batch):
            batch["x"] = batch["observation"] + 1

        with (
            Collector(Counter, frames_per_batch=4, total_frames=8, postproc=forgot_to_return) as collector,
            pytest.raises((TypeError, ValueError), match="postproc"),
        ):
            list(collector)


class TestSplitTrajs:
    def test_pieces_of_episodes_come_padded(self):
        """FAULTS 21: raw batches of 40 cut episodes of 50; the ids tell which pieces belong together."""
        with Collector(Counter(50), frames_per_batch=40, total_frames=120, split_trajs=True) as collector:
            batches = list(collector)
            assert collector.collected_frames == 120
        lengths = [batch["collector", "mask"].sum(1).tolist() for batch in batches]
        assert lengths == [[40], [10, 30], [20, 20]]
        whole = {}
        for batch in batches:
            for row, mask in zip(ids(batch), batch["collector", "mask"].tolist(), strict=True):
                whole[row[0]] = whole.get(row[0], 0) + sum(mask)
        assert list(whole.values()) == [50, 50, 20]
        assert batches[1].names == [None, "time"]

    def test_padding_is_zero_and_frames_are_all_there(self):
        with Collector(counters(2, 3), frames_per_batch=12, split_trajs=True) as collector:
            batch = collector.next()
        mask = batch["collector", "mask"]
        assert int(mask.sum()) == 12
        assert batch["next", "observation"][mask].flatten().tolist() == [1, 2, 1, 2, 1, 2, 1, 2, 3, 1, 2, 3]
        assert (batch["next", "observation"][~mask] == 0).all()


class TestResets:
    """FAULTS 86: resets = episodes that began + calls of reset and set_seed."""

    def test_construction_resets_once_and_the_first_batch_does_not(self):
        env = Counter(4)
        with Collector(env, frames_per_batch=3) as collector:
            assert env.resets == 1
            collector.next()
            assert env.resets == 1
            collector.next()
            assert env.resets == 2

    def test_a_call_of_reset_is_one_more(self):
        envs = counters(None, None)
        with Collector(envs, frames_per_batch=2) as collector:
            collector.reset()
            assert [env.resets for env in envs] == [2, 2]
            collector.reset(1)
            collector.next()
            assert [env.resets for env in envs] == [2, 3]

    def test_set_seed_resets_nothing_until_the_next_batch(self):
        """FAULTS 103."""
        envs = counters(None, None)
        with Collector(envs, frames_per_batch=2) as collector:
            collector.next()
            collector.set_seed(5)
            collector.set_seed(6)
            assert [env.resets for env in envs] == [1, 1]
            collector.next()
            assert [env.resets for env in envs] == [2, 2]
            collector.next()
            assert [env.resets for env in envs] == [2, 2]

    def test_a_reset_uses_the_pending_seed_and_is_not_repeated(self):
        envs = counters(None, None)
        with Collector(envs, frames_per_batch=2) as collector:
            collector.set_seed([11, 22])
            collector.reset(1)
            assert [env.seeds for env in envs] == [[], [22]]
            collector.next()
            assert [env.seeds for env in envs] == [[11], [22]]
            assert [env.resets for env in envs] == [2, 2]

    def test_a_transform_is_called_once_a_step_and_once_a_reset(self):
        """FAULTS 14, 15: also for the last observation of an episode, which it reaches too."""
        calls = []

        def add_100(observation):
            calls.append(1)
            return observation + 100

        env = Counter(3)
        wrapped = gym.wrappers.TransformObservation(env, add_100, env.observation_space)
        with Collector(wrapped, frames_per_batch=5, total_frames=10) as collector:
            batch = joined(list(checked(collector)))
        assert len(calls) == env.steps + env.resets == 10 + 4
        assert seen(batch) == [100 + t % 3 for t in range(10)]
        assert after(batch) == [101 + t % 3 for t in range(10)]

    @pytest.mark.parametrize("lengths", [(1, 1, 1), (2, 3, 5), (4, 4, 4), (1, 7, 2)])
    def test_all_together_and_at_different_times(self, lengths):
        """FAULTS 5."""
        envs = [Tagged(lane, length) for lane, length in enumerate(lengths)]
        with Collector(envs, frames_per_batch=9, total_frames=36) as collector:
            batch = joined(list(checked(collector)))
        for lane, length in enumerate(lengths):
            expected = [[lane, t // length, t % length] for t in range(12)]
            assert batch["observation"][lane].tolist() == expected
            assert batch["next", "observation"][lane].tolist() == [[a, b, c + 1] for a, b, c in expected]
            assert envs[lane].resets == 1 + 12 // length


class TestCountsOfTheCollector:
    def test_collected_frames_grow_batch_by_batch(self):
        with Collector(Counter, num_envs=2, frames_per_batch=4, total_frames=10) as collector:
            assert [collector.collected_frames for _ in collector] == [4, 8, 10]

    def test_it_says_what_it_is(self):
        with Collector(Counter, num_envs=2, frames_per_batch=4, total_frames=10) as collector:
            collector.next()
            for part in ("num_envs=2", "frames_per_batch=4", "total_frames=10", "collected_frames=4", "open"):
                assert part in repr(collector)
        assert "closed" in repr(collector)

    def test_versions_stand_on_the_frames_they_computed(self):
        with Collector(Counter, zero, frames_per_batch=2, total_frames=8) as collector:
            versions = []
            for batch in checked(collector):
                versions += batch["collector", "policy_version"].tolist()
                collector.update_policy_weights_()
            assert versions == [0, 0, 1, 1, 2, 2, 3, 3]
            assert collector.policy_version == 4 == collector.stats().policy_version


class TestProbeInterface:
    def test_a_probe_of_ones_own_works(self):
        class Mine(Probe):
            def __init__(self):
                super().__init__(2)
                self.observation_space, self.action_space = spaces.Discrete(3), spaces.Discrete(2)

            def _observe(self):
                return np.int64(self.t)

        with Collector(functools.partial(Mine), frames_per_batch=4) as collector:
            assert collector.next()["observation"].tolist() == [0, 1, 0, 1]

    def test_option_errors_are_value_errors(self):
        assert issubclass(OptionError, ValueError)
