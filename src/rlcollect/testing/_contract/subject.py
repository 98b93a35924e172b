"""What is checked: from what the user passed to open environments, each call of which is guarded.

Whatever an environment raises becomes a finding that says what, where and when; only a typed Ctrl-C goes through.
"""

from __future__ import annotations

import copy
import functools
import importlib
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gymnasium as gym
from gymnasium.envs.registration import EnvSpec, find_highest_version, get_env_id, parse_env_id
from gymnasium.vector import SyncVectorEnv, VectorEnv

from rlcollect.envs.make import close_all
from rlcollect.errors import OptionError
from rlcollect.failures import is_interrupt
from rlcollect.testing._contract.report import BrokenError, Finding

__all__ = ["ACCEPTED", "Recipe", "Subject", "guarded", "subject_of"]

Made = TypeVar("Made")
ACCEPTED = (
    "an environment id or spec, a gymnasium.Env, a gymnasium.vector.VectorEnv, or a callable that returns one of the "
    "two"
)


@dataclass(frozen=True)
class Recipe:
    """Makes a new environment each time; what would travel to another process.

    Attributes:
        source: an id, a spec or a maker.
        kwargs: for it; for `gymnasium.make_vec`, with `num_envs`.
        num_envs: lanes of a vector environment; None: as the source makes it.
    """

    source: Any
    kwargs: Mapping[str, Any]
    num_envs: int | None

    def __call__(self) -> Any:
        """Makes one."""
        if not isinstance(self.source, str | EnvSpec):
            if self.num_envs is None:
                return self.source(**self.kwargs)
            return SyncVectorEnv([functools.partial(self.source, **self.kwargs)] * self.num_envs)
        spec = copy.copy(_spec(self.source))
        spec.disable_env_checker = True  # it would raise and warn of what is to be told here
        if self.num_envs is None:
            return gym.make(spec, **self.kwargs)
        return gym.make_vec(spec, num_envs=self.num_envs, **self.kwargs)


class Subject:
    """An environment under check.

    Args:
        name: what it is called.
        recipe: makes a new one; None where an instance was passed.
        instance: that one.
        steps: that the longest run takes, at most.
        seconds: that the longest run takes, at most.
        seed: for resets and actions.
    """

    def __init__(
        self, name: str, recipe: Recipe | None, instance: Any, *, steps: int, seconds: float, seed: int
    ) -> None:
        self.name = name
        self.recipe = recipe
        self.steps = steps
        self.seconds = seconds
        self.seed = seed
        self._last = instance
        self._waiting: list[Any] = []

    def peek(self) -> Any:
        """The environment that `opened` gives next."""
        if not self._waiting:
            self._waiting.append(self._made())
        return self._waiting[0]

    def discard(self) -> None:
        """Closes the environment that waits, if it was made here."""
        waiting, self._waiting = self._waiting, []
        if self.recipe is not None:
            close_all(waiting)

    @contextmanager
    def opened(self) -> Iterator[Any]:
        """A new environment, closed in the end; or the instance that was passed, which is its owner's to close.

        Raises:
            BrokenError: it cannot be made, or not be closed.
        """
        env = self._waiting.pop() if self._waiting else self._made()
        findings: tuple[Finding, ...] = ()
        try:
            yield env
        except BrokenError as broken:
            findings = broken.findings
        finally:
            if self.recipe is not None:
                try:
                    guarded("close", "in close()", env.close)
                except BrokenError as broken:
                    findings += broken.findings
        if findings:
            raise BrokenError(*findings)

    def _made(self) -> Any:
        if self.recipe is None:
            return self._last
        env = guarded("maker", "while it was made", self.recipe)
        if env is self._last and env is not None:
            raise BrokenError(
                Finding(
                    "maker",
                    "broken",
                    "it returned the same environment twice",
                    "Make a new one in each call, or pass the environment itself.",
                )
            )
        self._last = env
        return env


def guarded(name: str, when: str, function: Callable[..., Made], *args: Any, **kwargs: Any) -> Made:
    """Calls what belongs to the user.

    Args:
        name: of the finding, if it raises.
        when: it happened, for the text.
        function: what to call.
        args: for it.
        kwargs: for it.

    Raises:
        BrokenError: it raised; with the last line of the traceback, and its place.
    """
    try:
        return function(*args, **kwargs)
    except (Exception, SystemExit, GeneratorExit, KeyboardInterrupt) as error:
        if is_interrupt(error):
            raise
        raise BrokenError(
            Finding(name, "broken", f"{_told(error)}, {when}", "Nothing should be raised here: see that line.")
        ) from error


def _told(error: BaseException) -> str:
    """The traceback's last line, and where the exception was raised."""
    said = traceback.format_exception_only(error)[-1].strip().splitlines()[0]
    place = traceback.extract_tb(error.__traceback__)[-1]
    if place.filename == __file__:  # it refused our arguments
        return said
    return f"{said} ({Path(place.filename).name}:{place.lineno}, in {place.name})"


def subject_of(
    make: Any, kwargs: Mapping[str, Any] | None, num_envs: int | None, *, steps: int, seconds: float, seed: int
) -> Subject:
    """What `check_env` was asked to check.

    Raises:
        OptionError: nothing that environments are made of; an id that nobody registered; options that go not with it.
    """
    kwargs = kwargs or {}
    bounds: dict[str, Any] = {"steps": steps, "seconds": seconds, "seed": seed}
    if isinstance(make, gym.Env | VectorEnv):
        if kwargs or num_envs is not None:
            raise OptionError(
                f"create_env_kwargs and num_envs make environments; {type(make).__name__} is one already. Leave them "
                "out, or pass a maker."
            )
        return Subject(type(make).__name__, None, make, **bounds)
    if isinstance(make, str):
        _spec(make)
    elif not (isinstance(make, EnvSpec) or callable(make)):
        raise OptionError(f"check_env takes {ACCEPTED}; {make!r} came.")
    return Subject(_name(make), Recipe(make, kwargs, num_envs), None, **bounds)


def _name(make: Any) -> str:
    if isinstance(make, str):
        return make
    if isinstance(make, EnvSpec):
        return make.id
    if isinstance(make, functools.partial):
        return _name(make.func)
    return str(getattr(make, "__qualname__", type(make).__qualname__))


def _spec(source: str | EnvSpec) -> EnvSpec:
    """The registration of an id; "module:id" imports the module first.

    Raises:
        OptionError: there is none.
    """
    if isinstance(source, EnvSpec):
        return source
    module, _, name = source.rpartition(":")
    if module:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise OptionError(f"{source!r}: there is no module {error.name!r}") from error
    try:
        namespace, base, version = parse_env_id(name)
        if version is None and name not in gym.registry:
            newest = find_highest_version(namespace, base)
            name = name if newest is None else get_env_id(namespace, base, newest)
        return gym.spec(name)
    except gym.error.Error as error:
        raise OptionError(f"There is no environment {source!r}: {error}") from error
