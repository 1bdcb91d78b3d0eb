"""What a code object does and what it names, read from its bytecode: once for each code object of the process.

The digest goes by what instructions mean: constants and names by content, not by their place in a table. So comments,
docstrings, line numbers, file names and constants that the compiler folded away do not count, nor does what the
interpreter writes into code that it has run often.
"""

from __future__ import annotations

import dis
import hashlib
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from nitro_cli.programs.order import Order

# ``a.b.c`` in the code: the name that is looked up, and the attributes read from it.
Chain = tuple[str, ...]

_OP = dis.opmap
_CACHE, _EXTENDED = _OP["CACHE"], _OP["EXTENDED_ARG"]
_HAS_CONST, _HAS_NAME = frozenset(dis.hasconst), frozenset(dis.hasname)
# How far the argument of an instruction is shifted above the flags that it carries besides the index of a name.
_SHIFT = {_OP["LOAD_GLOBAL"]: 1}
if "LOAD_METHOD" not in _OP or _OP["LOAD_METHOD"] > 255:  # since Python 3.12
    _SHIFT |= {_OP["LOAD_ATTR"]: 1, _OP["LOAD_SUPER_ATTR"]: 2}
_BY_NAME = {name: op for name, op in _OP.items() if op < 256}


def _ops(*names: str) -> frozenset[int]:
    return frozenset(_BY_NAME[name] for name in names if name in _BY_NAME)


