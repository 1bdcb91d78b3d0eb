"""What counts as another code: everything that a hook can reach, and nothing that says how it is written."""

from __future__ import annotations

import enum
import functools
import importlib
import math
import sys
import types
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nitro_cli.programs.fingerprint import fingerprint


def made(source: str, name: str = "f", filename: str = "user.py", **names):
    """The function ``name`` of a piece of source, as a user's module would hold it."""
    namespace = {"__name__": "user", "jnp": jnp, "np": np, "math": math, **names}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


def digest(function) -> str:
    return fingerprint(f=function).digest()


def same(one: str, other: str, **options) -> bool:
    return digest(made(one, **options)) == digest(made(other, **options))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(x):\n    return x + 1", "def f(x):\n    return x + 2"),
        ("def f(x):\n    return x + 1", "def f(x):\n    return x + 1.0"),
        ("def f(x):\n    return x + 1", "def f(x):\n    return x + True"),
        ("def f(x):\n    return x * 0.0", "def f(x):\n    return x * -0.0"),
        ("def f(x):\n    return x + 1", "def f(y):\n    return y - 1"),
        ("def f(x):\n    return jnp.sin(x)", "def f(x):\n    return jnp.cos(x)"),
        ("def f(x, n=1):\n    return x + n", "def f(x, n=2):\n    return x + n"),
        ("def f(x, *, n=1):\n    return x + n", "def f(x, *, n=2):\n    return x + n"),
        ("K = 1\ndef f(x):\n    return x + K", "K = 2\ndef f(x):\n    return x + K"),
        ("K = [1, 2]\ndef f(x):\n    return K", "K = [2, 1]\ndef f(x):\n    return K"),
        ("K = {'a': 1}\ndef f(x):\n    return K", "K = {'a': 2}\ndef f(x):\n    return K"),
        ("K = np.ones(3)\ndef f(x):\n    return K", "K = np.ones(3)\nK[1] = 2\ndef f(x):\n    return K"),
        ("K = np.ones(3)\ndef f(x):\n    return K", "K = np.ones(3, np.float32)\ndef f(x):\n    return K"),
        ("K = jnp.ones(3)\ndef f(x):\n    return K", "K = jnp.zeros(3)\ndef f(x):\n    return K"),
        ("def g(x):\n    return x\ndef f(x):\n    return g(x)", "def g(x):\n    return -x\ndef f(x):\n    return g(x)"),
        (
            "def g(x):\n    return x\ndef f(x):\n    return list(map(lambda y: g(y), x))",
            "def g(x):\n    return -x\ndef f(x):\n    return list(map(lambda y: g(y), x))",
        ),
        (
            "def f(x):\n    def inner(y):\n        return y + 1\n    return inner(x)",
            "def f(x):\n    def inner(y):\n        return y + 2\n    return inner(x)",
        ),
        ("f = lambda x: x + 1", "f = lambda x: x + 2"),
        (
            "class A:\n    k = 1\n    def m(self):\n        return self.k\na = A()\ndef f(x):\n    return a.m()",
            "class A:\n    k = 2\n    def m(self):\n        return self.k\na = A()\ndef f(x):\n    return a.m()",
        ),
        (
            "class A:\n    def __init__(self):\n        self.k = 1\na = A()\ndef f(x):\n    return a.k",
            "class A:\n    def __init__(self):\n        self.k = 1\na = A()\na.k = 2\ndef f(x):\n    return a.k",
        ),
        (
            "class B:\n    def m(self):\n        return 1\nclass A(B):\n    pass\ndef f(x):\n    return A().m()",
            "class B:\n    def m(self):\n        return 2\nclass A(B):\n    pass\ndef f(x):\n    return A().m()",
        ),
        (
            "class A:\n    @property\n    def p(self):\n        return 1\na = A()\ndef f(x):\n    return a.p",
            "class A:\n    @property\n    def p(self):\n        return 2\na = A()\ndef f(x):\n    return a.p",
        ),
        ("def f(x):\n    return x in (1, 2)", "def f(x):\n    return x in (1, 3)"),
        ("def f(x):\n    return x in {1, 2}", "def f(x):\n    return x in {1, 3}"),
        ("def f(x):\n    return 'a'", "def f(x):\n    return 'b'"),
        ("def f(x):\n    try:\n        return x\n    except KeyError:\n        pass", "def f(x):\n    return x"),
        ("g = jnp.sin\ndef f(x):\n    return g(x)", "g = jnp.cos\ndef f(x):\n    return g(x)"),
    ],
)
def test_what_changes_what_the_code_does_is_another_fingerprint(one, other):
    assert same(one, one)
    assert not same(one, other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("def f(x):\n    return x + 1", "\n\n\ndef f(x):\n    # why\n    return x + 1"),
        ('def f(x):\n    "one"\n    return x + 1', 'def f(x):\n    "another"\n    return x + 1'),
        ("def f(x):\n    return x + 1", "def f(x: int) -> int:\n    return x + 1"),
        ("K = 1\ndef f(x):\n    return x", "K = 2\ndef f(x):\n    return x"),
        (
            'class A:\n    "one"\n    def m(self):\n        "1"\n        return 1\na = A()\ndef f(x):\n    return a',
            'class A:\n    "two"\n    def m(self):\n        "2"\n        return 1\na = A()\ndef f(x):\n    return a',
        ),
        ("def f(x):\n    return (x\n        + 1)", "def f(x):\n    return x + 1"),
    ],
)
def test_how_it_is_written_does_not_count(one, other):
    assert same(one, other)


