"""Calling a policy for the first time: what it reads, what it writes, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tensordict import TensorDictBase, is_leaf_nontensor, is_tensor_collection
from tensordict.nn import InteractionType

from rlcollect.devices import Transfer
from rlcollect.errors import PolicyError
from rlcollect.interfaces import ActionForm
from rlcollect.layout import Key, as_key, is_private, show_key
from rlcollect.rollout.policy.carried import IS_INIT
from rlcollect.rollout.policy.drafts import Draft, Observed, Whole, draft_policy, is_declared
from rlcollect.rollout.policy.outputs import Take, outputs_by_key, take_by_keys
from rlcollect.rollout.policy.stated import stated_outputs

__all__ = ["LANES_FIRST", "Calling", "Probe", "draft_of", "probe_policy", "version_of"]

Call = Callable[..., Any]
LANES_FIRST = (
    "The lanes come first: bring [num_layers, N, H] into [N, num_layers, H], or let `RecurrentModule` do it. "
    "initial_policy_state= has the shape of one lane."
)


@dataclass(frozen=True)
class Calling:
    """How a policy is to be called.

    Attributes:
        exploration: how samples are chosen.
        ours: names that an output may not have, beside those that are always ours.
        initial: what the user said of the policy's first state, of one lane, by key.
        trusted: outputs whose keys and shapes are declared are believed, without a call.
        twins: whether modules may be called through twins (`direct`).
        wrap: what makes the planned call another one: a compiler, a CUDA graph.
        warm_calls: calls that this needs before it is ready.
        transfer: between the host and the device where the policy computes.
    """

    exploration: InteractionType = InteractionType.RANDOM
    ours: Sequence[str] = ()
    initial: Mapping[Key, torch.Tensor] = field(default_factory=dict)
    trusted: bool = False
    twins: bool = True
    wrap: Callable[[Call], Call] | None = None
    warm_calls: int = 2
    transfer: Transfer = field(default_factory=Transfer)


@dataclass(frozen=True)
class Probe:
    """What is known of a policy after its first call.

    Attributes:
        policy: the policy; in a `Whole` if its parts cannot be called one by one.
        draft: how it is called.
        values: the first outputs by key; zeros of their shapes if it was not called.
        take: how to take outputs from later results.
        touched: whether it changed its input in place.
        called: whether it was called: a policy that is trusted need not be.
    """

    policy: Any
    draft: Draft
    values: Mapping[Key, Any]
    take: Take | None
    touched: bool
    called: bool


def draft_of(policy: Any, observed: Observed, calling: Calling) -> Draft:
    """How a policy is called, before anything is known of its outputs."""
    return draft_policy(policy, observed, calling.exploration, twins=calling.twins)


def _is_tensor_of(key: Key, value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (value is None and is_private(key))


def probe_policy(policy: Any, observed: Observed, actions: ActionForm, calling: Calling) -> Probe:
    """Calls a policy on the first observation.

    Modules of a chain may return mappings and arrays, which tensordict understands and a program does not: then the
    whole chain gets a TensorDict.

    Raises:
        PolicyError: it reads what is not there, fails, or returns nothing that an action could be found in.
    """
    draft = draft_of(policy, observed, calling)
    stated = stated_outputs(policy, actions, observed.lead, trusted=calling.trusted)
    if stated is not None:
        return Probe(policy, draft, stated, take_by_keys(draft.out_keys), touched=False, called=False)
    if draft.out_keys is None:
        result, touched = _tried(policy, draft, observed, calling)
        return _understood(policy, draft, result, touched, observed, actions, calling)
    why = "its modules return something else than tensors"
    try:
        result, touched = _tried(policy, draft, observed, calling)
    except PolicyError:
        result, touched, why = None, False, "its modules cannot be called with tensors alone"
    values = result if isinstance(result, tuple) else (result,)
    surprising = draft.program is not None and draft.program.wrote_more
    if not surprising and all(_is_tensor_of(key, value) for key, value in zip(draft.out_keys, values, strict=False)):
        return _understood(policy, draft, result, touched, observed, actions, calling)
    return probe_policy(
        Whole(policy, "a part writes more than it declares" if surprising else why), observed, actions, calling
    )


def _understood(
    policy: Any,
    draft: Draft,
    result: Any,
    touched: bool,
    observed: Observed,
    actions: ActionForm,
    calling: Calling,
) -> Probe:
    private = {key for key in observed.state if is_private(key)}
    shown = {*observed.tensors, *draft.in_keys} - private
    for node in observed.loose:
        value = observed.tensors[node]
        if is_tensor_collection(value):
            shown |= {(*node, *as_key(name)) for name in value.keys(True, True, is_leaf=is_leaf_nontensor)}
    if isinstance(result, TensorDictBase) and IS_INIT in draft.in_keys and not observed.is_own(IS_INIT):
        first = calling.transfer.move(torch.ones((*observed.lead, 1), dtype=torch.bool))
        if not torch.equal(result.get(IS_INIT, first), first):
            shown -= {IS_INIT}  # the policy has put something of its own in its place
    values, take = outputs_by_key(result, draft.out_keys, shown, actions)
    return Probe(policy, draft, values, take, touched=touched, called=True)


def _tried(policy: Any, draft: Draft, observed: Observed, calling: Calling) -> tuple[Any, bool]:
    """What the first call returns, and whether it changed its input in place."""
    arguments = [observed.example(key) for key in draft.in_keys]
    arguments = [calling.transfer.move(value) if isinstance(value, torch.Tensor) else value for value in arguments]
    before = [version_of(tensor) for tensor in arguments if tensor is not None]
    try:
        with torch.no_grad():
            result = draft.assemble()(*arguments)
    except PolicyError:
        raise
    except Exception as error:
        raise PolicyError(_failure(policy, draft, observed, error)) from error
    return result, [version_of(tensor) for tensor in arguments if tensor is not None] != before


def _failure(policy: Any, draft: Draft, observed: Observed, error: Exception) -> str:
    own = [key for key in draft.in_keys if observed.is_own(key)]
    shown = [f"{show_key(key)} {list(getattr(observed.tensors[key], 'shape', ()))}" for key in own]
    text = f"The policy failed on the first observation ({', '.join(shown)}): {type(error).__name__}: {error}"
    state = {key: value for key, value in observed.state.items() if value is not None}
    if state:
        forms = ", ".join(f"{show_key(key)} {list(value.shape)} {value.dtype}" for key, value in state.items())
        text += f"\nIt was shown its state {forms}. {LANES_FIRST}"
    unknown = [key for key, value in observed.state.items() if value is None]
    if unknown:
        lines = ", ".join(f"{show_key(key)}: torch.zeros(...)" for key in unknown)
        text += (
            f"\nIt was called without {', '.join(map(show_key, unknown))}, since nothing tells the shape of that "
            f"state. Add initial_policy_state={{{lines}}}, with the shapes of one lane."
        )
    if draft.takes_all and not observed.state and not is_declared(policy):
        text += (
            "\nIf it reads state of its own: td.get('hidden', None), or initial_policy_state={'hidden': "
            "torch.zeros(...)}, of one lane."
        )
    if observed.num_lanes is None:
        text += "\nA single lane shows the policy unbatched observations; num_envs=1 gives it a batch of one lane."
    puzzled = isinstance(error, AttributeError | IndexError | KeyError | TypeError)
    if puzzled and draft.path == "direct" and draft.program is None:
        text += "\nIf it takes a TensorDict, annotate its parameter so, or name it `tensordict` or `td`."
    return text


def version_of(tensor: Any) -> int:
    """How often torch has written to a tensor in place; numpy's writes do not count. 0 in inference mode."""
    return tensor._version if isinstance(tensor, torch.Tensor) and not tensor.is_inference() else 0
