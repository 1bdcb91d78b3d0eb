"""Schedules at many steps in one compiled call, to the last bit what they give when they are called step by step.

Called with a number, a schedule runs one small program per operation, and each rounds its result. Compiled as a whole,
operations are merged: ``a * b + c`` is rounded once, a division becomes a multiplication by the reciprocal, and the
values differ in their last bits. So the call that is compiled here keeps operations apart: whatever passes from one to
the next is or-ed, bit by bit, with a zero that is an argument. No compiler can look through that, and it costs nothing.

Operations inside one ``jax.jit`` of the schedule's own stay together, since they are together step by step too. The one
exception are functions that jax itself inlines while it traces, such as ``jnp.mean``: they are taken apart, and may
differ in the last bit. No schedule of optax uses one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Var, jaxpr_as_fun

# Numbers of a schedule that are repeated for each step, so that an operation meets them as it would meet them alone: a
# division by one number shared by all steps would be another operation. Larger tables are shared.
REPEATED = 64


def at_many(schedule: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """``schedule`` as a function ``(steps, zeros)`` to be compiled: ints, and as many int zeros.

    Raises whatever jax raises, now or when the result is traced, where the schedule cannot be traced; TypeError where
    it returns anything but one number or array.
    """
    closed, returned = jax.make_jaxpr(schedule, return_shape=True)(0)
    if jax.tree.structure(returned) != jax.tree.structure(0):
        raise TypeError("a schedule returns one number or array")

    def values(steps: Any, zeros: Any) -> Any:
        steps = steps.astype(jax.dtypes.canonicalize_dtype(np.int64))  # as jax takes a Python int
        return jax.vmap(lambda step, zero: _apart(closed, step, zero, zeros[0]))(steps, zeros)

    return values


def _apart(closed: ClosedJaxpr, step: Any, zero: Any, shared: Any) -> Any:
    """The one result of ``closed`` at ``step``, with a barrier between any two operations."""
    jaxpr = closed.jaxpr
    known = dict(zip(jaxpr.constvars, map(jnp.asarray, closed.consts), strict=True)) | {jaxpr.invars[0]: step}

    def read(atom: Any) -> Any:
        value = jnp.asarray(atom.val, atom.aval.dtype) if hasattr(atom, "val") else known[atom]  # literals have one
        return _opaque(value, zero if value.size <= REPEATED else shared)

    for eqn in jaxpr.eqns:
        inputs = [Var(atom.aval) for atom in eqn.invars]
        alone = jaxpr.replace(constvars=[], invars=inputs, outvars=eqn.outvars, eqns=[eqn.replace(invars=inputs)])
        known.update(zip(eqn.outvars, jaxpr_as_fun(ClosedJaxpr(alone, []))(*map(read, eqn.invars)), strict=True))
    return read(jaxpr.outvars[0])


def _opaque(value: Any, zero: Any) -> Any:
    """``value``, where no compiler knows it. By an or: two in a row are still a barrier, where two xors would be none.

    Integers pass: their arithmetic rounds nothing.
    """
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return value
    bits = np.dtype(f"int{8 * value.dtype.itemsize}")
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(value, bits) | zero.astype(bits), value.dtype)