_GLOBAL = _ops("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
_ATTRIBUTE = _ops("LOAD_ATTR", "LOAD_METHOD")
_METHOD = _ops("LOAD_METHOD")
_SUPER = _ops("LOAD_SUPER_ATTR")
_FREE = _ops("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")
_FAST = frozenset(op for name, op in _BY_NAME.items() if name.startswith("LOAD_FAST"))
_PAIRS = frozenset(op for name, op in _BY_NAME.items() if op in _FAST and name.count("LOAD_FAST") == 2)
_ASSIGN = _ops("STORE_GLOBAL", "DELETE_GLOBAL")
_ASSIGN_ATTRIBUTE = _ops("STORE_ATTR", "DELETE_ATTR")
_STORE = _ops("STORE_FAST", "STORE_DEREF", "STORE_NAME", "STORE_GLOBAL")
_STORE_NAME = _OP["STORE_NAME"]
_IMPORT, _IMPORT_FROM, _POP, _NULL = _OP["IMPORT_NAME"], _OP["IMPORT_FROM"], _OP["POP_TOP"], _OP["PUSH_NULL"]
# What a class statement stores that says how it is written.
_WRITING = ("__doc__", "__firstlineno__", "__static_attributes__")
_CALL = _ops("PRECALL", "CALL", "KW_NAMES")
# How far a call of ``getattr`` has been read: its name, the object, the name it looks up, a default.
_NOTHING, _FUNCTION, _OBJECT, _NAME, _DEFAULT = range(5)
_LOOK_UP = ("getattr", "hasattr", "setattr", "delattr")
# Flags that change what a call does: *args, **kwargs, generators and coroutines.
_FLAGS = 0x04 | 0x08 | 0x20 | 0x80 | 0x100 | 0x200


class Import(NamedTuple):
    """``import module`` or ``from module import names``; ``bound`` maps local names to what of it they mean: the name
    of an attribute, "." for the module itself, "" for its first package."""

    module: str
    names: tuple[str, ...]
    bound: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Scan:
    """What a code object, and the code nested in it, does and names."""

    code: types.CodeType
    digest: str
    chains: tuple[Chain, ...]
    captured: tuple[Chain, ...]
    imported: tuple[Chain, ...]
    imports: tuple[Import, ...]
    attributes: frozenset[str]
    assigned: tuple[str, ...]
    dynamic: bool
    iterated: frozenset[Chain]
    unordered: bool
    codes: tuple[types.CodeType, ...]

    @property
    def inherits(self) -> bool:
        return ("super",) in self.chains


_SCANS: dict[int, Scan] = {}


def scan(code: types.CodeType) -> Scan:
    """The scan of ``code``, which is kept: it costs about a microsecond for each instruction."""
    found = _SCANS.get(id(code))
    if found is None:
        found = _SCANS[id(code)] = _Scanner(code).result()
    return found


def instructions(code: types.CodeType) -> Iterator[tuple[int, int]]:
    """Operations and arguments, without caches; ``co_code`` never shows specialised instructions."""
    raw, extended = code.co_code, 0
    for index in range(0, len(raw), 2):
        op = raw[index]
        if op == _EXTENDED:
            extended = (extended | raw[index + 1]) << 8
        elif op != _CACHE:
            yield op, extended | raw[index + 1]
            extended = 0


class _Scanner:
    """One pass over the instructions. ``open`` is the chain that the value on top of the stack came from."""

    def __init__(self, code: types.CodeType) -> None:
        self.code = code
        self.parts: list[str] = []
        self.chains: dict[Chain, None] = {}
        self.captured: dict[Chain, None] = {}
        self.imports: list[list[Any]] = []
        self.attributes: set[str] = set()
        self.assigned: dict[str, None] = {}
        self.dynamic = False
        self.order = Order(code)
        self.open: list[str] | None = None
        self.into = self.chains
        self.look_up = _NOTHING
        self.candidate: tuple[list[str] | None, dict[Chain, None], str] = (None, self.chains, "")
        self.nested = [scan(each) for each in code.co_consts if isinstance(each, types.CodeType)]

    def result(self) -> Scan:
        constants: list[Any] = [None, None]
        for op, arg in instructions(self.code):
            self._text(op, arg)
            if op in _HAS_CONST:
                constants = [constants[1], self.code.co_consts[arg]]
            elif "SMALL_INT" in dis.opname[op]:
                constants = [constants[1], arg]
            self._import(op, arg, constants)
            self.order.feed(op, arg, tuple(self.open) if self.open else None)
            self._chain(op, arg)
        self._close()
        if self.look_up:
            self._look_up_ends(sure=False)
        own = [each for inner in self.nested for each in inner.captured if each[0] in self.code.co_freevars]
        return Scan(
            self.code,
            self._digest(),
            _merged(self.chains, *(inner.chains for inner in self.nested)),
            _merged(self.captured, own),
            _local_chains(self.code, {name for each in self.imports for name, _ in each[2]}),
            (*(Import(each[0], each[1], tuple(each[2])) for each in self.imports), *_all(self.nested, "imports")),
            frozenset(self.attributes).union(*(inner.attributes for inner in self.nested)),
            _merged(self.assigned, *(inner.assigned for inner in self.nested)),
            self.dynamic or any(inner.dynamic for inner in self.nested),
            frozenset(self.order.iterated).union(*(inner.iterated for inner in self.nested)),
            self.order.unordered or any(inner.unordered for inner in self.nested),
            (self.code, *_all(self.nested, "codes")),
        )

    def _text(self, op: int, arg: int) -> None:
        if op in _HAS_CONST:
            self.parts.append(f"{op} {constant(self.code.co_consts[arg])}")
            return
        if op in _HAS_NAME:
            name = self.code.co_names[arg >> _SHIFT.get(op, 0)]
            if op == _STORE_NAME and name in _WRITING:
                self.parts[-1] = ""
            self.parts.append(f"{op} {name} {arg & ((1 << _SHIFT.get(op, 0)) - 1)}")
            return
        self.parts.append(f"{op} {arg}")

    def _digest(self) -> str:
        code = self.code
        counts = f"{code.co_argcount} {code.co_posonlyargcount} {code.co_kwonlyargcount} {code.co_flags & _FLAGS}"
        names = repr((code.co_varnames, code.co_freevars, code.co_cellvars))
        text = "\n".join([counts, names, code.co_exceptiontable.hex(), *self.parts])
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def _chain(self, op: int, arg: int) -> None:
        if op in _ATTRIBUTE or op in _SUPER or op in _ASSIGN_ATTRIBUTE or op == _IMPORT_FROM:
            name = self.code.co_names[arg >> _SHIFT.get(op, 0)]
            self.attributes.add(name)
            if self.open is not None and op in _ATTRIBUTE:
                self.open.append(name)
                return
            if self.open is not None and op in _ASSIGN_ATTRIBUTE:
                self.assigned[".".join([*self.open, name])] = None
            if self.look_up in (_OBJECT, _DEFAULT) and op in _ATTRIBUTE:
                return
        if self.look_up:
            self._looked_up(op, arg)
        self._close()
        if op in _GLOBAL:
            self.open, self.into = [self.code.co_names[arg >> _SHIFT.get(op, 0)]], self.chains
            if self.open[0] in _LOOK_UP:
                self.look_up = _FUNCTION
        elif op in _FREE and (name := _variable(self.code, arg)) in self.code.co_freevars:
            self.open, self.into = [name], self.captured
        elif op in _ASSIGN:
            self.assigned[self.code.co_names[arg]] = None

    def _looked_up(self, op: int, arg: int) -> None:
        """``getattr(a.b, "c")`` is read as ``a.b.c``; a name that is computed makes the code dynamic."""
        loads = op in _GLOBAL or op in _FREE or (op in _FAST and op not in _PAIRS)
        if self.look_up == _FUNCTION and loads:
            self.look_up = _OBJECT
        elif self.look_up == _OBJECT and op in _HAS_CONST and isinstance(self.code.co_consts[arg], str):
            self.candidate = (self.open, self.into, self.code.co_consts[arg])
            self.open, self.look_up = None, _NAME
        elif self.look_up == _NAME and (loads or op in _HAS_CONST):
            self.look_up = _DEFAULT
        elif op == _NULL and self.look_up == _FUNCTION:
            return
        else:
            self._look_up_ends(sure=op in _CALL and self.look_up in (_NAME, _DEFAULT))

    def _look_up_ends(self, sure: bool) -> None:
        chain, into, name = self.candidate
        self.dynamic = self.dynamic or not sure
        if sure:
            self.attributes.add(name)
        if chain is not None:
            into[(*chain, name) if sure else tuple(chain)] = None
        self.candidate = (None, self.chains, "")
        self.look_up = _NOTHING

    def _close(self) -> None:
        if self.open is not None:
            self.into[tuple(self.open)] = None
            self.open = None

    def _import(self, op: int, arg: int, constants: list[Any]) -> None:
        if op == _IMPORT:
            level, names = constants
            dots = "." * level if isinstance(level, int) else ""
            self.imports.append([dots + self.code.co_names[arg], tuple(names or ()), [], ""])
        elif op == _IMPORT_FROM and self.imports:
            names = self.imports[-1][1]
            self.imports[-1][3] = self.code.co_names[arg] if names else "."
        elif op in _STORE and self.imports and self.imports[-1][3] is not None:
            name = self.code.co_names[arg] if op in _HAS_NAME else _variable(self.code, arg)
            self.imports[-1][2].append((name, self.imports[-1][3]))
            self.imports[-1][3] = None


def _merged(*chains: Any) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(each for some in chains for each in some))


