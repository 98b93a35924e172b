"""`buffer`: what is written, in which order, and what is refused."""

from __future__ import annotations

import threading
import time
import warnings

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, tensorclass

from rlcollect import ReplayBuffer
from rlcollect.errors import ClosedError, InvalidBatchError, OptionError, SpaceError

from .helpers import batch, descriptors, full, ids_of, lane_values, sealed, torn, values

STORAGES = pytest.mark.parametrize("storage", ["memory", "shared", "memmap"])


@pytest.fixture(params=["memory", "shared", "memmap"])
def storage(request):
    return request.param


class TestCounts:
    def test_what_is_counted_are_frames(self, storage):
        """[4 lanes x 10 steps] are 40, whatever the shape."""
        with ReplayBuffer(80, storage=storage) as buffer:
            buffer.extend(batch(4, 10))
            assert len(buffer) == 40
            assert buffer.write_count == 40

    @pytest.mark.parametrize("shape", [[6], [1, 6], [2, 3], [1, 2, 3]])
    def test_every_number_of_batch_dimensions_is_taken(self, shape):
        """The last one is time, all others are lanes."""
        buffer = ReplayBuffer(12)
        buffer.extend(batch(1, 6).reshape(shape))
        assert len(buffer) == 6
        assert sorted(values(buffer)) == [*range(6)]

    def test_write_count_goes_on_when_frames_make_room(self, storage):
        """It counts what was ever written; the length what is there."""
        with ReplayBuffer(40, storage=storage) as buffer:
            for start in (0, 10, 20):
                buffer.extend(batch(4, 10, start=start))
            assert (len(buffer), buffer.write_count) == (40, 120)

    def test_a_batch_without_frames_changes_nothing(self):
        """Neither no steps nor no lanes divide the buffer."""
        buffer = ReplayBuffer(12)
        buffer.extend(batch(2, 0))
        buffer.extend(batch(0, 3))
        assert len(buffer) == 0
        buffer.extend(batch(3, 2))
        assert lane_values(buffer) == {0: [0, 1], 1: [0, 1], 2: [0, 1]}

    def test_a_buffer_is_true_when_it_is_empty(self):
        """`if buffer:` asks whether there is one."""
        assert ReplayBuffer(3)
        assert "0 of 3 frames" in repr(ReplayBuffer(3))


