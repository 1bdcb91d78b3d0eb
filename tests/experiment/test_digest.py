"""One digest by content, the same in every process, and GraphConst values that have one."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import functools
import io
import itertools
import math
import re
import subprocess
import sys
import textwrap
import threading
from collections import OrderedDict, deque, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.content import check_graphconst, content_digest, short_value


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Number(enum.IntEnum):
    ONE = 1


class Point(NamedTuple):
    x: int
    y: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any = 1


class Object:
    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class Slots:
    __slots__ = ("a", "b")

    def __init__(self, a: Any) -> None:
        self.a = a


class Text(str):
    __slots__ = ()


def adder(n: Any) -> Any:
    return lambda x: x + n


def documented(x: Any) -> Any:
    """Adds."""
    return x + 1


DIFFERENT = [
    None, True, False, 0, 1, -1, 2**70, 0.0, -0.0, 1.0, math.nan, math.inf, 1j, "1", "", b"1", bytearray(b"1"),
    Text("1"), Color.RED, Color.BLUE, Number.ONE, Path("a"), Path("b"), (), (1,), [1], [[1]], [1, 2], (1, 2), [2, 1],
    {1}, frozenset({1}), {}, {"a": 1}, {"a": 2}, {"a": 1, "b": 2}, {"b": 2, "a": 1}, OrderedDict(a=1), deque([1]),
    range(3), range(0, 3, 2), slice(3), Point(1, 2), Frozen(1), Frozen(1.0), Object(a=1), Object(a=2), Object(b=1),
    Slots(1), Slots(2), int, float, list[int], list[float], math, np, np.sin, np.cos, math.sin, len, [].append,
    np.array([1, 2]), np.array([1, 2], np.int32), np.array([[1, 2]]), np.array([1.0, 2.0]), np.array(1), np.int64(1),
    np.array([1], ">i4"), np.array([1], "<i4"), np.array([(1,)], [("a", "i4")]), np.array([(1,)], [("b", "i4")]),
    np.array(["2020"], "M8[s]"), np.array(["2020"], "M8[Y]"), np.array([1, "a"], object), np.dtype("f4"), np.float32,
    jnp.array([1, 2]), jnp.array([1, 2], jnp.float32), jnp.array([1, 2], jnp.bfloat16), jax.random.key(0),
    jax.random.key(1), np.ma.array([1, 2], mask=[0, 1]), np.ma.array([1, 2], mask=[1, 0]),
    adder(1), adder(2), documented, functools.partial(documented, 1), functools.partial(documented, 2),
    Frozen(1).__hash__, jnp.tanh, jax.nn.relu, jax.jit(adder(1)), re.compile("a"), re.compile("a", re.I),
    decimal.Decimal("1.0"), decimal.Decimal("1.00"), lambda x: x, lambda x: -x, lambda x, y: x,
]  # fmt: skip


def test_different_values_have_different_digests() -> None:
    digests = [content_digest(value) for value in DIFFERENT]
    for (a, one), (b, two) in itertools.combinations(zip(digests, DIFFERENT, strict=True), 2):
        assert a != b, (one, two)
    assert all(re.fullmatch("[0-9a-f]{64}", digest) for digest in digests)


def test_equal_content_has_an_equal_digest() -> None:
    assert content_digest({3, 1, 2}) == content_digest({2, 3, 1})
    assert content_digest(adder([1])) == content_digest(adder([1]))
    assert content_digest(Object(a=1, b=2)) == content_digest(Object(b=2, a=1))
    assert content_digest(np.zeros(0)) == content_digest(np.zeros(0))


def test_how_an_array_lies_in_memory_counts():
    """Traced code can see it: ``ravel("K")`` goes by it."""
    rows, columns = np.array([[0, 2], [1, 3]]), np.arange(4).reshape(2, 2).T
    assert content_digest([rows]) != content_digest([columns])
    assert content_digest([columns]) == content_digest([np.arange(4).reshape(2, 2).T])


def test_docstrings_comments_and_lines_do_not_count() -> None:
    def compiled(text: str) -> Any:
        scope: dict[str, Any] = {"__name__": "user"}
        exec(textwrap.dedent(text), scope)
        return scope["f"]

    plain = compiled("def f(x):\n    return x + 1")
    assert content_digest(plain) == content_digest(compiled('\n\n# why\ndef f(x):\n    """Doc."""\n    return x + 1'))
    assert content_digest(plain) != content_digest(compiled("def f(x):\n    return x + 2"))
    assert content_digest(plain) != content_digest(compiled("def f(x=1):\n    return x + 1"))


def test_cycles_end() -> None:
    def ring(n: int) -> list[Any]:
        loop: list[Any] = [n]
        loop.append(loop)
        return loop

    assert content_digest(ring(1)) == content_digest(ring(1))
    assert content_digest(ring(1)) != content_digest(ring(2))
    node = Object()
    node.me = [node]  # pyright: ignore
    assert content_digest(node)


def test_the_digest_is_the_same_in_another_process() -> None:
    code = """
    import numpy as np
    from pathlib import Path
    from nitro_cli.experiment.content import content_digest
    def f(x, n=(1, 2)):
        return {x for x in "abc"}, x in {"a", "b", "c"}
    print(content_digest([{"a", "b", "c"}, {"x": 1.5}, Path("a"), np.arange(3), f, len, np.sin, frozenset("xyz")]))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    outputs = {
        subprocess.run(command, capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1


class Driver:
    """State that Python cannot see: a C object that also has a dict."""

    def __init__(self) -> None:
        self.lock = threading.Lock()


UNDECIDED = {
    "generator": (i for i in ()),
    "lock": threading.Lock(),
    "file": io.StringIO("a"),
    "object": object(),
    "iterator": iter([1]),
    "nested": {"a": [Driver()]},
    "memoryview": memoryview(b"a"),
    "itertools": itertools.count(),
}


@pytest.mark.parametrize("kind", UNDECIDED)
def test_what_content_cannot_decide_is_refused_with_its_path(kind: str) -> None:
    with pytest.raises(TypeError, match="has no content to compare") as error:
        content_digest(UNDECIDED[kind])
    if kind == "nested":
        assert "['a'][0].lock is a _thread.lock" in str(error.value)


def test_tracers_have_no_content() -> None:
    def trace(x: Any) -> Any:
        with pytest.raises(TypeError, match="no content"):
            content_digest([x])
        return x

    jax.jit(trace)(1.0)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
)


@given(plain)
def test_plain_values_pass_as_graphconst(value: Any) -> None:
    check_graphconst(Frozen, "x", value)


class ByIdentity:
    def __init__(self) -> None:
        self.x = 1


class EqualOnly(ByIdentity):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, EqualOnly)

    __hash__ = object.__hash__


