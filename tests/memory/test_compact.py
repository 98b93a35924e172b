"""`CompactBatch`: what stands in it worked out by hand, and that the full form comes back from it, bit for bit."""

from __future__ import annotations

import gc
import io
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, is_non_tensor, lazy_stack

from rlcollect import CompactBatch, InvalidBatchError
from rlcollect.memory import compact
from rlcollect.memory.compact import CompactMemory

DTYPES = (
    torch.bool,
    torch.uint8,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.complex128,
)
VALUES = (0.0, -0.0, 1.0, 2.0, float("nan"))


def content(value: Any) -> Any:
    """All there is to tell two things apart: kinds, keys, shapes, names, devices and bytes."""
    if is_non_tensor(value):
        return value.batch_size, value.tolist() if hasattr(value, "tolist") else value.data
    if isinstance(value, LazyStackedTensorDict):
        return value.names, [content(part) for part in value.tensordicts]
    if isinstance(value, TensorDictBase):
        parts = {key: content(value.get(key)) for key in value.keys()}  # noqa: SIM118
        return type(value), value.batch_size, value.names, value.device, parts
    row = value.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8).tolist() if value.numel() else []
    return value.dtype, tuple(value.shape), value.device, row


def one_lane(before: Any, after: Any) -> TensorDict:
    """A batch `[T]` of these observations."""
    before, after = (torch.as_tensor(values) for values in (before, after))
    batch = TensorDict({"x": before, "next": {"x": after}}, [len(before)], names=["time"])
    batch["action"] = torch.arange(len(before))
    return batch


def going_on(shape: tuple[int, ...], *features: int, dtype: torch.dtype = torch.float32) -> TensorDict:
    """A batch in which every observation is another, and each goes on."""
    lead, steps = shape[:-1], shape[-1]
    rows = 1 + torch.arange(torch.Size((*lead, steps + 1, *features)).numel()).reshape(*lead, steps + 1, *features)
    time = len(lead)
    before, after = (rows.narrow(time, first, steps).to(dtype).clone() for first in (0, 1))
    names = [*[None] * time, "time"]
    return TensorDict({"x": before, "action": torch.zeros(shape), "next": {"x": after}}, shape, names=names)


class TestByHand:
    def test_an_episode_that_ends_inside(self) -> None:
        batch = one_lane([0.0, 1.0, 2.0, 0.0, 1.0], [1.0, 2.0, 3.0, 1.0, 2.0])
        small = CompactBatch.of(batch)
        assert small.observations["x"].tolist() == [0, 1, 2, 0, 1, 2]
        assert small.finals["x"].tolist() == [3]
        assert small.index.tolist() == [[2]]
        assert {*small.data.keys(True, True)} == {"action"}
        assert content(small.expand()) == content(batch)

    def test_one_that_ends_with_the_last_step_is_the_last_observation(self) -> None:
        small = CompactBatch.of(one_lane([0.0, 1.0, 2.0], [1.0, 2.0, 3.0]))
        assert small.observations["x"].tolist() == [0, 1, 2, 3]
        assert not len(small.finals)
        assert small.index.shape == (0, 1)

    def test_places_are_those_in_the_batch(self) -> None:
        batch = going_on((2, 3, 4), 2)
        batch["next", "x"][1, 0, 2] = -1.0
        batch["next", "x"][0, 2, 0, 1] = -2.0
        small = CompactBatch.of(batch)
        assert small.index.tolist() == [[0, 2, 0], [1, 0, 2]]
        assert small.finals["x"].tolist() == [batch["next", "x"][0, 2, 0].tolist(), [-1, -1]]
        assert content(small.expand()) == content(batch)

    def test_a_row_is_final_where_any_key_is(self) -> None:
        batch = going_on((4,))
        batch["y"], batch["next", "y"] = torch.tensor([1, 2, 7, 4]), torch.tensor([2, 3, 4, 5])
        small = CompactBatch.of(batch)
        assert small.index.tolist() == [[1]]
        assert small.finals["x"].tolist() == [3]
        assert small.finals["y"].tolist() == [3]

    def test_rows_that_hold_no_frame(self) -> None:
        """A lane that fell behind: its last frame is followed by zeros."""
        batch = one_lane([5.0, 6.0, 0.0, 0.0], [6.0, 7.0, 0.0, 0.0])
        batch["collector", "mask"] = torch.tensor([True, True, False, False])
        small = CompactBatch.of(batch)
        assert small.index.tolist() == [[1]]
        assert small.frames == 2
        assert content(small.expand()) == content(batch)

    def test_bytes_are_compared_and_not_numbers(self) -> None:
        same, other = np.array([0x7FC00001, 0x7FC00002], np.uint32).view(np.float32)
        began = torch.from_numpy(np.array([1.0, same, same, 0.0, 0.0], np.float32))
        came = torch.from_numpy(np.array([same, other, 0.0, -0.0, 9.0], np.float32))
        batch = one_lane(began, came)
        small = CompactBatch.of(batch)
        assert small.index.tolist() == [[1], [3]]
        assert content(small.expand()) == content(batch)

    @pytest.mark.parametrize("steps", [0, 1])
    def test_of_hardly_any_step(self, steps: int) -> None:
        batch = going_on((2, steps), 3)
        small = CompactBatch.of(batch)
        assert small.observations["x"].shape == (2, steps + 1, 3)
        assert content(small.expand()) == content(batch)

    def test_at_worst_it_is_as_large_as_the_full_form(self) -> None:
        batch = going_on((3, 5), 100)
        batch["next", "x"].neg_()
        small = CompactBatch.of(batch)
        assert len(small.index) == 3 * 4
        assert small.nbytes - small.index.nbytes == batch.bytes()
        assert content(small.expand()) == content(batch)


