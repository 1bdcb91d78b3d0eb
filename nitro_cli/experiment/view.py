"""What traced code gets as ``self``: the experiment without what the trace must not see.

A view is an instance of a generated subclass, so methods, ``isinstance`` and ``super()`` work as ever. Each field is a
property over what the view holds: GraphConst values, Device values (arrays or tracers), and a sentinel for every Host
field. The Host value itself is not in the view at all, so no trace can walk a data set by accident.
"""

from __future__ import annotations

import abc
import sys
import types
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NoReturn, TypeVar

from pydantic import BaseModel

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.markers import Marker
from nitro_cli.experiment.traits import config_metadata

E = TypeVar("E")

_TRACE: ContextVar[tuple[str, set[str] | None] | None] = ContextVar("nitro_trace", default=None)


class HostFieldError(ExperimentError):
    """Traced code used a Host field."""

    def __init__(self, name: str, operation: str) -> None:
        active = _TRACE.get()
        where = f"'{active[0]}'" if active else "traced code"
        fixes = (
            f"mark it GraphConst (`{name}: GraphConst[...]`): baked into the program, which recompiles for each value",
            f"or mark it Device (`{name}: Device[...]`): an input of the program, free to sweep and schedule",
            "or read it in host code: build_data, build_model, derive, finalize_metrics",
        )
        if _is_knob(name):
            fixes = (
                f"'{name}' is a knob of nitro, which passes it to the programs where they need it",
                "for a number of your own, declare a field: Device (an input, free to sweep) or GraphConst (baked in)",
                "or read it in host code: build_data, build_model, derive, finalize_metrics",
            )
        super().__init__(
            f"{where} uses the Host field '{name}' ({operation}); a compiled program cannot see Host fields",
            *fixes,
            field=name,
            hook=active[0] if active else None,
            operation=operation,
        )


def _is_knob(name: str) -> bool:
    from nitro_cli.experiment.base import KNOBS

    return name in KNOBS


@contextmanager
def tracing(hook: str, reads: set[str] | None = None) -> Iterator[None]:
    """While active, reading a view's Host field raises, and ``reads`` collects the GraphConst fields that are read."""
    token = _TRACE.set((hook, reads))
    try:
        yield
    finally:
        _TRACE.reset(token)


def in_trace() -> bool:
    """True inside ``tracing`` or while jax traces a function."""
    if _TRACE.get() is not None:
        return True
    core = sys.modules.get("jax._src.core")  # jax has no public test for this
    clean = getattr(core, "trace_state_clean", None)
    return clean is not None and not clean()


class StrippedHost:
    """Stands for a Host field in a view. Looking at it (``repr``) is fine; every operation raises HostFieldError."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        object.__setattr__(self, "_name", name)

    def __repr__(self) -> str:
        return f"<Host field '{object.__getattribute__(self, '_name')}', not available in traced code>"

    def __getattr__(self, attribute: str) -> NoReturn:
        raise HostFieldError(self._name, f".{attribute}")

    def __setattr__(self, attribute: str, value: Any) -> NoReturn:
        raise HostFieldError(self._name, f".{attribute} = ...")


_OPERATIONS = """
    add sub mul matmul truediv floordiv mod divmod pow lshift rshift and xor or
    radd rsub rmul rmatmul rtruediv rfloordiv rmod rdivmod rpow rlshift rrshift rand rxor ror
    iadd isub imul imatmul itruediv ifloordiv imod ipow ilshift irshift iand ixor ior
    neg pos abs invert round trunc floor ceil int float complex index bool bytes str format fspath hash
    lt le gt ge eq ne len iter next reversed contains getitem setitem delitem call enter exit await delattr
    array jax_array array_ufunc array_function copy deepcopy reduce_ex
