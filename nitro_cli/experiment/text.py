"""Command-line text read by a field's type."""

from __future__ import annotations

import collections.abc
import datetime
import math
import re
import typing
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, Literal

import tomli
from pydantic import ConfigDict, TypeAdapter, ValidationError

from nitro_cli.experiment.values import BadValue, bare, choices, members, type_name
from nitro_cli.suggest import did_you_mean

# TOML's numbers, so that a text means the same in a preset and on the command line (\d would take other scripts).
_INT = re.compile(r"[+-]?(0|[1-9](_?[0-9])*)")
_RADIX = re.compile(r"0(x[0-9a-fA-F](_?[0-9a-fA-F])*|o[0-7](_?[0-7])*|b[01](_?[01])*)")
_DIGITS = r"[0-9](_?[0-9])*"
_FLOAT = re.compile(rf"[+-]?(({_DIGITS}\.?({_DIGITS})?|\.{_DIGITS})([eE][+-]?{_DIGITS})?|inf|nan)")
_SEQUENCES = (list, tuple, set, frozenset, collections.abc.Sequence)
_CONTAINERS = (*_SEQUENCES, dict, collections.abc.Mapping)
_TEXT_LIKE = (str, PurePath)


def read_text(annotation: Any, text: str) -> Any:
    """The Python value that ``text`` means for this type; still to be validated. Raises BadValue."""
    kinds = members(annotation)
    says_none = text in ("none", "None") and text not in choices(annotation)
    if says_none and type(None) in kinds and not any(_is_text(kind) for kind in kinds):
        return None
    kinds = tuple(kind for kind in kinds if kind is not type(None)) or kinds
    failures: list[BadValue] = []
    for kind in kinds:
        try:
            return _read_one(kind, text)
        except BadValue as error:
            failures.append(error)
    if len(failures) == 1 and len(members(annotation)) == 1:
        raise failures[0]
    hint = next((failure.hint for failure in failures if failure.hint), "")
    raise BadValue(_expected(annotation, text), hint)


def _is_text(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, _TEXT_LIKE) and not issubclass(kind, Enum)


def _expected(kind: Any, text: str) -> str:
    if options := choices(kind):
        return f"expected one of {', '.join(options)}; got '{text}'"
    return f"expected {type_name(kind)}, got '{text}'"


def _read_one(kind: Any, text: str) -> Any:
    kind = bare(kind)
    origin = typing.get_origin(kind) or kind
    if origin is Literal:
        return _choice(kind, text, {_spelling(arg): arg for arg in typing.get_args(kind)})
    if origin in _SEQUENCES:
        return _sequence(kind, text)
    if origin in (dict, collections.abc.Mapping) or typing.is_typeddict(origin):
        return _toml(kind, text, "write a TOML inline table, such as '{a = 1}'")
    if origin in (Any, object):
        return _toml(kind, text, "write a TOML value; text needs quotes of its own: '\"text\"'")
    if not isinstance(origin, type):
        return _by_pydantic(kind, text)
    if issubclass(origin, Enum):
        return _enum(origin, text)
    reader = _READERS.get(origin)
    if reader is not None:
        return reader(kind, text)
    if issubclass(origin, PurePath):
        return _path(kind, text)
    return _by_pydantic(kind, text)


def _bool(kind: Any, text: str) -> bool:
    if text in ("true", "false", "True", "False"):
        return text.lower() == "true"
    raise BadValue(_expected(kind, text), "write true or false")


def _int(kind: Any, text: str) -> int:
    if _INT.fullmatch(text) or _RADIX.fullmatch(text):
        return int(text, 0)
    raise BadValue(_expected(kind, text), _int_hint(text))


def _int_hint(text: str) -> str:
    if re.fullmatch(r"[+-]?0[0-9]+", text):
        return f"write {int(text)}"
    value = float(text) if _FLOAT.fullmatch(text) else math.nan
    return f"write {int(value)}" if math.isfinite(value) and value.is_integer() else ""


