"""Schedules of optimizers that an experiment steps by itself: they are bound by path, and their values are absolute.

A bare key is the name of a hyperparameter and drives it in every optimizer that has it; ``opt.gen.learning_rate`` is a
path into the tree that ``setup_optimizers`` returned, and drives what lies below it. The longer path wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from nitro_cli.errors import ExperimentError
from nitro_cli.optim.layout import make_layout
from nitro_cli.optim.leaves import Leaves
from nitro_cli.optim.manual import optimizers
from nitro_cli.optim.plan import DEFAULT, Plan
from nitro_cli.optim.rule import Rule
from nitro_cli.optim.schedules import Bound, Declared, check_one_array, keep_exact, kind_of, resolved
from nitro_cli.suggest import did_you_mean, listed


@dataclass(frozen=True)
class Optimizers:
    """The tree of optimizers as programs see it: structure and leaves, and rule and parameters by path.

    ``columns`` are the leaves that are hyperparameters, by their index; ``names`` are their paths.
    """

    leaves: Leaves
    rules: Mapping[str, Rule]
    params: Mapping[str, Leaves]
    columns: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of(cls, tree: Any) -> Optimizers:
        """Describe a tree whose leaves are arrays."""
        leaves, found = Leaves.of(tree), optimizers(tree)
        names = [_joined(path, name) for path, node in found.items() for name in node.hyperparameters]
        return cls(
            leaves,
            {path: node.static.rule for path, node in found.items()},
            {path: node.static.params for path, node in found.items()},
            tuple(leaves.paths.index(name) for name in names),
            tuple(names),
        )

    def values(self, arrays: Sequence[Any]) -> dict[str, float]:
        """The hyperparameters among the tree's leaves, by path, in as few digits as tell their floats apart."""
        return {name: float(str(np.asarray(arrays[i])[()])) for name, i in zip(self.names, self.columns, strict=True)}

    def scheduled(self, arrays: Sequence[Any], vector: Any) -> list[Any]:
        """The leaves with the hyperparameters of this step put in; nan in ``vector`` keeps what a leaf holds."""
        leaves = list(arrays)
        for column, index in enumerate(self.columns):
            value = vector[column].astype(leaves[index].dtype)
            leaves[index] = jax.numpy.where(jax.numpy.isnan(vector[column]), leaves[index], value)
        return leaves


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def manual_plan(params: Leaves, optimizers: Optimizers, kind: str) -> Plan:
    """A plan without groups: how parameters lie in buffers, and a column per hyperparameter that a schedule may drive.

    The vector without schedules is all nan: hyperparameters are leaves of the optimizers, and keep their values.
    """
    count = len(params.specs)
    return Plan(
        groups=(),
        layout=make_layout(params, [DEFAULT] * count, [False] * count, [DEFAULT], kind),
        columns=tuple(_split(name) for name in optimizers.names),
        values=(float("nan"),) * len(optimizers.names),
        no_decay=(False,) * count,
        clip=False,
        ema=False,
    )


def _split(name: str) -> tuple[str, str]:
    path, _, field = name.rpartition(".")
    return path, field


def bind_paths(
    entries: Sequence[Declared], found: Optimizers, device: Mapping[str, Any], total: int, owner: str
) -> list[Bound]:
    """Resolve every entry against the optimizers and the Device fields (name -> shape, None for several arrays).

    Raises ExperimentError for a path that is not there, a field that is no number, and a key that means two things.
    """
    bound = [_bind(entry, found, device, total, owner) for entry in entries]
    depths = [_depth(entry) for entry in entries]
    return keep_exact(entries, bound, depths, owner, lambda entry, columns: _target(entry, found, columns))


def _depth(entry: Declared) -> int:
    return len(entry.group.split(".")) if entry.group else 0


