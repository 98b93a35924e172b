"""An exception on its way from a worker process: its type, its text, and the report of who, where and how."""

from __future__ import annotations

import pickle
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import cloudpickle

from rlcollect.errors import WorkerError
from rlcollect.failures import MISREAD, text_of

__all__ = ["Failure"]


@dataclass(frozen=True)
class Failure:
    """What was raised in a worker.

    Attributes:
        exception: its class, arguments and attributes, pickled; None: it cannot be.
        text: type and text, as a traceback ends.
        told: the traceback, as text.
        worker, lane, step: see `WorkerError`.
        context: the text of the report that came with it; empty: there was none.
    """

    exception: bytes | None
    text: str
    told: str
    worker: int
    lane: int | None
    step: int
    context: str

    @classmethod
    def of(cls, error: BaseException, worker: int) -> Failure:
        """The failure that an exception is; it may come from a `WorkerError`, whose report is then taken."""
        report = error if isinstance(error, WorkerError) else error.__cause__
        text = f"{type(error).__name__}: {text_of(error)}"
        told = "".join(traceback.format_exception(error))
        if not isinstance(report, WorkerError):
            return cls(_packed(error), text, told, worker, None, 0, "")
        return cls(_packed(error), text, report.worker_traceback, report.worker, report.lane, report.step, str(report))

    def raised(self) -> BaseException:
        """The exception to raise: the same, from a `WorkerError`; such a one alone where it cannot be made again."""
        report = WorkerError(
            self.context or f"worker {self.worker}: {self.text}",
            worker=self.worker,
            lane=self.lane,
            step=self.step,
            worker_traceback=self.told,
        )
        report.add_note(f"In the worker:\n{self.told}")
        error = None if self.exception is None else _rebuilt(self.exception)
        if error is None or isinstance(error, (WorkerError, *MISREAD)):
            return report
        error.__cause__ = report
        return error


def _packed(error: BaseException) -> bytes | None:
    """Its parts, and as `pickle` has it: what is written in C keeps more than arguments and attributes."""
    state = {key: value for key, value in vars(error).items() if key != "__notes__"}
    slots = [name for kind in type(error).__mro__ for name in _names(vars(kind).get("__slots__", ()))]
    state |= {name: getattr(error, name) for name in slots if hasattr(error, name)}
    try:
        data: bytes = cloudpickle.dumps((type(error), error.args, state, cloudpickle.dumps(error), text_of(error)))
    except Exception:  # whatever it holds, its text is enough
        return None
    return data


def _names(slots: str | Iterable[str]) -> list[str]:
    return [slots] if isinstance(slots, str) else list(slots)


def _rebuilt(data: bytes) -> BaseException | None:
    """The exception again: what comes out first with the same class and text."""
    try:
        kind, args, state, whole, text = pickle.loads(data)
    except Exception:  # whatever is missing here, its text is enough
        return None
    ways: list[Callable[[], Any]] = [lambda: pickle.loads(whole), lambda: _without_init(kind, args, state)]
    if hasattr(kind.__init__, "__code__"):  # its own: it may take other arguments than are kept, or do something
        ways.reverse()
    for way in ways:
        try:
            error = way()
            for name, value in state.items():
                if not hasattr(error, name):
                    setattr(error, name, value)
        except Exception:
            continue
        if type(error) is kind and text_of(error) == text:
            made: BaseException = error
            return made
    return None


def _without_init(kind: type[BaseException], args: tuple[Any, ...], state: Mapping[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    error.args = args
    for name, value in state.items():
        setattr(error, name, value)
    return error
