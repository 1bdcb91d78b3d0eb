"""experiments/myexp.py as a script by hand, up to the first step: jit, donation, nothing else."""

import jax
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits


class MLP(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, x):
        for _ in range(self.depth):
            x = nn.relu(nn.Dense(self.width)(x))
        return nn.Dense(10)(x)


digits = load_digits()
image = (digits.data / 16.0).astype(np.float32)
label = digits.target.astype(np.int32)
train, val, test = np.split(np.random.default_rng(0).permutation(len(image)), [1257, 1527])

model = MLP(128, 2)
tx = optax.radam(1e-3)


@jax.jit
def init(key):
    params = model.init(key, np.zeros((1, 64), np.float32))["params"]
    return params, tx.init(params)


def step(params, opt_state, image, label):
    def objective(params):
        logits = model.apply({"params": params}, image)
        target = optax.smooth_labels(jax.nn.one_hot(label, 10), 0.05)
        return optax.softmax_cross_entropy(logits, target).mean(), (logits.argmax(-1) == label).mean()

    (loss, accuracy), grads = jax.value_and_grad(objective, has_aux=True)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss, accuracy


step = jax.jit(step, donate_argnums=(0, 1))
params, opt_state = init(jax.random.key(42))
rows = train[np.random.default_rng(42).permutation(len(train))[:64]]
params, opt_state, loss, accuracy = jax.block_until_ready(step(params, opt_state, image[rows], label[rows]))
print("first_step", sum(leaf.size for leaf in jax.tree.leaves(params)), float(loss), flush=True)