class TestKeys:
    def test_flags_and_counts_stay_where_they_are_and_what_a_policy_carries_does_not(self) -> None:
        batch = going_on((2, 3))
        for name in ("done", "terminated", "truncated", "step_count", "is_init"):
            batch[name] = batch["next", name] = torch.zeros(2, 3, 1, dtype=torch.bool)
        batch["agents", "done"] = batch["next", "agents", "done"] = torch.zeros(2, 3, 1, dtype=torch.bool)
        batch["hidden"] = batch["next", "hidden"] = torch.zeros(2, 3, 8)
        batch["next", "reward"] = torch.zeros(2, 3, 1)
        small = CompactBatch.of(batch)
        assert {*small.observations.keys(True, True)} == {"x", "hidden"}
        assert {"done", ("next", "done"), ("agents", "done"), ("next", "reward")} <= {*small.data.keys(True, True)}
        assert content(small.expand()) == content(batch)

    def test_only_those_that_are_named(self) -> None:
        batch = going_on((3,))
        batch["deep", "y"] = batch["next", "deep", "y"] = torch.zeros(3)
        batch["done"] = batch["next", "done"] = torch.zeros(3, 1, dtype=torch.bool)
        small = CompactBatch.of(batch, [("deep", "y"), "done"])
        assert {*small.observations.keys(True, True)} == {("deep", "y"), "done"}
        assert "x" in small.data
        assert content(small.expand()) == content(batch)

    def test_none(self) -> None:
        batch = going_on((2, 3))
        small = CompactBatch.of(batch, [])
        assert not len(small.index)
        assert small.observations.batch_size == (2, 4)
        assert content(small.expand()) == content(batch)

    def test_what_has_another_form_below_next_stays(self) -> None:
        batch = going_on((3,), 2)
        batch["y"], batch["next", "y"] = torch.zeros(3, 2), torch.zeros(3, 2, dtype=torch.float64)
        batch["z"], batch["next", "z"] = torch.zeros(3, 2), torch.zeros(3, 3)
        small = CompactBatch.of(batch)
        assert {*small.observations.keys()} == {"x"}
        assert content(small.expand()) == content(batch)

    def test_levels_with_dimensions_of_their_own(self) -> None:
        """Agents: their level has one more dimension, and is nothing but observations below "next"."""
        batch = going_on((2, 4))
        agents = TensorDict({"seen": torch.zeros(2, 4, 3, 5)}, [2, 4, 3], names=[None, "time", "agents"])
        batch["agents"], batch["next", "agents"] = agents, agents.clone()
        batch["next", "agents", "seen"][0, 1, 2] = 1.0
        small = CompactBatch.of(batch)
        assert small.index.tolist() == [[0, 1]]
        assert content(small.expand()) == content(batch)

    def test_what_has_no_fixed_form_stays_in_full(self) -> None:
        batch = going_on((2, 3), 4)
        parts = [TensorDict({"seen": torch.zeros(3, size)}, [3]) for size in (2, 5)]
        batch["unlike"], batch["next", "unlike"] = lazy_stack(parts), lazy_stack([part.clone() for part in parts])
        batch["text"], batch["next", "text"] = (NonTensorData(word, batch_size=[2, 3]) for word in ("go", "on"))
        small = CompactBatch.of(batch)
        assert {*small.observations.keys(True, True)} == {"x"}
        assert content(small.expand()) == content(batch)

    def test_a_lazy_stack_of_all_stays_in_full(self) -> None:
        batch = lazy_stack([going_on((3,), 2), going_on((3,), 4)])
        small = CompactBatch.of(batch)
        assert isinstance(small.expand(), LazyStackedTensorDict)
        assert content(small.expand()) == content(batch)

    @pytest.mark.parametrize("key", ["y", "action", ("next", "x"), "odd", "word"])
    def test_one_that_does_not_stand_at_both_places_is_refused(self, key: Any) -> None:
        batch = going_on((3,))
        batch["odd"], batch["next", "odd"] = torch.zeros(3), torch.zeros(3, 1)
        batch["word"], batch["next", "word"] = (NonTensorData(word, batch_size=[3]) for word in ("go", "on"))
        with pytest.raises(InvalidBatchError, match=r"expected a tensor under .*the batch has \[\"?'x'"):
            CompactBatch.of(batch, [key])


