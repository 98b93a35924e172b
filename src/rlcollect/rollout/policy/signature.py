"""What a plain policy takes: which parameters of a callable are filled, and how."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch import nn

__all__ = ["Parameter", "Taken", "parameter_names", "taken_parameters"]


@dataclass(frozen=True)
class Parameter:
    """One parameter of a policy."""

    name: str
    optional: bool
    keyword_only: bool
    wants_tensordict: bool


@dataclass(frozen=True)
class Taken:
    """What a policy takes.

    Attributes:
        filled: the parameters that are filled.
        by_name: whether they have to be filled by name.
        others: optional ones that are not filled.
    """

    filled: tuple[Parameter, ...]
    by_name: bool
    others: tuple[Parameter, ...] = ()


def taken_parameters(policy: Any, roots: Collection[str]) -> Taken:
    """The parameters that are filled: required ones, and optional ones that are named like a key.

    None at all: one positional argument.

    Args:
        policy: a module or any callable.
        roots: names that can be given.
    """
    target = getattr(policy, "_orig_mod", policy)  # torch.compile hides the signature
    target = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return Taken((), by_name=False)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    found = [Parameter(p.name, p.default is not p.empty, p.kind is p.KEYWORD_ONLY, _wants_tensordict(p)) for p in named]
    filled = [p for p in found if not p.optional or p.name in roots]
    by_name = any(p.keyword_only for p in filled) or filled != found[: len(filled)]
    others = tuple(p for p in found if p not in filled)
    return Taken(tuple(filled), by_name and bool(filled), others)


def parameter_names(policy: Any) -> set[str] | None:
    """The names of all parameters of a callable; None for one that takes a TensorDict."""
    taken = taken_parameters(policy, ())
    if len(taken.filled) == 1 and taken.filled[0].wants_tensordict:
        return None
    return {parameter.name for parameter in (*taken.filled, *taken.others)}


def _wants_tensordict(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        wants = "TensorDict" in annotation
    else:
        options = typing.get_args(annotation) or (annotation,)
        wants = any(isinstance(option, type) and issubclass(option, TensorDictBase) for option in options)
    return wants or parameter.name in ("tensordict", "td")
