"""What really happened while a program was traced, against what its fingerprint says that it depends on.

The fingerprint is a static look at code. A trace shows what ran: which functions made an operation of the program, and
which files and environment variables user code read. What the fingerprint did not foresee makes the program unfit for
the store, with the reason; the program itself runs as it is.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import types
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nitro_cli.programs.fingerprint import is_user_code

LARGE_BYTES = 4 << 20  # a constant from this size on is pointed out

_watching = threading.local()


class Witness:
    """One trace. ``objections()`` are lines for people, each a reason not to keep the program."""

    def __init__(self) -> None:
        self.read: dict[str, None] = {}

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """While active, in this thread: note each file and environment variable that user code reads."""
        _audited()
        _watching.witness = self
        try:
            with _environment_watched():
                yield
        finally:
            _watching.witness = None

    def objections(self, jaxpr: Any, walked: Collection[types.CodeType]) -> list[str]:
        """``walked`` are the code objects that the fingerprint covers."""
        strangers = {code: None for code in user_code(jaxpr) if code not in walked}
        ran = [f"`{_said(code)}` ran in the trace, and no name in the code leads to it" for code in strangers]
        return [*self.read, *ran]


def user_code(jaxpr: Any) -> Iterator[types.CodeType]:
    """Code objects of the user's that made an operation of the program, each once."""
    seen: set[int] = set()
    for equation in equations(jaxpr):
        traceback = equation.source_info.traceback
        if traceback is None:
            continue
        codes, _ = traceback.raw_frames()
        for code in codes:
            if code.co_filename.startswith(_NITRO):
                break  # what called nitro made no operation
            if id(code) not in seen:
                seen.add(id(code))
                if is_user_code(code.co_filename) and not _generated(code):
                    yield code


def equations(jaxpr: Any) -> Iterator[Any]:
    """The equations of a jaxpr and of all that lie in it."""
    todo, seen = [jaxpr], set()
    while todo:
        inner = todo.pop()
        inner = getattr(inner, "jaxpr", inner)
        if id(inner) in seen or not hasattr(inner, "eqns"):
            continue
        seen.add(id(inner))
        for equation in inner.eqns:
            yield equation
            for value in equation.params.values():
                todo.extend(value if isinstance(value, (tuple, list)) else (value,))


def constants(jaxpr: Any) -> Iterator[Any]:
    """Arrays that are baked into a program, the largest first, each once."""
    held = {id(c): c for c in getattr(jaxpr, "consts", ())}
    for equation in equations(jaxpr):
        for value in equation.params.values():
            held |= {id(c): c for c in getattr(value, "consts", ())}
    arrays = [value for value in held.values() if hasattr(value, "nbytes")]
    return iter(sorted(arrays, key=lambda array: -array.nbytes))


def large_constants(jaxpr: Any, entries: dict[str, str]) -> list[str]:
    """Lines for people on arrays of some megabytes in a program, by name where the fingerprint knows them."""
    from nitro_cli.programs.fingerprint import atom

    lines = []
    for array in constants(jaxpr):
        if array.nbytes < LARGE_BYTES:
            break
        text = atom(np.asarray(array))
        names = [name for name, value in entries.items() if value == text]
        shape = f"{array.dtype}[{','.join(map(str, array.shape))}]"
        named = f"`{names[0]}`, " if names else ""
        lines.append(f"{named}an array {shape} of {array.nbytes / 2**20:.0f} MB")
    return lines


def _said(code: types.CodeType) -> str:
    return f"{code.co_name}` in `{Path(code.co_filename).name}:{code.co_firstlineno}"


def _generated(code: types.CodeType) -> bool:
    """Methods that dataclasses and the like write: their class is covered by its fields."""
    return code.co_filename.startswith("<") and code.co_name.startswith("__")


_NITRO = f"{Path(__file__).resolve().parent.parent}{os.sep}"
_JAX = str(Path(str(jax.__file__)).resolve().parent)
_OF_CODE = ("linecache.py", "inspect.py", "importlib/__init__.py")


def _reader(behalf: tuple[str, ...] = ()) -> str | None:
    """``loss in myexp.py:31``: the nearest frame of the user's, whose call made this read; None where there is none.
    What libraries below ``behalf`` read, they read on their own behalf."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(("<frozen importlib", *behalf)) or name.endswith(_OF_CODE):
            return None  # code counts by content, wherever it is read
        if name != __file__ and name.startswith(_NITRO):
            return None
        if name != __file__ and is_user_code(name) and not _generated(frame.f_code):
            return f"`{frame.f_code.co_name}` in {Path(name).name}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def _note(what: str, behalf: tuple[str, ...] = ()) -> None:
    witness = getattr(_watching, "witness", None)
    if witness is not None and (where := _reader(behalf)) is not None:
        witness.read[f"{where} {what} while it is traced"] = None


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and getattr(_watching, "witness", None) is not None:
        path, _, flags = arguments
        if isinstance(path, (str, bytes)) and not _known(os.fsdecode(path)) and flags & os.O_ACCMODE != os.O_WRONLY:
            _note("reads a file")


def _known(path: str) -> bool:
    """Whether a file belongs to a library or the system, or holds what jax compiled."""
    jax_cache = getattr(sys.modules["jax"].config, "jax_compilation_cache_dir", None) or _NITRO
    return not is_user_code(path) or path.startswith(("/proc/", "/sys/", "/dev/", jax_cache))


@functools.cache
def _audited() -> None:
    """Once per process, since an audit hook cannot be taken out again; it does nothing while nobody watches."""
    sys.addaudithook(_audit)


@contextlib.contextmanager
def _environment_watched() -> Iterator[None]:
    kind: Any = type(os.environ)
    plain = kind.__getitem__

    def __getitem__(self: Any, key: Any) -> Any:
        if self is os.environ:
            _note(f"reads the environment variable {key}", behalf=(_JAX,))
        return plain(self, key)

    kind.__getitem__ = __getitem__
    try:
        yield
    finally:
        kind.__getitem__ = plain
