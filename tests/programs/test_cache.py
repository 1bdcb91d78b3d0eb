"""How many programs an experiment has, and what makes another one."""

from __future__ import annotations

import functools
import threading

import jax
import numpy as np
import optax
import pytest
from toys import Compiles, Line, Measured, OnDevice, Watcher, arrays, splits

from nitro_cli import ArrayLoader, GraphConst, cache_reset, cache_stats
from nitro_cli.errors import ExperimentError
from nitro_cli.programs.cache import cache_entries
from nitro_cli.programs.ledger import ledger


class Plain(Measured):
    """With a GraphConst that nothing reads, and one that decides shapes."""

    unread: GraphConst[int] = 0
    width: GraphConst[int] = 3

    def build_data(self, dist):
        x = np.ones((8, self.width), np.float32)
        loader = ArrayLoader(x=x, y=x[:, 0], batch_size=self.batch)
        return {"train": loader, "val": loader}

    def build_model(self, rng):
        return None, {"b": np.float32(0), "w": np.zeros(self.width, np.float32)}, {}


@pytest.fixture
def trained(handle):
    """The cache holds the three programs of a trained ``Measured``."""
    handle(Measured()).train()


def test_two_programs_train_and_every_later_call_is_a_hit(handle, empty_cache):
    handle(Line(max_epochs=2), data={"train": splits()["train"]}).train()
    assert [entry.program for entry in cache_entries()] == ["gradient", "update"]
    assert cache_stats() == (14, 2, 2)


def test_validation_adds_one_program_which_evaluate_and_predict_share(handle, empty_cache):
    n = handle(Measured(max_epochs=2))
    n.train()
    n.validate()
    n.evaluate("test")
    n.predict(arrays(4))
    n.predict({"x": arrays(3)["x"]})
    list(n.predict(n.splits["val"]))
    assert [entry.program for entry in cache_entries()] == ["gradient", "update", "evaluation"]
    assert cache_stats()[1:] == (3, 3)


def test_a_metric_on_the_device_is_a_program_and_a_remainder_is_another(handle, empty_cache):
    handle(OnDevice(max_epochs=2), data=splits()).train()
    assert cache_stats()[1:] == (4, 4)
    with Compiles() as ragged:
        handle(OnDevice(max_epochs=2), data=splits(val_rows=10)).train()
    assert ragged.programs == ["metrics"]
    assert ragged.why == {"metrics": "rows: 4 -> 2"}


def test_the_four_hooks_alone_measure_the_loss_in_a_program(handle, empty_cache):
    n = handle(Line(max_epochs=2), data=splits(val_rows=8))
    n.train()
    assert sorted(entry.program for entry in cache_entries()) == ["evaluation", "gradient", "loss", "update"]
    assert list(n.validate()) == ["val_loss"]
    with Compiles() as ragged:
        handle(Line(), data=splits(val_rows=6)).train()
    assert ragged.programs == ["loss"]


def test_a_handle_that_is_built_compiles_and_prints_nothing(handle, empty_cache, capfd):
    before = ledger.mark()
    watcher = Watcher()
    handle(Measured(), observer=watcher)
    assert cache_stats() == (0, 0, 0)
    assert ledger.since(before) == []
    assert watcher.events == []
    assert capfd.readouterr() == ("", "")


def test_a_second_handle_on_an_equal_experiment_compiles_nothing(handle, trained):
    with Compiles() as again:
        handle(Measured()).train()
    assert again.misses == 0


