"""Set-up: from an experiment to everything that a handle freezes. Runs the host hooks once; compiles no program.

The order is fixed and each step needs the one before: hooks and knobs, data, derived values, GraphConst checks, Device
values, model, routing of batch fields, optimizer rule, report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from typing import Any

import jax
import numpy as np

from nitro_cli.data.routing import Route
from nitro_cli.data.source import check_source
from nitro_cli.errors import ExperimentError, UsageError
from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.content import check_graphconst, content_digest, short_value
from nitro_cli.experiment.discovery import experiment_name
from nitro_cli.experiment.hooks import (
    ALL,
    CLASS_HOOKS,
    MANUAL,
    REQUIRED,
    hook,
    knob,
    owns_step,
    replace_fields,
    require_hooks,
)
from nitro_cli.experiment.presets import Resolved, Source
from nitro_cli.experiment.signatures import check_signatures
from nitro_cli.experiment.sources import class_source
from nitro_cli.experiment.traits import config_metadata, device_fields, graphconst_fields
from nitro_cli.models import model_content
from nitro_cli.optim.bindings import Optimizers, bind_paths, manual_plan
from nitro_cli.optim.layout import KINDS
from nitro_cli.optim.leaves import Leaves
from nitro_cli.optim.plan import Plan, Settings, make_plan
from nitro_cli.optim.rule import Rule
from nitro_cli.optim.schedules import Bound, Table, bind, mentions, parse
from nitro_cli.optim.update import anchored_buffers
from nitro_cli.programs.answers import kept_answer
from nitro_cli.programs.fingerprint import atom
from nitro_cli.programs.recipe import Recipe
from nitro_cli.run.batches import check_ragged, route_batches
from nitro_cli.run.checkpoints import CheckpointPolicy
from nitro_cli.run.manual_setup import (
    check_evaluable,
    check_knobs,
    set_up_optimizers,
)
from nitro_cli.run.report import Report
from nitro_cli.run.reporting import make_report
from nitro_cli.suggest import did_you_mean, listed, nearest


@dataclass(frozen=True)
class Knobs:
    """The settings of a run that only the driver reads."""

    seed: int
    max_epochs: int
    learning_rate: float
    weight_decay: float
    accum: int
    gradient_clip_norm: float
    ema_decay: float
    evaluate_with_ema: bool
    param_dtype: str | None
    compute_dtype: str | None
    parameter_layout: str
    run_dir: Any
    check_divergence: bool


KNOBS = tuple(f.name for f in dataclass_fields(Knobs))


@dataclass
class Setup:
    """What set-up gives. ``params`` are the buffers of the layout, ``state`` and ``device`` the leaves of their trees,
    ``anchors`` what the buffers that decay elsewhere than to zero decay to: arrays on the device. ``opt_state`` are the
    leaves of the optimizers of an experiment that owns its step; None in the automatic loop, which makes them later."""

    experiment: Any
    name: str
    knobs: Knobs
    sources: dict[str, Source]
    preset: str | None
    splits: dict[str, Any]
    schema: dict[str, dict[str, jax.ShapeDtypeStruct]]
    train_width: int | None
    eval_width: int
    recipe: Recipe
    model_content: Any
    params: list[jax.Array]
    state: list[jax.Array]
    opt_state: list[Any] | None
    device: list[jax.Array]
    anchors: list[jax.Array]
    schedules: Table
    policy: CheckpointPolicy
    explicit_policy: bool
    graphconst: dict[str, dict[str, str]]
    report: Report


def set_up(experiment: Any, data: Any, resolved: Resolved | None, knobs: Mapping[str, Any]) -> Setup:
    """Run set-up. Raises ExperimentError for anything that the experiment has wrong, before any compile."""
    cls = type(experiment)
    hooks = {name: found for name in ALL if name not in CLASS_HOOKS and (found := hook(cls, name)) is not None}
    sources = dict(resolved.sources) if resolved else {}
    experiment, extra = _with_fields(experiment, knobs, sources)
    manual = owns_step(experiment)
    require_hooks(cls, MANUAL if manual else REQUIRED)
    check_signatures(cls)

    splits = _splits(cls, hooks["build_data"](experiment, None) if data is None else data)
    check_ragged(splits)
    experiment = _derived(experiment, hooks, splits, sources)
    settings = Knobs(**{name: extra.get(name, knob(experiment, name)) for name in KNOBS})
    for name in graphconst_fields(cls):
        check_graphconst(cls, name, getattr(experiment, name))

    device_tree = {name: _device_field(experiment, name) for name in device_fields(cls)}
    model, params_tree, state_tree = _model(experiment, hooks, settings)
    params = Leaves.of(params_tree)
    _check_params(cls, params)

    residency = {name: _residency(cls, hooks, experiment, name) for name in ("metrics", "train_metrics")}
    schema, widths, routes = route_batches(cls, hooks, splits, residency, manual)
    train = splits.get("train")
    if train is not None and len(train) % settings.accum:
        raise _indivisible(len(train), settings.accum)
    if manual and train is not None:
        _check_accum(cls, settings.accum, routes["train_step"])
    declared = parse(hooks["schedules"](experiment), cls.__name__, manual)
    opt_state = optimizers = None
    if manual:
        check_evaluable(cls, hooks, splits)
        check_knobs(settings)
        opt_state, optimizers = set_up_optimizers(experiment, hooks, model, params_tree, state_tree)
        plan = manual_plan(params, optimizers, _plan_settings(settings).layout)
    else:

        def kept(rule: Rule, facts: Mapping[str, Any], find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
            return kept_answer(experiment, {"optimizer": (rule.code, dict(rule.fixed))}, facts, find)

        plan = make_plan(experiment, hooks, params, _plan_settings(settings), mentions(declared), kept)
    if settings.evaluate_with_ema and not plan.ema:
        raise UsageError(
            "evaluate_with_ema needs a moving average, and ema_decay is 0", "set ema_decay, for example to 0.999"
        )
    total = settings.max_epochs * (len(train) // settings.accum) if train is not None else 0
    schedules = _schedules(experiment, hooks, declared, plan, optimizers, device_tree, total)
    buffers = plan.layout.pack(jax.tree.leaves(params_tree))
    if residency["train_metrics"] == "host" and "train_metrics" in routes and routes["train_metrics"].rng:
        raise ExperimentError(
            f"{cls.__name__}.train_metrics declares 'rng', but it runs on the host, where it is given no random key",
            "leave rng out, or let metrics_residency return 'device' for it",
            place=class_source(cls).place("train_metrics"),
        )
    recipe = Recipe(
        experiment=experiment,
        hooks=hooks,
        routes=routes,
        residency=residency,
        model=model,
        params=params,
        state=Leaves.of(state_tree),
        device=Leaves.of(device_tree),
        plan=plan,
        accum=settings.accum,
        compute_dtype=settings.compute_dtype,
        fields={name: _decided(getattr(experiment, name)) for name in graphconst_fields(cls)},
        optimizers=optimizers,
    )
    policy = _policy(cls, hooks["checkpointer"], experiment)
    if policy is not None and not isinstance(policy, CheckpointPolicy):
        raise ExperimentError(
            f"{cls.__name__}.checkpointer returns {type(policy).__name__}, not a CheckpointPolicy",
            'for example: return CheckpointPolicy(keep=3, metric="val_accuracy", mode="max")',
        )
    setup = Setup(
        experiment=experiment,
        name=experiment_name(cls),
        knobs=settings,
        sources=sources,
        preset=resolved.preset if resolved else None,
        splits=splits,
        schema=schema,
        train_width=widths.get("train"),
        eval_width=max(widths.values(), default=0),
        recipe=recipe,
        model_content=model_content(model),
        params=[placed(buffer) for buffer in buffers],
        state=jax.tree.leaves(state_tree),
        opt_state=jax.tree.leaves(opt_state) if manual else None,
        device=jax.tree.leaves(device_tree),
        anchors=_anchors(plan, params, buffers),
        schedules=schedules,
        policy=policy or CheckpointPolicy(),
        explicit_policy=policy is not None,
        graphconst={
            name: {"digest": content_digest(getattr(experiment, name)), "text": short_value(getattr(experiment, name))}
            for name in graphconst_fields(cls)
        },
        report=None,  # type: ignore[arg-type]  # filled in below, from the rest
    )
    setup.report = make_report(setup, resolved)
    return setup


def placed(leaf: Any) -> jax.Array:
    """``leaf`` on nitro's device, in the dtype that jax gives it. A copy: programs take buffers by donation, and what
    the caller holds must stay alive. Committed, so that a fresh state and a restored one look alike to jax."""
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.wrap_key_data(
            jax.device_put(np.array(jax.random.key_data(leaf)), jax.devices()[0]), impl=jax.random.key_impl(leaf)
        )
    array = np.array(leaf)
    return jax.device_put(array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False), jax.devices()[0])


def device_value(value: Any) -> Any:
    """A Device field's value on the device: scalars and arrays, also inside tuples, lists and dicts."""
    return jax.tree.map(placed, value)


