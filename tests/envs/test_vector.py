"""Vector environments of Gymnasium, in every mode and from every process: each lane is what a plain loop has it be."""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv
from gymnasium.wrappers import vector as wrappers
from hypothesis import given, settings
from hypothesis import strategies as st

from rlcollect import Collector, WorkerError
from rlcollect.errors import EnvError, OptionError
from rlcollect.testing import Breaker, Counter, Tagged, check_batch
from tests import reference
from tests.collectors.helpers import checked, joined
from tests.envs.vector_helpers import (
    BACKENDS,
    DISABLED,
    ENDS,
    MODES,
    NEXT_STEP,
    SAME_STEP,
    Homemade,
    Maker,
    Scripted,
    TaggedTree,
    assert_by_hand,
    count,
    counters,
    lanes_of,
    rows_stay_in_their_episode,
    same_bits,
)
from tests.reference import ACTION_SPACES, OBSERVATION_SPACES

RECORD = ("is_init", "step_count")
LENGTHS = (1, 2, 4, 9)
KINDS = {
    "box": Tagged,
    "dict": TaggedTree,
    "counter": lambda lane, *args, **options: Counter(*args, **options),
    "counter dict": lambda lane, *args, **options: Counter(*args, observation="dict", **options),
}

modes = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.value)
backends = pytest.mark.parametrize("backend", sorted(BACKENDS))
backends_in_short = pytest.mark.parametrize(  # what is sent by value is the same: where little depends on how it comes
    "backend", ["async", pytest.param("async without shared memory", marks=pytest.mark.slow), "sync"]
)


def makers(kind: str, *lengths: int | None, first_end: int = 0, **options: Any) -> list[Any]:
    """A maker of each lane; ends are told in turn by each of the three kinds of flags."""
    return [
        functools.partial(KINDS[kind], lane, length, end=ENDS[(first_end + lane) % 3], **options)
        for lane, length in enumerate(lengths)
    ]


def zero(observation):
    return torch.zeros(observation.shape[:-1], dtype=torch.int64)


