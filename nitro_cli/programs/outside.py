"""What code must not name if a later process is to reuse its program: whatever answers otherwise the next time.

The clock, random numbers, files, the environment and the like are known by the object that a name means, so
``from time import time as now`` is found too. A library function that is merely called counts for what it is called.
"""

from __future__ import annotations

import builtins
import functools
import pathlib
import sys
import types
from typing import Any

CLOCK, RANDOM, FILES = "reads the clock", "draws random numbers", "reads files"
ENVIRONMENT, SYSTEM, NETWORK = "reads the environment", "asks the operating system", "uses the network"
TEXT, IMPORTS, CALLERS = "runs text as code", "imports by a computed name", "looks at its callers"
INTERPRETER, IDENTITY = "asks the interpreter", "depends on where objects lie in memory or on the hash seed"
UNORDERED = "goes through a set, whose order is another one in every process: sorted() makes it one"
WRITTEN, SUBCLASSES = "reads how code is written", "asks which subclasses were defined"


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _each(text: str, phrase: str) -> dict[str, str]:
    return dict.fromkeys(text.split(), phrase)


# Modules of which everything is outside, but for the names listed.
_WHOLE: dict[str, tuple[str, frozenset[str]]] = {
    "time": (CLOCK, frozenset(("sleep", "struct_time", "strftime", "strptime"))),
    "random": (RANDOM, frozenset()),
    "numpy.random": (RANDOM, frozenset()),
    "secrets": (RANDOM, frozenset()),
    "uuid": (RANDOM, frozenset(("UUID", "NAMESPACE_DNS", "NAMESPACE_URL", "uuid3", "uuid5"))),
    "socket": (NETWORK, frozenset()),
    "urllib.request": (NETWORK, frozenset()),
    "requests": (NETWORK, frozenset()),
    "subprocess": (SYSTEM, frozenset()),
    "os": (SYSTEM, _words("path sep altsep linesep extsep pathsep curdir pardir devnull fspath PathLike")),
    "tempfile": (FILES, frozenset()),
    "shutil": (FILES, frozenset()),
    "glob": (FILES, frozenset(("escape",))),
    "fileinput": (FILES, frozenset()),
    "linecache": (FILES, frozenset()),
    "gc": (INTERPRETER, frozenset()),
    "importlib.resources": (FILES, frozenset()),
    "importlib.metadata": (FILES, frozenset()),
}
# Single names of other modules.
_NAMES: dict[str, dict[str, str]] = {
    "os": {
        "environ": ENVIRONMENT,
        "environb": ENVIRONMENT,
        "getenv": ENVIRONMENT,
        "getenvb": ENVIRONMENT,
        "urandom": RANDOM,
    },
    "os.path": _each(
        "exists lexists isfile isdir islink ismount getsize getmtime getatime getctime samefile sameopenfile samestat "
        "abspath realpath expanduser expandvars",
        FILES,
    ),
    "sys": {
        **_each("argv orig_argv stdin path modules flags exc_info getrefcount", INTERPRETER),
        **dict.fromkeys(("_getframe", "_getframemodulename", "_current_frames"), CALLERS),
    },
    "inspect": {
        **dict.fromkeys(("stack", "currentframe", "trace", "getouterframes", "getinnerframes"), CALLERS),
        **dict.fromkeys(
            ("getsource", "getsourcelines", "getsourcefile", "getfile", "findsource", "getcomments"), FILES
        ),
        **_each("getdoc get_annotations", WRITTEN),
    },
    "traceback": dict.fromkeys(("extract_stack", "format_stack", "print_stack", "walk_stack"), CALLERS),
    "importlib": {"import_module": IMPORTS, "reload": IMPORTS, "__import__": IMPORTS},
    "builtins": {
        **dict.fromkeys(("eval", "exec", "compile"), TEXT),
        "open": FILES,
        "input": INTERPRETER,
        "__import__": IMPORTS,
        "id": IDENTITY,
        "hash": IDENTITY,
    },
    "io": dict.fromkeys(("open", "open_code", "FileIO"), FILES),
    "codecs": {"open": FILES},
    "numpy": {
        **_each("load loadtxt genfromtxt fromfile fromregex memmap DataSource", FILES),
        **_each("geterr geterrcall getbufsize get_printoptions", INTERPRETER),
    },
    "decimal": _each("getcontext setcontext", INTERPRETER),
    "typing": _each("get_type_hints", WRITTEN),
    "jax.numpy": dict.fromkeys(("load", "fromfile"), FILES),
    "threading": dict.fromkeys(("get_ident", "get_native_id", "current_thread", "active_count"), INTERPRETER),
    "weakref": dict.fromkeys(("ref", "proxy", "WeakValueDictionary", "WeakKeyDictionary", "WeakSet"), INTERPRETER),
    "platform": dict.fromkeys(("node", "uname", "platform", "release", "version"), SYSTEM),
    "locale": dict.fromkeys(("getlocale", "setlocale", "localeconv"), SYSTEM),
}
# Class methods, which are made anew each time they are looked up.
_METHODS = {
    **dict.fromkeys((("datetime", name) for name in ("now", "utcnow", "today")), CLOCK),
    **dict.fromkeys((("date", name) for name in ("today",)), CLOCK),
}
# Attributes that mean as much whatever has them.
_ATTRIBUTES: dict[str, str] = {
    **_each("read_text read_bytes exists is_file is_dir is_symlink is_mount iterdir rglob scandir samefile", FILES),
    **_each("co_firstlineno co_filename co_lines co_positions co_linetable co_code tb_lineno f_lineno", WRITTEN),
    **_each("__doc__ __annotations__ annotation return_annotation", WRITTEN),
    "__subclasses__": SUBCLASSES,
}
# And those that mean it in code that names a path: elsewhere they are words like others.
_OF_PATHS: dict[str, str] = _each("stat lstat glob walk open resolve absolute expanduser cwd home owner group", FILES)
# Functions of libraries that are called so: ``pandas.read_csv``, ``gzip.open``, ``PIL.Image.open``.
_LIBRARY_PREFIX, _LIBRARY_OPEN = "read_", "open"
# Special methods for which the interpreter's own hash and identity are the point.
_MAY_HASH = ("__hash__", "__eq__", "__ne__", "__repr__", "__reduce__")


