"""TOML files with places: what tomli reads, plus where each table and key stands, and values written back.

Written on one line each and in TOML 1.0, so that every parser reads them back equal.
"""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import tomli
import tomli_w

from nitro_cli.errors import Place, UsageError
from nitro_cli.experiment.sources import shown

UNSET = "unset"

Key = tuple[str, ...]
Span = tuple[int, int]  # offset in the text, width


@dataclass(frozen=True)
class TomlFile:
    data: dict[str, Any]
    text: str
    path: Path
    headers: dict[Key, Span] = field(default_factory=dict)
    keys: dict[Key, Span] = field(default_factory=dict)

    def place(self, table: str, key: str | None = None) -> Place:
        """Where ``key`` of ``[table]`` stands (``table=""``: outside any table); without a key, the table's header."""
        wanted: Key = tuple(part for part in (table, key) if part)
        span = self._span(wanted)
        return Place(shown(self.path)) if span is None else place_at(self.path, self.text, *span)

    def _span(self, wanted: Key) -> Span | None:
        exact = self.keys.get(wanted) if len(wanted) > 1 else None
        if exact is not None:
            return exact
        for spans in (self.headers, self.keys):  # [current.opt] and opt.lr stand for "opt" of [current]
            for name, span in spans.items():
                if name[: len(wanted)] == wanted:
                    return span
        return None


def place_at(path: Path, text: str, offset: int, width: int = 1) -> Place:
    start = text.rfind("\n", 0, offset) + 1
    line = text.count("\n", 0, offset) + 1
    excerpt = text[start:].split("\n", 1)[0].rstrip("\r")
    return Place(shown(path), line, offset - start + 1, width, excerpt)


def read_toml(path: str | Path) -> TomlFile:
    """Raises UsageError, with place and remedy, for a file that is missing, not UTF-8 or not TOML."""
    path = Path(path)
    text = _read_text(path)
    scan = _Scanner(text)
    try:
        data = tomli.loads(text)
    except tomli.TOMLDecodeError as error:
        raise _syntax_error(path, text, error) from None
    scan.run()
    return TomlFile(data, text, path, scan.headers, scan.keys)


def _read_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{shown(path)} cannot be read: {error.strerror}", file=shown(path)) from None
    try:
        if raw.startswith((b"\xff\xfe", b"\xfe\xff")) or b"\0" in raw:
            raise ValueError("UTF-16")
        return raw.decode("utf-8-sig").replace("\r\n", "\n")
    except ValueError:
        note = "save it as UTF-8, the encoding of every TOML file"
        raise UsageError(f"{shown(path)} is not UTF-8", note, file=shown(path)) from None


def _syntax_error(path: Path, text: str, error: tomli.TOMLDecodeError) -> UsageError:
    scan = _Scanner(text)
    scan.run()
    if scan.repeated is not None and error.msg.startswith(("Cannot overwrite", "Cannot declare")):
        name, span, first = scan.repeated
        place = place_at(path, text, *span)
        earlier = place_at(path, text, *first).line
        return UsageError(f"{name} appears twice in {shown(path)}", f"the first one is in line {earlier}", place=place)
    line = error.doc.splitlines()[error.lineno - 1] if error.doc.splitlines()[error.lineno - 1 :] else ""
    place = Place(shown(path), error.lineno, error.colno, 1, line)
    return UsageError(f"{shown(path)} is not valid TOML: {error.msg}", *_remedy(line, error.msg), place=place)


def _remedy(line: str, message: str) -> tuple[str, ...]:
    value = line.partition("=")[2].partition("#")[0].strip()
    if "\\" in line and ("Unescaped" in message or "escape" in message.lower() or "hex value" in message):
        return ("a backslash starts an escape in double quotes: use single quotes, 'C:\\data'",)
    if value.lower() in ("null", "none", "nil"):
        name = line.partition("=")[0].strip()
        return (
            f'TOML has no null: leave the key out for the class\'s default, or write {UNSET} = ["{name}"] for None',
        )
    if value in ("True", "False"):
        return (f"write {value.lower()}",)
    if message == "Invalid value" and re.fullmatch(r"[A-Za-z_][\w./-]*", value):
        return (f'text needs quotes: "{value}"',)
    return ()


