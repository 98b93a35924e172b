"""Random actions: for a warm-up, or for good, or in some lanes beside a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.envs.calls import MASK
from rlcollect.envs.sampling import ActionSampler, DrivenSampler, MaskedActionSampler
from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Leaf
from rlcollect.rollout.actors import PolicyActor
from rlcollect.rollout.storing import put, rows_of

__all__ = ["MixedActor", "RandomActor"]

Array = np.ndarray[Any, Any]
Sampler = ActionSampler | MaskedActionSampler | DrivenSampler


class RandomActor:
    """Draws actions: a whole rollout's at once, or step by step where an "action_mask" tells what is allowed.

    Args:
        make_sampler: from a generator to a source of actions.
        generator: where its randomness comes from.
        leaves: how the actions are stored.
    """

    def __init__(
        self,
        make_sampler: Callable[[np.random.Generator], Sampler],
        generator: np.random.Generator,
        leaves: Sequence[Leaf],
    ) -> None:
        self.observations: Sequence[tuple[Any, ...]] = []
        self.sampler = make_sampler(generator)
        self.call: Callable[..., Any] = tuple
        self._make_sampler = make_sampler
        self._leaves = leaves
        self._rows: list[tuple[Any, ...]] = []
        self._memory: RolloutMemory | None = None
        self._times: list[tuple[int]] = []
        self.write: Callable[[int, Any], Sequence[Any]] = self._write_drawn

    def reseed(self, generator: np.random.Generator) -> None:
        """Begins another stream."""
        self.sampler = self._make_sampler(generator)

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout."""
        self._memory = memory

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: draws their actions, or makes views of their masks."""
        memory = self._memory
        assert memory is not None
        self._rows = memory.arrays.once(
            ("random", start, stop),
            lambda: list(zip(*(rows_of(memory, leaf, start, stop) for leaf in self._leaves), strict=True)),
        )
        if isinstance(self.sampler, ActionSampler):
            self._draw_ahead(self.sampler, memory, start, stop)
            return
        self.observations = [()] * (stop - start)
        self.call, self.write = self.sampler.sample, self._write_drawn
        if isinstance(self.sampler, MaskedActionSampler) and MASK in memory.arrays:
            self.observations = [(mask,) for mask in memory.arrays[MASK].swapaxes(0, 1)[start:stop]]
        elif isinstance(self.sampler, MaskedActionSampler):
            sample = self.sampler.sample
            self.observations = [(mask,) for mask in memory.tensors[MASK][:, start:stop].unbind(1)]
            self.call = lambda mask: sample(mask.cpu().numpy())

    def _draw_ahead(self, sampler: ActionSampler, memory: RolloutMemory, start: int, stop: int) -> None:
        for leaf, drawn in zip(self._leaves, sampler.peek(stop - start, skip=start), strict=True):
            if leaf.key in memory.arrays:
                memory.arrays[leaf.key].swapaxes(0, 1)[start:stop] = drawn
            else:
                time = memory.tensors[leaf.key].ndim - len(leaf.shape) - 1
                rows = torch.from_numpy(drawn.swapaxes(0, 1) if time else drawn[:, 0])
                memory.tensors[leaf.key].narrow(time, start, stop - start).copy_(rows)
        if len(self._times) < stop - start:
            self._times = [(t,) for t in range(stop - start)]
        self.observations = self._times[: stop - start]
        self.call, self.write = self._rows.__getitem__, _written

    def check(self, outputs: Any) -> None:
        """Chance is always right."""

    def finish(self, made: int) -> None:
        """So many steps were random."""
        if isinstance(self.sampler, ActionSampler):
            self.sampler.advance(made)

    def release(self) -> None:
        """Lets the memory go."""
        self.observations, self._rows, self.call, self._memory = [], [], tuple, None

    def _write_drawn(self, t: int, outputs: Sequence[Any]) -> Sequence[Any]:
        rows = self._rows[t]
        for row, value in zip(rows, outputs, strict=True):
            put(row, ..., value)
        return rows


def _written(_t: int, rows: Sequence[Array]) -> Sequence[Array]:
    """Actions that stand in their rows already."""
    return rows


class MixedActor:
    """The policy, with random actions in some lanes: both are asked, and the random ones win there.

    Attributes:
        lanes: bool `[N]`, where the action is random.

    Args:
        policy: asked for all lanes.
        random: asked for all lanes.
        lanes: as above.
    """

    def __init__(self, policy: PolicyActor, random: RandomActor, lanes: Array) -> None:
        self.observations = _Both(policy.observations, random.observations)
        self.lanes = lanes
        self._policy = policy
        self._random = random

    def call(self, observation: tuple[Any, ...], masks: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """What the policy wrote, and what chance would do."""
        drawn = [_copied(value) for value in self._random.call(*masks)]  # they may stand where the policy writes
        return self._policy.call(*observation), drawn

    def check(self, outputs: tuple[Any, list[Any]]) -> None:
        """Holds the policy's outputs against its first ones."""
        self._policy.check(outputs[0])

    def write(self, t: int, outputs: tuple[Any, list[Any]]) -> Sequence[Any]:
        """Stores both in row t; what else the policy wrote is zero where the action is random."""
        chosen, drawn = outputs
        self._policy.prove(chosen)
        rows = self._policy.store(t, chosen)
        self._policy.check_actions(chosen, ~self.lanes)
        for row, value in zip(rows, drawn, strict=True):
            put(
                row,
                self.lanes,
                value[torch.from_numpy(self.lanes)] if isinstance(value, torch.Tensor) else value[self.lanes],
            )
        self._policy.blank_extras(t, self.lanes)
        return rows


class _Both(Sequence[tuple[Any, ...]]):
    """Pairs of what two actors are shown."""

    def __init__(self, one: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]]) -> None:
        self._one = one
        self._other = other

    def __len__(self) -> int:
        return len(self._one)

    def __getitem__(self, t: Any) -> Any:
        return self._one[t], self._other[t]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()
