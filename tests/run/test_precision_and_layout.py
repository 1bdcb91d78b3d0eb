"""Knobs that change how numbers are held: dtypes, the moving average in evaluation, and the layout of parameters."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import Line, Measured, arrays, parameters, splits

from nitro_cli.errors import ExperimentError, NitroError, ProtectError


class Net(Measured):
    """Two layers with biases, adam, and state that counts calls in float32."""

    learning_rate: float = 0.02
    max_epochs: int = 2

    def optimizer(self):
        return optax.adam

    def build_model(self, rng):
        draw = np.random.default_rng(0).normal
        layers = {"a": {"w": draw(size=(3, 8)), "b": np.zeros(8)}, "c": {"w": draw(size=(8, 1)), "b": np.zeros(1)}}
        ps = jax.tree.map(lambda leaf: np.asarray(leaf, np.float32) * 0.5, layers)
        return None, ps, {"seen": np.float32(0)}

    def forward(self, model, ps, st, *, x):
        hidden = jnp.tanh(x @ ps["a"]["w"] + ps["a"]["b"])
        return (hidden @ ps["c"]["w"] + ps["c"]["b"])[:, 0], {"seen": st["seen"] + x.shape[0]}


def test_computing_in_bfloat16_keeps_parameters_loss_and_state_in_float32(handle):
    seen = {}

    class Watching(Net):
        def forward(self, model, ps, st, *, x):
            seen.update(ps=ps["a"]["w"].dtype, x=x.dtype, st=st["seen"].dtype)
            outputs, st = super().forward(model, ps, st, x=x)
            seen["computed"] = outputs.dtype
            return outputs, st

        def loss(self, outputs, *, y):
            seen.update(outputs=outputs.dtype, y=y.dtype)
            return ((outputs - y) ** 2).mean()

    n = handle(Watching(compute_dtype="bfloat16"))
    n.train()
    assert {k: str(v) for k, v in seen.items()} == {
        "ps": "bfloat16", "x": "bfloat16", "st": "float32", "computed": "bfloat16", "outputs": "float32", "y": "float32"
    }  # fmt: skip
    assert {str(a.dtype) for a in parameters(n).values()} == {"float32"}
    assert n.snapshot()["st"]["seen"] == 32.0
    plain = handle(Watching())
    plain.train()
    for path, value in parameters(plain).items():
        np.testing.assert_allclose(parameters(n)[path], value, rtol=0, atol=0.03)
        assert not np.array_equal(parameters(n)[path], value) or not value.any()


def test_parameters_stored_in_bfloat16_stay_so_through_a_resume(handle):
    n = handle(Net(param_dtype="bfloat16"))
    n.train()
    assert {str(a.dtype) for a in parameters(n).values()} == {"bfloat16"}
    more = handle(Net(param_dtype="bfloat16", max_epochs=3), resume=n.run)
    assert more.train().epochs == 3
    assert {str(a.dtype) for a in parameters(more).values()} == {"bfloat16"}


def test_a_compute_dtype_is_another_gradient_and_evaluation_program_and_no_other_update(handle, empty_cache):
    from nitro_cli.programs.cache import cache_entries

    handle(Net()).train()
    handle(Net(compute_dtype="bfloat16")).train()
    assert [(e.program, e.why) for e in cache_entries()[3:]] == [
        ("gradient", "compute_dtype: none -> bfloat16"),
        ("evaluation", "compute_dtype: none -> bfloat16"),
    ]


def test_evaluation_with_the_moving_average_uses_it_and_leaves_the_weights_alone(handle):
    n = handle(Net(ema_decay=0.5, evaluate_with_ema=True))
    n.train()
    average, weights = n.snapshot()["ema"], parameters(n)
    batch = arrays(4)

    def by_hand(ps):
        hidden = np.tanh(batch["x"] @ ps["a.w"] + ps["a.b"])
        return (hidden @ ps["c.w"] + ps["c.b"])[:, 0]

    np.testing.assert_allclose(n.predict({"x": batch["x"]}), by_hand(average), rtol=1e-5)
    assert not np.allclose(by_hand(average), by_hand(weights), rtol=1e-3)
    loaded = handle(Net(ema_decay=0.5, evaluate_with_ema=True), weights=f"{n.run.path}:latest")
    assert loaded.validate() == n.validate()
    raw = handle(Net(ema_decay=0.5), weights=f"{n.run.path}:latest")
    np.testing.assert_allclose(raw.predict({"x": batch["x"]}), by_hand(weights), rtol=1e-5)


def test_a_moving_average_that_is_not_there_cannot_evaluate(handle):
    with pytest.raises(NitroError, match="ema_decay is 0"):
        handle(Net(evaluate_with_ema=True))
    first = handle(Net())
    first.train()
    with pytest.raises(ProtectError, match="no moving average"):
        handle(Net(ema_decay=0.5, evaluate_with_ema=True), weights=f"{first.run.path}:latest")


@pytest.mark.parametrize("layout", ["flat", "tree"])
def test_layouts_train_alike_and_weights_load_across_them(layout, handle):
    mixed, other = handle(Net()), handle(Net(parameter_layout=layout))
    mixed.train()
    other.train()
    for path, value in parameters(mixed).items():
        np.testing.assert_allclose(parameters(other)[path], value, rtol=2e-6, atol=1e-7)
    loaded = handle(Net(parameter_layout=layout), weights=f"{mixed.run.path}:latest")
    jax.tree.map(np.testing.assert_array_equal, loaded.parameters, mixed.parameters)
    assert loaded.validate() == pytest.approx(mixed.validate(), rel=1e-6)


def test_a_resume_under_another_layout_is_refused_leaf_by_leaf(handle, snapshot):
    first = handle(Net())
    first.train()
    with pytest.raises(ProtectError) as caught:
        handle(Net(parameter_layout="tree", max_epochs=3), resume=first.run)
    assert str(caught.value).replace(str(first.run.path), "RUN") == snapshot


def test_large_leaves_stay_alone(handle):
    class Wide(Line):
        def build_model(self, rng):
            return None, {"w": np.zeros(3, np.float32), "b": np.zeros(1, np.float32), "big": np.zeros((200, 100))}, {}

        def forward(self, model, ps, st, *, x):
            return x @ ps["w"] + ps["b"] + ps["big"].sum(), st

        def optimizer(self):
            return functools.partial(optax.sgd, momentum=0.9)

    buffers = handle(Wide(), data=splits()).setup.recipe.plan.layout.buffers
    assert [(b.name, b.spec.shape) for b in buffers] == [("default:float32", (4,)), ("big", (200, 100))]


def test_an_unknown_layout_of_a_plain_class_is_refused(handle):
    with pytest.raises((NitroError, ExperimentError)):
        handle(Net(), parameter_layout="pile")
