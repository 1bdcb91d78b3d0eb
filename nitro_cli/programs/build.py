"""From a function over flat lists of arrays to an executable: out of the store where it is there, else compiled.

What is found under its key is loaded without any tracing. What is not is traced and lowered; where the lowered program
is known after all, its executable is loaded, and only otherwise XLA compiles. A program that is kept was seen to depend
on nothing but what its key holds: no refusal of the fingerprint, no objection of the witness, and a second trace, made
while XLA compiles, that gave the same program.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from nitro_cli.programs import ahead, executables
from nitro_cli.programs.cache import Built, program_cache
from nitro_cli.programs.key import Request
from nitro_cli.programs.lower import Lowered, lower
from nitro_cli.programs.reasons import Known, explain
from nitro_cli.programs.store import CacheMismatch, Entry, Store, StoreWarning, open_store, settings
from nitro_cli.programs.witness import Witness, large_constants


def build(
    request: Request,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    donate: Sequence[int] = (),
    reads: set[str],
    found: dict[str, Any],
    options: Mapping[str, Any] | None = None,
    linked: dict[str, Any] | None = None,
) -> Built:
    """The program ``function`` for ``arguments`` (pytrees of ``jax.ShapeDtypeStruct``).

    ``donate`` gives the positions of arguments whose buffers the program may take. ``reads`` is filled by the trace
    with the GraphConst fields that it read, ``found`` with what the caller wants to keep of it. ``options`` are
    compiler options; ``linked`` holds executables of this process by what they lower to, where they are to be shared.

    Raises CacheMismatch where a stored program is to be verified and is another one than is traced now.
    """
    job = _Job(request, function, arguments, tuple(donate), reads, found, dict(options or {}), linked, open_store())
    built = job.stored()
    if built is not None:
        return built
    with job.alone():
        # Another process may have compiled it while this one waited.
        return job.stored() or job.compiled()


@dataclass
class _Job:
    request: Request
    function: Callable[..., Any]
    arguments: Sequence[Any]
    donate: tuple[int, ...]
    reads: set[str]
    found: dict[str, Any]
    options: dict[str, Any]
    linked: dict[str, Any] | None
    store: Store | None

    def lowered(self) -> Lowered:
        return lower(self.request, self.function, self.arguments, self.donate, self.options)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        return self.store.alone(self.request.digest) if self.store is not None else contextlib.nullcontext()

    # ---- out of the store -----------------------------------------------------------------------------------------

    def stored(self) -> Built | None:
        """The program as it was compiled before, where the store has it and may be asked."""
        request, store = self.request, self.store
        if store is None or settings.cold or request.code.refusals:
            return None
        entry = store.find(request.experiment, request.program, request.digest, request.fields)
        if entry is None or not entry.usable:
            return None
        start = time.perf_counter()
        executable = self._load(store, entry)
        if executable is None:
            return None
        seconds = time.perf_counter() - start
        if settings.verify:
            self._verify(store, entry)
        store.used(entry, seconds)
        return Built(
            executable=executables.FirstCall(executable, self.donate, lambda error: self._anew(store, entry, error)),
            found=self.found,
            reads=frozenset(entry.reads),
            load_seconds=seconds,
            origin="loaded",
            entry=entry.name,
            why="unchanged",
        )

    def _load(self, store: Store, entry: Entry) -> Any:
        """The executable of an entry. Whatever makes it unusable here is a miss, and takes it out of the store."""
        made = ahead.taken(entry)
        payload = store.executable(entry.executable) if made is None else b""
        if payload is None:
            return None
        try:
            executable, found = made or executables.loaded(payload, entry.trees, entry.lapack)
        except Exception as error:  # whatever jax or pickle raise for bytes that do not fit this machine
            _tell(f"the stored program {entry.name} does not load here and is compiled anew", error)
            store.drop(entry)
            return None
        self.found.update(found)
        return executable

    def _anew(self, store: Store, entry: Entry, error: Exception) -> Any:
        _tell(f"the stored program {entry.name} does not run here and is compiled anew", error)
        store.drop(entry)
        return self._compile(self.lowered(), compare=False)[0]

    def _verify(self, store: Store, entry: Entry) -> None:
        now = self.lowered()
        if now.digest == entry.lowered and self.reads == set(entry.reads):
            return
        store.poison(entry, "verification found another program")
        raise CacheMismatch(
            f"the stored program {entry.name} is not what its code traces to now",
            f"it depends on something besides the {len(entry.code)} things that nitro sees in its code",
            "the entry is marked and will not be used again: the next run compiles it anew",
            "runs that loaded it may have trained another program; their run.json names it",
            "please report it, with the code of the experiment",
            entry=entry.name,
        )

    # ---- compiled -------------------------------------------------------------------------------------------------

    def compiled(self) -> Built:
        """Trace and lower, load what the same lowered program was compiled to before or compile it, and keep it."""
        why, witness = self._why(), Witness()
        with witness.watch():
            low = self.lowered()
        objections = list(self.request.code.refusals)
        objections += witness.objections(low.jaxpr, self.request.code.codes)
        start = time.perf_counter()
        executable = self._linked(low)
        origin = "linked" if executable is not None else "compiled"
        compare = self.store is not None and not objections
        if executable is None:
            executable, differs = self._compile(low, compare)
        else:
            differs = self._differs(low) if compare else []
        seconds = time.perf_counter() - start
        entry, kept_out = "", tuple(objections + differs)
        if self.linked is not None:
            self.linked[low.digest] = executable
        if self.store is not None:
            entry, kept_out = self._keep(self.store, low, executable, origin, kept_out, seconds)
        return Built(
            executable=executable,
            found=self.found,
            reads=frozenset(self.reads),
            trace_seconds=low.trace_seconds,
            lower_seconds=low.lower_seconds,
            compile_seconds=seconds,
            origin=origin,
            entry=entry,
            kept_out=kept_out,
            large=tuple(large_constants(low.jaxpr, self.request.code.entries)),
            why=why,
        )

    def _why(self) -> str:
        request = self.request
        same = [p for p in program_cache().all() if p.request.program == request.program]
        known = [Known.of_request(p.request, p.built.reads) for p in same]
        if self.store is not None:
            known += map(Known.of_entry, self.store.nearest(request.experiment, request.program))
        return explain(request, known)

    def _linked(self, low: Lowered) -> Any:
        """What the same lowered program was compiled to before, under whatever key."""
        if self.linked is not None and low.digest in self.linked:
            return self.linked[low.digest]
        if self.store is None or settings.cold or settings.verify:
            return None
        payload = self.store.executable(low.digest)
        if payload is None:
            return None
        try:
            executable = executables.loaded(payload, low.trees(self.found), low.lapack)[0]
        except Exception as error:  # as in _load
            _tell("a stored executable does not load here and is compiled anew", error)
            return None

        def anew(error: Exception) -> Any:
            _tell("a stored executable does not run here and is compiled anew", error)
            return self._compile(low, compare=False)[0]

        return executables.FirstCall(executable, self.donate, anew)

    def _compile(self, low: Lowered, compare: bool) -> tuple[Any, list[str]]:
        """The executable, and objections of the second trace. That one runs in this thread, since settings of jax that
        the caller made for a while hold in this thread alone, and XLA works beside it in another."""
        if self.store is None:
            return low.stages.compile(), []
        with executables.past_jax_cache():
            if not compare:
                return low.stages.compile(), []
            with ThreadPoolExecutor(1) as beside:
                compiling = beside.submit(low.stages.compile)
                differs = self._differs(low)
                return compiling.result(), differs

    def _differs(self, first: Lowered) -> list[str]:
        """An objection where a second trace gives another program: a clock, a random number, an iterator."""
        again = self.request.code.again
        if again is not None and again().digest() != self.request.code.digest():
            return ["what it depends on changed while it was traced"]
        try:
            with contextlib.redirect_stdout(_Unheard(sys.stdout)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                second = self.lowered()
        except Exception as error:  # whatever a hook raises that cannot be called twice
            return [f"a second trace failed ({type(error).__name__}: {error})"]
        return [] if second.text == first.text else ["a second trace gave another program"]

    def _keep(
        self, store: Store, low: Lowered, executable: Any, origin: str, objections: tuple[str, ...], seconds: float
    ) -> tuple[str, tuple[str, ...]]:
        """Write the entry, and the executable where nothing speaks against it. Returns the entry's name and what
        speaks against it."""
        trees, payload = "", None
        try:
            trees = low.trees(self.found)
        except Exception as error:  # whatever pickle raises
            objections = (*objections, f"what it returns cannot be written down ({error})")
        if low.calls_python:
            objections = (*objections, "it calls back into Python")
        elif origin == "compiled":
            try:
                payload = executables.serialized(executable)
            except Exception as error:  # as above, or a backend that cannot
                objections = (*objections, f"its executable cannot be written down ({error})")
        request = self.request
        stored = payload is not None or origin == "linked"
        poisoned = store.find(request.experiment, request.program, request.digest, request.fields)
        entry = Entry(
            experiment=request.experiment,
            program=request.program,
            key=request.digest,
            code=request.code.entries,
            places=request.code.places,
            arguments=request.arguments,
            settings=request.settings,
            environment=request.environment,
            reads={name: request.fields[name] for name in sorted(self.reads) if name in request.fields},
            lowered=low.digest,
            executable=low.digest if stored else "",
            bytes=len(payload or b""),
            trees=trees,
            lapack=low.lapack,
            kept_out=objections,
            poisoned=poisoned.poisoned if poisoned is not None else "",
            seconds={"trace": low.trace_seconds, "lower": low.lower_seconds, "compile": seconds},
            created=time.time(),
        )
        return (entry.name if store.keep(entry, payload) else ""), objections


class _Unheard(io.TextIOBase):
    """``out`` without what this thread writes. Others, which fetch data perhaps, are heard."""

    def __init__(self, out: Any) -> None:
        self._out, self._thread = out, threading.get_ident()

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._out.write(text)

    def flush(self) -> None:
        self._out.flush()


def _tell(what: str, error: Exception) -> None:
    reason = str(error).strip().partition("\n")[0]
    warnings.warn(f"{what}: {reason or type(error).__name__}", StoreWarning, 3)
