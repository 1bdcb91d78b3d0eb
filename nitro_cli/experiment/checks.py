"""What can be wrong with the declaration of an experiment, one message for each mistake.

``check_body`` looks at a class body before pydantic does, so that every mistake gets nitro's words;
``check_fields`` looks at the finished fields.
"""

from __future__ import annotations

import dataclasses
import re
import typing
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo as PydanticField

from nitro_cli.errors import ExperimentError, Place
from nitro_cli.experiment import hooks
from nitro_cli.experiment.markers import NO_DEFAULT, Marker, MarkerTag
from nitro_cli.experiment.sources import ClassSource
from nitro_cli.experiment.traits import FieldInfo
from nitro_cli.experiment.values import BadValue, bare, from_python, members, type_name

RESERVED_FIELDS = {"unset": "`unset` in a preset table lists the fields that are None"}
_BARE_TEXT = re.compile(r"(\w+\.)*(GraphConst|Device|Host)")


def check_body(name: str, body: Mapping[str, Any], source: ClassSource, base: type | None) -> None:
    """Raises ExperimentError for what a class body says wrongly before any field is built."""
    annotations = _body_annotations(body)
    for field, annotation in annotations.items():
        if not field.startswith("_"):
            _check_field_name(name, field, source, base)
            _check_markers(name, field, annotation, source.place(field))
    for attribute, value in body.items():
        if attribute not in annotations and not attribute.startswith("_"):
            _check_attribute(name, attribute, value, source, base)
    for attribute in body:
        if attribute in annotations or (base is not None and hasattr(base, attribute)):
            continue
        if meant := hooks.near_miss(attribute, body):  # one that is inherited would go on being called instead
            _refuse_near_miss(name, attribute, meant, source)


def check_fields(cls: type, infos: Mapping[str, FieldInfo], own: Iterable[str], source: ClassSource) -> None:
    """Raises ExperimentError for a marker, type or default that an experiment cannot have."""
    from nitro_cli.experiment.base import KNOBS

    for field in own:
        info, place = infos[field], source.place(field)
        if field in KNOBS:
            _check_knob(cls.__name__, info, place)
        _check_flat(cls.__name__, info, place)
        check_default(cls.__name__, info, place)


def _refuse_near_miss(name: str, method: str, meant: str, source: ClassSource) -> None:
    what = f"{name} defines '{method}', which nitro never calls"
    note = f"rename it, or write `_{method}` if it is a helper of your own"
    raise ExperimentError(what, note, place=source.place(method), label=f"did you mean '{meant}'?", hook=meant)


def check_default(name: str, info: FieldInfo, place: Place | None) -> None:
    if info.default is NO_DEFAULT:
        return
    try:
        from_python(info, info.default)
    except BadValue as error:
        what = f"the default of field '{info.name}' of {name} does not fit its type: {error.message}"
        raise ExperimentError(what, *_notes(error.hint), place=place, field=info.name) from None


def _notes(hint: str) -> tuple[str, ...]:
    return (hint,) if hint else ()


def _body_annotations(body: Mapping[str, Any]) -> dict[str, Any]:
    if "__annotations__" in body:
        return dict(body["__annotations__"])
    late = body.get("__annotate_func__") or body.get("__annotate__")  # Python 3.14
    if late is None:
        return {}
    import annotationlib  # pyright: ignore[reportMissingImports]

    return annotationlib.call_annotate_function(late, annotationlib.Format.FORWARDREF)


def _check_field_name(name: str, field: str, source: ClassSource, base: type | None) -> None:
    place = source.place(field)
    if field in hooks.ALL:
        what = f"field '{field}' of {name} has the name of a hook"
        raise ExperimentError(what, f"rename it, for example `{field}_name`", place=place, field=field)
    if field in RESERVED_FIELDS:
        raise ExperimentError(
            f"field '{field}' of {name} has a reserved name", RESERVED_FIELDS[field], place=place, field=field
        )
    inherited = getattr(base, "model_fields", {})
    if base is not None and field not in inherited and hasattr(base, field):
        what = f"field '{field}' of {name} hides a method that every experiment has"
        raise ExperimentError(what, "give it another name", place=place, field=field)


def _check_markers(name: str, field: str, annotation: Any, place: Place | None) -> None:
    text = _text_of(annotation)
    if text is not None:
        found = re.findall(r"\b(GraphConst|Device|Host)\b", text)
        lone = _BARE_TEXT.fullmatch(text.strip()) is not None
    else:
        found = list(_marker_words(annotation))
        lone = typing.get_origin(annotation) is Annotated and isinstance(annotation.__origin__, TypeVar)
    if lone:
        what = f"field '{field}' of {name} has the marker {found[-1]} without a type"
        raise ExperimentError(
            what, f"write `{field}: {found[-1]}[int]`, with the field's type", place=place, field=field
        )
    if len(found) > 1:
        what = f"field '{field}' of {name} has more than one marker: {', '.join(found)}"
        raise ExperimentError(what, "a field is exactly one of GraphConst, Device and Host", place=place, field=field)
    if found and not _outermost(annotation, text):
        what = f"field '{field}' of {name} has the marker {found[0]} inside its type"
        note = f"the marker goes outside: `{found[0]}[int | None]`, not `{found[0]}[int] | None`"
        raise ExperimentError(what, note, place=place, field=field)


def _text_of(annotation: Any) -> str | None:
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None)


def _marker_words(annotation: Any) -> Iterator[str]:
    if typing.get_origin(annotation) is Annotated:
        yield from (tag.marker.word for tag in reversed(annotation.__metadata__) if isinstance(tag, MarkerTag))
        yield from _marker_words(annotation.__origin__)
    else:
        for arg in typing.get_args(annotation):
            yield from _marker_words(arg)


