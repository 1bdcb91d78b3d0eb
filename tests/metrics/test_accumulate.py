"""Reduction of metrics over batches, and what is said when a hook returns the wrong thing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro_cli.errors import ExperimentError
from nitro_cli.metrics.accumulate import Accumulator, is_joined
from nitro_cli.metrics.modes import Concat, Max, Min, Sum


def reduce(*batches, rows: int = 4) -> dict:
    accumulator = Accumulator()
    for index, batch in enumerate(batches):
        accumulator.add(batch, rows, index)
    return accumulator.result()


def test_a_mean_is_over_samples_not_over_batches():
    values = np.array([0.0] * 8 + [10.0] * 2)
    accumulator = Accumulator()
    for index, start in enumerate(range(0, 10, 4)):
        batch = values[start : start + 4]
        accumulator.add({"loss": (batch.sum(), len(batch))}, len(batch), index)
    assert accumulator.result() == {"loss": 2.0}


@given(values=st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=40), size=st.integers(1, 50))
def test_any_batch_size_gives_the_same_metrics(values, size):
    data = np.array(values, np.float32)
    accumulator = Accumulator()
    for index, start in enumerate(range(0, len(data), size)):
        x = data[start : start + size]
        wide = x.astype(np.float64)
        accumulator.add(
            {"mean": (wide.sum(), len(x)), "max": Max(x.max()), "min": Min(x.min()), "all": Concat(x)}, len(x), index
        )
    result = accumulator.result()
    assert result["mean"] == pytest.approx(data.astype(np.float64).mean(), rel=1e-9, abs=1e-6)
    assert (result["max"], result["min"]) == (data.max(), data.min())
    assert (result["all"] == data).all()
    assert result["all"].dtype == np.float32


def test_scalars_become_floats_and_arrays_reduce_elementwise():
    result = reduce(
        {
            "n": Sum(3),
            "per_class": (np.array([1, 2]), np.array([1, 4])),
            "high": Max(np.array([1, 9])),
            "hit": Max(False),
        },
        {
            "n": Sum(4),
            "per_class": (np.array([2, 0]), np.array([2, 4])),
            "high": Max(np.array([5, 2])),
            "hit": Max(True),
        },
    )
    assert (result["n"], type(result["n"])) == (7.0, float)
    assert (result["hit"], type(result["hit"])) == (1.0, float)
    assert result["per_class"].tolist() == [1.0, 0.25]
    assert result["high"].tolist() == [5, 9]


def test_sums_are_taken_in_double_precision_and_integers_stay_exact():
    small = np.float32(0.1)
    assert reduce(*[{"x": Sum(small)}] * 10_000)["x"] == pytest.approx(10_000 * float(small), rel=1e-12)
    counts = np.full(2, 2**53 + 1)
    assert reduce({"x": Sum(counts)}, {"x": Sum(np.ones(2, np.int64))})["x"].tolist() == [2**53 + 2] * 2


def test_count_zero_is_nan_without_a_warning():
    assert math.isnan(reduce({"x": (0.0, 0)}, {"x": (0.0, 0)})["x"])
    result = reduce({"x": (np.array([1.0, 3.0]), np.array([0, 2]))})["x"]
    assert math.isnan(result[0])
    assert result[1] == 1.5


def test_one_count_may_serve_a_whole_array_and_weights_may_be_fractions():
    assert reduce({"x": (np.array([2.0, 4.0]), 4)})["x"].tolist() == [0.5, 1.0]
    assert reduce({"x": (1.0, 0.25)}, {"x": (1.0, 0.75)})["x"] == 2.0


def test_groups_keep_their_shape_and_may_have_one_mode():
    batch = {
        "a": {"b": Sum(1), "c": {"d": (1, 2)}},
        "extremes": Max({"x": 1, "y": {"z": 2}}),
        "m": ({"p": 3, "q": 4}, 2),
    }
    once = {"a": {"b": 1.0, "c": {"d": 0.5}}, "extremes": {"x": 1.0, "y": {"z": 2.0}}, "m": {"p": 1.5, "q": 2.0}}
    assert reduce(batch) == once
    assert reduce(batch, batch)["a"] == {"b": 2.0, "c": {"d": 0.5}}


def test_nan_is_not_hidden_by_an_extreme():
    assert math.isnan(reduce({"x": Max(np.nan)}, {"x": Max(1.0)})["x"])


def test_jax_values_are_read_and_bfloat16_is_summed_wide():
    import jax.numpy as jnp

    assert reduce(*[{"x": Sum(jnp.ones((), jnp.bfloat16))}] * 300)["x"] == 300.0
    assert reduce({"x": Concat(jnp.arange(4))})["x"].tolist() == [0, 1, 2, 3]


def test_what_was_added_is_not_kept_by_reference():
    buffer = np.array([1.0, 2.0])
    accumulator = Accumulator()
    accumulator.add({"x": Max(buffer), "all": Concat(buffer), "s": Sum(buffer)}, 2, 0)
    buffer[:] = 100
    result = accumulator.result()
    assert [result[name].tolist() for name in ("x", "all", "s")] == [[1.0, 2.0]] * 3


def test_nothing_added_and_nothing_returned():
    assert Accumulator().result() == {}
    assert reduce({}, {}) == {}


def test_a_joined_array_is_known_by_identity():
    joined = reduce({"x": Concat(np.arange(4))})["x"]
    assert is_joined(joined)
    assert not is_joined(joined.copy())
    assert not is_joined(3.0)


BAD = {
    "not a dict": [0.5],
    "key not a string": [{1: Sum(1)}],
    "no mode": [{"val": {"accuracy": np.float32(0.5)}}],
    "list without mode": [{"x": [1, 2]}],
    "unknown mode": [{"x": (1.0, "mean")}],
    "mode class": [{"x": (1.0, Sum)}],
    "mode first": [{"x": ("sum", 1.0)}],
    "triple": [{"x": (1.0, 2.0, 3.0)}],
    "mode in mode": [{"x": Sum(Max(1))}],
    "mode in a group with a mode": [{"x": Sum({"a": 1, "b": (1, 2)})}],
    "text": [{"x": Sum("high")}],
    "negative count": [{"x": (1.0, -1)}],
    "count of another shape": [{"x": (np.zeros(2), np.zeros(3))}],
    "mode changes": [{"x": Sum(1)}, {"x": (1, 2)}],
    "key set changes": [{"x": Sum(1), "y": Sum(1)}, {"x": Sum(1), "z": Sum(1)}],
    "nested key set changes": [{"g": {"x": Sum(1)}}, {"g": {"x": Sum(1), "y": Sum(1)}}],
    "group becomes value": [{"g": {"x": Sum(1)}}, {"g": Sum(1)}],
    "value becomes group": [{"g": Sum(1)}, {"g": {"x": Sum(1)}}],
    "shape changes": [{"x": Sum(np.zeros(3))}, {"x": Sum(np.zeros(4))}],
    "concat without rows": [{"x": Concat(1.0)}],
    "concat with padding": [{"x": Concat(np.zeros((8, 2)))}],
    "concat pieces differ": [{"x": Concat(np.zeros((4, 2)))}, {"x": Concat(np.zeros((4, 3)))}],
}


@pytest.mark.parametrize("case", BAD)
def test_errors_name_the_metric(case, snapshot):
    with pytest.raises(ExperimentError) as caught:
        reduce(*BAD[case])
    assert str(caught.value) == snapshot
