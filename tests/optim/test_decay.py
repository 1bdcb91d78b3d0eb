"""Decoupled decay: last, scaled by the rate, towards zero or an anchor, and nowhere for excluded leaves."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.hooks import default_no_decay
from nitro_cli.optim import update
from tests.optim.plans import Bare, TwoGroups, assert_close, gradients, optax_run, params, plan_for, run
from tests.toys import Line, Measured, parameters

RATE, DECAY = 0.05, 0.2


class Decaying(TwoGroups):
    learning_rate: float = RATE
    weight_decay: float = DECAY

    def optimizer(self):
        return optax.adam


def test_decay_equals_adamw_with_the_same_mask():
    tree = params()
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    assert_close(
        run(plan_for(Decaying(), tree), tree), optax_run(optax.adamw(RATE, weight_decay=DECAY, mask=mask), tree)
    )


def test_the_decay_of_a_group_is_scaled_by_the_rate_of_that_group():
    class Slower(Decaying):
        def group_learning_rate(self, group):
            return self.learning_rate / 10 if group == "encoder" else None

        def group_weight_decay(self, group):
            return 0.0 if group == "default" else 0.3

    tree = params()
    labels = {"encoder": jax.tree.map(lambda _: "slow", tree["encoder"]), "head": {"kernel": "fast", "bias": "fast"}}
    mask = functools.partial(jax.tree.map, lambda leaf: leaf.ndim > 1)
    reference = optax.multi_transform(
        {"slow": optax.adamw(RATE / 10, weight_decay=0.3, mask=mask), "fast": optax.adam(RATE)}, labels
    )
    plan = plan_for(Slower(), tree)
    assert plan.group("encoder").ratio == pytest.approx(0.1)
    assert_close(run(plan, tree), optax_run(reference, tree))


def test_extending_the_default_exclusion():
    class Extended(Decaying):
        def no_decay(self, path, leaf):
            return default_no_decay(path, leaf) or "head" in path

    plan = plan_for(Extended(), params())
    excluded = [path for path, no in zip(plan.layout.leaves.paths, plan.no_decay, strict=True) if no]
    assert excluded == ["encoder.a.bias", "encoder.b.bias", "head.bias", "head.kernel"]


def anchored_run(e, tree, first, steps):
    """With zero gradients, so that decay alone moves the weights."""
    plan = plan_for(e, tree)
    buffers = plan.layout.pack(jax.tree.leaves(tree))
    anchors = [plan.layout.pack(jax.tree.leaves(first))[i] for i in update.anchored_buffers(plan)]
    zero = [np.zeros_like(b) for b in buffers]
    state = update.initial_state(plan, plan.vector(), buffers, anchors)
    for _ in range(steps):
        buffers, state = update.step(plan, buffers, zero, state, plan.vector(), anchors)
    return plan, plan.layout.tree([np.asarray(b) for b in buffers])


def test_l2_sp_moves_by_the_closed_form_and_excluded_leaves_do_not_move():
    class Anchored(Bare):
        learning_rate: float = RATE
        weight_decay: float = DECAY

        def optimizer(self):
            return optax.sgd

        def decay_anchor(self, group):
            return "w0"

    tree, first, steps = params(0), params(7), 12
    _, moved = anchored_run(Anchored(), tree, first, steps)
    left = (1 - RATE * DECAY) ** steps

    def check(now, before, anchor):
        expected = anchor + (before - anchor) * left if before.ndim > 1 else before
        np.testing.assert_allclose(now, expected, rtol=2e-6, atol=2e-7)

    jax.tree.map(check, moved, tree, first)


def test_anchors_enter_the_programs_of_a_run(handle):
    class Anchored(Line):
        learning_rate: float = 0.1
        weight_decay: float = 0.5
        anchor: str = "w0"

        def optimizer(self):
            return optax.sgd

        def no_decay(self, path, leaf):
            return path == "b"

        def decay_anchor(self, group):
            return self.anchor if self.anchor == "w0" else {"w": np.full(3, 4.0), "b": np.float32(0)}

        def build_model(self, rng):
            return None, {"b": np.float32(0), "w": np.ones(3, np.float32)}, {}

        def loss(self, outputs, *, y):
            return outputs.sum() * 0.0

    n = handle(Anchored())
    n.train()
    np.testing.assert_array_equal(parameters(n)["w"], 1.0)
    n = handle(Anchored(anchor="tree"))
    n.train()
    np.testing.assert_allclose(parameters(n)["w"], 4 - 3 * (1 - 0.1 * 0.5) ** 4, rtol=1e-6)
    assert parameters(n)["b"] == 0


@pytest.mark.parametrize(
    "anchor",
    [
        {"w": np.zeros(2)},
        {"v": np.zeros(3)},
        {"b": np.float32(0)},
        {"w": np.zeros(3), "extra": np.zeros(3)},
        {"w": np.array([0.0, np.nan, 0.0])},
    ],
)
def test_an_anchor_that_does_not_fit_is_refused(anchor, snapshot, handle):
    class Misfit(Measured):
        weight_decay: float = 0.1

        def no_decay(self, path, leaf):
            return path == "b"

        def decay_anchor(self, group):
            return anchor

    with pytest.raises(ExperimentError) as caught:
        handle(Misfit())
    assert str(caught.value) == snapshot


def test_accumulation_clip_decay_and_average_together_equal_a_hand_written_loop(handle):
    """20 steps of two micro-batches, one clip on the mean gradient, decoupled decay, a moving average."""

    class Everything(Line):
        max_epochs: int = 10
        accum: int = 2
        learning_rate: float = 0.05
        weight_decay: float = 0.1
        gradient_clip_norm: float = 0.5
        ema_decay: float = 0.9

        def optimizer(self):
            return optax.adam

        def no_decay(self, path, leaf):
            return path == "b"

    n = handle(Everything())
    n.train()
    batches = list(n.splits["train"])
    ps, average = {"b": np.float32(0), "w": np.zeros(3, np.float32)}, None
    # Hyperparameters as float32 arrays, as nitro's enter the program: folded as Python floats they round differently.
    rate, b1, b2, eps, decay = (np.float32(v) for v in (0.05, 0.9, 0.999, 1e-8, 0.1))
    adamw = optax.adamw(rate, b1, b2, eps, weight_decay=decay, mask={"b": False, "w": True})
    tx = optax.chain(optax.clip_by_global_norm(0.5), adamw)
    state, average = tx.init(ps), ps

    def loss(ps, x, y):
        return ((x @ ps["w"] + ps["b"] - y) ** 2).mean()

    gradient = jax.jit(jax.grad(loss))
    for step in range(20):
        two = [gradient(ps, batches[i]["x"], batches[i]["y"]) for i in ((2 * step) % 4, (2 * step) % 4 + 1)]
        mean = jax.tree.map(lambda a, b: (a + b) / 2, *two)
        changes, state = tx.update(mean, state, ps)
        ps = optax.apply_updates(ps, changes)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, ps)
    for path in ("b", "w"):
        np.testing.assert_allclose(parameters(n)[path], ps[path], rtol=0, atol=1e-6)
        np.testing.assert_allclose(n.snapshot()["ema"][path], average[path], rtol=0, atol=1e-6)
    assert len(gradients(0)) == 2