class TestMemory:
    def test_it_shares_nothing_with_the_batch_nor_with_what_is_expanded(self) -> None:
        batch = going_on((2, 4), 3)
        batch["next", "x"][0, 1] = -5.0
        before = content(batch)
        small = CompactBatch.of(batch)
        batch.zero_()
        full = small.expand()
        assert content(full) == before
        for value in full.values(True, True):
            value.zero_()
        assert content(small.expand()) == before

    def test_the_batch_is_only_read(self) -> None:
        batch = going_on((2, 4), 3).lock_()
        before = content(batch)
        small = CompactBatch.of(batch)
        assert content(batch) == before
        small.data["more"] = torch.zeros(2, 4)
        small.expand()["more"] = torch.zeros(2, 4)

    @pytest.mark.parametrize(
        "change",
        [
            lambda value: value.transpose(0, 1).contiguous().transpose(0, 1),
            lambda value: value.repeat_interleave(2, 1)[:, ::2],
            lambda value: value.repeat_interleave(2, -1)[..., ::2],
            lambda value: value.transpose(0, -1).contiguous().transpose(0, -1),
            lambda value: value[..., :1, :1],
            lambda value: value[..., :0],
            lambda value: value[:1, :1].expand(value.shape),
        ],
        ids=["time first", "steps apart", "features apart", "turned", "one of many", "none", "expanded"],
    )
    @pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
    def test_tensors_may_lie_in_any_way(self, change: Any, dtype: torch.dtype) -> None:
        batch = going_on((3, 4), 2, 5, dtype=dtype)
        batch["next", "x"][1, 2] = 0
        odd = batch.apply(lambda value: change(value) if value.ndim > 2 else value)
        assert content(CompactBatch.of(odd).expand()) == content(odd)

    def test_a_conjugate_view(self) -> None:
        batch = going_on((2, 4), 3, dtype=torch.complex64)
        batch["x"], batch["next", "x"] = (batch["x"] * 1j).conj(), batch["next", "x"] * -1j
        assert batch["x"].is_conj()
        assert not len(CompactBatch.of(batch).index)
        assert content(CompactBatch.of(batch).expand()) == content(batch)

    def test_observations_of_a_dropped_batch_make_room_for_the_next(self) -> None:
        gc.disable()
        try:
            memory = CompactMemory(keep=2)
            batch = going_on((2, 4), 3)
            small = CompactBatch.of(batch, memory=memory)
            place = small.observations["x"].data_ptr()
            del small
            small = CompactBatch.of(batch, memory=memory)
            assert small.observations["x"].data_ptr() == place
            kept, before = small.observations["x"][1, 2:], small.observations["x"][1, 2:].clone()
            del small
            batch.zero_()
            others = [CompactBatch.of(batch, memory=memory) for _ in range(4)]
            assert torch.equal(kept, before)
            assert len({other.observations["x"].data_ptr() for other in others} | {place}) == 5
        finally:
            gc.enable()

    def test_shorter_and_longer_batches(self) -> None:
        memory = CompactMemory(keep=2)
        batches = [going_on((2, steps), 3) for steps in (4, 2, 9, 4)]
        for batch in batches:
            assert content(CompactBatch.of(batch, memory=memory).expand()) == content(batch)

    def test_gradients_do_not_come_along_in_observations(self) -> None:
        batch = going_on((2, 4))
        batch["x"].requires_grad_()
        assert not CompactBatch.of(batch).observations["x"].requires_grad