@pytest.mark.parametrize(
    "changed",
    [
        {"note": "another"},
        {"scale": 3.0},
        {"seed": 7},
        {"learning_rate": 0.5},
        {"max_epochs": 2},
        {"check_divergence": False},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_the_driver_reads_and_what_is_traced_as_an_input_compiles_nothing(handle, trained, changed):
    with Compiles() as again:
        handle(Measured().replace(**changed)).train()
    assert again.misses == 0


def test_a_hyperparameter_of_the_optimizer_compiles_nothing(handle):
    def adam(b1):
        class Adam(Measured):
            def optimizer(self):
                return functools.partial(optax.adam, b1=b1)

        return Adam()

    first = handle(adam(0.9))
    first.train()
    with Compiles() as again:
        other = handle(adam(0.1))
        other.train()
    assert again.misses == 0
    assert not np.array_equal(first.snapshot()["opt_state"], other.snapshot()["opt_state"])


@pytest.mark.parametrize(
    ("changed", "programs"),
    [
        ({"power": 3}, ["gradient"]),
        ({"shift": 0.5}, ["evaluation", "gradient"]),
        ({"unread": 1}, []),
        ({"width": 2}, ["evaluation", "gradient", "update"]),
    ],
    ids=["read by loss", "read by forward", "read by nothing", "structural"],
)
def test_a_changed_graphconst_compiles_the_programs_that_read_it(handle, empty_cache, changed, programs):
    handle(Plain()).train()
    with Compiles() as again:
        handle(Plain(**changed)).train()
    assert again.programs == programs
    with Compiles() as back:
        handle(Plain()).train()
    assert back.misses == 0


def test_a_graphconst_read_by_the_loss_counts_for_the_metric_that_the_loss_stands_in_for(handle, empty_cache):
    handle(Line()).train()
    with Compiles() as again:
        handle(Line(power=4)).train()
    assert again.programs == ["gradient", "loss"]
    assert set(again.why.values()) == {"`power` 2 -> 4"}


def test_accumulation_is_another_gradient_program_once_and_its_number_is_an_input(handle, empty_cache, trained):
    with Compiles() as four:
        handle(Measured(accum=4)).train()
    assert four.why == {"gradient": "accum: 1 -> more than 1"}
    with Compiles() as others:
        handle(Measured(accum=2)).train()
        handle(Measured(accum=1)).train()
    assert others.misses == 0


def test_another_batch_width_leaves_the_update_alone(handle, empty_cache, trained):
    with Compiles() as again:
        handle(Measured(batch=2)).train()
    assert again.programs == ["evaluation", "gradient"]
    assert again.why["evaluation"] == "batch.x: float32[4,3] -> float32[2,3]"


def test_jax_itself_compiles_nothing_after_the_first_step_and_validation(handle, empty_cache):
    marks: dict[str, int] = {}
    actions = {name: lambda facts, name=name: marks.setdefault(name, ledger.mark()) for name in ("first_step", "epoch")}
    validating = lambda facts: marks.setdefault("validate", ledger.mark())  # noqa: E731
    n = handle(Measured(max_epochs=3), observer=Watcher(phase=validating, **actions))
    n.train()
    n.validate()
    assert ledger.verified
    assert ledger.since(0)
    assert ledger.rows[marks["first_step"] : marks["validate"]] == []
    assert ledger.rows[marks["epoch"] :] == []


def test_the_ledger_sees_an_eager_operation_that_nitro_does_not_know_of(handle):
    mark = ledger.mark()
    jax.jit(lambda x: x * 3.25)(np.float32(1))
    assert len(ledger.since(mark)) == 1


def test_after_a_reset_a_handle_keeps_its_programs_and_a_new_one_compiles(handle, empty_cache):
    n = handle(Measured(max_epochs=2))
    n.validate()
    cache_reset()
    assert cache_stats() == (0, 0, 0)
    n.validate()
    assert cache_stats().misses == 0
    with Compiles() as again:
        handle(Measured()).validate()
    assert again.programs == ["evaluation"]


def test_two_threads_that_want_the_same_program_compile_it_once(handle, empty_cache):
    handles = [handle(Measured()), handle(Measured())]
    together, results, errors = threading.Barrier(2), [], []

    def predict(n):
        together.wait()
        try:
            results.append(n.predict(arrays(4)))
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=predict, args=(n,)) for n in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert cache_stats()[1:] == (1, 1)
    np.testing.assert_array_equal(*results)


def test_a_compile_that_fails_leaves_nothing_behind_and_can_be_tried_again(handle, empty_cache, monkeypatch):
    n = handle(Measured())
    good = Measured.loss
    monkeypatch.setattr(Measured, "loss", lambda self, outputs, *, y: outputs)
    bad = handle(Measured())
    with pytest.raises(ExperimentError, match="must return one scalar"):
        bad.train()
    assert cache_stats()[1:] == (0, 0)
    monkeypatch.setattr(Measured, "loss", good)
    n.train()
    assert cache_stats()[1:] == (3, 3)


def test_batches_whose_other_axes_vary_are_programs_that_are_counted_and_explained(handle, empty_cache):
    class Sequences(Line):
        def forward(self, model, ps, st, *, x):
            return x.mean((1, 2)) * ps["b"], st

    def batch(length):
        return {"x": np.ones((4, length, 3), np.float32), "y": np.ones(4, np.float32)}

    watcher = Watcher()
    n = handle(Sequences(max_epochs=2), data={"train": [batch(5), batch(6), batch(5)]}, observer=watcher)
    n.train()
    assert watcher.compiled == ["gradient", "update", "gradient"]
    assert watcher.of("compile")[-1]["why"] == "batch.x: float32[4,5,3] -> float32[4,6,3]"
    assert cache_stats()[1:] == (3, 3)
    assert n.state.step == 6


def test_entries_say_what_they_are_and_how_long_they_took(handle, empty_cache):
    handle(Measured(max_epochs=2)).train()
    entries = {entry.program: entry for entry in cache_entries()}
    assert {name: entry.hits for name, entry in entries.items()} == {"gradient": 7, "update": 7, "evaluation": 3}
    assert all(entry.why == "first use" for entry in entries.values())
    assert all(min(e.trace_seconds, e.lower_seconds, e.compile_seconds) > 0 for e in entries.values())


def test_a_split_that_is_longer_costs_no_program(handle, trained):
    with Compiles() as again:
        loader = ArrayLoader(arrays(32), batch_size=4, shuffle=True)
        handle(Measured(), data={**splits(), "train": loader}).train()
    assert again.misses == 0
