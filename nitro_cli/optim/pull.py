"""Whether an optimizer rule decays weights by itself, decided by what it does where the gradient is zero.

optax's own factories say it by the name of an argument. A chain of the user's need not: ``add_decayed_weights`` may
stand anywhere in it. Together with nitro's decay the weights would then decay twice, without a word.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nitro_cli.optim.rule import Rule

_SIDE = 4  # of the small arrays that the rule is tried on; a real parameter may be too large to try anything on


def pulls(rule: Rule, tree: Any) -> bool:
    """Whether the first update for a zero gradient depends on the weights.

    ``tree`` holds a ``jax.ShapeDtypeStruct`` for each. A rule that works for these shapes alone counts as one that does
    not pull.
    """
    if not _reads_weights(rule, tree):
        return False

    def filled(value: int) -> Any:
        return jax.tree.map(lambda s: np.full([min(side, _SIDE) for side in s.shape], value, s.dtype), tree)

    try:
        pairs = zip(jax.tree.leaves(_update(rule, filled(1))), jax.tree.leaves(_update(rule, filled(0))), strict=True)
        return any(bool(np.any(np.abs(np.asarray(a) - np.asarray(b)) > 0)) for a, b in pairs)
    except Exception:  # whatever a user's rule says to shapes that are not its own
        return False


def _update(rule: Rule, weights: Any) -> Any:
    def first(weights: Any) -> Any:
        transformation = rule.build({**rule.hyperparameters, "learning_rate": 1.0})
        gradient = jax.tree.map(jax.numpy.zeros_like, weights)
        return transformation.update(gradient, transformation.init(weights), weights)[0]

    return jax.jit(first)(weights)


def _reads_weights(rule: Rule, tree: Any) -> bool:
    """Whether any result of an update is computed from the weights, other than through the state they began with."""

    def update(weights: Any, gradient: Any, state: Any) -> Any:
        return rule.build(rule.hyperparameters).update(gradient, state, weights)[0]

    state = jax.eval_shape(lambda weights: rule.build(rule.hyperparameters).init(weights), tree)
    jaxpr = jax.make_jaxpr(update)(tree, tree, state).jaxpr
    reached = {id(var) for var in jaxpr.invars[: len(jax.tree.leaves(tree))]}
    for eqn in jaxpr.eqns:
        if any(id(var) in reached for var in eqn.invars):
            reached |= {id(var) for var in eqn.outvars}
    return any(id(var) in reached for var in jaxpr.outvars)
