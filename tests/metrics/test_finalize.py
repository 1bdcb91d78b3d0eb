"""What may come out of finalize_metrics, and which numbers reach the logs."""

from __future__ import annotations

import gc

import numpy as np
import pytest

from nitro_cli.errors import ExperimentError
from nitro_cli.metrics import accumulate
from nitro_cli.metrics.accumulate import Accumulator
from nitro_cli.metrics.finalize import check_final, flatten_metrics
from nitro_cli.metrics.modes import Concat, Sum

GOOD = {"loss": 0.5, "n": 3, "ok": True, "f": np.float32(2), "per_class": np.arange(3), "a": {"b": np.array([4.0])}}


def test_host_numbers_arrays_and_dicts_are_right():
    check_final(GOOD, "val")
    check_final({}, "val")


def test_logs_get_every_single_number_and_no_array():
    flat = flatten_metrics(GOOD)
    assert flat == {"loss": 0.5, "n": 3.0, "ok": 1.0, "f": 2.0, "a.b": 4.0}
    assert all(type(value) is float for value in flat.values())


def joined():
    accumulator = Accumulator()
    accumulator.add({"scores": Concat(np.arange(4.0))}, 4, 0)
    return accumulator.result()


def test_a_concat_array_must_be_reduced(snapshot):
    result = joined()
    with pytest.raises(ExperimentError) as caught:
        check_final(result, "val")
    assert str(caught.value) == snapshot
    check_final({"scores": result["scores"].mean(), "histogram": result["scores"][:2] + 1}, "val")


def test_joined_arrays_are_forgotten_with_their_last_user():
    result = joined()
    key = id(result["scores"])
    assert key in accumulate._joined
    del result
    gc.collect()
    assert key not in accumulate._joined


def test_every_fault_is_named_at_once(snapshot):
    import jax.numpy as jnp

    result = {
        "device": jnp.ones(3),
        "group": {"mode": Sum(1.0), "pair": (1.0, 2), "text": "high", "nothing": None, "list": [1, 2]},
        "words": np.array(["a"]),
        "group.text": 1.0,
    }
    with pytest.raises(ExperimentError) as caught:
        check_final(result, "test")
    assert str(caught.value) == snapshot


def test_a_forgotten_return(snapshot):
    with pytest.raises(ExperimentError) as caught:
        check_final(None, "val")
    assert str(caught.value) == snapshot
