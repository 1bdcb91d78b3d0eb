"""``nitro train``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nitro_cli.cli.failures import relative
from nitro_cli.cli.look_ups import with_store
from nitro_cli.cli.session import Session, changed_fields
from nitro_cli.cli.views import View
from nitro_cli.errors import ProtectError, UsageError


@with_store
def run(session: Session) -> int:
    """Train, or go on training. stdout gets the run's directory."""
    out, found = session.output, session.found
    view = View(out)
    resumed = _resumed_run(session)
    base = _configuration_of(resumed) if resumed else {}
    resolved = session.configure(base)
    view.banner(found.qualname, resolved.preset)
    if resumed:
        view.changes(changed_fields(session, base, resolved.experiment), "changed on resume")

    from nitro_cli.programs import ahead

    cls = type(resolved.experiment)
    ahead.begin(cls)  # beside the imports that follow
    from nitro_cli.run.directory import open_run
    from nitro_cli.run.nitro import Nitro

    def observer(event: str, facts: Any) -> None:
        view.observe(event, facts)
        if event == "first_step":
            ahead.note(cls)
        if event == "run":
            out.open_log(open_run(facts["run_dir"]).console_path)

    nitro = Nitro(
        resolved.experiment,
        resolved=resolved,
        resume=resumed,
        observer=observer,
        command_line=session.command_line,
        force=bool(session.value("force")),
    )
    view.report(nitro.report)
    outcome = nitro.train()
    view.done(outcome, found.name)
    out.result(relative(outcome.run.path))
    return outcome.exit_code


def _resumed_run(session: Session) -> Any:
    """The run that --resume means, or None. Raises ProtectError where there is none: nothing starts afresh unasked."""
    ref = session.value("resume")
    if ref is None:
        return None
    session.check()
    if session.value("force"):
        raise UsageError("--resume goes on with a run, and --force starts one anew", "keep one of them")
    from nitro_cli.run.directory import find_run, open_run

    if ref == "latest" and (folder := _run_dir(session)) is not None:
        return open_run(folder, error=ProtectError)
    run, given = find_run(None, session.found.name, ref, error=ProtectError), session.value("field_run_dir")
    if given and Path(given).resolve() != run.path.resolve():
        raise UsageError(
            f"--resume={ref} goes on in {relative(run.path)}, and --run-dir names another folder: {given}",
            "leave out --run-dir",
        )
    return run


def _run_dir(session: Session) -> Path | None:
    """The folder that the configuration names for the run, if it names one."""
    try:
        return getattr(session.configure().experiment, "run_dir", None)
    except UsageError:
        return None  # told when the run's own configuration is known as well


def _configuration_of(run: Any) -> dict[str, Any]:
    from nitro_cli.experiment.presets import load_run_config

    return load_run_config(run.config_path)
