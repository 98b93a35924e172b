"""Ray, started once for all tests of a run; each test uses it, and leaves nothing there."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import pytest

from tests import backend

pytest.importorskip("ray")


@pytest.fixture(scope="session")
def cluster() -> Any:
    """Ray, with room for many small remotes."""
    return backend.start_ray()


@pytest.fixture
def here(cluster: Any) -> Iterator[None]:
    """Ray is there; all that a test has asked of it is given back."""
    yield
    gc.collect()
    assert cluster.is_initialized()
