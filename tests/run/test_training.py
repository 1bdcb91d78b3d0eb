"""A run from its first step to its last record."""

from __future__ import annotations

import dataclasses
import json
import math
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import (
    FEATURES,
    Line,
    Measured,
    Stopping,
    Watcher,
    arrays,
    assert_same,
    differs,
    everything,
    log_of,
    parameters,
    splits,
)

from nitro_cli import ArrayLoader, CheckpointPolicy, Nitro
from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.presets import load_run_config
from nitro_cli.programs.ledger import ledger


def test_four_hooks_train_validate_and_checkpoint_with_nothing_else_passed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    n = Nitro(Line())
    outcome = n.train()
    assert (outcome.status, outcome.exit_code, outcome.epochs, outcome.steps) == ("finished", 0, 1, 4)
    assert sorted(n.history[0]) == ["epoch", "step", "train_loss", "val_loss"]
    assert outcome.best == outcome.latest
    assert outcome.latest["step"] == 4
    assert (tmp_path / "runs" / "Line" / "latest").resolve() == outcome.run.path
    assert sorted(p.name for p in outcome.run.path.iterdir()) == [
        "checkpoints",
        "config.toml",
        "metrics.jsonl",
        "run.json",
    ]
    records = log_of(outcome.run.path)
    assert records[-1]["type"] == "finish"
    assert records[-1]["status"] == "finished"


def test_training_makes_the_loss_small(handle):
    n = handle(Measured(max_epochs=30))
    n.train()
    assert n.history[0]["val_error"] > 0.5
    assert n.validate()["val_error"] < 0.2
    np.testing.assert_allclose(parameters(n)["w"], [1.0, -2.0, 0.5], atol=0.2)


@pytest.mark.parametrize("accum", [1, 2, 4])
def test_every_step_has_its_row_with_its_step_epoch_and_loss(handle, accum):
    """Compared with the same steps by hand: loss before each update, averaged over the micro-batches."""
    n = handle(Measured(max_epochs=2, accum=accum))
    outcome = n.train()
    rows = log_of(outcome.run.path, "train")
    per_epoch = 4 // accum
    assert [row["step"] for row in rows] == list(range(1, 2 * per_epoch + 1))
    assert [row["epoch"] for row in rows] == [1] * per_epoch + [2] * per_epoch
    expected = _by_hand(2, accum)
    np.testing.assert_allclose([row["values"]["loss"] for row in rows], expected, rtol=1e-5)
    means = [np.mean(expected[:per_epoch]), np.mean(expected[per_epoch:])]
    np.testing.assert_allclose([row["train_loss"] for row in n.history], means, rtol=1e-5)
    assert (n.state.step, n.state.epoch, n.state.position) == (2 * per_epoch, 2, 0)


def _by_hand(epochs, accum):
    """Losses of gradient descent at 0.05 on the plane, in float64."""
    data = arrays()
    x, y = data["x"].astype(np.float64), data["y"].astype(np.float64)
    w, b, losses = np.zeros(FEATURES), 0.0, []
    for _ in range(epochs):
        for start in range(0, 16, 4 * accum):
            rows = slice(start, start + 4 * accum)
            error = x[rows] @ w + b - y[rows]
            losses.append((error**2).mean())
            w = w - 0.05 * 2 * (error[:, None] * x[rows]).mean(0)
            b = b - 0.05 * 2 * error.mean()
    return losses


def test_four_micro_batches_of_four_are_one_step_on_sixteen(handle):
    parts = handle(Measured(accum=4, max_epochs=5))
    whole = handle(Measured(max_epochs=5), data=splits(batch=16))
    parts.train()
    whole.train()
    assert parts.state.step == whole.state.step == 5
    assert not differs(everything(parts), everything(whole))
    two = handle(Measured(accum=2, max_epochs=5))
    two.train()
    assert differs(parameters(two), parameters(whole))


