"""What an environment does at the ends of its episodes, and what a batch then says: one lane as a plain loop has it."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.wrappers import TimeLimit

from rlcollect import Collector
from rlcollect.testing import Counter, Reuser, Tagged, check_batch
from tests.collectors.helpers import after, checked, counters, flag, ids, joined, seen

FLAGS = {"terminated": (1, 0), "truncated": (0, 1), "both": (1, 1)}


def zero(observation):
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class TestTheThreeEnds:
    @pytest.mark.parametrize("end", sorted(FLAGS))
    @pytest.mark.parametrize("lanes", [None, 1, 3])
    @pytest.mark.parametrize("length", [1, 2, 5])
    def test_flags_are_told_apart_and_both_stay_both(self, end, lanes, length):
        """FAULTS 13: `done` is either; both at once stays both."""
        make = functools.partial(Counter, length, end=end)
        with Collector(make, num_envs=lanes, frames_per_batch=12, total_frames=60) as collector:
            batch = joined(list(checked(collector))).reshape(lanes or 1, -1)
        last = [int(t % length == length - 1) for t in range(60 // (lanes or 1))]
        terminated, truncated = FLAGS[end]
        for lane in range(lanes or 1):
            assert flag(batch, "done")[lane] == last
            assert flag(batch, "terminated")[lane] == [terminated * value for value in last]
            assert flag(batch, "truncated")[lane] == [truncated * value for value in last]
        assert not any(batch[name].any() for name in ("done", "terminated", "truncated"))

    @pytest.mark.parametrize("end", sorted(FLAGS))
    @pytest.mark.parametrize("observation", ["box", "scalar", "discrete", "dict", "tuple"])
    def test_the_last_observation_is_the_true_one_and_the_next_is_the_resets(self, end, observation):
        """FAULTS 1, 11: next obs of the last frame is L, also after a truncation; the frame after it starts at 0."""
        make = functools.partial(Counter, 3, end=end, observation=observation)
        with Collector(make, num_envs=2, frames_per_batch=10, total_frames=40) as collector:
            batch = joined(list(checked(collector)))
        count = torch.arange(20) % 3
        for key in batch["next"].keys(include_nested=True, leaves_only=True):
            if key not in ("reward", "done", "terminated", "truncated"):
                for values, expected in ((batch[key], count), (batch["next"][key], count + 1)):
                    flat = values.reshape(2, 20, -1)
                    assert (flat == expected[None, :, None]).all(), key

    @pytest.mark.parametrize("lanes", [None, 2])
    def test_the_policy_saw_the_first_observation_of_each_episode(self, lanes):
        """FAULTS 1: 0 after every end, and the batch holds what it was given."""
        given = []

        def policy(observation):
            given.append(observation.clone())
            return zero(observation)

        with Collector(
            functools.partial(Counter, 3), policy, num_envs=lanes, frames_per_batch=8, total_frames=32
        ) as collector:
            batch = joined(list(collector))
        assert torch.equal(torch.stack(given[1:], -2), batch["observation"])
        assert all((observation == t % 3).all() for t, observation in enumerate(given[1:]))

    @pytest.mark.parametrize("end", sorted(FLAGS))
    def test_an_env_that_uses_its_array_again(self, end):
        """FAULTS 6."""
        with Collector(Reuser(3, end=end), frames_per_batch=5, total_frames=30) as collector:
            batch = joined(list(checked(collector)))
        assert after(batch) == [t % 3 + 1 for t in range(30)]
        assert seen(batch) == [t % 3 for t in range(30)]

    def test_an_end_on_the_last_frame_of_a_batch(self):
        with Collector(Counter(4), frames_per_batch=4, total_frames=12) as collector:
            batches = list(checked(collector))
        for batch in batches:
            assert seen(batch) == [0, 1, 2, 3]
            assert after(batch) == [1, 2, 3, 4]
            assert flag(batch, "done") == [0, 0, 0, 1]
        assert [set(ids(batch)) for batch in batches] == [{ids(batch)[0]} for batch in batches]

    def test_ends_on_neighbouring_frames(self):
        with Collector(counters(1, 2), frames_per_batch=10) as collector:
            check_batch(batch := collector.next())
        assert flag(batch, "done") == [[1] * 5, [0, 1, 0, 1, 0]]
        assert len(set(ids(batch)[0])) == 5

    def test_the_reward_stands_on_its_own_frame(self):
        with Collector(counters(2, 3), frames_per_batch=10) as collector:
            batch = collector.next()
        assert batch["next", "reward"].squeeze(-1).tolist() == [[0, 1, 0, 1, 0], [0, 1, 2, 0, 1]]
        assert batch["next", "reward"].dtype is torch.float32


class TestPartialResets:
    def test_each_lane_keeps_its_own_counts(self):
        """FAULTS 4."""
        with Collector(counters(2, 3, 5), frames_per_batch=21, total_frames=90, record="step_count") as collector:
            batch = joined(list(checked(collector)))
        for lane, length in enumerate([2, 3, 5]):
            expected = [t % length for t in range(30)]
            assert batch["step_count"][lane].flatten().tolist() == expected == seen(batch)[lane]

    def test_ids_go_up_in_the_order_in_which_episodes_begin(self):
        with Collector(counters(2, 3), frames_per_batch=12) as collector:
            assert ids(collector.next()) == [[0, 0, 2, 2, 4, 4], [1, 1, 1, 3, 3, 3]]


class TestTagged:
    """FAULTS 7: an environment whose rows say where they come from."""

    @pytest.mark.parametrize("options", [{}, {"max_frames_per_traj": 3}, {"reset_at_each_iter": True}], ids=str)
    @pytest.mark.parametrize("end", sorted(FLAGS))
    def test_no_row_pairs_two_episodes_and_none_is_made_up(self, options, end):
        envs = [Tagged(lane, length, end=end) for lane, length in enumerate([1, 2, 4, 9])]
        with Collector(envs, frames_per_batch=20, total_frames=240, **options) as collector:
            batch = joined(list(checked(collector)))
        before, later = batch["observation"], batch["next", "observation"]
        assert torch.equal(before[..., :2], later[..., :2])  # worker and episode
        assert torch.equal(before[..., 2] + 1, later[..., 2])
        assert torch.equal(before[..., 0], torch.arange(4.0)[:, None].expand(4, 60))
        assert batch.numel() == 240 == sum(env.steps for env in envs)

    def test_ids_and_episodes_are_one_to_one(self):
        """FAULTS 20: over batches, a new seed and explicit resets."""
        envs = [Tagged(lane, 4, random_length=True) for lane in range(3)]
        with Collector(envs, frames_per_batch=15) as collector:
            batches = [collector.next()]
            collector.set_seed(3)
            batches.append(collector.next())
            collector.reset([0, 2])
            batches += [collector.rollout(), collector.next()]
        batch = joined(list(checked(batches)))
        episodes = [tuple(row) for row in batch["observation"][..., :2].reshape(-1, 2).tolist()]
        pairs = set(zip(batch["collector", "traj_ids"].flatten().tolist(), episodes, strict=True))
        assert len(pairs) == len({one for one, _ in pairs}) == len({other for _, other in pairs})
        assert len(pairs) > 12

    def test_random_ends_over_many_batches(self):
        envs = [Tagged(lane, 6, random_length=True) for lane in range(4)]
        with Collector(envs, frames_per_batch=28, total_frames=2800, max_frames_per_traj=5) as collector:
            collector.set_seed(0)
            batch = joined(list(checked(collector)))
            assert collector.stats().episodes == int(batch["next", "done"].sum())
        assert torch.equal(batch["observation"][..., :2], batch["next", "observation"][..., :2])
        ended = batch["next", "done"][..., 0]
        starts = batch["observation"][:, 1:, 2] == 0
        assert torch.equal(starts, ended[:, :-1])
        assert [env.resets for env in envs] == [2 + int(lane.sum()) for lane in ended]  # construction, set_seed


class TestTimeLimit:
    def test_it_truncates(self):
        env = Counter(None)
        with Collector(TimeLimit(env, 3), frames_per_batch=9, total_frames=18) as collector:
            batch = joined(list(checked(collector)))
        assert flag(batch, "truncated") == flag(batch, "done") == [0, 0, 1] * 6
        assert not any(flag(batch, "terminated"))
        assert after(batch) == [1, 2, 3] * 6
        assert env.resets == 7

    def test_both_flags_stand_where_the_env_ends_on_that_very_step(self):
        with Collector(TimeLimit(Counter(3), 3), frames_per_batch=6) as collector:
            batch = collector.next()
        assert flag(batch, "terminated") == flag(batch, "truncated") == [0, 0, 1] * 2

    def test_by_gymnasiums_own_register(self):
        with Collector(
            "CartPole-v1", zero, frames_per_batch=50, create_env_kwargs={"max_episode_steps": 5}, num_envs=2
        ) as collector:
            batch = collector.next()
        check_batch(batch)
        assert flag(batch, "truncated") == [[0, 0, 0, 0, 1] * 5] * 2
        assert not any(sum(flag(batch, "terminated"), []))  # noqa: RUF017


TAXI = "Taxi-v4" if "Taxi-v4" in gym.registry else "Taxi-v3"  # by the version of Gymnasium


class TestAgainstAPlainLoop:
    @pytest.mark.parametrize("name", ["CartPole-v1", "MountainCarContinuous-v0", TAXI, "FrozenLake-v1", "Acrobot-v1"])
    def test_environments_of_gymnasium(self, name):
        """FAULTS 18: the same seed and the same actions, every key exactly, over three batches and several ends."""
        limit = 17
        with Collector(name, frames_per_batch=40, create_env_kwargs={"max_episode_steps": limit}) as collector:
            collector.set_seed([5])
            batch = joined([collector.next() for _ in range(3)])
        env = gym.make(name, max_episode_steps=limit)
        observation, _ = env.reset(seed=5)
        for t in range(120):
            row = batch[t]
            action = row["action"].numpy()
            action = env.action_space.dtype.type(action) if action.shape == () else action
            assert np.array_equal(row["observation"].numpy(), np.asarray(observation, row["observation"].numpy().dtype))
            observation, reward, terminated, truncated, _ = env.step(action)
            assert np.array_equal(
                row["next", "observation"].numpy(), np.asarray(observation).astype(row["observation"].numpy().dtype)
            )
            assert row["next", "reward"].item() == np.float32(reward)
            assert (row["next", "terminated"].item(), row["next", "truncated"].item()) == (terminated, truncated)
            if terminated or truncated:
                observation, _ = env.reset()
        assert batch["next", "done"].sum() >= 7
        env.close()

    def test_action_masks_reach_the_policy_and_bind_random_actions(self):
        """Taxi tells in its info which actions do anything."""
        with Collector(TAXI, frames_per_batch=300, info_keys="action_mask") as collector:
            batch = collector.next()
        assert batch["action_mask"].gather(-1, batch["action"][:, None].long()).all()
        assert torch.equal(
            batch["action_mask"][1:][~batch["next", "done"][:-1, 0]],
            batch["next", "action_mask"][:-1][~batch["next", "done"][:-1, 0]],
        )
        assert torch.equal(batch["next", "info", "action_mask"], batch["next", "action_mask"])
