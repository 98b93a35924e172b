"""`trajs_per_batch`: so many whole episodes a batch, in one process; `tests/workers` has the other kinds.

Rows of FAULTS that are held here: 15, 21, 27, 28, 29, 31.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import sys
import tracemalloc
import warnings
from collections import Counter as Tally

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv

from rlcollect import Collector, EnvError, OptionError, WorkerError
from rlcollect.testing import Breaker, Counter, Echo, Life, Tagged, TaggedAgents, TensorTagged
from tests.collectors.helpers import WholeEpisodes, episodes_of, interrupt_at_call
from tests.envs.vector_helpers import Homemade

FORMATS = ("padded", "cat", "nested")
every_format = pytest.mark.parametrize("traj_format", FORMATS)
every_order = pytest.mark.parametrize("traj_order", ["started", "lanes"])


def lanes(*lengths, **options):
    """`Tagged` lanes: the tag is the lane's number."""
    return [Tagged(lane, length, **options) for lane, length in enumerate(lengths)]


def steps_of(collector):
    """Frames that the environments have made."""
    return sum(each.steps for each in collector.map_fn(list)[0])


def made_by(envs):
    """Frames that the lanes of a vector environment have made."""
    if isinstance(envs[0], Homemade):
        return int(envs[0].frames.sum())
    return sum(env.steps * (env.num_envs if isinstance(env, TensorTagged) else 1) for env in envs)


def counting(observation, hidden=None):
    """Its state is the number of steps since the episode began, if it is carried as it should be."""
    hidden = torch.zeros(*observation.shape[:-1], 1) if hidden is None else hidden
    return {"action": hidden[..., 0].long() % 2, ("next", "hidden"): hidden + 1}