def _device_field(experiment: Any, name: str) -> Any:
    cls, value = type(experiment), getattr(experiment, name)
    try:
        return device_value(value)
    except (TypeError, ValueError):
        raise ExperimentError(
            f"field '{name}' of {cls.__name__} is marked Device, and no device can hold {short_value(value)}",
            "a Device field is a number, an array, or a tuple, list or dict of them",
            "GraphConst is for names and choices that a program is built by, Host for what only host code reads",
            place=class_source(cls).place(name),
            field=name,
        ) from None


def _with_fields(experiment: Any, given: Mapping[str, Any], sources: dict[str, Source]) -> tuple[Any, dict[str, Any]]:
    """The experiment with the fields that ``Nitro`` was given, and those knobs that it has no field for."""
    cls = type(experiment)
    metadata = config_metadata(cls)
    unknown = [name for name in given if name not in metadata and name not in KNOBS]
    if unknown:
        close = nearest(unknown[0], [*metadata, *KNOBS])
        raise ExperimentError(
            f"Nitro has no keyword '{unknown[0]}', and {cls.__name__} has no such field",
            *([f"did you mean '{close[0]}'?"] if close else []),
        )
    changes = {name: value for name, value in given.items() if name in metadata}
    if changes:
        for name in changes:
            sources[name] = Source("python", "Nitro keyword", (("before", getattr(experiment, name)),))
        experiment = replace_fields(experiment, **changes)
    return experiment, {name: value for name, value in given.items() if name not in metadata}


