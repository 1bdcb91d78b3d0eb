"""validate, evaluate and predict: right numbers, whatever the batches."""

from __future__ import annotations

from types import GeneratorType

import jax.numpy as jnp
import numpy as np
import pytest
from toys import FEATURES, Line, Measured, OnDevice, arrays, assert_same, parameters, splits

from nitro_cli import ArrayLoader, Concat, Max, Min, NoPrefetch, Prefetch, Sum
from nitro_cli.errors import ExperimentError, UsageError

START = np.array([0.5, -1.0, 0.25], np.float32)


class Fixed(Measured):
    """Parameters that are not zero, so that an evaluation without training says something."""

    def build_model(self, rng):
        return None, {"b": np.float32(0.1), "w": START}, {}


def direct(x):
    return x @ START + np.float32(0.1)


@pytest.mark.parametrize("where", ["host", "device"])
def test_eight_zeros_and_two_tens_in_batches_of_four_have_the_mean_two(handle, where):
    values = np.array([0, 0, 0, 0, 0, 0, 0, 0, 10, 10], np.float32)

    class Mean(Line):
        def forward(self, model, ps, st, *, x):
            return x, st

        def metrics(self, outputs, *, y):
            return {"mean": (outputs.sum(), len(y))}

        def metrics_residency(self, hook):
            return where

    loader = ArrayLoader(x=values, y=values, batch_size=4)
    assert handle(Mean(), data={"val": loader}).validate() == {"val_mean": 2.0}


def test_the_loss_as_a_metric_is_weighted_by_real_rows(handle):
    values = np.array([0, 0, 0, 0, 0, 0, 0, 0, 10, 10], np.float32)

    class Mean(Line):
        def forward(self, model, ps, st, *, x):
            return x, st

        def loss(self, outputs, *, y):
            return outputs.mean()

    loader = ArrayLoader(x=values, y=values, batch_size=4)
    assert handle(Mean(), data={"val": loader}).validate() == {"val_loss": 2.0}


class Every(Fixed):
    """Every mode of reduction at once, nested."""

    def metrics(self, outputs, *, y):
        xp = jnp if self.metrics_residency("metrics") == "device" else np
        error = xp.abs(outputs - y)
        return {
            "error": (error.sum(), len(y)),
            "extremes": {"largest": Max(error.max()), "smallest": Min(error.min())},
            "total": Sum(error.sum()),
            "all": Concat(error),
        }

    def finalize_metrics(self, metrics, split):
        everything = metrics.pop("all")
        return {**metrics, "median": float(np.median(everything)), "rows": len(everything)}


class EveryOnDevice(Every):
    def metrics_residency(self, hook):
        return "device"


def expected(rows, seed):
    data = arrays(rows, seed)
    error = np.abs(direct(data["x"]) - data["y"])
    return {
        "error": error.mean(),
        "extremes.largest": error.max(),
        "extremes.smallest": error.min(),
        "total": error.sum(),
        "median": np.median(error),
        "rows": rows,
    }


@pytest.mark.parametrize("e", [Every(), EveryOnDevice()], ids=["host", "device"])
@pytest.mark.parametrize("batch", [1, 7, 64, 100])
def test_the_size_of_batches_does_not_show_in_the_metrics(handle, e, batch):
    rows = 75 if batch == 64 else 19
    n = handle(e, data={"val": ArrayLoader(arrays(rows, seed=3), batch_size=batch)})
    found = n.validate()
    wanted = {f"val_{name}": value for name, value in expected(rows, 3).items()}
    assert sorted(found) == sorted(wanted)
    for name, value in wanted.items():
        assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-6), name


def test_metrics_never_see_a_padded_row(handle):
    seen = []

    class Looking(Fixed):
        def metrics(self, outputs, *, x, y):
            seen.append((len(outputs), len(x), len(y)))
            return {"rows": Sum(len(y))}

    n = handle(Looking(), data={"val": ArrayLoader(arrays(19), batch_size=8)})
    assert n.validate() == {"val_rows": 19.0}
    assert seen == [(8, 8, 8), (8, 8, 8), (3, 3, 3)]


def test_padding_makes_no_infinity_that_the_data_has_not(handle):
    """Rows are padded with a real one: 1 / x of zeros would be infinite, and NaN in a sum over a masked row."""

    class Inverse(Line):
        def forward(self, model, ps, st, *, x):
            return 1 / x, st

    x = np.arange(1, 6, dtype=np.float32)
    n = handle(Inverse(), data={"val": ArrayLoader(x=x, y=x, batch_size=4)})
    np.testing.assert_allclose(np.concatenate(list(n.predict(n.splits["val"]))), 1 / x, rtol=1e-6)


def test_predict_equals_a_direct_forward_in_data_order_one_row_per_sample(handle):
    data = arrays(19, seed=5)
    n = handle(Fixed())
    batches = n.predict(ArrayLoader(x=data["x"], batch_size=4))
    assert isinstance(batches, GeneratorType)
    parts = list(batches)
    assert [len(part) for part in parts] == [4, 4, 4, 4, 3]
    assert all(type(part) is np.ndarray for part in parts)
    np.testing.assert_allclose(np.concatenate(parts), direct(data["x"]), rtol=1e-6)


@pytest.mark.parametrize("wrap", [NoPrefetch, lambda source: Prefetch(source, workers=2)], ids=["none", "workers"])
def test_predict_keeps_the_order_of_the_data_under_prefetch(handle, wrap):
    data = arrays(40, seed=6)
    n = handle(Fixed())
    parts = list(n.predict(wrap(ArrayLoader(x=data["x"], batch_size=3))))
    np.testing.assert_allclose(np.concatenate(parts), direct(data["x"]), rtol=1e-6)


