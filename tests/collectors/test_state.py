"""Saving and loading, resetting, seeding, and what a collector tells about itself."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import random
import signal
import time

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from rlcollect import Collector, OptionError, Spread, Stats
from rlcollect.testing import Counter, Echo, Probe, Tagged, check_batch
from tests.collectors.helpers import Restless, checked, counters, flag, ids, joined, same, seen


class Stochastic(nn.Module):
    """Draws its action from torch's global generator."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.register_buffer("offset", torch.zeros(1))

    def forward(self, observation):
        return self.net(observation) + self.offset + torch.randn_like(observation)


def actor():
    """The usual stochastic actor, with its log-probability."""
    net = TensorDictModule(nn.Linear(1, 2), in_keys=["observation"], out_keys=["logits"])
    head = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    return ProbabilisticTensorDictSequential(net, head)


def tensors_of(state):
    if isinstance(state, torch.Tensor):
        return [state]
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list | tuple) else ()
    return [tensor for part in parts for tensor in tensors_of(part)]


def all_ids(batches):
    return set(joined(batches)["collector", "traj_ids"].flatten().tolist())


class TestLoading:
    @pytest.mark.parametrize("lanes", [None, 3])
    @pytest.mark.parametrize("saved_after", [0, 1, 5, 7, 8])
    def test_exactly_the_remaining_batches_come(self, lanes, saved_after):
        """FAULTS 106."""
        options = {"frames_per_batch": 6, "total_frames": 45, "num_envs": lanes}
        with Collector(Counter, **options) as collector:
            first = [collector.next() for _ in range(saved_after)]
            state = collector.state_dict()
        with Collector(Counter, **options) as collector:
            collector.load_state_dict(state)
            assert collector.collected_frames == min(6 * saved_after, 45)
            assert collector.stats().batches == saved_after
            assert collector.exhausted == (saved_after == 8)
            rest = list(checked(collector))
            assert len(collector) == 8
        sizes = [6] * 7 + [3]
        assert [batch.numel() for batch in rest] == sizes[saved_after:]
        assert sum(batch.numel() for batch in first + rest) == 45

    def test_an_id_is_never_used_again(self):
        with Collector(counters(2, 3), frames_per_batch=10) as collector:
            batches = [collector.next() for _ in range(3)]
            state = collector.state_dict()
        with Collector(counters(2, 3), frames_per_batch=10) as collector:
            collector.next()
            collector.load_state_dict(state)
            later = [collector.next() for _ in range(3)]
        assert all_ids(batches).isdisjoint(all_ids(later))
        list(checked([*batches, *later]))  # a load is a cut

    def test_a_load_begins_new_episodes_with_the_next_batch(self):
        env = Counter(None)
        with Collector(env, frames_per_batch=4, record="step_count") as collector:
            collector.next()
            state = collector.state_dict()
            collector.next()
            assert env.resets == 1
            collector.load_state_dict(state)
            assert env.resets == 1
            batch = collector.next()
            assert seen(batch) == [0, 1, 2, 3]
            assert batch["step_count"].flatten().tolist() == [0, 1, 2, 3]
            assert env.resets == 2

    def test_taking_a_state_changes_nothing(self):
        def collect(take):
            with Collector(Restless, Stochasticly(), frames_per_batch=4, total_frames=24) as collector:
                collector.set_seed(3)
                for batch in collector:
                    yield batch
                    if take:
                        collector.state_dict()

        for one, other in zip(collect(True), collect(False), strict=True):
            assert same(one, other)

    def test_a_state_is_not_changed_by_what_comes_later(self):
        with Collector(counters(2, 3), Stochasticly(), frames_per_batch=10, init_random_frames=25) as collector:
            collector.set_seed(0)
            collector.next()
            state = collector.state_dict()
            before = repr(state)
            for _ in range(10):
                collector.next()
                collector.update_policy_weights_()
            assert repr(state) == before

    def test_a_state_can_be_loaded_twice(self):
        with Collector(Counter(3), frames_per_batch=10) as collector:
            collector.set_seed(0)
            collector.next()
            state = collector.state_dict()
            runs = []
            for _ in range(2):
                collector.load_state_dict(state)
                runs.append(collector.next())
        assert same(*runs)

    def test_other_numbers_of_lanes_are_refused(self):
        with Collector(Counter, num_envs=2, frames_per_batch=4) as collector:
            state = collector.state_dict()
        with Collector(Counter, num_envs=3, frames_per_batch=6) as collector:
            with pytest.raises(OptionError, match=r"2 lanes.*3"):
                collector.load_state_dict(state)
            assert not collector.closed

    def test_a_refused_state_changes_nothing(self):
        policy = Stochasticly()
        with Collector(Counter, policy, num_envs=2, frames_per_batch=4) as collector:
            collector.next()
            state = collector.state_dict()
        other = Stochasticly()
        before = {key: value.clone() for key, value in other.state_dict().items()}
        with Collector(Counter, other, num_envs=3, frames_per_batch=6) as collector:
            with pytest.raises(OptionError):
                collector.load_state_dict(state)
            assert collector.collected_frames == 0
        assert all(torch.equal(value, before[key]) for key, value in other.state_dict().items())

    def test_something_else_is_refused_in_words(self):
        with Collector(Counter, frames_per_batch=4) as collector:
            for wrong in ({}, {"frames": 3}):
                with pytest.raises(OptionError):
                    collector.load_state_dict(wrong)
            assert not collector.closed

    def test_version_and_statistics_go_on(self):
        with Collector(Counter(3), Stochasticly(), frames_per_batch=9) as collector:
            collector.next()
            collector.update_policy_weights_()
            state, before = collector.state_dict(), collector.stats()
        with Collector(Counter(3), Stochasticly(), frames_per_batch=9) as collector:
            collector.load_state_dict(state)
            after = collector.stats()
            assert dataclasses.replace(after, time=None) == dataclasses.replace(before, time=None)
            assert (after.frames, after.batches, after.episodes, after.policy_version) == (9, 1, 3, 1)
            assert collector.next()["collector", "policy_version"].unique().tolist() == [1]
            assert collector.stats().episodes == 6
            assert math.isclose(sum(dataclasses.astuple(collector.stats().time)), 1)

    def test_a_warm_up_goes_on_where_it_was(self):
        options = {"frames_per_batch": 6, "init_random_frames": 14}
        with Collector(counters(5, 5, 5), Stochasticly(3), **options) as collector:
            first = [collector.next() for _ in range(2)]
            state = collector.state_dict()
        with Collector(counters(5, 5, 5), Stochasticly(3), **options) as collector:
            collector.load_state_dict(state)
            rest = [collector.next() for _ in range(2)]
        versions = joined(first + rest)["collector", "policy_version"]
        assert int((versions == -1).sum()) == 14
        assert (versions.diff(dim=1) >= 0).all()

    def test_pending_seeds_are_kept(self):
        with Collector(counters(5, 5), frames_per_batch=4) as collector:
            collector.next()
            collector.set_seed([11, 22])
            state = collector.state_dict()
        envs = counters(5, 5)
        with Collector(envs, frames_per_batch=4) as collector:
            collector.load_state_dict(state)
            collector.next()
        assert [env.seeds for env in envs] == [[11], [22]]

    def test_pending_seeds_are_given_up_where_the_state_has_none(self):
        envs = counters(5, 5)
        with Collector(envs, frames_per_batch=4) as collector:
            state = collector.state_dict()
            collector.set_seed(3)
            collector.load_state_dict(state)
            collector.next()
        assert [env.seeds for env in envs] == [[], []]

    def test_the_number_of_a_lanes_episode_goes_on(self):
        """What `reset_options` is given: a curriculum by episodes does not begin anew."""

        def options(lane, episode, _info):
            calls.append((lane, episode))

        calls = []
        with Collector(counters(2, 4), frames_per_batch=8, reset_options=options) as collector:
            collector.next()
            state = collector.state_dict()
        newest = dict(sorted(calls))
        calls.clear()
        with Collector(counters(2, 4), frames_per_batch=8, reset_options=options) as collector:
            collector.load_state_dict(state)
            calls.clear()
            collector.next()
        assert calls[:2] == [(lane, episode + 1) for lane, episode in newest.items()]


