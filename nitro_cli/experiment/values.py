"""One judge of values for Python, TOML and the command line.

A value is checked strictly by pydantic after a short list of widenings (int to float, list to tuple or set, text to
Enum, Literal or Path), so that ``true`` is never a number and ``2.5`` never an int. Command-line text is read by the
field's type, never by guess, and then goes through the same check.
"""

from __future__ import annotations

import collections.abc
import datetime
import functools
import re
import sys
import types
import typing
from enum import Enum
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError

from nitro_cli.experiment.traits import FieldInfo
from nitro_cli.suggest import did_you_mean

_SEQUENCES = (list, tuple, set, frozenset, collections.abc.Sequence)
_CONFIG = ConfigDict(strict=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class BadValue(ValueError):
    """A value that a field does not take. ``message`` reads after the field's name, ``hint`` says what to write."""

    def __init__(self, message: str, hint: str = "") -> None:
        self.message, self.hint = message, hint
        super().__init__(f"{message} ({hint})" if hint else message)


def from_python(info: FieldInfo, value: Any) -> Any:
    """``value`` as the field holds it. Raises BadValue."""
    wide = widen(info.type, value)
    if _literal_hole(info.type, wide):
        raise BadValue(_expected(info.type, value), _hint(info.type, value))
    try:
        return _adapter(info.type).validate_python(wide)
    except ValidationError as error:
        raise _bad(info.type, value, error) from None


def from_text(info: FieldInfo, text: str) -> Any:
    """Command-line ``text`` as the field holds it: read by the field's type, then checked. Raises BadValue."""
    from nitro_cli.experiment.text import read_text

    return from_python(info, read_text(info.type, text))


def type_name(annotation: Any) -> str:
    """``int``, ``float | None``, ``list[int]``, ``'sgd' | 'adam'``: a type as help and messages show it."""
    if annotation is None or annotation is type(None):
        return "None"
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        return type_name(args[0])
    if is_union(annotation):
        return " | ".join(type_name(arg) for arg in args)
    if origin is Literal:
        return " | ".join(repr(arg) for arg in args)
    if origin is not None and args:
        inner = ", ".join("..." if arg is ... else type_name(arg) for arg in args if not isinstance(arg, list))
        return f"{getattr(origin, '__name__', origin)}[{inner}]"
    return getattr(annotation, "__name__", None) or str(annotation).removeprefix("typing.")


def is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (Union, types.UnionType)


def bare(annotation: Any) -> Any:
    """The type inside ``Annotated`` and the ``type X = ...`` statement."""
    while True:
        if typing.get_origin(annotation) is Annotated:
            annotation = typing.get_args(annotation)[0]
        elif hasattr(annotation, "__value__"):
            annotation = annotation.__value__
        else:
            return annotation


def members(annotation: Any) -> tuple[Any, ...]:
    """The alternatives of a union in order (nested ones flattened), or the type alone."""
    annotation = bare(annotation)
    if not is_union(annotation):
        return (annotation,)
    return tuple(member for arg in typing.get_args(annotation) for member in members(arg))


def choices(annotation: Any) -> list[str]:
    """What may be written for an Enum or Literal (with None where a union allows it); empty for other types."""
    found: list[str] = []
    for member in members(annotation):
        if isinstance(member, type) and issubclass(member, Enum):
            found.extend(m.value if isinstance(m.value, str) else m.name for m in member)
        elif typing.get_origin(member) is Literal:
            found.extend("none" if arg is None else str(arg) for arg in typing.get_args(member))
        elif member is not type(None):
            return []
    return found


def widen(annotation: Any, value: Any) -> Any:
    """The allowed conversions, at any depth; a value that none of them fits comes back as it was."""
    target = bare(annotation)
    value = _python_scalar(target, value)
    if is_union(target):
        return _widen_union(typing.get_args(target), value)
    origin, args = typing.get_origin(target) or target, typing.get_args(target)
    if origin in (list, tuple, set, frozenset, collections.abc.Sequence):
        return _widen_items(origin, args, value)
    if origin in (dict, collections.abc.Mapping) and isinstance(value, dict) and len(args) == 2:
        return {widen(args[0], key): widen(args[1], item) for key, item in value.items()}
    if isinstance(origin, type) and issubclass(origin, Enum) and not isinstance(value, Enum):
        return _enum_member(origin, value)
    if isinstance(origin, type) and issubclass(origin, PurePath) and isinstance(value, str) and value:
        return Path(value)
    return value


def _widen_union(args: tuple[Any, ...], value: Any) -> Any:
    for wide in (value, *(widen(arg, value) for arg in args)):
        for arg in args:
            if _fits(arg, wide):
                return wide
    return value


def _fits(annotation: Any, value: Any) -> bool:
    if _literal_hole(annotation, value):
        return False
    try:
        _adapter(annotation).validate_python(value)
    except ValidationError:
        return False
    return True


def _widen_items(origin: Any, args: tuple[Any, ...], value: Any) -> Any:
    if not isinstance(value, list) and type(value) is not origin:
        return value
    items = list(value)
    if origin is tuple and args and args[-1] is not ...:
        wide = [widen(arg, item) for arg, item in zip(args, items, strict=False)] + items[len(args) :]
    else:
        wide = [widen(args[0], item) if args else item for item in items]
    try:
        return wide if origin is collections.abc.Sequence else origin(wide)
    except TypeError:  # items that do not hash: pydantic says so
        return value


def _enum_member(enum: type[Enum], value: Any) -> Any:
    """By value, or by name where no other member has that text as its value."""
    for member in enum:
        if type(member.value) is type(value) and member.value == value:
            return member
    return enum.__members__.get(value, value) if isinstance(value, str) else value


def _python_scalar(target: Any, value: Any) -> Any:
    """A numpy scalar as a Python one, except where the field asks for a numpy type."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.generic) or target is Any:
        return value
    wants = any(isinstance(m, type) and issubclass(m, numpy.generic) for m in members(target))
    return value if wants else value.item()


def _literal_hole(annotation: Any, value: Any) -> bool:
    """True for the hole that strict pydantic leaves: ``True`` and ``1.0`` pass for ``Literal[1]``."""
    kinds = members(annotation)
    literals = [arg for kind in kinds if typing.get_origin(kind) is Literal for arg in typing.get_args(kind)]
    if not literals or any(type(value) is type(arg) and value == arg for arg in literals):
        return False
    return not any(typing.get_origin(kind) is not Literal and _fits(kind, value) for kind in kinds)


@functools.lru_cache(maxsize=512)
def _cached_adapter(annotation: Any) -> TypeAdapter[Any]:
    return _new_adapter(annotation)


def _new_adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(annotation, config=_CONFIG)
    except PydanticUserError:  # a model or dataclass brings its own configuration
        return TypeAdapter(annotation)


def _adapter(annotation: Any) -> TypeAdapter[Any]:
    try:
        return _cached_adapter(annotation)
    except TypeError:  # metadata that does not hash
        return _new_adapter(annotation)


def _bad(annotation: Any, value: Any, error: ValidationError) -> BadValue:
    errors = error.errors(include_url=False, include_context=False)
    if len(errors) == 1 and (special := _special(annotation, errors[0])):
        return special
    return BadValue(_expected(annotation, value), _hint(annotation, value))


# What is wrong with the value itself rather than with its type: pydantic's sentence says it best.
_TYPE_ERRORS = ("_type", "_parsing", "missing_argument", "is_instance_of", "enum", "literal_error")


def _special(annotation: Any, error: Any) -> BadValue | None:
    kind, location, given = error["type"], error["loc"], error["input"]
    where = f"item {'.'.join(str(part) for part in location)}: " if location and not is_union(bare(annotation)) else ""
    if kind == "finite_number":
        return BadValue(
            f"{where}must be finite, got {given}", "nan and inf need Field(allow_inf_nan=True) on the field"
        )
    if kind in ("too_long", "missing") and typing.get_origin(bare(annotation)) is tuple:
        return None
    if kind == "value_error" or kind == "assertion_error":
        return BadValue(f"{where}{error['msg'].partition(', ')[2]}, got {shown(given)}")
    if not kind.endswith(_TYPE_ERRORS):
        text = error["msg"].replace("Input should", "should", 1)
        return BadValue(f"{where}{text[0].lower()}{text[1:]}, got {shown(given)}")
    if where:
        return BadValue(
            f"{where}expected {error['msg'].partition('valid ')[2] or 'another type'}, got {describe(given)}"
        )
    return None


def _expected(annotation: Any, value: Any) -> str:
    target = bare(annotation)
    if (options := choices(annotation)) and isinstance(value, str | int | float):
        return f"expected one of {', '.join(options)}; got {describe(value)}"
    fixed = _fixed_length(target)
    if fixed is not None and isinstance(value, list | tuple) and len(value) != fixed:
        return f"expected {type_name(target)}: {fixed} values expected, got {len(value)}"
    return f"expected {type_name(annotation)}, got {describe(value)}"


def _fixed_length(target: Any) -> int | None:
    args = typing.get_args(target)
    if typing.get_origin(target) is not tuple or (args and args[-1] is ...):
        return None
    return len(args)


def _hint(annotation: Any, value: Any) -> str:
    kinds = members(annotation)
    if int in kinds and isinstance(value, float) and value.is_integer():
        return f"write {int(value)}"
    if (options := choices(annotation)) and isinstance(value, str):
        return did_you_mean(value, options)
    if isinstance(value, str) and value == "" and any(isinstance(k, type) and issubclass(k, PurePath) for k in kinds):
        return "an empty path means nothing; leave the field out"
    if isinstance(value, str) and value.lower() in ("none", "null"):
        return "leave the field out, or name it in `unset = [...]` where its type allows None"
    looks_plain = isinstance(value, str) and re.fullmatch(r"[-+\w.]*[0-9]|true|false", value)
    if looks_plain and any(kind in (int, float, bool) for kind in kinds):
        return "write it without quotes"
    if str in kinds and isinstance(value, int | float | datetime.date | datetime.time):
        return "write it in quotes"
    if isinstance(value, dict):
        return "fields are flat: write one field for each value"
    return ""


def shown(value: Any, width: int = 60) -> str:
    text = repr(value) if not isinstance(value, Enum) else str(value.value)
    return text if len(text) <= width else text[: width - 3] + "..."


def describe(value: Any) -> str:
    """``2.5 (float)``: a value with its type, short."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return f"an array of {value.dtype} with shape {value.shape}"
    if value is None:
        return "None"
    return f"{shown(value)} ({type(value).__name__})"
