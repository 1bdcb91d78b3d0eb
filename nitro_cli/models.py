"""One line from a flax module to the triple ``(model, ps, st)`` that ``build_model`` returns, for linen and for NNX.

Parameters and state cross nitro's programs as plain nested dicts of arrays: a call over NNX's own containers costs ten
times as much. Initialisation is compiled as one program, since an initialisation run operation by operation compiles
every operation by itself and takes seconds.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro_cli.errors import ExperimentError
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.once import run_once


def linen_model(module: Any, rng: jax.Array, *inputs: Any, **options: Any) -> tuple[Any, Any, Any]:
    """Initialise a linen module.

    ``inputs`` are example arrays (or ``jax.ShapeDtypeStruct``), batch axis first, as the module's ``__call__`` takes
    them; ``options`` are its static keywords (``train=False``). Returns ``(module, ps, st)``: ``ps`` is the "params"
    collection, ``st`` a dict of all other collections (empty for a stateless module).
    """
    specs = [jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.canonicalize_dtype(x.dtype)) for x in inputs]

    def initialise(key: jax.Array) -> Any:
        zeros = [jnp.zeros(spec.shape, spec.dtype) for spec in specs]
        return module.init({"params": key, "dropout": jax.random.fold_in(key, 1)}, *zeros, **options)

    code = fingerprint(module=model_content(module), options=options)
    described = {str(i): f"{spec.dtype}{spec.shape}" for i, spec in enumerate(specs)}
    kept_as = type(module).__qualname__
    variables = dict(run_once(initialise, rng, name="initialise", experiment=kept_as, code=code, settings=described))
    ps = variables.pop("params", {})
    return module, ps, variables


@dataclass(frozen=True)
class _Definition:
    """An NNX module without its arrays: its graph definition, and the shape of the state that was split from it."""

    graphdef: Any
    params: Any
    state: Any
    rng_state: Any
    rng_leaves: tuple[tuple[bool, tuple[int, ...], Any], ...]


class NnxModel:
    """The static half of an NNX module.

    ``content`` is what decides it, for the keys of programs: the function that builds the module, or its definition.
    The definition itself is asked for when something is traced: it holds functions, so it cannot be kept for the next
    process, and one that loads all its programs does not need it.
    """

    def __init__(self, define: Callable[[], _Definition], content: Any) -> None:
        self._define = define
        self.content = content

    @functools.cached_property
    def definition(self) -> _Definition:
        return self._define()

    def merge(self, ps: Any, st: Any, rng: jax.Array | None) -> Any:
        """The module with these parameters and state; every random stream is derived from ``rng``."""
        from flax import nnx

        known = self.definition
        key = jax.random.wrap_key_data(jnp.zeros(2, jnp.uint32), impl="threefry2x32") if rng is None else rng
        streams = [
            jax.random.fold_in(key, index) if is_key else jnp.zeros(shape, dtype)
            for index, (is_key, shape, dtype) in enumerate(known.rng_leaves)
        ]
        return nnx.merge(
            known.graphdef,
            jax.tree.unflatten(known.params, jax.tree.leaves(ps)),
            jax.tree.unflatten(known.state, jax.tree.leaves(st)),
            jax.tree.unflatten(known.rng_state, streams),
        )


def nnx_model(module: Any, rng: jax.Array | None = None) -> tuple[NnxModel, Any, Any]:
    """Split an NNX module into ``(model, ps, st)``.

    ``module`` is a module, or (much faster to start) a function of ``nnx.Rngs`` that builds one, with ``rng`` to seed
    it: ``nnx_model(lambda rngs: Net(self.width, rngs=rngs), rng)``. ``ps`` holds the ``nnx.Param`` values, ``st`` every
    other variable (batch statistics and so on). Random streams are not state here: ``apply_model`` derives them from
    its ``rng``, so that a resumed run draws the same numbers.
    """
    from flax import nnx

    if isinstance(module, nnx.Module):
        known, ps, st = _split(module)
        return NnxModel(lambda: known, known.graphdef), *jax.tree.map(jnp.asarray, (ps, st))
    if rng is None:
        raise ExperimentError(
            "nnx_model needs a random key to build a module from a function",
            "write: nnx_model(lambda rngs: Net(..., rngs=rngs), rng)",
        )
    defined: list[_Definition] = []

    def initialise(key: jax.Array) -> Any:
        made = module(nnx.Rngs(params=key, default=jax.random.fold_in(key, 1), dropout=jax.random.fold_in(key, 2)))
        known, ps, st = _split(made)
        defined[:] = [known]
        return ps, st

    def define() -> _Definition:
        if not defined:
            jax.eval_shape(initialise, rng)
        return defined[0]

    kept_as = getattr(module, "__qualname__", type(module).__qualname__).partition(".")[0]
    ps, st = run_once(initialise, rng, name="initialise", experiment=kept_as, code=fingerprint(module=module))
    return NnxModel(define, module), ps, st


def _split(module: Any) -> tuple[_Definition, Any, Any]:
    """``(definition, ps, st)`` with ``ps`` and ``st`` as plain nested dicts."""
    from flax import nnx

    graphdef, params, rng_state, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    rng_leaves = tuple(
        (bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)), tuple(leaf.shape), leaf.dtype)
        for leaf in jax.tree.leaves(rng_state)
    )
    params_tree, rest_tree, rng_tree = map(jax.tree.structure, (params, rest, rng_state))
    definition = _Definition(graphdef, params_tree, rest_tree, rng_tree, rng_leaves)
    return definition, nnx.to_pure_dict(params), nnx.to_pure_dict(rest)


def apply_model(
    model: Any, ps: Any, st: Any, *inputs: Any, train: bool = False, rng: jax.Array | None = None, **options: Any
) -> tuple[Any, Any]:
    """Run either kind of module: ``(outputs, st_new)``, with ``st_new`` shaped like ``st``.

    ``train`` switches dropout and batch statistics (a linen module gets it under the name its ``__call__`` declares:
    ``train``, ``training``, ``deterministic`` or ``use_running_average``); ``rng`` feeds dropout. With ``train=False``
    ``st_new`` equals ``st``.
    """
    if isinstance(model, NnxModel):
        return _apply_nnx(model, ps, st, inputs, train, rng, options)
    return _apply_linen(model, ps, st, inputs, train, rng, options)


def _apply_nnx(model: NnxModel, ps: Any, st: Any, inputs: Any, train: bool, rng: Any, options: Any) -> tuple[Any, Any]:
    from flax import nnx

    module = model.merge(ps, st, rng)
    module.train() if train else module.eval()
    outputs = module(*inputs, **options)
    _, _, _, rest = nnx.split(module, nnx.Param, nnx.RngState, ...)
    return outputs, jax.tree.unflatten(jax.tree.structure(st), jax.tree.leaves(rest))


def _apply_linen(model: Any, ps: Any, st: Any, inputs: Any, train: bool, rng: Any, options: Any) -> tuple[Any, Any]:
    declared = inspect.signature(type(model).__call__).parameters
    for name, value in (
        ("train", train),
        ("training", train),
        ("deterministic", not train),
        ("use_running_average", not train),
    ):
        if name in declared and name not in options:
            options[name] = value
    variables = {"params": ps, **st}
    rngs = {"dropout": rng} if rng is not None else None
    if not (train and st):
        return model.apply(variables, *inputs, rngs=rngs, **options), st
    outputs, changed = model.apply(variables, *inputs, rngs=rngs, mutable=list(st), **options)
    return outputs, {**st, **changed}


def model_content(model: Any) -> Any:
    """The model as a fingerprint looks at it: of an ``NnxModel`` what makes it, since its arrays are arguments."""
    if type(model) in (list, tuple):
        return type(model)(map(model_content, model))
    if type(model) is dict:
        return {key: model_content(part) for key, part in model.items()}
    return model.content if isinstance(model, NnxModel) else model