def test_the_file_does_not_count():
    source = "def f(x):\n    return x + 1"
    assert digest(made(source, filename="/a/one.py")) == digest(made(source, filename="/b/two.py"))


def test_captured_values_count_by_content():
    def capture(value):
        return lambda x: (x, value)

    for one, other in [
        (1, 2),
        ([1, 2], [1, 3]),
        ({"a": [1]}, {"a": [2]}),
        (np.arange(3), np.arange(3) + 1),
        (functools.partial(max, 1), functools.partial(max, 2)),
        ((1, (2, 3)), (1, (2, 4))),
        (None, False),
        ({1, 2}, {1, 3}),
    ]:
        assert digest(capture(one)) == digest(capture(one))
        assert digest(capture(one)) != digest(capture(other))
    assert digest(capture([1, 2])) == digest(capture([1, 2]))
    assert digest(capture(np.arange(4))) == digest(capture(np.arange(4)))


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Config:
    width: int
    parts: list


class Slotted:
    __slots__ = ("a",)

    def __init__(self, a):
        self.a = a


def test_objects_count_by_their_class_and_content():
    def about(value):
        return fingerprint(model=value).digest()

    assert about(Config(1, [2])) == about(Config(1, [2])) != about(Config(1, [3]))
    assert about(Slotted(1)) == about(Slotted(1)) != about(Slotted(2))
    assert about(Colour.RED) != about(Colour.BLUE)
    assert about(jax.random.key(0)) == about(jax.random.key(0)) != about(jax.random.key(1))


def test_what_refers_to_itself_comes_to_an_end():
    def f(x):
        return f(x - 1) if x else 0

    loop: list = [1]
    loop.append(loop)
    assert digest(f) == digest(f)
    assert fingerprint(model=loop).digest() == fingerprint(model=loop).digest()


def test_two_that_differ_only_in_what_is_shared_differ():
    one, two = [1], [1]
    assert fingerprint(model=(one, one)).digest() == fingerprint(model=(one, one)).digest()
    assert fingerprint(model=(one, [2])).digest() != fingerprint(model=(one, two)).digest()


def test_an_object_that_only_its_identity_tells_apart_is_refused_and_never_taken_for_another():
    one, other = iter([1]), iter([1])
    assert fingerprint(model=one).digest() == fingerprint(model=one).digest() != fingerprint(model=other).digest()
    assert fingerprint(model=one).refusals == ("`model` is a builtins.list_iterator, whose content cannot be seen",)
    assert fingerprint(model=Config(1, [])).refusals == ()


def test_decorated_functions_are_looked_into():
    def double(function):
        @functools.wraps(function)
        def wrapper(x):
            return 2 * function(x)

        return wrapper

    def triple(function):
        @functools.wraps(function)
        def wrapper(x):
            return 3 * function(x)

        return wrapper

    one = made("def f(x):\n    return x + 1")
    other = made("def f(x):\n    return x + 2")
    assert digest(double(one)) == digest(double(one))
    assert digest(double(one)) != digest(double(other))
    assert digest(double(one)) != digest(triple(one))
    assert digest(jax.jit(one)) != digest(jax.jit(other))


CUSTOM_VJP = """
@jax.custom_vjp
def g(x):
    return x

def forwards(x):
    return x, None

def backwards(residual, cotangent):
    return (cotangent * {number},)

g.defvjp(forwards, backwards)

def f(x):
    return g(x)
"""
CUSTOM_JVP = """
@jax.custom_jvp
def g(x):
    return x

@g.defjvp
def rule(primals, tangents):
    return g(*primals), tangents[0] * {number}

def f(x):
    return g(x)
"""
ATTRIBUTE = """
def g(x):
    return x

g.factor = {number}

def f(x):
    return g(x) * g.factor
"""


