"""README and docs are true: their examples run, their links lead somewhere."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = [
    pytest.param(code, kind, id=f"{page.name}-{i}")
    for page in PAGES
    for i, (kind, code) in enumerate(re.findall(r"```python( interop| ray)?\n(.*?)```", page.read_text(), re.S))
]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torchrl")
@pytest.mark.parametrize(("code", "kind"), EXAMPLES)
def test_examples_run(code: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind == " interop":
        pytest.importorskip("torchrl", reason="an example with TorchRL, which the extra `interop` installs")
    monkeypatch.chdir(tmp_path)
    with _own_ray(monkeypatch) if kind == " ray" else nullcontext():
        exec(compile(code, "example", "exec"), {"__name__": "__main__"})


@contextmanager
def _own_ray(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That of the tests, if it runs, else one that is gone afterwards; whatever else runs on the machine."""
    ray = pytest.importorskip("ray", reason="an example with Ray, which the extra `ray` installs")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # no token is left in the home of who runs the tests
    if ray.is_initialized():
        yield
        return
    ray.init(address="local", num_cpus=2, object_store_memory=100_000_000, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_pictures_are_of_what_is_delivered() -> None:
    drawing: Any = runpy.run_path(str(ROOT / "scripts" / "draw_trajectories.py"))
    for name, text in drawing["drawn"]().items():
        assert (ROOT / "docs" / "pictures" / name).read_text() == text, (
            "python scripts/draw_trajectories.py docs/pictures"
        )


def test_the_readme_has_an_example_of_ten_lines() -> None:
    lines = [line for line in EXAMPLES[0].values[0].splitlines() if line.strip()]
    assert 5 < len(lines) <= 10


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), target
