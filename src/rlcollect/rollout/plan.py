"""From what the user passed as a policy to a plan: the keys it reads, the keys it writes, the call.

Made once, at construction, from the policy, the observation's leaves and one call on the first observation. Two paths:

- *direct*: tensors in, tensors out. Plain modules and functions, and TensorDictModule / TensorDictSequential, whose
  inner modules are called one after the other without a TensorDict.
- *tensordict*: everything else from TensorDict to TensorDict gets one, each step.

This module knows no environment, only leaves and spaces.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import nn

from rlcollect.envs.spaces import ALWAYS_OURS, ActionCodec
from rlcollect.errors import PolicyError
from rlcollect.layout import Key, Leaf, show_key
from rlcollect.rollout.direct import DirectCall

__all__ = ["Plan", "plan_policy"]

Call = Callable[..., Any]


@dataclass
class Plan:
    """How a policy is called.

    Attributes:
        in_keys: the observation keys whose tensors are the arguments of `call`, in order.
        outputs: what `call` returns: one leaf for a single value, several for a tuple. The actions come first.
        examples: the first outputs, one a leaf; their shapes and kinds are those of all that follow.
        call: from tensors to a tensor, or to a tuple of them.
        path: "direct" or "tensordict".
        reason: why it took this path, in a few words.
    """

    in_keys: tuple[Key, ...]
    outputs: tuple[Leaf, ...]
    examples: tuple[Any, ...]
    call: Call
    path: str
    reason: str
    _directs: Sequence[DirectCall]
    _assemble: Callable[[], Call]

    def refresh(self) -> Call:
        """`call`, made anew if hooks or children of the policy's modules changed. Called once a rollout."""
        if sum(direct.refresh() for direct in self._directs):  # every one is refreshed
            self.call = self._assemble()
        return self.call


@dataclass
class _Draft:
    """A call before its outputs are known."""

    in_keys: tuple[Key, ...]
    directs: list[DirectCall]
    assemble: Callable[[], Call]
    out_keys: list[Key] | None  # as declared; None: the result tells
    path: str
    reason: str


def plan_policy(
    policy: Any,
    observation: Mapping[Key, torch.Tensor],
    actions: ActionCodec,
    *,
    num_lanes: int | None,
    whole: Key,
    ours: Sequence[str] = (),
) -> Plan:
    """Plans how `policy` is called, by calling it once on the first observation.

    Args:
        policy: a callable or module from observation to action, or from TensorDict to TensorDict.
        observation: the first observation by key, `[N, *shape]`, or `[*shape]` for a single lane.
        actions: how actions are stored.
        num_lanes: N; None for a single lane.
        whole: the key under which the whole observation stands; () for a Dict space, whose keys stand at the root.
        ours: names that an output may not have, beside those that are always ours.

    Raises:
        PolicyError: it reads what is not there, fails, or writes no action of this action space.
    """
    draft = _draft(policy, observation, whole, num_lanes)
    arguments = [observation[key] for key in draft.in_keys]
    call = draft.assemble()
    try:
        with torch.no_grad():
            result = call(*arguments)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(_failed(error, draft, observation, num_lanes)) from error
    values, extract = _outputs(result, draft, actions, set(observation))
    leaves = _check_outputs(values, actions, num_lanes, [*ALWAYS_OURS, *ours])

    def assemble() -> Call:
        inner = draft.assemble()
        return inner if extract is None else lambda *tensors: extract(inner(*tensors))

    examples = tuple(values[leaf.key] for leaf in leaves)
    return Plan(
        draft.in_keys, leaves, examples, assemble(), draft.path, draft.reason, draft.directs, assemble
    )  # fmt: skip


def _failed(error: Exception, draft: _Draft, observation: Mapping[Key, torch.Tensor], num_lanes: int | None) -> str:
    shown = ", ".join(f"{show_key(key)} {list(observation[key].shape)}" for key in draft.in_keys)
    text = f"The policy failed on the first observation ({shown}): {type(error).__name__}: {error}"
    if num_lanes is None:
        text += "\nA single lane shows the policy unbatched observations; num_envs=1 gives it a batch of one lane."
    return text


