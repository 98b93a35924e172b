"""Where suites that are written for every kind of collector have their workers: in processes, or on a Ray cluster.

`pytest --ray tests/workers/test_parity.py tests/workers/test_faults.py tests/weights/test_suite.py` runs them on Ray
(`make slow` does). That takes long: every remote is a process that imports torch.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import sys
from collections.abc import Sequence
from typing import Any

from rlcollect import MultiAsyncCollector, MultiSyncCollector, RayCollector

SMALL = {"num_cpus": 0.05}
IS_RAY = False  # set by `conftest` before any test is collected


def start_ray() -> Any:
    """Ray, with room for many small remotes; the session's end shuts it down."""
    import ray

    if not ray.is_initialized():
        os.environ["RAY_AUTH_MODE"] = "disabled"  # no token is left in the home of who runs the tests
        own = {"object_store_memory": 300_000_000, "include_dashboard": False, "log_to_driver": False}
        ray.init(address="local", num_cpus=4, configure_logging=False, **own)
    return ray


def sync_and_async() -> dict[str, Any]:
    """The two kinds of collectors with several workers."""
    if not IS_RAY:
        return {"sync": MultiSyncCollector, "async": MultiAsyncCollector}
    own = {"remote_configs": SMALL}
    return {
        "sync": functools.partial(RayCollector, sync=True, **own),
        "async": functools.partial(RayCollector, sync=False, **own),
    }


def is_on_ray(item: Any) -> bool:
    """Whether a test has its workers on Ray, with `--ray`: as its parameter `kind` tells, or a mark."""
    kind = item.callspec.params.get("kind") if hasattr(item, "callspec") else None
    if kind is None:
        return item.get_closest_marker("on_ray") is not None
    return bool(getattr(kind, "is_on_ray", kind != "single"))


class Named:
    """A kind whose remotes have names, by which tests find them.

    Args:
        sync: which of the two kinds.
    """

    newest = 0

    def __init__(self, *, sync: bool) -> None:
        self.sync = sync
        self.__name__ = "RayCollector"

    def __call__(self, makers: Sequence[Any], *arguments: Any, **options: Any) -> RayCollector:
        Named.newest += 1
        configs = [{**SMALL, "name": name_of(worker)} for worker in range(len(makers))]
        return RayCollector(makers, *arguments, sync=self.sync, remote_configs=configs, **options)


def name_of(worker: int) -> str:
    """The name of a remote of the newest collector."""
    return f"rlcollect-{worker}-{Named.newest}"


def pid_of(worker: int) -> int:
    """The process of a remote of the newest collector, whatever that does."""
    import ray

    pid: int = ray.get(ray.get_actor(name_of(worker)).__ray_call__.remote(lambda _: os.getpid()), timeout=30)
    return pid


def own_name() -> str:
    """Of the process that this is, or the actor."""
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        return str(ray.get_runtime_context().get_actor_name())
    return multiprocessing.current_process().name


def living() -> list[str]:
    """Remotes that have a name."""
    import ray

    return list(ray.util.list_named_actors())
