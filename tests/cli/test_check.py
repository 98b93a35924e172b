"""`rlcollect check`: which environment is meant, the table, and the exit status."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import rlcollect

MODULE = """
import functools

import gymnasium
from gymnasium.vector import SyncVectorEnv

from rlcollect.testing import Breaker, Counter, Reuser

breaks = functools.partial(Breaker, at=3)
instance = Counter(length=6)


class Nested:
    Inner = Counter


def lanes(number=2):
    return SyncVectorEnv([Counter] * number)


class Twice(Reuser):
    pass


gymnasium.register("Twice", entry_point=Counter)
gymnasium.register("Later-v3", entry_point=Counter)
"""


@pytest.fixture(autouse=True)
def _module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.py").write_text(MODULE)
    monkeypatch.setenv("COLUMNS", "200")


def check(*words: object) -> int:
    return rlcollect("check", *words, *(() if "--steps" in words else ("--steps", 60)))


def rows(told: str) -> dict[str, tuple[str, str]]:
    """Level and text of each check in the table."""
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in told.splitlines() if "│" in line]
    table: dict[str, tuple[str, str]] = {}
    name = ""
    for level, check, text in cells:
        name = check or name
        table[name] = (level, text) if check else (table[name][0], f"{table[name][1]} {text}")
    return table


class TestTheTable:
    def test_of_a_clean_environment(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert rlcollect("check", "CartPole-v1", "--steps", 500) == 0
        told = capsys.readouterr()
        assert told.err == ""
        assert told.out.splitlines()[0].strip() == "CartPole-v1"
        assert told.out.splitlines()[-1] == "0 broken, 0 warnings, of 16 checks"
        table = rows(told.out)
        assert {level for level, _ in table.values()} == {"ok"}
        assert table["spaces"] == ("ok", "'observation' [4] float32; 'action' [] int64")
        assert table["step"] == ("ok", "500 calls")
        assert table["rewards"] == ("ok", "finite, from 1 to 1")
        assert "at the 99th percentile" in table["time"][1]
        assert "of the time is spent in reset()" in table["time"][1]

    def test_of_a_broken_one(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check("probes:ProbeBreaks-v0") == 1
        told = capsys.readouterr().out
        level, text = rows(told)["step"]
        assert level == "broken"
        assert "RuntimeError: Breaker broke as told to: call 17 of step" in text
        assert "-> " in text
        assert "1 broken, 0 warnings" in told

    def test_warnings_alone_end_with_status_0(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check("mine:Reuser") == 0
        told = capsys.readouterr().out
        level, text = rows(told)["reused arrays"]
        assert level == "warning"
        assert "-> rlcollect copies what it records at once" in text
        assert "0 broken, 1 warning, of 16 checks" in told

    def test_fits_a_narrow_terminal(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "80")
        assert check("mine:breaks") == 1
        assert max(map(len, capsys.readouterr().out.splitlines())) <= 80

    def test_what_an_environment_says_is_not_markup(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "odd.py").write_text("def make():\n    raise ValueError('[red]no[/red] [0]')\n")
        assert check("odd:make") == 1
        assert "ValueError: [red]no[/red] [0] (odd.py:2, in make)" in rows(capsys.readouterr().out)["maker"][1]


class TestWhichEnvironment:
    @pytest.mark.parametrize(
        "words",
        [
            ("probes:ProbeCounter-v0",),
            ("ProbeCounter-v0", "--module", "probes"),
            ("mine:Counter",),
            ("--module", "mine:Counter"),
            ("mine:Nested.Inner",),
            ("mine:Later",),
        ],
        ids=str,
    )
    def test_every_way_to_name_one(self, words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
        assert check(*words) == 0
        assert "of 5 to 5 steps" in capsys.readouterr().out

    def test_an_instance(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check("mine:instance") == 0
        assert "of 6 to 6 steps" in capsys.readouterr().out

    def test_an_id_is_more_than_an_attribute_of_its_name(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check("mine:Twice") == 0
        assert rows(capsys.readouterr().out)["reused arrays"][0] == "ok"

    def test_a_maker_of_lanes(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check("mine:lanes", "--kwarg", "number=3") == 0
        assert "all 3 give" in rows(capsys.readouterr().out)["lanes"][1]

    def test_lanes_of_a_maker(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check("mine:Counter", "--num-envs", 3) == 0
        assert "all 3 give" in rows(capsys.readouterr().out)["lanes"][1]

    def test_lanes_of_an_id(self, capsys: pytest.CaptureFixture[str]) -> None:
        options = ("--kwarg", "vectorization_mode=sync", "--kwarg", "vector_kwargs={'autoreset_mode': 'SameStep'}")
        assert check("CartPole-v1", "--num-envs", 2, *options) == 0
        assert "SAME_STEP" in rows(capsys.readouterr().out)["autoreset mode"][1]

    def test_values_are_read_as_python_or_else_as_text(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check("mine:Counter", "--kwarg", "length=3", "--kwarg", "end=truncated") == 0
        assert "20 episodes of 3 to 3 steps, mean 3; ends: 20 truncated" in capsys.readouterr().out


class TestWrongUsage:
    @pytest.mark.parametrize(
        ("words", "told"),
        [
            ((), "ENV is missing"),
            (("CartPole-v1", "--module", "mine:Counter"), "both ENV 'CartPole-v1' and --module 'mine:Counter'"),
            (("CartPol-v1",), "There is no environment 'CartPol-v1'"),
            (("mine:Countr",), "'mine' has no attribute of that name. Did you mean 'Counter'?"),
            (("mine:Later-v4",), "Did you mean 'Later-v3'?"),
            (("mine:Nested.Outer",), "has no 'Outer'"),
            (("nowhere:Counter",), "there is no module 'nowhere'"),
            (("mine.py:Counter",), "Leave out the .py: mine"),
            (("CartPole-v1", "--module", "nowhere"), "there is no module 'nowhere'"),
            (("--module", "mine:Countr"), "module 'mine' has no 'Countr'. Did you mean 'Counter'?"),
            (("--module", "mine:"), "module 'mine' has no ''"),
            (("probes:number",), "check_env takes an environment id or spec"),
            (("probes:Net",), "check_env takes an environment id or spec"),
            (("CartPole-v1", "--kwarg", "gravity"), "--kwarg takes NAME=VALUE, not 'gravity'"),
            (("CartPole-v1", "--steps", 0), "must be positive"),
            (("CartPole-v1", "--seed", -1), "must not be negative"),
            (("CartPole-v1", "--num-envs", 0), "must be a positive integer"),
            (("mine:instance", "--num-envs", 2), "is one already"),
            (("mine:lanes", "--num-envs", 2), "makes vector environments"),
        ],
        ids=str,
    )
    def test_ends_with_status_2(self, words: tuple[object, ...], told: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert check(*words) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert told in error
        assert "Traceback" not in error

    def test_a_module_that_raises_shows_its_traceback(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "hurt.py").write_text("import nothing_of_this_name\n")
        assert check("hurt:make") == 2
        error = capsys.readouterr().err
        assert "importing 'hurt' failed" in error
        assert "import nothing_of_this_name" in error


def test_help_says_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        rlcollect("check", "--help")
    assert ended.value.code == 0
    told = capsys.readouterr().out
    for part in ("ENV", "MODULE[:ATTRIBUTE]", "NAME=VALUE", "--num-envs", "--seconds", "module:attribute"):
        assert part in told
