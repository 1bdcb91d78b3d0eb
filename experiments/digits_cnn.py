"""Handwritten digits with a small convolutional network: batch statistics, dropout, and random numbers in training."""

from __future__ import annotations

import functools
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import optax
from flax import nnx

from nitro_cli import ArrayLoader, CheckpointPolicy, Device, Experiment, GraphConst, apply_model, nnx_model


def digits() -> tuple[np.ndarray, np.ndarray]:
    """float32[1797, 8, 8, 1] between 0 and 1, and int32[1797]: the digits in scikit-learn's own file. To import
    scikit-learn for them would take half a second of every start."""
    spec = find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("the digits come with scikit-learn: pip install scikit-learn")
    file = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(file, delimiter=",", dtype=np.float32)
    return table[:, :-1].reshape(-1, 8, 8, 1) / 16.0, table[:, -1].astype(np.int32)


class CNN(nnx.Module):
    """Two convolutions with batch normalisation, dropout, and a linear read-out of the pooled features."""

    def __init__(self, channels: int, dropout: float, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, channels, (3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(channels, rngs=rngs)
        self.conv2 = nnx.Conv(channels, 2 * channels, (3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(2 * channels, rngs=rngs)
        self.dropout = nnx.Dropout(dropout, rngs=rngs)
        self.head = nnx.Linear(2 * channels * 4, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.norm1(self.conv1(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        x = nnx.relu(self.norm2(self.conv2(x)))
        x = nnx.max_pool(x, (2, 2), (2, 2))
        return self.head(self.dropout(x.reshape(len(x), -1)))


class DigitsCNN(Experiment):
    """Handwritten digits, a small CNN in flax NNX with BatchNorm and Dropout."""

    channels: GraphConst[int] = 16
    """Channels of the first convolution; the second has twice as many."""
    dropout: GraphConst[float] = 0.2
    """Share of features that dropout silences in training."""
    smoothing: Device[float] = 0.0
    """Label smoothing."""
    batch_size: int = 64
    """Rows per batch."""
    max_epochs: int = 10

    def build_data(self, dist):
        image, label = digits()
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
        return nnx_model(lambda rngs: CNN(self.channels, self.dropout, rngs=rngs), rng)

    def forward(self, model, ps, st, *, image, train, rng):
        return apply_model(model, ps, st, image, train=train, rng=rng)

    def loss(self, outputs, *, label):
        target = optax.smooth_labels(nnx.one_hot(label, 10), self.smoothing)
        return optax.softmax_cross_entropy(outputs, target).mean()

    def metrics(self, outputs, *, label):
        return {"accuracy": ((outputs.argmax(-1) == label).sum(), len(label))}

    def optimizer(self):
        return functools.partial(optax.adamw, weight_decay=1e-4)

    def checkpointer(self):
        return CheckpointPolicy(metric="val_accuracy", mode="max")