# --- reading ----------------------------------------------------------------------------------------------------------


def _draft(policy: Any, observation: Mapping[Key, torch.Tensor], whole: Key, num_lanes: int | None) -> _Draft:
    if not callable(policy):
        raise PolicyError(
            "policy must be None, a callable or an nn.Module from observation to action, or from TensorDict to "
            f"TensorDict; {policy!r} came."
        )
    if isinstance(policy, type):
        raise PolicyError(f"policy is the class {policy.__name__}; pass an instance of it.")
    if isinstance(policy, TensorDictModuleBase) or (hasattr(policy, "in_keys") and hasattr(policy, "out_keys")):
        return _draft_tensordict_module(policy, observation, num_lanes)
    names = _parameters(policy)
    if len(names) == 1 and names[0].wants_tensordict:
        return _draft_tensordict(policy, observation, num_lanes, "it takes a TensorDict")
    if len(names) > 1:
        return _draft_named(policy, names, observation, num_lanes)
    direct = DirectCall(policy)
    if whole in observation:
        return _Draft((whole,), [direct], lambda: direct.call, None, "direct", "from observation to action")
    keys = tuple(key for key in observation if key[: len(whole)] == whole)
    return _Draft(keys, [direct], lambda: _with_tensordict(direct.call, keys, len(whole), num_lanes),
                  None, "tensordict", "the observation has several keys")  # fmt: skip


@dataclass(frozen=True)
class _Parameter:
    name: str
    optional: bool
    keyword_only: bool
    wants_tensordict: bool


def _parameters(policy: Any) -> list[_Parameter]:
    """The parameters that a call could fill; empty where they cannot be known."""
    target = policy.forward if isinstance(policy, nn.Module) else policy
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return []
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    found = [
        _Parameter(p.name, p.default is not p.empty, p.kind is p.KEYWORD_ONLY, _wants_tensordict(p))
        for p in parameters
        if p.kind not in kinds
    ]
    required = [p for p in found if not p.optional]
    return required if len(required) == 1 and not required[0].keyword_only else found


