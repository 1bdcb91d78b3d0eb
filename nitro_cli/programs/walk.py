"""The walk through user code: from its roots to every function, constant and captured value that they can reach.

What is found goes into a queue and is looked at once. Functions and classes are entries under their own names, so that
an edit shows as one line wherever it is reached from; library code counts by name, but what library closures hold
counts by content. Anything that cannot be decided, or that fails, is a refusal.
"""

from __future__ import annotations

import collections
import contextlib
import enum
import functools
import inspect
import os
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nitro_cli.experiment.markers import Marker
from nitro_cli.experiment.objects import attribute, visible_state
from nitro_cli.experiment.traits import config_metadata
from nitro_cli.programs import atoms, frameworks, libraries
from nitro_cli.programs import parts as objects
from nitro_cli.programs.atoms import atom, name_of
from nitro_cli.programs.code import Scan, scan
from nitro_cli.programs.libraries import is_user_class, is_user_code, is_user_function, is_user_module
from nitro_cli.programs.outside import outside
from nitro_cli.programs.parts import registered_with
from nitro_cli.programs.recheck import Watch


def _special(names: str) -> frozenset[str]:
    return frozenset(f"__{name}__" for name in names.split())


# Attributes of a class that say nothing about what it does.
_CLASS_NOISE = frozenset(
    (
        *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__slots__", "_abc_impl"),
        *(
            "__annotations__",
            "__annotate__",
            "__annotate_func__",
            "__annotations_cache__",
            "__conditional_annotations__",
        ),
        *("__firstlineno__", "__static_attributes__", "__abstractmethods__", "__parameters__", "__orig_bases__"),
        *(
            "__classdictcell__",
            "__type_params__",
            "__nitro_view__",
            "__nitro_viewed__",
            "__match_args__",
        ),
        *("__non_callable_proto_members__", "__protocol_attrs__", "__callable_proto_members_only__"),
    )
)
# What dataclasses write from the fields, which count by themselves.
_GENERATED = _special("init repr eq lt le gt ge hash setattr delattr replace match_args getstate setstate new copy")
# Special methods of an experiment that run on the host only.
_HOST_METHODS = _special("init post_init new repr str init_subclass class_getitem")
# Marks an entry as one of this process alone.
_PROCESS = os.urandom(8).hex()
_KEPT: dict[int, tuple[int, Any]] = {}


