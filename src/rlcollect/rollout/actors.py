"""Who chooses the actions: the policy, chance, or (for one step, when a warm-up is shared unevenly) both.

Each actor is given the memory of a rollout, prepares views of it for a window of steps, and then only calls and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from rlcollect.envs.calls import MASK
from rlcollect.envs.sampling import ActionSampler, DrivenSampler, MaskedActionSampler
from rlcollect.errors import PolicyError
from rlcollect.interfaces import RolloutMemory
from rlcollect.layout import Key, Leaf, has_numpy, show_key
from rlcollect.rollout.checks import ActionCheck, first_undrawable
from rlcollect.rollout.policy.carried import alike
from rlcollect.rollout.policy.outputs import kind_of
from rlcollect.rollout.policy.plan import Plan
from rlcollect.rollout.policy.pooled import PooledState
from rlcollect.rollout.policy.probe import version_of

__all__ = ["MixedActor", "PolicyActor", "RandomActor"]

Array = np.ndarray[Any, Any]
Sampler = ActionSampler | MaskedActionSampler | DrivenSampler


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
        self._stores = [_store(leaf, shape, example, on_host=on_host) for leaf, shape, example in forms]
        self._actions: list[tuple[Array, ...]] = []
        self._shown: list[tuple[torch.Tensor, int]] = []
        self._memory: RolloutMemory | None = None
        self._loose: Mapping[Key, Sequence[Any]] = {}
        self._rows: list[tuple[Any, ...]] = []
        self._action_shape, self._action_dtype = plan.shapes[0], getattr(plan.examples[0], "dtype", None)
        plain_action = on_host and len(plan.outputs) == 1 and _is_plain(plan.outputs[0], plan.examples[0])
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
        rows = [_rows(self._memory, leaf, start, stop) for leaf in self._plan.outputs]
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


class RandomActor:
    """Draws actions: a whole rollout's at once, or step by step where an "action_mask" tells what is allowed.

    Args:
        make_sampler: from a generator to a source of actions.
        generator: where its randomness comes from.
        leaves: how the actions are stored.
    """

    def __init__(
        self,
        make_sampler: Callable[[np.random.Generator], Sampler],
        generator: np.random.Generator,
        leaves: Sequence[Leaf],
    ) -> None:
        self.observations: Sequence[tuple[Any, ...]] = []
        self.sampler = make_sampler(generator)
        self.call: Callable[..., Any] = tuple
        self._make_sampler = make_sampler
        self._leaves = leaves
        self._rows: list[tuple[Any, ...]] = []
        self._memory: RolloutMemory | None = None
        self._times: list[tuple[int]] = []
        self.write: Callable[[int, Any], Sequence[Any]] = self._write_drawn

    def reseed(self, generator: np.random.Generator) -> None:
        """Begins another stream."""
        self.sampler = self._make_sampler(generator)

    def bind(self, memory: RolloutMemory) -> None:
        """Takes the memory of the next rollout."""
        self._memory = memory

    def view(self, start: int, stop: int) -> None:
        """The steps that follow are these of the rollout: draws their actions, or makes views of their masks."""
        memory = self._memory
        assert memory is not None
        self._rows = memory.arrays.once(
            ("random", start, stop),
            lambda: list(zip(*(_rows(memory, leaf, start, stop) for leaf in self._leaves), strict=True)),
        )
        if isinstance(self.sampler, ActionSampler):
            self._draw_ahead(self.sampler, memory, start, stop)
            return
        self.observations = [()] * (stop - start)
        self.call, self.write = self.sampler.sample, self._write_drawn
        if isinstance(self.sampler, MaskedActionSampler) and MASK in memory.arrays:
            self.observations = [(mask,) for mask in memory.arrays[MASK].swapaxes(0, 1)[start:stop]]
        elif isinstance(self.sampler, MaskedActionSampler):
            sample = self.sampler.sample
            self.observations = [(mask,) for mask in memory.tensors[MASK][:, start:stop].unbind(1)]
            self.call = lambda mask: sample(mask.cpu().numpy())

    def _draw_ahead(self, sampler: ActionSampler, memory: RolloutMemory, start: int, stop: int) -> None:
        for leaf, drawn in zip(self._leaves, sampler.peek(stop - start, skip=start), strict=True):
            if leaf.key in memory.arrays:
                memory.arrays[leaf.key].swapaxes(0, 1)[start:stop] = drawn
            else:
                time = memory.tensors[leaf.key].ndim - len(leaf.shape) - 1
                rows = torch.from_numpy(drawn.swapaxes(0, 1) if time else drawn[:, 0])
                memory.tensors[leaf.key].narrow(time, start, stop - start).copy_(rows)
        if len(self._times) < stop - start:
            self._times = [(t,) for t in range(stop - start)]
        self.observations = self._times[: stop - start]
        self.call, self.write = self._rows.__getitem__, _written

    def check(self, outputs: Any) -> None:
        """Chance is always right."""

    def finish(self, made: int) -> None:
        """So many steps were random."""
        if isinstance(self.sampler, ActionSampler):
            self.sampler.advance(made)

    def release(self) -> None:
        """Lets the memory go."""
        self.observations, self._rows, self.call, self._memory = [], [], tuple, None

    def _write_drawn(self, t: int, outputs: Sequence[Any]) -> Sequence[Any]:
        rows = self._rows[t]
        for row, value in zip(rows, outputs, strict=True):
            _put(row, ..., value)
        return rows


def _put(row: Any, where: Any, value: Any) -> None:
    """Stores an array or a tensor in a row that is either."""
    if isinstance(row, torch.Tensor):
        value = torch.as_tensor(value, device=row.device)
        where = torch.from_numpy(where).to(row.device) if isinstance(where, np.ndarray) else where
    row[where] = value


def _written(_t: int, rows: Sequence[Array]) -> Sequence[Array]:
    """Actions that stand in their rows already."""
    return rows


class MixedActor:
    """The policy, with random actions in some lanes: both are asked, and the random ones win there.

    Attributes:
        lanes: bool `[N]`, where the action is random.

    Args:
        policy: asked for all lanes.
        random: asked for all lanes.
        lanes: as above.
    """

    def __init__(self, policy: PolicyActor, random: RandomActor, lanes: Array) -> None:
        self.observations = _Both(policy.observations, random.observations)
        self.lanes = lanes
        self._policy = policy
        self._random = random

    def call(self, observation: tuple[Any, ...], masks: tuple[Any, ...]) -> tuple[Any, list[Any]]:
        """What the policy wrote, and what chance would do."""
        drawn = [_copied(value) for value in self._random.call(*masks)]  # they may stand where the policy writes
        return self._policy.call(*observation), drawn

    def check(self, outputs: tuple[Any, list[Any]]) -> None:
        """Holds the policy's outputs against its first ones."""
        self._policy.check(outputs[0])

    def write(self, t: int, outputs: tuple[Any, list[Any]]) -> Sequence[Any]:
        """Stores both in row t; what else the policy wrote is zero where the action is random."""
        chosen, drawn = outputs
        self._policy.prove(chosen)
        rows = self._policy.store(t, chosen)
        self._policy.check_actions(chosen, ~self.lanes)
        for row, value in zip(rows, drawn, strict=True):
            _put(
                row,
                self.lanes,
                value[torch.from_numpy(self.lanes)] if isinstance(value, torch.Tensor) else value[self.lanes],
            )
        self._policy.blank_extras(t, self.lanes)
        return rows


