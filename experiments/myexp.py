"""Handwritten digits with a small multilayer perceptron: the smallest complete experiment."""

from __future__ import annotations

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from nitro_cli import ArrayLoader, CheckpointPolicy, Device, Experiment, GraphConst, apply_model, linen_model


class MLP(nn.Module):
    """``depth`` hidden layers of ``width``, and ten logits."""

    width: int
    depth: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(x)


class MyExp(Experiment):
    """Handwritten digits, a small MLP."""

    width: GraphConst[int] = 128
    """Hidden width. Structural: another value is another program."""
    depth: GraphConst[int] = 2
    """Number of hidden layers."""
    smoothing: Device[float] = 0.05
    """Label smoothing. A traced input: sweep it and nothing compiles."""
    batch_size: int = 64
    """Rows per batch."""
    max_epochs: int = 20

    def build_data(self, dist):
        digits = load_digits()
        image = (digits.data / 16.0).astype(np.float32)
        label = digits.target.astype(np.int32)
        order = np.random.default_rng(0).permutation(len(image))
        train, val, test = np.split(order, [1257, 1527])

        def loader(rows, **options):
            return ArrayLoader(image=image[rows], label=label[rows], batch_size=self.batch_size, **options)

        return {
            "train": loader(train, shuffle=True, seed=self.seed, drop_last=True),
            "val": loader(val),
            "test": loader(test),
        }

    def build_model(self, rng):
        return linen_model(MLP(self.width, self.depth), rng, np.zeros((1, 64), np.float32))

    def forward(self, model, ps, st, *, image):
        return apply_model(model, ps, st, image)

    def loss(self, outputs, *, label):
        target = optax.smooth_labels(jax.nn.one_hot(label, 10), self.smoothing)
        return optax.softmax_cross_entropy(outputs, target).mean()

    def train_metrics(self, outputs, *, label):
        return {"accuracy": (outputs.argmax(-1) == label).mean()}

    def metrics(self, outputs, *, label):
        shifted = outputs - outputs.max(-1, keepdims=True)
        log_probability = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        return {
            "loss": (-log_probability[np.arange(len(label)), label].sum(), len(label)),
            "accuracy": ((outputs.argmax(-1) == label).sum(), len(label)),
        }

    def checkpointer(self):
        return CheckpointPolicy(metric="val_accuracy", mode="max")
