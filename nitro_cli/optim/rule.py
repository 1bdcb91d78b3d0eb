"""The optimizer rule of a parameter group: an optax factory whose numbers are arguments of the program.

A factory (``optax.adamw``, or a ``functools.partial`` of one) is called inside the update program with traced numbers,
so a sweep over rates, decays or betas reuses one compiled program. A finished transformation has its numbers baked in,
and is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
import optax

from nitro_cli.errors import ExperimentError, NitroError
from nitro_cli.suggest import did_you_mean, listed

_FIX = "return a factory: `return optax.adam`, or with settings `return functools.partial(optax.adam, b1=0.8)`"
# Arguments by which a factory decays by itself; the second is adafactor's.
_DECAYS = ("weight_decay", "weight_decay_rate", "adam_weight_decay")
# Wrappers that gather several gradients by themselves, by the name of their state.
_ACCUMULATING = ("MultiStepsState", "ApplyEvery", "ApplyEveryState")


# optax's own partials, such as ``nadamw`` of ``adamw``, by identity: they do not know their name.
_PARTIALS = {id(value): name for name, value in vars(optax).items() if isinstance(value, functools.partial)}


@dataclass(frozen=True)
class Hyperparameters:
    """What ``optimizer(self, group, hp)`` builds a transformation from.

    ``learning_rate`` and ``weight_decay`` are traced float scalars of this group; ``decay_mask`` is a tree of bools,
    True where ``no_decay`` lets weights decay; ``anchor`` is the tree that decay pulls towards, or None for zero.
    """

    learning_rate: Any
    weight_decay: Any
    decay_mask: Any
    anchor: Any


@dataclass(frozen=True)
class Rule:
    """``hyperparameters`` enter the update program as float scalars; ``fixed`` are baked in (flags, counts, names).

    ``whole`` is set where the experiment builds the transformation by itself; nitro then adds no decay.
    """

    name: str
    factory: Callable[..., Any]
    hyperparameters: Mapping[str, float]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    whole: bool = False

    @property
    def code(self) -> Callable[..., Any]:
        """What the rule is made of, for a program's key: the factory, or the hook that builds the transformation."""
        return self.factory.__wrapped__ if self.whole else self.factory  # type: ignore[attr-defined]

    @property
    def decays_itself(self) -> bool:
        """Whether weight decay is one of the factory's own hyperparameters (``optax.adamw``)."""
        return not self.whole and any(name in self.hyperparameters for name in _DECAYS)

    def build(
        self, values: Mapping[str, Any], decay_mask: Any = None, anchor: Any = None
    ) -> optax.GradientTransformationExtraArgs:
        """The transformation for these values, which may be tracers."""
        if self.whole:
            hp = Hyperparameters(values["learning_rate"], values["weight_decay"], decay_mask, anchor)
            made = self.factory(hp)
        else:
            made = self.factory(**self.fixed, **values)
        if isinstance(made, optax.MultiSteps):
            raise accumulates(self.name)
        if not isinstance(made, optax.GradientTransformation):
            what = "an array" if hasattr(made, "shape") else type(made).__name__
            fix = "call the factory: return optax.adam(hp.learning_rate)" if self.whole else _FIX
            raise ExperimentError(f"the optimizer {self.name} gives {what}, not an optax transformation", fix)
        return optax.with_extra_args_support(made)


def accumulates(name: str) -> ExperimentError:
    return ExperimentError(
        f"the optimizer {name} gathers several gradients by itself",
        "nitro accumulates: every update it makes is a whole step, so schedules and the log would count wrongly",
        "set the knob accum instead: --accum 4",
    )