@pytest.mark.parametrize("source", [CUSTOM_VJP, CUSTOM_JVP, ATTRIBUTE], ids=["vjp", "jvp", "attribute"])
def test_rules_of_derivatives_and_attributes_of_functions_count(source):
    one, other = source.format(number=1), source.format(number=2)
    assert same(one, one, jax=jax)
    assert not same(one, other, jax=jax)
    assert fingerprint(f=made(one, jax=jax)).refusals == ()


def test_a_jitted_helper_is_stable():
    source = "@jax.jit\ndef g(x):\n    return x\ndef f(x):\n    return g(x)"
    assert same(source, "\n\n" + source, jax=jax)
    assert fingerprint(f=made(source, jax=jax)).refusals == ()


def test_entries_name_what_they_are_and_where():
    source = "K = 3\ndef g(x):\n    return x + K\ndef f(x):\n    return g(x)"
    found = fingerprint(f=made(source, filename="/somewhere/losses.py"))
    assert sorted(found.entries) == ["f", "user.K", "user.g"]
    assert found.entries["user.K"] == "int 3"
    assert found.places == {"f": "losses.py:4", "user.g": "losses.py:2"}


def test_library_code_counts_by_name():
    found = fingerprint(f=jnp.linalg.norm)
    assert not found.refusals
    assert found.digest() == fingerprint(f=jnp.linalg.norm).digest() != fingerprint(f=jnp.linalg.det).digest()


def test_code_behind_super_counts():
    source = """
class Base:
    def hook(self, x):
        return x + {number}

    def other(self, x):
        return x

class Middle(Base):
    pass

class Top(Middle):
    def hook(self, x):
        return super().hook(x)

    def alone(self, x):
        return self.other(x)
"""

    def of(number, name):
        top = made(source.format(number=number), "Top", __name__="user")
        return fingerprint(top, hook=vars(top)[name]).digest()

    assert of(1, "hook") == of(1, "hook") != of(2, "hook")
    assert of(1, "alone") == of(2, "alone")


def test_modules_inside_packages_count_by_what_is_named_in_them():
    def of(number, unused=0):
        module, package = types.ModuleType("pack.losses"), types.ModuleType("pack")
        exec(
            compile(f"K = {number}\nUNUSED = {unused}\ndef g(x):\n    return x + K", "losses.py", "exec"), vars(module)
        )
        module.__file__, package.__file__ = "pack/losses.py", "pack/__init__.py"
        package.losses = module
        package.itself = package
        return digest(made("def f(x):\n    return pack.losses.g(pack.itself)", pack=package))

    assert of(1) == of(1) == of(1, unused=3)
    assert of(1) != of(2)


IMPORTS = {
    "a module": "def f(x):\n    import late_losses\n    return late_losses.scaled(x)",
    "a name": "def f(x):\n    from late_losses import scaled\n    return scaled(x)",
    "a name of a package": "def f(x):\n    from late_package.inner import scaled\n    return scaled(x)",
    "a module of a package": "def f(x):\n    import late_package.inner\n    return late_package.inner.scaled(x)",
    "in a nested function": (
        "def f(x):\n    def g():\n        from late_losses import scaled\n        return scaled(x)\n    return g()"
    ),
}


@pytest.mark.parametrize("what", IMPORTS)
def test_what_a_function_imports_when_it_runs_counts(what, tmp_path, monkeypatch):
    def written(factor):
        for name in ("late_losses", "late_package", "late_package.inner"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        importlib.invalidate_caches()
        text = f"FACTOR = {factor}\ndef scaled(x):\n    return x * FACTOR\n"
        (tmp_path / "late_losses.py").write_text(text)
        (tmp_path / "late_package").mkdir(exist_ok=True)
        (tmp_path / "late_package" / "__init__.py").write_text("")
        (tmp_path / "late_package" / "inner.py").write_text(text)
        return digest(made(IMPORTS[what]))

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    assert written(1) != written(2)
    assert written(2) == written(2)


def test_a_missing_module_is_left_to_the_trace():
    assert digest(made("def f(x):\n    import no_such_module\n    return x"))


def test_members_of_enums_count_by_value_and_their_methods_by_code():
    members = "class C({base}):\n    A = {value}\n    def shown(self):\n        return {shown}\n"
    source = members + "def f(x):\n    return C.A.shown()"

    def variant(base="enum.Enum", value=1, shown="self.value"):
        return digest(made(source.format(base=base, value=value, shown=shown), enum=enum))

    assert variant() == variant()
    assert variant() != variant(value=2)
    assert variant() != variant(shown="-self.value")
