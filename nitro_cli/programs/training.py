"""The two programs that train: ``gradient``, once per micro-batch, and ``update``, once per optimizer step.

What a step has gathered stays pending until the update commits it: gradient, new model state, and the row of numbers
for the log. So a loss that is not finite can withhold the whole step, and the handle still holds the last good one.

``clock`` is int32[3]: steps done, micro-batches into this step, and the first step whose loss was not finite (-1 while
there is none). It lives on the device, so a step needs nothing from the host but its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.view import tracing
from nitro_cli.optim import update as optimizer_step
from nitro_cli.optim.clip import clip_by_global_norm
from nitro_cli.optim.leaves import Leaves, spec_text
from nitro_cli.optim.plan import GLOBAL
from nitro_cli.programs.build import build
from nitro_cli.programs.cache import Built
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.key import Request
from nitro_cli.programs.once import run_once
from nitro_cli.programs.recipe import Recipe

CLOCK = jax.ShapeDtypeStruct((3,), np.dtype("int32"))
SEED = jax.ShapeDtypeStruct((2,), np.dtype("uint32"))
FLAG = jax.ShapeDtypeStruct((), np.dtype("bool"))


def float_spec(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jax.dtypes.canonicalize_dtype(np.float64))


def new_clock(step: int) -> np.ndarray:
    return np.array([step, 0, -1], np.int32)


def step_key(seed: jax.Array, clock: jax.Array) -> jax.Array:
    """The random key of a micro-batch: a pure function of seed, step and micro-batch, so that a resumed run draws the
    same numbers."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.fold_in(jax.random.fold_in(key, clock[0]), clock[1])


def gradient_request(recipe: Recipe, batch: Mapping[str, jax.ShapeDtypeStruct], model_content: Any) -> Request:
    """What the gradient program for batches of these shapes depends on."""
    roots = {"forward": recipe.hooks["forward"], "loss": recipe.hooks["loss"], "model": model_content}
    if recipe.hooks.get("train_metrics") is not None and recipe.residency["train_metrics"] == "device":
        roots["train_metrics"] = recipe.hooks["train_metrics"]
    arguments = recipe.described() | {f"batch.{name}": spec_text(spec) for name, spec in batch.items()}
    settings = recipe.settings() | {
        "accum": "1" if recipe.accum == 1 else "more than 1",
        "train_metrics": recipe.residency["train_metrics"] if recipe.hooks.get("train_metrics") else "none",
    }
    return Request("gradient", fingerprint(recipe.experiment, **roots), arguments, settings, recipe.fields, recipe.name)


