"""What a ``train_step`` may return, and what its set-up may give."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from manual_toys import OwnLine, TinyGAN, placeless
from toys import Line, splits

from nitro_cli import Experiment, GraphConst, backward, optimizer_state
from nitro_cli.errors import ExperimentError, NitroError
from nitro_cli.experiment.discovery import find_experiment, list_experiments


def sound(ps, st, opt_state):
    return {"loss": jnp.float32(1), "ps": ps, "st": st, "opt_state": opt_state}


RETURNS = {
    "nothing": lambda r: None,
    "a tuple": lambda r: tuple(r.values()),
    "without st": lambda r: {k: v for k, v in r.items() if k != "st"},
    "a misspelt key": lambda r: {**{k: v for k, v in r.items() if k != "opt_state"}, "opt_states": r["opt_state"]},
    "metrics": lambda r: {**r, "metrics": {}},
    "a loss that is a vector": lambda r: {**r, "loss": jnp.ones(4)},
    "a whole loss": lambda r: {**r, "loss": jnp.int32(1)},
    "a loss and more": lambda r: {**r, "loss": (jnp.float32(1), 2)},
    "ps without a part": lambda r: {**r, "ps": {"gen": r["ps"]["gen"]}},
    "ps of another shape": lambda r: {**r, "ps": _with(r["ps"], lambda w: w[:1])},
    "ps of another dtype": lambda r: {**r, "ps": _with(r["ps"], lambda w: w.astype(jnp.bfloat16))},
    "ps in other containers": lambda r: {**r, "ps": _Wrapped(r["ps"])},
    "a new state": lambda r: {**r, "st": {"seen": jnp.float32(1)}},
    "optimizers swapped": lambda r: {**r, "opt_state": {"gen": r["opt_state"]["disc"], "disc": r["opt_state"]["gen"]}},
    "optimizers swapped with their rules": lambda r: {
        **r,
        "opt_state": {
            **r["opt_state"],
            "gen": r["opt_state"]["gen"].__class__(_other(), *_parts(r["opt_state"]["gen"])),
        },
    },
    "one optimizer": lambda r: {**r, "opt_state": r["opt_state"]["gen"]},
    "a text in ps": lambda r: {**r, "ps": {**r["ps"], "gen": "gen"}},
    "stats with loss": lambda r: {**r, "stats": {"loss": 1.0}},
    "stats that are arrays": lambda r: {**r, "stats": {"norms": jnp.ones(3)}},
    "stats that are none": lambda r: {**r, "stats": None},
}


class _Wrapped(dict):
    """Another kind of dict, which jax takes for one leaf."""


def _other():
    return optimizer_state(optax.sgd, TinyGAN().build_model(None)[1]["gen"], learning_rate=0.1).static


def _parts(opt):
    return {"learning_rate": opt.hyperparameters["learning_rate"]}, opt.count, opt.state


def _with(ps, change):
    inner = ps["gen"]["in"]
    return {**ps, "gen": {**ps["gen"], "in": {**inner, "w": change(inner["w"])}}}


@pytest.mark.parametrize("kind", RETURNS)
def test_what_a_step_may_not_return(handle, kind, snapshot):
    class Wrong(TinyGAN):
        def train_step(self, model, ps, opt_state, st, *, x):
            return RETURNS[kind](sound(ps, st, opt_state))

    with pytest.raises(ExperimentError) as caught:
        handle(Wrong()).train()
    assert placeless(caught.value) == snapshot


def test_the_capture_trap_is_an_error_of_the_first_step(handle):
    class Trapped(TinyGAN):
        def train_step(self, model, ps, opt_state, st, *, x):
            _, grads = backward(lambda _: (x @ ps["disc"]["in"]["w"]).mean(), ps["disc"])
            raise AssertionError(grads)

    with pytest.raises(ExperimentError, match="it captures `ps`"):
        handle(Trapped()).train()


SETUPS = {
    "none": lambda ps: None,
    "a transformation": lambda ps: {"gen": optax.adam(1e-3)},
    "a text": lambda ps: {"gen": "adam"},
}


@pytest.mark.parametrize("kind", SETUPS)
def test_what_setup_optimizers_may_not_return(handle, kind, snapshot):
    class Wrong(TinyGAN):
        def setup_optimizers(self, model, ps, st, mesh):
            return SETUPS[kind](ps)

    with pytest.raises(ExperimentError) as caught:
        handle(Wrong())
    assert placeless(caught.value) == snapshot


def test_optimizers_may_be_any_tree_of_arrays(handle):
    class Plain(OwnLine):
        def setup_optimizers(self, model, ps, st, mesh):
            return {"rate": 0.05, "plain": optax.adam(1e-3).init(ps), "steps": np.int64(0)}

        def train_step(self, model, ps, opt_state, st, *, x, y):
            loss, grads = backward(lambda p: self.loss(x @ p["w"] + p["b"], y=y), ps)
            ps = {name: ps[name] - opt_state["rate"] * grads[name] for name in ps}
            return {
                "loss": loss,
                "ps": ps,
                "st": st,
                "opt_state": {**opt_state, "steps": opt_state["steps"] + 1},
            }

    n = handle(Plain())
    n.train()
    state = n.snapshot()["opt_state"]
    assert (state["steps"], state["rate"]) == (4, np.float32(0.05))


def test_what_is_missing_is_listed_with_near_misses(handle, snapshot):
    class Half(Line):
        def train_step(self, model, ps, opt_state, st, *, x):
            return {}

    with pytest.raises(ExperimentError) as caught:
        handle(Half())
    assert placeless(caught.value) == snapshot


def test_a_misspelt_hook_is_refused_when_the_class_is_defined(snapshot):
    with pytest.raises(ExperimentError) as caught:

        class Misspelt(Line):
            def training_step(self, model, ps, opt_state, st):
                return {}

    assert placeless(caught.value) == snapshot


DECISIONS = {"no truth value": (OwnLine, lambda self: 1), "nothing to own": (Line, lambda self: True)}


@pytest.mark.parametrize("kind", DECISIONS)
def test_what_manual_training_may_not_say(handle, kind, snapshot):
    base, decide = DECISIONS[kind]
    Deciding = type("Deciding", (base,), {"__module__": __name__, "manual_training": decide})
    with pytest.raises(ExperimentError) as caught:
        handle(Deciding())
    assert placeless(caught.value) == snapshot


FIELDS = {
    "a field no batch has": "z",
    "a near miss": "xx",
    "by position": "by position",
    "a Host field": "host",
}


@pytest.mark.parametrize("kind", FIELDS)
def test_what_a_step_may_not_take(handle, kind, snapshot):
    class TakesZ(OwnLine):
        def train_step(self, model, ps, opt_state, st, *, z):
            return sound(ps, st, opt_state)

    class TakesY(OwnLine):
        def train_step(self, model, ps, opt_state, st, *, x, Y=None):
            return sound(ps, st, opt_state)

    class ByPosition(OwnLine):
        def train_step(self, model, ps, opt_state, st, x):
            return sound(ps, st, opt_state)

    class ReadsHost(OwnLine):
        def train_step(self, model, ps, opt_state, st, *, x):
            return {**sound(ps, st, opt_state), "loss": x.mean() * self.learning_rate}

    cls = dict(zip(FIELDS, (TakesZ, TakesY, ByPosition, ReadsHost), strict=True))[kind]
    with pytest.raises(NitroError) as caught:
        handle(cls()).train()
    assert placeless(caught.value) == snapshot


def test_graph_constants_that_the_step_reads_are_in_its_key(handle):
    class Reads(OwnLine):
        gain: GraphConst[float] = 1.0
        other: GraphConst[float] = 1.0

        def train_step(self, model, ps, opt_state, st, *, x):
            return {**sound(ps, st, opt_state), "loss": x.mean() * self.gain}

    n = handle(Reads(), data={"train": splits()["train"]})
    n.train()
    program = next(iter(n.programs._held.values()))
    assert program.built.reads == {"gain"}


SOURCE = '''
class Manual:
    """Without nitro's base."""
    def build_data(self, dist): ...
    def build_model(self, rng): ...
    def setup_optimizers(self, model, ps, st, mesh): ...
    def train_step(self, model, ps, opt_state, st): ...
'''


def test_a_plain_class_with_a_step_is_an_experiment(tmp_path):
    (tmp_path / "experiments").mkdir()
    (tmp_path / "experiments" / "own_step.py").write_text(SOURCE)
    assert [listing.doc for listing in list_experiments(tmp_path)] == ["Without nitro's base."]
    assert find_experiment("own_step", tmp_path).cls.__name__ == "Manual"
    assert not issubclass(find_experiment("own_step", tmp_path).cls, Experiment)