def resolve_rule(declared: Any, learning_rate: float, weight_decay: float, owner: str, group: str) -> Rule:
    """The rule for what ``optimizer`` returned (None means RAdam), at the group's rate.

    Raises ExperimentError for a finished transformation, for a factory without a learning rate, for a rate that the
    factory was already given, and for one that decays by itself while nitro's decay is on.
    """
    factory: Any = optax.radam if declared is None else declared
    if isinstance(factory, optax.MultiSteps):
        raise accumulates("MultiSteps")
    if isinstance(factory, optax.GradientTransformation):
        raise ExperimentError(
            f"{owner}.optimizer returns a finished optax transformation; its numbers would be baked into the program",
            "every change of a rate would then compile again",
            _FIX,
            "to build a whole transformation from the resolved values: def optimizer(self, group, hp)",
        )
    if not callable(factory):
        raise ExperimentError(f"{owner}.optimizer returns {type(factory).__name__}, not an optax factory", _FIX)
    given: dict[str, Any] = {}
    function, named = factory, None
    while isinstance(function, functools.partial):
        named = named or _PARTIALS.get(id(function))
        given = {**function.keywords, **given}
        if function.args:
            raise ExperimentError(
                f"{owner}.optimizer returns a partial with positional arguments", "give them by name", _FIX
            )
        function = function.func
    if function is optax.MultiSteps:
        raise accumulates("MultiSteps")
    name = named or getattr(function, "__name__", type(function).__name__)
    try:
        parameters = inspect.signature(function).parameters
    except ValueError:  # a type of Python's own, such as dict
        raise ExperimentError(f"{owner}.optimizer returns {name}, not an optax factory", _FIX) from None
    takes_any = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    unknown = [key for key in given if key not in parameters and not takes_any]
    if unknown:
        hint = did_you_mean(unknown[0], parameters)
        raise ExperimentError(
            f"{owner}.optimizer gives {name} the argument '{unknown[0]}', which it does not have",
            *([hint] if hint else []),
            f"it has: {listed(list(parameters), 20)}",
        )
    if "learning_rate" in given:
        raise ExperimentError(
            f"{owner}.optimizer fixes learning_rate={given['learning_rate']!r} for {name}",
            "the rate is the knob learning_rate: set it in a preset, with --learning-rate, or as a class default",
            "a schedule for it belongs into schedules(self)",
        )
    if "learning_rate" not in parameters:
        raise ExperimentError(f"{owner}.optimizer returns {name}, which has no parameter 'learning_rate'", _FIX)
    settings = {key: p.default for key, p in parameters.items() if p.default is not inspect.Parameter.empty} | given
    settings.pop("learning_rate", None)
    numbers = {key: float(value) for key, value in settings.items() if _is_number(value)}
    for key, value in numbers.items():
        good, note = limit(key)
        if not good(value):
            raise ExperimentError(f"{owner}.optimizer: {name} has {key}={value:g}; {note}")
    # A whole number may be a count that decides a shape; a decay is a quantity however it is written.
    numeric = {key: value for key, value in numbers.items() if key in _DECAYS or not _is_whole(settings[key])}
    if weight_decay > 0:
        for own in [key for key in _DECAYS if key in numeric]:
            if numeric[own] > 0:
                raise _decays_twice(function, name, own, weight_decay, group)
            given[own] = numeric.pop(own)  # by nothing: nitro's decay is the only one
    fixed = {key: value for key, value in given.items() if key not in numeric}
    return Rule(name, function, {"learning_rate": float(learning_rate), **numeric}, fixed)


def _decays_twice(function: Any, name: str, own: str, weight_decay: float, group: str) -> ExperimentError:
    module = getattr(function, "__module__", None) or ""
    prefix = next((each for each in ("optax.contrib", "optax") if module.startswith(each)), "")
    return ExperimentError(
        f"group '{group}' would decay twice: {name} decays by itself, and nitro's weight_decay is {weight_decay}",
        "either set nitro's weight_decay to 0 and give it to the factory: "
        f"functools.partial({prefix}{'.' if prefix else ''}{name}, {own}={weight_decay})",
        "or take the rule without decay (adam for adamw) and keep nitro's, which knows no_decay and anchors",
    )


