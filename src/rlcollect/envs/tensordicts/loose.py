"""What is observed and has no fixed form: text and other objects, shapes that change, agents whose shapes differ.

It goes from the environment to the policy and into batches by value, beside the memory of the tensors. A *node* is the
level of a TensorDict that is passed on as it is: the value itself, a tensorclass, or a lazy stack of unlike parts.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, is_tensorclass

from rlcollect.errors import OptionError, SpaceError
from rlcollect.layout import Key, as_key, overlap, show_key

__all__ = ["Loose", "LooseRecord", "find_loose", "with_levels", "with_loose"]


@dataclass(frozen=True)
class Loose:
    """A node without fixed form.

    Attributes:
        key: where it stands.
        parts: keys below it that are taken; () where it is taken as it is.
    """

    key: Key
    parts: Sequence[Key] = ()

    @property
    def keys(self) -> list[Key]:
        """What is taken, from the root."""
        return [(*self.key, *part) for part in self.parts] or [self.key]

    def of(self, data: TensorDictBase) -> Any:
        """The node in the data of all lanes."""
        if self.parts or len(self.key) > 1:
            return data.get(self.key)
        try:
            return data.get(self.key[0])
        except RuntimeError:  # lanes of unlike shapes
            return data.get(self.key[0], as_nested_tensor=True)


def find_loose(env: Any, first: TensorDictBase, *, exclude: Sequence[Key], rename: Mapping[Key, Key]) -> list[Loose]:
    """The nodes of an environment's observations that have no fixed form.

    Args:
        env: the environment.
        first: what its first reset gave.
        exclude: keys, or prefixes of keys, to leave out.
        rename: keys to be renamed, which these cannot be.

    Raises:
        SpaceError: keys that only some parts of a lazy stack have.
        OptionError: one is to be renamed.
    """
    _check_shared(first)
    found: dict[Key, list[Key]] = {}
    shown = {as_key(name) for name in first.keys(True)}
    specs = env.full_observation_spec
    for key in map(as_key, specs.keys(True, True)):
        if key in shown and not any(key[: len(prefix)] == prefix for prefix in exclude):
            node, part = _node(first, key, specs[key])
            if node is not None:
                found.setdefault(node, []).extend([part] if part else [])
    for old in rename:
        if clash := next((key for key in found if overlap(key, old)), None):
            raise OptionError(
                f"rename_keys names {show_key(old)}; {show_key(clash)} has no fixed form and keeps its name."
            )
    return [Loose(node, tuple(dict.fromkeys(parts))) for node, parts in found.items()]


def _node(first: TensorDictBase, key: Key, spec: Any) -> tuple[Key | None, Key]:
    """The node that a key belongs to, and the part of it that is to be taken; None: it is a plain tensor."""
    is_tensor = isinstance(spec.dtype, torch.dtype)
    is_fixed = is_tensor and -1 not in spec.shape
    for length in range(1, len(key)):
        level = first.get(key[:length])
        if is_tensorclass(level):
            return key[:length], ()
        if isinstance(level, LazyStackedTensorDict) and is_tensor and not is_fixed:
            return key[:length], key[length:]
    return (None, ()) if is_fixed else (key, ())


def _check_shared(data: Any, above: Key = ()) -> None:
    """Every part of a lazy stack has the same keys."""
    if isinstance(data, LazyStackedTensorDict):
        parts: list[set[Key]] = [{as_key(name) for name in part.keys(True)} for part in data.tensordicts]
        everywhere = functools.reduce(operator.and_, parts)
        exclusive = sorted(functools.reduce(operator.or_, parts) - everywhere)
        if exclusive:
            key = (*above, *exclusive[0])
            holders = [place for place, names in enumerate(parts) if exclusive[0] in names]
            raise SpaceError(
                f"Only some parts of a lazy stack have {show_key(key)} ({', '.join(map(str, holders))} of "
                f"{len(parts)}). A batch needs the same keys everywhere: give the others a placeholder (TorchRL's "
                "`consolidate_spec` does)."
            )
        return
    for name in data.keys():  # noqa: SIM118 - a TensorDict iterates over its first dimension
        if issubclass(data.entry_class(name), TensorDictBase):
            _check_shared(data.get(name), (*above, name))


class LooseRecord:
    """The nodes of a rollout, as they come.

    Attributes:
        shown: by node, what all lanes showed before each step so far: `[N]` each.

    Args:
        nodes: which; the same of every environment.
        lead: the batch dimensions of the lanes.
    """

    def __init__(self, nodes: Sequence[Loose], lead: tuple[int, ...]) -> None:
        self._nodes = nodes
        self._lead = lead
        self._keys = [key for node in nodes for key in node.keys]
        self._before: list[TensorDictBase] = []
        self._after: list[TensorDictBase] = []
        self.shown: dict[Key, list[Any]] = {node.key: [] for node in nodes}

    def begin(self, envs: Sequence[TensorDictBase]) -> None:
        """A rollout begins, or lanes were reset: this is what they show."""
        self._before, self._after = [], []
        for values in self.shown.values():
            values.clear()
        self.show(envs)

    def show(self, envs: Sequence[TensorDictBase]) -> None:
        """What the lanes show before the next step, by environment."""
        data = self._all_lanes(envs)
        self._before.append(data)
        flat = data.reshape(-1) if len(self._lead) > 1 else data
        for node in self._nodes:
            value = node.of(flat)
            self.shown[node.key].append(value.copy() if isinstance(value, TensorDictBase) else value)

    def show_again(self, envs: Sequence[TensorDictBase]) -> None:
        """Lanes were reset after the last step: the newest is this."""
        self._before.pop()
        for values in self.shown.values():
            values.pop()
        self.show(envs)

    def record(self, envs: Sequence[TensorDictBase]) -> None:
        """What came of a step, by environment."""
        self._after.append(self._all_lanes(envs))

    def _all_lanes(self, envs: Sequence[TensorDictBase]) -> TensorDictBase:
        # an environment may write to its tensors again; other objects stay the same ones
        chosen = [data.select(*self._keys).apply(torch.clone) for data in envs]
        if self._lead and (len(chosen) > 1 or not chosen[0].batch_size):
            return LazyStackedTensorDict.maybe_dense_stack(chosen, 0)
        return chosen[0]

    def batch(self, made: int) -> dict[Key, Any]:
        """What was recorded of the first steps, `[*lead, made]` by key, "next" too; () is the key of all of it.

        As TorchRL stacks it: where a shape changes in time there is nothing but a lazy stack of all frames.
        """
        frames = [
            TensorDict({**dict(before.items()), "next": after}, batch_size=self._lead)
            if not isinstance(before, LazyStackedTensorDict)
            else before.copy().set("next", after)
            for before, after in zip(self._before[:made], self._after[:made], strict=True)
        ]
        whole = LazyStackedTensorDict.maybe_dense_stack(frames, len(self._lead))
        if isinstance(whole, LazyStackedTensorDict):
            return {(): whole}
        keys = [node.key for node in self._nodes]
        return {key: whole.get(key) for key in (*keys, *(("next", *key) for key in keys))}


def with_levels(
    values: Mapping[Key, Any], levels: Mapping[Key, tuple[int, ...]], batch_size: tuple[int, ...]
) -> dict[Key, Any]:
    """The same values, and empty TensorDicts for levels that have more batch dimensions than what is around them.

    Args:
        values: as `LooseRecord.batch` gives them.
        levels: these dimensions by key, upper levels first.
        batch_size: of the values.
    """
    if () in values:
        for frame in values[()].tensordicts:
            for key, dims in levels.items():
                if frame.get(key, None) is None:
                    frame.set(key, TensorDict({}, batch_size=(*frame.batch_size, *dims)))
        return {**values}
    names = [*[None] * (len(batch_size) - 1), "time"]
    empty = {
        key: TensorDict({}, batch_size=(*batch_size, *dims), names=[*names, *[None] * len(dims)])
        for key, dims in levels.items()
        if not any(key[: len(other)] == other for other in values)
    }
    return {**empty, **values}


def with_loose(batch: TensorDict, values: Mapping[Key, Any]) -> TensorDictBase:
    """A batch with what has no fixed form put in; where that is a level, the tensors that stand there are kept.

    Args:
        batch: `[*lead, T]`, of tensors.
        values: as `LooseRecord.batch` gives them.
    """
    if () in values:
        whole: TensorDictBase = values[()].update(batch)
        whole.names = batch.names
        return whole
    for key, value in values.items():
        tensors = batch.get(key, None)
        batch.set(key, value if tensors is None else value.update(tensors))
    return batch
