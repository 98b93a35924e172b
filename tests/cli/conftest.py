from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import pytest
import torch

from tests.cli.helpers import write_module


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The current folder, with the module `probes` in it; what a command changes in the process is put back."""
    write_module(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    threads, registry, modules = torch.get_num_threads(), {*gymnasium.registry}, {*sys.modules}
    yield tmp_path
    torch.set_num_threads(threads)
    for name in {*gymnasium.registry} - registry:
        del gymnasium.registry[name]
    for name in {*sys.modules} - modules:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]
