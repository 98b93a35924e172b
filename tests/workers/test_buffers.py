"""Frames that go to a buffer are those that would have been delivered: whoever writes them, however, and for whom.

Frames are told apart by their trajectory, and are held against each other byte by byte.
"""

from __future__ import annotations

import functools
import itertools
import multiprocessing
import os
import signal
import time
import tracemalloc
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict, TensorDictBase

from rlcollect import (
    ClosedError,
    Collector,
    MultiAsyncCollector,
    MultiStep,
    MultiSyncCollector,
    OptionError,
    ReplayBuffer,
    WorkerDied,
    WorkerError,
)
from rlcollect.memory.replay.writing import Writer
from rlcollect.testing import Counter, Tagged
from rlcollect.workers.keeping import Keeping
from rlcollect.workers.worker import Worker
from tests.workers.fault_helpers import CULPRIT, kill_worker, raised_by, within
from tests.workers.helpers import KINDS, PROCESSES, Endless, Kind, TaggedLanes, leaves, of, talkative

pytestmark = [
    pytest.mark.timeout(60),
    pytest.mark.filterwarnings("ignore::rlcollect.WorkerRestarted"),
]


def in_short(ones, others, quick):
    """Each with each; with several processes these are run each time, in which each of both is seen."""
    return [
        pytest.param(one, other, marks=() if one == "single" or (one, other) in quick else pytest.mark.slow)
        for one, other in itertools.product(ones, others)
    ]


every_kind, process_kinds = of(KINDS), of(PROCESSES)
single_and_sync = pytest.mark.parametrize("kind", [KINDS["single"], KINDS["sync"]], ids=["single", "sync"])
MASK = ("collector", "mask")
IDS = ("collector", "traj_ids")
ROOM = 7200  # frames: more than any test here makes, but for those that say so; a multiple of their lanes


# --- frames, told apart -----------------------------------------------------------------------------------------------


def flat(batch: TensorDictBase) -> TensorDictBase:
    """The frames of a batch, `[F]`: lane after lane, without rows that are none."""
    mask = batch.get(MASK, None)
    return batch.reshape(-1) if mask is None else batch[mask]


def rows(frames: TensorDictBase) -> list[bytes]:
    """All that a frame holds, but for whether it is one."""
    columns = [
        value.contiguous().reshape(len(frames), -1).view(torch.uint8).numpy()
        for key, value in sorted(leaves(frames).items(), key=lambda item: str(item[0]))
        if key != MASK
    ]
    return [row.tobytes() for row in np.concatenate(columns, 1)]


def trajectories(batches: list[TensorDictBase]) -> dict[int, list[bytes]]:
    """The frames of each, in order."""
    found: dict[int, list[bytes]] = {}
    for batch in batches:
        frames = flat(batch)
        for number, row in zip(frames[IDS].tolist(), rows(frames), strict=True):
            found.setdefault(number, []).append(row)
    return found


def check_same(buffer: ReplayBuffer, batches: list[TensorDictBase], *, is_exact: bool = True) -> None:
    """A buffer has the frames of these batches; of kinds that are not in step, of what both have."""
    ours, theirs = trajectories([buffer.frames()]), trajectories(batches)
    if is_exact:
        assert ours.keys() == theirs.keys()
        assert [number for number in ours if ours[number] != theirs[number]] == []
        return
    compared = 0
    for number in ours.keys() & theirs.keys():
        length = min(len(ours[number]), len(theirs[number]))
        assert ours[number][:length] == theirs[number][:length], number
        compared += length
    assert compared >= 12, "there is too little that both have"


def check_counts(buffer: ReplayBuffer, collector: Collector, total: int | None = None) -> None:
    """FAULTS 74, 78: what is there, what was written and what is counted is one number."""
    assert len(buffer) == buffer.write_count == collector.collected_frames
    if total is not None:
        assert buffer.write_count == total


def check_tagged(buffer: ReplayBuffer) -> None:
    """Each frame of `Tagged` lanes was written once, whole, and those of a trajectory follow each other."""
    frames = buffer.frames()
    before, after = frames["observation"], frames["next", "observation"]
    assert torch.equal(before[:, :2], after[:, :2])
    assert torch.equal(before[:, 2] + 1, after[:, 2])
    assert torch.equal(frames["next", "reward"][:, 0], before[:, 2])
    names = list(zip(frames[IDS].tolist(), before[:, 2].int().tolist(), strict=True))
    assert len({*names}) == len(names), "a frame twice"
    for number, own in itertools.groupby(names, lambda name: name[0]):
        steps = [t for _, t in own]
        assert steps == list(range(steps[0], steps[0] + len(steps))), number


def make_tagged(worker: int) -> functools.partial[Tagged]:
    return functools.partial(Tagged, worker, 6, random_length=True)


