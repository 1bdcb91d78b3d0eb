"""Device values are changed on a live handle, compile nothing, and refuse what would."""

from __future__ import annotations

import dataclasses
from enum import Enum
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import Field
from toys import FEATURES, Compiles, Measured, Watcher, arrays, splits

from nitro_cli import Device
from nitro_cli.errors import ExperimentError, UsageError
from nitro_cli.programs.ledger import ledger


class Color(Enum):
    RED = "red"


class Knobbed(Measured):
    """Device values of every kind."""

    count: Device[int] = 3
    flag: Device[bool] = True
    pair: Device[tuple[float, float]] = (1.0, 2.0)
    weights: Device[np.ndarray] = np.ones(FEATURES, np.float32)
    share: Device[float] = Field(default=0.5, ge=0, le=1)

    def build_model(self, rng):
        return None, {"b": np.float32(1), "w": np.ones(FEATURES, np.float32)}, {}

    def forward(self, model, ps, st, *, x):
        out = (x * self.weights) @ ps["w"] + ps["b"] * self.pair[0] + self.count + self.share
        return self.scale * out + jnp.where(self.flag, 0.0, 100.0), st


def direct(x, weights=1.0, pair=1.0, count=3, share=0.5, scale=1.0, flag=True):
    return scale * ((x * weights).sum(1) + pair + count + share) + (0 if flag else 100)


@pytest.fixture
def n(handle):
    made = handle(Knobbed())
    made.predict(arrays(4))
    return made


@pytest.mark.parametrize(
    ("given", "back"),
    [
        ({"scale": 2.0}, 2.0),
        ({"scale": 2}, 2.0),
        ({"scale": np.float64(2)}, 2.0),
        ({"scale": jnp.float32(2)}, 2.0),
        ({"count": 5}, 5),
        ({"count": np.int64(5)}, 5),
        ({"flag": False}, False),
        ({"pair": (3.0, 4.0)}, (3.0, 4.0)),
        ({"pair": [3, 4]}, (3.0, 4.0)),
        ({"share": 1.0}, 1.0),
    ],
    ids=str,
)
def test_a_new_value_reaches_the_program_compiles_nothing_and_reads_back_as_a_host_value(n, given, back):
    (name,) = given
    x = arrays(4)["x"]
    with Compiles() as compiles:
        n.set_device(**given)
        before = ledger.mark()
        found = n.predict({"x": x})
    assert compiles.misses == 0
    assert ledger.since(before) == []
    assert n.device_value(name) == back
    assert type(n.device_value(name)) is type(back)
    effect = {"pair": back[0]} if name == "pair" else {name: back}
    np.testing.assert_allclose(found, direct(x, **effect), rtol=1e-5)


def test_an_array_field_is_set_by_an_array_of_its_shape(n):
    x, weights = arrays(4)["x"], np.array([1.0, 0.0, -1.0])
    n.set_device(weights=weights)
    np.testing.assert_allclose(n.predict({"x": x}), direct(x, weights=weights), rtol=1e-5)
    np.testing.assert_array_equal(n.device_value("weights"), weights.astype(np.float32))


def test_a_field_of_a_short_float_takes_numbers(handle):
    class Short(Measured):
        gain: Device[np.ndarray] = np.ones(2)

    made = handle(Short(gain=np.asarray(jnp.ones(2, jnp.bfloat16))))
    made.set_device(gain=np.array([0.5, 3]))
    assert made.device_value("gain").tolist() == [0.5, 3]


def test_several_values_are_set_together_or_not_at_all(n):
    n.set_device(scale=2.0, count=1)
    assert (n.device_value("scale"), n.device_value("count")) == (2.0, 1)
    with pytest.raises(UsageError):
        n.set_device(scale=9.0, count="many")
    assert (n.device_value("scale"), n.device_value("count")) == (2.0, 1)