def Stochasticly(seed=0):  # noqa: N802 - a module, made the same each time, whose action is one of two
    torch.manual_seed(seed)

    class Choosing(Stochastic):
        def forward(self, observation):
            return (super().forward(observation)[..., 0] > 0).long()

    return Choosing()


class TestRandomStreamsGoOn:
    """FAULTS 109."""

    def resumed(self, make, policy, *, batches=3, **options):
        """What an uninterrupted run and a resumed one give after the point where the state was taken.

        The environments' episodes never end, so that both runs see the same observations after a reset.
        """
        with Collector(make, policy(), frames_per_batch=42, **options) as collector:
            collector.set_seed(5)
            for _ in range(batches):
                collector.next()
            state = collector.state_dict()
            collector.reset()
            straight = [collector.next() for _ in range(3)]
        torch.manual_seed(999)
        with Collector(make, policy(), frames_per_batch=42, **options) as collector:
            collector.set_seed(123)
            collector.next()
            collector.load_state_dict(state)
            loaded = [collector.next() for _ in range(3)]
        for batch, other in zip(straight, loaded, strict=True):
            yield batch.exclude(("collector", "traj_ids")), other.exclude(("collector", "traj_ids"))

    @pytest.mark.parametrize("lanes", [None, 3])
    def test_of_random_actions(self, lanes):
        for straight, loaded in self.resumed(functools.partial(Echo, (2,)), lambda: None, num_envs=lanes):
            assert same(straight, loaded)

    @pytest.mark.parametrize("batches", [1, 3, 4, 10])
    def test_of_random_actions_whatever_was_drawn_before(self, batches):
        for straight, loaded in self.resumed(Counter, lambda: None, batches=batches):
            assert straight["action"].tolist() == loaded["action"].tolist()

    def test_of_random_actions_in_a_warm_up(self):
        for straight, loaded in self.resumed(Counter, Stochasticly, init_random_frames=80):
            assert same(straight, loaded)

    @pytest.mark.parametrize("policy", [Stochastic, actor], ids=["module", "tensordict"])
    def test_of_a_stochastic_policy(self, policy):
        make = Counter if policy is actor else Echo
        for straight, loaded in self.resumed(make, policy, num_envs=3):
            assert same(straight, loaded)

    def test_of_the_environments(self):
        for straight, loaded in self.resumed(Restless, lambda: None, num_envs=3):
            assert same(straight, loaded)

    def test_of_environments_under_wrappers(self):
        def make():
            return gym.wrappers.TransformReward(TimeLimit(Restless(), 4), lambda reward: reward * 2)

        for straight, loaded in self.resumed(make, lambda: None, num_envs=2):
            assert same(straight, loaded)

    def test_the_learners_generator_is_left_alone(self):
        with Collector(Counter, Stochasticly(), frames_per_batch=10) as collector:
            collector.next()
            state = collector.state_dict()
            torch.manual_seed(4)
            before = torch.get_rng_state()
            collector.load_state_dict(state)
            collector.next()
            assert torch.equal(torch.get_rng_state(), before)