def test_what_lies_in_the_accumulator_before_the_first_micro_batch_does_not_matter(handle, monkeypatch):
    clean = handle(Measured(accum=4))
    clean.train()
    empty = Nitro.empty_pending

    def poisoned(self, columns):
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), empty(self, columns))

    monkeypatch.setattr(Nitro, "empty_pending", poisoned)
    n = handle(Measured(accum=4))
    n.train()
    assert_same(everything(n), everything(clean))


class Counted(Line):
    """Train metrics, and a count of the forwards in the state."""

    where: str = "device"

    def build_model(self, rng):
        return None, {"b": np.float32(0), "w": np.zeros(FEATURES, np.float32)}, {"seen": np.int32(0)}

    def forward(self, model, ps, st, *, x, train):
        return x @ ps["w"] + ps["b"], {"seen": st["seen"] + (1 if train else 0)}

    def train_metrics(self, outputs, *, y):
        return {"error": abs(outputs - y).mean(), "largest": abs(outputs - y).max()}

    def metrics_residency(self, hook):
        return self.where if hook == "train_metrics" else "host"

    def optimizer(self):
        return optax.sgd


@pytest.mark.parametrize("accum", [1, 2])
def test_train_metrics_on_host_and_device_agree_and_leave_the_gradient_alone(handle, accum):
    ends, rows = [], []
    for where in ("device", "host"):
        n = handle(Counted(where=where, accum=accum, max_epochs=2, learning_rate=0.05))
        outcome = n.train()
        ends.append(everything(n))
        rows.append([row["values"] for row in log_of(outcome.run.path, "train")])
    plain = handle(Measured(accum=accum, max_epochs=2))
    plain.train()
    assert not differs(ends[0], ends[1])
    assert not differs(
        parameters(plain), {p.removeprefix("ps."): a for p, a in ends[0].items() if p in ("ps.b", "ps.w")}
    )
    assert len(rows[0]) == len(rows[1]) == 8 // accum
    for device, host in zip(*rows, strict=True):
        assert sorted(device) == sorted(host) == ["error", "largest", "loss"]
        for name in device:
            assert device[name] == pytest.approx(host[name], abs=1e-6)


def test_state_moves_with_every_forward_in_training_and_with_none_in_evaluation(handle):
    n = handle(Counted(max_epochs=2, accum=2))
    n.train()
    n.validate()
    assert n.snapshot()["st"]["seen"] == 8


def test_the_loop_runs_no_operation_of_its_own_and_reads_nothing_back_unasked(handle):
    """With jax's caches emptied an eager operation would have to compile, and the ledger would know."""
    n = handle(Measured(max_epochs=3, accum=1, seed=5))
    n.observer = Watcher(epoch=lambda facts: n.request_stop())
    n.train()
    n.observer = Watcher()
    jax.clear_caches()
    before = ledger.mark()
    with jax.transfer_guard_device_to_host("disallow"):
        n.train()
    assert n.state.epoch == 3
    assert [row.name for row in ledger.since(before)] == []


def test_accumulation_and_host_metrics_run_no_operation_of_their_own_either(handle):
    n = handle(Counted(max_epochs=2, accum=2, where="host"))
    n.observer = Watcher(epoch=lambda facts: n.request_stop())
    n.train()
    jax.clear_caches()
    before = ledger.mark()
    n.train()
    assert n.state.epoch == 2
    assert [row.name for row in ledger.since(before)] == []


def test_a_requested_stop_ends_after_the_step_and_a_second_train_continues(handle):
    whole = handle(Measured(max_epochs=3))
    whole.train()
    n = None
    train = Stopping(splits()["train"], at=1, act=lambda: n.request_stop(), epoch=1)
    n = handle(Measured(max_epochs=3), data={**splits(), "train": train})
    first = n.train()
    assert first.status == "stopped"
    assert first.exit_code == 0
    assert (n.state.epoch, n.state.step) == (1, 4 + n.state.position)
    assert 0 < n.state.position < 4
    assert first.latest["step"] == n.state.step
    second = n.train()
    assert second.status == "finished"
    assert second.run.path == first.run.path
    assert_same(everything(n), everything(whole))
    assert [row["step"] for row in log_of(second.run.path, "train")] == list(range(1, 13))
    assert [row["status"] for row in log_of(second.run.path) if row["type"] == "finish"] == ["stopped", "finished"]
    assert n.history == whole.history


