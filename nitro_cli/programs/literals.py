"""Where a function stands, and the constants written in it: so that a reason can say ``0.1 -> 0.2``.

This is for people alone and decides nothing: a key holds the digest of the code. It is put together only where a
program is compiled.
"""

from __future__ import annotations

import dis
import hashlib
import json
import types
from collections.abc import Iterator
from pathlib import Path

from nitro_cli.programs.code import instructions

_LONGEST = 2000  # characters of constants: a table written into code is no reading matter
_CONSTANT = frozenset(op for name, op in dis.opmap.items() if name in ("LOAD_CONST", "RETURN_CONST"))
_SMALL = dis.opmap.get("LOAD_SMALL_INT")


def place_text(code: types.CodeType) -> str:
    """``losses.py:12``, and behind it the constants of the code and a name for the rest of it, where it has any."""
    place = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
    constants, rest = [], []
    for text, is_constant in _told(code):
        (constants if is_constant else rest).append(text)
    told = json.dumps(constants)
    if not constants or len(told) > _LONGEST:
        return place
    name = hashlib.sha256("\n".join(rest).encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{place}\t{name}\t{told}"  # a file may have a space in its name


def file_of(place: str) -> str:
    """``losses.py``."""
    return place.partition("\t")[0].rpartition(":")[0]


def changed_constants(before: str, now: str) -> list[str]:
    """``0.1 -> 0.2`` for each constant that changed, of two places; empty where other things changed as well."""
    (_, old, first), (_, new, second) = ([*text.split("\t", 2), "", ""][:3] for text in (before, now))
    if not old or old != new:
        return []
    pairs = zip(json.loads(first), json.loads(second), strict=True)
    return [f"{was} -> {is_now}" for was, is_now in pairs if was != is_now]


def _told(code: types.CodeType) -> Iterator[tuple[str, bool]]:
    """Every instruction as text, and whether it is a constant, of the code and of that nested in it."""
    yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_flags)), False
    for op, arg in instructions(code):
        if op == _SMALL:
            yield str(arg), True
        elif op not in _CONSTANT:
            yield f"{op} {arg}", False
        elif isinstance(code.co_consts[arg], types.CodeType):
            yield "code", False
            yield from _told(code.co_consts[arg])
        elif code.co_consts[arg] is not None:
            yield _shown(code.co_consts[arg]), True
        else:
            yield "None", False


def _shown(value: object) -> str:
    """A constant as it is written. The elements of a set are in no order of their own."""
    return f"{{{', '.join(sorted(map(repr, value)))}}}" if isinstance(value, frozenset) else repr(value)
