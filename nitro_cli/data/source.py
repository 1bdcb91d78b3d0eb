"""What a split is, and what each of its batches must be.

A split is anything with ``len()`` that counts batches and that can be iterated again and again, each batch a dict of
host arrays with the batch axis first: a list of batches, ``ArrayLoader``, a torch ``DataLoader``, a grain dataset.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from nitro_cli.errors import ExperimentError
from nitro_cli.suggest import did_you_mean, listed

# Keywords that nitro itself fills in, so a batch field cannot have their names.
RESERVED = ("train", "rng", "accum")


class DataError(ExperimentError):
    """A split, a loader or a batch broke the contract between data and nitro."""

    kind = "data"


@dataclass(frozen=True)
class SplitInfo:
    """What is known about a split without reading it; None where the source does not say."""

    batches: int
    rows: int | None
    batch_size: int | None
    dropped: int | None
    kind: str


def unwrap(source: Any) -> Any:
    """The source itself, without the ``Prefetch`` or ``NoPrefetch`` declaration around it."""
    return source.source if getattr(type(source), "declares_prefetch", False) else source


def indexable(source: Any) -> bool:
    """Whether ``source[i]`` gives batch ``i``."""
    return hasattr(type(source), "__getitem__") and hasattr(type(source), "__len__")


def count_batches(split: str, source: Any) -> int:
    """``len(source)``; raises DataError where there is no usable length."""
    try:
        batches = len(source)
    except (TypeError, NotImplementedError, OverflowError) as error:
        raise DataError(
            f"split '{split}' has no len(): {_type(source)}",
            f"len() raised: {error}",
            "len() must count the batches of one epoch: it fixes how many steps a run has",
            "fix: give the loader a __len__, or make a list of its batches with list(...)",
            split=split,
        ) from error
    if batches >= sys.maxsize:
        raise DataError(
            f"split '{split}' has no end: its len() is {batches}",
            "fix: one epoch must end; leave out repeat(), or give it a number",
            split=split,
        )
    return batches


def check_source(split: str, source: Any) -> None:
    """Refuses a split that cannot be trained on; reads no batch. Raises DataError naming the split."""
    source = unwrap(source)
    if isinstance(source, Mapping):
        raise DataError(
            f"split '{split}' is one dict of arrays, not a sequence of batches",
            f'fix: "{split}": ArrayLoader(arrays, batch_size=64), or a list with this dict in it for a single batch',
            split=split,
        )
    if isinstance(source, np.ndarray | str | bytes) or _holds_arrays(source):
        raise DataError(
            f"split '{split}' is {_type(source)}, not a sequence of batches",
            f'fix: "{split}": ArrayLoader(image=images, label=labels, batch_size=64)',
            split=split,
        )
    if hasattr(source, "__next__"):
        raise DataError(
            f"split '{split}' is an iterator ({_type(source)}), which can be read only once",
            "every epoch reads the split from its start",
            "fix: return list(...) of it, or an object whose __iter__ starts again and that has len()",
            split=split,
        )
    if not hasattr(source, "__iter__") and not hasattr(type(source), "__getitem__"):
        raise DataError(
            f"split '{split}' cannot be iterated: {_type(source)}",
            "fix: give a list of batches, an ArrayLoader, or any loader with len() whose items are dicts of arrays",
            split=split,
        )
    if count_batches(split, source) < 1:
        raise DataError(
            f"split '{split}' has no batches: its len() is {len(source)}",
            "fix: check the file list and the filter behind it; a loader that drops the last partial batch is empty "
            "when batch_size is larger than the data",
            split=split,
        )


def describe(source: Any) -> SplitInfo:
    """What the source says of itself: batches always; rows, batch size and dropped rows where it is known."""
    source = unwrap(source)
    batch_size = _whole(getattr(source, "batch_size", None))
    rows = _whole(getattr(source, "rows", None))
    dropped = _whole(getattr(source, "dropped", None))
    if rows is None and batch_size is not None and hasattr(source, "drop_last"):  # the shape of a torch DataLoader
        rows = _length(getattr(source, "dataset", None))
        if rows is not None and dropped is None:
            dropped = rows % batch_size if source.drop_last else 0
    return SplitInfo(len(source), rows, batch_size, dropped, type(source).__name__)


def first_batch(split: str, source: Any) -> dict[str, np.ndarray]:
    """The first batch, drawn by index where that is possible and by starting one iteration where it is not.

    Only the keys are checked here; ``check_batch`` checks the values once it is known which fields travel.
    """
    source = unwrap(source)
    if indexable(source):
        return dict(_mapping(split, 0, source[0]))
    iterator = iter(source)
    try:
        batch = next(iterator)
    except StopIteration:
        raise DataError(
            f"split '{split}' gave no batch, though its len() is {len(source)}",
            "fix: __iter__ must start from the first batch each time it is called",
            split=split,
        ) from None
    finally:
        if hasattr(iterator, "close"):
            iterator.close()
    return dict(_mapping(split, 0, batch))


def check_batch(
    split: str, index: int, batch: Any, schema: Collection[str] | None, fields: Iterable[str] | None = None
) -> None:
    """Refuses batch ``index`` of ``split`` unless it is a dict of arrays with exactly the fields in ``schema``.

    A negative ``index`` stands for one that is not known, ``schema`` None means that any fields are right. ``fields``
    are those whose values are looked at (the routed ones), None means all. Raises DataError naming split, batch and
    field.
    """
    _mapping(split, index, batch)
    if schema is not None and (len(schema) != len(batch) or not all(name in schema for name in batch)):
        raise _changed_schema(split, index, batch, schema)
    routed = fields is not None
    for name in batch if fields is None else fields:
        value = batch[name]
        if type(value) is not np.ndarray or value.dtype.kind in "OUSMm" or value.dtype.fields is not None:
            _check_value(split, index, name, value, routed)


def check_width(split: str, index: int, batch: Mapping[str, Any], fields: Iterable[str], width: int) -> None:
    """Refuses a training batch whose routed fields do not all have ``width`` rows."""
    for name in fields:
        size = len(batch[name])
        if size != width:
            raise DataError(
                f"{_at(split, index)}: field '{name}' has {size} rows, every batch before had {width}",
                "a batch of another size would be another program",
                "fix: drop the partial last batch (drop_last=True)",
                split=split,
                batch=index,
                field=name,
            )


def infer_batch_size(split: str, batch: Mapping[str, Any], fields: Iterable[str]) -> int:
    """The leading axis that all ``fields`` of ``batch`` share. Raises DataError where there is no single such size."""
    fields = tuple(fields)
    check_reserved(split, batch)
    if not fields:
        raise DataError(
            f"split '{split}': no hook takes a batch field, so there is no batch size",
            f"the batch has: {listed(list(batch))}",
            "fix: declare the fields that a hook needs as keyword-only parameters: def forward(self, model, ps, st, *, "
            f"{next(iter(batch), 'image')})",
            split=split,
        )
    shapes = {name: np.shape(batch[name]) for name in fields}
    for name, shape in shapes.items():
        if not shape or shape[0] == 0:
            raise DataError(
                f"split '{split}': field '{name}' of the first batch has shape {shape}, without any row",
                "fix: the first axis is the batch; make batches of the samples (ArrayLoader does; grain: .batch(n))",
                split=split,
                field=name,
            )
    sizes = {shape[0] for shape in shapes.values()}
    if len(sizes) > 1:
        raise DataError(
            f"split '{split}': the batch size is ambiguous, the first axes differ",
            *(f"{name}: {shape[0]} (shape {shape})" for name, shape in shapes.items()),
            "fix: the batch axis comes first in every field that a hook takes",
            split=split,
        )
    return sizes.pop()


def check_reserved(split: str, names: Iterable[str]) -> None:
    """Refuses batch fields that have the name of a keyword nitro fills in."""
    for name in names:
        if name in RESERVED:
            raise DataError(
                f"split '{split}': a batch field cannot be called '{name}'",
                "nitro gives hooks a keyword of that name itself",
                f"fix: rename the field, for example '{name}_data'",
                split=split,
                field=name,
            )


def _at(split: str, index: int) -> str:
    return f"split '{split}', batch {index}" if index >= 0 else f"split '{split}', one of its batches"


def _mapping(split: str, index: int, batch: Any) -> Mapping[str, Any]:
    if type(batch) is not dict and not isinstance(batch, Mapping):
        raise DataError(
            f"{_at(split, index)}: a batch must be a dict of arrays, this is {_type(batch)}",
            'fix: give the arrays names: {"image": x, "label": y}',
            split=split,
            batch=index,
        )
    for name in batch:
        if type(name) is not str:
            raise DataError(
                f"{_at(split, index)}: field names must be strings, this one is {name!r}",
                split=split,
                batch=index,
            )
    return batch


def _changed_schema(split: str, index: int, batch: Mapping[str, Any], schema: Collection[str]) -> DataError:
    appeared = [name for name in batch if name not in schema]
    missing = [name for name in schema if name not in batch]
    notes = []
    if missing:
        notes.append(f"missing: {listed(missing)}")
    if appeared:
        hint = did_you_mean(appeared[0], missing)
        notes.append(f"appeared: {listed(appeared)}{' (' + hint + ')' if hint else ''}")
    return DataError(
        f"{_at(split, index)}: its fields are not those of the first batch",
        *notes,
        "fix: every batch of every split has the same fields",
        split=split,
        batch=index,
    )


def _check_value(split: str, index: int, name: str, value: Any, routed: bool) -> None:
    dtype = getattr(value, "dtype", None)
    if isinstance(dtype, np.dtype) and not isinstance(value, np.generic):
        opaque = dtype.kind in "USMm" or dtype.fields is not None
        if not dtype.hasobject and not (routed and opaque):
            return
        problem, fix = f"has dtype {dtype}, which no device can hold", "convert it to numbers of one dtype"
    elif callable(getattr(value, "numpy", None)):
        problem, fix = f"is {_type(value)}, not a numpy array", "call .numpy() on it, in the loader or its collate_fn"
    elif isinstance(value, int | float | complex | np.generic):
        problem, fix = f"is one number ({_type(value)}), not a row per sample", "use an array, or a field of self"
    else:
        problem, fix = f"is {_type(value)}, not a numpy array", "convert it with np.asarray(..., dtype)"
    raise DataError(
        f"{_at(split, index)}: field '{name}' {problem}", f"fix: {fix}", split=split, batch=index, field=name
    )


def _holds_arrays(source: Any) -> bool:
    """A pair such as ``(images, labels)``: a list or tuple of bare arrays where batches should be."""
    return isinstance(source, list | tuple) and bool(source) and all(isinstance(item, np.ndarray) for item in source)


def _type(value: Any) -> str:
    kind = type(value)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _whole(value: Any) -> int | None:
    return int(value) if isinstance(value, int | np.integer) and not isinstance(value, bool) else None


def _length(value: Any) -> int | None:
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None
