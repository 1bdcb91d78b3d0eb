"""The three markers that say what a field is to the compiled program.

``width: GraphConst[int]`` is baked into the program and part of its key, ``smoothing: Device[float]`` is a traced input
and in no key, and ``Host[T]`` (or no marker at all) is for the driver only and invisible to the trace.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, TypeVar

T = TypeVar("T")


class Marker(StrEnum):
    GRAPHCONST = "const"
    DEVICE = "device"
    HOST = "host"

    @property
    def word(self) -> str:
        """How the marker is written in an experiment: ``GraphConst``, ``Device`` or ``Host``."""
        return {"const": "GraphConst", "device": "Device", "host": "Host"}[self.value]


@dataclass(frozen=True)
class MarkerTag:
    """What stands in the annotation at run time: ``GraphConst[int]`` is ``Annotated[int, MarkerTag(GRAPHCONST)]``."""

    marker: Marker


# Type checkers see through ``Annotated``: to them ``Device[float]`` is ``float``.
GraphConst = Annotated[T, MarkerTag(Marker.GRAPHCONST)]
Device = Annotated[T, MarkerTag(Marker.DEVICE)]
Host = Annotated[T, MarkerTag(Marker.HOST)]


class _NoDefault:
    """The type of ``NO_DEFAULT``: the field must be given. Not ``None``, which is a value like any other."""

    _instance: _NoDefault | None = None

    def __new__(cls) -> _NoDefault:
        if cls._instance is None:
            cls._instance = super().__new__(cls)
        return cls._instance

    def __repr__(self) -> str:
        return "NO_DEFAULT"

    def __reduce__(self) -> tuple[Any, ...]:
        return (_NoDefault, ())


NO_DEFAULT = _NoDefault()
