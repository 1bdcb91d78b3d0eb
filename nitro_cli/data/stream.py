"""One pass over a split, with or without threads.

A thread costs a run whose loader is already faster than its step, so an undeclared split starts without any, is
measured, and gets workers only where fetching takes a noticeable part of the loop's time.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from itertools import islice
from statistics import fmean, median
from time import perf_counter
from typing import Any

from nitro_cli.data.source import DataError, indexable
from nitro_cli.data.workers import END, Workers

# A split gets workers when, over its first batches, fetching one takes longer than both of these.
MEASURED = 8
SLOW_SECONDS = 200e-6
SLOW_FRACTION = 0.05

# Sources found slow, and not by one fetch: their next pass has workers from its first batch on, however short it is.
_slow_sources: weakref.WeakSet[Any] = weakref.WeakSet()


class Stream:
    """An iterator of ``(index, batch)`` over one pass, for a ``with`` statement; ``open_stream`` makes it.

    ``wait_seconds`` is the time the loop has been kept waiting for batches, ``path`` the way they are read and
    ``workers`` the number of threads at work now. A complete pass has given every batch exactly once, else it ends with
    a DataError. A ``for`` loop runs on the generator behind the stream, which saves a call per batch.
    """

    def __init__(
        self,
        split: str,
        source: Any,
        total: int,
        skip: int,
        prepare: Callable[[Any], Any] | None,
        config: dict[str, Any],
        check: Callable[[int, Any], None] | None = None,
    ) -> None:
        self.path: str = config["path"]
        self.wait_seconds = 0.0
        self.workers = 0
        self._split = split
        self._source = source
        self._total = total
        self._prepare = prepare
        self._check = check
        self._config = config
        self._by_index = indexable(source)
        self._ledger = Ledger(split, skip, total)
        self._pool: Workers | None = None
        self._batches = self._read(skip)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        return self._batches

    def __next__(self) -> tuple[int, Any]:
        return next(self._batches)

    def close(self) -> None:
        """Ends the pass and its threads, at any moment. Never raises; waits a second at most."""
        self._close_pool()
        with suppress(Exception):  # such as a generator that a worker still runs
            self._batches.close()

    def _close_pool(self) -> None:
        if self._pool is not None:
            self._pool.close()
            self.workers = 0

    def _read(self, skip: int) -> Generator[tuple[int, Any], None, None]:
        began = perf_counter()
        items = self._items(skip)
        self.wait_seconds += perf_counter() - began
        try:
            if self.path != "auto":
                rest = self._inline if self._config["workers"] == 0 else self._in_background
            elif _was_slow(self._source):
                rest = self._in_background
            else:
                rest = yield from self._measured(items, skip)
            yield from rest(items, self._ledger.upto)
            if not self._by_index and next(items, END) is not END:
                raise self._ledger.too_many()
            self._ledger.check()
        finally:
            self._close_pool()
            with suppress(Exception):  # the reason for ending must not be hidden
                getattr(items, "close", int)()

    def _items(self, skip: int) -> Iterator[Any]:
        if self._by_index:
            return map(self._source.__getitem__, range(skip, self._total))
        items = iter(self._source)
        next(islice(items, skip, skip), None)
        return items

    def _inline(self, items: Iterator[Any], start: int, stop: int | None = None) -> Iterator[tuple[int, Any]]:
        prepare, check, ledger = self._prepare, self._check, self._ledger
        for index in range(start, self._total if stop is None else stop):
            began = perf_counter()
            batch = next(items, END)
            if batch is END:
                return
            if check is not None:
                check(index, batch)
            if prepare is not None:
                batch = prepare(batch)
            self.wait_seconds += perf_counter() - began
            ledger.upto = index + 1  # in order by construction
            yield index, batch

    def _measured(self, items: Iterator[Any], start: int) -> Generator[tuple[int, Any], None, Callable[..., Any]]:
        """Yields the first batches inline; returns the method that reads the rest."""
        fetches, steps = [], []
        before = self.wait_seconds
        for pair in self._inline(items, start, min(start + MEASURED, self._total)):
            fetches.append(self.wait_seconds - before)
            given = perf_counter()
            yield pair
            steps.append(perf_counter() - given)
            before = self.wait_seconds
        if not is_slow(fetches, steps):
            return self._inline
        # One slow fetch may be a hiccup of the machine: reason enough for this pass, but not for all that follow.
        if is_slow(fetches[:1] + sorted(fetches[1:])[:-1], steps):
            with suppress(TypeError):  # a source without hash or weak references is measured again
                _slow_sources.add(self._source)
        return self._in_background

    def _in_background(self, items: Iterator[Any], start: int) -> Iterator[tuple[int, Any]]:
        count = min(self._config["workers"], self._total - start)
        if count < 1:
            return
        room, ordered = self._config["host_batches"], self._config["ordered"]
        self._pool = pool = Workers(self._fetch(items), start, self._total, count, room, ordered, self._split)
        self.workers = count
        for _ in range(start, self._total):
            began = perf_counter()
            index, batch = pool.take()
            self.wait_seconds += perf_counter() - began
            if batch is END:
                return
            self._ledger.deliver(index)
            yield index, batch

    def _fetch(self, items: Iterator[Any]) -> Callable[[int], Any]:
        source, by_index, prepare, check = self._source, self._by_index, self._prepare, self._check

        def fetch(index: int) -> Any:
            batch = source[index] if by_index else next(items, END)
            if batch is END:
                return END
            if check is not None:
                check(index, batch)
            return batch if prepare is None else prepare(batch)

        return fetch


class Ledger:
    """Notes every batch that is delivered, so that a pass can prove that each came exactly once."""

    def __init__(self, split: str, start: int, total: int) -> None:
        self.upto = start  # every index below has been delivered
        self._start = start
        self._early: set[int] = set()
        self._split = split
        self._total = total

    def deliver(self, index: int) -> None:
        if index < self.upto or index in self._early:
            raise DataError(f"split '{self._split}': batch {index} came twice", split=self._split)
        self._early.add(index)
        while self.upto in self._early:
            self._early.remove(self.upto)
            self.upto += 1

    def check(self) -> None:
        """Raises DataError unless all batches of the pass have been delivered."""
        if self.upto == self._total:
            return
        missing = self._total - self.upto - len(self._early)
        notes = [f"first missing: batch {self.upto}"]
        if self.upto == self._start and not self._early:
            notes = [
                "this pass gave nothing: the source can be read only once, and has been",
                "fix: __iter__ must start from the first batch each time it is called",
            ]
        elif missing == 1 and not self._early:
            notes.append("one too few can mean that the source is not restartable: set-up has drawn a first batch")
        else:
            notes.append("fix: len() must count the batches that one iteration gives")
        raise DataError(
            f"split '{self._split}': {missing} of {self._total} batches are missing", *notes, split=self._split
        )

    def too_many(self) -> DataError:
        return DataError(
            f"split '{self._split}' gives more than the {self._total} batches that its len() promises",
            "the rest would never be seen, and a schedule would end too early",
            "fix: len() must count the batches that one iteration gives",
            split=self._split,
        )


def is_slow(fetches: list[float], steps: list[float]) -> bool:
    """Whether batches are worth a thread, from the seconds that the first fetches and steps took.

    The first fetch is left out, because it starts the loader, and the middle step counts, because the first compiles.
    """
    if len(fetches) < 2 or not steps:
        return False
    fetch = fmean(fetches[1:])
    return fetch > SLOW_SECONDS and fetch > SLOW_FRACTION * median(steps)


def _was_slow(source: Any) -> bool:
    try:
        return source in _slow_sources
    except TypeError:
        return False
