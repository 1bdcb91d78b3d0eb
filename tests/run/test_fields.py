"""Which batch fields reach which hook, split by split, and which of them travel to the device."""

from __future__ import annotations

import numpy as np
import pytest
from toys import FEATURES, Line, Measured, arrays, log_of, splits

from nitro_cli import ArrayLoader, Sum
from nitro_cli.errors import ExperimentError
from nitro_cli.programs.ledger import ledger


class Weighted(Measured):
    """Optional fields in every hook; only the training batches have them."""

    def forward(self, model, ps, st, *, x, mask=None):
        return (x if mask is None else x * mask) @ ps["w"] + ps["b"], st

    def loss(self, outputs, *, y, weight=None):
        return ((outputs - y) ** 2 * (1.0 if weight is None else weight)).mean()

    def metrics(self, outputs, *, y, weight=None):
        assert weight is None
        return {"error": (np.abs(outputs - y).sum(), len(y))}


def weighted_train(weight=1.0):
    more = {"weight": np.full(16, weight, np.float32), "mask": np.ones((16, FEATURES), np.float32)}
    return ArrayLoader({**arrays(), **more}, batch_size=4)


def test_a_field_with_a_default_may_be_missing_in_a_split(handle):
    n = handle(Weighted(), data={**splits(), "train": weighted_train()})
    n.train()
    plain = handle(Measured())
    plain.train()
    assert n.history[0]["val_error"] == pytest.approx(plain.history[0]["val_error"], rel=1e-5)
    assert n.predict(arrays(3)).shape == (3,)
    still = handle(Weighted(), data={**splits(), "train": weighted_train(weight=0.0)})
    still.train()
    np.testing.assert_array_equal(still.parameters["w"], np.zeros(FEATURES))


def test_the_loss_that_stands_in_for_a_metric_may_lack_an_optional_field_too(handle):
    class Bare(Line):
        def loss(self, outputs, *, y, weight=None):
            return ((outputs - y) ** 2 * (1.0 if weight is None else weight)).mean()

    n = handle(Bare(), data={**splits(), "train": weighted_train()})
    n.train()
    y = arrays(8, seed=1)["y"]
    at_start = handle(Bare(), data={"val": splits()["val"]})
    assert at_start.validate()["val_loss"] == pytest.approx(float((y**2).mean()), rel=1e-5)
    assert "val_loss" in n.history[0]


class Named(Measured):
    """Hooks on the host that read texts, which no device can hold."""

    def train_metrics(self, outputs, *, name):
        return {"letters": float(sum(map(len, name)))}

    def metrics(self, outputs, *, name, y):
        assert len(name) == len(y) == len(outputs)
        return {"letters": Sum(float(sum(map(len, name))))}

    def metrics_residency(self, hook):
        return "host"


@pytest.mark.parametrize("accum", [1, 2])
def test_what_only_the_host_reads_may_be_what_no_device_can_hold(handle, accum):
    names = np.array([f"row {i:02}" for i in range(16)])
    train = ArrayLoader({**arrays(), "name": names}, batch_size=4)
    val = ArrayLoader({**arrays(), "name": names}, batch_size=3)
    n = handle(Named(accum=accum), data={"train": train, "val": val})
    outcome = n.train()
    assert [row["values"]["letters"] for row in log_of(outcome.run.path, "train")] == [24.0] * (4 // accum)
    assert n.history[0]["val_letters"] == 96.0


def test_train_metrics_cannot_pass_for_the_loss(handle, snapshot):
    class Twice(Measured):
        def train_metrics(self, outputs, *, y):
            return {"loss": 0.0 * outputs.mean()}

    with pytest.raises(ExperimentError) as caught:
        handle(Twice()).train()
    assert "\n".join(line for line in str(caught.value).splitlines() if not line.startswith("  -->")) == snapshot


def test_a_second_handle_makes_jax_compile_nothing_of_any_name(handle):
    handle(Measured()).train()
    before = ledger.mark()
    handle(Measured(note="another", seed=3, learning_rate=0.01, max_epochs=2)).train()
    assert [row.name for row in ledger.since(before)] == []
