"""Vector environments that take a step to reset: rows that are no frames, lanes that run ahead, lanes that fall behind.

All of it holds for whatever steps are not all frames; the environments here are `SyncVectorEnv`s in mode NEXT_STEP with
masked_reset=False, and homemade ones.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule

from rlcollect import Collector
from rlcollect.errors import OptionError
from rlcollect.testing import Tagged
from tests.collectors.helpers import checked
from tests.envs.vector_helpers import (
    ENDS,
    NEXT_STEP,
    Maker,
    Scripted,
    TaggedTree,
    assert_by_hand,
    count,
    lanes_of,
    mask_of,
    masked_rows_are_zero,
    rows_stay_in_their_episode,
)

RECORD = ("is_init", "step_count")
UNEVEN = (1, 2, 5, None)  # half of the first lane's steps are frames, and all of the last one's


def pending(*lengths: int | None, kind: Any = Tagged, **options: Any) -> Maker:
    lanes = [functools.partial(kind, lane, length, **options) for lane, length in enumerate(lengths)]
    return Maker("sync", lanes, autoreset_mode=NEXT_STEP)


def collect(maker: Any, policy: Any = None, **options: Any) -> Collector:
    return Collector(maker, policy, **{"masked_reset": False, **options})


def zero(observation):
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class Counting:
    """Counts the frames of each episode by state, and remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, tensordict):
        self.shown.append(tensordict.clone())
        tensordict["action"] = torch.ones(tensordict.batch_size, dtype=torch.int64)
        tensordict["next", "age"] = tensordict["age"] + 1
        tensordict["square"] = tensordict["age"] ** 2
        return tensordict


LENGTHS = torch.tensor([length or torch.inf for length in UNEVEN])
AGE = {"initial_policy_state": {"age": torch.zeros(1)}, "record": RECORD}


class TestMask:
    @pytest.mark.parametrize("steps", [1, 2, 3, 8, 40])
    def test_lanes_come_forward_at_their_own_pace(self, steps):
        maker = pending(*UNEVEN)
        delivered = [0] * 4
        with collect(maker, frames_per_batch=4 * steps, record=RECORD) as collector:
            batches = []
            for _ in range(12):
                batches.append(collector.next())
                mask = mask_of(batches[-1])
                assert mask.shape == (4, steps)
                assert mask[:, 0].any()
                counts = mask.sum(1).tolist()
                assert mask.tolist() == [[t < frames for t in range(steps)] for frames in counts]  # no gaps
                assert masked_rows_are_zero(batches[-1])
                delivered = [have + more for have, more in zip(delivered, counts, strict=True)]
                ahead = [made - have for made, have in zip(maker.ask("steps"), delivered, strict=True)]
                assert all(0 <= frames <= steps for frames in ahead)
                if min(counts) < steps:  # only where another lane has no room left
                    assert max(ahead) == steps
                assert collector.stats().frames == sum(delivered) == count(batches)
        list(checked(batches))
        assert_by_hand(batches, maker.lanes)

    def test_lanes_of_one_pace_are_never_short(self):
        maker = pending(3, 3, 3)
        with collect(maker, frames_per_batch=12, total_frames=120) as collector:
            for batch in checked(collector):
                assert mask_of(batch).all()
            assert collector.stats().dropped == 0
            assert maker.ask("steps") == [40] * 3

    def test_every_batch_has_the_same_keys(self):
        with collect(pending(None, None), frames_per_batch=8) as collector:
            assert ("collector", "mask") in collector.next().keys(True)

    def test_memory_that_was_used_before_shows_nowhere(self):
        maker = pending(1, None, kind=TaggedTree)
        with collect(maker, frames_per_batch=8) as collector:
            for _ in range(9):
                batch = collector.next()
                assert masked_rows_are_zero(batch)
                for key in batch.keys(include_nested=True, leaves_only=True):
                    batch[key].fill_(1)
                del batch

    def test_soft_truncation_marks_the_last_frame_of_each_lane(self):
        plain, marked = (
            collect(pending(*UNEVEN, end="both"), frames_per_batch=12, total_frames=240, set_truncated=soft)
            for soft in (False, True)
        )
        with plain, marked:
            ours, theirs = list(plain), list(marked)
        list(checked(theirs))
        for one, other in zip(ours, theirs, strict=True):
            frames = mask_of(one).sum(1)
            last = torch.arange(one.batch_size[1]) == frames[:, None] - 1
            for name in ("truncated", "done"):
                assert torch.equal(other["next", name][..., 0], one["next", name][..., 0] | last)
            assert torch.equal(other["next", "terminated"], one["next", "terminated"])
            for key in ("action", "observation", ("collector", "traj_ids"), ("next", "observation")):
                assert torch.equal(one[key], other[key])