class TestEveryLaneIsWhatAPlainLoopHas:
    """FAULTS 5, 7, 10, 11, 13, 18: no row pairs two episodes, none is lost, no observation is another's."""

    @modes
    @pytest.mark.parametrize(
        ("backend", "kind", "first_end"),
        [
            pytest.param(*case, marks=() if case[0] == "sync" or case[2] == 0 else pytest.mark.slow)
            for case in itertools.product(sorted(BACKENDS), ["box", "dict"], range(3))
        ],
    )
    def test_every_key_of_every_frame(self, backend, mode, kind, first_end):
        lanes = makers(kind, *LENGTHS, first_end=first_end)
        maker = Maker(backend, lanes, autoreset_mode=mode)
        with Collector(maker, frames_per_batch=28, total_frames=140, record=RECORD) as collector:
            batches = list(checked(collector))
            assert sum(maker.ask("steps")) == 140 + collector.stats().dropped
            assert collector.stats().episodes >= sum(int(lane["next", "done"].sum()) for lane in lanes_of(batches))
        assert count(batches) == 140
        assert_by_hand(batches, lanes)

    @modes
    @backends_in_short
    @pytest.mark.parametrize("kind", ["counter", "counter dict"])
    def test_all_lanes_may_end_together(self, backend, mode, kind):
        lanes = [functools.partial(KINDS[kind], 0, 3, end="both")] * 3
        with Collector(Maker(backend, lanes, autoreset_mode=mode), frames_per_batch=24, record=RECORD) as collector:
            batches = [collector.next() for _ in range(4)]
        assert_by_hand(list(checked(batches)), lanes)

    @modes
    @pytest.mark.parametrize("masked", [True, False, None])
    def test_a_sync_vector_environment_however_it_is_opened(self, mode, masked):
        lanes = makers("dict", *LENGTHS)
        maker = Maker("sync", lanes, autoreset_mode=mode)
        with Collector(maker, frames_per_batch=20, total_frames=160, record=RECORD, masked_reset=masked) as collector:
            batches = list(checked(collector))
            assert sum(maker.ask("steps")) == 160 + collector.stats().dropped
        assert_by_hand(batches, lanes)
        assert (("collector", "mask") in batches[0].keys(True)) is (mode is NEXT_STEP and masked is False)

    @modes
    @backends_in_short
    def test_dense_batches_are_those_of_the_lanes_themselves(self, backend, mode):
        """Bit for bit, ids and marks too, where every step is a frame."""
        lanes = makers("dict", *LENGTHS)
        if mode is NEXT_STEP and backend == "async without shared memory":
            pytest.skip("no step of it is sure to be a frame")
        own, theirs = (
            Collector(made, frames_per_batch=28, total_frames=140, record=RECORD)
            for made in (lanes, Maker(backend, lanes, autoreset_mode=mode))
        )
        with own, theirs:
            own.set_seed(3)
            theirs.set_seed(3)
            for one, other in zip(own, theirs, strict=True):
                assert same_bits(one, other)
            assert own.stats().episodes == theirs.stats().episodes
            assert own.stats().episode_return == theirs.stats().episode_return

    @backends
    @modes
    def test_resets_are_episodes(self, backend, mode):
        """One at construction, one for each episode that began: nothing is reset in vain."""
        maker = Maker(backend, makers("box", 2, 3, 7), autoreset_mode=mode)
        with Collector(maker, frames_per_batch=21, total_frames=84) as collector:
            batches = list(collector)
            resets, steps = maker.ask("resets"), maker.ask("steps")
        for lane, length in enumerate((2, 3, 7)):
            begun = 1 + steps[lane] // length
            pending = mode is NEXT_STEP and backend == "async without shared memory"
            assert resets[lane] in ((begun, begun - 1) if pending else (begun,))
        assert count(batches) == 84

    @modes
    @backends
    def test_infos_of_every_step(self, backend, mode):
        """Those of an episode's last step too, which SAME_STEP keeps apart."""
        lanes = makers("counter", *LENGTHS)
        maker = Maker(backend, lanes, autoreset_mode=mode)
        with Collector(maker, frames_per_batch=20, total_frames=100, record=RECORD, info_keys="t") as collector:
            assert_by_hand(list(checked(collector)), lanes, info_keys=["t"])

    @modes
    @pytest.mark.parametrize("copy", [True, False])
    @pytest.mark.parametrize("backend", ["sync", "async"])
    def test_arrays_that_are_given_out_again(self, mode, copy, backend):
        """`copy=False` gives the same array each time. FAULTS 67, 69."""
        lanes = makers("dict", *LENGTHS)
        maker = Maker(backend, lanes, autoreset_mode=mode, copy=copy)
        with Collector(maker, frames_per_batch=20, record=RECORD, masked_reset=backend != "async" or None) as collector:
            batches = [collector.next() for _ in range(6)]
            kept = [batch.clone() for batch in batches]
            collector.next()
        assert_by_hand(list(checked(batches)), lanes)
        assert all(same_bits(*pair) for pair in zip(batches, kept, strict=True))

    @modes
    @backends_in_short
    def test_an_environment_of_gymnasium(self, backend, mode):
        def make():
            return gym.make("CartPole-v1", max_episode_steps=13)

        with Collector(Maker(backend, [make] * 3, autoreset_mode=mode), frames_per_batch=60) as collector:
            collector.set_seed([5, 6, 7])
            lanes = lanes_of([collector.next() for _ in range(3)])
        for seed, lane in zip((5, 6, 7), lanes, strict=True):
            env = make()
            observation, _ = env.reset(seed=seed)
            for row in lane:
                assert np.array_equal(row["observation"].numpy(), observation)
                observation, reward, terminated, truncated, _ = env.step(row["action"].numpy())
                assert np.array_equal(row["next", "observation"].numpy(), observation)
                assert row["next", "reward"].item() == np.float32(reward)
                assert (row["next", "terminated"].item(), row["next", "truncated"].item()) == (terminated, truncated)
                if terminated or truncated:
                    observation, _ = env.reset()
            env.close()


