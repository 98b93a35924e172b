"""EnvPool: what a batch says is what a plain loop over a second pool with the same seeds says.

The loop replays, lane by lane, the actions that the batches hold, in a pool that gives all lanes at every step; so it
holds for asynchronous pools too, whatever order their rows came in.
"""

from __future__ import annotations

import math
import re
import signal
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium.wrappers import vector as wrappers
from tensordict import TensorDictBase
from torch import nn

from rlcollect import Collector
from rlcollect.errors import EnvError, OptionError, PolicyError, WorkerError
from rlcollect.testing import CollectionContract
from tests.collectors.helpers import checked, interrupt_at_call, joined
from tests.envs.vector_helpers import all_keys, bits_of, count, lanes_of, mask_of, masked_rows_are_zero
from tests.reference import observation_leaves as parts

WHY = "EnvPool is not installed: `make interop` installs it, and runs these"
envpool = pytest.importorskip("envpool", reason=WHY)

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore:.*Box (low|high)'s precision lowered:UserWarning"),
]

Frames = dict[Any, np.ndarray[Any, Any]]
SEED = 7
RECORD = ("is_init", "step_count")
SHORT = {"task": "CartPole-v1", "max_episode_steps": 15}
TASKS: dict[str, dict[str, Any]] = {
    "CartPole": {"task": "CartPole-v1"},
    "CartPole, cut at 15": SHORT,
    "InvertedPendulum": {"task": "InvertedPendulum-v5"},
    "Hopper, cut at 9": {"task": "Hopper-v4", "max_episode_steps": 9},
    "MiniGrid": {"task": "MiniGrid-Empty-5x5-v0", "max_episode_steps": 12},
    "Pong": {"task": "Pong-v5", "max_episode_steps": 12},
    "Breakout, by lives": {"task": "Breakout-v5", "episodic_life": True, "use_fire_reset": True},
}
QUICK = [name for name in TASKS if name not in ("Pong", "Breakout, by lives")]


def pool(task: str = "CartPole-v1", lanes: int = 4, seed: Any = SEED, **options: Any) -> Any:
    return envpool.make(task, env_type="gymnasium", num_envs=lanes, seed=seed, **options)


def upright(observation: torch.Tensor) -> torch.Tensor:
    """Pushes the cart below the falling pole: episodes of uneven lengths."""
    return (observation[..., 2] > 0).long()


def rightwards(observation: torch.Tensor) -> torch.Tensor:
    """Lets the pole fall at once."""
    return torch.ones(observation.shape[:-1], dtype=torch.int64)


# --- the plain loop ---------------------------------------------------------------------------------------------------


class Lane:
    """One lane of the plain loop: what it shows, and what was written down of it."""

    def __init__(self, actions: Sequence[Any], cuts: Collection[int]) -> None:
        self.actions, self.cuts = actions, cuts
        self.shown: dict[Any, Any] = {}
        self.pending = False
        self.age = self.episode = self.made = 0
        self.frames: dict[Any, list[Any]] = {}

    @property
    def is_through(self) -> bool:
        return self.made == len(self.actions)

    def begin(self, shown: dict[Any, Any]) -> None:
        self.shown, self.pending, self.age = shown, False, 0
        self.episode += 1

    def take(self, after: dict[Any, Any], reward: Any, terminated: bool, truncated: bool, infos: Mapping[str, Any]):
        frame = {
            **self.shown,
            **{("next", *key): value for key, value in after.items()},
            ("action",): self.actions[self.made],
            ("next", "reward"): [reward],
            ("next", "terminated"): [terminated],
            ("next", "truncated"): [truncated],
            ("next", "done"): [terminated or truncated],
            **{("next", "info", key): value for key, value in infos.items()},
            ("collector", "traj_ids"): self.episode,
            ("step_count",): [self.age],
            ("next", "step_count"): [self.age + 1],
            ("is_init",): [self.age == 0],
            **{(flag,): [False] for flag in ("done", "terminated", "truncated")},
        }
        for key, value in frame.items():
            self.frames.setdefault(key, []).append(np.array(value))
        self.made, self.age = self.made + 1, self.age + 1


def by_hand(
    reference: Any,
    actions: Sequence[Sequence[Any]],
    *,
    limit: int | None = None,
    cuts: Sequence[Collection[int]] | None = None,
    info_keys: Sequence[str] = (),
) -> list[Frames]:
    """Steps a synchronous pool, each lane through its own actions, and writes down what every key must be.

    Args:
        reference: not reset yet.
        actions: of each lane.
        limit: frames after which an episode is truncated, and its lane alone reset.
        cuts: for each lane, the numbers of frames before which it is reset, if its episode has begun.
        info_keys: entries of the info that are written down.
    """
    space, count_lanes = reference.observation_space, len(actions)
    lanes = [Lane(each, cuts[lane] if cuts else ()) for lane, each in enumerate(actions)]
    idle = np.zeros_like(np.asarray(actions[0][0]))

    def begin(which: list[int]) -> None:
        rows, _ = reference.reset(np.array(which)) if len(which) < count_lanes else reference.reset()
        for place, lane in enumerate(which):
            lanes[lane].begin({key: value[place].copy() for key, value in parts(space, rows).items()})

    begin(list(range(count_lanes)))
    while not all(lane.is_through for lane in lanes):
        if due := [i for i, lane in enumerate(lanes) if lane.age and not lane.is_through and lane.made in lane.cuts]:
            begin(due)
        asked = [idle if lane.pending or lane.is_through else lane.actions[lane.made] for lane in lanes]
        observation, rewards, terminated, truncated, info = reference.step(np.stack(asked))
        assert info["env_id"].tolist() == list(range(count_lanes))
        rows = parts(space, observation)
        over = []
        for i, lane in enumerate(lanes):
            after = {key: value[i].copy() for key, value in rows.items()}
            if lane.pending:
                assert (rewards[i], terminated[i], truncated[i]) == (0, False, False)
                lane.begin(after)
            elif not lane.is_through:
                limited = limit is not None and lane.age + 1 == limit
                infos = {key: info[key][i] for key in info_keys}
                lane.take(after, rewards[i], bool(terminated[i]), bool(truncated[i]) or limited, infos)
                lane.shown, lane.pending = after, bool(terminated[i] or truncated[i])
                if limited and not lane.pending:
                    over.append(i)
            else:
                lane.pending = bool(terminated[i] or truncated[i])
        if over:
            begin(over)
    return [{key: np.stack(values) for key, values in lane.frames.items()} for lane in lanes]