class TestWhatItIs:
    def small(self) -> CompactBatch:
        batch = going_on((4, 6), 10)
        batch["next", "x"][1, 2] = -1.0
        return CompactBatch.of(batch)

    def test_attributes(self) -> None:
        small = self.small()
        assert small.batch_size == (4, 6)
        assert small.names == [None, "time"]
        assert small.observations.names == [None, "time"]
        assert small.device is None
        assert small.frames == 24
        assert len(small) == 4
        assert small.nbytes == 4 * 6 * 4 + 4 * 7 * 40 + 40 + 16
        assert repr(small) == (
            "CompactBatch(batch_size=[4, 6], observations=['x'], finals=1, nbytes=1,272, device=None)"
        )

    @pytest.mark.parametrize("how", ["pickle", "torch"])
    def test_it_can_be_saved(self, how: str) -> None:
        small = self.small()
        if how == "pickle":
            loaded = pickle.loads(pickle.dumps(small))
        else:
            file = io.BytesIO()
            torch.save(small, file)
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
        assert content(loaded.expand()) == content(small.expand())

    def test_on_another_device(self) -> None:
        small = self.small()
        assert content(small.to("cpu").expand()) == content(small.expand().to("cpu"))
        assert small.to("cpu").device == torch.device("cpu")
        assert small.to("meta").expand()["x"].device.type == "meta"

    def test_a_slice_of_steps(self) -> None:
        batch = one_lane([0.0, 1.0, 2.0, 0.0, 1.0], [1.0, 2.0, 3.0, 1.0, 2.0])
        part = CompactBatch.of(batch)[1:3]
        assert part.observations["x"].tolist() == [1, 2, 0]
        assert part.index.tolist() == [[1]]
        assert content(part.expand()) == content(batch[1:3])

    @pytest.mark.parametrize("part", [0, slice(None, None, 2), slice(None, None, -1), "x", (slice(None), 1), None])
    def test_anything_but_a_plain_slice_is_refused(self, part: Any) -> None:
        with pytest.raises(TypeError, match="takes slices without a step"):
            self.small()[part]

    def test_it_is_not_iterated_over_by_accident(self) -> None:
        with pytest.raises(TypeError):
            list(self.small())


class TestRefusals:
    def test_no_time(self) -> None:
        with pytest.raises(InvalidBatchError, match="time last"):
            CompactBatch.of(TensorDict({"x": torch.zeros(3)}, []))

    def test_time_first(self) -> None:
        batch = going_on((2, 3))
        batch.names = ["time", None]
        with pytest.raises(InvalidBatchError, match="time as the last"):
            CompactBatch.of(batch)

    def test_no_values(self) -> None:
        with pytest.raises(InvalidBatchError, match="'x' is on the meta device"):
            CompactBatch.of(going_on((2, 3)).to("meta"))


