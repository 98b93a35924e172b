"""Several nodes, of which one is lost. They are a cluster of their own, so a program of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.timeout(300), pytest.mark.cluster]
TOTAL = {"async": 4000, "sync": 4002}  # of 6 lanes together it is rounded up


@pytest.mark.parametrize("way", ["async", pytest.param("sync", marks=pytest.mark.slow)])
def test_what_was_there_is_made_elsewhere(way):
    """Counts are exact, episodes whole (`check_batch`), weights the newest; the warning says what happened."""
    script = Path(__file__).with_name("losing_a_node.py")
    done = subprocess.run(
        [sys.executable, "-m", f"tests.cluster.{script.stem}", way],
        cwd=script.parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["nodes"] == 2
    assert told["frames"] == told["collected"] == TOTAL[way]
    assert told["restarts"] == [0, 1, 0]
    assert {tuple(each) for each in told["versions"]} == {(0, 1.0), (1, 2.0)}
    (warning,) = told["warned"]
    assert "worker 1" in warning
    assert "node has died" in warning
