"""One process-wide cache of compiled programs, and the reason for every compile.

A program is compiled ahead of time and then called as it is: it refuses other shapes instead of compiling for them, so
nothing can compile again without passing through here. ``misses`` counts programs that were compiled or loaded from
the store, ``hits`` counts calls and look-ups that needed neither, ``entries`` counts programs held; after the first
step, ``misses == entries`` and neither grows.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from nitro_cli.programs.key import Request

_KEPT_ONCE = 64


class CacheStats(NamedTuple):
    hits: int
    misses: int
    entries: int


@dataclass(frozen=True)
class Built:
    """What building a program gives: the executable, what the trace found out, and seconds by phase.

    ``origin``: "compiled" by XLA, "linked" (traced, and its executable loaded), or "loaded" from the store without a
    trace. ``entry`` names it in the store; ``kept_out`` are the reasons why it is not there for other processes.
    ``large`` names arrays of some megabytes that are baked into it.
    """

    executable: Callable[..., Any]
    found: dict[str, Any]
    reads: frozenset[str]
    trace_seconds: float = 0.0
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    load_seconds: float = 0.0
    origin: str = "compiled"
    entry: str = ""
    kept_out: tuple[str, ...] = ()
    large: tuple[str, ...] = ()
    why: str = "first use"


@dataclass(frozen=True)
class EntryInfo:
    """One program as reports show it."""

    program: str
    hits: int
    trace_seconds: float
    lower_seconds: float
    compile_seconds: float
    load_seconds: float
    why: str
    origin: str
    entry: str
    kept_out: tuple[str, ...]

    @property
    def seconds(self) -> float:
        return self.trace_seconds + self.lower_seconds + self.compile_seconds + self.load_seconds


@dataclass
class Program:
    """A compiled program: ``run`` takes flat lists of arrays. ``used`` books calls, once per stretch."""

    request: Request
    built: Built
    hits: int = 0
    calls_booked: int = field(default=0, repr=False)

    def __post_init__(self) -> None:
        self.run = self.built.executable

    @property
    def found(self) -> dict[str, Any]:
        return self.built.found

    def used(self, calls: int) -> None:
        """Book ``calls`` executions. The first call of a program is the one it was compiled for: no hit."""
        first = self.calls_booked == 0 and calls > 0
        self.calls_booked += calls
        self.hits += calls - first
        _CACHE.hits += calls - first

    def info(self) -> EntryInfo:
        b = self.built
        return EntryInfo(
            self.request.program,
            self.hits,
            b.trace_seconds,
            b.lower_seconds,
            b.compile_seconds,
            b.load_seconds,
            b.why,
            b.origin,
            b.entry,
            b.kept_out,
        )


class ProgramCache:
    """Programs by key. Under one key stand several entries where they read GraphConst fields of different values.

    Beside them, and uncounted, stand programs that are run once (``once``): the last few, and in ``linked`` their
    executables by what they lower to.
    """

    def __init__(self) -> None:
        self.hits = 0
        self.misses = 0
        self.programs: dict[str, list[Program]] = {}
        self.linked: dict[str, Any] = {}
        self._once: dict[str, Built] = {}
        self._in_order: list[Program] = []
        self._lock = threading.RLock()

    def get(
        self,
        request: Request,
        build: Callable[[Request], Built],
        compiled: Callable[[Program], None] = lambda _: None,
    ) -> Program:
        """The program for ``request``: one that is held, or ``build`` it and pass it to ``compiled``.

        The lock is held while compiling, so that two threads never compile the same program.
        """
        with self._lock:
            for program in self.programs.get(request.digest, ()):
                if request.reads_same(program.request, program.built.reads):
                    if not program.calls_booked:
                        program.calls_booked = 1
                    return program
            with making(request.program):
                program = Program(request, build(request))
            self.programs.setdefault(request.digest, []).append(program)
            self._in_order.append(program)
            self.misses += 1
        compiled(program)
        return program

    def held_once(self, request: Request, build: Callable[[], Built]) -> Built:
        """The program for ``request`` that is run once, held or built. One that content does not decide is built anew
        each time."""
        with self._lock:
            built = self._once.get(request.digest)
            if built is None:
                built = build()
                if not built.kept_out:
                    self._once[request.digest] = built
                for held in (self._once, self.linked):  # a sweep over seeds in one process has no end
                    while len(held) > _KEPT_ONCE:
                        del held[next(iter(held))]
            return built

    def all(self) -> list[Program]:
        """All programs, in the order in which they were compiled."""
        return list(self._in_order)

    def reset(self) -> None:
        with self._lock:
            self.hits = self.misses = 0
            self.programs.clear()
            self.linked.clear()
            self._once.clear()
            self._in_order.clear()


_CACHE = ProgramCache()


_MAKING: list[str] = []


@contextlib.contextmanager
def making(program: str) -> Iterator[None]:
    """While active, this program is being compiled or loaded: what somebody who wants to stop has to wait for."""
    _MAKING.append(program)
    try:
        yield
    finally:
        _MAKING.pop()


def being_made() -> str | None:
    """The program that is being compiled or loaded at this moment, for any thread that asks."""
    made = _MAKING[-1:]  # one look: it may be done in between
    return made[0] if made else None


def program_cache() -> ProgramCache:
    """The cache of this process."""
    return _CACHE


def cache_stats() -> CacheStats:
    """``(hits, misses, entries)`` of this process. A program compiled or loaded is a miss; one called again is
    a hit."""
    return CacheStats(_CACHE.hits, _CACHE.misses, len(_CACHE.all()))


def cache_entries() -> list[EntryInfo]:
    """The programs held, in the order in which they were compiled."""
    return [program.info() for program in _CACHE.all()]


def cache_reset() -> None:
    """Forget every program and both counters. Handles keep the programs that they already use."""
    _CACHE.reset()