class Iterated(list):
    """The batches that come without a buffer, copied."""

    def __init__(self, kind: Kind, make, policy=None, **options) -> None:
        with kind.open(make, policy, **options) as collector:
            collector.set_seed(3)
            super().__init__(batch.clone() for batch in collector)


def fill(buffer, kind: Kind, make, policy=None, *, in_background: bool = False, **options):
    """All frames into a buffer; the collector, which is closed."""
    with kind.open(make, policy, replay_buffer=buffer, **options) as collector:
        collector.set_seed(3)
        if in_background:
            collector.start()
            collector.wait_for(frames=collector.total_frames, timeout=30)
        else:
            for nothing in collector:
                assert nothing is None
        assert collector.exhausted
    return collector


def telling(observation: torch.Tensor, hidden: torch.Tensor | None = None) -> dict[Any, torch.Tensor]:
    """Keeps a state, and writes more than an action; it may act in a thread."""
    shape = observation.shape[:-1]
    hidden = torch.zeros(*shape, 1) if hidden is None else hidden
    number = observation[..., 2:]
    return {
        "action": (hidden[..., 0] % 2).long(),
        "small": number.to(torch.uint8),
        "half": number.to(torch.float16),
        ("heads", "rounded"): (number / 3).to(torch.bfloat16),
        ("next", "hidden"): hidden + 1,
    }


class Listed:
    """Somebody else's buffer: all that it has is `extend`."""

    def __init__(self) -> None:
        self.batches: list[TensorDictBase] = []

    def extend(self, batch: TensorDictBase) -> None:
        self.batches.append(batch.clone())

    def frames(self) -> TensorDictBase:
        return torch.cat(self.batches)


# --- the matrix -------------------------------------------------------------------------------------------------------

LANES = {
    "one lane": {"lanes": None},
    "lanes": {"lanes": 3},
    "env workers": {"lanes": 4, "env_workers": 2},
}
MODES = {"extend": {}, "step": {"extend_buffer": False}, "episodes": {"trajs_per_batch": 2}}
QUICK = {
    ("single", "one lane", "memory", "step"),
    ("single", "lanes", "memory", "extend"),
    ("single", "lanes", "memmap", "episodes"),
    ("single", "lanes", "shared", "step"),
    ("sync", "one lane", "memmap", "extend"),
    ("sync", "lanes", "shared", "step"),
    ("sync", "lanes", "shared", "episodes"),
    ("async", "lanes", "shared", "extend"),
    ("async", "one lane", "shared", "episodes"),
    ("async", "lanes", "memmap", "step"),
    ("one async", "one lane", "memmap", "step"),
}
"""What is run each time; the rest is slow."""
MATRIX = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow, id=", ".join(case))
    for case in itertools.product(KINDS, LANES, ("memory", "shared", "memmap"), MODES)
    if case[0] == "single" or case[2] != "memory"
]


class TestContent:
    @pytest.mark.parametrize(("name", "lanes", "storage", "mode"), MATRIX)
    def test_a_buffer_has_the_frames_that_are_delivered_without(self, name, lanes, storage, mode):
        """FAULTS 71: of every kind, for every number of lanes, however they are written; counts are exact."""
        kind, options = (
            KINDS[name],
            {**LANES[lanes], "policy": talkative, "record": ("is_init", "step_count", "worker")},
        )
        options["total_frames"] = total = 10 * 4 * (LANES[lanes]["lanes"] or 1) * kind.workers
        delivered = {"trajs_per_batch": 2} if mode == "episodes" else {}
        expected = Iterated(kind, make_tagged, **options, **delivered)
        buffer = ReplayBuffer(ROOM, storage=storage)
        collector = fill(buffer, kind, make_tagged, **options, **MODES[mode])
        check_counts(buffer, collector, None if mode == "episodes" else total)
        check_tagged(buffer)
        check_same(buffer, expected, is_exact=kind.is_sync)
        assert torch.equal(buffer.frames()["next", "step_count"][:, 0], buffer.frames()["next", "observation"][:, 2])
        buffer.close()

    @pytest.mark.parametrize(
        ("name", "mode"), in_short(KINDS, ("extend", "step"), {("sync", "step"), ("async", "extend")})
    )
    def test_in_the_background_they_are_the_same(self, name, mode):
        """Where the policy draws nothing the thread makes the same frames."""
        kind = KINDS[name]
        options = {"lanes": 2, "policy": telling, "total_frames": 80 * kind.workers}
        expected = Iterated(kind, make_tagged, **options)
        buffer = ReplayBuffer(ROOM, storage="shared")
        collector = fill(buffer, kind, make_tagged, in_background=True, **options, **MODES[mode])
        check_counts(buffer, collector, 80 * kind.workers)
        check_same(buffer, expected, is_exact=kind.is_sync)
        buffer.close()


