"""Schedules: from the names that ``schedules(self)`` declares to the numbers of every step.

There are two namespaces: ``opt``, the hyperparameters of the optimizer, and ``device``, the Device fields. A bare key
must mean exactly one thing; ``opt.weight_decay`` and ``device.temperature`` say which; ``opt.encoder.learning_rate``
means one group. Steps are counted as optax counts them: the first update is step 0, so a schedule over ``total`` steps
is asked for 0 .. total - 1.

A schedule that jax can trace is tabulated ahead, a block of steps at once; any other is called on the host, once per
step. Either way its values are exactly those of a call with the number of the step, and they enter the programs as
arguments.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro_cli.errors import ExperimentError
from nitro_cli.optim.exact import at_many
from nitro_cli.optim.plan import GLOBAL, Plan
from nitro_cli.optim.rule import limit
from nitro_cli.suggest import did_you_mean, listed

NAMESPACES = ("opt", "device")
BLOCK = 1024  # steps tabulated in one call; fixed, so that the call is compiled once

# How a schedule gives its values: for a block of steps by a compiled call; for a block of steps by Python's own
# arithmetic, which is float64 and so must not be compiled; or for one step by a call, when that step comes.
TRACED, PLAIN, HOST = "traced", "plain", "host"


@dataclass(frozen=True)
class Declared:
    """One entry of ``schedules(self)``. ``namespace`` is "" for a bare key, ``group`` None unless a path names it."""

    key: str
    namespace: str
    group: str | None
    name: str
    value: Any


@dataclass(frozen=True)
class Bound:
    """A schedule and what it drives: columns of the hyperparameter vector with factors (ratios), or a Device field."""

    key: str
    target: str
    schedule: Callable[[Any], Any]
    constant: bool
    columns: tuple[tuple[int, float], ...] = ()
    field: str | None = None
    kind: str = HOST


def parse(declared: Any, owner: str, paths: bool = False) -> list[Declared]:
    """Flatten what the hook returned. Raises ExperimentError for anything but nested dicts of schedules.

    ``paths`` allows keys of any depth below ``opt``: paths into a tree of optimizers, not names of groups.
    """
    if not isinstance(declared, Mapping):
        raise ExperimentError(
            f"{owner}.schedules must return a dict, and returned {type(declared).__name__}",
            'for example: return {"learning_rate": lambda total: optax.cosine_decay_schedule(1e-3, total)}',
        )
    entries = []
    for key, value in _flat(declared, ""):
        parts = key.split(".")
        if "" in parts:
            raise ExperimentError(
                f"{owner}.schedules: '{key}' has an empty part",
                "keys are words joined by single dots: opt.learning_rate",
            )
        if any(key == entry.key for entry in entries):
            raise ExperimentError(
                f"{owner}.schedules: '{key}' is given twice, as a dotted key and in a dict", "leave one of them out"
            )
        namespace = parts[0] if parts[0] in NAMESPACES else ""
        rest = parts[1:] if namespace else parts
        if namespace and not rest:
            raise ExperimentError(
                f"{owner}.schedules: '{key}' must be a dict of schedules, and is {type(value).__name__}",
                f'write: {{"{key}": {{"learning_rate": ...}}}}, or the dotted key "{key}.learning_rate"',
            )
        if len(rest) > (2 if namespace == "opt" else 1) and not (paths and namespace == "opt"):
            raise ExperimentError(
                f"{owner}.schedules: '{key}' is too deep",
                f"keys are `name`, `opt.name`, `opt.{'path' if paths else 'group'}.name` or `device.name`",
            )
        group = ".".join(rest[:-1]) or None
        entries.append(Declared(key, namespace, group, rest[-1], value))
    return entries


def _flat(node: Mapping[Any, Any], prefix: str) -> list[tuple[str, Any]]:
    found = []
    for key, value in node.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        found += _flat(value, path) if isinstance(value, Mapping) else [(path, value)]
    return found


def mentions(entries: Sequence[Declared]) -> Callable[[str, str], bool]:
    """Whether a schedule is declared for a group's hyperparameter, for ``make_plan``."""

    def scheduled(group: str, name: str) -> bool:
        return any(e.namespace != "device" and e.name == name and e.group in (None, group) for e in entries)

    return scheduled