class TestOptionsThatResetLanes:
    @modes
    @backends
    @pytest.mark.parametrize("limit", [1, 4])
    def test_a_limit_of_ours_truncates_or_is_refused(self, backend, mode, limit):
        lanes = makers("box", 3, 4, None)
        maker = Maker(backend, lanes, autoreset_mode=mode)
        if mode is NEXT_STEP and backend == "async without shared memory":
            with pytest.raises(OptionError, match=r"max_frames_per_traj.*single lanes.*masked_reset"):
                Collector(maker, frames_per_batch=15, max_frames_per_traj=limit)
            return
        with Collector(maker, frames_per_batch=15, total_frames=90, max_frames_per_traj=limit) as collector:
            batch = joined(list(checked(collector)))
            assert maker.ask("steps") == [30] * 3
        assert rows_stay_in_their_episode([batch])
        for lane, length in enumerate((3, 4, None)):
            size = min(length or limit, limit)
            assert batch["step_count"][lane, :, 0].tolist() == [t % size for t in range(30)]
            truncated = batch["next", "truncated"][lane, size - 1 :: size]
            assert truncated.all() if size == limit else truncated.any() == (lane != 0)
            own_end = length is not None and length <= limit
            assert batch["next", "terminated"][lane].any() == (own_end and ENDS[lane] != "truncated")

    @modes
    @backends
    def test_single_lanes_are_reset_or_it_is_refused(self, backend, mode):
        maker = Maker(backend, makers("box", None, 5, None), autoreset_mode=mode)
        with Collector(maker, frames_per_batch=9) as collector:
            before = collector.next()
            if mode is NEXT_STEP and backend == "async without shared memory":
                with pytest.raises(OptionError, match=r"reset of some lanes.*masked_reset"):
                    collector.reset([0, 1])
                assert not collector.closed
                collector.reset()
                check_batch(collector.next(), previous=before)
                return
            collector.reset([0, 1])
            after = collector.next()
            check_batch(after, previous=before)
            assert after["observation"][:, 0].tolist() == [[0, 1, 0], [1, 1, 0], [2, 0, 3]]
            assert (after["collector", "traj_ids"][:, 0] == before["collector", "traj_ids"][:, -1]).tolist() == [
                False,
                False,
                True,
            ]
            collector.reset(torch.tensor([False, False, True]), seed=11, options={"a": 1})
            assert maker.ask("last_seed")[2] == 11
            assert maker.ask("last_options")[2] == {"a": 1}
            assert maker.ask("last_options")[:2] == [None, None] or maker.ask("last_options")[:2] == [{}, {}]
            last = collector.next()
            check_batch(last, previous=after)
            assert last["observation"][:, 0].tolist() == [[0, 1, 3], [1, 1, 3], [2, 1, 0]]

    @modes
    @backends
    def test_a_reset_at_each_iteration_or_it_is_refused(self, backend, mode):
        maker = Maker(backend, makers("box", None, 2), autoreset_mode=mode)
        if mode is NEXT_STEP and backend == "async without shared memory":
            with pytest.raises(OptionError, match=r"reset_at_each_iter.*masked_reset"):
                Collector(maker, frames_per_batch=8, reset_at_each_iter=True)
            return
        with Collector(maker, frames_per_batch=8, reset_at_each_iter=True) as collector:
            batches = [collector.next() for _ in range(3)]
            list(checked(batches))
        assert [batch["observation"][:, 0, 2].tolist() for batch in batches] == [[0, 0]] * 3
        assert [int(batch["observation"][0, 0, 1]) for batch in batches] == [0, 1, 2]

    @backends
    def test_reset_options_of_every_episode_or_a_refusal(self, backend):
        """Autoreset drops them: NEXT_STEP by itself and SAME_STEP refuse what they could not give."""
        maker = Maker(backend, makers("box", 2, 3), autoreset_mode=DISABLED)
        with Collector(maker, frames_per_batch=20, reset_options={"level": 3}) as collector:
            collector.next()
            assert maker.ask("last_options") == [{"level": 3}] * 2
        options = {"frames_per_batch": 4, "reset_options": {"level": 3}}
        if backend == "sync":
            with Collector(Maker(backend, makers("box", 2, 3), autoreset_mode=SAME_STEP), **options) as collector:
                collector.next()  # as its lanes
            with pytest.raises(OptionError, match="reset_options"):
                Collector(Maker(backend, makers("box", 2), autoreset_mode=SAME_STEP), masked_reset=True, **options)
            with pytest.raises(OptionError, match="reset_options"):
                Collector(Maker(backend, makers("box", 2), autoreset_mode=NEXT_STEP), masked_reset=False, **options)
            return
        with pytest.raises(OptionError, match=r"reset_options.*SAME_STEP"):
            Collector(Maker(backend, makers("box", 2, 3), autoreset_mode=SAME_STEP), **options)
        masked = Maker(backend, makers("box", 2, 3), autoreset_mode=NEXT_STEP)
        if backend == "async":
            with Collector(masked, **options) as collector:
                collector.next()
                assert masked.ask("last_options") == [{"level": 3}] * 2
        else:
            with pytest.raises(OptionError, match="reset_options"):
                Collector(masked, **options)

    def test_options_are_a_new_dictionary_each_time(self):
        """The environment takes the mask out of the dictionary that it is given."""
        env = Homemade(2, 3, None, behaves=DISABLED)
        with Collector(env, frames_per_batch=12, reset_options={"level": 3}) as collector:
            collector.next()
        assert len(env.given_options) == 4
        assert [id(options) for options in env.given_options] == list({id(options): 0 for options in env.given_options})
        assert all(options["level"] == 3 for options in env.given_options)
        masks = [options["reset_mask"].tolist() for options in env.given_options[1:]]
        assert masks == [[True, False, False], [False, True, False], [True, False, False]]

    def test_options_that_depend_on_the_lane_are_refused_with_a_way_out(self):
        maker = Maker("async", makers("box", 2), autoreset_mode=DISABLED)
        with pytest.raises(OptionError, match=r"num_envs="):
            Collector(maker, frames_per_batch=4, reset_options=lambda lane, episode, info: {})
        lanes = Maker("sync", makers("box", 2, 3))
        with Collector(lanes, frames_per_batch=8, reset_options=lambda lane, *_: {"lane": lane}) as collector:
            collector.next()
            assert lanes.ask("last_options") == [{"lane": 0}, {"lane": 1}]


