"""``nitro cache-stats``: the acceptance check of an experiment; without one, the store of compiled programs."""

from __future__ import annotations

from typing import Any

from nitro_cli.cli import stored
from nitro_cli.cli.console import paint
from nitro_cli.cli.look_ups import with_store
from nitro_cli.cli.options import CONFIG, LOOK_UPS
from nitro_cli.cli.render import rows_or_table
from nitro_cli.cli.session import Session
from nitro_cli.cli.views import View
from nitro_cli.errors import Problem

MODES = {"clear": stored.clear, "prune": stored.prune, "probe": stored.probe, "explain": stored.explain}
BOUNDS = ("to_size", "unused_for")


@with_store
def run(session: Session) -> int:
    """With an experiment: 0 when nothing compiled twice, else 1. Without: the store, or what is to be done with it."""
    session.parsed.problems += _contradictions(session)
    if session.found is not None:
        return _check(session)
    session.check()
    return next((mode for key, mode in MODES.items() if session.value(key)), stored.listing)(session)


def _contradictions(session: Session) -> list[Problem]:
    """Options that do not go together, or not with what is asked for."""
    given = session.parsed.given
    modes = [given[key] for key in MODES if key in given]
    problems = []
    if len(modes) > 1:
        problems.append(Problem(f"{' and '.join(modes)} exclude each other", notes=("give one of them at a time",)))
    elif modes and session.found is not None:
        what = f"{modes[0]} takes no experiment"
        problems.append(Problem(what, notes=(f"leave out {session.found.name!r}",)))
    for key in BOUNDS:
        if key in given and "prune" not in given:
            line = f"nitro cache-stats --prune {given[key]} {session.value(key)}"
            problems.append(Problem(f"{given[key]} says what --prune leaves", notes=(f"write {line}",)))
    if session.found is None:
        for option in (*CONFIG, *LOOK_UPS):
            if option.key in given:
                what = f"{option.name} is about an experiment, and none is named"
                value = f" {session.value(option.key)}" if option.kind == "text" else ""
                problems.append(Problem(what, notes=(f"write nitro cache-stats EXPERIMENT {option.name}{value}",)))
    return problems


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
        "compiled": found.origins.get("compiled", 0),
        "linked": found.origins.get("linked", 0),
        "loaded": found.origins.get("loaded", 0),
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
    rows = [(e.program, e.hits, e.origin, f"{e.seconds:.2f}s", e.why) for e in found.entries]
    header = ("program", "hits", "origin", "seconds", "why")
    lines = rows_or_table(session.output, header, rows, bool(session.value("wide")))
    lines += [f"grown: {reason}" for reason in found.grown]
    lines += [f"compiled outside nitro's programs after the first step: {name} x {n}" for name, n in found.late_foreign]
    lines.append(f"misses {found.misses} ({found.told_origins}), entries {found.entries_count}, hits {found.hits}")
    return [*lines, paint(found.verdict, "good" if found.ok else "error")]
