"""Why a program is compiled, in words: edits of code and constants, in a real file that is loaded again."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import textwrap

import jax
import numpy as np
import pytest
from toys import Compiles, Measured, Watcher, arrays, log_of

from nitro_cli import Nitro

LOSSES = '''
"""Helpers, one module away from the experiment."""
import jax.numpy as jnp

FLOOR = 0.5
NAMES = {"a": 1, "b": 2}


def inner(error):
    # a comment
    return jnp.maximum(abs(error), FLOOR)


def smooth(error, power=2):
    """Two levels below the hook."""
    return inner(error) ** power


def unused(error):
    return error
'''

EXPERIMENT = """
from typing import ClassVar

import numpy as np
import optax
import losses
from losses import smooth
from nitro_cli import ArrayLoader, Experiment, GraphConst

GAIN = 1.0


class Model:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, ps, x):
        return self.factor * (x @ ps["w"])


class Edited(Experiment):
    weight: GraphConst[float] = 1.0
    SCALE: ClassVar[float] = 2.0

    def build_data(self, dist):
        x = np.linspace(-1, 1, 24, dtype=np.float32).reshape(8, 3)
        loader = ArrayLoader(x=x, y=x[:, 0], batch_size=4)
        return {"train": loader, "val": loader}

    def build_model(self, rng):
        return Model(1.0), {"w": np.zeros(3, np.float32)}, {}

    def forward(self, model, ps, st, *, x):
        return GAIN * model(ps, x), st

    def helper(self, error):
        return error

    def loss(self, outputs, *, y):
        return self.weight * smooth(self.helper(outputs - y)).mean() / self.SCALE

    def metrics(self, outputs, *, y):
        return {"error": (abs(outputs - y).sum(), len(y))}

    def optimizer(self):
        return optax.sgd
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    """``project(losses=..., experiment=...)`` writes both files, loads them anew and gives the experiment class."""
    count = itertools.count()
    monkeypatch.syspath_prepend(str(tmp_path))

    def load(losses=LOSSES, experiment=EXPERIMENT, folder=None):
        where = (tmp_path / (folder or f"version-{next(count)}")) if folder else tmp_path
        where.mkdir(exist_ok=True)
        for name, text in (("losses", losses), ("edited", experiment)):
            path = where / f"{name}.py"
            path.write_text(textwrap.dedent(text))
            spec = importlib.util.spec_from_file_location(name, path)
            module = importlib.util.module_from_spec(spec)
            monkeypatch.setitem(sys.modules, name, module)
            exec(compile(path.read_text(), str(path), "exec"), module.__dict__)
        return sys.modules["edited"].Edited

    return load