class TestWhatComes:
    @every_format
    @every_order
    @pytest.mark.parametrize("frames", [1, 7, 40])
    def test_so_many_whole_episodes_whatever_rollouts_they_were_made_in(self, traj_format, traj_order, frames):
        seen = WholeEpisodes(3)
        with Collector(
            lanes(2, 3, 11, 4),
            frames_per_batch=4 * frames,
            total_frames=300,
            trajs_per_batch=3,
            traj_format=traj_format,
            traj_order=traj_order,
        ) as collector:
            for batch in collector:
                seen.add(batch)
                assert collector.collected_frames == seen.frames
            assert steps_of(collector) == seen.frames + collector.stats().dropped
        seen.check_none_is_missing() if traj_order == "started" else None
        assert {tag: count for tag, _, count in seen.episodes} == {0: 2, 1: 3, 2: 11, 3: 4}

    @every_format
    def test_a_single_lane(self, traj_format):
        seen = WholeEpisodes(2)
        with Collector(
            Tagged(0, 7, random_length=True),
            frames_per_batch=5,
            total_frames=100,
            trajs_per_batch=2,
            traj_format=traj_format,
        ) as collector:
            for batch in collector:
                seen.add(batch)
        seen.check_none_is_missing()

    def test_episodes_of_50_in_rollouts_of_40(self):
        """TorchRL #2659: 3 episodes of 50 were 6 trajectories."""
        with Collector(Counter(50), frames_per_batch=40, total_frames=450, trajs_per_batch=3) as collector:
            for batch in collector:
                assert batch.batch_size == (3, 50)
                assert batch["collector", "mask"].all()
                assert batch["observation"][..., 0].tolist() == [list(range(50))] * 3

    def test_padding_is_told_by_the_mask_and_holds_nothing(self):
        """TorchRL PR #4057: losses counted padding."""

        class Nan(Tagged):
            def _reward_for(self, action):
                return float("nan")

        with Collector([Nan(0, 2), Nan(1, 5)], frames_per_batch=8, total_frames=70, trajs_per_batch=4) as collector:
            frames = 0
            for batch in collector:
                mask = batch["collector", "mask"]
                frames += int(mask.sum())
                assert torch.equal(batch["next", "reward"].isnan()[..., 0], mask)
                for value in batch.values(include_nested=True, leaves_only=True):
                    assert not value[~mask].any()
            assert frames == collector.collected_frames

    def test_episodes_that_are_cut_into_fragments(self):
        """TorchRL #1428."""
        options = {"frames_per_batch": 30, "trajs_per_batch": 2, "fragment_len": 8}
        with Collector(Counter(20), **options) as collector:
            batch = collector.next()
        assert batch.batch_size == (6, 8)
        assert batch["collector", "mask"].sum(-1).tolist() == [8, 8, 4] * 2
        assert batch["observation"][batch["collector", "mask"]][:, 0].tolist() == [*range(20)] * 2
        with Collector(Counter(20), traj_format="nested", **options) as collector:
            assert [len(each) for each in collector.next()["observation"].unbind()] == [8, 8, 4] * 2

    def test_a_limit_is_an_end(self):
        with Collector(
            lanes(None, 3), frames_per_batch=10, total_frames=60, trajs_per_batch=2, max_frames_per_traj=7
        ) as collector:
            seen = WholeEpisodes(2)
            for batch in collector:
                seen.add(batch)
                for episode in episodes_of(batch):
                    assert episode["next", "truncated"][-1, 0] == (len(episode) == 7)
                    assert episode["step_count"][:, 0].tolist() == list(range(len(episode)))
        seen.check_none_is_missing()
        assert {count for _, _, count in seen.episodes} == {7, 3}

    def test_a_state_that_the_policy_carries(self):
        with Collector(
            lanes(3, 5), counting, frames_per_batch=8, total_frames=60, trajs_per_batch=3, record="is_init"
        ) as collector:
            for episode in itertools.chain.from_iterable(map(episodes_of, collector)):
                assert episode["hidden"][:, 0].tolist() == list(range(len(episode)))
                assert episode["is_init"][:, 0].tolist() == [True] + [False] * (len(episode) - 1)

    def test_a_warm_up(self):
        versions = []
        with Collector(
            lanes(3, 3), counting, frames_per_batch=8, total_frames=30, trajs_per_batch=2, init_random_frames=10
        ) as collector:
            for batch in collector:
                versions += batch["collector", "policy_version"][batch["collector", "mask"]].tolist()
        assert Tally(versions)[-1] == 10

    @pytest.mark.parametrize(
        "options", [{"use_buffers": False}, {"storing_device": "cpu"}, {"record": "mask"}], ids=str
    )
    def test_batches_are_the_users(self, options):
        with Collector(
            lanes(3, 5), frames_per_batch=8, total_frames=90, trajs_per_batch=3, traj_format="cat", **options
        ) as collector:
            kept = [(batch, batch.clone()) for batch in collector]
            assert all(batch.names == ["time"] for batch, _ in kept)
            devices = {batch.device for batch, _ in kept}
        assert all((batch == copy).all() for batch, copy in kept)
        assert devices == {torch.device("cpu") if "storing_device" in options else None}

    def test_breaking_off_and_going_on(self):
        seen = WholeEpisodes(1)
        with Collector(lanes(3, 5), frames_per_batch=8, trajs_per_batch=1) as collector:
            for _ in range(5):
                for batch in itertools.islice(collector, 2):
                    seen.add(batch)
        seen.check_none_is_missing()


class Images(Tagged):
    """`Tagged`, with an image whose every point is t."""

    def __init__(self, lane, length):
        super().__init__(lane, length)
        self.observation_space = gym.spaces.Dict(
            {"observation": self.observation_space, "image": gym.spaces.Box(0, 255, (32, 32), np.uint8)}
        )

    def _observe(self):
        return {"observation": super()._observe(), "image": np.full((32, 32), self.t, np.uint8)}


