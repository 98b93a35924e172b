"""The modules that a policy computes with without being one: those that a function, a partial or an object holds.

A function uses what its closure and its globals hold under the names it mentions. In another process its copy holds
copies, under the same names; so weights can be sent by name.
"""

from __future__ import annotations

import dis
import functools
from collections.abc import Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from rlcollect.weights.naming import module_of, plain, tensors_of

__all__ = ["held_modules", "held_names", "held_tensors"]

DEPTH = 4  # functions that use objects that hold functions ...
FOREIGN = ("torch", "numpy", "tensordict", "builtins", "gymnasium")


def held_modules(policy: Any) -> dict[str, nn.Module]:
    """The modules that a policy holds, by the names under which it does; not those it consists of."""
    own = module_of(policy)
    found: dict[str, nn.Module] = {}
    seen = set() if own is None else {id(module) for module in own.modules()}
    roots = [policy] if own is None else [part for module in own.modules() for part in vars(module).values()]
    for root in roots:
        if isinstance(root, FunctionType | MethodType | functools.partial) or own is None:
            _search(root, "", found, seen, DEPTH)
    return found


def held_tensors(held: Mapping[str, nn.Module]) -> dict[str, torch.Tensor]:
    """Their parameters and buffers, each name after that of its module."""
    return {
        f"{name}.{inner}": tensor
        for name, module in held.items()
        for inner, tensor in tensors_of(module).items()
        if not is_lazy(tensor)
    }


def held_names(held: Mapping[str, nn.Module]) -> list[str]:
    """All names that state dicts of theirs have."""
    return [f"{name}.{plain(inner)}" for name, module in held.items() for inner in module.state_dict()]


def _search(value: Any, name: str, found: dict[str, nn.Module], seen: set[int], depth: int) -> None:
    if id(value) in seen or depth == 0:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        seen.update(id(module) for module in value.modules())
        name = name or "policy"
        while name in found:
            name += "_"
        found[name] = value
        return
    for part, inner in _parts(value):
        _search(inner, f"{name}_{part}".lstrip("_"), found, seen, depth - 1)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, functools.partial):
        yield from _parts(value.func)
        yield from ((str(place), part) for place, part in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, MethodType):
        yield from _parts(value.__self__)
        yield from _parts(value.__func__)
    elif isinstance(value, FunctionType):
        yield from _used_by(value)
    elif isinstance(value, list | tuple):
        yield from ((str(place), part) for place, part in enumerate(value))
    elif isinstance(value, dict):
        yield from ((str(key), part) for key, part in value.items())
    elif not isinstance(value, ModuleType | type) and type(value).__module__.split(".")[0] not in FOREIGN:
        yield from getattr(value, "__dict__", {}).items()


def _used_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    for free, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield free, cell.cell_contents
        except ValueError:  # it is not set yet
            continue
    yield from (
        (name, function.__globals__[name]) for name in _names(function.__code__) if name in function.__globals__
    )


def _names(code: CodeType) -> list[str]:
    """Names of globals that code uses, with those of functions inside it; not those of attributes."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*(each.argval for each in dis.get_instructions(code) if each.opname == "LOAD_GLOBAL"), *inner]
