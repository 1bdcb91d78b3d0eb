"""The store of compiled programs as ``nitro cache-stats`` shows and looks after it. Nothing here imports jax."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from nitro_cli.cli.console import paint
from nitro_cli.cli.failures import relative
from nitro_cli.cli.render import age_text, grid, rows_or_table, size_text
from nitro_cli.cli.session import Session
from nitro_cli.errors import Problem, ProtectError, UsageError
from nitro_cli.programs.store import MAX_BYTES, MAX_DAYS, Listed, Store, store_as_it_lies, store_root

LAST_RUNS = 10
ENTRY_COLUMNS = ("experiment", "program", "size", "age", "used", "hits", "saved", "state", "entry")
RUN_COLUMNS = ("run", "misses", "loaded", "entries", "hits", "compile", "saved", "status", "preset")
SWITCHED_OFF = "the store is switched off by NITRO_CACHE_DIR: every process compiles its programs anew"
SWITCH_ON = "unset NITRO_CACHE_DIR, or let it name a folder of yours"
_SIZES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_DAYS = {"h": 1 / 24, "d": 1.0, "w": 7.0}


# ---- what lies there -----------------------------------------------------------------------------------------------


def listing(session: Session) -> int:
    """The entries of the store, what they sum up to, and the counters of the last runs."""
    out, code = session.output, 0
    store, problem = store_as_it_lies()
    if store is not None:
        _list_entries(session, store)
    else:
        code = 1 if problem else 0
        out.event("store", {"root": None, "problem": problem or SWITCHED_OFF})
        out.result(f"nitro keeps no compiled programs: {problem}" if problem else f"{SWITCHED_OFF}; {SWITCH_ON}")
    _list_runs(session, store)
    out.event("done", {"status": "finished", "exit_code": code})
    return code


def _list_entries(session: Session, store: Store) -> None:
    out, found = session.output, store.listed()
    for row in found:
        out.event("entry", _entry_facts(row))
    facts = _totals(store, found)
    out.event("store", facts)
    if found:
        for line in rows_or_table(out, ENTRY_COLUMNS, [_cells(session, row) for row in found], session.value("wide")):
            out.result(line)
        if out.stdout.isatty():
            for line in _reasons(found):
                out.result(line)
        out.result("")
    for line in _total_lines(facts):
        out.result(line)


def _entry_facts(row: Listed) -> dict[str, Any]:
    entry = row.entry
    return {
        "experiment": entry.experiment,
        "program": entry.program,
        "entry": entry.name,
        "bytes": row.bytes,
        "created": entry.created,
        "used": row.used,
        "hits": row.hits,
        "seconds_saved": row.seconds_saved,
        "seconds": dict(entry.seconds),
        "state": row.state,
        "reason": row.reason,
    }


def _cells(session: Session, row: Listed) -> tuple[Any, ...]:
    """One row of the table. On a terminal a reason stands below the table: it is longer than a column may be."""
    entry, now = row.entry, time.time()
    why = f": {row.reason}" if row.reason and not session.output.stdout.isatty() else ""
    return (
        entry.experiment,
        entry.program,
        size_text(row.bytes),
        age_text(now - entry.created),
        age_text(now - row.used),
        row.hits,
        f"{row.seconds_saved:.1f}s",
        row.state + why,
        entry.name.rpartition("/")[2],
    )


def _reasons(found: list[Listed]) -> list[str]:
    """One line for each program that is not simply kept."""
    lines = [
        f"{row.entry.experiment}/{row.entry.program} {row.state}: {row.reason}" for row in found if row.state != "kept"
    ]
    return list(dict.fromkeys(lines))


def _totals(store: Store, found: list[Listed]) -> dict[str, Any]:
    orphans = [path for path in store.orphans() if path.suffix != ".lock"]  # locks have no size to speak of
    return {
        "root": str(store.root),
        "entries": len(found),
        "kept": sum(row.state == "kept" for row in found),
        "bytes": store.size(),
        "max_bytes": MAX_BYTES,
        "max_days": MAX_DAYS,
        "jax_bytes": store.size("jax"),
        "hits": sum(row.hits for row in found),
        "seconds_saved": sum(row.seconds_saved for row in found),
        "orphans": len(orphans),
        "orphan_bytes": sum(path.stat().st_size for path in orphans if path.exists()),
    }


def _total_lines(facts: Mapping[str, Any]) -> list[str]:
    count, kept = facts["entries"], facts["kept"]
    entries = f"{count} entries" if count != 1 else "1 entry"
    use = f"loaded {facts['hits']} times, which saved {facts['seconds_saved']:.1f}s"
    rows = [
        ["store", facts["root"]],
        [
            "holds",
            f"{entries}, {kept} of them kept for other processes; {use}" if count else "no compiled programs yet",
        ],
        ["size", f"{size_text(facts['bytes'])} of at most {size_text(facts['max_bytes'])}"],
        ["jax", f"{size_text(facts['jax_bytes'])} of that are jax's own cache, for all that nitro does not compile"],
        ["age", f"what nobody uses for {facts['max_days']} days is removed"],
    ]
    if facts["orphans"]:
        what = f"{facts['orphans']} files ({size_text(facts['orphan_bytes'])}) that nothing needs"
        rows.append(["orphans", f"{what}; nitro cache-stats --prune removes them"])
    return [paint(name.ljust(7), "head") + "  " + text for name, text in rows]


def _list_runs(session: Session, store: Store | None) -> None:
    """The last runs of this folder, and as many of other folders as there is room for."""
    out = session.output
    rows = _runs_here()
    here = {row["path"] for row in rows}
    elsewhere = [row for row in reversed(store.runs() if store is not None else []) if row.get("run_dir") not in here]
    rows += [_run_elsewhere(row) for row in elsewhere]
    shown = rows[:LAST_RUNS]
    for row in shown:
        out.event("run", {name: value for name, value in row.items() if name != "path"})
    if not shown:
        out.say("no runs yet: there is no runs/ folder here")
        return
    out.result("")
    for line in rows_or_table(out, RUN_COLUMNS, [_run_cells(row) for row in shown], bool(session.value("wide"))):
        out.result(line)


def _runs_here() -> list[dict[str, Any]]:
    from nitro_cli.errors import OutputError
    from nitro_cli.run.directory import list_runs

    rows = []
    for run in list_runs()[:LAST_RUNS]:
        try:
            facts = run.read_run()
        except OutputError:
            facts = {"status": "run.json is damaged"}
        rows.append(_run_facts(str(run.path), facts))
    return rows


def _run_facts(path: str, facts: Mapping[str, Any]) -> dict[str, Any]:
    cache = facts.get("cache") or {}
    shown = {"path": path, "run": relative(path), "status": facts.get("status"), "preset": facts.get("preset")}
    return {**shown, "experiment": facts.get("experiment"), "cache": cache}


def _run_elsewhere(row: Mapping[str, Any]) -> dict[str, Any]:
    return _run_facts(str(row.get("run_dir", "")), row)


def _run_cells(row: Mapping[str, Any]) -> tuple[Any, ...]:
    cache = row["cache"]
    counts = [cache.get(name, "-") for name in ("misses", "loaded", "entries", "hits")]
    seconds = [
        f"{cache[n]:.1f}s" if isinstance(cache.get(n), float) else "-" for n in ("compile_seconds", "seconds_saved")
    ]
    return (row["run"], *counts, *seconds, row["status"] or "-", row["preset"] or "-")


# ---- what is removed -----------------------------------------------------------------------------------------------


def clear(session: Session) -> int:
    """Remove everything that nitro keeps for other processes."""
    store, out = _store_or_refuse(), session.output
    entries, freed = len(store.listed()), store.clear()
    left = store.size()
    out.event("clear", {"root": str(store.root), "entries": entries, "freed_bytes": freed, "left_bytes": left})
    out.event("done", {"status": "finished", "exit_code": 5 if left else 0})
    what = f"{entries} entries" if entries != 1 else "1 entry"
    out.result(f"removed {what}, {size_text(freed)} freed in {store.root}" if freed else f"{store.root} is empty")
    if left:
        out.fail(f"error: {size_text(left)} could not be removed from {store.root}")
    return 5 if left else 0


def prune(session: Session) -> int:
    """Remove orphans, what is too old, and the least recently used of what is too much."""
    bounds = _bounds(session)
    store, out = _store_or_refuse(), session.output
    before = store.size()
    files = store.prune(*bounds)
    left = store.size()
    facts = {"root": str(store.root), "removed": files, "freed_bytes": max(before - left, 0), "left_bytes": left}
    out.event("prune", facts)
    out.event("done", {"status": "finished", "exit_code": 0})
    rest = f"{size_text(left)} left in {store.root}"
    what = f"{files} files and entries" if files != 1 else "1 file or entry"
    out.result(
        f"removed {what}, {size_text(facts['freed_bytes'])} freed; {rest}" if files else f"nothing to remove; {rest}"
    )
    return 0


def _bounds(session: Session) -> tuple[int, float]:
    """``(bytes, days)`` that the options ask for. Raises UsageError with all that is wrong about them."""
    problems: list[Problem] = []
    found: list[Any] = []
    for key, read, default in (("to_size", to_bytes, MAX_BYTES), ("unused_for", to_days, MAX_DAYS)):
        text = session.value(key)
        try:
            found.append(default if text is None else read(text))
        except ValueError as error:
            problems.append(Problem(f"{session.parsed.given[key]} {text}: {error}"))
    if problems:
        raise UsageError(problems)
    return found[0], found[1]


def to_bytes(text: str) -> int:
    """``500MB``, ``1.5GB``, ``2GiB`` or 0 as bytes. Raises ValueError that names the right form."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b", text.strip(), re.IGNORECASE)
    if text.strip() == "0":
        return 0
    if found is None:
        raise ValueError("a size is a number and its unit: 500MB, 1.5GB or 2GiB")
    return int(float(found[1]) * _SIZES[(found[2] or "").lower()])


