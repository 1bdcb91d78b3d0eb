"""``nitro show``: what a run would be, with nothing compiled and nothing written."""

from __future__ import annotations

from nitro_cli.cli.render import binding_facts, binding_lines, config_facts, config_lines, heading, plain_report
from nitro_cli.cli.session import Session


def run(session: Session) -> int:
    """Print the configuration and the bindings on stdout."""
    resolved = session.configure()

    from nitro_cli.run.nitro import Nitro

    out = session.output
    report = Nitro(resolved.experiment, resolved=resolved, command_line=session.command_line).report
    head = (report.title, report.preset, report.path)
    out.event("config", config_facts(*head, report.fields))
    out.event("binding", binding_facts(report))
    out.event("done", {"status": "finished", "exit_code": 0})
    verbose = out.verbose > 0
    if out.stdout.isatty():
        lines = [heading(*head), *config_lines(report.fields, verbose, out.width()), *binding_lines(report)]
    else:
        lines = plain_report(report, verbose)
    for line in lines:
        out.result(line)
    return 0