class TestEveryDriver:
    @every_format
    @every_order
    @pytest.mark.parametrize(
        "make",
        [
            lambda: SyncVectorEnv([functools.partial(Tagged, lane, n) for lane, n in enumerate((3, 5, 2))]),
            lambda: Homemade(3, 5, 2),
            lambda: Homemade(3, 5, 2, masks="ignored"),
            lambda: TensorTagged([3, 5, 2]),
            lambda: TensorTagged([3, 5, 2], end="truncated"),
        ],
        ids=["masked resets", "next step", "next step, resets all", "tensors", "tensors, truncated"],
    )
    def test_vector_environments(self, make, traj_format, traj_order):
        seen = WholeEpisodes(4)
        with Collector(
            make,
            frames_per_batch=24,
            total_frames=150,
            trajs_per_batch=4,
            traj_format=traj_format,
            traj_order=traj_order,
        ) as collector:
            for batch in collector:
                seen.add(batch)
            frames = collector.map_fn(made_by)[0]
            assert seen.frames == collector.collected_frames
            assert frames == seen.frames + collector.stats().dropped
        assert {(tag, count) for tag, _, count in seen.episodes} == {(0, 3), (1, 5), (2, 2)}
        seen.check_none_is_missing() if traj_order == "started" else None

    @pytest.mark.timeout(60)
    @every_order
    def test_lanes_that_processes_step(self, traj_order):
        """Lanes go forward at their own pace, and some may be delivered short, or with no frame at all."""
        seen = WholeEpisodes(3)
        with Collector(
            [functools.partial(Tagged, lane, length) for lane, length in enumerate((2, 3, 9, 4))],
            frames_per_batch=16,
            total_frames=300,
            env_workers=2,
            env_groups=2,
            trajs_per_batch=3,
            traj_order=traj_order,
        ) as collector:
            for batch in collector:
                seen.add(batch)
            made = sum(steps for vector in collector.map_fn(list)[0] for steps in vector.get_attr("steps"))
            lost = collector.stats().dropped
        assert made - lost - seen.frames in range(5), "those under way when it was asked"
        seen.check_none_is_missing() if traj_order == "started" else None

    @every_format
    def test_several_agents(self, traj_format):
        """An episode is whole when nobody is there any more."""
        lives = {"cat_0": Life(ends=2), "cat_1": Life(ends=5, end="truncated"), "cat_2": Life(ends=1)}
        with Collector(
            [functools.partial(TaggedAgents, lives, lane) for lane in range(2)],
            frames_per_batch=12,
            total_frames=70,
            trajs_per_batch=3,
            traj_format=traj_format,
        ) as collector:
            for batch in collector:
                times = batch["agents", "observation"][..., 3]
                rows = times.unbind() if traj_format != "cat" else times.split(5)
                assert [row[:, 1].tolist() for row in rows] == [[0.0, 1, 2, 3, 4]] * 3

    @every_format
    def test_large_frames(self, traj_format):
        with Collector(
            [Images(0, 3), Images(1, 7)],
            frames_per_batch=10,
            total_frames=70,
            trajs_per_batch=3,
            traj_format=traj_format,
        ) as collector:
            for episode in itertools.chain.from_iterable(map(episodes_of, collector)):
                times = torch.arange(len(episode))[:, None, None]
                assert torch.equal(episode["observation"][:, 2].long(), times.flatten())
                assert (episode["image"] == times).all()
                assert (episode["next", "image"] == times + 1).all()


class TestOrder:
    def test_by_start_all_wait_for_the_one_that_began_first(self):
        with Collector(lanes(6, 2), frames_per_batch=4, trajs_per_batch=2, traj_format="cat") as collector:
            seen = WholeEpisodes(2)
            for _ in range(6):
                seen.add(collector.next())
        assert [(tag, number) for tag, number, _ in seen.episodes] == [
            *[(0, 0), (1, 0), (1, 1), (1, 2)],
            *[(0, 1), (1, 3), (1, 4), (1, 5)],
            *[(0, 2), (1, 6), (1, 7), (1, 8)],
        ]

    def test_by_lanes_each_gives_one_in_turn_and_some_are_left_out(self):
        with Collector(lanes(6, 2), frames_per_batch=4, trajs_per_batch=3, traj_order="lanes") as collector:
            seen = WholeEpisodes(3)
            for _ in range(20):
                seen.add(collector.next())
            assert [tag for tag, _, _ in seen.episodes] == [0, 1] * 30
            assert collector.stats().dropped > 0
        numbers = [number for tag, number, _ in seen.episodes if tag == 1]
        assert numbers == sorted(numbers)
        assert numbers[-1] > len(numbers), "of lane 1"