OPTIONS = {
    "set_truncated": {"set_truncated": True},
    "init_random_frames": {"init_random_frames": 23},
    "max_frames_per_traj": {"max_frames_per_traj": 3, "record": ("is_init",)},
    "info_keys": {"info_keys": {"t": spaces.Discrete(100)}},
    "record": {"record": ("is_init", "step_count", "worker", "episode", "mask")},
    "reset_at_each_iter": {"reset_at_each_iter": True},
    "seed_per_episode": {"seed_per_episode": True},
    "track_traj_ids": {"record": ("worker", "episode", "step_count"), "track_traj_ids": True},
    "use_buffers": {"use_buffers": False},
    "split_trajs": {"split_trajs": True},
    "fragment_len": {"fragment_len": 3},
    "an odd total": {"total_frames": 52},
}
WHOLE_ONLY = (
    "set_truncated",
    "use_buffers",
    "split_trajs",
    "fragment_len",
)  # with which frames are not written step by step


class TestOptions:
    @pytest.mark.parametrize("name", OPTIONS)
    def test_an_option_means_what_it_means_without_a_buffer(self, name):
        """In one process, by rollouts, step by step, and in the background; no padded row is in the buffer."""
        options = {"lanes": 2, "policy": telling, "total_frames": 96, **OPTIONS[name]}
        expected, kind = Iterated(KINDS["single"], make_tagged, **options), KINDS["single"]
        for mode, in_background in itertools.product([{}, {"extend_buffer": False}], [False, True]):
            if mode and name in WHOLE_ONLY:
                continue
            buffer = ReplayBuffer(ROOM)
            collector = fill(buffer, kind, make_tagged, in_background=in_background, **options, **mode)
            check_counts(buffer, collector, options["total_frames"])
            check_same(buffer, expected)
            assert buffer.frames().get(MASK, torch.ones(1, dtype=torch.bool)).all()

    @pytest.mark.parametrize(
        "name",
        [
            *("set_truncated", "init_random_frames", "split_trajs"),
            *(pytest.param(name, marks=pytest.mark.slow) for name in ("max_frames_per_traj", "fragment_len", "record")),
        ],
    )
    def test_workers_do_the_same(self, name):
        kind = KINDS["sync"]
        options = {"lanes": 2, "policy": telling, "total_frames": 96, **OPTIONS[name]}
        expected = Iterated(kind, make_tagged, **options)
        for mode in [{}] if name in WHOLE_ONLY else [{}, {"extend_buffer": False}]:
            buffer = ReplayBuffer(ROOM, storage="shared")
            collector = fill(buffer, kind, make_tagged, **options, **mode)
            check_counts(buffer, collector, options["total_frames"])
            check_same(buffer, expected)
            buffer.close()

    @every_kind
    def test_random_frames_are_as_many_as_were_asked_for(self, kind):
        """FAULTS 74: a warm-up ends at its frame, whatever the buffer counts."""
        buffer = ReplayBuffer(ROOM, storage="shared")
        fill(buffer, kind, make_tagged, telling, lanes=2, total_frames=96, init_random_frames=21, extend_buffer=False)
        assert (buffer.frames()["collector", "policy_version"] == -1).sum() == 21
        buffer.close()

    @pytest.mark.parametrize(
        ("name", "cat_results"),
        in_short(
            ("workers write", "main writes"),
            ("stack", 0, -1),
            {("workers write", "stack"), ("workers write", -1), ("main writes", 0)},
        ),
    )
    def test_how_workers_are_joined_changes_no_frame(self, name, cat_results):
        changed = {} if name == "workers write" else {"postproc": lambda batch: batch}
        kind, options = KINDS["sync"], {"lanes": 2, "policy": telling, "total_frames": 64, "cat_results": cat_results}
        expected = Iterated(kind, make_tagged, **{**options, "cat_results": "stack"})
        buffer = ReplayBuffer(ROOM, storage="shared")
        collector = fill(buffer, kind, make_tagged, **options, **changed)
        check_counts(buffer, collector, 64)
        check_tagged(buffer)
        check_same(buffer, expected)
        buffer.close()


class TestSplit:
    @pytest.mark.parametrize(
        "changed",
        [{"split_trajs": True}, {"fragment_len": 3}, {"cat_results": -1, "postproc": lambda batch: batch}],
        ids=["split", "fragments", "joined in time"],
    )
    def test_what_lies_side_by_side_follows_each_other(self, changed):
        """FAULTS 75: trajectories are dealt out piece by piece, and no slice of one jumps over a piece elsewhere."""
        cls = MultiSyncCollector if "cat_results" in changed else Collector
        makers = [functools.partial(Tagged, lane, 60, random_length=True) for lane in range(3)]
        for seed in range(3):
            buffer = ReplayBuffer(3000, storage="shared")
            with cls(makers, frames_per_batch=21, total_frames=1008, replay_buffer=buffer, **changed) as collector:
                collector.set_seed(seed)
                for _ in collector:
                    pass
            check_counts(buffer, collector, 1008)
            check_tagged(buffer)
            buffer.close()