class TestOrder:
    def test_lanes_keep_the_order_of_time_over_several_batches(self, storage):
        """25 steps in batches of 10 and 5: the newest 20 of each lane, in order."""
        with ReplayBuffer(80, storage=storage) as buffer:
            for start, steps in ((0, 10), (10, 5), (15, 10)):
                buffer.extend(batch(4, steps, start=start))
            assert lane_values(buffer) == {lane: [*range(5, 25)] for lane in range(4)}

    @pytest.mark.parametrize("steps", [7, 8, 9, 30])
    def test_a_batch_longer_than_the_ring_leaves_its_newest(self, steps):
        """Rings of 4 frames: the last 4 of each lane."""
        buffer = ReplayBuffer(8)
        buffer.extend(batch(2, 3, start=500))
        buffer.extend(batch(2, steps))
        assert lane_values(buffer) == {lane: [*range(steps - 4, steps)] for lane in range(2)}
        assert buffer.write_count == 2 * (3 + steps)

    def test_rows_that_are_masked_are_not_kept(self, storage):
        """Lanes that are unequally far afterwards go on each from where it is."""
        mask = [[True] * 3, [True, True, False], [False] * 3]
        with ReplayBuffer(30, storage=storage) as buffer:
            buffer.extend(batch(3, 3, mask=mask))
            assert lane_values(buffer) == {0: [0, 1, 2], 1: [0, 1]}
            buffer.extend(batch(3, 2, start=3, mask=[[True, True]] * 3))
            assert lane_values(buffer) == {0: [0, 1, 2, 3, 4], 1: [0, 1, 3, 4], 2: [3, 4]}
            assert buffer.frames()["collector", "mask"].all()

    def test_masked_rows_go_round_the_ring(self):
        """A ring of 4, of which each batch fills 2 of 3 rows: the newest 4 stand."""
        buffer = ReplayBuffer(4)
        for start in range(0, 30, 3):
            buffer.extend(batch(1, 3, start=start, mask=[[True, False, True]]))
        assert values(buffer) == [24, 26, 27, 29]

    def test_single_frames_follow_each_other(self):
        """add() is extend() of one."""
        buffer = ReplayBuffer(5)
        for step in range(7):
            buffer.add(batch(1, 1, start=step)[0, 0])
        assert values(buffer) == [2, 3, 4, 5, 6]
        with pytest.raises(OptionError, match="use extend"):
            buffer.add(batch(1, 2))

    def test_a_capacity_that_lanes_do_not_divide_is_rounded_down_with_one_warning(self):
        """10 frames among 4 lanes: 2 each."""
        buffer = ReplayBuffer(10)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            buffer.extend(batch(4, 3))
            buffer.extend(batch(4, 3, start=3))
        assert len(caught) == 1
        assert "no multiple of 4 lanes: each keeps 2" in str(caught[0].message)
        assert caught[0].filename == __file__
        assert lane_values(buffer) == {lane: [4, 5] for lane in range(4)}

    def test_more_lanes_than_frames_are_refused(self):
        """A lane without a frame would keep nothing."""
        with pytest.raises(OptionError, match="5 lanes, and there is room for 4"):
            ReplayBuffer(4).extend(batch(5, 1))

    def test_a_thousand_lanes_and_one_lane_keep_theirs(self):
        """1,200 lanes of 2 frames; 1 lane of 2,400."""
        many, one = ReplayBuffer(2400), ReplayBuffer(2400)
        many.extend(batch(1200, 3))
        one.extend(batch(1, 3000))
        assert many.frames()["value"].view(1200, 2).tolist() == [[n * 1000 + 1, n * 1000 + 2] for n in range(1200)]
        assert values(one) == [*range(600, 3000)]

    @pytest.mark.parametrize("uneven", [False, True])
    def test_many_lanes_are_written_as_quickly_the_first_time(self, uneven):
        """2,048 of them: the first and the tenth batch within a multiple of each other, and of a few lanes'."""
        buffer, few = ReplayBuffer(2048 * 100), ReplayBuffer(2048 * 100)
        mask = [[True, True, False, True], [True] * 4] * 1024 if uneven else None
        small = None if mask is None else torch.tensor(mask).view(8, 1024).tolist()

        def seconds(buffer, data):
            start = time.perf_counter()
            buffer.extend(data)
            return time.perf_counter() - start

        many = [seconds(buffer, batch(2048, 4, mask=mask)) for _ in range(10)]
        least = min(seconds(few, batch(8, 1024, mask=small)) for _ in range(10))
        assert many[0] < 20 * min(many) + 0.1
        assert min(many) < 20 * least

    def test_a_capacity_of_one_keeps_the_newest(self, storage):
        """There is one frame, at every moment between two writes."""
        with ReplayBuffer(1, storage=storage) as buffer:
            for start in range(3):
                buffer.extend(batch(1, 2, start=start))
                assert values(buffer) == [start + 1]
                assert buffer.sample(3)["value"].tolist() == [start + 1] * 3


