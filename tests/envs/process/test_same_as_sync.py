"""What `ProcessVectorEnv` gives is what `SyncVectorEnv` gives in mode SAME_STEP, bit for bit."""

from __future__ import annotations

import functools

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.wrappers import vector as wrappers

from rlcollect import OptionError, ProcessVectorEnv
from tests.envs.process.helpers import SPACES, Random, Steps, check_same, processes, sync

pytestmark = pytest.mark.timeout(60)


def check_equal(make, envs=5, workers=2, steps=60, wrap=lambda env: env, **options):
    makers = [functools.partial(gym.make, make) if isinstance(make, str) else make] * envs
    ours, theirs = wrap(processes(make, envs, workers, **options)), wrap(sync(makers))
    try:
        assert ours.observation_space == theirs.observation_space
        assert ours.action_space == theirs.action_space
        assert ours.single_observation_space == theirs.single_observation_space
        assert ours.metadata == theirs.metadata
        check_same(ours.reset(seed=7, options={"a": 1}), theirs.reset(seed=7, options={"a": 1}))
        ours.action_space.seed(1)
        ended = 0
        for _ in range(steps):
            actions = ours.action_space.sample()
            got, wanted = ours.step(actions), theirs.step(actions)
            check_same(got, wanted)
            assert ours.observation_space.contains(got[0])
            ended += int((got[2] | got[3]).sum())
        return ended
    finally:
        ours.close()
        theirs.close()


@pytest.mark.parametrize(("name", "steps"), [("CartPole-v1", 100), ("Pendulum-v1", 210), ("Taxi-v4", 210)])
def test_gymnasiums_environments(name, steps):
    assert check_equal(name, steps=steps) > 0


@pytest.mark.parametrize("space", SPACES)
def test_observation_spaces(space):
    assert check_equal(functools.partial(Random, space)) > 10


@pytest.mark.parametrize("space", SPACES)
def test_action_spaces(space):
    check_equal(functools.partial(Random, "discrete", space), envs=3, steps=10)


@pytest.mark.parametrize(("envs", "workers"), [(1, 1), (3, 3), (7, 3)])
def test_lanes_are_shared_out(envs, workers):
    check_equal(functools.partial(Random, "mixed"), envs, workers, steps=20)


def test_without_infos():
    check_equal(functools.partial(Random, infos=False))


class TestUnderWrappers:
    @pytest.mark.parametrize(
        ("make", "wrap"),
        [
            (Random, wrappers.NormalizeReward),
            (Random, lambda env: wrappers.ClipReward(env, 0.1, 0.5)),
            ("Pendulum-v1", lambda env: wrappers.RescaleAction(env, np.float32(-1), np.float32(1))),
        ],
    )
    def test_it_is_the_same(self, make, wrap):
        check_equal(make, wrap=wrap)

    def test_statistics_of_episodes(self):
        ours = wrappers.RecordEpisodeStatistics(processes("CartPole-v1"))
        theirs = wrappers.RecordEpisodeStatistics(sync([functools.partial(gym.make, "CartPole-v1")] * 4))
        ours.reset(seed=0), theirs.reset(seed=0)
        ended = 0
        for _ in range(40):
            got, wanted = ours.step(np.zeros(4, np.int64))[4], theirs.step(np.zeros(4, np.int64))[4]
            assert ("episode" in got) == ("episode" in wanted)
            if "episode" in got:
                check_same({**got["episode"], "t": 0}, {**wanted["episode"], "t": 0})
                ended += got["_episode"].sum()
        assert ended > 4
        ours.close()

    def test_infos_as_lists(self):
        ours, theirs = (wrappers.DictInfoToList(envs) for envs in (processes(Random), sync([Random] * 4)))
        ours.reset(seed=0), theirs.reset(seed=0)
        for _ in range(10):
            check_same(ours.step(np.zeros(4, np.int64)), theirs.step(np.zeros(4, np.int64)))
        ours.close()


