"""Batches in which each observation stands once.

A full batch has nearly every observation twice: as what came of a step, and as what the next step began with. Here a
lane of `T` steps has `T + 1` of them, and beside them those that a step came to and no step began with.

Which these are is found by comparing bytes. Flags and ids tell it only where they are recorded: a cut shows in no flag,
a soft truncation is one and the observation goes on all the same, and rows of different workers may stand side by side.
Numbers would do no better: NaN is not equal to itself, and 0.0 is equal to -0.0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase

from rlcollect.errors import InvalidBatchError
from rlcollect.layout import Key, Layout, Leaf, as_key, nested, show_key, tensordict_leaves
from rlcollect.memory.marks import check_time
from rlcollect.memory.slots import BlockPool

__all__ = ["CompactBatch", "CompactMemory"]

Array = np.ndarray[Any, Any]
Pair = tuple[torch.Tensor, torch.Tensor]  # what steps began with, and what came of them: `[*lead, T, *shape]`
IN_FULL = frozenset({"done", "terminated", "truncated", "step_count", "is_init"})  # small, and read by themselves
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class CompactMemory:
    """Gives the memory of observations; on the host from blocks that are used again once nobody holds a tensor in them.

    Args:
        keep: how many blocks that were let go are kept, for each key. 0: none, ever.
    """

    def __init__(self, keep: int = 0) -> None:
        self._keep = keep
        self._pools: dict[Key, BlockPool] = {}

    def take(self, leaf: Leaf, device: torch.device) -> torch.Tensor:
        """A tensor of this form; what stands in it is whatever stood there before."""
        if device.type != "cpu":
            return torch.empty(leaf.shape, dtype=leaf.dtype, device=device)
        layout = Layout([leaf])
        pool = self._pools.get(leaf.key)
        if pool is None or pool.nbytes < layout.nbytes():
            pool = self._pools[leaf.key] = BlockPool(layout.nbytes(), keep=self._keep)
        lease, _ = pool.take()
        return layout.carve(lease)[leaf.key]

    def forget(self) -> None:
        """No more will be asked for: what is let go goes back to the system."""
        self._pools.clear()


@dataclass(frozen=True, eq=False, repr=False)
class CompactBatch:
    """A batch with each observation once: about half of its bytes where observations are what is large.

    With `compact_obs=True` a collector delivers these. `expand()` gives the full form, bit for bit; a loop over
    minibatches should expand a part at a time:

        for batch in collector:  # 16 lanes
            for lane in range(0, 16, 4):
                learn(batch[lane : lane + 4].expand())

    It is `T + 1` observations a lane and one for each episode that ends or is cut inside, in the place of `2 T`: with
    episodes of one step as large as the full form (and `index`). What is saved is in what you keep: the rollout itself
    is made in full form, in memory that is used for the next one, and `expand` makes a full copy.

    Attributes:
        data: everything else, `[*lead, T]`: actions, rewards, flags, ids, and what has no fixed form.
        observations: `[*lead, T + 1]`, by key. The first `T` are what the steps began with. Number `t + 1` is also what
            came of step `t`, unless `index` names that step; so the last is what came of the last step, also where an
            episode ended there. (With no step at all: zeros.)
        finals: `[K]`, by the same keys: what came of the steps that `index` names.
        index: int64 `[K, D]`, their places in `data`, one number for each of its D batch dimensions, in order. It says
            where observations do not go on, which is not quite where episodes end: read flags and ids for that.

    It shares memory with nothing, but for parts that are taken of it.
    """

    data: TensorDictBase
    observations: TensorDictBase
    finals: TensorDictBase
    index: torch.Tensor

    @classmethod
    def of(
        cls,
        batch: TensorDictBase,
        keys: Iterable[str | tuple[str, ...]] | None = None,
        *,
        memory: CompactMemory | None = None,
    ) -> CompactBatch:
        """A batch with each observation once.

        Args:
            batch: in full form, `[T]`, `[N, T]` or `[B, N, T]`: time last.
            keys: which tensors, as they stand at the root; each stands below "next" too. None: all that stand at both
                places in the same form, but for flags and step counts: observations, and what a policy carries from
                step to step. Whichever they are, `expand` gives back what was; where most steps do not begin with what
                the one before came to, nothing is saved.
            memory: where observations go; None: to new memory.

        Returns:
            A copy, on the devices where the tensors of `batch` are.

        Raises:
            InvalidBatchError: a batch without time, or with time elsewhere; a key that does not stand at both places as
                a tensor of one form; tensors without values (on the meta device).
        """
        check_time(batch)
        pairs = dict(_pairs(batch, keys))
        memory, dims = memory or CompactMemory(), batch.batch_dims
        rows = {key: _stored(key, pair, dims, memory) for key, pair in pairs.items()}
        index = _breaks(list(pairs.values()), batch)
        at = tuple(index.unbind(-1))
        finals = nested((key, after[at]) for key, (_, after) in pairs.items())
        shape = [*batch.batch_size[:-1], batch.batch_size[-1] + 1]
        taken = [each for key in pairs for each in (key, ("next", *key))]
        return cls(
            data=batch.exclude(*taken).clone(),
            observations=TensorDict(nested(rows.items()), shape, names=batch.names, device=batch.device),
            finals=TensorDict(finals, [len(index)], device=batch.device),
            index=index,
        )

    def expand(self) -> TensorDictBase:
        """The full form, `[*lead, T]`: what `of` was given, bit by bit. It shares memory with nothing."""
        full = self.data.clone()
        time, steps, at = full.batch_dims - 1, full.batch_size[-1], tuple(self.index.unbind(-1))
        for key, rows in tensordict_leaves(self.observations):
            now, after = (
                rows.narrow(time, first, steps).clone(memory_format=torch.contiguous_format) for first in (0, 1)
            )
            after[at] = self.finals.get(key)
            full.set(key, now)
            full.set(("next", *key), after)
        return full

    def __getitem__(self, part: slice) -> CompactBatch:
        """Some of the first batch dimension, lanes or workers (of a batch `[T]`: steps).

        It shares its memory with this one, but for `finals` and `index`.

        Raises:
            TypeError: anything but a slice without a step.
        """
        if not isinstance(part, slice) or part.step not in (None, 1):
            raise TypeError(f"a CompactBatch takes slices without a step, as in batch[2:4]; {part!r} came")
        start, stop, _ = part.indices(len(self))
        stop = max(start, stop)
        is_in = (self.index[:, 0] >= start) & (self.index[:, 0] < stop)
        index = self.index[is_in]
        index[:, 0] -= start
        last = stop + 1 if self.data.batch_dims == 1 else stop
        return CompactBatch(self.data[start:stop], self.observations[start:last], self.finals[is_in], index)

    def to(self, device: torch.device | str | int) -> CompactBatch:
        """All of it on another device; what is there already is not copied."""
        data, observations, finals = (part.to(device) for part in (self.data, self.observations, self.finals))
        return CompactBatch(data, observations, finals, self.index.to(device))

    @property
    def batch_size(self) -> torch.Size:
        """Of the full form: `[*lead, T]`."""
        size: torch.Size = self.data.batch_size
        return size

    @property
    def names(self) -> list[str | None]:
        """Of the dimensions of the full form; time is the last."""
        names: list[str | None] = self.data.names
        return names

    @property
    def device(self) -> torch.device | None:
        """Of the full form."""
        device: torch.device | None = self.data.device
        return device

    @property
    def frames(self) -> int:
        """How many there are: rows, but for those that a `("collector", "mask")` marks as none."""
        mask = self.data.get(("collector", "mask"), None)
        return self.batch_size.numel() if mask is None else int(mask.sum())

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors in it."""
        parts = (self.data, self.observations, self.finals)
        tensors = [value for part in parts for _, value in tensordict_leaves(part) if isinstance(value, torch.Tensor)]
        return sum(tensor.nbytes for tensor in (*tensors, self.index))

    def __len__(self) -> int:
        return self.batch_size[0]

    def __repr__(self) -> str:
        keys = ", ".join(show_key(key) for key, _ in tensordict_leaves(self.observations))
        return (
            f"CompactBatch(batch_size={list(self.batch_size)}, observations=[{keys}], finals={len(self.index)}, "
            f"nbytes={self.nbytes:,}, device={self.device})"
        )


