"""The optimizer of a run: an optax factory whose numeric hyperparameters are arguments of the program, not part of it.

A factory (``optax.adamw``, or a ``functools.partial`` of one) is called inside the update program with traced numbers,
so a sweep over rates, decays or betas reuses one compiled program. A finished transformation has its numbers baked in,
and is refused.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from nitro_cli.errors import ExperimentError

_FIX = "return a factory: `return optax.adam`, or with settings `return functools.partial(optax.adam, b1=0.8)`"


@dataclass(frozen=True)
class Rule:
    """``hyperparameters`` enter the update program as float scalars; ``fixed`` are baked in (flags, counts, names)."""

    name: str
    factory: Callable[..., optax.GradientTransformation]
    hyperparameters: Mapping[str, float]
    fixed: Mapping[str, Any]

    def build(self, hyperparameters: Mapping[str, Any]) -> optax.GradientTransformationExtraArgs:
        """The transformation for these values, which may be tracers."""
        made = self.factory(**self.fixed, **hyperparameters)
        return optax.with_extra_args_support(made)

    def values(self) -> list[np.ndarray]:
        """Hyperparameters as float scalars, in the order of their names."""
        dtype = jax.dtypes.canonicalize_dtype(np.float64)
        return [np.asarray(self.hyperparameters[name], dtype) for name in sorted(self.hyperparameters)]

    def named(self, values: list[Any]) -> dict[str, Any]:
        return dict(zip(sorted(self.hyperparameters), values, strict=True))


def resolve_rule(declared: Any, learning_rate: float, owner: str) -> Rule:
    """The rule for what ``optimizer(self)`` returned (None means RAdam), at the rate of the knob ``learning_rate``.

    Raises ExperimentError for a finished transformation, for a factory without a learning rate, and for a rate that the
    factory was already given.
    """
    factory: Any = optax.radam if declared is None else declared
    if isinstance(factory, optax.GradientTransformation):
        raise ExperimentError(
            f"{owner}.optimizer returns a finished optax transformation; its numbers would be baked into the program",
            "every change of a rate would then compile again",
            _FIX,
            "the rate itself is the knob learning_rate",
        )
    if not callable(factory):
        raise ExperimentError(f"{owner}.optimizer returns {type(factory).__name__}, not an optax factory", _FIX)
    given: dict[str, Any] = {}
    function = factory
    while isinstance(function, functools.partial):
        given = {**function.keywords, **given}
        if function.args:
            raise ExperimentError(
                f"{owner}.optimizer returns a partial with positional arguments", "give them by name", _FIX
            )
        function = function.func
    name = getattr(function, "__name__", type(function).__name__)
    parameters = inspect.signature(function).parameters
    if "learning_rate" in given:
        raise ExperimentError(
            f"{owner}.optimizer fixes learning_rate={given['learning_rate']!r} for {name}",
            "the rate is the knob learning_rate: set it in a preset, with --learning-rate, or as a class default",
        )
    if "learning_rate" not in parameters:
        raise ExperimentError(f"{owner}.optimizer returns {name}, which has no parameter 'learning_rate'", _FIX)
    settings = {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty} | given
    settings.pop("learning_rate", None)
    numeric = {key: float(value) for key, value in settings.items() if _is_number(value)}
    fixed = {key: value for key, value in given.items() if key not in numeric}
    return Rule(name, function, {"learning_rate": float(learning_rate), **numeric}, fixed)


def _is_number(value: Any) -> bool:
    return isinstance(value, (float, np.floating)) and not isinstance(value, bool)


def traceable(rule: Rule, parameters: Any) -> Rule:
    """``rule`` with those hyperparameters fixed that its code decides by in Python, and so cannot take as arguments.

    ``parameters`` is the tree of parameter shapes. Usually nothing has to be fixed.
    """
    if _traces(rule, parameters):
        return rule
    for name in sorted(rule.hyperparameters):
        moved = _fixing(rule, [name])
        if name != "learning_rate" and _traces(moved, parameters):
            return moved
    # More than one: fix all but the rate, which every optax factory takes as an array.
    return _fixing(rule, [name for name in rule.hyperparameters if name != "learning_rate"])


def _fixing(rule: Rule, names: list[str]) -> Rule:
    kept = {name: value for name, value in rule.hyperparameters.items() if name not in names}
    return Rule(rule.name, rule.factory, kept, {**rule.fixed, **{n: rule.hyperparameters[n] for n in names}})


def _traces(rule: Rule, parameters: Any) -> bool:
    def step(values: list[Any], ps: Any) -> Any:
        transformation = rule.build(rule.named(values))
        return transformation.update(ps, transformation.init(ps), ps)

    try:
        jax.eval_shape(step, rule.values(), parameters)
    except jax.errors.ConcretizationTypeError:
        return False
    return True


def initial_state(rule: Rule, parameters: Any) -> Any:
    """The optimizer state for ``parameters``, compiled as one program instead of one per operation."""

    def optimizer_init(values: list[Any], ps: Any) -> Any:
        state = rule.build(rule.named(values)).init(ps)
        return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), state)

    return jax.jit(optimizer_init)(rule.values(), parameters)
