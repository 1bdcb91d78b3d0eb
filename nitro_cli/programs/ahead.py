"""Executables that are loaded ahead of being asked for, beside the imports and the set-up of a warm start.

The last run of an experiment left a note of the entries that it used until its first step; the next one loads these in
a thread. Nothing is run and nothing decided by it: which entry a program is, its key says, as ever, and what was
loaded in vain is dropped.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import threading
from concurrent.futures import Future
from typing import Any

from nitro_cli.programs import executables
from nitro_cli.programs.cache import cache_entries
from nitro_cli.programs.environment import environment
from nitro_cli.programs.store import Entry, Store, open_store, settings

_loading: dict[str, Future[tuple[Entry, Any] | None]] = {}  # by the name of the entry
_keys: dict[type, str] = {}


def begin(cls: type) -> None:
    """Start to load what the last run of the experiment ``cls`` loaded. It starts jax's backend, so that must not have
    to be configured any more."""
    store = open_store()
    if store is None or settings.cold:
        return
    # Only what was made on this very machine, for these versions, is safe to load. The thread is left with what needs
    # no Python: beside a busy thread, each look at a file would wait its turn for milliseconds.
    facts = (inspect.getfile(cls), cls.__qualname__, environment())
    _keys[cls] = key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
    futures = {name: Future() for name in (store.answer(key) or {}).get("entries", ())}
    _loading.update(futures)
    if futures:
        threading.Thread(target=_work, args=(store, futures), name="nitro-ahead").start()


def taken(entry: Entry) -> Any:
    """What ``executables.loaded`` gives for ``entry``, once, where that is loaded or being loaded; else None."""
    future = _loading.pop(entry.name, None)
    if future is None or future.cancel():  # its turn has not come: asking now is sooner
        return None
    found = future.result()
    return found[1] if found is not None and found[0] == entry else None


def note(cls: type) -> None:
    """Leave word for the next run, after the first step of this one."""
    _loading.clear()
    store, key = open_store(), _keys.get(cls)
    if store is None or key is None:
        return
    used = {"entries": [entry.entry for entry in cache_entries() if entry.entry]}
    if store.answer(key) != used:
        store.keep_answer(key, used)


def _work(store: Store, futures: dict[str, Future[tuple[Entry, Any] | None]]) -> None:
    for name, future in futures.items():
        if future.set_running_or_notify_cancel():
            future.set_result(_loaded(store, name))


def _loaded(store: Store, name: str) -> tuple[Entry, Any] | None:
    """None for whatever is wrong: who asks for the entry will find out, and tell."""
    try:
        entry = store.entry_by_name(name)
        payload = store.executable(entry.executable) if entry is not None and entry.usable else None
        if entry is None or payload is None:
            return None
        return entry, executables.loaded(payload, entry.trees, entry.lapack)
    except Exception:
        return None