class Walk:
    def __init__(self, owner: Any) -> None:
        self.entries: dict[str, str] = {}
        self.places: dict[str, types.CodeType] = {}
        self.refusals: dict[str, None] = {}
        self.codes: set[types.CodeType] = set()
        self.libraries: set[str] = set()
        self.watch = Watch()
        self._owner: type | None = owner if isinstance(owner, type) or owner is None else type(owner)
        self._experiment = None if isinstance(owner, type) else owner
        self._fields = _fields(self._owner, self._experiment)
        self._queue: collections.deque[tuple[str, Any, bool, str]] = collections.deque()
        self._because = ""
        self._seen: dict[int, tuple[str, Any]] = {}
        self._spaces: dict[int, str] = {}
        self._named: set[str] = set()
        self._methods: dict[str, list[tuple[str, Any]]] = {}
        self._library_names: dict[int, tuple[Any, str | None]] = {}
        self._constants: dict[Any, list[str]] = {}
        self._unused = False

    def run(self, roots: dict[str, Any]) -> None:
        for name, value in roots.items():
            self._guarded(name, self.visit, name, value, True)
        self._guarded("the experiment", self._special_methods)
        self._drain()
        for found in libraries.foreign(frozenset(self.libraries.union(libraries.ALWAYS))):
            self.visit(f"{found.holder}.{found.name}", found.function)
        self._drain()
        # Methods that nothing walked so far names: what they do counts, but they run only by means that no
        # program should use, so what they ask of the outside world is no reason to refuse.
        self._unused = True
        for methods in list(self._methods.values()):
            for path, value in methods:
                self.visit(path, value)
        self._drain()

    def _drain(self) -> None:
        while self._queue:
            path, value, root, self._because = self._queue.popleft()
            self._guarded(path, self._look_at, path, value, root)
        self._because = ""

    def _guarded(self, path: str, step: Any, *arguments: Any) -> None:
        """Whatever fails while it is looked at is refused, whoever's fault it is."""
        try:
            step(*arguments)
        except Exception as error:
            self.put(path, f"unreadable {_only_here(error)}")
            self.refuse(f"`{path}` could not be looked at: {type(error).__name__}: {error}")

    def refuse(self, line: str) -> None:
        if self._unused:
            return
        if not self._because:
            self.refusals[line] = None
        elif not any(known.startswith(self._because) for known in self.refusals):  # one is enough
            plain = "__" not in line  # what frameworks put into classes says nothing to anybody
            self.refusals[self._because + (f": {line}" if plain else ", and not all of that can be seen")] = None

    @contextlib.contextmanager
    def may_mean(self, node: str, function: types.FunctionType, what: str) -> Iterator[None]:
        """What is visited inside, and from there, is looked at since some code may mean it: what speaks against it is
        told of that code, which can name what it means instead."""
        before, code = self._because, function.__code__
        said = f"`{node}` in {Path(code.co_filename).name}:{code.co_firstlineno} {what}"
        self._because = before or said
        try:
            yield
        finally:
            self._because = before

    def put(self, path: str, text: str) -> str:
        """The name under which it is entered: another one where that is taken by another thing."""
        name, count = path, 1
        while self.entries.get(name, text) != text:
            count += 1
            name = f"{path} ({count})"
        self.entries[name] = text
        return name

    # Values

    def visit(self, path: str, value: Any, root: bool = False) -> None:
        text = atom(value)
        if text is None:
            self._queue.append((path, value, root, self._because))
            return
        self.put(path, text)
        if type(value) not in (int, float, str, bool, type(None), tuple, bytes, complex):
            self.watch.whole(value)

    def _look_at(self, path: str, value: Any, root: bool) -> None:
        if functions := objects.bound(value):
            self.put(f"{path} kind", type(value).__name__)
            for suffix, function in functions:
                self.visit(path + suffix, function)
            return
        if (phrase := outside(value)) is not None:
            self.refuse(f"`{path}` {phrase}")
        name = self.library_name(value)
        if name is not None:
            self.put(path, f"library {name}")
            self.library(value)
            return
        seen = self._seen.get(id(value))
        if seen is None:
            own = None if root else libraries.own_name(value)
            node = self._node(own or path)
            self._seen[id(value)] = seen = (node, value)
            self._enter(node, value)
        if seen[0] != path:
            self.put(path, f"{_kind(value)} {seen[0]}")

    def _node(self, path: str) -> str:
        """A name that no other object has."""
        name, count = path, 1
        while name in self.entries:
            count += 1
            name = f"{path} ({count})"
        return name

    def _enter(self, node: str, value: Any) -> None:
        if isinstance(value, types.FunctionType):
            self._function(node, value)
        elif isinstance(value, type):
            self._class(node, value)
        elif isinstance(value, types.ModuleType):
            self.put(node, f"module {value.__name__}")
            self.module(node, value)
        else:
            self._object(node, value)

    def _object(self, node: str, value: Any) -> None:
        found = objects.describe(value)
        if found is None:
            self._opaque(node, value)
            return
        self.watch.whole(value)
        self.put(node, found.text)
        for suffix, child in found.children:
            if suffix == " is a":
                self._type_of(node, child)
            else:
                self.visit(node + suffix, child)
        if frameworks.is_primitive(value):
            for suffix, child in frameworks.primitive_rules(value):
                self.visit(node + suffix, child)

    def _type_of(self, node: str, cls: type) -> None:
        """The class of an object is looked at, and needs no line: the object's own line names it."""
        if self.library_name(cls) is not None:
            self.library(cls)
        elif id(cls) not in self._seen:
            self._queue.append((libraries.own_name(cls) or f"{node} class", cls, False, self._because))
        elif self._seen[id(cls)][0] != name_of(cls):
            self.put(f"{node} class", f"class {self._seen[id(cls)][0]}")

    def _opaque(self, node: str, value: Any) -> None:
        """An object without visible state."""
        kind = name_of(type(value))
        if self._unused:
            self.put(node, f"{kind} in code that is not used")
            return
        self.put(node, f"{kind} {_only_here(value)}")
        self.refuse(f"`{node}` is a {kind}, whose content cannot be seen")

    # Functions

    def _function(self, node: str, function: types.FunctionType) -> None:
        self.watch.function(function)
        code = scan(function.__code__)
        user = is_user_function(function)
        if objects.is_single_dispatch(function):
            self._described(node, objects.single_dispatch(function))
            return
        folded = self._read(node, function, code) if user else []
        if user and function.__name__ != function.__code__.co_name:
            folded.append(f"called {function.__name__}")
        inner = function.__dict__.get("__wrapped__")
        if user:
            self.codes.update(code.codes)
            self.put(node, f"code {atoms.digest(' '.join([code.digest, *sorted(folded)]))}")
            self.places[node] = function.__code__
        else:
            self.library(function)
            module = function.__globals__.get("__name__")
            text = f"library code {module}.{function.__code__.co_qualname} {code.digest}"
            wraps_users = isinstance(inner, types.FunctionType) and is_user_function(inner)
            self.put(f"{node} wrapper" if wraps_users else node, text)
        if inner is not None:
            renamed = not user and isinstance(inner, types.FunctionType) and is_user_function(inner)
            self.visit(node if renamed else f"{node}.__wrapped__", inner)
        self._held(node, function, code, user)

    def _held(self, node: str, function: types.FunctionType, code: Scan, user: bool) -> None:
        """Defaults, attributes, and what is captured: as far as the code reads it, or all of it for a library's."""
        named = function.__code__.co_varnames[: function.__code__.co_argcount]
        defaults = function.__defaults__ or ()
        for name, value in zip(named[len(named) - len(defaults) :], defaults, strict=False):
            self.visit(f"{node}({name})", value)
        for name, value in sorted((function.__kwdefaults__ or {}).items()):
            self.visit(f"{node}({name})", value)
        for name, value in sorted(function.__dict__.items()):
            if name not in ("__wrapped__", "__isabstractmethod__", "__signature__"):
                self.visit(f"{node}.{name}", value)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # not yet filled: a function that refers to itself before it is bound
                continue
            if name == "__class__":
                self._enclosing_class(value)
            elif not user:
                self.visit(f"{node}.{name}", value)

    def _enclosing_class(self, cls: Any) -> None:
        """The class that ``super()`` in a method means; what an experiment inherits is looked up by name."""
        if isinstance(cls, type) and not (self._owner is not None and cls in self._owner.__mro__):
            self.visit(name_of(cls), cls)

    def _described(self, node: str, found: objects.Parts) -> None:
        self.put(node, found.text)
        for suffix, child in found.children:
            self.visit(node + suffix, child)

    # What code names

    def _read(self, node: str, function: types.FunctionType, code: Scan) -> list[str]:
        """Look at all that a function names."""
        from nitro_cli.programs.names import Names

        names = Names(self, node, function, code)
        names.look_up()
        if code.dynamic and not self._unused:
            with self.may_mean(node, function, "looks up a name that it computes, so it may mean any method"):
                self.everything_of_owner()
        self._mention(code)
        return names.folded

    def space(self, namespace: dict[str, Any]) -> str:
        """The name of a module by its namespace; a module that was loaded anew has another one."""
        found = self._spaces.get(id(namespace))
        if found is None:
            name, count = str(namespace.get("__name__", "?")), 1
            found = name
            while found in self._spaces.values():
                count += 1
                found = f"{name} ({count})"
            self._spaces[id(namespace)] = found
        return found

    def module(self, path: str, module: types.ModuleType) -> None:
        """A module that is used as a value: everything in it may be meant."""
        if not is_user_module(module):
            self.library(module)
            return
        self.watch.mapping(vars(module))
        name = self.space(vars(module))
        for each, value in sorted(vars(module).items()):
            if not (each.startswith("__") and each.endswith("__")) and not isinstance(value, types.ModuleType):
                self.visit(f"{name}.{each}", value)

    # What is reached by name only: the experiment, and methods

    def _mention(self, code: Scan) -> None:
        if self._unused:
            return
        if code.inherits and self._owner is not None:
            for name in sorted(code.attributes):
                self._on_owner(name, inherited=True)
        for name in sorted(code.attributes - self._named):
            self._named.add(name)
            self._on_owner(name, inherited=False)
            for path, value in self._methods.pop(name, ()):
                self.visit(path, value)

    def _special_methods(self) -> None:
        """What the interpreter calls on an experiment without naming it."""
        if self._owner is None:
            return
        for base in self._owner.__mro__:
            self.watch.cls(base)
        names = {name for base in self._owner.__mro__ if is_user_class(base) for name in vars(base)}
        for name in sorted(names - _HOST_METHODS - _CLASS_NOISE):
            value = next(vars(base)[name] for base in self._owner.__mro__ if name in vars(base))
            special = name.startswith("__") and name.endswith("__") and isinstance(value, types.FunctionType)
            if special and is_user_code(value.__code__.co_filename) and not value.__code__.co_filename.startswith("<"):
                self._on_owner(name, inherited=True)

    def everything_of_owner(self) -> None:
        """Some code computes the names that it looks up: any method may be meant."""
        for base in self._owner.__mro__ if self._owner is not None else ():
            if is_user_class(base):
                for name in sorted(vars(base)):
                    if name not in self._named and not name.startswith("__"):
                        self._named.add(name)
                        self._on_owner(name, inherited=True)
        for methods in list(self._methods.values()):
            for path, value in methods:
                self.visit(path, value)
        self._methods.clear()

    def _on_owner(self, name: str, inherited: bool) -> None:
        """What ``self.name`` means on the experiment class, where it is no field: a method or a class constant; and,
        for code that says ``super()``, what ``name`` means on every class behind the first."""
        owner = self._owner
        self._on_field(name)
        for base in owner.__mro__ if owner is not None else ():
            if name not in vars(base) or name in _CLASS_NOISE:
                continue
            value = vars(base)[name]
            described = isinstance(value, types.MemberDescriptorType)  # a slot, that is a field of a dataclass
            if is_user_class(base) and not described and name not in self._fields:
                self.visit(f"{base.__module__}.{base.__qualname__}.{name}", value)
            if not inherited:
                return

    def _on_field(self, name: str) -> None:
        """A field of the experiment whose value is baked into programs, where that is more than plain values; and a
        private attribute, which is no field."""
        private = attribute(self._experiment, "__pydantic_private__") or {}
        if name in private:
            self.watch.mapping(private)
            self.visit(f"{name_of(type(self._experiment))}.{name}", private[name])
        info = self._fields.get(name)
        if self._experiment is None or getattr(info, "marker", None) is not Marker.GRAPHCONST:
            return
        self._code_in(f"{name_of(type(self._experiment))}.{name}", getattr(self._experiment, name))

    def _code_in(self, path: str, value: Any) -> None:
        """Functions in a value, and the classes of objects in it: plain values in it are for ``Request.fields``."""
        if atom(value) is not None:
            return
        if type(value) in (list, tuple, dict):
            for key, part in value.items() if type(value) is dict else enumerate(value):
                self._code_in(f"{path}[{key!r}]", part)
            return
        state = visible_state(value) if is_user_class(type(value)) else None
        if state is None and not isinstance(value, enum.Enum):
            self.visit(path, value)
            return
        self._type_of(path, type(value))
        for name, part in sorted((state or {}).items()) if not isinstance(value, enum.Enum) else ():
            self._code_in(f"{path}.{name}", part)

    # Classes

    def _class(self, node: str, cls: type) -> None:
        self.watch.cls(cls)
        self.put(node, f"class of {', '.join(name_of(base) for base in cls.__bases__)}")
        for base in cls.__bases__:
            self._type_of(f"{node} base {base.__name__}", base)
        self._type_of(f"{node} metaclass", type(cls))
        for suffix, value in objects.class_facts(cls):
            self.visit(node + suffix, value)
        made_of_fields = "__dataclass_fields__" in vars(cls) or issubclass(cls, tuple)
        unwanted = _CLASS_NOISE | frameworks.noise(cls)
        for name, value in sorted(vars(cls).items()):
            if name in unwanted or name.startswith(("__dataclass", "__pydantic", "__nitro", "_abc")):
                continue
            if isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)) or _is_inherited(cls, name):
                continue
            if made_of_fields and name in _GENERATED and _is_generated(value):
                continue
            if not _of_enum(cls, name, value):
                self._member(f"{node}.{name}", cls, name, value)

    def _member(self, path: str, cls: type, name: str, value: Any) -> None:
        """A method that no code names, and no library knows, waits until some code does."""
        method = isinstance(value, (types.FunctionType, staticmethod, classmethod, property, functools.cached_property))
        special = name.startswith("__") and name.endswith("__")
        known = name in self._named or any(name in vars(base) for base in cls.__mro__ if not is_user_class(base))
        if method and not special and not known and not self._unused:
            self._methods.setdefault(name, []).append((path, value))
        else:
            self.visit(path, value)

    # Libraries

    def library_name(self, value: Any) -> str | None:
        found = self._library_names.get(id(value))
        if found is None:
            found = self._library_names[id(value)] = (value, libraries.library_name(value))
        return found[1]

    def constants(self, module: Any) -> list[str]:
        found = self._constants.get(module)
        if found is None:
            found = self._constants[module] = libraries.constants(module)
        return found

    def library(self, value: Any) -> None:
        """Library code counts by its distribution; what the user put into a class of it counts by content."""
        name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__
        if isinstance(value, types.FunctionType):  # one that wraps another goes by the other's name
            name = value.__globals__.get("__name__")
        if (package := libraries.top(name)) is not None:
            self.libraries.add(package)
        if isinstance(value, type) and id(value) not in self._seen:
            self._seen[id(value)] = (name_of(value), value)
            for base in value.__mro__:
                if base is not object:
                    self.watch.cls(base)
            for found in libraries.foreign_members(value):
                self.visit(f"{found.holder}.{found.name}", found.function)
            if strangers := [name_of(cls) for cls in registered_with(value) if is_user_class(cls)]:
                self.put(f"{name_of(value)} registered", ", ".join(sorted(strangers)))