GOOD = [[1], {"a": [np.arange(3)]}, np.ones(2), {1, 2}, Frozen(1), Frozen((1, 2)), Point(1, 2), Color.RED, math.nan,
        jnp.ones(2), int, documented, jax.nn.relu, np.float32, np.dtype("f4"), Path("a")]  # fmt: skip


def test_values_that_nitro_makes_content_hashable() -> None:
    for value in GOOD:
        check_graphconst(Frozen, "x", value)


BROKEN = {
    "identity": ByIdentity(),
    "inside": [ByIdentity()],
    "hash": EqualOnly(),
    "array in a dataclass": Frozen(np.arange(3)),
    "lock": Driver(),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_values_that_do_not_compare_by_content(kind: str, snapshot: Any) -> None:
    with pytest.raises(ExperimentError) as error:
        check_graphconst(Frozen, "x", BROKEN[kind])
    assert str(error.value) == snapshot


def test_short_values_fit_a_report() -> None:
    assert short_value([64, 64]) == "[64, 64]"
    assert short_value(np.ones((3, 4), np.float32)) == "float32[3,4]"
    assert short_value(list(range(10**6))) == "list of 1000000"
    assert short_value("x" * 100) == "'" + "x" * 36 + "..."
    assert short_value(Path("runs")) == "runs"
    assert short_value(Color.RED) == "RED"
    assert namedtuple("P", "a")(1) == (1,)
