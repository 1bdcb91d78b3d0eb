"""One rule of the fingerprint after another: what counts, what does not, and what no later process may reuse."""

from __future__ import annotations

import builtins
import contextvars
import decimal
import functools
import re
import subprocess
import sys
import textwrap
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from nitro_cli import Experiment
from nitro_cli.programs.fingerprint import Fingerprint, Recheck, fingerprint

HEAD = """
import abc, array, collections, contextlib, contextvars, dataclasses, datetime, decimal, enum, fractions, functools
import itertools, logging, math, operator, re, threading, types, typing
import jax, optax
import flax.linen as nn
import flax.struct
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
"""


@pytest.fixture
def load(monkeypatch):
    """``load(source)`` is a module of the user's under the name ``work``, as importing it anew would make it."""

    def load(source: str, name: str = "work", head: str = HEAD) -> types.ModuleType:
        module = types.ModuleType(name)
        module.__file__ = f"/somewhere/{name}.py"
        monkeypatch.setitem(sys.modules, name, module)
        exec(compile(head + textwrap.dedent(source), module.__file__, "exec", dont_inherit=True), vars(module))
        return module

    return load


@pytest.fixture(autouse=True)
def _decimal_digits():
    with decimal.localcontext():
        yield


def of(module: types.ModuleType, owner: str | None = None) -> Fingerprint:
    return fingerprint(getattr(module, owner) if owner else None, f=module.f)