def test_predict_takes_one_batch_of_any_size_up_to_the_width(handle):
    data = arrays(4)
    n = handle(Fixed())
    for rows in (1, 3, 4):
        np.testing.assert_allclose(n.predict({"x": data["x"][:rows]}), direct(data["x"][:rows]), rtol=1e-6)
    with pytest.raises(ExperimentError, match="5 rows, the program was made for 4"):
        n.predict({"x": arrays(5)["x"]})


def test_outputs_may_be_a_tree(handle):
    class Tree(Fixed):
        def forward(self, model, ps, st, *, x):
            y = x @ ps["w"] + ps["b"]
            return {"y": y, "parts": (x * 2, [y[:, None]])}, st

        def loss(self, outputs, *, y):
            return ((outputs["y"] - y) ** 2).mean()

        def metrics(self, outputs, *, y):
            return {"error": (np.abs(outputs["y"] - y).sum(), len(y))}

    n = handle(Tree())
    x = arrays(3)["x"]
    out = n.predict({"x": x})
    np.testing.assert_allclose(out["y"], direct(x), rtol=1e-6)
    np.testing.assert_allclose(out["parts"][0], x * 2)
    assert out["parts"][1][0].shape == (3, 1)
    assert n.validate()["val_error"] > 0


def test_a_split_without_labels_can_be_predicted_and_says_why_it_cannot_be_evaluated(handle, snapshot):
    n = handle(Fixed(), data={**splits(), "serve": ArrayLoader(x=arrays(6)["x"], batch_size=4)})
    assert sum(len(part) for part in n.predict(n.splits["serve"])) == 6
    with pytest.raises(ExperimentError) as caught:
        n.evaluate("serve")
    assert str(caught.value) == snapshot


def test_an_unknown_split_lists_those_there_are(handle, snapshot):
    with pytest.raises(UsageError) as caught:
        handle(Fixed()).evaluate("tets")
    assert str(caught.value) == snapshot


def test_an_array_is_no_batch_and_the_message_says_how_to_write_one(handle, snapshot):
    with pytest.raises(UsageError) as caught:
        handle(Fixed()).predict(arrays(4)["x"])
    assert str(caught.value) == snapshot


def test_a_batch_without_what_forward_takes_is_refused(handle, snapshot):
    with pytest.raises(ExperimentError) as caught:
        handle(Fixed()).predict({"image": arrays(4)["x"]})
    assert str(caught.value) == snapshot


def test_evaluation_changes_nothing_in_the_handle(handle):
    n = handle(Fixed())
    n.train()
    before = parameters(n)
    first = n.validate()
    n.evaluate("test")
    list(n.predict(n.splits["test"]))
    assert n.validate() == first
    assert_same(parameters(n), before)
    assert (n.state.step, n.state.epoch) == (4, 1)


def test_evaluate_names_metrics_by_split_and_keeps_a_name_that_has_it_already(handle):
    class Named(Fixed):
        def finalize_metrics(self, metrics, split):
            return {"error": metrics["error"], f"{split}_twice": 2 * metrics["error"]}

    found = handle(Named()).evaluate("test")
    assert sorted(found) == ["test_error", "test_twice"]
    assert found["test_twice"] == 2 * found["test_error"]


def test_the_first_rows_of_evaluation_are_counted(handle):
    n = handle(Fixed(), data={"val": ArrayLoader(arrays(19), batch_size=8)})
    n.validate()
    assert n.last_rows == {"val": 19}


def test_device_and_host_metrics_of_one_experiment_agree(handle):
    host = handle(Fixed(), data=splits(val_rows=10))

    class FixedOnDevice(OnDevice):
        def build_model(self, rng):
            return None, {"b": np.float32(0.1), "w": START}, {}

    device = handle(FixedOnDevice(), data=splits(val_rows=10))
    assert host.validate()["val_error"] == pytest.approx(device.validate()["val_error"], rel=1e-6)


def test_integer_and_double_inputs_are_taken_at_jaxs_own_precision(handle):
    n = handle(Fixed())
    x = arrays(4)["x"]
    np.testing.assert_array_equal(n.predict({"x": x.astype(np.float64)}), n.predict({"x": x}))
    assert n.predict({"x": np.ones((2, FEATURES), np.int64)}).dtype == np.float32


def test_a_split_that_is_a_list_of_batches_works(handle):
    loader = ArrayLoader(arrays(10), batch_size=4)
    batches = list(loader)
    assert handle(Fixed(), data={"val": batches}).validate() == handle(Fixed(), data={"val": loader}).validate()


WRONG = {
    "not a dict": lambda outputs, y: (outputs.sum(), 4),
    "no mode": lambda outputs, y: {"error": outputs.sum()},
    "concat of other rows": lambda outputs, y: {"all": Concat(outputs[:2])},
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_metrics_may_not_return(handle, snapshot, kind):
    class Wrong(Fixed):
        def metrics(self, outputs, *, y):
            return WRONG[kind](outputs, y)

    with pytest.raises(ExperimentError) as caught:
        handle(Wrong()).validate()
    assert str(caught.value) == snapshot


FINAL = {
    "not a dict": lambda metrics: 1.0,
    "a jax array": lambda metrics: {"error": jnp.ones(3)},
    "a raw concat": lambda metrics: {"all": metrics["all"]},
    "a text": lambda metrics: {"error": "good"},
}


@pytest.mark.parametrize("kind", FINAL)
def test_what_finalize_metrics_may_not_return(handle, snapshot, kind):
    class Wrong(Fixed):
        def metrics(self, outputs, *, y):
            return {"all": Concat(outputs)}

        def finalize_metrics(self, metrics, split):
            return FINAL[kind](metrics)

    with pytest.raises(ExperimentError) as caught:
        handle(Wrong()).validate()
    assert str(caught.value) == snapshot
