"""A six-layer transformer on random tokens: the experiment whose start benchmarks/start_up.py times."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from nitro_cli import ArrayLoader, Experiment, GraphConst, apply_model, linen_model

VOCABULARY = 256


class Block(nn.Module):
    """Causal attention and a feed-forward part, each behind a layer norm and added to what came in."""

    width: int
    heads: int

    @nn.compact
    def __call__(self, x, mask):
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads)(y, mask=mask)
        y = nn.gelu(nn.Dense(4 * self.width)(nn.LayerNorm()(x)))
        return x + nn.Dense(self.width)(y)


class Transformer(nn.Module):
    """Token and position embeddings, ``depth`` blocks, and logits of the next token."""

    width: int
    heads: int
    depth: int

    @nn.compact
    def __call__(self, tokens):
        positions = jnp.arange(tokens.shape[1])
        x = nn.Embed(VOCABULARY, self.width)(tokens) + nn.Embed(tokens.shape[1], self.width)(positions)
        mask = nn.make_causal_mask(tokens)
        for _ in range(self.depth):
            x = Block(self.width, self.heads)(x, mask)
        return nn.Dense(VOCABULARY)(nn.LayerNorm()(x))


class RandomTokens(Experiment):
    """Next-token prediction on tokens without meaning."""

    width: GraphConst[int] = 128
    heads: GraphConst[int] = 4
    depth: GraphConst[int] = 6
    length: GraphConst[int] = 128
    batch_size: int = 8

    def build_data(self, dist):
        tokens = np.random.default_rng(0).integers(0, VOCABULARY, (8 * self.batch_size, self.length + 1), np.int32)
        return {"train": ArrayLoader(tokens=tokens, batch_size=self.batch_size, shuffle=True, seed=self.seed)}

    def build_model(self, rng):
        module = Transformer(self.width, self.heads, self.depth)
        return linen_model(module, rng, np.zeros((1, self.length), np.int32))

    def forward(self, model, ps, st, *, tokens):
        return apply_model(model, ps, st, tokens[:, :-1])

    def loss(self, outputs, *, tokens):
        return optax.softmax_cross_entropy_with_integer_labels(outputs, tokens[:, 1:]).mean()

    def optimizer(self):
        return optax.adam