def _all(scans: list[Scan], name: str) -> Iterator[Any]:
    for each in scans:
        yield from getattr(each, name)


def _variable(code: Any, arg: int) -> str:
    return code._varname_from_oparg(arg)


def _local_chains(code: types.CodeType, names: set[str]) -> tuple[Chain, ...]:
    """Chains that begin with a local variable among ``names``: one that an import statement binds."""
    if not names:
        inner = [each for each in code.co_consts if isinstance(each, types.CodeType)]
        return _merged(*(scan(each).imported for each in inner))
    found: dict[Chain, None] = {}
    chain: list[str] | None = None
    for op, arg in instructions(code):
        if chain is not None and op in _ATTRIBUTE:
            chain.append(code.co_names[arg >> _SHIFT.get(op, 0)])
            continue
        if chain is not None:
            found[tuple(chain)] = None
        chain = None
        for name in _loaded(code, op, arg):
            if chain is not None:
                found[tuple(chain)] = None
            chain = [name] if name in names else None
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            free = names.intersection(each.co_freevars)
            found.update(dict.fromkeys((*_local_chains(each, free), *scan(each).imported)))
    return tuple(found)


def _loaded(code: types.CodeType, op: int, arg: int) -> list[str]:
    if op in _PAIRS:
        return [_variable(code, arg >> 4), _variable(code, arg & 15)]
    if op in _FAST:  # of a variable that nested functions share, this only hands the cell to one
        name = _variable(code, arg)
        return [] if name in code.co_cellvars or name in code.co_freevars else [name]
    if op in _FREE:
        return [_variable(code, arg)]
    return [code.co_names[arg]] if op in _GLOBAL and op not in _SHIFT else []


def constant(value: Any) -> str:
    """A constant of a code object as a text that decides it and its type."""
    if isinstance(value, types.CodeType):
        return scan(value).digest
    if isinstance(value, tuple):
        return f"({', '.join(map(constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(constant, value)))}}}"
    if type(value) is int:
        return f"int {value:x}"  # repr() refuses very large ones
    return f"{type(value).__name__} {value!r}"
