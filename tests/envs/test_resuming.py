"""The middle of an episode, saved and put back: what an environment does next is the same."""

from __future__ import annotations

import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import wrappers

from rlcollect.envs.journal import Journal, checksum
from rlcollect.envs.resuming import middle_state, put_in_the_middle
from rlcollect.envs.saving import as_plain, as_was
from rlcollect.testing import Counter

CLASSIC = ("CartPole-v1", "Pendulum-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Acrobot-v1")
WRAPPERS = {
    "none": lambda env: env,
    "statistics": wrappers.RecordEpisodeStatistics,
    "normal observations": wrappers.NormalizeObservation,
    "normal rewards": lambda env: wrappers.NormalizeReward(env, gamma=0.9),
    "stacks": lambda env: wrappers.FrameStackObservation(env, 3),
    "delays": lambda env: wrappers.DelayObservation(env, 2),
    "the time": wrappers.TimeAwareObservation,
    "two": lambda env: wrappers.ClipReward(wrappers.FlattenObservation(env), -0.5, 0.5),
}


class Own(wrappers.TransformReward):
    """Somebody else's wrapper."""


class Says(gym.Wrapper):
    """Says its own state, and that of what is inside."""

    def __init__(self, env):
        super().__init__(env)
        self.count = 0

    def step(self, action):
        self.count += 1
        return self.env.step(action)

    def get_state(self):
        return {"count": self.count, "inside": middle_state(self.env)}

    def set_state(self, state):
        self.count = state["count"]
        put_in_the_middle(self.env, state["inside"])


def run(env, steps, seed):
    """What the env shows under random actions."""
    env.action_space.seed(seed)
    shown = []
    for _ in range(steps):
        observation, reward, terminated, truncated, _ = env.step(env.action_space.sample())
        shown.append((np.asarray(observation).tobytes(), reward, terminated, truncated))
        if terminated or truncated:
            shown.append(np.asarray(env.reset()[0]).tobytes())
    return shown


def check_goes_on(make, steps=40):
    """One env that goes on, and another in the place of which it was put."""
    one, other = make(), make()
    one.reset(seed=3)
    run(one, 7, seed=1)
    other.reset(seed=9)
    run(other, 12, seed=2)
    state = pickle.loads(pickle.dumps(as_plain(middle_state(one))))
    before = as_plain(middle_state(one))
    assert put_in_the_middle(other, as_was(state))
    assert run(one, steps, seed=5) == run(other, steps, seed=5)
    third = make()  # what was saved is no part of what went on
    third.reset(seed=4)
    assert put_in_the_middle(third, as_was(before))
    one.close(), other.close(), third.close()


class TestGymnasiums:
    @pytest.mark.parametrize("name", CLASSIC)
    def test_classic_control(self, name):
        check_goes_on(lambda: gym.make(name, max_episode_steps=11))

    @pytest.mark.parametrize("wrapper", WRAPPERS)
    def test_under_its_own_wrappers(self, wrapper):
        check_goes_on(lambda: WRAPPERS[wrapper](gym.make("Pendulum-v1", max_episode_steps=11)))

    def test_an_episode_that_has_not_begun_to_move(self):
        env, other = gym.make("CartPole-v1"), gym.make("CartPole-v1")
        env.reset(seed=3), other.reset(seed=4)
        assert put_in_the_middle(other, middle_state(env))
        assert run(env, 20, 1) == run(other, 20, 1)


class TestOthers:
    def test_what_says_its_state_is_asked(self):
        check_goes_on(lambda: Says(gym.make("Pendulum-v1", max_episode_steps=11)))
        check_goes_on(lambda: wrappers.TimeAwareObservation(Says(gym.make("Pendulum-v1", max_episode_steps=11))))

    @pytest.mark.parametrize(
        "make",
        [
            Counter,
            lambda: Own(gym.make("CartPole-v1"), abs),
            lambda: wrappers.ClipReward(Counter(), 0, 1),
            lambda: wrappers.TransformReward(gym.make("CartPole-v1"), abs),
            lambda: wrappers.TransformObservation(gym.make("CartPole-v1"), abs, None),
        ],
        ids=["an environment", "a wrapper", "an environment under a wrapper", "a function", "another function"],
    )
    def test_nobody_guesses(self, make):
        env = make()
        env.reset()
        assert middle_state(env) is None

    def test_what_it_was_made_with_stays(self):
        one, other = gym.make("CartPole-v1", max_episode_steps=10), gym.make("CartPole-v1", max_episode_steps=200)
        other.unwrapped.gravity = 1.0
        one.reset(seed=3), other.reset(seed=4)
        assert put_in_the_middle(other, middle_state(one))
        assert other.get_wrapper_attr("_max_episode_steps") == 200
        assert other.unwrapped.gravity == 1.0
        assert (other.unwrapped.state == one.unwrapped.state).all()

    @pytest.mark.parametrize(
        "make",
        [
            Counter,
            lambda: wrappers.TimeAwareObservation(gym.make("CartPole-v1")),
            lambda: gym.make("Acrobot-v1"),
            lambda: gym.make("MountainCar-v0"),
        ],
        ids=["unknown", "another wrapper", "another task", "a third"],
    )
    def test_one_of_another_kind_is_left_alone(self, make):
        one, other = gym.make("CartPole-v1"), make()
        one.reset()
        other.reset()
        assert not put_in_the_middle(other, middle_state(one))


