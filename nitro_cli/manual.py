"""What a ``train_step`` is written with: gradients, optimizer steps, clipping, moving averages.

All of these are plain functions of arrays. They work inside a step, in a test, and in a notebook.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal, jaxpr_as_fun

from nitro_cli.errors import ExperimentError, Place
from nitro_cli.optim.clip import averaged, clip_by_global_norm
from nitro_cli.optim.leaves import spec_text
from nitro_cli.optim.manual import OptimizerState, optimizer_state, step_optimizer

__all__ = [
    "OptimizerState",
    "backward",
    "clip_by_global_norm",
    "moving_average",
    "optimizer_state",
    "step_optimizer",
]


def backward(fn: Callable[..., Any], params: Any, *consts: Any, has_aux: bool = False) -> tuple[Any, Any]:
    """``(loss, gradient)`` of ``fn(params, *consts)`` with respect to ``params``; everything else is constant.

    ``fn`` returns a floating-point scalar or, with ``has_aux``, a pair ``(scalar, aux)``; the first of the two results
    is then ``(loss, aux)``. The gradient has the structure of ``params``.

    Raises ExperimentError where the loss does not depend on ``params`` at all: ``fn`` then uses a value captured from
    outside where it should use its argument, and the gradient would be silently zero.
    """
    aux: list[Any] = []

    def objective(leaves: Any) -> Any:
        returned = fn(jax.tree.unflatten(structure, leaves), *consts)
        loss, extra = _parts(fn, returned, has_aux)
        flat, tree = jax.tree.flatten(extra)
        aux[:] = [tree]
        return loss, flat

    leaves, structure = jax.tree.flatten(params)
    leaves = [jnp.asarray(leaf) for leaf in leaves]
    # One trace of the objective and its derivative, which is looked at before it is used.
    closed, shape = jax.make_jaxpr(jax.value_and_grad(objective, has_aux=True), return_shape=True)(leaves)
    if leaves and all(_is_zero(closed.jaxpr, out) for out in closed.jaxpr.outvars[-len(leaves) :]):
        raise _captured(fn, params)
    flat = jaxpr_as_fun(closed)(*leaves)
    (loss, extra), gradient = jax.tree.unflatten(jax.tree.structure(shape), flat)
    value = (loss, jax.tree.unflatten(aux[0], extra)) if has_aux else loss
    return value, jax.tree.unflatten(structure, gradient)


def moving_average(average: Any, values: Any, decay: Any) -> Any:
    """``decay * average + (1 - decay) * values``, leaf by leaf, in the dtypes of ``average``.

    Keep ``average`` in ``st`` (``st["ema"]``, begun as a copy of the parameters in ``build_model``), so that
    checkpoints hold it and ``forward`` can evaluate with it. ``decay`` is a number or a traced scalar.
    """
    return averaged(average, values, decay)


def _parts(fn: Callable[..., Any], returned: Any, has_aux: bool) -> tuple[Any, Any]:
    if has_aux and not (isinstance(returned, tuple) and len(returned) == 2):
        raise _objective_error(fn, f"must return (loss, aux) under has_aux, and returned {_kind(returned)}")
    loss, extra = returned if has_aux else (returned, ())
    if isinstance(loss, (tuple, list, dict)) or loss is None:
        note = "for a pair (loss, aux), write: backward(..., has_aux=True)"
        raise _objective_error(fn, f"must return one scalar, and returned {_kind(loss)}", note)
    loss = jnp.asarray(loss)
    if loss.shape != ():
        note = "reduce it over the batch: return loss.mean()"
        raise _objective_error(fn, f"must return one scalar, and returned an array {spec_text(loss)}", note)
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise _objective_error(fn, f"must return a floating-point number, and returned {loss.dtype}")
    return loss, extra


def _objective_error(fn: Callable[..., Any], what: str, *notes: str) -> ExperimentError:
    return ExperimentError(f"the objective given to backward {what}", *notes, place=_place(fn))


def _place(fn: Callable[..., Any]) -> Place | None:
    code = getattr(fn, "__code__", None)
    return Place(code.co_filename, code.co_firstlineno) if code is not None else None


def _kind(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {spec_text(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def _is_zero(jaxpr: Any, out: Any) -> bool:
    """Whether an output is the zero that jax fills in for a derivative that does not exist: a zero literal, as it is or
    broadcast. A derivative that merely comes out as zero is computed from something."""
    if isinstance(out, Literal):
        return not np.any(np.asarray(out.val, np.float64))
    made = next((eqn for eqn in jaxpr.eqns if out in eqn.outvars), None)
    if made is None or made.primitive.name not in ("broadcast_in_dim", "convert_element_type", "full_like"):
        return False
    return all(_is_zero(jaxpr, operand) for operand in made.invars)


def _captured(fn: Callable[..., Any], params: Any) -> ExperimentError:
    names = _captured_names(fn, params)
    found = [f"it captures {', '.join(f'`{name}`' for name in names)}, which holds the same arrays"] if names else []
    return _objective_error(
        fn,
        "does not depend on its first argument, so the gradient would be zero everywhere",
        "the capture trap: a value that a function takes from outside is a constant to its gradient",
        *found,
        "use the argument itself inside: backward(lambda ps_gen: loss(ps_gen), ps['gen'])",
        "another way to get here: the loss goes through stop_gradient, an argmax, or whole numbers",
    )


def _captured_names(fn: Callable[..., Any], params: Any) -> list[str]:
    """Variables of the enclosing function that hold one of the arrays of ``params``."""
    code, cells = getattr(fn, "__code__", None), getattr(fn, "__closure__", None) or ()
    wanted = {id(leaf) for leaf in jax.tree.leaves(params)}
    names = []
    for name, cell in zip(code.co_freevars if code else (), cells, strict=False):
        try:
            leaves = jax.tree.leaves(cell.cell_contents)
        except (ValueError, TypeError):  # not assigned yet, or a tree that jax cannot take apart
            continue
        if any(id(leaf) in wanted for leaf in leaves):
            names.append(name)
    return names
