"""What code goes through in order, among what may be a set: the order of a set may be another one in the next process.

One pass over the instructions of a code object follows what is on top of the stack: a set that the code makes, or a
chain of names, of which the walk knows what it means. Such a value may be asked what it holds. What hands it to a loop,
to a function other than those that give the same in any order, to its caller, or into another object goes through it.
Variables of the code object are followed in the order of the instructions, other variables are not.
"""

from __future__ import annotations

import dis
import types
from typing import Any

_NAMES = {name: op for name, op in dis.opmap.items() if op < 256}


def _ops(*prefixes: str) -> frozenset[int]:
    return frozenset(op for name, op in _NAMES.items() if name.startswith(prefixes))


_LOADS = _ops("LOAD_", "PUSH_NULL", "COPY", "MAKE_FUNCTION", "IMPORT_NAME") - _ops("LOAD_ATTR", "LOAD_METHOD")
_FAST, _CELL = _ops("LOAD_FAST"), _ops("LOAD_DEREF")
_STORES_FAST, _STORES_CELL = _ops("STORE_FAST"), _ops("STORE_DEREF")
_TWO = frozenset(op for name, op in _NAMES.items() if name.count("_FAST") == 2)
_ATTRIBUTE, _METHOD = _ops("LOAD_ATTR", "LOAD_METHOD"), _ops("LOAD_METHOD")
_GLOBAL, _NULL, _CONST, _SWAP = (_NAMES[name] for name in ("LOAD_GLOBAL", "PUSH_NULL", "LOAD_CONST", "SWAP"))
_CALLS, _SPREADS = _ops("CALL"), _ops("CALL_FUNCTION_EX")
_MAKES = _ops("BUILD_SET", "SET_UPDATE", "SET_ADD")
_COMBINES = _ops("BINARY_OP")
_GOES_THROUGH = _ops("GET_ITER", "UNPACK", "LIST_EXTEND", "FORMAT", "CONVERT_VALUE")
_HANDS_ON = _ops(
    *("RETURN_VALUE", "YIELD_VALUE", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL"),
    *("BUILD_TUPLE", "BUILD_LIST", "BUILD_MAP", "BUILD_CONST_KEY_MAP", "LIST_APPEND", "MAP_ADD"),
)
# Between a set and what takes it, inlined comprehensions among them.
_PASSES = _ops("PRECALL", "KW_NAMES", "SWAP", "JUMP_BACKWARD", "END_FOR", "NOP", "RESUME", "EXTENDED_ARG", "CACHE")
_SETS = ("set", "frozenset", "<setcomp>")
_GIVES_SETS = ("union", "intersection", "difference", "symmetric_difference")
# What is the same whatever the order: built-in functions, and methods of sets.
_ANY_ORDER = frozenset(
    (
        *("len", "sorted", "min", "max", "any", "all", "bool", "isinstance", "type", *_SETS, *_GIVES_SETS),
        *("add", "discard", "remove", "update", "issubset", "issuperset", "isdisjoint"),
        *("intersection_update", "difference_update", "symmetric_difference_update"),
    )
)
_COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
_HAS_NULL_BIT = {_GLOBAL: 1} | ({} if _METHOD else dict.fromkeys(_ops("LOAD_ATTR"), 1))

Chain = tuple[str, ...]
_A_SET: Any = True


class Order:
    """``iterated`` are chains that the code goes through, ``unordered`` says whether it goes through a set it made."""

    def __init__(self, code: types.CodeType) -> None:
        self.iterated: set[Chain] = set()
        self.unordered = False
        self._code = code
        self._top: Any = None  # a chain, _A_SET, or None for whatever is neither
        self._below: list[Any] = []  # the same, of what lies under the top and belongs to no call yet
        self._calls: list[tuple[str, list[Any]]] = []  # functions on the stack, and what of interest they are given
        self._held: dict[str, Any] = {}  # by variable
        self._swapped = False

    def feed(self, op: int, arg: int, chain: Chain | None) -> None:
        """The next instruction. ``chain`` is what the value on top of the stack was read from, where that is known."""
        top = chain or self._top
        self._top = None
        if op in _TWO:
            self._two(op, arg, top)
        elif op in _LOADS:
            self._load(op, arg, top)
        elif self._swapped and op in _STORES_FAST:  # an inlined comprehension gives its variable back
            self._top = top
        elif op in _STORES_FAST or op in _STORES_CELL:
            self._store(self._variable(arg), top)
        elif op in _ATTRIBUTE:
            self._attribute(op, arg, top)
        elif op in _CALLS:
            self._call(op, top)
        elif op in _MAKES or (op in _COMBINES and (top or self._below)):
            self._top = _A_SET if op in _MAKES or _A_SET in (top, *self._below) else top or self._below[-1]
            self._below.clear()
        elif op in _PASSES:
            self._top = top
        else:
            if op in _GOES_THROUGH:
                self._through([top])
            elif op in _HANDS_ON and _A_SET in (top, *self._below):  # what a name means, the walk may follow further
                self.unordered = self.unordered or self._code.co_name != "<setcomp>"
            self._below.clear()
        self._swapped = op == _SWAP

    def _two(self, op: int, arg: int, top: Any) -> None:
        first, second = self._variable(arg >> 4), self._variable(arg & 15)
        stores = dis.opname[op].startswith("STORE")
        if stores:
            self._store(first, top)
        else:
            self._lies(top)
            self._lies(self._held.get(first))
        if stores and op not in _FAST and dis.opname[op].count("STORE") == 2:
            self._store(second, None)
        else:
            self._top = self._held.get(second)

    def _load(self, op: int, arg: int, top: Any) -> None:
        self._lies(top)
        callee = self._callee(op, arg)
        if callee is not None:
            self._calls.append((callee, []))
        elif op == _CONST:
            self._top = _A_SET if isinstance(self._code.co_consts[arg], frozenset) else None
        elif op in _FAST or op in _CELL:
            self._top = self._held.get(self._variable(arg))

    def _attribute(self, op: int, arg: int, top: Any) -> None:
        shift = _HAS_NULL_BIT.get(op, 0)
        name = self._code.co_names[arg >> shift]
        if name in ("pop", "__iter__"):
            self._through([top])
        if op in _METHOD or (shift and arg & 1):
            self._calls.append((name, []))

    def _call(self, op: int, top: Any) -> None:
        name, given = self._calls.pop() if self._calls else ("", [])
        if op in _SPREADS or name not in _ANY_ORDER:
            self._through([top, *given])
        self._below.clear()
        self._top = _A_SET if name in _SETS or name in _GIVES_SETS else None

    def _callee(self, op: int, arg: int) -> str | None:
        """The name of a function that is put on the stack to be called, "" for one without; else None."""
        if op == _CONST:
            inner = self._code.co_consts[arg]
            named = isinstance(inner, types.CodeType) and inner.co_name in _COMPREHENSIONS
            return inner.co_name if named else None
        if op == _GLOBAL:
            return self._code.co_names[arg >> 1] if arg & 1 else None
        return "" if op == _NULL else None

    def _lies(self, value: Any) -> None:
        """Something else comes on top of ``value``: it is an argument, or waits for an operator."""
        if value is not None:
            (self._calls[-1][1] if self._calls else self._below).append(value)

    def _store(self, name: str, value: Any) -> None:
        self._below.clear()
        self._held.pop(name, None)
        if value is not None:
            self._held[name] = value

    def _through(self, values: list[Any]) -> None:
        for value in values:
            if value is _A_SET:
                self.unordered = True
            elif value is not None:
                self.iterated.add(value)

    def _variable(self, arg: int) -> str:
        code: Any = self._code
        return code._varname_from_oparg(arg)
