"""How processes are started: by each method, without running the program's main module again."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from rlcollect.errors import OptionError
from rlcollect.processes.launch import default_method, launch
from tests.processes import helpers

METHODS = multiprocessing.get_all_start_methods()
QUICK = [method for method in METHODS if method != "spawn"]
ROOT = Path(__file__).parents[2]


def launched(method, *arguments, name="some-name"):
    """What a new process says of itself."""
    here, there = multiprocessing.Pipe(duplex=True)
    with here, there:
        process = launch(method, helpers.report, there, arguments, name=name)
        there.close()
        assert here.poll(60), "it never spoke"
        told = here.recv()
    process.join(30)
    assert process.exitcode == 0
    told["process"] = process
    return told


class TestMethods:
    def test_the_default_is_one_of_them(self):
        assert default_method() in METHODS
        if "forkserver" in METHODS:
            assert default_method() == "forkserver"

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("method", [*QUICK, pytest.param("spawn", marks=pytest.mark.slow)])
    def test_each(self, method):
        told = launched(method, 1, "two", name="some-name")
        assert told["given"] == [1, "two"]
        assert told["name"] == told["process"].name == "some-name"
        assert told["pid"] == told["process"].pid != os.getpid()
        assert told["process"].daemon

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("method", QUICK)
    def test_ctrl_c_is_not_seen_from_the_first_moment(self, method):
        assert launched(method)["blocked"] or method == "forkserver"  # whose server does not hear it either

    @pytest.mark.timeout(60)
    @pytest.mark.skipif("forkserver" not in METHODS, reason="no such method here")
    def test_a_server_has_imported_what_takes_long(self):
        assert launched("forkserver")["modules"] == ["torch", "tensordict", "gymnasium"]

    @pytest.mark.parametrize("method", ["thread", "", None])
    def test_one_that_is_not_known(self, method):
        with pytest.raises(OptionError, match=r"start_method must be one of .*'spawn'") as raised:
            launch(method, helpers.report, None, (), name="some-name")
        assert all(repr(known) in str(raised.value) for known in METHODS)
        assert repr(method) in str(raised.value)

    @pytest.mark.timeout(60)
    def test_the_programs_own_method_is_left_alone(self):
        before = multiprocessing.get_start_method(allow_none=True)
        launched("forkserver" if "forkserver" in METHODS else "spawn")
        assert multiprocessing.get_start_method(allow_none=True) == before


class TestEnvironmentVariables:
    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("method", QUICK)
    def test_are_those_of_the_moment(self, method, monkeypatch):
        """A server that was started before has older ones."""
        monkeypatch.setenv("RLCOLLECT_TEST_OLD", "1")
        assert launched(method)["environ"]["RLCOLLECT_TEST_OLD"] == "1"
        monkeypatch.setenv("RLCOLLECT_TEST_NEW", "2")
        monkeypatch.delenv("RLCOLLECT_TEST_OLD")
        environ = launched(method)["environ"]
        assert environ["RLCOLLECT_TEST_NEW"] == "2"
        assert "RLCOLLECT_TEST_OLD" not in environ


SCRIPT = """
print("the main module runs", flush=True)

import multiprocessing

from rlcollect.processes.pool import ProcessPool
from tests.processes.helpers import STAGES, make

ONLY_IN_THE_PROGRAM = 1


class Own:
    def __init__(self, value):
        self.value = value


def double(own):
    import sys

    mains = [sys.modules[name] for name in ("__main__", "__mp_main__")]
    assert METHOD == "fork" or not any(hasattr(main, "ONLY_IN_THE_PROGRAM") for main in mains)
    return Own(own.value * 2)


for METHOD in multiprocessing.get_all_start_methods():
    pool = ProcessPool(1, make, method=METHOD, stages=STAGES)
    pool.submit(0, ("call", double, Own(3)))
    (reply,) = pool.ready(60)
    print(METHOD, reply.failure.told if reply.failure else reply.value.value, isinstance(reply.value, Own), flush=True)
    pool.shutdown()
"""


class TestTheMainModule:
    @pytest.mark.timeout(120)
    def test_is_not_run_again(self, tmp_path):
        """No guard, by no method; what it defines goes to workers and comes back as the same."""
        script = tmp_path / "program.py"
        script.write_text(textwrap.dedent(SCRIPT))
        done = subprocess.run(
            [sys.executable, str(script)],
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"},
        )
        assert done.stdout.splitlines() == ["the main module runs", *(f"{method} 6 True" for method in METHODS)], done
        assert done.stderr == ""
