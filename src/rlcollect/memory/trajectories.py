"""Batches cut into trajectories: one row a piece of an episode, padded at its end or as long as it is.

Knows the keys of a batch and nothing of who made it. No flag is written, and the input is only read.
"""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, is_non_tensor, is_tensor_collection

from rlcollect.errors import OptionError
from rlcollect.layout import Key, show_key
from rlcollect.memory.marks import Marks
from rlcollect.memory.pieces import Pieces
from rlcollect.memory.rows import Jagged, Taken
from rlcollect.options.checks import key_of, positive

__all__ = ["split_trajectories"]


def split_trajectories(
    batch: TensorDictBase,
    *,
    prefix: str = "collector",
    mask_key: str | Key | None = None,
    as_nested: bool | torch.layout = False,
    fragment_len: int | None = None,
) -> TensorDictBase:
    """The pieces of episodes that a batch holds, one row each, padded with zeros at the end.

    A new piece begins where a lane begins, where the id in `(prefix, "traj_ids")` changes, and after each frame whose
    `("next", "done")` is set. One of the two keys is enough; both count where both are there. The first and the last
    piece of a lane may be parts of an episode that goes on in another batch: nothing marks them, and no flag is
    changed; their ids tell which pieces belong together.

    Rows that the batch's own mask marks False, under `(prefix, "mask")` or `mask_key`, are left out, as if they did not
    stand there. Pieces come by lane, then by time.

    Args:
        batch: `[T]`, `[N, T]` or `[B, N, T]`, time last. Contiguous or not; extra dimensions of a tensor are kept.
        prefix: under which key ids and mask stand.
        mask_key: where the mask of the result is put, a key as tensordict knows them; None: `(prefix, "mask")`.
        as_nested: whether pieces are nested tensors of their own lengths, not padded. `torch.jagged` is the same as
            True; another layout is refused.
        fragment_len: the most frames of a piece, K. Longer ones are cut from their beginning on: a piece of 20 with
            K = 8 to 8, 8 and 4.

    Returns:
        A new TensorDict `[n_traj, T_max]` with names `[None, "time"]` and the keys of `batch`, and under `mask_key` a
        bool tensor `[n_traj, T_max]`, True on every real frame. `T_max` is the length of the longest piece, or
        `fragment_len`; padding is 0 (False), and None for what is no tensor, unless it is the same for all frames. It
        shares no memory with `batch`. A batch without a valid row gives `[0, 0]`.

        With `as_nested`, a TensorDict `[n_traj]` whose tensors, of any dtype, are nested, `[n_traj, j, *shape]`, of
        jagged layout and of one j, so that they can be computed with together; what is no tensor is a list a piece.
        There is no mask. What cannot be nested is a stack of agents, lanes or frames whose shapes or keys differ.
        (TorchRL's are of strided layout, with time in the batch size, `[n_traj, -1]`.)

    Raises:
        InvalidBatchError: `batch` has no time dimension, or neither ids nor done; or an id comes back in its lane
            after another stood between (slices of one episode, interleaved): which rows belong together cannot be
            told.
        OptionError: an option makes no sense, or `as_nested` was asked for what cannot be nested.

    Example:
        >>> from tensordict import TensorDict
        >>> batch = TensorDict({"next": {"done": torch.tensor([0, 1, 0]).bool()}, "x": torch.tensor([1, 2, 3])}, [3])
        >>> split_trajectories(batch)["x"]
        tensor([[1, 2],
                [3, 0]])
    """
    own = (prefix, "mask")
    key = own if mask_key is None else key_of("mask_key", mask_key)
    longest = None if fragment_len is None else positive("fragment_len", fragment_len)
    is_nested = _is_nested(as_nested)
    _check_level(batch, key)
    marks = Marks.of(batch, prefix, own, key)
    pieces = Pieces.of(marks, batch.batch_size, longest)
    rows = None if marks.real is None else pieces.frames
    if is_nested:
        return Jagged(batch.batch_dims, rows, pieces.offsets)(batch)
    mask = pieces.mask(longest)
    made = Taken(batch.batch_dims, mask.shape, (None, "time"), rows, mask.reshape(-1).nonzero()[:, 0])(batch)
    made.set(key, mask)
    return made


def _is_nested(as_nested: Any) -> bool:
    if isinstance(as_nested, bool):
        return as_nested
    if as_nested != torch.jagged:
        raise OptionError(f"as_nested must be True, False or torch.jagged, not {as_nested!r}.")
    return True


def _check_level(batch: TensorDictBase, key: Key) -> None:
    """The mask has a place to stand."""
    for length in range(1, len(key)):
        level = batch.get(key[:length], None)
        if level is not None and (is_non_tensor(level) or not is_tensor_collection(level)):
            raise OptionError(f"mask_key={key!r} would stand below {show_key(key[:length])}, which is a value.")
