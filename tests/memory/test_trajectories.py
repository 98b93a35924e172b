"""`split_trajectories`: expected rows worked out by hand, then against a plain loop on any batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import (
    LazyStackedTensorDict,
    MetaData,
    NonTensorData,
    NonTensorStack,
    TensorDict,
    TensorDictBase,
    UnbatchedTensor,
    lazy_stack,
    tensorclass,
)

from rlcollect import Collector
from rlcollect.errors import InvalidBatchError, OptionError
from rlcollect.memory import split_trajectories
from rlcollect.testing import Tagged


def make_batch(*, ids: Any = None, done: Any = None, mask: Any = None, prefix: str = "collector") -> TensorDict:
    """A batch whose `"x"` numbers its frames from 1 in memory order, so that every frame is known again."""
    shape = torch.as_tensor(ids if ids is not None else done).shape
    batch = TensorDict({"x": 1 + torch.arange(shape.numel()).reshape(shape)}, shape, names=[None] * len(shape))
    if ids is not None:
        batch[prefix, "traj_ids"] = torch.as_tensor(ids)
    if done is not None:
        batch["next", "done"] = torch.as_tensor(done).bool().unsqueeze(-1)
    if mask is not None:
        batch[prefix, "mask"] = torch.as_tensor(mask).bool()
    return batch


def rows(pieces: TensorDictBase) -> list[list[int]]:
    """The real frames of each piece, by their numbers."""
    return [x[m].tolist() for x, m in zip(pieces["x"], pieces["collector", "mask"], strict=True)]


class TestWhereItCuts:
    def test_one_lane(self) -> None:
        pieces = split_trajectories(make_batch(ids=[5, 5, 5, 9, 9, 2], done=[0, 0, 1, 0, 1, 0]))
        assert pieces.batch_size == (3, 3)
        assert pieces.names == [None, "time"]
        assert pieces["x"].tolist() == [[1, 2, 3], [4, 5, 0], [6, 0, 0]]
        assert pieces["collector", "mask"].tolist() == [[True, True, True], [True, True, False], [True, False, False]]
        assert pieces["collector", "traj_ids"].tolist() == [[5, 5, 5], [9, 9, 0], [2, 0, 0]]
        assert pieces["next", "done"][..., 0].tolist() == [
            [False, False, True],
            [False, True, False],
            [False, False, False],
        ]

    def test_pieces_come_by_lane_then_by_time(self) -> None:
        pieces = split_trajectories(make_batch(ids=[[7, 7, 8, 8], [3, 4, 4, 4]]))
        assert rows(pieces) == [[1, 2], [3, 4], [5], [6, 7, 8]]

    def test_three_batch_dimensions(self) -> None:
        done = torch.zeros(2, 2, 3)
        done[1, 0, 1] = 1
        pieces = split_trajectories(make_batch(ids=torch.arange(4).reshape(2, 2, 1).repeat(1, 1, 3), done=done))
        assert rows(pieces) == [[1, 2, 3], [4, 5, 6], [7, 8], [9], [10, 11, 12]]

    def test_a_cut_without_done_is_a_cut(self) -> None:
        """After a `reset()` or a restart the id changes and nothing is done."""
        assert rows(split_trajectories(make_batch(ids=[1, 1, 2, 2], done=[0, 0, 0, 0]))) == [[1, 2], [3, 4]]

    def test_a_done_in_the_middle_of_one_id_is_a_cut(self) -> None:
        """Soft truncations, side by side: the id goes on."""
        assert rows(split_trajectories(make_batch(ids=[1, 1, 1, 1], done=[0, 1, 0, 0]))) == [[1, 2], [3, 4]]

    def test_without_done_the_ids_decide(self) -> None:
        """FAULTS 25."""
        assert rows(split_trajectories(make_batch(ids=[[1, 1, 2], [3, 3, 3]]))) == [[1, 2], [3], [4, 5, 6]]

    def test_without_ids_done_decides(self) -> None:
        assert rows(split_trajectories(make_batch(done=[[0, 1, 0], [1, 0, 1]]))) == [[1, 2], [3], [4], [5, 6]]

    def test_the_same_id_in_two_lanes_is_two_pieces(self) -> None:
        assert rows(split_trajectories(make_batch(ids=[[1, 1], [1, 1]]))) == [[1, 2], [3, 4]]

    def test_done_without_its_last_dimension(self) -> None:
        batch = TensorDict({"x": torch.tensor([1, 2, 3]), "next": {"done": torch.tensor([True, False, False])}}, [3])
        assert rows(split_trajectories(batch)) == [[1], [2, 3]]

    def test_large_ids_are_not_rounded(self) -> None:
        """Ids are (worker << 40) | counter; floats would take neighbours for equal."""
        ids = [(1 << 60) + 1, (1 << 60) + 2]
        assert split_trajectories(make_batch(ids=ids))["collector", "traj_ids"].tolist() == [[ids[0]], [ids[1]]]

    def test_150_frames_of_episodes_of_50_are_three_pieces(self) -> None:
        t = torch.arange(150)
        pieces = split_trajectories(make_batch(ids=t // 50, done=t % 50 == 49))
        assert pieces.batch_size == (3, 50)
        assert pieces["collector", "mask"].all()

    @pytest.mark.parametrize("cut", [1, 4, 7])
    def test_cutting_the_batch_elsewhere_changes_no_flag(self, cut: int) -> None:
        """Where a batch ends is not part of the data: done stands where the episode ended, and nowhere else."""
        whole = make_batch(ids=[0, 0, 0, 0, 1, 1, 1, 1], done=[0, 0, 0, 1, 0, 0, 0, 1])
        flags = []
        for part in (whole[:cut], whole[cut:]):
            pieces = split_trajectories(part)
            flags += pieces["next", "done"][..., 0][pieces["collector", "mask"]].tolist()
        assert flags == [False, False, False, True, False, False, False, True]


class TestFragments:
    def test_an_episode_of_20_in_pieces_of_8(self) -> None:
        pieces = split_trajectories(make_batch(ids=torch.full((20,), 7)), fragment_len=8)
        assert pieces.batch_size == (3, 8)
        assert pieces["collector", "mask"].sum(-1).tolist() == [8, 8, 4]
        assert rows(pieces) == [[*range(1, 9)], [*range(9, 17)], [*range(17, 21)]]

    def test_no_piece_crosses_an_episode_a_cut_or_a_lane(self) -> None:
        batch = make_batch(ids=[[1, 1, 1, 1, 2, 2], [3, 3, 3, 3, 3, 3]], done=[[0, 0, 1, 0, 0, 0], [0] * 6])
        assert rows(split_trajectories(batch, fragment_len=2)) == [
            *([1, 2], [3], [4], [5, 6]),
            *([7, 8], [9, 10], [11, 12]),
        ]

    def test_all_are_padded_to_it(self) -> None:
        pieces = split_trajectories(make_batch(ids=[1, 2, 2]), fragment_len=5)
        assert pieces["x"].tolist() == [[1, 0, 0, 0, 0], [2, 3, 0, 0, 0]]
        assert split_trajectories(make_batch(ids=[]), fragment_len=5).batch_size == (0, 5)

    def test_frames_that_are_left_out_do_not_count(self) -> None:
        batch = make_batch(ids=[1, 1, 9, 1, 1], mask=[1, 1, 0, 1, 1])
        assert rows(split_trajectories(batch, fragment_len=3)) == [[1, 2, 4], [5]]

    @pytest.mark.parametrize("length", [0, -1, 2.0, True, "8"])
    def test_refused(self, length: Any) -> None:
        with pytest.raises(OptionError, match="fragment_len"):
            split_trajectories(make_batch(ids=[1]), fragment_len=length)


class TestNested:
    def test_pieces_have_their_own_lengths(self) -> None:
        batch = make_batch(ids=[[5, 5, 5, 9], [7, 7, 7, 7]], done=[[0, 0, 1, 0], [0, 1, 0, 0]])
        batch["deep", "image"] = torch.arange(48.0).reshape(2, 4, 2, 3)
        pieces = split_trajectories(batch, as_nested=True)
        assert pieces.batch_size == pieces["deep"].batch_size == (4,)
        assert ("collector", "mask") not in pieces.keys(True)
        assert [x.tolist() for x in pieces["x"].unbind()] == [[1, 2, 3], [4], [5, 6], [7, 8]]
        assert [d.flatten().tolist() for d in pieces["next", "done"].unbind()] == [
            *([False, False, True], [False], [False, True], [False, False])
        ]
        assert pieces["deep", "image"].layout == torch.jagged
        assert torch.equal(pieces["deep", "image"].unbind()[3], batch["deep", "image"][1, 2:])
        assert pieces["next", "done"].dtype == torch.bool
        assert pieces["x"].dtype == torch.int64

    def test_they_can_be_computed_with_together(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["w"] = torch.tensor([0.5, 1.0, 2.0])
        pieces = split_trajectories(batch, as_nested=torch.jagged)
        assert [y.tolist() for y in (pieces["w"] * pieces["x"]).unbind()] == [[0.5, 2], [6]]

    def test_padded_they_are_the_padded_ones(self) -> None:
        batch = make_batch(ids=[[1, 1, 2, 3, 3, 3], [7, 7, 7, 7, 7, 7]])
        nested, padded = (split_trajectories(batch, as_nested=nested, fragment_len=4) for nested in (True, False))
        assert torch.equal(nested["x"].to_padded_tensor(0), padded["x"])

    def test_rows_that_are_not_valid_are_left_out(self) -> None:
        batch = make_batch(ids=[[1, 9, 1], [2, 2, 3]], mask=[[1, 0, 1], [1, 1, 0]])
        assert [x.tolist() for x in split_trajectories(batch, as_nested=True)["x"].unbind()] == [[1, 3], [4, 5]]

    @pytest.mark.parametrize("mask", [None, torch.zeros(0, dtype=torch.bool)])
    def test_no_frame(self, mask: Any) -> None:
        pieces = split_trajectories(make_batch(ids=torch.zeros(0, dtype=torch.long), mask=mask), as_nested=True)
        assert pieces.batch_size == (0,)
        assert not pieces["x"].unbind()

    def test_text(self) -> None:
        """A list a piece; one text for all stays one."""
        batch = make_batch(ids=[1, 1, 2])
        batch["said"] = NonTensorStack("a", "b", "c")
        batch["task"] = NonTensorData("walk", batch_size=[3])
        pieces = split_trajectories(batch, as_nested=True)
        assert pieces.get("said").tolist() == [["a", "b"], ["c"]]
        assert pieces["task"] == "walk"

    def test_agents_of_like_shapes(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["agents"] = TensorDict({"x": torch.arange(6).reshape(3, 2)}, [3, 2])
        batch["stacked"] = lazy_stack([TensorDict({"x": torch.arange(3) + i}, [3]) for i in (0, 10)], 1)
        pieces = split_trajectories(batch, as_nested=True)
        assert [x.tolist() for x in pieces["agents", "x"].unbind()] == [[[0, 1], [2, 3]], [[4, 5]]]
        assert [x.tolist() for x in pieces["stacked", "x"].unbind()] == [[[0, 10], [1, 11]], [[2, 12]]]

    def test_agents_of_unlike_shapes_cannot_be_nested(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["agents"] = lazy_stack([TensorDict({"o": torch.ones(3, width)}, [3]) for width in (2, 4)], 1)
        with pytest.raises(OptionError, match=r"as_nested .*'o'"):
            split_trajectories(batch, as_nested=True)

    def test_lanes_of_unlike_shapes_cannot_be_nested(self) -> None:
        with pytest.raises(OptionError, match=r"as_nested .*'o'"):
            split_trajectories(unlike_lanes(), as_nested=True)

    def test_it_shares_nothing(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        pieces = split_trajectories(batch, as_nested=True)
        batch.zero_()
        assert pieces["x"].values().tolist() == [1, 2, 3]

    def test_gradients_flow(self) -> None:
        batch = make_batch(ids=[1, 2, 2])
        batch["p"] = torch.ones(3, requires_grad=True)
        (split_trajectories(batch, as_nested=True)["p"] * 2).values().sum().backward()
        assert batch["p"].grad.tolist() == [2, 2, 2]

    @pytest.mark.parametrize("layout", [torch.strided, 1, None, "jagged"])
    def test_refused(self, layout: Any) -> None:
        with pytest.raises(OptionError, match="as_nested"):
            split_trajectories(make_batch(ids=[1]), as_nested=layout)


class TestMaskKey:
    @pytest.mark.parametrize("key", ["real", ("collector", "real"), ("new", "level", "real")])
    def test_the_mask_stands_there(self, key: Any) -> None:
        pieces = split_trajectories(make_batch(ids=[1, 1, 2]), mask_key=key)
        assert pieces[key].tolist() == [[True, True], [True, False]]
        assert ("collector", "mask") not in pieces.keys(True)

    def test_both_masks_of_a_batch_are_kept_to(self) -> None:
        batch = make_batch(ids=[1, 1, 1, 2], mask=[1, 1, 0, 1])
        batch["real"] = torch.tensor([False, True, True, True])
        pieces = split_trajectories(batch, mask_key="real")
        assert rows(pieces) == [[2], [4]]
        assert torch.equal(pieces["real"], pieces["collector", "mask"])

    def test_what_was_split_can_be_split_again(self) -> None:
        once = split_trajectories(make_batch(ids=[[1, 1, 2], [3, 4, 4]]), mask_key="real")
        twice = split_trajectories(once, mask_key="real")
        assert (once == twice).all()

    @pytest.mark.parametrize("key", [3, (), ("a", 3), ["a"]])
    def test_no_key(self, key: Any) -> None:
        with pytest.raises(OptionError, match="mask_key"):
            split_trajectories(make_batch(ids=[1]), mask_key=key)

    def test_no_place_for_it(self) -> None:
        with pytest.raises(OptionError, match="below 'x'"):
            split_trajectories(make_batch(ids=[1]), mask_key=("x", "mask"))

    @pytest.mark.parametrize("key", ["x", "collector", "image"])
    def test_something_else_is_there(self, key: str) -> None:
        batch = make_batch(ids=[1, 1])
        batch["image"] = torch.zeros(2, 3, dtype=torch.bool)
        with pytest.raises(InvalidBatchError, match=key):
            split_trajectories(batch, mask_key=key)


class TestMaskedRows:
    def test_rows_that_are_not_valid_are_left_out(self) -> None:
        batch = make_batch(ids=[[1, 1, 1, 1], [2, 2, 3, 3]], mask=[[1, 1, 0, 0], [1, 1, 1, 0]])
        pieces = split_trajectories(batch)
        assert rows(pieces) == [[1, 2], [5, 6], [7]]
        assert pieces["collector", "mask"].sum() == 5

    def test_a_gap_in_an_episode_does_not_cut_it(self) -> None:
        """A pre-empted rollout and the next one of the same lane, joined in time: one episode."""
        assert rows(split_trajectories(make_batch(ids=[1, 1, 0, 0, 1, 2], mask=[1, 1, 0, 0, 1, 1]))) == [[1, 2, 5], [6]]

    def test_what_stands_in_a_gap_does_not_count(self) -> None:
        batch = make_batch(ids=[1, 9, 1], done=[0, 1, 0], mask=[1, 0, 1])
        assert rows(split_trajectories(batch)) == [[1, 3]]

    def test_no_valid_row(self) -> None:
        pieces = split_trajectories(make_batch(ids=[[1, 1], [2, 2]], mask=torch.zeros(2, 2)))
        assert pieces.batch_size == (0, 0)
        assert pieces["x"].shape == (0, 0)
        assert pieces["collector", "mask"].dtype == torch.bool

    def test_no_frame(self) -> None:
        assert split_trajectories(make_batch(ids=torch.zeros(2, 0, dtype=torch.long))).batch_size == (0, 0)

    def test_a_lane_without_valid_rows_gives_no_piece(self) -> None:
        assert rows(split_trajectories(make_batch(ids=[[1, 1], [2, 2]], mask=[[0, 0], [1, 1]]))) == [[3, 4]]


class TestContent:
    def test_nan_does_not_leak_into_padding(self) -> None:
        batch = make_batch(ids=[1, 2, 2])
        batch["nan"] = torch.full((3, 2), torch.nan)
        pieces = split_trajectories(batch)
        assert torch.equal(pieces["nan"].isnan().all(-1), pieces["collector", "mask"])
        assert (pieces["nan"][0, 1] == 0).all()

    @pytest.mark.parametrize(
        "dtype",
        [torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int64, torch.float32, torch.float64, torch.bfloat16],
    )
    @pytest.mark.parametrize("mask", [None, [1, 1, 0, 1]], ids=["", "masked"])
    def test_dtypes_stay(self, dtype: torch.dtype, mask: Any) -> None:
        batch = make_batch(ids=[1, 2, 2, 2] if mask else [1, 2, 2], mask=mask)
        batch["v"] = torch.tensor([1, 0, 1, 1] if mask else [1, 0, 1]).to(dtype)
        value = split_trajectories(batch)["v"]
        assert value.dtype == dtype
        assert value.to(torch.int64).tolist() == [[1, 0], [0, 1]]

    def test_nested_keys_and_feature_dimensions(self) -> None:
        batch = make_batch(ids=[[1, 2, 2], [3, 3, 3]])
        image = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
        batch["next", "deep", "image"] = image
        pieces = split_trajectories(batch)
        assert pieces["next", "deep"].batch_size == (3, 3)
        assert pieces["next", "deep"].names == [None, "time"]
        assert torch.equal(pieces["next", "deep", "image"][1, :2], image[0, 1:])
        assert torch.equal(pieces["next", "deep", "image"][2], image[1])
        assert not pieces["next", "deep", "image"][0, 1:].any()

    def test_permuted_and_strided_tensors(self) -> None:
        """FAULTS 25."""
        dense = make_batch(ids=[[1, 1, 2], [3, 3, 3]], done=[[0, 1, 0], [0, 0, 0]])
        dense["image"] = torch.randn(2, 3, 4, 5)
        time_major = dense.apply(lambda value: value.transpose(0, 1).contiguous(), batch_size=[3, 2])
        permuted = time_major.apply(lambda value: value.transpose(0, 1), batch_size=[2, 3])
        strided = dense.apply(lambda value: value.repeat_interleave(2, 1)[:, ::2], batch_size=[2, 3])
        assert not permuted["image"].is_contiguous()
        assert not strided["image"].is_contiguous()
        expected = split_trajectories(dense)
        assert (split_trajectories(permuted) == expected).all()
        assert (split_trajectories(strided) == expected).all()

    def test_expanded_tensors(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["one"] = torch.ones(1).expand(3)
        assert split_trajectories(batch)["one"].tolist() == [[1, 1], [1, 0]]

    def test_a_lazy_stack_of_lanes(self) -> None:
        dense = make_batch(ids=[[1, 1, 2], [3, 4, 4]])
        pieces = split_trajectories(lazy_stack([dense[0].clone(), dense[1].clone()]))
        assert rows(pieces) == [[1, 2], [3], [4], [5, 6]]

    def test_what_is_no_tensor_stays(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["task"] = NonTensorData("walk", batch_size=[3])
        assert split_trajectories(batch).get("task").tolist() == [["walk"] * 2] * 2

    def test_what_is_told_once_for_all_is_told_once(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["task"] = MetaData("walk", batch_size=[3])
        for nested, size in ((False, (2, 2)), (True, (2,))):
            task = split_trajectories(batch, as_nested=nested).get("task")
            assert (type(task), task.data, task.batch_size) == (MetaData, "walk", size)

    def test_text_by_the_frame(self) -> None:
        batch = make_batch(ids=[[1, 2, 2], [3, 3, 4]])
        batch["said"] = lazy_stack([NonTensorStack("a", "b", "c"), NonTensorStack("d", "e", "f")])
        pieces = split_trajectories(batch)
        assert pieces.get("said").tolist() == [["a", None], ["b", "c"], ["d", "e"], ["f", None]]

    def test_text_of_no_frame(self) -> None:
        batch = make_batch(ids=[1, 1], mask=[0, 0])
        batch["said"] = NonTensorStack("a", "b")
        assert split_trajectories(batch).get("said").tolist() == []

    def test_more_batch_dimensions_below(self) -> None:
        batch = make_batch(ids=[[1, 2, 2], [3, 3, 4]])
        batch["agents"] = TensorDict({"o": torch.arange(48).reshape(2, 3, 4, 2)}, [2, 3, 4], names=[None, "time", "n"])
        pieces = split_trajectories(batch)["agents"]
        assert pieces.batch_size == (4, 2, 4)
        assert pieces.names == [None, "time", "n"]
        assert torch.equal(pieces["o"][1], batch["agents", "o"][0, 1:])
        assert not pieces["o"][0, 1].any()

    @pytest.mark.parametrize("lanes", [(), (2,)])
    def test_agents_of_unlike_shapes(self, lanes: tuple[int, ...]) -> None:
        batch = make_batch(ids=torch.tensor([1, 2, 2]).expand(*lanes, 3))
        parts = [TensorDict({"o": torch.rand(*lanes, 3, width)}, [*lanes, 3]) for width in (2, 4)]
        batch["agents"] = lazy_stack(parts, -1)
        pieces = split_trajectories(batch)["agents"]
        assert pieces.batch_size == (2 * len(parts[0][..., 0].reshape(-1)), 2, 2)
        for part, moved in zip(parts, pieces.unbind(-1), strict=True):
            assert torch.equal(moved["o"][1], part["o"].reshape(-1, 3, part["o"].shape[-1])[0, 1:])
            assert not moved["o"][0, 1].any()

    def test_lanes_of_unlike_shapes(self) -> None:
        """A stack of pieces of unlike shapes; padding has the shape of its piece."""
        batch = unlike_lanes()
        before = batch.clone()
        pieces = split_trajectories(batch)
        assert isinstance(pieces, LazyStackedTensorDict)
        assert rows(pieces) == [[1, 2], [3], [4, 5, 6]]
        assert [tuple(piece["o"].shape) for piece in pieces.unbind(0)] == [(3, 2), (3, 2), (3, 4)]
        assert not pieces[1]["o"][1:].any()
        pieces[2][0]["o"].zero_()
        assert (batch == before).all()

    def test_frames_of_unlike_shapes(self) -> None:
        frames = [TensorDict({"o": torch.full((width,), width)}, []) for width in (1, 2, 3)]
        batch = lazy_stack(frames).update(make_batch(ids=[1, 2, 2]))
        pieces = split_trajectories(batch)
        assert [[frame["o"].tolist() for frame in piece.unbind(0)] for piece in pieces.unbind(0)] == [
            [[1], [0]],
            [[2, 2], [3, 3, 3]],
        ]

    def test_a_tensorclass(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["point"] = Point(torch.tensor([1.0, 2.0, 3.0]), "metres", batch_size=[3])
        point = split_trajectories(batch)["point"]
        assert isinstance(point, Point)
        assert point.x.tolist() == [[1, 2], [3, 0]]
        assert point.unit == "metres"

    def test_what_has_no_batch_dimensions(self) -> None:
        batch = make_batch(ids=[1, 1, 2])
        batch["scale"] = UnbatchedTensor(torch.ones(5))
        for nested in (True, False):
            assert split_trajectories(batch, as_nested=nested)["scale"].tolist() == [1] * 5

    def test_collected_episodes_stay_whole(self) -> None:
        with Collector(lambda: Tagged(length=9, random_length=True), frames_per_batch=90, num_envs=3) as collector:
            batch = collector.next()
        pieces = split_trajectories(batch, fragment_len=4)
        mask = pieces["collector", "mask"]
        assert mask.sum() == 90
        for piece, real in zip(pieces["observation"], mask, strict=True):
            t = piece[real][:, 2]
            assert (piece[real][:, 1] == piece[0, 1]).all()
            assert torch.equal(t, t[0] + torch.arange(len(t)))
            assert t[0] % 4 == 0

    def test_another_prefix(self) -> None:
        batch = make_batch(ids=[1, 1, 2], prefix="mine")
        pieces = split_trajectories(batch, prefix="mine")
        assert pieces["mine", "mask"].tolist() == [[True, True], [True, False]]
        assert "collector" not in pieces

    def test_gradients_flow_to_real_frames_only(self) -> None:
        batch = make_batch(ids=[1, 2, 2])
        batch["p"] = torch.ones(3, requires_grad=True)
        split_trajectories(batch)["p"].mul(2).sum().backward()
        assert batch["p"].grad.tolist() == [2, 2, 2]


@tensorclass
class Point:
    x: torch.Tensor
    unit: str


def unlike_lanes() -> LazyStackedTensorDict:
    """Two lanes of three frames, of observations of another length."""
    dense = make_batch(ids=[[1, 1, 2], [3, 3, 3]])
    lanes = [dense[i].clone().set("o", torch.ones(3, width)) for i, width in enumerate((2, 4))]
    return lazy_stack(lanes)


class TestPurity:
    @pytest.mark.parametrize("ids", [[1, 1, 1], [1, 2, 2]], ids=["one piece", "two pieces"])
    def test_input_and_output_share_nothing(self, ids: list[int]) -> None:
        batch = make_batch(ids=ids, done=[0, 0, 0], mask=[1, 1, 1])
        before = batch.clone()
        pieces = split_trajectories(batch)
        kept = pieces.clone()
        assert (batch == before).all()
        assert set(batch.keys(True, True)) == set(before.keys(True, True))
        batch.zero_()
        assert (pieces == kept).all()
        batch.update(before.clone())
        pieces.zero_()
        assert (batch == before).all()

    def test_no_mask_is_put_into_the_input(self) -> None:
        batch = make_batch(ids=[1, 1])
        split_trajectories(batch)
        assert ("collector", "mask") not in batch.keys(True)

    def test_a_locked_batch(self) -> None:
        pieces = split_trajectories(make_batch(ids=[1, 2]).lock_())
        pieces["more"] = torch.zeros(2, 1)

    def test_a_memory_mapped_batch_is_only_read(self, tmp_path: Any) -> None:
        batch = make_batch(ids=[1, 1, 2]).memmap(tmp_path)
        pieces = split_trajectories(batch)
        pieces.zero_()
        assert TensorDict.load_memmap(tmp_path)["x"].tolist() == [1, 2, 3]


class TestRefusals:
    def test_an_id_that_comes_back(self) -> None:
        batch = make_batch(ids=[[1, 1, 1, 1], [7, 7, 8, 7]])
        with pytest.raises(InvalidBatchError, match=r"trajectory id 7 comes back in lane 1: it begins at t=0 .* t=3"):
            split_trajectories(batch)

    def test_an_id_that_comes_back_in_one_lane_of_many(self) -> None:
        ids = torch.tensor([4, 5, 5]).repeat(100, 1)
        assert len(split_trajectories(make_batch(ids=ids))) == 200
        ids[60, 2] = 4
        with pytest.raises(InvalidBatchError, match=r"id 4 comes back in lane 60: it begins at t=0 .* again at t=2"):
            split_trajectories(make_batch(ids=ids))

    def test_an_id_that_comes_back_in_the_only_lane(self) -> None:
        with pytest.raises(InvalidBatchError, match="trajectory id 3 comes back in the only lane"):
            split_trajectories(make_batch(ids=[3, 3, 5, 3]))

    def test_an_id_that_comes_back_under_three_dimensions(self) -> None:
        ids = torch.zeros(2, 2, 3, dtype=torch.long)
        ids[1, 0] = torch.tensor([4, 5, 4])
        with pytest.raises(InvalidBatchError, match=r"trajectory id 4 comes back in lane \(1, 0\)"):
            split_trajectories(make_batch(ids=ids))

    def test_slices_of_one_id_side_by_side(self) -> None:
        """FAULTS 23, [A, A, B, A]: A twice side by side is one piece; A again is refused, and named."""
        slices = [make_batch(ids=[traj] * 2) for traj in (5, 5, 8, 5, 8)]
        assert rows(split_trajectories(torch.cat(slices[:3]))) == [[1, 2, 1, 2], [1, 2]]
        with pytest.raises(InvalidBatchError, match=r"id 5 .* only lane: it begins at t=0 .* again at t=6"):
            split_trajectories(torch.cat(slices))

    def test_a_mask_that_is_none(self) -> None:
        batch = make_batch(ids=[1, 1])
        batch["collector", "mask"] = torch.tensor([0.5, 1])
        with pytest.raises(InvalidBatchError, match=r"torch.bool.*torch.float32"):
            split_trajectories(batch)

    def test_neither_ids_nor_done(self) -> None:
        with pytest.raises(InvalidBatchError, match="neither"):
            split_trajectories(TensorDict({"x": torch.zeros(3)}, [3]))

    def test_no_time(self) -> None:
        with pytest.raises(InvalidBatchError, match="time last"):
            split_trajectories(TensorDict({"next": {"done": torch.tensor([True])}}, []))

    def test_time_first(self) -> None:
        batch = make_batch(ids=[[1, 1], [2, 2]])
        batch.names = ["time", None]
        with pytest.raises(InvalidBatchError, match="time as the last"):
            split_trajectories(batch)

    def test_more_than_one_done_a_frame(self) -> None:
        batch = TensorDict({"next": {"done": torch.zeros(3, 2, dtype=torch.bool)}}, [3])
        with pytest.raises(InvalidBatchError, match="one value a frame"):
            split_trajectories(batch)


def plain_loop(batch: TensorDict) -> list[list[int]]:
    """The same, one frame at a time."""
    flat = batch.reshape(-1, batch.batch_size[-1]) if batch.batch_dims > 1 else batch.unsqueeze(0)
    keys = flat.keys(True)
    pieces: list[list[int]] = []
    for lane in range(flat.batch_size[0]):
        last = None
        for t in range(flat.batch_size[1]):
            frame = flat[lane, t]
            if ("collector", "mask") in keys and not frame["collector", "mask"]:
                continue
            traj_id = frame["collector", "traj_ids"].item() if ("collector", "traj_ids") in keys else 0
            if last is None or last[0] != traj_id or last[1]:
                pieces.append([])
            pieces[-1].append(frame["x"].item())
            last = traj_id, ("next", "done") in keys and frame["next", "done"].item()
    return pieces


@st.composite
def batches(draw: st.DrawFn) -> TensorDict:
    shape = (*draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.integers(1, 7)))
    count = torch.Size(shape).numel()
    flags = st.lists(st.booleans(), min_size=count, max_size=count)
    with_ids, with_done = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    ids = 40 - torch.tensor(draw(flags)).reshape(shape).cumsum(-1) if with_ids else None
    done = torch.tensor(draw(flags)).reshape(shape) if with_done else None
    mask = torch.tensor(draw(flags)).reshape(shape) if draw(st.booleans()) else None
    batch = make_batch(ids=ids, done=done, mask=mask)
    return batch.apply(lambda value: value.mT.contiguous().mT if value.ndim > 1 else value)


@settings(deadline=None)
@given(batch=batches(), longest=st.none() | st.integers(1, 4))
def test_equals_a_plain_loop(batch: TensorDict, longest: int | None) -> None:
    expected = plain_loop(batch)
    if longest is not None:
        expected = [piece[i : i + longest] for piece in expected for i in range(0, len(piece), longest)]
    pieces = split_trajectories(batch, fragment_len=longest)
    assert rows(pieces) == expected
    assert pieces.batch_size == (len(expected), longest or max(map(len, expected), default=0))
    for piece, mask in zip(pieces["x"], pieces["collector", "mask"], strict=True):
        assert mask.tolist() == sorted(mask.tolist(), reverse=True), "padding comes last"
        assert not piece[~mask].any()
    nested = split_trajectories(batch, fragment_len=longest, as_nested=True)
    assert [x.tolist() for x in nested["x"].unbind()] == expected
