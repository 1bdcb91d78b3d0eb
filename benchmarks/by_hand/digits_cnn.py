"""experiments/digits_cnn.py as a script by hand, up to the first step: jit, donation, nothing else."""

from importlib.util import find_spec
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx


class CNN(nnx.Module):
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


file = Path(find_spec("sklearn").origin).parent / "datasets" / "data" / "digits.csv.gz"
table = np.loadtxt(file, delimiter=",", dtype=np.float32)
image, label = table[:, :-1].reshape(-1, 8, 8, 1) / 16.0, table[:, -1].astype(np.int32)
train, val, test = np.split(np.random.default_rng(0).permutation(len(image)), [1257, 1527])

tx = optax.adamw(1e-3, weight_decay=1e-4)
graphdef = None


@jax.jit
def init(key):
    """One program for everything that the start needs; the structure is kept on the way."""
    global graphdef
    graphdef, params, rest = nnx.split(CNN(16, 0.2, rngs=nnx.Rngs(key)), nnx.Param, ...)
    return params, rest, tx.init(params)


def step(params, rest, opt_state, image, label):
    def objective(params):
        model = nnx.merge(graphdef, params, rest, copy=True)
        target = optax.smooth_labels(nnx.one_hot(label, 10), 0.0)
        loss = optax.softmax_cross_entropy(model(image), target).mean()
        return loss, nnx.split(model, nnx.Param, ...)[2]

    (loss, rest), grads = jax.value_and_grad(objective, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), rest, opt_state, loss


step = jax.jit(step, donate_argnums=(0, 1, 2))
params, rest, opt_state = init(jax.random.key(42))
rows = train[np.random.default_rng(42).permutation(len(train))[:64]]
params, rest, opt_state, loss = jax.block_until_ready(step(params, rest, opt_state, image[rows], label[rows]))
print("first_step", sum(leaf.size for leaf in jax.tree.leaves(params)), float(loss), flush=True)
