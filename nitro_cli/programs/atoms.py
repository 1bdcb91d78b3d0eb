"""Values without parts as texts: each decides the value and its exact type, in this process and in any other."""

from __future__ import annotations

import array
import datetime
import decimal
import enum
import hashlib
import re
import sys
import types
from typing import Any, NamedTuple

import numpy as np

SMALL = 60
_PLAIN = (bool, int, float, complex, type(None), type(...), type(NotImplemented))
# Types written in C whose content is all in what they say of themselves.
_BY_REPR = (
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta, datetime.timezone),
    *(range, array.array),
)
_BUILT_IN = (
    types.BuiltinFunctionType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    types.MethodWrapperType,
    types.GetSetDescriptorType,
)


class Parts(NamedTuple):
    """An object that has parts: ``text`` for the object itself; ``children`` as pairs of a suffix to its name and an
    object. The suffix " is a" marks its class."""

    text: str
    children: list[tuple[str, Any]]


def atom(value: Any) -> str | None:
    """A short text that decides the value and its type, or None where the value has parts to look at."""
    kind = type(value)
    if kind in _PLAIN:
        return f"{kind.__name__} {value:x}" if kind is int and abs(value) >> 64 else f"{kind.__name__} {value!r}"
    if kind in (str, bytes, bytearray):
        return f"{kind.__name__} {short(repr(value))}"
    if kind in (tuple, frozenset):
        return _pure(value)
    if isinstance(value, np.generic):
        return _scalar(value)
    if kind is np.ndarray:
        return None if held_by_reference(value.dtype) else f"array {array_text(value)}"
    if isinstance(value, np.dtype):
        return f"dtype {dtype_text(value)}"
    if kind is slice:
        parts = [atom(part) for part in (value.start, value.stop, value.step)]
        return None if None in parts else f"slice {', '.join(map(str, parts))}"
    if kind is decimal.Decimal:  # what is computed with it depends on the context
        context = decimal.getcontext()
        return f"{name_of(kind)} {short(repr(value))} to {context.prec} digits, {context.rounding}"
    if kind in _BY_REPR:
        return f"{name_of(kind)} {short(repr(value))}"
    if kind is re.Pattern:
        return f"re.Pattern {value.pattern!r} {value.flags}"
    return _from_jax(value)


def short(text: str) -> str:
    """The text, or its digest where it is long."""
    return text if len(text) <= SMALL else digest(text)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _pure(value: Any) -> str | None:
    """A tuple or a frozen set of atoms. Which objects in it are shared says nothing: none of them can change."""
    texts = []
    for part in value:
        text = atom(part)
        if text is None:
            return None
        texts.append(text)
    if type(value) is frozenset and not ordered(value):
        texts.sort()
    joined = ", ".join(texts)
    return f"{type(value).__name__} ({joined if len(joined) <= 2 * SMALL else digest(joined)})"


def ordered(value: Any) -> bool:
    """Whether a set goes by the same order in every process that fills it in the same way: numbers do, and what hashes
    by text or by address does not."""
    return len(value) < 2 or all(type(each) in (int, bool, float) for each in value)


def _scalar(value: np.generic) -> str:
    if isinstance(value, np.void):
        return f"scalar {array_text(np.asarray(value))}"
    return f"{dtype_text(value.dtype)} {value.item()!r}"


def held_by_reference(dtype: np.dtype) -> bool:
    """Whether the bytes of such an array are addresses of what it holds."""
    return dtype.hasobject or dtype.kind == "T"


def dtype_text(dtype: np.dtype) -> str:
    if dtype.names:
        fields: Any = dtype.fields
        return f"{{{', '.join(f'{n}: {dtype_text(fields[n][0])} at {fields[n][1]}' for n in dtype.names)}}}"
    if dtype.subdtype:
        return f"{dtype_text(dtype.subdtype[0])}{dtype.subdtype[1]}"
    return dtype.name if dtype.isnative else f"{dtype.name} {dtype.str}"


