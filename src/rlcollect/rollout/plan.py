"""From what the user passed as a policy to a plan: the keys it reads, the keys it writes, the call.

Made once, at construction, from the policy, the observation's leaves and one call on the first observation. Two paths:

- *direct*: tensors in, tensors out. Plain modules and functions, and TensorDictModule / TensorDictSequential, whose
  inner modules are called one after the other without a TensorDict (`program`).
- *tensordict*: everything else from TensorDict to TensorDict gets one, each step.

This module knows no environment, only leaves and spaces.
"""

from __future__ import annotations

import difflib
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import nn

from rlcollect.envs.spaces import ALWAYS_OURS, ActionCodec
from rlcollect.errors import PolicyError
from rlcollect.layout import Key, nested, show_key
from rlcollect.rollout.direct import DirectCall
from rlcollect.rollout.outputs import checked_leaves, outputs_by_key, take_by_keys
from rlcollect.rollout.program import Program, as_key

__all__ = ["Observed", "Plan", "plan_policy", "version_of"]

Call = Callable[..., Any]


@dataclass(frozen=True)
class Observed:
    """What a policy is shown.

    Attributes:
        tensors: the first observation by key, `[N, *shape]`, or `[*shape]` for a single lane.
        num_lanes: N; None for a single lane.
        whole: the key under which the whole observation stands; () for a Dict space, whose keys stand at the root.
    """

    tensors: Mapping[Key, torch.Tensor]
    num_lanes: int | None
    whole: Key

    def tensordict(self, keys: Sequence[Key], tensors: Sequence[torch.Tensor], skip: int = 0) -> TensorDict:
        """A TensorDict of the lanes; the first `skip` parts of each key are left out."""
        values = nested(zip([key[skip:] for key in keys], tensors, strict=True))
        return TensorDict(values, batch_size=[] if self.num_lanes is None else [self.num_lanes])

    def lacks(self, key: Key, reads: str) -> PolicyError:
        """What to raise when the policy reads what is not there."""
        names = [show_key(known) for known in self.tensors]
        near = difflib.get_close_matches(show_key(key), names, n=1)
        hint = (f"Did you mean {near[0]}? " if near else "") + f"The observation has {', '.join(names)}."
        if key in (("is_init",), ("step_count",)):
            hint += " (What `record=` adds is not shown to policies by this release.)"
        return PolicyError(f"The policy reads {reads}, which the environment does not give. {hint}")


@dataclass
class _Draft:
    """A call, before anything is known of its outputs."""

    in_keys: tuple[Key, ...]
    assemble: Callable[[], Call]
    path: str
    reason: str
    directs: Sequence[DirectCall] = ()
    program: Program | None = None
    out_keys: list[Key] | None = None  # of a program; None: the result tells


class Plan:
    """How a policy is called.

    Attributes:
        outputs: what `call` returns: one leaf for a single value, several for a tuple. The actions come first.
        examples: the first outputs, one a leaf; their shapes and kinds are those of all that follow.
        call: from tensors to a tensor, or to a tuple of them.

    Args:
        policy: what the user passed.
        observed: what it is shown.
        actions: how actions are stored.
        ours: names that an output may not have, beside those that are always ours.

    Raises:
        PolicyError: it reads what is not there, fails, or writes no action of this action space.
    """

    def __init__(self, policy: Any, observed: Observed, actions: ActionCodec, ours: Sequence[str] = ()) -> None:
        self._policy = policy
        self._observed = observed
        draft, result, touched = _probed(policy, observed)
        values, take = outputs_by_key(result, draft.out_keys, set(observed.tensors), actions)
        self.outputs = checked_leaves(
            values, actions, list(observed.tensors), observed.num_lanes, [*ALWAYS_OURS, *ours]
        )
        self.examples = tuple(values[leaf.key] for leaf in self.outputs)
        self._copies = touched
        self._current, self._take = draft, take
        self.call = self._assemble()

    @property
    def in_keys(self) -> tuple[Key, ...]:
        """The observation keys whose tensors are the arguments of `call`, in order."""
        return self._current.in_keys

    @property
    def path(self) -> str:
        """How it is called: "direct" or "tensordict"."""
        return self._current.path

    @property
    def reason(self) -> str:
        """Why it took this path, in a few words."""
        return self._current.reason

    def _assemble(self) -> Call:
        return self._prepared(self._taking(self._current.assemble()))

    def _taking(self, call: Call) -> Call:
        """A call that returns the outputs alone, in order."""
        take, keys = self._take, [leaf.key for leaf in self.outputs]
        if take is None or (len(keys) > 1 and self._current.out_keys == keys):
            return call
        if len(keys) == 1:
            return lambda *tensors: take(call(*tensors), keys)[0]
        return lambda *tensors: take(call(*tensors), keys)

    def _prepared(self, call: Call) -> Call:
        """A call that may be given views of a rollout's memory.

        Rows of several lanes lie apart in it by as much as the rollout is long, and kernels round by how their input
        lies: so that the data do not depend on the size of a batch, reals are shown in one piece. A policy that changes
        its input gets a copy.
        """
        tensors = [self._observed.tensors[key] for key in self.in_keys]
        if self._copies:
            return lambda *given: call(*[tensor.clone(memory_format=torch.contiguous_format) for tensor in given])
        if self._observed.num_lanes is None or not any(tensor.is_floating_point() for tensor in tensors):
            return call
        if len(tensors) == 1:
            return lambda tensor: call(tensor.contiguous())
        reals = [tensor.is_floating_point() for tensor in tensors]
        return lambda *given: call(
            *[tensor.contiguous() if real else tensor for tensor, real in zip(given, reals, strict=True)]
        )

    def refresh(self) -> None:
        """Looks for hooks that came and modules that were replaced; `in_keys` and `call` may then be others."""
        program = self._current.program
        if program is not None and program.is_stale():
            self._current = _draft(self._policy, self._observed)
            self._take = take_by_keys(self._current.out_keys)
            self.call = self._assemble()
        elif sum(direct.refresh() for direct in self._current.directs):  # every one is refreshed
            self.call = self._assemble()