class Patchy(Tagged):
    """Every episode is short or long, by a fair coin."""

    def _draw_limit(self):
        return 40 if self.np_random.random() < 0.5 else 2


def first_to_finish(collector, episodes):
    """What a naive loop collects: those that end first. The share of long ones."""
    found = []
    while len(found) < episodes:
        batch = collector.next()
        ends = batch["next", "done"][..., 0].nonzero().tolist()
        ends.sort(key=lambda place: place[1])  # in time
        found += [int(batch["next", "observation"][lane, t, 2]) for lane, t in ends]
    return np.mean([length == 40 for length in found[:episodes]])


class TestShortOnesAreNotPreferred:
    """Half of all episodes that begin have 2 frames, the others 40; a batch has as many episodes as there are lanes."""

    LANES = 16

    @every_order
    def test_the_share_of_long_ones_in_each_batch(self, traj_order):
        """Over many first batches: it is the first that a race would spoil most."""
        shares = []
        for seed in range(60):
            with Collector(
                [Patchy(lane, 40) for lane in range(self.LANES)],
                frames_per_batch=2 * self.LANES,
                trajs_per_batch=self.LANES,
                traj_order=traj_order,
            ) as collector:
                collector.set_seed(seed)
                shares.append((collector.next()["collector", "mask"].sum(-1) == 40).double().mean().item())
        # 960 fair coins: a standard deviation of 0.016
        assert abs(np.mean(shares) - 0.5) < 0.06

    def test_those_that_end_first_are_mostly_short(self):
        """What the test above would find of a race."""
        shares = []
        for seed in range(30):
            with Collector(
                [Patchy(lane, 40) for lane in range(self.LANES)], frames_per_batch=2 * self.LANES
            ) as collector:
                collector.set_seed(seed)
                shares.append(first_to_finish(collector, self.LANES))
        assert np.mean(shares) < 0.2

    def test_lanes_of_short_and_lanes_of_long_ones(self):
        """By start: as many as began. By lanes: half."""
        lengths = [3] * 4 + [30] * 4
        for traj_order, expected in (("started", 1 / 11), ("lanes", 1 / 2)):
            with Collector(
                lanes(*lengths), frames_per_batch=80, trajs_per_batch=10, traj_order=traj_order
            ) as collector:
                found = [n for _ in range(60) for n in collector.next()["collector", "mask"].sum(-1).tolist()]
            assert abs(np.mean([length == 30 for length in found]) - expected) < 0.02