def _wants_tensordict(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if isinstance(annotation, type) and issubclass(annotation, TensorDictBase):
        return True
    return (isinstance(annotation, str) and "TensorDict" in annotation) or parameter.name in ("tensordict", "td")


def _draft_named(
    policy: Any, parameters: list[_Parameter], observation: Mapping[Key, torch.Tensor], num_lanes: int | None
) -> _Draft:
    """Several named parameters get the keys of those names."""
    roots = {key[0] for key in observation}
    taken = [p for p in parameters if p.name in roots or not p.optional]
    for parameter in taken:
        if parameter.name not in roots:
            raise PolicyError(_missing((parameter.name,), observation, f"a parameter {parameter.name!r}"))
    direct = DirectCall(policy)
    groups = [[key for key in observation if key[0] == p.name] for p in taken]
    keys = tuple(key for group in groups for key in group)
    if all(len(group) == 1 and len(group[0]) == 1 for group in groups):
        names = [p.name for p in taken]

        def assemble() -> Call:
            call = direct.call
            if any(p.keyword_only for p in taken):
                return lambda *tensors: call(**dict(zip(names, tensors, strict=True)))
            return call

        return _Draft(keys, [direct], assemble, None, "direct", f"from {', '.join(names)} to action")

    def assemble_nested() -> Call:
        call = direct.call

        def nested(*tensors: torch.Tensor) -> Any:
            whole = _tensordict(keys, tensors, 0, num_lanes)
            return call(**{p.name: whole.get(p.name) for p in taken})

        return nested

    return _Draft(keys, [direct], assemble_nested, None, "tensordict", "a parameter has several keys")


def _draft_tensordict(
    policy: Any, observation: Mapping[Key, torch.Tensor], num_lanes: int | None, reason: str
) -> _Draft:
    keys = tuple(observation)
    return _Draft(keys, [], lambda: _with_tensordict(policy, keys, 0, num_lanes), None, "tensordict", reason)


def _draft_tensordict_module(policy: Any, observation: Mapping[Key, torch.Tensor], num_lanes: int | None) -> _Draft:
    in_keys = [_as_key(key) for key in policy.in_keys]
    for key in in_keys:
        if not any(known[: len(key)] == key for known in observation):
            raise PolicyError(_missing(key, observation, f"the key {show_key(key)}"))
    program = _Program()
    reason = program.add(policy)
    if reason is None and not all(key in observation for key in program.in_keys):
        reason = "it reads a key that has parts"
    if reason is not None:
        return _draft_tensordict(policy, observation, num_lanes, reason)
    return _Draft(
        tuple(program.in_keys), program.directs, program.assemble, program.out_keys, "direct", "its modules are known"
    )


def _as_key(key: Any) -> Key:
    return (key,) if isinstance(key, str) else tuple(key)


def _missing(key: Key, observation: Mapping[Key, torch.Tensor], reads: str) -> str:
    names = [show_key(known) for known in observation]
    near = difflib.get_close_matches(show_key(key), names, n=1)
    hint = f"Did you mean {near[0]}?" if near else f"The observation has {', '.join(names)}."
    return f"The policy reads {reads}, which the environment does not give. {hint}"


def _tensordict(keys: Sequence[Key], tensors: Sequence[torch.Tensor], skip: int, num_lanes: int | None) -> TensorDict:
    nested: dict[str, Any] = {}
    for key, tensor in zip(keys, tensors, strict=True):
        level = nested
        for part in key[skip:-1]:
            level = level.setdefault(part, {})
        level[key[-1]] = tensor
    return TensorDict(nested, batch_size=[] if num_lanes is None else [num_lanes])


def _with_tensordict(call: Call, keys: Sequence[Key], skip: int, num_lanes: int | None) -> Call:
    return lambda *tensors: call(_tensordict(keys, tensors, skip, num_lanes))


# --- TensorDictModule and TensorDictSequential without a TensorDict ---------------------------------------------------

MODULE_METHODS = ("__call__", "forward", "_call_module", "_write_to_tensordict")
SEQUENCE_METHODS = ("__call__", "forward", "_run_module")


class _Program:
    """The inner modules of TensorDictModules, in order, over numbered registers."""

    def __init__(self) -> None:
        self.in_keys: list[Key] = []
        self.out_keys: list[Key] = []
        self.directs: list[DirectCall] = []
        self._steps: list[tuple[list[Key], list[Key]]] = []

    def add(self, module: Any) -> str | None:
        """Appends a module; None, or why it must be called with a TensorDict."""
        if not isinstance(module, TensorDictModuleBase):
            return f"{type(module).__name__} is no TensorDictModule"
        if any(module.__dict__[name] for name in ("_forward_pre_hooks", "_forward_hooks")):
            return f"a hook on {type(module).__name__}"
        if _inherits(module, TensorDictSequential, SEQUENCE_METHODS):
            if module.partial_tolerant or module._select_before_return or module.inplace is not None:
                return f"options of {type(module).__name__}"
            return next((reason for part in module.module if (reason := self.add(part)) is not None), None)
        if _inherits(module, TensorDictModule, MODULE_METHODS):
            return self._add_module(module)
        return f"{type(module).__name__} has ways of its own"

    def _add_module(self, module: TensorDictModule) -> str | None:
        options = (module._kwargs, module.method, module.method_kwargs or None, module._get_kwargs or None)
        selected = module.out_keys != module.out_keys_source
        if any(option is not None for option in options) or module.inplace is not True or selected:
            return f"options of {type(module).__name__}"
        if isinstance(module.module, TensorDictModuleBase):
            return "a TensorDictModule inside a TensorDictModule"
        reads, writes = [_as_key(key) for key in module.in_keys], [_as_key(key) for key in module.out_keys]
        self.in_keys += [key for key in reads if key not in self.out_keys and key not in self.in_keys]
        self.out_keys += [key for key in writes if key not in self.out_keys and key != ("_",)]
        self.directs.append(DirectCall(module.module))
        self._steps.append((reads, writes))
        return None

    def assemble(self) -> Call:
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
                for place, value in zip(writes, values, strict=True):
                    registers[place] = value
            return tuple([registers[place] for place in results])

        return run


def _inherits(module: Any, kind: type, methods: Sequence[str]) -> bool:
    return isinstance(module, kind) and all(getattr(type(module), m, None) is getattr(kind, m, None) for m in methods)


# --- writing ----------------------------------------------------------------------------------------------------------


def _outputs(
    result: Any, draft: _Draft, actions: ActionCodec, inputs: set[Key]
) -> tuple[dict[Key, Any], Callable[[Any], Any] | None]:
    """The outputs by key, the actions first; and how to take them from a result (None: the result is the output)."""
    values, take = _by_key(result, draft, inputs, [leaf.key for leaf in actions.leaves])
    action_keys = [leaf.key for leaf in actions.leaves]
    if lacking := [key for key in action_keys if key not in values]:
        written = ", ".join(show_key(key) for key in values) or "nothing"
        raise PolicyError(f"The policy should write {show_key(lacking[0])}; it wrote {written}.")
    extras = [key for key in values if key not in action_keys and not any(p.startswith("_") for p in key)]
    order = [*action_keys, *extras]
    ordered = {key: values[key] for key in order}
    if take is None:  # a bare value
        return ordered, None
    if len(order) == 1:
        return ordered, lambda later: take(later, order)[0]
    if isinstance(result, tuple) and list(values) == order:
        return ordered, None
    return ordered, lambda later: take(later, order)


Take = Callable[[Any, list[Key]], tuple[Any, ...]]


def _by_key(result: Any, draft: _Draft, inputs: set[Key], action_keys: list[Key]) -> tuple[dict[Key, Any], Take | None]:
    if draft.out_keys is not None:
        return _by_declaration(result, draft.out_keys)
    if isinstance(result, TensorDictBase):
        return _from_tensordict(result, inputs, action_keys), _take_from_tensordict
    if isinstance(result, Mapping):
        below = () if "action" in result else ("action",)
        values = {(*below, *key): value for key, value in _flat(result)}
        return values, lambda later, keys: tuple(_at(later, key[len(below) :]) for key in keys)
    if isinstance(result, tuple | list) and len(action_keys) == len(result) > 1:
        return dict(zip(action_keys, result, strict=True)), lambda later, _: tuple(later)
    if action_keys != [("action",)]:
        raise PolicyError(
            f"The policy should return an action with the parts {', '.join(map(show_key, action_keys))}, as a "
            f"TensorDict, a mapping or a tuple; {_kind(result)} came."
        )
    if not isinstance(result, torch.Tensor | np.ndarray | np.generic | int | float):
        raise PolicyError(f"The policy should return an action tensor or a TensorDict; {_kind(result)} came.")
    return {("action",): result}, None


def _by_declaration(result: Any, out_keys: list[Key]) -> tuple[dict[Key, Any], Take | None]:
    """The result of a chain of known modules: a tuple in the order of `out_keys`, or a single value."""
    values = result if isinstance(result, tuple) else (result,)
    if len(values) != len(out_keys):
        raise PolicyError(
            f"The policy declares {len(out_keys)} out_keys ({', '.join(map(show_key, out_keys))}) and returned "
            f"{len(values)} value(s)."
        )
    if not isinstance(result, tuple):
        return {out_keys[0]: result}, None
    places = {key: place for place, key in enumerate(out_keys)}
    return dict(zip(out_keys, values, strict=True)), lambda later, keys: tuple([later[places[key]] for key in keys])


def _from_tensordict(result: TensorDictBase, inputs: set[Key], action_keys: list[Key]) -> dict[Key, Any]:
    found = {_as_key(key): value for key, value in result.items(include_nested=True, leaves_only=True)}
    if any(key[0] == "action" for key in found):
        return {key: value for key, value in found.items() if key not in inputs}
    # a policy may return the parts of its action alone
    if action_keys != [("action",)] and all(key[1:] in found for key in action_keys):
        raise PolicyError(
            "The policy returned the parts of an action at the root of its TensorDict; "
            f"nest them: {', '.join(map(show_key, action_keys))}."
        )
    return {key: value for key, value in found.items() if key not in inputs}


def _take_from_tensordict(result: Any, keys: list[Key]) -> tuple[Any, ...]:
    values = tuple([result.get(key if len(key) > 1 else key[0], None) for key in keys])
    if any(value is None for value in values):
        lacking = next(key for key, value in zip(keys, values, strict=True) if value is None)
        raise PolicyError(f"The policy wrote {show_key(lacking)} at first, and now it did not.")
    return values


def _flat(mapping: Mapping[Any, Any]) -> list[tuple[Key, Any]]:
    found: list[tuple[Key, Any]] = []
    for name, value in mapping.items():
        inner = _flat(value) if isinstance(value, Mapping) else [((), value)]
        found += [((str(name), *key), part) for key, part in inner]
    return found


def _at(mapping: Any, key: Key) -> Any:
    for part in key:
        mapping = mapping[part]
    return mapping


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} ({value!r})"


