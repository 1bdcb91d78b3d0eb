"""Parameter groups, resolved: which leaf belongs to which, with which rule, rate, decay and anchor; and the vector of
hyperparameters that the update program takes.

The vector is the one place where numbers of the optimizer enter a program. Its columns are named by group and
hyperparameter, so a schedule binds to columns, and changing any number compiles nothing.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax

from nitro_cli.errors import ExperimentError, UsageError
from nitro_cli.experiment.traits import device_fields
from nitro_cli.experiment.view import StrippedHost, compile_view
from nitro_cli.optim import findings
from nitro_cli.optim.findings import Kept
from nitro_cli.optim.layout import Layout, make_layout
from nitro_cli.optim.leaves import Leaves
from nitro_cli.optim.rule import Rule, fixing, resolve_rule

GLOBAL = ""  # the group of hyperparameters that belong to none
DEFAULT = "default"


@dataclass(frozen=True)
class Group:
    """``ratio`` is the group's rate over the knob ``learning_rate``. ``anchor`` is "zero", "w0" or a tree of arrays.

    ``at_start`` are hyperparameters that are read before the first step only, ``unread`` those that nothing reads.
    """

    name: str
    leaves: tuple[int, ...]
    rule: Rule
    ratio: float
    weight_decay: float
    decays: bool
    anchor: Any
    elementwise: bool
    at_start: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def anchored(self) -> bool:
        return (self.decays or self.rule.whole) and not _to_zero(self.anchor)


@dataclass(frozen=True)
class Plan:
    """Everything that the update program is made from, apart from the experiment's code.

    ``columns`` are ``(group, hyperparameter)``, ``values`` their unscheduled values; ``no_decay`` is per leaf.
    """

    groups: tuple[Group, ...]
    layout: Layout
    columns: tuple[tuple[str, str], ...]
    values: tuple[float, ...]
    no_decay: tuple[bool, ...]
    clip: bool
    ema: bool

    @functools.cached_property
    def idle(self) -> set[tuple[str, str]]:
        """Columns that no update reads."""
        return {(group.name, name) for group in self.groups for name in (*group.at_start, *group.unread)}

    def group(self, name: str) -> Group:
        return next(group for group in self.groups if group.name == name)

    def vector(self) -> np.ndarray:
        """float[columns]: the hyperparameters without schedules."""
        return np.array(self.values, jax.dtypes.canonicalize_dtype(np.float64))

    def column(self, group: str, name: str) -> int:
        return self.columns.index((group, name))

    def of(self, group: Group, vector: Any) -> dict[str, Any]:
        """A group's hyperparameters out of the vector, as scalars."""
        return {name: vector[i] for i, (owner, name) in enumerate(self.columns) if owner == group.name}


@dataclass(frozen=True)
class Settings:
    """The knobs that a plan depends on."""

    learning_rate: float
    weight_decay: float
    gradient_clip_norm: float
    ema_decay: float
    layout: str


