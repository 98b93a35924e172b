"""What a collection came to, as a table, and the line of Python that loads it."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from tensordict import TensorDict

from rlcollect.stats import Spread, Stats

__all__ = ["print_summary"]


def print_summary(
    console: Console, out: Path, stats: Stats, frames: int, seconds: float, seconds_on_disk: float
) -> None:
    """Prints it.

    Args:
        console: where to.
        out: the folder of the dataset.
        stats: of the collector.
        frames: that are in the dataset.
        seconds: that the collection took.
        seconds_on_disk: how many of them writing files took.
    """
    size = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    table = Table(show_header=False)
    for name, value in (
        ("frames", f"{frames:,}"),
        ("episodes", f"{stats.episodes:,}"),
        ("return (last 100)", _spread(stats.episode_return)),
        ("length (last 100)", _spread(stats.episode_length)),
        ("frames/s", f"{frames / seconds:,.0f}"),
        ("time", _shares(stats, seconds, seconds_on_disk)),
        ("size on disk", f"{decimal(size)}, {size / frames:,.0f} bytes a frame"),
    ):
        table.add_row(name, value)
    console.print(table, highlight=False)
    for line in _loading(out):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def _spread(spread: Spread) -> str:
    if spread.mean is None:
        return "no episode has ended"
    return f"mean {spread.mean:,.4g}, min {spread.min:,.4g}, max {spread.max:,.4g}"


def _shares(stats: Stats, seconds: float, seconds_on_disk: float) -> str:
    """Where the time of the whole run went; writing is into memory, and to the disk."""
    if stats.time is None:
        return "nothing was collected"
    collecting = stats.seconds / seconds
    env, policy = stats.time.env * collecting, stats.time.policy * collecting
    writing = stats.time.writing * collecting + seconds_on_disk / seconds
    elsewhere = max(1.0 - env - policy - writing, 0.0)
    return f"env {env:.0%}, policy {policy:.0%}, writing {writing:.0%}, elsewhere {elsewhere:.0%}"


def _loading(out: Path) -> list[str]:
    """How to load it: one line each way."""
    folder = json.dumps(str(out), ensure_ascii=False)
    shape = [*TensorDict.load_memmap(out).batch_size]
    if len(shape) == 1:
        return [f"TensorDict.load_memmap({folder})  # {shape}, time"]
    return [
        f"TensorDict.load_memmap({folder})  # {shape}, time x lanes",
        f"rlcollect.export.load_dataset({folder})  # {shape[::-1]}, lanes x time",
    ]
