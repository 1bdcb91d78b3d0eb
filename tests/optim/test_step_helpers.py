"""The helpers that a step is written with, each on its own."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from manual_toys import placeless

from nitro_cli import backward, clip_by_global_norm, optimizer_state, step_optimizer
from nitro_cli.errors import ExperimentError
from nitro_cli.optim.leaves import Leaves

PS = {"b": np.float32(0.5), "w": np.array([1.0, -2.0, 3.0], np.float32)}
X = np.arange(6, dtype=np.float32).reshape(2, 3)


def loss(ps, x):
    return jnp.mean((x @ ps["w"] + ps["b"]) ** 2)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))

SOUND = {
    "plain": loss,
    "one parameter of two": lambda ps, x: (x @ ps["w"]).mean(),
    "linear": lambda ps, x: ps["w"].sum() + ps["b"],
    "zero by arithmetic": lambda ps, x: loss(ps, x) * 0,
    "in a jit": lambda ps, x: jax.jit(loss)(ps, x),
    "rematerialised": lambda ps, x: jax.checkpoint(loss)(ps, x),
    "in a scan": lambda ps, x: jax.lax.scan(lambda c, row: (c + row @ ps["w"], None), 0.0, x)[0],
    "in a branch": lambda ps, x: jax.lax.cond(x[0, 0] > 5, lambda: 0.0, lambda: loss(ps, x)),
    "its own derivative": lambda ps, x: jnp.sum(doubled(ps["w"])),
    "of a gradient": lambda ps, x: sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss)(ps, x))),
}


@pytest.mark.parametrize("kind", SOUND)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_a_gradient_is_the_one_of_jax(kind, traced):
    fn = SOUND[kind]
    run = jax.jit(lambda ps, x: backward(fn, ps, x)) if traced else lambda ps, x: backward(fn, ps, x)
    value, gradient = run(PS, X)
    expected = jax.value_and_grad(fn)(PS, X)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), (value, gradient), expected)


def test_what_the_objective_gives_besides_comes_out_and_constants_get_no_gradient():
    def objective(ps, x, scale):
        return scale * loss(ps, x), {"x": x, "twice": [scale * 2]}

    (value, aux), gradient = backward(objective, PS, X, jnp.float32(3), has_aux=True)
    assert value == pytest.approx(3 * float(loss(PS, X)))
    assert aux["twice"] == [6.0]
    np.testing.assert_array_equal(aux["x"], X)
    assert jax.tree.structure(gradient) == jax.tree.structure(PS)


def captured(ps, x):
    return backward(lambda _: loss(ps, x), ps)


def captured_from_a_value_made_before(ps, x):
    made = x @ ps["w"]
    return backward(lambda ps_new: jnp.mean(made**2), ps)


def stopped(ps, x):
    return backward(lambda p: loss(jax.lax.stop_gradient(p), x), ps)


def captured_in_a_jit(ps, x):
    return backward(lambda p: jax.jit(lambda q: loss(ps, x))(p), ps)


def captured_in_a_scan(ps, x):
    return backward(lambda p: jax.lax.scan(lambda c, row: (c + row @ ps["w"], None), 0.0, x)[0], ps)


def whole_numbers(ps, x):
    return backward(lambda p: jnp.argmax(p["w"]).astype(jnp.float32), ps)


TRAPS = [
    captured,
    captured_from_a_value_made_before,
    stopped,
    captured_in_a_jit,
    captured_in_a_scan,
    whole_numbers,
]


CAPTURING = (captured, captured_in_a_jit, captured_in_a_scan)  # those whose own variable holds the arrays


@pytest.mark.parametrize("trap", TRAPS, ids=lambda trap: trap.__name__)
@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
def test_an_objective_that_does_not_depend_on_its_argument_is_an_error_that_names_the_trap(trap, traced):
    with pytest.raises(ExperimentError, match="capture trap") as caught:
        (jax.jit(trap) if traced else trap)(PS, X)
    assert caught.value.problems[0].place.line is not None
    assert ("captures `ps`" in str(caught.value)) == (trap in CAPTURING)


def test_the_text_of_the_trap(snapshot):
    with pytest.raises(ExperimentError) as caught:
        captured(PS, X)
    assert placeless(caught.value) == snapshot


OBJECTIVES = {
    "a vector": lambda ps: ps["w"] * 2,
    "a pair": lambda ps: (loss(ps, X), X),
    "nothing": lambda ps: None,
    "a whole number": lambda ps: jnp.int32(1),
}


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_what_an_objective_may_not_return(kind, snapshot):
    with pytest.raises(ExperimentError) as caught:
        backward(OBJECTIVES[kind], PS)
    assert placeless(caught.value) == snapshot


def test_under_has_aux_it_must_be_a_pair(snapshot):
    with pytest.raises(ExperimentError) as caught:
        backward(lambda ps: loss(ps, X), PS, has_aux=True)
    assert placeless(caught.value) == snapshot


def test_numbers_are_leaves_and_the_path_of_one_is_its_name():
    tree = {
        "gen": optimizer_state(optax.adam, PS, learning_rate=1e-3),
        "disc": optimizer_state(optax.sgd, PS, learning_rate=1),
    }
    paths = Leaves.of(tree).paths
    assert [p for p in paths if "state" not in p] == [
        *("disc.learning_rate", "disc.count"),
        *(f"gen.{name}" for name in ("learning_rate", "b1", "b2", "eps", "eps_root", "count")),
    ]
    assert all(leaf.dtype == np.float32 for leaf in tree["gen"].hyperparameters.values())


RULES = {
    "adam": (optax.adam, {"learning_rate": 0.1}),
    "sgd with momentum": (optax.sgd, {"learning_rate": 0.1, "momentum": 0.9}),
    "a partial": (functools.partial(optax.adamw, weight_decay=0.1), {"learning_rate": 0.01}),
    "rmsprop": (optax.rmsprop, {"learning_rate": 0.01, "centered": True}),
    "a chain of one's own": (
        lambda learning_rate, norm: optax.chain(optax.clip_by_global_norm(norm), optax.adam(learning_rate)),
        {"learning_rate": 0.1, "norm": 0.5},
    ),
    "a schedule of optax": (optax.sgd, {"learning_rate": optax.linear_schedule(0.1, 0.0, 3)}),
}


@pytest.mark.parametrize("kind", RULES)
def test_steps_are_those_of_optax(kind):
    factory, numbers = RULES[kind]
    rule = factory(**numbers)
    state, ps, ours = optimizer_state(factory, PS, **numbers), PS, PS
    reference = rule.init(PS)
    step = jax.jit(step_optimizer)
    for _ in range(3):
        gradient = jax.grad(loss)(ps, X)
        updates, reference = rule.update(gradient, reference, ps)
        ps = optax.apply_updates(ps, updates)
        state, ours = step(state, ours, jax.grad(loss)(ours, X))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, ps)
    assert state.count == 3


def test_a_rate_can_be_replaced_inside_a_step():
    state = optimizer_state(optax.sgd, PS, learning_rate=0.1)
    gradient = jax.tree.map(np.ones_like, PS)

    def step(rate):
        return step_optimizer(state.replace(learning_rate=rate), PS, gradient)[1]["b"]

    assert float(jax.jit(step)(0.5)) == 0.0


def test_half_precision_stays_half():
    half = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PS)
    state, new = step_optimizer(optimizer_state(optax.adam, half, learning_rate=0.1), half, half)
    assert {leaf.dtype for leaf in jax.tree.leaves(new)} == {jnp.dtype("bfloat16")}
    assert jax.tree.leaves(state.state)[1].dtype == jnp.bfloat16


def test_optimizers_pass_through_control_flow():
    def body(carry, _):
        state, ps = carry
        return step_optimizer(state, ps, jax.grad(loss)(ps, X)), None

    first = (optimizer_state(optax.adam, PS, learning_rate=0.1), PS)
    (state, _), _ = jax.lax.scan(body, jax.tree.map(jnp.asarray, first), None, length=4)
    assert state.count == 4


WRONG = {
    "a transformation": lambda: optimizer_state(optax.adam(1e-3), PS),
    "no rule": lambda: optimizer_state("adam", PS),
    "an unknown setting": lambda: optimizer_state(optax.adam, PS, learning_rat=1e-3),
    "a missing setting": lambda: optimizer_state(optax.adam, PS),
    "one that accumulates": lambda: optimizer_state(
        lambda learning_rate: optax.MultiSteps(optax.sgd(learning_rate), 2), PS, learning_rate=0.1
    ),
    "other parameters": lambda: step_optimizer(optimizer_state(optax.sgd, PS, learning_rate=0.1), {"w": PS["w"]}, PS),
    "another shape": lambda: step_optimizer(
        optimizer_state(optax.sgd, PS, learning_rate=0.1), PS, {**PS, "w": np.ones(2, np.float32)}
    ),
    "a tree of optimizers": lambda: step_optimizer(
        {"gen": optimizer_state(optax.sgd, PS, learning_rate=0.1)},
        PS,
        PS,  # type: ignore[arg-type]
    ),
    "parameters first": lambda: step_optimizer(PS, optimizer_state(optax.sgd, PS, learning_rate=0.1), PS),  # type: ignore[arg-type]
    "an unknown replacement": lambda: optimizer_state(optax.adam, PS, learning_rate=0.1).replace(beta1=0.5),
    "replacing what is fixed": lambda: optimizer_state(optax.sgd, PS, learning_rate=0.1).replace(nesterov=1.0),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_optimizers_refuse(kind, snapshot):
    with pytest.raises(ExperimentError) as caught:
        WRONG[kind]()
    assert placeless(caught.value) == snapshot


def test_clipping_takes_plain_numbers():
    clipped = clip_by_global_norm({"a": jnp.array([3.0, 4.0])}, 1.0)
    np.testing.assert_allclose(clipped["a"], [0.6, 0.8], rtol=1e-6)