class TestCounts:
    def test_it_ends_with_the_first_batch_at_all_frames_or_over_them(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is rounded to whole steps of all lanes
            with Collector(lanes(4, 4, 4), frames_per_batch=9, total_frames=16, trajs_per_batch=1) as collector:
                assert [len(batch[0]) for batch in collector] == [4] * 4
                assert collector.total_frames == collector.collected_frames == 16
            with Collector(lanes(4, 4, 4), frames_per_batch=9, total_frames=17, trajs_per_batch=1) as collector:
                assert len(list(collector)) == 5
                assert collector.exhausted
                assert collector.next() is None
                assert collector.collected_frames == 20

    def test_the_number_of_batches_is_not_known(self):
        with (
            Collector(Counter(4), frames_per_batch=8, total_frames=16, trajs_per_batch=2) as collector,
            pytest.raises(TypeError, match="episodes have any length"),
        ):
            len(collector)

    def test_no_more_is_stepped_than_rollouts_need(self):
        """Tianshou #255: 32 steps ran an episode of 100,000; RLlib #53053: what was left over was made again."""
        with Collector(lanes(3, 5), frames_per_batch=8, trajs_per_batch=2) as collector:
            for _ in range(30):
                before = steps_of(collector)
                collector.next()
                made = steps_of(collector)
                assert made - before <= 2 * 2 * 5 + 8
                waiting = made - collector.collected_frames
                assert waiting <= 8 + 5
            resets = sum(each.resets for each in collector.map_fn(list)[0])
            assert collector.stats().episodes + 2 == resets

    def test_frames_of_every_version(self):
        with Collector(
            lanes(3, 7), counting, frames_per_batch=8, total_frames=200, trajs_per_batch=2, traj_format="nested"
        ) as collector:
            lags = Tally()
            for version, batch in enumerate(collector):
                lags.update((version - batch["collector", "policy_version"].values()).tolist())
                collector.update_policy_weights_()
            assert collector.policy_lag == dict(sorted(lags.items()))
            assert len(lags) > 2

    def test_figures_at_the_end(self):
        with Collector(lanes(3, 7), frames_per_batch=40, total_frames=100, trajs_per_batch=2) as collector:
            batches = list(collector)
            stats = collector.stats()
            assert stats.frames == sum(int(batch["collector", "mask"].sum()) for batch in batches)
            assert stats.batches == len(batches)
            assert stats.frames + stats.dropped == steps_of(collector)

    def test_figures_before(self):
        with Collector(lanes(3, 7), frames_per_batch=40, trajs_per_batch=2) as collector:
            collector.next()
            assert collector.stats().dropped == 0, "what waits will come"


class TestCuts:
    @pytest.mark.parametrize(
        "cut",
        [
            lambda collector: collector.reset(),
            lambda collector: collector.reset([0]),
            lambda collector: collector.set_seed(1),
            lambda collector: collector.load_state_dict(collector.state_dict()),
        ],
        ids=["reset", "one lane", "seed", "load"],
    )
    def test_the_open_ones_are_dropped(self, cut):
        seen = WholeEpisodes(2)
        with Collector(lanes(5, 7), frames_per_batch=6, trajs_per_batch=2) as collector:
            for number in range(30):
                seen.add(collector.next())
                if number % 3 == 2:
                    cut(collector)
            stats = collector.stats()
            assert stats.dropped > 0
            assert steps_of(collector) - stats.dropped - seen.frames in range(3 * (5 + 7)), "those that wait"

    def test_in_the_middle_of_a_rollout_of_all(self):
        """What waits comes all the same."""
        with Collector(lanes(2, 9), frames_per_batch=8, trajs_per_batch=1) as collector:
            assert len(collector.next()[0]) == 2
            collector.reset()
            lengths = [len(collector.next()[0]) for _ in range(3)]
        assert lengths == [2, 2, 9], "the one of 9 that had begun first is gone, and those after it are there"


class TestState:
    @every_format
    @every_order
    @pytest.mark.parametrize("weights_only", [True, False])
    def test_what_waits_is_in_it(self, traj_format, traj_order, weights_only, tmp_path):
        options = {"frames_per_batch": 30, "trajs_per_batch": 2, "traj_format": traj_format, "traj_order": traj_order}
        with Collector(lanes(2, 7, 3), **options) as first:
            first.next()
            torch.save(first.state_dict(), tmp_path / "state")
            seen = WholeEpisodes(2)
            for _ in range(2):
                seen.add(first.next())
            frames = first.collected_frames
        with Collector(lanes(2, 7, 3), **options) as second:
            second.load_state_dict(torch.load(tmp_path / "state", weights_only=weights_only))
            again = WholeEpisodes(2)
            for _ in range(2):
                again.add(second.next())
            assert second.collected_frames == frames
        assert again.episodes == seen.episodes

    def test_the_state_of_rollouts_goes_into_it(self):
        with Collector(lanes(2, 7), frames_per_batch=30) as first:
            first.next()
            state = first.state_dict()
        with Collector(lanes(2, 7), frames_per_batch=30, trajs_per_batch=2) as second:
            second.load_state_dict(state)
            WholeEpisodes(2).add(second.next())
            assert second.collected_frames == 30 + 9

    def test_and_not_the_other_way(self):
        with Collector(lanes(2, 7), frames_per_batch=30, trajs_per_batch=2) as first:
            first.next()
            state = first.state_dict()
        with Collector(lanes(2, 7), frames_per_batch=30) as second:
            with pytest.raises(OptionError, match="trajs_per_batch="):
                second.load_state_dict(state)
            assert second.next().shape == (2, 15), "nothing was changed"

    def test_one_of_an_exhausted_collector(self):
        with Collector(lanes(2, 7), frames_per_batch=30, total_frames=30, trajs_per_batch=2) as first:
            list(first)
            state = first.state_dict()
        with Collector(lanes(2, 7), frames_per_batch=30, total_frames=60, trajs_per_batch=2) as second:
            second.load_state_dict(state)
            seen = WholeEpisodes(2)
            for batch in second:
                seen.add(batch)


def test_nested_episodes_pad_to_the_longest_and_not_to_all_of_them():
    """As those of `split_trajectories` do."""
    options = {"frames_per_batch": 40, "trajs_per_batch": 4}
    with Collector(lanes(3, 7), **options, traj_format="nested") as collector:
        nested = collector.next()["observation"]
    with Collector(lanes(3, 7), **options) as collector:
        assert nested.to_padded_tensor(0).equal(collector.next()["observation"])


def test_a_state_with_other_keys_is_refused():
    """Half of an episode would lack what the other half has."""
    options = {"frames_per_batch": 8, "trajs_per_batch": 3}
    with Collector(Counter, None, **options) as collector:
        collector.next()
        state = collector.state_dict()
    with Collector(Counter, None, record=("is_init",), **options) as collector:
        collector.load_state_dict(state)
        with pytest.raises(OptionError, match=r"'is_init' is not in the frames of the state"):
            collector.next()


class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "why"),
        [
            ({"set_truncated": True}, "set_truncated"),
            ({"reset_at_each_iter": True}, "reset_at_each_iter"),
            ({"track_traj_ids": False}, "track_traj_ids"),
            ({"split_trajs": True}, "split_trajs"),
            ({"return_same_td": True}, "return_same_td"),
            ({"traj_format": "cat", "fragment_len": 4}, "fragment_len"),
            ({"traj_format": "rows"}, "'padded', 'cat', 'nested'"),
            ({"traj_order": "finished"}, "'started', 'lanes'"),
            ({"trajs_per_batch": 0}, "trajs_per_batch"),
            ({"trajs_per_batch": True}, "trajs_per_batch"),
            ({"fragment_len": 0}, "fragment_len"),
            ({"max_open_frames": 0}, "max_open_frames"),
        ],
        ids=str,
    )
    def test_what_does_not_go_with_it_is_named(self, options, why):
        with pytest.raises(OptionError, match=why):
            Collector(Counter, frames_per_batch=4, **{"trajs_per_batch": 2, **options})

    @pytest.mark.parametrize(
        "options", [{"traj_format": "cat"}, {"traj_order": "lanes"}, {"max_open_frames": 10}], ids=str
    )
    def test_what_needs_it_is_named(self, options):
        (name,) = options
        with pytest.raises(OptionError, match=rf"{name}=.*needs trajs_per_batch="):
            Collector(Counter, frames_per_batch=4, **options)

    def test_a_rollout(self):
        with Collector(Counter, frames_per_batch=4, trajs_per_batch=2) as collector:
            with pytest.raises(OptionError, match=r"rollout\(\).*trajs_per_batch="):
                collector.rollout()
            assert len(collector.next()) == 2


