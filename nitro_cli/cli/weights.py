"""Which weights a command takes: the run, the checkpoint in it, and why."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nitro_cli.cli.failures import relative
from nitro_cli.cli.session import Session, changed_fields
from nitro_cli.cli.views import View
from nitro_cli.errors import UsageError


@dataclass
class Prepared:
    """A handle with its weights. ``weights`` says which ones, for ``--json``."""

    nitro: Any
    view: View
    weights: dict[str, Any]


def prepare(session: Session) -> Prepared:
    """Find run and checkpoint, configure, build the handle, and say on stderr what was taken and why."""
    view = View(session.output)
    run, checkpoint = _choose(session)
    base: dict[str, Any] = {}
    if run is not None:
        from nitro_cli.experiment.presets import load_run_config

        base = load_run_config(run.config_path)
    resolved = session.configure(base)
    view.banner(session.found.qualname, resolved.preset)
    weights, facts = _weights(resolved.experiment, session.found.name, run, checkpoint, view)
    if run is not None:
        view.changes(changed_fields(session, base, resolved.experiment), "changed since the run")

    from nitro_cli.run.nitro import Nitro

    nitro = Nitro(
        resolved.experiment,
        resolved=resolved,
        weights=weights,
        observer=view.observe,
        command_line=session.command_line,
    )
    view.report(nitro.report)
    return Prepared(nitro, view, facts)


def _choose(session: Session) -> tuple[Any, str]:
    """``(run or None for fresh weights, checkpoint reference)``."""
    fresh, ref = session.value("weights"), session.value("run")
    checkpoint = session.value("checkpoint")
    if fresh is not None:
        if fresh != "fresh":
            raise UsageError(
                f"--weights {fresh}: only 'fresh' is known", "name a run with --run, a checkpoint with --checkpoint"
            )
        if ref or checkpoint:
            raise UsageError("--weights fresh takes no run", "leave out --run and --checkpoint")
        return None, ""
    from nitro_cli.run.directory import find_run, list_runs, open_run

    if checkpoint and ref is None and (path := Path(checkpoint)).exists() and not checkpoint.isdigit():
        return open_run(_run_folder(path)), checkpoint
    if ref is None and not list_runs(None, session.found.name):
        raise UsageError(
            f"{session.found.name} has no run to take weights from",
            f"train first: nitro train {session.found.name}",
            "or take newly initialised weights: --weights fresh",
            kind="no_run",
        )
    return find_run(None, session.found.name, ref or "latest"), checkpoint or "best"


def _run_folder(path: Path) -> Path:
    """The run to which a path belongs: the run itself, its checkpoints folder, or a checkpoint in it."""
    for folder in (path, *list(path.resolve().parents)[:2]):
        if (folder / "run.json").is_file():
            return folder
    return path


def _weights(e: Any, name: str, run: Any, checkpoint: str, view: View) -> tuple[Any, dict[str, Any]]:
    if run is None:
        view.note("weights: newly initialised, not trained")
        return "fresh", {"run": None, "checkpoint": None, "why": "fresh"}
    from nitro_cli.run.checkpoints import Checkpoints, resolve_checkpoint

    with Checkpoints(run.checkpoints_path, _policy(e)) as checkpoints:
        try:
            info, why = resolve_checkpoint(checkpoints, checkpoint)
        except UsageError as error:
            if checkpoints.steps():
                raise
            only = error.problems[0]
            notes = (
                f"go on with it: nitro train {name} --resume={relative(run.path)}",
                "or take another run: --run RUN",
            )
            raise UsageError([replace(only, notes=(*only.notes, *notes))]) from None
        for skipped in checkpoints.skipped:
            view.observe("warning", {"message": f"skipped {relative(skipped.path)}: {skipped.reason}"})
    view.note(f"weights: {relative(info.path)} of run {run.id}: {why}")
    facts = {"run": relative(run.path), "checkpoint": relative(info.path), "epoch": info.epoch, "why": why}
    return (run, info), facts


def _policy(e: Any) -> Any:
    from nitro_cli.experiment.hooks import hook

    function = hook(type(e), "checkpointer")
    return function(e) if function is not None else None
