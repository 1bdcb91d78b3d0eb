"""What ``forward`` calls."""

from functools import partial

import jax.numpy as jnp

from toolbox.deep.ops import soften

LIMITS = {"low": -4.0, "high": 4.0}


def squash(x, gain=1.5):
    """One level below the hook."""
    return soften(x) * gain


def clamped(x, *, low, high):
    return jnp.clip(x, low, high)


within = partial(clamped, **LIMITS)


def leveled(level):
    """A function with a captured value."""

    def apply(x):
        return x * level

    return apply


leveling = leveled(2.0)


def stretched(function):
    """A decorator that says nothing of what it wraps."""

    def around(x):
        return function(x) * 1.25

    return around


@stretched
def shifted(x):
    return x + 0.5