class TestWhatNeverEnds:
    @every_order
    def test_the_error_names_the_lane_and_comes_soon(self, traj_order):
        """Tianshou #234: an environment that never ends."""
        with Collector(
            lanes(3, None, 5), frames_per_batch=30, trajs_per_batch=4, traj_order=traj_order, max_open_frames=100
        ) as collector:
            with pytest.raises(EnvError, match=r"lane 1 \(counted over all workers\).*of 100 .*max_open_frames"):
                list(collector)
            assert collector.closed, "as after any error of an environment"
            stats = collector.stats()
        assert stats.frames < 1000

    def test_a_limit_of_episodes_makes_it_needless(self):
        with Collector(
            lanes(3, None), frames_per_batch=60, trajs_per_batch=4, max_open_frames=10, max_frames_per_traj=50
        ) as collector:
            assert [collector.next()["collector", "mask"].sum(-1).max() for _ in range(3)] == [50, 3, 3]

    @every_order
    @pytest.mark.slow
    def test_memory_is_flat(self, traj_order):
        """One lane never ends, and is truncated; the others' episodes are short. 500 batches."""
        with Collector(
            [Images(0, None), *(Images(lane, 2) for lane in range(1, 6))],
            frames_per_batch=60,
            trajs_per_batch=6,
            traj_order=traj_order,
            max_frames_per_traj=12,
            traj_format="cat",
        ) as collector:
            tracemalloc.start()
            try:
                peaks = []
                for number in range(500):
                    collector.next()
                    if number % 100 == 99:
                        peaks.append(tracemalloc.get_traced_memory()[0])
                        assert collector._supply.waiting <= 6 * (12 + 60)
            finally:
                tracemalloc.stop()
        assert max(peaks[1:]) < 1.2 * peaks[0] + 2**18


