"""``nitro cache-stats``: the acceptance check of an experiment, or the counters of the last runs."""

from __future__ import annotations

from typing import Any

from nitro_cli.cli.console import paint
from nitro_cli.cli.failures import relative
from nitro_cli.cli.render import table
from nitro_cli.cli.session import Session
from nitro_cli.cli.views import View

LAST_RUNS = 10


def run(session: Session) -> int:
    """With an experiment: 0 when nothing compiled twice, else 1. Without: the counters that runs left behind."""
    return _counters(session) if session.found is None else _check(session)


def _check(session: Session) -> int:
    resolved = session.configure()
    view = View(session.output)
    view.banner(session.found.qualname, resolved.preset)
    view.config(session.found, resolved)

    from nitro_cli.run.acceptance import acceptance_check

    out = session.output

    def observer(event: str, facts: dict[str, Any]) -> None:
        if event not in ("run", "checkpoint"):  # the check's own run is thrown away: its places mean nothing to anyone
            view.observe(event, facts)

    found = acceptance_check(resolved.experiment, resolved, observer)
    code = 0 if found.ok else 1
    for entry in found.entries:
        out.event("program", vars(entry))
    facts = {
        "ok": found.ok,
        "hits": found.hits,
        "misses": found.misses,
        "entries": found.entries_count,
        "grown": list(found.grown),
        "foreign": [list(row) for row in found.foreign],
        "late_foreign": [list(row) for row in found.late_foreign],
        "verdict": found.verdict,
    }
    out.event("cache", facts)
    out.event("done", {"status": "finished", "exit_code": code})
    for line in _check_lines(session, found):
        out.result(line)
    return code


def _check_lines(session: Session, found: Any) -> list[str]:
    rows = [(entry.program, entry.hits, f"{entry.compile_seconds:.2f}s", entry.why) for entry in found.entries]
    lines = _lines(session, ("program", "hits", "compile", "why"), rows)
    lines += [f"grown: {reason}" for reason in found.grown]
    lines += [f"compiled outside nitro's programs after the first step: {name} x {n}" for name, n in found.late_foreign]
    lines.append(f"misses {found.misses}, entries {found.entries_count}, hits {found.hits}")
    return [*lines, paint(found.verdict, "good" if found.ok else "error")]


def _counters(session: Session) -> int:
    session.check()
    from nitro_cli.run.directory import list_runs

    out = session.output
    rows = []
    for run in list_runs()[:LAST_RUNS]:
        facts = run.read_run()
        cache = facts.get("cache") or {}
        shown = {"run": relative(run.path), "status": facts.get("status"), "preset": facts.get("preset")}
        out.event("run", {**shown, "experiment": facts.get("experiment"), "cache": cache})
        counts = [cache.get(name, "-") for name in ("misses", "entries", "hits")]
        seconds = sum(float(program.get("compile_seconds") or 0) for program in cache.get("programs", []))
        rows.append((shown["run"], *counts, f"{seconds:.1f}s", shown["status"] or "-", shown["preset"] or "-"))
    out.event("done", {"status": "finished", "exit_code": 0})
    if not rows:
        out.say("no runs here yet: there is no runs/ folder")
    else:
        for line in _lines(session, ("run", "misses", "entries", "hits", "compile", "status", "preset"), rows):
            out.result(line)
    return 0


def _lines(session: Session, header: tuple[str, ...], rows: list[Any]) -> list[str]:
    """A table; where stdout is not a terminal, tab-separated rows that nothing is cut from."""
    out = session.output
    if out.stdout.isatty():
        return table(header, rows, None if session.value("wide") else out.width())
    head = [] if out.quiet else ["\t".join(header)]
    return head + ["\t".join(str(cell) for cell in row) for row in rows]
