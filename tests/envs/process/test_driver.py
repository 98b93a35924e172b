"""Lanes in worker processes behind a collector: the same data as lanes here, in groups too, and over restarts."""

from __future__ import annotations

import contextlib
import functools
import warnings

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlcollect import Collector, MultiSyncCollector, OptionError, ProcessVectorEnv, WorkerRestarted
from rlcollect.testing import Counter, Tagged, check_batch
from tests.workers.test_interrupts import interrupting
from tests.workers.test_restarts import Life, Watch

pytestmark = pytest.mark.timeout(120)
RECORD = ("step_count", "is_init")


def lanes(count=8, **options):
    return [functools.partial(Tagged, lane, 3 + lane % 5, **options) for lane in range(count)]


def counting(observation, hidden=None):
    """Its state is the number of steps since the episode began, if it is carried as it should be."""
    hidden = torch.zeros(*observation.shape[:-1], 1) if hidden is None else hidden
    return {"action": hidden[..., 0].long() % 2, ("next", "hidden"): hidden + 1}


def rows(batch):
    """The frames of each lane, by the number that it shows."""
    for lane in batch.unbind(0):
        mask = lane.get(("collector", "mask"), None)
        yield lane if mask is None else lane[mask]


class TestOneGroup:
    def test_gives_what_lanes_here_give_bit_for_bit(self):
        batches = []
        for options in ({}, {"env_workers": 2}):
            with Collector(
                lanes(random_length=True), counting, frames_per_batch=80, total_frames=400, init_random_frames=30,
                max_frames_per_traj=4, record=RECORD, **options,
            ) as collector:  # fmt: skip
                collector.set_seed(5)
                batches.append([batch.clone() for batch in collector])
        for ours, theirs in zip(*batches, strict=True):
            assert (ours == theirs).all()
            assert ours.names == theirs.names

    def test_by_num_envs_of_one_maker(self):
        with Collector("CartPole-v1", frames_per_batch=64, num_envs=4, env_workers=2) as collector:
            batch = collector.next()
            check_batch(batch)
            assert batch.shape == (4, 16)

    def test_with_arguments_for_the_maker(self):
        with Collector(
            Counter, frames_per_batch=24, num_envs=3, env_workers=2, create_env_kwargs={"length": 4}
        ) as collector:
            batch = collector.next()
            assert batch["next", "done"].sum() == 6

    def test_in_a_worker_process(self):
        with MultiSyncCollector(
            [lambda: Tagged(0, 4)], frames_per_batch=32, num_envs=4, env_workers=2, timeout=60
        ) as collector:
            check_batch(collector.next())

    def test_a_state_goes_on(self):
        options = {"frames_per_batch": 40, "env_workers": 2}
        with Collector(lanes(4, random_length=True), **options) as collector:
            collector.set_seed(1)
            collector.next()
            state = collector.state_dict()
            after = collector.next()
        with Collector(lanes(4, random_length=True), **options) as collector:
            collector.load_state_dict(state)
            again = collector.next()
            assert again.shape == after.shape
            assert not {*after["collector", "traj_ids"].flatten().tolist()} & {
                *state["episodes"]["lengths"]
            }  # ids go on
            check_batch(again)


