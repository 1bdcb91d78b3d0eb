"""The one program of manual mode: ``step``, an experiment's own ``train_step`` with the checks of what it returns.

What a step returns is committed as a whole or not at all, by the same clock as in the automatic loop: a loss that is
not finite leaves the handle with the last good step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nitro_cli.experiment.view import tracing
from nitro_cli.optim.bindings import Optimizers
from nitro_cli.optim.leaves import Leaves, spec_text, structure_text
from nitro_cli.programs.build import build
from nitro_cli.programs.cache import Built
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.key import Request
from nitro_cli.programs.recipe import FORWARD, Recipe, kind_of, pick
from nitro_cli.programs.training import CLOCK, FLAG, SEED, advanced, commit, float_spec, step_key
from nitro_cli.suggest import did_you_mean, listed

RETURNED = ("loss", "ps", "st", "opt_state")
CONTRACT = 'return {"loss": ..., "ps": ..., "st": ..., "opt_state": ...}, with "stats": {...} for more to log'


def step_request(recipe: Recipe, batch: Mapping[str, jax.ShapeDtypeStruct], model_content: Any) -> Request:
    """What the step program for batches of these shapes depends on."""
    found = _optimizers(recipe)
    roots = {f"optimizer {path}": (rule.factory, dict(rule.fixed)) for path, rule in found.rules.items()}
    code = fingerprint(recipe.experiment, train_step=recipe.hooks["train_step"], model=model_content, **roots)
    arguments = (
        recipe.described() | found.leaves.described("opt_state") | {"opt_state": structure_text(found.leaves.structure)}
    )
    arguments |= {f"batch.{name}": spec_text(spec) for name, spec in batch.items()}
    settings = {
        "accum": str(recipe.accum) if recipe.routes["train_step"].accum else "none",
        "train_metrics": "host" if recipe.host_metrics else "none",
    }
    return Request("step", code, arguments, settings, recipe.fields, recipe.name)


def build_step(request: Request, recipe: Recipe, batch: Mapping[str, jax.ShapeDtypeStruct]) -> Built:
    """``(params, state, opt_state, clock, seed, device, vector, check, batches) -> (params, state, opt_state, clock,
    row[, stats])``, all as flat lists; the first four are taken by donation.

    ``batches`` is a list of ``accum`` micro-batches. ``vector`` holds the hyperparameters that schedules drive, nan for
    the others. ``row`` is float[1 + m], the loss and the scalar stats; ``stats`` comes back where ``train_metrics``
    runs on the host.
    """
    optimizers = _optimizers(recipe)
    route = recipe.routes["train_step"]
    reads: set[str] = set()
    found: dict[str, Any] = {}

    def step(
        params: Any,
        state: Any,
        opt_state: Any,
        clock: Any,
        seed: Any,
        device: Any,
        vector: Any,
        check: Any,
        arrays: Any,
    ) -> Any:
        fields = {name: _stacked([a[i] for a in arrays], route.accum) for i, name in enumerate(batch)}
        reserved: dict[str, Any] = {"accum": recipe.accum} if route.accum else {}
        if route.rng:
            reserved["rng"] = _keys(seed, clock, recipe.accum) if route.accum else _key(seed, clock)
        with tracing("train_step", reads):
            returned = recipe.hooks["train_step"](
                recipe.view(device),
                recipe.model,
                recipe.plan.layout.tree(params),
                optimizers.leaves.tree(optimizers.scheduled(opt_state, vector)),
                recipe.state.tree(state),
                **pick(route, fields),
                **reserved,
            )
        loss, trees, stats = checked(recipe, returned)
        logged = {"loss": loss} | {name: value for name, value in stats.items() if jnp.shape(value) == ()}
        found["columns"] = tuple(logged)
        row = jnp.stack([jnp.asarray(value).astype(float_spec().dtype) for value in logged.values()])
        made = (recipe.plan.layout.pack(trees["ps"]), trees["st"], trees["opt_state"])
        broken = check & ~jnp.isfinite(row[0])
        good = ~broken & (clock[2] < 0)
        kept = commit(good, lambda *_: made, (params, state, opt_state))
        result = *kept, advanced(clock, good, broken), row
        return (*result, stats) if recipe.host_metrics else result

    arguments = [
        recipe.plan.layout.specs,
        list(recipe.state.specs),
        list(optimizers.leaves.specs),
        CLOCK,
        SEED,
        list(recipe.device.specs),
        float_spec(len(recipe.plan.columns)),
        FLAG,
        [list(batch.values())] * recipe.accum,
    ]
    return build(request, step, arguments, donate=(0, 1, 2, 3), reads=reads, found=found)


def checked(recipe: Recipe, returned: Any) -> tuple[jax.Array, dict[str, list[Any]], dict[str, Any]]:
    """``(loss, leaves by tree, stats)`` of what a step returned. Raises ExperimentError for a broken contract."""
    if not isinstance(returned, Mapping):
        raise recipe.broken("train_step", f"must return a dict, and returned {kind_of(returned)}", CONTRACT)
    _check_keys(recipe, returned)
    loss = recipe.checked_loss("train_step", returned["loss"], _loss_note(recipe))
    expected = {"ps": recipe.params, "st": recipe.state, "opt_state": _optimizers(recipe).leaves}
    trees = {name: _same(recipe, name, leaves, returned[name]) for name, leaves in expected.items()}
    return loss, trees, _stats(recipe, returned.get("stats", {}))


def _optimizers(recipe: Recipe) -> Optimizers:
    assert recipe.optimizers is not None
    return recipe.optimizers


def _key(seed: Any, clock: Any) -> Any:
    """The key that ``forward`` is given in the automatic loop."""
    return jax.random.fold_in(step_key(seed, clock), FORWARD)


def _keys(seed: Any, clock: Any, accum: int) -> Any:
    """Those of the micro-batches of a group."""
    return jax.vmap(lambda micro: _key(seed, clock.at[1].set(micro)))(jnp.arange(accum, dtype=clock.dtype))


def _stacked(arrays: Sequence[Any], leading: bool) -> Any:
    return jnp.stack(arrays) if leading else jnp.asarray(arrays[0])


def _loss_note(recipe: Recipe) -> str:
    if recipe.routes["train_step"].accum:
        return "average it over the group as well, whose axis comes first: loss.mean()"
    return "reduce it over the batch: loss.mean()"


def _check_keys(recipe: Recipe, returned: Mapping[str, Any]) -> None:
    missing = [name for name in RETURNED if name not in returned]
    unknown = [str(name) for name in returned if name not in (*RETURNED, "stats")]
    if not missing and not unknown:
        return
    parts = [f"without {listed([repr(name) for name in missing])}"] if missing else []
    parts += [f"with {listed([repr(name) for name in unknown])}, which nitro does not know"] if unknown else []
    hints = [did_you_mean(name, missing or (*RETURNED, "stats")) for name in unknown]
    raise recipe.broken("train_step", f"returned a dict {' and '.join(parts)}", *filter(None, hints), CONTRACT)


def _same(recipe: Recipe, name: str, expected: Leaves, tree: Any) -> list[Any]:
    """The leaves of a tree that came in as ``expected``. Raises ExperimentError with every path that differs."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        if not hasattr(leaf, "dtype") and not isinstance(leaf, (bool, int, float)):
            where = ".".join([name, *filter(None, [jax.tree_util.keystr(path, simple=True, separator=".")])])
            raise recipe.broken("train_step", f"returned {kind_of(leaf)} where '{where}' must be an array")
    arrays = jax.tree.map(jnp.asarray, tree)
    now = Leaves.of(arrays)
    if now.structure != expected.structure:
        raise recipe.broken("train_step", *_difference(name, expected, now))
    problems = [
        f"{name}.{path}: {spec_text(before)} -> {spec_text(spec)}"
        for path, before, spec in zip(expected.paths, expected.specs, now.specs, strict=True)
        if (before.shape, before.dtype) != (spec.shape, spec.dtype)
    ]
    if problems:
        more = [f"and {len(problems) - 5} more"] if len(problems) > 5 else []
        raise recipe.broken(
            "train_step",
            f"returned '{name}' with another shape or dtype than it came in (was -> now)",
            *problems[:5],
            *more,
            "one program serves every step, so what it returns fits what it takes: cast back with .astype(...)",
        )
    return jax.tree.leaves(arrays)