def test_a_stop_asked_for_in_the_last_step_of_an_epoch_still_validates(handle):
    n = None
    train = Stopping(splits()["train"], at=3, act=lambda: n.request_stop())
    n = handle(Measured(max_epochs=3), data={**splits(), "train": train})
    assert n.train().status == "stopped"
    assert (n.state.epoch, n.state.position, n.state.step) == (1, 0, 4)
    assert "val_error" in n.history[0]


def test_a_stop_can_be_requested_from_another_thread(handle):
    n = handle(Measured(max_epochs=10_000))
    started = threading.Event()
    n.observer = Watcher(first_step=lambda facts: started.set())
    stopper = threading.Thread(target=lambda: (started.wait(), n.request_stop()))
    stopper.start()
    outcome = n.train()
    stopper.join()
    assert outcome.status == "stopped"
    assert n.state.epoch < 10_000


def test_a_finished_run_that_is_trained_again_does_nothing_and_says_so(handle):
    watcher = Watcher()
    n = handle(Measured(max_epochs=2), observer=watcher)
    n.train()
    before, history = everything(n), list(n.history)
    outcome = n.train()
    assert outcome.status == "finished"
    assert watcher.warnings[-1] == "nothing to train: 2 epochs are done, max_epochs is 2"
    assert_same(everything(n), before)
    assert n.history == history
    assert outcome.latest["step"] == 8


def test_no_epochs_is_a_run_without_steps(handle):
    outcome = handle(Measured(max_epochs=0)).train()
    assert (outcome.status, outcome.steps, outcome.best, outcome.latest) == ("finished", 0, None, None)


def test_a_class_without_the_base_trains(handle):
    @dataclasses.dataclass(frozen=True)
    class Bare:
        """Markers as class attributes; every knob has nitro's default."""

        width: int = FEATURES
        scale: float = 1.0
        max_epochs: int = 2

        device_fields = ("scale",)
        host_fields = ("max_epochs",)

        def build_data(self, dist):
            return splits()

        def build_model(self, rng):
            return None, {"w": np.zeros(self.width, np.float32)}, {}

        def forward(self, model, ps, st, *, x):
            return self.scale * (x @ ps["w"]), st

        def loss(self, outputs, *, y):
            return ((outputs - y) ** 2).mean()

    n = handle(Bare(scale=2.0))
    assert n.train().epochs == 2
    n.set_device(scale=0.0)
    np.testing.assert_array_equal(n.predict(arrays(4)), np.zeros(4))


def test_the_configuration_that_a_run_writes_reloads_to_equal_values(handle):
    e = Measured(power=4, scale=0.1, note='with "quotes"', max_epochs=1)
    outcome = handle(e).train()
    stored = {name: value for name, (value, _) in load_run_config(outcome.run.config_path).items()}
    fresh = Measured(**stored)
    assert fresh.replace(run_dir=None) == e.replace(run_dir=None)


def test_records_of_a_run_are_strict_json_in_their_order(handle):
    outcome = handle(Measured(max_epochs=2)).train()
    lines = outcome.run.log_path.read_text().splitlines()
    records = [json.loads(line, parse_constant=lambda name: pytest.fail(name)) for line in lines]
    kinds = [record.get("context", record["type"]) for record in records]
    assert kinds[0] == "params"
    assert kinds[-1] == "finish"
    assert kinds.count("validate") == kinds.count("data") == 2
    assert kinds.count("train") == 8
    run = json.loads(outcome.run.run_json_path.read_text())
    assert (run["status"], run["exit_code"], run["epochs"], run["steps"]) == ("finished", 0, 2, 8)