class Lagging(Tagged):
    """Worker 1 takes its time."""

    def step(self, action):
        if self.worker == 1:
            time.sleep(0.003)
        return super().step(action)


def lagging(worker: int) -> functools.partial[Lagging]:
    return functools.partial(Lagging, worker, 5)


class TestLateWorkers:
    CHANGED: ClassVar = {
        "rollouts": {},
        "steps": {"extend_buffer": False},
        "main writes": {"postproc": lambda batch: batch},
        "by value": {"use_buffers": False},
    }

    @pytest.mark.parametrize(
        ("changed", "stragglers"),
        in_short(
            CHANGED,
            ("stop", "continue"),
            {("rollouts", "continue"), ("steps", "stop"), ("main writes", "continue"), ("by value", "stop")},
        ),
    )
    def test_what_they_have_made_is_written_once(self, changed, stragglers):
        """Rows that a pre-empted worker has not made are not in the buffer; a late rollout is, when it has come."""
        changed = self.CHANGED[changed]
        kind, buffer = KINDS["sync"], ReplayBuffer(ROOM, storage="shared")
        options = {"preemptive_threshold": 0.5, "stragglers": stragglers, **changed}
        collector = fill(buffer, kind, lagging, steps=10, lanes=2, total_frames=400, **options)
        check_counts(buffer, collector, 400)
        check_tagged(buffer)
        buffer.close()


# --- rows that are no frames ------------------------------------------------------------------------------------------


class Vector:
    """A vector environment whose lanes pend a reset after each end: its rollouts go by the scratch path."""

    def __init__(self, worker: int, mode: AutoresetMode = AutoresetMode.NEXT_STEP) -> None:
        self.worker, self.mode = worker, mode

    def __call__(self) -> SyncVectorEnv:
        lanes = [functools.partial(Tagged, 10 * self.worker + lane, 2 + 3 * lane) for lane in range(3)]
        return SyncVectorEnv(lanes, autoreset_mode=self.mode)


class TestScratch:
    @pytest.mark.parametrize(
        ("name", "mode"),
        in_short(
            KINDS,
            ("extend", "step", "main writes", "episodes"),
            {("sync", "step"), ("sync", "main writes"), ("async", "extend"), ("async", "episodes")},
        ),
    )
    def test_rows_that_are_no_frames_are_not_written(self, name, mode):
        """NEXT_STEP environments whose lanes are not in step: rows that are none stay out, each frame comes once."""
        kind = KINDS[name]
        changed = {"main writes": {"postproc": lambda batch: batch}, **MODES}[mode]
        options = {"lanes": None, "steps": 12, "masked_reset": False, "total_frames": 12 * 3 * 4 * kind.workers}
        buffer = ReplayBuffer(ROOM, storage="shared")
        collector = fill(buffer, kind, Vector, **options, **changed)
        check_counts(buffer, collector)
        if mode != "episodes":
            assert collector.collected_frames == collector.total_frames
        check_tagged(buffer)
        assert buffer.frames()[MASK].all() if MASK in leaves(buffer.frames()) else True
        buffer.close()

    def test_the_frames_are_those_that_are_delivered(self):
        options = {"lanes": None, "steps": 12, "masked_reset": False, "total_frames": 144}
        for kind in (KINDS["single"], KINDS["sync"]):
            expected = Iterated(kind, Vector, **options)
            buffer = ReplayBuffer(ROOM, storage="shared")
            fill(buffer, kind, Vector, **options)
            check_same(buffer, expected)
            buffer.close()


# --- post-processing --------------------------------------------------------------------------------------------------


