"""The command line: `rlcollect collect`, `rlcollect bench` and `rlcollect check`.

The only room that knows tyro and rich; `import rlcollect` brings in neither.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro
from gymnasium.error import DependencyNotInstalled, UnregisteredEnv
from tyro import conf

from rlcollect.cli.bench import Bench
from rlcollect.cli.check import Check
from rlcollect.cli.collect import INTERRUPTED, Collect
from rlcollect.errors import DatasetError, OptionError, RlcollectError, WorkerError

__all__ = ["main"]

FAILED, WRONG_USAGE = 1, 2
Command = (
    Annotated[Collect, conf.subcommand("collect", description="Collect frames of an environment into a folder.")]
    | Annotated[Bench, conf.subcommand("bench", description="Measure a collector beside a hand-written loop.")]
    | Annotated[Check, conf.subcommand("check", description="Check that an environment keeps its contract.")]
)


def main(args: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        args: the words after `rlcollect`; None: those of the process.

    Returns:
        The exit status: 0; 1 where something failed; 2 where the command makes no sense; 130 after Ctrl-C.

    Raises:
        SystemExit: after `--help` (0), or words that are no command (2).
    """
    command: Any = tyro.cli(
        Command,
        prog="rlcollect",
        description="Collect experience of an environment.",
        args=args,
    )
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    with warnings.catch_warnings():
        warnings.showwarning = _warn
        try:
            return int(command.run())
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            return INTERRUPTED
        except Exception as error:
            told = _told(error)
            if told is None:
                raise
            print(told, file=sys.stderr)
            return WRONG_USAGE if isinstance(error, OptionError) else FAILED


def _told(error: Exception) -> str | None:
    """What the user is told of it; None: it is a bug of ours, and shown as it is."""
    report = error if isinstance(error, WorkerError) else error.__cause__
    if isinstance(report, WorkerError) and not isinstance(error, UnregisteredEnv | DependencyNotInstalled):
        return f"{report.worker_traceback}error: {report}"
    if isinstance(error, RlcollectError | UnregisteredEnv | DependencyNotInstalled):
        without_number = error.strerror if isinstance(error, DatasetError) else None
        return f"error: {without_number or error}"
    return None


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    print(f"warning: {message}", file=sys.stderr)
