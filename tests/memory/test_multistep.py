"""`MultiStep`: a table worked out by hand, then against a plain loop on any batch, then on what is collected."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict, TensorDictBase, lazy_stack

from rlcollect import Collector, InvalidBatchError, MultiStep, OptionError, split_trajectories
from rlcollect.testing import Counter, Tagged, check_batch

NAN = float("nan")


def make_batch(reward: Any, *, done: Any = None, ids: Any = None, mask: Any = None) -> TensorDict:
    """A batch whose `("next", "x")` numbers its frames from 0 in memory order."""
    reward = torch.as_tensor(reward, dtype=torch.float32)
    size = reward.shape
    batch = TensorDict({"next": TensorDict({"reward": reward.unsqueeze(-1)}, size)}, size)
    batch["next", "x"] = torch.arange(size.numel()).reshape(size)
    if done is not None:
        batch["next", "done"] = torch.as_tensor(done).bool().unsqueeze(-1)
    if ids is not None:
        batch["collector", "traj_ids"] = torch.as_tensor(ids)
    if mask is not None:
        batch["collector", "mask"] = torch.as_tensor(mask).bool()
    return batch


def table(batch: TensorDictBase) -> tuple[list[Any], list[Any], list[Any]]:
    """Reward, what follows, and n."""
    return (
        batch["next", "reward"].squeeze(-1).tolist(),
        batch["next", "x"].tolist(),
        batch["steps_to_next_obs"].squeeze(-1).tolist(),
    )


class TestTable:
    """gamma = 1/2, three steps; frames 0 to 3 are an episode, 4 to 6 the beginning of another."""

    REWARD = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
    EXPECTED = (
        [1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8, 16 + 16 + 16, 32 + 32, 64],
        [2, 3, 3, 3, 6, 6, 6],
        [3, 3, 2, 1, 3, 2, 1],
    )

    def test_an_episode_ends(self) -> None:
        batch = make_batch(self.REWARD, done=[0, 0, 0, 1, 0, 0, 0])
        multi = MultiStep(0.5, 3)(batch)
        assert table(multi) == self.EXPECTED
        assert multi["steps_to_next_obs"].shape == (7, 1)
        assert multi["steps_to_next_obs"].dtype == torch.int64
        assert multi["next", "original_reward"].squeeze(-1).tolist() == [*self.REWARD]

    def test_an_episode_is_cut(self) -> None:
        assert table(MultiStep(0.5, 3)(make_batch(self.REWARD, ids=[7, 7, 7, 7, 3, 3, 3]))) == self.EXPECTED
        assert table(MultiStep(0.5, 3)(make_batch(self.REWARD, done=[0] * 7, ids=[7] * 4 + [3] * 3))) == self.EXPECTED

    def test_a_lane_ends(self) -> None:
        batch = make_batch([[1, 2, 4], [8, 16, 32]], done=torch.zeros(2, 3))
        assert table(MultiStep(0.5, 2)(batch)) == (
            [[2, 4, 4], [16, 32, 32]],
            [[1, 2, 2], [4, 5, 5]],
            [[2, 2, 1], [2, 2, 1]],
        )

    def test_rows_that_are_no_frames(self) -> None:
        """They end what stands before them, stay as they are, and nothing of them gets out."""
        batch = make_batch([1, 2, NAN, NAN, 4, 8], ids=[5] * 6, done=[0] * 6, mask=[1, 1, 0, 0, 1, 1])
        reward, following, steps = table(MultiStep(0.5, 3)(batch))
        assert reward[:2] + reward[4:] == [2, 2, 8, 8]
        assert torch.tensor(reward[2:4]).isnan().all()
        assert following == [1, 1, 2, 3, 5, 5]
        assert steps == [2, 1, 0, 0, 2, 1]

    def test_flags_are_those_of_the_last_step(self) -> None:
        batch = make_batch([0] * 5, done=[0, 0, 1, 0, 1])
        batch["next", "terminated"] = torch.tensor([0, 0, 1, 0, 0]).bool().unsqueeze(-1)
        batch["next", "truncated"] = torch.tensor([0, 0, 0, 0, 1]).bool().unsqueeze(-1)
        following = MultiStep(1.0, 2)(batch)["next"]
        assert following["done"].flatten().tolist() == [False, True, True, True, True]
        assert following["terminated"].flatten().tolist() == [False, True, True, False, False]
        assert following["truncated"].flatten().tolist() == [False, False, False, True, True]

    def test_one_step_is_the_batch_and_two_keys(self) -> None:
        batch = make_batch(self.REWARD, done=[0, 0, 0, 1, 0, 0, 0])
        multi = MultiStep(0.5, 1)(batch)
        assert (multi.pop("steps_to_next_obs") == 1).all()
        assert (multi["next"].pop("original_reward") == multi["next", "reward"]).all()
        assert (multi == batch).all()
        assert set(multi.keys(True)) == set(batch.keys(True))


class TestContent:
    def test_several_rewards(self) -> None:
        """Each by its key, of any floating type and shape."""
        batch = make_batch([1.0, 2.0, 4.0], done=[0, 1, 0])
        batch["next", "agents"] = TensorDict({"reward": torch.arange(12, dtype=torch.float64).reshape(3, 4, 1)}, [3, 4])
        batch["next", "bare"] = torch.tensor([1, 2, 4], dtype=torch.bfloat16)
        multi = MultiStep(0.5, 2, reward_keys=["bare", ("agents", "reward")])(batch)["next"]
        assert multi["bare"].tolist() == [2, 2, 4]
        assert multi["bare"].dtype == torch.bfloat16
        assert multi["agents", "reward"][..., 0].tolist() == [[2, 3.5, 5, 6.5], [4, 5, 6, 7], [8, 9, 10, 11]]
        assert multi["agents", "reward"].dtype == torch.float64
        assert multi["agents"].batch_size == (3, 4)
        assert (multi["agents", "original_reward"] == batch["next", "agents", "reward"]).all()
        assert (multi["original_bare"] == batch["next", "bare"]).all()
        assert multi["reward"].flatten().tolist() == [2, 2, 4], "not named, so it moves like all the rest"

    def test_hundreds_of_steps_are_summed_exactly(self) -> None:
        count, gamma = 400, 0.99
        reward = torch.rand(count, generator=torch.Generator().manual_seed(0))
        sums = MultiStep(gamma, 300)(make_batch(reward, done=[0] * count))["next", "reward"].flatten()
        discounts = gamma ** torch.arange(300, dtype=torch.float64)
        for t in (0, 50, 99, 100, 101, 398, 399):
            window = reward[t : t + 300].double()
            assert sums[t] == (window * discounts[: len(window)]).sum().float(), t

    def test_text_and_levels_move_too(self) -> None:
        batch = make_batch([[1, 2], [3, 4]], done=[[0, 0], [0, 0]])
        batch["next", "text"] = lazy_stack([NonTensorStack("a", "b"), NonTensorStack("c", "d")])
        batch["next", "info", "deep"] = torch.tensor([[1, 2], [3, 4]])
        following = MultiStep(1.0, 2)(batch)["next"]
        assert following["text"] == [["b", "b"], ["d", "d"]]
        assert following["info", "deep"].tolist() == [[2, 2], [4, 4]]

    @pytest.mark.parametrize("size", [(0,), (2, 0), (0, 3)])
    def test_no_frames(self, size: tuple[int, ...]) -> None:
        multi = MultiStep(0.5, 3)(make_batch(torch.zeros(size), done=torch.zeros(size)))
        assert multi.batch_size == size
        assert multi["steps_to_next_obs"].shape == (*size, 1)

    def test_a_lazy_stack_of_lanes(self) -> None:
        dense = make_batch([[1, 2, 4], [8, 16, 32]], done=[[0, 1, 0], [0, 0, 0]])
        stacked = MultiStep(0.5, 2)(lazy_stack([dense[0].clone(), dense[1].clone()]))
        assert table(stacked) == table(MultiStep(0.5, 2)(dense))

    def test_lanes_of_unlike_shapes(self) -> None:
        dense = make_batch([[1, 2, 4], [8, 16, 32]], done=[[0, 1, 0], [0, 0, 0]])
        lanes = [dense[i].clone() for i in (0, 1)]
        for lane, width in zip(lanes, (1, 2), strict=True):
            lane["next", "o"] = lane["next", "x"].unsqueeze(-1).repeat(1, width)
        batch = lazy_stack(lanes)
        before = batch.clone()
        multi = MultiStep(0.5, 2)(batch)
        assert table(multi) == table(MultiStep(0.5, 2)(dense))
        assert [lane["next", "o"].tolist() for lane in multi.unbind(0)] == [[[1], [1], [2]], [[4, 4], [5, 5], [5, 5]]]
        multi[1][0]["next"]["o"].zero_()
        assert (batch == before).all()
        assert set(batch.keys(True)) == set(before.keys(True))

    def test_gradients_flow(self) -> None:
        batch = make_batch([0, 0, 0], done=[0, 0, 0])
        reward = torch.ones(3, 1, requires_grad=True)
        batch["next", "reward"] = reward
        MultiStep(0.5, 2)(batch)["next", "reward"].sum().backward()
        assert reward.grad is not None
        assert reward.grad.flatten().tolist() == [1, 1.5, 1.5]

    def test_it_is_a_module(self) -> None:
        assert str(MultiStep(0.5, 3)) == "MultiStep(gamma=0.5, n_steps=3)"
        assert not MultiStep(0.5, 3).state_dict()


class TestPurity:
    @pytest.mark.parametrize("n_steps", [1, 2])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_the_batch_is_only_read(self, n_steps: int, dtype: torch.dtype) -> None:
        batch = make_batch([[1, 2, 4], [8, 16, 32]], done=[[0, 1, 0], [0, 0, 0]], mask=[[1, 1, 1], [1, 1, 0]])
        batch["next", "reward"] = batch["next", "reward"].to(dtype)
        before = batch.clone()
        multi = MultiStep(0.5, n_steps)(batch)
        multi["next"].zero_()
        del multi["next", "reward"]
        assert set(batch.keys(True)) == set(before.keys(True))
        assert (batch == before).all()

    def test_a_locked_batch(self) -> None:
        batch = make_batch([1, 2], done=[0, 0]).lock_()
        MultiStep(0.5, 2)(batch)["more"] = torch.zeros(2)
        assert batch.is_locked

    def test_a_memory_mapped_batch(self, tmp_path: Any) -> None:
        multi = MultiStep(0.5, 2)(make_batch([1, 2], done=[0, 0]).memmap(tmp_path))
        assert table(multi) == ([2, 2], [1, 1], [2, 1])
        assert TensorDict.load_memmap(tmp_path)["next", "reward"].flatten().tolist() == [1, 2]


class TestCollected:
    @pytest.mark.parametrize("options", [{}, {"set_truncated": True}], ids=["", "set_truncated"])
    @pytest.mark.parametrize("lanes", [None, 3])
    def test_what_follows_is_of_the_same_episode(self, lanes: int | None, options: Any) -> None:
        kept = []

        def keep(batch: TensorDictBase) -> TensorDictBase:
            check_batch(batch)
            kept.append((batch, batch.clone()))
            return batch

        steps = MultiStep(0.9, 3)
        with Collector(
            lambda: Tagged(length=7, random_length=True),
            frames_per_batch=60,
            total_frames=180,
            num_envs=lanes,
            postproc=[keep, steps],
            **options,
        ) as collector:
            collector.set_seed(0)
            batches = list(collector)
        assert len(batches) == 3
        for batch, (source, copy) in zip(batches, kept, strict=True):
            assert (source == copy).all(), "the batch was written to"
            (_, episode, t), (_, next_episode, next_t) = (
                batch["observation"].movedim(-1, 0),
                batch["next", "observation"].movedim(-1, 0),
            )
            n = batch["steps_to_next_obs"].squeeze(-1)
            assert (next_episode == episode).all()
            assert (next_t == t + n).all()
            assert (n == 3).any()
            ended_early = n[..., :-2] < 3
            assert batch["next", "done"][..., :-2, 0][ended_early].all()
            expected = sum(0.9**k * torch.where(n > k, t + k, 0) for k in range(3))
            torch.testing.assert_close(batch["next", "reward"].squeeze(-1), expected)

    @pytest.mark.parametrize("mask_key", [("collector", "mask"), "real"])
    def test_of_padded_trajectories_as_of_the_batch(self, mask_key: Any) -> None:
        with Collector(lambda: Tagged(length=6, random_length=True), frames_per_batch=60, num_envs=3) as collector:
            batch = collector.next()
        pieces = split_trajectories(batch, mask_key=mask_key)
        padded = MultiStep(0.9, 4, mask_key=mask_key)(pieces)
        assert (padded[pieces[mask_key]].exclude(mask_key) == MultiStep(0.9, 4)(batch).reshape(-1)).all()
        assert not padded[~pieces[mask_key]].any()

    def test_it_comes_after_split_trajectories(self) -> None:
        """Done stands on several rows of an episode then."""
        with pytest.raises(InvalidBatchError, match="first"):
            split_trajectories(MultiStep(0.9, 4)(make_batch([1, 2], done=[0, 0])))

    def test_with_split_trajs(self) -> None:
        with Collector(Counter(5), frames_per_batch=12, split_trajs=True, postproc=MultiStep(1.0, 2)) as collector:
            batch = collector.next()
        assert batch["steps_to_next_obs"].squeeze(-1).tolist() == [[2, 2, 2, 2, 1], [2, 2, 2, 2, 1], [2, 1, 0, 0, 0]]
        assert batch["next", "reward"].squeeze(-1).tolist() == [[1, 3, 5, 7, 4], [1, 3, 5, 7, 4], [1, 1, 0, 0, 0]]


class TestRefusals:
    @pytest.mark.parametrize("gamma", [0, -0.5, 1.1, NAN, True, "0.9", None, torch.ones(())])
    def test_gamma(self, gamma: Any) -> None:
        with pytest.raises(OptionError, match="gamma"):
            MultiStep(gamma, 3)

    @pytest.mark.parametrize("n_steps", [0, -1, 2.0, True, "3", None])
    def test_n_steps(self, n_steps: Any) -> None:
        with pytest.raises(OptionError, match="n_steps"):
            MultiStep(0.9, n_steps)

    @pytest.mark.parametrize("keys", ["reward", [], None, [3], [()], 3])
    def test_reward_keys(self, keys: Any) -> None:
        with pytest.raises(OptionError, match="reward_keys"):
            MultiStep(0.9, 3, reward_keys=keys)

    def test_mask_key(self) -> None:
        with pytest.raises(OptionError, match="mask_key"):
            MultiStep(0.9, 3, mask_key=3)  # type: ignore[arg-type]

    def test_no_reward(self) -> None:
        with pytest.raises(InvalidBatchError, match=r"\('next', 'reward'\).*NoneType"):
            MultiStep(0.9, 3)(TensorDict({"collector": {"traj_ids": torch.zeros(3)}}, [3]))

    def test_a_reward_of_whole_numbers(self) -> None:
        batch = TensorDict({"next": {"reward": torch.ones(3, dtype=torch.int64), "done": torch.zeros(3)}}, [3])
        with pytest.raises(InvalidBatchError, match="floating"):
            MultiStep(0.9, 3)(batch)

    def test_twice(self) -> None:
        steps = MultiStep(0.9, 3)
        with pytest.raises(InvalidBatchError, match="before"):
            steps(steps(make_batch([1, 2], done=[0, 0])))

    def test_time_first(self) -> None:
        batch = make_batch([[1, 2], [3, 4]], done=[[0, 0], [0, 0]])
        batch.names = ["time", None]
        with pytest.raises(InvalidBatchError, match="time as the last"):
            MultiStep(0.9, 3)(batch)


def plain_loop(batch: TensorDictBase, gamma: float, n_steps: int) -> list[tuple[float, int, int]]:
    """Reward, number of the frame whose next is taken, and n: the same, one frame at a time."""
    keys = batch.keys(True)
    flat = batch.reshape(-1, batch.batch_size[-1])
    length = flat.batch_size[1]
    found = []

    def real(lane: int, t: int) -> bool:
        return ("collector", "mask") not in keys or bool(flat["collector", "mask"][lane, t])

    def joined(lane: int, t: int) -> bool:
        ids = flat["collector", "traj_ids"][lane] if ("collector", "traj_ids") in keys else torch.zeros(length)
        ended = ("next", "done") in keys and bool(flat["next", "done"][lane, t])
        return t + 1 < length and real(lane, t + 1) and ids[t] == ids[t + 1] and not ended

    for lane in range(flat.batch_size[0]):
        for t in range(length):
            reward = flat["next", "reward"][lane, :, 0]
            if not real(lane, t):
                found.append((reward[t].item(), lane * length + t, 0))
                continue
            total, k = reward[t].item(), 0
            while k + 1 < n_steps and joined(lane, t + k):
                k += 1
                total += gamma**k * reward[t + k].item()
            found.append((total, lane * length + t + k, k + 1))
    return found


@st.composite
def batches(draw: st.DrawFn) -> TensorDict:
    size = (*draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.integers(1, 9)))
    count = torch.Size(size).numel()
    flags = st.lists(st.booleans(), min_size=count, max_size=count).map(lambda some: torch.tensor(some).reshape(size))
    rewards = st.lists(st.integers(-9, 9), min_size=count, max_size=count)
    with_ids, with_done = draw(st.sampled_from([(True, True), (True, False), (False, True)]))
    batch = make_batch(
        torch.tensor(draw(rewards)).reshape(size),
        ids=40 - draw(flags).cumsum(-1) if with_ids else None,
        done=draw(flags) if with_done else None,
        mask=draw(flags) if draw(st.booleans()) else None,
    )
    return batch.apply(lambda value: value.mT.contiguous().mT if value.ndim > 1 else value)


@settings(deadline=None)
@given(batch=batches(), gamma=st.sampled_from([0.5, 0.9, 1.0]), n_steps=st.integers(1, 12))
def test_equals_a_plain_loop(batch: TensorDict, gamma: float, n_steps: int) -> None:
    before = batch.clone()
    multi = MultiStep(gamma, n_steps)(batch)
    assert (batch == before).all()
    reward, source, steps = (torch.tensor(each) for each in zip(*plain_loop(batch, gamma, n_steps), strict=True))
    torch.testing.assert_close(multi["next", "reward"].flatten(), reward)
    assert multi["next", "x"].flatten().tolist() == source.tolist()
    assert multi["steps_to_next_obs"].flatten().tolist() == steps.tolist()
    assert (multi["next", "original_reward"] == before["next", "reward"]).all()
