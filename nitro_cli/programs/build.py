"""From a function over flat lists of arrays to a compiled executable, with the seconds of each phase."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nitro_cli.programs.cache import Built
from nitro_cli.programs.key import Request

# jax keeps traces of inner functions by identity, and such a trace goes stale when a global that it read changes. The
# value of a user context is part of the key of those caches: with the program's own digest as the value, every program
# is traced anew and an unchanged one is not.
_trace_context = jax.make_user_context(default_value=None)


def build(
    request: Request,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    donate: Sequence[int] = (),
    reads: set[str],
    found: dict[str, Any],
) -> Built:
    """Trace, lower and compile ``function`` for ``arguments`` (pytrees of ``jax.ShapeDtypeStruct``).

    ``donate`` gives the positions of arguments whose buffers the program may take. ``reads`` is filled by the trace
    with the GraphConst fields that it read, ``found`` with what the caller wants to keep of it.
    """
    function.__name__ = f"nitro_{request.program}"
    jitted = jax.jit(function, donate_argnums=tuple(donate))
    with _trace_context(f"{request.digest} {sorted(request.fields.items())}"):
        start = time.perf_counter()
        traced = jitted.trace(*arguments)
        after_trace = time.perf_counter()
        lowered = traced.lower()
        after_lower = time.perf_counter()
        compiled = lowered.compile()
        end = time.perf_counter()
    return Built(compiled, found, frozenset(reads), after_trace - start, after_lower - after_trace, end - after_lower)