class TestSeeds:
    @modes
    @backends_in_short
    def test_one_seed_gives_equal_batches(self, backend, mode):
        def run(seed):
            lanes = [functools.partial(Tagged, lane, 6, random_length=True) for lane in range(3)]
            with Collector(Maker(backend, lanes, autoreset_mode=mode), frames_per_batch=30) as collector:
                collector.set_seed(seed)
                return [collector.next() for _ in range(4)]

        one, again, other = run(3), run(3), run(4)
        assert all(same_bits(*pair) for pair in zip(one, again, strict=True))
        assert not all(same_bits(*pair) for pair in zip(one, other, strict=True))

    @backends_in_short
    @modes
    def test_a_list_reaches_the_lanes_as_it_is(self, backend, mode):
        maker = Maker(backend, makers("box", 2, 3, 4), autoreset_mode=mode)
        with Collector(maker, frames_per_batch=30) as collector:
            assert collector.set_seed([5, 17, 6]) == 18
            collector.next()
            assert maker.ask("seeds") == [[5], [17], [6]]
            collector.set_seed(2)
            collector.next()
            drawn = [seeds[1] for seeds in maker.ask("seeds")]
            assert len({*drawn}) == 3
            collector.set_seed(2, static_seed=True)
            collector.next()
            assert len({seeds[2] for seeds in maker.ask("seeds")}) == 1

    def test_lanes_of_a_vector_environment_get_the_seeds_of_plain_lanes(self):
        envs = [make() for make in makers("box", 2, 3)]
        vectors = [Maker(backend, makers("box", 2, 3)) for backend in sorted(BACKENDS)]
        seeds = []
        for made in (envs, *vectors):
            with Collector(made, frames_per_batch=8) as collector:
                collector.set_seed(1)
                collector.next()
                seeds.append([env.seeds for env in envs] if made is envs else made.ask("seeds"))
        assert seeds[1:] == seeds[:1] * 3

    @pytest.mark.parametrize("behaves", MODES, ids=lambda mode: mode.value)
    def test_an_environment_that_takes_one_integer(self, behaves):
        def run(seed):
            env = Homemade(2, 3, behaves=behaves, seeds="ints")
            with Collector(env, frames_per_batch=8) as collector:
                collector.set_seed(seed)
                collector.next()
                collector.set_seed(seed)
                collector.next()
            return [given for given in env.given_seeds if given is not None]

        one, again, other = run(3), run(3), run(4)
        assert one == again != other
        assert len(one) == 2
        assert one[0] == one[1]
        assert all(isinstance(seed, int) for seed in one)

    @modes
    @backends_in_short
    def test_a_saved_state_goes_on_with_the_lanes_generators(self, backend, mode):
        lanes = [functools.partial(Tagged, lane, 6, random_length=True) for lane in range(3)]

        def load(state):
            with Collector(
                Maker(backend, lanes, autoreset_mode=mode), frames_per_batch=30, total_frames=150
            ) as collector:
                collector.load_state_dict(state)
                return [batch.clone() for batch in collector]

        with Collector(Maker(backend, lanes, autoreset_mode=mode), frames_per_batch=30, total_frames=150) as collector:
            collector.set_seed(1)
            collector.next()
            collector.next()
            state = collector.state_dict()
        one, other = load(state), load(state)
        assert count(one) == 90
        lengths = [lane["next", "done"].nonzero()[:, 0].tolist() for lane in lanes_of(one)]
        assert lengths == [lane["next", "done"].nonzero()[:, 0].tolist() for lane in lanes_of(other)]
        assert torch.equal(joined(one)["action"], joined(other)["action"])


