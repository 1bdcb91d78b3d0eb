"""Trace and lower a program: the part before XLA, which decides what the program is."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from nitro_cli.programs.key import Request

# jax keeps traces of inner functions by identity. Such a trace goes stale when a global that it read changes, and who
# looks for what a trace reads sees nothing of it. The value of a user context is part of the key of those caches: with
# another value for each, every trace is a whole one.
_trace_context = jax.make_user_context(default_value=None)
_traces = itertools.count()
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
) -> Lowered:
    """Every call traces everything, past what jax remembers of earlier ones. ``options`` are compiler options."""
    function.__name__ = f"nitro_{request.program}"
    with _trace_context(next(_traces)):
        start = time.perf_counter()
        jitted = jax.jit(function, donate_argnums=donate, compiler_options=dict(options) or None)
        jaxpr = jitted.trace(*arguments)
        after_trace = time.perf_counter()
        stages = jaxpr.lower()
        end = time.perf_counter()
    return Lowered(request, dict(options), jaxpr.jaxpr, stages, after_trace - start, end - after_trace)
