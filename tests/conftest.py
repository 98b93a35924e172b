"""What every test finds: processes that start as they do where nobody has imported TorchRL."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def forked(request: pytest.FixtureRequest) -> Iterator[None]:
    """TorchRL changes the start method for all of the program, to one that takes seconds a process."""
    if "torchrl" in request.module.__name__ or "fork" not in multiprocessing.get_all_start_methods():
        yield
        return
    before = multiprocessing.get_start_method(allow_none=True)
    multiprocessing.set_start_method("fork", force=True)
    yield
    multiprocessing.set_start_method(before, force=True)
