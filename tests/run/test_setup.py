"""Set-up: what it fixes, and what it refuses before anything is compiled."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import FEATURES, Compiles, Line, Measured, arrays, splits

from nitro_cli import ArrayLoader, Device, Experiment, GraphConst, Nitro, cache_stats
from nitro_cli.errors import ExperimentError, NitroError
from nitro_cli.experiment.presets import resolve


def refusal(e, **options) -> str:
    """The message of the error that building a handle on ``e`` raises, without the excerpt of the source."""
    before = cache_stats().misses
    with pytest.raises(NitroError) as caught:
        Nitro(e, **options)
    assert cache_stats().misses == before
    lines = str(caught.value).splitlines()
    kept = "\n".join(line for line in lines if not line.startswith(" ") or line.startswith("   ="))
    return re.sub(r"\d+ in all", "many in all", kept)  # knobs are added in time


def with_hook(**hooks):
    """A ``Measured`` with other hooks."""
    return type("Other", (Measured,), {**hooks, "__module__": __name__})()


BUILD_DATA = {
    "none": lambda self, dist: None,
    "a loader": lambda self, dist: splits()["train"],
    "no split": lambda self, dist: {},
    "arrays": lambda self, dist: {"train": arrays()},
    "a pair": lambda self, dist: {"train": (arrays()["x"], arrays()["y"])},
    "an iterator": lambda self, dist: {"train": iter(splits()["train"])},
    "no length": lambda self, dist: {"train": (batch for batch in splits()["train"])},
    "empty": lambda self, dist: {"train": []},
    "tuples": lambda self, dist: {"train": [(arrays()["x"], arrays()["y"])]},
    "lists": lambda self, dist: {"train": [{"x": [[1.0, 2.0, 3.0]], "y": [1.0]}]},
    "ambiguous": lambda self, dist: {"train": [{"x": np.ones((4, 3), np.float32), "y": np.ones(5, np.float32)}]},
    "scalars": lambda self, dist: {"train": [{"x": np.float32(1), "y": np.float32(1)}]},
    "a reserved field": lambda self, dist: {"train": ArrayLoader(**arrays(), rng=np.ones(16), batch_size=4)},
    "a missing field": lambda self, dist: {"train": ArrayLoader(y=arrays()["y"], batch_size=4)},
    "missing in one split": lambda self, dist: {**splits(), "val": ArrayLoader(y=arrays()["y"], batch_size=4)},
}


@pytest.mark.parametrize("kind", BUILD_DATA)
def test_what_build_data_may_not_return(kind, snapshot):
    assert refusal(with_hook(build_data=BUILD_DATA[kind])) == snapshot


W = np.zeros(FEATURES, np.float32)
BUILD_MODEL = {
    "none": lambda self, rng: None,
    "a pair": lambda self, rng: (None, {"w": W}),
    "a text in the state": lambda self, rng: (None, {"w": W}, {"kind": "zeros"}),
    "no parameters": lambda self, rng: (None, {}, {}),
    "whole numbers": lambda self, rng: (None, {"w": np.zeros(3, np.int32)}, {}),
}


@pytest.mark.parametrize("kind", BUILD_MODEL)
def test_what_build_model_may_not_return(kind, snapshot):
    assert refusal(with_hook(build_model=BUILD_MODEL[kind])) == snapshot


OPTIMIZER = {
    "a finished transformation": lambda self: optax.adam(1e-3),
    "a number": lambda self: 0.1,
    "a rate of its own": lambda self: functools.partial(optax.adam, learning_rate=0.1),
    "no rate": lambda self: optax.clip,
    "a partial by position": lambda self: functools.partial(optax.adam, 0.1),
}


@pytest.mark.parametrize("kind", OPTIMIZER)
def test_what_optimizer_may_not_return(kind, snapshot):
    assert refusal(with_hook(optimizer=OPTIMIZER[kind])) == snapshot


OTHERS = {
    "derive: no dict": {"derive": lambda self, data: 3},
    "derive: no field": {"derive": lambda self, data: {"scal": 2.0}},
    "derive: a value that does not fit": {"derive": lambda self, data: {"scale": "large"}},
    "metrics_residency": {"metrics_residency": lambda self, hook: "gpu"},
    "checkpointer": {"checkpointer": lambda self: "best"},
    "loss: misspelt": {"loss": lambda self, outputs, *, yy: outputs.mean()},
    "forward: by position": {"forward": lambda self, model, ps, st, x: (x, st)},
    "forward: too few": {"forward": lambda self, model, ps, *, x: (x, {})},
    "metrics: rng": {"metrics": lambda self, outputs, *, y, rng: {}},
    "loss: train": {"loss": lambda self, outputs, *, y, train: outputs.mean()},
    "train_metrics: rng on the host": {
        "train_metrics": lambda self, outputs, *, y, rng: {},
        "metrics_residency": lambda self, hook: "host",
    },
}


@pytest.mark.parametrize("kind", OTHERS)
def test_what_other_hooks_may_not_be_or_return(kind, snapshot):
    assert refusal(with_hook(**OTHERS[kind])) == snapshot


def test_missing_hooks_are_listed_together():
    class Half(Experiment):
        def build_data(self, dist):
            return splits()

    with pytest.raises(ExperimentError) as caught:
        Nitro(Half())
    assert [problem.facts["hook"] for problem in caught.value.problems] == ["build_model", "forward", "loss"]


def test_batches_must_divide_into_steps(snapshot):
    assert refusal(Measured(accum=3)) == snapshot


def test_an_unknown_keyword_is_named_with_its_neighbour(snapshot):
    assert refusal(Measured(), max_epoch=3) == snapshot


def test_weights_and_resume_take_runs(snapshot, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert refusal(Measured(), weights=3) == snapshot(name="weights")
    assert refusal(Measured(), resume=3.5) == snapshot(name="resume")
    assert refusal(Measured(), weights="latest:best") == snapshot(name="no run")
    assert refusal(Measured(), resume=True) == snapshot(name="nothing to resume")


def test_runs_are_found_by_name_from_python(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    first = Nitro(Measured(max_epochs=2))
    first.train()
    expected = first.validate()
    assert Nitro(Measured(), weights="latest:latest").validate() == expected
    assert Nitro(Measured(), weights=f"{first.run.path}:2").validate() == expected
    more = Nitro(Measured(max_epochs=3), resume=True)
    assert more.run.path == first.run.path
    assert more.train().epochs == 3


class Identity:
    """Compares by identity: no two constructions are equal."""

    def __init__(self):
        self.sizes = [1, 2]


def test_a_graphconst_that_compares_by_identity_is_refused_naming_the_field():
    class Holding(Line):
        config: GraphConst[Identity | None] = None

    message = refusal(Holding(config=Identity()))
    assert "config" in message


def test_containers_as_graphconst_are_taken_by_content(handle):
    class Lists(Measured):
        sizes: GraphConst[list[int]] = [1, 2]  # noqa: RUF012
        table: GraphConst[np.ndarray] = np.ones(2)

        def loss(self, outputs, *, y):
            return ((outputs - y) ** 2).mean() * sum(self.sizes) + self.table.sum()

    handle(Lists()).train()
    with Compiles() as equal:
        handle(Lists(sizes=[1, 2], table=np.ones(2))).train()
    assert equal.misses == 0
    with Compiles() as other:
        handle(Lists(sizes=[2, 2])).train()
        handle(Lists(table=np.zeros(2))).train()
    assert other.programs == ["gradient", "gradient"]


def test_keywords_are_fields_and_the_experiment_given_stays_as_it_is(handle):
    e = Measured()
    n = handle(e, max_epochs=7, scale=3.0)
    assert (e.max_epochs, e.scale) == (1, 1.0)
    assert (n.setup.knobs.max_epochs, n.device_value("scale")) == (7, 3.0)
    rows = {row.name: row for row in n.report.fields}
    assert (rows["max_epochs"].kind, rows["max_epochs"].shadowed) == ("python", (("before", 1),))


def test_derived_values_reach_the_programs_and_win_over_what_was_given(handle):
    class Derived(Measured):
        mean: Device[float] = 0.0

        def derive(self, data):
            return {"mean": float(np.mean([batch["y"].mean() for batch in data["train"]])), "note": "derived"}

        def forward(self, model, ps, st, *, x):
            return x @ ps["w"] + self.mean, st

    n = handle(Derived(mean=9.0))
    expected = float(arrays()["y"].mean())
    assert n.device_value("mean") == pytest.approx(expected, rel=1e-5)
    assert n.setup.experiment.note == "derived"
    rows = {row.name: row for row in n.report.fields}
    assert rows["mean"].kind == "derived"
    assert rows["mean"].shadowed == (("default", 9.0),)
    np.testing.assert_allclose(n.predict(arrays(4)), np.full(4, expected), rtol=1e-5)


def test_build_data_and_derive_see_the_whole_experiment_and_run_once(handle):
    calls = []

    class Counting(Measured):
        rows: int = 12

        def build_data(self, dist):
            calls.append(("build_data", self.rows, dist))
            return splits(rows=self.rows)

        def derive(self, data):
            calls.append(("derive", self.rows, sorted(data)))
            return {}

    n = handle(Counting())
    n.train()
    n.validate()
    assert calls == [("build_data", 12, None), ("derive", 12, ["test", "train", "val"])]


def test_data_given_replaces_build_data(handle):
    def build_data(self, dist):
        raise AssertionError("not called")

    n = handle(with_hook(build_data=build_data), data={"val": splits()["val"]})
    assert list(n.splits) == ["val"]


def test_parameters_of_any_kind_of_number_become_floats_on_the_device(handle):
    def build_model(self, rng):
        return None, {"w": [0.0, jnp.ones(()), np.float64(2)], "b": np.zeros(FEATURES)}, {}

    def forward(self, model, ps, st, *, x):
        return x @ ps["b"] + sum(ps["w"]), st

    n = handle(with_hook(build_model=build_model, forward=forward))
    np.testing.assert_array_equal(n.predict(arrays(2)), np.full(2, 3, np.float32))
    n.train()


def test_what_build_model_returned_is_not_taken_away_from_its_owner(handle):
    own = {"b": jnp.float32(0), "w": jnp.zeros(FEATURES)}

    n = handle(with_hook(build_model=lambda self, rng: (None, own, {})))
    n.train()
    np.testing.assert_array_equal(own["w"], np.zeros(FEATURES))


def test_build_model_gets_the_key_of_the_seed(handle):
    keys = []

    def build_model(self, rng):
        keys.append(np.asarray(jax.random.key_data(rng)))
        return None, {"b": np.float32(0), "w": W}, {}

    E = type(with_hook(build_model=build_model))
    for seed in (3, 3, 4, 2**40 + 1):
        handle(E(seed=seed))
    for seed, key in zip((3, 3, 4, 2**40 + 1), keys, strict=True):
        expected = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32)
        np.testing.assert_array_equal(key, expected)
    np.testing.assert_array_equal(keys[0], jax.random.key_data(jax.random.key(3)))


def test_a_preset_names_itself_in_the_handle(tmp_path):
    class Preset(Measured):
        @classmethod
        def presets(cls):
            return {"quick": {"max_epochs": 2, "scale": 0.5}}

    n = Nitro.from_preset(Preset, "quick", note="mine", run_dir=tmp_path / "run")
    assert (n.setup.preset, n.setup.knobs.max_epochs, n.device_value("scale")) == ("quick", 2, 0.5)
    kinds = {row.name: row.kind for row in n.report.fields}
    assert (kinds["max_epochs"], kinds["note"], kinds["power"]) == ("preset", "python", "default")
    assert resolve(Preset, "quick").experiment.max_epochs == 2
    with pytest.raises(NitroError, match="builds its own data"):
        Nitro.from_preset(Preset, "quick", data=splits())


WRONG_SIGNATURES = {
    "build_data": lambda self: splits(),
    "build_model": lambda self: None,
    "derive": lambda self: {},
    "finalize_metrics": lambda self, metrics: metrics,
    "metrics_residency": lambda self: "host",
    "param_group": lambda self: "default",
    "group_learning_rate": lambda self: 0.1,
    "decay_anchor": lambda self: "zero",
    "no_decay": lambda self, path: True,
    "schedules": lambda self, total: {},
    "checkpointer": lambda self, metric: None,
}


def test_hooks_that_cannot_be_called_are_all_named_at_once():
    cls = type("Wrong", (Line,), {**WRONG_SIGNATURES, "__module__": "elsewhere"})
    message = refusal(cls())
    for name in WRONG_SIGNATURES:
        assert f"Wrong.{name} takes (" in message
        assert f"write: def {name}(self" in message


def test_a_rate_that_float32_cannot_hold_is_refused():
    assert "too large for float32" in refusal(Measured(learning_rate=1e300))


def test_derive_may_set_a_knob(handle):
    class Derived(Measured):
        def derive(self, data):
            return {"max_epochs": 2}

    n = handle(Derived(max_epochs=5))
    assert n.setup.knobs.max_epochs == 2
    assert n.train().epochs == 2


def test_whole_numbers_that_would_wrap_are_refused(handle):
    data = {"train": [{"x": np.ones((4, FEATURES), np.float32), "y": np.full(4, 2**40)}]}
    with pytest.raises(ExperimentError, match="int32 cannot hold"):
        handle(Line(), data=data).train()


def test_a_scheduled_device_field_cannot_be_set_and_is_evaluated_as_it_was_last(handle):
    class Scheduled(Measured):
        def schedules(self):
            return {"scale": lambda total: optax.linear_schedule(2.0, 1.0, total)}

    n = handle(Scheduled(max_epochs=2))
    with pytest.raises(NitroError, match="follows a schedule"):
        n.set_device(scale=3.0)
    n.train()
    assert n.validate() == {k: v for k, v in n.history[-1].items() if k.startswith("val_")}
    loaded = handle(Scheduled(max_epochs=2), weights=f"{n.run.path}:latest")
    assert loaded.validate() == n.validate()
    batch = next(iter(n.splits["val"]))
    ps = n.parameters
    np.testing.assert_allclose(n.predict(batch), 1.125 * (batch["x"] @ ps["w"] + ps["b"]), rtol=1e-6)
