"""A run's updates are those of plain optax, step for step, with hyperparameters that are inputs of the program."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import FEATURES, Compiles, Measured, arrays, parameters, splits

STEPS = 5
RATE = 0.03
FACTORIES = {
    "the default": (None, optax.radam),
    "radam": (optax.radam, optax.radam),
    "adam": (optax.adam, optax.adam),
    "adam with settings": (
        functools.partial(optax.adam, b1=0.7, eps=1e-4),
        functools.partial(optax.adam, b1=0.7, eps=1e-4),
    ),
    "sgd": (optax.sgd, optax.sgd),
    "sgd with momentum": (
        functools.partial(optax.sgd, momentum=0.9, nesterov=True),
        functools.partial(optax.sgd, momentum=0.9, nesterov=True),
    ),
    "adamw": (functools.partial(optax.adamw, weight_decay=0.1), functools.partial(optax.adamw, weight_decay=0.1)),
    "rmsprop": (optax.rmsprop, optax.rmsprop),
    "lion": (optax.lion, optax.lion),
    "adagrad": (optax.adagrad, optax.adagrad),
}


def with_optimizer(declared, **fields):
    class Other(Measured):
        learning_rate: float = RATE

        def build_model(self, rng):
            return None, {"b": np.float32(0.3), "w": np.linspace(-1, 1, FEATURES, dtype=np.float32)}, {}

        def optimizer(self):
            return declared

    return Other(**fields)


def by_hand(transformation):
    """Parameters after five steps of plain optax on the same batches."""
    loader = splits()["train"]
    ps = {"b": jnp.float32(0.3), "w": jnp.linspace(-1, 1, FEATURES, dtype=jnp.float32)}
    state = transformation.init(ps)

    def loss(ps, x, y):
        return (jnp.abs(x @ ps["w"] + ps["b"] - y) ** 2).mean()

    @jax.jit
    def step(ps, state, x, y):
        changes, state = transformation.update(jax.grad(loss)(ps, x, y), state, ps)
        return optax.apply_updates(ps, changes), state

    for index in range(STEPS):
        batch = loader[index % 4]
        ps, state = step(ps, state, batch["x"], batch["y"])
    return {name: np.asarray(leaf) for name, leaf in ps.items()}


def five_batches():
    loader = splits()["train"]
    return [loader[index % 4] for index in range(STEPS)]


@pytest.mark.parametrize("kind", FACTORIES)
def test_five_steps_equal_those_of_plain_optax(handle, kind):
    declared, factory = FACTORIES[kind]
    n = handle(with_optimizer(declared), data={"train": five_batches()})
    n.train()
    assert n.state.step == STEPS
    expected = by_hand(factory(RATE))
    for name, leaf in parameters(n).items():
        np.testing.assert_allclose(leaf, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_the_rate_is_the_knob(handle):
    moved = []
    for rate in (0.01, 0.02):
        n = handle(with_optimizer(optax.sgd, learning_rate=rate), data={"train": five_batches()[:1]})
        n.train()
        moved.append(parameters(n)["w"] - np.linspace(-1, 1, FEATURES, dtype=np.float32))
    np.testing.assert_allclose(moved[1], 2 * moved[0], rtol=1e-4)


def test_every_number_of_a_factory_is_an_input_of_the_program(handle):
    def run(**settings):
        n = handle(with_optimizer(functools.partial(optax.adam, **settings)), data={"train": five_batches()})
        n.train()
        return parameters(n)["w"]

    run(b1=0.9)
    with Compiles() as compiles:
        ends = [run(b1=0.5), run(b2=0.5), run(eps=0.1), run(eps_root=0.1)]
    assert compiles.misses == 0
    assert len({end.tobytes() for end in ends}) == 4


def test_a_flag_of_a_factory_is_another_update_program(handle, empty_cache):
    handle(with_optimizer(functools.partial(optax.sgd, momentum=0.9, nesterov=False))).train()
    with Compiles() as compiles:
        handle(with_optimizer(functools.partial(optax.sgd, momentum=0.9, nesterov=True))).train()
    assert compiles.programs == ["update"]


def test_a_factory_of_ones_own_is_part_of_the_program(handle):
    def scaled(factor):
        def own(learning_rate, boost=1.0):
            return optax.chain(optax.scale(factor), optax.scale(boost), optax.scale_by_learning_rate(learning_rate))

        return own

    n = handle(with_optimizer(scaled(2.0)), data={"train": five_batches()})
    n.train()
    np.testing.assert_allclose(parameters(n)["w"], by_hand(optax.sgd(2 * RATE))["w"], rtol=1e-5)
    with Compiles() as compiles:
        handle(with_optimizer(scaled(3.0)), data={"train": five_batches()}).train()
    assert compiles.programs == ["update"]
    with Compiles() as boosted:
        handle(with_optimizer(functools.partial(scaled(3.0), boost=2.0)), data={"train": five_batches()}).train()
    assert boosted.misses == 0


def test_every_number_of_the_optimizer_state_lives_on_the_device_and_moves(handle):
    """A counter left on the host would be baked into the program and stand still."""
    n = handle(with_optimizer(None), data={"train": five_batches()})
    n.train()
    assert all(isinstance(leaf, jax.Array) for leaf in n.state.opt_state)
    counts = [leaf for path, leaf in n.snapshot()["opt_state"].items() if leaf.dtype.kind == "i"]
    assert counts
    assert all(count == STEPS for count in counts)


def test_half_precision_parameters_keep_their_dtype(handle):
    class Half(Measured):
        def build_model(self, rng):
            return None, {"b": np.zeros((), np.float16), "w": np.zeros(FEATURES, np.float16)}, {}

    n = handle(Half(max_epochs=2))
    n.train()
    assert all(leaf.dtype == np.float16 for leaf in parameters(n).values())
    assert np.abs(parameters(n)["w"]).sum() > 0


def test_a_gradient_that_is_zero_moves_nothing_under_gradient_descent(handle):
    flat = {"x": np.zeros((4, FEATURES), np.float32), "y": np.full(4, 0.3, np.float32)}
    n = handle(with_optimizer(optax.sgd), data={"train": [flat]})
    n.train()
    np.testing.assert_array_equal(parameters(n)["w"], np.linspace(-1, 1, FEATURES, dtype=np.float32))
    assert arrays(4)["x"].any()
