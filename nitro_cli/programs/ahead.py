"""The executables of the first step, run in by a thread while set-up goes on.

On a CPU the first run of an executable builds its matrix routines, which takes as long as tens of steps. So what the
last run of the experiment used is loaded at once and run on zeros beside set-up. (To load in the thread as well would
gain nothing: jax holds Python's lock while it does.) It is a guess that decides nothing: a program is looked up by its
key all the same, and only what is found there is taken from here. Nothing made for another machine, version or flag is
touched, since jax checks none of that when it loads an executable.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any

from nitro_cli.programs import executables
from nitro_cli.programs.environment import environment
from nitro_cli.programs.store import Entry, Store, open_store, settings

PROGRAMS = ("gradient", "update", "step")

_loaded: dict[tuple[str, str], tuple[Any, threading.Event]] = {}  # by executable and trees


def load_ahead(experiment: str) -> None:
    """Load what the last run of ``experiment`` took its first step with, and begin to run it in."""
    _loaded.clear()
    store = open_store()
    if store is None or settings.cold:
        return
    here = environment()
    for program in PROGRAMS:
        entry = next(iter(store.nearest(experiment, program)), None)
        if entry is not None and entry.usable and _made_here(entry, here):
            with contextlib.suppress(Exception):  # told where the program is asked for, if it is
                _load(store, entry)
    ready = list(_loaded.values())
    threading.Thread(target=_run_in, args=(ready,), name="nitro-run-in", daemon=True).start()


def taken(entry: Entry) -> tuple[Any, dict[str, Any]] | None:
    """``(executable, found)`` of an entry where it was loaded ahead."""
    found, done = _loaded.pop((entry.executable, entry.trees), (None, None))
    if done is not None:
        done.wait()
    return found


def _load(store: Store, entry: Entry) -> None:
    payload = store.executable(entry.executable)
    if payload is not None:
        found = executables.loaded(payload, entry.trees, entry.lapack)
        _loaded[entry.executable, entry.trees] = found, threading.Event()


def _run_in(ready: list[tuple[Any, threading.Event]]) -> None:
    for (executable, _), done in ready:
        with contextlib.suppress(Exception):  # the first call in earnest will fail likewise, and there is a way out
            executables.run_on_zeros(executable)
        done.set()


def _made_here(entry: Entry, here: dict[str, str]) -> bool:
    return all(entry.environment.get(name) == value for name, value in here.items())
