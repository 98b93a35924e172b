"""What a policy says of its outputs and its state without being called: specs and primers, as TorchRL's modules have.

A spec is anything with a `shape` and a `dtype`; a composite one has `keys(include_nested, leaves_only)` and items. This
package never imports TorchRL.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule
from torch import nn

from rlcollect.errors import PolicyError
from rlcollect.interfaces import ActionForm
from rlcollect.layout import Key, as_key, show_key
from rlcollect.rollout.policy.program import UNUSED
from rlcollect.weights.naming import module_of

__all__ = ["generators_of", "looks_for_is_init", "modules_of", "stated_initial", "stated_outputs"]


def modules_of(policy: Any) -> Iterator[nn.Module]:
    """Every module that a policy is made of, as far as torch knows."""
    owner = module_of(policy)
    if owner is not None:
        yield from owner.modules()


def looks_for_is_init(policy: Any) -> bool:
    """Whether a part of the policy looks for `is_init` without declaring it, as TorchRL's exploration modules do."""
    return any(getattr(module, "is_init_key", None) == "is_init" for module in modules_of(policy))


def generators_of(policy: Any) -> list[torch.Generator]:
    """Generators of random numbers that parts of a policy have for themselves."""
    return [
        value for module in modules_of(policy) for value in vars(module).values() if isinstance(value, torch.Generator)
    ]


def stated_outputs(
    policy: Any, actions: ActionForm, lead: Sequence[int], *, trusted: bool
) -> dict[Key, torch.Tensor] | None:
    """Zeros for every output of a policy that declares their keys and shapes; None where one is not known.

    Shapes come from `policy.spec`, of the action from the action space; a log-probability is one number a lane, where
    there is one action a lane, and not one of each agent.

    Args:
        policy: what the user passed.
        actions: how actions are stored.
        lead: the leading dimensions: `[N]`, or none for a single lane.
        trusted: whether declarations are believed. None of a policy that is not: it is called.
    """
    keys = [as_key(key) for key in getattr(policy, "out_keys", ())]
    keys = [key for key in keys if key != UNUSED]
    known = dict(_spec_leaves(getattr(policy, "spec", None), len(lead)))
    known |= {leaf.key: (leaf.shape, leaf.dtype) for leaf in actions.leaves}
    one_action = all(leaf.key[0] == "action" for leaf in actions.leaves)
    for part in _distributions(policy) if one_action else ():
        params = [known[key][1] for key in map(as_key, part.in_keys) if key in known]
        known |= {key: ((), params[0]) for key in map(as_key, part.log_prob_keys) if params and key not in known}
    if not trusted or not keys or not all(key in known for key in keys):
        return None
    return {key: torch.zeros((*lead, *known[key][0]), dtype=known[key][1]) for key in keys}


def _distributions(policy: Any) -> list[ProbabilisticTensorDictModule]:
    return [m for m in modules_of(policy) if isinstance(m, ProbabilisticTensorDictModule) and m.return_log_prob]


def stated_initial(policy: Any, num_lanes: int | None) -> dict[Key, torch.Tensor]:
    """The first value of state, of one lane, where the policy says it: by primers of its parts, or by its spec."""
    found: dict[Key, torch.Tensor] = {}
    batch_dims = 0 if num_lanes is None else 1
    for key, (shape, dtype) in _spec_leaves(getattr(policy, "spec", None), batch_dims):
        if key[0] == "next" and len(key) > 1:
            found[key[1:]] = torch.zeros(shape, dtype=dtype)
    for module in modules_of(policy):
        make = getattr(module, "make_tensordict_primer", None)
        if callable(make):
            try:
                found |= _primed(make())
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                reads = [as_key(key) for key in getattr(module, "in_keys", ())]
                both = [key for key in reads if key in map(as_key, getattr(module, "out_keys", ()))]
                next_keys = "".join(f"; write {show_key(key)} under {show_key(('next', *key))}" for key in both)
                raise PolicyError(
                    f"{type(module).__name__}, which reads {', '.join(map(show_key, reads))}, cannot say how its state "
                    f"begins (make_tensordict_primer()): {error}{next_keys}"
                ) from error
    return found


def _primed(primer: Any) -> dict[Key, torch.Tensor]:
    default = getattr(primer, "default_value", 0.0)
    found = {}
    for key, (shape, dtype) in _spec_leaves(getattr(primer, "primers", None), 0):
        value = default.get(key if len(key) > 1 else key[0], 0.0) if isinstance(default, Mapping) else default
        if isinstance(value, int | float | torch.Tensor):
            found[key] = torch.as_tensor(value, dtype=dtype).expand(shape).clone()
    return found


def _spec_leaves(spec: Any, batch_dims: int) -> Iterator[tuple[Key, tuple[tuple[int, ...], torch.dtype]]]:
    """Shape of one lane, and dtype, of every leaf of a composite spec that has one.

    Specs are written for one lane, or for all: a composite spec's own shape tells which.
    """
    if spec is None or not hasattr(spec, "keys"):
        return
    skip = min(len(getattr(spec, "shape", ())), batch_dims)
    for name in spec.keys(True, True):
        leaf = spec[name]
        if leaf is not None and hasattr(leaf, "shape") and isinstance(getattr(leaf, "dtype", None), torch.dtype):
            yield as_key(name), (tuple(leaf.shape[skip:]), leaf.dtype)
