"""`check_batch`: does a batch keep what a batch promises?

It looks at a `TensorDict` and nothing else: where the batch came from, and how, is not its business.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

from rlcollect.errors import InvalidBatchError
from rlcollect.testing._invariants import BEFORE, INVARIANTS, Fault
from rlcollect.testing._rows import DONE, IDS, INIT, MASK, NEXT_STEPS, STEPS, VERSION, Key, Rows, quoted, stack_rows

__all__ = ["check_batch"]

_Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]

_FLAG: Final[_Form] = ((1,), torch.bool)
_COUNT: Final[_Form] = ((1,), torch.int64)
_NUMBER: Final[_Form] = ((), torch.int64)

_FLAGS: Final[tuple[Key, ...]] = (DONE, ("terminated",), ("truncated",))
_NEXT_FLAGS: Final[tuple[Key, ...]] = tuple(("next", *key) for key in _FLAGS)
_REWARD: Final[Key] = ("next", "reward")

_FORMS: Final[dict[Key, _Form]] = {
    **dict.fromkeys((*_FLAGS, *_NEXT_FLAGS), _FLAG),
    _REWARD: ((1,), torch.float32),
    STEPS: _COUNT,
    NEXT_STEPS: _COUNT,
    INIT: _FLAG,
    IDS: _NUMBER,
    VERSION: _NUMBER,
    MASK: ((), torch.bool),
}
"""Shape after the batch dimensions, and dtype, of every key that is ours."""

_REQUIRED: Final[tuple[Key, ...]] = (*_FLAGS, *_NEXT_FLAGS)
_TRACKED: Final[tuple[Key, ...]] = tuple(key for key in _FORMS if key != _REWARD)
_NOT_OBSERVED: Final = frozenset({"reward", "done", "terminated", "truncated", "step_count", "is_init", "info"})
_MOST_SHOWN: Final = 8


def check_batch(batch: TensorDictBase, *, previous: TensorDictBase | None = None) -> None:
    """Raises if a batch breaks an invariant, and names the first wrong frame.

    First the form: the required keys (flags, `"action"`, reward, an observation before and after the step), and
    shapes and dtypes of every key that has fixed ones. Then every frame:

    - `done = terminated | truncated`, before the step and after it; no flag is set before a step;
    - each observation is bit for bit the `("next", ...)` observation of the frame before it in its lane, or an
      episode ended in between: that frame is done and the trajectory id changes, or the id changes without done
      (a cut). A frame after a done one may keep its id only across the end of a batch, if it was truncated and not
      terminated there (a soft truncation); the observation then goes on as well;
    - a trajectory id stands in one lane, and never comes back after its lane has left it;
    - `step_count` is 0 where an episode begins, one more after each step, and goes on within the episode;
    - `is_init` is True on the first frame of an episode and only there;
    - `policy_version` is at least -1 and does not decrease in a lane, leaving out the -1 of random actions.

    Rows that `("collector", "mask")` calls invalid are left out of everything: the frame before one is the newest
    valid one of its lane. Without trajectory ids, done alone separates episodes. What the first frame of a lane must
    be is not known, unless `previous` or its step count tells.

    Observations are the leaves under `"next"` that also stand at the root, nested ones too, other than the keys
    above and what is under `("next", "info")`. Where something else was written at both places (a recurrent
    state, say), it must go on within an episode as observations do.

    Args:
        batch: batch dimensions `[T]`, `[N, T]` or `[B, N, T]`: time last, every other one counts lanes.
        previous: the batch before this one, of the same lanes. Its own frames are not checked again, but pairs
            across the border are, and ids and versions that it holds are known. Not for batches of which workers
            were concatenated along time.

    Raises:
        InvalidBatchError: the text says which frame (the smallest time, then the smallest lane), which key, what came
            and what was expected. A contradiction between two neighbours is put down to the later one.

    Example:
        A text that it raises with::

            lane 3, t = 17: 'observation' is [0.0], expected [17.0]: what ('next', 'observation') holds at t = 16,
            of the same episode
    """
    batch = _with_theirs_apart(batch)
    _check_form(batch)
    if previous is not None:
        previous = _with_theirs_apart(previous)
        _check_form(previous)
        _check_neighbours(previous, batch)
    rows = _rows_of([batch] if previous is None else [previous, batch])
    faults = (fault for invariant in INVARIANTS for fault in invariant(rows))
    _raise_first(faults, rows, batch.batch_size[:-1])


def _with_theirs_apart(batch: TensorDictBase) -> TensorDictBase:
    """A key named like one of our optional ones, but of another dtype, is the environment's: under another name.

    Without `max_frames_per_traj` or `record=`, `"step_count"` and `"is_init"` are as good a name as any.
    """
    if not isinstance(batch, TensorDictBase):
        return batch
    apart = batch.copy()
    for key, dtype in ((STEPS, torch.int64), (INIT, torch.bool)):
        value = batch.get(key, None)
        if isinstance(value, Tensor) and value.dtype != dtype:
            for name in (key, ("next", *key)):
                if apart.get(name, None) is not None:
                    apart.rename_key_(name, (*name[:-1], f"{name[-1]} (of the environment)"))
    return apart


def _rows_of(batches: list[TensorDictBase]) -> Rows:
    observed = _observation_keys(batches[-1])
    return stack_rows(batches, _tracked_keys(batches[-1]), observed)


def _tracked_keys(batch: TensorDictBase) -> tuple[Key, ...]:
    """Every key that the invariants read, as far as it is there."""
    observed = _observation_keys(batch)
    present = [key for key in _TRACKED if batch.get(key, None) is not None]
    return (*present, *observed, *(("next", *key) for key in observed))


def _observation_keys(batch: TensorDictBase) -> tuple[Key, ...]:
    """Leaves that stand both at the root and under "next", other than ours."""
    after = _leaf_keys(batch.get("next"))
    root = frozenset(_leaf_keys(batch))
    return tuple(key for key in after if key in root and not {key[0], key[-1]} & _NOT_OBSERVED)


def _leaf_keys(data: TensorDictBase) -> tuple[Key, ...]:
    keys = data.keys(include_nested=True, leaves_only=True)
    return tuple(key if isinstance(key, tuple) else (key,) for key in keys)


def _check_form(batch: Any) -> None:
    """Keys, shapes and dtypes; there is no frame to name here."""
    if not isinstance(batch, TensorDictBase):
        raise InvalidBatchError(f"expected a TensorDict, got {batch!r}")
    _check_time_is_last(batch)
    _check_required(batch)
    for key, (shape, dtype) in _FORMS.items():
        leaf = batch.get(key, None)
        if leaf is not None:
            _check_leaf(key, leaf, (*batch.batch_size, *shape), dtype)
    _check_observations(batch)


def _check_time_is_last(batch: TensorDictBase) -> None:
    if not batch.batch_size:
        raise InvalidBatchError("expected batch dimensions [T], [N, T] or [B, N, T], got none")
    if "time" in batch.names[:-1]:
        raise InvalidBatchError(f"expected 'time' as the last batch dimension, got dimensions named {batch.names}")


def _check_required(batch: TensorDictBase) -> None:
    counts = (STEPS, NEXT_STEPS) if any(batch.get(key, None) is not None for key in (STEPS, NEXT_STEPS)) else ()
    found = _leaf_keys(batch)
    of_groups = {key[:1] for key in found if len(key) > 1 and key[0] not in ("next", "collector", "action")}
    reward = any((*_REWARD[:1], *group, "reward") in found for group in of_groups) or _REWARD in found
    action = any(key[0] == "action" or key[1:2] == ("action",) for key in found)
    lacking = [*([] if reward else [_REWARD]), *([] if action else [("action",)])]
    for key in (*(key for key in (*_REQUIRED, *counts) if batch.get(key, None) is None), *lacking):
        raise InvalidBatchError(f"expected a key {quoted(key)}, found only {', '.join(map(quoted, found))}")


def _check_leaf(key: Key, leaf: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(leaf, Tensor):
        raise InvalidBatchError(f"{quoted(key)}: expected a tensor, got a {type(leaf).__name__}")
    if tuple(leaf.shape) != shape:
        raise InvalidBatchError(f"{quoted(key)}: expected shape {list(shape)}, got {list(leaf.shape)}")
    if leaf.dtype != dtype:
        raise InvalidBatchError(f"{quoted(key)}: expected {dtype}, got {leaf.dtype}")


def _check_observations(batch: TensorDictBase) -> None:
    """There are some, and each has one form before and after the step."""
    observed = _observation_keys(batch)
    if not observed:
        raise InvalidBatchError("expected an observation, a key that stands at the root and under 'next'; found none")
    for key in observed:
        before = batch.get(key)
        _check_leaf(("next", *key), batch.get(("next", *key)), tuple(before.shape), before.dtype)


def _check_neighbours(previous: TensorDictBase, batch: TensorDictBase) -> None:
    """The two have the same lanes and the same keys, in the same form."""
    if previous.batch_size[:-1] != batch.batch_size[:-1]:
        lanes = list(batch.batch_size[:-1]), list(previous.batch_size[:-1])
        raise InvalidBatchError(f"previous: expected the lanes of the batch, {lanes[0]}, got {lanes[1]}")
    for key in sorted((set(_tracked_keys(batch)) ^ set(_tracked_keys(previous))) - {MASK}):
        holder = "the batch" if batch.get(key, None) is not None else "previous"
        raise InvalidBatchError(f"expected the same keys in both batches: {quoted(key)} is only in {holder}")
    dimensions = len(batch.batch_size)
    for key in _observation_keys(batch):
        leaf, before = batch.get(key), previous.get(key)
        _check_leaf(key, leaf, (*batch.batch_size, *before.shape[dimensions:]), before.dtype)


def _raise_first(faults: Iterable[Fault], rows: Rows, lanes: torch.Size) -> None:
    """Reports the earliest fault; of several at one frame, the first that was found."""
    found = [(first, fault) for fault in faults if (first := _first_frame(fault, rows)) is not None]
    if not found:
        return
    (time, lane), fault = min(found, key=lambda pair: pair[0])
    raise InvalidBatchError(f"{_lane_name(lane, lanes)}, {_time_name(time, rows)}: {_what(fault, rows, lane, time)}")


def _first_frame(fault: Fault, rows: Rows) -> tuple[int, int] | None:
    """Time and lane of the first wrong frame of the batch itself."""
    wrong = fault.wrong[:, rows.border :].T.nonzero()
    if not len(wrong):
        return None
    time, lane = wrong[0].tolist()
    return time + rows.border, lane


def _what(fault: Fault, rows: Rows, lane: int, time: int) -> str:
    because = fault.because.replace(BEFORE, _time_name(int(rows.row_before[lane, time]), rows))
    came = fault.came[lane, time]
    if isinstance(fault.expected, str):
        return f"{quoted(fault.key)} is {came.tolist()}, expected {fault.expected}: {because}"
    expected = fault.expected[lane, time]
    where, came, expected = _shown(came, expected)
    return f"{quoted(fault.key)}{where} is {came.tolist()}, expected {expected.tolist()}: {because}"


def _shown(came: Tensor, expected: Tensor) -> tuple[str, Tensor, Tensor]:
    """What to print of two tensors: all, or the first place where they differ."""
    if came.numel() <= _MOST_SHOWN:
        return "", came, expected
    differs = (came != expected) & ~(came.isnan() & expected.isnan())
    place = tuple(differs.nonzero()[0].tolist()) if differs.any() else (0,) * came.dim()
    return f" at {list(place)}", came[place], expected[place]


def _lane_name(lane: int, lanes: torch.Size) -> str:
    if len(lanes) <= 1:
        return f"lane {lane}"
    *workers, last = (int(index) for index in torch.unravel_index(torch.tensor(lane), lanes))
    return f"worker {', '.join(map(str, workers))}, lane {last}"


def _time_name(time: int, rows: Rows) -> str:
    return f"t = {time - rows.border}" if time >= rows.border else f"t = {time} of the batch before"
