"""How an exception reaches the caller: as itself, with who, where and the worker's own traceback."""

from __future__ import annotations

import dis
import traceback
from types import TracebackType

from rlcollect.errors import EnvError, PolicyError, RlcollectError, WorkerError

__all__ = ["relayed"]

MISREAD = (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt)
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
        `EnvError` or `PolicyError` where an answer does not fit; a real Ctrl-C as it is.
    """
    where = f"worker {worker}, step {step}" if lane is None else f"worker {worker}, lane {lane}, step {step}"
    if isinstance(error, EnvError | PolicyError):
        return _caused(type(error)(f"{where}: {error}"), error)
    if isinstance(error, RlcollectError) or (isinstance(error, KeyboardInterrupt) and not _raised_by_code(error)):
        return error
    if isinstance(error, TypeError | ValueError | KeyError | IndexError) and _raised_in_our_code(error):
        kind = PolicyError if lane is None else EnvError
        whose = "policy" if lane is None else "environment"
        text = f"{where}: what the {whose} gave does not fit what it gave before: {type(error).__name__}: {error}"
        return _caused(kind(text), error)
    told = "".join(traceback.format_exception(error))
    report = WorkerError(
        f"{where}: {type(error).__name__}: {error}", worker=worker, lane=lane, step=step, worker_traceback=told
    )
    if isinstance(error, MISREAD):
        return _caused(report, error)
    report.__cause__ = error.__cause__
    return _caused(error, report)


def _caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _last(error: BaseException) -> TracebackType | None:
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    return last


def _raised_in_our_code(error: BaseException) -> bool:
    """Whether the exception comes from one of our own lines, not from something they called."""
    last = _last(error)
    return last is not None and str(last.tb_frame.f_globals.get("__name__", "")).startswith(OURS)


def _raised_by_code(error: BaseException) -> bool:
    """Whether a `raise` statement made it; a typed Ctrl-C comes between any two instructions."""
    last = _last(error)
    return last is not None and last.tb_frame.f_code.co_code[last.tb_lasti] == dis.opmap["RAISE_VARARGS"]