def to_days(text: str) -> float:
    """``30d``, ``12h``, ``2w`` or 0 as days. Raises ValueError that names the right form."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([hdw])", text.strip(), re.IGNORECASE)
    if text.strip() == "0":
        return 0.0
    if found is None:
        raise ValueError("an age is a number and its unit, hours, days or weeks: 12h, 30d or 2w")
    return float(found[1]) * _DAYS[found[2].lower()]


def _store_or_refuse(why: str = "so there is nothing to do") -> Store:
    store, problem = store_as_it_lies()
    if store is not None:
        return store
    if problem:
        raise ProtectError(f"the store is left alone: {problem}", path=str(store_root()))
    raise UsageError(f"the store is switched off by NITRO_CACHE_DIR, {why}", SWITCH_ON)


# ---- what differs --------------------------------------------------------------------------------------------------


def explain(session: Session) -> int:
    """What differs between the programs of two runs. 1 where an entry that would say it is gone."""
    from nitro_cli.cli.compared import NO_STORE, compare, ran_without_store
    from nitro_cli.run.directory import find_run

    out = session.output
    runs = [find_run(None, None, ref) for ref in session.value("explain")]
    facts, names = [run.read_run() for run in runs], [relative(run.path) for run in runs]
    without = [name for name, told in zip(names, facts, strict=True) if ran_without_store(told)]
    rows = compare(facts[0], facts[1], _store_or_refuse("and what programs depend on is read from it"))
    if not rows:
        raise UsageError("the run.json of these runs names no programs", "runs that trained a step name them")
    code = 1 if any(row.unknown for row in rows) else 0
    out.say(f"{names[0]} -> {names[1]}")
    for name in dict.fromkeys(without):
        out.event("warning", {"message": f"{name} {NO_STORE}"})
        out.warn(f"{name} {NO_STORE}")
    for row in rows:
        out.event("difference", vars(row))
    out.event("done", {"status": "finished", "exit_code": code})
    if out.stdout.isatty():
        lines = grid([[row.program, line] for row in rows for line in row.lines()])
    else:
        lines = [f"{row.program}\t{line}" for row in rows for line in row.lines()]
    for line in lines:
        out.result(line)
    return code


def probe(session: Session) -> int:
    """Whether a second process loads here what a first one compiled."""
    from nitro_cli.cli.probing import probe_store

    return probe_store(session.output)
