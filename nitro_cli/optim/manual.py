"""Optimizers that an experiment steps by itself.

An ``OptimizerState`` is one node of a tree: the rule is static, its numeric hyperparameters, the count of its steps and
optax's own state are leaves. So a schedule or a step can change a rate without another program, and the path of a
hyperparameter in the tree (``gen.learning_rate``) is the name by which schedules know it.
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
from jax.core import Tracer

from nitro_cli.errors import ExperimentError
from nitro_cli.optim.leaves import Leaves, spec_text
from nitro_cli.optim.rule import Rule, accumulates, traceable
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.once import run_once
from nitro_cli.suggest import did_you_mean, listed

_EXAMPLE = "optimizer_state(optax.adam, ps['gen'], learning_rate=2e-4)"


@dataclass(frozen=True, eq=False)
class Optimizer:
    """The static half: the rule, and the parameters it was made for."""

    rule: Rule
    params: Leaves

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Optimizer):
            return NotImplemented
        one, two = self.rule, other.rule
        return (one.factory, one.fixed, list(one.hyperparameters), self.params) == (
            *(two.factory, two.fixed, list(two.hyperparameters)),
            other.params,
        )

    def __hash__(self) -> int:
        return hash((self.rule.name, self.params.paths))

    def __repr__(self) -> str:
        return self.rule.name

    def content(self) -> tuple[Any, ...]:
        """What it decides, as plain values; the code of the rule is looked at by the fingerprint of the step."""
        return self.rule.name, list(self.rule.hyperparameters), self.params.described("ps")


@jax.tree_util.register_pytree_with_keys_class
class OptimizerState:
    """One optimizer under way, made by ``optimizer_state`` and moved on by ``step_optimizer``.

    ``hyperparameters`` are float scalars by name, ``count`` int32[] counts the steps taken, ``state`` is optax's.
    """

    def __init__(self, static: Optimizer, hyperparameters: Mapping[str, Any], count: Any, state: Any) -> None:
        self.static, self.hyperparameters = static, dict(hyperparameters)
        self.count, self.state = count, state

    def replace(self, **hyperparameters: Any) -> OptimizerState:
        """With other values for some hyperparameters; they may be traced. Raises ExperimentError for other names."""
        for name in hyperparameters:
            if name not in self.hyperparameters:
                hint = did_you_mean(name, self.hyperparameters)
                what = f"the optimizer {self.static.rule.name} has no numeric hyperparameter '{name}'"
                raise ExperimentError(what, *([hint] if hint else []), f"it has: {listed(list(self.hyperparameters))}")
        old = self.hyperparameters
        cast = {name: jnp.asarray(value).astype(old[name].dtype) for name, value in hyperparameters.items()}
        return OptimizerState(self.static, {**old, **cast}, self.count, self.state)

    def tree_flatten_with_keys(self) -> Any:
        key = jax.tree_util.GetAttrKey
        leaves = [(key(name), value) for name, value in self.hyperparameters.items()]
        return (*leaves, (key("count"), self.count), (key("state"), self.state)), self.static

    @classmethod
    def tree_unflatten(cls, static: Optimizer, children: Any) -> OptimizerState:
        *values, count, state = children
        return cls(static, dict(zip(static.rule.hyperparameters, values, strict=True)), count, state)

    def __repr__(self) -> str:
        return f"OptimizerState({self.static.rule.name}, {listed(list(self.hyperparameters))})"


def optimizer_state(rule: Callable[..., Any], params: Any, /, **hyperparameters: Any) -> OptimizerState:
    """The first state of an optimizer for ``params``, a tree of arrays.

    ``rule`` is an optax factory (``optax.adam``, or a ``functools.partial`` of one). Its numbers, those given here and
    its float defaults, become float scalar leaves; flags, counts and functions stay fixed in the program.
    Raises ExperimentError for a finished transformation, for unknown or missing settings, and for a rule that gathers
    several gradients by itself.
    """
    leaves = Leaves.of(jax.tree.map(_array, params))
    made = traceable(_resolved(rule, hyperparameters), leaves.tree(leaves.specs))
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    values = {name: np.asarray(value, dtype) for name, value in made.hyperparameters.items()}

    def initial(arguments: Any) -> Any:
        state = made.build(arguments[0]).init(arguments[1])
        return jax.tree.map(jnp.asarray, state)

    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(params)):
        state = initial((values, params))
    else:
        code = fingerprint(rule=made.code, fixed=dict(made.fixed))
        state = run_once(initial, (values, params), name="optimizer_init", experiment=made.name, code=code)
    return OptimizerState(Optimizer(made, leaves), values, np.int32(0), state)


def step_optimizer(opt_state: OptimizerState, params: Any, grads: Any) -> tuple[OptimizerState, Any]:
    """One step of one optimizer: ``(its new state, the new parameters)``, in the dtypes that came in.

    ``params`` and ``grads`` have the structure that ``optimizer_state`` was given. Raises ExperimentError naming the
    leaf where they do not fit.
    """
    if not isinstance(opt_state, OptimizerState):
        raise _no_optimizer(opt_state)
    name = opt_state.static.rule.name
    _check_fits(opt_state.static.params, params, f"the parameters given to step_optimizer for {name}")
    _check_fits(opt_state.static.params, grads, f"the gradient given to step_optimizer for {name}", dtypes=False)
    rule = opt_state.static.rule.build(opt_state.hyperparameters)
    updates, state = rule.update(grads, opt_state.state, params)
    new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
    state = _like(opt_state, state)
    return OptimizerState(opt_state.static, opt_state.hyperparameters, opt_state.count + 1, state), new


def _like(before: OptimizerState, state: Any) -> Any:
    """optax's new state in the dtypes of the old one. Raises ExperimentError where it has another structure."""
    old, now = jax.tree.flatten(before.state), jax.tree.flatten(state)
    if old[1] != now[1]:
        what = f"the optimizer {before.static.rule.name} changes the structure of its state in a step"
        raise ExperimentError(what, "every step of a run is one program, so its state keeps its structure")
    return jax.tree.unflatten(old[1], [jnp.asarray(n).astype(o.dtype) for o, n in zip(old[0], now[0], strict=True)])


