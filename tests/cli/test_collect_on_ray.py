"""`rlcollect collect --ray`: few tests, each with much in it, since every remote takes seconds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from rlcollect.export import load_dataset
from rlcollect.testing import check_batch
from tests.cli.helpers import RUN, assert_holds, rlcollect

INIT = "ray.init(address='local', num_cpus=2, object_store_memory=100_000_000, include_dashboard=False)"
IDLE = """
def is_idle():
    for _ in range(300):
        if ray.available_resources().get("CPU") == 2:
            return True
        time.sleep(0.1)
    return False
"""
TWICE = f"""
import ray, sys, time
from rlcollect.cli import main
{IDLE}
{INIT}
words = "collect CartPole-v1 --ray --remote-cpus 0.1 --num-collectors 2 --num-envs 2 --frames 120 --seed 5".split()
words += ["--policy", "probes:Net", "--frames-per-batch", "80"]
for name in "ab":
    assert main([*words, "--out", name]) == 0
print("idle:", is_idle())
"""
CLUSTER = f"""
import ray, sys, time
{IDLE}
{INIT}
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.readline()
print("idle:", is_idle(), flush=True)
"""


def started(script: str, *words: object, cwd: Path) -> subprocess.Popen[str]:
    """A program that has no cluster but those that it is told of."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, words)],
        cwd=cwd,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RAY_ADDRESS": "", "RAY_AUTH_MODE": "disabled"},
    )


class TestWords:
    @pytest.mark.parametrize(
        ("option", "told"),
        [
            (["--address", "here:1"], "--address here:1 is for remotes on a Ray cluster; add --ray"),
            (["--num-collectors", 2], "--num-collectors 2 is for"),
            (["--remote-cpus", 0.5], "--remote-cpus 0.5 is for"),
            (["--ray", "--policy", "p.pt2"], "--policy p.pt2 does not go with --ray"),
            (["--ray", "--num-collectors", 0], "--num-collectors must be positive, not 0"),
            (["--ray", "--remote-cpus", -1], "--remote-cpus must not be negative"),
        ],
    )
    def test_what_does_not_go_together_is_named(
        self, option: list[object], told: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run", *option) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert told in error

    @pytest.mark.timeout(60)
    def test_without_ray_it_says_how_to_get_it(self, folder: Path) -> None:
        words = ("collect", "CartPole-v1", "--frames", 10, "--ray", "--out", "run")
        process = started("import sys; sys.modules['ray'] = None; " + RUN, *words, cwd=folder)
        out, error = process.communicate()
        assert process.returncode == 1
        assert error == ("error: RayCollector needs Ray, which is not installed here: pip install 'rlcollect[ray]'.\n")
        assert out == ""
        assert not (folder / "run").exists()


@pytest.mark.timeout(120)
class TestOnACluster:
    @pytest.mark.cluster
    def test_the_lanes_of_all_remotes_lie_side_by_side_and_a_seed_repeats_them(self, folder: Path) -> None:
        pytest.importorskip("ray")
        process = started(TWICE, cwd=folder)
        out, error = process.communicate()
        assert process.returncode == 0, error
        assert out.splitlines()[-1] == "idle: True"
        a, b = (load_dataset(folder / name) for name in "ab")
        assert_holds(folder / "a", 120, lanes=4)
        assert (a == b).all()
        first, second = a["collector", "traj_ids"].unflatten(0, (2, 2)) >> 40
        assert (first == 0).all()
        assert (second == 1).all()
        assert not torch.equal(a["observation"][:2], a["observation"][2:])

    @pytest.mark.cluster
    def test_ctrl_c_keeps_what_was_collected_and_leaves_nothing_there(self, folder: Path) -> None:
        pytest.importorskip("ray")
        cluster = started(CLUSTER, cwd=folder)
        try:
            assert cluster.stdout is not None
            address = cluster.stdout.readline().strip()
            words = ("--frames", 10_000_000, "--num-envs", 2, "--out", "run", "--remote-cpus", 0.1)
            process = started(RUN, "collect", "CartPole-v1", "--ray", "--address", address, *words, cwd=folder)
            while not (folder / "run" / "meta.json").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.05)
            os.killpg(process.pid, signal.SIGINT)  # as in a terminal
            _, error = process.communicate()
            assert process.returncode == 130
            batch = load_dataset(folder / "run")
            assert batch.batch_size[0] == 4
            check_batch(batch)
            assert f"interrupted: the dataset holds {batch.numel():,} frames\n" in error
            told, error = cluster.communicate("\n", timeout=40)
            assert told == "idle: True\n", error
        finally:
            cluster.kill()