"""


def _refusal(operation: str) -> Any:
    def refuse(self: StrippedHost, *args: Any, **kwargs: Any) -> NoReturn:
        raise HostFieldError(self._name, operation)

    refuse.__name__ = operation
    return refuse


for _operation in _OPERATIONS.split():
    setattr(StrippedHost, f"__{_operation}__", _refusal(f"__{_operation}__"))


def compile_view(experiment: E, device: Mapping[str, Any] | None = None) -> E:
    """The experiment as traced code sees it: an instance of a subclass of its class, without validation.

    ``device`` gives the values of Device fields (arrays or tracers); a Device field it does not name keeps its host
    value. Raises ExperimentError for a name in ``device`` that is no Device field.
    """
    cls = getattr(type(experiment), "__nitro_viewed__", type(experiment))
    given = dict(device or {})
    infos = config_metadata(cls)
    if wrong := [name for name in given if name not in infos or infos[name].marker is not Marker.DEVICE]:
        raise ExperimentError(f"{wrong[0]!r} is not a Device field of {cls.__name__}")
    view = object.__new__(_view_class(cls))
    for slot, value in _pydantic_state(experiment):
        object.__setattr__(view, slot, value)
    held = _held(view)
    for name, info in infos.items():
        if info.marker is Marker.HOST:
            held[name] = StrippedHost(name)
        else:
            held[name] = given[name] if name in given else _in_order(_raw(experiment, name))
    return view


def _held(view: Any) -> dict[str, Any]:
    """What a view holds, without counting it as read: its class has a ``__dict__`` of its own."""
    slot = _slot_of_dict(type(view))
    assert slot is not None
    return slot.__get__(view)


def _slot_of_dict(cls: type) -> Any:
    found = (vars(base).get("__dict__") for base in cls.__mro__)
    return next((slot for slot in found if isinstance(slot, types.GetSetDescriptorType)), None)


def _fill(view: Any, values: Mapping[str, Any]) -> None:
    held = _held(view)
    held.clear()
    held.update(values)


def _in_order(value: Any) -> Any:
    """A set as one that is gone through in the same order in every process: texts hash differently in each."""
    if type(value) not in _ORDERED or all(type(each) in (int, bool, float) for each in value):
        return value
    return _ORDERED[type(value)](value)


def _sorted(self: Any) -> Iterator[Any]:
    from nitro_cli.experiment.content import content_digest

    return iter(sorted(set.union(set(), self), key=lambda each: (type(each).__name__, content_digest(each))))


_ORDERED: dict[type, type] = {kind: type(kind.__name__, (kind,), {"__iter__": _sorted}) for kind in (set, frozenset)}


def _raw(experiment: Any, name: str) -> Any:
    """The value without counting it as a read where the experiment is itself a view."""
    if hasattr(type(experiment), "__nitro_viewed__"):
        return _held(experiment)[name]
    return getattr(experiment, name)


def _pydantic_state(experiment: Any) -> Iterator[tuple[str, Any]]:
    if hasattr(type(experiment), "__pydantic_fields__"):
        yield "__pydantic_fields_set__", set()
        yield "__pydantic_extra__", None
        yield "__pydantic_private__", experiment.__pydantic_private__


def _view_class(cls: type) -> Any:
    if "__nitro_view__" not in cls.__dict__:
        body: dict[str, Any] = {name: _field(name, info.marker) for name, info in config_metadata(cls).items()}
        body |= {"__nitro_viewed__": cls, "__module__": cls.__module__, "__qualname__": cls.__qualname__}
        body |= {
            "__setattr__": _frozen,
            "__delattr__": _frozen,
            "__dict__": property(_whole(_held), _fill),  # vars(), pickles, copies
            "__repr__": _repr,
            "__str__": _repr,
            "__doc__": cls.__doc__,
        }
        if getattr(cls, "__iter__", None) is BaseModel.__iter__:  # dict(self); an __iter__ of the user's own stays
            body["__iter__"] = _iter
        body |= {name: _whole(getattr(cls, name)) for name in _WHOLE if hasattr(cls, name) and name not in body}
        body |= {"__eq__": object.__eq__, "__hash__": object.__hash__}
        # Past pydantic's metaclass: nothing is validated and no field is declared anew.
        make = abc.ABCMeta.__new__ if isinstance(cls, abc.ABCMeta) else type.__new__
        # A class of slots alone has no place for what a view holds: a class between the two gives it one.
        base = cls if _slot_of_dict(cls) else make(type(cls), cls.__name__, (cls,), {})
        view = make(type(cls), cls.__name__, (base,), body)
        type.__setattr__(cls, "__nitro_view__", view)
    return cls.__dict__["__nitro_view__"]


def _field(name: str, marker: Marker) -> property:
    def read(self: Any) -> Any:
        if marker is Marker.HOST and in_trace():
            raise HostFieldError(name, "read")
        active = _TRACE.get()
        if marker is Marker.GRAPHCONST and active is not None and active[1] is not None:
            active[1].add(name)
        return _held(self)[name]

    return property(read)


def _frozen(self: Any, name: str, *value: Any) -> NoReturn:
    raise ExperimentError(
        f"'{name}' cannot be set on {type(self).__name__} in traced code: an experiment is frozen",
        "return what a hook computes; state that changes goes through `st`",
        field=name,
    )


def _all_read(self: Any) -> None:
    """What shows or hands out the whole view reads each of its GraphConst fields."""
    active = _TRACE.get()
    if active is not None and active[1] is not None:
        infos = config_metadata(type(self))
        active[1].update(name for name, info in infos.items() if info.marker is Marker.GRAPHCONST)


# Methods of pydantic that hand out all fields.
_WHOLE = ("model_dump", "model_dump_json", "model_copy", "dict", "json", "copy")


def _whole(method: Any) -> Any:
    def reads(self: Any, *args: Any, **kwargs: Any) -> Any:
        _all_read(self)
        return method(self, *args, **kwargs)

    return reads


def _iter(self: Any) -> Iterator[tuple[str, Any]]:
    _all_read(self)
    held = _held(self)
    return iter([(name, held[name]) for name in config_metadata(type(self))])


def _repr(self: Any) -> str:
    _all_read(self)
    held = _held(self)
    values = ", ".join(f"{name}={held[name]!r}" for name in config_metadata(type(self)))
    return f"<view of {type(self).__name__}({values})>"
