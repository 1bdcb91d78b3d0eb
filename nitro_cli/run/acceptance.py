"""The acceptance check: after the first step, nothing compiles.

In an empty in-process cache, train one epoch, validate, and validate again. The check is met when every miss is also an
entry (no program was compiled twice), when no program needed a second version, and when jax's own ledger shows no
compile of any name after the first step and the first validation. A program that is loaded from the store is a miss as
well, and needs a second version as much as one that is compiled.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from nitro_cli.experiment.presets import Resolved
from nitro_cli.programs.cache import EntryInfo, Program, cache_entries, cache_reset, cache_stats, program_cache
from nitro_cli.programs.executables import past_jax_cache
from nitro_cli.programs.ledger import LedgerRow, ledger
from nitro_cli.programs.reasons import Known, explain
from nitro_cli.run.counters import ORIGINS
from nitro_cli.run.nitro import Nitro

ONE_VERSION = ("gradient", "update", "evaluation", "step")


@dataclass(frozen=True)
class Acceptance:
    """``origins`` counts the misses: "compiled", "linked" (traced, and the executable found by what it lowers to) or
    "loaded" without a trace. ``grown`` says which programs were needed again and why. ``foreign`` counts jax's other
    compiles by name, before the first step and validation were done, ``late_foreign`` those after. ``verified`` is
    False where jax reported no compile at all, so that nothing can be concluded from its ledger."""

    entries: list[EntryInfo]
    hits: int
    misses: int
    origins: dict[str, int]
    entries_count: int
    grown: list[str]
    foreign: list[tuple[str, int]]
    late_foreign: list[tuple[str, int]]
    verified: bool
    ok: bool
    verdict: str

    @property
    def told_origins(self) -> str:
        return _told(self.origins)


class _Marks:
    """Where jax's ledger stood at the moments that matter. Training from the first step on, and anything after the
    first validation, must compile nothing."""

    def __init__(self, observer: Callable[[str, dict[str, Any]], None]) -> None:
        self.observer = observer
        self.marks: dict[str, int] = {}

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        name = facts.get("phase", event)
        self.marks.setdefault(name, ledger.mark())
        self.observer(event, facts)

    def late(self) -> list[LedgerRow]:
        after_step = ledger.rows[self.marks.get("first_step", 0) : self.marks.get("validate", ledger.mark())]
        return after_step + ledger.rows[self.marks["epoch"] :]


def acceptance_check(
    e: Any,
    resolved: Resolved | None = None,
    observer: Callable[[str, dict[str, Any]], None] = lambda event, facts: None,
) -> Acceptance:
    """Run the check on an experiment. Its run is written to a temporary directory and removed."""
    cache_reset()
    _make_jax_report()
    start = ledger.mark()
    marks = _Marks(observer)
    with tempfile.TemporaryDirectory(prefix="nitro-acceptance-") as folder:
        n = Nitro(e, resolved=resolved, observer=marks, max_epochs=1, run_dir=Path(folder) / "run")
        n.noted = False  # the run is thrown away: a list of runs is no place for it
        n.train()
        before = cache_stats()
        if "val" in n.splits:
            n.validate()
    stats, entries = cache_stats(), cache_entries()
    late = marks.late()
    origins = dict(Counter(entry.origin for entry in entries))
    grown = _grown(program_cache().all())
    if stats.misses > before.misses:
        grown += [f"{entry.program}: {entry.why}" for entry in entries[before.entries :]]
    other = [row.name for row in ledger.since(start) if row not in late and "nitro_" not in row.name]
    late_names = Counter(row.name for row in late if "nitro_" not in row.name)
    ok = stats.misses == stats.entries and not grown and not late_names and ledger.verified
    return Acceptance(
        entries=entries,
        hits=stats.hits,
        misses=stats.misses,
        origins=origins,
        entries_count=stats.entries,
        grown=grown,
        foreign=list(Counter(other).items()),
        late_foreign=list(late_names.items()),
        verified=ledger.verified,
        ok=ok,
        verdict=_verdict(origins, stats.misses, stats.entries, grown, late_names),
    )


def _make_jax_report() -> None:
    """One compile for the ledger to see: where all programs are loaded, jax has nothing else to report, and an empty
    ledger would say nothing."""
    if not ledger.verified:
        with past_jax_cache():
            jax.jit(lambda: 0).lower().compile()


def _grown(programs: list[Program]) -> list[str]:
    """Second versions of a program. A metric program has one per number of rows, which is as it should be.

    The reason is found among the programs of this process: the store gives none for a program that it has, and knows
    versions of other runs for one that it has not.
    """
    seen: dict[str, list[Known]] = {}
    grown = []
    for program in programs:
        request = program.request
        earlier = seen.setdefault(request.program, [])
        why = explain(request, earlier)
        if earlier and (request.program in ONE_VERSION or not why.startswith("rows: ")):
            grown.append(f"{request.program}: {why}")
        earlier.append(Known.of_request(request, program.built.reads))
    return grown


def _told(origins: dict[str, int]) -> str:
    """``compiled 1, loaded 2``."""
    known = [name for name in ORIGINS if origins.get(name)]
    return ", ".join(f"{name} {origins[name]}" for name in known) or "none"


def _verdict(origins: dict[str, int], misses: int, entries: int, grown: list[str], late: Counter[str]) -> str:
    if not ledger.verified:
        return "cannot verify: jax reported no compile event at all"
    if misses != entries:
        return f"not met: {misses} misses for {entries} programs, so one was compiled twice"
    if grown:
        return f"not met: {len(grown)} compiled after the first step"
    if late:
        names = ", ".join(f"{name} x {count}" for name, count in late.items())
        return f"not met: jax compiled operations of the experiment after the first step and validation: {names}"
    how = "" if set(origins) <= {"compiled"} else f" ({_told(origins)})"
    return f"met: {misses} misses == {entries} programs{how}, and nothing compiled after the first step"