class _Both(Sequence[tuple[Any, ...]]):
    """Pairs of what two actors are shown."""

    def __init__(self, one: Sequence[tuple[Any, ...]], other: Sequence[tuple[Any, ...]]) -> None:
        self._one = one
        self._other = other

    def __len__(self) -> int:
        return len(self._one)

    def __getitem__(self, t: Any) -> Any:
        return self._one[t], self._other[t]


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value.copy()


def _rows(memory: RolloutMemory, leaf: Leaf, start: int, stop: int) -> Sequence[Any]:
    """For each step, where an output goes: an array `[N, *shape]`, or a tensor where numpy lacks the dtype."""
    if leaf.key in memory.arrays:
        return list(memory.arrays[leaf.key][:, start:stop].swapaxes(0, 1))
    tensor = memory.tensors[leaf.key]
    time = tensor.ndim - len(leaf.shape) - 1
    return tensor.narrow(time, start, stop - start).unbind(time)


def _store(leaf: Leaf, shape: tuple[int, ...], example: Any, *, on_host: bool) -> Callable[[Any, Any], None]:
    """How an output of this kind gets into its row; one of another shape or dtype, which numpy would cast, does not."""
    if example is None:  # the policy was not called at construction
        return _store_any
    if not on_host:
        return _store_there(leaf, shape)
    if not isinstance(example, torch.Tensor):
        return _store_array
    if not (has_numpy(leaf.dtype) and has_numpy(example.dtype)):
        return _store_by_torch
    dtype = example.dtype

    def store_tensor(row: Array, value: torch.Tensor) -> None:
        if value.shape != shape or value.dtype is not dtype:
            raise TypeError(f"{leaf} expected, {value.shape} {value.dtype} came")
        row[...] = value.numpy()

    def store_detached(row: Array, value: torch.Tensor) -> None:
        store_tensor(row, value.detach())

    return store_detached if example.requires_grad else store_tensor


def _store_there(leaf: Leaf, shape: tuple[int, ...]) -> Callable[[Any, Any], None]:
    """How an output gets into a row on another device."""

    def store(row: torch.Tensor, value: Any) -> None:
        if tuple(np.shape(value)) != shape:
            raise TypeError(f"{leaf} expected, {np.shape(value)} came")
        row.copy_(torch.as_tensor(value))

    return store


def _is_plain(leaf: Leaf, example: Any) -> bool:
    """Whether an output is a tensor that numpy can have as it is."""
    return (
        isinstance(example, torch.Tensor)
        and has_numpy(leaf.dtype)
        and has_numpy(example.dtype)
        and not example.requires_grad
    )


def _store_array(row: Array, value: Any) -> None:
    row[...] = value


def _store_any(row: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        _store_by_torch(row, value.detach())
    else:
        row[...] = value


def _store_by_torch(row: Any, value: torch.Tensor) -> None:
    (row if isinstance(row, torch.Tensor) else torch.from_numpy(row)).copy_(value)