def _policy(cls: type, function: Callable[..., Any], experiment: Any) -> Any:
    try:
        return function(experiment)
    except UsageError as error:
        raise ExperimentError(
            f"{cls.__name__}.checkpointer: {error.problems[0].what}", place=class_source(cls).place("checkpointer")
        ) from error


def _splits(cls: type, data: Any) -> dict[str, Any]:
    if not isinstance(data, Mapping) or not data:
        raise ExperimentError(
            f"{cls.__name__}.build_data must return a dict of splits, and returned "
            + ("an empty one" if isinstance(data, Mapping) else type(data).__name__),
            'for example: return {"train": ArrayLoader(...), "val": ArrayLoader(...), "test": ArrayLoader(...)}',
            place=class_source(cls).place("build_data"),
        )
    for split, source in data.items():
        check_source(split, source)
    return dict(data)


def _derived(experiment: Any, hooks: Mapping[str, Callable[..., Any]], splits: Any, sources: dict[str, Source]) -> Any:
    cls = type(experiment)
    derived = hooks["derive"](experiment, splits)
    if not isinstance(derived, Mapping):
        raise ExperimentError(
            f"{cls.__name__}.derive must return a dict of field values, and returned {type(derived).__name__}"
        )
    if not derived:
        return experiment
    unknown = [name for name in derived if name not in config_metadata(cls)]
    if unknown:
        close = nearest(unknown[0], config_metadata(cls))
        raise ExperimentError(
            f"{cls.__name__}.derive returned '{unknown[0]}', which is no field of {cls.__name__}",
            *([f"did you mean '{close[0]}'?"] if close else []),
            f"fields: {listed(list(config_metadata(cls)))}",
            place=class_source(cls).place("derive"),
        )
    for name in derived:
        before = sources.get(name)
        kind = before.kind if before else "default"
        sources[name] = Source("derived", "derive", ((kind, getattr(experiment, name)),))
    try:
        return replace_fields(experiment, **derived)
    except UsageError as error:
        raise ExperimentError(
            f"{cls.__name__}.derive returned a value that its field does not take",
            *(note for problem in error.problems for note in (problem.what, *problem.notes)),
            place=class_source(cls).place("derive"),
        ) from None


