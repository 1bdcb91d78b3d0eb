"""Whether an optimizer rule treats every number of every parameter alike, decided from its own program.

Such a rule (adam, sgd, lion) gives the same result on many leaves joined into one flat buffer, and is far cheaper
there. One that looks at a whole leaf (lamb, adafactor, muon), at its shape or at its name does not, and must see the
tree. The check traces one update and follows the data: each leaf's result may depend on that leaf's own numbers,
element by element, and on scalars; and it must be computed in the same way for every leaf and for a flat buffer. What
the check does not know counts as not element-wise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

# Primitives whose every output element depends on the same element of their array inputs.
_ELEMENTWISE = frozenset(
    """abs acos acosh add add_any and asin asinh atan atan2 atanh cbrt ceil clamp convert_element_type copy copy_p cos
    cosh div eq erf erf_inv erfc exp exp2 expm1 floor ge gt integer_pow is_finite le log log1p logistic lt max min mul
    ne neg nextafter not optimization_barrier or pow reduce_precision rem round rsqrt select_n sign sin sinh sqrt square
    stop_gradient sub tan tanh xor""".split()  # noqa: SIM905 (sixty quoted names would be harder to read)
)
_CALLS = {
    "pjit": "jaxpr",
    "jit": "jaxpr",
    "closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_SHAPES = frozenset(("shape", "sharding", "broadcast_dimensions", "name", "jaxpr", "call_jaxpr", "branches"))
_FLAT = 12345  # elements of the flat buffer that leaves are compared with; a size that no rule treats specially
SCALAR = "scalar"


class _NotElementwise(Exception):
    """Raised inside the check; never leaves it."""


def is_elementwise(init: Callable[[Any], Any], update: Callable[..., Any], tree: Any) -> bool:
    """Whether an optax rule, given by its two functions, may run on joined leaves of ``tree``, a tree of
    ``jax.ShapeDtypeStruct``. It is tried on that very tree, since a rule may go by names."""
    # A leaf without axes cannot be told from the rule's own scalars; it is never joined, so it need not be.
    joined = {path: spec for path, spec in _with_paths(tree) if spec.shape}
    try:
        forms = _forms(init, update, tree)
        return all(
            {forms[path] for path, spec in joined.items() if spec.dtype == dtype} == _flat_forms(init, update, dtype)
            for dtype in {spec.dtype for spec in joined.values()}
        )
    except _NotElementwise:
        return False


def _flat_forms(init: Any, update: Any, dtype: Any) -> set[str]:
    try:
        return set(_forms(init, update, {"flat": jax.ShapeDtypeStruct((_FLAT,), dtype)}).values())
    except Exception:  # the rule wants the names of the tree
        raise _NotElementwise from None


def _forms(init: Any, update: Any, tree: Any) -> dict[Any, str]:
    """By path, how each leaf is computed, as a text without shapes and names."""
    leaves = dict(_with_paths(tree))
    arguments = (tree, jax.eval_shape(init, tree), tree)  # gradients, state, parameters
    closed, returned = jax.make_jaxpr(update, return_shape=True)(*arguments)
    kinds: dict[Any, tuple[Any, str]] = {}
    for var, (path, spec) in zip(closed.jaxpr.invars, _with_paths(arguments), strict=True):
        leaf = _leaf_in(path, spec, leaves)
        kinds[var] = (SCALAR if leaf is None else leaf, _name(path, leaf))
    for var, const in zip(closed.jaxpr.constvars, closed.consts, strict=True):
        kinds[var] = _constant(const)
    forms: dict[Any, list[str]] = {path: [] for path in leaves}
    for (path, spec), (owner, form) in zip(_with_paths(returned), _follow(closed.jaxpr, kinds), strict=True):
        leaf = _leaf_in(path, spec, leaves)
        if owner not in (SCALAR, leaf):
            raise _NotElementwise
        if leaf is not None:
            forms[leaf].append(f"{_name(path, leaf)} = {form}")
    return {path: "\n".join(sorted(lines)) for path, lines in forms.items()}


def _with_paths(tree: Any) -> list[tuple[Any, Any]]:
    return jax.tree_util.tree_flatten_with_path(tree)[0]


def _leaf_in(path: Any, spec: Any, leaves: Any) -> Any:
    """The path of the leaf that an array belongs to: the state of optax rules repeats the tree of the parameters. What
    belongs to a leaf has its shape; everything else is a scalar, for which it is None."""
    found = next((path[i:] for i in range(len(path)) if path[i:] in leaves), None)
    if tuple(spec.shape) != (() if found is None else tuple(leaves[found].shape)):
        raise _NotElementwise
    return found


def _name(path: Any, leaf: Any) -> str:
    return jax.tree_util.keystr(path[: len(path) - len(leaf or ())]) + ("*" if leaf else "")


def _constant(value: Any) -> tuple[str, str]:
    if np.shape(value) != ():
        raise _NotElementwise
    return SCALAR, f"{np.asarray(value).dtype} {np.asarray(value).item()!r}"


def _follow(jaxpr: Any, kinds: dict[Any, tuple[Any, str]]) -> list[tuple[Any, str]]:
    """Owner (a leaf's name, or SCALAR) and form of each output. The form is a digest of the expression."""
    for eqn in jaxpr.eqns:
        inputs = [_kind(atom, kinds) for atom in eqn.invars]
        for var, result in zip(eqn.outvars, _apply(eqn, inputs), strict=True):
            kinds[var] = result
    return [_kind(atom, kinds) for atom in jaxpr.outvars]


def _kind(atom: Any, kinds: dict[Any, tuple[Any, str]]) -> tuple[Any, str]:
    if hasattr(atom, "val"):  # a literal
        return _constant(atom.val)
    return kinds[atom]


def _apply(eqn: Any, inputs: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    name = eqn.primitive.name
    if name in _CALLS and _CALLS[name] in eqn.params:
        return _call(eqn.params[_CALLS[name]], inputs)
    if name == "cond":
        if inputs[0][0] != SCALAR:
            raise _NotElementwise
        branches = [_call(branch, inputs[1:]) for branch in eqn.params["branches"]]
        return [_merge(inputs[0], results) for results in zip(*branches, strict=True)]
    owners = {owner for owner, _ in inputs if owner != SCALAR}
    if len(owners) > 1:
        raise _NotElementwise
    owner, form = owners.pop() if owners else SCALAR, _form(eqn, inputs)
    # From scalars alone comes a scalar, or a number spread over some leaf's shape; that is nothing new either.
    scalars = owner == SCALAR and all(var.aval.shape == () for var in eqn.outvars)
    spreads = owner == SCALAR and name == "broadcast_in_dim"
    if not (scalars or spreads or name in _ELEMENTWISE or _keeps_shape(eqn)):
        raise _NotElementwise
    return [(owner, f"{form}:{i}") for i, _ in enumerate(eqn.outvars)]


def _keeps_shape(eqn: Any) -> bool:
    """A reshape or broadcast that changes nothing, as some rules write them."""
    return eqn.primitive.name in ("broadcast_in_dim", "reshape", "squeeze") and (
        eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    )


def _call(closed: Any, inputs: list[tuple[Any, str]]) -> list[tuple[Any, str]]:
    jaxpr = getattr(closed, "jaxpr", closed)
    kinds: dict[Any, tuple[Any, str]] = dict(zip(jaxpr.invars, inputs, strict=True))
    kinds |= {v: _constant(c) for v, c in zip(jaxpr.constvars, getattr(closed, "consts", ()), strict=True)}
    return _follow(jaxpr, kinds)


def _merge(predicate: tuple[Any, str], results: tuple[tuple[Any, str], ...]) -> tuple[Any, str]:
    owners = {owner for owner, _ in results if owner != SCALAR}
    if len(owners) > 1:
        raise _NotElementwise
    form = str(hash((predicate[1], tuple(form for _, form in results))))
    return (owners.pop() if owners else SCALAR), form


def _form(eqn: Any, inputs: list[tuple[Any, str]]) -> str:
    """A short text that is equal for equal expressions. Shapes are left out: they differ from leaf to leaf."""
    parameters = sorted((k, str(v)) for k, v in eqn.params.items() if k not in _SHAPES)
    return str(hash((eqn.primitive.name, tuple(parameters), tuple(form for _, form in inputs))))
