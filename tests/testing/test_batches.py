"""`check_batch` passes what is right and names the very frame that is not.

Good batches come from a plain loop over probe environments, the way a reader would write it; each test then breaks
one thing at a known lane and time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorData, TensorDict, lazy_stack

from rlcollect.errors import InvalidBatchError
from rlcollect.testing import Counter, Tagged, check_batch

N, T = 4, 23
IDS = ("collector", "traj_ids")
VERSION = ("collector", "policy_version")
MASK = ("collector", "mask")


def observed(observation):
    """An observation as what goes into a TensorDict."""
    if isinstance(observation, dict):
        return {
            key: observed(part) if isinstance(part, dict) else torch.tensor(part) for key, part in observation.items()
        }
    return {"observation": torch.tensor(observation)}


def flags(terminated, truncated):
    flag = {"done": terminated or truncated, "terminated": terminated, "truncated": truncated}
    return {key: torch.tensor([value]) for key, value in flag.items()}


@dataclass
class Lane:
    """Steps one environment, frame by frame: the plain loop."""

    env: object
    number: int
    versions: list[int] = field(default_factory=lambda: [0])
    episodes: int = 0
    frames: int = 0
    count: int = 0
    observation: object = None

    def begin(self):
        self.observation, _ = self.env.reset(seed=None if self.episodes else self.number)
        self.episodes, self.count = self.episodes + 1, 0

    def frame(self):
        if self.observation is None:
            self.begin()
        action = self.frames % 2
        following, reward, terminated, truncated, info = self.env.step(action)
        row = {
            **observed(self.observation),
            **flags(terminated=False, truncated=False),
            "action": torch.tensor(action),
            "step_count": torch.tensor([self.count]),
            "is_init": torch.tensor([self.count == 0]),
            "next": {
                **observed(following),
                **flags(terminated, truncated),
                "reward": torch.tensor([reward]),
                "step_count": torch.tensor([self.count + 1]),
                "info": {"t": torch.tensor(info["t"])},
            },
            "collector": {
                "traj_ids": torch.tensor((self.number << 40) + self.episodes),
                "policy_version": torch.tensor(self.versions[min(self.frames // 5, len(self.versions) - 1)]),
            },
        }
        self.frames, self.count, self.observation = self.frames + 1, self.count + 1, following
        if terminated or truncated:
            self.begin()
        return TensorDict(row)


def make_lanes(lanes=N, **options):
    options = {"length": 5, "random_length": True, **options}
    return [Lane(Tagged(worker=lane, **options), lane) for lane in range(lanes)]


def collect(lanes, time=T):
    batch = torch.stack([torch.stack([lane.frame() for _ in range(time)]) for lane in lanes])
    batch.names = [None, "time"]
    return batch


def good(time=T, **options):
    return collect(make_lanes(**options), time)


def fixed(time=T, length=5, lanes=N, **options):
    """Lanes whose episodes all have `length` steps: t = 5 begins the second episode of each."""
    return collect([Lane(Counter(length, **options), lane) for lane in range(lanes)], time)


def two(time=T, **options):
    """Two neighbouring batches."""
    lanes = make_lanes(**options)
    return collect(lanes, time), collect(lanes, time)


def cut(lanes, lane):
    """What a restart does: the episode of one lane is given up, and another begins."""
    lanes[lane].begin()


def soft(batch, lane=slice(None), time=-1):
    """Marks a frame as softly truncated."""
    batch["next", "truncated"][lane, time] = True
    batch["next", "done"][lane, time] = True
    return batch


def refuses(batch, text, previous=None):
    with pytest.raises(InvalidBatchError) as caught:
        check_batch(batch, previous=previous)
    assert text in str(caught.value)


class TestGoodBatches:
    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_lanes_that_end_at_different_times(self, end):
        first, second = two(end=end)
        check_batch(first)
        check_batch(second, previous=first)

    @pytest.mark.parametrize("observation", ["box", "scalar", "discrete", "dict"])
    def test_forms_of_observations(self, observation):
        check_batch(fixed(observation=observation))

    def test_a_single_environment(self):
        check_batch(good()[0])

    def test_stacked_workers(self):
        lanes = make_lanes(6)
        first, second = (collect(lanes).reshape(2, 3, T) for _ in range(2))
        check_batch(first)
        check_batch(second, previous=first)

    def test_lazy_stacks(self):
        lanes = make_lanes(4)
        batch = collect(lanes)
        check_batch(lazy_stack([batch[:2], batch[2:]], 0))

    def test_a_policy_that_is_updated_and_random_at_first(self):
        lanes = make_lanes()
        for lane in lanes:
            lane.versions = [-1, 0, -1, 0, 3, -1, 3, 8]
        first, second = collect(lanes), collect(lanes)
        check_batch(first)
        check_batch(second, previous=first)

    def test_optional_keys_may_be_missing(self):
        check_batch(good().exclude("collector", "step_count", "is_init", ("next", "step_count"), ("next", "info")))

    def test_keys_of_no_concern_may_be_there(self):
        batch = good()
        batch["log_prob"] = torch.full((N, T), torch.nan)
        batch["next", "only_after"] = torch.rand(N, T)
        batch["note"] = NonTensorData("hello", batch_size=[N, T])
        check_batch(batch)

    def test_info_may_repeat_a_key_without_being_an_observation(self):
        batch = good()
        batch["info"] = {"t": torch.zeros(N, T, dtype=torch.int64)}
        check_batch(batch)

    def test_one_frame(self):
        check_batch(good(time=1))

    def test_no_frame(self):
        check_batch(good()[:, :0])

    def test_batches_of_different_lengths(self):
        lanes = make_lanes()
        first = collect(lanes, 7)
        check_batch(collect(lanes, 3), previous=first)

    def test_observations_that_are_nan_or_complex(self):
        batch = good()
        for key in ("odd", ("next", "odd")):
            batch[key] = torch.full((N, T, 2), complex(0, torch.nan))
        check_batch(batch)

    def test_observations_without_elements(self):
        batch = good()
        batch["empty"] = batch["next", "empty"] = torch.zeros(N, T, 0)
        check_batch(batch)

    @settings(max_examples=25, deadline=None)
    @given(lanes=st.integers(1, 4), length=st.integers(1, 6), times=st.lists(st.integers(1, 9), min_size=1, max_size=4))
    def test_any_lanes_in_any_pieces(self, lanes, length, times):
        made, previous = make_lanes(lanes, length=length), None
        for time in times:
            batch = collect(made, time)
            check_batch(batch, previous=previous)
            previous = batch

    def test_the_batch_is_left_as_it_was(self):
        first, second = two()
        kept = first.clone(), second.clone()
        check_batch(second, previous=first)
        assert (first == kept[0]).all()
        assert (second == kept[1]).all()


class TestForm:
    def test_not_a_tensordict(self):
        refuses(None, "expected a TensorDict, got None")

    def test_no_batch_dimensions(self):
        refuses(TensorDict({"done": torch.zeros(1)}), "expected batch dimensions [T], [N, T] or [B, N, T], got none")

    def test_time_is_not_last(self):
        refuses(
            good().transpose(0, 1), "expected 'time' as the last batch dimension, got dimensions named ['time', None]"
        )

    @pytest.mark.parametrize(
        "key",
        [
            "done",
            "terminated",
            "truncated",
            "action",
            "next",
            ("next", "reward"),
            ("next", "done"),
            ("next", "terminated"),
            ("next", "truncated"),
        ],
    )
    def test_a_required_key_is_missing(self, key):
        first = ("next", "done") if key == "next" else key
        refuses(good().exclude(key), f"expected a key {first!r}, found only ")

    @pytest.mark.parametrize("key", ["step_count", ("next", "step_count")])
    def test_half_of_the_step_count_is_missing(self, key):
        refuses(good().exclude(key), f"expected a key {key!r}, found only ")

    def test_no_observation(self):
        refuses(good().exclude("observation"), "expected an observation")

    @pytest.mark.parametrize(
        "key", ["done", ("next", "truncated"), ("next", "reward"), "is_init", "step_count", ("next", "step_count")]
    )
    def test_a_column_without_its_last_dimension(self, key):
        batch = good()
        batch[key] = batch[key].squeeze(-1)
        refuses(batch, f"{key!r}: expected shape [4, 23, 1], got [4, 23]")

    @pytest.mark.parametrize("key", [IDS, VERSION])
    def test_a_number_with_a_last_dimension(self, key):
        batch = good()
        batch[key] = batch[key].unsqueeze(-1)
        refuses(batch, f"{key!r}: expected shape [4, 23], got [4, 23, 1]")

    @pytest.mark.parametrize(
        ("key", "dtype", "expected"),
        [
            ("terminated", torch.uint8, "torch.bool"),
            (("next", "done"), torch.float32, "torch.bool"),
            (("next", "reward"), torch.float64, "torch.float32"),
            (("next", "step_count"), torch.int32, "torch.int64"),
            (IDS, torch.int32, "torch.int64"),
            (VERSION, torch.float32, "torch.int64"),
        ],
    )
    def test_a_wrong_dtype(self, key, dtype, expected):
        batch = good()
        batch[key] = batch[key].to(dtype)
        refuses(batch, f"{key!r}: expected {expected}, got {dtype}")

    def test_a_mask_of_another_dtype(self):
        batch = good()
        batch[MASK] = torch.ones(N, T)
        refuses(batch, f"{MASK!r}: expected torch.bool, got torch.float32")

    def test_a_flag_that_is_no_tensor(self):
        batch = good()
        batch["done"] = TensorDict({"yes": torch.zeros(N, T)}, [N, T])
        refuses(batch, "'done': expected a tensor, got a TensorDict")

    def test_observations_of_two_forms(self):
        batch = good()
        batch["next", "observation"] = batch["next", "observation"].double()
        refuses(batch, "('next', 'observation'): expected torch.float32, got torch.float64")
        batch["next", "observation"] = torch.zeros(N, T, 2)
        refuses(batch, "('next', 'observation'): expected shape [4, 23, 3], got [4, 23, 2]")


class TestFlags:
    @pytest.mark.parametrize("value", [True, False])
    def test_done_is_not_the_sum_of_the_others(self, value):
        batch = fixed()
        time = 2 if value else 4
        batch["next", "done"][1, time] = value
        refuses(batch, f"lane 1, t = {time}: ('next', 'done') is {value}, expected {not value}: ")

    def test_done_before_the_step_is_not_the_sum_of_the_others(self):
        batch = good()
        batch["truncated"][2, 9] = True
        refuses(batch, "lane 2, t = 9: 'done' is False, expected True: done = terminated | truncated")

    @pytest.mark.parametrize("flag", ["terminated", "truncated"])
    def test_a_step_from_a_finished_episode(self, flag):
        batch = good()
        batch["done"][2, 9] = batch[flag][2, 9] = True
        refuses(batch, "lane 2, t = 9: 'done' is True, expected False: no step is taken from a finished episode")


class TestObservations:
    def test_a_reset_observation_in_place_of_the_last_one(self):
        """The classic fault: `next` holds the first observation of the following episode, and done got lost."""
        batch = fixed()
        batch["next", "done"][3, 4] = batch["next", "terminated"][3, 4] = False
        batch[IDS][3] = batch[IDS][3, 0]
        refuses(
            batch.exclude("step_count", ("next", "step_count"), "is_init"),
            "lane 3, t = 5: 'observation' is [0.0], expected [5.0]: what ('next', 'observation') holds at t = 4, "
            "of the same episode",
        )

    def test_a_frame_that_was_dropped(self):
        batch = fixed()
        refuses(torch.cat([batch[:, :7], batch[:, 8:]], 1), "lane 0, t = 7: 'observation' is [3.0], expected [2.0]")

    def test_a_frame_of_another_lane(self):
        batch = good(length=50, random_length=False)
        batch["observation"][2, 11] = batch["observation"][1, 11]
        refuses(batch, "lane 2, t = 11: 'observation' is [1.0, 0.0, 11.0], expected [2.0, 0.0, 11.0]")

    def test_a_next_observation_that_was_changed_is_put_down_to_the_frame_after(self):
        batch = fixed()
        batch["next", "observation"][1, 2] = 77
        refuses(batch, "lane 1, t = 3: 'observation' is [3.0], expected [77.0]")

    def test_the_last_observation_of_an_episode_is_free(self):
        batch = fixed()
        batch["next", "observation"][1, 4] = 77
        check_batch(batch)

    def test_nested_keys(self):
        batch = fixed(observation="dict")
        batch["nested", "grid"][1, 3, 1, 2] = -1
        refuses(batch, "lane 1, t = 3: ('nested', 'grid') is [[3, 3, 3], [3, 3, -1]], expected [[3, 3, 3], [3, 3, 3]]")

    def test_of_a_large_one_the_first_difference_is_shown(self):
        batch = fixed()
        for key in ("image", ("next", "image")):
            batch[key] = torch.zeros(N, T, 8, 8, 3, dtype=torch.uint8)
        batch["image"][2, 8, 4, 5, 1] = 9
        refuses(batch, "lane 2, t = 8: 'image' at [4, 5, 1] is 9, expected 0: what ('next', 'image') holds at t = 7")

    def test_a_sign_of_zero_counts(self):
        batch = fixed()
        batch["observation"][0, 6] = batch["next", "observation"][0, 5] = 0.0
        batch["observation"][0, 6] = -0.0
        refuses(batch, "lane 0, t = 6: 'observation' is [-0.0], expected [0.0]")

    def test_nan_is_not_a_number(self):
        batch = fixed()
        batch["observation"][0, 6] = torch.nan
        refuses(batch, "lane 0, t = 6: 'observation' is [nan], expected [1.0]")

    def test_one_nan_is_as_good_as_another(self):
        batch = fixed()
        batch["observation"][0, 6] = torch.nan
        batch["next", "observation"][0, 5] = torch.tensor([0x7FC00123], dtype=torch.int32).view(torch.float32)
        check_batch(batch)

    def test_nans_are_no_difference_to_show(self):
        batch = fixed()
        for key in ("wide", ("next", "wide")):
            batch[key] = torch.full((N, T, 9), torch.nan)
        batch["wide"][2, 8, 4] = 0
        refuses(batch, "lane 2, t = 8: 'wide' at [4] is 0.0, expected nan: ")

    @pytest.mark.parametrize(
        "dtype", [torch.float64, torch.bfloat16, torch.complex64, torch.int32, torch.bool, torch.uint8]
    )
    def test_dtypes(self, dtype):
        batch = fixed()
        for key in ("odd", ("next", "odd")):
            batch[key] = torch.zeros(N, T, 2, 6, dtype=dtype)
        check_batch(batch)
        batch["odd"][3, 2, 1, 4] = 1
        refuses(batch, "lane 3, t = 2: 'odd' at [1, 4] is ")


class TestTrajectoryIds:
    def test_a_cut_is_legal(self):
        lanes = make_lanes(length=50, random_length=False)
        first = collect(lanes, 7)
        cut(lanes, 2)
        second = collect(lanes, 7)
        check_batch(torch.cat([first, second], 1))
        check_batch(second, previous=first)

    def test_an_id_that_outlives_its_episode(self):
        batch = fixed()
        batch[IDS][2, 5:] = batch[IDS][2, 4]
        refuses(
            batch, f"lane 2, t = 5: {IDS!r} is {(2 << 40) + 1}, expected a new id: ('next', 'done') is True at t = 4"
        )

    def test_a_soft_truncation_in_the_middle(self):
        batch = soft(good(length=50, random_length=False), lane=1, time=8)
        refuses(batch, "lane 1, t = 9: ('collector', 'traj_ids') is")

    def test_an_id_that_comes_back(self):
        batch = fixed()
        batch[IDS][2, 10:15] = batch[IDS][2, 0]
        refuses(
            batch,
            f"lane 2, t = 10: {IDS!r} is {(2 << 40) + 1}, expected an id not seen before: "
            "this lane has left that id before",
        )

    def test_an_id_in_two_lanes(self):
        batch = fixed()
        batch[IDS][3, 10:15] = batch[IDS][1, 0]
        refuses(
            batch, "lane 3, t = 10: ('collector', 'traj_ids') is 1099511627777, expected an id not seen before: that id"
        )

    def test_ids_that_start_alike_in_every_lane(self):
        batch = fixed()
        batch[IDS][:] = batch[IDS][:1].clone()
        refuses(batch, "lane 1, t = 0: ('collector', 'traj_ids') is 1, expected an id not seen before")

    def test_an_id_of_the_batch_before_comes_back(self):
        lanes = [Lane(Counter(5), lane) for lane in range(2)]
        first, second = collect(lanes, 20), collect(lanes, 20)
        second[IDS][1, 5:10] = first[IDS][1, 0]
        check_batch(second)
        refuses(second, "lane 1, t = 5: ('collector', 'traj_ids') is", previous=first)

    def test_without_ids_done_separates(self):
        check_batch(good().exclude("collector"))

    def test_without_ids_a_change_needs_done(self):
        lanes = make_lanes(length=50, random_length=False)
        first = collect(lanes, 7)
        cut(lanes, 2)
        batch = torch.cat([first, collect(lanes, 7)], 1).exclude(
            "collector", "step_count", ("next", "step_count"), "is_init"
        )
        refuses(batch, "lane 2, t = 7: 'observation' is [2.0, 1.0, 0.0], expected [2.0, 0.0, 7.0]")


class TestBorder:
    def test_a_frame_lost_between_two_batches(self):
        lanes = [Lane(Counter(None), lane) for lane in range(2)]
        first = collect(lanes, 8)
        lanes[1].frame()
        second = collect(lanes, 8)
        check_batch(second)
        refuses(
            second,
            "lane 1, t = 0: 'observation' is [9.0], expected [8.0]: what ('next', 'observation') holds at t = 7 of the "
            "batch before, of the same episode",
            previous=first,
        )

    def test_a_soft_truncation_at_the_end_of_the_batch_before(self):
        first, second = two(length=50, random_length=False)
        check_batch(soft(first))
        check_batch(second, previous=first)

    def test_a_real_truncation_looks_the_same_there(self):
        lanes = [Lane(Counter(8, end="truncated"), lane) for lane in range(2)]
        first, second = collect(lanes, 8), collect(lanes, 8)
        check_batch(second, previous=first)

    def test_after_a_soft_truncation_the_episode_goes_on(self):
        first, second = two(length=50, random_length=False)
        second["observation"][2, 0] = 0
        refuses(
            second, "lane 2, t = 0: 'observation' is [0.0, 0.0, 0.0], expected [2.0, 0.0, 23.0]", previous=soft(first)
        )

    def test_a_termination_is_never_soft(self):
        first, second = two(length=50, random_length=False)
        soft(first)["next", "terminated"][2, -1] = True
        refuses(second, "lane 2, t = 0: ('collector', 'traj_ids') is", previous=first)

    def test_without_ids_a_soft_truncation_and_a_new_episode_are_both_legal(self):
        first, second = (batch.exclude("collector") for batch in two(length=50, random_length=False))
        check_batch(second, previous=soft(first))
        lanes = [Lane(Counter(8, end="truncated"), lane) for lane in range(2)]
        first, second = (collect(lanes, 8).exclude("collector") for _ in range(2))
        check_batch(second, previous=first)

    def test_without_ids_step_counts_tell_which(self):
        first, second = (batch.exclude("collector") for batch in two(length=50, random_length=False))
        second["step_count"] += 1
        second["next", "step_count"] += 1
        refuses(second, "lane 0, t = 0: 'step_count' is 24, expected 0, or what", previous=soft(first))

    def test_faults_of_the_batch_before_are_not_reported_again(self):
        first, second = two()
        first["observation"][1, 3] = 77
        check_batch(second, previous=first)

    @pytest.mark.parametrize("which", [0, 1])
    def test_mask_may_be_in_one_of_the_two(self, which):
        batches = two()
        batches[which][MASK] = torch.ones(N, T, dtype=torch.bool)
        check_batch(batches[1], previous=batches[0])

    def test_other_keys_must_be_in_both(self):
        first, second = two()
        refuses(second.exclude("is_init"), "'is_init' is only in previous", previous=first)
        refuses(second, "'is_init' is only in the batch", previous=first.exclude("is_init"))

    def test_lanes_must_agree(self):
        first, second = two()
        refuses(second, "previous: expected the lanes of the batch, [4], got [3]", previous=first[:3])

    def test_observations_must_have_one_form(self):
        first, second = two()
        first["observation"], first["next", "observation"] = torch.zeros(N, T, 2), torch.zeros(N, T, 2)
        refuses(second, "'observation': expected shape [4, 23, 2], got [4, 23, 3]", previous=first)


class TestStepCount:
    def test_it_does_not_count_up(self):
        batch = fixed()
        batch["next", "step_count"][2, 8] = 3
        refuses(batch, "lane 2, t = 8: ('next', 'step_count') is 3, expected 4: one more than 'step_count'")

    def test_it_does_not_go_on(self):
        batch = fixed()
        batch["step_count"][2, 8] += 1
        batch["next", "step_count"][2, 8] += 1
        refuses(batch, "lane 2, t = 8: 'step_count' is 4, expected 3: what ('next', 'step_count') holds at t = 7")

    def test_it_is_not_reset_after_done(self):
        batch = fixed()
        batch["step_count"][2, 5:] += 5
        batch["next", "step_count"][2, 5:] += 5
        refuses(batch, "lane 2, t = 5: 'step_count' is 5, expected 0: an episode begins here")

    def test_it_is_not_reset_after_a_cut(self):
        lanes = make_lanes(length=50, random_length=False)
        first = collect(lanes, 7)
        cut(lanes, 2)
        lanes[2].count = 7
        batch = torch.cat([first, collect(lanes, 7)], 1)
        refuses(batch, "lane 2, t = 7: 'step_count' is 7, expected 0: an episode begins here")

    def test_it_is_negative(self):
        batch = fixed(time=3)
        batch["step_count"][1] -= 1
        batch["next", "step_count"][1] -= 1
        refuses(batch, "lane 1, t = 0: 'step_count' is -1, expected 0 or more")

    def test_it_goes_on_across_the_border(self):
        first, second = two(length=50, random_length=False)
        second["step_count"] -= 23
        second["next", "step_count"] -= 23
        check_batch(second.exclude("is_init"))
        refuses(second, "lane 0, t = 0: 'step_count' is 0, expected 23", previous=first)


class TestIsInit:
    @pytest.mark.parametrize(("time", "value"), [(5, False), (7, True), (0, False), (22, True)])
    def test_it_is_wrong(self, time, value):
        batch = fixed()
        batch["is_init"][2, time] = value
        refuses(batch, f"lane 2, t = {time}: 'is_init' is {value}, expected {not value}: ")

    @pytest.mark.parametrize("value", [False, True])
    def test_nothing_tells_about_the_first_frame(self, value):
        batch = fixed().exclude("step_count", ("next", "step_count"))
        batch["is_init"][2, 0] = value
        check_batch(batch)

    def test_the_batch_before_tells(self):
        first, second = (
            batch.exclude("step_count", ("next", "step_count")) for batch in two(length=50, random_length=False)
        )
        check_batch(second, previous=soft(first))
        second["is_init"][1, 0] = True
        refuses(second, "lane 1, t = 0: 'is_init' is True, expected False", previous=first)

    def test_it_is_not_set_after_a_cut(self):
        lanes = make_lanes(length=50, random_length=False)
        first = collect(lanes, 7)
        cut(lanes, 2)
        batch = torch.cat([first, collect(lanes, 7)], 1)
        check_batch(batch)
        batch["is_init"][2, 7] = False
        refuses(batch, "lane 2, t = 7: 'is_init' is False, expected True")

    def test_without_ids(self):
        batch = fixed().exclude("collector")
        batch["is_init"][2, 5] = False
        refuses(batch, "lane 2, t = 5: 'is_init' is False, expected True")


class TestPolicyVersion:
    def test_it_goes_back(self):
        batch = good()
        batch[VERSION][:, 10:] = 4
        batch[VERSION][1, 17] = 3
        refuses(batch, "lane 1, t = 17: ('collector', 'policy_version') is 3, expected 4: or a newer one")

    def test_it_goes_back_behind_random_actions(self):
        batch = good()
        batch[VERSION][1, :10] = 4
        batch[VERSION][1, 10:12] = -1
        refuses(batch, "lane 1, t = 12: ('collector', 'policy_version') is 0, expected 4")

    def test_it_is_below_minus_one(self):
        batch = good()
        batch[VERSION][1, 6] = -2
        refuses(batch, "lane 1, t = 6: ('collector', 'policy_version') is -2, expected -1 or more")

    def test_lanes_may_differ(self):
        batch = good()
        batch[VERSION][1] = 9
        check_batch(batch)

    def test_it_goes_back_across_the_border(self):
        first, second = two()
        first[VERSION][3] = 1
        refuses(second, "lane 3, t = 0: ('collector', 'policy_version') is 0, expected 1", previous=first)


class TestMask:
    def masked(self, valid, seed=0):
        """Two batches of an endless Counter, with rubbish in every row of the first that is not valid."""
        lanes = [Lane(Counter(None), lane, versions=[50]) for lane in range(N)]
        draw = torch.Generator().manual_seed(seed)
        first = torch.stack([self.rows(lane, valid[lane.number], draw) for lane in lanes])
        return first, collect(lanes, 5)

    def rows(self, lane, valid, draw):
        def drawn(leaf):
            return torch.randint(-99, 99, leaf.shape, generator=draw).clamp(min=0 if leaf.dtype == torch.bool else -99)

        example = Lane(Counter(), 0).frame()
        rubbish = [example.apply(lambda leaf: drawn(leaf).to(leaf.dtype)) for _ in valid]
        rows = torch.stack([lane.frame() if is_valid else row for is_valid, row in zip(valid, rubbish, strict=True)])
        rows[MASK] = torch.tensor(valid)
        return rows

    @pytest.mark.parametrize("seed", range(5))
    def test_invalid_rows_are_ignored_wherever_they_stand(self, seed):
        valid = np.random.default_rng(seed).random((N, 12)) < 0.6
        valid[2] = seed % 2
        first, second = self.masked(valid.tolist(), seed)
        check_batch(first)
        check_batch(second, previous=first)

    def test_without_the_mask_they_are_not(self):
        first, _ = self.masked([[True] * 5 + [False] * 3] * N)
        refuses(first.exclude(MASK), "lane 0, t = 5: ")

    def test_valid_rows_are_checked_across_a_gap(self):
        first, _ = self.masked([[True, True, False, False, True, True]] * N)
        first["observation"][1, 4] = 5
        refuses(
            first, "lane 1, t = 4: 'observation' is [5.0], expected [2.0]: what ('next', 'observation') holds at t = 1,"
        )

    def test_the_border_is_between_valid_rows(self):
        first, second = self.masked([[True] * 4 + [False] * 2] * N)
        second["observation"][1, 0] = 5
        refuses(
            second, "expected [4.0]: what ('next', 'observation') holds at t = 3 of the batch before", previous=first
        )

    def test_a_soft_truncation_stands_on_the_last_valid_row(self):
        first, second = self.masked([[True] * 4 + [False] * 2] * N)
        soft(first, time=3)
        check_batch(first)
        check_batch(second, previous=first)


class TestReport:
    def test_the_earliest_frame_comes_first_whatever_is_wrong_there(self):
        batch = fixed()
        batch["next", "done"][0, 9] = False
        batch[VERSION][2, 8] = -5
        batch["observation"][3, 8] = 99
        refuses(batch, "lane 2, t = 8: ('collector', 'policy_version')")

    def test_workers_are_named_with_their_lanes(self):
        batch = collect(make_lanes(6, length=50, random_length=False)).reshape(2, 3, T)
        batch["observation"][1, 2, 17] = -1
        refuses(batch, "worker 1, lane 2, t = 17: 'observation' is")

    def test_a_single_environment_is_lane_0(self):
        batch = good(length=50, random_length=False)[1]
        batch["observation"][17] = -1
        refuses(batch, "lane 0, t = 17: 'observation' is")

    def test_the_error_is_an_assertion(self):
        with pytest.raises(AssertionError):
            check_batch(good().exclude("action"))

    @settings(max_examples=40, deadline=None)
    @given(lane=st.integers(0, N - 1), time=st.integers(1, T - 1), seed=st.integers(0, 3))
    def test_any_observation_that_is_changed_is_named(self, lane, time, seed):
        batch = collect([Lane(Tagged(number, 50), number) for number in range(N)])
        batch["observation"][lane, time, seed % 3] += 1
        refuses(batch, f"lane {lane}, t = {time}: 'observation' is ")
