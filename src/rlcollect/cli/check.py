"""`rlcollect check`: does an environment keep its contract?"""

from __future__ import annotations

import ast
import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import gymnasium as gym
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tyro import conf

from rlcollect.cli.modules import attribute_of, imported
from rlcollect.errors import OptionError
from rlcollect.testing import Finding, Level, Report, check_env

__all__ = ["Check"]

STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "broken": "bold red", "skipped": "dim"}
BROKEN = 1


@dataclass(frozen=True, kw_only=True)
class Check:
    """Check that an environment keeps the contract that collectors lean on, and say what to do where it does not.

    Random actions step it through as many episodes as it takes. The exit status is 1 if something is broken, and 0 if
    there are warnings at most.

    Attributes:
        env: A Gymnasium id; "module:id" imports the module first, as seen from the current folder. Or
            "module:attribute", where the attribute is an environment, a vector environment, or what makes one.
        module: A module to import first, for the ids that it registers; or "module:attribute", in the place of ENV.
        kwarg: For what makes the environment; may be given several times. The value is read as Python does, or else
            as text. With --num-envs it goes to gymnasium.make_vec ("vectorization_mode=async").
        num_envs: Check so many lanes: what gymnasium.make_vec makes of an id, or a SyncVectorEnv of what a maker makes.
        steps: How many steps the longest run takes.
        seconds: After which the longest run ends, be there steps left or not.
        seed: Of resets and actions.
    """

    env: conf.Positional[Annotated[str | None, conf.arg(metavar="ENV")]] = None
    module: Annotated[str | None, conf.arg(metavar="MODULE[:ATTRIBUTE]")] = None
    kwarg: conf.UseAppendAction[Annotated[tuple[str, ...], conf.arg(metavar="NAME=VALUE")]] = ()
    num_envs: Annotated[int | None, conf.arg(metavar="N")] = None
    steps: Annotated[int, conf.arg(metavar="N")] = 2000
    seconds: Annotated[float, conf.arg(metavar="S")] = 10.0
    seed: Annotated[int, conf.arg(metavar="N")] = 0

    def run(self) -> int:
        """Checks.

        Returns:
            The exit status: 0, or 1 where something is broken.

        Raises:
            OptionError: there is no such environment, or an option makes no sense.
        """
        name, make = _source(self.env, self.module)
        console = Console()
        with console.status("checking"):
            report = check_env(
                make,
                steps=self.steps,
                seed=self.seed,
                seconds=self.seconds,
                num_envs=self.num_envs,
                create_env_kwargs=_kwargs(self.kwarg),
            )
        console.print(_table(name, report), highlight=False)
        console.print(_summary(report), markup=False, highlight=False)
        return BROKEN if report.broken else 0


def _table(name: str, report: Report) -> Table:
    table = Table("", "check", "found, and what to do", title=Text(name))
    for finding in report.findings:
        style = STYLES[finding.level]
        table.add_row(Text(finding.level, style), Text(finding.name), _told(finding))
    return table


def _told(finding: Finding) -> Text:
    text = Text(finding.found)
    return text.append(f"\n-> {finding.remedy}", "italic") if finding.remedy else text


def _summary(report: Report) -> str:
    warnings = f"{len(report.warnings)} warning{'' if len(report.warnings) == 1 else 's'}"
    return f"{len(report.broken)} broken, {warnings}, of {len(report.findings)} checks"


# --- what is checked --------------------------------------------------------------------------------------------------


def _source(env: str | None, module: str | None) -> tuple[str, Any]:
    """What the table is called, and what `check_env` takes."""
    name, colon, attribute = (module or "").partition(":")
    found = imported(name, "--module: ", OptionError) if name else None
    if colon and found is not None:
        if env is not None:
            raise OptionError(f"both ENV {env!r} and --module {module!r} name an environment; give one of them")
        return f"{module}", attribute_of(found, attribute, "--module: ", OptionError)
    if env is None:
        raise OptionError("ENV is missing: a Gymnasium id, module:id or module:attribute")
    name, colon, attribute = env.rpartition(":")
    if not colon:
        return env, env
    found = imported(name, "", OptionError)
    if attribute in gym.registry:
        return env, env
    if hasattr(found, attribute.split(".")[0]):
        return env, attribute_of(found, attribute, "", OptionError)
    if any(known.rpartition("-v")[0] == attribute for known in gym.registry):
        return env, env
    near = difflib.get_close_matches(attribute, [*dir(found), *gym.registry], n=1)
    hint = f". Did you mean {near[0]!r}?" if near else ""
    raise OptionError(f"nobody registered an id {attribute!r}, and {name!r} has no attribute of that name{hint}")


def _kwargs(words: Sequence[str]) -> dict[str, Any]:
    kwargs = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not (name.isidentifier() and equals):
            raise OptionError(f"--kwarg takes NAME=VALUE, not {word!r}")
        kwargs[name] = _value(value)
    return kwargs


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
