"""Who chooses the actions: the policy, chance, or (for one step, when a warm-up is shared unevenly) both.

Each actor is given the memory of a rollout, prepares views of it for a window of steps, and then only calls and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.envs.calls import MASK
from rlcollect.envs.sampling import ActionSampler, MaskedActionSampler
from rlcollect.errors import PolicyError
from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Arrays, Key, Leaf, has_numpy, show_key
from rlcollect.rollout.plan import Plan, version_of

__all__ = ["MixedActor", "PolicyActor", "RandomActor"]

Array = np.ndarray[Any, Any]


class PolicyActor:
    """Calls a planned policy, and records what it writes.

    Args:
        plan: how the policy is called.
        num_action_leaves: how many of its outputs make up the action.
        batched: whether the policy sees a dimension of lanes.
    """

    def __init__(self, plan: Plan, num_action_leaves: int, *, batched: bool) -> None:
        self.observations: Sequence[tuple[torch.Tensor, ...]] = []
        self.call = plan.call
        self._plan = plan
        self._batched = batched
        self._num_action_leaves = num_action_leaves
        self._stores = [_store(leaf, example) for leaf, example in zip(plan.outputs, plan.examples, strict=True)]
        self._actions: list[tuple[Array, ...]] = []
        self._shown: list[tuple[torch.Tensor, int]] = []
        self._memory: RolloutMemory | None = None
        self._rows: list[tuple[Any, ...]] = []
        plain_action = len(plan.outputs) == 1 and self._stores[0] is _store_tensor
        self.write: Callable[[int, Any], Sequence[Array]] = self._write_action if plain_action else self._write_all

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout."""
        self._plan.refresh()
        self.call = self._plan.call
        self._memory = memory
        tensors = [memory.tensors[key] for key in self._plan.in_keys]
        self._shown = [(tensor, version_of(tensor)) for tensor in tensors]

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows."""
        assert self._memory is not None
        time = 1 if self._batched else 0
        views = [tensor.narrow(time, start, stop - start).unbind(time) for tensor, _ in self._shown]
        self.observations = list(zip(*views, strict=True)) if views else [()] * (stop - start)
        outputs, count = self._plan.outputs, self._num_action_leaves
        if all(leaf.key in self._memory.arrays for leaf in outputs):
            self._rows = self._memory.arrays.once(("outputs", start, stop), lambda: self._views(start, stop))
        else:  # rows that are tensors are the batch's own
            self._rows = self._views(start, stop)
        self._actions = self._rows if len(outputs) == count else [row[:count] for row in self._rows]

    def _views(self, start: int, stop: int) -> list[tuple[Any, ...]]:
        assert self._memory is not None
        rows = [_rows(self._memory, leaf, start, stop) for leaf in self._plan.outputs]
        return list(zip(*rows, strict=True))

    def finish(self) -> None:
        """Called after a rollout.

        Raises:
            PolicyError: the policy has changed the observations it was shown.
        """
        if any(version_of(tensor) != version for tensor, version in self._shown):
            raise PolicyError(
                "The policy changed its observation in place, and with it the record. It did not at construction, "
                "where it would have been given copies. Let it work on a copy."
            )

    def release(self) -> None:
        """Lets the memory go."""
        self.observations, self._rows, self._actions, self._shown, self._memory = [], [], [], [], None

    def _write_action(self, t: int, output: torch.Tensor) -> Sequence[Array]:
        rows = self._actions[t]
        rows[0][...] = output.numpy()
        return rows

    def _write_all(self, t: int, outputs: Any) -> Sequence[Array]:
        values = outputs if len(self._stores) > 1 else (outputs,)
        for store, row, value in zip(self._stores, self._rows[t], values, strict=True):
            store(row, value)
        return self._actions[t]

    def check(self, outputs: Any) -> None:
        """Holds outputs against the first ones there were: storing them would hide another shape by broadcasting.

        Raises:
            PolicyError: another number of outputs, or another shape.
        """
        values = outputs if len(self._stores) > 1 else (outputs,)
        if len(values) != len(self._stores):
            raise PolicyError(f"The policy gave {len(self._stores)} outputs at first, and now {len(values)}.")
        for leaf, first, value in zip(self._plan.outputs, self._plan.examples, values, strict=True):
            if np.shape(value) != np.shape(first):
                raise PolicyError(
                    f"{show_key(leaf.key)} had shape {list(np.shape(first))} at first, and now {list(np.shape(value))}."
                )

    def blank(self, memory: RolloutMemory) -> None:
        """Zeros for every output: what stands where the policy was not asked."""
        for leaf in self._plan.outputs:
            memory.tensors[leaf.key].zero_()

    def blank_extras(self, t: int, lanes: Array) -> None:
        """Zeros in row t of these lanes for every output but the action."""
        where = np.flatnonzero(lanes).tolist()
        for row in self._rows[t][self._num_action_leaves :]:
            row[where] = 0


class RandomActor:
    """Draws actions: a whole rollout's at once, or step by step where an "action_mask" tells what is allowed.

    Args:
        make_sampler: from a generator to a source of actions.
        generator: where its randomness comes from.
        action_keys: the keys the actions are stored under.
    """

    def __init__(
        self,
        make_sampler: Callable[[np.random.Generator], ActionSampler | MaskedActionSampler],
        generator: np.random.Generator,
        action_keys: Sequence[Key],
    ) -> None:
        self.observations: Sequence[tuple[Any, ...]] = []
        self.sampler = make_sampler(generator)
        self.call: Callable[..., Any] = tuple
        self._make_sampler = make_sampler
        self._action_keys = action_keys
        self._rows: list[tuple[Array, ...]] = []
        self._arrays: list[Array] = []
        self._once = Arrays({}, remember=False).once
        self._masks: Array = np.zeros(0)
        self._times: list[tuple[int]] = []
        self.write: Callable[[int, Any], Sequence[Array]] = self._write_drawn

    def reseed(self, generator: np.random.Generator) -> None:
        """Begins another stream."""
        self.sampler = self._make_sampler(generator)

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout."""
        self._once = memory.arrays.once
        self._arrays = [memory.arrays[key].swapaxes(0, 1) for key in self._action_keys]
        if isinstance(self.sampler, MaskedActionSampler):
            self._masks = memory.arrays[MASK].swapaxes(0, 1)

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: draws their actions, or makes views of their masks."""
        self._rows = self._once(
            ("random", start, stop), lambda: list(zip(*(array[start:stop] for array in self._arrays), strict=True))
        )
        if isinstance(self.sampler, MaskedActionSampler):
            self.observations = [(mask,) for mask in self._masks[start:stop]]
            self.call, self.write = self.sampler.sample, self._write_drawn
        else:
            for array, drawn in zip(self._arrays, self.sampler.peek(stop - start, skip=start), strict=True):
                array[start:stop] = drawn
            if len(self._times) < stop - start:
                self._times = [(t,) for t in range(stop - start)]
            self.observations = self._times
            self.call, self.write = self._rows.__getitem__, _written

    def check(self, outputs: Any) -> None:
        """Chance is always right."""

    def finish(self, made: int) -> None:
        """So many steps were random; lets the memory go."""
        if isinstance(self.sampler, ActionSampler):
            self.sampler.advance(made)
        self.observations, self._rows, self.call, self._arrays = [], [], tuple, []
        self._masks, self._once = np.zeros(0), Arrays({}, remember=False).once

    def _write_drawn(self, t: int, outputs: Sequence[Array]) -> Sequence[Array]:
        rows = self._rows[t]
        for row, value in zip(rows, outputs, strict=True):
            row[...] = value
        return rows


def _written(_t: int, rows: Sequence[Array]) -> Sequence[Array]:
    """Actions that stand in their rows already."""
    return rows


class MixedActor:
    """The policy, with random actions in some lanes: both are asked, and the random ones win there.

    Args:
        policy: asked for all lanes.
        random: asked for all lanes.
        lanes: bool `[N]`, where the action is random.
    """

    def __init__(self, policy: PolicyActor, random: RandomActor, lanes: Array) -> None:
        self.observations = list(zip(policy.observations, random.observations, strict=True))
        self._policy = policy
        self._random = random
        self._lanes = lanes

    def call(self, observation: tuple[Any, ...], masks: tuple[Any, ...]) -> tuple[Any, list[Array]]:
        """What the policy wrote, and what chance would do."""
        drawn = [value.copy() for value in self._random.call(*masks)]  # they may stand where the policy writes
        return self._policy.call(*observation), drawn

    def check(self, outputs: tuple[Any, list[Array]]) -> None:
        """Holds the policy's outputs against its first ones."""
        self._policy.check(outputs[0])

    def write(self, t: int, outputs: tuple[Any, list[Array]]) -> Sequence[Array]:
        """Stores both in row t; what else the policy wrote is zero where the action is random."""
        chosen, drawn = outputs
        rows = self._policy.write(t, chosen)
        for row, value in zip(rows, drawn, strict=True):
            row[self._lanes] = value[self._lanes]
        self._policy.blank_extras(t, self._lanes)
        return rows


