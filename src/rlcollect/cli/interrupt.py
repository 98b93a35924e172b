"""Ctrl-C as a wish to end, not as a blow."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

__all__ = ["CtrlC"]

PATIENCE = 1.0


class CtrlC:
    """Within, a Ctrl-C asks for the end, so that the batch under way is still made and written.

    Where that takes longer than a second, or at the next Ctrl-C, comes `KeyboardInterrupt`, as usual.

        with CtrlC() as ctrl_c:
            while not ctrl_c.asked and (batch := collector.next()) is not None:
                writer.write(batch)

    Attributes:
        asked: whether Ctrl-C was typed.
    """

    def __init__(self) -> None:
        self.asked = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> CtrlC:
        self._handle(signal.SIGINT)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.asked:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _handle(self, number: int) -> None:
        self._before[number] = signal.signal(number, self._typed)

    def _typed(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.default_int_handler(number, frame)  # as if typed: one that is raised here would count as the env's
        self.asked = True
        self._handle(signal.SIGALRM)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE)
