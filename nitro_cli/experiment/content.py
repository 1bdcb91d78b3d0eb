"""Values by content: one digest that is the same in every process, and the check that a GraphConst value has one.

Never ``repr``, ``id``, ``hash`` or pickle: these differ between processes, or agree where contents differ. Every node
is tagged with its type, so ``1``, ``1.0``, ``True`` and ``"1"`` are four values, and what has no content to look at (a
lock, an open file, a generator) raises TypeError that says where it lies.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import decimal
import functools
import hashlib
import re
import struct
import sys
import types
import typing
from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.objects import is_python_made, library_name, visible_state

_HAS_DOCSTRING = 0x4000000  # code flag of Python 3.13 and later
_REFUSED = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType, types.FrameType, types.TracebackType)


def content_digest(value: Any) -> str:
    """Full sha256 in hex of the content of ``value``. Raises TypeError, with the path, where content cannot decide."""
    try:
        return _Digester().digest(value).hex()
    except RecursionError:
        raise TypeError(f"a {type(value).__name__} nested too deeply has no content digest") from None


class _Digester:
    def __init__(self) -> None:
        self.path: list[str] = []
        self.open: dict[int, int] = {}  # containers being walked, by id: how deep each one lies

    def digest(self, value: Any) -> bytes:
        plain = _PLAIN.get(type(value))
        if plain is not None:
            return _node(type(value).__name__, plain(value))
        if id(value) in self.open:  # a cycle: it is said by how far up it points
            return _node("cycle", str(len(self.open) - self.open[id(value)]).encode())
        self.open[id(value)] = len(self.open)
        try:
            return self._compound(value)
        finally:
            del self.open[id(value)]

    def _compound(self, value: Any) -> bytes:
        kind = type(value)
        walk = _WALKS.get(kind)
        if walk is not None:
            return _node(kind.__name__, *walk(self, value))
        if isinstance(value, _REFUSED):
            raise self.refuse(value)
        if isinstance(value, type):
            return _node("type", _name(value))
        if isinstance(value, Enum):
            return _node("enum", _name(kind), value.name.encode(), self.at(".value", value.value))
        if isinstance(value, PurePath):
            return _node("path", kind.__name__.encode(), str(value).encode())
        if isinstance(value, types.ModuleType):
            return _node("module", value.__name__.encode())
        return self._array(value) or self._callable(value) or self._object(value)

    def at(self, step: str, value: Any) -> bytes:
        self.path.append(step)
        result = self.digest(value)
        self.path.pop()
        return result

    def refuse(self, value: Any) -> TypeError:
        where = "".join(self.path) or "the value"
        return TypeError(
            f"{where.removeprefix('.')} is a {_name(type(value)).decode()}, which has no content to compare"
        )

    def items(self, values: Iterable[Any]) -> list[bytes]:
        return [self.at(f"[{index}]", item) for index, item in enumerate(values)]

    def mapping(self, value: dict[Any, Any]) -> list[bytes]:
        return [_node("item", self.at(" key", key), self.at(f"[{key!r}]", item)) for key, item in value.items()]

    def unordered(self, value: Iterable[Any]) -> list[bytes]:
        return sorted(self.at("{}", item) for item in value)

    def named(self, values: dict[str, Any]) -> list[bytes]:
        return [_node(name, self.at(f".{name}", values[name])) for name in sorted(values)]

    def _array(self, value: Any) -> bytes | None:
        numpy = sys.modules.get("numpy")
        if numpy is None:
            return None
        if isinstance(value, numpy.dtype):
            return _node("dtype", self._dtype(value))
        if type(value) is numpy.ndarray or isinstance(value, numpy.generic):
            return _node(type(value).__name__, *self._array_parts(numpy.asarray(value)))
        if isinstance(value, numpy.ndarray):
            return _node(_name(type(value)), *self._array_parts(numpy.asarray(value)), *self.named(vars(value)))
        if isinstance(value, numpy.ufunc):
            return _node("ufunc", value.__name__.encode())
        return self._jax_array(numpy, value)

    def _jax_array(self, numpy: Any, value: Any) -> bytes | None:
        jax = sys.modules.get("jax")
        if jax is None or not isinstance(value, jax.Array):
            return None
        if isinstance(value, jax.core.Tracer):
            raise self.refuse(value)
        if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
            impl = str(jax.random.key_impl(value)).encode()
            return _node("jax.key", impl, *self._array_parts(numpy.asarray(jax.random.key_data(value))))
        weak = str(getattr(value, "weak_type", False)).encode()
        return _node("jax.Array", weak, *self._array_parts(numpy.asarray(value)))

    def _array_parts(self, array: Any) -> list[bytes]:
        shape = str(array.shape).encode()
        if not array.flags.c_contiguous:  # how an array lies in memory shows in ravel("K") and the like
            shape += f" strides {array.strides}".encode()
        if array.dtype.hasobject:
            return [self._dtype(array.dtype), shape, *self.items(array.ravel().tolist())]
        return [self._dtype(array.dtype), shape, hashlib.sha256(array.tobytes()).digest()]

    def _dtype(self, dtype: Any) -> bytes:
        if dtype.fields is None:
            return f"{dtype.name} {dtype.str}".encode()
        fields = [(n, self._dtype(f[0]), f[1]) for n, f in dtype.fields.items()]
        return _node("fields", *(_node(n, d, str(offset).encode()) for n, d, offset in fields))

    def _callable(self, value: Any) -> bytes | None:
        if (name := library_name(value)) is not None:
            return _node("library", name.encode())
        if isinstance(value, functools.partial):
            parts = (self.at(".func", value.func), self.at(".args", value.args), self.at(".keywords", value.keywords))
            return _node("partial", _name(type(value)), *parts)
        if isinstance(value, types.MethodType):
            return _node("method", self.at(".__func__", value.__func__), self.at(".__self__", value.__self__))
        if isinstance(value, types.FunctionType):
            return _node("function", *self._function(value))
        if isinstance(value, types.BuiltinFunctionType | types.MethodWrapperType):
            return _node("builtin", value.__name__.encode(), self.at(".__self__", value.__self__))
        if isinstance(getattr(value, "__wrapped__", None), types.FunctionType) and not is_python_made(type(value)):
            return _node("wrapped", _name(type(value)), self.at(".__wrapped__", value.__wrapped__))  # a jitted function
        return None

    def _function(self, function: Any) -> list[bytes]:
        closure = [_cell(cell) for cell in function.__closure__ or ()]
        return [
            self.at(".__code__", function.__code__),
            self.at(".__defaults__", function.__defaults__),
            self.at(".__kwdefaults__", function.__kwdefaults__),
            *self.items(closure),
        ]

    def code(self, code: types.CodeType) -> list[bytes]:
        """What a function does, without where it lies: no file name, line numbers or docstring."""
        names = (code.co_name, *code.co_names, "", *code.co_varnames, "", *code.co_freevars, "", *code.co_cellvars)
        counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & ~_HAS_DOCSTRING)
        consts = code.co_consts[1:] if _has_docstring(code) else code.co_consts
        consts = tuple(const for const in consts if const is not None)
        code_bytes = (code.co_code, code.co_exceptiontable)
        return [*code_bytes, str(counts).encode(), "\0".join(names).encode(), *self.items(consts)]

    def _object(self, value: Any) -> bytes:
        kind = type(value)
        if typing.get_origin(value) is not None:
            return _node("generic", self.at("", typing.get_origin(value)), *self.items(typing.get_args(value)))
        for base, walk in _BASES.items():
            if isinstance(value, base):
                state = dict(getattr(value, "__dict__", {}))
                return _node("sub", _name(kind), *walk(self, value), *self.named(state))
        if isinstance(value, BaseModel):
            return _node("object", _name(kind), *self.named({**value.__dict__, **(value.__pydantic_extra__ or {})}))
        if dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen:  # pyright: ignore
            state = {field.name: getattr(value, field.name) for field in dataclasses.fields(kind)}
            return _node("object", _name(kind), *self.named(state))
        state = visible_state(value)
        if state is None:
            raise self.refuse(value)
        return _node("object", _name(kind), *self.named(state))


def check_graphconst(E: type, name: str, value: Any) -> None:
    """A GraphConst value goes into a program's key: it must compare and hash by content.

    Raises ExperimentError that names the field, what broke, and the three ways out.
    """
    broken = _broken(value)
    if broken is None:
        return
    raise ExperimentError(
        f"the GraphConst field '{name}' of {E.__name__} does not compare by content: {broken}",
        "flatten it: one plain field (int, float, str, tuple, ...) for each value inside it",
        "or make its class a frozen dataclass, whose == and hash go by content",
        "or leave the marker out (Host) and read it in build_data or build_model only",
        field=name,
    )


def _broken(value: Any) -> str | None:
    try:
        twin = _twin(value)
    except Exception as error:  # whatever a class of the user's does when copied
        return f"a {type(value).__name__} cannot be copied ({error})"
    try:
        if content_digest(value) != content_digest(twin):
            return f"a {type(value).__name__} and its deep copy have different contents"
    except TypeError as error:
        return str(error)
    return _broken_part(value, twin)


def _twin(value: Any) -> Any:
    """A deep copy in which functions, jitted ones included, stand for themselves."""
    if type(value) in (list, tuple):
        return type(value)(_twin(item) for item in value)
    if type(value) is dict:
        return {key: _twin(item) for key, item in value.items()}
    return value if library_name(value) or hasattr(value, "__wrapped__") else copy.deepcopy(value)


def _broken_part(value: Any, twin: Any) -> str | None:
    """nitro makes containers and arrays content-hashable itself; other objects must do it by ``==`` and ``hash``."""
    kind = type(value)
    if kind in (list, tuple):
        return next(filter(None, map(_broken_part, value, twin)), None)
    if kind is dict:
        return next(filter(None, map(_broken_part, value.values(), twin.values())), None)
    if kind in _PLAIN or hasattr(value, "dtype") or kind in (set, frozenset):
        return None
    try:
        if not bool(value == twin):
            return f"a {kind.__name__} is not equal to its own deep copy"
    except Exception as error:
        return f"comparing a {kind.__name__} with its deep copy raises {type(error).__name__}: {error}"
    try:
        same = hash(value) == hash(twin)
    except TypeError:
        return None
    return None if same else f"a {kind.__name__} and its equal deep copy hash differently"


def short_value(value: Any, width: int = 40) -> str:
    """A value for a report, at most ``width`` characters."""
    if isinstance(value, Enum):
        text = str(value.value) if isinstance(value.value, str) else value.name
    elif hasattr(value, "dtype") and hasattr(value, "shape") and getattr(value, "ndim", 0):
        text = f"{value.dtype}[{','.join(str(n) for n in value.shape)}]"
    elif isinstance(value, PurePath):
        text = str(value)
    elif isinstance(value, list | tuple) and len(value) > width:  # never the repr of a whole data set
        text = f"{type(value).__name__} of {len(value)}"
    elif callable(value) and isinstance(getattr(value, "__qualname__", None), str):  # a jitted function, for example
        text = value.__qualname__
    else:
        text = repr(value)
    text = re.sub(r" at 0x[0-9a-f]+", "", " ".join(text.split()))  # an address says nothing, and differs every time
    return text if len(text) <= width else text[: width - 3] + "..."


def _node(tag: str | bytes, *parts: bytes) -> bytes:
    hasher = hashlib.sha256()
    for part in (tag.encode() if isinstance(tag, str) else tag, *parts):
        hasher.update(len(part).to_bytes(8, "big"))
        hasher.update(part)
    return hasher.digest()


def _name(kind: type) -> bytes:
    return f"{kind.__module__}.{kind.__qualname__}".encode()


def _cell(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _has_docstring(code: types.CodeType) -> bool:
    if sys.version_info >= (3, 13):
        return bool(code.co_flags & _HAS_DOCSTRING)
    is_function = code.co_flags & 2 and code.co_name != "<lambda>"
    return bool(is_function and code.co_consts and isinstance(code.co_consts[0], str))


def _bits(value: float) -> bytes:
    return struct.pack(">d", value) if value == value else b"nan"  # which of the many NaNs means nothing


def _int(value: int) -> bytes:
    return format(value, "x").encode()  # str() refuses integers of more than 4300 digits


def _text(value: str) -> bytes:
    return value.encode("utf-8", "surrogatepass")


_PLAIN: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"",
    type(...): lambda value: b"",
    type(NotImplemented): lambda value: b"",
    bool: lambda value: b"1" if value else b"0",
    int: _int,
    float: _bits,
    complex: lambda value: _bits(value.real) + _bits(value.imag),
    str: _text,
    bytes: bytes,
    bytearray: bytes,
    datetime.date: lambda value: value.isoformat().encode(),
    datetime.timedelta: lambda value: str((value.days, value.seconds, value.microseconds)).encode(),
    decimal.Decimal: lambda value: str(value.as_tuple()).encode(),
}

_WALKS: dict[type, Callable[[_Digester, Any], list[bytes]]] = {
    tuple: _Digester.items,
    list: _Digester.items,
    deque: lambda d, v: [d.at(".maxlen", v.maxlen), *d.items(v)],
    dict: _Digester.mapping,
    types.MappingProxyType: _Digester.mapping,
    set: _Digester.unordered,
    frozenset: _Digester.unordered,
    range: lambda d, v: d.items((v.start, v.stop, v.step)),
    slice: lambda d, v: d.items((v.start, v.stop, v.step)),
    types.CodeType: _Digester.code,
    re.Pattern: lambda d, v: d.items((v.pattern, v.flags)),
    datetime.datetime: lambda d, v: [v.isoformat().encode(), d.at(".tzinfo", v.tzinfo)],
    datetime.time: lambda d, v: [v.isoformat().encode(), d.at(".tzinfo", v.tzinfo)],
    datetime.timezone: lambda d, v: [str(v.utcoffset(None)).encode()],
}

# Classes of the user's that derive from a builtin: the builtin's content, then the object's own attributes.
_BASES: dict[type, Callable[[_Digester, Any], list[bytes]]] = {
    dict: _Digester.mapping,
    tuple: _Digester.items,
    list: _Digester.items,
    deque: _WALKS[deque],
    set: _Digester.unordered,
    frozenset: _Digester.unordered,
    str: lambda d, v: [_text(str.__str__(v))],
    bytes: lambda d, v: [bytes(v)],
    int: lambda d, v: [_int(int(v))],
    float: lambda d, v: [_bits(float(v))],
}