class TestCounts:
    @pytest.mark.parametrize("total", [4, 8, 20, 44, 48, 100, 404])
    @pytest.mark.parametrize("steps", [1, 3, 11])
    def test_total_frames_is_exact(self, total, steps):
        maker = pending(*UNEVEN)
        with collect(maker, frames_per_batch=4 * steps, total_frames=total) as collector:
            batches = list(checked(collector))
            assert collector.exhausted
            assert collector.next() is None
            assert collector.collected_frames == collector.stats().frames == count(batches) == total
            assert collector.stats().dropped == sum(maker.ask("steps")) - total
            assert collector.stats().batches == len(batches)
        assert all(mask_of(batch).any() for batch in batches)
        assert all(batch.batch_size[1] <= steps for batch in batches)

    @pytest.mark.parametrize("lengths", [(1, 3), (1, None), (1, 2, None)])
    def test_nothing_is_lost_before_the_last_frame(self, lengths):
        """A batch that is asked for short, and comes with a lane still shorter, is not the last one."""
        for each in range(20, 40):
            maker = pending(*lengths)
            with collect(
                maker, frames_per_batch=10 * len(lengths), total_frames=each * len(lengths), record=RECORD
            ) as collector:
                batches = list(checked(collector))
            assert_by_hand(batches, maker.lanes)
            assert count(batches) == each * len(lengths)

    def test_what_lanes_cannot_divide_is_rounded_up_with_one_warning(self):
        with pytest.warns(UserWarning, match="rounded up to 24"):
            collector = collect(pending(1, 2, None), frames_per_batch=12, total_frames=22)
        with collector:
            assert count(collector) == collector.total_frames == 24
        with pytest.warns(UserWarning, match="rounded up to 12"):
            collector = collect(pending(1, 2, None), frames_per_batch=10)
        with collector:
            assert collector.next().batch_size == (3, 4)

    def test_the_length_is_the_number_of_batches_or_not_known(self):
        """Masked batches hold fewer frames, so there may be more of them."""
        with collect(pending(1, None), frames_per_batch=8, total_frames=80) as collector:
            try:
                length = len(collector)
            except TypeError:
                length = None
            batches = list(collector)
        assert length in (None, len(batches))

    def test_rollouts_between_are_not_counted_and_lose_nothing(self):
        maker = pending(*UNEVEN)
        with collect(maker, frames_per_batch=20, total_frames=60, record=RECORD) as collector:
            batches = [collector.next(), collector.rollout(), collector.next(), collector.rollout()]
            assert collector.collected_frames == count([batches[0], batches[2]])
            batches += list(collector)
            batches.append(collector.rollout())
        list(checked(batches))
        for lane, made in enumerate(lanes_of(batches[:-2])):
            assert made["observation"][:, 0].eq(lane).all()
        assert count([batches[0], batches[2], *batches[4:-1]]) == 60

    def test_figures_of_episodes(self):
        maker = pending(2, 3)
        with collect(maker, frames_per_batch=8, total_frames=48) as collector:
            batches = list(collector)
            stats = collector.stats()
        ended = sum(int(batch["next", "done"].sum()) for batch in batches)
        assert ended <= stats.episodes <= ended + 4  # those of frames that were dropped too
        assert (stats.episode_length.min, stats.episode_length.max) == (2, 3)
        assert (stats.episode_return.min, stats.episode_return.max) == (1, 3)  # 0 + 1, 0 + 1 + 2

    def test_a_batch_that_breaks_off_takes_what_was_made_ahead_with_it(self):
        """Those are counted; what was made of the batch itself is not: it never was."""
        maker = pending(2, 3, None)
        with collect(maker, Boom(12), frames_per_batch=15, total_frames=60) as collector:
            first = collector.next()
            ahead = sum(maker.ask("steps")) - count([first])
            assert ahead > 0
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            batches = [first, *collector]
            assert collector.stats().dropped >= ahead
        list(checked(batches))
        assert count(batches) == 60


