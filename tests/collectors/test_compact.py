"""`compact_obs=True`: each batch, expanded, is the one that comes without it, whoever made it and however."""

from __future__ import annotations

import functools
import gc
import itertools
import signal
import time
import weakref
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from rlcollect import Collector, CompactBatch, InvalidBatchError, MultiSyncCollector, OptionError
from rlcollect.testing import Counter, Life, Reuser, Tagged, TaggedAgents, TensorTagged, check_batch
from tests.workers.helpers import KINDS, PROCESSES, Kind, TaggedLanes, assert_same, of, remembering

pytestmark = pytest.mark.timeout(60)

every_kind, process_kinds = of(KINDS), of(PROCESSES)


def expanded(batch: Any) -> Any:
    """The full form of what was delivered."""
    assert isinstance(batch, CompactBatch)
    return batch.expand()


def collected(make: Any, policy: Any = None, *, count: int = 4, kind: Any = Collector, **options: Any) -> list[Any]:
    """The first batches, as they are delivered; with a cut before the third."""
    torch.manual_seed(5)
    with kind(make, policy, **options) as collector:
        collector.set_seed(3)
        batches = [collector.next() for _ in range(2)]
        collector.reset()
        return [*batches, *(collector.next() for _ in range(count - 2))]


def check_same(make: Any, policy: Any = None, **options: Any) -> list[CompactBatch]:
    """With the option the same comes as without it; what came."""
    plain, compact = (collected(make, policy, compact_obs=each, **options) for each in (False, True))
    assert_same([expanded(batch) for batch in compact], plain)
    return compact


def of_each_worker(kind: Kind, collector: Any, count: int) -> list[list[Any]]:
    """The first so many batches of each worker, in full form; a Ctrl-C is no reason to stop."""
    parts: list[list[Any]] = [[] for _ in range(kind.workers)]
    while min(map(len, parts)) < count:
        try:
            batch = collector.next()
        except KeyboardInterrupt:
            continue
        for worker, part in kind.parts(batch if isinstance(batch, TensorDict) else expanded(batch)):
            parts[worker].append(part)
    return [each[:count] for each in parts]


def check_each_worker(ours: Sequence[Any], theirs: Sequence[Any]) -> None:
    for one, other in zip(ours, theirs, strict=True):
        assert_same(one, other)


class TestKinds:
    @every_kind
    @pytest.mark.parametrize(
        ("make", "lanes"),
        [
            (TaggedLanes, 3),
            (lambda worker: functools.partial(Counter, 4), None),  # ends with the last row of each batch
            (lambda worker: functools.partial(Reuser, 3, observation="dict"), 2),
            (lambda worker: "CartPole-v1", 2),
        ],
        ids=["tagged", "counter", "reused dict", "CartPole"],
    )
    def test_each_worker_delivers_what_it_does_without(self, kind: Kind, make: Any, lanes: int | None) -> None:
        came = []
        for compact in (False, True):
            torch.manual_seed(5)
            with kind.open(make, lanes=lanes, steps=8, max_frames_per_traj=9, compact_obs=compact) as collector:
                collector.set_seed(3)
                came.append(of_each_worker(kind, collector, 3))
        check_each_worker(*came)

    @pytest.mark.parametrize("join", ["stack", 0, -1])
    def test_however_workers_are_joined(self, join: Any) -> None:
        check_same([Tagged] * 2, frames_per_batch=24, num_envs=2, cat_results=join, kind=MultiSyncCollector)

    def test_workers_that_hold_collectors_make_full_batches(self) -> None:
        check_same([Tagged] * 2, frames_per_batch=24, num_envs=2, kind=MultiSyncCollector, collector_class=Collector)

    @of(["async", "one async"])
    def test_batches_that_wait_are_in_the_state_in_full_form(self, kind: Kind) -> None:
        """It loads into a collector without the option as well."""
        waiting = 2 * kind.workers
        with kind.open(TaggedLanes, lanes=2, steps=5, compact_obs=True) as collector:
            collector.next()
            while sum(collector.map_fn(lambda envs: envs[0].steps)) < 5 * (1 + waiting):
                time.sleep(0.005)
            state = collector.state_dict()
            following = [expanded(collector.next()) for _ in range(waiting)]
        assert len(state["pending"]) == waiting
        for compact in (True, False):
            with kind.open(TaggedLanes, lanes=2, steps=5, compact_obs=compact) as other:
                other.load_state_dict(state)
                came = [other.next() for _ in range(waiting)]
                assert_same([expanded(batch) for batch in came] if compact else came, following)

    @process_kinds
    def test_a_ctrl_c_while_it_is_compacted_loses_nothing(self, kind: Kind, monkeypatch: Any) -> None:
        calls, compact_of = itertools.count(), CompactBatch.of

        def interrupted(*arguments: Any, **options: Any) -> CompactBatch:
            if next(calls) in (1, 2):
                signal.raise_signal(signal.SIGINT)
            return compact_of(*arguments, **options)

        monkeypatch.setattr(CompactBatch, "of", interrupted)
        came = []
        for compact in (False, True):
            with kind.open(TaggedLanes, lanes=2, steps=5, compact_obs=compact) as collector:
                collector.set_seed(3)
                came.append(of_each_worker(kind, collector, 2))
        assert next(calls) > 3
        check_each_worker(*came)