class Remembering(Counter):
    """Has a state of its own, beside its generator."""

    def __init__(self):
        super().__init__(3)
        self.level = 0

    def step(self, action):
        self.level += 1
        return super().step(action)

    def state_dict(self):
        return {"level": self.level}

    def load_state_dict(self, state):
        self.level = state["level"]


class TestEnvironmentState:
    @pytest.mark.parametrize("wrap", [lambda env: env, lambda env: TimeLimit(env, 2)], ids=["plain", "wrapped"])
    def test_what_a_state_dict_of_theirs_returns_is_saved_and_loaded(self, wrap):
        """Environments from `gymnasium.make` are always wrapped."""
        envs = [Remembering(), Remembering()]
        with Collector([wrap(env) for env in envs], frames_per_batch=8) as collector:
            collector.next()
            state = collector.state_dict()
        envs = [Remembering(), Remembering()]
        with Collector([wrap(env) for env in envs], frames_per_batch=8) as collector:
            collector.load_state_dict(state)
            assert [env.level for env in envs] == [4, 4]

    def test_an_attribute_of_that_name_that_is_no_method_is_theirs(self):
        env = Counter(3)
        env.state_dict = {"anything": 1}
        with Collector(env, frames_per_batch=4) as collector:
            collector.load_state_dict(collector.state_dict())
            check_batch(collector.next())
        assert env.state_dict == {"anything": 1}

    def test_it_is_under_env_state_dict(self):
        with Collector(Remembering(), frames_per_batch=8) as collector:
            assert collector.state_dict()["env_state_dict"]["0"]["env"] == {"level": 0}


