"""How a program gets to a cluster, and what is said where it cannot."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from contextlib import nullcontext

import pytest
import ray

from rlcollect import OptionError
from rlcollect.cluster.connection import check_demand

pytestmark = pytest.mark.timeout(120)


def ran(code: str) -> str:
    """What a program of its own wrote."""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_without_ray_the_class_says_how_to_install_it():
    code = """
        import sys
        sys.modules["ray"] = None
        from rlcollect import RayCollector, RayReplayBuffer
        for make in (lambda: RayCollector("CartPole-v1", frames_per_batch=4), lambda: RayReplayBuffer(10)):
            try:
                make()
            except ImportError as error:
                print(error)
    """
    assert ran(code).count("pip install 'rlcollect[ray]'") == 2


def test_an_address_where_nobody_is_is_refused_at_once():
    code = """
        from rlcollect import OptionError, RayCollector
        for address in ("127.0.0.1:9", "ray://127.0.0.1:9"):
            try:
                RayCollector("CartPole-v1", frames_per_batch=4, ray_init_config={"address": address})
            except OptionError as error:
                print(error)
    """
    told = ran(code)
    assert "There is no Ray cluster at address='127.0.0.1:9'" in told
    assert "is one of a Ray client" in told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ([{"num_cpus": 2}] * 2, None),
        ([{"num_cpus": 2}] * 3, "3 remotes ask for 2 CPU each, and the 2 nodes of the cluster have room for 2 of them"),
        ([{"num_cpus": 1}] * 6, None),
        ([{"num_cpus": 0.1}] * 60, None),
        ([{"num_cpus": 0.1, "num_gpus": 0.5}] * 2, None),
        ([{"num_cpus": 2, "num_gpus": 0.5}] * 2, "ask for 2 CPU and 0.5 GPU each, .* room for 1 of them"),
        ([{"num_cpus": 3.5}], "A remote asks for 3.5 CPU, and no node of the cluster has more than 3"),
        ([{"resources": {"special": 1}}], "1 special, and no node of the cluster has more than 0"),
        ([{"num_cpus": 1}] * 5 + [{"num_cpus": 2}], "6 remotes ask for 7 CPU in all, and the cluster has 6"),
        ([{"num_cpus": 0}] * 100, None),
    ],
)
def test_what_remotes_ask_for_is_held_against_each_node(monkeypatch, asked, told):
    """Two nodes of 3 CPUs, one of which has a GPU."""
    nodes = [{"CPU": 3.0}, {"CPU": 3.0, "GPU": 1.0}]
    gone = {"Alive": False, "Resources": {"CPU": 100.0}}
    monkeypatch.setattr(ray, "nodes", lambda: [*[{"Alive": True, "Resources": node} for node in nodes], gone])
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"CPU": 6.0, "GPU": 1.0})
    with nullcontext() if told is None else pytest.raises(OptionError, match=told):
        check_demand(asked)


@pytest.mark.cluster
def test_who_starts_ray_shuts_it_down_when_nobody_uses_it():
    code = """
        import os
        os.environ["RAY_AUTH_MODE"] = "disabled"
        import ray
        from rlcollect import RayCollector
        own = {"frames_per_batch": 4, "remote_configs": {"num_cpus": 0.1}}
        first = RayCollector("CartPole-v1", ray_init_config={"num_cpus": 2, "address": "local"}, **own)
        second = RayCollector("CartPole-v1", **own)
        first.next()
        first.shutdown()
        assert ray.is_initialized()
        second.next()
        second.shutdown()
        second.shutdown()
        assert not ray.is_initialized()
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
        third = RayCollector("CartPole-v1", **own)
        third.shutdown()
        assert ray.is_initialized(), "it was there before"
        fourth = RayCollector("CartPole-v1", **own)
        fourth.shutdown(timeout=1.0, shutdown_ray=True)
        assert not ray.is_initialized()
    """
    ran(code)


@pytest.mark.cluster
def test_a_process_that_was_forked_ends_nothing():
    code = """
        import os
        os.environ["RAY_AUTH_MODE"] = "disabled"
        import ray
        from rlcollect import RayCollector, RayReplayBuffer
        ours = {"address": "local", "num_cpus": 2, "include_dashboard": False}
        own = {"frames_per_batch": 4, "remote_configs": {"num_cpus": 0.1}, "ray_init_config": ours}
        with RayCollector("CartPole-v1", **own) as collector, RayReplayBuffer(10) as buffer:
            if not (child := os.fork()):
                buffer.close()
                collector.shutdown()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            collector.next()
            assert len(buffer) == 0
        assert not ray.is_initialized()
    """
    ran(code)


@pytest.mark.cluster
def test_threads_that_come_together_share_one():
    code = """
        import os
        os.environ["RAY_AUTH_MODE"] = "disabled"
        from concurrent.futures import ThreadPoolExecutor
        import ray
        from rlcollect import RayReplayBuffer
        ours = {"address": "local", "num_cpus": 2, "include_dashboard": False}
        with ThreadPoolExecutor(2) as threads:
            buffers = list(threads.map(lambda size: RayReplayBuffer(size, ray_init_config=ours), (10, 20)))
            assert [len(buffer) for buffer in buffers] == [0, 0]
            list(threads.map(RayReplayBuffer.close, buffers))
        assert not ray.is_initialized()
    """
    ran(code)
