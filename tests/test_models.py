"""The one-line helpers for flax: what they return, and that both kinds of module behave alike."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from toys import Compiles, Measured

from nitro_cli import GraphConst, apply_model, cache_reset, linen_model, nnx_model
from nitro_cli.errors import ExperimentError
from nitro_cli.programs.ledger import ledger

KEY = jax.random.wrap_key_data(np.array([0, 7], np.uint32), impl="threefry2x32")
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Linen(nn.Module):
    """Batch statistics and dropout, told ``train``."""

    width: int = 4

    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(self.width)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


class Nnx(nnx.Module):
    def __init__(self, width, rngs):
        self.dense = nnx.Linear(3, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


def linen(rng=KEY):
    return linen_model(Linen(), rng, X, train=False)


def from_function(rng=KEY):
    return nnx_model(lambda rngs: Nnx(4, rngs), rng)


def from_instance(rng=KEY):
    return nnx_model(Nnx(4, nnx.Rngs(0)))


every_kind = pytest.mark.parametrize("make", [linen, from_function, from_instance])


@every_kind
def test_parameters_and_state_are_plain_trees_of_arrays(make):
    _, ps, st = make()
    for tree in (ps, st):
        assert type(tree) is dict
        assert all(type(node) is dict for node in tree.values())
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(tree))
    assert sum(leaf.size for leaf in jax.tree.leaves(ps)) == 3 * 4 + 4 + 4 + 4
    assert sum(leaf.size for leaf in jax.tree.leaves(st)) == 8


@every_kind
def test_evaluation_needs_no_key_and_leaves_the_state_alone(make):
    model, ps, st = make()
    one, st_one = apply_model(model, ps, st, X)
    two, _ = apply_model(model, ps, st, X, rng=KEY)
    np.testing.assert_array_equal(one, two)
    assert jax.tree.structure(st_one) == jax.tree.structure(st)
    jax.tree.map(np.testing.assert_array_equal, st_one, st)


@every_kind
def test_training_moves_the_statistics_and_drops_by_the_key(make):
    model, ps, st = make()
    one, st_one = apply_model(model, ps, st, X, train=True, rng=KEY)
    same, _ = apply_model(model, ps, st, X, train=True, rng=KEY)
    other, _ = apply_model(model, ps, st, X, train=True, rng=jax.random.fold_in(KEY, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.array_equal(one, other)
    assert 0 < (np.asarray(one) == 0).mean() < 1
    assert jax.tree.structure(st_one) == jax.tree.structure(st)
    moved = [not np.array_equal(a, b) for a, b in zip(jax.tree.leaves(st), jax.tree.leaves(st_one), strict=True)]
    assert all(moved)


def test_a_linen_model_equals_flaxs_own_application():
    model, ps, st = linen()
    np.testing.assert_array_equal(apply_model(model, ps, st, X)[0], model.apply({"params": ps, **st}, X, train=False))
    out, st_new = apply_model(model, ps, st, X, train=True, rng=KEY)
    expected, changed = model.apply({"params": ps, **st}, X, train=True, rngs={"dropout": KEY}, mutable=["batch_stats"])
    np.testing.assert_allclose(out, expected, rtol=1e-6)
    np.testing.assert_allclose(
        st_new["batch_stats"]["BatchNorm_0"]["mean"], changed["batch_stats"]["BatchNorm_0"]["mean"], rtol=1e-6
    )


def test_an_nnx_model_equals_the_module_it_was_made_from():
    module = Nnx(4, nnx.Rngs(0))
    model, ps, st = nnx_model(module)
    out, _ = apply_model(model, ps, st, X)
    module.eval()
    np.testing.assert_allclose(out, module(X), rtol=1e-6)


@pytest.mark.parametrize("make", [linen, from_function])
def test_values_are_by_the_key(make):
    def values(rng):
        return [np.asarray(leaf) for leaf in jax.tree.leaves(make(rng)[1])]

    one, same, other = values(KEY), values(KEY), values(jax.random.fold_in(KEY, 3))
    assert all(map(np.array_equal, one, same))
    assert not all(map(np.array_equal, one, other))


@pytest.mark.parametrize("make", [linen, from_function])
def test_an_initialisation_is_one_compile_once(make):
    make()
    before = ledger.mark()
    make()
    make(jax.random.wrap_key_data(np.array([1, 2], np.uint32), impl="threefry2x32"))
    assert [row.name for row in ledger.since(before)] == []


@pytest.mark.parametrize("name", ["training", "deterministic", "use_running_average"])
def test_a_linen_module_is_told_of_training_under_the_name_it_declares(name):
    namespace = {"nn": nn}
    exec(  # a signature for each spelling
        f"def call(self, x, {name}=None):\n    return nn.Dense(1)(x) * 0 + float(bool({name}))", namespace
    )
    cls = type("Told", (nn.Module,), {"__call__": nn.compact(namespace["call"]), "__module__": __name__})
    model, ps, st = linen_model(cls(), KEY, X)
    (training, _), (evaluating, _) = (apply_model(model, ps, st, X, train=t) for t in (True, False))
    assert (training[0, 0], evaluating[0, 0]) == ((1, 0) if name == "training" else (0, 1))


def test_a_stateless_linen_module_has_an_empty_state():
    model, ps, st = linen_model(nn.Dense(2), KEY, jax.ShapeDtypeStruct((1, 3), jnp.float32))
    assert st == {}
    assert apply_model(model, ps, st, X, train=True)[1] == {}


def test_a_function_without_a_key_is_an_error(snapshot):
    with pytest.raises(ExperimentError) as caught:
        nnx_model(lambda rngs: Nnx(4, rngs))
    assert str(caught.value) == snapshot


class WithNnx(Measured):
    width: GraphConst[int] = 2
    gain: float = 1.0

    def build_model(self, rng):
        return nnx_model(lambda rngs: nnx.Linear(3, self.width, rngs=rngs), rng)

    def forward(self, model, ps, st, *, x):
        out, st = apply_model(model, ps, st, x)
        return out.sum(-1), st


class WithLinen(WithNnx):
    activation: GraphConst[str] = "tanh"

    def build_model(self, rng):
        return linen_model(nn.Sequential([nn.Dense(self.width), getattr(jnp, self.activation)]), rng, X)


@pytest.mark.parametrize("E", [WithNnx, WithLinen])
def test_a_field_that_initialisation_does_not_read_initialises_nothing_anew(handle, E):
    handle(E()).validate()
    before = ledger.mark()
    with Compiles() as again:
        handle(E(seed=3, max_epochs=4, note="another", learning_rate=0.5, gain=2.0)).validate()
    assert again.misses == 0
    assert [row.name for row in ledger.since(before)] == []


def test_a_model_of_another_content_is_another_program(handle, empty_cache):
    handle(WithLinen()).validate()
    with Compiles() as again:
        handle(WithLinen(activation="sin")).validate()
    assert again.programs == ["evaluation"]
    assert "sin" in again.why["evaluation"]
    with Compiles() as wide:
        handle(WithNnx(width=3)).validate()
    assert wide.programs == ["evaluation"]


def test_parameters_do_not_depend_on_what_else_was_initialised(handle):
    one = handle(WithNnx()).parameters
    handle(WithNnx(width=5))
    again = handle(WithNnx()).parameters
    jax.tree.map(np.testing.assert_array_equal, one, again)
    other = handle(WithNnx(seed=1)).parameters
    assert not np.array_equal(one["kernel"], other["kernel"])


def test_a_reset_forgets_initialisations_too(handle, empty_cache):
    handle(WithNnx())
    held = ledger.mark()
    handle(WithNnx())
    assert ledger.since(held) == []
    cache_reset()
    handle(WithNnx())
    assert "jit(nitro_initialise)" in [row.name for row in ledger.since(held)]


def test_a_sweep_holds_the_last_initialisations_only(handle, empty_cache, monkeypatch):
    monkeypatch.setattr("nitro_cli.programs.cache._KEPT_ONCE", 2)
    for width in (2, 3, 4):
        handle(WithNnx(width=width))
    mark = ledger.mark()
    handle(WithNnx(width=4))
    assert ledger.since(mark) == []
    handle(WithNnx(width=2))
    assert "jit(nitro_initialise)" in [row.name for row in ledger.since(mark)]
