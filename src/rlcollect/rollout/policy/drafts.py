"""Reading a policy: which keys it takes and how it is called, before anything is known of its outputs.

Two paths:

- *direct*: tensors in, tensors out. Plain modules and functions, and chains of TensorDictModules, whose inner modules
  are called one after the other without a TensorDict (`program`).
- *tensordict*: everything else from TensorDict to TensorDict gets one, each step.

This module knows no environment, only leaves and spaces.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModuleBase

from rlcollect.errors import PolicyError
from rlcollect.layout import Key, as_key, nested, show_key
from rlcollect.rollout.policy.carried import IS_INIT
from rlcollect.rollout.policy.direct import DirectCall
from rlcollect.rollout.policy.program import Program
from rlcollect.rollout.policy.signature import Parameter, taken_parameters

__all__ = ["Draft", "Observed", "Whole", "draft_policy", "is_declared"]

Call = Callable[..., Any]


@dataclass(frozen=True)
class Observed:
    """What a policy is shown.

    Attributes:
        tensors: the first observation by key, `[N, *shape]`, or `[*shape]` for a single lane; what has no fixed form as
            it is.
        num_lanes: N; None for a single lane.
        whole: the key under which the whole observation stands; () for a Dict space, whose keys stand at the root.
        state: the policy's own state by key, in the same shapes; None where the shape is not known yet.
        marks_first: whether a policy that takes any TensorDict finds `is_init` in it.
        loose: the keys of what has no fixed form: no tensors, or of other shapes each time.
        pool: of how many lanes these N are some, other ones at each step; None: they are all.
    """

    tensors: Mapping[Key, Any]
    num_lanes: int | None
    whole: Key
    state: Mapping[Key, torch.Tensor | None] = field(default_factory=dict)
    marks_first: bool = False
    pool: int | None = None
    loose: frozenset[Key] = frozenset()

    @property
    def lead(self) -> list[int]:
        """The leading dimensions: `[N]`, or none for a single lane."""
        return [] if self.num_lanes is None else [self.num_lanes]

    @property
    def extras(self) -> list[Key]:
        """What a TensorDict holds beside the observation."""
        return [*self.state, *([IS_INIT] if self.marks_first and IS_INIT not in self.tensors else [])]

    def is_own(self, key: Key) -> bool:
        """Whether a key is part of the observation, not of the policy's past."""
        return key in self.tensors

    def example(self, key: Key) -> Any:
        """The first value of a key; None if it is not known yet."""
        if key in self.tensors:
            value = self.tensors[key]
            return value.clone() if hasattr(value, "clone") else value
        if key == IS_INIT:
            return torch.ones((*self.lead, 1), dtype=torch.bool)
        value = self.state[key]
        return None if value is None else value.clone()

    def tensordict(self, keys: Sequence[Key], tensors: Sequence[Any], skip: int = 0) -> TensorDict:
        """A TensorDict of the lanes, without what is not known yet; the first `skip` parts of each key are left out."""
        known = ((key[skip:], value) for key, value in zip(keys, tensors, strict=True) if value is not None)
        return TensorDict(nested(known), batch_size=self.lead)

    def lacks(self, key: Key, reads: str, written: Sequence[Key] = ()) -> PolicyError:
        """What to raise when the policy reads what is not there, neither here nor among what it writes itself."""
        names = [show_key(known) for known in self.tensors]
        others = [show_key(known) for known in written if known != key]
        near = difflib.get_close_matches(show_key(key), [*names, *others], n=1)
        hint = (f"Did you mean {near[0]}? " if near else "") + f"The observation has {', '.join(names)}."
        if key == ("step_count",):
            hint += " (Step counts are recorded, and not shown to policies.)"
        elif not near:
            hint += f" If it is recurrent state, write the next one under {show_key(('next', *key))}, and add "
            hint += f"initial_policy_state={{{show_key(key)}: torch.zeros(...)}}, of one lane."
        return PolicyError(f"The policy reads {reads}, which the environment does not give. {hint}")


