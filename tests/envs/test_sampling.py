"""Random actions: exact bounds, true distributions, streams that nothing disturbs, masks."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import itertools

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlcollect import Collector, EnvError, SpaceError
from rlcollect.envs.sampling import BLOCK, ActionSampler, MaskedActionSampler
from rlcollect.envs.spaces import ActionCodec
from rlcollect.layout import Leaf, numpy_dtype
from rlcollect.rollout.seeding import action_generator, lane_seed, torch_seed
from rlcollect.testing import check_batch

LANES = 2
INF = np.inf


def sampler(space, seed=0, lanes=LANES):
    return ActionSampler(ActionCodec(space), lanes, np.random.default_rng(seed))


def draws(space, steps, seed=0, lanes=LANES):
    """`[T, N, *shape]` of a space without parts."""
    (values,) = sampler(space, seed, lanes).peek(steps)
    return values


def decoded(space, steps, seed=0):
    """What the environments would get, step after step."""
    source, codec = sampler(space, seed), ActionCodec(space)
    leaves = source.peek(steps)
    return [action for t in range(steps) for action in codec.decode([leaf[t] for leaf in leaves])]


def fits(space, action):
    """Whether the space has it. Boxes without dimensions sample scalars, and want arrays."""
    return space.contains(np.asarray(action) if isinstance(space, spaces.Box) else action)


def assert_even(counts):
    """Pearson's chi-square against equal chances; the seed is fixed, so this does not fail now and then."""
    counts = np.asarray(counts, float)
    k = counts.size - 1
    chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
    limit = k * (1 - 2 / (9 * k) + 3.3 * np.sqrt(2 / (9 * k))) ** 3  # Wilson and Hilferty; one in two thousand
    assert chi < limit


def small_discretes():
    """Discrete spaces of small dtypes, which older versions of Gymnasium lack."""
    if "dtype" not in inspect.signature(spaces.Discrete).parameters:
        return {}
    return {
        "discrete uint8 up to the last": (spaces.Discrete(6, start=250, dtype=np.uint8), 250, 255),
        "discrete int8 from the first": (spaces.Discrete(6, start=-128, dtype=np.int8), -128, -123),
    }


INTEGERS = {
    "discrete": (spaces.Discrete(5), 0, 4),
    "discrete from -2": (spaces.Discrete(5, start=-2), -2, 2),
    "discrete of one": (spaces.Discrete(1, start=7), 7, 7),
    **small_discretes(),
    "discrete at the top of int64": (spaces.Discrete(4, start=2**63 - 4), 2**63 - 4, 2**63 - 1),
    "discrete at the bottom of int64": (spaces.Discrete(4, start=-(2**63)), -(2**63), -(2**63) + 3),
    "multidiscrete": (spaces.MultiDiscrete([3, 3]), 0, 2),
    "multidiscrete from": (spaces.MultiDiscrete([3, 3], start=[-1, -1]), -1, 1),
    "multidiscrete of two dimensions": (spaces.MultiDiscrete([[3, 3], [3, 3]]), 0, 2),
    "multidiscrete int8": (spaces.MultiDiscrete([4], start=[124], dtype=np.int8), 124, 127),
    "multidiscrete uint8": (spaces.MultiDiscrete([6], start=[250], dtype=np.uint8), 250, 255),
    "multidiscrete at the top of int64": (spaces.MultiDiscrete([3], start=[2**63 - 3]), 2**63 - 3, 2**63 - 1),
    "multibinary": (spaces.MultiBinary([2, 2]), 0, 1),
    "bool box": (spaces.Box(0, 1, (3,), np.bool_), 0, 1),
    "bool box of True": (spaces.Box(1, 1, (3,), np.bool_), 1, 1),
    "uint8 box": (spaces.Box(250, 255, (2,), np.uint8), 250, 255),
    "int8 box": (spaces.Box(-128, -125, (2,), np.int8), -128, -125),
    "int16 box": (spaces.Box(-3, 3, (), np.int16), -3, 3),
    "int32 box at the top": (spaces.Box(2**31 - 4, 2**31 - 1, (2,), np.int32), 2**31 - 4, 2**31 - 1),
    "int64 box at the bottom": (
        spaces.Box(np.array([-(2**63)]), np.array([-(2**63) + 2]), dtype=np.int64),
        -(2**63),
        -(2**63) + 2,
    ),
    "int64 box at the top": (
        spaces.Box(np.array([2**63 - 3]), np.array([2**63 - 1]), dtype=np.int64),
        2**63 - 3,
        2**63 - 1,
    ),
    "uint64 box at the top": (
        spaces.Box(np.array([2**64 - 3], np.uint64), np.array([2**64 - 1], np.uint64), dtype=np.uint64),
        2**64 - 3,
        2**64 - 1,
    ),
    "box of one value": (spaces.Box(5, 5, (2,), np.int32), 5, 5),
}  # fmt: skip


