"""The first values of a model, kept in the store for the next process with the same seed.

An initialisation is a program that is loaded to be run once. What it gives is decided by the program and by the few
words that it is called with, so to read it is as good as to run it, and sooner: of a transformer of 1.2 million
parameters, 10 ms instead of 300.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from nitro_cli.programs import executables
from nitro_cli.programs.key import Request
from nitro_cli.programs.store import CacheMismatch, Entry, Store, open_store, settings

ARGUMENT_BYTES = 4096  # a seed; what is called with more, such as parameters, is better run than looked for
VALUE_BYTES = 16 << 20  # a sweep over seeds leaves as many


def kept_values(
    request: Request, arguments: Sequence[Any], run: Callable[[], tuple[Any, list[Any]]]
) -> tuple[Any, list[Any]]:
    """``(structure, arrays)`` as ``run`` returns it, or as it did in an earlier process for the same program and
    arguments. Raises CacheMismatch where that is to be verified and is not so now."""
    store = open_store()
    if store is None or settings.cold or sum(a.nbytes for a in arguments) > ARGUMENT_BYTES:
        return run()
    entry = store.find(request.experiment, request.program, request.digest, request.fields)
    known = None
    if entry is not None and entry.usable:
        known = store.note("values", _key(entry, arguments))
        if known is not None and not settings.verify:
            store.used(entry, 0.0)
            return executables.found_in(entry.trees)["structure"], _read(known)
    structure, arrays = run()
    entry = entry or store.find(request.experiment, request.program, request.digest, request.fields)
    if entry is not None and entry.usable:
        _keep(store, _key(entry, arguments), arrays, known)
    return structure, arrays


def _keep(store: Store, key: str, arrays: Sequence[Any], known: bytes | None) -> None:
    if sum(a.nbytes for a in arrays) > VALUE_BYTES or not all(map(_plain, arrays)):
        return
    written = _written(arrays)
    if known is None:
        store.keep_note("values", key, written)
    elif known != written:
        store.drop_note("values", key)
        raise CacheMismatch(
            "the first values that the store has of a model are not what its initialisation gives now",
            "they are removed: the next run initialises it anew",
            "please report it, with the code of the experiment",
            entry=key,
        )


def _plain(array: Any) -> bool:
    """Whether an array is its dtype, its shape and its bytes, and nothing more. A random key is not, nor is a number
    that gives way to another dtype."""
    return not jax.numpy.issubdtype(array.dtype, jax.dtypes.extended) and not array.weak_type


def _key(entry: Entry, arguments: Sequence[Any]) -> str:
    digest = hashlib.sha256(f"{entry.key} {entry.lowered}".encode())
    for argument in arguments:
        digest.update(f"{argument.dtype} {argument.shape}".encode())
        digest.update(np.asarray(_words(argument)).tobytes())
    return digest.hexdigest()


def _words(array: Any) -> Any:
    return jax.random.key_data(array) if jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key) else array


def _written(arrays: Sequence[Any]) -> bytes:
    """A line of JSON with dtypes and shapes, and the bytes of all arrays."""
    head = json.dumps([[a.dtype.name, a.shape] for a in arrays]).encode()
    return b"".join([head, b"\n", *(np.asarray(a).tobytes() for a in arrays)])


def _read(written: bytes) -> list[jax.Array]:
    start = written.index(b"\n") + 1
    arrays = []
    for name, shape in json.loads(written[:start]):
        dtype = jax.numpy.dtype(name)
        count = int(np.prod(shape))
        arrays.append(jax.device_put(np.frombuffer(written, dtype, count, start).reshape(shape)))
        start += count * dtype.itemsize
    return arrays
