"""What an object consists of: a line that says what it is, and the objects in it, each with how it is reached.

``describe`` knows containers, what ``functools`` and jax make, and any object whose whole state Python can see. It
gives None for the others: only their identity tells them apart.
"""

from __future__ import annotations

import _abc  # pyright: ignore[reportMissingImports]
import abc
import collections
import contextvars
import dataclasses
import enum
import functools
import logging
import operator
import sys
import threading
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import numpy as np

from nitro_cli.experiment.objects import attribute, visible_state
from nitro_cli.programs import atoms, frameworks
from nitro_cli.programs.atoms import Parts, atom, built_in, digest, name_of
from nitro_cli.programs.libraries import is_user_module

# A container of more atoms than this is one line.
_MANY = 64


def describe(value: Any) -> Parts | None:
    kind = type(value)
    for handler in (_EXACT.get(kind), _from_subclass(value)):
        if handler is not None:
            return handler(value)
    found = built_in(value)
    if found is not None:
        return Parts(found[0], [] if found[1] is None else [(".__self__", found[1])])
    if typing.get_origin(value) is not None or kind.__module__ == "typing":
        return _typing(value)
    return frameworks.describe(value) or _object(value)


def _from_subclass(value: Any) -> Callable[[Any], Parts | None] | None:
    return next((handler for kind, handler in _SUBCLASSES if isinstance(value, kind)), None)


# Containers


def _items(value: Any) -> Parts:
    return _sequence(value, atoms.name_of(type(value)).removeprefix("builtins."))


def _sequence(values: Any, text: str) -> Parts:
    if len(values) > _MANY and (joined := _joined(values)) is not None:
        return Parts(f"{text} of {len(values)} {digest(joined)}", [])
    return Parts(text, [(f"[{index}]", part) for index, part in enumerate(values)])


def _joined(values: Iterable[Any]) -> str | None:
    texts: list[str] = []
    for each in values:
        text = None if isinstance(each, np.ndarray) else atom(each)
        if text is None:
            return None
        texts.append(text)
    return "\n".join(texts)


def _mapping(value: Any) -> Parts:
    """Keys name the entries. Their order shows where it is not that of the alphabet, by which entries are sorted."""
    kind = name_of(type(value)).removeprefix("builtins.")
    keys = [_key(key) for key in value]
    if len(keys) > _MANY and None not in keys and (joined := _joined(value.values())) is not None:
        return Parts(f"{kind} of {len(keys)} {digest(joined + repr(keys))}", [])
    texts = [f"[{index if key is None else key}]" for index, key in enumerate(keys)]
    in_order = "" if texts == sorted(texts) else f" in the order {atoms.short(' '.join(texts))}"
    children = list(zip(texts, value.values(), strict=True))
    children += [(f".key[{i}]", key) for i, (key, text) in enumerate(zip(value, keys, strict=True)) if text is None]
    return Parts(kind + in_order, children)


def _key(key: Any) -> str | None:
    if type(key) is str:
        return repr(key) if len(key) <= atoms.SMALL else digest(key)
    text = atom(key)
    return None if text is None else text.removeprefix("int ")


def _set(value: Any) -> Parts:
    from nitro_cli.programs.fingerprint import fingerprint

    if (texts := [atom(part) for part in value]) and None in texts:
        ordered = sorted(value, key=lambda part: fingerprint(part=part).digest())
        return Parts(type(value).__name__, [(f"[{index}]", part) for index, part in enumerate(ordered)])
    if not atoms.ordered(value):
        texts = sorted(map(str, texts))
    return Parts(f"{type(value).__name__} ({atoms.short(', '.join(map(str, texts)))})", [])


def _attributes(value: Any) -> list[tuple[str, Any]]:
    """What an object of a derived class holds besides."""
    return [(f".{name}", part) for name, part in sorted((attribute(value, "__dict__") or {}).items())]


def _field_of_tuple(value: Any) -> Parts:
    """The attribute of a named tuple: which item it is."""
    return Parts(f"item {value.__reduce__()[1][0]}", [])