def make_plan(
    experiment: Any,
    hooks: Mapping[str, Callable[..., Any]],
    leaves: Leaves,
    settings: Settings,
    scheduled: Callable[[str, str], bool],
    kept: Kept = lambda rule, facts, find: find(),
) -> Plan:
    """Resolve the groups. ``scheduled(group, hyperparameter)`` says whether a schedule is declared for it: a scheduled
    decay, clip or average is on even where its knob is 0. ``kept`` may answer from memory what tracing a rule would
    find. Raises ExperimentError for what a hook gives wrongly."""
    owner = type(experiment).__name__
    names = [_group_name(owner, hooks["param_group"](experiment, p, s), p) for p, s in _pairs(leaves)]
    order = sorted(dict.fromkeys(names), key=lambda name: name != DEFAULT)
    no_decay = [_excluded(owner, hooks["no_decay"](experiment, p, s), p) for p, s in _pairs(leaves)]
    members = {name: [i for i, n in enumerate(names) if n == name] for name in order}
    groups = [
        _group(experiment, hooks, leaves, name, members[name], no_decay, settings, scheduled, kept) for name in order
    ]
    by_name = {group.name: group for group in groups}
    decays = [by_name[n].decays and not excluded for n, excluded in zip(names, no_decay, strict=True)]
    joinable = [group.name for group in groups if group.elementwise]
    layout = make_layout(leaves, names, decays, joinable, settings.layout)
    columns = [((g.name, name), value) for g in groups for name, value in _numbers(g).items()]
    clip = settings.gradient_clip_norm > 0 or scheduled(GLOBAL, "gradient_clip_norm")
    ema = settings.ema_decay > 0 or scheduled(GLOBAL, "ema_decay")
    columns += [((GLOBAL, "gradient_clip_norm"), settings.gradient_clip_norm)] if clip else []
    columns += [((GLOBAL, "ema_decay"), settings.ema_decay)] if ema else []
    return Plan(
        tuple(groups),
        layout,
        tuple(name for name, _ in columns),
        tuple(float(value) for _, value in columns),
        tuple(no_decay),
        clip,
        ema,
    )


def decay_mask(leaves: Leaves, members: Sequence[int], no_decay: Sequence[bool]) -> Any:
    """For a whole transformation: True where weights decay, in the tree of the parameters without other groups."""
    return leaves.tree([not no_decay[i] if i in members else optax.MaskedNode() for i in range(len(no_decay))])


def _to_zero(anchor: Any) -> bool:
    return isinstance(anchor, str) and anchor == "zero"


def _pairs(leaves: Leaves) -> Sequence[tuple[str, Any]]:
    return list(zip(leaves.paths, leaves.specs, strict=True))


def _group_name(owner: str, name: Any, path: str) -> str:
    if not isinstance(name, str) or not name.isidentifier():
        raise ExperimentError(
            f"{owner}.param_group returned {name!r} for '{path}'; a group is named by a word, such as 'encoder'",
            "schedules name groups in dotted keys: opt.encoder.learning_rate",
        )
    return name


def _excluded(owner: str, answer: Any, path: str) -> bool:
    if not isinstance(answer, (bool, np.bool_)):
        raise ExperimentError(
            f"{owner}.no_decay returned {answer!r} for '{path}'; it is True or False",
            "True leaves the parameter out of decay; extend the default: "
            "return default_no_decay(path, leaf) or path.startswith('head')",
        )
    return bool(answer)


def _numbers(group: Group) -> dict[str, float]:
    numbers = dict(group.rule.hyperparameters)
    if group.decays:
        numbers["weight_decay"] = group.weight_decay
    return numbers


def _group(
    experiment: Any,
    hooks: Mapping[str, Callable[..., Any]],
    leaves: Leaves,
    name: str,
    members: Sequence[int],
    no_decay: Sequence[bool],
    settings: Settings,
    scheduled: Callable[[str, str], bool],
    kept: Kept,
) -> Group:
    owner = type(experiment).__name__
    for knob, value in (("learning_rate", settings.learning_rate), ("weight_decay", settings.weight_decay)):
        _check_range(knob, value)
    rate = _number(owner, "group_learning_rate", name, hooks["group_learning_rate"](experiment, name))
    decay = _number(owner, "group_weight_decay", name, hooks["group_weight_decay"](experiment, name))
    rate = settings.learning_rate if rate is None else rate
    decay = settings.weight_decay if decay is None else decay
    own = set(members)
    tree = leaves.tree([spec if i in own else optax.MaskedNode() for i, spec in enumerate(leaves.specs)])
    rule = _rule(experiment, hooks["optimizer"], name, rate, decay, owner)
    anchor = _anchor(owner, name, hooks["decay_anchor"](experiment, name))
    decaying = decay > 0 or scheduled(name, "weight_decay")
    if rule.whole:
        mask = decay_mask(leaves, members, no_decay)
        found = findings.of_whole(rule, name, tree, mask, None if _to_zero(anchor) else tree)
    else:
        found = findings.of_factory(rule, leaves, tree, decaying, kept)
        rule = fixing(rule, found.fixed)
    decays = decaying and not rule.decays_itself and not rule.whole
    if decays and found.pulls:
        raise ExperimentError(
            f"group '{name}' would decay twice: {rule.name} moves the weights even where the gradient is zero, and "
            f"nitro's weight_decay is {decay:g}" + (", scheduled" if scheduled(name, "weight_decay") else ""),
            "either set nitro's weight_decay to 0, or take the decay (add_decayed_weights) out of the chain and keep "
            "nitro's, which knows no_decay and anchors",
            "for decay at a place of your own in the chain: def optimizer(self, group, hp), with hp.weight_decay",
        )
    read_by_decay = ("learning_rate",) if decays else ()
    return Group(
        name=name,
        leaves=tuple(members),
        rule=rule,
        ratio=rate / settings.learning_rate,
        weight_decay=decay,
        decays=decays,
        anchor=anchor,
        elementwise=found.joined,
        at_start=tuple(name for name in found.at_start if name not in read_by_decay),
        unread=tuple(name for name in found.unread if name not in read_by_decay),
    )


