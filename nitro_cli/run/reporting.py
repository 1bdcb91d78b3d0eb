"""The report of a handle, put together from what set-up resolved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nitro_cli.data.prefetch import prefetch_config
from nitro_cli.data.source import describe
from nitro_cli.experiment.content import short_value
from nitro_cli.experiment.presets import Resolved
from nitro_cli.experiment.sources import class_source, shown
from nitro_cli.experiment.traits import config_metadata
from nitro_cli.optim.plan import Group, Plan
from nitro_cli.optim.schedules import Table
from nitro_cli.run.manual_setup import declined_notes, manual_notes, optimizer_rows
from nitro_cli.run.report import GroupRow, HookRow, Report, ScheduleRow, SplitRow, field_rows

if TYPE_CHECKING:
    from nitro_cli.run.setup import Setup


def make_report(setup: Setup, resolved: Resolved | None) -> Report:
    """Everything that was fixed when the handle was constructed."""
    cls, recipe = type(setup.experiment), setup.recipe
    path = class_source(cls).path
    hooks = [HookRow(name, found.fields, recipe.residency.get(name)) for name, found in recipe.routes.items()]
    sizes = [int(np.prod(spec.shape)) for spec in recipe.params.specs]
    return Report(
        title=f"{setup.name}:{cls.__name__}",
        mode="manual" if recipe.manual else "automatic",
        experiment=setup.name,
        preset=setup.preset,
        path=shown(path) if path else None,
        fields=field_rows(setup.experiment, config_metadata(cls), setup.sources),
        run={
            "seed": setup.knobs.seed,
            "accum": setup.knobs.accum,
            "max_epochs": setup.knobs.max_epochs,
            "total_steps": setup.schedules.total,
            "gradient_clip_norm": setup.knobs.gradient_clip_norm,
            "run_dir": str(setup.knobs.run_dir) if setup.knobs.run_dir else None,
        },
        splits=[_split_row(setup, split) for split in setup.splits],
        model={"parameters": sum(sizes), "leaves": len(sizes), "state_leaves": len(recipe.state.specs)},
        optimizer=_optimizer_facts(setup),
        groups=_group_rows(setup),
        schedules=_schedule_rows(setup.schedules),
        hooks=hooks,
        devices=f"{jax.default_backend()} x 1 | jax {jax.__version__}",
        notes=[*(resolved.notes if resolved else ()), *_notes(setup)],
    )


def _optimizer_facts(setup: Setup) -> dict[str, Any]:
    """The rule of the first group, and what concerns all of them."""
    plan, layout = setup.recipe.plan, setup.recipe.plan.layout
    if setup.recipe.optimizers is not None:
        rules = {path or "default": rule.name for path, rule in setup.recipe.optimizers.rules.items()}
        return {"rules": rules, "buffers": len(layout.buffers), "layout": setup.knobs.parameter_layout}
    first = plan.groups[0]
    return {
        "rule": first.rule.name,
        "learning_rate": setup.knobs.learning_rate,
        "hyperparameters": {k: v for k, v in first.rule.hyperparameters.items() if k != "learning_rate"},
        "fixed": {k: short_value(v) for k, v in first.rule.fixed.items()},
        "gradient_clip_norm": setup.knobs.gradient_clip_norm if plan.clip else None,
        "ema_decay": setup.knobs.ema_decay if plan.ema else None,
        "compute_dtype": setup.knobs.compute_dtype,
        "buffers": len(layout.buffers),
        "layout": setup.knobs.parameter_layout,
    }


def _group_rows(setup: Setup) -> list[GroupRow]:
    recipe = setup.recipe
    if recipe.optimizers is not None:
        return optimizer_rows(recipe.optimizers, setup.opt_state)
    return [_group_row(setup, group) for group in recipe.plan.groups]


def _group_row(setup: Setup, group: Group) -> GroupRow:
    specs = [setup.recipe.params.specs[i] for i in group.leaves]
    decay = group.rule.hyperparameters.get("weight_decay", group.weight_decay if group.decays else 0.0)
    return GroupRow(
        group=group.name,
        rule=group.rule.name,
        learning_rate=setup.knobs.learning_rate * group.ratio,
        ratio=group.ratio,
        weight_decay=decay,
        anchor=group.anchor if isinstance(group.anchor, str) else "an array tree",
        hyperparameters={k: v for k, v in group.rule.hyperparameters.items() if k != "learning_rate"},
        fixed={k: short_value(v) for k, v in group.rule.fixed.items()},
        parameters=sum(int(np.prod(spec.shape)) for spec in specs),
        leaves=len(specs),
        joined=group.elementwise,
    )


def _schedule_rows(schedules: Table) -> list[ScheduleRow]:
    return [ScheduleRow(b.key, b.target, "schedules(self)", b.constant) for b in schedules.bound]


def _notes(setup: Setup) -> list[str]:
    recipe = setup.recipe
    notes = [
        f"Device field '{name}' has its own value: its schedule needs the steps of a run, and there is no train split"
        for name in setup.schedules.waiting
    ]
    if recipe.manual:
        return [*notes, *manual_notes(setup.experiment, recipe.hooks, setup.knobs, recipe.residency)]
    return [*notes, *declined_notes(setup.experiment, recipe.hooks), *_unused(recipe.plan)]


def _unused(plan: Plan) -> list[str]:
    """Settings of the optimizer that have no effect, said rather than left to be found out."""
    notes = []
    for group in plan.groups:
        if group.decays and all(plan.no_decay[i] for i in group.leaves):
            notes.append(f"group '{group.name}': weight decay has no effect, for no_decay excludes every leaf of it")
        if not group.decays and not group.rule.whole and group.anchor != "zero":
            notes.append(f"group '{group.name}': the decay anchor has no effect, for its weight decay is 0")
        rule = "optimizer(self, group, hp)" if group.rule.whole else group.rule.name
        for name in group.unread:
            notes.append(f"group '{group.name}': {rule} does not use {'hp.' if group.rule.whole else ''}{name}")
    return notes


def _split_row(setup: Setup, split: str) -> SplitRow:
    source = setup.splits[split]
    info, config = describe(source), prefetch_config(source)
    padded = None
    if info.rows is not None and split != "train":
        padded = info.batches * setup.eval_width - (info.rows - (info.dropped or 0))
    text = config["path"] if not config["workers"] else f"{config['path']}, {config['workers']} workers"
    return SplitRow(split, info.rows, info.batches, info.batch_size, info.dropped, padded or None, text)
