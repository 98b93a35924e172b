"""Where suites that are written for every kind of collector have their workers: in processes, or on a Ray cluster.

`pytest --ray tests/workers/test_parity.py tests/weights/test_suite.py` runs them on Ray, which takes long: every remote
is a process that imports torch.
"""

from __future__ import annotations

import functools
import os
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
