"""Code that computes the names it looks up may mean anything: what speaks against keeping it is told of that code."""

from __future__ import annotations

import importlib

import pytest

from nitro_cli.programs.fingerprint import fingerprint

TABLES = "import time\n\nA = 1.0\n\n\ndef now():\n    return time.time()\n"
OWN = """
import operator
import time

from experiments import tables
from nitro_cli import Experiment

RATE = 2.0
{handle}


def look(name):
    return globals()[name]


class Own(Experiment):
    kind: str = "A"

    def build_data(self, dist):
        return {{"train": [{{"x": time.time()}}]}}

    def build_model(self, rng): ...

    def forward(self, model, ps, st, *, x):
        return x, st

    def loss(self, outputs):
        return {loss}
"""


@pytest.fixture
def refusals(tmp_path, monkeypatch):
    """``refusals(loss)`` of an experiment whose ``build_data`` reads the clock, which no program does."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def call(loss, handle="HANDLE = iter([1])"):
        folder = tmp_path / "experiments"
        folder.mkdir()
        (folder / "tables.py").write_text(TABLES)
        (folder / "own.py").write_text(OWN.format(loss=loss, handle=handle))
        importlib.invalidate_caches()
        own = importlib.import_module("experiments.own").Own
        return list(fingerprint(own(), forward=own.forward, loss=own.loss).refusals)

    return call


@pytest.mark.parametrize(
    "loss",
    [
        "outputs * globals()['RATE']",
        "outputs * look('RATE')",
        "outputs * getattr(tables, self.kind)",
        "outputs * vars(tables)[self.kind]",
        "outputs * tables.__dict__[self.kind]",
        "getattr(outputs, self.kind)()",
        "operator.attrgetter(self.kind)(outputs)",
    ],
)
def test_a_computed_name_is_told_with_the_function_and_the_file(refusals, loss, snapshot):
    found = refusals(loss)
    assert all(line.startswith(("`loss` in own.py:", "`experiments.own.look` in own.py:")) for line in found)
    assert found == snapshot


def test_names_that_are_written_out_blame_nothing_else(refusals):
    assert refusals("outputs * {'A': tables.A}[self.kind]") == []


def test_what_frameworks_put_into_classes_is_not_told(refusals):
    (line,) = refusals("outputs * globals()['RATE']", handle="")
    assert "pydantic" not in line
    assert "anything in experiments.own" in line