def _difference(name: str, expected: Leaves, now: Leaves) -> list[str]:
    """What to say of a tree with another structure: a sentence and notes."""
    missing = [f"{name}.{path}" for path in expected.paths if path not in now.paths]
    extra = [f"{name}.{path}" for path in now.paths if path not in expected.paths]
    if missing or extra:
        return [
            f"returned '{name}' with another structure than it came in",
            *([f"missing: {listed(missing, 5)}"] if missing else []),
            *([f"unexpected: {listed(extra, 5)}"] if extra else []),
            "every part comes back, also one that the step leaves as it was",
        ]
    swapped = "is an optimizer that was made for other parameters in its place?" if name == "opt_state" else ""
    return [
        f"returned '{name}' with the paths that came in, but in other containers or with another rule",
        *([swapped] if swapped else []),
        "build it from the same kinds of containers: {**ps, 'gen': ps_gen}, for example",
    ]


def _stats(recipe: Recipe, stats: Any) -> dict[str, Any]:
    """Scalars by name; with a host ``train_metrics``, which takes them, also arrays and trees of arrays."""
    if not recipe.host_metrics:
        return recipe.checked_scalars("train_step", stats, " as its stats")
    if not isinstance(stats, Mapping) or any(not isinstance(name, str) for name in stats) or "loss" in stats:
        return recipe.checked_scalars("train_step", stats, " as its stats")
    return {name: jax.tree.map(jnp.asarray, value) for name, value in stats.items()}