def bind(
    entries: Sequence[Declared], plan: Plan, device: Mapping[str, Any], total: int, owner: str, own_decay: bool
) -> list[Bound]:
    """Resolve every entry against the plan and the Device fields (name -> shape, None for a field of several arrays).

    ``own_decay`` says that the experiment defines ``group_weight_decay``, which a bare ``weight_decay`` schedule would
    override. A later, more exact key wins: a group path over a bare one. Raises ExperimentError for a key that means
    nothing or two things.
    """
    bound = [_bind(entry, plan, device, total, owner, own_decay) for entry in entries]
    depths = [1 if entry.group else 0 for entry in entries]
    return keep_exact(entries, bound, depths, owner, lambda entry, columns: _target(entry, plan, columns))


def keep_exact(
    entries: Sequence[Declared],
    bound: Sequence[Bound],
    depths: Sequence[int],
    owner: str,
    target: Callable[[Declared, Sequence[int]], str],
) -> list[Bound]:
    """Every number to the key that names it at the greatest depth; ``target`` says what is left to a key.

    Raises ExperimentError for two keys of one depth, and for one that is left with nothing.
    """
    _refuse_rivals(entries, bound, owner)
    deepest: dict[int, int] = {}
    for depth, b in zip(depths, bound, strict=True):
        for column, _ in b.columns:
            deepest[column] = max(deepest.get(column, -1), depth)
    result = []
    for entry, depth, b in zip(entries, depths, bound, strict=True):
        columns = tuple((column, factor) for column, factor in b.columns if deepest[column] == depth)
        if b.columns and not columns:
            raise ExperimentError(
                f"{owner}.schedules: '{entry.key}' drives nothing: more exact keys drive {b.target}",
                "leave it out",
            )
        said = target(entry, [column for column, _ in columns]) if columns else b.target
        result.append(dataclasses.replace(b, columns=columns, target=said))
    return result


def _refuse_rivals(entries: Sequence[Declared], bound: Sequence[Bound], owner: str) -> None:
    """Raises ExperimentError where two keys of the same depth drive the same number: neither would be the exact one."""
    taken: dict[Any, str] = {}
    for entry, b in zip(entries, bound, strict=True):
        for driven in (*((entry.group, column) for column, _ in b.columns), *([b.field] if b.field else [])):
            if driven in taken:
                raise ExperimentError(
                    f"{owner}.schedules: '{taken[driven]}' and '{entry.key}' both drive {b.target}",
                    "leave one of them out",
                )
            taken[driven] = entry.key


def _bind(entry: Declared, plan: Plan, device: Mapping[str, Any], total: int, owner: str, own_decay: bool) -> Bound:
    fields = list(dict.fromkeys(name for _, name in plan.columns))
    in_opt = entry.namespace != "device" and (entry.name in fields or entry.group is not None)
    in_device = entry.namespace != "opt" and entry.name in device
    if entry.group is not None and entry.group not in [g.name for g in plan.groups]:
        groups = [g.name for g in plan.groups]
        hint = did_you_mean(entry.group, groups)
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}' names no parameter group: there is no '{entry.group}'",
            *([hint] if hint else []),
            f"groups: {listed(groups)}",
        )
    if in_opt and in_device:
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}' means two things, an optimizer hyperparameter and a Device field",
            f"write 'opt.{entry.name}' or 'device.{entry.name}'",
        )
    if not in_opt and not in_device:
        raise _meaningless(entry, plan, fields, [name for name, spec in device.items() if spec is not None], owner)
    schedule, constant = resolved(entry, total, owner)
    if in_device:
        check_one_array(entry, device, owner)
        target = f"Device field {entry.name}"
        return Bound(entry.key, target, schedule, constant, (), entry.name, kind_of(schedule))
    wanted = [i for i, (group, name) in enumerate(plan.columns) if name == entry.name]
    if entry.group is not None:
        wanted = [i for i in wanted if plan.columns[i][0] == entry.group]
        if not wanted:
            if (GLOBAL, entry.name) in plan.columns:
                raise ExperimentError(
                    f"{owner}.schedules: '{entry.key}': {entry.name} belongs to no group, but to all parameters "
                    "together",
                    f"write 'opt.{entry.name}'",
                )
            known = [name for group, name in plan.columns if group == entry.group]
            hint = did_you_mean(entry.name, known)
            raise ExperimentError(
                f"{owner}.schedules: group '{entry.group}' has no hyperparameter '{entry.name}'",
                *([hint] if hint else []),
                f"it has: {listed(known)}",
            )
    if entry.name == "weight_decay" and entry.group is None and own_decay:
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}' would override the hook group_weight_decay in every group",
            f"schedule it by group (opt.{plan.groups[-1].name}.weight_decay), or leave the hook out",
        )
    read = [i for i in wanted if plan.columns[i] not in plan.idle]
    if not read:
        raise _idle(entry, plan, wanted[0], owner)
    columns = tuple((i, _ratio(plan, i)) for i in read)
    return Bound(entry.key, _target(entry, plan, read), schedule, constant, columns, None, kind_of(schedule))