def _resolved(rule: Any, given: Mapping[str, Any]) -> Rule:
    if isinstance(rule, optax.MultiSteps):
        raise accumulates("MultiSteps")
    if isinstance(rule, optax.GradientTransformation):
        raise ExperimentError(
            "optimizer_state was given a finished optax transformation; its numbers would be baked into the program",
            f"give the factory and its numbers: {_EXAMPLE}",
            "for a chain, write a function of the numbers that returns it, and give that",
        )
    if not callable(rule):
        raise ExperimentError(
            f"optimizer_state takes an optax factory first, not {type(rule).__name__}", f"for example: {_EXAMPLE}"
        )
    settings = dict(given)
    while isinstance(rule, functools.partial):
        if rule.args:
            raise ExperimentError(
                "optimizer_state was given a partial with positional arguments", "give them by name: learning_rate=2e-4"
            )
        settings = {**rule.keywords, **settings}
        rule = rule.func
    name = getattr(rule, "__name__", type(rule).__name__)
    parameters = inspect.signature(rule).parameters
    _check_settings(name, parameters, settings)
    numeric = {
        key: float(settings.get(key, p.default))
        for key, p in parameters.items()
        if _is_numeric(settings.get(key, p.default), p.default)
    }
    numeric |= {key: float(v) for key, v in settings.items() if key not in parameters and _is_numeric(v, None)}
    return Rule(name, rule, numeric, {key: value for key, value in settings.items() if key not in numeric})


def _check_settings(name: str, parameters: Mapping[str, inspect.Parameter], settings: Mapping[str, Any]) -> None:
    kinds = inspect.Parameter
    named = [key for key, p in parameters.items() if p.kind not in (kinds.VAR_KEYWORD, kinds.VAR_POSITIONAL)]
    if not any(p.kind is kinds.VAR_KEYWORD for p in parameters.values()):
        for key in settings:
            if key not in named:
                hint = did_you_mean(key, named)
                what = f"optimizer_state: {name} has no setting '{key}'"
                raise ExperimentError(what, *([hint] if hint else []), f"it takes: {listed(named, 20)}")
    for key in named:
        if parameters[key].default is kinds.empty and key not in settings:
            raise ExperimentError(
                f"optimizer_state: {name} needs '{key}'", f"for example: optimizer_state(optax.{name}, ps, {key}=1e-3)"
            )


def _is_numeric(value: Any, default: Any) -> bool:
    """Whether a setting is a number that may change: a real, or a whole number where the rule has no whole default."""
    if isinstance(value, (bool, np.bool_)) or value is inspect.Parameter.empty:
        return False
    whole = isinstance(value, (int, np.integer))
    if whole:
        return not isinstance(default, (int, np.integer)) and default is not None
    scalar = isinstance(value, jax.Array) and value.shape == () and jnp.issubdtype(value.dtype, jnp.floating)
    return isinstance(value, (float, np.floating)) or scalar


def _array(leaf: Any) -> Any:
    return leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(leaf)


def _no_optimizer(given: Any) -> ExperimentError:
    kind = type(given).__name__
    inside = [path for path, node in optimizers(given).items() if isinstance(node, OptimizerState)]
    notes = [f"it holds optimizers at: {listed(inside)}; step one at a time"] if inside else []
    return ExperimentError(
        f"step_optimizer takes an optimizer first, and was given {kind}",
        *notes,
        "write: state, ps_new = step_optimizer(opt_state['gen'], ps['gen'], grads)",
        "optimizers are made by optimizer_state, in setup_optimizers",
    )


def _check_fits(expected: Leaves, tree: Any, what: str, dtypes: bool = True) -> None:
    now = Leaves.of(jax.tree.map(_array, tree))
    if now.structure != expected.structure:
        missing = [path for path in expected.paths if path not in now.paths]
        extra = [path for path in now.paths if path not in expected.paths]
        raise ExperimentError(
            f"{what} have another structure than those that optimizer_state was given".replace(
                "gradient given", "gradients given"
            ),
            *([f"missing: {listed(missing)}"] if missing else []),
            *([f"unexpected: {listed(extra)}"] if extra else []),
            "an optimizer steps the tree it was made for: opt_state['gen'] goes with ps['gen']",
        )
    for path, before, spec in zip(expected.paths, expected.specs, now.specs, strict=True):
        if before.shape != spec.shape or (dtypes and before.dtype != spec.dtype):
            raise ExperimentError(
                f"{what} do not fit at '{path}': {spec_text(spec)}, and the optimizer was made for "
                f"{spec_text(before)}".replace("gradient given", "gradients given")
            )


def optimizers(tree: Any) -> dict[str, Any]:
    """Every ``OptimizerState`` of a tree by its path, in order; "" for one that is the tree itself."""
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, OptimizerState))[0]
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): node
        for path, node in found
        if isinstance(node, OptimizerState)
    }