class TestGroups:
    def collect(self, source, policy=counting, frames=400, **options):
        seen = {}
        options = {"env_workers": 2, "env_groups": 2, "record": RECORD, **options}
        with Collector(source, policy, frames_per_batch=80, total_frames=frames, **options) as collector:
            previous = None
            for batch in collector:
                check_batch(batch, previous=previous)
                previous = batch
                for lane in rows(batch):
                    for row, hidden in zip(
                        lane["observation"].int().tolist(), lane["hidden"].flatten().tolist(), strict=True
                    ):
                        seen.setdefault(row[0], []).append((row[1], row[2], int(hidden)))
            assert collector.collected_frames == frames == sum(map(len, seen.values()))
        return seen

    @pytest.mark.parametrize("workers", [2, 4])
    def test_each_lane_is_that_of_its_environment(self, workers):
        for lane, frames in self.collect(lanes(), env_workers=workers).items():
            length = 3 + lane % 5
            assert frames == [(k // length, k % length, k % length) for k in range(len(frames))]

    def test_a_warm_up(self):
        frames, random = self.collect(lanes(), init_random_frames=43), 0
        assert len(frames) == 8
        with Collector(
            lanes(), counting, frames_per_batch=80, total_frames=160, init_random_frames=43, env_workers=2, env_groups=2
        ) as collector:
            for batch in collector:
                random += int((batch["collector", "policy_version"][batch["collector", "mask"]] == -1).sum())
        assert random == 43

    def test_a_new_seed_is_the_same_again(self):
        def made():
            with Collector(lanes(random_length=True), frames_per_batch=80, env_workers=2, env_groups=2) as collector:
                collector.set_seed(3)
                return [collector.next().clone() for _ in range(3)]

        for one, other in zip(made(), made(), strict=True):
            assert (one == other).all()

    def test_infos(self):
        with Collector(
            lanes(), frames_per_batch=80, env_workers=2, env_groups=2, info_keys={"t": spaces.Discrete(99)}
        ) as collector:
            for _ in range(3):
                batch = collector.next()
                mask = batch["collector", "mask"]
                assert (batch["next", "info", "t"][mask] == batch["next", "observation"][mask][:, 2]).all()

    def test_a_reset_cuts_all(self):
        with Collector(lanes(), frames_per_batch=80, env_workers=2, env_groups=2) as collector:
            collector.next()
            collector.reset()
            check_batch(collector.next())
            with pytest.raises(OptionError, match="groups"):
                collector.reset(3)

    def test_ctrl_c_in_any_call(self):
        interrupted = 0
        with Collector(lanes(), frames_per_batch=16, env_workers=2, env_groups=2) as collector:
            for number in range(1, 200, 4):
                with contextlib.suppress(KeyboardInterrupt), interrupting(number) as places:
                    check_batch(collector.next())
                interrupted += places.calls >= number
            check_batch(collector.next())
        assert interrupted > 20

    def test_of_different_sizes(self):
        with pytest.raises(OptionError, match="one size"):
            Collector(lanes(7), frames_per_batch=70, env_workers=2, env_groups=2)


class TestRestarts:
    @pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted")
    @pytest.mark.parametrize("groups", [pytest.param(1, marks=pytest.mark.slow), 2])
    @pytest.mark.parametrize(("steps", "frames"), [(400, 4000), pytest.param(1000, 20_000, marks=pytest.mark.slow)])
    def test_one_step_of_many_fails(self, groups, steps, frames):
        """FAULTS 62 and 64."""

        def make():
            return ProcessVectorEnv(
                lambda: Life(rate=1 / steps), 8, 2, num_groups=groups, on_worker_failure="restart", max_restarts=None
            )

        watch = Watch(None)
        with Collector(make, frames_per_batch=400, total_frames=frames) as collector:
            for batch in collector:
                watch.add(batch)
            assert collector.collected_frames == watch.frames == frames
            (restarts,) = collector.map_fn(lambda envs: sum(envs[0].restarts))
        assert restarts > 3
        assert len(watch.lives) > 8
        watch.check()

    def test_carried_state_begins_anew_with_the_lane(self):
        class Fails(gym.Wrapper):
            def step(self, action):
                if self.env.unwrapped.steps == 13:
                    raise LookupError("it fell")
                return super().step(action)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkerRestarted)
            with Collector(
                lambda: ProcessVectorEnv(
                    lambda: Fails(Tagged(0, 5)), 4, 2, on_worker_failure="restart", max_restarts=None
                ),
                counting,
                frames_per_batch=80,
                record=RECORD,
            ) as collector:
                for _ in range(5):
                    batch = collector.next()
                    check_batch(batch)
                    mask = batch["collector", "mask"]
                    t = batch["observation"][mask][:, 2]
                    assert (batch["hidden"][mask][:, 0] == t).all()
                    assert (batch["step_count"][mask][:, 0] == t).all()
                    assert (batch["is_init"][mask][:, 0] == (t == 0)).all()

    def test_returns_and_lengths_are_of_episodes_that_ended(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", WorkerRestarted)
            with Collector(
                lambda: ProcessVectorEnv(lambda: Life(rate=0.01), 4, 2, on_worker_failure="restart", max_restarts=None),
                frames_per_batch=80,
                total_frames=800,
            ) as collector:
                ended = sum(int(batch["next", "done"].sum()) for batch in collector)
                stats = collector.stats()
        assert stats.episodes >= ended > 0
        assert stats.episode_length.min == stats.episode_length.max == 7
        assert stats.episode_return.min == 7.0


class TestOptions:
    def test_groups_need_workers(self):
        with pytest.raises(OptionError, match=r"env_groups.*env_workers="):
            Collector("CartPole-v1", frames_per_batch=8, num_envs=4, env_groups=2)

    @pytest.mark.parametrize("value", [0, -1, 1.5, "two"])
    def test_a_number_of_workers(self, value):
        with pytest.raises(OptionError, match="env_workers"):
            Collector("CartPole-v1", frames_per_batch=8, num_envs=4, env_workers=value)

    def test_more_workers_than_lanes(self):
        with pytest.raises(OptionError, match="num_workers"):
            Collector("CartPole-v1", frames_per_batch=8, num_envs=2, env_workers=3)

    def test_shared_arrays_in_groups(self):
        with pytest.raises(OptionError, match="copy=False"):
            Collector(lambda: ProcessVectorEnv("CartPole-v1", 4, 2, num_groups=2, copy=False), frames_per_batch=8)


def test_observations_of_several_parts():
    class Parts(Counter):
        def __init__(self):
            super().__init__(4, observation="dict")

    for groups in (1, 2):
        with Collector(Parts, frames_per_batch=32, num_envs=4, env_workers=2, env_groups=groups) as collector:
            batch = collector.next()
            check_batch(batch)
            assert np.isfinite(batch["next", "reward"].numpy()).all()


@pytest.mark.parametrize("groups", [1, 2])
def test_a_mask_that_comes_in_the_info_stands_beside_the_last_observation(groups):
    class Masked(Counter):
        def __init__(self):
            super().__init__(4)
            self.action_space = spaces.Discrete(3)

        def _inform(self):
            return {**super()._inform(), "action_mask": np.array([1, self.t % 2, 1], np.int8)}

    with Collector(
        Masked, frames_per_batch=64, num_envs=4, env_workers=2, env_groups=groups,
        info_keys={"action_mask": spaces.MultiBinary(3)},
    ) as collector:  # fmt: skip
        batch = collector.next()
        check_batch(batch)
        after = batch["next", "observation"].flatten()
        assert (batch["next", "action_mask"].reshape(-1, 3)[:, 1] == after % 2).all()