class TestBoundsOfWholeNumbers:
    @pytest.mark.parametrize("name", INTEGERS)
    def test_both_bounds_are_reached_and_never_crossed(self, name):
        space, low, high = INTEGERS[name]
        values = draws(space, 300)
        assert int(values.min()) == low
        assert int(values.max()) == high
        assert values.shape == (300, LANES, *space.shape)

    @pytest.mark.parametrize("name", INTEGERS)
    def test_every_value_between_has_the_same_chance(self, name):
        space, low, high = INTEGERS[name]
        if low == high:
            pytest.skip("there is one value only")
        flat = draws(space, 4000, seed=1).reshape(-1)
        counts = np.bincount((flat.astype(object) - low).astype(np.int64), minlength=high - low + 1)
        assert len(counts) == high - low + 1
        assert_even(counts)

    @pytest.mark.parametrize("name", INTEGERS)
    def test_environments_get_elements_of_their_space(self, name):
        space, *_ = INTEGERS[name]
        for action in decoded(space, 60):
            assert fits(space, action)
            assert isinstance(action, np.ndarray if space.shape else np.generic)  # as `sample()` has it
            assert action.dtype == space.dtype

    @pytest.mark.parametrize(
        "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64]
    )
    def test_the_whole_range_of_a_type(self, dtype):
        info = np.iinfo(dtype)
        space = spaces.Box(info.min, info.max, (2,), dtype)
        values = draws(space, 4000)
        assert values.dtype == dtype
        top_bits = (
            (values.astype(object) - int(space.low.min())) * 8 // (int(space.high.max()) - int(space.low.min()) + 1)
        )
        assert_even(np.bincount(top_bits.astype(np.int64).reshape(-1), minlength=8))

    def test_a_discrete_space_as_large_as_they_come(self):
        space = spaces.Discrete(2**63 - 1)
        values = draws(space, 2000)
        assert (values >= 0).all()
        assert_even(np.bincount((values // (2**63 // 4)).reshape(-1), minlength=4))
        assert all(space.contains(action) for action in decoded(space, 20))

    def test_bounds_that_differ_by_element(self):
        space = spaces.Box(np.array([[0, -5], [7, 100]]), np.array([[1, -3], [7, 103]]), dtype=np.int16)
        values = draws(space, 300)
        assert (values.min((0, 1)) == space.low).all()
        assert (values.max((0, 1)) == space.high).all()
        space = spaces.MultiDiscrete([[2, 3], [4, 5]], start=[[0, -1], [5, 9]])
        values = draws(space, 300)
        assert (values.min((0, 1)) == space.start).all()
        assert (values.max((0, 1)) == space.start + space.nvec - 1).all()

    def test_elements_are_drawn_apart(self):
        """A grid of two dice has all its fields."""
        values = draws(spaces.MultiDiscrete([3, 4]), 4000).reshape(-1, 2)
        assert_even(np.bincount(values[:, 0] * 4 + values[:, 1], minlength=12))
        values = draws(spaces.MultiBinary(3), 4000).reshape(-1, 3)
        assert_even(np.bincount(values @ np.array([1, 2, 4]), minlength=8))


def box(low, high, dtype=np.float32):
    return spaces.Box(np.asarray(low, dtype), np.asarray(high, dtype), dtype=dtype)


REALS = {
    "unit": box([0.0, -1.0], [1.0, 1.0]),
    "scalar": box(-2.0, 3.0),
    "one value": box([0.1, -7.0], [0.1, -7.0]),
    "zero": box([0.0], [0.0]),
    "large": box([1e9], [1e9 + 128]),
    "where float32 counts by two": box([2.0**24], [2.0**24 + 4]),
    "one step of float32": box([1.0], [np.nextafter(np.float32(1), np.float32(2))]),
    "one step below": box([np.nextafter(np.float32(1), np.float32(0))], [1.0]),
    "denormal": box([0.0], [1e-44]),
    "as far as float32 goes": box([-np.finfo(np.float32).max], [np.finfo(np.float32).max]),
    "float16": box([-0.1, 0.3], [0.1, 0.3], np.float16),
    "float64": box([-0.5, 2.0], [0.5, 3.0], np.float64),
}


class TestBoundsOfReals:
    @pytest.mark.parametrize("name", REALS)
    def test_they_are_never_crossed(self, name):
        space = REALS[name]
        values = draws(space, 3000)
        assert np.isfinite(values).all()
        assert (values >= space.low).all()
        assert (values <= space.high).all()
        assert all(fits(space, action) for action in decoded(space, 300))

    def test_both_ends_are_used_where_there_are_few_numbers(self):
        assert np.unique(draws(REALS["where float32 counts by two"], 500)).tolist() == [
            2.0**24,
            2.0**24 + 2,
            2.0**24 + 4,
        ]
        assert len(np.unique(draws(REALS["one step of float32"], 500))) == 2
        assert len(np.unique(draws(REALS["one step below"], 500))) == 2
        assert len(np.unique(draws(REALS["denormal"], 500))) == 8

    @pytest.mark.parametrize("name", ["unit", "scalar", "float64", "as far as float32 goes"])
    def test_they_are_even(self, name):
        space = REALS[name]
        low, high = space.low.astype(np.float64), space.high.astype(np.float64)
        unit = (draws(space, 5000) / 2.0 - low / 2) / (high / 2 - low / 2)
        for element in unit.reshape(10000, -1).T:
            assert_even(np.histogram(element, bins=20, range=(0, 1))[0])

    @pytest.mark.parametrize(
        ("low", "high"),
        [(0.1, 0.1 + 3e-8), (-0.1 - 3e-8, -0.1), (1 / 3, 1 / 3 + 1e-7), (-np.pi - 1e-6, -np.pi)],
    )
    def test_bounds_between_two_numbers_of_float32_are_not_crossed_by_rounding(self, low, high):
        """A float64 space: its bounds are no float32, and what is stored (float32) is what the environment gets."""
        space = box([low], [high], np.float64)
        assert all(space.contains(action) for action in decoded(space, 500))

    def test_bounds_beyond_float32(self):
        """The actions are finite, and the environment accepts them."""
        space = box([-1e300], [1e300], np.float64)
        actions = decoded(space, 50)
        assert all(np.isfinite(action).all() and space.contains(action) for action in actions)

    def test_one_finite_bound_gives_an_exponential_tail(self):
        space = box([2.0, -INF], [INF, -3.0])
        above, below = draws(space, 5000).reshape(-1, 2).T
        for distance in (above - 2, -3 - below):
            assert (distance >= 0).all()
            assert distance.mean() == pytest.approx(1, abs=0.05)
            assert np.median(distance) == pytest.approx(np.log(2), abs=0.05)
            assert distance.max() > 5

    def test_no_finite_bound_gives_a_normal(self):
        values = draws(box([-INF, -INF], [INF, INF]), 5000)
        assert values.mean() == pytest.approx(0, abs=0.05)
        assert values.std() == pytest.approx(1, abs=0.05)
        assert np.abs(values).max() > 3

    def test_every_kind_of_bound_in_one_space(self):
        space = box([0.0, -INF, 5.0, -INF, 2.0], [1.0, -4.0, INF, INF, 2.0])
        values = draws(space, 2000)
        assert (values >= space.low).all()
        assert (values <= space.high).all()
        assert (values[..., 4] == 2).all()
        spread = values.std((0, 1))
        assert (spread[:4] > 0.2).all()
        assert all(space.contains(action) for action in decoded(space, 100))

    def test_a_large_finite_bound_with_an_open_side(self):
        values = draws(box([1e30, -INF], [INF, -1e30]), 200)
        assert (values[..., 0] == np.float32(1e30)).all()
        assert (values[..., 1] == np.float32(-1e30)).all()


PARTS = spaces.Dict(
    {
        "g": spaces.Discrete(9, start=-4),
        "t": spaces.Tuple((box([0.0, -INF], [1.0, INF]), spaces.MultiBinary(3), spaces.Box(0, 255, (2,), np.uint8))),
        "m": spaces.MultiDiscrete([4, 5]),
    }
)


class TestStreams:
    @pytest.mark.parametrize("space", [spaces.Discrete(1000), box([0.0], [1.0]), PARTS], ids=["one", "real", "parts"])
    @pytest.mark.parametrize("cut", [[1], [2, 3, 5], [63, 1], [BLOCK], [BLOCK + 1], [7, BLOCK * 3, 1], [1000]])
    def test_it_does_not_matter_how_many_are_asked_for_at_a_time(self, space, cut):
        total = 300
        whole = sampler(space).peek(total)
        source, parts, made = sampler(space), [], 0
        for size in itertools.cycle(cut):
            size = min(size, total - made)
            parts.append(source.peek(size))
            source.advance(size)
            made += size
            if made == total:
                break
        for index, leaf in enumerate(whole):
            assert np.array_equal(np.concatenate([part[index] for part in parts]), leaf)

    def test_looking_ahead_passes_over_nothing(self):
        source = sampler(spaces.Discrete(1000))
        (far,) = source.peek(500)
        for steps in (1, 10, 500, 64):
            assert np.array_equal(source.peek(steps)[0], far[:steps])
        source.advance(100)
        assert np.array_equal(source.peek(400)[0], far[100:])
        source.advance(0)
        assert np.array_equal(source.peek(1)[0], far[100:101])

    def test_what_was_given_does_not_change_later(self):
        source = sampler(spaces.Discrete(1000))
        (first,) = source.peek(10)
        kept = first.copy()
        source.advance(10)
        source.peek(500)
        assert np.array_equal(first, kept)

    @pytest.mark.parametrize("used", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 200])
    @pytest.mark.parametrize("ahead", [0, 1, BLOCK, 300])
    def test_a_saved_state_goes_on_where_it_was(self, used, ahead):
        source = sampler(PARTS)
        source.peek(used)
        source.advance(used)
        source.peek(ahead)
        state = source.state_dict()
        kept = copy.deepcopy(state)
        expected = source.peek(150)
        source.advance(150)
        assert state == kept
        other = sampler(PARTS, seed=99)
        other.peek(70)
        other.advance(3)
        for _ in range(2):  # and once more
            other.load_state_dict(state)
            for ours, theirs in zip(other.peek(150), expected, strict=True):
                assert np.array_equal(ours, theirs)
            other.advance(20)
        assert state == kept

    def test_a_state_can_be_saved_as_weights_are(self):
        state = sampler(PARTS).state_dict()
        file = io.BytesIO()
        torch.save(state, file)
        file.seek(0)
        assert torch.load(file, weights_only=True) == state

    def test_lanes_differ(self):
        values = draws(spaces.Discrete(1000), 500, lanes=4)[..., :]
        for one, other in itertools.combinations(range(4), 2):
            assert (values[:, one] == values[:, other]).mean() < 0.02
        unit = draws(box(0.0, 1.0), 2000, lanes=4)
        assert np.abs(np.corrcoef(unit.T) - np.eye(4)).max() < 0.1

    def test_steps_differ(self):
        unit = draws(box(0.0, 1.0), 3000, lanes=1)[:, 0]
        for lag in (1, 2, BLOCK, 2 * BLOCK):
            assert abs(np.corrcoef(unit[:-lag], unit[lag:])[0, 1]) < 0.08  # four standard deviations

    def test_neighbouring_seeds_and_workers_differ(self):
        space = box(0.0, 1.0)
        streams = [
            ActionSampler(ActionCodec(space), 1, action_generator(seed, worker)).peek(500)[0][:, 0]
            for seed in range(5)
            for worker in range(3)
        ]
        assert np.abs(np.corrcoef(streams) - np.eye(15)).max() < 0.2
        for one, other in itertools.combinations(streams, 2):
            assert not set(one.tolist()) & set(other.tolist())  # nor is one a later part of another

    def test_seeds_of_lanes_and_of_torch_do_not_meet(self):
        """No `seed + i`: 3000 lanes of neighbouring seeds and workers, all with seeds of their own."""
        seeds = [lane_seed(s, w, n) for s in range(30) for w in range(4) for n in range(25)]
        assert len(set(seeds)) == len(seeds)
        assert all(0 <= seed < 2**31 for seed in seeds)
        own = [torch_seed(s, w) for s in range(100) for w in range(4)]
        assert len(set(own)) == len(own)
        assert lane_seed(3, 1, 2) == lane_seed(3, 1, 2) != lane_seed(3, 1, 2, generation=1)
        assert lane_seed(2**70, 0, 0) != lane_seed(2**70 + 1, 0, 0)


def masked(space, shape, seed=0, lanes=LANES, dtype=torch.int8):
    return MaskedActionSampler(
        ActionCodec(space), Leaf(("action_mask",), shape, dtype), lanes, np.random.default_rng(seed)
    )


class TestMasks:
    @pytest.mark.parametrize("start", [0, -3, 7])
    @pytest.mark.parametrize("dtype", [np.int8, np.bool_, np.float32, np.int64])
    def test_only_what_is_allowed_and_each_with_the_same_chance(self, start, dtype):
        source = masked(spaces.Discrete(5, start=start), (5,))
        masks = np.array([[1, 0, 1, 0, 1], [0, 0, 0, 1, 0]], dtype)
        actions = np.stack([source.sample(masks)[0] for _ in range(3000)]) - start
        assert set(actions[:, 1]) == {3}
        counts = np.bincount(actions[:, 0], minlength=5)
        assert counts[[1, 3]].tolist() == [0, 0]
        assert_even(counts[[0, 2, 4]])

    def test_every_part_of_a_multidiscrete(self):
        space = spaces.MultiDiscrete([2, 3], start=[5, -1])
        source = masked(space, (5,))
        masks = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0]], np.int8)
        actions = np.stack([source.sample(masks)[0] for _ in range(3000)])
        assert actions.shape == (3000, 2, 2)
        assert {tuple(action) for action in actions[:, 1].tolist()} == {(6, -1)}
        first = actions[:, 0] - [5, 0]
        assert set(first[:, 1].tolist()) == {0, 1}
        assert_even(np.bincount(first[:, 0] * 2 + first[:, 1], minlength=4))

    def test_masks_that_allow_all(self):
        source = masked(spaces.Discrete(4), (4,))
        actions = np.stack([source.sample(np.ones((LANES, 4), np.int8))[0] for _ in range(2000)])
        for lane in range(LANES):
            assert_even(np.bincount(actions[:, lane], minlength=4))
        assert_even(np.bincount(actions[:, 0] * 4 + actions[:, 1], minlength=16))

    @pytest.mark.parametrize("space", [spaces.Discrete(3), spaces.MultiDiscrete([3, 2])], ids=repr)
    def test_a_mask_that_allows_nothing_is_an_error_that_names_the_lane(self, space):
        size = 3 if isinstance(space, spaces.Discrete) else 5
        masks = np.ones((3, size), np.int8)
        masks[1, :3] = 0
        with pytest.raises(EnvError, match=r"lane 1: \"action_mask\" allows no action.*0, 0, 0"):
            masked(space, (size,), lanes=3).sample(masks)

    def test_the_stream_does_not_depend_on_the_masks(self):
        """Other masks for a while, the same actions after it."""
        one, other = (masked(spaces.Discrete(50), (50,)) for _ in range(2))
        full = np.ones((LANES, 50), np.int8)
        few = full.copy()
        few[:, 3:] = 0
        for _ in range(10):
            one.sample(full)
            other.sample(few)
        assert all((one.sample(full)[0] == other.sample(full)[0]).all() for _ in range(10))

    def test_a_saved_state_goes_on_where_it_was(self):
        source, full = masked(spaces.Discrete(50), (50,)), np.ones((LANES, 50), np.int8)
        source.sample(full)
        state = source.state_dict()
        expected = [source.sample(full)[0] for _ in range(5)]
        other = masked(spaces.Discrete(50), (50,), seed=9)
        other.load_state_dict(state)
        assert np.array_equal([other.sample(full)[0] for _ in range(5)], expected)

    @pytest.mark.parametrize(
        ("space", "shape", "words"),
        [
            (spaces.Discrete(3), (4,), [r"\[4\]", r"\[3\]"]),
            (spaces.Discrete(3), (3, 1), [r"\[3, 1\]", r"\[3\]"]),
            (spaces.Discrete(3), (), [r"\[\]", r"\[3\]"]),
            (spaces.MultiDiscrete([2, 3]), (3,), [r"\[3\]", r"\[5\]"]),
            (spaces.MultiDiscrete([[2, 3]]), (5,), ["MultiDiscrete"]),
            (spaces.MultiBinary(3), (3,), ["MultiBinary", "rename_keys"]),
            (box([0.0], [1.0]), (1,), ["Box", "rename_keys"]),
        ],
        ids=repr,
    )
    def test_a_mask_that_means_nothing_is_an_error(self, space, shape, words):
        with pytest.raises(SpaceError) as raised:
            masked(space, shape)
        for word in words:
            assert raised.match(word)


