"""How a split is read ahead of the loop: what the user declares, and what follows from it.

A thread costs a run whose loader is already faster than its step, so by default a stream starts without any, measures,
and takes workers only where batches really are waited for. ``Prefetch`` and ``NoPrefetch`` decide it by hand.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from nitro_cli.data.source import DataError, count_batches, indexable, unwrap
from nitro_cli.data.stream import Stream

__all__ = ["NoPrefetch", "Prefetch", "Stream", "check_indexing", "open_stream", "prefetch_config"]


class _Declaration:
    """A split with a word on how to read it. Iterating by hand passes through."""

    declares_prefetch = True

    def __init__(self, source: Any) -> None:
        if isinstance(source, _Declaration):
            raise DataError(
                f"{type(self).__name__} around {type(source).__name__}: a split has one prefetch declaration",
                "fix: wrap the loader itself, once",
            )
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.source)

    def __getitem__(self, index: int) -> Any:
        return self.source[index]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "source":
            raise AttributeError(name)
        return getattr(self.source, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.source!r})"


class Prefetch(_Declaration):
    """Fetches in ``workers`` threads from the first batch on (default: one per processor, 8 at most).

    ``host_batches`` bounds the batches in memory (default: two per worker). ``ordered=False`` delivers batches as they
    are ready; only for a source with ``source[i]``. Without ``source[i]`` there is one worker.
    """

    def __init__(
        self, source: Any, workers: int | None = None, host_batches: int | None = None, ordered: bool = True
    ) -> None:
        super().__init__(source)
        for name, value in (("workers", workers), ("host_batches", host_batches)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise DataError(
                    f"Prefetch: {name} must be a whole number, 1 or more, not {value!r}",
                    "fix: NoPrefetch(source) reads without threads",
                )
        if workers is not None and host_batches is not None and host_batches < workers:
            raise DataError(
                f"Prefetch: host_batches={host_batches} leaves no room for workers={workers}",
                "fix: at least one batch per worker; two per worker is the default",
            )
        self.workers = workers
        self.host_batches = host_batches
        self.ordered = ordered


class NoPrefetch(_Declaration):
    """Fetches every batch in the loop itself, never in a thread."""


def prefetch_config(source: Any) -> dict[str, Any]:
    """How a pass over ``source`` will read it: path, workers, host_batches, ordered, and a note where one helps."""
    inner = unwrap(source)
    config: dict[str, Any] = {"path": "inline", "workers": 0, "host_batches": 0, "ordered": True, "note": ""}
    if isinstance(source, NoPrefetch):
        return config
    if not isinstance(source, Prefetch) and isinstance(inner, list | tuple):
        return {**config, "path": "materialized"}
    wanted = source if isinstance(source, Prefetch) else Prefetch(source)
    workers = wanted.workers or min(8, _processors(), wanted.host_batches or 8)
    if workers > 1 and not indexable(inner):
        workers, config["note"] = 1, "one producer, because the source has no source[i]"
    config.update(workers=workers, host_batches=wanted.host_batches or 2 * workers)
    config["ordered"] = wanted.ordered or workers == 1
    if wanted is not source:
        config["path"] = "auto"
    elif workers == 1:
        config["path"] = "single"
    else:
        config["path"] = "fanout" if wanted.ordered else "fanout_unordered"
    return config


def open_stream(
    split: str,
    source: Any,
    *,
    epoch: int,
    skip: int = 0,
    prepare: Callable[[Any], Any] | None = None,
    check: Callable[[int, Any], None] | None = None,
) -> Stream:
    """Begins ``epoch`` of ``split`` and returns the stream of its batches from batch ``skip`` on.

    ``prepare`` is applied to every batch, in the worker threads where there are some; ``check(index, batch)`` runs just
    before it, and is for errors that name the batch. ``source.set_epoch(epoch)`` is called once, where it is defined,
    before the length is read. Raises DataError for a length or ``skip`` out of range.
    """
    inner = unwrap(source)
    if hasattr(inner, "set_epoch"):
        inner.set_epoch(epoch)
    total = count_batches(split, inner)
    if not 0 <= skip <= total:
        raise DataError(f"split '{split}' cannot start at batch {skip}: it has {total}", split=split)
    return Stream(split, inner, total, skip, prepare, prefetch_config(source), check)


def check_indexing(source: Any, values: bool = True) -> None:
    """For the tests of a data source: raises DataError unless ``source[i]`` is the ``i``-th batch of an iteration.

    Compares fields, shapes and dtypes, and with ``values`` also the contents; only they show an index that counts
    samples instead of batches.
    """
    inner = unwrap(source)
    count = 0
    for count, expected in enumerate(inner, 1):
        found = inner[count - 1]
        if found.keys() != expected.keys():
            raise DataError(f"source[{count - 1}] has fields {list(found)}, iteration gives {list(expected)}")
        for name in expected:
            _compare(f"source[{count - 1}]", name, np.asarray(found[name]), np.asarray(expected[name]), values)
    if count != len(inner):
        raise DataError(f"iteration gives {count} batches, len() says {len(inner)}")


def _compare(where: str, name: str, found: np.ndarray, expected: np.ndarray, values: bool) -> None:
    seen, wanted = (found.shape, found.dtype), (expected.shape, expected.dtype)
    if seen != wanted:
        raise DataError(f"{where}: field '{name}' has shape and dtype {seen}, iteration gives {wanted}", field=name)
    if values and found.tobytes() != expected.tobytes():
        raise DataError(
            f"{where}: field '{name}' has other values than iteration gives",
            "fix: the index counts batches, not samples, and an epoch's order is the same for both",
            field=name,
        )


def _processors() -> int:
    """Processors that this process may use."""
    usable = getattr(os, "sched_getaffinity", None)
    return len(usable(0)) if usable else os.cpu_count() or 1