def assert_by_hand(batches: Iterable[TensorDictBase], reference: Any, *, version: int = -1, **how: Any) -> None:
    """Every key of every frame is what the plain loop wrote down."""
    made = lanes_of(list(batches))
    expected = by_hand(reference, [lane["action"].numpy() for lane in made], **how)
    owners: dict[int, tuple[int, int]] = {}
    for lane, (got, wanted) in enumerate(zip(made, expected, strict=True)):
        assert all_keys(got) - {("collector", "mask"), ("collector", "policy_version")} == wanted.keys()
        assert (got["collector", "policy_version"] == version).all()
        for key, values in wanted.items():
            came = got.get(key)
            if key == ("collector", "traj_ids"):
                for identity, episode in zip(came.tolist(), values.tolist(), strict=True):
                    assert owners.setdefault(identity, (lane, episode)) == (lane, episode), (lane, key)
                continue
            assert torch.equal(came, torch.from_numpy(values).to(came.dtype)), (lane, key, came, values)
    assert len({*owners.values()}) == len(owners)
    reference.close()


def collected(made: Any, policy: Any = None, **options: Any) -> list[TensorDictBase]:
    """All batches, each held against the one before it."""
    with Collector(made, policy, record=RECORD, **options) as collector:
        batches = list(checked(collector))
        assert collector.exhausted
        assert count(batches) == collector.collected_frames == collector.total_frames
    return batches


# --- synchronous pools ------------------------------------------------------------------------------------------------


class TestAllLanesAtOnce:
    """Reset rows take a step: frames go by way of a scratch memory."""

    @pytest.mark.parametrize("name", TASKS)
    def test_every_key_of_every_frame(self, name):
        frames = 60 if name == "Pong" else 320
        batches = collected(pool(**TASKS[name]), frames_per_batch=28, total_frames=frames)
        assert sum(int(batch["next", "done"].sum()) for batch in batches) > 3
        assert_by_hand(batches, pool(**TASKS[name]))

    @pytest.mark.parametrize("steps", [1, 2, 13, 300])
    def test_whatever_the_size_of_a_batch(self, steps):
        batches = collected(pool(**SHORT), upright, frames_per_batch=4 * steps, total_frames=4 * 301)
        assert_by_hand(batches, pool(**SHORT), version=0)

    @pytest.mark.parametrize("total", [3, 6, 9, 300])
    @pytest.mark.parametrize("steps", [1, 4])
    def test_total_frames_is_exact(self, steps, total):
        with Collector(pool(lanes=3, **SHORT), frames_per_batch=3 * steps, total_frames=total) as collector:
            batches = list(checked(collector))
            assert count(batches) == total == collector.stats().frames
            assert collector.next() is None
        assert all(mask_of(batch).any() for batch in batches)

    def test_masks_have_no_gaps_and_hide_nothing_but_zeros(self):
        with Collector(pool(), rightwards, frames_per_batch=4 * 6) as collector:
            for _ in range(30):
                batch = collector.next()
                mask = mask_of(batch)
                counts = mask.sum(1).tolist()
                assert mask.tolist() == [[t < frames for t in range(6)] for frames in counts]
                assert masked_rows_are_zero(batch)

    def test_infos(self):
        keys = ("elapsed_step", "env_id")
        batches = collected(pool(**SHORT), frames_per_batch=40, total_frames=400, info_keys=keys)
        assert_by_hand(batches, pool(**SHORT), info_keys=keys)
        for lane, frames in enumerate(lanes_of(batches)):
            assert (frames["next", "info", "env_id"] == lane).all()
            assert torch.equal(frames["next", "info", "elapsed_step"], frames["step_count"][:, 0].int() + 1)

    def test_nested_infos(self):
        with Collector(pool(), frames_per_batch=8, info_keys=[("players", "env_id")]) as collector:
            batch = collector.next()
        assert batch["next", "info", "players", "env_id"].tolist() == [[lane] * 2 for lane in range(4)]

    def test_float64_is_kept_if_asked(self):
        task = TASKS["InvertedPendulum"]
        batches = collected(pool(**task), frames_per_batch=40, total_frames=200, obs_dtype="env")
        assert batches[0]["observation"].dtype == batches[0]["next", "observation"].dtype == torch.float64
        assert_by_hand(batches, pool(**task))

    def test_a_single_lane(self):
        batches = collected(pool(lanes=1), upright, frames_per_batch=5, total_frames=300)
        assert batches[0].batch_size == (1, 5)
        assert all(mask_of(batch).all() for batch in batches)
        assert_by_hand(batches, pool(lanes=1), version=0)

    @pytest.mark.parametrize("options", [{"return_same_td": True}, {"use_buffers": False}], ids=str)
    def test_in_whatever_memory(self, options):
        with Collector(pool(), upright, record=RECORD, frames_per_batch=40, total_frames=400, **options) as collector:
            batches = [batch.clone() for batch in collector]
        assert_by_hand(batches, pool(), version=0)

    def test_batches_that_are_kept_never_change(self):
        with Collector(pool(**SHORT), upright, frames_per_batch=20) as collector:
            kept = [collector.next() for _ in range(5)]
            copies = [batch.clone() for batch in kept]
            for _ in range(8):
                collector.next()
        for batch, copy in zip(kept, copies, strict=True):
            ours, theirs = bits_of(batch), bits_of(copy)
            assert all(torch.equal(ours[key], theirs[key]) for key in theirs)

    def test_trajectories(self):
        """`split_trajs` leaves out what the mask does."""
        plain = collected(pool(**SHORT), upright, frames_per_batch=40, total_frames=400)
        with Collector(
            pool(**SHORT), upright, frames_per_batch=40, total_frames=400, split_trajs=True, record=RECORD
        ) as collector:
            pieces = list(collector)
        assert sum(int(piece["collector", "mask"].sum()) for piece in pieces) == count(plain) == 400
        for piece in pieces:
            mask = piece["collector", "mask"]
            assert (piece["next", "done"][mask].sum()) <= len(piece)
            assert (piece["step_count"][:, 1:] - piece["step_count"][:, :-1])[mask[:, 1:]].eq(1).all()

    def test_under_a_wrapper_of_gymnasium(self):
        """One that passes observations on."""
        batches = collected(wrappers.ClipReward(pool(**SHORT), 0, 0.5), upright, frames_per_batch=40, total_frames=400)
        assert all((batch["next", "reward"][mask_of(batch)] == 0.5).all() for batch in batches)
        for batch in batches:
            batch["next", "reward"][mask_of(batch)] = 1
        assert_by_hand(batches, pool(**SHORT), version=0)


