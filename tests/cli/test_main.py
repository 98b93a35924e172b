"""Words that are no command, help, and what the process is left with."""

from __future__ import annotations

import runpy
import sys

import pytest

from rlcollect.errors import RlcollectError
from tests.cli.helpers import rlcollect


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["collect", "CartPole-v1", "--frames", "10"], "--out"),
        (["collect", "CartPole-v1", "--out", "run"], "--frames"),
        (["collect", "--frames", "10", "--out", "run"], "ENV"),
        (["collect", "CartPole-v1", "--frames", "many", "--out", "run"], "many"),
        (["collect", "CartPole-v1", "--frames", "10", "--out", "run", "--num-env", "3"], "--num-envs"),
        (["colect"], "colect"),
        ([], "collect"),
    ],
)
def test_wrong_words_are_named_and_end_with_status_2(
    words: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        rlcollect(*words)
    assert ended.value.code == 2
    told = capsys.readouterr()
    assert named in told.err + told.out
    assert "Traceback" not in told.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--help"], ["collect", "bench"]),
        (["collect", "--help"], ["ENV", "--overwrite", "FILE.pt2", "not trusted", "unpickle"]),
        (["bench", "--help"], ["ENV", "--rounds", "hand-written"]),
    ],
)
def test_help_says_what_there_is(words: list[str], named: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        rlcollect(*words)
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert all(part in told for part in named)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        (["--num-envs", 0], "num_envs must be a positive integer, not 0"),
        (["--frames", -5], "--frames must be positive, not -5"),
        (["--seed", -1], "--seed must not be negative"),
        (["--frames-per-batch", 0], "frames_per_batch must be a positive integer, not 0"),
        (["--policy", "nothing"], "--policy takes random, module:attribute, or a FILE.pt2"),
        (["--weights", "w.pt"], "--weights needs a policy that is an nn.Module"),
    ],
)
def test_options_that_make_no_sense_end_with_status_2(
    option: list[object], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run", *option) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert told in error
    assert "Traceback" not in error


def test_the_module_ends_with_the_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["rlcollect", "collect", "CartPole-v1", "--frames", "0", "--out", "run"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("rlcollect", run_name="__main__")
    assert ended.value.code == 2
    assert "--frames" in capsys.readouterr().err


def test_an_unknown_environment_is_told_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert rlcollect("collect", "CartPol-v1", "--frames", 10, "--out", "run") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "CartPole" in line


def test_a_bug_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlcollect.cli.collect.load_policy", lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run")


def test_warnings_are_lines(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import warnings

    def warn(*_: object) -> None:
        warnings.simplefilter("always")
        warnings.warn("mind the gap", stacklevel=1)
        raise RlcollectError("enough")

    monkeypatch.setattr("rlcollect.cli.collect.load_policy", warn)
    assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run") == 1
    assert capsys.readouterr().err == "warning: mind the gap\nerror: enough\n"
