"""What one function's code names, looked up where the interpreter would find it.

Names of libraries, and of the user's functions that are bound under their own name, need no entries for being named:
they count for the function that names them (``folded``). So an edit that calls one helper more shows as one changed
function and one new one, and ``jnp.cos = jnp.sin`` still shows.
"""

from __future__ import annotations

import contextlib
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nitro_cli.programs import libraries
from nitro_cli.programs.atoms import atom, built_in, name_of, ordered
from nitro_cli.programs.chains import MISSING, imported, start, step
from nitro_cli.programs.code import Scan
from nitro_cli.programs.libraries import is_user_class, is_user_function, is_user_module
from nitro_cli.programs.outside import UNORDERED, is_path, outside, outside_attribute, outside_module, outside_names

if TYPE_CHECKING:
    from nitro_cli.programs.walk import Walk

# Functions that find attributes by names that are computed.
_SEARCH = frozenset(
    ("operator.attrgetter", "operator.methodcaller", "inspect.getmembers", "inspect.getattr_static", "inspect.getmro")
)
# Values among the built-in names; all others there are functions and classes.
_BUILT_IN = frozenset(("None", "True", "False", "NotImplemented", "Ellipsis", "__debug__", "__name__", "__doc__"))


class Names:
    def __init__(self, walk: Walk, node: str, function: types.FunctionType, code: Scan) -> None:
        self.folded: list[str] = []
        self._walk = walk
        self._node = node
        self._function = function
        self._code = code
        self._paths = False

    def look_up(self) -> None:
        namespace = self._function.__globals__
        space = self._walk.space(namespace)
        for chain in self._code.chains:
            value, is_built_in = start(namespace, chain[0], self._walk.watch)
            if is_built_in:
                self._built_in(chain, value)
            elif value is not MISSING:
                self._chain(f"{space}.{chain[0]}", value, chain[1:], chain in self._code.iterated)
        self._captured()
        self._imported(namespace.get("__package__"))
        for phrase in outside_names(self._code.attributes, self._paths):
            self._refuse(phrase)
        if self._code.unordered:
            self._refuse(UNORDERED)
        for name in self._code.assigned:
            self._refuse(f"assigns to {name}, which is global")
        if "__dict__" in self._code.attributes:
            self._any_method("__dict__")

    def _captured(self) -> None:
        cells = dict(zip(self._function.__code__.co_freevars, self._function.__closure__ or (), strict=True))
        for chain in self._code.captured:
            if chain[0] == "__class__" or chain[0] not in cells:
                continue
            try:
                value = cells[chain[0]].cell_contents
            except ValueError:  # not yet filled: a function that refers to itself before it is bound
                continue
            self._chain(f"{self._node}.{chain[0]}", value, chain[1:], chain in self._code.iterated)

    def _imported(self, package: Any) -> None:
        bound: dict[str, tuple[str, Any]] = {}
        for each in self._code.imports:
            for local, value in imported(each, package):
                if value is MISSING:
                    self.folded.append(f"{local} cannot be imported")
                else:
                    bound[local] = (f"{each.module.lstrip('.')}.{dict(each.bound).get(local, local)}", value)
        for chain in self._code.imported:
            if chain[0] in bound:
                self._chain(*bound[chain[0]], chain[1:], chain in self._code.iterated)

    def _built_in(self, chain: tuple[str, ...], value: Any) -> None:
        name = chain[0]
        if self._outside(value):
            return
        if getattr(value, "__module__", None) == "builtins" and getattr(value, "__name__", None) == name:
            if name == "globals":
                self._namespace()
            elif name in ("vars", "dir"):
                self._any_method(f"{name}()")
        elif name not in _BUILT_IN:  # somebody bound the name to something of his own
            self._chain(f"builtins.{name}", value, chain[1:])

    def _namespace(self) -> None:
        """Code that says ``globals()`` may mean everything in its module."""
        namespace = self._function.__globals__
        module = sys.modules.get(namespace.get("__name__", ""))
        if module is not None and vars(module) is namespace:
            with self._may_mean(f"takes a name from globals(), so it may mean anything in {module.__name__}"):
                self._walk.module(self._node, module)
        else:
            self._refuse("takes names from globals()")

    def _chain(self, label: str, value: Any, attributes: tuple[str, ...], iterated: bool = False) -> None:
        """``label`` and what is read from it, as far as that is sure; ``iterated`` where the code goes through it."""
        holder = None
        self._paths = self._paths or is_path(value)
        if self._outside(value):
            return
        for name in attributes:
            phrase = outside_attribute(value, name)
            if phrase is not None:
                self._refuse(phrase)
                return
            found = step(value, name, self._walk.watch)
            if found is MISSING:
                self._stop(label, value, holder, name)
                return
            label = f"{self._label(value, label)}.{name}"
            value, holder = found, value
            if self._outside(value):
                return
        if iterated and isinstance(value, (set, frozenset)) and not ordered(value):
            self._refuse(UNORDERED)
        self._end(label, value, holder)

    def _label(self, value: Any, label: str) -> str:
        """A module goes by its own name, whatever the code that imports it calls it."""
        return self._walk.space(vars(value)) if isinstance(value, types.ModuleType) else label

    def _stop(self, label: str, value: Any, holder: Any, name: str) -> None:
        """``value`` is what is read from, and what ``name`` gives is not sure."""
        if not isinstance(value, types.ModuleType):
            self._end(label, value, holder)
        elif "__getattr__" in vars(value) and is_user_module(value):
            self._walk.visit(f"{self._label(value, label)}.__getattr__", vars(value)["__getattr__"])
        else:
            self.folded.append(f"{label}.{name} is not there")

    def _end(self, label: str, value: Any, holder: Any) -> None:
        if isinstance(value, types.ModuleType):
            self._module(label, value)
            return
        name = self._walk.library_name(value)
        if name is not None:
            self._walk.library(value)
            if name in _SEARCH:
                self._any_method(name)
            self._refer(label, name, f"library {name}")
            self.folded.extend(self._constants(value))
        elif _is_of_library(holder):
            self._of_library(label, value, holder)
        elif isinstance(value, (types.FunctionType, type)) and (own := libraries.own_name(value)) is not None:
            self._refer(label, own, f"{'class' if isinstance(value, type) else 'function'} {own}")
            self._walk.visit(own, value)
        else:
            self._walk.visit(label, value)

    def _refer(self, label: str, name: str, text: str) -> None:
        if label.rpartition(".")[2] == name.rpartition(".")[2]:
            self.folded.append(f"{label} is {name}")
        else:
            self._walk.put(label, text)

    def _module(self, label: str, module: types.ModuleType) -> None:
        """A module that is used as a value: everything in it may be meant, or what the code names as attributes."""
        phrase = outside_module(module)
        if phrase is not None:
            self._refuse(phrase)
        if is_user_module(module):
            with self._may_mean(f"uses the module {module.__name__} as a value, so it may mean anything in it"):
                self._walk.visit(self._walk.space(vars(module)), module)
            return
        self._walk.library(module)
        self.folded.append(f"{label} is module {module.__name__}")
        for name in sorted(self._code.attributes & vars(module).keys()):
            phrase = outside_attribute(module, name)
            if phrase is not None:
                self._refuse(phrase)
            else:
                self._outside(vars(module)[name])

    def _of_library(self, label: str, value: Any, holder: Any) -> None:
        """What a library holds without a name of its own: a number, a table, or what somebody put there."""
        self._walk.library(holder)
        if isinstance(value, types.FunctionType) and is_user_function(value):
            self._walk.visit(label, value)
        elif (text := atom(value)) is not None:
            self.folded.append(f"{label} is {text}")
        elif isinstance(value, (list, dict, set)) or is_user_class(type(value)):
            self._walk.visit(label, value)
        else:
            c_name = built_in(value)
            said = c_name[0] if c_name else getattr(value, "__name__", None) or getattr(value, "name", "")
            self.folded.append(f"{label} is {name_of(type(value))} {said if isinstance(said, str) else ''}")

    def _constants(self, value: Any) -> list[str]:
        """Numbers that the module of a library function calls constants, in case somebody changed one."""
        return self._walk.constants(getattr(value, "__module__", None))

    def _any_method(self, how: str) -> None:
        with self._may_mean(f"uses {how}, so it may mean any method"):
            self._walk.everything_of_owner()

    def _may_mean(self, what: str) -> contextlib.AbstractContextManager[None]:
        return self._walk.may_mean(self._node, self._function, what)

    def _outside(self, value: Any) -> bool:
        phrase = outside(value, self._function.__name__)
        if phrase is not None:
            self._refuse(phrase)
        return phrase is not None

    def _refuse(self, phrase: str) -> None:
        code = self._function.__code__
        self._walk.refuse(f"`{self._node}` in {Path(code.co_filename).name}:{code.co_firstlineno} {phrase}")


def _is_of_library(holder: Any) -> bool:
    if isinstance(holder, types.ModuleType):
        return not is_user_module(holder)
    return isinstance(holder, type) and not is_user_class(holder)
