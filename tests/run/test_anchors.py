"""Runs whose weights decay towards their first or loaded ones."""

from __future__ import annotations

import itertools

import numpy as np
import optax
import pytest
from toys import Line, parameters

from nitro_cli.errors import ProtectError, UsageError


class Anchored(Line):
    learning_rate: float = 0.1
    weight_decay: float = 0.5
    start: float = 1.0

    def optimizer(self):
        return optax.sgd

    def decay_anchor(self, group):
        return "w0"

    def no_decay(self, path, leaf):
        return path == "b"

    def build_model(self, rng):
        return None, {"b": np.float32(0), "w": np.full(3, self.start, np.float32)}, {}


class Flat(Anchored):
    """Without a gradient, so that decay alone moves the weights."""

    def loss(self, outputs, *, y):
        return outputs.sum() * 0.0


def test_a_run_goes_on_only_towards_the_anchor_it_had(handle, snapshot):
    count = itertools.count()

    class Moody(Anchored):
        def build_model(self, rng):
            return None, {"b": np.float32(0), "w": np.full(3, next(count), np.float32)}, {}

    first = handle(Moody())
    first.train()
    with pytest.raises(ProtectError) as caught:
        handle(Moody(max_epochs=2), resume=first.run)
    assert str(caught.value).replace(str(first.run.path), "RUN") == snapshot
    good = handle(Anchored())
    good.train()
    assert handle(Anchored(max_epochs=2), resume=good.run).train().epochs == 2


def test_decay_towards_loaded_weights_leaves_them_where_they_are(handle, tmp_path):
    first = handle(Anchored())
    first.train()
    loaded = parameters(first)["w"]
    weights = f"{first.run.path}:latest"
    n = handle(Flat(start=5.0), weights=weights, w0="weights")
    n.train()
    np.testing.assert_allclose(parameters(n)["w"], loaded, rtol=1e-6)
    n = handle(Flat(start=5.0), weights=weights)
    n.train()
    left = (1 - 0.1 * 0.5) ** 4
    np.testing.assert_allclose(parameters(n)["w"], 5 + (loaded - 5) * left, rtol=1e-6)


@pytest.mark.parametrize("w0", ["weights", "first"])
def test_an_anchor_that_means_nothing_is_refused(handle, w0):
    with pytest.raises(UsageError, match="w0="):
        handle(Anchored(), w0=w0)