# --- through a collector ----------------------------------------------------------------------------------------------


class Choosy(gym.Env):
    """Allows other actions in each lane and step; refuses what is not allowed.

    The mask stands in the observation, or in the info.
    """

    def __init__(self, lane, space, place="observation", length=4, empty_at=None):
        self.lane, self.action_space, self.place, self.length, self.empty_at = lane, space, place, length, empty_at
        self.size = int(space.n) if isinstance(space, spaces.Discrete) else int(space.nvec.sum())
        x = spaces.Box(-1, 1e6, (1,), np.float32)
        self.observation_space = (
            spaces.Dict({"x": x, "action_mask": spaces.MultiBinary(self.size)}) if place == "observation" else x
        )
        self.episode, self.t, self.total = -1, 0, 0

    def mask(self):
        if self.total == self.empty_at:
            return np.zeros(self.size, np.int8)
        rng = np.random.default_rng([self.lane, self.episode, self.t])
        sizes = [self.size] if isinstance(self.action_space, spaces.Discrete) else self.action_space.nvec.tolist()
        parts = [rng.random(size) < 0.5 for size in sizes]
        for part in parts:
            part[rng.integers(len(part))] = True
        return np.concatenate(parts).astype(np.int8)

    def answer(self):
        self.now = self.mask()
        x = np.array([100 * self.episode + self.t], np.float32)
        if self.place == "observation":
            return {"x": x, "action_mask": self.now}, {}
        return x, {"action_mask": self.now}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.episode, self.t = self.episode + 1, 0
        return self.answer()

    def step(self, action):
        assert self.allows(action), (self.now, action)
        self.t, self.total = self.t + 1, self.total + 1
        observation, info = self.answer()
        return observation, 1.0, self.t == self.length, False, info

    def allows(self, action):
        if isinstance(self.action_space, spaces.Discrete):
            return self.now[action - self.action_space.start]
        parts = np.split(self.now, np.cumsum(self.action_space.nvec)[:-1])
        return all(part[i] for part, i in zip(parts, np.asarray(action) - self.action_space.start, strict=True))


