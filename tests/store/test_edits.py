"""What an edit must compile anew, and what it must not: nitro's own experiment form, in a fresh process per edit.

Each case runs with verification on: every program that is loaded is traced as well, and must be the same.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import edits
import pytest
from forks import copied


@pytest.fixture(scope="module")
def filled(forks, tmp_path_factory):
    """``filled(case)``: the store that the run before the edit has left behind."""
    stores: dict[str, Path] = {}

    def fill(case: edits.Case) -> Path:
        key = f"{case.experiment} {sorted(case.first.items())}"
        if key not in stores:
            folder = tmp_path_factory.mktemp("first")
            copied(folder)
            forks.run(**job(case, folder, fields=dict(case.first)))
            stores[key] = folder / "store"
        return stores[key]

    return fill


def job(case: edits.Case, folder: Path, **facts: Any) -> dict[str, Any]:
    (folder / "runs").mkdir(exist_ok=True)
    places = {"project": folder / "project", "store": folder / "store", "runs": folder / "runs"}
    return {"experiment": case.experiment} | places | facts


def second(case: edits.Case, folder: Path) -> dict[str, Any]:
    """The job of the run after the edit."""
    fields = {**case.first, **case.fields}
    around = {"environment": dict(case.environment), "before": case.before, "after": case.after}
    return job(case, folder, fields=fields, preset=case.preset, verify=True, **around)


def edited(case: edits.Case, folder: Path) -> None:
    copied(folder)
    for name, before, after in case.edits:
        file = folder / "project" / name
        text = file.read_text()
        assert text.count(before) == 1, f"{before!r} occurs {text.count(before)} times in {name}"
        file.write_text(text.replace(before, after))


EVERY = int(os.environ.get("EDIT_CASES_EVERY", "1"))  # a sample, where time is short


@pytest.mark.parametrize("case", edits.CASES[::EVERY], ids=lambda case: case.name)
def test_an_edit_compiles_what_it_changes(case, forks, filled, tmp_path):
    shutil.copytree(filled(case), tmp_path / "store")
    edited(case, tmp_path)
    programs = {p["program"]: p for p in forks.run(**second(case, tmp_path))["programs"]}
    loaded = {name for name, program in programs.items() if program["origin"] == "loaded"}
    misses = set(case.misses.split()) | set(case.refused.split())
    assert not loaded & misses
    assert programs.keys() - loaded - misses - set(case.may.split()) == set(), [p["why"] for p in programs.values()]
    if case.refused:
        again = {p["program"]: p for p in forks.run(**second(case, tmp_path))["programs"]}
        for name in case.refused.split():
            assert again[name]["origin"] != "loaded"
            assert again[name]["kept_out"]
