"""What vector environments were seen to do wrong: it is borne, or said before a wrong frame is delivered."""

from __future__ import annotations

import functools
import os
import signal
import time
import warnings
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorWrapper
from gymnasium.wrappers import vector as wrappers

from rlcollect import Collector
from rlcollect.errors import EnvError
from rlcollect.testing import Reuser, Tagged, check_batch
from tests.collectors.helpers import checked
from tests.envs.vector_helpers import (
    BACKENDS,
    DISABLED,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    Homemade,
    Maker,
    assert_by_hand,
    counters,
    lanes_of,
    mask_of,
    rows_stay_in_their_episode,
)

RECORD = ("is_init", "step_count")
modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)


def zero(observation):
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


def tagged(*lengths: int | None) -> list[Any]:
    return [functools.partial(Tagged, lane, length) for lane, length in enumerate(lengths)]


def pull(env: Any, batches: int = 6, **options: Any) -> list[Any]:
    """Batches of an environment, each checked."""
    with Collector(env, **{"frames_per_batch": 12, "record": RECORD, **options}) as collector:
        pulled = [collector.next() for _ in range(batches)]
    list(checked(pulled))
    return pulled


class TestReusedArrays:
    """FAULTS 6, 69: the array that is `final_obs` is written over by the reset that follows, in the environment."""

    lanes = tuple(functools.partial(Reuser, length) for length in (2, 3))

    @pytest.mark.parametrize("mode", [NEXT_STEP, DISABLED], ids=lambda mode: mode.value)
    @pytest.mark.parametrize("backend", sorted(BACKENDS))
    @pytest.mark.parametrize("kind", ["box", "dict"])
    def test_the_truth_where_it_is_seen_before_the_reset(self, backend, mode, kind):
        lanes = [functools.partial(lane, observation=kind) for lane in self.lanes]
        for masked in (None, False) if backend == "sync" else (None,):
            batches = pull(Maker(backend, lanes, autoreset_mode=mode), masked_reset=masked)
            assert_by_hand(batches, lanes)

    @pytest.mark.parametrize("masked", [True, False])
    def test_same_step_in_this_process_is_an_error(self, masked):
        with (
            Collector(
                Maker("sync", self.lanes, autoreset_mode=SAME_STEP), frames_per_batch=12, masked_reset=masked
            ) as collector,
            pytest.raises(EnvError, match=r"lane 0.*one array for all its observations"),
        ):
            collector.next()

    def test_same_step_opened_as_lanes_is_right(self):
        assert_by_hand(pull(Maker("sync", self.lanes, autoreset_mode=SAME_STEP)), self.lanes)

    @pytest.mark.parametrize("backend", ["async", "async without shared memory"])
    def test_same_step_in_other_processes_is_warned_of(self, backend):
        """What a worker sends is overwritten already: it can only be suspected."""
        maker = Maker(backend, self.lanes, autoreset_mode=SAME_STEP)
        with Collector(maker, frames_per_batch=24) as collector:
            with pytest.warns(UserWarning, match="one array for all its observations") as caught:
                collector.next()
            collector.next()  # once is enough
        assert len(caught) == 1

    @pytest.mark.parametrize("backend", ["async", "async without shared memory"])
    def test_honest_environments_are_not_suspected(self, backend):
        pull(Maker(backend, counters(1, 2, 5), autoreset_mode=SAME_STEP))

    def test_a_vector_environment_with_one_array(self):
        for behaves in (NEXT_STEP, DISABLED):
            for masked in (None, True):
                assert rows_stay_in_their_episode(
                    pull(Homemade(1, 3, None, behaves=behaves, aliased=True), masked_reset=masked)
                )
        assert rows_stay_in_their_episode(pull(Homemade(1, 3, None, behaves=SAME_STEP, aliased=True)))


