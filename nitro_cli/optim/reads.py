"""What an optimizer rule reads, found by tracing it: its numbers, and the weights.

A number that no update reads can be given and scheduled, and nothing happens. Some are read before the first step only,
such as adagrad's ``initial_accumulator_value``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from nitro_cli.errors import NitroError

# ``build(values, anchor)`` is the transformation for these hyperparameters.
Build = Callable[[dict[str, Any], Any], Any]


@dataclass(frozen=True)
class Reads:
    """``in_update`` and ``at_start`` are the hyperparameters that an update, and the first state, are computed from;
    ``nowhere`` the others.

    ``weights`` says whether the update is computed from the weights, other than through the state they began with.
    """

    in_update: frozenset[str]
    at_start: frozenset[str]
    nowhere: frozenset[str]
    weights: bool


def reads(build: Build, names: Iterable[str], tree: Any, anchor: Any = None) -> Reads:
    """``tree`` and ``anchor`` hold a ``jax.ShapeDtypeStruct`` for each array.

    A rule that only works with its first state as it is, without tracing it, counts as one that reads everything.
    Raises what the rule raises where it fails on such parameters at all.
    """
    values = {name: jax.ShapeDtypeStruct((), np.float32) for name in sorted(names)}

    def init(values: dict[str, Any], anchor: Any, weights: Any) -> Any:
        return build(values, anchor).init(weights)

    def update(values: dict[str, Any], weights: Any, gradient: Any, state: Any, anchor: Any) -> Any:
        return build(values, anchor).update(gradient, state, weights)

    def first(values: dict[str, Any], weights: Any, anchor: Any) -> Any:
        return update(values, weights, weights, init(values, anchor, weights), anchor)

    try:
        start, state = jax.make_jaxpr(init, return_shape=True)(values, anchor, tree)
        step, (updates, _) = jax.make_jaxpr(update, return_shape=True)(values, tree, tree, state, anchor)
    except NitroError:
        raise
    except Exception:  # whatever a rule does with the tracers of its state
        jax.eval_shape(first, values, tree, anchor)
        return Reads(frozenset(values), frozenset(), frozenset(), True)
    known = list(values)
    weights = step.jaxpr.invars[len(known) : len(known) + len(jax.tree.leaves(tree))]
    in_update = _named(known, step.jaxpr, step.jaxpr.outvars)
    at_start = _named(known, start.jaxpr, start.jaxpr.outvars)
    needed = _needed(step.jaxpr, step.jaxpr.outvars[: len(jax.tree.leaves(updates))])
    return Reads(in_update, at_start, frozenset(known) - in_update - at_start, any(id(v) in needed for v in weights))


def _named(names: Sequence[str], jaxpr: Any, results: Sequence[Any]) -> frozenset[str]:
    """Those of the first arguments that the results are computed from."""
    needed = _needed(jaxpr, results)
    return frozenset(name for name, var in zip(names, jaxpr.invars, strict=False) if id(var) in needed)


def _needed(jaxpr: Any, results: Sequence[Any]) -> set[int]:
    """Variables, by identity, that results are computed from. A call counts as reading all that it is given."""
    needed = {id(var) for var in results}
    for eqn in reversed(jaxpr.eqns):
        if eqn.effects or any(id(var) in needed for var in eqn.outvars):
            needed |= {id(var) for var in eqn.invars}
    return needed