def choosy(space, place, lanes, **options):
    made = itertools.count()
    return {
        "create_env_fn": lambda: Choosy(next(made), space, place, **options),
        "num_envs": lanes,
        "info_keys": ("action_mask",) if place == "info" else (),
    }


def first_allowed(td):
    """A policy that needs a mask that allows something, and writes something of its own."""
    mask = td["action_mask"]
    assert (mask.sum(-1) > 0).all()
    return td.set("action", mask.long().argmax(-1) + 3).set("seen", mask.float() + 1)


MASKED_SPACES = [spaces.Discrete(6), spaces.Discrete(6, start=-2), spaces.MultiDiscrete([3, 4], start=[0, 5])]


@pytest.mark.parametrize("place", ["observation", "info"])
@pytest.mark.parametrize("lanes", [None, 3], ids=["single", "three lanes"])
class TestMasksOfEnvironments:
    @pytest.mark.parametrize("space", MASKED_SPACES, ids=repr)
    def test_random_actions_respect_them(self, space, place, lanes):
        """The environment refuses what its mask forbids; what is recorded is what it saw."""
        with Collector(**choosy(space, place, lanes), frames_per_batch=30, total_frames=180) as collector:
            batch = torch.cat(list(collector), -1)
        check_batch(batch)
        start = torch.as_tensor(space.start)
        chosen = batch["action"] - start
        if isinstance(space, spaces.Discrete):
            allowed = batch["action_mask"].gather(-1, chosen.unsqueeze(-1))
        else:
            offsets = torch.tensor([0, *np.cumsum(space.nvec)[:-1].tolist()])
            allowed = batch["action_mask"].gather(-1, chosen + offsets)
        assert (allowed == 1).all()
        assert len(batch["action"].reshape(180, -1).unique(dim=0)) > 4
        assert (batch["collector", "policy_version"] == -1).all()

    def test_a_warm_up_respects_them_and_all_batches_have_the_same_keys(self, place, lanes):
        """FAULTS 33: the policy never sees a mask that was made up."""
        options = choosy(spaces.Discrete(6, start=3), place, lanes)
        with Collector(
            **options, policy=first_allowed, frames_per_batch=12, total_frames=48, init_random_frames=20
        ) as collector:
            batches = list(collector)
        assert all(set(b.keys(True, True)) == set(batches[0].keys(True, True)) for b in batches)
        batch = torch.cat(batches, -1)
        check_batch(batch)
        random = batch["collector", "policy_version"] == -1
        assert random.sum() == 20
        assert torch.equal(batch["action"][~random], batch["action_mask"].long().argmax(-1)[~random] + 3)
        assert torch.equal(batch["seen"][~random], batch["action_mask"].float()[~random] + 1)
        assert (batch["action_mask"].gather(-1, batch["action"].unsqueeze(-1) - 3) == 1).all()

    def test_a_mask_that_allows_nothing_names_its_lane(self, place, lanes):
        with (
            Collector(**choosy(spaces.Discrete(6), place, lanes, empty_at=10), frames_per_batch=60) as collector,
            pytest.raises(EnvError, match=r"lane 0.*allows no action"),
        ):
            collector.next()

    def test_the_batch_size_is_not_part_of_the_data(self, place, lanes):
        wholes = []
        for frames in (3, 12, 60):
            with Collector(
                **choosy(spaces.Discrete(6), place, lanes), frames_per_batch=frames, total_frames=60
            ) as collector:
                collector.set_seed(0)
                wholes.append(torch.cat(list(collector), -1)["action"])
        assert torch.equal(wholes[0], wholes[1])
        assert torch.equal(wholes[0], wholes[2])


