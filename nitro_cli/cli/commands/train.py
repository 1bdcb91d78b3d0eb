"""``nitro train``."""

from __future__ import annotations

from typing import Any

from nitro_cli.cli.failures import relative
from nitro_cli.cli.session import Session, changed_fields
from nitro_cli.cli.views import View
from nitro_cli.errors import ProtectError


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

    from nitro_cli.run.directory import open_run
    from nitro_cli.run.nitro import Nitro

    def observer(event: str, facts: Any) -> None:
        view.observe(event, facts)
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
    from nitro_cli.run.directory import find_run

    return find_run(None, session.found.name, ref, error=ProtectError)


def _configuration_of(run: Any) -> dict[str, Any]:
    from nitro_cli.experiment.presets import load_run_config

    return load_run_config(run.config_path)