class TestForm:
    @pytest.mark.parametrize(
        ("change", "match"),
        [
            (lambda data: data.exclude("value"), "lacks 'value'"),
            (lambda data: data.set("other", data["value"]), "'other' is new"),
            (lambda data: data.set("value", data["value"].int()), r"'value' \[\] int64; 'value' \[\] int32 came"),
            (lambda data: data.set("value", data["value"][..., None]), r"'value' \[1\] int64 came"),
            (lambda data: data.set(("next", "reward"), data["value"]), r"\('next', 'reward'\)"),
            (lambda data: data.set_non_tensor("value", "word"), "'value'"),
        ],
    )
    def test_frames_of_another_form_are_refused_by_key(self, change, match):
        """What differs is named, and nothing is written."""
        buffer = full()
        with pytest.raises(SpaceError, match=match):
            buffer.extend(change(batch()))
        assert len(buffer) == 40
        assert buffer.write_count == 40

    def test_what_is_no_tensor_is_refused_by_key(self):
        """Also as the first frame."""
        data = batch()
        data["word"] = NonTensorData("word", data.batch_size)
        with pytest.raises(SpaceError, match="'word' is a NonTensorData"):
            ReplayBuffer(40).extend(data)

    def test_tensors_of_unequal_rows_are_refused_by_key(self):
        """Nested and sparse ones."""
        jagged = torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged)
        for value in (jagged, torch.eye(2).to_sparse()):
            with pytest.raises(SpaceError, match="'word' is a nested or sparse tensor"):
                ReplayBuffer(40).extend(TensorDict({"word": value}, [2]))

    def test_time_has_to_be_last(self):
        """A batch whose names say otherwise is refused; so is one without time."""
        for data in (batch().transpose(0, 1), batch()[0, 0]):
            with pytest.raises(InvalidBatchError):
                ReplayBuffer(40).extend(data)

    def test_memory_is_there_after_init(self, storage):
        """The form is held against what comes; nothing is there yet."""
        with ReplayBuffer(40, storage=storage) as buffer:
            buffer.init(batch()[0, 0])
            assert (len(buffer), buffer.write_count) == (0, 0)
            with pytest.raises(SpaceError):
                buffer.extend(TensorDict({"value": torch.zeros(4, 10)}, [4, 10]))
            buffer.extend(batch())
            buffer.init(batch())
            assert len(buffer) == 40
            with pytest.raises(SpaceError, match="no 'more'"):
                buffer.init(batch()[0].set("more", torch.zeros(10)))

    def test_done_has_one_value_a_frame(self):
        """Else nobody knows when the episode ends."""
        with pytest.raises(InvalidBatchError, match="one value a frame"):
            ReplayBuffer(4).extend(TensorDict({"next": {"done": torch.zeros(1, 4, 2, dtype=torch.bool)}}, [1, 4]))


DTYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32,
    torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64,
]  # fmt: skip


def odd_batch(dtype, shape, lanes=2, steps=3):
    value = torch.arange(lanes * steps * max(1, int(torch.Size(shape).numel()))) % 2
    value = value[: lanes * steps * torch.Size(shape).numel()].reshape(lanes, steps, *shape).to(dtype)
    return TensorDict({"deep": {"er": {"value": value}}, "number": torch.arange(lanes * steps).view(lanes, steps)},
                      [lanes, steps])  # fmt: skip


