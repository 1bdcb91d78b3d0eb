"""Clipping by the global norm of the accumulated gradient."""

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
