"""The weights that a worker's policy computes with, and how new ones get into them."""

from __future__ import annotations

from typing import Any

import torch

from rlcollect.layout import Leaf
from rlcollect.rollout.policy.held import held_modules, held_names, held_tensors
from rlcollect.rollout.policy.intake import Acting, receive, weights_of
from rlcollect.weights.versioned import Taker
from rlcollect.workers.messages import AttachWeights

__all__ = ["Taking"]


class Taking:
    """Takes new weights for a policy: its own, and those of modules that a function holds.

    Args:
        acting: the policy.
        is_alone: whether it is a copy for this worker alone; else nothing is taken, and nothing looked for.
    """

    def __init__(self, acting: Acting, *, is_alone: bool) -> None:
        self._acting = acting
        self._held = held_modules(acting.policy) if is_alone else {}
        self._taker: Taker | None = None

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [*self._acting.tensors(), *held_tensors(self._held)]

    @property
    def leaves(self) -> tuple[Leaf, ...]:
        """What can be taken, by name."""
        return tuple(Leaf((name,), tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors())

    @property
    def names(self) -> tuple[str, ...]:
        """All names that a state dict of the policy has."""
        return (*(weights_of(self._acting.policy) or ()), *held_names(self._held))

    def attach(self, command: AttachWeights, buffer: Any) -> None:
        """Weights come from this memory from now on."""
        self._taker = Taker(buffer, command.leaves)

    def take(self) -> int | None:
        """Takes the newest weights; their version. None: there are no newer ones."""
        if self._taker is None or (taken := self._taker.take()) is None:
            return None
        version, weights = taken
        receive(self._tensors(), {key[0]: tensor for key, tensor in weights.items()})
        return version

    def skip(self) -> None:
        """What was published so far is not wanted."""
        if self._taker is not None:
            self._taker.skip()
