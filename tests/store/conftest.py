"""Projects, stores, and processes that are forked for the price of a few tenths of a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from forks import Forks, copied


@pytest.fixture(scope="session")
def forks():
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def process(forks, tmp_path) -> Callable[..., dict[str, Any]]:
    """``process(experiment, **job)`` trains an experiment of ``small.py`` in a process of its own, on the store of the
    test. ``process.store`` is where that lies."""
    (tmp_path / "runs").mkdir()
    places = {"project": copied(tmp_path), "store": tmp_path / "store", "runs": tmp_path / "runs"}

    def run(experiment: str = "Line", **job: Any) -> dict[str, Any]:
        return forks.run(**places | {"module": "experiments.small", "experiment": experiment} | job)

    run.store = tmp_path / "store"
    return run