def test_the_best_checkpoint_is_by_the_policy_and_the_newest_stays(handle):
    class Rising(Measured):
        """Its metric gets worse with every epoch."""

        def metrics(self, outputs, *, y):
            return {"score": (np.abs(outputs - y).sum(), len(y))}

        def checkpointer(self):
            return CheckpointPolicy(keep=1, metric="val_score", mode="max")

    outcome = handle(Rising(max_epochs=4)).train()
    assert (outcome.best["epoch"], outcome.best["step"]) == (1, 4)
    assert outcome.latest["epoch"] == 4
    assert sorted(p.name for p in outcome.run.checkpoints_path.iterdir() if p.name.isdigit()) == ["16", "4"]


def test_a_policy_on_a_metric_that_is_not_there_is_an_error_that_lists_the_metrics(handle, snapshot):
    class Wrong(Measured):
        def checkpointer(self):
            return CheckpointPolicy(metric="val_accuracy", mode="max")

    with pytest.raises(ExperimentError) as caught:
        handle(Wrong()).train()
    assert str(caught.value) == snapshot


def test_without_a_val_split_a_run_keeps_its_newest_checkpoints(handle):
    watcher = Watcher()
    outcome = handle(Measured(max_epochs=2), data={"train": splits()["train"]}, observer=watcher).train()
    assert outcome.best is None
    assert outcome.latest["epoch"] == 2
    assert watcher.warnings == []


def test_there_must_be_a_train_split_to_train_on(handle, snapshot):
    n = handle(Measured(), data={"val": splits()["val"]})
    assert "val_error" in n.validate()
    with pytest.raises(ExperimentError) as caught:
        n.train()
    assert str(caught.value) == snapshot


def test_a_short_batch_in_training_is_refused_naming_it(handle, snapshot):
    data = {"train": list(splits(rows=14)["train"])}
    with pytest.raises(ExperimentError) as caught:
        handle(Measured(), data=data).train()
    assert str(caught.value) == snapshot


def test_a_loader_that_tells_its_rows_is_refused_before_anything_is_trained(handle, snapshot):
    with pytest.raises(ExperimentError) as caught:
        handle(Measured(), data=splits(rows=14))
    assert str(caught.value) == snapshot


def test_shuffling_is_by_seed_and_epoch(handle):
    def trained(seed):
        n = handle(Measured(max_epochs=2), data=splits(shuffle=True, seed=seed))
        n.train()
        return everything(n)

    assert_same(trained(3), trained(3))
    assert differs(trained(3), trained(4))


def test_random_numbers_are_by_seed_and_step(handle):
    class Noisy(Measured):
        def forward(self, model, ps, st, *, x, rng):
            return x @ ps["w"] + ps["b"] + jax.random.normal(rng, (len(x),)), st

        def loss(self, outputs, *, y, rng):
            return ((outputs - y + jax.random.normal(rng)) ** 2).mean()

    def trained(seed):
        n = handle(Noisy(max_epochs=2, seed=seed))
        outcome = n.train()
        return everything(n), [row["values"]["loss"] for row in log_of(outcome.run.path, "train")]

    (one, losses), (same, _), (other, _) = trained(1), trained(1), trained(2)
    assert_same(one, same)
    assert differs(one, other)
    assert len(set(losses)) == len(losses)


class Drawing(Measured):
    """Its loss is a random number, and nothing else."""

    def loss(self, outputs, *, y, rng):
        return jax.random.normal(rng) + 0 * outputs.mean()


def test_every_step_and_every_micro_batch_draws_its_own_number(handle):
    def losses(accum):
        n = handle(Drawing(max_epochs=2, accum=accum))
        return [row["values"]["loss"] for row in log_of(n.train().run.path, "train")]

    single, pairs = losses(1), losses(2)
    assert len(set(single)) == 8
    assert len(set(pairs)) == 4
    assert pairs[0] != pytest.approx(single[0])  # the mean of two numbers, of which the first is that of the first step