class TestPolicyState:
    def test_weights_and_buffers_are_in_it_and_loaded(self):
        """FAULTS 107."""
        policy = Stochasticly()
        with Collector(Counter, policy, frames_per_batch=4) as collector:
            with torch.no_grad():
                policy.net.weight.fill_(3.0)
                policy.offset.fill_(4.0)
            state = collector.state_dict()
            with torch.no_grad():
                policy.net.weight.fill_(5.0)  # the state is a copy
        assert state["policy_state_dict"]["net.weight"].item() == 3.0
        other = Stochasticly()
        with Collector(Counter, other, frames_per_batch=4) as collector:
            collector.load_state_dict(state)
        assert (other.net.weight.item(), other.offset.item()) == (3.0, 4.0)

    def test_of_a_compiled_policy(self):
        """FAULTS 107: wrapped is as good as plain."""
        policy = nn.Sequential(Stochasticly())
        with Collector(Counter, policy, frames_per_batch=4) as collector:
            assert "0.net.weight" in collector.state_dict()["policy_state_dict"]

    def test_strict_wants_weights_that_fit(self):
        with Collector(Counter, frames_per_batch=4) as collector:
            without = collector.state_dict()
        assert "policy_state_dict" not in without
        with Collector(Counter, Stochasticly(), frames_per_batch=4) as collector:
            with pytest.raises(OptionError, match="policy_state_dict"):
                collector.load_state_dict(without)
            collector.load_state_dict(without, strict=False)
            wrong = collector.state_dict()
            del wrong["policy_state_dict"]["offset"]
            with pytest.raises(RuntimeError, match="offset"):
                collector.load_state_dict(wrong)
            collector.load_state_dict(wrong, strict=False)
            check_batch(collector.next())

    def test_weights_that_have_nowhere_to_go_are_an_error_unless_they_need_not_fit(self):
        with Collector(Counter, Stochasticly(), frames_per_batch=4) as collector:
            state = collector.state_dict()
        with Collector(Counter, lambda observation: observation[..., 0].long() * 0, frames_per_batch=4) as collector:
            with pytest.raises(OptionError, match="policy_state_dict"):
                collector.load_state_dict(state)
            collector.load_state_dict(state, strict=False)
            check_batch(collector.next())

    def test_those_of_a_module_whose_method_is_the_policy_are_saved(self):
        policy = Stochasticly()
        with Collector(Counter, policy.forward, frames_per_batch=4) as collector:
            saved = collector.state_dict()["policy_state_dict"]
        assert saved.keys() == policy.state_dict().keys()


class TestTheStateItself:
    def state(self):
        with Collector(counters(2, 3), Stochasticly(), frames_per_batch=10, init_random_frames=25) as collector:
            collector.set_seed(0)
            collector.next()
            collector.set_seed(1)
            return collector.state_dict()

    def test_the_names_that_were_promised(self):
        assert {"policy_state_dict", "env_state_dict", "frames", "iter"} <= self.state().keys()

    def test_tensors_are_on_the_cpu_and_need_no_gradient(self):
        tensors = tensors_of(self.state())
        assert tensors
        assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in tensors)

    @pytest.mark.parametrize("weights_only", [True, False])
    def test_it_goes_through_a_file(self, weights_only, tmp_path):
        torch.save(self.state(), tmp_path / "state.pt")
        state = torch.load(tmp_path / "state.pt", weights_only=weights_only)
        runs = []
        for loaded in (state, self.state()):
            with Collector(counters(2, 3), Stochasticly(3), frames_per_batch=10, init_random_frames=25) as collector:
                collector.load_state_dict(loaded)
                runs.append(joined([collector.next() for _ in range(4)]))
        assert same(*runs)

    @pytest.mark.parametrize("kind", ["masked", "other generator"])
    def test_with_every_kind_of_random_actions_and_generators(self, kind, tmp_path):
        class Masked(Counter):
            def __init__(self):
                super().__init__(3)
                self.observation_space = gym.spaces.Dict(
                    {"observation": self.observation_space, "action_mask": gym.spaces.MultiBinary(2)}
                )

            def _observe(self):
                return {"observation": np.array([self.t], np.float32), "action_mask": np.ones(2, np.int8)}

        class Twister(Counter):
            def reset(self, *, seed=None, options=None):
                result = super().reset(seed=seed, options=options)
                self.np_random = np.random.Generator(np.random.MT19937(seed))
                return result

        kind = Masked if kind == "masked" else Twister
        with Collector(kind, frames_per_batch=10) as collector:
            collector.set_seed(0)
            collector.next()
            torch.save(collector.state_dict(), tmp_path / "state.pt")
            expected = collector.next()["action"].tolist()
        with Collector(kind, frames_per_batch=10) as collector:
            collector.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
            assert collector.next()["action"].tolist() == expected

    def test_one_of_an_exhausted_collector_can_be_taken(self):
        with Collector(Counter, frames_per_batch=4, total_frames=4) as collector:
            list(collector)
            state = collector.state_dict()
        with Collector(Counter, frames_per_batch=4, total_frames=12) as collector:
            collector.load_state_dict(state)
            assert len(list(collector)) == 2


