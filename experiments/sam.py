"""Sharpness-aware minimisation on handwritten digits: two gradients for each step of one optimizer.

The first gradient says in which direction the loss rises fastest; the second is taken at the point that lies ``rho``
that way, and moves the parameters from where they were (Foret et al., 2021).
"""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from nitro_cli import (
    ArrayLoader,
    CheckpointPolicy,
    Device,
    Experiment,
    GraphConst,
    backward,
    linen_model,
    optimizer_state,
    step_optimizer,
)


class MLP(nn.Module):
    """One hidden layer and ten logits."""

    width: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(self.width)(x)))


class SAM(Experiment):
    """Handwritten digits, a small MLP, sharpness-aware minimisation."""

    width: GraphConst[int] = 64
    """Hidden width."""
    rho: Device[float] = 0.05
    """How far the second gradient is taken from the parameters; 0 is plain gradient descent."""
    momentum: float = 0.9
    """Momentum of the optimizer."""
    batch_size: int = 64
    """Rows per batch."""
    learning_rate: float = 0.1
    max_epochs: int = 20

    def build_data(self, dist):
        digits = load_digits()
        image = (digits.data / 16.0).astype(np.float32)
        label = digits.target.astype(np.int32)
        train, val, test = np.split(np.random.default_rng(0).permutation(len(image)), [1257, 1527])

        def loader(rows, **options):
            return ArrayLoader(image=image[rows], label=label[rows], batch_size=self.batch_size, **options)

        return {
            "train": loader(train, shuffle=True, seed=self.seed, drop_last=True),
            "val": loader(val),
            "test": loader(test),
        }

    def build_model(self, rng):
        return linen_model(MLP(self.width), rng, np.zeros((1, 64), np.float32))

    def setup_optimizers(self, model, ps, st, mesh):
        return optimizer_state(optax.sgd, ps, learning_rate=self.learning_rate, momentum=self.momentum)

    def train_step(self, model, ps, opt_state, st, *, image, label):
        def objective(ps):
            return self.loss(self.forward(model, ps, st, image=image)[0], label=label)

        loss, rise = backward(objective, ps)
        scale = self.rho / (optax.tree.norm(rise) + 1e-12)
        sharpest = jax.tree.map(lambda p, g: p + scale * g, ps, rise)
        loss_there, grads = backward(objective, sharpest)
        opt_state, ps = step_optimizer(opt_state, ps, grads)
        stats = {"sharpness": loss_there - loss}
        return {"loss": loss, "ps": ps, "st": st, "opt_state": opt_state, "stats": stats}

    def forward(self, model, ps, st, *, image):
        return model.apply({"params": ps}, image), st

    def loss(self, outputs, *, label):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, label).mean()

    def metrics(self, outputs, *, label):
        return {"accuracy": ((outputs.argmax(-1) == label).sum(), len(label))}

    def checkpointer(self):
        return CheckpointPolicy(metric="val_accuracy", mode="max")
