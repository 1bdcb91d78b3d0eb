"""Reasons, told of two versions of the same file."""

from __future__ import annotations

import sys
import types

import jax
import optax
import pytest

from nitro_cli.models import model_content
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.literals import changed_constants, place_text
from nitro_cli.programs.reasons import Known, between

OPTIMIZERS = """
import optax

SCALE = 2.0


def helper(x):
    return x * SCALE


def mine(learning_rate, flag=True, wrap=None):
    return optax.chain(optax.scale(helper(1.0)), optax.sgd(learning_rate))


def other(learning_rate):
    return optax.sgd(learning_rate)


local = [lambda learning_rate: optax.sgd(learning_rate * 2.0)]
halved = [lambda x: x * 0.5]
"""
MODEL = """
from flax import nnx

from nitro_cli.models import nnx_model


class Net(nnx.Module):
    def __init__(self, width, rngs):
        self.inner = nnx.Linear(4, width, rngs=rngs)

    def __call__(self, x):
        return self.inner(x) * 2.0


def build(rng):
    return nnx_model(lambda rngs: Net(8, rngs=rngs), rng)
"""


@pytest.fixture
def module(monkeypatch, tmp_path):
    """``module(source)`` as an import would load it."""

    def load(source):
        found = types.ModuleType("experiments.own")
        monkeypatch.setitem(sys.modules, "experiments.own", found)
        exec(compile(source, str(tmp_path / "own.py"), "exec"), vars(found))
        return found

    return load


def _known(code):
    return Known(code.entries, code.places, {}, {}, {}, {})


def _rule(factory, **fixed):
    return _known(fingerprint(None, **{"optimizer default": (factory, fixed)}))


def test_of_an_optimizer_the_factory_or_what_is_given_to_it(module, snapshot):
    own = module(OPTIMIZERS)
    given = _rule(own.mine, flag=True)
    pairs = {
        "another value": (given, _rule(own.mine, flag=False)),
        "given": (_rule(own.mine), given),
        "no longer given": (given, _rule(own.mine)),
        "another function given": (_rule(own.mine, wrap=own.helper), _rule(own.mine, wrap=own.mine)),
        "another factory": (_rule(optax.adam), _rule(optax.sgd)),
        "a factory of the user": (_rule(optax.adam), _rule(own.mine)),
        "a factory without a name": (_rule(own.local[0]), _rule(optax.adam)),
    }
    assert {name: between(*pair) for name, pair in pairs.items()} == snapshot


@pytest.mark.parametrize(
    ("before", "now"),
    [
        *(("SCALE = 2.0", "SCALE = 3.0"), ("rate * 2.0", "rate * 3.0"), ("x * 0.5", "x * 0.25")),
        *(("x * SCALE", "x + SCALE"), ("(learning_rate))\n", "(learning_rate, 0.9))\n")),
        ("sgd(learning_rate * 2.0)", "adam(learning_rate)"),
    ],
)
def test_of_an_optimizer_the_users_code(module, snapshot, before, now):
    old, new = (
        _known(fingerprint(None, **{
            "optimizer default": (own.mine, {"wrap": own.halved[0]}), "optimizer head": (own.local[0], {})
        }))
        for own in map(module, (OPTIMIZERS, OPTIMIZERS.replace(before, now)))
    )  # fmt: skip
    assert between(old, new) == snapshot


@pytest.mark.parametrize(
    ("before", "now"),
    [("Net(8", "Net(16"), ("* 2.0", "* 3.0"), ("lambda rngs: Net(8, rngs=rngs)", "Net(8, rngs=nnx.Rngs(rng))")],
)
def test_of_an_nnx_model_the_constant(module, snapshot, before, now):
    old, new = (
        _known(fingerprint(None, model=model_content(module(source).build(jax.random.key(0))[0])))
        for source in (MODEL, MODEL.replace(before, now))
    )
    assert between(old, new)[:1] == snapshot


def _place(source):
    return place_text(compile(source, "/some/where else.py", "eval"))


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("f(1, 2)", "f(1, 3)", ["2 -> 3"]),
        ("f(1, 300)", "f(2, 1.0)", ["1 -> 2", "300 -> 1.0"]),
        ("f('a', True)", "f('b', True)", ["'a' -> 'b'"]),
        ("lambda x: x * 2.0", "lambda x: x * 3.0", ["2.0 -> 3.0"]),
        ("x in {1, 2}", "x in {3, 1}", ["{1, 2} -> {1, 3}"]),
        ("f(1)", "g(2)", []),
        ("f(1)", "f(1, 2)", []),
        ("f(x)", "f(y)", []),
        ("f(1)", "f(1)", []),
    ],
)
def test_constants_are_told_where_nothing_else_changed(before, now, told):
    assert changed_constants(_place(before), _place(now)) == told


def test_a_place_of_before_and_one_with_a_long_table_tell_nothing():
    assert changed_constants("losses.py:12", _place("f(1)")) == []
    assert _place(f"f({', '.join(map(str, range(1000)))})") == "where else.py:1"
