"""Threads that fetch batches ahead of the loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

# What a fetch returns where the source has ended.
END: Any = object()

# How long close waits for workers that are in the middle of a fetch; one that hangs for good is left to the process.
_PATIENCE = 1.0


class Workers:
    """Runs ``fetch(index)`` for ``start <= index < stop`` in ``count`` threads and hands the results on.

    At most ``room`` batches are fetched or waiting at any time. Ordered results come in order of index; an exception
    takes the place of its result. Threads end by themselves after the last index, an exception or ``close``.
    """

    def __init__(
        self, fetch: Callable[[int], Any], start: int, stop: int, count: int, room: int, ordered: bool, name: str
    ) -> None:
        self._fetch = fetch
        self._stop = stop
        self._room = room
        self._ordered = ordered
        self._next_job = self._next_out = start
        self._taken = self._given = start
        self._results: dict[int, tuple[Any, BaseException | None]] = {}
        self._closed = False
        # Re-entrant, because a garbage collection in a thread that holds it may close this very object.
        lock = threading.RLock()
        self._ready = threading.Condition(lock)
        self._space = threading.Condition(lock)
        self._threads = [
            threading.Thread(target=self._work, name=f"nitro-{name}-{i}", daemon=True) for i in range(count)
        ]
        try:
            for thread in self._threads:
                thread.start()
        except BaseException:
            self.close()
            raise

    def take(self) -> tuple[int, Any]:
        """The next ``(index, result)``; raises what the fetch raised, with the worker's traceback."""
        with self._ready:
            while not self._closed:
                index = self._available()
                if index is not None:
                    break
                self._ready.wait()
            else:
                raise RuntimeError("the stream was closed while a batch was awaited")
            value, error = self._results.pop(index)
            self._next_out = index + 1
            self._given += 1
            self._space.notify()
        if error is not None:
            raise error
        return index, value

    def close(self) -> None:
        """Ends the threads. Never raises, waits a second at most, and may be called from anywhere and again."""
        with self._ready:
            self._closed = True
            self._results.clear()
            self._ready.notify_all()
            self._space.notify_all()
        deadline = time.monotonic() + _PATIENCE
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _available(self) -> int | None:
        if self._ordered:
            return self._next_out if self._next_out in self._results else None
        return next(iter(self._results), None)

    def _job(self) -> int | None:
        """The next index to fetch, as soon as there is room for its result; None where there is nothing more to do."""
        with self._space:
            while not self._closed and self._next_job < self._stop:
                if self._taken - self._given < self._room:
                    index = self._next_job
                    self._next_job += 1
                    self._taken += 1
                    return index
                self._space.wait()
            return None

    def _work(self) -> None:
        while (index := self._job()) is not None:
            value, error = None, None
            try:
                value = self._fetch(index)
            except BaseException as caught:  # even SystemExit: the loop must hear of it, or it would wait for ever
                error = caught
            with self._ready:
                if self._closed:
                    return
                if error is not None or value is END:
                    self._next_job = self._stop  # nothing after this one is wanted
                    self._space.notify_all()
                self._results[index] = (value, error)
                self._ready.notify()
