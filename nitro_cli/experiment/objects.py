"""What can be seen of an object: its attributes, and whether an installed library defines it."""

from __future__ import annotations

import functools
import struct
import sys
import sysconfig
import types
from typing import Any

_ABSENT = object()
_POINTER = struct.calcsize("P")


def visible_state(value: Any) -> dict[str, Any] | None:
    """``__dict__`` and slots of an object of a class written in Python; None where state may lie out of sight."""
    if not is_python_made(type(value)):
        return None
    state = {name: attribute(value, name, _ABSENT) for name in _slots(type(value))}
    state = {name: part for name, part in state.items() if part is not _ABSENT}
    return {**state, **(attribute(value, "__dict__") or {})}


def attribute(value: Any, name: str, default: Any = None) -> Any:
    """An attribute of an instance that is really there: a class that makes attributes up is not asked."""
    try:
        return object.__getattribute__(value, name)
    except AttributeError:
        return default


def is_python_made(kind: type) -> bool:
    """A class whose instances have no C state: no base is bigger than its slots, its dict and its weak references."""
    visible = False
    for klass, base in zip(kind.__mro__, kind.__mro__[1:], strict=False):
        slots = klass.__dict__.get("__slots__", ())
        count = 1 if isinstance(slots, str) else len(tuple(slots))
        if klass.__basicsize__ - base.__basicsize__ > _POINTER * (count + 2):
            return False
        visible = visible or "__slots__" in klass.__dict__ or "__dict__" in klass.__dict__
    return visible


def _slots(kind: type) -> list[str]:
    names: list[str] = []
    for klass in kind.__mro__:
        slots = klass.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            private = name.startswith("__") and not name.endswith("__")
            names.append(f"_{klass.__name__.lstrip('_')}{name}" if private else name)
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def library_name(value: Any) -> str | None:
    """``module.qualname`` of something that an installed library defines under that very name, else None."""
    if isinstance(value, types.MethodType) or not callable(value):
        return None
    module, qualname = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(qualname, str) or module not in sys.modules:
        return None
    found: Any = sys.modules[module]
    try:
        for part in qualname.split("."):
            found = getattr(found, part)
    except AttributeError:
        return None
    return f"{module}.{qualname}" if found is value and is_library(module) else None


@functools.lru_cache(maxsize=1024)
def is_library(module: str) -> bool:
    path = getattr(sys.modules.get(module), "__file__", None)
    if path is None:
        return module != "__main__"
    return path.startswith(library_folders())


@functools.lru_cache(maxsize=1)
def library_folders() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    return tuple({paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")})