def seed_words(seed: int) -> np.ndarray:
    """The seed as the two words of a random key: what ``jax.random.key(seed)`` holds, without running anything."""
    return np.array([(seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF], np.uint32)


def _plan_settings(knobs: Knobs) -> Settings:
    if knobs.parameter_layout not in KINDS:
        raise ExperimentError(f"parameter_layout is {knobs.parameter_layout!r}; it is one of {', '.join(KINDS)}")
    return Settings(
        knobs.learning_rate, knobs.weight_decay, knobs.gradient_clip_norm, knobs.ema_decay, knobs.parameter_layout
    )


def _schedules(
    experiment: Any,
    hooks: Mapping[str, Any],
    declared: Any,
    plan: Plan,
    optimizers: Optimizers | None,
    device_tree: Mapping[str, Any],
    total: int,
) -> Table:
    cls = type(experiment)
    specs = {name: _leaf_spec(value) for name, value in device_tree.items()}
    own_decay = hooks["group_weight_decay"] is not Experiment.group_weight_decay
    bound: list[Bound] = []
    if total and optimizers is not None:
        bound = bind_paths(declared, optimizers, specs, total, cls.__name__)
    elif total:
        bound = bind(declared, plan, specs, total, cls.__name__, own_decay)
    waiting = [] if total else [e.name for e in declared if e.namespace != "opt" and e.name in specs]
    return Table(bound, plan, specs, total, cls.__name__, waiting)


def _leaf_spec(value: Any) -> Any:
    """Shape and dtype of a Device field that is one array; None for a container, which no schedule can drive."""
    return jax.ShapeDtypeStruct(value.shape, value.dtype) if hasattr(value, "shape") else None


def _anchors(plan: Plan, params: Leaves, w0: list[Any]) -> list[jax.Array]:
    """What anchored buffers decay to: the first weights, or arrays of the experiment, found by path."""
    anchors = []
    for index in anchored_buffers(plan):
        buffer = plan.layout.buffers[index]
        anchor = plan.group(buffer.group).anchor
        if isinstance(anchor, str):
            anchors.append(placed(w0[index]))
            continue
        given = dict(zip(Leaves.of(anchor).paths, jax.tree.leaves(anchor), strict=True))
        if strange := [path for path in given if path not in params.paths]:
            hint = did_you_mean(strange[0], params.paths)
            raise ExperimentError(
                f"the decay anchor of group '{buffer.group}' does not fit: the model has no parameter '{strange[0]}'",
                *([hint] if hint else []),
                f"parameters: {listed(params.paths, 8)}",
            )
        parts = []
        for i in buffer.leaves:
            path, spec = params.paths[i], params.specs[i]
            if path not in given or tuple(given[path].shape) != tuple(spec.shape):
                found = "is not there" if path not in given else f"has shape {tuple(given[path].shape)}"
                raise ExperimentError(
                    f"the decay anchor of group '{buffer.group}' does not fit: '{path}' {found}",
                    f"it needs shape {tuple(spec.shape)}; an anchor tree has the paths of the parameters",
                )
            values = np.asarray(given[path])
            if values.dtype.kind in "OUSMm":
                raise ExperimentError(
                    f"the decay anchor of group '{buffer.group}' does not fit: '{path}' holds {values.dtype}, "
                    "not numbers"
                )
            values = values.astype(spec.dtype)
            if not np.isfinite(values).all():
                raise ExperimentError(
                    f"the decay anchor of group '{buffer.group}' has values that are not finite, in '{path}'",
                    "weights pulled there would not be finite either",
                )
            parts.append(values.ravel())
        anchors.append(placed(np.concatenate(parts).reshape(buffer.spec.shape)))
    return anchors


def _model(experiment: Any, hooks: Mapping[str, Callable[..., Any]], knobs: Knobs) -> tuple[Any, Any, Any]:
    cls = type(experiment)
    words: Any = seed_words(knobs.seed)  # a numpy array will do, whatever the stub of wrap_key_data says
    returned = hooks["build_model"](experiment, jax.random.wrap_key_data(words, impl="threefry2x32"))
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise ExperimentError(
            f"{cls.__name__}.build_model must return (model, ps, st), and returned "
            + (f"a tuple of {len(returned)}" if isinstance(returned, tuple) else type(returned).__name__),
            "a model without state returns an empty dict: return model, ps, {}",
            "for flax: return linen_model(module, rng, inputs) or nnx_model(lambda rngs: Net(rngs=rngs), rng)",
            place=class_source(cls).place("build_model"),
        )
    model, ps, st = returned
    try:
        # Parameters stay on the host until they are packed into buffers, so that they are copied once.
        return model, jax.tree.map(lambda leaf: _on_host(leaf, knobs.param_dtype), ps), jax.tree.map(placed, st)
    except TypeError as error:
        raise ExperimentError(
            f"{cls.__name__}.build_model returned parameters or state that are not arrays: {error}",
            place=class_source(cls).place("build_model"),
        ) from error


def _on_host(leaf: Any, param_dtype: str | None) -> np.ndarray:
    """A parameter as a numpy array in the dtype that it will have. Raises TypeError for what is not numeric."""
    array = np.asarray(leaf)
    if array.dtype.kind in "OUSMm":
        raise TypeError(f"{array.dtype} is no numeric type")
    dtype = jax.dtypes.canonicalize_dtype(array.dtype)
    if param_dtype is not None and jax.numpy.issubdtype(dtype, jax.numpy.floating):
        dtype = jax.numpy.dtype(param_dtype)
    return array.astype(dtype, copy=False)


def _check_params(cls: type, params: Leaves) -> None:
    if not params.specs:
        raise ExperimentError(
            f"{cls.__name__}.build_model returned no parameters: its second value holds no array",
            place=class_source(cls).place("build_model"),
        )
    for path, spec in zip(params.paths, params.specs, strict=True):
        if not jax.numpy.issubdtype(spec.dtype, jax.numpy.floating):
            raise ExperimentError(
                f"parameter '{path}' is {spec.dtype}; parameters are floating-point, since they get gradients",
                "move it into st, the state that build_model returns third",
                place=class_source(cls).place("build_model"),
            )


def _check_accum(cls: type, accum: int, step: Route) -> None:
    if accum == 1 or step.accum:
        return
    raise ExperimentError(
        f"accum is {accum}, and {cls.__name__}.train_step does not say that it takes groups of batches",
        f"declare the keyword: def train_step(self, model, ps, opt_state, st, *, {', '.join([*step.fields, 'accum'])})",
        "fields and rng then have the micro-batches of a group stacked on a leading axis (of 1 for accum=1), and the "
        "step averages over it",
        place=class_source(cls).place("train_step"),
    )


def _residency(cls: type, hooks: Mapping[str, Callable[..., Any]], experiment: Any, name: str) -> str:
    value = hooks["metrics_residency"](experiment, name)
    if value not in ("host", "device"):
        raise ExperimentError(
            f"{cls.__name__}.metrics_residency returned {value!r} for '{name}'; it is 'host' or 'device'",
            place=class_source(cls).place("metrics_residency"),
        )
    return value


def _indivisible(batches: int, accum: int) -> UsageError:
    lower = batches - batches % accum
    workable = [n for n in (lower, lower + accum) if n]
    return UsageError(
        f"the train split has {batches} batches, which accum={accum} does not divide",
        "a step never spans two epochs; every batch must belong to a full group",
        f"workable numbers of batches: {' or '.join(map(str, workable))}; or set accum to a divisor of {batches}",
    )


def _decided(value: Any) -> str:
    """A GraphConst value as a text that decides it by content, readable where it is short."""
    text = atom(value)
    if text is not None:
        return text
    plain = isinstance(value, (list, tuple)) and all(atom(part) for part in value) and len(repr(value)) <= 60
    return f"{type(value).__name__} {value!r}" if plain else f"{short_value(value)} {content_digest(value)}"