def _rows(memory: RolloutMemory, leaf: Leaf, start: int, stop: int) -> Sequence[Any]:
    """For each step, where an output goes: an array `[N, *shape]`, or a tensor where numpy lacks the dtype."""
    if leaf.key in memory.arrays:
        return list(memory.arrays[leaf.key][:, start:stop].swapaxes(0, 1))
    tensor = memory.tensors[leaf.key]
    time = tensor.ndim - len(leaf.shape) - 1
    return tensor.narrow(time, start, stop - start).unbind(time)


def _store(leaf: Leaf, example: Any) -> Callable[[Any, Any], None]:
    """How an output of this kind gets into its row."""
    if not isinstance(example, torch.Tensor):
        return _store_array
    if not (has_numpy(leaf.dtype) and has_numpy(example.dtype)) or example.device.type != "cpu":
        return _store_by_torch
    return _store_detached if example.requires_grad else _store_tensor


def _store_tensor(row: Array, value: torch.Tensor) -> None:
    row[...] = value.numpy()


def _store_detached(row: Array, value: torch.Tensor) -> None:
    row[...] = value.detach().numpy()


def _store_array(row: Array, value: Any) -> None:
    row[...] = value


def _store_by_torch(row: Any, value: torch.Tensor) -> None:
    (row if isinstance(row, torch.Tensor) else torch.from_numpy(row)).copy_(value)
