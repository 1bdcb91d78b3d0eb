"""Plans made from an experiment's hooks alone, and steps of them, without data or a model."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nitro_cli import Experiment
from nitro_cli.experiment.hooks import ALL, hook
from nitro_cli.optim import update
from nitro_cli.optim.leaves import Leaves
from nitro_cli.optim.plan import Plan, Settings, make_plan
from nitro_cli.optim.schedules import mentions, parse


class Bare(Experiment):
    """The required hooks, which nothing here calls."""

    def build_data(self, dist): ...

    def build_model(self, rng): ...

    def forward(self, model, ps, st): ...

    def loss(self, outputs): ...


class TwoGroups(Bare):
    def param_group(self, path, leaf):
        return "encoder" if path.startswith("encoder") else "default"


def params(seed: int = 0) -> dict[str, Any]:
    """Leaves of one and two dimensions in two modules, some of equal shape."""
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    return {
        "encoder": {"a": {"kernel": draw(5, 4), "bias": draw(4)}, "b": {"kernel": draw(4, 4), "bias": draw(4)}},
        "head": {"kernel": draw(4, 3), "bias": draw(3)},
    }


def gradients(step: int) -> dict[str, Any]:
    return params(100 + step)


def plan_for(e: Any, tree: Any, *, layout: str = "mix", **more: Any) -> Plan:
    hooks = {name: found for name in ALL if (found := hook(e, name)) is not None}
    settings = Settings(e.learning_rate, e.weight_decay, e.gradient_clip_norm, e.ema_decay, layout)
    declared = parse(hooks["schedules"](e), type(e).__name__)
    return make_plan(e, hooks, Leaves.of(tree), settings, mentions(declared), **more)


def run(plan: Plan, tree: Any, steps: int = 5, vectors: Any = None, anchors: Any = ()) -> Any:
    """Parameters after ``steps`` updates with the gradients above."""
    vector = plan.vector()
    buffers = plan.layout.pack(jax.tree.leaves(tree))
    state = update.initial_state(plan, vector, buffers, anchors)
    step = jax.jit(lambda p, g, s, v: update.step(plan, p, g, s, v, anchors))
    for i in range(steps):
        packed = plan.layout.pack(jax.tree.leaves(gradients(i)))
        buffers, state = step(buffers, packed, state, vector if vectors is None else vectors[i])
    return plan.layout.tree([np.asarray(b) for b in buffers])


def optax_run(transformation: Any, tree: Any, steps: int = 5) -> Any:
    """The same with plain optax over the tree."""
    import optax

    state = transformation.init(tree)
    step = jax.jit(transformation.update)
    for i in range(steps):
        changes, state = step(gradients(i), state, tree)
        tree = optax.apply_updates(tree, changes)
    return tree


def assert_close(one: Any, other: Any, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), one, other)
