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
    """Whether the first update for a zero gradient depends on the weights, which the rule reads.

    ``tree`` holds a ``jax.ShapeDtypeStruct`` for each. A rule that works for these shapes alone counts as one that does
    not pull.
    """

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