class Touched:
    """Adds one to a field that is zero, in place, and counts its calls here."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        self.calls += 1
        batch["next", "reward"] += 1000
        return batch


class TestPostproc:
    @pytest.mark.parametrize(
        ("kind", "changed", "ours"),
        [
            pytest.param(
                kind,
                changed,
                ours,
                id=f"{name}, {' '.join(changed) or 'rollouts'}, {'ours' if ours else 'foreign'}",
                marks=() if name == "single" or ours is ("split_trajs" not in changed) else pytest.mark.slow,
            )
            for name, kind in KINDS.items()
            for changed in ({}, {"split_trajs": True}, {"trajs_per_batch": 2}, {"fragment_len": 2})
            for ours in (True, False)
        ],
    )
    def test_it_is_done_once(self, kind, changed, ours):
        """FAULTS 72: in every path, whoever's buffer it is."""
        buffer, touched = ReplayBuffer(ROOM, storage="shared") if ours else Listed(), Touched()
        with kind.open(make_tagged, lanes=2, total_frames=64, replay_buffer=buffer, postproc=touched, **changed) as c:
            batches = sum(1 for _ in c)
            frames = buffer.frames()
            assert torch.equal(frames["next", "reward"][:, 0], frames["observation"][:, 2] + 1000)
            assert len(frames) == c.collected_frames
            assert touched.calls == batches
        if ours:
            check_counts(buffer, c)
            buffer.close()

    @single_and_sync
    def test_returns_of_several_steps_are_those_that_are_delivered(self, kind):
        """`MultiStep` makes of a batch another that has its rows."""
        options = {"lanes": 2, "total_frames": 96, "policy": talkative}
        expected = Iterated(kind, make_tagged, **options, postproc=MultiStep(gamma=0.5, n_steps=3))
        buffer = ReplayBuffer(ROOM, storage="shared")
        collector = fill(buffer, kind, make_tagged, **options, postproc=MultiStep(gamma=0.5, n_steps=3))
        check_counts(buffer, collector, 96)
        check_same(buffer, expected)
        buffer.close()

    def test_what_is_no_batch_is_refused(self):
        """What it returns is to be kept frame by frame; the collector is closed, as after any failure of it."""
        for wrong in (lambda batch: {"a": 1}, lambda batch: TensorDict({}, [])):
            with Collector(Counter, frames_per_batch=4, replay_buffer=ReplayBuffer(8), postproc=wrong) as collector:
                with pytest.raises(OptionError, match="TensorDict whose last batch dimension is time"):
                    collector.next()
                assert collector.closed


# --- counts, and what was there before --------------------------------------------------------------------------------


class TestCounts:
    @every_kind
    def test_nothing_is_written_after_the_total(self, kind):
        """FAULTS 74, 78: 4 lanes of 10 steps are 40 frames, and the last batch is as long as it takes."""
        buffer = ReplayBuffer(ROOM, storage="shared")
        with kind.open(make_tagged, lanes=4, steps=10, total_frames=40 * kind.workers + 16, replay_buffer=buffer) as c:
            for _ in c:
                assert buffer.write_count >= c.collected_frames
            time.sleep(0.05)
            check_counts(buffer, c, 40 * kind.workers + 16)
            assert c.next() is None
            check_counts(buffer, c, 40 * kind.workers + 16)
        check_counts(buffer, c, 40 * kind.workers + 16)
        buffer.close()

    @every_kind
    def test_a_buffer_that_is_smaller_keeps_the_newest_of_each_lane(self, kind):
        buffer = ReplayBuffer(20 * kind.workers, storage="shared")
        collector = fill(buffer, kind, TaggedLanes, lanes=2, steps=8, total_frames=240 * kind.workers)
        assert buffer.write_count == collector.collected_frames == 240 * kind.workers
        assert len(buffer) == 20 * kind.workers
        check_tagged(buffer)
        buffer.close()

    @every_kind
    def test_a_rollout_that_is_longer_than_a_ring(self, kind):
        """Its last frames stay."""
        buffer = ReplayBuffer(6 * kind.workers, storage="shared")
        fill(buffer, kind, TaggedLanes, lanes=2, steps=20, total_frames=80 * kind.workers)
        assert len(buffer) == 6 * kind.workers
        check_tagged(buffer)
        buffer.close()

    @every_kind
    def test_what_was_there_before_stays(self, kind):
        """FAULTS 110: at construction, and while others come beside it."""
        buffer = ReplayBuffer(ROOM, storage="shared")
        fill(buffer, kind, make_tagged, lanes=3, total_frames=60 * kind.workers)
        before = trajectories([buffer.frames()])
        with kind.open(TaggedLanes, lanes=2, total_frames=40 * kind.workers, replay_buffer=buffer) as collector:
            assert trajectories([buffer.frames()]) == before
            assert buffer.write_count == 60 * kind.workers
            for _ in collector:
                pass
            assert collector.collected_frames == 40 * kind.workers
        assert buffer.write_count == len(buffer) == 100 * kind.workers
        frames = buffer.frames()
        assert {*rows(frames)} >= {row for own in before.values() for row in own}
        buffer.close()

    @pytest.mark.parametrize(
        ("name", "where"),
        in_short(KINDS, ("written there", "written here"), {("sync", "written there"), ("async", "written here")}),
    )
    def test_the_next_collector_goes_on_where_the_last_was(self, name, where):
        """Its episodes have other ids, so that none seems to go on with the last one of a lane."""
        kind, changed = KINDS[name], {"postproc": lambda batch: batch} if where == "written here" else {}
        buffer = ReplayBuffer(ROOM, storage="shared")
        for turn in (1, 2, 3):
            collector = fill(buffer, kind, Endless, lanes=2, total_frames=32 * kind.workers, **changed)
            assert collector.collected_frames == 32 * kind.workers
            assert buffer.write_count == len(buffer) == 32 * kind.workers * turn
            assert len({*buffer.frames()[IDS].tolist()}) == 2 * kind.workers * turn
            check_tagged(buffer)
        buffer.close()

    def test_two_collectors_in_one_buffer(self):
        """Each has lanes of its own, spare ones the second."""
        buffer = ReplayBuffer(ROOM, storage="shared", spare_lanes=4)
        options = {"frames_per_batch": 16, "total_frames": 160, "replay_buffer": buffer}
        with (
            MultiAsyncCollector([make_tagged(1), make_tagged(2)], num_envs=2, **options) as one,
            Collector(make_tagged(3), num_envs=4, **options) as other,
        ):
            one.start()
            other.start()
            one.wait_for(frames=160, timeout=20)
            other.wait_for(frames=160, timeout=20)
            assert one.collected_frames == other.collected_frames == 160
            assert buffer.write_count == 320
            with pytest.raises(OptionError, match="spare_lanes"):
                Collector(make_tagged(3), frames_per_batch=4, replay_buffer=buffer)
        tags = buffer.frames()["observation"][:, 0]
        assert [int((tags == tag).sum()) for tag in (1, 2, 3)][2] == 160
        buffer.close()

    def test_memory_is_flat(self):
        """FAULTS 98: over many batches, in this process and in the background."""
        buffer = ReplayBuffer(64)
        with Collector(Counter, frames_per_batch=16, num_envs=2, replay_buffer=buffer) as collector:
            for _ in range(50):
                collector.next()
            tracemalloc.start()
            try:
                first = tracemalloc.get_traced_memory()[0]
                for _ in range(300):
                    collector.next()
                grown = tracemalloc.get_traced_memory()[0] - first
            finally:
                tracemalloc.stop()
        assert grown < 100_000


