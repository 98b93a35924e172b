"""What a policy wrote: by which keys, how to take it from a result, and whether it is an action of this space."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from rlcollect.envs.spaces import ActionCodec
from rlcollect.errors import PolicyError
from rlcollect.layout import Key, Leaf, show_key, tensordict_leaves

__all__ = ["Take", "checked_leaves", "outputs_by_key", "take_by_keys"]

Take = Callable[[Any, Sequence[Key]], tuple[Any, ...]]
NUMBERS = (torch.Tensor, np.ndarray, np.generic, int, float)


def outputs_by_key(
    result: Any, out_keys: Sequence[Key] | None, inputs: set[Key], actions: ActionCodec
) -> tuple[dict[Key, Any], Take | None]:
    """The outputs of one call by key, and how to take some of them from the result of a later call.

    Args:
        result: what the policy returned.
        out_keys: of a chain of known modules, whose result is a tuple in this order, or a single value.
        inputs: keys of the observation: what is written there is not recorded.
        actions: how actions are stored.

    Returns:
        Values by key; None in the place of a taker where the result is itself the one output.

    Raises:
        PolicyError: it is nothing that an action of this space could be found in.
    """
    if out_keys is not None:
        values, take = _declared(result, out_keys)
    elif isinstance(result, TensorDictBase):
        values, take = dict(tensordict_leaves(result)), _take_from_tensordict
    elif isinstance(result, Mapping):
        values, take = _mapping(result)
    else:
        values, take = _bare(result, actions)
    kept = {key: value for key, value in values.items() if key not in inputs}
    return {key: value for key, value in kept.items() if not any(part.startswith("_") for part in key)}, take


def _declared(result: Any, out_keys: Sequence[Key]) -> tuple[dict[Key, Any], Take | None]:
    values = result if isinstance(result, tuple) else (result,)
    if len(values) != len(out_keys):
        raise PolicyError(
            f"The policy declares {len(out_keys)} out_keys ({', '.join(map(show_key, out_keys))}) and returned "
            f"{len(values)} value(s)."
        )
    by_key = dict(zip(out_keys, values, strict=True))
    return by_key, take_by_keys(out_keys) if isinstance(result, tuple) else None


def take_by_keys(out_keys: Sequence[Key] | None) -> Take:
    """How to take outputs from the result of a program with these `out_keys`; None: from a TensorDict."""
    if out_keys is None:
        return _take_from_tensordict
    places = {key: place for place, key in enumerate(out_keys)}

    def take(result: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
        values = result if isinstance(result, tuple) else (result,)
        return tuple([values[places[key]] for key in keys])

    return take


def _take_from_tensordict(result: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
    values = tuple([result.get(key if len(key) > 1 else key[0], None) for key in keys])
    if any(value is None for value in values):
        lacking = next(key for key, value in zip(keys, values, strict=True) if value is None)
        raise PolicyError(f"The policy wrote {show_key(lacking)} at first, and now it did not.")
    return values


def _mapping(result: Mapping[Any, Any]) -> tuple[dict[Key, Any], Take]:
    """A mapping with an "action" is a set of outputs; any other is the action itself, by its parts."""
    below = () if "action" in result else ("action",)
    values = {(*below, *key): value for key, value in _flat(result)}

    def take(later: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
        return tuple([_at(later, key[len(below) :]) for key in keys])

    return values, take


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


def _bare(result: Any, actions: ActionCodec) -> tuple[dict[Key, Any], Take | None]:
    keys = [leaf.key for leaf in actions.leaves]
    several = len(keys) > 1 or isinstance(actions.space, spaces.Tuple)
    if several and isinstance(result, tuple | list) and len(result) == len(keys):
        return dict(zip(keys, result, strict=True)), lambda later, _: tuple(later)
    if keys != [("action",)]:
        raise PolicyError(
            f"The policy should return an action with the parts {', '.join(map(show_key, keys))}, as a TensorDict, a "
            f"mapping or a tuple; {_kind(result)} came."
        )
    if not isinstance(result, NUMBERS):
        raise PolicyError(
            f"The policy should return an action tensor, or several outputs by name, as a TensorDict or a mapping "
            f'({{"action": ..., "log_prob": ...}}); {_kind(result)} came.'
        )
    return {("action",): result}, None


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    return f"{type(value).__name__} ({value!r})"


# --- checks -----------------------------------------------------------------------------------------------------------


def checked_leaves(
    values: Mapping[Key, Any], actions: ActionCodec, observed: Sequence[Key], num_lanes: int | None, ours: Sequence[str]
) -> tuple[Leaf, ...]:
    """The leaves that the outputs are stored as: those of the action, then the others.

    Raises:
        PolicyError: no action, an action that does not fit, a name of ours, a value that is no tensor of the lanes.
    """
    lead = () if num_lanes is None else (num_lanes,)
    action_keys = [leaf.key for leaf in actions.leaves]
    _check_there(values, action_keys)
    for leaf in actions.leaves:
        _check_action(leaf, values[leaf.key], lead, actions)
    extras = [key for key in values if key not in action_keys]
    _check_names([*action_keys, *extras], observed, {*ours} - {"action"})
    return (*actions.leaves, *(_extra_leaf(key, values[key], lead) for key in extras))


def _check_there(values: Mapping[Key, Any], action_keys: Sequence[Key]) -> None:
    lacking = [key for key in action_keys if key not in values]
    if not lacking:
        return
    if action_keys != [("action",)] and all(key[1:] in values for key in action_keys):
        raise PolicyError(
            "The policy returned the parts of an action at the root of its TensorDict; nest them: "
            f"{', '.join(map(show_key, action_keys))}."
        )
    written = ", ".join(show_key(key) for key in values) or "nothing"
    raise PolicyError(f"The policy should write {show_key(lacking[0])}; it wrote {written}.")


def _check_names(keys: Sequence[Key], observed: Sequence[Key], ours: set[str]) -> None:
    for place, key in enumerate(keys):
        if key[0] in ours:
            raise PolicyError(f"The policy writes {show_key(key)}, which is a name of ours. Give it another.")
        for other in (*observed, *keys[:place]):
            shorter = min(len(key), len(other))
            if key[:shorter] == other[:shorter]:
                raise PolicyError(
                    f"The policy writes {show_key(key)}, and {show_key(other)} stands there too: one would lie below "
                    "the other. Give it another name."
                )


def _extra_leaf(key: Key, value: Any, lead: tuple[int, ...]) -> Leaf:
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise PolicyError(f"The policy writes {show_key(key)}, which should be a tensor; {_kind(value)} came.")
    tensor = _as_tensor(key, value)
    if tuple(tensor.shape[: len(lead)]) != lead:
        raise PolicyError(
            f"The policy writes {show_key(key)} of shape {list(tensor.shape)}; its first dimension should be the "
            f"{lead[0]} lanes."
        )
    return Leaf(key, tuple(tensor.shape[len(lead) :]), tensor.dtype)


def _as_tensor(key: Key, value: Any) -> torch.Tensor:
    if isinstance(value, NUMBERS):
        try:
            return torch.as_tensor(value)
        except (RuntimeError, TypeError, ValueError):  # an array of objects
            pass
    raise PolicyError(f"The policy writes {show_key(key)}, which should be a tensor; {_kind(value)} came.")


def _check_action(leaf: Leaf, value: Any, lead: tuple[int, ...], actions: ActionCodec) -> None:
    wanted = (*lead, *leaf.shape)
    tensor = _as_tensor(leaf.key, value)
    real = leaf.dtype.is_floating_point
    same_kind = tensor.dtype.is_floating_point if real else not (tensor.is_floating_point() or tensor.is_complex())
    if tuple(tensor.shape) == wanted and same_kind:
        return
    hint = ""
    if lead == () and tuple(tensor.shape) == (1, *wanted):
        hint = " A single lane shows the policy unbatched observations; num_envs=1 gives it a batch of one lane."
    elif not real and tuple(tensor.shape[: len(wanted)]) == wanted and tensor.ndim == len(wanted) + 1:
        hint = " If these are scores or one-hot actions, return their argmax(-1)."
    raise PolicyError(
        f"{show_key(leaf.key)} should have shape {list(wanted)} and dtype {str(leaf.dtype).removeprefix('torch.')} "
        f"for the action space {actions.space}; {_kind(value)} came.{hint}"
    )
