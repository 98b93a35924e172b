"""`rlcollect bench` prints a ratio, for every kind of policy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.helpers import export, rlcollect


@pytest.mark.parametrize("lanes", [(), ("--num-envs", 2)], ids=["one", "lanes"])
@pytest.mark.parametrize(
    ("env", "policy"),
    [
        ("CartPole-v1", "random"),
        ("CartPole-v1", "probes:net"),
        ("CartPole-v1", "probes:Net"),
        ("CartPole-v1", "probes:module"),
        ("CartPole-v1", "probes:with_tensordict"),
        ("probes:ProbeEcho-v0", "probes:half"),
    ],
)
def test_prints_a_ratio(env: str, policy: str, lanes: tuple[object, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert rlcollect("bench", env, "--policy", policy, "--seconds", 0.01, "--rounds", 2, *lanes) == 0
    told = capsys.readouterr().out
    assert policy in told
    assert re.search(r"rlcollect +. [\d,]+ +. \d+\.\d\d \(\d+\.\d\d - \d+\.\d\d\)", told)
    assert re.search(r"hand-written loop, records nothing +. [\d,]+ +. 1 ", told)


def test_a_program_gets_a_lane(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export(folder / "policy.pt2")
    assert rlcollect("bench", "CartPole-v1", "--policy", "policy.pt2", "--seconds", 0.01, "--rounds", 1) == 0
    assert "1 lane," in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--seconds", 0), ("--rounds", 0)])
def test_options_that_make_no_sense_end_with_status_2(
    option: tuple[object, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert rlcollect("bench", "CartPole-v1", *option) == 2
    assert "must be positive" in capsys.readouterr().err


def test_observations_of_several_tensors_are_refused_for_a_policy(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--policy", "probes:zero", "--seconds", 0.01, "--rounds", 1)
    assert rlcollect("bench", "probes:ProbeDict-v0", *words) == 2
    assert "shows a policy one tensor" in capsys.readouterr().err
    assert rlcollect("bench", "probes:ProbeDict-v0", "--seconds", 0.01, "--rounds", 1) == 0