def limit(name: str) -> tuple[Callable[[Any], Any], str]:
    """Whether values suit a hyperparameter, and how that is said. Only those are limited whose meaning is known."""
    if name == "gradient_clip_norm":
        return lambda value: np.asarray(value) > 0, f"{name} must be more than 0: a norm of 0 would stop every step"
    if name in ("learning_rate", *_DECAYS):
        return lambda value: np.asarray(value) >= 0, f"{name} must be 0 or more"
    if name in ("ema_decay", "b1", "b2"):
        return lambda value: (np.asarray(value) >= 0) & (np.asarray(value) < 1), f"{name} must be 0 or more and under 1"
    return lambda value: np.ones(np.shape(value), bool), ""


def _is_number(value: Any) -> bool:
    if isinstance(value, (np.ndarray, jax.Array)) and value.shape == ():
        return value.dtype.kind in "iuf"
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, (int, np.integer)) or getattr(getattr(value, "dtype", None), "kind", "") in ("i", "u")


def traceable(rule: Rule, parameters: Any) -> Rule:
    """``rule`` with those hyperparameters fixed that its code decides by in Python, and so cannot take as arguments.

    ``rule`` is a factory, ``parameters`` a tree of parameter shapes. Usually nothing has to be fixed. Raises
    ExperimentError where the rule accumulates by itself, or needs arguments that nitro does not give.
    """
    if _traces(rule, parameters):
        return rule
    for name in sorted(rule.hyperparameters):
        moved = fixing(rule, [name])
        if name != "learning_rate" and _traces(moved, parameters):
            return moved
    # More than one: fix all but the rate, which every optax factory takes as an array.
    moved = fixing(rule, [name for name in rule.hyperparameters if name != "learning_rate"])
    if not _traces(moved, parameters):
        raise ExperimentError(
            f"the optimizer {rule.name} decides by learning_rate in Python, where it is no number yet",
            "the rate is an input of the program, so that schedules and sweeps compile nothing: use jnp.where on it",
        )
    return moved


def fixing(rule: Rule, names: Sequence[str]) -> Rule:
    """``rule`` with these hyperparameters baked in."""
    kept = {name: value for name, value in rule.hyperparameters.items() if name not in names}
    fixed = {**rule.fixed, **{name: rule.hyperparameters[name] for name in names}}
    return dataclasses.replace(rule, hyperparameters=kept, fixed=fixed)


def _traces(rule: Rule, parameters: Any) -> bool:
    def step(values: dict[str, Any], ps: Any) -> Any:
        transformation = rule.build(values)
        state = transformation.init(ps)
        check_state(rule, state)
        return transformation.update(ps, state, ps)

    values = {name: np.float32(value) for name, value in rule.hyperparameters.items()}
    try:
        jax.eval_shape(step, values, parameters)
    except jax.errors.ConcretizationTypeError:
        return False
    except NitroError:
        raise
    except Exception as error:
        missing = isinstance(error, TypeError) and "missing" in str(error) and "argument" in str(error)
        notes = ["optax says what is wrong with these parameters; nitro only called it"]
        if missing and "update" in str(error):
            notes = ["it wants to evaluate the loss itself; take a rule that works on gradients alone"]
        elif missing:
            notes = ["give the argument a default, or bind it: functools.partial(factory, argument=...)"]
        what = "needs arguments that nitro does not give it" if missing else "fails on a step with these parameters"
        raise ExperimentError(f"the optimizer {rule.name} {what}: {error}", *notes) from error
    return True


def check_state(rule: Rule, state: Any) -> None:
    """Refuses a wrapper that accumulates, wherever it stands in the chain."""
    jax.tree.map(lambda node: _refuse_accumulating(rule, node), state, is_leaf=lambda node: _is_accumulating(node))


def _is_accumulating(node: Any) -> bool:
    return type(node).__name__ in _ACCUMULATING


def _refuse_accumulating(rule: Rule, node: Any) -> None:
    if _is_accumulating(node):
        raise accumulates(rule.name)
