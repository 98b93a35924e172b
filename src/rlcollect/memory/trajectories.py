"""Batches cut into trajectories: one row a piece of an episode, padded at its end.

Knows the keys of a batch and nothing of who made it. Everything is computed by index: no loop over frames, no flag
is written, and the input is only read.
"""

from __future__ import annotations

import torch
from tensordict import TensorDictBase

from rlcollect.errors import InvalidBatchError

__all__ = ["split_trajectories"]


def split_trajectories(batch: TensorDictBase, *, prefix: str = "collector") -> TensorDictBase:
    """The pieces of episodes that a batch holds, one row each, padded with zeros at the end.

    A new piece begins where a lane begins, where the id in `(prefix, "traj_ids")` changes, and after each frame whose
    `("next", "done")` is set. One of the two keys is enough; both count where both are there. The first and the last
    piece of a lane may be parts of an episode that goes on in another batch: nothing marks them, and no flag is
    changed; their ids tell which pieces belong together.

    Rows that the batch's own `(prefix, "mask")` marks False are left out, as if they did not stand there. Pieces come
    by lane, then by time.

    Args:
        batch: `[T]`, `[N, T]` or `[B, N, T]`, time last. Contiguous or not; extra dimensions of a tensor are kept.
        prefix: under which key ids and mask stand.

    Returns:
        A new TensorDict `[n_traj, T_max]` with names `[None, "time"]` and the keys of `batch`, and
        `(prefix, "mask")`, bool, True on every real frame. `T_max` is the length of the longest piece; padding is 0
        (False). It shares no memory with `batch`. A batch without a valid row gives `[0, 0]`.

    Raises:
        InvalidBatchError: `batch` has no time dimension, or neither ids nor done; or an id comes back in its lane
            after another stood between (slices of one episode, interleaved): which rows belong together cannot be
            told.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"next": {"done": torch.tensor([0, 1, 0]).bool()}, "x": torch.tensor([1, 2, 3])}, [3])
        >>> split_trajectories(batch)["x"]
        tensor([[1, 2],
                [3, 0]])
    """
    _check_time(batch)
    ids = _per_frame(batch, (prefix, "traj_ids"))
    done = _per_frame(batch, ("next", "done"))
    marks = ids if ids is not None else done
    if marks is None:
        raise InvalidBatchError(
            f"expected ({prefix!r}, 'traj_ids') or ('next', 'done') to tell trajectories apart, but the batch has "
            f"neither; its keys are {sorted(map(str, batch.keys(True, True)))}. Keep one of them, or pass prefix= if "
            "the ids stand under another key"
        )
    frames = _frames(_per_frame(batch, (prefix, "mask")), like=marks)
    if ids is not None:
        _check_ids(ids[frames], frames)
    index, mask = _padded(frames, _starts(frames, ids, done))
    pieces = batch[index]
    _zero_padding(pieces, mask)
    pieces.names = [None, "time"]
    pieces.set((prefix, "mask"), mask)
    return pieces


def _check_time(batch: TensorDictBase) -> None:
    if not batch.batch_dims:
        raise InvalidBatchError("expected a batch [T], [N, T] or [B, N, T], time last; this one has batch_size []")
    if "time" in batch.names[:-1]:
        raise InvalidBatchError(
            f"expected time as the last batch dimension, but the names are {batch.names}; transpose the batch first"
        )


def _per_frame(batch: TensorDictBase, key: tuple[str, str]) -> torch.Tensor | None:
    """The tensor under `key` with one value a frame, `[*batch_size]`; None if there is none."""
    value: torch.Tensor | None = batch.get(key, default=None)
    if value is None:
        return None
    if tuple(value.shape) not in (tuple(batch.batch_size), (*batch.batch_size, 1)):
        raise InvalidBatchError(
            f"expected one value a frame under {key}, {list(batch.batch_size)} or {[*batch.batch_size, 1]}, "
            f"but it has shape {list(value.shape)}"
        )
    return value.reshape(batch.batch_size)


def _frames(valid: torch.Tensor | None, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Where the real frames are: one index `[K]` a batch dimension, by lane, then by time, on the device of `like`."""
    if valid is None:
        valid = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    return valid.to(like.device).nonzero(as_tuple=True)


def _changes(values: torch.Tensor) -> torch.Tensor:
    """Where a value `[K]` is not the one before it; the first is a change."""
    changed = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _lane_changes(frames: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Where a lane's first real frame is, `[K]`."""
    changed = torch.zeros_like(frames[-1], dtype=torch.bool)
    changed[:1] = True
    for index in frames[:-1]:
        changed |= _changes(index)
    return changed


def _starts(frames: tuple[torch.Tensor, ...], ids: torch.Tensor | None, done: torch.Tensor | None) -> torch.Tensor:
    """Which of the real frames begin a piece, `[K]`."""
    starts = _lane_changes(frames)
    if ids is not None:
        starts |= _changes(ids[frames])
    if done is not None:
        starts[1:] |= done[frames][:-1].bool()
    return starts


def _check_ids(ids: torch.Tensor, frames: tuple[torch.Tensor, ...]) -> None:
    """Each id stands in one run within its lane.

    Raises:
        InvalidBatchError: one does not; names the first.
    """
    runs = (_lane_changes(frames) | _changes(ids)).nonzero()[:, 0]
    lane_and_id = torch.stack([index[runs] for index in (*frames[:-1], ids)], dim=-1)
    _, inverse, counts = torch.unique(lane_and_id, dim=0, return_inverse=True, return_counts=True)
    again = (counts[inverse] > 1).nonzero()[:, 0]
    if not again.numel():
        return
    *lane, traj_id = lane_and_id[again[0]].tolist()
    first, second = (int(frames[-1][runs[run]]) for run in (inverse == inverse[again[0]]).nonzero()[:2, 0])
    where = f"lane {lane[0] if len(lane) == 1 else tuple(lane)}" if lane else "the only lane"
    raise InvalidBatchError(
        f"trajectory id {traj_id} comes back in {where}: it begins at t={first} and, after another id, again at "
        f"t={second}. Rows of one trajectory must stand side by side in a lane; sort the batch by id, or split each "
        "slice on its own before joining them"
    )


def _zero_padding(pieces: TensorDictBase, mask: torch.Tensor) -> None:
    """Put 0 where `mask` `[n_traj, T_max]` is False; `where`, for it knows every dtype, and NaN does not go through."""
    for key, value in list(pieces.items(include_nested=True, leaves_only=True)):
        real = mask.to(value.device).reshape(*mask.shape, *[1] * (value.ndim - mask.ndim))
        pieces.set(key, torch.where(real, value, torch.zeros((), dtype=value.dtype, device=value.device)))


def _padded(frames: tuple[torch.Tensor, ...], starts: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
    """Where each frame of each piece comes from.

    Returns:
        One index `[n_traj, T_max]` a batch dimension, 0 where there is no frame; and where there is one.
    """
    first = starts.nonzero()[:, 0]
    lengths = torch.diff(first, append=first.new_tensor([len(starts)]))
    longest = int(lengths.max()) if len(lengths) else 0
    steps = torch.arange(longest, device=starts.device)
    mask = steps < lengths[:, None]
    source = (first[:, None] + steps).where(mask, 0)
    return tuple(index[source] for index in frames), mask
