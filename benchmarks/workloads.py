"""The steps that benchmarks/loop.py times: one that costs next to nothing, the digits MLP, and one of 10 ms or more."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from experiments.myexp import MyExp
from nitro_cli import ArrayLoader, Experiment, GraphConst


def dense(sizes):
    """Layers of weights and biases for the given sizes."""
    draw = np.random.default_rng(0).normal
    shapes = itertools.pairwise(sizes)
    return [{"w": jnp.asarray(draw(size=s, scale=s[0] ** -0.5), jnp.float32), "b": jnp.zeros(s[1])} for s in shapes]


class NullStep(Experiment):
    """A linear model on one row: all of its time is the cost of calling programs."""

    def build_data(self, dist):
        x = np.random.default_rng(0).normal(size=(2048, 4)).astype(np.float32)
        return {"train": ArrayLoader(x=x, y=x.sum(1), batch_size=1, shuffle=True)}

    def build_model(self, rng):
        return None, {"w": jnp.zeros(4)}, {}

    def forward(self, model, ps, st, *, x):
        return x @ ps["w"], st

    def loss(self, outputs, *, y):
        return ((outputs - y) ** 2).mean()


class WideMLP(Experiment):
    """Three layers wide enough that a step takes 10 ms or more on two cores."""

    width: GraphConst[int] = 768

    def build_data(self, dist):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(256 * 60, 256)).astype(np.float32)
        return {"train": ArrayLoader(x=x, y=rng.integers(0, 10, len(x)).astype(np.int32), batch_size=256)}

    def build_model(self, rng):
        return None, dense([256, self.width, self.width, 10]), {}

    def forward(self, model, ps, st, *, x):
        for layer in ps[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        return x @ ps[-1]["w"] + ps[-1]["b"], st

    def loss(self, outputs, *, y):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, y).mean()


class NarrowMLP(WideMLP):
    """Forty narrow layers: many leaves, little arithmetic."""

    def build_data(self, dist):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(64 * 100, 32)).astype(np.float32)
        return {"train": ArrayLoader(x=x, y=rng.integers(0, 10, len(x)).astype(np.int32), batch_size=64)}

    def build_model(self, rng):
        return None, dense([32, *[32] * 39, 10]), {}


class MillionMLP(WideMLP):
    """1.1 million parameters in six leaves, a step of some milliseconds."""

    def build_data(self, dist):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(64 * 60, 784)).astype(np.float32)
        return {"train": ArrayLoader(x=x, y=rng.integers(0, 10, len(x)).astype(np.int32), batch_size=64)}

    def build_model(self, rng):
        return None, dense([784, 704, 704, 64]), {}


WORKLOADS = {
    "null": (NullStep, 8),
    "digits": (MyExp, 200),
    "narrow": (NarrowMLP, 30),
    "million": (MillionMLP, 24),
    "wide": (WideMLP, 12),
}