class Boom:
    """Ctrl-C is typed during one of its calls."""

    def __init__(self, at):
        self.at, self.calls = at, -1  # construction calls it once

    def __call__(self, observation):
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)
        return zero(observation)


def batches_despite_interrupts(collector):
    batches = []
    while not collector.exhausted:
        try:
            batches.append(collector.next())
        except KeyboardInterrupt:
            assert not collector.closed
    return batches


class TestVersions:
    def test_frames_made_ahead_keep_the_version_that_made_them(self):
        class Policy:
            version = 0.0

            def __call__(self, tensordict):
                tensordict["action"] = torch.zeros(tensordict.batch_size, dtype=torch.int64)
                tensordict["made_by"] = torch.full((*tensordict.batch_size, 1), self.version)
                return tensordict

        policy, mixed = Policy(), 0
        with collect(pending(*UNEVEN), policy, frames_per_batch=12) as collector:
            batches = []
            for version in range(1, 15):
                batches.append(collector.next())
                mask, versions = mask_of(batches[-1]), batches[-1]["collector", "policy_version"]
                assert torch.equal(versions[mask].float(), batches[-1]["made_by"][mask][:, 0])
                assert versions.max() == version - 1
                mixed += len(versions[mask].unique()) > 1
                policy.version = float(version)
                assert collector.update_policy_weights_() == version
        list(checked(batches))
        assert mixed > 5

    @pytest.mark.parametrize("how", ["reset", "set_seed"])
    def test_frames_made_ahead_come_first_after_a_reset(self, how):
        maker = pending(*UNEVEN)
        with collect(maker, zero, frames_per_batch=16, record=RECORD) as collector:
            batches = [collector.next(), collector.next()]
            made, begun = maker.ask("steps"), maker.ask("resets")
            ahead = [steps - len(lane) for steps, lane in zip(made, lanes_of(batches), strict=True)]
            assert max(ahead) > 0
            collector.reset() if how == "reset" else collector.set_seed(3)
            batches += [collector.next() for _ in range(2)]
        list(checked(batches))
        assert rows_stay_in_their_episode(batches)
        for lane, frames in enumerate(lanes_of(batches[2:])):
            first = ahead[lane]
            assert (frames["observation"][:first, 1] < begun[lane]).all()
            assert frames["observation"][first].tolist() == [lane, begun[lane], 0]
            assert frames["is_init"][first]
            ids = frames["collector", "traj_ids"]
            assert not (ids[:first] == ids[first]).any()

    def test_a_seed_makes_what_comes_after_the_frames_made_ahead(self):
        def run(batches_before):
            maker = pending(3, 4, 6, random_length=True)
            with collect(maker, frames_per_batch=18) as collector:
                collector.set_seed(1)
                for _ in range(batches_before):
                    collector.next()
                begun = maker.ask("resets")
                collector.set_seed(7)
                lanes = lanes_of([collector.next() for _ in range(4)])
            ahead = sum(
                int((lane["observation"][:, 1] < first).sum()) for lane, first in zip(lanes, begun, strict=True)
            )
            return ahead, [lane[lane["observation"][:, 1] >= first] for lane, first in zip(lanes, begun, strict=True)]

        _, plain = run(0)
        ahead, later = run(3)
        assert ahead
        for one, other in zip(plain, later, strict=True):
            frames = min(len(one), len(other))
            assert frames > 12
            for key in ("action", ("next", "done"), ("next", "reward")):
                assert torch.equal(one[key][:frames], other[key][:frames])