def _pairs(batch: TensorDictBase, keys: Iterable[Any] | None) -> Iterator[tuple[Key, Pair]]:
    """What steps began with and what came of them, by key: those of `keys`, or all that stand in both places."""
    tensors = dict(_tensors(batch))
    both = {key: (now, tensors["next", *key]) for key, now in tensors.items() if ("next", *key) in tensors}
    alike = {key: (now, after) for key, (now, after) in both.items() if _form(now) == _form(after)}
    chosen = [key for key in alike if key[-1] not in IN_FULL] if keys is None else [as_key(key) for key in keys]
    for key in dict.fromkeys(chosen):
        if key not in alike:
            raise InvalidBatchError(
                f"expected a tensor under {show_key(key)} and one of the same form under {show_key(('next', *key))}, "
                f"with a row a frame, but the batch has {[show_key(each) for each in alike]}. Name one of these"
            )
        if alike[key][0].is_meta:
            raise InvalidBatchError(
                f"{show_key(key)} is on the meta device and holds no values, so where observations go on cannot be told"
            )
        yield key, alike[key]


def _tensors(data: TensorDictBase, above: Key = ()) -> Iterator[tuple[Key, torch.Tensor]]:
    """Plain tensors by key. Lazy stacks and tensorclasses are left as they are, with all that is in them."""
    if not isinstance(data, TensorDict):
        return
    for name, value in data.items():
        if isinstance(value, TensorDictBase):
            yield from _tensors(value, (*above, name))
        elif isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_nested:
            yield (*above, name), value.detach().resolve_conj().resolve_neg()


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device


