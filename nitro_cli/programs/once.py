"""Programs that a process runs once, before it trains: initialisations of models and optimizers.

They go through the store like the others, and are not counted among the programs of a run. What one lowers to decides
too: an initialisation that captures the experiment has another key for every seed or learning rate, and is compiled no
second time all the same. On a CPU it is compiled without the expensive passes: a small convolutional network took 1.9 s
instead of 8.3 s to initialise, with the same numbers up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from nitro_cli.optim.leaves import structure_text
from nitro_cli.programs.build import build
from nitro_cli.programs.cache import Built, program_cache
from nitro_cli.programs.fingerprint import Fingerprint
from nitro_cli.programs.key import Request
from nitro_cli.programs.values import kept_values


def run_once(
    function: Callable[[Any], Any],
    argument: Any,
    *,
    name: str,
    experiment: str,
    code: Fingerprint,
    settings: Mapping[str, str] | None = None,
) -> Any:
    """``function(argument)`` as one compiled program; ``argument`` is any tree of arrays.

    ``code`` is all that the function depends on besides its argument.
    """
    leaves, tree = jax.tree.flatten(argument)
    leaves = [leaf if isinstance(leaf, jax.Array) else _canonical(leaf) for leaf in leaves]
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    described = {str(i): f"{spec.dtype}[{','.join(map(str, spec.shape))}]" for i, spec in enumerate(specs)}
    found: dict[str, Any] = {}

    def initialise(leaves: Any) -> Any:
        flat, found["structure"] = jax.tree.flatten(function(jax.tree.unflatten(tree, leaves)))
        return flat

    request = Request(name, code, described | {"tree": structure_text(tree)}, settings or {}, {}, experiment)
    cache = program_cache()

    def make() -> Built:
        return build(request, initialise, [specs], reads=set(), found=found, options=_cheap(), linked=cache.linked)

    def run() -> tuple[Any, list[Any]]:
        built = cache.held_once(request, make)
        return built.found["structure"], built.executable(leaves)

    return jax.tree.unflatten(*kept_values(request, leaves, run))


def _canonical(leaf: Any) -> np.ndarray:
    """A host value in the dtype that jax gives it: a compiled program does not convert what it is called with."""
    array = np.asarray(leaf)
    return array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)


def _cheap() -> dict[str, Any]:
    if jax.default_backend() != "cpu":
        return {}
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
