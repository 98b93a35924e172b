"""How weights are taken out of a model, and put into one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.errors import OptionError
from rlcollect.weights.form import WeightsForm
from rlcollect.weights.naming import copy_into, module_of, tensors_of, weights_by_name, weights_of

__all__ = ["WeightStrategy"]


class WeightStrategy:
    """What of a model travels, and in which form.

    Args:
        extract_as: "tensordict": all parameters and buffers, as a nested TensorDict. "state_dict": what its
            `state_dict()` holds (buffers that are not persistent are not in it, and stay each receiver's own).

    Raises:
        OptionError: it is neither.
    """

    def __init__(self, extract_as: Literal["tensordict", "state_dict"] = "tensordict") -> None:
        if extract_as not in ("tensordict", "state_dict"):
            raise OptionError(f'extract_as must be "tensordict" or "state_dict", not {extract_as!r}.')
        self.extract_as = extract_as

    def __repr__(self) -> str:
        return f"WeightStrategy({self.extract_as!r})"

    def extract_weights(self, source: Any) -> TensorDictBase | dict[str, torch.Tensor]:
        """The weights of a module, or weights as they are, in the form of this strategy. They share memory with it.

        Args:
            source: a module, a TensorDict (nested or flat) or a state dict.

        Raises:
            PolicyError: it is none of these.
        """
        named = {name: tensor.detach() for name, tensor in self.named(source).items()}
        if self.extract_as == "state_dict":
            return named
        return TensorDict(named, batch_size=[]).unflatten_keys(".")

    def named(self, source: Any) -> dict[str, torch.Tensor]:
        """The same, flat, by the names that a state dict has.

        Raises:
            PolicyError: see `extract_weights`.
        """
        if self.extract_as == "state_dict" and module_of(source) is not None:
            return weights_by_name(weights_of(source))
        return weights_by_name(source)

    def apply_weights(self, destination: Any, weights: TensorDictBase | Mapping[str, Any]) -> None:
        """Copies weights into a module, or into a TensorDict of them, in place: its tensors stay the objects they are.

        Args:
            destination: a module, or a TensorDict.
            weights: in any form that `extract_weights` takes.

        Raises:
            PolicyError: they do not fit; names the first difference. Nothing was copied.
        """
        module = module_of(destination)
        if module is not None:
            form, tensors = WeightsForm.of_module(module), tensors_of(module)
        else:
            tensors = weights_by_name(destination)
            form = WeightsForm.of(tensors, names=tensors)
        copy_into(tensors, form.fitted(self.named(weights), "what they are for"))