def _derived(base: Callable[[Any], Parts]) -> Callable[[Any], Parts]:
    """An object of a class that derives from a built-in: what the built-in holds, its attributes, and its class."""

    def parts(value: Any) -> Parts:
        text, children = base(value)
        own = [] if type(value).__module__ in ("collections", "builtins") else [(" is a", type(value))]
        return Parts(text, children + _attributes(value) + own)

    return parts


def _plain_value(base: type) -> Callable[[Any], Parts]:
    return lambda value: Parts(f"{name_of(type(value))} {atom(base(value))}", [])


def _array(value: np.ndarray) -> Parts:
    base = np.asarray(value)
    if atoms.held_by_reference(base.dtype):
        shape = ",".join(map(str, base.shape))
        return _sequence(base.ravel().tolist(), f"{name_of(type(value))} {atoms.dtype_text(base.dtype)}[{shape}]")
    return Parts(f"{name_of(type(value))} {atoms.array_text(base)}", [])


# Functions, and what stands for them


def _partial(value: Any) -> Parts:
    arguments = [(f".args[{index}]", part) for index, part in enumerate(value.args)]
    keywords = [(f".keywords[{name!r}]", part) for name, part in value.keywords.items()]
    return Parts(name_of(type(value)), [(".func", value.func), *arguments, *keywords])


def _method(value: Any) -> Parts:
    return Parts("method", [(".__func__", value.__func__), (".__self__", value.__self__)])


def bound(value: Any) -> list[tuple[str, Any]]:
    """The functions in what a class holds for its methods and properties; empty for anything else. They go by the name
    of the attribute themselves."""
    if type(value) in (staticmethod, classmethod):
        return [("", value.__func__)]
    if type(value) is property:
        accessors = (("", value.fget), (" setter", value.fset), (" deleter", value.fdel))
        return [(suffix, each) for suffix, each in accessors if each is not None]
    return []


def _cached(value: Any) -> Parts:
    return Parts(f"lru_cache {value.cache_parameters()}", [(".__wrapped__", value.__wrapped__)])


def is_single_dispatch(function: types.FunctionType) -> bool:
    registry = function.__dict__.get("registry")
    return function.__code__.co_filename == functools.__file__ and isinstance(registry, types.MappingProxyType)


def single_dispatch(function: Any) -> Parts:
    """The implementations by class; what it remembers of earlier calls does not count."""
    children = [(f"[{name_of(cls)}]", each) for cls, each in function.registry.items()]
    return Parts("singledispatch", children)


def _operator(value: Any) -> Parts:
    """``operator.itemgetter`` and its like say what they hold when they are to be copied."""
    made, arguments = value.__reduce__()[:2]
    more = made.keywords if isinstance(made, functools.partial) else {}
    first = made.args if isinstance(made, functools.partial) else ()
    children = [(f"[{index}]", part) for index, part in enumerate((*first, *arguments))]
    return Parts(name_of(type(value)), children + [(f"[{name!r}]", part) for name, part in more.items()])


def _typing(value: Any) -> Parts | None:
    origin = typing.get_origin(value)
    if origin is not None:
        arguments = [(f"[{index}]", part) for index, part in enumerate(typing.get_args(value))]
        return Parts("generic", [(".origin", origin), *arguments])
    return Parts(f"{name_of(type(value))} {getattr(value, '__name__', None) or getattr(value, '_name', '')}", [])


# Objects that have no content to count, or that say it in their own way


def _context_variable(value: Any) -> Parts:
    try:
        return Parts(f"ContextVar {value.name}", [(".get()", value.get())])
    except LookupError:
        return Parts(f"ContextVar {value.name} without a value", [])


def _sentinel(value: Any) -> Parts:
    """A bare ``object()`` stands for itself. Which names mean the same one shows; a library's own is said by name."""
    known = _SENTINELS.get(id(value))
    if known is None:
        known = _SENTINELS[id(value)] = (value, _library_sentinel(value))
    return Parts(f"object {known[1]}", [])


_SENTINELS: dict[int, tuple[Any, str]] = {}


def _library_sentinel(value: Any) -> str:
    for name, module in sorted(sys.modules.items()):
        if isinstance(module, types.ModuleType) and not is_user_module(module):
            for each, held in list(vars(module).items()):
                if held is value:
                    return f"{name}.{each}"
    return "of the user's"


def _without_content(value: Any) -> Parts:
    return Parts(name_of(type(value)), [])