class TestEnvironments:
    @pytest.mark.parametrize("lanes", [None, 3])
    @pytest.mark.parametrize("observation", ["scalar", "discrete", "dict", "tuple"])
    def test_observations_of_every_form(self, observation: Any, lanes: int | None) -> None:
        make = functools.partial(Counter, 4, observation=observation)
        for batch in check_same(make, num_envs=lanes, frames_per_batch=5 * (lanes or 1)):
            assert "next" in batch.data
            assert {*batch.data["next"].keys(True, True)} == {"reward", "done", "terminated", "truncated"}

    @pytest.mark.parametrize(
        "options",
        [
            {"set_truncated": True},
            {"reset_at_each_iter": True},
            {"track_traj_ids": False},
            {"record": ["is_init", "step_count", "mask"], "info_keys": "t"},
            {"init_random_frames": 20},
            {"total_frames": 66},  # the last one is shorter
            {"storing_device": "cpu"},
            {"use_buffers": False},
        ],
        ids=str,
    )
    def test_with_other_options(self, options: Any) -> None:
        makers = [functools.partial(Counter, length) for length in (2, 3, 7)]
        check_same(makers, lambda observation: observation[..., 0].long() % 2, frames_per_batch=18, **options)

    def test_what_a_policy_carries_is_stored_once_too(self) -> None:
        for batch in check_same(functools.partial(Counter, 3), remembering, num_envs=2, frames_per_batch=16):
            assert {*batch.observations.keys()} == {"observation", "hidden"}

    @pytest.mark.parametrize("masked", [None, False])
    def test_vector_environments_that_reset_themselves(self, masked: bool | None) -> None:
        """With masked_reset=False lanes fall behind: rows that hold no frame, and a last frame that zeros follow."""

        def make() -> gym.vector.VectorEnv:
            lanes = [functools.partial(Tagged, lane, length) for lane, length in enumerate((1, 2, 5, None))]
            return SyncVectorEnv(lanes, autoreset_mode=AutoresetMode.NEXT_STEP)

        batches = check_same(make, frames_per_batch=24, masked_reset=masked, count=8)
        assert masked is None or any(batch.frames < batch.batch_size.numel() for batch in batches)

    def test_agents(self) -> None:
        lives = {"cat_0": Life(ends=3), "cat_1": Life(joins=1, ends=5)}
        for batch in check_same([functools.partial(TaggedAgents, lives)] * 2, frames_per_batch=20):
            assert ("agents", "observation") in batch.observations.keys(True)

    def test_tensors(self) -> None:
        check_same(functools.partial(TensorTagged, [2, 3, 5], nested=True), frames_per_batch=21)


class TestDelivery:
    def test_a_rollout_that_is_asked_for_has_the_full_form(self) -> None:
        with Collector(functools.partial(Counter, 3), frames_per_batch=5, compact_obs=True) as collector:
            check_batch(collector.rollout())
            assert isinstance(collector.next(), CompactBatch)

    def test_only_the_full_form_is_used_again_while_batches_are_kept(self) -> None:
        with Collector(Counter, num_envs=2, frames_per_batch=16, compact_obs=True) as collector:
            kept = [collector.next() for _ in range(5)]
            before = [batch.expand() for batch in kept]
            made = {collector.rollout()["observation"].untyped_storage().data_ptr() for _ in range(5)}
            assert len(made) == 1
            assert_same([batch.expand() for batch in kept], before)
            assert len({batch.observations["observation"].data_ptr() for batch in kept}) == 5

    @pytest.mark.parametrize("how", ["closed", "exhausted"])
    def test_afterwards_no_memory_is_kept(self, how: str) -> None:
        gc.disable()
        try:
            with Collector(Counter, frames_per_batch=16, total_frames=32, compact_obs=True) as collector:
                batches = list(collector) if how == "exhausted" else [collector.next()]
                if how == "closed":
                    collector.shutdown()
                blocks = [weakref.ref(batch.observations["observation"].untyped_storage()) for batch in batches]
                assert not collector._compact._pools
                del batches
                assert [block() for block in blocks] == [None] * len(blocks)
        finally:
            gc.enable()


class TestRefusals:
    @pytest.mark.parametrize(
        "other",
        [
            {"split_trajs": True},
            {"trajs_per_batch": 2},
            {"fragment_len": 3},
            {"postproc": [len]},
            {"return_same_td": True},
        ],
        ids=lambda other: next(iter(other)),
    )
    @every_kind
    def test_what_needs_the_full_form_is_named(self, kind: Kind, other: Any) -> None:
        with pytest.raises(OptionError, match=rf"compact_obs=True does not go with {next(iter(other))}"):
            kind.open(TaggedLanes, lanes=2, compact_obs=True, **other)

    def test_a_device_without_values(self) -> None:
        with (
            Collector(Counter, frames_per_batch=4, compact_obs=True, storing_device="meta") as collector,
            pytest.raises(InvalidBatchError, match="meta device"),
        ):
            collector.next()
