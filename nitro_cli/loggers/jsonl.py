"""The log of a run: one JSON object a line, readable at any moment, whole after any crash.

A line is written with one system call and nothing is kept back in a buffer, so a killed process loses at most the
line it was writing. Every line is strict JSON: a number that JSON cannot say (nan, infinity) is ``null``.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from nitro_cli.errors import OutputError, Place, ProtectError

_encode = json.JSONEncoder(allow_nan=False, separators=(",", ":")).encode


def plain(value: Any) -> Any:
    """``value`` in JSON's own types. Arrays become lists, paths text, enums their value, nan and infinity ``None``."""
    if value is None or isinstance(value, (bool, str)):
        # A str subclass that is an enum says its value, not its member name.
        return getattr(value, "value", value) if isinstance(value, str) else value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    return _plain_other(value)


def _plain_other(value: Any) -> Any:
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars, without importing either
        listed = value.tolist()
        if type(listed) is type(value):  # long double gives itself back
            return plain(float(value))
        return plain(listed)
    if hasattr(value, "value") and hasattr(value, "name"):  # an Enum member
        return plain(value.value)
    if hasattr(value, "isoformat"):
        return value.isoformat()
    return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


def _line(record: Mapping[str, Any]) -> bytes:
    try:  # most records are plain already, and walking through one costs more than writing it
        text = _encode(record)
    except (TypeError, ValueError):
        text = _encode(plain(record))
    return text.encode() + b"\n"


class JsonLines:
    """Writes records to ``path``; safe to call from several threads.

    ``append=False`` starts a new file and refuses one that exists (``ProtectError``). ``append=True`` continues a
    file and first repairs a last line that a crash left half written. A write that fails (a full disk) leaves only
    whole lines behind and raises ``OutputError``.
    """

    def __init__(self, path: str | Path, append: bool = False) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        try:
            self._file = open(self.path, "ab+" if append else "xb", buffering=0)  # noqa: SIM115 (held until close)
        except FileExistsError:
            raise ProtectError(
                f"the log {self.path} exists already and would be overwritten", "continue that run with --resume"
            ) from None
        except OSError as error:
            raise _failed(self.path, error) from error
        if append:
            _repair(self._file)
        self._end = self._file.seek(0, os.SEEK_END)

    def write(self, type: str, **record: Any) -> None:
        """Write one record. It is in the operating system's hands when this returns."""
        self._put(_line({"type": type, **record}))

    def write_many(self, records: Iterable[tuple[str, Mapping[str, Any]] | Mapping[str, Any]]) -> None:
        """Write several records at once: ``(type, fields)`` pairs, or mappings that hold ``type``."""
        lines = [
            _line(record if isinstance(record, Mapping) else {"type": record[0], **record[1]}) for record in records
        ]
        if lines:
            self._put(b"".join(lines))

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with self._lock:
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def _put(self, data: bytes) -> None:
        with self._lock:
            if self._file.closed:
                raise ValueError(f"the log {self.path} is closed")
            try:
                rest = memoryview(data)
                while rest:
                    rest = rest[self._file.write(rest) :]
            except OSError as error:
                self._file.truncate(self._end)
                self._file.seek(self._end)
                raise _failed(self.path, error) from error
            self._end += len(data)


def _failed(path: Path, error: OSError) -> OutputError:
    return OutputError(f"cannot write the log {path}: {error.strerror or error}", path=str(path))


def _repair(file: Any) -> None:
    """Finish a last line that lacks only its newline; cut one that is torn."""
    file.seek(0)
    data = file.read()
    start = data.rfind(b"\n") + 1
    if start == len(data):
        return
    if _parsed(data[start:]) is None:
        file.truncate(start)
    else:
        file.write(b"\n")


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:  # also what undecodable bytes raise
        return None
    return record if isinstance(record, dict) else None


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """All records of a log; none where there is no file. A torn last line is left out.

    Raises ``OutputError`` with the line's place for a damaged line anywhere else.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    while lines and not lines[-1].strip():
        lines.pop()
    records = []
    for number, line in enumerate(lines, start=1):
        record = _parsed(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            raise OutputError(
                f"line {number} of the log is damaged", "the other lines are readable", place=Place(path, number)
            )
    return records