class TestMasksInOtherForms:
    def test_a_mask_with_parts_is_respected_or_refused(self):
        """Gymnasium's own masks for MultiDiscrete are tuples; ignoring one in silence would make illegal actions."""

        class Parts(Choosy):
            def __init__(self):
                super().__init__(0, spaces.MultiDiscrete([2, 3]))
                self.observation_space = spaces.Dict(
                    {
                        "x": self.observation_space["x"],
                        "action_mask": spaces.Tuple((spaces.MultiBinary(2), spaces.MultiBinary(3))),
                    }
                )

            def answer(self):
                observation, info = super().answer()
                return {**observation, "action_mask": (self.now[:2], self.now[2:])}, info

        with contextlib.suppress(SpaceError), Collector(Parts, frames_per_batch=100) as collector:
            collector.next()

    def test_a_mask_that_was_renamed_is_none(self):
        options = choosy(spaces.Discrete(6), "observation", 2)
        with (
            Collector(**options, frames_per_batch=100, rename_keys={"action_mask": "legal"}) as collector,
            pytest.raises(AssertionError),
        ):
            collector.next()

    def test_another_key_may_be_renamed_to_be_one(self):
        class Named(Choosy):
            def __init__(self):
                super().__init__(0, spaces.Discrete(5))
                self.observation_space = spaces.Dict(
                    {"x": self.observation_space["x"], "legal": self.observation_space["action_mask"]}
                )

            def answer(self):
                observation, info = super().answer()
                return {"x": observation["x"], "legal": self.now}, info

        with Collector(Named, frames_per_batch=100, rename_keys={"legal": "action_mask"}) as collector:
            assert collector.next()["action_mask"].shape == (100, 5)

    def test_a_mask_of_no_use_is_no_error_where_a_policy_acts(self):
        space = spaces.Dict({"x": box([0.0], [1.0]), "action_mask": spaces.MultiBinary(9)})

        class Odd(gym.Env):
            observation_space, action_space = space, spaces.Discrete(2)

            def reset(self, *, seed=None, options=None):
                return space.sample(), {}

            def step(self, action):
                return space.sample(), 0.0, False, False, {}

        with Collector(Odd, lambda td: td.set("action", torch.tensor(1)), frames_per_batch=4) as collector:
            assert (collector.next()["action"] == 1).all()
        with pytest.raises(SpaceError, match="action_mask"):
            Collector(Odd, frames_per_batch=4)