def check_one_array(entry: Declared, device: Mapping[str, Any], owner: str) -> None:
    """Raises ExperimentError for a Device field that is a tuple, list or dict."""
    if device[entry.name] is None:
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}': the Device field '{entry.name}' holds several arrays, and a schedule "
            "drives one",
            "make what changes a field of its own",
        )


def _target(entry: Declared, plan: Plan, columns: Sequence[int]) -> str:
    groups = list(dict.fromkeys(plan.columns[i][0] for i in columns))
    return entry.name if groups == [GLOBAL] else f"{entry.name} of {listed(groups)}"


def _ratio(plan: Plan, column: int) -> float:
    group, name = plan.columns[column]
    return plan.group(group).ratio if name == "learning_rate" else 1.0


def _idle(entry: Declared, plan: Plan, column: int, owner: str) -> ExperimentError:
    group = plan.group(plan.columns[column][0])
    rule, name = group.rule.name, entry.name
    why, fix = f"{rule} does not use {name}", "use it there, or leave the schedule out"
    if name in group.at_start:
        why = f"{rule} reads {name} before the first step only"
        fix = "what is read once takes a value, not a schedule: give it to the factory"
        if name == "learning_rate":
            fix = "and keeps it in its state, as inject_hyperparams does: take the factory that it wraps"
    return ExperimentError(f"{owner}.schedules: '{entry.key}' would change nothing: {why}", fix)


def _meaningless(entry: Declared, plan: Plan, fields: list[str], device: list[str], owner: str) -> ExperimentError:
    if entry.namespace != "device" and entry.name in [group.name for group in plan.groups]:
        return ExperimentError(
            f"{owner}.schedules: '{entry.key}' is a parameter group, not one of its hyperparameters",
            f"write one of: {listed([f'opt.{group}.{name}' for group, name in plan.columns if group == entry.name])}",
        )
    known = {"opt": fields, "device": device}.get(entry.namespace, [*fields, *device])
    hint = did_you_mean(entry.name, known)
    return ExperimentError(
        f"{owner}.schedules: '{entry.key}' matches nothing that can be scheduled",
        *([hint] if hint else []),
        *([f"optimizer hyperparameters: {listed(fields, 20)}"] if entry.namespace != "device" else []),
        *([f"Device fields: {listed(device, 20) or 'none'}"] if entry.namespace != "opt" else []),
    )


def resolved(entry: Declared, total: int, owner: str) -> tuple[Callable[[Any], Any], bool]:
    """The schedule itself: a number is constant, a factory of the horizon is called with it, anything else is asked
    for its values as it is."""
    value = entry.value
    if isinstance(value, (np.ndarray, jax.Array)) and value.shape == () and value.dtype.kind in "iuf":
        value = value.item()
    if isinstance(value, (int, float, np.number)) and not isinstance(value, bool):
        if not math.isfinite(float(value)):
            raise ExperimentError(f"{owner}.schedules: '{entry.key}' is {value}", "a schedule is finite at every step")
        return (lambda step: np.float64(value)), True
    if not callable(value):
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}' is {type(value).__name__}; it must be a number, an optax schedule, or a "
            "function of the total number of steps that returns one",
            "for example: lambda total: optax.cosine_decay_schedule(1e-3, total)",
        )
    try:
        made = value(total)
    except Exception as error:
        if _is_schedule(value):
            return value, False  # a curve that has no value past its end
        if not _takes_one(value):
            raise ExperimentError(
                f"{owner}.schedules: '{entry.key}' is a function that cannot be called with one number",
                "a factory takes the total number of steps, a schedule the number of the step: "
                "lambda total: optax.cosine_decay_schedule(1e-3, total)",
            ) from error
        raise ExperimentError(
            f"{owner}.schedules: '{entry.key}' failed for a run of {total} steps: {type(error).__name__}: {error}",
            "the run has max_epochs * batches / accum steps; check warm-up and decay lengths against that",
        ) from error
    return (made, False) if callable(made) else (value, False)


def _is_schedule(function: Callable[[Any], Any]) -> bool:
    try:
        return isinstance(function(0), (int, float, np.number, np.ndarray, jax.Array))
    except Exception:  # whatever it raises, it is no schedule that has a first step
        return False


def _takes_one(function: Callable[..., Any]) -> bool:
    try:
        inspect.signature(function).bind(0)
    except TypeError:
        return False
    except ValueError:  # a builtin that does not say what it takes
        pass
    return True


