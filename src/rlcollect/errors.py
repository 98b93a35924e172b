"""Everything that rlcollect raises, in one tree.

RlcollectError
├── OptionError            an option has a value that makes no sense, or does not go with another (also ValueError)
├── SpaceError             a space has no tensor form, lanes disagree, or a key is one of ours     (also ValueError)
├── PolicyError            the policy reads or writes something that does not fit                  (also ValueError)
├── EnvError               an environment gave something that does not fit its spaces              (also RuntimeError)
├── WorkerError            something was raised where frames are made: who, where, what            (also RuntimeError)
├── ClosedError            a collector was used after it was shut down                             (also RuntimeError)
├── InvalidBatchError      a batch breaks an invariant; raised by `rlcollect.testing`              (also AssertionError)
└── DatasetError           a dataset cannot be written or read                                     (also OSError)

Each text says what was expected, what came, and what to do about it.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "DatasetError",
    "EnvError",
    "InvalidBatchError",
    "OptionError",
    "PolicyError",
    "RlcollectError",
    "SpaceError",
    "WorkerError",
]


class RlcollectError(Exception):
    """Base of everything that rlcollect raises on purpose."""


class OptionError(RlcollectError, ValueError):
    """An option has a value that makes no sense, or does not go with another option."""


class SpaceError(RlcollectError, ValueError):
    """A space has no tensor form, the lanes' spaces disagree, or a key collides with one of ours."""


class PolicyError(RlcollectError, ValueError):
    """The policy reads a key that is not there, or writes something that is not an action of this environment."""


class EnvError(RlcollectError, RuntimeError):
    """An environment gave something that does not fit what it declared."""


class WorkerError(RlcollectError, RuntimeError):
    """Something was raised where frames are made.

    The exception that the environment, policy or hook raised comes out as itself, *from* one of these; what would
    be misunderstood on its way (`StopIteration`, `GeneratorExit`, `SystemExit`, a `KeyboardInterrupt` that nobody
    typed) comes out as one of these.

    Attributes:
        worker: number of the worker; 0 in a single process.
        lane: number of the lane within the worker; None where the error belongs to no lane (the policy's, say).
        step: how many frames had been made when it happened: of that lane, or of the first lane if there is none.
        worker_traceback: the traceback as text, as it stood in the worker.
    """

    def __init__(self, message: str, *, worker: int, lane: int | None, step: int, worker_traceback: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.lane = lane
        self.step = step
        self.worker_traceback = worker_traceback


class ClosedError(RlcollectError, RuntimeError):
    """A collector was used after it was shut down."""


class InvalidBatchError(RlcollectError, AssertionError):
    """A batch breaks an invariant of `rlcollect`; the text names the first wrong frame."""


class DatasetError(RlcollectError, OSError):
    """A dataset cannot be written or read."""