def build_gradient(request: Request, recipe: Recipe, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Built:
    """``(params, state, clock, seed, device, batch[, pending, first, scale]) -> pending[, outputs]``.

    ``pending`` is ``[gradients, state_new, row]`` as flat lists; ``row`` is float[1 + m], the loss and the train
    metrics. With accumulation it comes back in, is added to (or, on the first micro-batch, replaced: by a select, so
    that nothing left in it can survive), and ``scale`` is ``1 / accum``.
    """
    names = tuple(batch)
    reads: set[str] = set()
    found: dict[str, Any] = {}
    host_metrics = recipe.hooks.get("train_metrics") is not None and recipe.residency["train_metrics"] == "host"

    def micro(params: Any, state: Any, clock: Any, seed: Any, device: Any, arrays: Any) -> Any:
        view = recipe.view(device)
        fields = dict(zip(names, arrays, strict=True))
        key = step_key(seed, clock)

        def objective(ps: Any) -> Any:
            outputs, st_new = recipe.forward(
                view, ps, recipe.state.tree(state), fields, train=True, key=key, reads=reads
            )
            loss = recipe.loss(view, outputs, fields, key=key, reads=reads)
            metrics = recipe.train_metrics(view, outputs, fields, key=key, reads=reads)
            return loss, (st_new, metrics, outputs if host_metrics else None)

        (loss, (st_new, metrics, outputs)), gradients = jax.value_and_grad(objective, has_aux=True)(
            recipe.plan.layout.tree(params)
        )
        found["columns"] = ("loss", *metrics)
        row = jnp.stack([jnp.asarray(v).astype(float_spec().dtype) for v in (loss, *metrics.values())])
        return [
            recipe.plan.layout.pack(jax.tree.leaves(gradients)),
            [jnp.asarray(leaf) for leaf in jax.tree.leaves(st_new)],
            row,
        ], outputs

    def once(params: Any, state: Any, clock: Any, seed: Any, device: Any, arrays: Any) -> Any:
        pending, outputs = micro(params, state, clock, seed, device, arrays)
        return (pending, outputs) if host_metrics else pending

    def accumulating(
        pending: Any, clock: Any, params: Any, state: Any, seed: Any, device: Any, arrays: Any, scale: Any
    ) -> Any:
        first = clock[1] == 0
        gathered, state_pending, row_pending = pending
        current = [jnp.where(first, s, p) for s, p in zip(state, state_pending, strict=True)]
        (gradients, state_new, row), outputs = micro(params, current, clock, seed, device, arrays)
        gradients = [
            jnp.where(first, g * scale.astype(g.dtype), old + g * scale.astype(g.dtype))
            for old, g in zip(gathered, gradients, strict=True)
        ]
        row = jnp.where(first, row * scale, row_pending + row * scale)
        pending, clock = [gradients, state_new, row], clock.at[1].add(1)
        return (pending, clock, outputs) if host_metrics else (pending, clock)

    ps, st, device = recipe.plan.layout.specs, list(recipe.state.specs), list(recipe.device.specs)
    arrays = list(batch.values())
    if recipe.accum == 1:
        arguments: list[Any] = [ps, st, CLOCK, SEED, device, arrays]
        return build(request, once, arguments, reads=reads, found=found)
    row = float_spec(1 + _count_train_metrics(recipe, batch))
    arguments = [[ps, st, row], CLOCK, ps, st, SEED, device, arrays, float_spec()]
    return build(request, accumulating, arguments, donate=(0, 1), reads=reads, found=found)


def _count_train_metrics(recipe: Recipe, batch: Mapping[str, jax.ShapeDtypeStruct]) -> int:
    """How many scalars ``train_metrics`` gives: needed before the trace, for the accumulator's shape."""
    if recipe.hooks.get("train_metrics") is None or recipe.residency["train_metrics"] != "device":
        return 0

    def metrics(params: Any, state: Any, seed: Any, device: Any, arrays: Any) -> Any:
        view, fields = recipe.view(device), dict(zip(batch, arrays, strict=True))
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        reads: set[str] = set()
        outputs, _ = recipe.forward(
            view, recipe.plan.layout.tree(params), recipe.state.tree(state), fields, train=True, key=key, reads=reads
        )
        return recipe.train_metrics(view, outputs, fields, key=key, reads=reads)

    specs = [recipe.plan.layout.specs, list(recipe.state.specs), SEED, list(recipe.device.specs), list(batch.values())]
    return len(jax.eval_shape(metrics, *specs))


def optimizer_state(recipe: Recipe, params: Any, anchors: Any) -> Any:
    """The tree of the optimizer's first state."""
    plan, request = recipe.plan, optimizer_request(recipe)
    settings = {**request.settings, **request.arguments}
    if any(group.rule.whole for group in plan.groups):  # which GraphConst values it reads is not known here
        settings |= request.fields

    def initial(arguments: Any) -> Any:
        state = optimizer_step.initial_state(plan, *arguments)
        return jax.tree.map(lambda leaf: jax.lax.convert_element_type(leaf, jnp.asarray(leaf).dtype), state)

    return run_once(
        initial,
        (plan.vector(), list(params), list(anchors)),
        name="optimizer_init",
        experiment=recipe.name,
        code=request.code,
        settings=settings,
    )


def update_request(recipe: Recipe, optimizer: Leaves, columns: Sequence[str]) -> Request:
    """What the update program depends on: no hook but the optimizer's, and no batch."""
    rule = optimizer_request(recipe)
    arguments = {**rule.arguments, **optimizer.described("opt_state"), "row": f"float[{len(columns)}]"}
    return Request("update", rule.code, arguments, rule.settings, rule.fields, rule.experiment)


def optimizer_request(recipe: Recipe) -> Request:
    """What the optimizer depends on."""
    plan = recipe.plan
    roots = {f"optimizer {g.name}": (g.rule.code, dict(g.rule.fixed)) for g in plan.groups}
    settings = {
        "gradient_clip_norm": "on" if plan.clip else "off",
        "ema_decay": "on" if plan.ema else "off",
        "hyperparameters": " ".join(f"{group}.{name}" for group, name in plan.columns if group != GLOBAL),
        "groups": "; ".join(
            f"{g.name}: {'joined' if g.elementwise else 'tree'} {'decays' if g.decays else 'no decay'} "
            f"{'anchored' if g.anchored else 'to zero'} {' '.join(recipe.params.paths[i] for i in g.leaves)}"
            for g in plan.groups
        ),
        "no_decay": " ".join(path for path, no in zip(recipe.params.paths, plan.no_decay, strict=True) if no),
    }
    return Request(
        "optimizer", fingerprint(recipe.experiment, **roots), recipe.described(), settings, recipe.fields, recipe.name
    )


def build_update(request: Request, recipe: Recipe, optimizer: Leaves, columns: Sequence[str]) -> Built:
    """``(params, state, opt_state, clock, average, pending, hyperparameters, check, anchors) -> (params, state,
    opt_state, clock, average, row)``.

    Takes everything it replaces by donation. ``hyperparameters`` is the plan's vector. Where ``check`` is true and a
    loss was not finite, now or before, nothing changes and the clock stands still.
    """
    plan = recipe.plan
    reads: set[str] = set()

    def update(params: Any, state: Any, opt_state: Any, clock: Any, average: Any, *rest: Any) -> Any:
        (gradients, state_new, row), vector, check, anchors = rest
        broken = check & ~jnp.isfinite(row[0])
        good = ~broken & (clock[2] < 0)

        def moved(params: Any, state: Any, opt_state: Any, average: Any) -> Any:
            clipped = gradients
            if plan.clip:
                clipped = clip_by_global_norm(gradients, vector[plan.column(GLOBAL, "gradient_clip_norm")])
            with tracing("optimizer", reads):
                new, new_opt = optimizer_step.step(plan, params, clipped, optimizer.tree(opt_state), vector, anchors)
            _check_same(optimizer, new_opt)
            new_average = optimizer_step.moving_average(plan, average, new, vector) if plan.ema else []
            made = new, state_new, jax.tree.leaves(new_opt), new_average
            return jax.tree.map(lambda a, b: a if a.dtype == b.dtype else a.astype(b.dtype), made, held)

        held = params, state, opt_state, average
        kept = commit(good, moved, held)
        return *kept[:3], advanced(clock, good, broken), kept[3], row

    ps, st = plan.layout.specs, list(recipe.state.specs)
    average = ps if plan.ema else []
    anchors = [ps[i] for i in optimizer_step.anchored_buffers(plan)]
    pending = [ps, st, float_spec(len(columns))]
    arguments = [ps, st, list(optimizer.specs), CLOCK, average, pending, float_spec(len(plan.columns)), FLAG, anchors]
    return build(request, update, arguments, donate=(0, 1, 2, 3, 4), reads=reads, found={})


def advanced(clock: Any, good: Any, broken: Any) -> Any:
    """The clock after a step: on where it was ``good``; the first ``broken`` one stays marked."""
    return jnp.stack(
        [
            jnp.where(good, clock[0] + 1, clock[0]),
            jnp.zeros((), clock.dtype),
            jnp.where(broken & (clock[2] < 0), clock[0], clock[2]),
        ]
    )


def commit(good: Any, moved: Any, held: Any) -> Any:
    """``moved(*held)`` where ``good``, else ``held``.

    On a CPU a branch: a select of every buffer made the update of 1.1 million parameters three times as slow. On other
    devices a select, since a branch there makes the host wait for its predicate.
    """
    if jax.default_backend() == "cpu":
        return jax.lax.cond(good, moved, lambda *same: same, *held)
    return jax.tree.map(lambda a, b: jnp.where(good, a, b), moved(*held), held)


def _check_same(optimizer: Leaves, new: Any) -> None:
    """An optimizer whose state changes shape or structure would need another program at the second step."""
    now = Leaves.of(jax.tree.map(jnp.asarray, new))
    if now.structure != optimizer.structure:
        raise ExperimentError("the optimizer changes the structure of its state in an update")
    for path, before, after in zip(optimizer.paths, optimizer.specs, now.specs, strict=True):
        if before.shape != after.shape:
            raise ExperimentError(
                f"the optimizer changes its state '{path}' from {spec_text(before)} to {spec_text(after)}"
            )