class TestReset:
    @pytest.mark.parametrize(
        ("index", "lanes"),
        [
            (None, [0, 1, 2]),
            (1, [1]),
            (np.int64(1), [1]),
            (torch.tensor(2), [2]),
            ([0, 2], [0, 2]),
            ([2, 0, 2], [0, 2]),
            ((1,), [1]),
            (np.array([0, 1]), [0, 1]),
            (torch.tensor([0, 1]), [0, 1]),
            (range(2), [0, 1]),
            (slice(1, None), [1, 2]),
            (slice(None), [0, 1, 2]),
            ([True, False, True], [0, 2]),
            (np.array([False, True, False]), [1]),
            (torch.tensor([[True], [False], [False]]), [0]),
            ([], []),
            ([False] * 3, []),
            (slice(3, None), []),
        ],
        ids=repr,
    )
    def test_these_lanes_begin_anew_and_the_others_go_on(self, index, lanes):
        envs = counters(None, None, None)
        with Collector(envs, frames_per_batch=9, record=("is_init", "step_count")) as collector:
            first = collector.next()
            collector.reset(index)
            second = collector.next()
        list(checked([first, second]))
        for lane in range(3):
            assert envs[lane].resets == (2 if lane in lanes else 1)
            assert seen(second)[lane] == ([0, 1, 2] if lane in lanes else [3, 4, 5])
            assert (ids(first)[lane][0] == ids(second)[lane][0]) == (lane not in lanes)
        assert not any(sum(flag(first, "done"), []))  # noqa: RUF017 - a cut is no end

    def test_the_mark_is_the_id(self):
        with Collector(Counter(None), frames_per_batch=3, record=("is_init", "step_count")) as collector:
            batches = [collector.next()]
            collector.reset()
            collector.reset(0)
            batches.append(collector.next())
        whole = joined(list(checked(batches)))
        changes = whole["collector", "traj_ids"].diff() != 0
        assert changes.tolist() == [False, False, True, False, False]
        assert whole["is_init"].flatten().tolist() == [True, False, False] * 2
        assert whole["step_count"].flatten().tolist() == [0, 1, 2] * 2
        assert not whole["next", "done"].any()

    def test_arguments_reach_the_environments(self):
        envs = counters(5, 5)
        with Collector(envs, frames_per_batch=4) as collector:
            collector.reset(1, options={"level": 3}, seed=[9])
        assert [env.last_options for env in envs] == [None, {"level": 3}]
        assert [env.seeds for env in envs] == [[], [9]]

    def test_one_seed_gives_each_lane_a_child_of_its_own(self):
        envs = counters(5, 5, 5)
        with Collector(envs, frames_per_batch=6) as collector:
            collector.reset(seed=9)
            collector.reset([2, 0], seed=9)
        assert len({env.last_seed for env in envs}) == 3
        assert [len(set(env.seeds)) for env in envs] == [1, 1, 1]  # whichever lanes are reset beside it

    def test_a_list_of_seeds_goes_to_the_lanes_as_they_were_named(self):
        envs = counters(5, 5, 5)
        with Collector(envs, frames_per_batch=6) as collector:
            collector.reset([2, 0], seed=[22, 11])
            assert [env.last_seed for env in envs] == [11, None, 22]
            for wrong in ([1], [1, 2, 3]):
                with pytest.raises(OptionError, match="one a lane"):
                    collector.reset([2, 0], seed=wrong)
            assert not collector.closed

    @pytest.mark.parametrize("seed", [np.int64(9), [np.int64(9)], np.array([9]), torch.tensor([9])])
    def test_seeds_of_many_kinds(self, seed):
        env = Counter(5)
        with Collector(env, frames_per_batch=6) as collector:
            collector.reset(seed=seed)
        assert env.seeds == [9]
        assert type(env.last_seed) is int  # numpy integers are refused by some environments

    @pytest.mark.parametrize(
        "wrong", [{"seed": -1}, {"seed": 1.5}, {"seed": "9"}, {"seed": [1.5, 2]}, {"options": 5}, {"options": "ab"}]
    )
    def test_wrong_arguments_leave_it_open(self, wrong):
        with Collector(counters(5, 5), frames_per_batch=6) as collector:
            with pytest.raises((OptionError, TypeError)):
                collector.reset(**wrong)
            assert not collector.closed
            check_batch(collector.next())

    def test_a_seed_given_here_wins_over_one_that_is_pending(self):
        envs = counters(5, 5)
        with Collector(envs, frames_per_batch=4) as collector:
            collector.set_seed([1, 2])
            collector.reset(0, seed=[9])
            check_batch(collector.next())
        assert [env.last_seed for env in envs] == [9, 2]

    def test_a_broken_off_episode_is_in_no_statistics(self):
        with Collector(Counter(5), frames_per_batch=3) as collector:
            collector.next()
            collector.reset()
            collector.next()
            assert collector.stats().episodes == 0
            collector.next()
            stats = collector.stats()
        assert (stats.episodes, stats.episode_length.mean, stats.episode_return.mean) == (1, 5, 10)

    def test_before_the_first_batch(self):
        env = Counter(3)
        with Collector(env, frames_per_batch=3) as collector:
            collector.reset()
            check_batch(collector.next())
        assert env.resets == 3


