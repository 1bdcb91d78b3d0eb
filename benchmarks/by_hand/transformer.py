"""benchmarks/transformer.py as a script by hand, up to the first step: jit, donation, nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn


class Block(nn.Module):
    width: int
    heads: int

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, mask=mask)
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(y)


class Transformer(nn.Module):
    width: int
    heads: int
    depth: int

    @nn.compact
    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(256, self.width)(tokens) + nn.Embed(tokens.shape[1], self.width)(positions)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x = Block(self.width, self.heads)(x, mask)
        return nn.Dense(256)(nn.LayerNorm()(x))


tokens = np.random.default_rng(0).integers(0, 256, (64, 129), np.int32)
model = Transformer(128, 4, 6)
tx = optax.adam(1e-3)


@jax.jit
def init(key):
    params = model.init(key, np.zeros((1, 128), np.int32))["params"]
    return params, tx.init(params)


def step(params, opt_state, tokens):
    def objective(params):
        logits = model.apply({"params": params}, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    loss, grads = jax.value_and_grad(objective)(params)
    updates, opt_state = tx.update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


step = jax.jit(step, donate_argnums=(0, 1))
params, opt_state = init(jax.random.key(42))
rows = np.random.default_rng(42).permutation(len(tokens))[:8]
params, opt_state, loss = jax.block_until_ready(step(params, opt_state, tokens[rows]))
print("first_step", sum(leaf.size for leaf in jax.tree.leaves(params)), float(loss), flush=True)