class Wide(gym.Env):
    """Any action; observes lane and step."""

    def __init__(self, lane=0, action_space=None):
        self.lane, self.t = lane, 0
        self.observation_space = spaces.Box(-1e6, 1e6, (2,), np.float32)
        self.action_space = action_space or spaces.Discrete(1000)
        self.received = []

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return np.array([self.lane, 0], np.float32), {}

    def step(self, action):
        self.received.append(action)
        self.t += 1
        return np.array([self.lane, self.t], np.float32), 0.0, self.t == 7, False, {}


def told(observation):
    """The policy's action: far away from what chance would do in all lanes and steps."""
    return (observation[..., 0] * 100 + observation[..., 1]).long()


class TestWarmUp:
    """`init_random_frames`, split over the lanes up front; quotas differ by one at most."""

    @pytest.mark.parametrize("frames", [1, 2, 3, 4, 7, 12, 13, 29, 30, 59])
    @pytest.mark.parametrize("steps", [1, 4, 30])
    def test_exact_in_every_lane(self, frames, steps):
        calls = []

        def policy(td):
            calls.append(td["observation"].clone())
            return td.set("action", told(td["observation"])).set("extra", td["observation"] + 1000)

        lanes, total = 3, 60
        envs = [Wide(lane) for lane in range(lanes)]
        with Collector(
            envs, policy, frames_per_batch=steps * lanes, total_frames=total, init_random_frames=frames
        ) as collector:
            collector.set_seed(0)
            batches = list(collector)
        assert len({tuple(sorted(map(str, b.keys(True, True)))) for b in batches}) == 1
        batch = torch.cat(batches, -1)
        check_batch(batch)
        quotas = [frames // lanes + (lane < frames % lanes) for lane in range(lanes)]
        random = torch.arange(total // lanes) < torch.tensor(quotas)[:, None]
        assert int(random.sum()) == frames
        assert torch.equal(batch["collector", "policy_version"], -random.long())
        assert torch.equal(batch["action"][~random], told(batch["observation"])[~random])
        assert (batch["action"][random] != told(batch["observation"])[random]).float().mean() > 0.8
        assert torch.equal(batch["extra"][~random], (batch["observation"] + 1000)[~random])
        assert (batch["extra"][random] == 0).all()
        for env, row in zip(envs, batch["action"], strict=True):
            assert env.received == row.tolist()
        assert len(calls) == 1 + total // lanes - frames // lanes  # not while all are random

    def test_the_random_actions_are_those_of_a_random_collector(self):
        """Whatever the batches, and whoever acts later."""
        wholes = []
        for policy, options in (
            (None, {}),
            (told, {"init_random_frames": 25, "frames_per_batch": 6}),
            (told, {"init_random_frames": 25, "frames_per_batch": 60}),
        ):
            envs = [Wide(lane) for lane in range(3)]
            with Collector(envs, policy, **{"frames_per_batch": 15, "total_frames": 60, **options}) as collector:
                collector.set_seed(4)
                wholes.append(torch.cat(list(collector), -1)["action"])
        quotas = torch.tensor([9, 8, 8])[:, None]
        random = torch.arange(20) < quotas
        assert torch.equal(wholes[0][random], wholes[1][random])
        assert torch.equal(wholes[1], wholes[2])

    @pytest.mark.parametrize("none", [None, 0, -1])
    def test_none_at_all(self, none):
        with Collector(Wide, told, frames_per_batch=9, num_envs=3, init_random_frames=none) as collector:
            assert (collector.next()["collector", "policy_version"] == 0).all()

    def test_a_single_lane(self):
        env = Wide()
        with Collector(env, told, frames_per_batch=4, total_frames=12, init_random_frames=5) as collector:
            batch = torch.cat(list(collector), -1)
        assert batch["collector", "policy_version"].tolist() == [-1] * 5 + [0] * 7
        assert torch.equal(batch["action"][5:], told(batch["observation"])[5:])
        assert env.received == batch["action"].tolist()

    @pytest.mark.parametrize(
        "action_space",
        [PARTS, spaces.Box(-1, 1, (2,), np.float32), spaces.Tuple((spaces.Discrete(9), spaces.MultiBinary(2)))],
        ids=["parts", "box", "tuple"],
    )
    def test_actions_with_parts_and_reals(self, action_space):
        """In the mixed step every part is random in the random lanes, and the policy's in the others."""
        codec = ActionCodec(action_space)

        def policy(td):
            for leaf in codec.leaves:
                value = 0.5 if leaf.dtype.is_floating_point else 1
                td[leaf.key] = torch.full((3, *leaf.shape), value, dtype=leaf.dtype)
            return td

        envs = [Wide(lane, action_space) for lane in range(3)]
        with Collector(envs, policy, frames_per_batch=120, init_random_frames=50) as collector:
            batch = collector.next()
        random = batch["collector", "policy_version"] == -1
        assert random.sum(1).tolist() == [17, 17, 16]
        for leaf in codec.leaves:
            value = 0.5 if leaf.dtype.is_floating_point else 1
            assert (batch[leaf.key][~random] == value).all()
            assert (batch[leaf.key][random] != value).any()
            assert batch[leaf.key].numpy().dtype == numpy_dtype(leaf.dtype)
        assert all(action_space.contains(action) for env in envs for action in env.received)

    def test_new_weights_during_the_warm_up_change_no_random_frame(self):
        with Collector(Wide, told, frames_per_batch=6, num_envs=3, init_random_frames=7) as collector:
            collector.next()
            collector.update_policy_weights_()
            versions = collector.next()["collector", "policy_version"]
        assert versions.tolist() == [[-1, 1], [1, 1], [1, 1]]

    def test_a_bfloat16_output_beside_it(self):
        def policy(td):
            return td.set("action", told(td["observation"])).set("half", td["observation"].bfloat16() + 1)

        with Collector(Wide, policy, frames_per_batch=12, num_envs=3, init_random_frames=4) as collector:
            batch = collector.next()
        random = batch["collector", "policy_version"] == -1
        assert (batch["half"][random] == 0).all()
        assert torch.equal(batch["half"][~random], (batch["observation"].bfloat16() + 1)[~random])