def _outermost(annotation: Any, text: str | None) -> bool:
    if text is None:
        return typing.get_origin(annotation) is Annotated
    opened = re.match(r"\s*(?:\w+\.)*(?:GraphConst|Device|Host|Annotated|ClassVar)\s*\[", text)
    return opened is not None and _closes_at(text, opened.end()) == len(text.rstrip())


def _closes_at(text: str, start: int) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += {"[": 1, "]": -1}.get(text[index], 0)
        if depth == 0:
            return index + 1
    return -1


def _check_attribute(name: str, attribute: str, value: Any, source: ClassSource, base: type | None) -> None:
    place = source.place(attribute)
    if isinstance(value, MarkerTag) or typing.get_origin(value) is Annotated:
        what = f"'{attribute}' of {name} is assigned a marker instead of annotated with it"
        raise ExperimentError(what, f"write `{attribute}: {type_name(value)} = ...`", place=place, field=attribute)
    if attribute in hooks.ALL and callable(value) and not _is_method(value):
        what = f"{name}.{attribute} is a {type(value).__name__}, not a plain method"
        note = f"write it as `def {attribute}(self, ...)`; nitro compiles hooks itself, so they need no decorator"
        raise ExperimentError(what, note, place=place, hook=attribute)
    if _is_method(value):
        return
    inherited = getattr(base, "model_fields", {}).get(attribute)
    kind = type_name(inherited.annotation) if inherited is not None else _type_to_write(value)
    shown = repr(value) if isinstance(value, bool | int | float | str | list | tuple) else "..."
    what = f"'{attribute}' of {name} has no type, so it is not a field"
    note = f"write `{attribute}: {kind} = {shown}`"
    other = () if inherited is not None else (f"or `{attribute}: ClassVar = ...` for a constant of the class",)
    raise ExperimentError(what, note, *other, place=place, field=attribute)


def _type_to_write(value: Any) -> str:
    if isinstance(value, PydanticField):
        return type(value.default).__name__ if value.default is not ... else "int"
    if isinstance(value, list | tuple) and value:
        inner = type(value[0]).__name__
        return f"list[{inner}]" if isinstance(value, list) else f"tuple[{inner}, ...]"
    return type(value).__name__


def _is_method(value: Any) -> bool:
    """Things in a class body that are no field and that pydantic leaves alone: methods, properties, nested classes."""
    if isinstance(value, type):
        return True
    module = type(value).__module__
    if module.startswith("pydantic._internal"):
        return True
    return hasattr(value, "__get__") and module in ("builtins", "functools")


def _check_knob(name: str, info: FieldInfo, place: Place | None) -> None:
    from nitro_cli.experiment.base import KNOBS

    if info.marker is not Marker.HOST:
        what = f"field '{info.name}' of {name} is marked {info.marker.word}, but only the driver reads it"
        why = (
            f"remove the marker: a knob is Host, and nitro passes `{info.name}` to the program itself where it needs it"
        )
        raise ExperimentError(what, why, place=place, field=info.name)
    allowed = set(members(KNOBS[info.name]))
    for kind in members(info.type):
        values = typing.get_args(kind) if typing.get_origin(kind) is Literal else ()
        if kind in allowed or (values and {type(value) for value in values} <= allowed):
            continue
        what = f"field '{info.name}' of {name} has the name of a nitro knob with another type: {type_name(info.type)}"
        note = f"the knob is `{info.name}: {type_name(KNOBS[info.name])}`; keep that type or take another name"
        raise ExperimentError(what, note, place=place, field=info.name)


def _check_flat(name: str, info: FieldInfo, place: Place | None) -> None:
    kinds = [kind for kind in _inner_types(info.type) if isinstance(kind, type)]
    if info.default is not NO_DEFAULT and info.default is not None and not isinstance(info.default, Enum | type):
        kinds.append(type(info.default))
    for kind in kinds:
        if not is_config_type(kind) or (info.marker is Marker.GRAPHCONST and is_frozen(kind)):
            continue
        what = f"field '{info.name}' of {name} holds a configuration object ({kind.__name__})"
        notes = [
            f"write its values as fields of {name}, and build the {kind.__name__} inside build_model from them",
            f"a preset that changes one value inside it would have to give the whole object, and every value it does "
            f"not name would silently fall back to {kind.__name__}'s own default",
        ]
        if info.marker is Marker.GRAPHCONST:
            notes.append(f"or make {kind.__name__} frozen, compared and hashed by content, if it really is one value")
        raise ExperimentError(what, *notes, place=place, field=info.name)


def _inner_types(annotation: Any) -> Iterator[Any]:
    for kind in members(annotation):
        yield typing.get_origin(kind) or kind
        if typing.get_origin(kind) is not Literal:
            for arg in typing.get_args(kind):
                yield from _inner_types(bare(arg))


def is_config_type(kind: type) -> bool:
    """A dataclass, pydantic model, attrs class or NamedTuple: a group of named values."""
    named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or issubclass(kind, BaseModel) or _attrs(kind) or named_tuple


def is_frozen(kind: type) -> bool:
    """True where instances cannot change and compare and hash by content."""
    if issubclass(kind, BaseModel):
        return bool(kind.model_config.get("frozen"))
    return issubclass(kind, tuple) or (
        kind.__hash__ not in (None, object.__hash__) and kind.__eq__ is not object.__eq__
    )


def _attrs(kind: type) -> bool:
    return hasattr(kind, "__attrs_attrs__")