def _fields(cls: Any, experiment: Any) -> Mapping[str, Any]:
    """The fields of an experiment's class. Only of an experiment itself it is sure that it is declared as one."""
    if experiment is not None:
        return config_metadata(cls)
    return getattr(cls, "model_fields", None) or getattr(cls, "__dataclass_fields__", {})


def _kind(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return "function"
    return "class" if isinstance(value, type) else "same as"


def _is_inherited(cls: type, name: str) -> bool:
    """Whether a class says again what it would inherit: the machinery of protocols writes such attributes late."""
    inherited = next((vars(base)[name] for base in cls.__mro__[1:] if name in vars(base)), None)
    return inherited is not None and vars(cls)[name] is inherited


def _is_generated(value: Any) -> bool:
    """Whether a dataclass wrote it. flax wraps what dataclasses write."""
    value = inspect.unwrap(value) if isinstance(value, types.FunctionType) else value
    return not isinstance(value, types.FunctionType) or value.__code__.co_filename.startswith("<")


def _of_enum(cls: type, name: str, value: Any) -> bool:
    """What the machinery of enums adds says nothing more than the members and their values."""
    return issubclass(cls, enum.Enum) and not isinstance(
        value, (types.FunctionType, property, classmethod, staticmethod)
    )


def _only_here(value: Any) -> str:
    """A text that no other object has, here or elsewhere. The object is kept, so that none comes to have it."""
    number, _ = _KEPT.setdefault(id(value), (len(_KEPT), value))
    return f"known only here as {_PROCESS}.{os.getpid()}.{number}"