def plan_policy(policy: Any, observed: Observed, actions: ActionCodec, ours: Sequence[str] = ()) -> Plan:
    """Plans how `policy` is called; see `Plan`."""
    if not callable(policy):
        raise PolicyError(
            "policy must be None, a callable or an nn.Module from observation to action, or from TensorDict to "
            f"TensorDict; {policy!r} came."
        )
    if isinstance(policy, type):
        raise PolicyError(f"policy is the class {policy.__name__}; pass an instance of it.")
    return Plan(policy, observed, actions, ours)


def _probe(draft: _Draft, observed: Observed) -> tuple[Any, bool]:
    """What the first call returns, and whether it changed its input in place."""
    arguments = [observed.tensors[key].clone() for key in draft.in_keys]
    before = [version_of(tensor) for tensor in arguments]
    try:
        with torch.no_grad():
            result = draft.assemble()(*arguments)
    except PolicyError:
        raise
    except Exception as error:
        shown = ", ".join(f"{show_key(key)} {list(observed.tensors[key].shape)}" for key in draft.in_keys)
        text = f"The policy failed on the first observation ({shown}): {type(error).__name__}: {error}"
        if observed.num_lanes is None:
            text += "\nA single lane shows the policy unbatched observations; num_envs=1 gives it a batch of one lane."
        if draft.path == "direct" and draft.program is None:
            text += "\nIf it takes a TensorDict, annotate its parameter so, or name it `tensordict` or `td`."
        raise PolicyError(text) from error
    return result, [version_of(tensor) for tensor in arguments] != before


def version_of(tensor: torch.Tensor) -> int:
    """How often torch has written to a tensor in place; numpy's writes do not count. 0 in inference mode."""
    return 0 if tensor.is_inference() else tensor._version


def _probed(policy: Any, observed: Observed) -> tuple[_Draft, Any, bool]:
    """A draft, what its first call returned, and whether it changed its input.

    Modules of a chain may return mappings and arrays, which tensordict understands and a program does not.
    """
    draft = _draft(policy, observed)
    if draft.out_keys is None:
        return draft, *_probe(draft, observed)
    try:
        result, touched = _probe(draft, observed)
    except PolicyError:
        result, touched = None, False
    values = result if isinstance(result, tuple) else (result,)
    if all(isinstance(value, torch.Tensor) for value in values):
        return draft, result, touched
    draft = _draft_tensordict(policy, observed, "its modules return something else than tensors")
    return draft, *_probe(draft, observed)


# --- reading ----------------------------------------------------------------------------------------------------------