def array_text(value: np.ndarray) -> str:
    shape = ",".join(map(str, value.shape))
    if value.ndim == 0 and not value.dtype.names:
        return f"{dtype_text(value.dtype)}[] {value.item()!r}"
    return f"{dtype_text(value.dtype)}[{shape}] {_bytes(value)}{_order(value)}"


def _order(value: np.ndarray) -> str:
    """How an array lies in memory, which ``ravel("K")`` and the like show, where it is not row by row."""
    return "" if value.flags.c_contiguous else f" strides {value.strides}"


def _bytes(value: np.ndarray) -> str:
    if value.dtype.names:  # field by field: what lies between fields is arbitrary
        return digest(" ".join(_bytes(value[name]) for name in value.dtype.names))
    hasher = hashlib.sha256()
    hasher.update(value.data if value.flags.c_contiguous and value.size and _simple(value) else value.tobytes())
    return hasher.hexdigest()


def _simple(value: np.ndarray) -> bool:
    return value.dtype.kind in "biufc"


def _from_jax(value: Any) -> str | None:
    jax: Any = sys.modules.get("jax")
    if jax is None or not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer):
        return None
    if not value.is_fully_addressable:
        return None
    placed = _placement(jax, value)
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        data = array_text(np.asarray(jax.random.key_data(value)))
        return f"key {jax.random.key_impl(value)} {data}{placed}"
    weak = " weak" if getattr(value, "weak_type", False) else ""
    return f"jax.Array{weak} {array_text(np.asarray(value))}{placed}"


def _placement(jax: Any, value: Any) -> str:
    """Where an array lies, unless it is just on the first device of this process."""
    sharding = value.sharding
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        (device,) = sharding.device_set
        return "" if device.id == 0 else f" on {device_text(device)}"
    return f" on {sharding_text(jax, sharding) or type(sharding).__name__}"


def device_text(device: Any) -> str:
    return f"{device.platform}:{device.id}"


def sharding_text(jax: Any, sharding: Any) -> str | None:
    """Mesh, axes and memory of a sharding; None for a kind that is not known here."""
    if isinstance(sharding, jax.sharding.SingleDeviceSharding):
        return f"sharding {' '.join(map(device_text, sharding.device_set))} {sharding.memory_kind}"
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"sharding {spec_text(sharding.spec)} over {mesh_text(sharding.mesh)} {sharding.memory_kind}"
    return None


def spec_text(spec: Any) -> str:
    extra = [
        f"{name} {sorted(getattr(spec, name, ()))}" for name in ("unreduced", "reduced") if getattr(spec, name, ())
    ]
    return f"P{tuple(spec)!r}{' '.join(extra)}"


def mesh_text(mesh: Any) -> str:
    devices = getattr(mesh, "devices", None)
    listed = " ".join(map(device_text, devices.flat)) if isinstance(devices, np.ndarray) else "no devices"
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    return f"mesh {', '.join(f'{name} {size} {kind.name}' for name, size, kind in axes)} of {short(listed)}"


def built_in(value: Any) -> tuple[str, Any] | None:
    """A function or method written in C: its name, and the object that it is bound to (None for a module's)."""
    if isinstance(value, np.ufunc):
        return f"built-in {value.__name__}", None
    if not isinstance(value, _BUILT_IN):
        return None
    holder = getattr(value, "__objclass__", None)
    bound = getattr(value, "__self__", None)
    if holder is None and bound is not None and not isinstance(bound, types.ModuleType):
        holder = bound if isinstance(bound, type) else type(bound)
    module = name_of(holder) if holder is not None else getattr(value, "__module__", "")
    return f"built-in {module}.{value.__name__}", None if isinstance(bound, (types.ModuleType, type)) else bound


def enum_text(value: enum.Enum) -> str:
    return f"{name_of(type(value))}.{value.name}"


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
