"""What a program's code consists of: the functions it runs, the constants and captured values they read.

``fingerprint(forward=..., model=...)`` walks from its roots through user code and returns named entries, one per
function, constant or captured value, so that two fingerprints can be compared line by line and a difference can be put
into words. It reads what is loaded, not what lies on disk, and leaves out comments, docstrings, line numbers and paths.
Library code counts by name here (versions stand in the environment part of the key); the data that library closures
hold counts by content.

This is the seam for program identity: nothing else in nitro looks at code.
"""

from __future__ import annotations

import dis
import enum
import functools
import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

_LIBRARY_ROOTS = tuple(
    str(Path(root).resolve())
    for root in {*sysconfig.get_paths().values(), str(Path(__file__).parent.parent)}
    if Path(root).name not in ("bin", "Scripts", "data")
)
# Attributes of a class that say nothing about what it does.
_CLASS_NOISE = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "__hash__", "_abc_impl"),
        *("__annotations__", "__annotate__", "__annotate_func__", "__annotations_cache__", "__match_args__"),
        *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "__parameters__", "__orig_bases__"),
    )
)
_SMALL = 60


@dataclass(frozen=True)
class Fingerprint:
    """``entries`` maps a name to a digest or a short value; ``places`` maps names of functions to ``file.py:12``.

    ``unstable`` names what could not be decided by content: such a program is never taken for another one.
    """

    entries: dict[str, str]
    places: dict[str, str] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    codes: frozenset[types.CodeType] = frozenset()
    again: Any = None

    def digest(self) -> str:
        text = "\n".join(f"{name} = {value}" for name, value in sorted(self.entries.items()))
        return hashlib.sha256(text.encode()).hexdigest()


def fingerprint(owner: type | None = None, /, **roots: Any) -> Fingerprint:
    """Walk from ``roots``. ``owner`` is the experiment class: methods and class constants that a hook names on
    ``self`` are looked up there."""
    walk = _Walk()
    for name, value in roots.items():
        walk.visit(name, value, owner)
    again = functools.partial(fingerprint, owner, **roots)
    return Fingerprint(walk.entries, walk.places, tuple(walk.unstable), frozenset(walk.codes), again)


def is_user_code(filename: str) -> bool:
    """Whether a code object's file is the user's own: neither the standard library, nor installed, nor nitro's."""
    if filename.startswith("<frozen"):
        return False
    return not filename.startswith(_LIBRARY_ROOTS)


