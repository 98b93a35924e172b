"""The weights that a worker computes with, and how new ones get into them: the policy's, and those of other models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rlcollect.layout import Key
from rlcollect.rollout.policy.intake import Acting
from rlcollect.weights.ends import Receiver
from rlcollect.weights.form import WeightsForm, tied_names
from rlcollect.weights.held import held_modules, held_names, held_tensors
from rlcollect.weights.naming import is_expanded, module_of, tensors_of, weights_of
from rlcollect.workers.models import POLICY, common_form

__all__ = ["Taking"]


class Taking:
    """Takes new weights for a policy (its own, and those of modules that a function holds) and for other models.

    Args:
        acting: the policy.
        receiver: where they come from; None: from nowhere, and nothing is looked for.
    """

    def __init__(self, acting: Acting, receiver: Receiver | None) -> None:
        self._acting = acting
        self._receiver = receiver
        self._held = {} if receiver is None else held_modules(acting.policy)
        self._models: Mapping[str, Sequence[nn.Module]] = {}
        self._forms: Mapping[str, WeightsForm] = {}
        module = module_of(acting.policy)
        if module is not None and receiver is not None:
            _unexpand(module)
        self._lazy = [] if module is None else [name for name, each in tensors_of(module).items() if is_lazy(each)]

    def look_after(self, models: Mapping[str, Sequence[nn.Module]]) -> None:
        """These take weights too: modules by the path to them.

        Raises:
            PolicyError: those at the end of one path have other weights than each other.
        """
        self._models = models
        self._forms = {path: common_form(path, modules) for path, modules in models.items()}

    def _of_policy(self) -> dict[str, torch.Tensor]:
        return {**self._acting.tensors(), **held_tensors(self._held)}

    @property
    def forms(self) -> dict[str, WeightsForm]:
        """What can be taken, by model."""
        module = module_of(self._acting.policy)
        tensors = self._of_policy()
        policy = WeightsForm.of(
            tensors,
            kept=self._acting.own,
            names=[*(weights_of(self._acting.policy) or ()), *held_names(self._held)],
            tied=None if module is None else tied_names(module),
            lazy={name: tensors[name].detach().cpu().clone() for name in self._lazy if name in tensors},
        )
        return {POLICY: policy, **self._forms}

    def accept(self, content: Any, attached: Sequence[Any]) -> None:
        """A message of who sends weights."""
        assert self._receiver is not None
        self._receiver.accept(content, attached)

    def take(self) -> int | None:
        """Takes the newest weights; their version. None: there are no newer ones."""
        receiver = self._receiver
        if receiver is None or not receiver.is_behind():
            return None
        targets: dict[Key, list[torch.Tensor]] = {
            (POLICY, name): [tensor] for name, tensor in self._of_policy().items()
        }
        for model, modules in self._models.items():
            for module in modules:
                for name, tensor in tensors_of(module).items():
                    targets.setdefault((model, name), []).append(tensor)
        return receiver.take(targets)


def _unexpand(module: nn.Module) -> None:
    """Buffers whose elements share a place in memory get one each: nothing could be copied into them."""
    for part in module.modules():
        for name, buffer in part._buffers.items():
            if buffer is not None and not is_lazy(buffer) and is_expanded(buffer):
                part._buffers[name] = buffer.contiguous()