def kind_of(schedule: Callable[[Any], Any]) -> str:
    """``TRACED``, ``PLAIN`` or ``HOST``. Compiles nothing."""
    ints = jax.ShapeDtypeStruct((2,), np.int32)
    try:
        jax.eval_shape(at_many(schedule), ints, ints)
    except Exception:  # whatever a host function does with a tracer: it will be called with plain numbers instead
        return HOST
    given: list[Any] = []
    try:
        jax.eval_shape(lambda: given.append(schedule(0)))
    except Exception:  # 1 / step has no value at step 0 in Python, and an infinite one, which will be reported, in jax
        return TRACED
    return PLAIN if isinstance(given[0], (int, float, np.number, np.ndarray)) else TRACED


class Table:
    """The values of all schedules, step by step.

    ``vector(step)`` is float[columns] and ``fields(step)`` the scheduled Device values; both cost an index once their
    block of steps is tabulated. ``driven`` are the names of the Device fields that a schedule drives; ``waiting`` those
    that would follow one, if there were a train split and so a horizon.
    """

    def __init__(
        self,
        bound: Sequence[Bound],
        plan: Plan,
        device: Mapping[str, Any],
        total: int,
        owner: str,
        waiting: Sequence[str] = (),
    ) -> None:
        self.bound = [b for b in bound if b.columns or b.field]
        self.total, self.waiting = total, tuple(waiting)
        self._plan, self._device, self._owner = plan, device, owner
        self._traced = [b for b in self.bound if b.kind == TRACED]
        self._plain = [b for b in self.bound if b.kind == PLAIN]
        self._host = [b for b in self.bound if b.kind == HOST]
        self.driven = tuple(b.field for b in self.bound if b.field)
        self._block = -1
        self._values: dict[str, np.ndarray] = {}
        self._vectors = np.zeros((0, len(plan.columns)))
        self._held: dict[str, Any] = {}
        self._asked: dict[tuple[str, int], Any] = {}  # of schedules on the host, until the log has shown them

    def __bool__(self) -> bool:
        return bool(self.bound)

    def vector(self, step: int) -> np.ndarray:
        """The hyperparameters of ``step``: float[columns]."""
        block, row = divmod(step, BLOCK)
        if block != self._block:
            self._tabulate(block)
        vector = self._vectors[row]
        for b in self._host:
            if b.columns:
                value = self._call(b, step)
                for column, factor in b.columns:
                    vector[column] = value * factor
        return vector

    def fields(self, step: int) -> dict[str, np.ndarray]:
        """The scheduled Device fields at ``step``, each with its field's shape and dtype."""
        block, row = divmod(step, BLOCK)
        if block != self._block:
            self._tabulate(block)
        return {
            b.field: self._cast(b, self._call(b, step) if b.kind == HOST else self._values[b.key][row])
            for b in self.bound
            if b.field
        }

    def shown(self, step: int) -> dict[str, float]:
        """What the log says of ``step``: each schedule's own value by its key."""
        if step // BLOCK != self._block:
            self._tabulate(step // BLOCK)
        row = step % BLOCK
        values = {b.key: self._call(b, step) if b.kind == HOST else self._values[b.key][row] for b in self.bound}
        for b in self._host:
            self._asked.pop((b.key, step), None)
        return {key: float(value) for key, value in values.items() if np.ndim(value) == 0}

    def curves(self, points: int = 60) -> dict[str, list[tuple[int, float]]]:
        """``(step, value)`` of every schedule at evenly spaced steps of the run, for a plot. Of an array, its mean."""
        steps = self._along(min(points, BLOCK))
        ahead = self._evaluated(steps)

        def value(b: Bound, index: int, step: int) -> float:
            return float(np.mean(ahead[b.key][index] if b.key in ahead else self._call(b, step)))

        spaced = list(enumerate(dict.fromkeys(steps.tolist())))
        return {b.key: [(step, value(b, i, step)) for i, step in spaced] for b in self.bound}

    def check(self, step: int) -> None:
        """Before any work, evaluate every schedule at ``step``, and those that need not wait along the whole run.

        Raises ExperimentError for values that are no numbers, not finite, out of range or of another shape.
        """
        if self.bound and step < self.total:
            self.vector(step)
            self.fields(step)
            self._evaluated(self._along(BLOCK))

    def _along(self, points: int) -> np.ndarray:
        """int32[BLOCK]: up to ``points`` evenly spaced steps of the run, in order, the last one repeated."""
        last = max(self.total - 1, 0)
        steps = sorted({round(i * last / max(points - 1, 1)) for i in range(points)})
        return np.array(steps + [last] * (BLOCK - len(steps)), np.int32)

    def _evaluated(self, steps: np.ndarray) -> dict[str, np.ndarray]:
        """By key, the checked values of the schedules that need not wait for their step, at ``BLOCK`` steps."""
        values = {b.key: np.stack([self._at(b, step) for step in steps.tolist()]) for b in self._plain}
        if self._traced:
            zeros = np.zeros(len(steps), np.int32)
            values |= zip([b.key for b in self._traced], jax.device_get(self._compiled(steps, zeros)), strict=True)
        for b in (*self._traced, *self._plain):
            self._check(b, values[b.key], steps)
        return values

    @functools.cached_property
    def _compiled(self) -> Callable[..., Any]:
        """The traced schedules in one call."""
        schedules = [at_many(b.schedule) for b in self._traced]

        def nitro_schedules(steps: Any, zeros: Any) -> Any:
            return [schedule(steps, zeros) for schedule in schedules]

        return jax.jit(nitro_schedules)

    def _tabulate(self, block: int) -> None:
        steps = np.arange(block * BLOCK, (block + 1) * BLOCK, dtype=np.int32)
        # Beyond the horizon a curve holds its last value: it was asked for `total` steps, not for more.
        self._values = self._evaluated(np.minimum(steps, max(self.total - 1, 0)))
        self._vectors = np.tile(self._plan.vector(), (BLOCK, 1))
        for b in (*self._traced, *self._plain):
            values = self._values[b.key]
            for column, factor in b.columns:
                self._vectors[:, column] = values.astype(np.float64) * factor
        self._block = block

    def _call(self, b: Bound, step: int) -> Any:
        """A host schedule at ``step``, which is called once for it, so that the log shows what the program was given.
        One that fails beyond the horizon holds its last value, and says so once."""
        if step >= self.total and b.key in self._held:
            return self._held[b.key]
        if (b.key, step) in self._asked:
            return self._asked[b.key, step]
        try:
            value = self._at(b, step)
        except ExperimentError:
            if step < self.total:
                raise
            self._held[b.key] = value = self._at(b, max(self.total - 1, 0))
            warnings.warn(
                f"the schedule '{b.key}' has no value for step {step}, past its horizon of {self.total} steps; "
                "it holds its last value",
                stacklevel=2,
            )
        self._check(b, value[None], np.array([step]))
        self._asked[b.key, step] = value
        return value

    def _at(self, b: Bound, step: int) -> np.ndarray:
        try:
            return np.asarray(b.schedule(step))
        except Exception as error:
            raise ExperimentError(
                f"{self._owner}.schedules: '{b.key}' failed at step {step}: {type(error).__name__}: {error}",
                f"it is called with the number of every step of the run, 0 to {max(self.total - 1, 0)}",
            ) from error

    def _check(self, b: Bound, values: np.ndarray, steps: np.ndarray) -> None:
        where = f"{self._owner}.schedules: '{b.key}'"
        if not (jnp.issubdtype(values.dtype, jnp.integer) or jnp.issubdtype(values.dtype, jnp.floating)):
            what = {"O": "objects", "U": "texts", "b": "bools"}.get(values.dtype.kind, str(values.dtype))
            raise ExperimentError(f"{where} gives {what}, not numbers", "return one int or float for every step")
        shape = values.shape[1:]
        if b.field is None and shape != ():
            raise ExperimentError(f"{where} gives arrays of shape {shape}; a hyperparameter is one number per step")
        if b.field and shape != tuple(self._device[b.field].shape):
            raise ExperimentError(
                f"{where} gives shape {shape} for the field '{b.field}', which has shape "
                f"{tuple(self._device[b.field].shape)}",
                "a scheduled field keeps its shape: another one would be another program",
            )
        dtype = jax.dtypes.canonicalize_dtype(np.float64)  # what the program computes in, where 1e39 is infinite
        seen = values.astype(np.float64).reshape(len(values), -1)
        checks = [(np.isfinite, "a curve must be finite at every one of them", 1.0)]
        if self._plan.groups:
            checks += [(*limit(self._plan.columns[column][1]), factor) for column, factor in b.columns]
        for good, note, factor in checks:
            with np.errstate(over="ignore"):
                taken = (seen * factor).astype(dtype) if b.field is None else seen
            bad = np.flatnonzero(~(good(taken) & np.isfinite(taken)).all(1))
            if len(bad):
                value, step = float(seen[bad[0]][0]), int(steps[bad[0]])
                raise ExperimentError(
                    f"{where} is {value:.9g} at step {step} of {self.total}", f"steps are counted from 0; {note}"
                )

    def _cast(self, b: Bound, value: Any) -> Any:
        return np.asarray(value).astype(self._device[b.field or ""].dtype)
