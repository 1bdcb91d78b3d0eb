"""``nitro list``: experiments and their presets, without importing any of them."""

from __future__ import annotations

from nitro_cli.cli.failures import relative
from nitro_cli.cli.render import table
from nitro_cli.cli.session import Session


def run(session: Session) -> int:
    """One row an experiment: a table on a terminal, tab-separated in a pipe."""
    session.check()
    from nitro_cli.experiment.discovery import list_experiments

    out = session.output
    found = list_experiments()
    for item in found:
        facts = {"name": item.name, "path": relative(item.path), "doc": item.doc, "presets": item.presets}
        out.event("experiment", {**facts, "error": str(item.error) if item.error else None})
    out.event("done", {"status": "finished", "exit_code": 0})
    rows = [
        (item.name, ", ".join(item.presets) or "-", _first_line(f"error: {item.error}" if item.error else item.doc))
        for item in found
    ]
    if not rows:
        out.say("no experiments: there is no experiments/ folder with Python files here")
    elif out.stdout.isatty():
        for line in table(("experiment", "presets", ""), rows, None if session.value("wide") else out.width()):
            out.result(line)
    else:
        for row in rows:
            out.result("\t".join(row))
    return 0


def _first_line(text: str | None) -> str:
    return next(iter((text or "").strip().splitlines()), "")