class _Walk:
    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.places: dict[str, str] = {}
        self.unstable: list[str] = []
        self.codes: list[types.CodeType] = []
        self._seen: dict[int, tuple[str, Any]] = {}

    def visit(self, path: str, value: Any, owner: type | None = None) -> None:
        short = atom(value)
        if short is not None:
            self.entries[path] = short
            return
        seen = self._seen.get(id(value))
        if seen is not None:
            if seen[0] != path:
                self.entries[path] = f"same as {seen[0]}"
            return
        self._seen[id(value)] = (path, value)
        if isinstance(value, enum.Enum):
            self._parts(path, f"{_name(type(value))}.{value.name}", {"value": value.value, "class": type(value)})
        elif isinstance(value, types.FunctionType):
            self._function(path, value, owner)
        elif isinstance(value, types.MethodType):
            self.visit(f"{path}.__func__", value.__func__, type(value.__self__))
            self.visit(f"{path}.__self__", value.__self__)
        elif isinstance(value, (staticmethod, classmethod)):
            self.visit(path + "()", value.__func__, owner)
        elif isinstance(value, property):
            self.visit(path + "()", value.fget, owner)
        elif isinstance(value, functools.partial):
            self._parts(path, "partial", {"func": value.func, "args": value.args, "keywords": value.keywords})
        elif isinstance(value, types.ModuleType):
            self.entries[path] = f"module {value.__name__}"
        elif isinstance(value, type):
            self._class(path, value)
        elif isinstance(value, (tuple, list, set, frozenset, dict)):
            self._container(path, value)
        elif callable(getattr(value, "__wrapped__", None)):
            self.entries[path] = f"wrapped by {_name(type(value))}"
            self.visit(f"{path}.__wrapped__", value.__wrapped__, owner)
            self._attached(path, value)  # the rules of a custom derivative, for example
        elif isinstance(value, (types.BuiltinFunctionType, np.ufunc)):
            self.entries[path] = f"built-in {getattr(value, '__module__', '')}.{value.__name__}"
        else:
            self._object(path, value)

    def _parts(self, path: str, kind: str, parts: Mapping[str, Any]) -> None:
        self.entries[path] = kind
        for name, part in parts.items():
            self.visit(f"{path}.{name}", part)

    def _container(self, path: str, value: Any) -> None:
        kind = _name(type(value))
        if isinstance(value, dict):
            self.entries[path] = f"{kind} of {len(value)}"
            for index, (key, part) in enumerate(value.items()):
                self.visit(f"{path}[{atom(key) or index}]", part)
                if atom(key) is None:
                    self.visit(f"{path}.key[{index}]", key)
            return
        items = list(value)
        if isinstance(value, (set, frozenset)):
            items.sort(key=lambda part: atom(part) or "")
        self.entries[path] = f"{kind} of {len(items)}"
        for index, part in enumerate(items):
            self.visit(f"{path}[{index}]", part)

    def _function(self, path: str, function: types.FunctionType, owner: type | None) -> None:
        code = function.__code__
        captured = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        defaults = {"defaults": function.__defaults__, "kwdefaults": function.__kwdefaults__}
        if is_user_code(code.co_filename):
            self.entries[path] = f"code {code_digest(code)}"
            self.codes.extend(_nested(code))
            self.places[path] = f"{Path(code.co_filename).name}:{code.co_firstlineno}"
            self._globals(function, code, owner)
        else:
            self.entries[path] = f"library {function.__module__}.{function.__qualname__}"
        for name, part in defaults.items():
            if part:
                self.visit(f"{path}.{name}", part)
        for name, cell in captured.items():
            try:
                content = cell.cell_contents
            except ValueError:  # not yet filled: a function that refers to itself before it is bound
                continue
            if name != "__class__":
                self.visit(f"{path}.{name}", content)
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None:
            self.visit(f"{path}.__wrapped__", wrapped, owner)
        if is_user_code(code.co_filename):
            self._attached(path, function)

    def _attached(self, path: str, value: Any) -> None:
        for name, part in sorted(getattr(value, "__dict__", {}).items()):
            if not name.startswith("_"):
                self.visit(f"{path}.{name}", part)

    def _globals(self, function: types.FunctionType, code: types.CodeType, owner: type | None) -> None:
        namespace = function.__globals__
        names, attributes = _names(code)
        for name in sorted(names & namespace.keys()):
            value = namespace[name]
            self.visit(f"{namespace.get('__name__', '?')}.{name}", value)
            self._module(value, attributes, set())
        for module in _imported(code, namespace):
            self._module(module, attributes, set())
        if owner is not None:
            for attribute in sorted(attributes):
                self._on_owner(attribute, owner, inherited="super" in names)

    def _module(self, module: Any, attributes: set[str], entered: set[str]) -> None:
        """What code that names ``attributes`` may mean by ``module.name`` and by ``package.module.name``."""
        if not isinstance(module, types.ModuleType) or module.__name__ in entered:
            return
        if not is_user_code(getattr(module, "__file__", None) or "<frozen"):
            return
        entered.add(module.__name__)
        for attribute in sorted(attributes & vars(module).keys()):
            self.visit(f"{module.__name__}.{attribute}", vars(module)[attribute])
            self._module(vars(module)[attribute], attributes, entered)

    def _on_owner(self, name: str, owner: type, inherited: bool) -> None:
        """What ``self.name`` means on the experiment class, where it is no field: a method or a class constant; and,
        for code that says ``super()``, what ``name`` means on every class behind the first."""
        for base in owner.__mro__:
            if name not in vars(base):
                continue
            value = vars(base)[name]
            described = isinstance(value, types.MemberDescriptorType)  # a slot, that is a field of a dataclass
            if is_user_class(base) and not described and name not in _fields(owner):
                self.visit(f"{base.__module__}.{base.__qualname__}.{name}", value, owner)
            if not inherited:
                return

    def _class(self, path: str, cls: type) -> None:
        self.entries[path] = f"class {_name(cls)}"
        if not is_user_class(cls):
            return
        for base in cls.__bases__:
            self.visit(f"{path} < {base.__name__}", base)
        if is_user_class(type(cls)):
            self.visit(f"{path} metaclass", type(cls))
        members = vars(cls).items()
        if issubclass(cls, enum.Enum):  # what the machinery of enums adds says nothing more than the members' values
            self.visit(f"{path} members", {name: member.value for name, member in cls.__members__.items()})
            members = [(name, value) for name, value in members if isinstance(value, types.FunctionType)]
        for name, value in members:
            generated = isinstance(value, types.FunctionType) and value.__code__.co_filename.startswith("<")
            if name in _CLASS_NOISE or name.startswith(("__dataclass", "__pydantic", "_abc")):
                continue
            if generated and name.startswith("__"):
                continue
            if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
                continue
            self.visit(f"{path}.{name}", value, cls)

    def _object(self, path: str, value: Any) -> None:
        cls = type(value)
        state = dict(_state(value))
        if not state and not hasattr(value, "__dict__") and not is_user_class(cls):
            self._opaque(path, value)
            return
        self.entries[path] = f"instance of {_name(cls)}"
        if is_user_class(cls):
            self.visit(_name(cls), cls)
        for name, part in state.items():
            self.visit(f"{path}.{name}", part)

    def _opaque(self, path: str, value: Any) -> None:
        """An object without visible state. One that hashes and compares by content is known by an equal one."""
        cls = type(value)
        if cls.__eq__ is not object.__eq__ and cls.__hash__ is not None:
            try:
                self.entries[path] = f"{_name(cls)} #{_EQUAL.setdefault(value, len(_EQUAL))}"
                return
            except TypeError:
                pass
        _KEPT[id(value)] = value
        self.entries[path] = f"{_name(cls)} at {id(value)}"
        self.unstable.append(path)


