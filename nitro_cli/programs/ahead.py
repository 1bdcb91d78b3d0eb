"""Executables that a process will probably want, loaded by a thread while set-up runs.

Which ones is a guess from what the last run of the experiment used. It decides nothing: a program is still looked up by
its key, and only what is found there is taken from here. Nothing made for another machine, version or flag is touched,
since jax checks none of that when it loads an executable.
"""

from __future__ import annotations

import threading
from typing import Any

from nitro_cli.programs import executables
from nitro_cli.programs.environment import environment
from nitro_cli.programs.store import Entry, Store, open_store, settings

PROGRAMS = ("initialise", "optimizer_init", "gradient", "update", "step", "evaluation")


class _Ahead:
    """One thread and what it has loaded, by executable and trees."""

    def __init__(self, store: Store, experiment: str) -> None:
        self._store, self._experiment = store, experiment
        self._loaded: dict[tuple[str, str], Any] = {}
        self._busy: tuple[str, str] | None = None
        self._changed = threading.Condition()
        self._wanted = True
        self._thread = threading.Thread(target=self._run, name="nitro-load-ahead", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        here = environment()
        for program in PROGRAMS:
            entry = next(iter(self._store.nearest(self._experiment, program)), None)
            if entry is None or not entry.usable or not _made_here(entry, here):
                continue
            key = (entry.executable, entry.trees)
            with self._changed:
                if not self._wanted:
                    return
                self._busy = key
            found = self._load(entry)
            with self._changed:
                self._busy = None
                if found is not None:
                    self._loaded[key] = found
                self._changed.notify_all()

    def _load(self, entry: Entry) -> Any:
        payload = self._store.executable(entry.executable)
        try:
            return None if payload is None else executables.loaded(payload, entry.trees, entry.lapack)
        except Exception:  # told where the program is asked for, if it is
            return None

    def take(self, entry: Entry) -> Any:
        key = (entry.executable, entry.trees)
        with self._changed:
            while self._busy == key:
                self._changed.wait()
            return self._loaded.pop(key, None)

    def stop(self) -> None:
        with self._changed:
            self._wanted = False
            self._loaded.clear()


_current: _Ahead | None = None


def load_ahead(experiment: str) -> None:
    """Begin to load what the last run of ``experiment`` used."""
    global _current
    stop_loading()
    store = open_store()
    if store is not None and not settings.cold:
        _current = _Ahead(store, experiment)


def taken(entry: Entry) -> tuple[Any, dict[str, Any]] | None:
    """``(executable, found)`` of an entry where it was loaded ahead; waits for it where that is under way."""
    return _current.take(entry) if _current is not None else None


def stop_loading() -> None:
    """Let go of what nobody asked for."""
    global _current
    if _current is not None:
        _current.stop()
        _current = None


def _made_here(entry: Entry, here: dict[str, str]) -> bool:
    return all(entry.environment.get(name) == value for name, value in here.items())