VALUES = {
    "the end of a chain": ("class A: pass\nC = A(); C.o = A(); C.o.k = {}\ndef f(x): return x * C.o.k", "1", "2"),
    "a slot": ("class A:\n  __slots__ = ('k',)\nC = A()\nC.k = {}\ndef f(x): return C.k", "1", "2"),
    "a class attribute": ("class A:\n  k = {}\ndef f(x): return A.k", "1", "2"),
    "the order of an array in memory": (
        "K = np.asarray([[1, 2], [3, 4]], order='{}')\ndef f(x): return K.ravel('K')",
        "C",
        "F",
    ),
    "the order in which numbers were put into a set": ("K = {}\ndef f(x): return list(K)", "\0 0, 8 \1", "\0 8, 0 \1"),
    "the digits that decimal numbers are computed to": (
        "K = decimal.Decimal(1)\ndecimal.getcontext().prec = {}\ndef f(x): return K / 3",
        "28",
        "6",
    ),
    "a name that a function was given": ("def g(x): pass\ng.__name__ = '{}'\ndef f(x): return g", "h", "i"),
    "an integer beyond 64 bits": ("K = {}\ndef f(x): return K", "2**70", "2**70 + 1"),
    "the sign of zero": ("K = {}\ndef f(x): return K", "0.0", "-0.0"),
    "a number and a truth value": ("K = {}\ndef f(x): return K", "1", "True"),
    "a number and a scalar": ("K = {}\ndef f(x): return K", "1.5", "np.float64(1.5)"),
    "a scalar and an array": ("K = {}\ndef f(x): return K", "np.float32(1.5)", "np.array(1.5, np.float32)"),
    "arrays of two kinds": ("K = {}\ndef f(x): return K", "np.ones(2, np.float32)", "jnp.ones(2)"),
    "a weak type": ("K = {}\ndef f(x): return K", "jnp.asarray(1.0)", "jnp.asarray(1.0, jnp.float32)"),
    "bfloat16": ("K = {}\ndef f(x): return K", "jnp.ones(2, jnp.bfloat16)", "2 * jnp.ones(2, jnp.bfloat16)"),
    "a scalar of bfloat16": ("K = {}\ndef f(x): return K", "ml_dtypes.bfloat16(1)", "ml_dtypes.bfloat16(2)"),
    "a shape": ("K = {}\ndef f(x): return K", "np.zeros((2, 3))", "np.zeros((3, 2))"),
    "a mask": ("K = np.ma.masked_array([1, 2], mask={})\ndef f(x): return K", "[0, 1]", "[1, 0]"),
    "an array of objects": ("K = np.array([{}, None], object)\ndef f(x): return K", "[1]", "[2]"),
    "an array of strings": (
        "K = np.array([{}], np.dtypes.StringDType())\ndef f(x): return K",
        "'a' * 40",
        "'a' * 39 + 'b'",
    ),
    "a record": ("K = np.array([(1, {})], 'i4,f8')\ndef f(x): return K", "2.0", "3.0"),
    "the byte order": ("K = np.dtype('{}f4')\ndef f(x): return K", "<", ">"),
    "a polynomial": ("K = np.poly1d([1.0, {}])\ndef f(x): return K(0.5)", "1.0", "2.0"),
    "a fraction": ("K = fractions.Fraction(1, {})\ndef f(x): return K", "3", "4"),
    "a decimal": ("K = decimal.Decimal('{}')\ndef f(x): return K", "0.7", "0.70"),
    "a duration": ("K = datetime.timedelta(seconds={})\ndef f(x): return K", "3", "4"),
    "an array of Python's": ("K = array.array('{}', [1, 2])\ndef f(x): return K", "i", "d"),
    "a pattern": ("K = re.compile('a', {})\ndef f(x): return K", "0", "re.I"),
    "a range": ("K = range({})\ndef f(x): return K", "3", "4"),
    "a slice": ("K = slice({})\ndef f(x): return K", "3", "4"),
    "an item getter": ("K = operator.itemgetter({})\ndef f(x): return K", "0", "1"),
    "an attribute getter": ("K = operator.attrgetter('{}')\ndef f(x): return K", "a", "b"),
    "a method caller": ("K = operator.methodcaller('m', {})\ndef f(x): return K", "0", "k=0"),
    "a function of operator": ("def f(x): return operator.{}(x, x)", "add", "mul"),
    "a ufunc": ("def f(x): return np.{}(1.0, 2.0)", "add", "multiply"),
    "a captured ufunc": ("K = np.{}\ndef f(x): return K(1.0, 2.0)", "add", "multiply"),
    "a method written in C": ("K = float.{}\ndef f(x): return K(x, 2.0)", "__mul__", "__add__"),
    "a bound method written in C": ("K = [{}].count\ndef f(x): return K(x)", "1", "2"),
    "a namespace": ("K = types.SimpleNamespace(a={})\ndef f(x): return K", "1", "2"),
    "the order of a dict": ("K = {}\ndef f(x): return list(K)", "{'a': 1, 'b': 2}", "{'b': 2, 'a': 1}"),
    "a kind of dict": ("K = collections.{}(a=1)\ndef f(x): return K", "OrderedDict", "Counter"),
    "the default of a dict": ("K = collections.defaultdict({})\ndef f(x): return K", "int", "float"),
    "the length of a deque": ("K = collections.deque([1], maxlen={})\ndef f(x): return K", "2", "3"),
    "a chain of dicts": ("K = collections.ChainMap(dict(a=1), dict(b={}))\ndef f(x): return K", "1", "2"),
    "a frozen set": ("K = frozenset({{{}, 'a'}})\ndef f(x): return K", "1", "2"),
    "a set of functions": ("def a(): return {}\nK = {{a, print}}\ndef f(x): return K", "1", "2"),
    "the end of a long list": ("K = [0] * 1000 + [{}]\ndef f(x): return K", "1", "2"),
    "the end of a long dict": ("K = dict.fromkeys(range(1000)); K[5] = {}\ndef f(x): return K", "1", "2"),
    "a class as a key": ("def a(v): return {}\nK = {{int: a}}\ndef f(x): return K[int](x)", "1", "2"),
    "the member of an enum": ("class E(enum.Enum):\n  A = {}\ndef f(x): return E.A.value", "1", "2"),
    "a member of two": ("class E(enum.Enum):\n  A = 1\n  B = 2\ndef f(x): return E.{}", "A", "B"),
    "flags": ("class E(enum.Flag):\n  A = 1\n  B = 2\nK = {}\ndef f(x): return K", "E.A", "E.A | E.B"),
    "a context variable": ("K = contextvars.ContextVar('K', default={})\ndef f(x): return K.get()", "1", "2"),
    "a type": ("K = {}\ndef f(x): return x.astype(K)", "jnp.float32", "jnp.float16"),
    "the parameters of a type": ("K = list[{}]\ndef f(x): return K", "int", "str"),
    "a union of types": ("K = int | {}\ndef f(x): return K", "str", "bytes"),
    "a text of a class": ("class S(str): pass\nK = S({})\ndef f(x): return K", "'a'", "'b'"),
    "a list of a class": ("class L(list): pass\nK = L(); K.k = {}\ndef f(x): return K", "1", "2"),
    "a sentinel and a value": ("S = object()\nK = {}\ndef f(x): return K is S", "S", "object()"),
    "a library's sentinel": ("K = {}\ndef f(x): return K", "object()", "functools._initial_missing"),
    "a random key": ("K = jax.random.key({})\ndef f(x): return K", "0", "1"),
    "the kind of a random key": ("K = jax.random.key(0, impl='{}')\ndef f(x): return K", "rbg", "unsafe_rbg"),
    "a sharding": (
        "M = jax.make_mesh((1,), ('d',))\nK = NamedSharding(M, PartitionSpec({}))\ndef f(x): return K",
        "'d'",
        "None",
    ),
    "the structure of a tree": ("K = jax.tree.structure({})\ndef f(x): return K", "{'a': 1}", "{'b': 1}"),
    "the kind of a tree": ("K = jax.tree.structure({})\ndef f(x): return K", "[1, 2]", "(1, 2)"),
    "a specification": ("K = jax.ShapeDtypeStruct(({},), jnp.float32)\ndef f(x): return K", "1", "2"),
    "an optimizer": ("K = optax.adam({})\ndef f(x): return K", "1e-3", "1e-4"),
    "a chain of optimizers": ("K = optax.chain(optax.scale({}), optax.sgd(1))\ndef f(x): return K", "1.0", "2.0"),
    "a condition of an optimizer": (
        "K = optax.masked(optax.scale(1.0), lambda p: {})\ndef f(x): return K",
        "True",
        "False",
    ),
    "parameters that code holds": ("K = nnx.Param({} * jnp.ones(2))\ndef f(x): return K", "1", "2"),
    "a module that code holds": ("K = nnx.Linear(2, 2, rngs=nnx.Rngs({}))\ndef f(x): return K(x)", "0", "1"),
    "the type of a variable": ("K = nnx.{}(jnp.ones(2))\ndef f(x): return K", "Param", "BatchStat"),
    "fields of a linen module": ("K = nn.Dense({})\ndef f(x): return K", "2", "3"),
    "a module in a linen module": ("K = nn.Sequential([nn.Dense({})])\ndef f(x): return K", "2", "3"),
    "a field of flax's dataclass": (
        "@flax.struct.dataclass\nclass H:\n  mu: float = 1.0\nK = H({})\ndef f(x): return K",
        "1.0",
        "2.0",
    ),
}


@pytest.mark.parametrize("what", VALUES)
def test_a_value_counts_by_its_content(load, what):
    source, one, other = VALUES[what]
    text = source.replace("{{", "\0").replace("}}", "\1")
    filled = [text.replace("{}", each).replace("\0", "{").replace("\1", "}") for each in (one, one, other)]
    a, b, c = (of(load(each)) for each in filled)
    assert a.digest() == b.digest() != c.digest()
    assert a.refusals == c.refusals == ()


