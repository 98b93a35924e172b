"""The policy as the one who acts: it is called, and what it writes is recorded.

It is given the memory of a rollout, prepares views of it for a window of steps, and then only calls and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.errors import PolicyError
from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Key, Leaf, show_key
from rlcollect.rollout.checks import ActionCheck, first_undrawable
from rlcollect.rollout.policy.carried import alike
from rlcollect.rollout.policy.outputs import kind_of
from rlcollect.rollout.policy.plan import Plan
from rlcollect.rollout.policy.pooled import PooledState
from rlcollect.rollout.policy.probe import version_of
from rlcollect.rollout.storing import is_plain, rows_of, store_of

__all__ = ["PolicyActor"]

Array = np.ndarray[Any, Any]


class PolicyActor:
    """Calls a planned policy, and records what it writes.

    Attributes:
        outputs: what it writes.
        has_state: whether it is shown something of its own past.

    Args:
        plan: how the policy is called.
        num_action_leaves: how many of its outputs make up the action.
        batched: whether the policy sees a dimension of lanes.
        check_actions: looks at the actions of every step; None: nobody does.
        on_host: whether the memory of rollouts is.
    """

    def __init__(
        self,
        plan: Plan,
        num_action_leaves: int,
        *,
        batched: bool,
        check_actions: ActionCheck | None = None,
        on_host: bool = True,
    ) -> None:
        self.observations: Sequence[tuple[torch.Tensor, ...]] = []
        self.call = plan.call
        self.outputs: Sequence[Leaf] = plan.outputs
        self.has_state = plan.state is not None
        self._plan = plan
        self._batched = batched
        self._num_action_leaves = num_action_leaves
        forms = zip(plan.outputs, plan.shapes, plan.examples, strict=True)
        self._stores = [store_of(leaf, shape, example, on_host=on_host) for leaf, shape, example in forms]
        self._actions: list[tuple[Array, ...]] = []
        self._shown: list[tuple[torch.Tensor, int]] = []
        self._memory: RolloutMemory | None = None
        self._loose: Mapping[Key, Sequence[Any]] = {}
        self._rows: list[tuple[Any, ...]] = []
        self._action_shape, self._action_dtype = plan.shapes[0], getattr(plan.examples[0], "dtype", None)
        plain_action = on_host and len(plan.outputs) == 1 and is_plain(plan.outputs[0], plan.examples[0])
        self.store: Callable[[int, Any], Sequence[Array]] = self._write_action if plain_action else self._write_all
        self._check_actions = check_actions
        self.write = self.store if check_actions is None else self._write_checked
        self._proven_write = self.write
        self._is_proven = plan.examples[0] is not None  # else it was not called yet
        if not self._is_proven:
            self.write = self._write_unproven

    def bind(
        self,
        memory: RolloutMemory,
        fresh: Sequence[int],
        starts: Sequence[tuple[int, int]],
        loose: Mapping[Key, Sequence[Any]],
        *,
        warming: bool = False,
        row_lanes: Array | None = None,
    ) -> None:
        """Takes the memory of the next rollout.

        Args:
            memory: where its frames go.
            fresh: lanes whose episode begins with the first step.
            starts: (t, lane) after which a lane's next episode begins, in order of time; it grows.
            loose: what is observed and does not stand in memory, by key and step; it grows.
            warming: whether chance acts in some lane.
            row_lanes: int64 `[S, M]`, whose rows there are at each step; it grows. None: those of all lanes.
        """
        self._plan.refresh()
        if self._plan.state is not None:
            self._plan.state.bind(fresh, starts, keep_initial=warming)
        if isinstance(self._plan.state, PooledState) and row_lanes is not None:
            self._plan.state.bind_rows(memory, row_lanes)
        self.call = self._plan.call
        self._memory = memory
        tensors = [memory.tensors[key] for key in self._plan.in_keys if key not in loose]
        self._shown = [(tensor, version_of(tensor)) for tensor in tensors]
        self._loose = loose

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: makes views of their rows."""
        assert self._memory is not None
        time = 1 if self._batched else 0
        views = [tensor.narrow(time, start, stop - start).unbind(time) for tensor, _ in self._shown]
        self.observations = list(zip(*views, strict=True)) if views else [()] * (stop - start)
        if any(key in self._loose for key in self._plan.in_keys):
            self.observations = _WithLoose(self.observations, self._plan.in_keys, self._loose, start)
        outputs, count = self._plan.outputs, self._num_action_leaves
        if all(leaf.key in self._memory.arrays for leaf in outputs):
            self._rows = self._memory.arrays.once(("outputs", start, stop), lambda: self._views(start, stop))
        else:  # rows that are tensors are the batch's own
            self._rows = self._views(start, stop)
        self._actions = self._rows if len(outputs) == count else [row[:count] for row in self._rows]

    def _views(self, start: int, stop: int) -> list[tuple[Any, ...]]:
        assert self._memory is not None
        rows = [rows_of(self._memory, leaf, start, stop) for leaf in self._plan.outputs]
        return list(zip(*rows, strict=True))

    def enter(self, t: int) -> None:
        """The policy acts from step t of the rollout on."""
        if self._plan.state is not None:
            self._plan.state.enter(t)

    def finish(self, made: int) -> None:
        """The rollout has `made` steps: records the policy's state.

        Raises:
            PolicyError: the policy has changed the observations it was shown.
        """
        if any(version_of(tensor) != version for tensor, version in self._shown):
            raise PolicyError(
                "The policy changed its observation in place, and with it the record. It did not at construction, "
                "where it would have been given copies. Let it work on a copy."
            )
        if self._plan.state is not None:
            assert self._memory is not None
            self._plan.state.fill(self._memory, made)

    def first_invalid(self, starts: Array, made: int) -> tuple[int, str] | None:
        """The first step at which nothing can be drawn from a distribution, and what to say of it.

        Args:
            starts: int64 `[N]`, the first step of each lane in which the policy acted.
            made: steps of the rollout.
        """
        assert self._memory is not None
        tensors = self._memory.tensors
        return first_undrawable(self._plan.samplings, tensors, starts, made, batched=self._batched)

    def release(self) -> None:
        """Lets the memory go."""
        self.observations, self._rows, self._actions, self._shown, self._memory = [], [], [], [], None
        self._loose = {}

    def _write_action(self, t: int, output: torch.Tensor) -> Sequence[Array]:
        rows = self._actions[t]
        try:
            fits = output.shape == self._action_shape and output.dtype is self._action_dtype
            rows[0][...] = output.numpy()
        except Exception as error:
            raise self._unfit((output,)) from error
        if not fits:
            raise self._unfit((output,))
        return rows

    def _write_all(self, t: int, outputs: Any) -> Sequence[Array]:
        values = outputs if len(self._stores) > 1 else (outputs,)
        try:
            for store, row, value in zip(self._stores, self._rows[t], values, strict=True):
                store(row, value)
        except Exception as error:
            raise self._unfit(values) from error
        return self._actions[t]

    def _unfit(self, values: Any) -> PolicyError:
        """What to say of outputs that could not be stored."""
        if not isinstance(values, tuple) or len(values) != len(self._stores):
            return PolicyError(f"The policy gave {len(self._stores)} output(s) at first, and now {kind_of(values)}.")
        plan = self._plan
        for leaf, shape, example, value in zip(plan.outputs, plan.shapes, plan.examples, values, strict=True):
            if not isinstance(value, torch.Tensor | np.ndarray) or tuple(value.shape) != shape:
                return PolicyError(
                    f"The policy's {show_key(leaf.key)} had shape {list(shape)} at first, and now it is "
                    f"{kind_of(value)}."
                )
            before = getattr(example, "dtype", value.dtype)
            if before != value.dtype:
                return PolicyError(
                    f"The policy's {show_key(leaf.key)} had dtype {before} at first, and now {value.dtype}."
                )
        return PolicyError("The policy's outputs cannot be stored as its first ones were.")

    def _write_unproven(self, t: int, outputs: Any) -> Sequence[Array]:
        self.prove(outputs)
        return self._proven_write(t, outputs)

    def prove(self, outputs: Any) -> None:
        """Holds the first outputs of all against what was declared, if the policy was not called at construction."""
        if not self._is_proven:
            self.check(outputs)
            self._is_proven, self.write = True, self._proven_write

    def _write_checked(self, t: int, outputs: Any) -> Sequence[Array]:
        actions = self.store(t, outputs)
        self.check_actions(outputs)
        return actions

    def check_actions(self, outputs: Any, lanes: Array | None = None) -> None:
        """Looks at the actions as the policy gave them, before they were cast, if that was asked for.

        Args:
            outputs: of one call.
            lanes: bool `[N]`, where the policy acts; None: in all.
        """
        if self._check_actions is None:
            return
        values = (outputs if len(self._stores) > 1 else (outputs,))[: self._num_action_leaves]
        arrays = [v.detach().cpu().numpy() if isinstance(v, torch.Tensor) else np.asarray(v) for v in values]
        self._check_actions(arrays if self._batched else [array[None] for array in arrays], lanes)

    def check(self, outputs: Any) -> None:
        """Holds outputs against the first ones there were: storing them would hide another shape by broadcasting.

        Raises:
            PolicyError: another number of outputs, or another shape.
        """
        values = outputs if len(self._stores) > 1 else (outputs,)
        if len(values) != len(self._stores):
            raise PolicyError(f"The policy gave {len(self._stores)} outputs at first, and now {len(values)}.")
        plan = self._plan
        for leaf, first, example, value in zip(plan.outputs, plan.shapes, plan.examples, values, strict=True):
            number = isinstance(value, torch.Tensor) and value.is_floating_point()
            if number and not leaf.dtype.is_floating_point and not torch.equal(value, value.round()):
                raise PolicyError(f"{show_key(leaf.key)} is stored as {leaf.dtype}, and now {value.tolist()} came.")
            if tuple(np.shape(value)) != first:
                before = "had" if example is not None else "should, by its spec, have"
                raise PolicyError(
                    f"The policy's {show_key(leaf.key)} {before} shape {list(first)}"
                    f"{' at first' if example is not None else ''}, and now {list(np.shape(value))}."
                )

    def state_dict(self) -> list[torch.Tensor]:
        """What the policy carries from frame to frame."""
        return [] if self._plan.state is None else self._plan.state.state_dict()

    def load_state_dict(self, state: Sequence[torch.Tensor]) -> bool:
        """Goes on from there; whether it is what this policy carries."""
        if self._plan.state is None:
            return not state
        return self._plan.state.load_state_dict(state)

    def blank(self, memory: RolloutMemory) -> None:
        """What stands where the policy was not asked: zeros, and its state as it is in the beginning."""
        for leaf in self._plan.outputs:
            target, first = memory.tensors[leaf.key], self._first_state(leaf.key)
            if first is None:
                target.zero_()
            else:
                target.copy_(first.unsqueeze(1) if self._batched else first[0])
        for key, first in self._plan.state.initial.items() if self._plan.state is not None else ():
            memory.tensors[key].copy_(first.unsqueeze(1) if self._batched else first[0])

    def _first_state(self, key: Key) -> torch.Tensor | None:
        return None if self._plan.state is None else self._plan.state.initial_of(key)

    def blank_extras(self, t: int, lanes: Array) -> None:
        """In row t of these lanes, for every output but the action, what stands where the policy was not asked."""
        where = np.flatnonzero(lanes).tolist()
        extras = slice(self._num_action_leaves, None)
        for leaf, row in zip(self._plan.outputs[extras], self._rows[t][extras], strict=True):
            first = self._first_state(leaf.key)
            row[where] = 0 if first is None else alike(first[where], row)
        if self._plan.state is not None:
            self._plan.state.blank_lanes(where)


class _WithLoose(Sequence[tuple[Any, ...]]):
    """The arguments of each step's call, some of which come to be only while the rollout is made.

    Args:
        tensors: those that stand in memory, by step of the window.
        keys: of all arguments, in order.
        loose: the others, by key and step of the rollout.
        start: of the window.
    """

    def __init__(
        self, tensors: Sequence[tuple[Any, ...]], keys: Sequence[Key], loose: Mapping[Key, Sequence[Any]], start: int
    ) -> None:
        self._tensors = tensors
        self._loose = [loose.get(key) for key in keys]
        self._start = start

    def __len__(self) -> int:
        return len(self._tensors)

    def __getitem__(self, t: Any) -> Any:
        tensors = iter(self._tensors[t])
        return tuple([next(tensors) if values is None else values[self._start + t] for values in self._loose])
