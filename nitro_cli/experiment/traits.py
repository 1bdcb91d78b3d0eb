"""What nitro knows about a class's fields: type, default, marker, help, line. The base class is not needed.

A marker is said in the annotation (``GraphConst[int]``) or, by a class without nitro's base, in the class attributes
``device_fields`` and ``host_fields``. A class that states ``host_fields`` has said everything: what is in neither tuple
is then GraphConst. Otherwise an unmarked field is Host.
"""

from __future__ import annotations

import dataclasses
import inspect
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import BaseModel

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.markers import NO_DEFAULT, Marker, MarkerTag
from nitro_cli.experiment.sources import class_source

_CACHE = "__nitro_fields__"


@dataclass(frozen=True)
class FieldInfo:
    """One field. ``type`` is the declared type inside the marker, with other metadata such as ``Field(ge=0)`` kept."""

    name: str
    type: Any
    default: Any = NO_DEFAULT
    marker: Marker = Marker.HOST
    doc: str = ""
    line: int = 0

    @property
    def required(self) -> bool:
        return self.default is NO_DEFAULT


def config_metadata(E: type) -> Mapping[str, FieldInfo]:
    """Every field of ``E`` by name, its own fields first in the order they are declared, then inherited knobs.

    Raises ExperimentError where the class is declared wrongly.
    """
    E = getattr(E, "__nitro_viewed__", E)
    if _CACHE not in E.__dict__:
        infos = _model_fields(E) if issubclass(E, BaseModel) else _class_fields(E)
        own = [name for name in own_fields(E) if name in infos]
        ordered = own + [name for name in infos if name not in own]
        type.__setattr__(E, _CACHE, MappingProxyType({name: infos[name] for name in ordered}))
    return E.__dict__[_CACHE]


def device_fields(E: type) -> tuple[str, ...]:
    """Names of the Device fields: traced inputs, which are in no program's key."""
    return _marked(E, Marker.DEVICE)


def host_fields(E: type) -> tuple[str, ...]:
    """Names of the Host fields: those marked so or not marked at all. Traced code cannot read them."""
    return _marked(E, Marker.HOST)


def graphconst_fields(E: type) -> tuple[str, ...]:
    """Names of the GraphConst fields: constants of the programs that read them."""
    return _marked(E, Marker.GRAPHCONST)


def own_fields(E: type) -> tuple[str, ...]:
    """Names that the user's classes declare or redeclare, nearest class first; nitro's knobs are not among them."""
    names: dict[str, None] = {}
    for klass in E.__mro__:
        if klass.__module__.partition(".")[0] in ("pydantic", "builtins") or "__nitro_base__" in klass.__dict__:
            continue
        names.update(dict.fromkeys(name for name in own_annotations(klass) if not name.startswith("_")))
        for trait in ("device_fields", "host_fields"):
            names.update(dict.fromkeys(klass.__dict__.get(trait, ())))
    return tuple(names)


def own_annotations(klass: type) -> dict[str, Any]:
    try:
        return inspect.get_annotations(klass)
    except NameError:  # Python 3.14 evaluates late; pydantic has kept what it could resolve
        return dict(getattr(klass, "__pydantic_fields__", {}))


def without_tags(annotation: Any) -> tuple[Any, tuple[Any, ...], tuple[Marker, ...]]:
    """An annotation taken apart: the bare type, metadata that is not nitro's, and the markers found."""
    if typing.get_origin(annotation) is not Annotated:
        return annotation, (), ()
    metadata = annotation.__metadata__
    markers = tuple(m.marker for m in metadata if isinstance(m, MarkerTag))
    return annotation.__origin__, tuple(m for m in metadata if not isinstance(m, MarkerTag)), markers


def annotated(bare: Any, metadata: tuple[Any, ...]) -> Any:
    return Annotated[(bare, *metadata)] if metadata else bare


def _marked(E: type, marker: Marker) -> tuple[str, ...]:
    return tuple(name for name, info in config_metadata(E).items() if info.marker is marker)


