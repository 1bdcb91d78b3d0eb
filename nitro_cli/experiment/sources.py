"""Where a class and its fields and methods stand in their source file, for error messages and help."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from nitro_cli.errors import Place

_parsing = threading.Lock()


@dataclass(frozen=True)
class ClassSource:
    """``lines`` are those of fields and methods, ``docs`` the strings below fields."""

    path: str | None = None
    line: int = 0
    lines: dict[str, int] = field(default_factory=dict)
    docs: dict[str, str] = field(default_factory=dict)

    def place(self, name: str | None = None) -> Place | None:
        """The place of a field or method, of the class itself where the name is not found, or None without a file."""
        if self.path is None:
            return None
        line = self.lines.get(name or "", self.line)
        text = linecache.getline(self.path, line).rstrip("\n") if line else ""
        return at(self.path, line or None, name, text)


def at(path: str | Path, line: int | None, word: str | None, text: str) -> Place:
    """A place that marks ``word`` in ``text`` (without a column where the word is not there)."""
    column = text.find(word) + 1 if word else 0
    return Place(shown(path), line, column or None, len(word or "") or 1, text or None)


def shown(path: str | Path) -> str:
    """A path as a message shows it: relative to the working directory where it lies below it."""
    try:
        return Path(path).resolve().relative_to(Path.cwd().resolve()).as_posix()
    except (ValueError, OSError):
        return str(path)


def class_source(cls: type) -> ClassSource:
    """Path and lines of a class; empty where there is no source (a notebook cell without one, ``exec``)."""
    return source_of(cls.__module__, cls.__qualname__, cls.__dict__.get("__firstlineno__"))


def source_of(module: str, qualname: str, first: int | None = None) -> ClassSource:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return ClassSource()
    try:
        tree = _tree("".join(linecache.getlines(path)))
    except (SyntaxError, ValueError):
        return ClassSource(path)
    nodes = list(_find(tree, [part for part in qualname.split(".") if part != "<locals>"]))
    if not nodes:
        return ClassSource(path)
    node = next((n for n in nodes if n.lineno == first), nodes[-1])
    return ClassSource(path, node.lineno, dict(_members(node)), dict(_docs(node)))


def parsed(text: str | bytes, filename: str = "<unknown>") -> ast.Module:
    """``ast.parse``, one thread at a time: CPython 3.11 fails with a SystemError where two parse at once."""
    with _parsing:
        return ast.parse(text, filename)


@functools.lru_cache(maxsize=8)
def _tree(text: str) -> ast.Module:
    """A file is asked for several times while its classes are made."""
    return parsed(text)


def defined_at(module: str, qualname: str) -> ClassSource:
    """The source of a class whose body has just run: the frame outside nitro that defines it picks among namesakes."""
    source = source_of(module, qualname)
    if source.path is None or "<locals>" not in qualname:
        return source
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename != source.path:
        frame = frame.f_back
    return source if frame is None else source_of(module, qualname, frame.f_lineno)


def _find(node: ast.AST, parts: list[str]) -> Iterator[ast.ClassDef]:
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if named and child.name == parts[0]:
            if len(parts) > 1:
                yield from _find(child, parts[1:])
            elif isinstance(child, ast.ClassDef):
                yield child
        elif not named:
            yield from _find(child, parts)


def _members(node: ast.ClassDef) -> Iterator[tuple[str, int]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement.lineno
        elif isinstance(statement, ast.Assign):
            yield from ((target.id, statement.lineno) for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name, statement.lineno


def _docs(node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """The string that stands directly below a field, by the field's name."""
    for above, below in pairwise(node.body):
        if not isinstance(above, ast.AnnAssign) or not isinstance(above.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            yield above.target.id, inspect.cleandoc(below.value.value)
