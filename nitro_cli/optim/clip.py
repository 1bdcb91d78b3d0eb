"""Arithmetic on whole trees: clipping by the global norm, and moving averages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax


def clip_by_global_norm(gradients: Any, threshold: jax.Array) -> Any:
    """Scale ``gradients`` by ``threshold / max(norm, threshold)``, where ``norm`` is the L2 norm over all leaves.

    ``threshold`` is a traced float scalar greater than 0. Applied once, to the gradient of the whole optimizer step.
    """
    norm = optax.tree.norm(gradients)
    scale = threshold / jnp.maximum(norm, threshold)
    return jax.tree.map(lambda g: g * scale.astype(g.dtype), gradients)


def averaged(average: Any, values: Any, decay: Any) -> Any:
    """``decay * average + (1 - decay) * values``, leaf by leaf, in the dtypes of ``average``."""
    rest = 1 - decay

    def moved(a: Any, v: Any) -> Any:
        return (a + jnp.asarray(rest).astype(a.dtype) * (v - a)).astype(a.dtype)

    return jax.tree.map(moved, average, values)
