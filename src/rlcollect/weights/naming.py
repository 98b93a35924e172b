"""Weights by name: what a policy computes with, in whatever form the user has it, and whether it fits.

Names are those of a state dict where nothing is compiled. Knows modules, TensorDicts and state dicts; neither processes
nor environments.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import nn
from torch.nn.parameter import is_lazy

from rlcollect.errors import PolicyError

__all__ = [
    "copy_into",
    "is_expanded",
    "load_weights",
    "misfit",
    "module_of",
    "plain",
    "tensors_of",
    "weights_by_name",
    "weights_of",
]

EXTRA = "_extra_state"  # how the names of what `get_extra_state` gives end


def module_of(policy: Any) -> nn.Module | None:
    """The module whose weights a policy computes with: itself, the one it is a method of, or that was compiled."""
    policy = _uncompiled(policy)
    owner: Any = policy if isinstance(policy, nn.Module) else getattr(policy, "__self__", None)
    while isinstance(getattr(owner, "_orig_mod", None), nn.Module):
        owner = owner._orig_mod
    return owner if isinstance(owner, nn.Module) else None


def _uncompiled(policy: Any) -> Any:
    """What a compiled function was made of."""
    while (made_of := getattr(policy, "_torchdynamo_orig_callable", None)) is not None:
        is_bound = hasattr(made_of, "__self__")
        policy = made_of if is_bound else getattr(made_of, "__wrapped__", made_of)  # torch wraps its own methods first
    return policy


def plain(name: str) -> str:
    """A name as it is where nothing is compiled."""
    return name.replace("_orig_mod.", "")


def weights_of(policy: Any) -> dict[str, Any] | None:
    """The weights that a policy computes with, under the names they have where nothing is compiled; None: no module."""
    module = module_of(policy)
    return None if module is None else {plain(name): value for name, value in module.state_dict().items()}


def is_expanded(tensor: torch.Tensor) -> bool:
    """Whether several elements share one place in memory; such a tensor cannot be written to in place, by anyone."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def load_weights(module: nn.Module, weights: Mapping[str, Any], *, strict: bool) -> None:
    """Loads what `weights_of` gave, whatever is compiled in the module.

    Raises:
        RuntimeError: torch's, for weights that do not fit.
    """
    names = {plain(name): name for name in module.state_dict()}
    module.load_state_dict({names.get(name, name): value for name, value in weights.items()}, strict=strict)


def _tensors_of(state: Mapping[Any, Any]) -> dict[str, Any]:
    """What a state dict holds beside a module's extra state, which is none of its weights."""
    return {plain(str(name)): value for name, value in state.items() if not str(name).endswith(EXTRA)}


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by name, each once: what is tied has its first name."""
    return {plain(name): tensor for name, tensor in (*module.named_parameters(), *module.named_buffers())}


def weights_by_name(given: Any) -> dict[str, torch.Tensor]:
    """Weights as the user has them, under the names of a state dict: of a module, a TensorDict, or such a dict.

    Raises:
        PolicyError: they are none of these.
    """
    module = module_of(given)
    if module is not None:
        return _tensors_of({**module.state_dict(), **dict(module.named_buffers())})
    if isinstance(given, TensorDictBase):
        given = given.flatten_keys(".")
    if not isinstance(given, Mapping | TensorDictBase):
        raise PolicyError(
            f"Weights come as a module, a TensorDict of parameters or a state dict; {type(given).__name__} came."
        )
    named = _tensors_of(dict(given.items()))
    if wrong := [name for name, value in named.items() if not isinstance(value, torch.Tensor)]:
        raise PolicyError(f"Weights are tensors; {wrong[0]!r} is {named[wrong[0]]!r}.")
    return named


def misfit(given: Mapping[str, torch.Tensor], needed: Mapping[str, Any], known: Collection[str]) -> str:
    """The first difference between weights that were given and those that are needed, in words; empty: there is none.

    Shapes are to be equal. Values are cast to the dtype of those that are needed, as far as `torch.can_cast` says so:
    from one precision to another, and from integers to floats; not from floats to integers.

    Args:
        given: by name.
        needed: tensors, or leaves: shapes and dtypes of those that are needed, by name.
        known: names that may be given too.
    """
    for name, like in needed.items():
        if name not in given:
            return f"{name!r} is lacking"
        tensor = given[name]
        if is_lazy(tensor):
            return f"{name!r} has no values yet: call the lazy module once"
        if tensor.is_meta:
            return f"{name!r} is on the meta device, and has no values"
        if tuple(tensor.shape) != tuple(like.shape):
            return f"{name!r} has shape {list(tensor.shape)}, and should have {list(like.shape)}"
        if not torch.can_cast(tensor.dtype, like.dtype):
            return f"{name!r} is of {tensor.dtype}, which cannot be cast to {like.dtype} without loss of its kind"
    unknown = [name for name in given if name not in needed and name not in known]
    return f"{unknown[0]!r} is none of its weights" if unknown else ""


def copy_into(tensors: Mapping[str, torch.Tensor], weights: Mapping[str, torch.Tensor]) -> None:
    """Copies weights into tensors of the same names, in place, as far as there are some."""
    with torch.no_grad():
        for name, tensor in tensors.items():
            if name in weights:
                tensor.copy_(weights[name])
