"""What is found out about an optimizer rule is remembered, for as long as everything it was found from is the same."""

from __future__ import annotations

import time

import numpy as np
import optax
import pytest

from nitro_cli.programs import store as stores
from nitro_cli.programs.answers import kept_answer
from tests.optim.plans import Bare, plan_for

ROUNDING = 0.5


def own(learning_rate, b1=0.9):
    return optax.chain(optax.trace(b1), optax.scale(ROUNDING), optax.scale_by_learning_rate(learning_rate))


def by_the_clock(learning_rate):
    return optax.sgd(learning_rate * (1 if time.time() else 2))


@pytest.fixture
def asked(own_store, monkeypatch):
    """``asked(rule, ...)`` makes a plan with the store, and says how often a rule had to be traced for it."""
    monkeypatch.setattr(stores.settings, "opened", {})
    count = [0]

    def plan(rule, shape=(2, 3), **settings):
        class Chosen(Bare):
            def optimizer(self):
                return rule

        e, before = Chosen(**settings), count[0]

        def kept(rule, facts, find):
            def counted():
                count[0] += 1
                return find()

            return kept_answer(e, {"optimizer": (rule.code, dict(rule.fixed))}, facts, counted)

        tree = {"a": np.ones(shape, np.float32), "b": np.ones(3, np.float32)}
        made = plan_for(e, tree, kept=kept)
        (group,) = made.groups
        return count[0] - before, group.elementwise, sorted(group.rule.hyperparameters)

    return plan


def test_a_rule_is_traced_once(asked):
    assert asked(own) == (1, True, ["b1", "learning_rate"])
    assert asked(own) == (0, True, ["b1", "learning_rate"])
    assert asked(optax.lamb) == (1, False, ["b1", "b2", "eps", "eps_root", "learning_rate", "weight_decay"])
    assert asked(optax.lamb)[:2] == (0, False)


def test_whatever_it_depends_on_asks_again(asked, monkeypatch):
    assert asked(own)[0] == 1
    assert asked(own, shape=(3, 3))[0] == 1
    assert asked(own, learning_rate=0.2)[0] == 1
    monkeypatch.setitem(globals(), "ROUNDING", 0.25)
    assert asked(own)[0] == 1
    monkeypatch.setattr(own, "__defaults__", (0.8,))
    assert asked(own)[0] == 1
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert asked(own)[0] == 1


def test_what_content_does_not_decide_is_not_remembered(asked):
    assert asked(by_the_clock)[0] == 1
    assert asked(by_the_clock)[0] == 1


def test_a_damaged_answer_is_asked_for_again(asked, own_store):
    asked(own)
    (file,) = (own_store / "answers").iterdir()
    good = file.read_bytes()
    for bad in (b"", good[:-1], good.replace(b"true", b"null"), b"x" * len(good)):
        file.write_bytes(bad)
        assert asked(own)[0] == 1
        assert file.read_bytes() == good
    file.chmod(0o666)
    with pytest.warns(stores.StoreWarning, match="not this user's alone"):
        assert asked(own)[0] == 1


def test_cold_asks_again_and_verify_compares(asked, own_store, monkeypatch):
    asked(own)
    monkeypatch.setattr(stores.settings, "cold", True)
    assert asked(own)[0] == 1
    monkeypatch.setattr(stores.settings, "cold", False)
    monkeypatch.setattr(stores.settings, "verify", True)
    assert asked(own)[0] == 1
    store = stores.open_store()
    (file,) = (own_store / "answers").iterdir()
    store.keep_answer(file.name, {"fixed": ["b1"], "joined": True, "pulls": False})
    with pytest.raises(stores.CacheMismatch, match="not what it is found to be now"):
        asked(own)
    assert not list((own_store / "answers").iterdir())


def test_answers_go_with_the_rest_of_the_store(asked, own_store):
    asked(own)
    store = stores.open_store()
    assert store.prune(max_days=1) == 0
    assert store.prune(max_days=-1) == 1
    asked(own)
    assert store.clear() > 0
    assert not list(own_store.rglob("answers/*"))
