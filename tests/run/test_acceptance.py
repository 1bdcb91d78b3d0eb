"""The acceptance check: met by a sound experiment, and not by one that compiles on."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest
from toys import FEATURES, Line, Measured, OnDevice, Watcher, splits

from nitro_cli.errors import DivergenceError
from nitro_cli.run.acceptance import acceptance_check


def programs(check):
    return [entry.program for entry in check.entries]


def test_three_programs_no_growth_and_nothing_foreign_after_the_first_step():
    check = acceptance_check(Measured(max_epochs=50))
    assert check.ok
    assert check.verified
    assert (check.misses, check.entries_count) == (3, 3)
    assert programs(check) == ["gradient", "update", "evaluation"]
    assert (check.grown, check.late_foreign) == ([], [])
    assert check.verdict == "met: 3 misses == 3 programs, and nothing compiled after the first step"


def test_a_device_metric_with_a_remainder_has_two_programs_and_is_met():
    class Ragged(OnDevice):
        def build_data(self, dist):
            return splits(val_rows=10)

    check = acceptance_check(Ragged())
    assert check.ok
    assert check.misses == 5
    assert programs(check).count("metrics") == 2


def test_the_four_hooks_alone_are_met():
    check = acceptance_check(Line())
    assert check.ok
    assert sorted(programs(check)) == ["evaluation", "gradient", "loss", "update"]


def test_without_a_validation_split_two_programs_are_met():
    class TrainOnly(Measured):
        def build_data(self, dist):
            return {"train": splits()["train"]}

    check = acceptance_check(TrainOnly())
    assert check.ok
    assert check.misses == 2


def test_a_key_that_moves_each_step_is_not_met_and_says_what_moved():
    class Growing(Line):
        def build_data(self, dist):
            return {"train": [{"x": np.ones((4, n, 3), np.float32), "y": np.ones(4, np.float32)} for n in (2, 3, 4, 5)]}

        def forward(self, model, ps, st, *, x):
            return (x @ ps["w"]).mean(1) + ps["b"], st

    check = acceptance_check(Growing())
    assert not check.ok
    assert check.verdict == "not met: 3 compiled after the first step"
    assert len(check.grown) == 3
    assert check.grown[0] == "gradient: batch.x: float32[4,2,3] -> float32[4,3,3]"


def test_an_eager_operation_in_a_hook_that_compiles_late_is_not_met_and_is_named():
    class Eager(Measured):
        def metrics(self, outputs, *, y):
            Eager.calls = getattr(Eager, "calls", 0) + 1
            if Eager.calls == 4:  # in the second validation

                def late_operation(x):
                    return x * 1.0625

                jax.jit(late_operation)(outputs)
            return {"error": (abs(outputs - y).sum(), len(y))}

    check = acceptance_check(Eager())
    assert not check.ok
    assert check.late_foreign == [("jit(late_operation)", 1)]
    assert "jit(late_operation) x 1" in check.verdict
    assert check.misses == check.entries_count == 3


def test_the_observer_is_told_and_the_run_is_gone_afterwards():
    watcher = Watcher()
    acceptance_check(Measured(), observer=watcher)
    (run,) = watcher.of("run")
    assert watcher.compiled == ["gradient", "update", "evaluation"]
    assert not Path(run["run_dir"]).exists()


def test_an_experiment_that_diverges_says_so_instead():
    class Diverging(Measured):
        def loss(self, outputs, *, y):
            return (outputs - y).mean() / 0.0

    with pytest.raises(DivergenceError):
        acceptance_check(Diverging())


def test_counters_do_not_leak_from_one_check_into_the_next():
    first, second = acceptance_check(Measured()), acceptance_check(Measured())
    assert (first.hits, first.misses) == (second.hits, second.misses)


def test_calls_are_counted_by_the_program_that_took_them():
    class Lengths(Line):
        def build_data(self, dist):
            rows = [np.ones((4, FEATURES + i), np.float32) for i in (0, 0, 1, 0)]
            return {"train": [{"x": x, "y": np.ones(4, np.float32)} for x in rows]}

        def forward(self, model, ps, st, *, x):
            return x.mean(1) * ps["w"].sum() + ps["b"], st

    done = acceptance_check(Lengths())
    assert not done.ok
    assert [(entry.program, entry.hits) for entry in done.entries] == [("gradient", 2), ("update", 3), ("gradient", 0)]