class TestForms:
    @modes
    @backends_in_short
    def test_a_reward_that_is_an_array_of_one_element(self, backend, mode):
        """FAULTS 8: the same batch from every path, or an error that says what is wrong."""

        class Paid(Counter):
            def _reward_for(self, action):
                return np.array([float(self.t)], np.float32)

        lanes = [functools.partial(Paid, 2), functools.partial(Paid, 3)]
        with Collector(Maker(backend, lanes, autoreset_mode=mode), frames_per_batch=12) as collector:
            if backend != "sync":
                with pytest.raises((EnvError, ValueError), match=r"rewards should have|inhomogeneous"):
                    collector.next()
                return
            batch = collector.next()
        check_batch(batch)
        assert torch.equal(batch["next", "reward"], batch["observation"])

    @pytest.mark.parametrize("masked", [None, True, False])
    @pytest.mark.parametrize("backend", ["sync", "async without shared memory"])
    def test_texts_are_left_out_by_name(self, backend, masked):
        class Told(gym.Env):
            observation_space = spaces.Dict({"x": spaces.Box(0, 99, (2,), np.float32), "mission": spaces.Text(20)})
            action_space = spaces.Discrete(2)

            def observe(self):
                return {"x": np.full(2, self.t, np.float32), "mission": f"go {self.t}"}

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                self.t = 0
                return self.observe(), {}

            def step(self, action):
                self.t += 1
                return self.observe(), 0.0, self.t == 3, False, {}

        for mode in MODES:
            if masked and (mode, backend) == (NEXT_STEP, "async without shared memory"):
                continue
            maker = Maker(backend, [Told] * 2, autoreset_mode=mode)
            with Collector(
                maker, frames_per_batch=16, exclude_keys=["mission"], masked_reset=masked, record=RECORD
            ) as collector:
                batches = [collector.next() for _ in range(2)]
                list(checked(batches))
            for lane in lanes_of(batches):
                assert torch.equal(lane["x"], lane["step_count"].expand(-1, 2).float())
                assert torch.equal(lane["next", "x"], lane["x"] + 1)

    @modes
    @pytest.mark.parametrize("observation", ["scalar", "discrete", "tuple"])
    def test_every_form_of_a_counter(self, mode, observation):
        with Collector(
            Maker("async", counters(1, 3, observation=observation), autoreset_mode=mode), frames_per_batch=12
        ) as collector:
            batches = [collector.next() for _ in range(2)]
            list(checked(batches))
        for length, lane in zip((1, 3), lanes_of(batches), strict=True):
            times = torch.arange(len(lane)) % length
            for key in lane["next"].keys(include_nested=True, leaves_only=True):
                if key not in ("reward", "done", "terminated", "truncated"):
                    flat = lane[key].reshape(len(lane), -1)
                    assert (flat == times[:, None]).all(), key
                    assert (lane["next"][key].reshape(len(lane), -1) == times[:, None] + 1).all(), key

    @modes
    def test_float64_becomes_the_default_float_or_stays(self, mode):
        lanes = counters(2, 3, dtype=np.float64)
        for obs_dtype, expected in ((None, torch.float32), ("env", torch.float64)):
            with Collector(
                Maker("async", lanes, autoreset_mode=mode), frames_per_batch=12, obs_dtype=obs_dtype
            ) as collector:
                batch = collector.next()
            assert batch["observation"].dtype == batch["next", "observation"].dtype == expected
            check_batch(batch)

    def test_lanes_must_be_as_many_as_were_asked_for(self):
        with Collector(Maker("async", counters(2, 3)), frames_per_batch=8, num_envs=2) as collector:
            assert collector.num_envs == 2
        with pytest.raises(OptionError, match=r"num_envs=3.*2 lanes"):
            Collector(Homemade(2, 3), frames_per_batch=8, num_envs=3)
        with pytest.raises(OptionError, match="holds several lanes"):
            Collector([Homemade(2), Homemade(2)], frames_per_batch=8)

    @modes
    @backends_in_short
    def test_one_lane_has_its_dimension(self, backend, mode):
        with Collector(Maker(backend, counters(3), autoreset_mode=mode), frames_per_batch=8) as collector:
            batch = collector.next()
        assert batch.batch_size == (1, 8)
        assert batch.names[-1] == "time"
        assert batch["observation"][0, :, 0].tolist() == [0, 1, 2, 0, 1, 2, 0, 1]


