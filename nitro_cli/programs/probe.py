"""One of the two processes of ``nitro cache-stats --probe``: asks for two small programs, and jax's cache for a third.

    python -m nitro_cli.programs.probe FILE JAX_CACHE_FOLDER

What happened is written into FILE as JSON. The store is the one that ``NITRO_CACHE_DIR`` names.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.compilation_cache import compilation_cache

from nitro_cli.programs.build import build
from nitro_cli.programs.fingerprint import Fingerprint
from nitro_cli.programs.key import Request

HITS, MISSES = "/jax/compilation_cache/cache_hits", "/jax/compilation_cache/cache_misses"
_CODE = Fingerprint({"probe": "1"}, again=lambda: _CODE)


def plain(leaves: Sequence[Any]) -> list[Any]:
    """A network of one layer and its gradient."""
    x, w = leaves
    return [jax.grad(lambda w: jnp.tanh(x @ w).sum())(w)]


def decomposed(leaves: Sequence[Any]) -> list[Any]:
    """A Cholesky decomposition, which a CPU leaves to a library that a process must have set up."""
    x, w = leaves
    return [jnp.linalg.cholesky(x @ x.T + 64.0 * jnp.eye(64)) @ w]


def main(file: str, jax_folder: str) -> None:
    numbers = np.random.default_rng(0)
    leaves = [numbers.standard_normal((64, 64), np.float32) for _ in range(2)]
    rows = [_nitro(name, function, leaves) for name, function in (("gradient", plain), ("cholesky", decomposed))]
    rows.append(_jax(jax_folder, leaves))
    Path(file).write_text(
        json.dumps({"device": f"{jax.default_backend()} {jax.devices()[0].device_kind}", "rows": rows})
    )


def _nitro(name: str, function: Callable[[Sequence[Any]], list[Any]], leaves: Sequence[Any]) -> dict[str, Any]:
    specs = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]
    request = Request(name, _CODE, {"x": "float32[64,64]"}, {}, {}, "probe")
    start = time.perf_counter()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        built = build(request, function, [specs], reads=set(), found={})
        seconds = time.perf_counter() - start
        results = built.executable(list(leaves))  # a first call may still find that the executable does not run here
    said = [str(warning.message) for warning in told]
    return {
        "program": name,
        "did": built.origin if not any("does not run here" in line for line in said) else "compiled",
        "seconds": seconds,
        "result": _digest(results),
        "said": [*said, *built.kept_out],
    }


def _jax(folder: str, leaves: Sequence[Any]) -> dict[str, Any]:
    counts = {HITS: 0, MISSES: 0}

    def count(event: str, **_: Any) -> None:
        if event in counts:
            counts[event] += 1

    jax.monitoring.register_event_listener(count)
    jax.config.update("jax_enable_compilation_cache", True)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compilation_cache.reset_cache()

    def jax_own(leaves: Sequence[Any]) -> list[Any]:  # lowering names a function anew, and jax's key holds the name
        return plain(leaves)

    start = time.perf_counter()
    results = jax.block_until_ready(jax.jit(jax_own)(list(leaves)))
    seconds = time.perf_counter() - start
    did = "loaded" if counts[HITS] and not counts[MISSES] else "compiled"
    return {"program": "jax's own", "did": did, "seconds": seconds, "result": _digest(results), "said": []}


def _digest(results: Sequence[Any]) -> str:
    return hashlib.sha256(b"".join(np.asarray(result).tobytes() for result in results)).hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