REFUSED = {
    "GraphConst": {"power": 3},
    "Host": {"note": "x"},
    "a knob": {"learning_rate": 0.1},
    "unknown": {"scael": 1.0},
    "another size": {"weights": np.ones(5)},
    "an array for a number": {"scale": np.ones(2)},
    "another length": {"pair": (1.0, 2.0, 3.0)},
    "a text": {"scale": "0.5"},
    "none": {"scale": None},
    "a fraction for a whole number": {"count": 2.7},
    "a truth value for a number": {"scale": True},
    "a number for a truth value": {"flag": 1},
    "too large": {"count": 2**40},
    "too large for a float": {"scale": 1e300},
    "not finite": {"scale": float("nan")},
    "out of bounds": {"share": 1.5},
    "complex": {"weights": np.ones(FEATURES, complex)},
    "nothing": {},
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_refused_and_how_it_is_mended(n, snapshot, kind):
    before = {name: n.device_value(name) for name in ("scale", "count", "flag", "pair", "share")}
    with pytest.raises(UsageError) as caught:
        n.set_device(**REFUSED[kind])
    assert str(caught.value) == snapshot
    assert {name: n.device_value(name) for name in before} == before


def test_reading_what_is_no_device_field_is_refused_alike(n):
    with pytest.raises(UsageError, match="'power' is a GraphConst field"):
        n.device_value("power")


def test_a_value_set_before_training_trains(handle):
    x = handle(Measured(max_epochs=1))
    x.set_device(scale=0.0)
    x.train()
    np.testing.assert_array_equal(x.snapshot()["ps"]["w"], np.zeros(FEATURES))


def test_the_experiment_that_was_given_is_not_touched(handle):
    e = Measured()
    made = handle(e)
    made.set_device(scale=3.0)
    assert e.scale == 1.0
    assert handle(e).device_value("scale") == 1.0


def test_the_array_that_was_given_is_not_kept(handle):
    given = np.zeros(FEATURES, np.float32)
    made = handle(Knobbed())
    made.set_device(weights=given)
    given[:] = 7
    np.testing.assert_array_equal(made.device_value("weights"), np.zeros(FEATURES))


def test_a_class_without_the_base_has_device_values_too(handle):
    @dataclasses.dataclass(frozen=True)
    class Bare:
        scale: Device[float] = 1.0

        def build_data(self, dist):
            return splits()

        def build_model(self, rng):
            return None, {"w": np.ones(FEATURES, np.float32)}, {}

        def forward(self, model, ps, st, *, x):
            return self.scale * (x @ ps["w"]), st

        def loss(self, outputs, *, y):
            return ((outputs - y) ** 2).mean()

    made = handle(Bare())
    x = arrays(4)["x"]
    made.set_device(scale=2)
    np.testing.assert_allclose(made.predict({"x": x}), 2 * x.sum(1), rtol=1e-5)
    with pytest.raises(UsageError):
        made.set_device(scale="x")


def test_no_value_at_all_is_another_program(handle):
    class Optional(Measured):
        gain: Device[float | None] = None

    made = handle(Optional())
    assert made.device_value("gain") is None
    with pytest.raises(UsageError, match="holds no value"):
        made.set_device(gain=1.0)
    made.set_device(gain=None)


def test_a_value_set_between_epochs_is_what_the_next_epoch_trains_with(handle):
    frozen = handle(Measured(max_epochs=2), observer=Watcher(epoch=lambda facts: frozen.set_device(scale=0.0)))
    frozen.train()
    once = handle(Measured(max_epochs=1))
    once.train()
    np.testing.assert_array_equal(frozen.snapshot()["ps"]["w"], once.snapshot()["ps"]["w"])


@pytest.mark.parametrize("value", ["a", Path("a"), [1.0, "a"], {"a": Color.RED}])
def test_what_no_device_can_hold_is_refused_at_set_up(handle, value):
    class Named(Measured):
        name: Device[Any] = value

    with pytest.raises(ExperimentError, match="'name' of Named is marked Device, and no device can hold") as caught:
        handle(Named())
    assert "GraphConst" in str(caught.value)