class TestSpaces:
    WAYS: ClassVar[dict[str, dict[str, Any]]] = {
        "next step, pending": {"autoreset_mode": NEXT_STEP, "masked_reset": False},
        "next step, by masks": {"autoreset_mode": NEXT_STEP, "masked_reset": True},
        "same step": {"autoreset_mode": SAME_STEP, "masked_reset": True},
    }
    SCRIPTS: ClassVar[list[Any]] = [[(1, "terminated"), (3, "truncated")], [(2, "both"), (5, "terminated")]]

    def lanes(self, observation, action):
        spaces = OBSERVATION_SPACES[observation], ACTION_SPACES[action]
        return [
            functools.partial(reference.Scripted, lane, script, *spaces) for lane, script in enumerate(self.SCRIPTS)
        ]

    def batches(self, backend, way, observation, action):
        options = dict(self.WAYS[way])
        maker = Maker(backend, self.lanes(observation, action), autoreset_mode=options.pop("autoreset_mode"))
        if backend != "sync":
            options = {}
        with Collector(maker, frames_per_batch=8, record=RECORD, **options) as collector:
            batches = [collector.next() for _ in range(3)]
            return list(checked(batches)), maker.ask("received")

    @pytest.mark.parametrize("way", sorted(WAYS))
    @pytest.mark.parametrize("observation", sorted(OBSERVATION_SPACES))
    def test_every_observation_space(self, way, observation):
        batches, _ = self.batches("sync", way, observation, "discrete")
        assert_by_hand(batches, self.lanes(observation, "discrete"))

    @pytest.mark.parametrize("observation", ["float64", "image", "dict of tuple", "multidiscrete"])
    def test_observation_spaces_between_processes(self, observation):
        for backend in ("async", "async without shared memory"):
            for way in ("next step, by masks", "same step"):
                batches, _ = self.batches(backend, way, observation, "discrete")
                assert_by_hand(batches, self.lanes(observation, "discrete"))

    @pytest.mark.parametrize("way", sorted(WAYS))
    @pytest.mark.parametrize("action", sorted(ACTION_SPACES))
    def test_every_action_space(self, way, action):
        """What a lane received is what its frames say, of the type that its space has; kept, it never changes."""
        for backend in ("sync", *(["async"] if action in ("dict", "float64 box") else [])):
            space = ACTION_SPACES[action]
            batches, received = self.batches(backend, way, "box", action)
            for lane, got in zip(lanes_of(batches), received, strict=True):
                assert all(space.contains(value) for value in got)
                for t, value in enumerate(got[: len(lane)]):
                    for key, part in reference.leaves(space, value, ("action",)).items():
                        stored = lane.get(key)[t]
                        assert torch.equal(torch.as_tensor(part).to(stored.dtype), stored)


class TestInfos:
    class Told(Counter):
        """An action mask in every info; "odd" only in the infos of odd t, "even" of even; "sum" nested, as arrays."""

        def _inform(self):
            info = {"action_mask": np.array([1, self.t % 2], np.int8), "deep": {"sum": np.full(2, self.t, np.int32)}}
            return {**info, "odd" if self.t % 2 else "even": np.float32(self.t)}

    @pytest.mark.parametrize(
        ("backend", "mode", "masked"),
        [*itertools.product(sorted(BACKENDS), MODES, [None]), ("sync", NEXT_STEP, False), ("sync", SAME_STEP, True)],
    )
    def test_entries_masks_and_gaps(self, backend, mode, masked):
        form = spaces.Box(-1, 99, (), np.float32)
        keys = {"odd": form, "even": form, ("deep", "sum"): None, "action_mask": None}
        with Collector(
            Maker(backend, [functools.partial(self.Told, length) for length in (1, 2, 5)], autoreset_mode=mode),
            frames_per_batch=30,
            info_keys=keys,
            record=RECORD,
            masked_reset=masked,
        ) as collector:
            lanes = lanes_of([collector.next() for _ in range(3)])
        for lane in lanes:
            after = lane["next", "step_count"]
            assert torch.equal(lane["next", "info", "deep", "sum"], after.expand(-1, 2).int())
            odd = (after % 2 == 1)[:, 0]
            assert torch.equal(lane["next", "info", "odd"][odd], after[odd, 0].float())
            assert lane["next", "info", "odd"][~odd].isnan().all()
            assert torch.equal(lane["next", "info", "even"][~odd], after[~odd, 0].float())
            assert lane["next", "info", "even"][odd].isnan().all()  # not that of the reset that follows
            before = lane["step_count"][:, 0]
            assert torch.equal(
                lane["action_mask"], torch.stack([torch.ones_like(before), before % 2], -1).to(torch.int8)
            )
            assert torch.equal(lane["next", "action_mask"][:, 1], (after[:, 0] % 2).to(torch.int8))
            assert (lane["action"] <= before % 2).all()  # random actions keep to the mask

    @modes
    @pytest.mark.parametrize("backend", ["async", "async without shared memory"])
    def test_a_mask_that_is_missing_once_is_an_error(self, backend, mode):
        """As with single lanes: else the policy would be told that nothing is allowed."""

        class Forgetful(Counter):
            def _inform(self):
                return {} if self.t == 2 else {"action_mask": np.ones(2, np.int8)}

        with (
            Collector(
                Maker(backend, [functools.partial(Forgetful, length) for length in (4, 1)], autoreset_mode=mode),
                zero,
                frames_per_batch=12,
                info_keys="action_mask",
            ) as collector,
            pytest.raises(EnvError, match="action_mask"),
        ):
            collector.next()

    @modes
    def test_figures_of_episodes_that_a_wrapper_records(self, mode):
        """`RecordEpisodeStatistics` marks its lanes one level up, and in SAME_STEP beside `final_info`, not in it."""

        def make():
            return wrappers.RecordEpisodeStatistics(AsyncVectorEnv(counters(2, 3), autoreset_mode=mode))

        with Collector(
            make, frames_per_batch=24, info_keys={("episode", "l"): spaces.Box(0, 99, (), np.float32)}
        ) as collector:
            lanes = lanes_of([collector.next() for _ in range(2)])
        for length, lane in zip((2, 3), lanes, strict=True):
            ended, figures = lane["next", "done"][:, 0], lane["next", "info", "episode", "l"]
            assert figures[~ended].isnan().all()
            if mode is not DISABLED:  # there it forgets every lane whenever one is reset (gymnasium 1.4)
                assert (figures[ended] == length).all()

    @modes
    @backends_in_short
    def test_an_entry_that_is_not_numeric(self, backend, mode):
        class Told(Counter):
            def _inform(self):
                return {"name": "x"}

        with pytest.raises(ValueError, match="name"):
            Collector(Maker(backend, [Told] * 2, autoreset_mode=mode), frames_per_batch=4, info_keys="name")

    @pytest.mark.parametrize("behaves", MODES, ids=lambda mode: mode.value)
    def test_an_entry_that_takes_another_form(self, behaves):
        class Growing(Homemade):
            def inform(self):
                return {"x": np.zeros((self.num_envs, 2 if self.t.max() < 2 else 3), np.float32)}

        with (
            Collector(Growing(4, 5, behaves=behaves), frames_per_batch=8, info_keys="x") as collector,
            pytest.raises(EnvError, match=r"'x'"),
        ):
            collector.next()

    @pytest.mark.parametrize("behaves", MODES, ids=lambda mode: mode.value)
    def test_an_entry_that_never_comes(self, behaves):
        with (
            Collector(Homemade(1, 1, behaves=behaves), frames_per_batch=400, info_keys="x") as collector,
            pytest.raises(EnvError, match=r"'x', and no step has had it in \d+ episodes"),
        ):
            collector.next()