class _Scanner:
    """Finds where tables and keys stand. Works on valid files; on others it goes as far as it can."""

    _KEY_PART = re.compile(r"""[ \t]*("(?:[^"\\\n]|\\.)*"|'[^'\n]*'|[A-Za-z0-9_-]+)[ \t]*""")

    def __init__(self, text: str) -> None:
        self.text, self.pos = text, 0
        self.table: Key = ()
        self.headers: dict[Key, Span] = {}
        self.keys: dict[Key, Span] = {}
        self.repeated: tuple[str, Span, Span] | None = None

    def run(self) -> None:
        while self.repeated is None and self._skip_blank():
            if self.text[self.pos] == "[":
                self._header()
            else:
                self._pair()

    def _skip_blank(self) -> bool:
        match = re.compile(r"(?:[ \t\r\n]+|#[^\n]*)*").match(self.text, self.pos)
        self.pos = match.end() if match else self.pos
        return self.pos < len(self.text)

    def _key(self) -> tuple[Key, Span]:
        parts, start, end = [], None, self.pos
        while match := self._KEY_PART.match(self.text, self.pos):
            start = match.start(1) if start is None else start
            end, self.pos = match.end(1), match.end()
            parts.append(_unquoted(match.group(1)))
            if self.text[self.pos : self.pos + 1] != ".":
                break
            self.pos += 1
        start = self.pos if start is None else start
        return tuple(parts), (start, max(end - start, 1))

    def _header(self) -> None:
        many = self.text.startswith("[[", self.pos)
        start = self.pos
        self.pos += 2 if many else 1
        self.table, _ = self._key()
        self._skip_line()
        span = (start, len(self.text[start : self.pos].split("#")[0].rstrip()))
        if self.table in self.headers and not many:
            self.repeated = (f"table [{'.'.join(self.table)}]", span, self.headers[self.table])
        self.headers.setdefault(self.table, span)

    def _pair(self) -> None:
        key, span = self._key()
        full = self.table + key
        if key and full in self.keys and not self._many():
            self.repeated = (f"key '{'.'.join(key)}'", span, self.keys[full])
        self.keys.setdefault(full, span)
        self._skip_value()

    def _many(self) -> bool:
        span = self.headers.get(self.table)
        return span is not None and self.text.startswith("[[", span[0])

    def _skip_line(self) -> None:
        end = self.text.find("\n", self.pos)
        self.pos = len(self.text) if end < 0 else end

    _TOKEN = re.compile(
        r'"""(?:[^\\]|\\.)*?"{3,5}|\'\'\'.*?\'{3,5}|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'|#[^\n]*|.', re.DOTALL
    )

    def _skip_value(self) -> None:
        depth = 0
        while match := self._TOKEN.match(self.text, self.pos):
            token = match.group()
            if token == "\n" and depth <= 0:
                return
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token, 0)
            self.pos = match.end()


def _unquoted(part: str) -> str:
    if part.startswith("'"):
        return part[1:-1]
    if part.startswith('"'):
        try:
            return tomli.loads(f"x = {part}")["x"]
        except tomli.TOMLDecodeError:
            return part[1:-1]
    return part


class Unsayable:
    """Stands for a value that TOML cannot say; ``why`` is what the comment line shows."""

    def __init__(self, why: str) -> None:
        self.why = why


def dump_table(name: str, values: Mapping[str, tuple[Any, str]]) -> str:
    """One TOML table, each value with its provenance as a comment. None goes into ``unset``; what TOML cannot say
    becomes a comment line."""
    lines, unset = [f"[{_key_text(name)}]"], []
    for key, (value, provenance) in values.items():
        note = f"  # {' '.join(provenance.split())}" if provenance else ""
        if value is None:
            unset.append(key)
            continue
        try:
            lines.append(f"{_key_text(key)} = {inline(value)}{note}")
        except TypeError:
            why = value.why if isinstance(value, Unsayable) else type(value).__name__
            lines.append(f"# {key}: not written ({why}){note}")
    if unset:
        lines.append(f"{UNSET} = {inline(unset)}  # None")
    return "\n".join(lines) + "\n"


def inline(value: Any) -> str:
    """A value as TOML text on one line. Raises TypeError for what TOML cannot say."""
    if isinstance(value, Enum):
        return inline(value.value if type(value.value) in (str, int, float) else value.name)
    if isinstance(value, PurePath):
        return inline(str(value))
    if type(value) in (str, bool, int, float, datetime.date, datetime.datetime, datetime.time):
        return tomli_w.dumps({"x": value})[4:-1]
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    if isinstance(value, set | frozenset):
        return "[" + ", ".join(sorted(inline(item) for item in value)) + "]"
    if type(value) is dict and all(type(key) is str for key in value):
        return "{" + ", ".join(f"{_key_text(key)} = {inline(item)}" for key, item in value.items()) + "}"
    raise TypeError(f"TOML cannot say a {type(value).__name__}")


def _key_text(key: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_-]+", key):
        return key
    return inline(key)