class TestManyLanes:
    def test_the_first_write_takes_no_longer_than_others(self):
        """FAULTS 55: 1,024 lanes, a column of a buffer each."""
        took = []
        with Collector(
            lambda: SyncVectorEnv([functools.partial(Counter, 3)] * 8), frames_per_batch=32, num_envs=None
        ) as collector:  # so that all is imported
            collector.next()
        lanes = [functools.partial(Counter, 3)] * 1024
        buffer = ReplayBuffer(1024 * 40, storage="shared")
        with Collector(lanes, frames_per_batch=1024 * 4, replay_buffer=buffer) as collector:
            for _ in range(10):
                start = time.perf_counter()
                collector.next()
                took.append(time.perf_counter() - start)
            check_counts(buffer, collector, 1024 * 40)
        assert took[0] < 10 * max(took[1:]) + 0.5
        buffer.close()


# --- what is refused --------------------------------------------------------------------------------------------------


class TestRefused:
    @process_kinds
    def test_memory_of_one_process_is_refused_where_others_would_write(self, kind):
        """FAULTS 76: at construction, and it says what to use."""
        with within(), pytest.raises(OptionError, match=r'storage="shared", or storage="memmap"'):
            kind.open(make_tagged, lanes=2, replay_buffer=ReplayBuffer(100))

    @pytest.mark.parametrize(
        ("options", "told"),
        [
            ({"extend_buffer": False}, "extend_buffer=False needs replay_buffer="),
            ({"replay_buffer": object()}, r"have an extend\(batch\)"),
            ({"replay_buffer": "own", "return_same_td": True}, "return_same_td=True does not go with replay_buffer="),
            ({"replay_buffer": "own", "compact_obs": True}, "compact_obs=True does not go with replay_buffer="),
            ({"replay_buffer": "own", "extend_buffer": 1}, "extend_buffer"),
            ({"replay_buffer": "own", "trajs_per_batch": 2, "traj_format": "nested"}, "nested"),
            ({"replay_buffer": "own", "use_buffers": False, "extend_buffer": False}, "use_buffers=False"),
            *(
                ({"replay_buffer": "own", "extend_buffer": False, name: value}, f"{name}=.*extend_buffer=False")
                for name, value in (
                    ("postproc", abs),
                    ("split_trajs", True),
                    ("fragment_len", 3),
                    ("trajs_per_batch", 2),
                )
            ),
        ],
        ids=lambda value: None if isinstance(value, str) else "+".join(value),
    )
    def test_what_makes_no_sense_is_refused_by_name(self, options, told):
        given = {**options}
        if given.get("replay_buffer") == "own":
            given["replay_buffer"] = ReplayBuffer(100)
        with pytest.raises(OptionError, match=told):
            Collector(Counter, frames_per_batch=4, **given)

    def test_a_rollout_beside_the_buffer_is_refused(self):
        with Collector(Counter, frames_per_batch=4, replay_buffer=ReplayBuffer(100)) as collector:
            with pytest.raises(OptionError, match=r"rollout\(\) does not go with replay_buffer="):
                collector.rollout()
            collector.next()
            assert collector.collected_frames == 4

    @every_kind
    def test_frames_of_another_form_are_refused_at_construction(self, kind):
        """And nothing is left of it: the buffer can be given to a collector that fits."""
        buffer = ReplayBuffer(ROOM, storage="shared")
        fill(buffer, kind, make_tagged, lanes=2, total_frames=16 * kind.workers)
        with pytest.raises(Exception, match="Frames of this buffer have"):
            kind.open(lambda worker: functools.partial(Counter, 3), lanes=2, replay_buffer=buffer)
        collector = fill(buffer, kind, make_tagged, lanes=2, total_frames=16 * kind.workers)
        assert collector.collected_frames == 16 * kind.workers
        buffer.close()

    @every_kind
    def test_more_lanes_than_there_is_room_for(self, kind):
        buffer = ReplayBuffer(3, storage="shared")
        with pytest.raises(OptionError, match="capacity is 3"):
            kind.open(make_tagged, lanes=4, replay_buffer=buffer)
        buffer.close()


