"""What ``loss`` and the metrics call."""

import enum

import jax


class Kind(enum.Enum):
    """How errors are weighed."""

    SQUARE = 2.0
    FOURTH = 4.0


@jax.custom_vjp
def passed(x):
    """The value as it is, and a gradient that is scaled."""
    return x


def _forward(x):
    return passed(x), None


def _backward(_, upstream):
    return (0.5 * upstream,)


passed.defvjp(_forward, _backward)


@jax.jit
def weighed(error):
    """A jitted helper."""
    return error * 1.5


REGISTRY = {}


def registered(name):
    def keep(function):
        REGISTRY[name] = function
        return function

    return keep


@registered("plain")
def plain(value):
    return value


@registered("doubled")
def doubled(value):
    return 2 * value


REDUCTIONS = {"mean": lambda x: x.mean(), "sum": lambda x: x.sum()}


def summed(errors):
    total = 0.0
    for i in range(2):
        total = total + errors.sum() * i
    return total
