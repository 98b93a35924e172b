"""Batches are the user's: nothing the collector does later changes one; and memory is used again, so it stays flat."""

from __future__ import annotations

import functools
import gc
import pickle
import queue
import sys
import threading
import weakref
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase

from rlcollect import Collector
from rlcollect.testing import Counter, Echo, Reuser, check_batch
from tests.collectors.helpers import checked, counters, joined, same

FRAMES = 8


def leaves(batch):
    return dict(batch.items(include_nested=True, leaves_only=True))


def pointers(batch):
    return {value.untyped_storage().data_ptr() for value in leaves(batch).values()}


@pytest.fixture
def no_collection():
    """Without the cyclic garbage collector: reference counts alone must do."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def endless(**options):
    """A collector whose observations count on for ever: no two rows are alike."""
    return Collector(functools.partial(Counter, None, dtype=np.int64), frames_per_batch=FRAMES, **options)


class TestBatchesAreTheUsers:
    def test_five_kept_batches_equal_their_copies_at_the_end(self):
        """FAULTS 67."""
        with Collector(counters(3, 5, 7), frames_per_batch=30, info_keys="t", record="step_count") as collector:
            kept = [(batch, batch.clone()) for batch, _ in zip(collector, range(5), strict=False)]
            for _ in range(20):
                collector.next()
        assert all(same(batch, copy) for batch, copy in kept)
        assert len({p for batch, _ in kept for p in pointers(batch)}) == sum(len(pointers(batch)) for batch, _ in kept)
        list(checked([batch for batch, _ in kept]))

    def test_kept_batches_outlive_the_collector(self):
        with endless() as collector:
            kept = [collector.next() for _ in range(3)]
        del collector
        gc.collect()
        for _ in range(3):
            with endless() as other:
                other.next()
        assert joined(kept)["observation"].flatten().tolist() == list(range(3 * FRAMES))

    @pytest.mark.parametrize("policy", [None, "module", "tensordict"])
    def test_a_changed_batch_changes_no_later_one(self, policy):
        """FAULTS 68."""
        policies = {
            None: None,
            "module": lambda observation: (observation[..., 0] % 2).long(),
            "tensordict": as_tensordict_policy,
        }

        def collect(spoil):
            with Collector(
                counters(3, 5), policies[policy], frames_per_batch=12, max_frames_per_traj=4, info_keys="t"
            ) as collector:
                collector.set_seed(0)
                for _ in range(4):
                    batch = collector.next()
                    yield batch.clone()
                    if spoil:
                        for value in leaves(batch).values():
                            value.fill_(1) if value.dtype is torch.bool else value.fill_(-99)

        for spoiled, clean in zip(collect(True), collect(False), strict=True):
            check_batch(spoiled)
            assert same(spoiled, clean)

    def test_observations_before_and_after_share_no_memory(self):
        """FAULTS 17, 68: changing one changes nothing else."""
        with endless() as collector:
            batch = collector.next()
            batch["observation"].zero_()
            assert batch["next", "observation"].flatten().tolist() == list(range(1, FRAMES + 1))
            before = leaves(batch.clone())
            for key, value in leaves(batch).items():
                value.fill_(1)
                for other, old in before.items():
                    if other != key:
                        assert torch.equal(leaves(batch)[other], old), (key, other)
                value.copy_(before[key])

    def test_a_mutated_batch_does_not_reach_the_environment(self):
        env = Reuser(4, observation="dict")
        with Collector(env, frames_per_batch=3, total_frames=12) as collector:
            batches = []
            for batch in collector:
                batches.append(batch.clone())
                batch["t"].fill_(-1)
                batch["next", "nested", "grid"].fill_(-1)
        list(checked(batches))
        assert joined(batches)["t"].flatten().tolist() == [t % 4 for t in range(12)]

    def test_actions_that_environments_keep_or_change_are_their_own(self):
        class Greedy(Echo):
            kept: list = []  # noqa: RUF012

            def step(self, action):
                self.kept.append((action, np.array(action)))
                return super().step(action)

        class Spoiler(Echo):
            def step(self, action):
                result = super().step(action)
                action[...] = 77
                return result

        for kind in (Greedy, Spoiler):
            with Collector(kind, frames_per_batch=4, total_frames=20) as collector:
                batch = joined([batch.clone() for batch in collector])
            assert torch.equal(batch["action"], batch["next", "observation"])
        assert all(np.array_equal(action, copy) for action, copy in Greedy.kept)


def as_tensordict_policy(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict.set("action", (tensordict["observation"][..., 0] % 2).long())


class TestReusedObservations:
    """FAULTS 6, 69: environments that hand out the same array each time."""

    @pytest.mark.parametrize("observation", ["box", "scalar", "dict", "tuple"])
    @pytest.mark.parametrize("lanes", [None, 3])
    @pytest.mark.parametrize("length", [1, 3, None])
    def test_next_minus_before_is_one_in_every_row(self, observation, lanes, length):
        make = functools.partial(Reuser, length, observation=observation)
        with Collector(make, num_envs=lanes, frames_per_batch=12, total_frames=36, info_keys="t") as collector:
            batch = joined(list(checked(collector)))
        for key, value in leaves(batch["next"]).items():
            if key in leaves(batch) and key not in ("done", "terminated", "truncated"):
                assert (value - leaves(batch)[key] == 1).all()
        count = torch.arange(36 // (lanes or 1)) % (length or 36)
        assert torch.equal(batch["next", "info", "t"].reshape(lanes or 1, -1), (count + 1).expand(lanes or 1, -1))

    def test_through_a_frame_stack(self):
        def make():
            return gym.wrappers.FrameStackObservation(Reuser(4), 3, padding_type="zero")

        with Collector(make, num_envs=2, frames_per_batch=10, total_frames=40) as collector:
            batch = joined(list(checked(collector)))
        newest = batch["observation"][..., -1, 0]  # the older ones are the wrapper's own references
        assert newest.tolist() == [[t % 4 for t in range(20)]] * 2
        assert torch.equal(batch["next", "observation"][..., -1, 0], newest + 1)

    def test_at_a_limit_of_ours_and_at_explicit_resets(self):
        with Collector([Reuser(None), Reuser(3)], frames_per_batch=10, max_frames_per_traj=4) as collector:
            batches = [collector.next()]
            collector.reset(0)
            batches.append(collector.next())
            collector.reset()
            batches.append(collector.next())
        list(checked(batches))
        assert all((batch["next", "observation"] - batch["observation"] == 1).all() for batch in batches)


class TestPoliciesThatKeep:
    @pytest.mark.parametrize("lanes", [None, 2])
    @pytest.mark.parametrize("as_tensordict", [False, True])
    def test_observations_it_was_given_stay_right(self, lanes, as_tensordict):
        """FAULTS 1: the first one of each episode among them."""
        given = []

        def policy(observation: torch.Tensor) -> torch.Tensor:
            given.append(observation)
            return torch.zeros(observation.shape[:-1], dtype=torch.int64)

        def tensordict_policy(td: TensorDict) -> TensorDict:
            given.append(td["observation"])
            return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

        chosen = tensordict_policy if as_tensordict else policy
        with Collector(Counter, chosen, num_envs=lanes, frames_per_batch=8, total_frames=80) as collector:
            for batch in collector:
                del batch  # its memory could be used again
        steps = 80 // (lanes or 1)
        assert len(given) == 1 + steps  # the probe
        for t, observation in enumerate(given[1:]):
            assert (observation == t % 5).all()

    def test_kept_tensordicts_stay_right(self):
        given = []

        def policy(td: TensorDict) -> TensorDict:
            given.append(td)
            return td.set("action", torch.zeros(td.batch_size, dtype=torch.int64))

        with Collector(functools.partial(Counter, 3), policy, num_envs=2, frames_per_batch=4) as collector:
            for _ in range(20):
                collector.next()
        assert [td["observation"].flatten().tolist() for td in given[1:]] == [[t % 3] * 2 for t in range(40)]

    def test_an_output_used_again_by_the_policy_is_copied(self):
        class SameOutput(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.out = torch.zeros((), dtype=torch.int64)

            def forward(self, observation):
                self.out.copy_(observation[0].long() % 2)
                return self.out

        with Collector(Counter(None), SameOutput(), frames_per_batch=6) as collector:
            assert collector.next()["action"].tolist() == [0, 1, 0, 1, 0, 1]


KEEP = {
    "batch": lambda batch: batch,
    "view of a batch": lambda batch: batch[2:4],
    "sub-dictionary": lambda batch: batch["next"],
    "tensor": lambda batch: batch["observation"],
    "slice": lambda batch: batch["next", "observation"][3:5],
    "expanded": lambda batch: batch["observation"].expand(3, *batch["observation"].shape),
    "reshaped": lambda batch: batch["observation"].flatten(),
    "array": lambda batch: batch["observation"].numpy(),
    "slice of an array": lambda batch: batch["observation"].numpy()[1:2],
    "storage": lambda batch: batch["observation"].untyped_storage(),
    "memoryview": lambda batch: memoryview(batch["observation"].numpy()),
    "dlpack": lambda batch: np.from_dlpack(batch["observation"]),
    "other dtype": lambda batch: batch["observation"].view(torch.int32),
    "detached": lambda batch: batch["next", "observation"].detach(),
}


class TestRecycling:
    def test_dropped_batches_give_their_memory_back(self, no_collection):
        with endless() as collector:
            batch = collector.next()
            first = pointers(batch)
            del batch
            batch = collector.next()
            assert pointers(batch) == first
            assert batch["observation"].flatten().tolist() == list(range(FRAMES, 2 * FRAMES))

    def test_a_loop_needs_two_blocks(self, no_collection):
        with endless(total_frames=50 * FRAMES) as collector:
            used = {frozenset(pointers(batch)) for batch in collector}
        assert len(used) == 2

    def test_memory_of_batches_that_a_postproc_replaces_comes_back(self, no_collection):
        used = set()

        def look(batch):
            used.add(frozenset(pointers(batch)))
            return batch.clone()

        with endless(total_frames=50 * FRAMES, postproc=look) as collector:
            list(collector)
        assert len(used) == 1

    @pytest.mark.parametrize("what", sorted(KEEP))
    def test_whatever_is_kept_keeps_its_memory(self, what, no_collection):
        with endless() as collector:
            batch = collector.next()
            taken = pointers(batch)
            kept = KEEP[what](batch)
            before = content(kept)
            del batch
            for _ in range(6):
                assert not pointers(collector.next()) & taken
            assert content(kept) == before
            del kept
            used = set()
            for _ in range(4):
                used |= pointers(collector.next())
            assert taken <= used  # it was let go

    def test_batches_may_be_dropped_by_another_thread(self):
        handed = queue.Queue()

        def drop():
            while (batch := handed.get()) is not None:
                del batch

        thread = threading.Thread(target=drop)
        thread.start()
        with endless() as collector:
            for index in range(200):
                batch = collector.next()
                assert batch["observation"].flatten().tolist() == list(range(index * FRAMES, (index + 1) * FRAMES))
                handed.put(batch)
        handed.put(None)
        thread.join(20)
        assert not thread.is_alive()

    def test_a_short_batch_uses_the_same_blocks(self, no_collection):
        with endless(total_frames=FRAMES + 3) as collector:
            batch = collector.next()
            block = min(pointers(batch))
            del batch
            batch = collector.next()
            assert len(batch) == 3
            assert batch["observation"].flatten().tolist() == [FRAMES, FRAMES + 1, FRAMES + 2]
            assert abs(min(pointers(batch)) - block) < 4096

    @pytest.mark.parametrize("last", [False, True])
    def test_letting_go_runs_no_python_code_in_which_a_ctrl_c_would_be_lost(self, last, no_collection):
        """What is raised in a finaliser is printed and ignored: the loop would go on, in spite of the Ctrl-C."""
        ran = []

        def look(frame, event, _):
            if event == "call":
                ran.append(frame.f_code.co_qualname)

        with endless() as collector:
            batch = collector.next()
            tensor = None if last else batch["observation"]
            sys.setprofile(look)
            try:
                del batch
                del tensor
            finally:
                sys.setprofile(None)
        assert not ran

    def test_use_buffers_false_never_uses_memory_again(self, no_collection):
        with endless(use_buffers=False) as collector:
            batch = collector.next()
            finalized = weakref.ref(batch)
            del batch
            assert finalized() is None
            assert collector.next()["observation"][0, 0] == FRAMES

    def test_batches_can_be_pickled_saved_and_shared(self, tmp_path):
        with endless() as collector:
            batch = collector.next()
            assert same(pickle.loads(pickle.dumps(batch)), batch)
            torch.save(batch, tmp_path / "batch.pt")
            assert same(torch.load(tmp_path / "batch.pt", weights_only=False), batch)
            shared = batch.clone().share_memory_()
            collector.next()
            assert same(shared, batch)
            batch.memmap(tmp_path / "mapped")
            assert same(TensorDict.load_memmap(tmp_path / "mapped"), batch)

    def test_tensors_can_be_resized_and_reach_gradients(self):
        """They are plain tensors: what a learner does with its own works."""
        with endless() as collector:
            batch = collector.next()
            value = batch["next", "reward"].requires_grad_()
            (value * 2).sum().backward()
            assert (value.grad == 2).all()
            assert torch.stack([batch["observation"], batch["observation"]]).shape == (2, FRAMES, 1)


def content(kept):
    """What a kept thing holds now, as bytes."""
    if isinstance(kept, TensorDictBase):
        return [value.numpy().tobytes() for value in leaves(kept).values()]
    if isinstance(kept, torch.Tensor):
        return kept.numpy().tobytes()
    return bytes(kept)


def resident():
    """Bytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
