"""Short batches at a fixed width: padded before the program, cut back before any hook sees them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from nitro_cli.data.source import DataError
from nitro_cli.errors import ExperimentError


def pad_batch(batch: Mapping[str, Any], fields: Iterable[str], width: int) -> tuple[dict[str, Any], int]:
    """``(batch with ``fields`` at ``width`` rows, number of real rows)``.

    Missing rows repeat the last real one: zeros could make NaNs that no real sample would. A full batch comes back as
    it is, not copied; fields that are not in ``fields`` are left alone. Raises DataError for a batch that is wider
    than ``width``, that has no rows, or whose fields differ in length.
    """
    fields = tuple(fields)
    sizes = [len(batch[name]) for name in fields]
    rows = sizes[0] if sizes else width
    if any(size != rows for size in sizes):
        raise DataError(
            "the fields of one batch have different numbers of rows",
            *(f"{name}: {size}" for name, size in zip(fields, sizes, strict=True)),
        )
    if rows == width:
        return batch if isinstance(batch, dict) else dict(batch), rows
    if rows > width:
        raise DataError(
            f"a batch has {rows} rows, the program was made for {width}",
            "fix: the first batch of a split must be its widest",
        )
    if rows == 0:
        raise DataError("a batch has no rows", "fix: leave empty batches out of the loader, and out of its len()")
    padded = dict(batch)
    for name in fields:
        padded[name] = _repeat_last(np.asarray(batch[name]), width)
    return padded, rows


def _repeat_last(array: np.ndarray, width: int) -> np.ndarray:
    out = np.empty((width, *array.shape[1:]), array.dtype)
    out[: len(array)] = array
    out[len(array) :] = array[-1]
    return out


def slice_rows(tree: Any, rows: int, width: int, what: str = "outputs") -> Any:
    """``tree`` with every array leaf as a numpy array of its first ``rows`` rows.

    Every array leaf must have ``width`` rows; that is checked on full batches too, so that a wrong layout does not hide
    until the first short one. Cut leaves are copies. Raises ExperimentError with the leaf's path and shape.
    """
    from jax import tree_util

    def cut(path: Any, leaf: Any) -> Any:
        shape = getattr(leaf, "shape", None)
        if shape is None:
            return leaf
        if not shape or shape[0] != width:
            raise ExperimentError(
                f"{what}{tree_util.keystr(path)} has shape {tuple(shape)}, its first axis must be the batch ({width})",
                "fix: return one row per sample, the batch axis first; reduce over the batch in loss or metrics",
            )
        array = np.asarray(leaf)
        return array if rows == width else array[:rows].copy()

    return tree_util.tree_map_with_path(cut, tree)