# --- somebody else's buffers ------------------------------------------------------------------------------------------


class TestForeign:
    @pytest.mark.parametrize(
        ("name", "mode"), in_short(KINDS, MODES, {("sync", "step"), ("async", "extend"), ("async", "episodes")})
    )
    def test_it_is_given_frames_without_rows_that_are_none(self, name, mode):
        """Frame by frame, lane after lane; step by step where this process makes them."""
        kind = KINDS[name]
        options = {"lanes": 2, "policy": talkative, "total_frames": 80 * kind.workers}
        expected = Iterated(kind, make_tagged, **options, **({"trajs_per_batch": 2} if mode == "episodes" else {}))
        buffer = Listed()
        collector = fill(buffer, kind, make_tagged, **options, **MODES[mode])
        assert all(batch.batch_dims == 1 for batch in buffer.batches)
        assert len(buffer.frames()) == collector.collected_frames
        if mode == "step":
            assert {len(batch) for batch in buffer.batches} == {2 * kind.together}
        check_same(buffer, expected, is_exact=kind.is_sync)

    @every_kind
    def test_what_it_raises_comes_out(self, kind):
        class Full(Listed):
            def extend(self, batch):
                if self.batches:
                    raise MemoryError("it is full")
                super().extend(batch)

        buffer = Full()
        with kind.open(make_tagged, lanes=2, total_frames=80 * kind.workers, replay_buffer=buffer) as collector:
            with pytest.raises(MemoryError, match="it is full"):
                for _ in collector:
                    pass
            assert collector.closed
            assert collector.collected_frames == len(buffer.frames())


# --- workers that fail ------------------------------------------------------------------------------------------------


class Slow(Tagged):
    """A step takes a little, so that somebody can come between."""

    def step(self, action):
        time.sleep(0.0005)
        return super().step(action)


def slow(worker: int) -> functools.partial[Slow]:
    return functools.partial(Slow, worker, 5)


class DiesUnheard:
    """Has worker 1 die, once, as a method is called for the k-th time: what it was about to say is not heard."""

    def __init__(self, folder: Path, owner: type, name: str, call: int) -> None:
        self.mark, self.owner, self.name, self.call = folder / "died", owner, name, call

    def __call__(self) -> None:
        if multiprocessing.current_process().name != CULPRIT or self.mark.exists():
            return
        calls, method = itertools.count(1), getattr(self.owner, self.name)

        def dying(*arguments: Any, **options: Any) -> Any:
            if next(calls) == self.call:
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*arguments, **options)

        setattr(self.owner, self.name, dying)  # of this process, which is about to end


class Failing(Tagged):
    """Raises at a step of worker 1, before it does anything."""

    def step(self, action):
        if self.worker == 1 and self.steps == 37:
            raise RuntimeError("it broke")
        return super().step(action)


