"""What set-up does for an experiment that owns its step: its optimizers, what can evaluate it, and its report rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.content import short_value
from nitro_cli.experiment.hooks import SIGNATURES, hook
from nitro_cli.experiment.sources import class_source
from nitro_cli.optim.bindings import Optimizers
from nitro_cli.run.report import GroupRow
from nitro_cli.suggest import listed

Hooks = Mapping[str, Callable[..., Any]]
# What only the automatic loop does: as knobs with the value that means "off", and as hooks.
_KNOBS = {"weight_decay": 0.0, "gradient_clip_norm": 0.0, "ema_decay": 0.0, "compute_dtype": None}
_HOOKS = (
    *("optimizer", "param_group", "group_learning_rate", "group_weight_decay", "decay_anchor", "no_decay"),
    "train_metrics",
)


def set_up_optimizers(experiment: Any, hooks: Hooks, model: Any, ps: Any, st: Any) -> tuple[Any, Optimizers]:
    """``(tree of arrays, its description)`` of what ``setup_optimizers`` returned. Raises ExperimentError where it
    holds anything but numeric arrays."""
    cls = type(experiment)
    place = class_source(cls).place("setup_optimizers")
    # one device until there is a mesh
    tree = hooks["setup_optimizers"](experiment, model, ps, st, None)
    if tree is None:
        what = f"{cls.__name__}.setup_optimizers returned None"
        raise ExperimentError(what, f"return a tree of optimizers: {SIGNATURES['setup_optimizers']}", place=place)
    arrays = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        where = jax.tree_util.keystr(path, simple=True, separator=".") or "value"
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float)):
            what = f"{cls.__name__}.setup_optimizers returned {_kind(leaf)} at '{where}'"
            note = "every leaf is an array: write optimizer_state(optax.adam, ps['gen'], learning_rate=2e-4)"
            raise ExperimentError(what, note, place=place)
        arrays.append(leaf if hasattr(leaf, "dtype") else np.asarray(leaf))
    tree = jax.tree.unflatten(jax.tree.structure(tree), [_canonical(leaf) for leaf in arrays])
    return tree, Optimizers.of(tree)


def _canonical(leaf: Any) -> Any:
    if jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return leaf
    dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
    return leaf if leaf.dtype == dtype else np.asarray(leaf, dtype)


def _kind(leaf: Any) -> str:
    name = type(leaf).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def check_evaluable(cls: type, hooks: Hooks, splits: Mapping[str, Any]) -> None:
    """Raises ExperimentError where there is a ``val`` split, and nothing to evaluate it with after each epoch."""
    lacking = [] if "forward" in hooks else ["forward"]
    lacking += [] if "metrics" in hooks or "loss" in hooks else ["metrics"]
    if "val" not in splits or not lacking:
        return
    raise ExperimentError(
        f"{cls.__name__} has a 'val' split, and no hook {listed([repr(name) for name in lacking])} to evaluate it with",
        "in manual mode forward and metrics serve evaluation alone (loss gives val_loss where there is no metrics)",
        "define what is missing, or leave the split out of build_data",
        place=class_source(cls).place(),
    )


def check_knobs(knobs: Any) -> None:
    """Raises ExperimentError for a knob that cannot be obeyed without the automatic loop."""
    if knobs.evaluate_with_ema:
        raise ExperimentError(
            "evaluate_with_ema needs the moving average of the automatic loop, and this experiment owns its step",
            "keep an average of your own in st with moving_average(...), and evaluate with it in forward",
        )


def manual_notes(experiment: Any, hooks: Hooks, knobs: Any, residency: Mapping[str, str]) -> list[str]:
    """What nitro itself does not do in manual mode, where the experiment asks for it."""
    cls = type(experiment)
    notes = [
        f"manual mode: nitro does not apply {name} (it is {getattr(knobs, name)}); train_step does, if anything"
        for name, off in _KNOBS.items()
        if getattr(knobs, name) != off
    ]
    own = [name for name in _HOOKS if name in hooks and hooks[name] is not getattr(Experiment, name, None)]
    if residency["train_metrics"] == "host":
        own = [name for name in own if name != "train_metrics"]
    if own:
        notes.append(f"manual mode: {listed(own)} of {cls.__name__} {'is' if len(own) == 1 else 'are'} not called")
    return notes


def declined_notes(experiment: Any, hooks: Hooks) -> list[str]:
    """What an experiment defines for manual mode, where the automatic loop trains it."""
    if "train_step" in hooks:
        return ["manual_training returns False: train_step is not called, and the automatic loop trains"]
    if hook(type(experiment), "setup_optimizers") is not None:
        return ["setup_optimizers is not called: there is no train_step, so the automatic loop trains"]
    return []


def optimizer_rows(optimizers: Optimizers, arrays: Any) -> list[GroupRow]:
    """A row per optimizer, as the automatic loop has one per parameter group."""
    values = optimizers.values(jax.tree.leaves(arrays))
    rows = []
    for path, rule in optimizers.rules.items():
        own = {name: values[f"{path}.{name}" if path else name] for name in rule.hyperparameters}
        rate = own.pop("learning_rate", float("nan"))
        specs = optimizers.params[path].specs
        rows.append(
            GroupRow(
                group=path or "default",
                rule=rule.name,
                learning_rate=rate,
                ratio=1.0,
                weight_decay=own.get("weight_decay", 0.0),
                anchor="zero",
                hyperparameters=own,
                fixed={name: short_value(value) for name, value in rule.fixed.items()},
                parameters=sum(int(np.prod(spec.shape)) for spec in specs),
                leaves=len(specs),
                joined=False,
            )
        )
    return rows
