"""`Breaker`: a `Counter` that breaks where, when and how it is told to.

For tests of what a collector does when an environment raises, dies, hangs or is slow.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Literal, NoReturn, TypeAlias, get_args

import numpy as np
from numpy.typing import DTypeLike

from rlcollect.errors import OptionError
from rlcollect.testing.environments import Counter, End, ObservationKind

__all__ = ["EXIT_CODE", "Breaker", "How", "UnpicklableError", "Where"]

How: TypeAlias = Literal["raise", "exit", "kill", "hang", "sleep"]
"""What happens when a `Breaker` breaks."""

Where: TypeAlias = Literal["constructor", "reset", "step", "close"]
"""The call in which a `Breaker` breaks."""

ExceptionSource: TypeAlias = BaseException | Callable[[], BaseException]

EXIT_CODE: Final = 3
"""Exit status of a process in which a `Breaker` broke with `how="exit"`."""

_NAP_SECONDS: Final = 0.05


class UnpicklableError(RuntimeError):
    """An exception that no pickler takes: it holds a lock. For `Breaker(exception=UnpicklableError)`."""

    def __init__(self, message: str = "this exception cannot be pickled") -> None:
        super().__init__(message)
        self.lock = threading.Lock()


class Breaker(Counter):
    """A `Counter` that breaks at the k-th call of one of its methods.

    It breaks before the call does anything: a step that breaks makes no frame, and so `Breaker(where="step", at=k)`
    makes k - 1 of them. Calls are counted from 1 over the environment's life, those that broke included. Where
    it raises or sleeps, the calls after the k-th work.

    Args:
        how: what happens:

            - "raise": `exception` is raised;
            - "exit": the process ends at once with `EXIT_CODE`, without clean-up;
            - "kill": the process kills itself with SIGKILL;
            - "hang": the call never returns (signals are still served);
            - "sleep": the call takes `seconds` longer.
        where: the method; "constructor" has only one call.
        at: which call, from 1; None for every call.
        share: in the place of `at`, the share of calls that break, at random, in another order in each life.
        exception: what "raise" raises: an exception, or what makes one when called with nothing (a class, a
            function). A factory is the way to an exception that cannot travel to a worker. None for a `RuntimeError`
            that says where it broke.
        seconds: how long "sleep" sleeps.
        once: path of a file that is made when it breaks; while the file exists, it does not break. So an environment
            made anew after it took its process down does not break again. None to break in every life.
        length: as for `Counter`.
        end: as for `Counter`.
        observation: as for `Counter`.
        dtype: as for `Counter`.

    Raises:
        OptionError: an option is not one of those named.
    """

    def __init__(
        self,
        how: How = "raise",
        where: Where = "step",
        at: int | None = 1,
        *,
        share: float | None = None,
        exception: ExceptionSource | None = None,
        seconds: float = 1.0,
        once: str | os.PathLike[str] | None = None,
        length: int | None = 5,
        end: End = "terminated",
        observation: ObservationKind = "box",
        dtype: DTypeLike = np.float32,
    ) -> None:
        super().__init__(length, end=end, observation=observation, dtype=dtype)
        _check_plan(how, where, at)
        if share is not None and not 0 <= share <= 1:
            raise OptionError(f"share is one of calls, in [0, 1]; got {share!r}")
        self.share = share
        self._chances = random.Random()  # seeded by the system: a life that was begun anew does not repeat the last
        self.how, self.where, self.at = how, where, at
        self.exception = exception
        self.seconds = seconds
        self.once = None if once is None else Path(once)
        self.calls: dict[str, int] = dict.fromkeys(get_args(Where), 0)
        self._count("constructor")

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """As `Counter`'s, unless this is the call that breaks.

        Args:
            seed: starts the environment's random stream anew.
            options: kept as `last_options`.

        Returns:
            The first observation, and `info`.
        """
        self._count("reset")
        return super().reset(seed=seed, options=options)

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """As `Counter`'s, unless this is the call that breaks.

        Args:
            action: without effect.

        Returns:
            Observation after the step, reward, terminated, truncated, `info`.
        """
        self._count("step")
        return super().step(action)

    def close(self) -> None:
        """As `Counter`'s, unless this is the call that breaks."""
        self._count("close")
        super().close()

    def _count(self, where: Where) -> None:
        """Counts one call, and breaks if it is the one."""
        self.calls[where] += 1
        if self.share is None:
            due = where == self.where and self.at in (None, self.calls[where])
        else:
            due = where == self.where and self._chances.random() < self.share
        if due and self._claim():
            self._break()

    def _claim(self) -> bool:
        """Whether this life may break: always without `once`, else for who makes the file."""
        if self.once is None:
            return True
        try:
            self.once.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True

    def _break(self) -> None:
        match self.how:
            case "raise":
                raise self._make_exception()
            case "exit":
                os._exit(EXIT_CODE)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "sleep":
                time.sleep(self.seconds)
            case "hang":
                _hang()

    def _make_exception(self) -> BaseException:
        if self.exception is None:
            return RuntimeError(f"Breaker broke as told to: call {self.calls[self.where]} of {self.where}")
        return self.exception if isinstance(self.exception, BaseException) else self.exception()


def _hang() -> NoReturn:
    while True:
        time.sleep(_NAP_SECONDS)


def _check_plan(how: How, where: Where, at: int | None) -> None:
    if how not in get_args(How):
        raise OptionError(f"how must be one of {get_args(How)}; got {how!r}")
    if where not in get_args(Where):
        raise OptionError(f"where must be one of {get_args(Where)}; got {where!r}")
    if at is not None and at < 1:
        raise OptionError(f"at counts calls from 1, or is None for every call; got {at!r}")
    if where == "constructor" and at not in (None, 1):
        raise OptionError(f"a constructor is called once: at must be 1; got {at!r}")