class TestEpisodeEnds:
    def test_rows_of_resets_are_never_recorded(self):
        """A reset row pays nothing, and CartPole pays 1 for every step."""
        batches = collected(pool(), rightwards, frames_per_batch=4 * 5, total_frames=400)
        for frames in lanes_of(batches):
            assert frames["next", "reward"].eq(1).all()
            assert frames["next", "done"].sum() > 8
            angle = frames["observation"][:, 2].abs()
            assert (angle[frames["is_init"][:, 0]] < 0.06).all()  # as CartPole begins
            assert (frames["next", "observation"][frames["next", "done"][:, 0]][:, 2].abs() > 0.2).all()

    def test_nor_those_that_follow_a_lost_life(self):
        """There `elapsed_step` goes on: it stands still over the row, instead of going back to 0."""
        task = {**TASKS["Breakout, by lives"], "use_fire_reset": False}
        keys = ("elapsed_step", "lives", "terminated")
        batches = collected(pool(**task, lanes=3), frames_per_batch=60, total_frames=600, info_keys=keys)
        assert_by_hand(batches, pool(**task, lanes=3), info_keys=keys)
        lost = 0
        for frames in lanes_of(batches):
            elapsed, lives = frames["next", "info", "elapsed_step"], frames["next", "info", "lives"]
            done, over = frames["next", "done"][:-1, 0], frames["next", "info", "terminated"][:-1].bool()
            assert (lives[1:][done & ~over] == lives[:-1][done & ~over]).all()  # the count of the life that is left
            assert (elapsed[1:] - elapsed[:-1])[~over].eq(1).all()
            assert torch.equal(done, over | (lives[:-1] < torch.cat((lives[:1], lives[:-2]))))
            lost += int((done & ~over).sum())
        assert lost > 3

    def test_the_flags_of_a_fall_and_of_a_limit(self):
        batches = collected(pool(**SHORT), upright, frames_per_batch=40, total_frames=400)
        batches += collected(pool(**SHORT), rightwards, frames_per_batch=40, total_frames=400)
        kinds = set()
        for batch in batches:
            ended = batch[mask_of(batch) & batch["next", "done"][..., 0]]
            limited = ended["next", "step_count"] == 15
            assert torch.equal(ended["next", "truncated"], limited)
            assert torch.equal(ended["next", "terminated"], ~limited)
            kinds |= {*limited[:, 0].tolist()}
        assert kinds == {True, False}

    def test_a_fall_on_the_step_of_the_limit_is_labelled_a_truncation(self):
        """How EnvPool labels it, and nothing else tells: documented, and seen here in case it changes."""
        natural = collected(pool(lanes=1), rightwards, frames_per_batch=20, total_frames=20)[0]
        fall = int(natural["next", "done"][0, :, 0].int().argmax()) + 1
        assert natural["next", "terminated"][0, fall - 1]
        for limit, flags in ((fall + 1, (True, False)), (fall, (False, True)), (fall - 1, (False, True))):
            batch = collected(
                pool(lanes=1, max_episode_steps=limit), rightwards, frames_per_batch=limit, total_frames=limit
            )[0]
            last = min(fall, limit) - 1
            assert batch["next", "done"][0, : last + 1, 0].tolist() == [False] * last + [True]
            assert (bool(batch["next", "terminated"][0, last]), bool(batch["next", "truncated"][0, last])) == flags
            fell = batch["next", "observation"][0, last, 2].abs() > 12 * math.pi / 180
            assert bool(fell) is (limit >= fall)


class TestLanesResetOneByOne:
    """Frames go straight into the batch: no mask, no scratch."""

    @pytest.mark.parametrize("name", [*QUICK, "Breakout, by lives"])
    def test_the_frames_are_those_of_a_pool_that_resets_itself(self, name):
        batches = collected(pool(**TASKS[name]), frames_per_batch=28, total_frames=400, masked_reset=True)
        assert not any(("collector", "mask") in all_keys(batch) for batch in batches)
        assert sum(int(batch["next", "done"].sum()) for batch in batches) > 3
        assert_by_hand(batches, pool(**TASKS[name]))

    @pytest.mark.parametrize("limit", [1, 2, 8, 9, 10, 30])
    @pytest.mark.parametrize("steps", [1, 7, 300])  # a rollout of 300 has two windows of views
    def test_a_limit_of_episodes(self, limit, steps):
        batches = collected(
            pool(),
            rightwards,
            frames_per_batch=4 * steps,
            total_frames=4 * (310 if steps == 300 else 70),
            max_frames_per_traj=limit,
        )
        assert_by_hand(batches, pool(), version=0, limit=limit)
        frames = joined(batches)
        assert frames["next", "step_count"].max() == limit or limit == 30
        if limit in (8, 9, 10):  # falls take about so many steps: both flags where they meet the limit
            both = frames["next", "terminated"] & frames["next", "truncated"]
            assert torch.equal(both, frames["next", "terminated"] & (frames["next", "step_count"] == limit))

    def test_a_limit_beside_the_pools_own(self):
        options = {"frames_per_batch": 40, "total_frames": 400, "max_frames_per_traj": 15}
        assert_by_hand(collected(pool(**SHORT), upright, **options), pool(**SHORT), version=0, limit=15)

    @pytest.mark.parametrize("steps", [1, 5, 12])
    def test_a_reset_with_every_batch(self, steps):
        batches = collected(
            pool(), rightwards, frames_per_batch=4 * steps, total_frames=4 * 10 * steps, reset_at_each_iter=True
        )
        assert all(batch["is_init"][:, 0].all() for batch in batches)
        assert_by_hand(batches, pool(), version=0, cuts=[range(0, 10 * steps, steps)] * 4)

    def test_both_at_once(self):
        options = {"reset_at_each_iter": True, "max_frames_per_traj": 4}
        batches = collected(pool(), rightwards, frames_per_batch=4 * 7, total_frames=4 * 70, **options)
        assert_by_hand(batches, pool(), version=0, cuts=[range(0, 70, 7)] * 4, limit=4)

    def test_lanes_that_go_on_are_not_touched(self):
        """All but one lane are reset after each frame or two; that one is what it is alone."""
        seeds = [3, 4, 5]
        with Collector(pool(lanes=3, seed=seeds), upright, frames_per_batch=3, masked_reset=True) as collector:
            made = [collector.next()]
            for _ in range(60):
                collector.reset([0, 2])
                made.append(collector.next())
        alone = collected(pool(lanes=1, seed=seeds[1:2]), upright, frames_per_batch=61, total_frames=61)
        frames = joined(made)
        for key in ("observation", "action", ("next", "observation"), ("next", "reward"), ("next", "done")):
            assert torch.equal(frames[key][1], alone[0][key][0])

    def test_the_length_is_known(self):
        with Collector(pool(), frames_per_batch=40, total_frames=100, masked_reset=True) as collector:
            assert len(collector) == 3


# --- asynchronous pools -----------------------------------------------------------------------------------------------