class TestModes:
    @modes
    def test_a_mode_told_as_a_string(self, mode):
        env = Homemade(1, 3, None, behaves=mode, declares=mode.value)
        assert rows_stay_in_their_episode(pull(env))

    @modes
    @pytest.mark.parametrize("final", ["array", "batch", "older"])
    def test_homemade_ones_of_every_mode(self, mode, final):
        env = Homemade(1, 3, 4, None, behaves=mode, final=final)
        batches = pull(env, frames_per_batch=16, total_frames=96)
        assert rows_stay_in_their_episode(batches)
        if mode is not NEXT_STEP:
            assert env.frames.tolist() == [24] * 4

    def test_no_mode_means_next_step_said_aloud_once(self):
        env = Homemade(1, 3, None, declares="nothing")
        with pytest.warns(UserWarning, match=r"autoreset_mode.*NEXT_STEP is assumed") as caught:
            batches = pull(env)
        assert len(caught) == 1
        assert caught[0].filename == __file__
        assert rows_stay_in_their_episode(batches)
        assert ("collector", "mask") in batches[0].keys(True)

    @pytest.mark.parametrize("told", ["SAME_STEP", "sometimes", 3])
    def test_a_mode_that_does_not_exist(self, told):
        with pytest.raises(EnvError, match=r"autoreset_mode.*NextStep"):
            Collector(Homemade(2, declares=told), frames_per_batch=4)

    def test_same_step_that_only_resets_with_the_next(self):
        """Told SAME_STEP, done as NEXT_STEP: nothing says what the episode had come to."""
        with (
            Collector(Homemade(3, None, behaves=NEXT_STEP, declares=SAME_STEP), frames_per_batch=12) as collector,
            pytest.raises(EnvError, match="final_obs"),
        ):
            collector.next()

    def test_same_step_without_a_final_observation(self):
        with (
            Collector(Homemade(3, None, behaves=SAME_STEP, final="nothing"), frames_per_batch=12) as collector,
            pytest.raises(EnvError, match=r"final_obs.*autoreset mode"),
        ):
            collector.next()

    @pytest.mark.parametrize("lengths", [(3, None), (1, 2)])
    def test_next_step_that_resets_at_once(self, lengths):
        """Told NEXT_STEP, done as SAME_STEP: the row after an end is a frame, and its observation no final one."""
        with (
            Collector(Homemade(*lengths, behaves=SAME_STEP, declares=NEXT_STEP), frames_per_batch=12) as collector,
            pytest.raises(EnvError, match="autoreset_mode"),
        ):
            collector.next()

    def test_next_step_that_resets_at_once_and_says_nothing(self):
        """Only episodes of one step betray it."""
        with (
            Collector(
                Homemade(1, None, behaves=SAME_STEP, declares=NEXT_STEP, final="nothing"), frames_per_batch=12
            ) as collector,
            pytest.raises(EnvError, match="autoreset_mode"),
        ):
            collector.next()

    def test_disabled_that_resets_at_once(self):
        with (
            Collector(Homemade(3, None, behaves=SAME_STEP, declares=DISABLED), frames_per_batch=12) as collector,
            pytest.raises(EnvError, match="autoreset_mode"),
        ):
            collector.next()

    def test_a_mode_is_only_told_and_never_seen_by_us(self):
        """The metadata is left as it was found."""
        env = Homemade(2, 3, declares=NEXT_STEP.value)
        before = dict(env.metadata)
        pull(env)
        assert env.metadata == before


