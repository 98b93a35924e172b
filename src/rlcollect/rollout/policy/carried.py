"""What a policy is shown of its own past: recurrent state, and whether an episode has just begun.

A policy that writes `("next", k)` and reads `k` has state. It is carried from frame to frame and from batch to batch,
and is its initial value in the first frame of each episode. The step loop knows nothing of this: ended episodes are
noticed before the next call (one comparison), and `k` is recorded after the rollout, since it follows from
`("next", k)` and from where episodes ended.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlcollect.errors import PolicyError
from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Key, Leaf, has_numpy, is_private, show_key

__all__ = ["IS_INIT", "Carried", "PolicyState", "alike", "whole"]

Array = np.ndarray[Any, Any]
IS_INIT: Key = ("is_init",)
FEW = 8  # lanes that are quicker one by one than by a list of their numbers


@dataclass(frozen=True)
class Carried:
    """A part of a policy's state.

    Attributes:
        key: under which the policy reads it.
        source: under which it writes the next one: `("next", *key)`, or `key` itself for a private part.
        initial: `[*shape]`, of one lane, when an episode begins.
        is_known: whether that is its shape; else the first call tells.
    """

    key: Key
    source: Key
    initial: torch.Tensor
    is_known: bool = True

    @property
    def is_recorded(self) -> bool:
        """Whether it is in batches: private parts are not."""
        return not is_private(self.key)

    @property
    def leaf(self) -> Leaf:
        """What is recorded under `key`."""
        return Leaf(self.key, tuple(self.initial.shape), self.initial.dtype)


class PolicyState:
    """The state of every lane, as a policy is shown it.

    `PolicyActor` calls `bind(...)` before a rollout, and `enter(t)` before a stretch of steps in which the policy acts;
    around each call the plan calls `begin()` and `keep(outputs)`; then come `blank_lanes` for those that chance acts
    for, and at the end `fill`.

    There are two tensors for each part, by turns shown and written: what a policy returns may be what it was shown.

    Attributes:
        turn: which of the two is shown next.

    Args:
        carried: the parts.
        num_lanes: N; None for a single lane, which is shown `[*shape]`.
        device: where the policy computes.
        given: initial values that the user gave, by key: they may be parameters, and learned.
    """

    def __init__(
        self,
        carried: Sequence[Carried],
        num_lanes: int | None,
        device: torch.device,
        given: Mapping[Key, torch.Tensor] | None = None,
    ) -> None:
        lanes = num_lanes or 1
        self.turn = 0
        self._carried = list(carried)
        self._batched = num_lanes is not None
        self._given = given or {}
        with torch.inference_mode(False):
            self._initial = [_everywhere(part.initial.to(device), lanes) for part in carried]
            self._pairs = [(initial.clone(), initial.clone()) for initial in self._initial]
            self._start = [initial.clone() for initial in self._initial]  # as the rollout began
            self._first = torch.ones((lanes, 1), dtype=torch.bool, device=device)
        self._rows = [[_quick(pair[turn]) for pair in self._pairs] for turn in (0, 1)]
        self._initial_rows = [_quick(initial) for initial in self._initial]
        self._first_rows = _quick(self._first)
        self._kept = [[self._shown(pair[turn]) for pair in self._pairs] for turn in (0, 1)]
        self._starts: Sequence[tuple[int, int]] = ()
        self._seen = 0
        self._fresh: list[int] = []  # lanes whose episode begins with the rollout
        self._entered = False
        self._marks = False  # whether anybody looks at `is_init`

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._batched else tensor[0]

    @property
    def leaves(self) -> list[Leaf]:
        """What is recorded of the state itself."""
        return [part.leaf for part in self._carried if part.is_recorded]

    @property
    def sources(self) -> list[Key]:
        """The keys under which the policy writes the next state."""
        return [part.source for part in self._carried]

    def views(self, keys: Sequence[Key]) -> tuple[tuple[torch.Tensor, ...], ...]:
        """What is shown at each turn, in the order of `keys`; `IS_INIT` may be among them."""
        places = {part.key: place for place, part in enumerate(self._carried)}
        marks = [key == IS_INIT and key not in places for key in keys]
        self._marks = any(marks)
        first = self._shown(self._first)
        return tuple(
            tuple([first if mark else self._kept[turn][places[key]] for key, mark in zip(keys, marks, strict=True)])
            for turn in (0, 1)
        )

    def bind(self, fresh: Sequence[int], starts: Sequence[tuple[int, int]], *, keep_initial: bool = False) -> None:
        """A rollout begins.

        Args:
            fresh: lanes whose episode begins with the first step.
            starts: (t, lane) after which a lane's next episode begins, in order of time; it grows.
            keep_initial: the initial values stay as they are, whatever became of the tensors that the user gave.
        """
        if not keep_initial:
            self._learn()
        self._starts, self._seen = starts, 0
        self._fresh = list(fresh)
        self._begin_lanes(self._fresh)
        for start, pair in zip(self._start, self._pairs, strict=True):
            start.copy_(pair[self.turn])

    def _learn(self) -> None:
        for part, initial in zip(self._carried, self._initial, strict=True):
            if part.key in self._given:
                initial.copy_(self._given[part.key].detach())

    def enter(self, t: int) -> None:
        """Frame t is next, and the policy acts."""
        self._begin_lanes([lane for _, lane in self._starts[self._seen :]])
        self._seen = len(self._starts)
        if t:
            newest = itertools.takewhile(lambda end: end[0] == t - 1, reversed(self._starts))
            self._mark([lane for _, lane in newest])
        else:
            self._mark(self._fresh)
        self._entered = True

    def begin(self) -> None:
        """The policy is called for the next frame: what ended with the one before is set back."""
        if self._entered:  # `enter` did it for this frame
            self._entered = False
            return
        lanes: list[int] = []
        if len(self._starts) != self._seen:
            lanes = [lane for _, lane in self._starts[self._seen :]]
            self._seen = len(self._starts)
            self._begin_lanes(lanes)
        self._mark(lanes)

    def _mark(self, lanes: list[int]) -> None:
        """Episodes begin in these lanes, and in no other; the policy may have written there."""
        if self._marks:
            self._first_rows[...] = False
            if lanes:
                self._first_rows[lanes] = True

    def _begin_lanes(self, lanes: list[int]) -> None:
        for rows, initial in zip(self._rows[self.turn], self._initial_rows, strict=True) if lanes else ():
            if len(lanes) > FEW:
                rows[lanes] = initial[lanes]
            else:
                for lane in lanes:
                    rows[lane] = initial[lane]

    def keep(self, written: Sequence[Any]) -> None:
        """Takes the next state, in the order of `sources`."""
        self.turn ^= 1
        for part, state, value in zip(self._carried, self._kept[self.turn], written, strict=True):
            tensor = value if isinstance(value, torch.Tensor) else torch.as_tensor(value)
            if tensor.shape != state.shape:
                raise PolicyError(
                    f"{show_key(part.source)} should have shape {list(state.shape)}, as the state before it; "
                    f"{list(tensor.shape)} came."
                )
            state.copy_(tensor)

    def state_dict(self) -> list[torch.Tensor]:
        """Each part, `[N, *shape]`: what is shown next."""
        return [pair[self.turn].cpu().clone() for pair in self._pairs]

    def load_state_dict(self, state: Sequence[torch.Tensor]) -> bool:
        """Goes on from there; whether it is of the same form, and else nothing is changed."""
        if [each.shape for each in state] != [one.shape for one, _ in self._pairs]:
            return False
        for pair, own in zip(self._pairs, state, strict=True):
            pair[self.turn].copy_(own)
        return True

    def blank_lanes(self, lanes: list[int]) -> None:
        """Chance acted in these lanes: their state stays as it was in the beginning."""
        self._begin_lanes(lanes)

    def initial_of(self, source: Key) -> torch.Tensor | None:
        """`[N, *shape]`, what the next state under this key is in frames that chance acts in; None: it is no state."""
        found = [place for place, part in enumerate(self._carried) if part.source == source]
        return self._initial[found[0]] if found else None

    @property
    def initial(self) -> dict[Key, torch.Tensor]:
        """`[N, *shape]`, the recorded state of frames that chance acts in, by key."""
        return {
            part.key: initial for part, initial in zip(self._carried, self._initial, strict=True) if part.is_recorded
        }

    def fill(self, memory: RolloutMemory, made: int) -> None:
        """Records the state that each of the first `made` frames was computed from."""
        begun = [(lane, end + 1) for end, lane in self._starts if end + 1 < made]
        lanes, times = [lane for lane, _ in begun], [time for _, time in begun]
        for place, part in enumerate(self._carried):
            if not part.is_recorded:
                continue
            now, after = whole(memory, part.key, self._batched), whole(memory, part.source, self._batched)
            now[:, 0] = alike(self._start[place], now)
            now[:, 1:made] = after[:, : made - 1]
            if begun:
                now[lanes, times] = alike(self._initial[place][0], now)


def _everywhere(value: torch.Tensor, lanes: int) -> torch.Tensor:
    return value.detach().expand(lanes, *value.shape).clone(memory_format=torch.contiguous_format)


def _quick(tensor: torch.Tensor) -> Any:
    """The same memory as an array, which is quicker to index; the tensor where numpy cannot have it."""
    return tensor.numpy() if tensor.device.type == "cpu" and has_numpy(tensor.dtype) else tensor


def alike(tensor: torch.Tensor, other: Any) -> Any:
    """A tensor in the form of another value: a tensor, or an array."""
    return tensor.to(other.device) if isinstance(other, torch.Tensor) else tensor.cpu().numpy()


def whole(memory: RolloutMemory, key: Key, batched: bool) -> Any:
    """A leaf of a rollout, `[N, T, *shape]`."""
    if key in memory.arrays:
        return memory.arrays[key]
    return memory.tensors[key] if batched else memory.tensors[key].unsqueeze(0)