@dataclass
class Draft:
    """A call, before anything is known of its outputs.

    Attributes:
        in_keys: what `assemble()` takes, what is the observation's own first.
        assemble: gives the call.
        path: "direct" or "tensordict".
        reason: why.
        directs: what `refresh` has to look at.
        program: of a chain.
        out_keys: of a program; None: the result tells.
        names: of all parameters; one that is not filled, or a group, may turn out to be state.
        takes_all: whether it is shown all there is.
    """

    in_keys: tuple[Key, ...]
    assemble: Callable[[], Call]
    path: str
    reason: str
    directs: Sequence[DirectCall] = ()
    program: Program | None = None
    out_keys: list[Key] | None = None
    names: tuple[str, ...] = ()
    takes_all: bool = False


def is_declared(policy: Any) -> bool:
    """Whether a policy says itself which keys it reads and writes."""
    return isinstance(policy, TensorDictModuleBase) or (hasattr(policy, "in_keys") and hasattr(policy, "out_keys"))


def draft_policy(policy: Any, observed: Observed, exploration: InteractionType, *, twins: bool) -> Draft:
    """How a policy is called with what is observed.

    Args:
        policy: what the user passed.
        observed: what it is shown.
        exploration: how samples are chosen.
        twins: whether modules may be called through twins (`direct`).

    Raises:
        PolicyError: it reads what is not there.
    """
    if isinstance(policy, Whole):
        return _draft_tensordict(policy, observed, policy.reason)
    if is_declared(policy):
        return _draft_chain(policy, observed, exploration, twins=twins)
    return _draft_callable(policy, observed, twins=twins)


class Whole:
    """A chain that gets a TensorDict, as a whole, whatever its parts are.

    Args:
        policy: the chain.
        reason: why.
    """

    def __init__(self, policy: Any, reason: str) -> None:
        self.policy = policy
        self.reason = reason
        self.in_keys, self.out_keys = policy.in_keys, policy.out_keys

    def __call__(self, tensordict: Any) -> Any:
        """What the chain does."""
        return self.policy(tensordict)


# --- from TensorDict to TensorDict ------------------------------------------------------------------------------------


def _draft_chain(policy: Any, observed: Observed, exploration: InteractionType, *, twins: bool) -> Draft:
    written = [as_key(key) for key in policy.out_keys]
    for key in map(as_key, policy.in_keys):
        inside = [known for known in written if len(known) > len(key)]  # a group of keys that the chain makes itself
        below = any(key[: len(node)] == node for node in observed.loose)
        known = (*observed.tensors, *observed.state, IS_INIT, *inside)
        if not below and not any(name[: len(key)] == key for name in known):
            raise observed.lacks(key, f"the key {show_key(key)}", written)
    shown = [*observed.tensors, *observed.extras]
    program = Program(policy, exploration, observed.lead, shown, twins=twins)
    refusal = program.refusal
    if refusal is None and not all(key in (*shown, IS_INIT) for key in program.in_keys):
        refusal = "it reads a key that has parts"
    if refusal is None and not observed.loose.isdisjoint(program.in_keys):
        refusal = "it reads what has no fixed form"
    if refusal is not None:
        draft = _draft_tensordict(policy, observed, refusal)
        draft.program = program if isinstance(policy, TensorDictModuleBase) else None
        return draft
    in_keys = _own_first(observed, program.in_keys)
    reason = "its modules are known" + (f"; {program.unknown}" if program.unknown else "")
    return Draft(
        in_keys,
        lambda: program.assemble(in_keys),
        "direct",
        reason,
        directs=program.directs,
        program=program,
        out_keys=program.out_keys,
    )


def _draft_tensordict(policy: Any, observed: Observed, reason: str) -> Draft:
    reads_first = IS_INIT in map(as_key, getattr(policy, "in_keys", ()))
    keys = tuple(dict.fromkeys([*observed.tensors, *observed.extras, *([IS_INIT] if reads_first else [])]))

    def call(*tensors: Any) -> Any:
        data = observed.tensordict(keys, tensors)
        result = policy(data)
        return data if result is None else result  # it may only have written to it

    return Draft(
        keys,
        lambda: call,
        "tensordict",
        reason,
        takes_all=True,
    )


def _own_first(observed: Observed, keys: Sequence[Key]) -> tuple[Key, ...]:
    return tuple(sorted(keys, key=lambda key: not observed.is_own(key)))


