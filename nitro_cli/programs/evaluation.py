"""The evaluation program, one for validate, evaluate and predict, and the metric programs that follow it on the device.

Evaluation always runs at one padded width, so a short batch, a batch without labels and a served one all use the same
executable. A metric program sees real rows only: their number is part of it, and a split with a remainder has two.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from nitro_cli.experiment.view import tracing
from nitro_cli.optim.leaves import Leaves, spec_text, structure_text
from nitro_cli.programs.build import build
from nitro_cli.programs.cache import Built
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.key import Request
from nitro_cli.programs.recipe import EVALUATION, Recipe
from nitro_cli.programs.training import SEED


def evaluation_request(recipe: Recipe, batch: Mapping[str, jax.ShapeDtypeStruct], model_content: Any) -> Request:
    """What the evaluation program depends on: ``forward`` and the model, at the padded batch shapes."""
    code = fingerprint(recipe.experiment, forward=recipe.hooks["forward"], model=model_content)
    arguments = recipe.described()
    arguments |= {f"batch.{name}": spec_text(spec) for name, spec in batch.items()}
    return Request("evaluation", code, arguments, recipe.settings() | {"train": "False"}, recipe.fields, recipe.name)


def build_evaluation(request: Request, recipe: Recipe, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Built:
    """``(params, state, device, seed, batch) -> outputs`` as flat lists; ``found["outputs"]`` describes the tree."""
    names = tuple(batch)
    reads: set[str] = set()
    found: dict[str, Any] = {}

    def evaluation(params: Any, state: Any, device: Any, seed: Any, arrays: Any) -> Any:
        outputs, _ = recipe.forward(
            recipe.view(device),
            recipe.plan.layout.tree(params),
            recipe.state.tree(state),
            dict(zip(names, arrays, strict=True)),
            train=False,
            key=_evaluation_key(seed),
            reads=reads,
        )
        found["outputs"] = Leaves.of(outputs)
        return jax.tree.leaves(outputs)

    arguments = [
        recipe.plan.layout.specs,
        list(recipe.state.specs),
        list(recipe.device.specs),
        SEED,
        list(batch.values()),
    ]
    return build(request, evaluation, arguments, reads=reads, found=found)


def metric_request(
    recipe: Recipe, hook: str, outputs: Leaves, batch: Mapping[str, jax.ShapeDtypeStruct], rows: int
) -> Request:
    """What a device-resident metric depends on: its own hook, and nothing of ``forward`` but the outputs' shapes."""
    code = fingerprint(recipe.experiment, **{hook: recipe.hooks[hook]})
    arguments = outputs.described("outputs") | recipe.device.described("device")
    arguments["outputs"] = structure_text(outputs.structure)
    arguments |= {f"batch.{name}": spec_text(spec) for name, spec in batch.items()}
    return Request(hook, code, arguments, {"rows": str(rows)}, recipe.fields, recipe.name)


def build_metric(
    request: Request, recipe: Recipe, hook: str, outputs: Leaves, batch: Mapping[str, jax.ShapeDtypeStruct], rows: int
) -> Built:
    """``(outputs, device, seed, batch) -> values`` of ``metrics`` or of ``loss`` over the first ``rows`` rows."""
    names = tuple(batch)
    reads: set[str] = set()
    found: dict[str, Any] = {}

    def metric(leaves: Any, device: Any, seed: Any, arrays: Any) -> Any:
        view = recipe.view(device)
        real = outputs.tree([leaf[:rows] for leaf in leaves])
        fields = {name: array[:rows] for name, array in zip(names, arrays, strict=True)}
        if hook == "loss":
            return recipe.loss(view, real, fields, key=_evaluation_key(seed), reads=reads)
        with tracing(hook, reads):
            return recipe.hooks[hook](view, real, **fields)

    arguments = [list(outputs.specs), list(recipe.device.specs), SEED, list(batch.values())]
    return build(request, metric, arguments, reads=reads, found=found)


def _evaluation_key(seed: jax.Array) -> jax.Array:
    return jax.random.fold_in(jax.random.wrap_key_data(seed, impl="threefry2x32"), EVALUATION)
