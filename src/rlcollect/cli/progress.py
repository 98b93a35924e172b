"""How far a collection is: an animated bar in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from contextlib import nullcontext
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from rlcollect.stats import Stats

__all__ = ["Report"]

SECONDS_BETWEEN_LINES = 10.0


class Report:
    """Shows frames, frames per second and the mean return of the last 100 episodes, while it is entered.

    Args:
        console: where to.
        total: frames at the end.
    """

    def __init__(self, console: Console, total: int) -> None:
        self._console = console
        self._total = total
        self._start = self._shown = time.perf_counter()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if console.is_terminal and console.file.isatty():
            columns = (BarColumn(), TextColumn("{task.fields[told]}"), TimeRemainingColumn())
            self._bar = Progress(*columns, console=console)
            self._task = self._bar.add_task("", total=total, told="")

    def __enter__(self) -> Report:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    @property
    def _live(self) -> Any:
        return self._bar or nullcontext()

    def update(self, frames: int, stats: Stats) -> None:
        """So many frames are written."""
        now = time.perf_counter()
        if self._bar is None and now - self._shown < SECONDS_BETWEEN_LINES:
            return
        mean = stats.episode_return.mean
        told = f"{frames:,} of {self._total:,} frames, {frames / (now - self._start):,.0f} frames/s, "
        told += "no episode has ended" if mean is None else f"return {mean:,.4g}"
        if self._bar is not None:
            self._bar.update(self._task, completed=frames, told=told)
        else:
            self._console.print(told, soft_wrap=True, markup=False, highlight=False)
            self._shown = now
