"""The acceptance check where the store has the programs: it must mean what it means without one."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from toys import Line, Measured, OnDevice, splits

from nitro_cli.programs import ledger as ledger_module
from nitro_cli.programs.ledger import Ledger
from nitro_cli.programs.store import open_store, settings
from nitro_cli.run import acceptance
from nitro_cli.run.acceptance import acceptance_check

pytestmark = pytest.mark.usefixtures("own_store")


class Ragged(OnDevice):
    def build_data(self, dist):
        return splits(val_rows=10)


class Growing(Line):
    def build_data(self, dist):
        return {"train": [{"x": np.ones((4, n, 3), np.float32), "y": np.ones(4, np.float32)} for n in (2, 3)]}

    def forward(self, model, ps, st, *, x):
        return (x @ ps["w"]).mean(1) + ps["b"], st


def test_what_was_compiled_is_loaded_and_the_check_is_met():
    first, second = acceptance_check(Measured()), acceptance_check(Measured())
    assert (first.origins, second.origins) == ({"compiled": 3}, {"loaded": 3})
    assert (second.misses, second.entries_count, second.hits) == (first.misses, first.entries_count, first.hits)
    assert second.verdict == "met: 3 misses == 3 programs (loaded 3), and nothing compiled after the first step"


def test_cold_compiles_all_of_it_anew(monkeypatch):
    acceptance_check(Measured())
    monkeypatch.setattr(settings, "cold", True)
    assert acceptance_check(Measured()).origins == {"compiled": 3}


def test_two_sizes_of_a_metric_are_as_it_should_be_when_they_are_loaded_too():
    acceptance_check(Ragged())
    check = acceptance_check(Ragged())
    assert check.origins == {"loaded": 5}
    assert (check.ok, check.grown) == (True, [])


def test_a_program_that_is_loaded_a_second_time_for_another_shape_is_still_growth():
    first, second = acceptance_check(Growing()), acceptance_check(Growing())
    assert second.origins == {"loaded": 3}
    assert not second.ok
    assert second.grown == first.grown == ["gradient: batch.x: float32[4,2,3] -> float32[4,3,3]"]


def test_where_all_is_loaded_jax_is_heard_all_the_same(monkeypatch):
    acceptance_check(Measured())
    silent = Ledger()
    jax.monitoring.register_event_duration_secs_listener(silent._on_duration)
    monkeypatch.setattr(acceptance, "ledger", silent)
    monkeypatch.setattr(ledger_module, "ledger", silent)
    check = acceptance_check(Measured())
    assert check.verified
    assert check.ok


def test_the_thrown_away_run_is_not_listed():
    acceptance_check(Measured())
    store = open_store()
    assert store is not None
    assert store.runs() == []