class TestPlainValues:
    @pytest.mark.parametrize(
        "value",
        [
            None,
            True,
            3,
            2**80,
            0.1,
            "text",
            (1, [2, (3,)]),
            {"a": 1, "b": {"c": (1.5,)}},
            {1: "not a text"},
            np.float32(0.1),
            np.int8(-3),
            np.bool_(True),
            {2, 3},
            np.longdouble(0.1),
        ],
        ids=repr,
    )
    def test_come_back(self, value):
        back = as_was(as_plain(value))
        assert back == value
        assert type(back) is type(value)

    @pytest.mark.parametrize(
        "dtype", ["float32", "float64", "int8", "uint8", "uint16", "uint64", "bool", "U3", "O", ">f4", "longdouble"]
    )
    def test_arrays_come_back(self, dtype):
        array = np.array([[1, 0], [0, 1]]).astype(dtype)
        back = as_was(as_plain(array))
        assert back.dtype == array.dtype
        assert (back == array).all()

    def test_a_mask_comes_back(self):
        back = as_was(as_plain(np.ma.masked_array([1, 2], [True, False])))
        assert back.mask.tolist() == [True, False]

    def test_they_are_copies(self):
        array = np.zeros(3)
        plain = as_plain({"a": array})
        array += 1
        back = as_was(plain)
        assert back["a"].tolist() == [0, 0, 0]
        back["a"] += 1
        assert as_was(plain)["a"].tolist() == [0, 0, 0]

    def test_any_loader_takes_them(self, tmp_path):
        wide = [np.full(2, np.iinfo(kind).max, kind) for kind in (np.uint16, np.uint32, np.uint64)]
        value = {"array": np.zeros(3, np.uint8), "other": {1, 2}, "deep": [{"number": np.float32(2)}], "wide": wide}
        torch.save(pickle.loads(pickle.dumps(as_plain(value))), tmp_path / "value.pt")  # from a worker, to a file
        back = as_was(torch.load(tmp_path / "value.pt", weights_only=True))
        assert back["other"] == {1, 2}
        assert back["deep"] == [{"number": np.float32(2)}]
        for array, own in zip(back["wide"], wide, strict=True):
            assert array.dtype == own.dtype
            assert (array == own).all()


class TestJournal:
    def made(self):
        env = gym.make("CartPole-v1")
        journal = Journal([env])
        return env, journal, journal.noting(0, env.reset)

    def decode(self, leaves):
        return [int(action) for action in leaves[0]]

    def stored(self, observation, info):
        return [observation[None]]

    def test_plays_what_it_was_told(self):
        env, journal, reset = self.made()
        observation, _ = reset()
        observation, _ = reset()
        actions, shown, rewards = np.array([0, 1, 1, 0, 1]), [], []
        for action in actions:
            shown.append(observation)
            observation, reward, *_ = env.step(int(action))
            rewards.append(np.float32(reward))
        for part in (slice(0, 2), slice(2, 5)):
            journal.go_on(0, [actions[part]], [np.array(shown[part]), np.array(rewards[part])])
        told = journal.told(0)
        after = env.np_random.bit_generator.state
        run(env, 30, 4)
        played = journal.play(0, told, self.decode, self.stored)
        assert played.observation.tobytes() == observation.tobytes()
        assert played.shown == told["shown"] == checksum((), [np.array(shown), np.array(rewards)])
        assert not played.has_ended
        assert env.np_random.bit_generator.state == after
        assert as_plain(journal.told(0)["kwargs"]) == as_plain(told["kwargs"])
        assert journal.told(0)["actions"][0].tolist() == actions.tolist(), "it can be told again"

    def test_a_reset_begins_a_new_page(self):
        env, journal, reset = self.made()
        assert journal.told(0) is None
        reset(seed=3)
        journal.go_on(0, [np.array([1])], [np.zeros((1, 4))])
        reset(options={"low": 0.0})
        told = journal.told(0)
        assert (told["kwargs"], told["actions"], told["shown"]) == ({"options": {"low": 0.0}}, [], ())
        env.close()

    def test_one_that_ended_on_the_way(self):
        env, journal, reset = self.made()
        reset(seed=3)
        journal.go_on(0, [np.ones(400, np.int64)], [np.zeros((400, 4), np.float32)])
        assert journal.play(0, journal.told(0), self.decode, self.stored).has_ended
        env.close()

    def test_a_checksum_is_of_all_rows_in_order(self):
        rows = np.arange(12.0).reshape(6, 2)
        assert checksum(checksum((), [rows[:2]]), [rows[2:]]) == checksum((), [rows])
        assert checksum((), [rows[::-1]]) != checksum((), [rows])
