"""Whether anything that a fingerprint was taken from has changed, without taking it again.

A walk notes what it looked at: the functions, the names that they read, and what containers and objects held. As long
as all of these are the same objects, the fingerprint is the same. What cannot be compared so (a large array that may
have been written to) makes the answer "unsure", and then the walk is done again.
"""

from __future__ import annotations

import abc
import types
from collections.abc import Mapping
from typing import Any

import numpy as np

from nitro_cli.experiment.objects import attribute
from nitro_cli.programs.libraries import same_objects

_ABSENT = object()
# Arrays up to this many bytes are compared; looking at larger ones takes as long as the walk does.
_SMALL_ARRAY = 1 << 16


class Watch:
    """What a walk looked at, and how it was then."""

    def __init__(self) -> None:
        self._functions: list[tuple[types.FunctionType, tuple[Any, ...]]] = []
        self._names: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        self._slots: list[tuple[Any, str, Any]] = []
        self._sequences: list[tuple[Any, tuple[Any, ...]]] = []
        self._mappings: list[tuple[Any, tuple[Any, ...], tuple[Any, ...]]] = []
        self._sets: list[tuple[Any, Any]] = []
        self._classes: list[tuple[type, tuple[Any, ...], tuple[Any, ...]]] = []
        self._arrays: list[tuple[np.ndarray, Any]] = []
        self._variables: list[tuple[Any, Any]] = []
        self._types: list[tuple[Any, type]] = []
        self._registered = abc.get_cache_token()
        self.unsure = False

    def function(self, function: types.FunctionType) -> None:
        self._functions.append((function, _facts(function)))
        if function.__dict__:
            self.mapping(function.__dict__)
        if function.__kwdefaults__:
            self.mapping(function.__kwdefaults__)

    def name(self, space: Mapping[str, Any], name: str, value: Any = _ABSENT) -> None:
        """``space[name]`` was read; without ``value``, it was not there."""
        self._names.setdefault(id(space), (space, {}))[1][name] = value

    def slot(self, holder: Any, name: str, value: Any) -> None:
        self._slots.append((holder, name, value))

    def whole(self, value: Any) -> None:
        """Everything that ``value`` holds was looked at."""
        if isinstance(value, np.ndarray):
            self._array(value)
        elif isinstance(value, (list, tuple)):
            self._sequences.append((value, tuple(value)))
        elif isinstance(value, (dict, types.MappingProxyType)):
            self.mapping(value)
        elif isinstance(value, set):
            self._sets.append((value, frozenset(value)))
        elif type(value).__name__ == "ContextVar":
            self._variables.append((value, value.get(_ABSENT)))
        elif type(value).__module__ == "collections" or type(value).__name__ in ("array", "bytearray"):
            self.unsure = True
        self._types.append((value, type(value)))
        held = attribute(value, "__dict__")
        if isinstance(held, dict) and not isinstance(value, types.FunctionType):
            self.mapping(held)
        self._all_slots(value)

    def _all_slots(self, value: Any) -> None:
        if isinstance(value, (list, tuple, dict, set, frozenset, np.ndarray)):
            return
        for base in type(value).__mro__:
            slots = base.__dict__.get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                if isinstance(name, str) and not name.startswith("__"):
                    self._slots.append((value, name, attribute(value, name, _ABSENT)))

    def mapping(self, value: Any) -> None:
        self._mappings.append((value, tuple(value), tuple(value.values())))

    def cls(self, cls: type) -> None:
        self._classes.append((cls, tuple(vars(cls).values()), cls.__bases__))

    def _array(self, value: np.ndarray) -> None:
        value = np.asarray(value)  # a masked array fills itself in when it is asked for its bytes
        if not value.flags.writeable and value.base is None:
            return
        if value.nbytes > _SMALL_ARRAY or value.dtype.hasobject:
            self.unsure = True
        else:
            self._arrays.append((value, (value.shape, value.dtype, value.tobytes())))

    def holds(self) -> bool:
        """Whether all of it is surely as it was."""
        try:
            return not self.unsure and self._same()
        except Exception:  # another thread changes what is compared, for example
            return False

    def _same(self) -> bool:
        return (
            abc.get_cache_token() == self._registered  # what was registered with abstract base classes
            and all(_same(kept, _facts(function)) for function, kept in self._functions)
            and all(_same_names(space, names) for space, names in self._names.values())
            and all(attribute(holder, name, _ABSENT) is value for holder, name, value in self._slots)
            and all(same_objects(kept, value) for value, kept in self._sequences)
            and all(same_objects(kept, m.values()) and same_objects(keys, m) for m, keys, kept in self._mappings)
            and all(value == kept for value, kept in self._sets)
            and all(same_objects(kept, vars(c).values()) and c.__bases__ == bases for c, kept, bases in self._classes)
            and all((v.shape, v.dtype, v.tobytes()) == kept for v, kept in self._arrays)
            and all(type(value) is kind for value, kind in self._types)
            and all(variable.get(_ABSENT) is value for variable, value in self._variables)
        )


def _facts(function: types.FunctionType) -> tuple[Any, ...]:
    facts = function.__code__, function.__defaults__, function.__kwdefaults__, len(function.__dict__)
    return (*facts, *map(_content, function.__closure__)) if function.__closure__ else facts


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return _ABSENT


def _same(kept: tuple[Any, ...], now: tuple[Any, ...]) -> bool:
    return same_objects(kept, now)


def _same_names(space: Mapping[str, Any], names: dict[str, Any]) -> bool:
    get = space.get
    return all(get(name, _ABSENT) is value for name, value in names.items())