def outside(value: Any, function: str = "") -> str | None:
    """What naming ``value`` in a function of this name means, for people: None for what has its content in itself."""
    found = _known().get(id(value))
    if found is None or found[0] is not value:
        return _by_name(value)
    phrase, name = found[1], found[2]
    if phrase is IDENTITY and function in _MAY_HASH:
        return None
    return f"{phrase} ({name})"


def outside_attribute(holder: Any, name: str) -> str | None:
    """The same for ``holder.name`` where the value is not known or is made anew: a submodule, a method of a class."""
    if isinstance(holder, types.ModuleType):
        whole = _WHOLE.get(holder.__name__)
        if whole is not None and name not in whole[1] and not name.startswith("__"):
            phrase = _NAMES.get(holder.__name__, {}).get(name, whole[0])
            return f"{phrase} ({holder.__name__}.{name})"
    if isinstance(holder, type):
        for base in holder.__mro__:
            phrase = _METHODS.get((base.__name__, name)) if base.__module__ == "datetime" else None
            if phrase is not None:
                return f"{phrase} (datetime.{base.__name__}.{name})"
    return None


def outside_module(module: types.ModuleType) -> str | None:
    """The same for a module that is used as a value."""
    whole = _WHOLE.get(module.__name__)
    return f"{whole[0]} ({module.__name__})" if whole is not None else None


def outside_names(attributes: frozenset[str], paths: bool) -> list[str]:
    """The same for attributes of objects that are not known before the code runs, which may be ``paths``."""
    table = _ATTRIBUTES | _OF_PATHS if paths else _ATTRIBUTES
    return [f"{table[name]} (.{name})" for name in sorted(attributes & table.keys())]


def is_path(value: Any) -> bool:
    """Whether a value is a path, a class of paths, or the module that has them."""
    kind = value if isinstance(value, type) else type(value)
    return issubclass(kind, pathlib.PurePath) or value is pathlib


def _by_name(value: Any) -> str | None:
    if type(value).__name__ == "ufunc" and value.__name__.endswith(" (vectorized)"):
        return f"calls a function that is hidden in a ufunc ({value.__name__})"
    if not isinstance(value, (types.FunctionType, types.MethodType)):
        return None
    name, module = value.__name__, value.__module__ or ""
    if not (name.startswith(_LIBRARY_PREFIX) or name == _LIBRARY_OPEN):
        return None
    from nitro_cli.programs.libraries import is_user_function

    inner = value.__func__ if isinstance(value, types.MethodType) else value
    if not isinstance(inner, types.FunctionType) or is_user_function(inner):
        return None
    return f"{FILES} ({module.partition('.')[0]}.{name})"


def _known() -> dict[int, tuple[Any, str, str]]:
    if len(sys.modules) != _last[0]:
        _last[:] = [len(sys.modules), _table(tuple(name for name in (*_WHOLE, *_NAMES) if name in sys.modules))]
    return _last[1]


# How many modules were loaded at the last look, and the table of those then.
_last: list[Any] = [0, {}]


@functools.lru_cache(maxsize=4)
def _table(loaded: tuple[str, ...]) -> dict[int, tuple[Any, str, str]]:
    """Objects that are outside, by identity, with what they mean. Kept alive, so that no other gets their identity."""
    found: dict[int, tuple[Any, str, str]] = {}
    for module in loaded:
        phrase, allowed = _WHOLE.get(module, ("", frozenset()))
        if phrase:
            for name, value in vars(sys.modules[module]).items():
                if name not in allowed and not name.startswith("_") and _belongs(value, module):
                    found[id(value)] = (value, phrase, f"{module}.{name}")
    for module in loaded:  # the single names after, since they say more
        for name, phrase in _NAMES.get(module, {}).items():
            value = vars(sys.modules[module]).get(name)
            if value is not None:
                found[id(value)] = (value, phrase, f"{module}.{name}" if module != "builtins" else name)
    found.pop(id(builtins), None)
    return found


def _belongs(value: Any, module: str) -> bool:
    """Whether a module defines what it holds, rather than having imported it for itself."""
    if isinstance(value, types.ModuleType) or value is None or isinstance(value, (bool, int, float, str, tuple)):
        return False
    made_in = getattr(value, "__module__", None)
    if made_in in (None, module):
        return True
    own = {"os": ("posix", "nt", "os"), "numpy.random": ("numpy.random",), "socket": ("_socket",)}
    return str(made_in).startswith(own.get(module, (module,)))
