"""`sampling`: every frame is as likely as any other; slices are of one trajectory, in the order of time."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlcollect import ReplayBuffer
from rlcollect.errors import OptionError

from .helpers import batch, full, sealed, torn


def chi_square(counts):
    """How far counts are from even ones, in standard deviations of what chance gives."""
    expected = counts.sum() / len(counts)
    statistic = ((counts - expected) ** 2 / expected).sum()
    freedom = len(counts) - 1
    return (statistic - freedom) / np.sqrt(2 * freedom)


class TestUniform:
    @pytest.mark.parametrize("storage", ["memory", "shared", "memmap"])
    def test_every_frame_is_as_likely_as_any_other(self, storage):
        """Also where lanes have unequally many: 3, 9 and 0 of rings of 12, one of which goes round."""
        with ReplayBuffer(36, storage=storage, seed=0) as buffer:
            buffer.extend(batch(3, 9, mask=[[True] * 3 + [False] * 6, [True] * 9, [False] * 9]))
            buffer.extend(batch(3, 9, start=9, mask=[[False] * 9, [True] * 9, [False] * 9]))
            everything = sorted(buffer.frames()["value"].tolist())
            assert everything == [0, 1, 2, *range(1006, 1018)]
            drawn = buffer.sample(30_000)["value"]
            found, counts = np.unique(drawn.numpy(), return_counts=True)
            assert found.tolist() == everything
            assert abs(chi_square(counts)) < 3

    def test_index_says_where_a_frame_lies(self):
        """As long as no other is written there, it is that one."""
        buffer = full(seed=0)
        sample = buffer.sample(100)
        assert sample.batch_size == torch.Size([100])
        assert sample["index"].dtype is torch.int64
        where = dict(zip(sample["index"].tolist(), sample["value"].tolist(), strict=True))
        assert where == {10 * (value // 1000) + value % 1000: value for value in where.values()}
        assert torch.equal(sample["observation"][:, 0], sample["value"].float())
        assert torch.equal(sample["next", "reward"][:, 0], sample["value"] / 2)

    def test_what_is_sampled_is_a_copy(self):
        """Nobody writes to the buffer by it."""
        buffer = full()
        sample = buffer.sample(100)
        for value in (sample["value"], sample["next", "done"], sample["observation"]):
            value.zero_()
        assert sorted(buffer.frames()["value"].tolist()) == sorted(batch()["value"].flatten().tolist())

    @pytest.mark.parametrize("prefetch", [0, 2])
    def test_large_ones_lie_where_others_did_only_if_nobody_has_those(self, prefetch):
        """Of ten samples, those that are kept stay as they are: each frame says which it is."""
        with ReplayBuffer(40, prefetch=prefetch) as buffer:
            buffer.extend(batch(width=5000))
            kept, views = [], []
            for turn in range(30):
                sample = buffer.sample(8)
                if turn % 3 == 0:
                    kept.append(sample)
                elif turn % 3 == 1:
                    views.append((sample["observation"][3, 7:], sample["value"][3].item()))
            for sample in kept:
                assert (sample["observation"] == sample["value"][:, None]).all()
            for view, value in views:
                assert (view == value).all()

    def test_a_seed_makes_the_same_draws(self):
        """Whatever the storage; another seed makes others."""
        one, other, third = full(seed=1), full(seed=1, storage="shared"), full(seed=2)
        first = one.sample(50)["value"].tolist()
        assert first == other.sample(50)["value"].tolist() != third.sample(50)["value"].tolist()
        assert one.sample(50)["value"].tolist() == other.sample(50)["value"].tolist() != first
        other.close()

    def test_what_cannot_be_drawn_says_what_to_do(self):
        """No frames, no number, a number that is none."""
        with pytest.raises(OptionError, match="Write some first"):
            ReplayBuffer(4, batch_size=2).sample()
        with pytest.raises(OptionError, match=r"sample\(256\), or ReplayBuffer\(batch_size=256\)"):
            full().sample()
        for number in (0, -1, 2.5, True):
            with pytest.raises(OptionError, match="batch_size must be a positive integer"):
                full().sample(number)

    def test_a_number_of_the_call_comes_before_that_of_the_buffer(self):
        buffer = full(batch_size=7)
        assert [len(buffer.sample()), len(buffer.sample(3)), len(buffer.sample())] == [7, 3, 7]


def rows_of(sample):
    """The values of each slice, without rows that are none."""
    mask = sample.get(("collector", "mask"), torch.ones(sample.batch_size, dtype=torch.bool))
    return [value[row].tolist() for value, row in zip(sample["value"], mask, strict=True)]


class TestSlices:
    def test_they_are_of_one_trajectory_in_the_order_of_time(self):
        """Over several batches, and where the ring goes round: episodes of 4 and 6 steps in batches of 5."""
        buffer = ReplayBuffer(2 * 17, sampler="slice", slice_len=3, num_slices=200, seed=0)
        for start in range(0, 50, 5):
            ends = [time % 5 for time in (3, 9) if start % 10 <= time < start % 10 + 5]
            buffer.extend(batch(2, 5, start=start, ends=ends, ids=[start // 10 * 2 + start % 10 // 5] * 2))
        sample = buffer.sample()
        assert sample.batch_size == torch.Size([200, 3])
        assert sample.names == [None, "time"]
        for row in rows_of(sample):
            step = row[0] % 1000
            assert row == [row[0], row[0] + 1, row[0] + 2]
            assert step >= 33
            assert step % 10 in (0, 1, 4, 5, 6, 7)  # with which a whole one of 4 or 6 steps begins

    def test_each_that_there_is_is_as_likely_as_any_other(self):
        """Two episodes of 4 and 6 steps in each of two lanes have 2 + 4 slices of 3."""
        buffer = ReplayBuffer(20, sampler="slice", slice_len=3, num_slices=12_000, seed=0)
        buffer.extend(batch(2, 10, ends=(3, 9)))
        found, counts = np.unique(buffer.sample()["value"][:, 0].numpy(), return_counts=True)
        assert found.tolist() == [0, 1, 4, 5, 6, 7, 1000, 1001, 1004, 1005, 1006, 1007]
        assert abs(chi_square(counts)) < 3

    def test_rare_ones_are_found(self):
        """Of 1,000 frames, 3 begin one."""
        buffer = ReplayBuffer(1000, sampler="slice", slice_len=8, num_slices=3000, seed=0)
        buffer.extend(batch(1, 1000, ends=[*range(990)]))
        found, counts = np.unique(buffer.sample()["value"][:, 0].numpy(), return_counts=True)
        assert found.tolist() == [990, 991, 992]
        assert abs(chi_square(counts)) < 3

    def test_none_that_is_whole_says_how_long_the_longest_is(self):
        """And which ways there are out."""
        buffer = ReplayBuffer(20, sampler="slice", slice_len=7, batch_size=14)
        buffer.extend(batch(2, 10, ends=(3, 9)))
        with pytest.raises(OptionError, match=r"longest has 6\).*strict_length=False"):
            buffer.sample()

    def test_short_ones_are_filled_up_with_zeros(self):
        """Which the mask leaves out; every frame begins one."""
        buffer = ReplayBuffer(20, sampler="slice", slice_len=3, num_slices=20_000, strict_length=False, seed=0)
        buffer.extend(batch(2, 10, ends=(3, 9), start=500))
        sample = buffer.sample()
        rows = rows_of(sample)
        for row in rows:
            first, step = row[0], row[0] % 1000 - 500
            left = 4 - step if step < 4 else 10 - step
            assert row == [*range(first, first + min(3, left))]
        found, counts = np.unique([row[0] for row in rows], return_counts=True)
        assert found.tolist() == [*range(500, 510), *range(1500, 1510)]
        assert abs(chi_square(counts)) < 3
        mask = sample["collector", "mask"]
        for value in (sample["value"], sample["observation"], sample["next", "reward"]):
            assert not value[~mask].any()

    def test_strict_ones_are_never_short(self):
        """There is no mask, for there is nothing to leave out."""
        buffer = ReplayBuffer(20, sampler="slice", slice_len=4, batch_size=40)
        buffer.extend(batch(2, 10, ends=(3, 9)))
        sample = buffer.sample()
        assert ("collector", "mask") not in sample.keys(True)
        assert (sample["value"].diff(dim=1) == 1).all()

    def test_frames_that_do_not_say_whose_they_are_cannot_be_sliced(self):
        """The error says which option of a collector makes them."""
        buffer = ReplayBuffer(20, sampler="slice", slice_len=4, batch_size=40)
        buffer.extend(batch().exclude(("collector", "traj_ids")))
        with pytest.raises(OptionError, match="track_traj_ids=True"):
            buffer.sample()

    @pytest.mark.parametrize(
        ("options", "size", "shape"),
        [
            ({"slice_len": 5, "num_slices": 4}, None, (4, 5)),
            ({"slice_len": 5, "batch_size": 20}, None, (4, 5)),
            ({"num_slices": 4, "batch_size": 20}, None, (4, 5)),
            ({"slice_len": 5}, 10, (2, 5)),
            ({"slice_len": 5, "num_slices": 4}, 10, (2, 5)),
        ],
    )
    def test_two_of_three_numbers_tell_the_third(self, options, size, shape):
        """A number of the call is of frames."""
        assert full(sampler="slice", **options).sample(size).batch_size == torch.Size(shape)

    def test_numbers_that_do_not_fit_are_refused(self):
        with pytest.raises(OptionError, match="no whole number of slices"):
            full(sampler="slice", slice_len=4).sample(10)
        with pytest.raises(OptionError, match="num_slices= or batch_size="):
            full(sampler="slice", slice_len=4).sample()

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("strict", [pytest.param(True, marks=pytest.mark.slow), False])
    def test_they_stay_whole_while_another_thread_writes(self, strict):
        """No frame is torn, none does not follow."""
        buffer = ReplayBuffer(128, sampler="slice", slice_len=8, batch_size=128, strict_length=strict)
        buffer.extend(sealed(1, 64))
        stop = threading.Event()

        def write():
            start = 64
            while not stop.is_set():
                buffer.extend(sealed(1, 16, start=start))
                start += 16

        thread = threading.Thread(target=write)
        thread.start()
        try:
            until = time.monotonic() + 1.5
            while time.monotonic() < until:
                sample = buffer.sample()
                mask = torch.ones(16, 8, dtype=torch.bool) if strict else sample["collector", "mask"]
                assert torn(sample[mask]) == 0
                assert (sample["number"].diff(dim=1) == 1)[mask[:, 1:]].all()
        finally:
            stop.set()
            thread.join()


class TestTransform:
    def test_it_makes_what_comes_out(self):
        """Of each sample, also ahead."""
        for prefetch in (0, 2):
            with full(transform=lambda sample: sample["value"] + 1, prefetch=prefetch) as buffer:
                assert {*buffer.sample(400).tolist()} == {
                    lane * 1000 + step + 1 for lane in range(4) for step in range(10)
                }

    def test_samples_are_on_the_device(self):
        """Where one is named."""
        with full(device="cpu", storage="shared") as buffer:
            assert buffer.device == buffer.sample(3).device == torch.device("cpu")


class TestPrefetch:
    def test_samples_are_made_ahead_in_order(self):
        """The same ones as without."""
        with full(seed=5, prefetch=3) as ahead, full(seed=5) as plain:
            for count in (4, 4, 4, 4):
                assert ahead.sample(count)["value"].tolist() == plain.sample(count)["value"].tolist()

    def test_another_number_is_made_anew(self):
        with full(prefetch=2) as buffer:
            assert [len(buffer.sample(count)) for count in (4, 4, 7, 7, 4)] == [4, 4, 7, 7, 4]

    def test_an_error_comes_out_and_is_over_with_its_cause(self):
        """It is not of samples that were asked for before."""
        with ReplayBuffer(40, prefetch=2) as buffer:
            for _ in range(3):
                with pytest.raises(OptionError, match="no frames"):
                    buffer.sample(3)
            buffer.extend(batch())
            assert len(buffer.sample(3)) == 3
            buffer.empty()
            with pytest.raises(OptionError, match="no frames"):
                buffer.sample(3)

    @pytest.mark.timeout(60)
    def test_several_threads_may_ask(self):
        """Each gets a sample of its own."""
        with full(prefetch=2) as buffer:
            found, threads = [], []
            for _ in range(4):
                threads.append(threading.Thread(target=lambda: found.extend(buffer.sample(5) for _ in range(50))))
                threads[-1].start()
            for thread in threads:
                thread.join()
            assert len(found) == 200
            assert len({id(sample) for sample in found}) == 200
            assert all(isinstance(sample, TensorDict) for sample in found)