# Objects that only equality can tell apart, numbered; and objects known by identity, kept so that no other object can
# come to have theirs.
_EQUAL: dict[Any, int] = {}
_KEPT: dict[int, Any] = {}


def atom(value: Any) -> str | None:
    """A short text that decides the value and its type, or None where the value has parts to look at."""
    if value is None or type(value) in (bool, int, float, complex):
        return f"{type(value).__name__} {value!r}"
    if type(value) in (str, bytes):
        text = repr(value)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return f"{type(value).__name__} {text}" if len(text) <= _SMALL else f"{type(value).__name__} {digest}"
    if isinstance(value, enum.Enum) and not is_user_class(type(value)):
        return f"{_name(type(value))}.{value.name}"
    if type(value) is np.ndarray or isinstance(value, np.generic):
        return _array(np.asarray(value))
    if isinstance(value, np.dtype):
        return f"dtype {value}"
    jax: Any = sys.modules.get("jax")
    if jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        return _jax_array(jax, value)
    return None


def _jax_array(jax: Any, value: Any) -> str:
    if jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key):
        return f"key {_array(np.asarray(jax.random.key_data(value)))}"
    return _array(np.asarray(value))


def _array(value: np.ndarray) -> str:
    if value.dtype == object:
        return f"object array {value.tolist()!r}"
    if value.size == 1 and value.ndim == 0:
        return f"{value.dtype} {value.item()!r}"
    content = hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()
    return f"{value.dtype}[{','.join(map(str, value.shape))}] {content}"


def code_digest(code: types.CodeType) -> str:
    """Digest of what a code object does: bytecode, constants, names; no docstring, file or line."""
    parts: list[str] = [
        code.co_code.hex(),
        code.co_exceptiontable.hex(),
        f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags}",
        repr((code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars)),
    ]
    parts.extend(_constant(constant) for constant in _constants(code))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _constants(code: types.CodeType) -> tuple[Any, ...]:
    """``co_consts`` with the docstring blanked: the first constant of a named function, where it is a text."""
    constants = code.co_consts
    if not constants or not isinstance(constants[0], str) or code.co_name.startswith("<"):
        return constants
    if sys.version_info >= (3, 13) and not code.co_flags & 0x4000000:
        return constants
    return (None, *constants[1:])


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return code_digest(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return f"{type(value).__name__} {value!r}"


def _names(code: types.CodeType) -> tuple[set[str], set[str]]:
    """Names that the code, and code nested in it, looks up as globals and as attributes."""
    names: set[str] = set()
    attributes: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"):
            names.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            nested_names, nested_attributes = _names(constant)
            names |= nested_names
            attributes |= nested_attributes
    return names, attributes


def _imported(code: types.CodeType, namespace: Mapping[str, Any]) -> Iterator[types.ModuleType]:
    """The user's modules that the code, or code nested in it, imports when it runs: it will run when it is traced, so
    they are loaded now."""
    constants: list[Any] = [0, None]
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constants = [constants[1], instruction.argval]
        elif instruction.opname == "IMPORT_NAME":
            level = constants[0] if isinstance(constants[0], int) else 0
            yield from _modules("." * level + instruction.argval, constants[1], namespace.get("__package__"))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _imported(constant, namespace)


def _modules(name: str, names: Any, package: str | None) -> Iterator[types.ModuleType]:
    """``import a.b`` means ``a`` and ``a.b``; ``from a import b`` means ``a`` and, where it is a module, ``a.b``."""
    try:
        full = importlib.util.resolve_name(name, package)
    except ImportError:
        return
    wanted = [full, *(f"{full}.{part}" for part in names or ())]
    wanted += [full.rsplit(".", i)[0] for i in range(1, full.count(".") + 1)]
    for each in dict.fromkeys(wanted):
        try:
            spec = importlib.util.find_spec(each)
            if spec is not None and is_user_code(spec.origin or "<frozen"):
                yield importlib.import_module(each)
        except Exception:  # it fails when it is traced as well, and is reported there
            continue


def is_user_class(cls: type) -> bool:
    module = sys.modules.get(cls.__module__)
    filename = getattr(module, "__file__", None)
    if filename is None:
        return cls.__module__ == "__main__" or (module is None and cls.__module__ != "builtins")
    return is_user_code(filename)


def _fields(cls: type) -> Any:
    return getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", ())


def _state(value: Any) -> Iterator[tuple[str, Any]]:
    yield from sorted(getattr(value, "__dict__", {}).items())
    for cls in type(value).__mro__:
        slots = cls.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
