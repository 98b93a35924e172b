"""Frames that tell what they are, and whether they are whole."""

from __future__ import annotations

from pathlib import Path

import torch
from tensordict import TensorDict

from rlcollect import ReplayBuffer

WORDS = 512  # of a frame's content: some kilobytes, which take long enough to write that a torn one would show


def batch(lanes=4, steps=10, *, start=0, ends=(), ids=None, width=2, mask=None):
    """Frames `[lanes, steps]`: `value` is lane * 1000 + start + time; episodes end at times `ends`, ids by lane."""
    value = torch.arange(lanes)[:, None] * 1000 + start + torch.arange(steps)
    done = torch.zeros(lanes, steps, 1, dtype=torch.bool)
    done[:, list(ends)] = True
    before = torch.cat([torch.zeros(lanes, 1, dtype=torch.long), done[..., 0].long()], 1).cumsum(1)[:, :steps]
    first = torch.arange(lanes)[:, None] * 100 if ids is None else torch.as_tensor(ids)[:, None]
    collector = {"traj_ids": first + before}
    if mask is not None:
        collector["mask"] = torch.as_tensor(mask)
    values = {
        "value": value,
        "observation": value[..., None].float().repeat(1, 1, width),
        "next": {"done": done, "reward": value[..., None] / 2},
        "collector": collector,
    }
    return TensorDict(values, [lanes, steps], names=[None, "time"])


def values(buffer):
    """The values of all frames, lane after lane, in the order of time."""
    return buffer.frames()["value"].tolist()


def lane_values(buffer):
    """The same, by lane, as what is written in it tells."""
    found = {}
    for value in values(buffer):
        found.setdefault(value // 1000, []).append(value % 1000)
    return found


def ids_of(buffer):
    return buffer.frames()["collector", "traj_ids"].tolist()


def sealed(lanes, steps, *, lane=0, start=0):
    """Frames that a torn one would not look like: each repeats its number, and ends with a checksum."""
    number = (torch.arange(lane, lane + lanes)[:, None] << 40) + start + torch.arange(steps)
    content = number[..., None] * 2654435761 + torch.arange(WORDS)
    values = {
        "number": number,
        "content": content,
        "check": content.sum(-1) ^ number,
        "collector": {"traj_ids": number >> 40},
        "next": {"done": torch.zeros(lanes, steps, 1, dtype=torch.bool)},
    }
    return TensorDict(values, [lanes, steps], names=[None, "time"])


def torn(frames):
    """How many frames are not what their writer wrote."""
    expected = frames["number"][..., None] * 2654435761 + torch.arange(WORDS)
    whole = (frames["content"] == expected).all(-1) & (frames["check"] == (expected.sum(-1) ^ frames["number"]))
    return int((~whole).sum())


def gaps(frames):
    """How many frames do not follow the one before of their lane."""
    number = frames["number"]
    same = number[1:] >> 40 == number[:-1] >> 40
    return int((same & (number[1:] != number[:-1] + 1)).sum())


def full(**options):
    """A buffer with the 40 frames of 4 lanes."""
    buffer = ReplayBuffer(40, **options)
    buffer.extend(batch())
    return buffer


def descriptors():
    return len([*Path("/proc/self/fd").iterdir()])


def folders(path):
    return sorted(each.name for each in Path(path).iterdir())