def _stored(key: Key, pair: Pair, dims: int, memory: CompactMemory) -> torch.Tensor:
    """What each step began with, and what came of the last: `[*lead, T + 1, *shape]`."""
    now, after = pair
    time, steps = dims - 1, now.shape[dims - 1]
    rows = memory.take(Leaf(key, (*now.shape[:time], steps + 1, *now.shape[dims:]), now.dtype), now.device)
    rows.narrow(time, 0, steps).copy_(now)
    last = rows.narrow(time, steps, 1)
    if steps:
        last.copy_(after.narrow(time, steps - 1, 1))
    else:
        last.zero_()
    return rows


def _breaks(pairs: Sequence[Pair], batch: TensorDictBase) -> torch.Tensor:
    """What came of which steps is not what the next began with, for any of these tensors: int64 `[K, D]`."""
    dims, pairs_of_steps = batch.batch_dims, max(batch.batch_size[-1] - 1, 0)
    device = pairs[0][0].device if pairs else batch.device
    breaks = torch.zeros([*batch.batch_size[:-1], pairs_of_steps], dtype=torch.bool, device=device)
    if breaks.numel():
        for now, after in pairs:
            breaks |= _differ(now.narrow(dims - 1, 1, pairs_of_steps), after.narrow(dims - 1, 0, pairs_of_steps), dims)
    return breaks.nonzero()


def _differ(ours: torch.Tensor, theirs: torch.Tensor, dims: int) -> torch.Tensor:
    """In which rows two tensors `[*lead, *shape]` are not the same, byte for byte: `[*lead]`."""
    if not ours.numel():
        return torch.zeros(ours.shape[:dims], dtype=torch.bool, device=ours.device)
    differ = _differ_on_host if ours.device.type == "cpu" else _differ_on_device
    return differ(ours, theirs, dims)


def _differ_on_host(ours: torch.Tensor, theirs: torch.Tensor, dims: int) -> torch.Tensor:
    """As the longest words that rows are whole numbers of: by numpy, which is quicker at it than torch."""
    one, other = _as_bytes(ours, dims), _as_bytes(theirs, dims)
    word = f"u{math.gcd(one.shape[-1], 8)}"
    return torch.from_numpy((one.view(word) != other.view(word)).any(-1))


def _differ_on_device(ours: torch.Tensor, theirs: torch.Tensor, dims: int) -> torch.Tensor:
    """As integers, which are equal where their bytes are; lane after lane, as each comparison takes memory."""
    shape, integer = [*ours.shape[1:dims], -1], INTEGERS[min(ours.itemsize, 8)]
    lanes = ((one.reshape(shape), other.reshape(shape)) for one, other in zip(ours, theirs, strict=True))
    return torch.stack([(one.view(integer) != other.view(integer)).any(-1) for one, other in lanes])


def _as_bytes(tensor: torch.Tensor, dims: int) -> Array:
    """Its rows as bytes: `[*lead, bytes]`."""
    rows = tensor.reshape(*tensor.shape[:dims], -1)
    if rows.stride(-1) != 1:
        rows = rows.clone(memory_format=torch.contiguous_format)
    array: Array = rows.view(torch.uint8).numpy()
    return array