SIZES = [(4, 2), (4, 3), (5, 2), (8, 3), (3, 1), (2, 1)]
sizes = pytest.mark.parametrize(("lanes", "rows"), SIZES, ids=[f"{rows} of {lanes}" for lanes, rows in SIZES])


class TestSomeLanesAtATime:
    """Rows come in the order in which they are done, and are put together by lane."""

    @sizes
    def test_each_lane_is_what_it_is_in_a_pool_that_waits_for_all(self, lanes, rows):
        batches = collected(
            pool(lanes=lanes, batch_size=rows, **SHORT), upright, frames_per_batch=lanes * 7, total_frames=lanes * 120
        )
        assert_by_hand(batches, pool(lanes=lanes, **SHORT), version=0)

    @pytest.mark.parametrize("name", TASKS)
    def test_every_key_of_every_frame(self, name):
        frames = 60 if name == "Pong" else 320
        batches = collected(pool(**TASKS[name], batch_size=3), frames_per_batch=28, total_frames=frames)
        assert sum(int(batch["next", "done"].sum()) for batch in batches) > 2
        assert_by_hand(batches, pool(**TASKS[name]))

    @pytest.mark.parametrize("steps", [1, 2, 130, 300])
    def test_whatever_the_size_of_a_batch(self, steps):
        batches = collected(
            pool(**SHORT, lanes=5, batch_size=2),
            rightwards,
            frames_per_batch=5 * steps,
            total_frames=5 * (400 if steps > 2 else 100),
        )
        assert_by_hand(batches, pool(**SHORT, lanes=5), version=0)

    @pytest.mark.parametrize("total", [4, 8, 20, 44, 404])
    @pytest.mark.parametrize("steps", [1, 3, 11])
    def test_total_frames_is_exact(self, steps, total):
        batches = collected(pool(**SHORT, batch_size=3), frames_per_batch=4 * steps, total_frames=total)
        assert all(mask_of(batch).any() for batch in batches)
        assert all(batch.batch_size[1] <= steps for batch in batches)

    def test_masks_have_no_gaps_and_hide_nothing_but_zeros(self):
        with Collector(pool(lanes=5, batch_size=2), frames_per_batch=5 * 6) as collector:
            for _ in range(40):
                batch = collector.next()
                counts = mask_of(batch).sum(1).tolist()
                assert mask_of(batch).tolist() == [[t < frames for t in range(6)] for frames in counts]
                assert masked_rows_are_zero(batch)

    def test_infos(self):
        keys = ("elapsed_step", "env_id")
        options = {"frames_per_batch": 35, "total_frames": 700, "info_keys": keys}
        batches = collected(pool(**SHORT, lanes=5, batch_size=3), upright, **options)
        assert_by_hand(batches, pool(**SHORT, lanes=5), version=0, info_keys=keys)
        for lane, frames in enumerate(lanes_of(batches)):
            assert (frames["next", "info", "env_id"] == lane).all()
            assert torch.equal(frames["next", "info", "elapsed_step"], frames["step_count"][:, 0].int() + 1)

    @pytest.mark.parametrize("options", [{"return_same_td": True}, {"use_buffers": False}], ids=str)
    def test_in_whatever_memory(self, options):
        made = pool(**SHORT, batch_size=3)
        with Collector(made, upright, record=RECORD, frames_per_batch=20, total_frames=400, **options) as collector:
            batches = [batch.clone() for batch in collector]
        assert_by_hand(batches, pool(**SHORT), version=0)

    def test_soft_truncation_marks_the_last_frame_of_each_lane(self):
        batches = collected(
            pool(**SHORT, batch_size=3), upright, frames_per_batch=20, total_frames=400, set_truncated=True
        )
        for batch in batches:
            for lane, frames in enumerate(mask_of(batch).sum(1).tolist()):
                assert not frames or batch["next", "truncated"][lane, frames - 1]
                fell_or_limited = batch["next", "step_count"][lane] == 15
                others = batch["next", "truncated"][lane, : max(frames - 1, 0)]
                assert not (others & ~fell_or_limited[: len(others)]).any()

    @pytest.mark.parametrize("steps", [1, 2, 5, 100])
    def test_an_interruptor(self, steps):
        class After:
            asked = 0

            def start_collection(self):
                self.asked = 0

            def stop_collection(self):
                self.asked = steps

            def collection_stopped(self):
                self.asked += 1
                return self.asked >= steps

        stopping, batches = After(), []
        made = pool(**SHORT, lanes=5, batch_size=2)
        with Collector(
            made, upright, frames_per_batch=50, total_frames=300, record=RECORD, interruptor=stopping
        ) as collector:
            while not collector.exhausted:
                stopping.start_collection()
                batches.append(collector.next())
                assert mask_of(batches[-1]).any()
        list(checked(batches))
        assert count(batches) == 300
        assert_by_hand(batches, pool(**SHORT, lanes=5), version=0)

    @pytest.mark.parametrize("option", [{"max_frames_per_traj": 5}, {"reset_at_each_iter": True}], ids=str)
    def test_what_resets_single_lanes_is_refused(self, option):
        with pytest.raises(OptionError, match=rf"{next(iter(option))}: .*batch_size=num_envs"):
            Collector(pool(batch_size=2), frames_per_batch=8, **option)

    def test_a_reset_of_one_lane_is_refused_and_nothing_is_lost(self):
        with Collector(pool(**SHORT, batch_size=2), upright, frames_per_batch=8, record=RECORD) as collector:
            batches = [collector.next()]
            with pytest.raises(OptionError, match=r"reset of some lanes: .*batch_size=num_envs"):
                collector.reset([1])
            batches += [collector.next() for _ in range(8)]
        list(checked(batches))
        assert_by_hand(batches, pool(**SHORT), version=0)

    def test_a_reset_of_all_lanes(self):
        """Frames that were made come first; then every lane begins, another episode than its first."""
        with Collector(pool(**SHORT, batch_size=2), upright, frames_per_batch=20, record=RECORD) as collector:
            batches = [collector.next() for _ in range(2)]
            collector.reset()
            batches += [collector.next() for _ in range(4)]
        list(checked(batches))
        for lane in lanes_of(batches):
            ids, done = lane["collector", "traj_ids"], lane["next", "done"][:, 0]
            cuts = ((ids[1:] != ids[:-1]) & ~done[:-1]).nonzero()[:, 0]
            assert len(cuts) <= 1
            first = lane["observation"][lane["is_init"][:, 0]]
            assert len({tuple(row) for row in first.tolist()}) == len(first)

    def test_under_a_wrapper_it_is_refused(self):
        """A wrapper hides that rows are those of some lanes."""
        with pytest.raises((OptionError, EnvError)):
            Collector(wrappers.RecordEpisodeStatistics(pool(batch_size=2)), frames_per_batch=8)


