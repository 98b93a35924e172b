"""What a policy wrote: by which keys, how to take it from a result, and whether it is an action of this space."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDictBase

from rlcollect.devices import CPU
from rlcollect.errors import PolicyError
from rlcollect.interfaces import ActionForm
from rlcollect.layout import Key, Leaf, overlap, show_key, tensordict_leaves

__all__ = ["Take", "checked_leaves", "kind_of", "outputs_by_key", "take_by_keys"]

Take = Callable[[Any, Sequence[Key]], tuple[Any, ...]]
Path = tuple[Any, ...]
ENV_GIVES = ("action", "info", "next")  # names below "next" that are ours beside those at the root
NUMBERS = (torch.Tensor, np.ndarray, np.generic, int, float)


def outputs_by_key(
    result: Any, out_keys: Sequence[Key] | None, inputs: set[Key], actions: ActionForm
) -> tuple[dict[Key, Any], Take | None]:
    """The outputs of one call by key, and how to take some of them from the result of a later call.

    Args:
        result: what the policy returned.
        out_keys: of a chain of known modules, whose result is a tuple in this order, or a single value.
        inputs: keys of what the policy is shown: what is written there is not recorded.
        actions: how actions are stored.

    Returns:
        Values by key; None in the place of a taker where the result is itself the one output.

    Raises:
        PolicyError: it is nothing that an action of this space could be found in.
    """
    if out_keys is not None:
        values, take = _declared(result, out_keys)
    elif isinstance(result, TensorDictBase):
        values, take = dict(tensordict_leaves(result)), _taker(result)
    elif isinstance(result, Mapping):
        values, take = _mapping(result, actions)
    else:
        values, take = _bare(result, actions)
    return {key: value for key, value in values.items() if key not in inputs}, take


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


def _other_keys(first: set[Any], now: set[Any]) -> PolicyError:
    lacking, new = (sorted(show_key(_as_tuple(key)) for key in keys) for keys in (first - now, now - first))
    what = [f"lacks {', '.join(lacking)}"] * bool(lacking) + [f"has {', '.join(new)} too"] * bool(new)
    return PolicyError(
        f"What the policy wrote {' and '.join(what)}, unlike at first. It should write the same keys each time "
        "(zeros, say, where there is nothing to write)."
    )


def _as_tuple(key: Any) -> Key:
    return tuple(map(str, key)) if isinstance(key, tuple) else (str(key),)


def _names(data: TensorDictBase, whole: bool) -> set[Any]:
    return set(data.keys(whole, whole))


def _other_form(first: str, now: Any) -> PolicyError:
    return PolicyError(f"The policy returned {first} at first, and now {kind_of(now)} came.")


def _taker(first: TensorDictBase) -> Take:
    """From a TensorDict, which has the same keys each time."""
    whole = any(isinstance(value, TensorDictBase) for value in first.values())  # else there are no levels to walk
    names = _names(first, whole)

    def take(result: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
        if not isinstance(result, TensorDictBase):
            raise _other_form("a TensorDict", result)
        now = _names(result, whole)
        if names != now:
            raise _other_keys(names, now)
        return _take_from_tensordict(result, keys)

    return take


def _take_from_tensordict(result: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
    values = tuple([result.get(key if len(key) > 1 else key[0], None) for key in keys])
    if any(value is None for value in values):
        lacking = next(key for key, value in zip(keys, values, strict=True) if value is None)
        raise PolicyError(f"The policy wrote {show_key(lacking)} at first, and now it did not.")
    return values


def _mapping(result: Mapping[Any, Any], actions: ActionForm) -> tuple[dict[Key, Any], Take]:
    """A mapping with an "action" is a set of outputs; any other is an action with parts, by these."""
    known = {leaf.key for leaf in actions.leaves}
    root = _root(actions)
    has_action = any(_as_tuple(name)[:1] == root[:1] for name in result)
    below = () if has_action or known == {root} else root
    is_tuple = isinstance(actions.space, spaces.Tuple)
    parts = _flat(result, tuples=is_tuple)
    form = {path for _, path, _ in parts}
    values = {(*below, *key): value for key, _, value in parts}
    paths = {(*below, *key): path for key, path, _ in parts}
    if below and (stray := next((key for key in values if key not in known), None)) and known <= {*values}:
        raise PolicyError(
            f"The policy returned an action by its parts, and {show_key(stray[len(below) :])}, which is none of "
            f'{actions.space}. To return more than the action: {{{show_key(root)}: {{...}}, "value": ...}}.'
        )

    def take(later: Any, keys: Sequence[Key]) -> tuple[Any, ...]:
        if not isinstance(later, Mapping):
            raise _other_form("a mapping", later)
        now = {path for _, path, _ in _flat(later, tuples=is_tuple)}
        if now != form:
            raise _other_keys(form, now)
        return tuple([_at(later, paths[key]) for key in keys])

    return values, take


def _root(actions: ActionForm) -> Key:
    """The key that the whole action stands under; () where there are several, one for each group of agents."""
    keys = [leaf.key for leaf in actions.leaves]
    roots = {key[: key.index("action") + 1] if "action" in key else key for key in keys}
    return next(iter(roots)) if len(roots) == 1 else ()


def _flat(mapping: Mapping[Any, Any], *, tuples: bool = False) -> list[tuple[Key, Path, Any]]:
    """Key, the way there, and value of each part; a name may be a tuple, as in a TensorDict.

    Args:
        mapping: the outputs.
        tuples: whether the action may be a tuple, whose parts have their places as names.
    """
    found: list[tuple[Key, Path, Any]] = []
    for name, value in mapping.items():
        key = _as_tuple(name)
        inner: list[tuple[Key, Path, Any]] = [((), (), value)]
        if isinstance(value, Mapping):
            inner = _flat(value)
        elif tuples and key == ("action",) and isinstance(value, tuple | list):
            inner = [((str(place),), (place,), part) for place, part in enumerate(value)]
        found += [((*key, *below), (name, *path), part) for below, path, part in inner]
    return found


def _at(mapping: Any, path: Path) -> Any:
    for name in path:
        mapping = mapping[name]
    return mapping


def _bare(result: Any, actions: ActionForm) -> tuple[dict[Key, Any], Take | None]:
    keys = [leaf.key for leaf in actions.leaves]
    several = len(keys) > 1 or isinstance(actions.space, spaces.Tuple)
    if several and isinstance(result, tuple | list) and len(result) == len(keys):
        return dict(zip(keys, result, strict=True)), lambda later, _: tuple(later)
    if keys != [_root(actions)]:
        raise PolicyError(
            f"The policy should return an action with the parts {', '.join(map(show_key, keys))}, as a TensorDict, a "
            f"mapping or a tuple; {kind_of(result)} came."
        )
    if not isinstance(result, NUMBERS):
        raise PolicyError(
            f"The policy should return an action tensor, or several outputs by name, as a TensorDict or a mapping "
            f'({{{show_key(keys[0])}: ..., "log_prob": ...}}); {kind_of(result)} came.'
        )
    return {keys[0]: result}, None


def kind_of(value: Any) -> str:
    """What came, in a few words."""
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {list(value.shape)} and dtype {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping | TensorDictBase):
        return f"{type(value).__name__} with the keys {', '.join(map(repr, value.keys())) or '(none)'}"
    if isinstance(value, tuple | list) and any(isinstance(part, torch.Tensor) for part in value):
        return f"a {type(value).__name__} of {len(value)} ({'; '.join(map(kind_of, value))})"
    return f"{type(value).__name__} ({value!r})"


# --- checks -----------------------------------------------------------------------------------------------------------


def checked_leaves(
    values: Mapping[Key, Any],
    actions: ActionForm,
    observed: Sequence[Key],
    state: Sequence[Key],
    num_lanes: int | None,
    ours: Sequence[str],
    device: torch.device = CPU,
) -> tuple[Leaf, ...]:
    """The leaves that the outputs are stored as: those of the action, then the others.

    Args:
        values: the first outputs by key.
        actions: how actions are stored.
        observed: keys of the observation.
        state: keys of the policy's state.
        num_lanes: N; None for a single lane.
        ours: names that an output may not have.
        device: where outputs should be.

    Raises:
        PolicyError: no action, an action that does not fit, a name of ours, a value that is no tensor of the lanes.
    """
    lead = () if num_lanes is None else (num_lanes,)
    action_keys = [leaf.key for leaf in actions.leaves]
    extras = [key for key in values if key not in action_keys]
    _check_names([*action_keys, *extras], observed, state, {*ours} - {"action", "next"})
    _check_there(values, action_keys)
    for leaf, space in zip(actions.leaves, actions.parts, strict=True):
        _check_action(leaf, values[leaf.key], lead, actions, bits=isinstance(space, spaces.MultiBinary))
    for key, value in values.items():
        if isinstance(value, torch.Tensor) and value.device not in (device, CPU):
            raise PolicyError(
                f"{show_key(key)} should be on {device}, where the policy computes, and came on {value.device}. Move "
                "the policy as a whole, or tell where it is with policy_device=."
            )
    return (*actions.leaves, *(_extra_leaf(key, values[key], lead) for key in extras))


def _check_there(values: Mapping[Key, Any], action_keys: Sequence[Key]) -> None:
    lacking = [key for key in action_keys if key not in values]
    if not lacking:
        return
    if all(any(key[start:] in values for start in range(1, len(key))) for key in action_keys):
        raise PolicyError(
            "The policy wrote its action, or parts of it, at the root of its TensorDict; nest what it writes: "
            f"{', '.join(map(show_key, action_keys))}."
        )
    written = [show_key(key) for key in values]
    near = difflib.get_close_matches(show_key(lacking[0]), written, n=1)
    hint = f" Is {near[0]} meant for it?" if near else ""
    raise PolicyError(
        f"The policy should write {show_key(lacking[0])}; it wrote {', '.join(written) or 'nothing'}.{hint}"
    )


def _check_names(keys: Sequence[Key], observed: Sequence[Key], state: Sequence[Key], ours: set[str]) -> None:
    for place, key in enumerate(keys):
        after = key[0] == "next"  # beside the next observation
        name, taken = (key[1:], {*ours, *ENV_GIVES}) if after else (key, ours)
        if not name or name[0] in taken:
            raise PolicyError(f"The policy writes {show_key(key)}, which is a name of ours. Give it another.")
        below_next = [("next", *other) for other in observed]
        for other in (*(below_next if after else (*observed, *state)), *keys[:place]):
            if overlap(key, other):
                raise PolicyError(
                    f"The policy writes {show_key(key)}, and {show_key(other)} stands there too: one would lie below "
                    "the other. Give it another name."
                )


def _extra_leaf(key: Key, value: Any, lead: tuple[int, ...]) -> Leaf:
    if not isinstance(value, torch.Tensor | np.ndarray):
        raise PolicyError(f"The policy writes {show_key(key)}, which should be a tensor; {kind_of(value)} came.")
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
    raise PolicyError(f"The policy writes {show_key(key)}, which should be a tensor; {kind_of(value)} came.")


def _check_action(leaf: Leaf, value: Any, lead: tuple[int, ...], actions: ActionForm, *, bits: bool) -> None:
    wanted = (*lead, *leaf.shape)
    tensor = _as_tensor(leaf.key, value)
    real = leaf.dtype.is_floating_point
    same_kind = tensor.dtype.is_floating_point if real else not (tensor.is_floating_point() or tensor.is_complex())
    if bits and tensor.is_floating_point():  # what torch's Bernoulli draws
        same_kind = tensor.device.type != "meta" and bool(((tensor == 0) | (tensor == 1)).all())
    if tuple(tensor.shape) == wanted and same_kind:
        return
    hint = ""
    if lead == () and tuple(tensor.shape) == (1, *wanted):
        hint = " A single lane shows the policy unbatched observations; num_envs=1 gives it a batch of one lane."
    elif not real and tensor.ndim and (*tensor.shape[:-1],) == wanted and tensor.shape[-1] > 1:
        hint = " If these are scores or one-hot actions, return their argmax(-1)."
    elif tuple(tensor.shape) == wanted and not real:
        hint = " Integers are due: .long(), say."
    elif tuple(tensor.shape) == (*wanted, 1):
        hint = " Leave out its last dimension: .squeeze(-1)."
    elif (*tensor.shape, 1) == wanted:
        hint = " Give it its last dimension: .unsqueeze(-1)."
    raise PolicyError(
        f"{show_key(leaf.key)} should have shape {list(wanted)} and dtype {str(leaf.dtype).removeprefix('torch.')} "
        f"for the action space {actions.space}; {kind_of(value)} came.{hint}"
    )