CODE = {
    "a property": "class A:\n  @property\n  def p(self): return {}\na = A()\ndef f(x): return a.p",
    "a cached property": "class A:\n  @functools.cached_property\n  def p(self): return {}\ndef f(x): return A().p",
    "a static method": "class A:\n  @staticmethod\n  def m(x): return {}\ndef f(x): return A.m(x)",
    "a class method": "class A:\n  @classmethod\n  def m(cls, x): return {}\ndef f(x): return A.m(x)",
    "a method of a mixin": "class M:\n  def m(self): return {}\nclass A(M): pass\na = A()\ndef f(x): return a.m()",
    "a partial method": (
        "class A:\n  def m(self, k): return k\n  n = functools.partialmethod(m, {})\ndef f(x): return A().n()"
    ),
    "a descriptor": "class D:\n  def __get__(self, o, t): return {}\nclass A:\n  d = D()\ndef f(x): return A.d",
    "an attribute made up": "class A:\n  def __getattr__(self, n): return {}\na = A()\ndef f(x): return a.b",
    "every attribute made up": "class A:\n  def __getattribute__(self, n): return {}\na = A()\ndef f(x): return a.b",
    "an attribute made up over one that is there": (
        "class A:\n  def __getattribute__(self, n): return {}\na = A()\nobject.__setattr__(a, 'b', 0)\n"
        "def f(x): return a.b"
    ),
    "a property over an attribute": (
        "class A:\n  @property\n  def p(self): return {}\na = A()\nvars(a)['p'] = 0\ndef f(x): return a.p"
    ),
    "an operator": "class A:\n  def __rmul__(self, o): return {}\na = A()\ndef f(x): return x * a",
    "a call": "class A:\n  def __call__(self, x): return {}\na = A()\ndef f(x): return a(x)",
    "a metaclass": (
        "class M(type):\n  @property\n  def u(cls): return {}\nclass A(metaclass=M): pass\ndef f(x): return A.u"
    ),
    "what a metaclass calls": (
        "class M(type):\n  def __call__(cls):\n    o = super().__call__()\n    o.w = {}\n    return o\n"
        "class A(metaclass=M): pass\ndef f(x): return A().w"
    ),
    "a default of a named tuple": "class P(typing.NamedTuple):\n  a: float = {}\ndef f(x): return P().a",
    "a default of a dataclass": "@dataclasses.dataclass\nclass C:\n  a: int = {}\ndef f(x): return C().a",
    "a factory of a dataclass": (
        "@dataclasses.dataclass\nclass C:\n  a: list = dataclasses.field(default_factory=lambda: [{}])\n"
        "def f(x): return C().a"
    ),
    "a function of an enum": "class E(enum.Enum):\n  A = 1\n  def m(self): return {}\ndef f(x): return E.A.m()",
    "a default argument": "def g(x, k={}): return k\ndef f(x): return g(x)",
    "a keyword's default": "def g(x, *, k={}): return k\ndef f(x): return g(x)",
    "a function as a default": "def g(x, k=lambda: {}): return k()\ndef f(x): return g(x)",
    "an attribute of a function": "def f(x): return f.k\nf.k = {}",
    "what a closure captures": (
        "def m(t):\n  def g(x):\n    return lambda y: y * t\n  return g\nK = m({})\ndef f(x): return K(x)"
    ),
    "what a closure reads of an object": (
        "def m(c):\n  return lambda x: x * c.a.b\nN = types.SimpleNamespace(a=types.SimpleNamespace(b={}))\n"
        "K = m(N)\ndef f(x): return K(x)"
    ),
    "a decorator": "def d(g):\n  def w(x): return g(x) * {}\n  return w\n@d\ndef f(x): return x",
    "what a decorator wraps": "def d(g):\n  def w(x): return g(x)\n  return w\n@d\ndef f(x): return x * {}",
    "a partial": "def g(x, k): return k\nK = functools.partial(g, k={})\ndef f(x): return K(x)",
    "an argument of a partial": "def g(k, x): return k\nK = functools.partial(g, {})\ndef f(x): return K(x)",
    "a cached function": "@functools.lru_cache\ndef g(n): return n * {}\ndef f(x): return g(2)",
    "an implementation by type": (
        "@functools.singledispatch\ndef g(v): return 0\n@g.register\ndef _(v: int): return {}\ndef f(x): return g(7)"
    ),
    "a function in a table": "K = {'a': lambda x: x * {}}\ndef f(x): return K['a'](x)",
    "a context manager": "@contextlib.contextmanager\ndef g(): yield {}\ndef f(x):\n  with g() as k: return k",
    "a function made from text": "exec('def g(x): return {}', globals())\ndef f(x): return g(x)",
    "a jitted function": "@jax.jit\ndef g(x): return x * {}\ndef f(x): return g(x)",
    "a static default of a jitted function": (
        "@functools.partial(jax.jit, static_argnames=('n',))\ndef g(x, n={}): return x * n\ndef f(x): return g(x)"
    ),
    "an option of jit": "g = jax.jit(lambda x, *y: x, static_argnums={})\ndef f(x): return g(x)",
    "a function under vmap": "K = jax.vmap(lambda r: r * {})\ndef f(x): return K(x)",
    "a function under checkpoint": "K = jax.checkpoint(lambda r: r * {})\ndef f(x): return K(x)",
    "a rule of a custom batch": (
        "@jax.custom_batching.custom_vmap\ndef g(x): return x\n@g.def_vmap\ndef r(n, b, x): return x * {}, b[0]\n"
        "def f(x): return g(x)"
    ),
    "how a class is flattened": (
        "class P:\n  pass\njax.tree_util.register_pytree_node(P, lambda p: ((p.a,), {}), lambda _, c: P())\n"
        "def f(x): return P()"
    ),
    "how a primitive is lowered": (
        "import jax.extend\nfrom jax.interpreters import mlir\nK = jax.extend.core.Primitive('k')\n"
        "mlir.register_lowering(K, lambda c, x: {})\ndef f(x): return K.bind(x)"
    ),
    "a method of a linen module": (
        "class A(nn.Module):\n  @nn.compact\n  def __call__(self, x): return nn.Dense(3)(x) * {}\nK = A()\n"
        "def f(x): return K.init_with_output(jax.random.key(0), x)"
    ),
    "what flax alone calls": (
        "class A(nn.Module):\n  def setup(self): self.d = nn.Dense({})\n  def __call__(self, x): return self.d(x)\n"
        "K = A()\ndef f(x): return K.init_with_output(jax.random.key(0), x)"
    ),
    "a module under remat": (
        "class A(nn.Module):\n  @nn.compact\n  def __call__(self, x): return x * {}\n"
        "K = nn.remat(A)\ndef f(x): return K"
    ),
    "an attribute made by a module": "def __getattr__(name): return {}\nimport work\ndef f(x): return work.VALUE",
    "a nested comprehension": "def f(x): return [[x * {} for _ in a] for a in x]",
    "an exception that is caught": "K = {}\ndef f(x):\n  try: return x\n  except K: return None",
    "a pattern that is matched": "def f(x):\n  match x:\n    case {}: return 1\n    case _: return 2",
    "a class inside a function": "def f(x):\n  class A:\n    k = {}\n  return A.k",
    "a computed name in a module": (
        "import work\nN = 'act'\ndef g_act(x): return {}\ndef f(x): return getattr(work, 'g_' + N)(x)"
    ),
    "a name from globals": "def g(x): return {}\ndef f(x): return globals()['g'](x)",
    "a name from vars": "import work\ndef g(x): return {}\ndef f(x): return vars(work)['g'](x)",
    "a name looked up by a constant": (
        "class A:\n  a = 1\n  b = 2\ndef f(x): return getattr(A, 'ab'[{} - 1:{}][:1] or 'a')\nA.k = {}"
    ),
    "a mutual recursion": "def g(x, n): return f(x) * {}\ndef f(x, n=1): return g(x, n - 1) if n else x",
}