# --- seeds ------------------------------------------------------------------------------------------------------------

ALL = {"at once": {}, "by masks": {"masked_reset": True}}
all_at_once = pytest.mark.parametrize("options", ALL.values(), ids=ALL)


class TestSeeds:
    def run(self, seed, options, made=None, batches=4):
        with Collector(made or pool(**SHORT), None, frames_per_batch=40, record=RECORD, **options) as collector:
            following = collector.set_seed(seed)
            assert following == (max(seed) + 1 if isinstance(seed, list) else seed + 1)
            return [collector.next() for _ in range(batches)]

    @all_at_once
    def test_one_seed_gives_one_sequence(self, options):
        one, two = self.run(3, options), self.run(3, options, made=pool(**SHORT, seed=12345))
        for left, right in zip(one, two, strict=True):
            assert all(torch.equal(value, bits_of(right)[key]) for key, value in bits_of(left).items())
        other = self.run(4, options)
        assert not torch.equal(one[0]["observation"], other[0]["observation"])

    @all_at_once
    def test_a_list_is_used_as_given(self, options):
        seeds = [11, 5, 2**31 - 1, 0]
        batches = self.run(seeds, options)
        assert_by_hand(batches, pool(**SHORT, seed=seeds))

    def test_a_list_is_used_as_given_by_an_asynchronous_pool(self):
        seeds = [11, 5, 2**31 - 1, 0]
        batches = self.run(seeds, {}, made=pool(**SHORT, batch_size=3))
        assert_by_hand(batches, pool(**SHORT, seed=seeds))

    @pytest.mark.parametrize("rows", [4, 3], ids=["all lanes", "some lanes"])
    def test_lanes_and_neighbouring_seeds_are_independent(self, rows):
        """EnvPool itself gives lane i `seed + i`."""
        firsts = set()
        for seed in (1, 2, 3):
            batches = self.run(seed, {}, made=pool(**SHORT, batch_size=rows))
            firsts |= {tuple(lane["observation"][0].tolist()) for lane in lanes_of(batches)}
        assert len(firsts) == 3 * 4

    def test_static_seed_gives_every_lane_the_same(self):
        with Collector(pool(), rightwards, frames_per_batch=80) as collector:
            assert collector.set_seed(3, static_seed=True) == 3
            batch = collector.next()
        assert all(torch.equal(batch["observation"][0], lane) for lane in batch["observation"])

    @pytest.mark.parametrize("rows", [4, 3], ids=["all lanes", "some lanes"])
    def test_what_comes_after_a_seed_does_not_depend_on_what_came_before(self, rows):
        """Resets that follow it neither."""

        def run(resets):
            with Collector(pool(batch_size=rows), upright, frames_per_batch=8, record=RECORD) as collector:
                for _ in range(resets):
                    collector.reset()
                collector.set_seed([1, 2, 3, 4])
                batches = [collector.next()]
                collector.reset()
                batches += [collector.next() for _ in range(2)]  # no pole falls as soon as that
            return [frames["observation"][frames["is_init"][:, 0]][-1].tolist() for frames in lanes_of(batches)]

        assert run(0) == run(2)

    def test_a_seed_in_the_middle(self):
        """Frames that were made before it come first; those after it are the same as at the start."""
        with Collector(pool(**SHORT), upright, frames_per_batch=40, record=RECORD) as collector:
            before = [collector.next() for _ in range(3)]
            collector.set_seed([1, 2, 3, 4])
            later = [collector.next() for _ in range(4)]
        list(checked([*before, *later]))
        expected = by_hand(pool(**SHORT, seed=[1, 2, 3, 4]), [[1] * 30] * 4)
        for lane, frames in enumerate(lanes_of(later)):
            starts = frames["observation"][frames["is_init"][:, 0]]
            assert expected[lane]["observation",][0].tolist() in starts.tolist()

    def test_a_reset_with_a_seed(self):
        with Collector(pool(**SHORT), upright, frames_per_batch=40, record=RECORD) as collector:
            collector.reset(seed=[4, 3, 2, 1])
            batches = [collector.next() for _ in range(4)]
        assert_by_hand(batches, pool(**SHORT, seed=[4, 3, 2, 1]), version=0)

    @all_at_once
    def test_a_seed_for_some_lanes_is_refused_and_nothing_is_lost(self, options):
        with Collector(pool(**SHORT), upright, frames_per_batch=40, record=RECORD, **options) as collector:
            batches = [collector.next()]
            with pytest.raises(OptionError, match="seed all lanes, or none"):
                collector.reset([1], seed=5)
            assert not collector.closed
            batches += [collector.next() for _ in range(3)]
        list(checked(batches))

    @pytest.mark.parametrize("rows", [4, 3], ids=["all lanes", "some lanes"])
    @pytest.mark.parametrize("seed", [2**31, 2**70])
    def test_seeds_that_envpool_does_not_take_are_refused(self, seed, rows):
        """It takes 31 bits."""
        with (
            Collector(pool(batch_size=rows), frames_per_batch=8) as collector,
            pytest.raises(OptionError, match=str(seed)),
        ):
            self.try_seed(collector, [seed, 1, 2, 3])

    def try_seed(self, collector, seeds):
        collector.set_seed(seeds)
        collector.next()

    @all_at_once
    def test_a_reset_of_one_lane_after_a_seed(self, options):
        """Made or refused; the seed holds."""
        with Collector(pool(**SHORT), upright, frames_per_batch=40, record=RECORD, **options) as collector:
            collector.set_seed([4, 3, 2, 1])
            try:
                collector.reset([1])
            except OptionError:
                assert not collector.closed
                assert_by_hand([collector.next()], pool(**SHORT, seed=[4, 3, 2, 1]), version=0)
                return
            batch = collector.next()
        expected = by_hand(pool(**SHORT, seed=[4, 3, 2, 1]), [[1]] * 4)
        for lane in (0, 2, 3):
            assert batch["observation"][lane, 0].tolist() == expected[lane]["observation",][0].tolist()

    @all_at_once
    def test_options_for_a_reset_are_refused_and_nothing_is_lost(self, options):
        with Collector(pool(**SHORT), upright, frames_per_batch=40, record=RECORD, **options) as collector:
            batches = [collector.next()]
            with pytest.raises(OptionError, match="options"):
                collector.reset(options={"level": 3})
            assert not collector.closed
            batches.append(collector.next())
        list(checked(batches))

    def test_reset_options_are_refused(self):
        with pytest.raises(OptionError, match=r"reset_options: .*EnvPool"):
            Collector(pool(), frames_per_batch=8, reset_options={"level": 3})


