"""Trace and lower a program: the part before XLA, which decides what the program is."""

from __future__ import annotations

import base64
import functools
import hashlib
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from nitro_cli.programs.key import Request

# jax keeps traces of inner functions by identity, and such a trace goes stale when a global that it read changes. The
# value of a user context is part of the key of those caches: with the program's own digest as the value, every program
# is traced anew and an unchanged one is not.
_trace_context = jax.make_user_context(default_value=None)
_CALLBACKS = ("python_cpu_callback", "python_gpu_callback", "python_callback")


@dataclass(frozen=True)
class Lowered:
    """A lowered program. ``stages`` is jax's own object; ``text`` its StableHLO, without places in files."""

    request: Request
    options: Mapping[str, Any]
    jaxpr: Any
    stages: Any
    trace_seconds: float
    lower_seconds: float

    @functools.cached_property
    def text(self) -> str:
        return self.stages.as_text()

    @functools.cached_property
    def digest(self) -> str:
        """Of everything that decides what XLA makes of it."""
        facts = "\n".join(f"{name} = {value}" for name, value in sorted(self.request.environment.items()))
        # The text leaves out arguments that are not used, which the executable is called with all the same.
        taken = [f"{a.dtype}{a.shape}{a.donated}" for a in jax.tree.leaves(self.stages.args_info)]
        return hashlib.sha256(f"{facts}\n{sorted(self.options.items())}\n{taken}\n{self.text}".encode()).hexdigest()

    @property
    def lapack(self) -> bool:
        """Whether it calls jaxlib's linear algebra, which a process must have set up before it runs."""
        return "lapack_" in self.text

    @property
    def calls_python(self) -> bool:
        """Whether it calls back into Python: its executable then holds a pointer of this process."""
        return any(word in self.text for word in _CALLBACKS)

    def trees(self, found: dict[str, Any]) -> str:
        """The trees of the call, and what the trace found out, as text. Raises what pickle raises."""
        arguments = jax.tree.structure(self.stages.args_info)
        return base64.b64encode(pickle.dumps((arguments, self.stages.out_tree, found))).decode()


def lower(
    request: Request,
    function: Callable[..., Any],
    arguments: Sequence[Any],
    donate: tuple[int, ...],
    options: Mapping[str, Any],
    again: bool,
) -> Lowered:
    """``options`` are compiler options. ``again`` traces everything once more, past what jax remembers of the first
    time."""
    function.__name__ = f"nitro_{request.program}"

    def traced(*arguments: Any) -> Any:
        return function(*arguments)

    traced.__name__ = function.__name__
    with _trace_context(f"{request.digest} {sorted(request.fields.items())}{' again' if again else ''}"):
        start = time.perf_counter()
        jitted = jax.jit(traced if again else function, donate_argnums=donate, compiler_options=dict(options) or None)
        jaxpr = jitted.trace(*arguments)
        after_trace = time.perf_counter()
        stages = jaxpr.lower()
        end = time.perf_counter()
    return Lowered(request, dict(options), jaxpr.jaxpr, stages, after_trace - start, end - after_trace)