@contextlib.contextmanager
def warned_by_gymnasium(backend):
    """A worker of an AsyncVectorEnv that raised is announced by warnings."""
    with warnings.catch_warnings():
        if backend != "sync":
            warnings.simplefilter("ignore")
        yield


class TestErrors:
    @modes
    @backends
    @pytest.mark.parametrize("where", ["step", "reset"])
    def test_what_is_raised_inside_a_lane_comes_out_with_its_type(self, backend, mode, where):
        lanes = [
            functools.partial(Counter, 3),
            functools.partial(Breaker, where=where, at=4 if where == "step" else 2, length=3),
        ]
        maker = Maker(backend, lanes, autoreset_mode=mode)
        with warned_by_gymnasium(backend), Collector(maker, zero, frames_per_batch=12) as collector:
            with pytest.raises(RuntimeError, match="Breaker") as caught:
                list(collector)
            assert collector.closed
        cause = caught.value.__cause__
        assert isinstance(cause, WorkerError)
        assert cause.worker == 0
        if backend == "sync":
            assert cause.lane == 1

    @pytest.mark.parametrize("masked", [True, False])
    def test_a_step_that_raises_says_when(self, masked):
        lanes = [functools.partial(Counter, 3), functools.partial(Breaker, at=6, length=None)]
        with (
            Collector(Maker("sync", lanes), zero, frames_per_batch=6, masked_reset=masked) as collector,
            pytest.raises(RuntimeError, match="Breaker") as caught,
        ):
            list(collector)
        assert isinstance(caught.value.__cause__, WorkerError)
        assert caught.value.__cause__.step == 5

    @modes
    def test_what_a_first_reset_raises(self, mode):
        lanes = [Counter, functools.partial(Breaker, where="reset")]
        for backend in sorted(BACKENDS):
            with warned_by_gymnasium(backend), pytest.raises(RuntimeError, match="Breaker") as caught:
                Collector(Maker(backend, lanes, autoreset_mode=mode), frames_per_batch=6)
            assert isinstance(caught.value.__cause__, WorkerError)

    @pytest.mark.parametrize("behaves", MODES, ids=lambda mode: mode.value)
    @pytest.mark.parametrize("masked", [None, False])
    def test_an_answer_of_another_form(self, behaves, masked):
        class Short(Homemade):
            def step(self, actions):
                return super().step(actions)[:4]

        class Wide(Homemade):
            def step(self, actions):
                observation, reward, *rest = super().step(actions)
                return observation, reward[:, None], *rest

        class Other(Homemade):
            def step(self, actions):
                observation, *rest = super().step(actions)
                return observation[:, :2], *rest

        for kind, text in ((Short, "step should return"), (Wide, r"rewards should have shape \[2\]"), (Other, "shape")):
            with Collector(kind(3, 4, behaves=behaves), frames_per_batch=4, masked_reset=masked) as collector:
                with pytest.raises(EnvError, match=text):
                    collector.next()
                assert collector.closed