class TestResets:
    @all_at_once
    def test_of_some_lanes(self, options):
        """A cut in these lanes, before their next frame; the others go on."""
        with Collector(pool(), upright, frames_per_batch=4 * 3, record=RECORD, **options) as collector:
            batches = [collector.next()]
            collector.reset([1])
            batches.append(collector.next())
            collector.reset([True, False, False, True])
            batches += [collector.next() for _ in range(40)]
        list(checked(batches))
        assert_by_hand(batches, pool(), version=0, cuts=[{6}, {3}, (), {6}])

    def test_of_a_lane_whose_reset_is_due(self):
        """Its episode has just ended: the reset takes the place of the one that the next step would have made."""
        with Collector(pool(lanes=1), rightwards, frames_per_batch=1, record=RECORD) as collector:
            batches, resets = [], 0
            for _ in range(60):
                batches.append(collector.next())
                if batches[-1]["next", "done"].any():
                    collector.reset([0] if resets % 2 else None)
                    resets += 1
        assert resets > 4
        list(checked(batches))
        assert_by_hand(batches, pool(lanes=1), version=0)

    def test_of_some_lanes_whose_resets_are_due(self):
        """Lanes of one seed end together; after that the one that was reset does not reset once more."""
        with Collector(pool(lanes=3), rightwards, frames_per_batch=3, record=RECORD) as collector:
            collector.set_seed(5, static_seed=True)
            batches = [collector.next()]
            while not batches[-1]["next", "done"].all():
                batches.append(collector.next())
            collector.reset([1])
            batches += [collector.next() for _ in range(30)]
        list(checked(batches))
        lanes = lanes_of(batches)
        for lane in lanes:
            frames = min(len(lane), len(lanes[0]))
            for key in ("observation", ("next", "observation"), ("next", "reward"), ("next", "done"), "is_init"):
                assert torch.equal(lane[key][:frames], lanes[0][key][:frames])

    @pytest.mark.parametrize("lane", range(4))
    def test_with_frames_that_were_made_ahead(self, lane):
        """They come first, then the cut; other lanes are what they were without it."""
        with Collector(pool(), rightwards, frames_per_batch=4 * 5, record=RECORD) as collector:
            batches = [collector.next() for _ in range(12)]
            collector.reset([lane])
            batches += [collector.next() for _ in range(12)]
        list(checked(batches))
        cuts = []
        for frames in lanes_of(batches):
            ids, done = frames["collector", "traj_ids"], frames["next", "done"][:, 0]
            cuts.append({int(cut) + 1 for cut in ((ids[1:] != ids[:-1]) & ~done[:-1]).nonzero()[:, 0]})
        assert all(not cut for other, cut in enumerate(cuts) if other != lane)
        assert len(cuts[lane]) <= 1
        if cuts[lane]:  # else it fell between two episodes
            assert_by_hand(batches, pool(), version=0, cuts=cuts)


# --- policies ---------------------------------------------------------------------------------------------------------


class Counting:
    """Counts the frames of each episode by state, and remembers what it was shown."""

    def __init__(self):
        self.shown = []

    def __call__(self, tensordict):
        self.shown.append(tensordict.clone())
        tensordict["action"] = upright(tensordict["observation"])
        tensordict["next", "age"] = tensordict["age"] + 1
        tensordict["square"] = tensordict["age"] ** 2
        return tensordict


AGE = {"initial_policy_state": {"age": torch.zeros(1)}, "record": RECORD}
FORMS = {"all lanes": {}, "by masks": {"masked_reset": True}, "some lanes": {}}
forms = pytest.mark.parametrize("form", FORMS)


def made_as(form: str, lanes: int = 5, **options: Any) -> Any:
    return pool(**{**SHORT, **options}, lanes=lanes, batch_size=2 if form == "some lanes" else 0)