def _enum(value: enum.Enum) -> Parts:
    return Parts(f"{atoms.enum_text(value)} {atom(value.value) or ''}".strip(), [(" is a", type(value))])


def _object(value: Any) -> Parts | None:
    """Any other object, where Python sees its whole state."""
    kind = type(value)
    state = visible_state(value)
    if state is None:
        return None
    unwanted = frameworks.noise(kind)
    for name in ("__pydantic_private__", "__pydantic_extra__"):
        state |= attribute(value, name) or {}
    names = sorted(name for name in state if name not in unwanted and not name.startswith("__pydantic"))
    return Parts(f"instance of {name_of(kind)}", [(" is a", kind), *((f".{name}", state[name]) for name in names)])


def registered_with(cls: type) -> list[type]:
    """The classes that were registered with an abstract base class as if they were derived from it."""
    if not isinstance(cls, abc.ABCMeta):
        return []
    return [found for each in _abc._get_dump(cls)[0] if (found := each()) is not None]


def class_facts(cls: type) -> Iterator[tuple[str, Any]]:
    """What a class is besides its attributes: fields of a dataclass, members of an enum, how jax takes it apart."""
    if registered := registered_with(cls):
        yield " registered", tuple(sorted(map(name_of, registered)))
    if issubclass(cls, enum.Enum):
        yield " members", {name: member.value for name, member in cls.__members__.items()}
    if "__dataclass_fields__" in vars(cls):
        unwanted = frameworks.noise(cls)
        listed = [f for f in dataclasses.fields(cast(Any, cls)) if f.name not in unwanted]
        yield " fields", tuple((f.name, f.init, f.kw_only is True, f.compare) for f in listed)
        yield " options", repr(getattr(cls, "__dataclass_params__", None))
        missing = dataclasses.MISSING
        yield from ((f".{f.name} default", f.default_factory) for f in listed if f.default_factory is not missing)
        yield from ((f".{f.name} metadata", dict(f.metadata)) for f in listed if f.metadata)
    for name, info in vars(cls).get("__pydantic_fields__", {}).items():
        yield f".{name} default", info.default_factory if info.default_factory is not None else _default(info)
    yield from frameworks.registered(cls)


def _default(info: Any) -> Any:
    return "required" if info.is_required() else info.default


_LOCKS = tuple({type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event})
_EXACT: dict[Any, Callable[[Any], Parts | None]] = {
    tuple: _items,
    list: _items,
    dict: _mapping,
    types.MappingProxyType: _mapping,
    collections.OrderedDict: _mapping,
    set: _set,
    frozenset: _set,
    types.SimpleNamespace: lambda v: Parts("namespace", _attributes(v)),
    types.MethodType: _method,
    object: _sentinel,
    contextvars.ContextVar: _context_variable,
    type(collections.namedtuple("_", "a").a): _field_of_tuple,  # pyright: ignore
    operator.itemgetter: _operator,
    operator.attrgetter: _operator,
    operator.methodcaller: _operator,
    type(functools.lru_cache(lambda: None)): _cached,
    types.GenericAlias: _typing,
    types.UnionType: _typing,
}


def _default_dict(value: Any) -> Parts:
    text, children = _mapping(value)
    return Parts(text, [*children, (".default_factory", value.default_factory)])


def _deque(value: Any) -> Parts:
    return _sequence(value, f"deque maxlen {value.maxlen}")


# By class and what derives from it, the more special ones first.
_SUBCLASSES: list[tuple[Any, Callable[[Any], Parts | None]]] = [
    (enum.Enum, _enum),
    (property, _object),
    (functools.partial, _derived(_partial)),
    (_LOCKS, _without_content),
    (logging.Logger, lambda value: Parts(f"logger {value.name}", [])),
    (collections.defaultdict, _derived(_default_dict)),
    (collections.deque, _derived(_deque)),
    (dict, _derived(_mapping)),
    ((list, tuple), _derived(_items)),
    ((set, frozenset), _derived(_set)),
    (np.ndarray, _derived(_array)),
    (str, _derived(_plain_value(str))),
    (bytes, _derived(_plain_value(bytes))),
    (int, _derived(_plain_value(int))),
    (float, _derived(_plain_value(float))),
]