def _model_fields(E: type[BaseModel]) -> dict[str, FieldInfo]:
    if not E.__pydantic_complete__:
        E.model_rebuild(raise_errors=True)
    source = class_source(E)
    infos = {}
    for name, field in E.model_fields.items():
        tags = [m.marker for m in field.metadata if isinstance(m, MarkerTag)]
        metadata = tuple(m for m in field.metadata if not isinstance(m, MarkerTag))
        declared = annotated(field.annotation, metadata + _knob_metadata(name, metadata))
        default = NO_DEFAULT if field.is_required() else field.get_default(call_default_factory=True, validated_data={})
        marker = tags[0] if tags else Marker.HOST
        doc = field.description or _knob_doc(name)
        infos[name] = FieldInfo(name, declared, default, marker, doc, source.lines.get(name, 0))
    return infos


def _knob_field(name: str) -> Any:
    from nitro_cli.experiment import base

    knob = getattr(base, "Experiment", None)  # absent while the base itself is being made
    return knob.model_fields.get(name) if knob is not None else None


def _knob_doc(name: str) -> str:
    knob = _knob_field(name)
    return (knob.description or "") if knob is not None else ""


def _knob_metadata(name: str, metadata: tuple[Any, ...]) -> tuple[Any, ...]:
    """The base's own limits of a knob (``ge=1``), so that redeclaring it to change a default does not lose them."""
    knob = _knob_field(name)
    return tuple(m for m in knob.metadata if m not in metadata) if knob is not None else ()


def _class_fields(E: type) -> dict[str, FieldInfo]:
    """Fields of a class without nitro's base: a dataclass, or any class with annotations or explicit traits."""
    explicit = _explicit_traits(E)
    hints = {
        k: v for k, v in _type_hints(E).items() if not k.startswith("_") and k not in ("device_fields", "host_fields")
    }
    defaults = dict(_defaults(E))
    source = class_source(E)
    infos = {}
    for name in dict.fromkeys([*(defaults or hints), *explicit[Marker.DEVICE], *explicit[Marker.HOST]]):
        bare, metadata, markers = without_tags(hints.get(name, Any))
        if typing.get_origin(bare) is typing.ClassVar:
            continue
        marker = _marker(E, name, markers, explicit)
        default = defaults.get(name, NO_DEFAULT)
        infos[name] = FieldInfo(name, annotated(bare, metadata), default, marker, "", source.lines.get(name, 0))
    return infos


def _explicit_traits(E: type) -> dict[Marker, tuple[str, ...]]:
    return {
        Marker.DEVICE: tuple(getattr(E, "device_fields", ())),
        Marker.HOST: tuple(getattr(E, "host_fields", ())),
    }


def _marker(E: type, name: str, markers: tuple[Marker, ...], explicit: Mapping[Marker, tuple[str, ...]]) -> Marker:
    from nitro_cli.experiment.base import KNOBS

    stated = list(dict.fromkeys([*markers, *(marker for marker, names in explicit.items() if name in names)]))
    if len(stated) > 1:
        words = " and ".join(marker.word for marker in stated)
        place = class_source(E).place(name)
        raise ExperimentError(f"field '{name}' of {E.__name__} is both {words}", "keep one of them", place=place)
    if stated:
        return stated[0]
    complement = hasattr(E, "host_fields") and name not in KNOBS
    return Marker.GRAPHCONST if complement else Marker.HOST


def _type_hints(E: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(E, include_extras=True)
    except NameError as error:
        place = class_source(E).place()
        note = "import the name where the class is declared, at the top of its module"
        raise ExperimentError(f"a field of {E.__name__} has an unknown type: {error}", note, place=place) from None


def _defaults(E: type) -> Iterator[tuple[str, Any]]:
    if dataclasses.is_dataclass(E):
        for field in dataclasses.fields(E):
            if field.default is not dataclasses.MISSING:
                yield field.name, field.default
            elif field.default_factory is not dataclasses.MISSING:
                yield field.name, field.default_factory()
            else:
                yield field.name, NO_DEFAULT
        return
    for name in _type_hints(E):
        if not name.startswith("_") and name not in ("device_fields", "host_fields"):
            yield name, inspect.getattr_static(E, name, NO_DEFAULT)
