"""Two levels below the hook."""

import jax.numpy as jnp

SHARPNESS = 2.0
UNUSED = 7


def soften(x):
    """A smooth step."""
    # how steep it is stands above
    scaled = SHARPNESS * x
    return jnp.tanh(scaled)


def nobody_calls_this(x):
    return x - 1