# --- checks -----------------------------------------------------------------------------------------------------------


def _check_outputs(
    values: Mapping[Key, Any], actions: ActionCodec, num_lanes: int | None, ours: Sequence[str]
) -> tuple[Leaf, ...]:
    """The leaves that the outputs are stored as."""
    lead = () if num_lanes is None else (num_lanes,)
    expected = {leaf.key: leaf for leaf in actions.leaves}
    for leaf in actions.leaves:
        _check_action(leaf, values[leaf.key], lead, actions)
    leaves = list(actions.leaves)
    taken = set(ours) - {"action"}
    for key, value in values.items():
        if key in expected:
            continue
        if key[0] in taken:
            raise PolicyError(f"The policy writes {show_key(key)}, which is a name of ours. Give it another.")
        if not isinstance(value, torch.Tensor):
            raise PolicyError(f"The policy writes {show_key(key)}, which should be a tensor; {_kind(value)} came.")
        if tuple(value.shape[: len(lead)]) != lead:
            raise PolicyError(
                f"The policy writes {show_key(key)} of shape {list(value.shape)}; its first dimension should be the "
                f"{num_lanes} lanes."
            )
        leaves.append(Leaf(key, tuple(value.shape[len(lead) :]), value.dtype))
    return tuple(leaves)


def _check_action(leaf: Leaf, value: Any, lead: tuple[int, ...], actions: ActionCodec) -> None:
    wanted = (*lead, *leaf.shape)
    tensor = torch.as_tensor(value)
    whole_numbers = not (leaf.dtype.is_floating_point or leaf.dtype is torch.bool)
    same_kind = (
        tensor.dtype.is_floating_point
        if leaf.dtype.is_floating_point
        else not tensor.dtype.is_floating_point and not tensor.dtype.is_complex
    )
    if tuple(tensor.shape) == wanted and same_kind:
        return
    hint = ""
    if whole_numbers and tuple(tensor.shape[: len(wanted)]) == wanted and tensor.ndim == len(wanted) + 1:
        hint = " If these are scores or one-hot actions, return their argmax(-1)."
    elif lead == () and tuple(tensor.shape) == (1, *wanted):
        hint = " A single lane shows the policy unbatched observations; num_envs=1 gives it a batch of one lane."
    raise PolicyError(
        f"{show_key(leaf.key)} should have shape {list(wanted)} and dtype {str(leaf.dtype).removeprefix('torch.')} "
        f"for the action space {actions.space}; {_kind(value)} came.{hint}"
    )