class TestOwnership:
    @modes
    @backends_in_short
    def test_instances_stay_open_and_what_was_made_is_closed(self, backend, mode):
        maker = Maker(backend, counters(2, 3), autoreset_mode=mode)
        with Collector(maker, frames_per_batch=4) as collector:
            collector.next()
        assert maker.made.closed
        env = BACKENDS[backend](counters(2, 3), autoreset_mode=mode)
        with Collector(env, frames_per_batch=4) as collector:
            collector.next()
        collector.shutdown()
        assert not env.closed
        env.reset()
        env.step(env.action_space.sample())
        env.close()

    @modes
    @backends_in_short
    def test_an_instance_that_was_in_use_before(self, backend, mode):
        """With ends pending, whatever became of them; and again by a second collector."""
        lanes = makers("box", 1, 2, 3)
        env = BACKENDS[backend](lanes, autoreset_mode=mode)
        for steps in (1, 2, 3):
            env.reset()
            for _ in range(1 if mode is DISABLED else steps):
                env.step(np.zeros(3, int))
            with Collector(env, frames_per_batch=9, record=RECORD) as collector:
                batches = [collector.next() for _ in range(3)]
                list(checked(batches))
                assert rows_stay_in_their_episode(batches)
                collector.set_seed(0)
                after = [collector.next() for _ in range(2)]
                list(checked([*batches, *after]))
                assert rows_stay_in_their_episode(after)
            for batch in (*batches, *after):
                assert torch.equal(batch["observation"][..., 2:], batch["step_count"].float())
        env.close()

    def test_an_id_of_a_vector_environment(self):
        env = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="async")
        with Collector(env, frames_per_batch=30, total_frames=90) as collector:
            batches = list(checked(collector))
        assert [batch.batch_size for batch in batches] == [(3, 10)] * 3
        env.close()


class TestLongRollouts:
    @modes
    @backends_in_short
    def test_more_steps_than_views_are_kept_for(self, backend, mode):
        lanes = makers("box", 3, 50, 300)
        with Collector(
            Maker(backend, lanes, autoreset_mode=mode), frames_per_batch=900, total_frames=1800, record=RECORD
        ) as collector:
            batches = list(checked(collector))
        assert_by_hand(batches, lanes)


@modes
@pytest.mark.parametrize("masked", [True, False])
class TestOptionsThatChangeNoData:
    """As every engine has them; the processes behind make no difference."""

    def test_memory_that_is_new_or_always_the_same(self, mode, masked):
        def run(**options):
            maker = Maker("sync", makers("dict", 2, 3, 7), autoreset_mode=mode)
            with Collector(maker, frames_per_batch=21, total_frames=96, masked_reset=masked, **options) as collector:
                collector.set_seed(0)
                return [batch.clone() for batch in collector]

        plain, fresh, same = run(), run(use_buffers=False), run(return_same_td=True)
        assert len(plain) == len(fresh) == len(same)
        for one, other, third in zip(plain, fresh, same, strict=True):
            assert same_bits(one, other)
            assert same_bits(one, third)

    def test_what_is_done_to_a_batch_does_not_reach_the_next(self, mode, masked):
        """FAULTS 68."""
        lanes = makers("dict", 2, 3, 7)
        maker = Maker("sync", lanes, autoreset_mode=mode)
        with Collector(maker, frames_per_batch=21, record=RECORD, masked_reset=masked) as collector:
            batches = []
            for _ in range(5):
                batch = collector.next()
                batches.append(batch.clone())
                for key in list(batch.keys(include_nested=True, leaves_only=True)):
                    batch[key].fill_(1)
        assert_by_hand(list(checked(batches)), lanes)


scripts = st.lists(st.tuples(st.integers(1, 6), st.sampled_from(ENDS)), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(
    scripts=st.lists(scripts, min_size=1, max_size=4),
    mode=st.sampled_from(MODES),
    steps=st.integers(1, 9),
    total=st.integers(1, 30),
    limit=st.none() | st.integers(1, 5),
    copy=st.booleans(),
)
def test_any_episodes_in_batches_of_any_size(scripts, mode, steps, total, limit, copy):
    """Where lanes are reset by masks, or in the step itself: an end by the environment and by a limit at once too."""
    lanes = [functools.partial(Scripted, lane, script) for lane, script in enumerate(scripts)]
    maker, many = Maker("sync", lanes, autoreset_mode=mode, copy=copy), len(lanes)
    with Collector(
        maker,
        frames_per_batch=steps * many,
        total_frames=total * many,
        max_frames_per_traj=limit,
        masked_reset=True,
        record=RECORD,
    ) as collector:
        batches = list(checked(collector))
        assert maker.ask("steps") == [total] * many
    assert_by_hand(batches, lanes, limit=limit)