class TestOddInputs:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("shape", [(), (3,), (0,), (2, 0, 3), (700,)], ids=str)
    def test_every_dtype_and_shape_comes_out_as_it_went_in(self, storage, dtype, shape):
        """Written evenly, and with rows left out; looked at and sampled."""
        data = odd_batch(dtype, shape)
        with ReplayBuffer(12, storage=storage) as buffer:
            buffer.extend(data)
            buffer.extend(data[:1])
            frames, sample = buffer.frames(), buffer.sample(20)
            for found in (frames, sample):
                assert found["deep", "er", "value"].dtype is dtype
                expected = data["deep", "er", "value"].flatten(0, 1)
                for value, number in zip(found["deep", "er", "value"], found["number"], strict=True):
                    assert torch.equal(value.view(torch.uint8) if shape and 0 not in shape else value.reshape(-1),
                                       expected[number].view(torch.uint8) if shape and 0 not in shape
                                       else expected[number].reshape(-1))  # fmt: skip
            assert len(frames) == 9

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_gradients_stay_outside(self, dtype):
        """What is kept needs none, nor does what is sampled."""
        value = torch.ones(2, 3, 4, dtype=dtype, requires_grad=True)
        buffer = ReplayBuffer(6)
        buffer.extend(TensorDict({"value": value * 2}, [2, 3]))
        buffer.extend(TensorDict({"value": value * 2}, [2, 3])[:1])
        assert not buffer.sample(4)["value"].requires_grad
        assert not buffer.frames()["value"].requires_grad
        assert (buffer.frames()["value"] == 2).all()

    def test_tensors_that_are_not_contiguous_are_written_as_they_look(self):
        """Transposed, expanded, every second one."""
        value = torch.arange(24).view(3, 2, 4).transpose(0, 1)
        one = torch.tensor([[7]]).expand(2, 3)
        step = torch.arange(12).view(2, 6)[:, ::2]
        buffer = ReplayBuffer(6)
        buffer.extend(TensorDict({"value": value, "one": one, "step": step}, [2, 3]))
        assert torch.equal(buffer.frames()["value"], value.reshape(6, 4))
        assert buffer.frames()["one"].tolist() == [7] * 6
        assert buffer.frames()["step"].tolist() == [0, 2, 4, 6, 8, 10]

    def test_a_lazy_stack_is_a_batch(self):
        """As are tensors in files."""
        lanes = batch(2, 3)
        lazy = LazyStackedTensorDict(lanes[0].clone(), lanes[1].clone(), stack_dim=0)
        buffer = ReplayBuffer(6)
        buffer.extend(lazy)
        buffer.extend(lanes.clone().memmap_())
        assert lane_values(buffer) == {0: [0, 1, 2], 1: [0, 1, 2]}
        assert buffer.write_count == 12

    def test_a_class_of_tensors_within_a_batch_is_its_keys(self):
        """As it is everywhere in TensorDicts."""

        @tensorclass
        class Pair:
            one: torch.Tensor
            two: torch.Tensor

        pair = Pair(torch.arange(6).view(2, 3), torch.zeros(2, 3), batch_size=[2, 3])
        buffer = ReplayBuffer(6)
        for _ in range(2):
            buffer.extend(TensorDict({"pair": pair}, [2, 3]))
        assert buffer.frames()["pair", "one"].tolist() == [*range(6)]


class TestDealing:
    def test_a_batch_of_other_lanes_is_dealt_out(self):
        """To where the least was written; frames of a trajectory stay together."""
        buffer = ReplayBuffer(40)
        buffer.extend(batch(2, 5, ids=[1, 2]))
        buffer.extend(batch(3, 4, start=100, ids=[11, 12, 13]))
        assert len(buffer) == 22
        assert ids_of(buffer) == [1] * 5 + [11] * 4 + [13] * 4 + [2] * 5 + [12] * 4

    def test_a_trajectory_goes_on_in_the_ring_that_it_is_in(self):
        """Its frames would else stand beside some that they do not follow."""
        buffer = ReplayBuffer(80, sampler="slice", slice_len=4, batch_size=80, seed=0)
        buffer.extend(batch(2, 1, ids=[1, 2]))
        for start in (0, 2, 4):
            buffer.extend(batch(3, 2, start=start, ids=[11, 12, 13]))
        assert {value % 1000 for value in values(buffer)} == {*range(6)}
        for row in buffer.sample()["value"].tolist():
            assert row == [*range(row[0], row[0] + 4)]

    def test_many_pieces_are_dealt_in_time(self):
        """2,000 trajectories among 1,000 lanes."""
        buffer = ReplayBuffer(8000)
        buffer.extend(batch(1000, 1))
        buffer.extend(batch(500, 8, ends=(1, 3, 5), start=1))
        assert len(buffer) == 5000
        assert len({*values(buffer)}) == 5000


