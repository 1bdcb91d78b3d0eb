"""What ``a.b.c`` in a function's code means, followed without running any code of the user's.

A chain is followed through modules, classes and the attributes of plain objects, as far as that is sure: so code that
reads ``CONFIG.optim.clip`` depends on that number and not on all of ``CONFIG``. It ends before anything that would run
code: a property, a method, an object that makes its attributes up.
"""

from __future__ import annotations

import builtins
import contextlib
import enum
import importlib
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from nitro_cli.experiment.objects import attribute
from nitro_cli.programs.code import Import
from nitro_cli.programs.libraries import is_user_module
from nitro_cli.programs.recheck import Watch

MISSING: Any = object()
_PLAIN_LOOK_UP = tuple(kind.__getattribute__ for kind in (object, types.FunctionType, types.SimpleNamespace))


def start(namespace: Mapping[str, Any], name: str, watch: Watch) -> tuple[Any, bool]:
    """What a global name means: the value, and whether it is one of the built-in names. MISSING where it is none."""
    value = namespace.get(name, MISSING)
    if value is not MISSING:
        watch.name(namespace, name, value)
        return value, False
    watch.name(namespace, name)
    value = vars(builtins).get(name, MISSING)
    if value is not MISSING:
        watch.name(vars(builtins), name, value)
    return value, value is not MISSING


def step(value: Any, name: str, watch: Watch) -> Any:
    """``value.name``, or MISSING where only running code could tell."""
    if isinstance(value, types.ModuleType):
        return _in_module(value, name, watch)
    if isinstance(value, type):
        return _in_class(value, name, watch)
    if isinstance(value, (types.MethodType, property, staticmethod, classmethod)):
        return MISSING
    return _in_object(value, name, watch)


def _in_module(module: types.ModuleType, name: str, watch: Watch) -> Any:
    space = vars(module)
    if name in space:
        watch.name(space, name, space[name])
        return space[name]
    watch.name(space, name)
    if is_user_module(module):
        return MISSING
    try:  # libraries load some of their modules, and warn of old names, when they are first named
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return getattr(module, name)
    except Exception:
        return MISSING


def _in_class(cls: type, name: str, watch: Watch) -> Any:
    if isinstance(cls, enum.EnumMeta):
        watch.cls(cls)
        return cls.__members__.get(name, MISSING)
    if type(cls).__getattribute__ is not type.__getattribute__ or _is_data(_look_up(type(cls), name)):
        return MISSING
    for base in cls.__mro__:
        watch.cls(base)
        if name in vars(base):
            found = vars(base)[name]
            if isinstance(found, staticmethod):
                return found.__func__
            plain = isinstance(found, (types.FunctionType, type)) or not hasattr(type(found), "__get__")
            return found if plain else MISSING
    return MISSING


def _in_object(value: Any, name: str, watch: Watch) -> Any:
    cls = type(value)
    if cls.__getattribute__ not in _PLAIN_LOOK_UP:
        return MISSING
    on_class = _look_up(cls, name)
    if isinstance(on_class, types.MemberDescriptorType):
        found = attribute(value, name, MISSING)
        watch.slot(value, name, found)
        return found
    if _is_data(on_class):
        return MISSING
    held = attribute(value, "__dict__")
    if type(held) is dict and name in held:
        watch.name(held, name, held[name])
        return held[name]
    if on_class is MISSING or hasattr(type(on_class), "__get__"):
        return MISSING
    for base in cls.__mro__:
        watch.cls(base)
    if type(held) is dict:
        watch.name(held, name)
    return on_class


def _look_up(cls: type, name: str) -> Any:
    for base in cls.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return MISSING


def _is_data(found: Any) -> bool:
    return found is not MISSING and (hasattr(type(found), "__set__") or hasattr(type(found), "__delete__"))


def imported(each: Import, package: str | None) -> Iterator[tuple[str, Any]]:
    """What an import statement inside a function binds: local names and values; it will run when it is traced, so it
    is run now. A module that is not there gives MISSING, under its own name."""
    try:
        full = importlib.util.resolve_name(each.module, package)
        module = _load(full)
        _load_parts(module, each)
    except Exception:  # the trace fails in the same way, and says so, or the code expects it
        yield each.module, MISSING
        return
    for local, meaning in each.bound:
        if meaning == "":
            yield local, sys.modules.get(full.partition(".")[0], MISSING)
        elif meaning == ".":
            yield local, module
        else:
            yield local, vars(module).get(meaning, MISSING)


def _load_parts(module: Any, each: Import) -> None:
    """``from package import name`` loads ``package.name`` where that is a module."""
    for name in each.names:
        if name not in vars(module):
            with contextlib.suppress(ImportError):
                _load(f"{module.__name__}.{name}")


def _load(name: str) -> Any:
    return sys.modules.get(name) or importlib.import_module(name)
