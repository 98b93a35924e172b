"""How an exception reaches the caller: as itself, with who, where and the worker's own traceback.

And how warnings point at the caller's line, not at one of ours.
"""

from __future__ import annotations

import dis
import signal
import sys
import traceback
import warnings
from types import CodeType, TracebackType

from rlcollect.errors import EnvError, PolicyError, RlcollectError, WorkerError

__all__ = ["MISREAD", "OnceEach", "is_interrupt", "relayed", "text_of", "warn"]

MISREAD = (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt)
MISFITS = (AttributeError, IndexError, KeyError, OverflowError, TypeError, ValueError)
WARNINGS = 1000  # that are passed on at most
OURS = ("rlcollect.envs.", "rlcollect.rollout.")


def relayed(error: BaseException, *, worker: int, lane: int | None, step: int) -> BaseException:
    """What to raise in the place of `error`.

    Args:
        error: caught where frames are made.
        worker: number of the worker.
        lane: whose environment it came from; None: not from an environment.
        step: how many frames that lane had made.

    Returns:
        The same exception, from a `WorkerError`; a `WorkerError` from it where it would be misread; a located
        `EnvError` or `PolicyError` where an answer does not fit; an interrupt from outside as it is.
    """
    where = f"worker {worker}, step {step}" if lane is None else f"worker {worker}, lane {lane}, step {step}"
    if isinstance(error, EnvError | PolicyError):
        return _caused(type(error)(f"{where}: {error}"), error)
    if isinstance(error, RlcollectError) or is_interrupt(error):
        return error
    if isinstance(error, MISFITS) and _raised_in_our_code(error):
        by_env = lane is not None or _module_of(error).startswith("rlcollect.envs.")
        kind, whose = (EnvError, "environment") if by_env else (PolicyError, "policy")
        text = f"{where}: what the {whose} gave does not fit: {type(error).__name__}: {text_of(error)}"
        return _caused(kind(text), error)
    told = "".join(traceback.format_exception(error))
    report = WorkerError(
        f"{where}: {type(error).__name__}: {text_of(error)}", worker=worker, lane=lane, step=step, worker_traceback=told
    )
    if isinstance(error, MISREAD):
        return _caused(report, error)
    report.__cause__ = error.__cause__
    return _caused(error, report)


def is_interrupt(error: BaseException) -> bool:
    """Whether it came from outside: a typed Ctrl-C, or what a signal handler of the program raised."""
    if not isinstance(error, KeyboardInterrupt | SystemExit):
        return False
    frames = list(traceback.walk_tb(error.__traceback__))
    handlers = _signal_handlers()
    if any(frame.f_code in handlers for frame, _ in frames):
        return True
    last = _last(error)  # Python's own handler raises between any two instructions, code at a `raise`
    return isinstance(error, KeyboardInterrupt) and (last is None or _opcode(last) != dis.opmap["RAISE_VARARGS"])


def text_of(error: BaseException) -> str:
    """The text of an exception, whatever its own code does."""
    try:
        return str(error)
    except Exception as failure:
        return f"(its text cannot be made: {type(failure).__name__})"


def warn(message: str | Warning, category: type[Warning] = UserWarning) -> None:
    """A warning that points at the first line outside this package."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and str(frame.f_globals.get("__name__", "")).startswith("rlcollect."):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level + 1)


class OnceEach:
    """Gives each warning once, and so many at most: what workers warn of comes again and again."""

    def __init__(self) -> None:
        self._given: set[tuple[type[Warning], str]] = set()

    def warn(self, text: str, category: type[Warning] = UserWarning) -> None:
        """See `warn`."""
        if (category, text) not in self._given and len(self._given) < WARNINGS:
            self._given.add((category, text))
            warn(text, category)


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _signal_handlers() -> set[CodeType]:
    codes = (getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals())
    return {code for code in codes if code is not None}


def _last(error: BaseException) -> TracebackType | None:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last


def _raised_in_our_code(error: BaseException) -> bool:
    """Whether the exception comes from one of our own lines, not from something they called."""
    return _module_of(error).startswith(OURS)


def _module_of(error: BaseException) -> str:
    """The module of the line that raised."""
    last = _last(error)
    return "" if last is None else str(last.tb_frame.f_globals.get("__name__", ""))


def _opcode(last: TracebackType) -> int:
    return last.tb_frame.f_code.co_code[last.tb_lasti]