@pytest.mark.parametrize("what", CODE)
def test_code_counts_wherever_it_is_reached(load, what):
    one, again, other = (of(load(CODE[what].replace("{}", number))) for number in ("1", "1", "2"))
    assert one.digest() == again.digest() != other.digest()
    assert one.refusals == other.refusals == ()


SAME = {
    "a class inside a function moves": (
        "def f(x):\n{}  class A:\n    'text'\n    def m(self): return self.k\n  return A"
    ),
    "a future import": "{}def f(x): return x",
    "a field that nothing reads": "C = types.SimpleNamespace(a=1, b='{}')\ndef f(x): return C.a",
    "what nothing reaches": "def g(x): return '''{}'''\ndef f(x): return x",
    "a method's docstring": "class A:\n  def m(self):\n    '''{}'''\n    return 1\na = A()\ndef f(x): return a.m()",
    "an annotation": "def f(x: '''{}'''): return x",
    "an imported module that code does not name": "{}\ndef f(x): return x",
}
FILLED = {
    "a class inside a function moves": ("", "\n\n\n"),
    "a future import": ("", "from __future__ import annotations\n"),
    "an imported module that code does not name": ("import statistics", "import string"),
}


@pytest.mark.parametrize("what", SAME)
def test_what_says_nothing_about_the_program_does_not_count(load, what):
    head = "" if what == "a future import" else HEAD
    one, other = (of(load(SAME[what].replace("{}", each), head=head)) for each in FILLED.get(what, ("a", "b")))
    assert one.digest() == other.digest()