def _float(kind: Any, text: str) -> float:
    if _FLOAT.fullmatch(text):
        return float(text)
    raise BadValue(_expected(kind, text), "write 0.1 or 1e-3" if re.search("[0-9]", text) else "")


def _str(kind: Any, text: str) -> str:
    return text


def _path(kind: Any, text: str) -> Path:
    if text:
        return Path(text)
    raise BadValue("expected a path, got empty text")


def _spelling(arg: Any) -> str:
    if isinstance(arg, bool) or arg is None:
        return str(arg).lower()
    return str(arg.value if isinstance(arg, Enum) else arg)


def _choice(kind: Any, text: str, options: dict[str, Any]) -> Any:
    if text in options:
        return options[text]
    raise BadValue(_expected(kind, text), did_you_mean(text, choices(kind) or list(options)))


def _enum(kind: type[Enum], text: str) -> Enum:
    by_value = {str(member.value): member for member in kind}
    return _choice(kind, text, {**kind.__members__, **by_value})


def _sequence(kind: Any, text: str) -> Any:
    hint = f"write {_example(kind, text)}"
    if text.lstrip().startswith("["):
        return _toml(kind, text, hint)
    if not text.strip():
        raise BadValue(_expected(kind, text), "write [] for an empty one")
    if any(typing.get_origin(kind) in _CONTAINERS for item in typing.get_args(kind) for kind in members(item)):
        raise BadValue(_expected(kind, text), hint)  # commas cannot say which list an item belongs to
    parts = [part.strip() for part in text.split(",")]
    if len(parts) > 1 and not parts[-1]:
        parts.pop()
    try:
        return [read_text(item, part) for item, part in zip(_item_types(kind, len(parts)), parts, strict=True)]
    except BadValue as error:
        raise BadValue(_expected(kind, text), hint if error.hint == "" or " " in text else error.hint) from None


def _item_types(kind: Any, count: int) -> list[Any]:
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and args and args[-1] is not ...:
        return [*args, *[args[-1]] * (count - len(args))][:count]
    return [args[0] if args else Any] * count


def _example(kind: Any, text: str) -> str:
    """The same items as a TOML array where they can be guessed for showing (never for using)."""
    args = typing.get_args(kind)
    words = [word for word in re.split(r"[\s,]+", text.strip("[](){} ")) if word]
    if args and set(members(args[0])) & {int, float} and words:
        return f"[{','.join(words)}] or {','.join(words)}"
    if args and args[0] is str and words:
        quoted = ", ".join('"' + word.strip("'\"") + '"' for word in words)
        return f"'[{quoted}]' or {','.join(words)}"
    return "a TOML array in quotes, such as '[[1, 2], [3]]'" if args and typing.get_args(args[0]) else "a TOML array"


def _toml(kind: Any, text: str, hint: str) -> Any:
    try:
        table = tomli.loads(f"x = {text}")
    except tomli.TOMLDecodeError:
        raise BadValue(_expected(kind, text), hint) from None
    if list(table) != ["x"]:
        raise BadValue(_expected(kind, text), hint)
    return table["x"]


def _date(kind: Any, text: str) -> Any:
    return _toml(kind, text, f"write {'12:30:00' if kind is datetime.time else '2024-01-31'}")


def _by_pydantic(kind: Any, text: str) -> Any:
    """Types with a text form of their own (complex, UUID, Decimal); others cannot be given on the command line."""
    try:
        return TypeAdapter(kind, config=ConfigDict(allow_inf_nan=False)).validate_strings(text)
    except ValidationError:
        raise BadValue(_expected(kind, text)) from None
    except Exception:  # a type pydantic knows nothing of
        message = f"a value of type {type_name(kind)} cannot be written on the command line"
        raise BadValue(message, "set it in the class or from Python") from None


_READERS: dict[Any, Any] = {
    bool: _bool,
    int: _int,
    float: _float,
    str: _str,
    datetime.date: _date,
    datetime.datetime: _date,
    datetime.time: _date,
}
