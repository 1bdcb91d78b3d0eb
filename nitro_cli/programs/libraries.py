"""Which code is the user's own and which comes with an installed library, and what a library consists of.

Library code counts by the version and the files of its distribution. What somebody put into a library at run time (a
function of the user's bound to a name of ``jax.numpy``, say) does not show there: ``foreign`` finds it.
"""

from __future__ import annotations

import functools
import operator
import os
import sys
import sysconfig
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

_NITRO = str(Path(__file__).parent.parent)
_HEAP_TYPE = 1 << 9
# What every program depends on, whether or not the user's code names it.
ALWAYS = ("jax", "jaxlib", "numpy")


def _roots() -> tuple[str, ...]:
    paths = sysconfig.get_paths()
    found = {paths[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")} | {_NITRO}
    return tuple(sorted(f"{root}{os.sep}" for root in found | {str(Path(root).resolve()) for root in found}))


_LIBRARY_ROOTS = _roots()
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))


@functools.lru_cache(maxsize=65536)
def is_user_code(filename: str) -> bool:
    """Whether a file is the user's own: neither the standard library, nor installed, nor nitro's."""
    if filename.startswith("<frozen"):
        return False
    return not filename.startswith(_LIBRARY_ROOTS) and not any(part in filename for part in _INSTALLED)


def is_user_function(function: types.FunctionType) -> bool:
    """Code without a file (made by ``exec`` or by a dataclass) belongs to whose module it was made in."""
    filename = function.__code__.co_filename
    if filename.startswith("<") and not filename.startswith("<frozen"):
        space = function.__globals__
        named_tuple = str(space.get("__name__")).startswith("namedtuple_")
        return not named_tuple and is_user_code(space.get("__file__") or filename)
    return is_user_code(filename)


def is_user_module(module: types.ModuleType) -> bool:
    filename = getattr(module, "__file__", None)
    if filename is None:  # built in, a namespace package, or typed in
        return module.__name__ == "__main__" or not (module.__name__ in sys.builtin_module_names or _spread(module))
    return is_user_code(filename)


def _spread(module: types.ModuleType) -> bool:
    """Whether a namespace package lies among the libraries; a module that was made by hand does not."""
    paths = list(getattr(module, "__path__", ()))
    if paths:
        return not any(is_user_code(path) for path in paths)
    return getattr(module, "__spec__", None) is not None and getattr(module.__spec__, "origin", None) in (
        "built-in",
        "frozen",
    )


def is_user_class(cls: type) -> bool:
    """Whether the user wrote the class, or a library made it for him: then it is not to be found by its name."""
    if not cls.__flags__ & _HEAP_TYPE:  # written in C
        return False
    module = sys.modules.get(cls.__module__)
    if module is None:
        return True
    return is_user_module(module) or not _found(cls.__module__, cls.__qualname__, cls)


def _found(module: Any, qualname: Any, value: Any) -> bool:
    """Whether ``module.qualname`` is this very object."""
    if not isinstance(module, str) or not isinstance(qualname, str):
        return False
    found: Any = sys.modules.get(module)
    for part in qualname.split("."):
        if isinstance(found, (types.ModuleType, type)):
            found = vars(found).get(part)
        else:
            return False
        if isinstance(found, (staticmethod, classmethod)):
            found = found.__func__
    return found is value


def own_name(value: Any) -> str | None:
    """``module.qualname`` of a function, a class or what stands for one, where that is found under that very name."""
    if isinstance(value, _NAMED):
        module, qualname = value.__module__, value.__qualname__
    elif is_user_class(type(value)):  # asking it could run the user's code
        return None
    else:
        said = getattr(value, "__dict__", {})
        module, qualname = said.get("__module__"), said.get("__qualname__")
    return f"{module}.{qualname}" if _found(module, qualname, value) else None


_NAMED = (types.FunctionType, type, types.BuiltinFunctionType)


def library_name(value: Any) -> str | None:
    """The own name of what a library defines, else None: for the user's, whatever it calls itself."""
    if isinstance(value, types.ModuleType):
        return None
    name = own_name(value)
    if name is None or not _is_library_module(value.__module__) or _wraps_user_code(value):
        return None
    return name


def _is_library_module(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not is_user_module(module)


def _wraps_user_code(value: Any) -> bool:
    for _ in range(20):
        if isinstance(value, types.FunctionType):
            if is_user_function(value):
                return True
        elif not isinstance(value, type) and is_user_class(type(value)):
            return True
        inner = getattr(value, "__dict__", {}).get("__wrapped__")
        if inner is None:
            return False
        value = inner
    return True


def top(module: Any) -> str | None:
    """The package that a module belongs to, where its content is to count: neither Python's nor nitro's own."""
    name = str(module).partition(".")[0]
    return None if name in sys.stdlib_module_names or name in ("nitro_cli", "builtins", "None", "") else name


def constants(module: Any) -> list[str]:
    """Numbers under names of capital letters in a module of a library other than Python's own."""
    if top(module) is None or module not in sys.modules:
        return []
    numbers = vars(sys.modules[module]).items()
    return [f"{module}.{n} is {v!r}" for n, v in sorted(numbers) if n.isupper() and type(v) in (int, float, bool)]


class Foreign(NamedTuple):
    """A function of the user's in a library, and where: ``holder`` is the module or class that it was put into."""

    holder: str
    name: str
    function: Any


_FUNCTION = types.FunctionType
_library_files: set[str] = set()
_looked_at: dict[str, tuple[Any, tuple[Any, ...], list[Foreign]]] = {}


def foreign(packages: frozenset[str]) -> list[Foreign]:
    """Functions of the user's in modules and classes of these packages. What holds the same objects as at the last
    look is not looked at again."""
    found: list[Foreign] = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in packages and isinstance(module, types.ModuleType):
            found += _foreign_in(name, module)
    return sorted(found, key=operator.itemgetter(0, 1))


def _foreign_in(name: str, module: types.ModuleType) -> list[Foreign]:
    space = vars(module)
    seen = _looked_at.get(name)
    if seen is None or seen[0] is not module or not same_objects(seen[1], space.values()):
        if is_user_module(module):
            return []
        values = tuple(space.values())
        # Hundreds of modules hold thousands of functions, nearly all of a few files: each file is judged once.
        functions = [value for value in values if type(value) is _FUNCTION]
        files = {function.__code__.co_filename for function in functions} - _library_files
        others = {file for file in files if file.startswith("<") or is_user_code(file)}
        _library_files.update(files - others)
        pairs = list(space.items()) if others else ()
        found = [Foreign(name, each, value) for each, value in pairs if _is_users(value)]
        _looked_at[name] = seen = (module, values, found)
    return seen[2]


def same_objects(kept: tuple[Any, ...], values: Any) -> bool:
    return len(kept) == len(values) and all(map(operator.is_, kept, values))


def _is_users(value: Any) -> bool:
    return type(value) is types.FunctionType and is_user_function(value)


def foreign_members(cls: type) -> Iterator[Foreign]:
    """What the user put into a class of a library, or into one that it inherits from."""
    for base in cls.__mro__:
        if is_user_class(base):
            continue
        for name, value in list(vars(base).items()):
            inner = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
            inner = inner.fget if isinstance(inner, property) else inner
            if _is_users(inner):
                yield Foreign(f"{base.__module__}.{base.__qualname__}", name, value)