def _bind(entry: Declared, found: Optimizers, device: Mapping[str, Any], total: int, owner: str) -> Bound:
    below = _below(found, entry, owner)
    columns = [i for i, name in enumerate(found.names) if _split(name)[1] == entry.name and _split(name)[0] in below]
    in_opt = entry.namespace != "device" and bool(columns)
    in_device = entry.namespace != "opt" and entry.name in device
    if in_opt and in_device:
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}' means two things, a hyperparameter of an optimizer and a Device field",
            f"write 'opt.{entry.name}' or 'device.{entry.name}'",
        )
    if not in_opt and not in_device:
        raise _unknown(entry, found, below, [name for name, spec in device.items() if spec is not None], owner)
    schedule, constant = resolved(entry, total, owner)
    if in_device:
        check_one_array(entry, device, owner)
        target = f"Device field {entry.name}"
        return Bound(entry.key, target, schedule, constant, (), entry.name, kind_of(schedule))
    target = _target(entry, found, columns)
    return Bound(entry.key, target, schedule, constant, tuple((i, 1.0) for i in columns), None, kind_of(schedule))


def _target(entry: Declared, found: Optimizers, columns: Sequence[int]) -> str:
    return f"{entry.name} of {listed([_split(found.names[i])[0] or 'the optimizer' for i in columns])}"


def _below(found: Optimizers, entry: Declared, owner: str) -> list[str]:
    """Paths of the optimizers that an entry means: all for a bare key, those at or below its path otherwise."""
    if entry.group is None:
        return list(found.rules)
    below = [path for path in found.rules if path == entry.group or path.startswith(f"{entry.group}.")]
    if below:
        return below
    if inside := [path for path in found.rules if entry.group.startswith(f"{path}.")]:
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}' leads into the state of the optimizer '{inside[0]}'",
            f"what can be scheduled there: {listed(_names(found, inside))}",
        )
    hint = did_you_mean(entry.group, found.rules)
    raise ExperimentError(
        f"{owner}.schedules: '{entry.key}' names no optimizer: there is nothing at '{entry.group}'",
        *([hint] if hint else []),
        f"optimizers: {listed([path for path in found.rules if path]) or 'one, without a path: write opt.NAME'}",
    )


def _names(found: Optimizers, below: Sequence[str]) -> list[str]:
    return list(dict.fromkeys(_split(name)[1] for name in found.names if _split(name)[0] in below))


def _unknown(entry: Declared, found: Optimizers, below: list[str], device: list[str], owner: str) -> ExperimentError:
    fixed = {path: found.rules[path].fixed for path in below if entry.name in found.rules[path].fixed}
    known = _names(found, below)
    if entry.namespace != "device" and fixed:
        path, settings = next(iter(fixed.items()))
        value, rule = settings[entry.name], found.rules[path].name
        number = isinstance(value, (int, float, np.number)) and not isinstance(value, bool)
        why = "the rule decides by it while it is traced" if number else f"it is {type(value).__name__}, not a number"
        return ExperimentError(
            f"{owner}.schedules: '{entry.key}' cannot be scheduled: {rule} has it fixed in the program ({why})",
            f"what can be scheduled there: {listed(known)}",
        )
    if entry.namespace != "device" and entry.name in ("count", "state"):
        return ExperimentError(
            f"{owner}.schedules: '{entry.key}' is the optimizer's own state, not a hyperparameter",
            f"what can be scheduled: {listed(known)}",
        )
    whole = f"{entry.group}.{entry.name}" if entry.group else entry.name
    inside = [name for name in found.names if name.startswith(f"{whole}.")]
    if entry.namespace == "opt" and inside:
        return ExperimentError(
            f"{owner}.schedules: '{entry.key}' is an optimizer, not one of its hyperparameters",
            f"write one of: {listed([f'opt.{name}' for name in inside])}",
        )
    names = {"opt": known, "device": device}.get(entry.namespace, [*known, *device])
    hint = did_you_mean(entry.name, names)
    where = f"at '{entry.group}'" if entry.group else "of the optimizers"
    return ExperimentError(
        f"{owner}.schedules: '{entry.key}' matches nothing that can be scheduled",
        *([hint] if hint else []),
        *([f"hyperparameters {where}: {listed(known, 20) or 'none'}"] if entry.namespace != "device" else []),
        *([f"Device fields: {listed(device, 20) or 'none'}"] if entry.namespace != "opt" and not entry.group else []),
    )
