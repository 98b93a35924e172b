"""TorchRL's parts of policies, told by the name of their `forward`: this package never imports TorchRL.

Q-value and exploration modules read and write a few keys of their TensorDict, and no more: their own code runs on a
stand-in that has just these, so the numbers are theirs whatever the release. A subclass with a `forward` of its own is
another part, and not known here. `make interop` holds each against TorchRL.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import nn

__all__ = ["is_safe_probabilistic", "kept_elsewhere", "stand_in_call"]

TORCHRL = "torchrl.modules.tensordict_module"
ON_STAND_INS = {("actors", "QValueModule"), ("exploration", "EGreedyModule"), ("exploration", "AdditiveGaussianModule")}


def _forwards_as(module: Any, place: str, name: str) -> bool:
    forward = getattr(type(module), "forward", None)
    told = getattr(forward, "__module__", ""), getattr(forward, "__qualname__", "")
    return told == (f"{TORCHRL}.{place}", f"{name}.forward")


def is_safe_probabilistic(module: Any) -> bool:
    """Whether it is a `SafeProbabilisticModule`, which draws and scores at once where its distribution can."""
    return _forwards_as(module, "probabilistic", "SafeProbabilisticModule")


class _StandIn:
    """As much of a TensorDict as these modules use."""

    __slots__ = ("_values", "shape")

    def __init__(self, values: dict[str, Any], shape: Sequence[int]) -> None:
        self._values = values
        self.shape = shape

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(key, default)

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    def update(self, values: Mapping[str, Any]) -> None:
        self._values.update(values)


def kept_elsewhere(module: Any, given: Collection[Any]) -> str | None:
    """Why a part cannot be used: what it remembers is kept, or first drawn, by TorchRL's environments.

    Args:
        module: any module.
        given: keys that the user gave an initial value of.
    """
    if _forwards_as(module, "actors", "MultiStepActorWrapper"):
        return (
            "MultiStepActorWrapper keeps its plan of actions in TorchRL's environments. Write the plan's state under "
            '("next", ...) in a module of your own, or act step by step'
        )
    if _is_called(module, "gSDEModule", "LazygSDEModule") and ("_eps_gSDE",) not in given:
        return (
            "the noise of gSDEModule is drawn by TorchRL's environments, for each episode. Draw it in a module of your "
            'own, or give one for all episodes, initial_policy_state={"_eps_gSDE": torch.randn(...)}, of one lane'
        )
    return None


def _is_called(module: Any, *names: str) -> bool:
    kind = type(module)
    return kind.__name__ in names and kind.__module__.startswith("torchrl.")


def stand_in_call(module: Any, lead: Sequence[int]) -> Callable[..., Any] | None:
    """What a known module does, from the values of its `in_keys` to those of its `out_keys`; None: it is not known.

    Args:
        module: any TensorDictModule.
        lead: the leading dimensions of what it is shown.
    """
    plain_call = type(module).__call__ is nn.Module.__call__
    known = plain_call and any(_forwards_as(module, *told) for told in ON_STAND_INS)
    reads, writes = list(module.in_keys), list(module.out_keys)
    if not known or not all(isinstance(key, str) for key in (*reads, *writes)):
        return None
    forward, shape = inspect.unwrap(type(module).forward), tuple(lead)

    def call(*values: Any) -> Any:
        stand_in = _StandIn(dict(zip(reads, values, strict=True)), shape)
        forward(module, stand_in)
        return tuple([stand_in.get(key) for key in writes])

    return call
