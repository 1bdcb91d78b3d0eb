"""Adds up what a ``metrics`` hook returns, batch by batch, on the host in double precision."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import numpy as np

from nitro_cli.errors import ExperimentError
from nitro_cli.metrics.modes import Concat, Max, Min, Mode

MODES = "(sum, count), Sum(value), Max(value), Min(value), Concat(value)"
_EXTREMES = {Max: np.maximum, Min: np.minimum}


class _Leaf:
    """One metric under way. ``mode`` is None for a (sum, count) pair."""

    def __init__(self, mode: type[Mode] | None) -> None:
        self.mode = mode
        self.total: np.ndarray | None = None
        self.count: np.ndarray | None = None
        self.pieces: list[np.ndarray] = []


class Accumulator:
    """Reduces the metrics of one pass over a split.

    ``add`` takes what the hook returned, as host values; ``result`` gives the same nested dict with one value each:
    a float for a scalar, an array for an array, all samples' entries for ``Concat``. Raises ExperimentError naming the
    metric by its path, such as ``val.accuracy``.
    """

    def __init__(self) -> None:
        self._tree: dict[str, Any] | None = None
        self._batches = 0

    def add(self, tree: Any, rows: int, batch_index: int) -> None:
        """Adds the metrics of batch ``batch_index``, which has ``rows`` real rows."""
        if not isinstance(tree, Mapping):
            raise ExperimentError(
                f"metrics returned {_kind(tree)}, not a dict (batch {batch_index})",
                'fix: return {"accuracy": (correct.sum(), len(correct))}',
            )
        if self._tree is None:
            self._tree = {}
        self._add_group(self._tree, tree, None, "", rows, batch_index)
        self._batches += 1

    def result(self) -> dict[str, Any]:
        """The reduced metrics; empty where nothing was added. A mean over a count of 0 is nan."""
        return _reduced(self._tree or {})

    def _add_group(
        self, into: dict[str, Any], group: Mapping[str, Any], mode: Any, path: str, rows: int, index: int
    ) -> None:
        if self._batches and group.keys() != into.keys():
            raise _changed_keys(path, into, group, index)
        for name, value in group.items():
            if not isinstance(name, str):
                raise ExperimentError(f"metric names must be strings, this one is {name!r} (in '{path or 'metrics'}')")
            where = f"{path}.{name}" if path else name
            self._add_value(into, name, value, mode, where, rows, index)

    def _add_value(
        self, into: dict[str, Any], name: str, value: Any, mode: Any, path: str, rows: int, index: int
    ) -> None:
        value, mode = _split_mode(value, mode, path)
        known = into.get(name)
        if isinstance(value, Mapping):
            if known is None:
                known = into[name] = {}
            if not isinstance(known, dict):
                raise _error(path, index, "is a group of metrics, in the batches before it was one value")
            self._add_group(known, value, mode, path, rows, index)
            return
        if mode is None:
            raise _error(
                path,
                index,
                f"has no mode: {_kind(value)}",
                f"say how batches are reduced, one of: {MODES}",
                f'fix for a mean over samples: "{path.rpartition(".")[2]}": (values.sum(), len(values))',
            )
        kind, count = mode if isinstance(mode, tuple) else (mode, None)
        if known is None:
            known = into[name] = _Leaf(kind)
        if not isinstance(known, _Leaf):
            raise _error(path, index, "is one value, in the batches before it was a group of metrics")
        if known.mode is not kind:
            raise _error(path, index, f"has mode {_named(kind)}, in the batches before it had {_named(known.mode)}")
        _fold(known, _number(value, path, index), count, path, rows, index)


def _split_mode(value: Any, outer: Any, path: str) -> tuple[Any, Any]:
    """``(bare value, mode)``: a mode class, ``(None, count)`` for a pair, or None where nothing says the mode."""
    if isinstance(value, Mode):
        inner: Any = type(value)
        bare = value.value
    elif isinstance(value, tuple):
        _check_pair(value, path)
        inner, bare = (None, value[1]), value[0]
    else:
        return value, outer
    if outer is not None:
        raise ExperimentError(
            f"metric '{path}' has a mode, and the group around it has one too",
            "fix: put the mode on the group or on its values, not on both",
        )
    if isinstance(bare, Mode | tuple):
        raise ExperimentError(f"metric '{path}' has two modes, one inside the other", f"use one of: {MODES}")
    return bare, inner


def _check_pair(value: tuple[Any, ...], path: str) -> None:
    strange = [item for item in value if isinstance(item, str | type)]
    if len(value) == 2 and not strange and not isinstance(value[1], Mode | Mapping):
        return
    if strange:
        what = f"has an unknown mode: {getattr(strange[0], '__name__', repr(strange[0]))}"
    else:
        what = f"has an unknown mode: a tuple of {len(value)}, with {_kind(value[-1]) if value else 'nothing'} last"
    raise ExperimentError(f"metric '{path}' {what}", f"use one of: {MODES}")


def _fold(leaf: _Leaf, value: np.ndarray, count: Any, path: str, rows: int, index: int) -> None:
    if leaf.mode is Concat:
        _check_piece(leaf, value, path, rows, index)
        leaf.pieces.append(value.copy())
        return
    if leaf.total is not None and value.shape != leaf.total.shape:
        raise _error(path, index, f"has shape {value.shape}, in the batches before it had {leaf.total.shape}")
    if leaf.mode in _EXTREMES:
        leaf.total = value.copy() if leaf.total is None else _EXTREMES[leaf.mode](leaf.total, value)
        return
    leaf.total = _wide(value) if leaf.total is None else leaf.total + _wide(value)
    if leaf.mode is None:
        counts = _count(count, value, path, index)
        leaf.count = counts if leaf.count is None else leaf.count + counts


def _check_piece(leaf: _Leaf, value: np.ndarray, path: str, rows: int, index: int) -> None:
    if not value.shape or value.shape[0] != rows:
        raise _error(
            path,
            index,
            f"is Concat and has shape {value.shape}, but the batch has {rows} rows",
            "fix: one entry per sample, the batch axis first",
        )
    if leaf.pieces and leaf.pieces[0].shape[1:] != value.shape[1:]:
        raise _error(
            path,
            index,
            f"has {value.shape[1:]} per sample, in the batches before it had {leaf.pieces[0].shape[1:]}",
            "fix: pad the entries to one shape, or reduce them per sample",
        )


def _count(count: Any, value: np.ndarray, path: str, index: int) -> np.ndarray:
    counts = _wide(_number(count, f"{path} (count)", index))
    if counts.shape not in ((), value.shape):
        raise _error(path, index, f"has a count of shape {counts.shape} for a sum of shape {value.shape}")
    if not (counts >= 0).all():
        raise _error(path, index, f"has a count of {counts}; counts are 0 or more", "the pair is (sum, count)")
    return counts


def _number(value: Any, path: str, index: int) -> np.ndarray:
    try:
        array = np.asarray(value)
        # bfloat16 and the 8-bit floats have no kind of their own in numpy, and their own arithmetic is too coarse.
        array = array.astype(np.float64) if array.dtype.kind == "V" and array.dtype.names is None else array
    except (TypeError, ValueError):
        array = np.asarray(None)
    if array.dtype.kind not in "biuf":
        raise _error(path, index, f"is not a number or an array of numbers: {_kind(value)}")
    return array


def _wide(array: np.ndarray) -> np.ndarray:
    """Sums of integers stay exact, sums of floats are taken in float64."""
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def _reduced(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _reduced(node) if isinstance(node, dict) else _value(node) for name, node in group.items()}


def _value(leaf: _Leaf) -> Any:
    if leaf.mode is Concat:
        return _remember_joined(np.concatenate(leaf.pieces))
    assert leaf.total is not None
    total = leaf.total
    if leaf.count is not None:
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.where(leaf.count > 0, total / leaf.count, np.nan)
    return float(total) if total.ndim == 0 else np.array(total)


# The joined arrays themselves, by identity: finalize must tell one that was handed on from one that the user computed.
_joined: dict[int, weakref.ref[np.ndarray]] = {}


def _remember_joined(array: np.ndarray) -> np.ndarray:
    key = id(array)
    _joined[key] = weakref.ref(array, lambda _: _joined.pop(key, None))
    return array


def is_joined(value: Any) -> bool:
    """Whether ``value`` is the very array that a ``Concat`` metric was joined to."""
    reference = _joined.get(id(value))
    return reference is not None and reference() is value


def _error(path: str, index: int, what: str, *notes: str) -> ExperimentError:
    return ExperimentError(f"metric '{path}' {what} (batch {index})", *notes, metric=path, batch=index)


def _changed_keys(path: str, before: Mapping[str, Any], now: Mapping[str, Any], index: int) -> ExperimentError:
    appeared = ", ".join(str(name) for name in now if name not in before)
    missing = ", ".join(name for name in before if name not in now)
    where = f"metric '{path}' has" if path else "metrics returned"
    notes = [f"appeared: {appeared}"] if appeared else []
    notes += [f"missing: {missing}"] if missing else []
    return ExperimentError(
        f"{where} other keys than in the batches before (batch {index})",
        *notes,
        "fix: return every metric on every batch; one that does not apply is (0.0, 0)",
    )


def _named(mode: type[Mode] | None) -> str:
    return "(sum, count)" if mode is None else mode.__name__


def _kind(value: Any) -> str:
    shape = getattr(value, "shape", None)
    return f"{type(value).__name__}{f' of shape {tuple(shape)}' if shape else ''}"
