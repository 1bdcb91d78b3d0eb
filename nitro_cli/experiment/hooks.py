"""The hooks an experiment may define, and how to reach them on any class, with nitro's base or without."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from nitro_cli.errors import ExperimentError, Problem
from nitro_cli.experiment.sources import class_source
from nitro_cli.experiment.traits import config_metadata
from nitro_cli.suggest import did_you_mean, listed, nearest

E = TypeVar("E")

REQUIRED = ("build_data", "build_model", "forward", "loss")
# What an experiment needs that owns its step: forward and loss then only serve evaluation.
MANUAL = ("build_data", "build_model", "train_step", "setup_optimizers")
OPTIONAL = (
    "metrics",
    "train_metrics",
    "finalize_metrics",
    "metrics_residency",
    "derive",
    "param_group",
    "optimizer",
    "group_learning_rate",
    "group_weight_decay",
    "decay_anchor",
    "no_decay",
    "schedules",
    "checkpointer",
    "train_step",
    "setup_optimizers",
    "manual_training",
)
CLASS_HOOKS = ("presets",)
ALL = REQUIRED + OPTIONAL + CLASS_HOOKS
# Hooks that run inside a compiled program and so see the view; ``metrics`` only under device residency.
TRACED = ("forward", "loss", "train_metrics", "metrics", "train_step")

SIGNATURES = {
    "build_data": "def build_data(self, dist): ...  # {'train': ..., 'val': ..., 'test': ...}",
    "build_model": "def build_model(self, rng): ...  # (model, ps, st)",
    "forward": "def forward(self, model, ps, st, *, <batch fields>): ...  # (outputs, st_new)",
    "loss": "def loss(self, outputs, *, <batch fields>): ...  # a scalar",
    "train_step": "def train_step(self, model, ps, opt_state, st, *, <batch fields>): ...  # loss, ps, st, opt_state",
    "setup_optimizers": "def setup_optimizers(self, model, ps, st, mesh): ...  # {'gen': optimizer_state(...), ...}",
}


def default_no_decay(path: str, leaf: Any) -> bool:
    """Whether weight decay leaves a parameter alone: those of one dimension or none (biases, scales of norms)."""
    return len(leaf.shape) <= 1


def hook(experiment: Any, name: str) -> Callable[..., Any] | None:
    """The hook as a plain function that takes the experiment first: the class's own, else nitro's default, else None.

    Raises ExperimentError where the class has something by that name that is not a plain method.
    """
    from nitro_cli.experiment.base import Experiment

    cls = experiment if isinstance(experiment, type) else type(experiment)
    found = inspect.getattr_static(cls, name, None)
    if found is None:
        found = inspect.getattr_static(Experiment, name, None)
    if found is None or inspect.isfunction(found):
        return found
    what = f"{cls.__name__}.{name} is a {type(found).__name__}, not a plain method"
    note = f"write it as `def {name}(self, ...)`; nitro compiles hooks itself, so they need no decorator"
    raise ExperimentError(what, note, place=class_source(cls).place(name))


def is_complete(names: Iterable[str]) -> bool:
    """Whether these methods are all that one of the two ways to train needs."""
    there = set(names)
    return set(REQUIRED) <= there or set(MANUAL) <= there


def owns_step(experiment: Any) -> bool:
    """Whether the experiment trains by its own ``train_step``: it has one, and ``manual_training`` does not decline.

    Raises ExperimentError where ``manual_training`` gives no truth value, or asks for a step that is not there.
    """
    cls = type(experiment)
    decide, has_step = hook(cls, "manual_training"), hook(cls, "train_step") is not None
    decided = decide(experiment) if decide is not None else has_step
    place = class_source(cls).place("manual_training")
    if not isinstance(decided, bool):
        what = f"{cls.__name__}.manual_training returned {decided!r}; it is True or False"
        raise ExperimentError(what, "False keeps train_step in the source and trains automatically", place=place)
    if decided and not has_step:
        what = f"{cls.__name__}.manual_training returned True, and there is no train_step"
        raise ExperimentError(
            what, f"write it: {SIGNATURES['train_step']}", "or leave manual_training out", place=place
        )
    return decided


def require_hooks(cls: type, required: Iterable[str] = REQUIRED) -> None:
    """Raises ExperimentError that lists every required hook the class lacks, with method names that come near."""
    missing = [name for name in required if hook(cls, name) is None]
    if not missing:
        return
    methods = [name for name in user_methods(cls) if name not in ALL]
    problems = []
    for name in missing:
        close = difflib.get_close_matches(name, methods, n=1, cutoff=0.6)
        label = f"is '{close[0]}' meant to be it?" if close else ""
        place = class_source(cls).place(close[0] if close else None)
        what = f"{cls.__name__} has no hook '{name}'"
        problems.append(Problem(what, place, label, (SIGNATURES[name],), {"hook": name}))
    raise ExperimentError(problems)


def user_methods(cls: type) -> list[str]:
    """Names of functions that the user's classes define."""
    names: dict[str, None] = {}
    for klass in cls.__mro__:
        if (
            klass.__module__.partition(".")[0] not in ("pydantic", "builtins")
            and "__nitro_base__" not in klass.__dict__
        ):
            names.update(dict.fromkeys(name for name, value in klass.__dict__.items() if inspect.isfunction(value)))
    return list(names)


def near_miss(name: str, defined: Iterable[str]) -> str | None:
    """The hook that a method named ``name`` was probably meant to be, if that hook is not defined itself."""
    if name.startswith("_") or name in ALL:
        return None
    close = difflib.get_close_matches(name, ALL, n=1, cutoff=0.85)
    return close[0] if close and close[0] not in set(defined) else None


def knob(experiment: Any, name: str) -> Any:
    """The value of a knob: the experiment's own field, or nitro's default for a class without it."""
    from nitro_cli.experiment.base import Experiment

    if name in config_metadata(type(experiment)):
        return getattr(experiment, name)
    return config_metadata(Experiment)[name].default


def replace_fields(experiment: E, **changes: Any) -> E:
    """A copy with some fields changed and validated. Raises UsageError with every unknown name and bad value."""
    from nitro_cli.experiment.base import Experiment, check_values

    if isinstance(experiment, Experiment):
        return experiment.replace(**changes)
    checked = check_values(type(experiment), changes)
    if dataclasses.is_dataclass(experiment) and not isinstance(experiment, type):
        return dataclasses.replace(experiment, **checked)
    twin = copy.copy(experiment)
    for name, value in checked.items():
        object.__setattr__(twin, name, value)
    return twin


def unknown_field(cls: type, name: str, where: str = "") -> Problem:
    """The problem of a name that is no field of ``cls``, with the nearest one and the list."""
    fields = list(config_metadata(cls))
    flat = "fields are flat; " if "." in name else ""
    label = flat + did_you_mean(name, fields)
    note = f"{cls.__name__} has {len(fields)} fields: {listed(fields, 20)}"
    facts = {"field": name, "suggestions": nearest(name, fields)}
    return Problem(f"unknown field '{name}'{where}", None, label.removesuffix("; "), (note,), facts)