class TestMasksThatAreIgnored:
    @pytest.mark.parametrize("behaves", [NEXT_STEP, DISABLED], ids=lambda mode: mode.value)
    def test_an_error_before_delivery_that_names_the_lane(self, behaves):
        env = Homemade(None, 3, None, behaves=behaves, masks="ignored")
        with Collector(env, frames_per_batch=12, masked_reset=True) as collector:
            with pytest.raises(EnvError, match=r"\[1\].*'observation' of lane 0.*reset_mask"):
                collector.next()
            assert collector.closed

    @modes
    def test_a_limit_of_ours(self, mode):
        env = Homemade(1, None, behaves=mode, masks="ignored")
        with (
            Collector(env, frames_per_batch=8, masked_reset=True, max_frames_per_traj=2) as collector,
            pytest.raises(EnvError, match="reset_mask"),
        ):
            collector.next()

    @modes
    def test_a_reset_of_ours(self, mode):
        env = Homemade(None, None, behaves=mode, masks="ignored")
        with Collector(env, frames_per_batch=8, masked_reset=True) as collector:
            collector.next()
            with pytest.raises(EnvError, match="reset_mask"):
                collector.reset([1])

    @pytest.mark.parametrize("behaves", [NEXT_STEP, DISABLED], ids=lambda mode: mode.value)
    def test_a_mask_that_is_written_to(self, behaves):
        """It is the environment's: it may use it up."""

        class Using(Homemade):
            def reset(self, *, seed=None, options=None):
                answer = super().reset(seed=seed, options=options)
                if options:
                    options.pop("reset_mask")[:] = False
                return answer

        assert rows_stay_in_their_episode(pull(Using(1, 3, None, behaves=behaves), masked_reset=True))

    def test_vectorised_cartpole(self):
        """It resets every lane, whatever the mask says: by default it is not asked to."""
        env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="vector_entry_point")
        batches = pull(env, frames_per_batch=60)
        assert ("collector", "mask") in batches[0].keys(True)
        with (
            Collector(env, frames_per_batch=300, masked_reset=True) as collector,
            pytest.raises(EnvError, match="reset_mask"),
        ):
            collector.next()
        env.close()

    def test_masks_that_are_kept_are_not_suspected(self):
        for behaves in (NEXT_STEP, DISABLED, SAME_STEP):
            batches = pull(Homemade(1, 3, 4, behaves=behaves), masked_reset=True, max_frames_per_traj=3)
            assert rows_stay_in_their_episode(batches)
            assert ("collector", "mask") not in batches[0].keys(True)
            assert max(int(batch["step_count"].max()) for batch in batches) == 2

    def test_not_a_number_is_equal_to_itself(self):
        class Nans(Homemade):
            def observe(self):
                rows = super().observe()
                rows[:, 0] = np.nan
                return rows

        batches = pull(Nans(2, None, behaves=DISABLED))
        assert batches[0]["observation"][..., 0].isnan().all()


class TestWrappers:
    PASSING: ClassVar[dict[str, Any]] = {
        "none": VectorWrapper,
        "ClipAction": wrappers.ClipAction,
        "ClipReward": functools.partial(wrappers.ClipReward, max_reward=1),
        "TransformObservation": functools.partial(wrappers.TransformObservation, func=lambda seen: seen + 100),
        "FlattenObservation": wrappers.FlattenObservation,
        "RecordEpisodeStatistics": wrappers.RecordEpisodeStatistics,
        "NormalizeReward": wrappers.NormalizeReward,
    }

    @modes
    @pytest.mark.parametrize("backend", ["sync", "async"])
    @pytest.mark.parametrize("name", sorted(PASSING))
    def test_around_every_mode(self, backend, mode, name):
        if name == "ClipAction":
            lanes = [functools.partial(gym.make, "MountainCarContinuous-v0", max_episode_steps=each) for each in (2, 3)]
        else:
            lanes = tagged(2, 3)
        inner = BACKENDS[backend](lanes, autoreset_mode=mode)
        try:
            env = self.PASSING[name](inner)
        except ValueError:  # observation wrappers refuse SAME_STEP, whose final_obs they would leave as it was
            assert mode is SAME_STEP
            inner.close()
            return
        batches = pull(env, frames_per_batch=12)
        for lane, length in zip(lanes_of(batches), (2, 3), strict=True):
            assert lane["next", "done"].flatten().tolist() == [t % length == length - 1 for t in range(len(lane))]
            assert lane["step_count"].flatten().tolist() == [t % length for t in range(len(lane))]
            if name not in ("ClipAction", "NormalizeReward"):
                shift = 100 * (name == "TransformObservation")
                assert torch.equal(lane["observation"][:, 2].long(), lane["step_count"][:, 0] + shift)
                assert torch.equal(lane["next", "observation"][:, 2].long(), lane["step_count"][:, 0] + 1 + shift)
        env.close()

    @pytest.mark.parametrize("backend", ["sync", "async"])
    def test_running_means_over_observations(self, backend):
        """`NormalizeObservation` fails on a mask: it is not given one, and knows what a policy was shown."""
        env = wrappers.NormalizeObservation(BACKENDS[backend](tagged(2, 3)))
        batches = pull(env)
        assert ("collector", "mask") in batches[0].keys(True)
        env.close()

    def test_an_action_wrapper_of_ones_own_is_not_known_to_hand_masks_on(self):
        class Own(VectorWrapper):
            pass

        for wrap, known in ((Own, False), (wrappers.FlattenObservation, True)):
            env = wrap(AsyncVectorEnv(tagged(2, 3)))
            batches = pull(env)
            assert (("collector", "mask") not in batches[0].keys(True)) is known
            batches = pull(env, masked_reset=True)
            assert ("collector", "mask") not in batches[0].keys(True)
            env.close()

    def test_a_final_observation_that_was_left_as_it_was(self):
        """Where its form differs, that shows."""

        class Widened(VectorWrapper):
            def __init__(self, env):
                super().__init__(env)
                self.single_observation_space = spaces.Box(-1, 99, (6,), np.float32)
                self.observation_space = spaces.Box(-1, 99, (env.num_envs, 6), np.float32)

            def reset(self, **kwargs):
                observation, info = self.env.reset(**kwargs)
                return np.repeat(observation, 2, -1), info

            def step(self, actions):
                observation, *rest = self.env.step(actions)
                return np.repeat(observation, 2, -1), *rest

        env = Widened(SyncVectorEnv(tagged(2, 3), autoreset_mode=SAME_STEP))
        with Collector(env, frames_per_batch=12) as collector, pytest.raises(EnvError, match="lane 0"):
            collector.next()

    def test_a_sync_vector_environment_that_is_more_than_its_lanes(self):
        """A subclass, a patched step, other spaces: it is stepped itself, not its lanes."""
        stepped = []

        class Own(SyncVectorEnv):
            def step(self, actions):
                stepped.append("own")
                return super().step(actions)

        pull(Own(tagged(2, 3)))
        assert len(stepped) >= 36
        env = SyncVectorEnv(tagged(2, 3))
        plain = env.step
        env.step = lambda actions: (stepped.append("patched"), plain(actions))[1]
        pull(env)
        assert stepped.count("patched") >= 36


