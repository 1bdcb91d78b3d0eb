"""Hooks that the driver calls take what it gives them: checked once, before any of them runs."""

from __future__ import annotations

import inspect

from nitro_cli.errors import ExperimentError, Problem
from nitro_cli.experiment.hooks import hook
from nitro_cli.experiment.sources import class_source

# What each hook is called with after ``self``. Hooks with batch fields are checked when the fields are routed.
ARGUMENTS = {
    "build_data": ("dist",),
    "build_model": ("rng",),
    "derive": ("data",),
    "metrics_residency": ("hook",),
    "finalize_metrics": ("metrics", "split"),
    "param_group": ("path", "leaf"),
    "group_learning_rate": ("group",),
    "group_weight_decay": ("group",),
    "decay_anchor": ("group",),
    "no_decay": ("path", "leaf"),
    "schedules": (),
    "checkpointer": (),
}


def check_signatures(cls: type) -> None:
    """Raises ExperimentError naming every hook that cannot be called with what nitro gives it."""
    problems = []
    for name, arguments in ARGUMENTS.items():
        function = hook(cls, name)
        if function is None:
            continue
        try:
            inspect.signature(function).bind(None, *arguments)
        except TypeError:
            wanted = ", ".join(("self", *arguments))
            found = ", ".join(inspect.signature(function).parameters)
            problems.append(
                Problem(
                    f"{cls.__name__}.{name} takes ({found}), and nitro calls it with ({wanted})",
                    class_source(cls).place(name),
                    notes=(f"write: def {name}({wanted}): ...",),
                    facts={"hook": name},
                )
            )
    if problems:
        raise ExperimentError(problems)