class TestPolicyState:
    @forms
    @pytest.mark.parametrize("steps", [1, 3, 40])
    def test_it_counts_the_frames_of_each_episode(self, form, steps):
        """By EnvPool's own count too."""
        policy = Counting()
        with Collector(
            made_as(form), policy, frames_per_batch=5 * steps, info_keys=["elapsed_step"], **AGE, **FORMS[form]
        ) as collector:
            batches = [collector.next() for _ in range(120 // steps)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["age"][mask][:, 0] + 1, batch["next", "info", "elapsed_step"][mask].float())
            assert torch.equal(batch["next", "age"][mask], batch["age"][mask] + 1)
            assert torch.equal(batch["square"][mask], batch["age"][mask] ** 2)
            assert torch.equal(batch["is_init"][mask], batch["age"][mask] == 0)
        for shown in policy.shown[1:]:
            assert torch.equal(shown["is_init"], shown["age"] == 0)
            assert shown.batch_size == (2 if form == "some lanes" else 5,)

    @forms
    def test_a_layer_of_torch(self, form):
        """What is recorded of its state follows from the row before, in each lane."""
        torch.manual_seed(0)
        cell = nn.GRUCell(4, 3)

        def policy(tensordict):
            hidden = cell(tensordict["observation"], tensordict["hidden"])
            tensordict["next", "hidden"] = hidden
            tensordict["action"] = (hidden.sum(-1) > 0).long()
            return tensordict

        state = {"hidden": torch.tensor([0.1, -0.2, 0.3])}
        with Collector(
            made_as(form), policy, frames_per_batch=5 * 7, initial_policy_state=state, record=RECORD, **FORMS[form]
        ) as collector:
            batches = list(checked(collector.next() for _ in range(20)))
        for frames in lanes_of(batches):
            first = frames["is_init"][:, 0]
            assert first.sum() > 3
            assert (frames["hidden"][first] == state["hidden"]).all()
            assert torch.equal(frames["hidden"][1:][~first[1:]], frames["next", "hidden"][:-1][~first[1:]])
            expected = cell(frames["observation"], frames["hidden"])
            torch.testing.assert_close(frames["next", "hidden"], expected.detach())

    @forms
    def test_a_policy_that_reads_is_init_by_name(self, form):
        shown = []

        def policy(observation, is_init):
            shown.append(is_init.clone())
            return upright(observation)

        with Collector(made_as(form), policy, frames_per_batch=15, record=("step_count",), **FORMS[form]) as collector:
            batches = [collector.next() for _ in range(30)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["is_init"][mask], batch["step_count"][mask] == 0)
        assert shown[1].all()
        assert sum(int(marks.sum()) for marks in shown[1:]) >= sum(int(batch["is_init"].sum()) for batch in batches)

    @forms
    def test_it_begins_anew_after_a_reset(self, form):
        with Collector(made_as(form), Counting(), frames_per_batch=5 * 4, **AGE, **FORMS[form]) as collector:
            batches = [collector.next() for _ in range(3)]
            collector.reset()
            batches += [collector.next() for _ in range(3)]
            collector.set_seed(3)
            batches += [collector.next() for _ in range(3)]
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["age"][mask], batch["step_count"][mask].float())

    @all_at_once
    def test_it_begins_anew_in_the_lanes_that_are_reset(self, options):
        with Collector(pool(), Counting(), frames_per_batch=4 * 3, **AGE, **options) as collector:
            batches = []
            for turn in range(20):
                batches.append(collector.next())
                collector.reset([turn % 4, (turn + 1) % 4])
        for batch in checked(batches):
            mask = mask_of(batch)
            assert torch.equal(batch["age"][mask], batch["step_count"][mask].float())
            assert torch.equal(batch["is_init"][mask], batch["age"][mask] == 0)

    @forms
    def test_versions(self, form):
        """Each frame has the version of the weights that chose its action, those that wait for their result too."""

        class Policy:
            version = 0.0

            def __call__(self, tensordict):
                tensordict["action"] = upright(tensordict["observation"])
                tensordict["made_by"] = torch.full((*tensordict.batch_size, 1), self.version)
                return tensordict

        policy = Policy()
        with Collector(made_as(form), policy, frames_per_batch=5 * 4, **FORMS[form]) as collector:
            batches = []
            for version in range(1, 20):
                batches.append(collector.next())
                mask = mask_of(batches[-1])
                made_by = batches[-1]["made_by"][mask][:, 0]
                assert torch.equal(batches[-1]["collector", "policy_version"][mask].float(), made_by)
                policy.version = float(version)
                assert collector.update_policy_weights_() == version
        list(checked(batches))


class TestWarmUp:
    @forms
    @pytest.mark.parametrize("frames", [1, 4, 5, 23, 100])
    @pytest.mark.parametrize("steps", [1, 6])
    def test_exactly_so_many_frames_are_random(self, form, frames, steps):
        with Collector(
            made_as(form),
            Counting(),
            frames_per_batch=5 * steps,
            total_frames=5 * 60,
            init_random_frames=frames,
            **AGE,
            **FORMS[form],
        ) as collector:
            batches = list(checked(collector))
        quotas = []
        for lane in lanes_of(batches):
            by_chance = lane["collector", "policy_version"] == -1
            quotas.append(int(by_chance.sum()))
            assert torch.equal(by_chance, torch.arange(len(lane)) < quotas[-1])
            assert not lane["square"][by_chance].any()
            assert not lane["age"][by_chance].any()
            acted = ~by_chance
            assert torch.equal(lane["action"][acted], upright(lane["observation"][acted]))
            takes_over = quotas[-1] < len(lane) and not lane["is_init"][quotas[-1]]
            assert not takes_over or lane["age"][quotas[-1]] == 0
            assert torch.equal(lane["is_init"], lane["step_count"] == 0)
        assert sum(quotas) == frames
        assert max(quotas) - min(quotas) <= 1

    @forms
    def test_the_frames_are_real(self, form):
        made = made_as(form)
        with Collector(
            made,
            upright,
            frames_per_batch=5 * 6,
            total_frames=300,
            init_random_frames=100,
            record=RECORD,
            **FORMS[form],
        ) as collector:
            batches = list(checked(collector))
        for batch in batches:
            versions = batch["collector", "policy_version"]
            versions[mask_of(batch)] = 0
        assert_by_hand(batches, made_as("all lanes"), version=0)


class TestActions:
    @forms
    @pytest.mark.parametrize("wrong", [-1, 2, 10**6])
    def test_out_of_range_is_an_error_that_names_lane_and_step(self, form, wrong):
        """EnvPool takes any number."""
        calls = []

        def policy(observation):
            calls.append(0)
            actions = upright(observation)
            if len(calls) == 4:  # one was at construction
                actions[1] = wrong
            return actions

        with (
            pytest.raises(PolicyError, match=rf"action.* {wrong} is not in Discrete\(2\)") as raised,
            Collector(made_as(form), policy, frames_per_batch=5 * 4, **FORMS[form]) as collector,
        ):
            collector.next()
        assert collector.closed
        lane = r"\d" if form == "some lanes" else 1
        assert re.search(rf"lane {lane}, step 2\b", str(raised.value))

    @forms
    def test_in_range_is_none(self, form):
        with Collector(
            made_as(form, task="Pong-v5"), lambda observation: torch.full((len(observation),), 5), frames_per_batch=10
        ) as collector:
            assert (collector.next()["action"] == 5).any()

    @forms
    def test_reals_are_what_the_pool_gets(self, form):
        """float32 in the batch, float64 in the pool."""
        task = {"task": "InvertedPendulum-v5", "max_episode_steps": 20}
        torch.manual_seed(0)
        head = nn.Linear(4, 1)
        batches = collected(
            made_as(form, **task), lambda o: head(o).detach(), frames_per_batch=40, total_frames=400, **FORMS[form]
        )
        assert batches[0]["action"].dtype == torch.float32
        assert_by_hand(batches, pool(**task, lanes=5), version=0)

    @forms
    @pytest.mark.parametrize("at", [0, 1, 7])
    def test_a_policy_that_raises_closes_the_collector(self, form, at):
        calls = iter(range(-1, 100))

        def policy(observation):
            if next(calls) == at:
                raise ZeroDivisionError("mine")
            return upright(observation)

        made = []

        def maker():
            made.append(made_as(form))
            return made[-1]

        with (
            pytest.raises(ZeroDivisionError, match="mine") as raised,
            Collector(maker, policy, frames_per_batch=5 * 4, **FORMS[form]) as collector,
        ):
            torch.cat([collector.next() for _ in range(3)])
        assert isinstance(raised.value.__cause__, WorkerError)
        assert raised.value.__cause__.step == at
        assert collector.closed
        assert made[0].closed


# --- who owns what ----------------------------------------------------------------------------------------------------


class TestOwnership:
    @forms
    def test_an_instance_stays_open_and_usable(self, form):
        made = made_as(form)
        for _ in range(2):
            with Collector(made, upright, frames_per_batch=20, **FORMS[form]) as collector:
                collector.next()
                collector.set_seed(1)
                collector.next()
                held = collector._worker.driver.env
            assert held is not made
            assert held.closed
            assert not made.closed
        if form == "some lanes":
            made.async_reset()
            assert len(made.recv(reset=True)[0]) == 2
        else:
            assert made.reset()[0].shape == (5, 4)
            assert made.step(np.ones(5, int))[1].tolist() == [1] * 5
        made.close()

    @forms
    def test_one_that_was_in_use_begins_anew(self, form):
        made = made_as(form)
        if form == "some lanes":
            made.async_reset()
            made.recv(reset=True)
            made.send(np.ones(2, int), np.array([0, 1], np.int32))
        else:
            made.reset()
            for _ in range(12):
                made.step(np.ones(5, int))
        batches = collected(made, upright, frames_per_batch=35, total_frames=350, **FORMS[form])
        assert all(lane["is_init"][0] for lane in lanes_of(batches))
        for frames in lanes_of(batches):
            assert frames["next", "reward"].eq(1).all()
            assert frames["next", "step_count"].max() <= 15

    def test_an_asynchronous_instance_is_rebuilt_as_it_was(self):
        """What it has under way cannot be taken back; its seeds, limits and task are those it had."""
        made = pool(**SHORT, lanes=5, batch_size=2, seed=[9, 8, 7, 6, 5], num_threads=1)
        with Collector(made, upright, frames_per_batch=35, total_frames=350, record=RECORD) as collector:
            batches = list(checked(collector))
            rebuilt = collector._worker.driver.env
            assert rebuilt is not made
            for name in ("num_envs", "batch_size", "max_episode_steps", "num_threads"):
                assert rebuilt.config[name] == made.config[name]
        assert_by_hand(batches, pool(**SHORT, lanes=5, seed=[9, 8, 7, 6, 5]), version=0)

    @forms
    def test_what_a_maker_made_is_closed(self, form):
        made = []

        def maker():
            made.append(made_as(form))
            return made[-1]

        with Collector(maker, upright, frames_per_batch=20, **FORMS[form]) as collector:
            assert collector.num_envs == 5
            collector.next()
            assert not made[0].closed
            collector.set_seed(1)
            collector.next()
            assert made[0].closed  # another took its place
            held = collector._worker.driver.env
            assert not held.closed
        assert held.closed
        assert len(made) == 1

    def test_a_wrong_number_of_lanes_is_refused_and_what_was_made_is_closed(self):
        made = []

        def maker():
            made.append(pool())
            return made[-1]

        with pytest.raises(OptionError, match=r"num_envs=3 .*has 4 lanes"):
            Collector(maker, frames_per_batch=12, num_envs=3)
        assert made[0].closed
        given = pool()
        with pytest.raises(OptionError, match=r"num_envs=3 .*has 4 lanes"):
            Collector(given, frames_per_batch=12, num_envs=3)
        assert not given.closed

    def test_several_pools_are_refused(self):
        with pytest.raises(OptionError, match=r"EnvPool.*several lanes"):
            Collector([pool(), pool()], frames_per_batch=8)

    def test_a_pool_of_another_form_is_refused(self):
        with pytest.raises(OptionError):
            Collector(envpool.make("CartPole-v1", env_type="dm", num_envs=2), frames_per_batch=8)

    @forms
    def test_a_state_gives_the_remaining_frames(self, form):
        options = {"frames_per_batch": 35, "total_frames": 350, "record": RECORD, **FORMS[form]}
        with Collector(made_as(form), upright, **options) as collector:
            batches = [collector.next() for _ in range(3)]
            state = collector.state_dict()
        with Collector(made_as(form), upright, **options) as collector:
            collector.load_state_dict(state)
            batches += list(collector)
        list(checked(batches))
        assert count(batches) == 350


# --- Ctrl-C -----------------------------------------------------------------------------------------------------------


def obeys_physics(frames: TensorDictBase) -> bool:
    """Whether CartPole's next observations follow from its observations and actions, as its documentation has it."""
    x, speed, angle, turning = frames["observation"].double().unbind(-1)
    force = torch.where(frames["action"] == 1, 10.0, -10.0)
    cos, sin = angle.cos(), angle.sin()
    pushed = (force + 0.05 * turning**2 * sin) / 1.1
    turn = (9.8 * sin - cos * pushed) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
    push = pushed - 0.05 * turn * cos / 1.1
    after = torch.stack((x + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * turning, turning + 0.02 * turn), -1)
    return torch.allclose(after.float(), frames["next", "observation"], atol=1e-4)


class TestCtrlC:
    @forms
    @pytest.mark.parametrize("at", [1, 2, 5, 9])
    def test_while_the_policy_acts(self, form, at):
        """The batch under way is dropped, and new episodes begin."""
        calls = iter(range(-1, 10**6))

        def policy(observation):
            if next(calls) == at:
                signal.raise_signal(signal.SIGINT)
            return upright(observation)

        batches = []
        with Collector(made_as(form), policy, frames_per_batch=20, total_frames=200, **FORMS[form]) as collector:
            while not collector.exhausted:
                try:
                    batches.append(collector.next())
                except KeyboardInterrupt:
                    assert not collector.closed
        list(checked(batches))
        assert count(batches) == 200
        assert all(obeys_physics(lane) for lane in lanes_of(batches))

    @forms
    def test_between_an_action_and_its_result(self, form):
        """There the pool still has the result to give when it is asked for the first rows of new episodes."""
        places = self.broken_off(form, 10**9)
        inside = [number for number, place in enumerate(places, 1) if place.startswith("envpool.py")]
        assert any("recv" in places[number - 1] for number in inside)
        for number in inside[:: 20 if form == "some lanes" else 3]:  # that one is built anew each time
            self.broken_off(form, number)

    def broken_off(self, form, number):
        """Ctrl-C comes with the so-manieth call in the second batch, in which poles fall; the calls until then."""
        with Collector(made_as(form), rightwards, frames_per_batch=5 * 6, record=RECORD, **FORMS[form]) as collector:
            batches = [collector.next()]
            places = interrupt_at_call(number)
            try:
                batches.append(collector.next())
            except KeyboardInterrupt:
                assert number == len(places)
            finally:
                sys.setprofile(None)
            batches += [collector.next() for _ in range(2)]
        list(checked(batches))
        for lane, frames in enumerate(lanes_of(batches)):
            assert obeys_physics(frames), (lane, places[-1])
        return places


# --- the contract -----------------------------------------------------------------------------------------------------


class Contract(CollectionContract):
    ends_within = 40
    task: Mapping[str, Any] = SHORT

    def make(self) -> Any:
        return pool(**self.task, lanes=3)


class TestContractOfAllLanesAtOnce(Contract):
    pass


class TestContractOfLanesResetOneByOne(Contract):
    options = {"masked_reset": True}  # noqa: RUF012
    resets_lanes = True


class TestContractOfSomeLanesAtATime(Contract):
    """Which lanes come forward how far is for the machine to say: nothing is compared between two runs."""

    seedable = False
    resets_lanes = False

    def make(self) -> Any:
        return pool(**self.task, lanes=3, batch_size=2)


class TestContractOfNestedObservations(Contract):
    task = TASKS["MiniGrid"]


class TestContractOfReals(Contract):
    task = TASKS["Hopper, cut at 9"]