class TestFailures:
    @pytest.mark.parametrize(
        ("kind", "mode", "lanes"),
        [
            pytest.param(
                KINDS[name],
                mode,
                lanes,
                id=f"{name}, {mode}, {lanes}",
                marks=() if (name, mode, lanes) in (("sync", "extend", 1), ("async", "step", 2)) else pytest.mark.slow,
            )
            for name, mode, lanes in itertools.product(("sync", "async"), ("extend", "step"), (1, 2))
        ],
    )
    def test_a_worker_that_is_killed_is_put_in_the_place_of(self, kind, mode, lanes):
        """In the midst of rollouts, over and over: others write to the same rings, no frame twice, and counts hold."""
        total = 400 * (lanes or 1) * kind.workers
        buffer = ReplayBuffer(ROOM, storage="shared")
        restart = {"on_worker_failure": "restart", "timeout": 30}
        with kind.open(
            slow, lanes=lanes, steps=40, total_frames=total, replay_buffer=buffer, **MODES[mode], **restart
        ) as c:
            c.start()
            for turn in range(1, 4):
                c.wait_for(write_count=turn * total // 5, timeout=20)
                kill_worker(turn % 2)
            c.wait_for(frames=total, timeout=30)
            assert c.collected_frames == total
        check_counts(buffer, c, total)
        check_tagged(buffer)
        buffer.close()

    @pytest.mark.parametrize("kind", [KINDS["sync"], KINDS["async"]], ids=["sync", "async"])
    @pytest.mark.parametrize(
        ("owner", "name", "call", "is_uneven"),
        [
            pytest.param(Keeping, "finished", 1, False, id="the first step"),
            pytest.param(Keeping, "finished", 3, False, id="another", marks=pytest.mark.slow),
            pytest.param(Keeping, "finished", 40, False, id="the last of a rollout", marks=pytest.mark.slow),
            pytest.param(Worker, "report", 1, False, id="all of a rollout", marks=pytest.mark.slow),
            pytest.param(Writer, "_write_rows", 6, True, id="a step of one lane of two"),
        ],
    )
    def test_what_a_worker_had_no_time_to_say(self, kind, owner, name, call, is_uneven, tmp_path):
        """It died between writing frames and saying that they stand: they are counted, and not made again."""
        buffer = ReplayBuffer(ROOM, storage="shared")
        options = {"on_worker_failure": "restart", "pre_collect_hook": DiesUnheard(tmp_path, owner, name, call)}
        options |= {"lanes": 2, "steps": 40, "total_frames": 480, "extend_buffer": False, "init_random_frames": 300}
        make, before = (lambda worker: functools.partial(Tagged, worker, 5)), 0
        if is_uneven:  # seven trajectories in four rings
            before = 35
            fill(buffer, KINDS["single"], make, telling, lanes=None, steps=5, total_frames=35)
        with kind.open(make, telling, replay_buffer=buffer, **options) as collector:
            list(collector)
            assert collector.stats().workers[1].restarts == 1
        assert collector.collected_frames == 480
        assert len(buffer) == buffer.write_count == 480 + before
        if not is_uneven:
            check_tagged(buffer)
            assert (buffer.frames()["collector", "policy_version"] == -1).sum() == 300
        buffer.close()

    def test_rows_that_a_worker_had_no_time_to_count(self, tmp_path):
        """The same where rows of a rollout are written when it is whole, of each lane as many as it has."""
        kind, buffer = KINDS["async"], ReplayBuffer(ROOM, storage="shared")
        options = {"on_worker_failure": "restart", "pre_collect_hook": DiesUnheard(tmp_path, Worker, "report", 2)}
        options |= {"lanes": None, "steps": 12, "masked_reset": False, "total_frames": 288}
        with kind.open(Vector, replay_buffer=buffer, **options) as collector:
            list(collector)
            assert collector.stats().workers[1].restarts == 1
        check_counts(buffer, collector, 288)
        buffer.close()

    @pytest.mark.parametrize("kind", [KINDS["sync"], KINDS["async"]], ids=["sync", "async"])
    def test_a_worker_that_raises_is_heard(self, kind):
        """The error comes out; what was written before it stands and is counted."""
        buffer = ReplayBuffer(ROOM, storage="shared")
        with kind.open(
            lambda worker: functools.partial(Failing, worker, 5), lanes=None, replay_buffer=buffer, extend_buffer=False
        ) as collector:
            with pytest.raises(RuntimeError, match="it broke") as caught:
                for _ in collector:
                    pass
            assert isinstance(caught.value.__cause__, WorkerError)
            assert collector.closed
        check_counts(buffer, collector)
        assert (buffer.frames()["observation"][:, 0] == 1).sum() == 37
        check_tagged(buffer)
        buffer.close()

    def test_a_worker_that_is_killed_is_heard(self):
        kind, buffer = KINDS["async"], ReplayBuffer(ROOM, storage="shared")
        with kind.open(slow, lanes=2, replay_buffer=buffer) as collector:
            collector.next()
            kill_worker(1)
            with within(), pytest.raises(WorkerDied, match="worker 1"):
                list(collector)
        check_counts(buffer, collector)
        check_tagged(buffer)
        buffer.close()

    @every_kind
    @pytest.mark.parametrize("storage", ["shared", "memmap"])
    def test_a_buffer_that_is_closed_under_a_collector(self, kind, storage):
        """It is somebody's mistake, and no crash: an error, or nothing that is seen."""
        buffer = ReplayBuffer(ROOM, storage=storage)
        collector = kind.open(slow, lanes=2, replay_buffer=buffer)
        collector.start()
        collector.wait_for(frames=8, timeout=20)
        buffer.close()
        with within():
            raised_by(functools.partial(collector.wait_for, frames=80, timeout=1))
            raised_by(collector.shutdown)
        assert collector.closed
        assert isinstance(raised_by(collector.next), ClosedError)
