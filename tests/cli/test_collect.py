"""`rlcollect collect`, from the words to the dataset."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from rlcollect.export import load_dataset
from tests.cli.helpers import RUN, assert_holds, rlcollect, start


class TestEndToEnd:
    def test_lanes(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("--frames", 600, "--num-envs", 3, "--seed", 0, "--max-frames-per-traj", 7, "--frames-per-batch", 90)
        assert rlcollect("collect", "CartPole-v1", *words, "--out", "run/here") == 0
        assert_holds(folder / "run/here", 600, lanes=3)
        assert load_dataset("run/here")["step_count"].max() <= 7
        told = capsys.readouterr()
        assert told.err == ""
        for part in ("600", "episodes", "return (last 100)", "length (last 100)", "frames/s", "size on disk"):
            assert part in told.out
        assert re.search(r"env \d+%, policy \d+%, writing \d+%, elsewhere \d+%", told.out)
        assert 'rlcollect.export.load_dataset("run/here")  # [3, 200], lanes x time' in told.out

    def test_the_line_that_loads_it_loads_it(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert rlcollect("collect", "CartPole-v1", "--frames", 60, "--num-envs", 3, "--out", 'a "b"') == 0
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("TensorDict")]
        assert eval(line, {"TensorDict": TensorDict}).batch_size == (20, 3)

    def test_one_environment_has_no_dimension_of_lanes(self, folder: Path) -> None:
        assert rlcollect("collect", "CartPole-v1", "--frames", 50, "--out", "run") == 0
        assert_holds(folder / "run", 50)

    def test_one_lane_has(self, folder: Path) -> None:
        assert rlcollect("collect", "CartPole-v1", "--frames", 50, "--num-envs", 1, "--out", "run") == 0
        assert_holds(folder / "run", 50, lanes=1)

    def test_an_environment_of_a_module_here(self, folder: Path) -> None:
        assert rlcollect("collect", "probes:ProbeCounter-v0", "--frames", 12, "--out", "run") == 0
        assert load_dataset("run")["observation"].flatten().tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]

    def test_a_seed_repeats_the_run_with_the_policy_that_it_makes(self) -> None:
        for out, seed in (("a", 5), ("b", 5), ("c", 6)):
            words = ("--frames", 60, "--num-envs", 2, "--policy", "probes:Net", "--seed", seed, "--out", out)
            assert rlcollect("collect", "CartPole-v1", *words) == 0
        a, b, c = (load_dataset(out) for out in "abc")
        assert (a == b).all()
        assert not torch.equal(a["observation"], c["observation"])

    def test_little_is_printed_where_nobody_watches(self, capsys: pytest.CaptureFixture[str]) -> None:
        words = ("--frames", 64, "--frames-per-batch", 2, "--out", "run")
        assert rlcollect("collect", "probes:ProbeCounter-v0", *words) == 0
        told = capsys.readouterr().out
        assert "\x1b" not in told
        assert len(told.splitlines()) < 15

    def test_a_line_now_and_then(self, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("rlcollect.cli.progress.SECONDS_BETWEEN_LINES", 0.0)
        words = ("--frames", 12, "--frames-per-batch", 4, "--out", "run")
        assert rlcollect("collect", "probes:ProbeCounter-v0", *words) == 0
        told = capsys.readouterr().out.splitlines()
        assert re.fullmatch(r"4 of 12 frames, [\d,]+ frames/s, no episode has ended", told[0])
        assert re.fullmatch(r"8 of 12 frames, [\d,]+ frames/s, return 10", told[1])

    @pytest.mark.timeout(60)
    def test_a_bar_in_a_terminal(self, folder: Path) -> None:
        ours, theirs = pty.openpty()
        words = ["collect", "CartPole-v1", "--frames", "3000", "--out", "run"]
        command = [sys.executable, "-c", RUN, *words]
        with subprocess.Popen(command, cwd=folder, stdout=theirs, env={**os.environ, "TERM": "xterm"}) as process:
            os.close(theirs)
            told = b""
            while part := _read(ours):
                told += part
        os.close(ours)
        assert process.returncode == 0
        assert b"\x1b[" in told
        assert b"3,000 of 3,000 frames" in told


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 4096)
    except OSError:  # how Linux says that the other end is closed
        return b""


class TestTheFolder:
    def test_one_that_exists_is_left_alone(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "run").mkdir()
        assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run") == 1
        told = capsys.readouterr()
        assert told.err == "error: 'run' exists. Choose another --out, or replace what stands there by --overwrite\n"
        assert told.out == ""
        assert not [*(folder / "run").iterdir()]

    def test_overwrite_replaces_a_dataset(self, folder: Path) -> None:
        for frames in (40, 20):
            assert rlcollect("collect", "CartPole-v1", "--frames", frames, "--out", "run", "--overwrite") == 0
            assert_holds(folder / "run", frames)

    def test_overwrite_replaces_nothing_else(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (folder / "run").mkdir()
        (folder / "run" / "thesis.tex").touch()
        assert rlcollect("collect", "CartPole-v1", "--frames", 10, "--out", "run", "--overwrite") == 1
        assert "not a dataset" in capsys.readouterr().err
        assert (folder / "run" / "thesis.tex").exists()

    def test_what_fails_before_the_first_frame_replaces_nothing(self, folder: Path) -> None:
        assert rlcollect("collect", "CartPole-v1", "--frames", 40, "--out", "run") == 0
        words = ("--frames", 40, "--out", "run", "--overwrite", "--policy", "probes:half")
        assert rlcollect("collect", "CartPole-v1", *words) == 1
        assert_holds(folder / "run", 40)

    @pytest.mark.timeout(60)
    def test_a_full_disk_ends_it_and_loses_nothing(self, folder: Path) -> None:
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)); "
        words = ("--frames", 100_000, "--num-envs", 2, "--frames-per-batch", 64, "--out", "run")
        process = start("collect", "CartPole-v1", *words, before=limit, cwd=folder)
        out, error = process.communicate()
        assert process.returncode == 1
        frames = load_dataset(folder / "run").numel()
        assert frames == 20_000 // (16 * 64) * 64  # 16 bytes an observation
        assert_holds(folder / "run", frames, lanes=2)
        assert error.startswith("error: cannot write a batch")
        assert f"{frames:,} frames stay" in error
        assert "Traceback" not in error
        assert f"{frames:,}" in out

    @pytest.mark.slow
    @pytest.mark.timeout(60)
    def test_a_disk_that_is_full_before_there_is_a_dataset(self, folder: Path) -> None:
        limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY)); "
        process = start("collect", "CartPole-v1", "--frames", 1000, "--out", "run", before=limit, cwd=folder)
        _, error = process.communicate()
        assert process.returncode == 1
        assert "there is no dataset yet" in error


class TestAnEnvironmentThatRaises:
    def test_keeps_its_traceback_and_is_told_in_one_line(
        self, folder: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        words = ("--frames", 100, "--num-envs", 2, "--frames-per-batch", 10, "--out", "run")
        assert rlcollect("collect", "probes:ProbeBreaks-v0", *words) == 1
        told = capsys.readouterr()
        assert "Traceback" in told.err
        assert "breaker.py" in told.err
        assert re.fullmatch(r"error: worker 0, lane 0, step 16: RuntimeError: .*", told.err.splitlines()[-1])
        assert "30" in told.out
        assert_holds(folder / "run", 30, lanes=2)


@pytest.mark.timeout(60)
class TestCtrlC:
    def test_ends_it_with_what_was_collected(self, folder: Path) -> None:
        words = ("--frames", 100_000_000, "--num-envs", 4, "--frames-per-batch", 400, "--out", "run")
        process = start("collect", "CartPole-v1", *words, cwd=folder)
        _wait_for(folder / "run" / "meta.json", process)
        process.send_signal(signal.SIGINT)
        out, error = process.communicate()
        assert process.returncode == 130
        frames = load_dataset(folder / "run").numel()
        assert frames > 0
        assert_holds(folder / "run", frames, lanes=4)
        assert error == f"interrupted: the dataset holds {frames:,} frames\n"
        assert f"{frames:,}" in out
        assert "load_memmap" in out

    def test_does_not_wait_for_a_batch_that_takes_long(self, folder: Path) -> None:
        words = ("--frames", 100_000, "--frames-per-batch", 100, "--out", "run")
        process = start("collect", "probes:ProbeSlow-v0", *words, cwd=folder)
        _wait_for(folder / "run" / "meta.json", process)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=8)  # the batch would take 10 seconds
        assert process.returncode == 130
        assert error == "interrupted: the dataset holds 100 frames\n"
        assert_holds(folder / "run", 100)


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    while not path.exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