REFUSED = {
    "reads the clock (time.time)": "import time\ndef f(x): return x * time.time()",
    "reads the clock (time.perf_counter)": "from time import perf_counter as now\ndef f(x): return x * now()",
    "reads the clock (time.monotonic)": "def f(x):\n  import time\n  return time.monotonic()",
    "reads the clock (datetime.datetime.now)": "def f(x): return datetime.datetime.now().year",
    "reads the clock (datetime.date.today)": "from datetime import date\ndef f(x): return date.today().year",
    "draws random numbers (random.random)": "import random\ndef f(x): return random.random()",
    "draws random numbers (numpy.random.default_rng)": "def f(x): return np.random.default_rng().normal()",
    "draws random numbers (os.urandom)": "import os\ndef f(x): return os.urandom(1)",
    "draws random numbers (uuid.uuid4)": "import uuid\ndef f(x): return uuid.uuid4()",
    "reads files (io.open)": "def f(x):\n  with open('a') as file: return file.read()",
    "reads files (numpy.loadtxt)": "def f(x): return np.loadtxt('a')",
    "reads files (.read_text)": "import pathlib\nP = pathlib.PurePath('a')\ndef f(x): return P.read_text()",
    "reads files (os.path.exists)": "import os\ndef f(x): return os.path.exists('a')",
    "reads the environment (os.environ)": "import os\ndef f(x): return os.environ['A']",
    "reads the environment (os.getenv)": "from os import getenv\ndef f(x): return getenv('A')",
    "asks the operating system (os.listdir)": "import os\ndef f(x): return os.listdir('.')",
    "runs text as code (eval)": "def f(x): return eval('x')",
    "runs text as code (exec)": "def f(x): exec('y = 1'); return x",
    "imports by a computed name (importlib.import_module)": (
        "import importlib\nN = 'math'\ndef f(x): return importlib.import_module(N)"
    ),
    "imports by a computed name (__import__)": "def f(x): return __import__('math')",
    "looks at its callers (sys._getframe)": "import sys\ndef f(x): return sys._getframe()",
    "looks at its callers (inspect.stack)": "import inspect\ndef f(x): return inspect.stack()",
    "asks the interpreter (sys.argv)": "import sys\ndef f(x): return sys.argv",
    "depends on where objects lie in memory or on the hash seed (hash)": "def f(x): return hash('a')",
    "reads files (.glob)": "import pathlib\nP = pathlib.PurePath('a')\ndef f(x): return list(P.glob('*'))",
    "reads files (.stat)": "import pathlib\nP = pathlib.PurePath('a')\ndef f(x): return P.stat().st_size",
    "reads files (.resolve)": "from pathlib import Path\ndef f(x): return Path('a').resolve()",
    "asks which subclasses were defined (.__subclasses__)": "class A: pass\ndef f(x): return len(A.__subclasses__())",
    "reads how code is written (.__doc__)": "class A:\n  'text'\ndef f(x): return len(A.__doc__)",
    "reads how code is written (.__annotations__)": "def g(x: int): pass\ndef f(x): return g.__annotations__",
    "reads how code is written (typing.get_type_hints)": "def g(x): pass\ndef f(x): return typing.get_type_hints(g)",
    "reads how code is written (.co_firstlineno)": "def f(x): return f.__code__.co_firstlineno",
    "asks the interpreter (numpy.geterr)": "def f(x): return np.geterr()",
    "asks the interpreter (decimal.getcontext)": "def f(x): return decimal.getcontext().prec",
    "calls a function that is hidden in a ufunc (g (vectorized))": (
        "def g(x): return x\nK = np.frompyfunc(g, 1, 1)\ndef f(x): return K(x)"
    ),
    "assigns to K, which is global": "K = 1\ndef f(x):\n  global K\n  K = 2\n  return x",
    "assigns to C.k, which is global": "C = types.SimpleNamespace()\ndef f(x):\n  C.k = 2\n  return x",
    "reads the clock (time)": "import time\ndef g(m): return m.time()\ndef f(x): return g(time)",
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_the_outside_world_answers_is_refused_with_the_place(load, why):
    found = of(load(REFUSED[why]))
    said = [line.split(" ", 3)[3] for line in found.refusals]
    assert why in said
    assert set(said) <= {why, "reads files (.exists)"}  # os.path.exists is told twice: any .exists is
    assert found.refusals[0].startswith("`f` in work.py:")


# Each is another order of "a" and "b", wherever a process draws a hash seed of its own.
IN_NO_ORDER = [
    "K = {'a', 'b'}\ndef f(x):\n  for k in K: x = g(k)\n  return x",
    "K = frozenset(('a', 'b'))\ndef f(x): return [g(k) for k in K]",
    "K = {'a', 'b'}\ndef f(x): return list(K)",
    "K = {'a', 'b'}\ndef f(x): return dict(zip(K, x))",
    "K = {'a', 'b'}\ndef f(x): return list(map(g, K))",
    "K = {'a', 'b'}\ndef f(x): return [(i, k) for i, k in enumerate(K)]",
    "class A: pass\nA.K = {'a', 'b'}\ndef f(x): return tuple(A.K)",
    "def m():\n  K = {'a', 'b'}\n  def f(x): return list(K)\n  return f\nf = m()",
    "def f(x):\n  for k in {'a', 'b'}: x = g(k)\n  return x",
    "def f(x): return [g(k) for k in {x, 'b'}]",
    "def f(x): return list(set(x))",
    "def f(x): return [k for k in frozenset(x.names)]",
    "def f(x): return list({k for k in x})",
    "def f(x):\n  s = {k for k in x}\n  for k in s: x = g(k)\n  return x",
    "def f(x):\n  s = set()\n  s.add(x)\n  t = s | {1}\n  return [g(k) for k in t]",
    "def f(x):\n  s = set(x)\n  return g(s)",
    "def f(x):\n  s = set(x)\n  return g(s, 1)",
    "def f(x): return g(*{k for k in x})",
    "def f(x):\n  s = set(x)\n  return s.pop()",
    "def f(x):\n  a, b = set(x)\n  return a",
    "def f(x):\n  s = set(x)\n  return [*s]",
    "def f(x):\n  s = set(x).union(x)\n  return ' '.join(s)",
    "def f(x):\n  s = set(x)\n  return f'{s}'",
    "def f(x):\n  s = set(x)\n  return [s]",
    "def h(x): return {x, 1}\ndef f(x): return [k for k in h(x)]",
    "K = {'a', 'b'}\ndef h(s): return list(s)\ndef f(x): return h(K)",
    "K = {'a', 'b'}\ndef h(s): return list(s)\ndef f(x): return h(x=1, s=K)",
    "K = {'a', 'b'}\ndef f(x):\n  s = K\n  return [g(k) for k in s]",
    "K = {'a', 'b'}\ndef f(x): return [g(k) for k in K - {x}]",
    "K = {'a', 'b'}\ndef f(x): return [g(k) for k in {x} - K]",
]
IN_ANY_ORDER = [
    "K = {'a', 'b'}\ndef f(x): return 'a' in K and x in {'c', 'd'}",
    "K = {'a', 'b'}\ndef f(x): return [g(k) for k in sorted(K)], list(sorted(K))",
    "K = {'a', 'b'}\ndef f(x): return [k for k in x if k not in K], list(x), len(K)",
    "def f(x):\n  for k in sorted(set(x)): g(k)\n  return len({x, 1}), max({k for k in x})",
    "K = {1, 2}\ndef f(x): return [g(k) for k in K]",
    "K = {'a': 1, 'b': 2}\ndef f(x): return [g(k) for k in K], list(K)",
    "def f(x):\n  s = set()\n  s.add(x)\n  s |= {1}\n  return g(x in s), len(s), sorted(s)",
    "def f(x):\n  s = set(x)\n  s = sorted(s)\n  for k in s: x = g(k)\n  return g(s)",
    "def f(x):\n  s = set(x)\n  return g([k for k in x if k not in s])",
    "def f(x): return set(x).issubset({x}) and {1, x} == {2, x} and not {x} - {1, x}",
    "K = {'a', 'b'}\ndef f(x):\n  s = K\n  return x in s and g(x in K, 1), sorted(K - {x})",
    "K = {1, 2}\ndef f(x): return g(K)",
]


@pytest.mark.parametrize("source", IN_NO_ORDER)
def test_the_order_of_a_set_is_refused_where_code_goes_by_it(load, source):
    (refusal,) = of(load("def g(k): return k\n" + source)).refusals
    assert refusal.endswith("goes through a set, whose order is another one in every process: sorted() makes it one")


@pytest.mark.parametrize("source", IN_ANY_ORDER)
def test_a_set_whose_order_does_not_show_is_not_refused(load, source):
    assert of(load("def g(k): return k\n" + source)).refusals == ()


def test_a_name_that_was_put_among_the_built_in_ones_counts(load, monkeypatch):
    seen = set()
    for value in (1.0, 2.0, lambda: 1, lambda: 2):
        monkeypatch.setattr(builtins, "SCALE", value, raising=False)
        seen.add(of(load("def f(x): return SCALE")).digest())
    assert len(seen) == 4


OPAQUE = {
    "`work.K` is a itertools.count": "K = itertools.count()\ndef f(x): return next(K)",
    "`work.K` is a builtins.generator": "K = (i for i in range(3))\ndef f(x): return next(K)",
    "`work.K` is a numpy.random._generator.Generator": "K = np.random.default_rng(0)\ndef f(x): return K.normal()",
    "`work.K` is a random.Random": "import random\nK = random.Random(0)\ndef f(x): return K.random()",
    "`work.K` is a weakref.ReferenceType": (
        "import weakref\nclass A: pass\na = A()\nK = weakref.ref(a)\ndef f(x): return K()"
    ),
    "`f(k)` reads the clock": "import time\ndef f(x, k=time.time): return k()",
}


@pytest.mark.parametrize("why", OPAQUE)
def test_what_has_no_content_is_refused_and_is_never_equal_to_another(load, why):
    one, other = of(load(OPAQUE[why])), of(load(OPAQUE[why]))
    assert one.refusals[0].startswith(why)
    assert one.digest() != other.digest() or "clock" in why


FINE = {
    "a lock": "K = threading.Lock()\ndef f(x):\n  with K: return x",
    "a logger": "K = logging.getLogger('a')\ndef f(x):\n  K.debug('here')\n  return x",
    "a method that is called like one of paths": "def f(x): return x.stat().open",
    "paths as texts": "import os\ndef f(x): return os.path.join('a', 'b')",
    "the type of a date": "def f(x): return datetime.datetime(2020, 1, 1).year",
    "a hash of its own": "class A:\n  def __hash__(self): return hash(1)\na = A()\ndef f(x): return a",
    "a number of an iterator": "def f(x): return next(itertools.count())",
    "what a method does that nothing calls": (
        "import time\nclass A:\n  def stamp(self): return time.time()\n  def m(self): return 1\na = A()\n"
        "def f(x): return a.m()"
    ),
}


@pytest.mark.parametrize("what", FINE)
def test_what_is_decided_by_content_is_not_refused(load, what):
    assert of(load(FINE[what])).refusals == ()


def test_a_method_that_code_names_is_looked_at_like_any_other(load):
    source = FINE["what a method does that nothing calls"].replace("a.m()", "a.stamp()")
    (refusal,) = of(load(source)).refusals
    assert re.fullmatch(r"`work.A.stamp` in work.py:\d+ reads the clock \(time.time\)", refusal)


def test_a_fault_in_what_is_looked_at_is_a_refusal(load):
    source = "class A(dict):\n  def values(self): raise RuntimeError('no')\nK = A()\ndef f(x): return K"
    found = of(load(source))
    assert found.refusals == ("`work.K` could not be looked at: RuntimeError: no",)
    assert found.digest() != of(load(source)).digest()


def test_what_takes_many_levels_comes_to_an_end(load):
    assert of(load("K = []\nfor _ in range(5000): K = [K]\ndef f(x): return K")).refusals == ()


PATCHES = {
    "a function of the user's": lambda patch: patch.setattr(jnp, "cos", lambda x: x),
    "another function of the library": lambda patch: patch.setattr(jnp, "cos", jnp.sin),
    "a function under the library's name": lambda patch: patch.setattr(
        jnp, "cos", functools.wraps(jnp.cos)(of_its_own)
    ),
    "a method of a class": lambda patch: patch.setattr(nn.Dense, "__call__", lambda self, x: x),
    "deep inside, where no code names it": lambda patch: patch.setattr(
        optax._src.numerics, "safe_increment", safe_increment
    ),
    "a built-in name": lambda patch: patch.setattr(builtins, "abs", lambda x: x),
}


def of_its_own(x):
    return x


def safe_increment(x):
    return x


@pytest.mark.parametrize("what", PATCHES)
def test_what_was_put_into_a_library_counts(load, monkeypatch, what):
    module = load("def f(x): return jnp.cos(x) + nn.Dense(3)(x) + abs(x) + optax.global_norm(x)")
    before = of(module).digest()
    with monkeypatch.context() as patch:
        PATCHES[what](patch)
        assert of(module).digest() != before
    assert of(module).digest() == before


OWNER = """
    def helper(experiment, x):
        return experiment.scaled(x)

    class E:
        gain = {gain}

        def f(self, x):
            return helper(self, x)

        def scaled(self, x):
            return x * self.gain

        def hosted(self, x):
            return {hosted}

        def __getitem__(self, x):
            return {item}
    """


def test_an_experiment_counts_as_far_as_any_code_names_it(load):
    def variant(gain=1, hosted=1, item=1):
        E = load(OWNER.format(gain=gain, hosted=hosted, item=item)).E
        return fingerprint(E, f=E.f).digest()

    assert variant() == variant() == variant(hosted=2)
    assert variant() != variant(gain=2)
    assert variant() != variant(item=2)


@pytest.mark.parametrize("said", ["getattr(self, 'ho' + x)", "type(self).__dict__['hosted']", "vars(type(self))"])
def test_a_computed_name_may_mean_anything_of_an_experiment(load, said):
    source = f"class E:\n  def f(self, x): return {said}\n  def hosted(self): return {{}}"
    one, other = (load(source.replace("{}", each)).E for each in "12")
    assert fingerprint(one, f=one.f).digest() != fingerprint(other, f=other.f).digest()


FIELD = """
    from nitro_cli import Experiment, GraphConst

    def helper(x): return x * {}

    @dataclasses.dataclass(frozen=True)
    class Config:
        width: int = 1

        def shaped(self, x): return x + {}

    class E(Experiment):
        act: GraphConst[typing.Any] = helper
        config: GraphConst[Config] = Config()
        sizes: GraphConst[tuple[int, ...]] = (1, {})

        def f(self, x): return self.act(x) + self.config.shaped(x) + self.sizes[1]

        def g(self, x): return x
    """


@pytest.mark.parametrize(("changed", "counts"), [((2, 1, 1), True), ((1, 2, 1), True), ((1, 1, 2), False)])
def test_code_that_a_field_holds_counts_where_code_names_the_field(load, changed, counts):
    def digests(numbers):
        E = load(FIELD.format(*numbers)).E
        return [fingerprint(E(), f=function).digest() for function in (E.f, E.g)]

    one, again, other = digests((1, 1, 1)), digests((1, 1, 1)), digests(changed)
    assert one == again
    assert (one[0] != other[0]) is counts
    assert one[1] == other[1]


@pytest.mark.parametrize(("old", "new"), [(2, 1), (1, 2)])
def test_what_is_left_of_a_module_that_was_loaded_anew_counts_by_itself(load, old, new):
    def digest(old, new):
        before = load(f"K = {old}\ndef g(x): return K")
        after = load(f"K = {new}\ndef f(x): return g(x) * K")
        after.g = before.g
        return of(after).digest()

    assert digest(1, 1) == digest(1, 1) != digest(old, new)


def test_two_classes_of_one_name_are_two(load):
    source = "def make(k):\n  class A:\n    def m(self): return self.k * {}\n  a = A()\n  a.k = k\n  return a\n"
    source += "K = [make(1), make(2)]\ndef f(x): return K"
    one, other = of(load(source.replace("{}", "1"))), of(load(source.replace("{}", "2")))
    assert one.digest() != other.digest()


def test_one_change_is_one_line_wherever_it_is_used(load):
    source = """
    K = {k}
    def low(x): return x * K
    def high(x): return low(x)
    def f(x): return high(low(x)) + low(x)
    """
    one, other = of(load(source.format(k=1))), of(load(source.format(k=2)))
    assert {name for name in one.entries if one.entries[name] != other.entries[name]} == {"work.K"}
    assert one.entries.keys() == other.entries.keys() == {"f", "work.high", "work.low", "work.K"}
    assert one.entries["work.K"] == "int 1"
    assert one.places["work.low"].startswith("work.py:")


def test_libraries_and_code_objects_are_named(load):
    module = load("def g(x):\n  return [jnp.sin(a) for a in x]\ndef f(x): return optax.l2_loss(g(x))")
    found = of(module)
    assert found.libraries == {"jax", "optax"}
    inner = [each for each in module.g.__code__.co_consts if isinstance(each, types.CodeType)]
    assert found.codes == {module.f.__code__, module.g.__code__, *inner}


SEEDED = """
import sys
sys.path.insert(0, sys.argv[1])
import written
from nitro_cli import Experiment
from nitro_cli.programs.fingerprint import fingerprint
print(fingerprint(f=written.f).digest())
"""
WRITTEN = """
import enum
import jax
import jax.numpy as jnp

class Kind(enum.Enum):
    A = "a"
    B = "b"

def one(x): return x
def two(x): return -x
NAMES = {"x", "y", "z", "another"}
CALLS = {one, two, Kind, Kind.A}
TABLE = {Kind.A: one, Kind.B: two}
LIMIT = object()

@jax.jit
def inner(x, limit=LIMIT):
    return x if limit is LIMIT else None

def f(x):
    return inner(x) if x in {"p", "q", 3} else [NAMES, CALLS, TABLE[Kind.A](x), jnp.sin(x)]
"""


def test_another_process_folder_and_hash_seed_give_the_same(tmp_path):
    found = set()
    for seed in ("0", "1", "77"):
        folder = tmp_path / seed
        folder.mkdir()
        ends = "\r\n" if seed == "1" else "\n"
        (folder / "written.py").write_bytes(WRITTEN.replace("\n", ends).encode())
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path), "JAX_PLATFORMS": "cpu", "HOME": str(tmp_path)}
        words = [sys.executable, "-c", SEEDED, str(folder)]
        found.add(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(found) == 1


@pytest.mark.parametrize("base", ["Own", "collections.abc.Hashable"])
def test_what_is_registered_with_an_abstract_class_counts(load, base):
    source = "class Own(abc.ABC): pass\nclass A: __hash__ = None\n{}\ndef f(x): return isinstance(x, BASE)"
    source = source.replace("BASE", base)
    without, registered = of(load(source.format(""))), of(load(source.format(f"{base}.register(A)")))
    assert without.digest() != registered.digest()
    assert registered.refusals == ()


def test_a_private_attribute_counts_where_code_names_it():
    class Private(Experiment):
        _scale: float = 1.0

        def loss(self, pred, batch):
            return self._scale

        def metrics(self, pred, batch):
            return {}

    e = Private()

    def found(name):
        return fingerprint(e, f=getattr(Private, name)).digest()

    look, before, other = Recheck(e, f=Private.loss), found("loss"), found("metrics")
    e._scale = 2.0
    assert not look.unchanged()
    assert found("loss") != before
    assert found("metrics") == other
    e._scale = 1.0
    assert found("loss") == before


def test_calls_do_not_change_what_a_function_is(load):
    module = load("K = [1, 2]\ndef f(x):\n  return sum(k * x for k in K) + len(K)")
    before = of(module).digest()
    for _ in range(3000):
        module.f(2)
    assert of(module).digest() == before


CHANGES = {
    "a number": "m.K = 2",
    "a name that hid none": "m.len = lambda x: 3",
    "a list": "m.L.append(3)",
    "an item of a list": "m.L[0] = 3",
    "an entry of a dict": "m.D['a'] = 2",
    "another order of a dict": "m.D['a'] = m.D.pop('a')",
    "a default": "m.g.__defaults__ = (2,)",
    "a keyword's default": "m.g.__kwdefaults__['q'] = 2",
    "code": "m.g.__code__ = (lambda x, k=1, *, q=1: None).__code__",
    "a captured value": "m.h.__closure__[0].cell_contents = 5",
    "an attribute of a function": "m.g.k = 2",
    "an array in place": "m.A[1] = 5",
    "an array's shape": "m.A.resize((2, 2), refcheck=False)",
    "an attribute of an object": "m.o.k = 3",
    "a slot": "m.s.k = 3",
    "a method": "m.O.m = lambda self: 7",
    "the class of an object": "m.o.__class__ = m.P",
    "a function of a library": "m.jnp = m.np",
    "a context variable": "m.V.set(4)",
    "a set": "m.S.add(7)",
    "what an abstract class takes for its own": "m.Abstract.register(m.O)",
}
WATCHED = """
    K, L, D, A, S = 1, [1, 2], {"a": 1, "b": 2}, np.zeros(4), {1, 2}
    V = contextvars.ContextVar("V", default=1)
    def g(x, k=1, *, q=1): return k
    def make(c): return lambda x: x * c
    h = make(3)
    class O:
        def __init__(self): self.k = 1
        def m(self): return self.k
    class P(O): pass
    class Slotted:
        __slots__ = ("k",)
    class Abstract(abc.ABC): pass
    o, s = O(), Slotted()
    s.k = 1
    def f(x): return K * len(L) + D["a"] + A + g(x) + h(x) + o.m() + s.k + jnp.sin(x) + V.get() + len(S), Abstract
    """


@pytest.mark.parametrize("what", CHANGES)
def test_a_recheck_sees_what_a_walk_would_see(load, what):
    module = load(WATCHED)
    look = Recheck(f=module.f)
    assert look.unchanged()
    before = look.fingerprint

    def change():
        exec(CHANGES[what], {"m": module})
        assert not look.unchanged()
        assert look.fingerprint.digest() != before.digest()
        assert look.unchanged()

    contextvars.copy_context().run(change)


def test_a_recheck_walks_no_further_while_nothing_changes(load, monkeypatch):
    module = load(WATCHED)
    look = Recheck(f=module.f)
    monkeypatch.setattr("nitro_cli.programs.fingerprint.Walk", None)
    assert look.unchanged()


def test_an_equal_value_in_another_object_is_no_change(load):
    module = load(WATCHED)
    look = Recheck(f=module.f)
    module.L = list(module.L)
    assert look.unchanged()


def test_modules_that_hold_arrays_do_not_count_by_serial_numbers():
    one, other = nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    assert fingerprint(model=one).digest() == fingerprint(model=other).digest()
    assert fingerprint(model=nn.Dense(2)).digest() == fingerprint(model=nn.Dense(2)).digest()
    assert fingerprint(model=one).refusals == fingerprint(model=nn.Dense(2)).refusals == ()


def test_graph_definitions_count_by_content():
    def definition(width, rngs=0):
        return nnx.split(nnx.Linear(2, width, rngs=nnx.Rngs(rngs)))[0]

    assert fingerprint(model=definition(2)).digest() == fingerprint(model=definition(2, rngs=1)).digest()
    assert fingerprint(model=definition(2)).digest() != fingerprint(model=definition(3)).digest()
    assert fingerprint(model=definition(2)).refusals == ()


def test_an_array_that_is_traced_is_refused():
    def traced(x):
        assert "model" in fingerprint(model=x).refusals[0]
        return x

    jax.jit(traced)(np.ones(2))
