"""What the package exports is complete, and importing it brings in nothing it should not."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import rlcollect
from rlcollect import errors


def test_all_names_are_there_and_sorted() -> None:
    assert rlcollect.__all__ == sorted(rlcollect.__all__)
    assert all(hasattr(rlcollect, name) for name in rlcollect.__all__)


def test_every_error_is_exported_and_of_one_tree() -> None:
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if kind.__module__ == errors.__name__:
            assert getattr(rlcollect, name) is kind
            assert issubclass(kind, (rlcollect.RlcollectError, UserWarning))
            assert name in (errors.__doc__ or ""), "the tree in the docstring lacks it"


def test_everything_exported_says_what_it_is() -> None:
    for name in rlcollect.__all__:
        assert inspect.getdoc(getattr(rlcollect, name)), name


@pytest.mark.timeout(60)
def test_importing_it_does_not_import_what_is_not_needed() -> None:
    code = "import sys, rlcollect, rlcollect.testing, rlcollect.export; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.PIPE, text=True)
    imported = {*done.stdout.split()}
    assert "rlcollect.export" in imported
    assert not imported & {"torchrl", "ray", "tyro", "rich", "matplotlib", "minari", "rlcollect.cli"}