def _draft(policy: Any, observed: Observed) -> _Draft:
    if isinstance(policy, TensorDictModuleBase) or (hasattr(policy, "in_keys") and hasattr(policy, "out_keys")):
        return _draft_chain(policy, observed)
    taken, by_name = _arguments(policy, {key[0] for key in observed.tensors})
    if len(taken) == 1 and taken[0].wants_tensordict:
        return _draft_tensordict(policy, observed, "it takes a TensorDict")
    if by_name or len(taken) > 1:
        return _draft_named(policy, taken, observed, by_name=by_name)
    direct = DirectCall(policy)
    whole = observed.whole
    if whole in observed.tensors:
        return _Draft((whole,), lambda: direct.call, "direct", "from observation to action", [direct])
    keys = tuple(key for key in observed.tensors if key[: len(whole)] == whole)

    def assemble() -> Call:
        call = direct.call
        return lambda *tensors: call(observed.tensordict(keys, tensors, skip=len(whole)))

    return _Draft(keys, assemble, "tensordict", "the observation has several keys", [direct])


@dataclass(frozen=True)
class _Parameter:
    name: str
    optional: bool
    keyword_only: bool
    wants_tensordict: bool


def _arguments(policy: Any, roots: set[str]) -> tuple[list[_Parameter], bool]:
    """The parameters that are filled, and whether they have to be by name.

    Required ones, and optional ones that are named like a key. None at all: one positional argument.
    """
    target = getattr(policy, "_orig_mod", policy)  # torch.compile hides the signature
    target = target.forward if isinstance(target, nn.Module) else target
    try:
        parameters = inspect.signature(target).parameters.values()
    except (TypeError, ValueError):  # some builtins have no signature
        return [], False
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    found = [
        _Parameter(p.name, p.default is not p.empty, p.kind is p.KEYWORD_ONLY, _wants_tensordict(p)) for p in named
    ]
    taken = [p for p in found if not p.optional or p.name in roots]
    if len([p for p in taken if not p.optional]) == 1 and not all(p.name in roots for p in taken):
        taken = [p for p in taken if not p.optional]  # the one required parameter gets the observation
    by_name = any(p.keyword_only for p in taken) or taken != found[: len(taken)]
    return taken, by_name and bool(taken)


def _wants_tensordict(parameter: inspect.Parameter) -> bool:
    annotation = parameter.annotation
    if isinstance(annotation, str):
        wants = "TensorDict" in annotation
    else:
        options = typing.get_args(annotation) or (annotation,)
        wants = any(isinstance(option, type) and issubclass(option, TensorDictBase) for option in options)
    return wants or parameter.name in ("tensordict", "td")


def _draft_named(policy: Any, taken: Sequence[_Parameter], observed: Observed, *, by_name: bool) -> _Draft:
    """Several named parameters get the keys of those names."""
    groups = [[key for key in observed.tensors if key[0] == p.name] for p in taken]
    for parameter, group in zip(taken, groups, strict=True):
        if not group:
            raise observed.lacks((parameter.name,), f"a parameter {parameter.name!r}")
    direct = DirectCall(policy)
    keys = tuple(key for group in groups for key in group)
    names = [p.name for p in taken]
    if not all(len(key) == 1 for key in keys):

        def assemble_nested() -> Call:
            call = direct.call

            def nested(*tensors: torch.Tensor) -> Any:
                whole = observed.tensordict(keys, tensors)
                return call(**{name: whole.get(name) for name in names})

            return nested

        return _Draft(keys, assemble_nested, "tensordict", "a parameter has several keys", [direct])

    def assemble() -> Call:
        call = direct.call
        return (lambda *tensors: call(**dict(zip(names, tensors, strict=True)))) if by_name else call

    return _Draft(keys, assemble, "direct", f"from {', '.join(names)} to action", [direct])


def _draft_tensordict(policy: Any, observed: Observed, reason: str) -> _Draft:
    keys = tuple(observed.tensors)
    return _Draft(
        keys, lambda: lambda *tensors: policy(observed.tensordict(keys, tensors)), "tensordict", reason
    )  # fmt: skip


def _draft_chain(policy: Any, observed: Observed) -> _Draft:
    for key in map(as_key, policy.in_keys):
        if not any(known[: len(key)] == key for known in observed.tensors):
            carried = ("next", *key) in map(as_key, policy.out_keys)
            note = " and writes for the next step (recurrent state is not carried by this release)" if carried else ""
            raise observed.lacks(key, f"the key {show_key(key)}{note}")
    program = Program(policy)
    refusal = program.refusal
    if refusal is None and not all(key in observed.tensors for key in program.in_keys):
        refusal = "it reads a key that has parts"
    if refusal is not None:
        draft = _draft_tensordict(policy, observed, refusal)
        draft.program = None if not isinstance(policy, TensorDictModuleBase) else program
        return draft
    return _Draft(
        tuple(program.in_keys),
        program.assemble,
        "direct",
        "its modules are known",
        program.directs,
        program,
        program.out_keys,
    )