FEATURES = ((), (1,), (3,), (2, 2), (0,))


@st.composite
def batches(draw: st.DrawFn) -> TensorDict:
    """Batches that look as if collected: episodes end, are cut, and lanes fall behind, wherever it may be."""
    lead, steps = draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.integers(0, 6))
    shape, dims = (*lead, steps), len(lead) + 1
    forms = draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(FEATURES)), min_size=1, max_size=4))
    draws = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    ends, is_frame = draws.random(shape) < draw(st.sampled_from([0.0, 0.2, 1.0])), np.ones(shape, bool)
    if draw(st.booleans()):
        is_frame &= np.arange(steps) < draws.integers(0, steps + 1, (*lead, 1))
    batch = TensorDict({}, shape, names=[*[None] * len(lead), "time"], device=draw(st.sampled_from([None, "cpu"])))
    for number, (dtype, features) in enumerate(forms):
        key = f"x{number}" if number % 2 else ("deep", f"x{number}")
        rows = [torch.from_numpy(draws.choice(VALUES, (*lead, count, *features))) for count in (steps + 1, steps)]
        began, came = rows[0].narrow(dims - 1, 0, steps).clone(), rows[0].narrow(dims - 1, 1, steps).clone()
        came[torch.from_numpy(ends)] = rows[1][torch.from_numpy(ends)]
        for values, where in ((began, key), (came, ("next", *([key] if isinstance(key, str) else key)))):
            values[torch.from_numpy(~is_frame)] = 0
            batch[where] = values.to(dtype) if dtype.is_floating_point else values.nan_to_num(7.0).to(dtype)
    batch["next", "done"] = torch.from_numpy(ends)[..., None]
    batch["collector", "mask"] = torch.from_numpy(is_frame)
    return batch


def plain_loop(batch: TensorDict, keys: list[Any]) -> list[list[int]]:
    """Where what came of a step is not what the next began with, one row at a time."""
    found = []
    for place in np.ndindex(*batch.batch_size):
        if place[-1] + 1 < batch.batch_size[-1]:
            following = (*place[:-1], place[-1] + 1)
            pairs = [(batch["next"][key][place], batch[key][following]) for key in keys]
            if any(content(came) != content(began) for came, began in pairs):
                found.append([*place])
    return found


@settings(deadline=None)
@given(batch=batches(), ends=st.tuples(st.integers(-4, 4) | st.none(), st.integers(-4, 4) | st.none()))
def test_whatever_the_batch_it_comes_back_and_so_does_each_part(batch: TensorDict, ends: Any) -> None:
    before, small = content(batch), CompactBatch.of(batch)
    keys = [key for key in batch.keys(True, True) if key[0] not in ("next", "collector")]
    assert {*small.observations.keys(True, True)} == {*keys}
    assert small.index.tolist() == plain_loop(batch, keys)
    assert small.frames == batch["collector", "mask"].sum()
    assert content(small.expand()) == content(batch) == before
    assert content(small[slice(*ends)].expand()) == content(batch[slice(*ends)])
    assert content(pickle.loads(pickle.dumps(small)).expand()) == before


@settings(deadline=None)
@given(batch=batches())
def test_a_device_tells_rows_apart_as_the_host_does(batch: TensorDict) -> None:
    for key in [key for key in batch.keys(True, True) if key[0] not in ("next", "collector")]:
        ours, theirs = batch[key], batch["next"][key]
        if ours.numel():
            expected = compact._differ_on_host(ours, theirs, batch.ndim)
            assert torch.equal(compact._differ_on_device(ours, theirs, batch.ndim), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_cuda(dtype: torch.dtype) -> None:
    batch = going_on((3, 5), 7, dtype=dtype).to("cuda")
    batch["next", "x"][1, 2] = 0
    small = CompactBatch.of(batch)
    assert small.observations["x"].is_cuda
    assert content(small.expand().cpu()) == content(batch.cpu())
    assert content(small.to("cpu").expand()) == content(batch.cpu())
