"""TensorDictModules without a TensorDict: a chain's inner modules, one after the other, over numbered registers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from rlcollect.layout import Key
from rlcollect.rollout.direct import DirectCall, is_hooked

__all__ = ["Program", "as_key"]

MODULE_METHODS = ("__call__", "forward", "_call_module", "_write_to_tensordict")
SEQUENCE_METHODS = ("__call__", "forward", "_run_module")


def as_key(key: Any) -> Key:
    """A key of tensordict as a tuple."""
    return (key,) if isinstance(key, str) else tuple(key)


class Program:
    """What a chain of known TensorDictModules does, as calls on tensors.

    Attributes:
        refusal: why the chain must be called with a TensorDict; None: it need not.
        in_keys, out_keys: what is read from outside, and what is written, in order.
        directs: the calls of the inner modules.

    Args:
        module: a TensorDictModule or TensorDictSequential, or anything else (which is refused).
    """

    def __init__(self, module: Any) -> None:
        self.in_keys: list[Key] = []
        self.out_keys: list[Key] = []
        self.directs: list[DirectCall] = []
        self._steps: list[tuple[list[Key], list[Key]]] = []
        self._module = module
        self._shape = list(_shape(module))
        self.refusal = self._add(module)

    def is_stale(self) -> bool:
        """Whether hooks, parts or inner modules are others than at construction."""
        return list(_shape(self._module)) != self._shape

    def _add(self, module: Any) -> str | None:
        if not isinstance(module, TensorDictModuleBase):
            return f"{type(module).__name__} is no TensorDictModule"
        if is_hooked(module):
            return f"a hook on {type(module).__name__}"
        if _inherits(module, TensorDictSequential, SEQUENCE_METHODS):
            if module.partial_tolerant or module._select_before_return or module.inplace is not None:
                return f"options of {type(module).__name__}"
            return next((refusal for part in _parts(module) if (refusal := self._add(part)) is not None), None)
        if _inherits(module, TensorDictModule, MODULE_METHODS):
            return self._add_module(module)
        return f"{type(module).__name__} is called as it is"

    def _add_module(self, module: Any) -> str | None:
        options = (module._kwargs, module.method, module.method_kwargs or None, module._get_kwargs or None)
        selected = module.out_keys != module.out_keys_source
        if any(option is not None for option in options) or module.inplace is not True or selected:
            return f"options of {type(module).__name__}"
        if isinstance(module.module, TensorDictModuleBase):
            return "a TensorDictModule inside a TensorDictModule"
        reads, writes = [as_key(key) for key in module.in_keys], [as_key(key) for key in module.out_keys]
        self.in_keys += [key for key in reads if key not in self.out_keys and key not in self.in_keys]
        self.out_keys += [key for key in writes if key not in self.out_keys and key != ("_",)]
        self.directs.append(DirectCall(module.module))
        self._steps.append((reads, writes))
        return None

    def assemble(self) -> Callable[..., Any]:
        """From tensors in the order of `in_keys` to those of `out_keys`: a tuple, or for a single step its result."""
        if len(self._steps) == 1 and self._steps[0] == (self.in_keys, self.out_keys):
            return self.directs[0].call
        places: dict[Key, int] = {}
        for key in (*self.in_keys, *self.out_keys, ("_",)):
            places.setdefault(key, len(places))
        steps = [
            (direct.call, [places[key] for key in reads], [places[key] for key in writes])
            for direct, (reads, writes) in zip(self.directs, self._steps, strict=True)
        ]
        results = [places[key] for key in self.out_keys]
        empty: list[Any] = [None] * (len(places) - len(self.in_keys))

        def run(*tensors: torch.Tensor) -> tuple[Any, ...]:
            registers = [*tensors, *empty]
            for call, reads, writes in steps:
                result = call(*[registers[place] for place in reads])
                values = result if isinstance(result, tuple) else (result,)
                if len(values) != len(writes):
                    return values  # not what was declared: whoever planned this sees it
                for place, value in zip(writes, values, strict=True):
                    registers[place] = value
            return tuple([registers[place] for place in results])

        return run


def _parts(module: Any) -> Iterator[Any]:
    parts = module.module
    return iter(parts.values() if isinstance(parts, nn.ModuleDict) else parts)


def _shape(module: Any) -> Iterator[tuple[Any, ...]]:
    """What a program relies on, for every TensorDictModule of a chain."""
    if isinstance(module, TensorDictModuleBase):
        inner = getattr(module, "module", None)
        yield id(module), id(inner), is_hooked(module)
        if isinstance(inner, nn.ModuleList | nn.ModuleDict):
            for part in _parts(module):
                yield from _shape(part)


def _inherits(module: Any, kind: type, methods: Sequence[str]) -> bool:
    return isinstance(module, kind) and all(getattr(type(module), m, None) is getattr(kind, m, None) for m in methods)