def _anchor(owner: str, group: str, anchor: Any) -> Any:
    named = isinstance(anchor, str) and anchor in ("zero", "w0")
    if not named and (anchor is None or not all(hasattr(leaf, "shape") for leaf in jax.tree.leaves(anchor))):
        raise ExperimentError(
            f"{owner}.decay_anchor returned {anchor!r} for group '{group}'; it is 'zero', 'w0' or a tree of arrays",
            "'zero' is ordinary weight decay, 'w0' pulls towards the weights that build_model returned",
        )
    return anchor


def _number(owner: str, hook: str, group: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not 0 <= float(value) < np.inf:
        raise ExperimentError(
            f"{owner}.{hook} returned {value!r} for group '{group}'; it must be a number, 0 or more",
            "return None, or leave the hook out, to take the knob's value",
        )
    _check_range(f"{owner}.{hook}, group '{group}'", float(value))
    return float(value)


def _check_range(what: str, value: float) -> None:
    """Programs compute in float32 (unless jax was told otherwise): what is too large for that would be infinite."""
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    largest = float(np.finfo(dtype).max)
    if abs(value) > largest:
        raise UsageError(f"{what} is {value:g}, which is too large for {dtype}", f"the largest is {largest:g}")


def _rule(experiment: Any, hook: Callable[..., Any], group: str, rate: float, decay: float, owner: str) -> Rule:
    """What the hook's signature asks for: ``optimizer(self)``, ``(self, group)`` or ``(self, group, hp)``."""
    parameters = list(inspect.signature(hook).parameters.values())[1:]
    taken = len(parameters)
    by_position = all(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    if not by_position or (taken == 1 and parameters[0].name == "hp"):
        raise ExperimentError(
            f"{owner}.optimizer takes {', '.join(map(str, parameters))}; "
            "it is optimizer(self), (self, group) or (self, group, hp), by position"
        )
    if taken == 2:
        # It runs while the update program is traced, so it gets the view that traced hooks get. A Device value would be
        # baked in unseen, so it raises like a Host field.
        stripped = {name: StrippedHost(name) for name in device_fields(type(experiment))}
        view = compile_view(experiment, stripped)

        def whole(hp: Any) -> Any:
            return hook(view, group, hp)

        whole.__wrapped__ = hook  # what the fingerprint looks at: the experiment's own code
        return Rule(f"{owner}.optimizer", whole, {"learning_rate": rate, "weight_decay": decay}, whole=True)
    if taken not in (0, 1):
        raise ExperimentError(
            f"{owner}.optimizer takes {taken} arguments; it is optimizer(self), (self, group) or (self, group, hp)"
        )
    declared = hook(experiment) if taken == 0 else hook(experiment, group)
    return resolve_rule(declared, rate, decay, owner, group)
