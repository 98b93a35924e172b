"""What must hold for every frame of a batch: one function an invariant, each over all rows at once.

A pair that contradicts itself is put down to its later frame: that is the one named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

from rlcollect.testing._rows import (
    IDS,
    INIT,
    NEXT_DONE,
    NEXT_STEPS,
    NEXT_TERMINATED,
    STEPS,
    VERSION,
    Key,
    Rows,
    quoted,
)

__all__ = ["BEFORE", "INVARIANTS", "Fault", "Invariant"]

BEFORE: Final = "<the frame before>"
"""Stands in a fault's reason for the name of the frame before; the report fills it in."""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Fault:
    """Where one invariant does not hold, and what to say of it.

    Attributes:
        wrong: `[lanes, time]`, the frames where it does not hold.
        key: what is wrong there.
        came: `[lanes, time, ...]`, the values that came.
        expected: the values expected, of the same shape, or what they should have been in words.
        because: the rule; `BEFORE` in it stands for the frame before.
    """

    wrong: Tensor
    key: Key
    came: Tensor
    expected: Tensor | str
    because: str


Invariant: TypeAlias = Callable[[Rows], Iterator[Fault]]


def flags_agree(rows: Rows) -> Iterator[Fault]:
    """Done is terminated or truncated, before the step and after it."""
    for at in ((), ("next",)):
        done, terminated, truncated = (rows.column((*at, flag)) for flag in ("done", "terminated", "truncated"))
        expected = terminated | truncated
        wrong = rows.valid & (done != expected)
        yield Fault(wrong, (*at, "done"), done, expected, "done = terminated | truncated")


def no_frame_starts_ended(rows: Rows) -> Iterator[Fault]:
    """Flags before the step are False: a frame is never made from an episode that is over."""
    for flag in ("done", "terminated", "truncated"):
        came = rows.column((flag,))
        yield Fault(
            rows.valid & came, (flag,), came, torch.zeros_like(came), "no step is taken from a finished episode"
        )


def ids_change_after_done(rows: Rows) -> Iterator[Fault]:
    """The frame after a done one has another id; a soft truncation at the end of the batch before is let through."""
    if IDS not in rows.leaves:
        return
    soft = rows.across & ~rows.before(rows.column(NEXT_TERMINATED))
    wrong = rows.same_id & rows.after_done & ~soft
    reason = f"{quoted(NEXT_DONE)} is True at {BEFORE}, and only a truncation at the end of a batch can be a soft one"
    yield Fault(wrong, IDS, rows.column(IDS), "a new id", reason)


def ids_are_unique(rows: Rows) -> Iterator[Fault]:
    """An id stands in one lane, and is never taken up again there."""
    if IDS not in rows.leaves:
        return
    ids = rows.column(IDS)
    times, lanes, elder_lanes = _second_starts(rows, ids)
    wrong = torch.zeros(2, *ids.shape, dtype=torch.bool)
    wrong[(lanes != elder_lanes).long(), lanes, times] = True
    yield Fault(wrong[0], IDS, ids, "an id not seen before", "this lane has left that id before")
    yield Fault(wrong[1], IDS, ids, "an id not seen before", "that id stands in another lane")


def observations_continue(rows: Rows) -> Iterator[Fault]:
    """Within an episode, a frame starts from the very observation in which the one before ended."""
    for key in rows.observed:
        came, expected = rows.leaves[key], rows.before(rows.leaves["next", *key])
        reason = f"what {quoted(('next', *key))} holds at {BEFORE}, of the same episode"
        yield Fault(rows.continues & ~_same_bits(came, expected), key, came, expected, reason)


def steps_count_up(rows: Rows) -> Iterator[Fault]:
    """The step count is one more after the step, and goes on from there within an episode."""
    if STEPS not in rows.leaves:
        return
    count, count_after = rows.column(STEPS), rows.column(NEXT_STEPS)
    wrong = rows.valid & (count_after != count + 1)
    yield Fault(wrong, NEXT_STEPS, count_after, count + 1, f"one more than {quoted(STEPS)}")
    wrong = rows.continues & (count != rows.before(count_after))
    reason = f"what {quoted(NEXT_STEPS)} holds at {BEFORE}, of the same episode"
    yield Fault(wrong, STEPS, count, rows.before(count_after), reason)


def steps_start_at_zero(rows: Rows) -> Iterator[Fault]:
    """The step count is 0 where an episode begins, after a cut too, and never below."""
    if STEPS not in rows.leaves:
        return
    count = rows.column(STEPS)
    yield Fault(rows.begins & (count != 0), STEPS, count, torch.zeros_like(count), "an episode begins here")
    yield Fault(rows.valid & (count < 0), STEPS, count, "0 or more", "it counts the steps of the episode so far")
    goes_on = rows.before(rows.column(NEXT_STEPS))
    wrong = rows.across & ~rows.begins & ~rows.continues & (count != 0) & (count != goes_on)
    reason = f"{BEFORE} is done, so an episode begins here, or goes on after a soft truncation"
    yield Fault(wrong, STEPS, count, f"0, or what {quoted(NEXT_STEPS)} holds there", reason)


def starts_are_marked(rows: Rows) -> Iterator[Fault]:
    """`is_init` is True on the first frame of an episode and nowhere else, as far as can be seen."""
    if INIT not in rows.leaves:
        return
    known, expected = rows.begins | rows.continues, rows.begins
    if STEPS in rows.leaves:
        expected = torch.where(known, expected, rows.column(STEPS) == 0)
        known = rows.valid
    came = rows.column(INIT)
    reason = "it is True on the first frame of an episode and only there"
    yield Fault(known & (came != expected), INIT, came, expected, reason)


def versions_never_go_back(rows: Rows) -> Iterator[Fault]:
    """Policy versions of a lane do not decrease; -1, a random action, counts as none."""
    if VERSION not in rows.leaves:
        return
    version = rows.column(VERSION)
    yield Fault(rows.valid & (version < -1), VERSION, version, "-1 or more", "-1 marks a random action, 0 is first")
    highest = torch.where(rows.valid, version, -1).cummax(dim=1).values
    wrong = rows.valid & (version >= 0) & (version < highest)
    yield Fault(wrong, VERSION, version, highest, "or a newer one: the versions of a lane never go back")


INVARIANTS: Final[tuple[Invariant, ...]] = (
    flags_agree,
    no_frame_starts_ended,
    ids_change_after_done,
    ids_are_unique,
    observations_continue,
    steps_count_up,
    steps_start_at_zero,
    starts_are_marked,
    versions_never_go_back,
)
"""Every invariant; where several break at one frame, the first in this order is reported."""


def _second_starts(rows: Rows, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where an id begins for the second time or later: times, lanes, and the lanes where it began first."""
    times, lanes = (rows.valid & ~rows.same_id).T.nonzero().unbind(1)
    names, which = torch.unique(ids[lanes, times], return_inverse=True)
    order = torch.arange(len(which))
    firsts = torch.full((len(names),), len(which)).scatter_reduce(0, which, order, "amin")
    elders = firsts[which]
    again = order != elders
    return times[again], lanes[again], lanes[elders][again]


def _same_bits(left: Tensor, right: Tensor) -> Tensor:
    """Rows `[lanes, time]` that are equal bit for bit, a NaN being equal to any NaN."""
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    same = left == right
    if left.is_floating_point():
        bits = _BITS[left.element_size()]
        same = (left.view(bits) == right.view(bits)) | (left.isnan() & right.isnan())
    return same.unsqueeze(-1).flatten(2).all(dim=-1)