class TestThreads:
    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("lanes", [pytest.param(1, marks=pytest.mark.slow), 2])
    def test_no_frame_is_torn_while_another_thread_writes(self, lanes):
        """The ring goes round many times, while samples are drawn and all frames are looked at."""
        buffer = ReplayBuffer(64 * lanes)
        buffer.extend(sealed(lanes, 64))
        stop = threading.Event()

        def write():
            start = 64
            while not stop.is_set():
                buffer.extend(sealed(lanes, 16, start=start))
                start += 16

        thread = threading.Thread(target=write)
        thread.start()
        try:
            until = time.monotonic() + 2
            while time.monotonic() < until:
                assert torn(buffer.sample(32)) == 0
                assert torn(buffer.frames()) == 0
        finally:
            stop.set()
            thread.join()


class TestEnd:
    def test_emptied_it_is_written_to_as_before(self, storage):
        """Its count goes on, and it says at once that there is nothing."""
        with full(storage=storage) if storage != "memmap" else ReplayBuffer(40, storage=storage) as buffer:
            if not len(buffer):
                buffer.extend(batch())
            buffer.empty()
            assert (len(buffer), buffer.write_count) == (0, 40)
            with pytest.raises(OptionError, match="no frames"):
                buffer.sample(1)
            buffer.extend(batch(start=10))
            assert lane_values(buffer) == {lane: [*range(10, 20)] for lane in range(4)}

    def test_closed_it_says_so(self, storage):
        """Whatever is asked of it; closing again does nothing."""
        buffer = ReplayBuffer(40, storage=storage, batch_size=3)
        buffer.extend(batch())
        claimless = [buffer.sample, buffer.empty, buffer.frames, buffer.state_dict, buffer.share, buffer.__reduce__,
                     lambda: buffer.extend(batch()), lambda: buffer.dumps("x"), lambda: buffer.loads("x"),
                     lambda: buffer.init(batch())]  # fmt: skip
        buffer.close()
        buffer.close()
        for call in claimless:
            with pytest.raises(ClosedError):
                call()

    def test_nothing_is_left_open(self, storage):
        """Neither by closing nor by forgetting it."""
        ReplayBuffer(4).close()
        before, threads = descriptors(), threading.active_count()
        for close in (True, False):
            buffer = ReplayBuffer(40, storage=storage, prefetch=2)
            buffer.extend(batch())
            buffer.sample(4)
            if close:
                buffer.close()
            del buffer
            for thread in threading.enumerate():  # what it had begun ends first
                if thread.name.startswith("rlcollect-sample"):
                    thread.join(5)
        assert descriptors() == before
        assert threading.active_count() == threads

    def test_shared_it_has_the_same_frames(self):
        """share() moves them; what was written goes on."""
        with full() as buffer:
            buffer.extend(batch(start=10))
            before = values(buffer)
            assert buffer.share() is buffer
            assert buffer.storage == "shared"
            assert (values(buffer), buffer.write_count) == (before, 80)
            buffer.extend(batch(start=20))
            assert lane_values(buffer) == {lane: [*range(20, 30)] for lane in range(4)}


class TestOptions:
    @pytest.mark.parametrize(
        "options",
        [
            {"capacity": 0}, {"storage": "disk"}, {"sampler": "best"}, {"sampler": "slice"}, {"slice_len": 3},
            {"batch_size": 0}, {"batch_size": 10, "sampler": "slice", "slice_len": 3}, {"prefetch": -1},
            {"spare_lanes": -1}, {"strict_length": 1}, {"transform": 3}, {"path": "here"}, {"seed": -1},
            {"sampler": "slice", "slice_len": 3, "num_slices": 2, "batch_size": 12},
        ],
        ids=str,
    )  # fmt: skip
    def test_values_that_make_no_sense_are_refused(self, options):
        """When the buffer is made."""
        with pytest.raises(OptionError):
            ReplayBuffer(**{"capacity": 10, **options})