class TestReset:
    def both(self, space="mixed"):
        return processes(functools.partial(Random, space)), sync([functools.partial(Random, space)] * 4)

    @pytest.mark.parametrize("seed", [3, [5, 1, 9, 4], [5, None, 9, 4]])
    def test_with_seeds(self, seed):
        ours, theirs = self.both()
        with ours:
            if seed == [5, None, 9, 4]:
                check_same(ours.reset(seed=0), theirs.reset(seed=0))
            check_same(ours.reset(seed=seed), theirs.reset(seed=seed))
            check_same(ours.reset(), theirs.reset())
            actions = ours.action_space.sample()
            check_same(ours.step(actions), theirs.step(actions))

    @pytest.mark.parametrize("lanes", [[0], [1, 2], [0, 1], [0, 1, 2, 3]])
    def test_of_some_lanes(self, lanes):
        ours, theirs = self.both()
        mask = np.isin(np.arange(4), lanes)
        with ours:
            check_same(ours.reset(seed=1), theirs.reset(seed=1))
            for seed in (None, 5):
                actions = ours.action_space.sample()
                check_same(ours.step(actions), theirs.step(actions))
                options = {"reset_mask": mask, "more": 1}
                check_same(ours.reset(seed=seed, options=dict(options)), theirs.reset(seed=seed, options=dict(options)))

    def test_the_users_options_stay(self):
        with processes(Random) as envs:
            envs.reset()
            options = {"reset_mask": np.array([True, False, False, False])}
            envs.reset(options=options)
            assert "reset_mask" in options

    @pytest.mark.parametrize("mask", [[True] * 4, np.zeros(4, bool), np.ones(3, bool), np.ones(4)])
    def test_masks_that_do_not_fit(self, mask):
        with processes(Random) as envs, pytest.raises(OptionError, match="reset_mask"):
            envs.reset(options={"reset_mask": mask})

    def test_seeds_that_do_not_fit(self):
        with processes(Random) as envs, pytest.raises(OptionError, match="4 lanes; 3 came"):
            envs.reset(seed=[1, 2, 3])


class TestGroups:
    @pytest.mark.parametrize("space", ["box", "mixed"])
    def test_each_gets_its_lanes(self, space):
        make = functools.partial(Random, space)
        ours, parts = processes(make, 6, 2, num_groups=2), [sync([make] * 3), sync([make] * 3)]
        with ours:
            assert [list(ours.lanes(group)) for group in (0, 1)] == [[0, 1, 2], [3, 4, 5]]
            ours.reset(seed=4)
            for group, part in enumerate(parts):
                part.reset(seed=4 + 3 * group)
            actions = np.zeros(3, np.int64)
            ours.send(1, actions)
            for _ in range(30):
                ours.send(0, actions)
                check_same(ours.recv(1), parts[1].step(actions))
                ours.send(1, actions)
                check_same(ours.recv(0), parts[0].step(actions))
            ours.recv(1)

    def test_step_takes_all(self):
        check_equal(functools.partial(Random, "dict"), 4, 4, num_groups=2)

    def test_actions_without_a_form(self):
        make = functools.partial(Random, "box", "text")
        with processes(make, 4, 2, num_groups=2) as ours:
            theirs = sync([make] * 2)
            ours.reset(seed=0), theirs.reset(seed=2)
            ours.send(1, ("ab", "cd"))
            check_same(ours.recv(1), theirs.step(("ab", "cd")))

    def test_what_is_out_of_order_is_refused(self):
        actions = np.zeros(2, np.int64)
        with processes(Random, 4, 2, num_groups=2) as envs:
            with pytest.raises(OptionError, match="call reset"):
                envs.send(0, actions)
            envs.reset(seed=0)
            with pytest.raises(OptionError, match="begin one first"):
                envs.recv(0)
            with pytest.raises(OptionError, match="0 to 1"):
                envs.send(2, actions)
            envs.send(0, actions)
            with pytest.raises(OptionError, match="under way"):
                envs.send(0, actions)
            with pytest.raises(OptionError, match="under way"):
                envs.step(np.zeros(4, np.int64))
            with pytest.raises(OptionError, match="No step of group 1"):
                envs.step_wait()
            assert len(envs.recv(0)[1]) == 2


