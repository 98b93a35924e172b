"""`shared`: how shared memory is divided among workers, and batches are made of it."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from rlcollect.layout import Leaf
from rlcollect.memory.shared import Groups, MemberSource, SlotPlan

LEAVES = (
    Leaf(("observation",), (2,), torch.float32),
    Leaf(("action",), (), torch.int64),
    Leaf(("next", "done"), (1,), torch.bool),
    Leaf(("half",), (3,), torch.bfloat16),
    Leaf(("_scratch",), (2,), torch.float32),
    Leaf(("next", "_hidden"), (), torch.int32),
)
PUBLIC = {("observation",), ("action",), ("next", "done"), ("half",)}
LEADS = {"single": ((), None), "one lane": ((1,), 1), "three lanes": ((3,), 3), "two dimensions": ((2, 3), 6)}
leads = pytest.mark.parametrize(("lead", "lanes"), LEADS.values(), ids=LEADS)


def plan_of(lead=(3,), lanes=3, *, groups=2, members=2, steps=4, leaves=LEAVES):
    return SlotPlan(leaves, groups=groups, members=members, lead=lead, num_lanes=lanes, steps=steps)


def memory(plan):
    return np.zeros(plan.nbytes, np.uint8)


def groups_of(plan, buffer, *, reuse=True, device=None):
    return Groups(plan, buffer, reuse=reuse, device=device)


def owned(groups, group, steps):
    """The tensors of a copy of a group."""
    return groups.owned(groups.bytes_of(group, None), steps, steps, groups.stacked)[0]


def shown(groups, group, steps):
    """The tensors of a group as they are."""
    return groups.shown(groups.bytes_of(group, None), steps)


def numbered(shape, dtype, start):
    values = torch.arange(start, start + max(1, int(np.prod(shape)))).reshape(shape)
    return values % 2 == 0 if dtype is torch.bool else (values % 256).to(dtype)


def filled(plan, buffer, group, steps):
    """A group in which every member wrote what is its own; what each wrote, as its batch, by hand."""
    written = []
    for member in range(plan.members):
        source = MemberSource(plan, buffer, member)
        source.choose(group)
        slot = source.take(steps)
        flat = () if plan.num_lanes is None else (plan.num_lanes,)
        batch = {}
        for place, leaf in enumerate(plan.leaves):
            start = 100_000 * group + 10_000 * member + 1000 * place
            value = numbered((*flat, steps, *leaf.shape), leaf.dtype, start)
            slot.tensors[leaf.key].copy_(value)
            batch[leaf.key] = value.reshape(*plan.lead, steps, *leaf.shape)
        written.append(batch)
    return written


def public(batch):
    return {
        key if isinstance(key, tuple) else (key,): value
        for key, value in batch.items(include_nested=True, leaves_only=True)
    }


def expect(batch, expected, shape):
    """The batch holds these tensors, and nothing private."""
    assert isinstance(batch, TensorDict)
    assert batch.batch_size == torch.Size(shape)
    assert batch.names == [*[None] * (len(shape) - 1), "time"]
    came = public(batch)
    assert came.keys() == PUBLIC
    for key in PUBLIC:
        assert came[key].dtype == expected[key].dtype
        assert torch.equal(came[key], expected[key]), key


class TestSlotPlan:
    @leads
    def test_bytes(self, lead, lanes):
        plan = plan_of(lead, lanes, groups=3)
        frames = 2 * (lanes or 1) * 4
        assert plan.nbytes == 3 * plan.group_bytes
        assert plan.group_bytes == plan.bytes_of(4) >= frames * (8 + 8 + 1 + 6 + 8 + 4)
        assert plan.bytes_of(1) <= plan.bytes_of(3) <= plan.group_bytes

    def test_groups_lie_side_by_side(self):
        plan = plan_of(groups=3)
        buffer = memory(plan)
        for number in range(3):
            plan.group(buffer, number)[:] = number + 1
        assert np.unique(buffer, return_counts=True)[1].tolist() == [plan.group_bytes] * 3

    @leads
    @pytest.mark.parametrize("steps", [1, 3, 4])
    def test_carving(self, lead, lanes, steps):
        plan = plan_of(lead, lanes)
        tensors = plan.carve(plan.group(memory(plan), 1), steps)
        front = (2, steps) if lanes is None else (2, lanes, steps)
        assert {key: (tuple(tensor.shape), tensor.dtype) for key, tensor in tensors.items()} == {
            leaf.key: ((*front, *leaf.shape), leaf.dtype) for leaf in LEAVES
        }

    def test_no_two_tensors_share_a_byte(self):
        plan = plan_of()
        buffer = memory(plan)
        for group in range(2):
            for tensor in plan.carve(plan.group(buffer, group), 4).values():
                assert not tensor.any()
                tensor.view(torch.uint8).fill_(1)
        assert buffer.max() == 1


class TestMemberSource:
    @leads
    def test_writes_in_place(self, lead, lanes):
        plan = plan_of(lead, lanes)
        buffer = memory(plan)
        written = {group: filled(plan, buffer, group, 4) for group in range(2)}
        for group in range(2):
            tensors = shown(groups_of(plan, buffer), group, 4)
            for member in range(2):
                for key, value in written[group][member].items():
                    assert torch.equal(tensors[key][member].reshape(value.shape), value)

    @leads
    def test_arrays_are_the_same_memory(self, lead, lanes):
        plan = plan_of(lead, lanes)
        slot = MemberSource(plan, memory(plan), 1).take(4)
        assert slot.arrays.keys() == {leaf.key for leaf in LEAVES if leaf.dtype is not torch.bfloat16}
        array = slot.arrays["observation",]
        assert array.shape == (lanes or 1, 4, 2)
        array[0, 2] = 5
        tensor = slot.tensors["observation",]
        assert (tensor if lanes is None else tensor[0])[2].tolist() == [5, 5]
        assert int(tensor.count_nonzero()) == 2

    @leads
    @pytest.mark.parametrize("made", [4, 2])
    def test_its_batch(self, lead, lanes, made):
        plan = plan_of(lead, lanes)
        buffer = memory(plan)
        written = filled(plan, buffer, 0, 4)[1]
        source = MemberSource(plan, buffer, 1)
        batch = source.take(4).batch(made)
        expect(batch, {key: value.narrow(len(lead), 0, made) for key, value in written.items()}, (*lead, made))

    def test_the_same_slot_and_batch_each_time(self):
        plan = plan_of()
        source = MemberSource(plan, memory(plan), 0)
        slot = source.take(4)
        assert source.take(4) is slot
        assert slot.batch(4) is slot.batch(4)
        short = slot.batch(2)
        assert short.batch_size == (3, 2)
        assert slot.batch(4).batch_size == (3, 4)

    def test_each_group_has_its_own(self):
        plan = plan_of()
        source = MemberSource(plan, memory(plan), 0)
        first = source.take(4)
        source.choose(1)
        second = source.take(4)
        second.tensors["action",].fill_(3)
        assert not first.tensors["action",].any()
        source.choose(0)
        assert source.take(4) is first

    def test_shorter_rollouts_use_the_beginning(self):
        plan = plan_of()
        buffer = memory(plan)
        for steps in (1, 2, 3):
            buffer[:] = 0
            filled(plan, buffer, 1, steps)
            group = plan.group(buffer, 1)
            assert group[: plan.bytes_of(steps)].any()
            assert not group[plan.bytes_of(steps) :].any()
            assert not plan.group(buffer, 0).any()

    def test_shorter_ones_in_between(self):
        plan = plan_of()
        source = MemberSource(plan, memory(plan), 0)
        full = source.take(4)
        assert [source.take(steps).tensors["action",].shape for steps in (1, 3, 1)] == [(3, 1), (3, 3), (3, 1)]
        assert source.take(4) is full


class TestStacked:
    @leads
    @pytest.mark.parametrize(("steps", "made"), [(4, 4), (4, 3), (2, 2), (2, 1)])
    def test_members_come_first(self, lead, lanes, steps, made):
        plan = plan_of(lead, lanes, members=3)
        buffer = memory(plan)
        written = filled(plan, buffer, 1, steps)
        groups = groups_of(plan, buffer)
        expected = {
            key: torch.stack([each[key] for each in written]).narrow(1 + len(lead), 0, made) for key in written[0]
        }
        for tensors in (shown(groups, 1, steps), owned(groups, 1, steps)):
            expect(groups.stacked(tensors, made), expected, (3, *lead, made))

    def test_of_one_member(self):
        plan = plan_of(members=1)
        buffer = memory(plan)
        written = filled(plan, buffer, 0, 4)[0]
        groups = groups_of(plan, buffer)
        expect(groups.stacked(owned(groups, 0, 4), 4), {key: value[None] for key, value in written.items()}, (1, 3, 4))


class TestSingle:
    @leads
    @pytest.mark.parametrize(("steps", "made"), [(4, 4), (4, 3), (2, 2), (2, 1)])
    def test_is_the_batch_of_its_member(self, lead, lanes, steps, made):
        plan = plan_of(lead, lanes, members=1)
        buffer = memory(plan)
        written = filled(plan, buffer, 1, steps)[0]
        groups = groups_of(plan, buffer)
        expected = {key: value.narrow(len(lead), 0, made) for key, value in written.items()}
        for tensors in (shown(groups, 1, steps), owned(groups, 1, steps)):
            expect(groups.single(tensors, made), expected, (*lead, made))


class TestJoined:
    @pytest.mark.parametrize(("steps", "made"), [(4, 4), (4, 3), (2, 2), (2, 1)])
    @pytest.mark.parametrize(
        ("lead", "lanes", "dim"),
        [((), None, 0), ((1,), 1, 0), ((3,), 3, 0), ((3,), 3, 1), ((2, 3), 6, 0), ((2, 3), 6, 1), ((2, 3), 6, 2)],
    )
    def test_one_after_the_other(self, lead, lanes, dim, steps, made):
        plan = plan_of(lead, lanes, members=3)
        buffer = memory(plan)
        written = filled(plan, buffer, 1, steps)
        groups = groups_of(plan, buffer)
        cut = [{key: value.narrow(len(lead), 0, made) for key, value in each.items()} for each in written]
        expected = {key: torch.cat([each[key] for each in cut], dim) for key in cut[0]}
        shape = [*lead, made]
        shape[dim] *= 3
        for tensors in (shown(groups, 1, steps), owned(groups, 1, steps)):
            expect(groups.joined(tensors, [made] * len(tensors[next(iter(tensors))]), dim), expected, shape)


def batch_of(groups, group=0):
    return groups.stacked(owned(groups, group, 4), 4)


class TestOwnership:
    def make(self, **options):
        plan = plan_of()
        buffer = memory(plan)
        written = filled(plan, buffer, 0, 4)
        return groups_of(plan, buffer, **options), buffer, torch.stack([each["observation",] for each in written])

    def test_what_is_owned_does_not_change(self):
        groups, buffer, expected = self.make()
        batch = batch_of(groups)
        buffer[:] = 255
        assert torch.equal(batch["observation"], expected)

    def test_what_is_shown_does(self):
        groups, buffer, expected = self.make()
        batch = groups.stacked(shown(groups, 0, 4), 4)
        assert torch.equal(batch["observation"], expected)
        buffer[:] = 0
        assert not batch["observation"].any()

    def test_what_the_user_writes_stays_with_the_user(self):
        groups, buffer, _ = self.make()
        before = buffer.copy()
        batch_of(groups)["observation"].fill_(-1)
        assert np.array_equal(buffer, before)

    def test_memory_that_was_let_go_is_used_again(self):
        groups, _, _ = self.make()
        seen = set()
        for _ in range(10):
            batch = batch_of(groups)
            seen.add(batch["observation"].data_ptr())
            del batch
        assert len(seen) == 1

    def test_memory_that_is_held_is_not(self):
        groups, buffer, expected = self.make()
        held = [batch_of(groups) for _ in range(5)]
        assert len({batch["observation"].data_ptr() for batch in held}) == 5
        buffer[:] = 0
        assert all(torch.equal(batch["observation"], expected) for batch in held)

    @pytest.mark.parametrize("part", ["view", "array", "row of another key"])
    def test_any_part_holds_it(self, part):
        groups, buffer, _ = self.make()
        batch = batch_of(groups)
        take = {
            "view": lambda batch: batch["observation"][1:],
            "array": lambda batch: batch["observation"].numpy()[1:],
            "row of another key": lambda batch: batch["action"][1, 0],
        }[part]
        kept = take(batch)
        before = torch.as_tensor(kept).clone()
        del batch
        gc.collect()
        buffer[:] = 0
        again = [batch_of(groups) for _ in range(4)]
        assert torch.equal(torch.as_tensor(kept), before)
        assert before.any()
        assert not any(batch["observation"].any() for batch in again)

    def test_shorter_ones_share_it(self):
        groups, _, _ = self.make()
        first = groups.stacked(owned(groups, 0, 4), 4)["observation"].data_ptr()
        gc.collect()
        assert groups.stacked(owned(groups, 0, 2), 2)["observation"].data_ptr() == first

    def test_forgotten_memory_stays_valid(self):
        groups, buffer, expected = self.make()
        batch = batch_of(groups)
        groups.forget()
        buffer[:] = 0
        assert torch.equal(batch["observation"], expected)
        assert batch_of(groups)["observation"].data_ptr() != batch["observation"].data_ptr()

    def test_without_reuse(self):
        groups, buffer, expected = self.make(reuse=False)
        batch = batch_of(groups)
        buffer[:] = 0
        batch_of(groups)
        assert torch.equal(batch["observation"], expected)

    @pytest.mark.parametrize("device", [None, torch.device("cpu")])
    def test_the_device_that_batches_say(self, device):
        groups, _, _ = self.make(device=device)
        assert batch_of(groups).device == device
        assert (
            groups.joined(
                shown(groups, 0, 4), [4] * len(shown(groups, 0, 4)[next(iter(shown(groups, 0, 4)))]), 0
            ).device
            == device
        )