class TestFlat:
    """FAULTS 56, 98."""

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"use_buffers": False},
            {"return_same_td": True},
            {"compact_obs": True},
            {"info_keys": ["t"], "record": ["is_init", "step_count"], "max_frames_per_traj": 2},
        ],
        ids=str,
    )
    @pytest.mark.parametrize(
        ("batches", "bytes_more"), [(700, 2**20), pytest.param(2000, 2 * 2**20, marks=pytest.mark.slow)]
    )
    @pytest.mark.slow
    def test_many_small_batches_with_many_episodes(self, options, batches, bytes_more):
        with Collector(counters(1, 2, 3), as_tensordict_policy, frames_per_batch=24, **options) as collector:
            for _ in range(300):
                collector.next()
                collector.update_policy_weights_()
            gc.collect()
            memory, files, threads = resident(), descriptors(), threading.active_count()
            for _ in range(batches):
                collector.next()
                collector.update_policy_weights_()
            gc.collect()
            assert resident() - memory < bytes_more
            assert descriptors() == files
            assert threading.active_count() == threads
            assert collector.stats().episodes > 5 * batches

    def test_collectors_that_come_and_go(self):
        def one():
            with Collector(Counter, num_envs=2, frames_per_batch=2000, total_frames=4000) as collector:
                list(collector)

        for _ in range(10):
            one()
        gc.collect()
        memory, files = resident(), descriptors()
        for _ in range(60):
            one()
        gc.collect()
        assert resident() - memory < 4 * 2**20
        assert descriptors() == files

    def test_large_batches_that_are_dropped_do_not_pile_up(self, no_collection):
        space = spaces.Box(0, 255, (64, 64, 3), np.uint8)

        class Image(gym.Env):
            observation_space, action_space = space, spaces.Discrete(2)
            frame = np.zeros(space.shape, np.uint8)

            def reset(self, *, seed=None, options=None):
                return self.frame, {}

            def step(self, action):
                return self.frame, 0.0, False, False, {}

        with Collector(Image, frames_per_batch=400) as collector:  # 10 MB a batch
            for _ in range(4):
                collector.next()
            memory = resident()
            for _ in range(40):
                collector.next()
            assert resident() - memory < 16 * 2**20

    def test_closed_collectors_hold_no_batch_memory(self, no_collection):
        collector = endless()
        batch = collector.next()
        storage = weakref.ref(batch["observation"].untyped_storage())
        del batch
        collector.shutdown()
        assert storage() is None
