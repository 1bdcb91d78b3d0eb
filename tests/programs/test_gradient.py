"""The gradient that a step is made from, read off one step of gradient descent at rate 1."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import FEATURES, Measured, arrays, differs, parameters, splits

from nitro_cli import ArrayLoader, Device, GraphConst

HIDDEN = 5


def start():
    rng = np.random.default_rng(4)
    return {
        "in": {"w": rng.normal(size=(FEATURES, HIDDEN)).astype(np.float32), "b": np.zeros(HIDDEN, np.float32)},
        "out": [rng.normal(size=HIDDEN).astype(np.float32), np.float32(0.1)],
    }


class Tree(Measured):
    """Two layers, a running mean in the state, and a Device and a GraphConst field in the loss."""

    learning_rate: float = 1.0
    gain: Device[float] = 0.7
    shape: GraphConst[str] = "square"

    def build_model(self, rng):
        return jnp.tanh, start(), {"mean": np.zeros(FEATURES, np.float32)}

    def forward(self, model, ps, st, *, x, train):
        hidden = model((x - st["mean"]) @ ps["in"]["w"] + ps["in"]["b"])
        mean = 0.5 * st["mean"] + 0.5 * x.mean(0)
        return {"y": hidden @ ps["out"][0] + ps["out"][1]}, {"mean": mean if train else st["mean"]}

    def loss(self, outputs, *, y):
        error = self.gain * outputs["y"] - y
        return (error**2).mean() if self.shape == "square" else jnp.abs(error).mean()

    def metrics(self, outputs, *, y):
        return {"error": (np.abs(outputs["y"] - y).sum(), len(y))}


def by_hand(ps, st, batch, gain=0.7):
    """Gradient of the loss by jax alone; the mean of the micro-batches that follow each other moves with the state."""

    def loss(ps):
        hidden = jnp.tanh((batch["x"] - st) @ ps["in"]["w"] + ps["in"]["b"])
        return ((gain * (hidden @ ps["out"][0] + ps["out"][1]) - batch["y"]) ** 2).mean()

    return jax.grad(loss)(ps)


def step_of(n):
    before = start()
    n.train()
    return jax.tree.map(lambda b, a: b - a, before, n.parameters)


def close(found, expected):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, expected)


def test_one_step_is_the_gradient_of_the_loss_in_every_leaf(handle):
    batch = ArrayLoader(arrays(), batch_size=4)[0]
    n = handle(Tree(), data={"train": [batch]})
    close(step_of(n), by_hand(start(), np.zeros(FEATURES, np.float32), batch))
    np.testing.assert_allclose(n.snapshot()["st"]["mean"], 0.5 * batch["x"].mean(0), rtol=1e-6)


def test_micro_batches_are_averaged_and_the_state_goes_from_one_to_the_next(handle):
    loader = ArrayLoader(arrays(), batch_size=4)
    n = handle(Tree(accum=4), data={"train": loader})
    mean, total = np.zeros(FEATURES, np.float32), None
    for index in range(4):
        part = by_hand(start(), mean, loader[index])
        total = part if total is None else jax.tree.map(jnp.add, total, part)
        mean = 0.5 * mean + 0.5 * loader[index]["x"].mean(0)
    found = step_of(n)
    close(found, jax.tree.map(lambda g: g / 4, total))
    np.testing.assert_allclose(n.snapshot()["st"]["mean"], mean, rtol=1e-5)


@pytest.mark.parametrize("accum", [2, 4])
def test_the_same_micro_batch_again_and_again_is_one_batch(handle, accum):
    batch = ArrayLoader(arrays(), batch_size=4)[0]

    class Still(Tree):
        def forward(self, model, ps, st, *, x, train):
            outputs, _ = super().forward(model, ps, st, x=x, train=train)
            return outputs, st

    once = handle(Still(), data={"train": [batch]})
    repeated = handle(Still(accum=accum), data={"train": [batch] * accum})
    close(step_of(repeated), step_of(once))


def test_a_device_value_is_in_the_gradient_and_another_one_changes_it(handle):
    batch = ArrayLoader(arrays(), batch_size=4)[0]
    n = handle(Tree(gain=-1.5), data={"train": [batch]})
    close(step_of(n), by_hand(start(), np.zeros(FEATURES, np.float32), batch, gain=-1.5))


def test_metrics_and_state_carry_no_gradient(handle):
    class Watching(Tree):
        def train_metrics(self, outputs, *, y):
            return {"large": (outputs["y"] ** 4).sum()}

    one, other = handle(Tree(max_epochs=2)), handle(Watching(max_epochs=2))
    one.train()
    other.train()
    assert not differs(parameters(one), parameters(other))


def test_parameters_that_the_loss_does_not_reach_stay_where_they_are(handle):
    class Idle(Measured):
        def build_model(self, rng):
            return None, {"b": np.float32(0), "w": np.zeros(FEATURES, np.float32), "idle": np.ones(2, np.float32)}, {}

    n = handle(Idle(max_epochs=2))
    n.train()
    np.testing.assert_array_equal(parameters(n)["idle"], np.ones(2))


def test_fields_of_a_batch_that_no_traced_hook_takes_do_not_reach_the_program(handle):
    """A field that cannot live on a device would be refused if it travelled."""
    texts = np.array([str(i) for i in range(16)])
    n = handle(Measured(), data={**splits(), "train": ArrayLoader({**arrays(), "id": texts}, batch_size=4)})
    n.train()
    assert n.state.step == 4