class TestWarmUp:
    @pytest.mark.parametrize("frames", [1, 3, 4, 7, 29, 80])
    @pytest.mark.parametrize("steps", [1, 5])
    def test_exactly_so_many_frames_are_random(self, frames, steps):
        maker = pending(*UNEVEN)
        policy = Counting()
        with collect(
            maker, policy, frames_per_batch=4 * steps, total_frames=160, init_random_frames=frames, **AGE
        ) as collector:
            lanes = lanes_of(list(checked(collector)))
            dropped = collector.stats().dropped
        quotas = []
        for lane in lanes:
            chance = lane["collector", "policy_version"] == -1
            quotas.append(int(chance.sum()))
            assert chance.tolist() == [t < quotas[-1] for t in range(len(lane))]
            assert (lane["action"][~chance] == 1).all()
            assert not lane["square"][chance].any()
            assert not lane["age"][chance].any()
            assert not lane["next", "age"][chance].any()
            assert torch.equal(lane["is_init"], lane["step_count"] == 0)
            for row in lane[~chance][1:]:  # once the policy has taken over, it counts from there
                assert row["age"] == 0 or not row["is_init"]
        expected = [frames // 4 + (lane < frames % 4) for lane in range(4)]
        if dropped == 0 or sum(quotas) == frames:
            assert quotas == expected
        assert sum(quotas) == frames

    def test_the_policy_takes_over_in_the_middle_of_an_episode(self):
        policy = Counting()
        with collect(
            pending(None, 4), policy, frames_per_batch=20, total_frames=40, init_random_frames=5, **AGE
        ) as collector:
            lanes = lanes_of(list(checked(collector)))
        assert lanes[0]["age"][:, 0].tolist() == [0] * 3 + list(range(17))
        assert lanes[0]["is_init"][:, 0].tolist() == [True] + [False] * 19
        assert lanes[1]["age"][:, 0].tolist() == [0, 0, 0, 1] + [0, 1, 2, 3] * 4

    @pytest.mark.parametrize("at", [1, 2, 3, 5, 8])
    def test_after_a_ctrl_c_too(self, at):
        """Frames of the batch that was dropped are made again, those that had been made ahead of it as well."""
        with collect(
            pending(2, 3, 7), Boom(at), frames_per_batch=9, total_frames=90, init_random_frames=20
        ) as collector:
            lanes = lanes_of(batches_despite_interrupts(collector))
        assert sum(int((lane["collector", "policy_version"] == -1).sum()) for lane in lanes) == 20

    def test_after_a_batch_that_a_hook_let_go(self):
        calls = []

        def hook(batch):
            calls.append(batch)
            if len(calls) == 2:
                signal.raise_signal(signal.SIGINT)
            return batch

        with collect(
            pending(2, 3, 7), zero, frames_per_batch=9, total_frames=90, init_random_frames=40, postproc=hook
        ) as collector:
            lanes = lanes_of(batches_despite_interrupts(collector))
        assert sum(int((lane["collector", "policy_version"] == -1).sum()) for lane in lanes) == 40

    def test_after_a_load_too(self):
        """Frames made ahead are no part of a state: they are made again, and are random again."""
        options = {"frames_per_batch": 9, "total_frames": 90, "init_random_frames": 40}
        with collect(pending(2, 3, 7), zero, **options) as collector:
            batches = [collector.next() for _ in range(3)]
            assert collector._worker.engine.surplus
            state = collector.state_dict()
        with collect(pending(2, 3, 7), zero, **options) as collector:
            collector.load_state_dict(state)
            batches += list(collector)
        assert count(batches) == 90
        assert sum(int((lane["collector", "policy_version"] == -1).sum()) for lane in lanes_of(batches)) == 40


class TestCarriedState:
    """DESIGN 9 rule 2: lanes that pend are in the call, their outputs thrown away; the first real frame starts anew."""

    @pytest.mark.parametrize("steps", [1, 3, 10])
    def test_it_counts_the_frames_of_each_episode(self, steps):
        policy = Counting()
        with collect(pending(*UNEVEN), policy, frames_per_batch=4 * steps, **AGE) as collector:
            batches = [collector.next() for _ in range(40 // steps)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["age"][mask], batch["step_count"][mask].float())
            assert torch.equal(batch["next", "age"][mask], batch["step_count"][mask] + 1.0)
            assert torch.equal(batch["square"][mask], batch["step_count"][mask].float() ** 2)
            assert torch.equal(batch["is_init"][mask], batch["step_count"][mask] == 0)
        for shown in policy.shown[1:]:
            assert shown.batch_size == (4,)
            assert torch.equal(shown["is_init"], shown["age"] == 0)
            age = shown["age"][:, 0]
            over = age == LENGTHS  # such a lane pends, and shows once more what it showed before its last action
            assert torch.equal(shown["observation"][:, 2], age - over.float())

    @pytest.mark.parametrize("how", ["reset", "set_seed", "interrupt"])
    def test_it_begins_anew_after_a_reset(self, how):
        policy = Counting()
        with collect(pending(*UNEVEN), policy, frames_per_batch=24, **AGE) as collector:
            batches = [collector.next(), collector.next()]
            getattr(collector, how)(*([1] if how == "set_seed" else [])) if how != "interrupt" else None
            batches += [collector.next(), collector.next()]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["age"][mask], batch["step_count"][mask].float())

    def test_a_policy_that_reads_is_init_by_name(self):
        shown = []

        def policy(observation, is_init):
            shown.append((observation.clone(), is_init.clone()))
            return zero(observation)

        with collect(pending(*UNEVEN), policy, frames_per_batch=12) as collector:
            batches = [collector.next() for _ in range(8)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["is_init"][mask], batch["observation"][mask][:, 2:] == 0)
        for observation, is_init in shown[1:]:
            assert torch.equal(is_init[1:], observation[1:, 2:] == 0)
            assert not observation[0, 2]  # of an episode of one step nothing else is ever shown
        assert [bool(is_init[0]) for _, is_init in shown[1:]] == [t % 2 == 0 for t in range(len(shown) - 1)]

    def test_over_a_window(self):
        """Views are made for 256 steps at a time."""
        policy = Counting()
        with collect(pending(3, 100, None), policy, frames_per_batch=3 * 600, **AGE) as collector:
            batches = [collector.next() for _ in range(2)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["age"][mask], batch["step_count"][mask].float())
            assert torch.equal(batch["is_init"][mask], batch["step_count"][mask] == 0)


class Masking(Tagged):
    """Tells in its observation which of three actions do anything: none of them, when all is over."""

    def __init__(self, worker: int, length: int | None) -> None:
        super().__init__(worker, length)
        self.action_space = spaces.Discrete(3)
        self.observation_space = spaces.Dict({"x": self.observation_space, "action_mask": spaces.MultiBinary(3)})

    def _observe(self) -> Any:
        mask = np.zeros(3, np.int8)
        if self.t != self.length:
            mask[[self.t % 3, (self.t + 1) % 3]] = 1
        return {"x": super()._observe(), "action_mask": mask}

    def _reward_for(self, action: Any) -> float:
        assert self._observe()["action_mask"][action], "an action that is not allowed"
        return super()._reward_for(action)


class TestFinalObservations:
    """Rows that pend show them, and nobody acts there: what comes of being asked all the same must not matter."""

    def run(self, policy=None, **options):
        with collect(
            pending(*UNEVEN, kind=Masking), policy, frames_per_batch=32, record=RECORD, **options
        ) as collector:
            batches = [collector.next() for _ in range(4)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert batch["action_mask"].gather(-1, batch["action"][..., None])[mask].all()
        return batches

    def test_random_actions(self):
        self.run()

    def test_a_warm_up(self):
        def policy(x, action_mask):
            return action_mask.long().argmax(-1)

        self.run(policy, init_random_frames=50)

    def test_a_distribution_over_what_is_allowed(self):
        policy = ProbabilisticTensorDictSequential(
            TensorDictModule(lambda mask: torch.where(mask != 0, 0.0, -torch.inf), ["action_mask"], ["logits"]),
            ProbabilisticTensorDictModule(
                ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
            ),
        )
        self.run(policy)

    def test_actions_that_are_looked_at(self):
        def policy(x, action_mask):
            return torch.where(action_mask.any(-1), action_mask.long().argmax(-1), -1)

        self.run(policy, check_actions=True)


class TestOtherOptions:
    def test_trajectories_leave_out_what_is_no_frame(self):
        plain, split = (
            collect(pending(*UNEVEN), frames_per_batch=12, total_frames=120, split_trajs=each) for each in (False, True)
        )
        with plain, split:
            for batch, trajectories in zip(plain, split, strict=True):
                mask, frames = mask_of(batch), trajectories["collector", "mask"]
                assert int(frames.sum()) == int(mask.sum())
                assert torch.equal(trajectories["observation"][frames], batch["observation"][mask])
                assert len(trajectories) == len(batch["collector", "traj_ids"][mask].unique())

    def test_keys_that_are_left_out_or_added(self):
        options = {"frames_per_batch": 12, "track_traj_ids": False, "record": ("worker",), "storing_device": "cpu"}
        with collect(pending(*UNEVEN), **options) as collector:
            batches = [collector.next() for _ in range(4)]
        list(checked(batches))
        for batch in batches:
            assert ("collector", "traj_ids") not in batch.keys(True)
            assert batch["collector", "worker"].shape == batch.batch_size
            assert not batch["collector", "worker"].any()
            assert batch.device == torch.device("cpu")

    def test_keys_that_are_renamed(self):
        class Named(TaggedTree):
            def __init__(self, *args):
                super().__init__(*args)
                self.observation_space = spaces.Dict({"reward": self.observation_space["tag"]})

            def _observe(self):
                return {"reward": super()._observe()["tag"]}

        with collect(
            pending(*UNEVEN, kind=Named), frames_per_batch=12, record=RECORD, rename_keys={"reward": ("seen", "tag")}
        ) as collector:
            batches = [collector.next() for _ in range(4)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["seen", "tag"][mask][:, 2:], batch["step_count"][mask].float())
            assert torch.equal(batch["next", "seen", "tag"][mask][:, 2:], batch["step_count"][mask] + 1.0)

    def test_outputs_that_numpy_does_not_have(self):
        def policy(tensordict):
            tensordict["action"] = torch.zeros(tensordict.batch_size, dtype=torch.int64)
            tensordict["half"] = tensordict["observation"].bfloat16()
            tensordict["next", "sum"] = tensordict["sum"] + 1
            return tensordict

        with collect(
            pending(*UNEVEN),
            policy,
            frames_per_batch=12,
            record=RECORD,
            initial_policy_state={"sum": torch.zeros(2, dtype=torch.bfloat16)},
        ) as collector:
            batches = [collector.next() for _ in range(6)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["half"][mask], batch["observation"][mask].bfloat16())
            assert torch.equal(batch["sum"][mask], batch["step_count"][mask].expand(-1, 2).bfloat16())

    def test_hooks_are_given_the_mask(self):
        seen = []
        with collect(pending(*UNEVEN), frames_per_batch=12, postproc=lambda batch: (seen.append(batch), batch)[1]) as c:
            assert c.next() is seen[0]
        assert ("collector", "mask") in seen[0].keys(True)


class TestLongRollouts:
    @pytest.mark.parametrize("steps", [127, 128, 129, 256, 300, 700])
    def test_around_the_size_of_the_scratch(self, steps):
        maker = pending(1, 7, 300, None)
        with collect(maker, frames_per_batch=4 * steps, total_frames=12 * steps, record=RECORD) as collector:
            batches = list(checked(collector))
            assert collector.stats().dropped == sum(maker.ask("steps")) - 12 * steps
        assert count(batches) == 12 * steps
        assert_by_hand(batches, maker.lanes)


class TestInterruptor:
    class After:
        """Stops each rollout after so many of its steps."""

        def __init__(self, steps):
            self.steps, self.asked = steps, 0

        def start_collection(self):
            self.asked = 0

        def stop_collection(self):
            self.asked = self.steps

        def collection_stopped(self):
            self.asked += 1
            return self.asked >= self.steps

    @pytest.mark.parametrize("steps", [1, 2, 5, 100])
    def test_what_is_there_is_delivered(self, steps):
        interruptor, maker = self.After(steps), pending(*UNEVEN)
        batches = []
        with collect(
            maker, zero, frames_per_batch=40, total_frames=160, record=RECORD, interruptor=interruptor
        ) as collector:
            while not collector.exhausted:
                interruptor.start_collection()
                batches.append(collector.next())
                assert masked_rows_are_zero(batches[-1])
                assert mask_of(batches[-1]).any()
            assert collector.stats().dropped == sum(maker.ask("steps")) - 160
        list(checked(batches))
        assert count(batches) == 160
        assert_by_hand(batches, maker.lanes, version=0)


class TestState:
    @pytest.mark.parametrize("after", [0, 1, 3])
    def test_exactly_the_remaining_frames_come(self, after):
        options = {"frames_per_batch": 12, "total_frames": 96, "record": RECORD}
        with collect(pending(*UNEVEN), **options) as collector:
            batches = [collector.next() for _ in range(after)]
            state = collector.state_dict()
        with collect(pending(*UNEVEN), **options) as collector:
            collector.load_state_dict(state)
            batches += list(collector)
            assert collector.collected_frames == 96
        assert count(batches) == 96
        list(checked(batches))

    def test_into_the_collector_that_gave_it(self):
        maker = pending(*UNEVEN)
        with collect(maker, frames_per_batch=12, total_frames=96, record=RECORD) as collector:
            collector.next()
            state = collector.state_dict()
            later = count([collector.next() for _ in range(2)])
            collector.load_state_dict(state)
            frames = count(collector)
            assert collector.stats().frames == 96
            assert collector.stats().dropped == sum(maker.ask("steps")) - 96 - later
        assert frames < 96


class TestCtrlC:
    @pytest.mark.parametrize(
        ("backend", "lengths", "steps"),
        [
            ("sync", (2, 3, 7), 3),
            ("sync", (2, None), 2),
            ("async without shared memory", (2, 3, 7), 3),
            pytest.param("async without shared memory", (2, None), 2, marks=pytest.mark.slow),
        ],
    )
    def test_the_batch_is_dropped_and_new_episodes_begin(self, backend, lengths, steps):
        lanes = [functools.partial(Tagged, lane, length) for lane, length in enumerate(lengths)]
        options = {"frames_per_batch": steps * len(lanes), "total_frames": 5 * steps * len(lanes), "record": RECORD}
        for at in range(1, 12):
            with collect(Maker(backend, lanes), Boom(at), **options) as collector:
                batches = batches_despite_interrupts(collector)
            list(checked(batches))
            assert rows_stay_in_their_episode(batches)
            assert episodes_begin_at_zero(batches)
            assert count(batches) == options["total_frames"]


def episodes_begin_at_zero(batches):
    """No frame is left out: the environment's count is ours."""
    return all(torch.equal(lane["observation"][:, 2], lane["step_count"][:, 0].float()) for lane in lanes_of(batches))


class TestResetsThatComeTwice:
    """`AsyncVectorEnv(shared_memory=False)`: a reset that follows an episode's end is followed by another (1.4)."""

    @pytest.mark.parametrize("how", ["reset", "set_seed"])
    @pytest.mark.parametrize("length", [1, 2, 3, 4])
    def test_the_row_of_the_second_is_no_frame(self, how, length):
        lanes = [functools.partial(Tagged, lane, each) for lane, each in enumerate((length, 2, 5))]
        with Collector(Maker("async without shared memory", lanes), Counting(), frames_per_batch=9, **AGE) as collector:
            batches = []
            for turn in range(6):
                batches.append(collector.next())
                collector.reset() if how == "reset" else collector.set_seed(turn)
        list(checked(batches))
        assert rows_stay_in_their_episode(batches)
        assert episodes_begin_at_zero(batches)
        for batch in batches:
            mask = mask_of(batch)
            assert torch.equal(batch["age"][mask], batch["step_count"][mask].float())

    def test_a_promise_that_cannot_be_true_is_refused_or_kept(self):
        """masked_reset=True says more than this environment can do."""
        lanes = [functools.partial(Tagged, lane, each) for lane, each in enumerate((1, 2, 5))]
        maker = Maker("async without shared memory", lanes)
        try:
            collector = Collector(maker, frames_per_batch=9, masked_reset=True)
        except OptionError:
            return
        with collector:
            batches = [collector.next() for _ in range(3)]
        assert rows_stay_in_their_episode(batches)


scripts = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(ENDS)), min_size=1, max_size=4)


class TestAnyEpisodesAnyBatches:
    @settings(max_examples=40, deadline=None)
    @given(
        scripts=st.lists(scripts, min_size=1, max_size=4),
        steps=st.integers(1, 12),
        total=st.integers(1, 40),
        warmup=st.integers(0, 30),
        soft=st.booleans(),
        same=st.booleans(),
    )
    def test_against_the_plain_loop(self, scripts, steps, total, warmup, soft, same):
        lanes = [functools.partial(Scripted, lane, script) for lane, script in enumerate(scripts)]
        maker, many = Maker("sync", lanes), len(scripts)
        with collect(
            maker,
            Counting(),
            frames_per_batch=steps * many,
            total_frames=total * many,
            init_random_frames=warmup,
            set_truncated=soft,
            return_same_td=same,
            **AGE,
        ) as collector:
            batches = [batch.clone() for batch in collector]
            assert collector.stats().dropped == sum(maker.ask("steps")) - total * many
        list(checked(batches))
        assert count(batches) == total * many
        chance = sum(int((lane["collector", "policy_version"] == -1).sum()) for lane in lanes_of(batches))
        assert chance <= warmup
        for batch in batches:
            mask = mask_of(batch)
            assert masked_rows_are_zero(batch)
            if soft:  # what the environments said is seen in the frames that go on
                lasts = [(lane, int(frames) - 1) for lane, frames in enumerate(mask.sum(1)) if frames]
                assert all(batch["next", "truncated"][where] for where in lasts)
        if not soft:
            for batch in batches:
                for key in ("age", "square", ("next", "age")):
                    batch.pop(key) if isinstance(key, str) else batch["next"].pop(key[1])
                batch["collector", "policy_version"][mask_of(batch)] = -1
            assert_by_hand(batches, lanes)

    @settings(max_examples=30, deadline=None)
    @given(
        scripts=st.lists(scripts, min_size=1, max_size=3),
        steps=st.integers(1, 7),
        verbs=st.lists(
            st.sampled_from(["next", "next", "rollout", "reset", "set_seed", "update", "load"]), max_size=12
        ),
        warmup=st.integers(0, 12),
    )
    def test_whatever_is_called_between_batches(self, scripts, steps, verbs, warmup):
        lanes = [functools.partial(Scripted, lane, script) for lane, script in enumerate(scripts)]
        maker, batches, loaded = Maker("sync", lanes), [], False
        with collect(
            maker, Counting(), frames_per_batch=steps * len(lanes), init_random_frames=warmup, **AGE
        ) as collector:
            for verb in verbs:
                if verb in ("next", "rollout"):
                    batches.append(getattr(collector, verb)())
                elif verb == "load":
                    collector.load_state_dict(collector.state_dict())
                    loaded = True
                else:
                    {"reset": collector.reset, "set_seed": lambda: collector.set_seed(1)}.get(
                        verb, collector.update_policy_weights_
                    )()
            ahead = collector._worker.engine.surplus
            if not loaded:
                assert sum(maker.ask("steps")) == (count(batches) if batches else 0) + ahead
            else:
                assert sum(maker.ask("steps")) == count(batches) + ahead + collector.stats().dropped
        list(checked(batches))
        assert rows_stay_in_their_episode(batches)
        assert not batches or episodes_begin_at_zero(batches)
        for batch in batches:
            mask = mask_of(batch)
            acted = mask & (batch["collector", "policy_version"] >= 0)
            assert (batch["age"][acted] <= batch["step_count"][acted]).all()
            if not warmup:
                assert torch.equal(batch["age"][mask], batch["step_count"][mask].float())
