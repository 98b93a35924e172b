"""What every test finds: processes that start as they do where nobody has imported TorchRL."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Iterator

import pytest
import torch

from tests import backend


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ray", action="store_true", help="workers of the suites for every kind are on a Ray cluster")


def pytest_configure(config: pytest.Config) -> None:
    backend.IS_RAY = config.getoption("--ray")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--ray` there are only tests whose workers are there."""
    if backend.IS_RAY:
        others = [item for item in items if not backend.is_on_ray(item)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(scope="session", autouse=True)
def on_ray() -> Iterator[None]:
    """Ray, where workers are to be there; it is gone at the end, whoever started it."""
    if backend.IS_RAY:
        backend.start_ray()
    yield
    if "ray" in sys.modules:
        sys.modules["ray"].shutdown()


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


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Several test runners share the cores: torch's threads would wait for each other at every call."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def imports_are_no_garbage() -> None:
    """What has been imported by now stays: no collection of garbage looks through all of it again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_word_of_tensordicts() -> Iterator[None]:
    """Some of what tensordict does with lazy stacks leaves "None" there, at which its import in a process fails."""
    yield
    if os.environ.get("LAZY_LEGACY_OP") == "None":
        del os.environ["LAZY_LEGACY_OP"]
