"""What a run compiled, loaded and called: for its run.json, and for the store's list of runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from nitro_cli.programs.cache import CacheStats, EntryInfo, cache_entries, cache_stats
from nitro_cli.programs.store import Store, open_store

ORIGINS = ("compiled", "linked", "loaded")


def cache_counters(before: CacheStats) -> dict[str, Any]:
    """The counters since ``before``, by where the programs came from, and every program that the process holds."""
    now, entries = cache_stats(), cache_entries()
    made = entries[before.entries :]
    origins = Counter(entry.origin for entry in made)
    return {
        "hits": now.hits - before.hits,
        "misses": now.misses - before.misses,
        **{name: origins[name] for name in ORIGINS},
        "entries": now.entries,
        "compile_seconds": float(sum(entry.seconds for entry in made if entry.origin == "compiled")),
        "seconds_saved": _saved(made, open_store()),
        "programs": [asdict(entry) for entry in entries],
    }


def _saved(made: list[EntryInfo], store: Store | None) -> float:
    """Seconds that the programs which were loaded took to compile once, less what it took to load them."""
    saved = 0.0
    for entry in made:
        kept = store.entry_by_name(entry.entry) if store is not None and entry.origin == "loaded" else None
        if kept is not None:
            saved += sum(kept.seconds.values()) - entry.load_seconds
    return saved


def note_run(run_dir: str, status: str, facts: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
    """Add the run to the store's list, which ``nitro cache-stats`` shows, and let the store look after itself."""
    store = open_store()
    if store is None:
        return
    cache = {name: value for name, value in counters.items() if name != "programs"}
    store.note_run({"time": time.time(), "run_dir": run_dir, "status": status, **facts, "cache": cache})
    store.tidy()