class TestTheRest:
    def test_calls_and_attributes(self):
        with processes(Random) as envs:
            envs.reset(seed=1)
            assert envs.call("get_wrapper_attr", "t") == (0, 0, 0, 0)
            assert envs.get_attr("t") == (0, 0, 0, 0)
            envs.set_attr("t", 3)
            envs.set_attr("mark", [1, 2, 3, 4])
            assert envs.get_attr("t") == (3, 3, 3, 3)
            assert envs.get_attr("mark") == (1, 2, 3, 4)
            assert envs.np_random_seed == (1, 2, 3, 4)
            assert len(envs.np_random) == 4
            with pytest.raises(OptionError, match="4 lanes; 2 came"):
                envs.set_attr("t", [1, 2])

    def test_between_send_and_recv(self):
        ours, theirs = processes(Random), sync([Random] * 4)
        with ours:
            ours.reset(seed=0), theirs.reset(seed=0)
            actions = np.zeros(4, np.int64)
            for _ in range(20):
                ours.step_async(actions)
                assert len(ours.get_attr("t")) == 4
                check_same(ours.step_wait(), theirs.step(actions))

    def test_render(self):
        make = functools.partial(gym.make, "Taxi-v4", render_mode="ansi")
        with processes("Taxi-v4", 2, 2, create_env_kwargs={"render_mode": "ansi"}) as envs:
            theirs = sync([make] * 2)
            assert envs.render_mode == "ansi"
            envs.reset(seed=0), theirs.reset(seed=0)
            assert envs.render() == theirs.render()

    def test_what_it_says_of_itself(self):
        with processes("CartPole-v1") as envs:
            assert envs.spec.id == "CartPole-v1"
            assert repr(envs) == "ProcessVectorEnv(CartPole-v1, num_envs=4)"
            assert (envs.num_envs, envs.num_groups, envs.closed, envs.unwrapped) == (4, 1, False, envs)
        assert envs.closed

    def test_copies_and_the_same_arrays(self):
        actions = np.zeros(4, np.int64)
        with processes("CartPole-v1") as envs:
            first = envs.reset(seed=0)[0]
            assert envs.step(actions)[0] is not first
        with processes("CartPole-v1", copy=False) as envs:
            first = envs.reset(seed=0)[0]
            assert envs.step(actions)[0] is first
        assert np.isfinite(first).all()  # it can still be read

    def test_what_is_too_long_for_the_page(self):
        def talkative():
            env = Steps()
            step = env.step
            env.step = lambda action: (*step(action)[:4], {"long": "x" * 300_000})
            return env

        with processes(talkative) as envs:
            envs.reset(seed=0)
            for _ in range(3):
                infos = envs.step(np.zeros(4, np.int64))[4]
                assert [len(text) for text in infos["long"]] == [300_000] * 4

    @pytest.mark.parametrize("actions", [np.zeros(3, np.int64), np.zeros(4), [[0], [0], [0], [0]]])
    def test_actions_that_do_not_fit(self, actions):
        with processes("CartPole-v1") as envs:
            envs.reset(seed=0)
            with pytest.raises(OptionError, match="actions should have"):
                envs.step(actions)
            envs.step(np.zeros(4, np.int64))

    def test_generators_of_the_processes_differ_and_follow_the_seed(self):
        def draws():
            import random

            return random.random(), np.random.random()

        class Drawing(Random):
            def drawn(self):
                return draws()

        found = []
        for _ in range(2):
            with processes(Drawing, 2, 2) as envs:
                envs.reset(seed=3)
                found.append(envs.call("drawn"))
        assert found[0] == found[1]
        assert found[0][0] != found[0][1]


class TestOptions:
    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"num_envs": 0}, "num_envs"),
            ({"num_workers": 5}, "more than there are lanes"),
            ({"num_groups": 3}, "cannot be divided"),
            ({"timeout": 0}, "timeout"),
            ({"worker_timeout": "1"}, "worker_timeout"),
            ({"on_worker_failure": "ignore"}, "on_worker_failure"),
            ({"max_restarts": -1}, "max_restarts"),
            ({"start_method": "thread"}, "start_method"),
            ({"make_env": [Random] * 3}, "sequence of 3"),
            ({"make_env": 3}, "lane 0 it is 3"),
            ({"make_env": Random()}, "made already"),
            ({"create_env_kwargs": [{}]}, "create_env_kwargs has 1"),
            ({"make_env": lambda: 3}, "it made 3"),
        ],
    )
    def test_that_make_no_sense(self, options, text):
        given = {"make_env": Random, "num_envs": 4, "num_workers": 2, "start_method": "fork", **options}
        with pytest.raises(OptionError, match=text):
            ProcessVectorEnv(given.pop("make_env"), **given)

    def test_a_maker_that_cannot_be_sent(self):
        import threading

        lock = threading.Lock()
        with pytest.raises(OptionError, match=r"make_env.*lock"):
            processes(lambda: (lock, Random())[1])

    def test_a_maker_for_each_lane(self):
        makers = [functools.partial(Random, infos=lane > 1) for lane in range(4)]
        with processes(makers) as envs:
            assert envs.get_attr("infos") == (False, False, True, True)
        with processes(Random, create_env_kwargs=[{"infos": lane > 1} for lane in range(4)]) as envs:
            assert envs.get_attr("infos") == (False, False, True, True)
