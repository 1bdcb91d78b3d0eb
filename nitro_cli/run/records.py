"""From a run's checkpoint to a handle: exact continuation or weights alone, and what is refused (``was -> now``)."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nitro_cli.errors import ProtectError, UsageError
from nitro_cli.experiment.discovery import experiment_name
from nitro_cli.experiment.hooks import hook
from nitro_cli.optim.update import anchored_buffers
from nitro_cli.run.checkpoints import CheckpointInfo, Checkpoints, resolve_checkpoint
from nitro_cli.run.directory import RunDirectory, find_run
from nitro_cli.run.setup import placed
from nitro_cli.run.state import placed_arrays, placed_buffers, template

if TYPE_CHECKING:
    from nitro_cli.run.nitro import Nitro


def resume_record(run: RunDirectory) -> tuple[Checkpoints, dict[str, Any], CheckpointInfo]:
    checkpoints = Checkpoints(run.checkpoints_path)
    info = checkpoints.latest()
    if info is None:
        raise ProtectError(
            f"the run {run.path} has no checkpoint to resume from", "start a new run: leave --resume out"
        )
    return checkpoints, checkpoints.read_meta(info.step), info


def named_run(e: Any, resume: Any, root: Path | None) -> RunDirectory | None:
    """The run to continue: a run, its id, its path, or True for the newest of the experiment."""
    if resume is None or resume is False or isinstance(resume, RunDirectory):
        return resume or None
    if resume is True or isinstance(resume, (str, Path)):
        return find_run(root, experiment_name(type(e)), "latest" if resume is True else resume, ProtectError)
    raise UsageError(f"resume takes a run, its id or path, or True for the newest one, not {resume!r}")


def named_weights(e: Any, weights: Any, root: Path | None) -> tuple[RunDirectory, CheckpointInfo] | None:
    """``RUN``, ``RUN:best``, ``RUN:latest`` or ``RUN:EPOCH`` as a run and one of its checkpoints."""
    if weights is None or weights == "fresh" or isinstance(weights, tuple):
        return weights if isinstance(weights, tuple) else None
    if not isinstance(weights, (str, Path)):
        raise UsageError(f"weights takes a run, such as 'latest:best' or a path, not {weights!r}")
    name, _, which = str(weights).rpartition(":") if ":" in str(weights) else (str(weights), "", "best")
    run = find_run(root, experiment_name(type(e)), name, ProtectError)
    policy = hook(type(e), "checkpointer")
    checkpoints = Checkpoints(run.checkpoints_path, policy(e) if policy is not None else None)
    return run, resolve_checkpoint(checkpoints, int(which) if which.isdigit() else which)[0]


def _laid(row: list[Any] | None) -> str:
    if row is None:
        return "not there"
    group, buffer, offset, shape = row
    return f"group {group}, buffer {buffer} at {offset}, shape {tuple(shape)}"


def restore(n: Nitro, checkpoints: Checkpoints, meta: dict[str, Any], info: CheckpointInfo) -> None:
    _check_graphconst(n, meta, info, "resumed")
    _check_position(n, meta["position"], info)
    recipe, state = n.setup.recipe, n.state
    _check_layout(n, meta, info)
    _check_anchors(n, meta, info)
    averaged = "ema" in checkpoints.layout(info.step)
    if averaged != recipe.plan.ema:
        raise ProtectError(
            f"the run {'keeps' if averaged else 'keeps no'} moving average of the weights, and ema_decay "
            f"{'is 0 now' if averaged else f'is {n.setup.knobs.ema_decay} now'}",
            f"checkpoint: {info.path}",
            "set ema_decay back to what it was, or start a new run",
        )
    optimizer = n.optimizer_layout()
    wanted = {"ps": template(recipe.params), "st": template(recipe.state), "opt_state": template(optimizer)}
    if recipe.plan.ema:
        wanted["ema"] = template(recipe.params)
    stored = checkpoints.restore(info.step, wanted)
    state.params = placed_buffers(recipe.plan.layout, stored["ps"])
    state.state = placed_arrays(recipe.state, stored["st"])
    state.opt_state = placed_arrays(optimizer, stored["opt_state"] | _changed_hyperparameters(n, meta))
    if recipe.plan.ema:
        state.average = placed_buffers(recipe.plan.layout, stored["ema"])
    state.restore_counters(meta["counters"])


def _changed_hyperparameters(n: Nitro, meta: dict[str, Any]) -> dict[str, Any]:
    """Hyperparameters that a manual experiment sets up otherwise than when its run was begun: like a knob of the
    automatic loop, they hold from here on. The others keep what the steps have made of them."""
    was = meta.get("hyperparameters", {})
    dtype = jax.dtypes.canonicalize_dtype(np.float64)
    return {path: np.asarray(now, dtype) for path, now in n.hyperparameters.items() if was.get(path, now) != now}


def anchor_digest(n: Nitro) -> str:
    """What decay pulls towards, as a digest: "w0" is made anew when a run is resumed, and must come out the same."""
    content = hashlib.sha256()
    for anchor in n.setup.anchors:
        content.update(np.asarray(anchor).tobytes())
    return content.hexdigest()


def _check_anchors(n: Nitro, meta: dict[str, Any], info: CheckpointInfo) -> None:
    if meta["anchors"] != anchor_digest(n):
        raise ProtectError(
            "the run cannot be resumed: what its weights decay towards is not what it was",
            f"checkpoint: {info.path}",
            "decay_anchor 'w0' is made anew by build_model, which must give the same weights for the same seed; "
            "an array tree must have the same values",
        )


def _check_layout(n: Nitro, meta: dict[str, Any], info: CheckpointInfo) -> None:
    """Optimizer state is stored buffer by buffer, so a run goes on only under the table it was saved with."""
    if n.setup.recipe.manual:
        return  # these optimizers are stored leaf by leaf
    was = {row[0]: row[1:] for row in meta["layout"]}
    now = {row[0]: row[1:] for row in n.setup.recipe.plan.layout.table()}
    if {path: row[-1] for path, row in was.items()} != {path: row[-1] for path, row in now.items()}:
        return  # other parameters, not another layout: comparing the arrays says it better
    rows = [
        f"{path}: {_laid(was.get(path))} -> {_laid(now.get(path))}"
        for path in dict.fromkeys([*was, *now])
        if was.get(path) != now.get(path)
    ]
    if rows:
        raise ProtectError(
            "the run cannot be resumed: parameters lie elsewhere than when it was saved (was -> now)",
            *rows[:6],
            *([f"and {len(rows) - 6} more"] if len(rows) > 6 else []),
            f"checkpoint: {info.path}",
            "keep the optimizer, param_group, weight_decay, param_dtype and parameter_layout as they were",
            "weights alone load into any layout",
        )


def _check_position(n: Nitro, position: int, info: CheckpointInfo) -> None:
    """A run that was ended inside an epoch goes on at the batch where it stopped: that must still be one."""
    train, accum = n.setup.splits.get("train"), n.setup.knobs.accum
    if position and (train is None or position >= len(train)):
        raise ProtectError(
            f"the checkpoint stands after {position} batches of an epoch, and the train split has "
            f"{len(train) if train is not None else 0}",
            f"checkpoint: {info.path}",
            "resume with the data that it was trained on, or start a new run",
        )
    if position % accum:
        raise ProtectError(
            f"the checkpoint stands after {position} batches of an epoch, which accum={accum} does not divide",
            "a step never spans a checkpoint: every batch belongs to a full group",
            f"checkpoint: {info.path}",
            "resume with the accum that it was trained with",
        )


def load_weights(n: Nitro, run: RunDirectory, info: CheckpointInfo, w0: str) -> None:
    checkpoints = Checkpoints(run.checkpoints_path)
    _check_graphconst(n, checkpoints.read_meta(info.step), info, "used")
    recipe = n.setup.recipe
    n.loaded_step = info.step
    wanted = {"ps": template(recipe.params), "st": template(recipe.state)}
    averaged = "ema" in checkpoints.layout(info.step)
    if n.setup.knobs.evaluate_with_ema and not averaged:
        raise ProtectError(
            f"the checkpoint {info.path} holds no moving average of the weights",
            "it was trained with ema_decay = 0; leave --evaluate-with-ema out",
        )
    if recipe.plan.ema and averaged:
        wanted["ema"] = template(recipe.params)
    stored = checkpoints.restore(info.step, wanted, partial=True)
    n.state.params = placed_buffers(recipe.plan.layout, stored["ps"])
    n.state.state = placed_arrays(recipe.state, stored["st"])
    if recipe.plan.ema:
        n.state.average = placed_buffers(recipe.plan.layout, stored.get("ema", stored["ps"]))
    if w0 == "weights":
        for i, index in enumerate(anchored_buffers(recipe.plan)):
            if recipe.plan.group(recipe.plan.layout.buffers[index].group).anchor == "w0":
                n.setup.anchors[i] = placed(np.asarray(n.state.params[index]))


def _check_graphconst(n: Nitro, meta: dict[str, Any], info: CheckpointInfo, verb: str) -> None:
    was, now = meta["graphconst"], n.setup.graphconst
    rows = [
        f"{name}: {was.get(name, {}).get('text', 'not there')} -> {now.get(name, {}).get('text', 'not there')}"
        for name in dict.fromkeys([*was, *now])
        if was.get(name, {}).get("digest") != now.get(name, {}).get("digest")
    ]
    if rows:
        raise ProtectError(
            f"the checkpoint cannot be {verb}: GraphConst fields differ from those it was trained with (was -> now)",
            *rows,
            f"checkpoint: {info.path}",
            "leave these fields as they were, or start a new run",
            fields=[row.split(":")[0] for row in rows],
        )
