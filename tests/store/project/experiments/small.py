"""Experiments whose programs compile in a few hundredths of a second."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nitro_cli import ArrayLoader, CheckpointPolicy, Device, Experiment, GraphConst


class Line(Experiment):
    """A plane through points."""

    power: GraphConst[int] = 2
    """Read by ``loss`` only."""
    scale: Device[float] = 1.0
    """A factor."""
    note: str = ""
    """For people."""
    learning_rate: float = 0.05

    def build_data(self, dist):
        x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
        loader = ArrayLoader(x=x, y=x.sum(1) + 0.5, batch_size=4)
        return {"train": loader, "val": loader}

    def build_model(self, rng):
        return None, {"w": np.zeros(3, np.float32), "b": np.float32(0)}, {}

    def forward(self, model, ps, st, *, x):
        return self.scale * (x @ ps["w"] + ps["b"]), st

    def loss(self, outputs, *, y):
        return (jnp.abs(outputs - y) ** self.power).mean()

    def metrics(self, outputs, *, y):
        return {"error": (np.abs(outputs - y).sum(), len(y))}

    def optimizer(self):
        return optax.sgd

    def checkpointer(self):
        return CheckpointPolicy(keep=1, metric="val_error")


class Decomposed(Line):
    """With linear algebra of LAPACK in all of its programs."""

    def forward(self, model, ps, st, *, x):
        outputs, st = super().forward(model, ps, st, x=x)
        square = jnp.outer(ps["w"], ps["w"]) + jnp.diag(jnp.arange(1.0, 4.0))
        numbers = jnp.linalg.cholesky(square)[0, 0] + jnp.linalg.svd(square, compute_uv=False)[0]
        numbers += jnp.linalg.eigh(square)[0][0] + jnp.linalg.inv(square)[0, 0]
        return outputs + numbers, st


class Printing(Line):
    """Prints while it runs."""

    def loss(self, outputs, *, y):
        jax.debug.print("{n}", n=outputs[0])
        return super().loss(outputs, y=y)


class Calling(Line):
    """Calls Python while it runs."""

    def forward(self, model, ps, st, *, x):
        outputs, st = super().forward(model, ps, st, x=x)
        once = jax.pure_callback(lambda x: np.asarray(x) + 1, jax.ShapeDtypeStruct((), np.float32), self.scale)
        return outputs + jax.lax.stop_gradient(once), st