class TestSeeds:
    def collect(self, seed, make=Restless, policy=None, lanes=3, batches=4, **options):
        with Collector(make, policy, num_envs=lanes, frames_per_batch=24, **options) as collector:
            assert collector.set_seed(seed) == seed + 1
            return joined([collector.next() for _ in range(batches)])

    @pytest.mark.parametrize("policy", [None, Stochasticly, actor], ids=["random", "module", "tensordict"])
    def test_the_same_seed_gives_the_same_bits(self, policy):
        """FAULTS 105."""
        runs = []
        for outside in range(2):
            made = policy and policy()
            torch.manual_seed(0)
            if made is not None:
                for parameter in made.parameters():
                    nn.init.constant_(parameter, 0.1)
            torch.manual_seed(outside)  # whatever the program does besides
            runs.append(self.collect(7, policy=made))
        assert same(*runs)

    def test_other_seeds_give_others(self):
        one, other = self.collect(7), self.collect(8)
        assert (one["observation"] != other["observation"]).any()
        assert (one["action"] != other["action"]).any()

    def test_lanes_differ(self):
        """FAULTS 100."""
        batch = self.collect(7)
        starts = batch["observation"][:, 0, 0].tolist()
        assert len(set(starts)) == 3
        assert len({tuple(row) for row in batch["action"].tolist()}) == 3

    def test_lanes_differ_where_no_seed_is_given(self):
        with Collector(Restless, num_envs=8, frames_per_batch=8) as collector:
            collector.next()
            collector.reset()
            assert len(set(collector.next()["observation"].flatten().tolist())) > 1

    def test_neighbouring_seeds_share_no_lane(self):
        """`seed + lane` would make lane 1 of seed 7 the lane 0 of seed 8."""
        seeds = []
        for seed in range(5, 10):
            envs = counters(*[5] * 4)
            with Collector(envs, frames_per_batch=4) as collector:
                collector.set_seed(seed)
                collector.next()
            seeds += [env.last_seed for env in envs]
        assert len(set(seeds)) == 20

    def test_static_seed_gives_every_lane_the_same_stream(self):
        with Collector(Restless, num_envs=3, frames_per_batch=24) as collector:
            assert collector.set_seed(7, static_seed=True) == 7
            batch = collector.next()
        assert batch["observation"][0].tolist() == batch["observation"][1].tolist() == batch["observation"][2].tolist()

    def test_what_was_collected_before_does_not_matter(self):
        """The warm-up and ids aside, a seed begins everything anew."""
        fresh = self.collect(7)
        with Collector(Restless, num_envs=3, frames_per_batch=24) as collector:
            for _ in range(3):
                collector.next()
            collector.set_seed(7)
            later = joined([collector.next() for _ in range(4)])
        assert same(fresh.exclude(("collector", "traj_ids")), later.exclude(("collector", "traj_ids")))

    def test_the_size_of_a_batch_does_not_matter(self):
        """FAULTS 22."""
        runs = []
        for steps in (1, 7, 70):
            with Collector(Restless, num_envs=2, frames_per_batch=2 * steps) as collector:
                collector.set_seed(7)
                runs.append(joined([collector.next() for _ in range(70 // steps)]))
        assert same(runs[0], runs[1])
        assert same(runs[0], runs[2])

    def test_generators_of_the_program_are_left_alone(self):
        torch.manual_seed(0)
        before = torch.get_rng_state(), random.getstate(), repr(np.random.get_state())
        self.collect(7, policy=Stochasticly(0))
        torch.manual_seed(0)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        assert repr(np.random.get_state()) == before[2]

    def test_draws_of_the_learner_change_no_data(self):
        runs = []
        for draws in (0, 3):
            with Collector(Restless, Stochasticly(), frames_per_batch=8) as collector:
                collector.set_seed(0)
                batches = []
                for _ in range(4):
                    batches.append(collector.next())
                    torch.randn(draws)
                runs.append(joined(batches))
        assert same(*runs)

    def test_without_set_seed_torchs_seed_begins_the_streams(self):
        runs = []
        for _ in range(2):
            torch.manual_seed(11)
            with Collector(Counter, num_envs=2, frames_per_batch=40) as collector:
                runs.append(collector.next())
        assert same(*runs)

    def test_seeds_beyond_32_bits(self):
        assert same(self.collect(2**40), self.collect(2**40))
        assert not same(self.collect(2**40), self.collect(0))

    def test_a_list_of_seeds_is_used_in_order(self):
        """FAULTS 102."""
        envs = counters(5, 5, 5)
        with Collector(envs, frames_per_batch=6) as collector:
            assert collector.set_seed([3, 9, 4]) == 10
            collector.next()
        assert [env.seeds for env in envs] == [[3], [9], [4]]


class Paying(Probe):
    """Pays what the script says, episode by episode."""

    def __init__(self, script):
        super().__init__(None)
        base = Counter()
        self.observation_space, self.action_space = base.observation_space, base.action_space
        self.script = script

    def _observe(self):
        return np.array([self.t], np.float32)

    def _draw_limit(self):
        return len(self.rewards)

    @property
    def rewards(self):
        return self.script[(self.resets - 1) % len(self.script)]

    def _reward_for(self, action):
        return self.rewards[self.t]


class TestStats:
    def stats(self, envs, steps, batches, **options):
        with Collector(envs, frames_per_batch=steps * len(envs), **options) as collector:
            for _ in range(batches):
                collector.next()
            return collector.stats()

    def test_before_the_first_batch(self):
        with Collector(Counter, frames_per_batch=4) as collector:
            stats = collector.stats()
        assert stats == Stats(0, 0, 0.0, 0.0, 0, Spread(None, None, None), Spread(None, None, None), 0, None)
        assert stats.as_dict() == {
            "frames": 0,
            "batches": 0,
            "seconds": 0.0,
            "frames_per_second": 0.0,
            "episodes": 0,
            "policy_version": 0,
            "dropped": 0,
        }

    def test_it_is_frozen(self):
        stats = self.stats([Counter(3)], 4, 1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.frames = 5

    @pytest.mark.parametrize("steps", [1, 2, 3, 6, 16, 48])
    def test_returns_and_lengths_of_episodes_that_span_batches(self, steps):
        """Worked out by hand: lane 0 plays 1+2+4, 8, 16+32; lane 1 plays 100+200+300+400+500."""
        envs = [Paying([[1, 2, 4], [8], [16, 32]]), Paying([[100, 200, 300, 400, 500]])]
        stats = self.stats(envs, steps, 48 // steps)
        assert stats.frames == 96
        assert stats.batches == 48 // steps
        returns, lengths = [7, 8, 48] * 8 + [1500] * 9, [3, 1, 2] * 8 + [5] * 9
        assert stats.episodes == 33
        assert stats.episode_return == Spread(pytest.approx(sum(returns) / 33), 7, 1500)
        assert stats.episode_length == Spread(pytest.approx(sum(lengths) / 33), 1, 5)

    def test_only_the_last_hundred_episodes_count(self):
        stats = self.stats([Paying([[1000]] * 50 + [[t] for t in range(100)])], 50, 3)
        assert stats.episodes == 150
        assert stats.episode_return == Spread(49.5, 0, 99)

    def test_the_last_hundred_are_the_last_in_time_over_all_lanes(self):
        """Lane 0 has 120 episodes of one frame; lane 1 has one of 30 frames, then one of 90."""
        stats = self.stats([Paying([[1]]), Paying([[-1] * 30, [7] * 90])], 120, 1)
        assert stats.episodes == 122
        assert stats.episode_return == Spread(pytest.approx((98 - 30 + 630) / 100), -30, 630)

    def test_an_open_episode_does_not_count(self):
        stats = self.stats([Counter(None)], 50, 2)
        assert (stats.episodes, stats.episode_return.mean, stats.episode_length.max) == (0, None, None)

    @pytest.mark.parametrize("end", ["terminated", "truncated", "both"])
    def test_every_end_counts(self, end):
        stats = self.stats([Counter(4, end=end)], 6, 2)
        assert (stats.episodes, stats.episode_return.mean, stats.episode_length.mean) == (3, 6, 4)

    def test_limits_of_ours_count_and_soft_truncations_do_not(self):
        stats = self.stats([Counter(None)], 5, 4, max_frames_per_traj=4, set_truncated=True)
        assert (stats.episodes, stats.episode_return.mean, stats.episode_length.mean) == (5, 6, 4)

    @pytest.mark.parametrize("wild", [math.nan, math.inf, 1e30])
    @pytest.mark.parametrize("steps", [1, 3, 24])
    def test_a_wild_reward_spoils_no_other_episode(self, wild, steps):
        """NaN, inf, or so large that a small one is lost beside it."""
        with Collector(Paying([[1, wild], [1, 2], [3]]), frames_per_batch=steps) as collector:
            for _ in range(24 // steps):
                collector.next()
            returns = sorted(collector.state_dict()["episodes"]["returns"], key=str)
        wanted = [1 + wild] * 5 + [3.0] * 9
        assert [value for value in returns if value == 3] == wanted[5:]

    def test_returns_are_summed_in_double_precision(self):
        stats = self.stats([Paying([[2.0**24] + [1.0] * 100])], 101, 1)
        assert stats.episode_return.mean == 2**24 + 100

    def test_seconds_and_speed(self):
        with Collector(Counter, frames_per_batch=400) as collector:
            collector.next()
            first = collector.stats()
            assert first.frames_per_second == pytest.approx(400 / first.seconds)
            assert collector.stats() == first  # what the caller does takes no collecting time
            collector.next()
            assert collector.stats().seconds > first.seconds

    @pytest.mark.parametrize("lanes", [None, 3])
    @pytest.mark.parametrize("policy", [None, "module"])
    def test_shares_of_time_add_up_to_one(self, lanes, policy):
        with Collector(
            Counter, policy and Stochasticly(), num_envs=lanes, frames_per_batch=600, total_frames=6000
        ) as collector:
            for _ in collector:
                shares = dataclasses.astuple(collector.stats().time)
                assert math.isclose(sum(shares), 1)
                assert all(0 <= share <= 1 for share in shares)

    def test_a_slow_environment_takes_the_time(self):
        class Slow(Counter):
            def step(self, action):
                end = time.perf_counter() + 0.0005
                while time.perf_counter() < end:
                    pass
                return super().step(action)

        stats = self.stats([Slow(None)], 500, 2)
        assert stats.time.env > 0.5  # 0.95 on a machine that does nothing else

    def test_as_dict_is_flat_and_all_numbers(self):
        with Collector(Counter(3), Stochasticly(), frames_per_batch=10) as collector:
            collector.next()
            flat = collector.stats().as_dict()
        assert all(isinstance(value, int | float) for value in flat.values())
        parts = [f"{name}/{part}" for name in ("episode_return", "episode_length") for part in ("mean", "min", "max")]
        shares = [f"time/{part}" for part in ("env", "policy", "writing", "elsewhere")]
        assert set(flat) == {
            "frames",
            "batches",
            "seconds",
            "frames_per_second",
            "dropped",
            "episodes",
            "policy_version",
            *parts,
            *shares,
        }
        assert flat["episode_length/mean"] == 3
        json.dumps(flat)

    def test_tagged_workers_are_not_needed(self):
        assert self.stats([Tagged(0, 2), Tagged(1, 3)], 6, 1).episodes == 5


class TestWhatAReviewFound:
    def test_a_load_after_an_interrupted_batch_is_not_undone(self):
        with Collector(Counter, Stochasticly(), frames_per_batch=4) as collector:
            state = collector.state_dict()
        calls = []

        def interrupting(batch):
            calls.append(1)
            if len(calls) == 1:
                signal.raise_signal(signal.SIGINT)
            return batch

        with Collector(
            Counter, Stochasticly(), frames_per_batch=4, init_random_frames=8, postproc=interrupting
        ) as collector:
            with pytest.raises(KeyboardInterrupt):
                collector.next()
            collector.load_state_dict(state)
            assert (collector.next()["collector", "policy_version"] == 0).all()

    def test_environments_that_draw_from_torch_when_reset_are_reproducible_and_leave_the_programs_stream(self):
        class Drawing(Counter):
            def _observe(self):
                return np.array([self.start + self.t], np.float32)

            def reset(self, **kwargs):
                self.start = float(torch.rand(()))
                return super().reset(**kwargs)

        firsts = []
        for _ in range(2):
            with Collector(Drawing, frames_per_batch=4) as collector:
                collector.set_seed(0)
                before = torch.get_rng_state()
                firsts.append(collector.next()["observation"][0].item())
                collector.reset()
                assert torch.equal(torch.get_rng_state(), before)
        assert firsts[0] == firsts[1]

    def test_states_of_environments_are_copies(self):
        class Moving(Counter):
            weights = torch.zeros(2)

            def state_dict(self):
                return {"weights": self.weights, "list": [self.weights]}

        with Collector(Moving, frames_per_batch=4) as collector:
            state = collector.state_dict()
            Moving.weights += 1
        saved = state["env_state_dict"]["0"]["env"]
        assert not saved["weights"].any()
        assert not saved["list"][0].any()
        Moving.weights.zero_()

    def test_a_list_of_seeds_is_not_static(self):
        with (
            Collector(counters(2, 2), frames_per_batch=4) as collector,
            pytest.raises(OptionError, match="static_seed"),
        ):
            collector.set_seed([1, 2], static_seed=True)
