"""Batches of arrays that are in memory."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from nitro_cli.data.source import DataError
from nitro_cli.suggest import listed


class ArrayLoader:
    """Cuts arrays of equal length into batches.

    ``ArrayLoader({"image": x, "label": y}, batch_size=64, shuffle=True)``, or the fields as keywords. The first axis
    of every array counts the rows. The order of an epoch depends on ``seed`` and the epoch alone, so a resumed run
    sees the same batches. ``source[i]`` is batch ``i`` of the current epoch and may be called from several threads.

    Without ``shuffle`` a batch is a view of the arrays and therefore read-only; with it, a copy. A ``batch_size``
    larger than the data gives one batch of all rows. Raises DataError, naming the field, for arrays that do not fit
    together.
    """

    def __init__(
        self,
        fields: Mapping[str, Any] | None = None,
        /,
        *,
        batch_size: int,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **arrays: Any,
    ) -> None:
        self._fields = {name: _array(name, value) for name, value in {**(fields or {}), **arrays}.items()}
        self.rows = _common_length(self._fields)
        self.batch_size = min(_whole("batch_size", batch_size, 1), self.rows)
        self.seed = _whole("seed", seed, 0)
        self.shuffle = bool(shuffle)
        self.drop_last = bool(drop_last)
        self.dropped = self.rows % self.batch_size if drop_last else 0
        self._batches = (self.rows - self.dropped + self.batch_size - 1) // self.batch_size
        self._order: np.ndarray | None = None
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Takes the order of ``epoch``, for the iterations and look-ups that start from now on."""
        self.epoch = _whole("epoch", epoch, 0)
        if self.shuffle:
            self._order = shuffled_rows(self.rows, self.seed, self.epoch)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        # The order is taken at the start: a set_epoch in the middle belongs to the next iteration.
        return map(self._cutter(), range(self._batches))

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        number = operator.index(index)
        if number < 0:
            number += self._batches
        if not 0 <= number < self._batches:
            raise IndexError(f"batch {index} of an ArrayLoader with {self._batches} batches")
        return self._cutter()(number)

    def __repr__(self) -> str:
        return f"ArrayLoader({', '.join(self._fields)}: {self.rows} rows, batch_size={self.batch_size})"

    def _cutter(self) -> Callable[[int], dict[str, np.ndarray]]:
        fields, size, order = self._fields, self.batch_size, self._order
        if order is None:
            return lambda i: {name: array[i * size : (i + 1) * size] for name, array in fields.items()}

        def gather(i: int) -> dict[str, np.ndarray]:
            rows = order[i * size : (i + 1) * size]
            return {name: array.take(rows, axis=0) for name, array in fields.items()}

        return gather


def shuffled_rows(rows: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of ``range(rows)``, int64, that depends on the arguments alone.

    It sorts raw generator bits, because numpy keeps those equal from version to version, which it does not promise for
    ``Generator.permutation``: a run must be resumable after an upgrade.
    """
    bits = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(rows)
    return np.argsort(bits, kind="stable")


def _array(name: str, value: Any) -> np.ndarray:
    try:
        array = np.asarray(value)
    except ValueError as error:
        raise DataError(
            f"ArrayLoader: field '{name}' is not one array: its rows differ in shape", field=name
        ) from error
    if array.dtype.hasobject:
        raise DataError(
            f"ArrayLoader: field '{name}' has dtype object ({type(value).__name__})",
            "fix: convert it to numbers of one dtype and one shape per row",
            field=name,
        )
    if array.ndim == 0:
        raise DataError(f"ArrayLoader: field '{name}' has no axis; the first axis counts the rows", field=name)
    array = array.view()
    array.flags.writeable = False  # batches are views: writing to one would change the data set
    return array


def _common_length(fields: Mapping[str, np.ndarray]) -> int:
    if not fields:
        raise DataError("ArrayLoader has no fields", "fix: ArrayLoader(image=images, label=labels, batch_size=64)")
    lengths = {name: len(array) for name, array in fields.items()}
    empty = [name for name, length in lengths.items() if length == 0]
    if empty:
        raise DataError(f"ArrayLoader: no rows in {listed(empty)}", "fix: check the filter or the file behind it")
    if len(set(lengths.values())) > 1:
        raise DataError(
            "ArrayLoader: the fields have different numbers of rows",
            *(f"{name}: {length} rows (shape {fields[name].shape})" for name, length in lengths.items()),
            "fix: the first axis of every array counts the same rows",
        )
    return next(iter(lengths.values()))


def _whole(name: str, value: Any, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise DataError(f"ArrayLoader: {name} must be a whole number, {least} or more, not {value!r}", argument=name)
    return int(value)
