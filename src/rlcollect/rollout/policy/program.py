"""TensorDictModules without a TensorDict: a chain's parts, one after the other, over numbered registers.

A part is known, and then a call on tensors: a TensorDictModule, a ProbabilisticTensorDictModule, and what TorchRL makes
of them (`torchrl_parts`). One part of a chain may be unknown (an exploration module with a `forward` of its own, say):
that one gets a TensorDict of all there is at its turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import nn

from rlcollect.layout import Key, as_key, nested, tensordict_leaves
from rlcollect.rollout.policy.direct import DirectCall, is_hooked
from rlcollect.rollout.policy.distributions import Sampling, distribution_call
from rlcollect.rollout.policy.torchrl_parts import is_safe_probabilistic, stand_in_call

__all__ = ["UNUSED", "Program"]

MODULE_METHODS = ("__call__", "forward", "_call_module", "_write_to_tensordict")
SEQUENCE_METHODS = ("__call__", "forward", "_run_module")
PROBABILISTIC_METHODS = ("__call__", "get_dist", "_dist_sample", "log_prob", "_resolve_generator")
UNUSED: Key = ("_",)  # tensordict's word for an output that nobody wants


@dataclass(frozen=True)
class _Step:
    """One call: from registers to registers."""

    reads: Sequence[Key]
    writes: Sequence[Key]
    current: Callable[[], Callable[..., Any]]


class Program:
    """What a chain of TensorDictModules does, as calls on tensors.

    Attributes:
        refusal: why the chain must be called with a TensorDict; None: it need not.
        unknown: the name of a part that gets a TensorDict of its own, if there is one.
        unknown_writes: what that part writes.
        wrote_more: whether that part wrote more than it declares, when it was first called.
        in_keys, out_keys: what is read from outside, and what is written, in order.
        samplings: what is drawn from which parameters, which are not checked at each call.
        directs: the calls of the inner modules.

    Args:
        module: a TensorDictModule or TensorDictSequential, or anything else (which is refused).
        exploration: how samples are chosen.
        lead: the leading dimensions of what it is shown: `[N]`, or none for a single lane.
        extra_keys: what an unknown part is shown beside the keys that the chain itself reads and writes.
        twins: whether modules may be called through twins (`direct`).
    """

    def __init__(
        self,
        module: Any,
        exploration: InteractionType,
        lead: Sequence[int],
        extra_keys: Sequence[Key],
        *,
        twins: bool = True,
    ) -> None:
        self.in_keys: list[Key] = []
        self.out_keys: list[Key] = []
        self.samplings: list[Sampling] = []
        self.directs: list[DirectCall] = []
        self.unknown: str | None = None
        self.unknown_writes: list[Key] = []
        self.wrote_more = False
        self._steps: list[_Step] = []
        self._module = module
        self._exploration = exploration
        self._lead = list(lead)
        self._extra_keys = extra_keys
        self._twins = twins
        self.looks_around = False  # whether a part may look at the exploration type
        self._shape = list(_shape(module))
        self._writes = Counter(_written(module))
        self.refusal = self._add(module)
        if self.refusal is None and self.unknown is not None and len(self._steps) == 1:
            self.refusal = self.unknown  # nothing but that part

    def is_stale(self) -> bool:
        """Whether hooks, parts or inner modules are others than at construction."""
        return list(_shape(self._module)) != self._shape

    # --- reading ---

    def _add(self, module: Any) -> str | None:
        """Adds the steps of a module; why it cannot, if so."""
        if not isinstance(module, TensorDictModuleBase):
            return f"{type(module).__name__} is no TensorDictModule"
        if is_hooked(module):
            return f"a hook on {type(module).__name__}"
        if _inherits(module, ProbabilisticTensorDictSequential, SEQUENCE_METHODS):
            if not module._requires_sample:
                return f"{type(module).__name__} takes its sample from another part"
            return self._add_sequence(module)
        if _inherits(module, TensorDictSequential, SEQUENCE_METHODS):
            return self._add_sequence(module)
        if _inherits(module, TensorDictModule, MODULE_METHODS):
            return self._add_module(module)
        if _inherits(module, ProbabilisticTensorDictModule, PROBABILISTIC_METHODS):
            return self._add_distribution(module)
        if (call := stand_in_call(module, self._lead)) is not None:
            self._add_step(module, lambda: call)
            self.looks_around = True
            return None
        return f"{type(module).__name__} is called as it is"

    def _add_sequence(self, module: Any) -> str | None:
        if module.partial_tolerant or module._select_before_return or module.inplace is not None:
            return f"options of {type(module).__name__}"
        return next((refusal for part in _parts(module) if (refusal := self._add_part(part)) is not None), None)

    def _add_part(self, part: Any) -> str | None:
        """A part that is refused is called with a TensorDict; for two of them, one for the whole chain is cheaper."""
        before = len(self._steps)
        refusal = self._add(part)
        if refusal is None or self.unknown is not None or not isinstance(part, TensorDictModuleBase):
            return refusal
        if len(self._steps) != before or not part.out_keys:
            return refusal  # a chain in the chain, half read; or one that declares nothing
        self.unknown = f"{type(part).__name__} gets a TensorDict: {refusal}"
        reads = [as_key(key) for key in part.in_keys]
        known = [*self.in_keys, *self.out_keys, *self._extra_keys, *reads]
        self.unknown_writes = [as_key(key) for key in part.out_keys]
        self._add_unknown(part, list(dict.fromkeys(known)), self.unknown_writes)
        return None

    def _add_unknown(self, part: Any, reads: list[Key], writes: list[Key]) -> None:
        lead = self._lead
        looked: list[bool] = []
        changes = list(dict.fromkeys([*writes, *reads]))  # it may put something else in the place of what it was shown
        places = [(key if len(key) > 1 else key[0]) for key in changes]

        def given_by_key(tensors: tuple[Any, ...]) -> dict[Key, Any]:
            return {key: tensor for key, tensor in zip(reads, tensors, strict=True) if tensor is not None}

        def call(*tensors: Any) -> tuple[Any, ...]:
            data = TensorDict(nested(given_by_key(tensors).items()), batch_size=lead)
            result = part(data)
            if not looked:
                looked.append(True)
                self.wrote_more = any(key not in changes for key, _ in tensordict_leaves(result))
            return tuple([result.get(place, None) for place in places])

        self._note(reads, writes)
        self._steps.append(_Step(reads, changes, lambda: call))
        self.looks_around = True

    def _add_module(self, module: Any) -> str | None:
        options = (module._kwargs, module.method, module.method_kwargs or None, module._get_kwargs or None)
        selected = module.out_keys != module.out_keys_source
        if any(option is not None for option in options) or module.inplace is not True or selected:
            return f"options of {type(module).__name__}"
        if isinstance(module.module, TensorDictModuleBase):
            return "a TensorDictModule inside a TensorDictModule"
        direct = DirectCall(module.module, twins=self._twins)
        self.directs.append(direct)
        self._add_step(module, lambda: direct.call)
        return None

    def _add_distribution(self, module: Any) -> str | None:
        safe = is_safe_probabilistic(module)
        if not (safe or type(module).forward is ProbabilisticTensorDictModule.forward):
            return f"{type(module).__name__} is called as it is"
        if len(module.dist_sample_keys) != 1:
            return "its distribution gives several samples"
        stays = all(self._writes[key] == (key not in self._extra_keys) for key in map(as_key, module.in_keys))
        sampling = distribution_call(module, self._exploration, atomic=safe, is_recorded=stays)
        if isinstance(sampling, str):
            return sampling
        self.samplings.append(sampling)
        self._add_step(module, lambda: sampling.call)
        return None

    def _add_step(self, module: Any, current: Callable[[], Callable[..., Any]]) -> None:
        reads, writes = [as_key(key) for key in module.in_keys], [as_key(key) for key in module.out_keys]
        self._note(reads, writes)
        self._steps.append(_Step(reads, writes, current))

    def _note(self, reads: Sequence[Key], writes: Sequence[Key]) -> None:
        self.in_keys += [key for key in reads if key not in self.out_keys and key not in self.in_keys]
        self.out_keys += [key for key in writes if key not in self.out_keys and key != UNUSED]

    # --- calling ---

    def assemble(self, in_keys: Sequence[Key]) -> Callable[..., Any]:
        """From tensors in the order of `in_keys` to those of `out_keys`: a tuple, or for a single step its result."""
        if len(self._steps) == 1 and self._steps[0] == _Step(list(in_keys), self.out_keys, self._steps[0].current):
            return self._steps[0].current()
        places: dict[Key, int] = {}
        for key in (*in_keys, *self.out_keys, UNUSED):
            places.setdefault(key, len(places))
        steps = [
            (step.current(), [places[key] for key in step.reads], [places[key] for key in step.writes])
            for step in self._steps
        ]
        results = [places[key] for key in self.out_keys]
        empty: list[Any] = [None] * (len(places) - len(in_keys))

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


def _written(module: Any) -> Iterator[Key]:
    """The keys that are written, by the parts of a chain one after the other."""
    inner = getattr(module, "module", None)
    if isinstance(module, TensorDictSequential) and isinstance(inner, nn.ModuleList | nn.ModuleDict):
        for part in _parts(module):
            yield from _written(part)
    else:
        yield from map(as_key, getattr(module, "out_keys", ()))


def _shape(module: Any) -> Iterator[tuple[Any, ...]]:
    """What a program relies on, for every TensorDictModule of a chain."""
    if isinstance(module, TensorDictModuleBase):
        inner = getattr(module, "module", None)
        yield id(module), id(inner), is_hooked(module)
        if isinstance(module, ProbabilisticTensorDictModule):
            kwargs = module.distribution_kwargs
            values = [(name, id(value)) for name, value in kwargs.items()] if isinstance(kwargs, dict) else id(kwargs)
            yield module.return_log_prob, module.distribution_class, values, id(module._generator), module.num_samples
        if isinstance(inner, nn.ModuleList | nn.ModuleDict):
            for part in _parts(module):
                yield from _shape(part)


def _inherits(module: Any, kind: type, methods: Sequence[str]) -> bool:
    return isinstance(module, kind) and all(getattr(type(module), m, None) is getattr(kind, m, None) for m in methods)