def interrupted_next(collector, number, places):
    """A batch, while Ctrl-C is typed at the so-manieth call of a function; tells which calls there were."""
    calls = interrupt_at_call(number)
    try:
        return collector.next()
    finally:
        sys.setprofile(None)
        places += calls


class TestFaults:
    def test_a_postprocessing_that_raises_closes_it(self):
        def broken(batch):
            raise RuntimeError("broken")

        with Collector(lanes(3, 5), frames_per_batch=8, trajs_per_batch=2, postproc=broken) as collector:
            with pytest.raises(RuntimeError, match="broken") as caught:
                collector.next()
            assert isinstance(caught.value.__cause__, WorkerError)
            assert collector.closed

    @every_format
    def test_ctrl_c_in_a_postprocessing_loses_and_doubles_nothing(self, traj_format):
        """It may have changed the batch, which is made again."""
        calls = itertools.count()

        def spoiled(batch):
            if next(calls) % 2 == 0:
                for value in batch.values(include_nested=True, leaves_only=True):
                    value.zero_()
                signal.raise_signal(signal.SIGINT)
            return batch

        seen, interrupted = WholeEpisodes(2), 0
        with Collector(
            lanes(3, 5), frames_per_batch=8, trajs_per_batch=2, traj_format=traj_format, postproc=spoiled
        ) as collector:
            for _ in range(20):
                try:
                    seen.add(collector.next())
                except KeyboardInterrupt:
                    interrupted += 1
                assert collector.collected_frames == seen.frames
            assert collector.stats().dropped == 0
        assert interrupted == 10
        seen.check_none_is_missing()

    def test_ctrl_c_in_any_call_of_next(self):
        """What was being made in this process is dropped (see `next`); every episode that comes is whole, and once."""
        seen, number, places = WholeEpisodes(2), 0, [None]
        with Collector(lanes(3, 5), frames_per_batch=8, trajs_per_batch=2, traj_format="cat") as collector:
            while len(places) >= number:
                number += 1
                with contextlib.suppress(KeyboardInterrupt):
                    seen.add(interrupted_next(collector, number, places := []))
                seen.add(collector.next())
                assert collector.collected_frames == seen.frames
        assert number > 60
        for tag in (0, 1):
            numbers = [each for other, each, _ in seen.episodes if other == tag]
            assert numbers == sorted(set(numbers))

    def test_an_environment_that_raises(self):
        with Collector([Breaker(at=30, length=4), Counter(4)], frames_per_batch=8, trajs_per_batch=2) as collector:
            with pytest.raises(RuntimeError, match="as told to"):
                list(collector)
            assert collector.closed

    def test_postprocessings_see_what_is_delivered(self):
        with Collector(
            Echo(length=3),
            frames_per_batch=8,
            trajs_per_batch=2,
            total_frames=30,
            postproc=[lambda batch: batch.set("more", batch["collector", "mask"].sum(-1, keepdim=True).expand(2, 3))],
        ) as collector:
            assert all((batch["more"] == 3).all() for batch in collector)
