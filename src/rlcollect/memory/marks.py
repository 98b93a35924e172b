"""What a batch says of its frames: whose they are, where episodes end, which are real.

Knows the keys of a batch, and nothing of what is done with them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tensordict import TensorDictBase

from rlcollect.errors import InvalidBatchError
from rlcollect.layout import Key, show_key

__all__ = ["STEPS", "Marks", "check_time"]

STEPS = "steps_to_next_obs"
"""Where `MultiStep` puts how many steps it made one."""


@dataclass(frozen=True)
class Marks:
    """One value a frame, `[*batch_size]` each, on one device; None where the batch does not say.

    Of ids and done it has at least one.

    Attributes:
        ids: the trajectory that a frame belongs to.
        done: whether the episode ended with it, bool.
        real: whether it is a frame at all, bool.
        device: where they lie.
    """

    ids: torch.Tensor | None
    done: torch.Tensor | None
    real: torch.Tensor | None
    device: torch.device

    @classmethod
    def of(cls, batch: TensorDictBase, prefix: str, *masks: Key) -> Marks:
        """The marks of a batch.

        Args:
            batch: `[*lanes, T]`.
            prefix: under which key the ids stand.
            masks: keys under which masks may stand; a frame is real if none says that it is not.

        Raises:
            InvalidBatchError: there is no time, time is not last, there are neither ids nor done, one of them has
                another form, or done stands on several rows of an episode, as `MultiStep` leaves it.
        """
        check_time(batch)
        if batch.get(STEPS, None) is not None:
            raise InvalidBatchError(
                f"{STEPS!r} is there: this batch went through a MultiStep before, and done no longer tells where "
                "episodes end. Cut it into trajectories first, and make its steps several once"
            )
        ids, done = _per_frame(batch, (prefix, "traj_ids")), _per_frame(batch, ("next", "done"))
        either = done if ids is None else ids
        if either is None:
            raise InvalidBatchError(
                f"expected ({prefix!r}, 'traj_ids') or ('next', 'done') to tell trajectories apart, but the batch has "
                f"neither; its keys are {sorted(map(str, batch.keys(True, True)))}. Keep one of them, or pass prefix= "
                "if the ids stand under another key"
            )
        device = either.device
        done = None if done is None else done.to(device, torch.bool)
        return cls(ids, done, _real(batch, masks, device), device)


def check_time(batch: TensorDictBase) -> None:
    """A batch has a dimension of time, and it is the last.

    Raises:
        InvalidBatchError: it has none, or it is another.
    """
    if not batch.batch_dims:
        raise InvalidBatchError("expected a batch [T], [N, T] or [B, N, T], time last; this one has batch_size []")
    if "time" in batch.names[:-1]:
        raise InvalidBatchError(
            f"expected time as the last batch dimension, but the names are {batch.names}; transpose the batch first"
        )


def _per_frame(batch: TensorDictBase, key: Key) -> torch.Tensor | None:
    """The tensor under `key` with one value a frame, `[*batch_size]`; None if there is none."""
    value = batch.get(key, default=None)
    if value is None:
        return None
    size = list(batch.batch_size)
    if not isinstance(value, torch.Tensor) or list(value.shape) not in (size, [*size, 1]):
        came = (
            f"it has shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"{type(value).__name__} came"
        )
        raise InvalidBatchError(f"expected one value a frame under {show_key(key)}, {size} or {[*size, 1]}, but {came}")
    return value.reshape(batch.batch_size)


def _real(batch: TensorDictBase, masks: tuple[Key, ...], device: torch.device) -> torch.Tensor | None:
    found: torch.Tensor | None = None
    for key in dict.fromkeys(masks):
        if (mask := _per_frame(batch, key)) is not None:
            if mask.dtype != torch.bool:
                raise InvalidBatchError(f"expected a mask, torch.bool, under {show_key(key)}, but it is {mask.dtype}")
            mask = mask.to(device)
            found = mask if found is None else found & mask
    return found