class TestAsyncTraps:
    @pytest.mark.parametrize("backend", ["async", "async without shared memory"])
    def test_ctrl_c_in_the_middle_of_a_step(self, backend):
        """Answers are still to come when the next reset is due: that is said."""

        class Interrupting(Tagged):
            def step(self, action):
                if self.steps == 4 and self.worker == 1:
                    time.sleep(0.1)  # until the program waits
                    os.kill(os.getppid(), signal.SIGINT)
                    time.sleep(0.1)  # until it has come
                return super().step(action)

        env = BACKENDS[backend]([functools.partial(Interrupting, lane, length) for lane, length in enumerate((3, 5))])
        try:
            with Collector(env, frames_per_batch=6, record=RECORD) as collector:
                collector.next()
                with pytest.raises(KeyboardInterrupt):
                    collector.next()
                with pytest.raises(EnvError, match="interrupted in the middle of a step"):
                    collector.next()
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of the call that is pending
                env.close(terminate=True)

    def test_lanes_of_different_processes_have_streams_of_their_own(self):
        lanes = [functools.partial(Tagged, 0, 50, random_length=True)] * 3
        for backend in ("async", "async without shared memory"):
            with Collector(Maker(backend, lanes), frames_per_batch=300) as collector:
                collector.set_seed(0)
                first = [
                    int(lane["next", "done"].nonzero()[0, 0]) for lane in lanes_of([collector.next(), collector.next()])
                ]
            assert len({*first}) == 3

    def test_more_lanes_than_may_run_at_once(self):
        lanes = tagged(1, 2, 3, 4)
        assert_by_hand(pull(Maker("async", lanes, max_concurrency=1)), lanes)


class TestConstantEnvironments:
    """Where nothing is observed, nothing can be suspected."""

    @modes
    def test_no_warning_and_no_error(self, mode):
        class Blind(Tagged):
            def _observe(self):
                return np.zeros(3, np.float32)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for backend in sorted(BACKENDS):
                for batch in pull(Maker(backend, [functools.partial(Blind, 0, 2)] * 2, autoreset_mode=mode)):
                    check_batch(batch)
                    assert mask_of(batch).any()