EDITS = {
    "forward": ("experiment", "GAIN * model(ps, x)", "GAIN * model(ps, x) + 1"),
    "loss": ("experiment", ".mean() / self.SCALE", ".sum() / self.SCALE"),
    "a method that loss calls": ("experiment", "return error", "return -error"),
    "a helper": ("losses", "inner(error) ** power", "inner(error) ** power + 0"),
    "a helper two levels below": ("losses", "jnp.maximum(abs(error), FLOOR)", "jnp.minimum(abs(error), FLOOR)"),
    "a constant of the module": ("experiment", "GAIN = 1.0", "GAIN = 3.0"),
    "a constant of another module": ("losses", "FLOOR = 0.5", "FLOOR = 0.25"),
    "a constant of the class": ("experiment", "[float] = 2.0", "[float] = 4.0"),
    "a default argument": ("losses", "power=2", "power=4"),
    "what the model holds": ("experiment", "Model(1.0)", "Model(2.0)"),
    "the code of the model": ("experiment", "self.factor * (x", "self.factor + (x"),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_compiles_what_it_reaches_and_says_which_it_was(handle, project, snapshot, edit):
    handle(project()()).train()
    where, old, new = EDITS[edit]
    text = LOSSES if where == "losses" else EXPERIMENT
    assert old in text
    with Compiles() as compiles:
        handle(project(**{where: text.replace(old, new)})()).train()
    assert compiles.why == snapshot
    with Compiles() as back:
        handle(project()()).train()
    assert back.misses == 0


HARMLESS = {
    "a comment": ("losses", "# a comment", "# another one\n    # on two lines"),
    "a docstring": ("losses", "Two levels below the hook.", "Something else."),
    "the docstring of the module": ("losses", "Helpers, one module away", "Helpers"),
    "lines above": ("experiment", "import losses", "\n\n\nimport losses"),
    "a function that nothing calls": ("losses", "return error\n", "return error + 1\n"),
    "a constant that nothing reads": ("losses", '{"a": 1', '{"a": 7'),
    "a hook on the host": ("experiment", "abs(outputs - y).sum()", "abs(outputs - y).max()"),
    "build_data": ("experiment", "np.linspace(-1, 1,", "np.linspace(-2, 1,"),
}


@pytest.mark.parametrize("edit", HARMLESS)
def test_an_edit_that_changes_no_program_compiles_nothing(handle, project, edit):
    handle(project()()).train()
    where, old, new = HARMLESS[edit]
    text = LOSSES if where == "losses" else EXPERIMENT
    assert old in text
    with Compiles() as compiles:
        handle(project(**{where: text.replace(old, new)})()).train()
    assert compiles.why == {}


def test_the_directory_in_which_the_code_lies_does_not_matter(handle, project):
    handle(project(folder="here")()).train()
    with Compiles() as compiles:
        handle(project(folder="there")()).train()
    assert compiles.why == {}


def test_a_redefined_hook_is_said_once_at_the_next_entry_and_the_handle_keeps_its_code(handle, monkeypatch, snapshot):
    watcher = Watcher()
    n = handle(Measured(), observer=watcher)
    before = n.predict(arrays(4))
    monkeypatch.setattr(Measured, "forward", lambda self, model, ps, st, *, x: (x.sum(1) + 1, st))
    np.testing.assert_array_equal(n.predict(arrays(4)), before)
    n.validate()
    assert watcher.warnings == [snapshot]
    fresh = handle(Measured())
    np.testing.assert_allclose(fresh.predict(arrays(4)), arrays(4)["x"].sum(1) + 1, rtol=1e-6)


def test_a_redefinition_of_a_helper_is_said_too_and_one_of_a_stranger_is_not(handle, project, monkeypatch):
    E = project()
    watcher = Watcher()
    n = handle(E(), observer=watcher)
    n.validate()
    monkeypatch.setattr(sys.modules["losses"], "unused", lambda error: 0)
    n.validate()
    assert watcher.warnings == []
    monkeypatch.setattr(sys.modules["losses"], "inner", lambda error: error)
    n.validate()
    n.validate()
    (warning,) = watcher.warnings
    assert "`losses.inner`" in warning
    assert "Build a new Nitro" in warning


def test_every_value_that_differs_is_named_up_to_two(handle, empty_cache):
    handle(Measured()).train()
    with Compiles() as compiles:
        handle(Measured(power=4, shift=1.0, batch=2, learning_rate=1e-4)).train()
    assert compiles.why["gradient"] == "`power` 2 -> 4; `shift` 0.0 -> 1.0; and 1 more difference"


def test_the_nearest_program_is_the_one_compared_with(handle, empty_cache):
    for power in (2, 4):
        handle(Measured(power=power, learning_rate=1e-4)).train()
    with Compiles() as compiles:
        handle(Measured(power=4, shift=1.0, learning_rate=1e-4)).train()
    assert compiles.why["gradient"] == "`shift` 0.0 -> 1.0"


def test_jaxs_settings_that_change_programs_are_in_the_key(handle, empty_cache):
    n = handle(Measured())
    n.validate()
    with Compiles() as compiles, jax.default_matmul_precision("highest"):
        handle(Measured()).validate()
    assert compiles.programs == ["evaluation"]
    with Compiles() as silent, jax.log_compiles(False):
        handle(Measured()).validate()
    assert silent.misses == 0


def test_reasons_reach_the_observer_and_the_log(handle, empty_cache, tmp_path):
    watcher = Watcher()
    n = Nitro(Measured(), observer=watcher, run_dir=tmp_path / "run")
    n.train()
    told = watcher.of("compile")
    assert [facts["program"] for facts in told] == ["gradient", "update", "evaluation"]
    for facts in told:
        assert facts["why"] == "first use"
        parts = [facts[f"{phase}_seconds"] for phase in ("trace", "lower", "compile")]
        assert facts["seconds"] == pytest.approx(sum(parts))
    logged = [record for record in log_of(tmp_path / "run") if record["type"] == "compile"]
    assert [record["program"] for record in logged] == ["gradient", "update", "evaluation"]
