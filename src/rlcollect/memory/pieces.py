"""Where the pieces of episodes are in a batch: index arithmetic on its marks, without a loop over frames."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rlcollect.errors import InvalidBatchError
from rlcollect.memory.marks import Marks

__all__ = ["Pieces"]


@dataclass(frozen=True)
class Pieces:
    """Pieces of episodes, by lane, then by time.

    Attributes:
        frames: `[K]` numbers of the real frames in this order: frame t of lane i is i * T + t.
        lengths: `[n]` how many of them each piece has, one after the other.
    """

    frames: torch.Tensor
    lengths: torch.Tensor

    @classmethod
    def of(cls, marks: Marks, size: torch.Size, longest: int | None) -> Pieces:
        """The pieces of a batch.

        Args:
            marks: of the batch.
            size: its batch size.
            longest: how many frames a piece may have; None: any number.

        Raises:
            InvalidBatchError: an id comes back in its lane after another stood between.
        """
        frames = _frames(marks.real, size.numel(), marks.device)
        lanes = frames // max(size[-1], 1)
        starts = _changes(lanes)
        if marks.ids is not None:
            ids = marks.ids.reshape(-1)[frames]
            starts |= _changes(ids)
            _check_ids(frames[starts], ids[starts], size)
        if marks.done is not None:
            starts[1:] |= marks.done.reshape(-1)[frames][:-1]
        lengths = _lengths(starts)
        return cls(frames, lengths if longest is None else _lengths(_within(lengths) % longest == 0))

    def mask(self, length: int | None) -> torch.Tensor:
        """`[n, length]` where a padded piece has frames; of the length of the longest piece, if none is given."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        steps = torch.arange(longest if length is None else length, device=self.lengths.device)
        return steps < self.lengths[:, None]

    @property
    def offsets(self) -> torch.Tensor:
        """`[n + 1]` where each piece begins among the real frames, and where the last one ends."""
        return torch.nn.functional.pad(self.lengths.cumsum(0), (1, 0))


def _frames(real: torch.Tensor | None, count: int, device: torch.device) -> torch.Tensor:
    if real is None:
        return torch.arange(count, device=device)
    return real.reshape(-1).nonzero()[:, 0]


def _changes(values: torch.Tensor) -> torch.Tensor:
    """Where a value `[K]` is not the one before it; the first is a change."""
    changed = torch.ones(values.shape, dtype=torch.bool, device=values.device)
    changed[1:] = values[1:] != values[:-1]
    return changed


def _lengths(starts: torch.Tensor) -> torch.Tensor:
    """How far it is from each start to the next, and from the last to the end."""
    first = starts.nonzero()[:, 0]
    return torch.diff(first, append=first.new_tensor([len(starts)]))


def _within(lengths: torch.Tensor) -> torch.Tensor:
    """`[K]` how many frames of its piece stand before each frame."""
    first = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum()), device=lengths.device) - first.repeat_interleave(lengths)


def _check_ids(frames: torch.Tensor, ids: torch.Tensor, size: torch.Size) -> None:
    """Each id stands in one run within its lane.

    Args:
        frames: `[R]` where runs begin, in order.
        ids: `[R]` theirs.
        size: of the batch.

    Raises:
        InvalidBatchError: one does not; names the first that comes back.
    """
    lanes = frames // max(size[-1], 1)
    order = ids.argsort(stable=True)  # runs of one id side by side, and these by lane
    before, after = order[:-1], order[1:]
    again = ((ids[before] == ids[after]) & (lanes[before] == lanes[after])).nonzero()[:, 0]
    if not len(again):
        return
    pair = again[after[again].argmin()]
    first, second = int(frames[before[pair]]), int(frames[after[pair]])
    lane = tuple(int(index) for index in torch.unravel_index(torch.tensor(first), size)[:-1])
    where = f"lane {lane[0] if len(lane) == 1 else lane}" if lane else "the only lane"
    raise InvalidBatchError(
        f"trajectory id {int(ids[before[pair]])} comes back in {where}: it begins at t={first % size[-1]} and, after "
        f"another id, again at t={second % size[-1]}. Rows of one trajectory must stand side by side in a lane; sort "
        "the batch by id, or split each slice on its own before joining them"
    )
