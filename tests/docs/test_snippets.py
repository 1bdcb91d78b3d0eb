"""Every fenced block of the README and of the docs is run, and what the pages show is what comes out."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .snippets import ROOT, Page, blocks_of, loosened, same_output

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), ROOT / "benchmarks" / "README.md"]
FOLDERS = ("experiments", "presets")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_store: Path) -> Iterator[Path]:
    """A project folder with the examples, to stand in, and an empty store of programs; modules loaded from it are
    forgotten afterwards."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("CI", "COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.chdir(tmp_path)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in FOLDERS}
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in list(sys.modules):
        if name.split(".")[0] in FOLDERS:
            del sys.modules[name]
    sys.modules.update(before)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_block_of_a_page_runs(path: Path, project: Path) -> None:
    page = Page(path, project)
    for block in blocks_of(path):
        page.run(block)


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.relative_to(ROOT)} links to {target}"


def test_outputs_are_compared_by_what_does_not_change() -> None:
    assert same_output(["loss 0.25  (n=3)", "...", "done"], ["loss 0.31 (n=3)", "a", "b", "done"])
    assert same_output(["...", "met"], ["met"])
    assert not same_output(["loss 0.25  (n=3)"], ["loss 0.25  (n=4)"])
    assert not same_output(["done"], ["done", "more"])
    assert loosened("runs/myexp/20250101-120000-current-0a1b") == "runs/myexp/RUN-current"
