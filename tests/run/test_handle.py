"""The handle as a fixed point: what is public on it, what stays, and what the caller keeps."""

from __future__ import annotations

import gc
import threading
import weakref

import jax
import numpy as np
import pytest
from toys import Line, Measured, Watcher, arrays, assert_same, everything, parameters, splits

from nitro_cli import CheckpointPolicy, Nitro
from nitro_cli.errors import ProtectError, UsageError


def test_validate_evaluate_and_predict_work_on_a_handle_that_never_trained(handle, tmp_path):
    n = handle(Measured())
    assert list(n.validate()) == ["val_error"]
    assert list(n.evaluate()) == ["test_error"]
    assert n.predict(arrays(2)).shape == (2,)
    assert n.run is None
    assert list(tmp_path.iterdir()) == []


def test_events_of_a_run_come_in_their_order(handle, empty_cache):
    watcher = Watcher()
    handle(Measured(max_epochs=2), observer=watcher).train()
    names = [name for name, _ in watcher.events if name not in ("progress", "warning", "phase")]
    assert names == [
        *("run", "compile", "compile", "first_step", "compile", "checkpoint", "epoch"),
        *("checkpoint", "epoch", "done"),
    ]
    done = watcher.of("done")[0]
    assert (done["status"], done["steps"], done["epochs"]) == ("finished", 8, 2)


def test_epoch_events_hold_the_metrics_that_the_log_and_the_history_hold(handle):
    watcher = Watcher()
    n = handle(Measured(max_epochs=2), observer=watcher)
    n.train()
    told = [facts["metrics"] for facts in watcher.of("epoch")]
    kept = [{k: v for k, v in row.items() if k not in ("epoch", "step")} for row in n.history]
    assert told == kept


def test_what_the_policy_hook_gave_is_the_callers(handle):
    policy = CheckpointPolicy(metric="val_error")

    class Owned(Measured):
        def checkpointer(self):
            return policy

    n = handle(Owned(max_epochs=2))
    n.train()
    assert n.setup.policy == policy == CheckpointPolicy(metric="val_error")


def test_two_handles_on_one_experiment_share_nothing_but_programs(handle):
    e = Measured(max_epochs=2)
    one, other = handle(e), handle(e)
    before = everything_of(other)
    one.train()
    assert_same(everything_of(other), before)
    other.train()
    assert_same(everything(one), everything(other))


def everything_of(n):
    n.optimizer_layout()
    return everything(n)


def test_two_handles_train_in_two_threads_as_they_would_alone(handle):
    alone = handle(Measured(max_epochs=5))
    alone.train()
    handles = [handle(Measured(max_epochs=5)) for _ in range(2)]
    errors = []

    def train(n):
        try:
            n.train()
        except Exception as error:  # shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=train, args=(n,)) for n in handles]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    for n in handles:
        assert_same(everything(n), everything(alone))


def test_training_leaves_no_thread_behind(handle):
    before = set(threading.enumerate())
    n = handle(Measured(max_epochs=2))
    n.train()
    list(n.predict(n.splits["val"]))
    assert set(threading.enumerate()) <= before


def test_a_handle_that_is_dropped_is_freed(handle):
    n = handle(Measured())
    n.train()
    gone = weakref.ref(n)
    del n
    gc.collect()
    assert gone() is None


def test_a_handle_on_another_seed_starts_from_its_own_parameters(handle):
    class Random(Measured):
        def build_model(self, rng):
            return None, {"b": np.float32(0), "w": jax.random.normal(rng, (3,))}, {}

    one, same, other = (handle(Random(seed=s)).parameters["w"] for s in (1, 1, 2))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)


def test_parameters_are_the_tree_that_build_model_gave(handle):
    n = handle(Measured())
    tree = n.parameters
    assert sorted(tree) == ["b", "w"]
    n.train()
    np.testing.assert_array_equal(n.parameters["w"], parameters(n)["w"])
    assert not np.array_equal(tree["w"], n.parameters["w"])


def test_a_run_folder_with_something_in_it_is_never_written_into(handle, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(ProtectError):
        Nitro(Measured(), run_dir=folder).train()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]
    with pytest.raises(ProtectError):
        Nitro(Measured(), run_dir=folder, force=True).train()
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


def test_progress_is_told_now_and_then_with_where_the_run_is(handle):
    watcher = Watcher()
    handle(Measured(max_epochs=3), observer=watcher).train()
    told = watcher.of("progress")
    assert told
    assert all(facts["total_steps"] == 12 and facts["steps_in_epoch"] == 4 for facts in told)


def test_observers_may_ask_the_handle_for_more(handle):
    seen = []
    n = handle(Line(max_epochs=2))
    n.observer = Watcher(epoch=lambda facts: seen.append(n.evaluate("test")))
    n.train()
    assert [sorted(row) for row in seen] == [["test_loss"], ["test_loss"]]
    assert seen[-1] == n.evaluate("test")


def test_from_preset_refuses_data_of_another_instance():
    with pytest.raises(UsageError, match="builds its own data"):
        Nitro.from_preset(Measured, "current", data=splits())
