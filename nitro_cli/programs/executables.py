"""Compiled executables as bytes, and back.

An executable that jax's own compilation cache returned cannot be serialized again: it loads, and fails when it runs
("Function ... not found"; jaxlib 0.10 and 0.12). So nitro's programs pass jax's cache by, and have their own store.
"""

from __future__ import annotations

import base64
import contextlib
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

_COPIED_BYTES = 1 << 30


def serialized(compiled: Any) -> bytes:
    """The executable as bytes. Raises whatever jax or pickle raise for one that cannot be written."""
    return serialize_executable.serialize(compiled)[0]


def loaded(payload: bytes, trees: str, lapack: bool) -> tuple[Any, dict[str, Any]]:
    """``(executable, found)``. Only ever given what the store has checked to be this user's own: both are pickles."""
    if lapack:
        initialize_lapack()
    arguments, outputs, found = _trees(trees)
    devices = jax.devices()[:1]
    compiled = serialize_executable.deserialize_and_load(payload, arguments, outputs, execution_devices=devices)
    return compiled, found


def found_in(trees: str) -> dict[str, Any]:
    """What the trace of a stored program found out, without the program. Given as ``loaded`` is."""
    return _trees(trees)[2]


def _trees(text: str) -> tuple[Any, Any, dict[str, Any]]:
    return pickle.loads(base64.b64decode(text))


def initialize_lapack() -> None:
    """Bind jaxlib's linear algebra to the LAPACK of scipy. Lowering a decomposition does this by the way; a loaded
    executable that calls one without it ends the process with a segmentation fault (jax issue 28908)."""
    from jaxlib import lapack

    lapack._lapack.initialize()  # type: ignore[attr-defined]


@contextlib.contextmanager
def past_jax_cache() -> Iterator[None]:
    """While active, jax compiles without a look into its own persistent cache."""
    before = jax.config.values["jax_enable_compilation_cache"]
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # jax decides once, at its first compile, whether there is a cache
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


class FirstCall:
    """A loaded executable, until it is known to run on this machine.

    Its first call keeps copies of what it is given by donation and waits for the result; should it fail, ``anew``
    gives another executable, which is called with the copies. From then on it only passes calls on.
    """

    def __init__(self, executable: Any, donate: Sequence[int], anew: Callable[[Exception], Any]) -> None:
        self._executable = executable
        self._donate = donate
        self._anew = anew
        self._known = False

    def __call__(self, *arguments: Any) -> Any:
        if self._known:
            return self._executable(*arguments)
        donated = [argument if i in self._donate else () for i, argument in enumerate(arguments)]
        size = sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(donated))
        copies = jax.tree.map(_copied, donated) if size <= _COPIED_BYTES else donated
        try:
            result = jax.block_until_ready(self._executable(*arguments))
        except jax.errors.JaxRuntimeError as error:
            if size > _COPIED_BYTES or "RESOURCE_EXHAUSTED" in str(error):
                raise  # nothing to try again with, or nothing that another executable would change
            self._executable = self._anew(error)
            again = [copies[i] if i in self._donate else argument for i, argument in enumerate(arguments)]
            result = self._executable(*again)
        self._known = True
        return result


def _copied(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        words = np.array(jax.random.key_data(leaf))
        return jax.random.wrap_key_data(jax.device_put(words), impl=jax.random.key_impl(leaf))
    return jax.device_put(np.array(leaf), leaf.sharding) if isinstance(leaf, jax.Array) else leaf
