"""Everything that rlcollect raises, in one tree.

RlcollectError
├── OptionError            an option has a value that makes no sense, or does not go with another (also ValueError)
├── SpaceError             a space has no tensor form, lanes disagree, or a key is one of ours     (also ValueError)
├── PolicyError            the policy reads or writes something that does not fit                  (also ValueError)
├── EnvError               an environment gave something that does not fit its spaces              (also RuntimeError)
├── WorkerError            something was raised where frames are made: who, where, what            (also RuntimeError)
├── WorkerDied             a worker process ended without a word: its exit code or signal           (also RuntimeError)
├── WorkerTimeout          a worker took longer than was allowed; nothing is lost                  (also TimeoutError)
├── BufferDied             the actor that holds a replay buffer is gone, with what was in it        (also RuntimeError)
├── SharedMemoryError      there is less shared memory than is needed                              (also OSError)
├── ClosedError            a collector was used after it was shut down                             (also RuntimeError)
├── InvalidBatchError      a batch breaks an invariant; raised by `rlcollect.testing`              (also AssertionError)
└── DatasetError           a dataset cannot be written or read                                     (also OSError)

Each text says what was expected, what came, and what to do about it. One warning has a class of its own:
`WorkerRestarted`.
"""

from __future__ import annotations

__all__ = [
    "BufferDied",
    "ClosedError",
    "DatasetError",
    "EnvError",
    "InvalidBatchError",
    "OptionError",
    "PolicyError",
    "RlcollectError",
    "SharedMemoryError",
    "SpaceError",
    "WorkerDied",
    "WorkerError",
    "WorkerRestarted",
    "WorkerTimeout",
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


class WorkerDied(RlcollectError, RuntimeError):  # noqa: N818 - it says what happened
    """A worker process ended without a word: killed, by `os._exit`, or by a crash in native code.

    Attributes:
        worker: its number.
        exitcode: as `multiprocessing` has it: negative for a signal; None where it is not known.
        stage: what it was doing.
    """

    def __init__(self, message: str, *, worker: int, exitcode: int | None, stage: str) -> None:
        super().__init__(message)
        self.worker = worker
        self.exitcode = exitcode
        self.stage = stage


class WorkerTimeout(RlcollectError, TimeoutError):  # noqa: N818 - it says what happened
    """Workers took longer than was allowed. They go on, and what they make is there at the next call.

    Attributes:
        workers: those that were waited for.
    """

    def __init__(self, message: str, *, workers: tuple[int, ...]) -> None:
        super().__init__(message)
        self.workers = workers


class BufferDied(RlcollectError, RuntimeError):  # noqa: N818 - it says what happened
    """The actor that holds a replay buffer is gone, with what was in it, or its cluster is."""


class SharedMemoryError(RlcollectError, OSError):
    """There is less shared memory than is needed."""


class ClosedError(RlcollectError, RuntimeError):
    """A collector was used after it was shut down."""


class InvalidBatchError(RlcollectError, AssertionError):
    """A batch breaks an invariant of `rlcollect`; the text names the first wrong frame."""


class DatasetError(RlcollectError, OSError):
    """A dataset cannot be written or read."""


class WorkerRestarted(UserWarning):
    """A worker failed, and another is put in its place.

    Attributes:
        worker: its number.
        cause: what it failed by.
    """

    def __init__(self, message: str, *, worker: int, cause: BaseException) -> None:
        super().__init__(message)
        self.worker = worker
        self.cause = cause