def test_forward_loss_and_train_metrics_draw_different_numbers(handle):
    class Three(Measured):
        def forward(self, model, ps, st, *, x, rng):
            return x @ ps["w"] * 0 + jax.random.normal(rng), st

        def loss(self, outputs, *, y, rng):
            return jax.random.normal(rng) + 0 * outputs.mean()

        def train_metrics(self, outputs, *, y, rng):
            return {"forward": outputs[0], "own": jax.random.normal(rng)}

    n = handle(Three(), data={"train": list(splits()["train"])[:1]})
    (row,) = log_of(n.train().run.path, "train")
    assert len(set(row["values"].values())) == 3


def test_a_python_number_as_loss_is_a_loss(handle):
    class Constant(Measured):
        def loss(self, outputs, *, y):
            return 1.5

    n = handle(Constant())
    n.train()
    assert n.history[0]["train_loss"] == 1.5


def test_a_user_error_in_a_hook_comes_through_and_the_run_says_failed(handle):
    class Broken(Measured):
        def metrics(self, outputs, *, y):
            raise ZeroDivisionError("in the user's own code")

    n = handle(Broken())
    with pytest.raises(ZeroDivisionError, match="own code"):
        n.train()
    assert n.run.read_run()["status"] == "failed"
    assert log_of(n.run.path)[-1] == {**log_of(n.run.path)[-1], "type": "finish", "status": "failed"}


@pytest.mark.parametrize("accum", [1, 2])
def test_after_a_loader_has_failed_counters_and_parameters_agree_and_training_can_go_on(handle, accum):
    def fail():
        raise OSError("the disk is gone")

    whole = handle(Measured(accum=accum))
    whole.train()
    train = Stopping(splits()["train"], at=3, act=fail)
    n = handle(Measured(accum=accum), data={**splits(), "train": train})
    with pytest.raises(OSError, match="the disk is gone"):
        n.train()
    assert (n.state.step, n.state.position) == (3 // accum, 3 // accum * accum)
    assert [row["step"] for row in log_of(n.run.path, "train")] == list(range(1, 3 // accum + 1))
    assert n.run.read_run()["status"] == "failed"
    n.train()
    assert_same(everything(n), everything(whole))


def test_a_loader_that_is_one_pass_short_is_diagnosed(handle, snapshot):
    class OnePass:
        def __init__(self):
            self.batches = iter(list(splits()["train"]))

        def __len__(self):
            return 4

        def __iter__(self):
            return iter(list(self.batches))

    with pytest.raises(ExperimentError) as caught:
        handle(Measured(max_epochs=2), data={"train": OnePass()}).train()
    assert str(caught.value) == snapshot


def test_fields_that_no_hook_declares_may_be_anything(handle):
    rows = arrays()
    names = np.array([f"sample {i}" for i in range(16)])
    loader = ArrayLoader({**rows, "name": names}, batch_size=4)
    n = handle(Measured(), data={"train": loader, "val": loader})
    assert n.train().status == "finished"
    assert math.isfinite(n.history[0]["val_error"])


class Slow:
    """The batches of another loader, each after some seconds."""

    def __init__(self, source, seconds):
        self.source, self.seconds = source, seconds

    def __len__(self):
        return len(self.source)

    def __iter__(self):
        for batch in self.source:
            time.sleep(self.seconds)
            yield batch


@pytest.mark.parametrize(("seconds", "warnings"), [(0.12, 1), (0.002, 0)])
def test_waiting_for_data_is_worth_a_warning_where_it_costs_something(handle, seconds, warnings):
    watcher, data = Watcher(), splits()
    data["train"] = Slow(data["train"], seconds)
    handle(Line(max_epochs=3), data=data, observer=watcher).train()
    assert min(facts["data_wait_frac"] for facts in watcher.of("epoch")[1:]) > 0.25
    assert len([each for each in watcher.warnings if "waiting for data" in each]) == warnings