# --- from tensors to tensors ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Argument:
    """One argument of a call: a tensor, or a TensorDict of several."""

    name: str | None  # None: by place
    keys: tuple[Key, ...]
    skip: int  # parts of the keys that are left out in a TensorDict

    @property
    def is_tensor(self) -> bool:
        return len(self.keys) == 1 and len(self.keys[0]) == self.skip

    def taker(self, observed: Observed, keys: Sequence[Key]) -> Callable[[Sequence[Any]], Any]:
        """From the tensors of `keys`, in their order, to the argument."""
        places = [keys.index(key) for key in self.keys]
        if self.is_tensor:
            return operator.itemgetter(places[0])
        return lambda tensors: observed.tensordict(self.keys, [tensors[place] for place in places], skip=self.skip)


def _draft_callable(policy: Any, observed: Observed, *, twins: bool) -> Draft:
    given = tuple(dict.fromkeys((*observed.tensors, *observed.state, IS_INIT)))
    roots = {key[0] for key in given}
    own = {key[0] for key in observed.tensors}
    taken = taken_parameters(policy, roots)
    required = [p for p in taken.filled if not p.optional]
    if len(required) == len(taken.filled) == 1 and required[0].wants_tensordict:
        return _draft_tensordict(policy, observed, "it takes a TensorDict")
    unknown = [p for p in required if p.name not in roots]
    if not taken.filled or (len(unknown) == 1 and not any(p.name in own for p in required)):
        only = unknown[0] if unknown else None  # it gets the observation, whatever its name
        past = [p for p in taken.filled if p is not only and p.name not in own]
        arguments = [_whole(observed, only), *(_named(p, given) for p in past)]
    else:
        if unknown:
            shown = ", ".join(repr(p.name) for p in unknown)
            near = [p.name for p in unknown if difflib.get_close_matches(p.name, own, n=1)]
            what = "a parameter" if len(unknown) == 1 else "the parameters"
            raise observed.lacks(((near or [unknown[-1].name])[0],), f"{what} {shown}")
        arguments = [_argument(p, given, by_name=taken.by_name) for p in taken.filled]
    names = tuple(p.name for p in (*taken.filled, *taken.others))
    return _draft_arguments(policy, arguments, observed, twins=twins, names=names)


def _whole(observed: Observed, parameter: Parameter | None) -> _Argument:
    """The one parameter that gets the observation, as it is."""
    name = parameter.name if parameter is not None and parameter.keyword_only else None
    keys = tuple(key for key in observed.tensors if key[: len(observed.whole)] == observed.whole)
    return _Argument(name, keys, len(observed.whole))


def _argument(parameter: Parameter, given: Sequence[Key], *, by_name: bool) -> _Argument:
    argument = _named(parameter, given)
    return argument if by_name else _Argument(None, argument.keys, argument.skip)


def _named(parameter: Parameter, given: Sequence[Key]) -> _Argument:
    return _Argument(parameter.name, tuple(key for key in given if key[0] == parameter.name), 1)


def _draft_arguments(
    policy: Any, arguments: Sequence[_Argument], observed: Observed, *, twins: bool, names: tuple[str, ...]
) -> Draft:
    direct = DirectCall(policy, twins=twins)
    keys = _own_first(observed, [key for argument in arguments for key in argument.keys])
    plain = all(argument.is_tensor for argument in arguments)
    in_place = plain and keys == tuple(argument.keys[0] for argument in arguments)

    def assemble() -> Call:
        call = direct.call
        by_place = [a.taker(observed, keys) for a in arguments if a.name is None]
        by_name = [(a.name, a.taker(observed, keys)) for a in arguments if a.name is not None]
        if in_place and not by_name:
            return call

        def arranged(*tensors: Any) -> Any:
            named = {name: take(tensors) for name, take in by_name}
            return call(*[take(tensors) for take in by_place], **named)

        def arranged_at_first(*tensors: Any) -> Any:
            """Without the state that is not known yet."""
            named = {name: value for name, take in by_name if (value := take(tensors)) is not None}
            return call(*[take(tensors) for take in by_place], **named)

        return arranged if all(value is not None for value in observed.state.values()) else arranged_at_first

    if plain:
        shown = [argument.keys[0][-1] for argument in arguments]
        reason = f"from {', '.join(shown)} to action"
        return Draft(keys, assemble, "direct", reason, directs=[direct], names=names)
    several = "the observation" if arguments[0].name is None and len(arguments) == 1 else "a parameter"
    return Draft(keys, assemble, "tensordict", f"{several} has several keys", directs=[direct], names=names)
