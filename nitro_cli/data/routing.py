"""Which batch fields a hook gets: exactly those that it declares as keyword-only parameters."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from inspect import Parameter
from typing import Any

from nitro_cli.data.source import RESERVED, check_reserved
from nitro_cli.errors import ExperimentError, Place
from nitro_cli.suggest import did_you_mean, listed

__all__ = ["RESERVED", "Route", "route"]

# The keywords nitro fills in, and the hooks that may ask for them.
ALLOWED = {"forward": ("train", "rng"), "loss": ("rng",), "train_metrics": ("rng",), "train_step": ("rng", "accum")}
_USUAL = {"forward": ["model", "ps", "st"], "train_step": ["model", "ps", "opt_state", "st"]}
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


@dataclass(frozen=True)
class Route:
    """What one hook is called with. ``fields``: batch fields; ``defaults``: keywords that keep their own default."""

    hook: str
    fields: tuple[str, ...]
    everything: bool
    train: bool
    rng: bool
    defaults: tuple[str, ...]
    optional: tuple[str, ...] = ()
    accum: bool = False


@dataclass(frozen=True)
class _Hook:
    """A hook under inspection, with what its error messages name."""

    owner: str
    name: str
    place: Place | None
    batch: tuple[str, ...]
    split: str
    positional: tuple[Parameter, ...]
    keywords: tuple[Parameter, ...]
    any_positional: bool
    everything: bool

    def error(self, what: str, *notes: str, **facts: Any) -> ExperimentError:
        return ExperimentError(f"{self.owner}.{self.name} {what}", *notes, place=self.place, hook=self.name, **facts)

    @property
    def has(self) -> str:
        return f"the batches of '{self.split}' have: {listed(self.batch)}"


def route(
    E: Any, hook_name: str, function: Callable[..., Any], batch_fields: Iterable[str], split: str, positional: int
) -> Route:
    """Resolves what ``hook_name`` of experiment ``E`` gets from batches with ``batch_fields``.

    ``function`` is the plain function with ``self`` first; ``positional`` is the number of arguments after ``self``
    that nitro passes by position. Raises ExperimentError for a parameter that nothing can fill, or that is probably
    misspelt.
    """
    hook = _inspect(E, hook_name, function, tuple(batch_fields), split)
    check_reserved(split, hook.batch)
    _check_positional(hook, positional)
    _check_reserved_keywords(hook)
    fields, defaults = [], []
    for parameter in hook.keywords:
        if parameter.name in RESERVED:
            continue
        if parameter.name in hook.batch:
            fields.append(parameter.name)
        else:
            _check_unfilled(hook, parameter)
            defaults.append(parameter.name)
    asked = {parameter.name for parameter in hook.keywords}
    return Route(
        hook_name,
        hook.batch if hook.everything else tuple(fields),
        hook.everything,
        "train" in asked,
        "rng" in asked,
        tuple(defaults),
        tuple(p.name for p in hook.keywords if p.default is not Parameter.empty),
        "accum" in asked,
    )


def _inspect(E: Any, name: str, function: Callable[..., Any], batch: tuple[str, ...], split: str) -> _Hook:
    owner = E if isinstance(E, type) else type(E)
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p for p in parameters if p.kind in _POSITIONAL]
    kinds = {p.kind for p in parameters}
    return _Hook(
        owner.__name__,
        name,
        _place(function),
        batch,
        split,
        tuple(positional[1:]),
        tuple(p for p in parameters if p.kind is Parameter.KEYWORD_ONLY),
        Parameter.VAR_POSITIONAL in kinds,
        Parameter.VAR_KEYWORD in kinds,
    )


def _place(function: Callable[..., Any]) -> Place | None:
    code = getattr(inspect.unwrap(function), "__code__", None)
    return Place(code.co_filename, code.co_firstlineno) if code else None


def _check_positional(hook: _Hook, expected: int) -> None:
    fillable = (*hook.batch, *ALLOWED.get(hook.name, ()))
    wrong = [p.name for p in hook.positional if p.name in fillable]
    names = [p.name for p in hook.positional]
    if wrong:
        keep = [name for name in names if name not in wrong]
        keep = keep if len(keep) == expected else _usual_names(hook.name, expected)
        after = [*wrong, *(p.name for p in hook.keywords)]
        raise hook.error(
            f"takes {listed(wrong)} by position, but batch fields are passed by keyword",
            f"fix: put them after a star: def {hook.name}(self, {', '.join([*keep, '*', *after])})",
            hook.has,
            parameters=wrong,
        )
    required = sum(p.default is Parameter.empty for p in hook.positional)
    enough = len(names) >= expected or hook.any_positional
    if not enough or required > expected:
        raise hook.error(
            f"takes {len(names)} arguments by position ({', '.join(names) or 'none'}), nitro passes {expected}",
            f"fix: def {hook.name}(self, {', '.join([*_usual_names(hook.name, expected), '*', '...'])})",
            "batch fields come after the star",
        )


def _usual_names(name: str, expected: int) -> list[str]:
    usual = _USUAL.get(name, ["outputs"])
    return usual if len(usual) == expected else [f"a{i}" for i in range(expected)]


def _check_reserved_keywords(hook: _Hook) -> None:
    allowed = ALLOWED.get(hook.name, ())
    for parameter in hook.keywords:
        if parameter.name in RESERVED and parameter.name not in allowed:
            able = listed([name for name, words in ALLOWED.items() if parameter.name in words])
            raise hook.error(
                f"declares '{parameter.name}', which this hook is not given",
                f"only {able} can take '{parameter.name}'",
                "fix: leave it out, or pass what you need through the outputs of forward",
                parameter=parameter.name,
            )


def _check_unfilled(hook: _Hook, parameter: Parameter) -> None:
    """A keyword that no batch has: an error without a default, and with one when it is nearly the name of a field."""
    name = parameter.name
    declared = {p.name for p in hook.keywords}
    if parameter.default is Parameter.empty:
        fillable = [*(field for field in hook.batch if field not in declared), *ALLOWED.get(hook.name, ())]
        notes = [note for note in (did_you_mean(name, fillable),) if note]
        raise hook.error(
            f"needs '{name}', which no batch has",
            *notes,
            hook.has,
            f"fix: rename the parameter or the batch field, or give it a default: {name}=None",
            parameter=name,
        )
    fillable = (*hook.batch, *ALLOWED.get(hook.name, ()))
    meant = next((field for field in fillable if field not in declared and _nearly(name, field)), None)
    if meant:
        raise hook.error(
            f"has '{name}', which no batch has; did you mean '{meant}'?",
            "it has a default, so the misspelling would go unnoticed and the field would never arrive",
            hook.has,
            f"fix: spell it '{meant}', or give the parameter a name that is not so near",
            parameter=name,
        )


def _nearly(name: str, field: str) -> bool:
    """Whether one is likely a misspelling of the other; stricter than a suggestion, because this one refuses."""
    a, b = name.lower(), field.lower()
    swapped = len(a) > 2 and sorted(a) == sorted(b)
    return a == b or swapped or difflib.SequenceMatcher(None, a, b).ratio() >= 0.8
