"""``nitro show``: what a run would be, with nothing compiled and nothing written."""

from __future__ import annotations

from pathlib import Path

from nitro_cli.cli.failures import relative
from nitro_cli.cli.plots import can_draw, check_plot, curve_lines, write_png
from nitro_cli.cli.render import binding_facts, binding_lines, config_facts, config_lines, heading, plain_report
from nitro_cli.cli.session import Session
from nitro_cli.errors import UsageError


def run(session: Session) -> int:
    """Print the configuration and the bindings on stdout."""
    plot = Path(session.value("plot")) if session.value("plot") else None
    if plot is not None:
        check_plot(plot, bool(session.value("force")))
    resolved = session.configure()

    from nitro_cli.run.nitro import Nitro

    out = session.output
    nitro = Nitro(resolved.experiment, resolved=resolved, command_line=session.command_line)
    report = nitro.report
    curves = nitro.schedule_curves() if report.schedules else {}
    head = (report.title, report.preset, report.path)
    out.event("config", config_facts(*head, report.fields))
    out.event("binding", binding_facts(report))
    if curves:
        out.event("schedules", {"curves": curves})
    out.event("done", {"status": "finished", "exit_code": 0})
    verbose = out.verbose > 0
    if out.stdout.isatty():
        lines = [heading(*head), *config_lines(report.fields, verbose, out.width()), *binding_lines(report)]
    else:
        lines = plain_report(report, verbose)
    for line in lines + ([] if not curves else curve_lines(curves, out.width(), not can_draw(out.stdout))):
        out.result(line)
    if plot is not None and not curves:
        raise UsageError("--plot: this run has no schedules to draw", "declare some: def schedules(self)")
    if plot is not None:
        write_png(curves, plot, f"{report.title}, {report.run['total_steps']} steps")
        out.result(f"plot {relative(plot)}")
    return 0
