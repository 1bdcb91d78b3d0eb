"""Batches at set-up: which hook receives which fields, how wide programs are, and what is seen to be wrong early."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from nitro_cli.data.routing import RESERVED, Route, route
from nitro_cli.data.source import DataError, check_batch, describe, first_batch, infer_batch_size
from nitro_cli.errors import ExperimentError
from nitro_cli.suggest import listed


def route_batches(
    cls: type,
    hooks: Mapping[str, Callable[..., Any]],
    splits: Mapping[str, Any],
    residency: Mapping[str, str],
    manual: bool,
) -> tuple[dict[str, dict[str, jax.ShapeDtypeStruct]], dict[str, int], dict[str, Route]]:
    """Per split the shapes of its first batch and its width, and per hook the fields that it receives. Fields that
    only a hook on the host takes never travel, so they may be anything: texts, for example.

    An experiment that owns its step is trained on what ``train_step`` takes and evaluated on what ``forward`` takes, so
    its splits may have different fields."""
    reference = "train" if "train" in splits else next(iter(splits))
    first = {split: first_batch(split, source) for split, source in splits.items()}
    routes = {
        name: route(cls, name, hooks[name], tuple(first[split]), split, positional)
        for name, positional, split in _routed(hooks, splits, reference, residency, manual)
    }
    schema, widths = {}, {}
    for split, batch in first.items():
        stepped = manual and split == "train"
        evaluating = [name for name in routes if name != "train_step"]
        traced = [routes[n] for n in (["train_step"] if stepped else evaluating) if residency.get(n) != "host"]
        used = tuple(dict.fromkeys(f for r in traced for f in r.fields if f not in RESERVED))
        present = [name for name in used if name in batch]
        forward = None if stepped else routes.get("forward")
        if forward is None and not stepped:  # an experiment that only trains
            schema[split] = {name: _spec(batch[name]) for name in batch}
            continue
        needed = forward.fields if forward is not None else ()
        lacking = [name for name in needed if forward and name not in batch and name not in forward.optional]
        if lacking:
            raise ExperimentError(
                f"split '{split}' has no field '{lacking[0]}', which {cls.__name__}.forward takes",
                f"its batches have: {listed(sorted(batch))}",
            )
        check_batch(split, 0, batch, None, present)
        widths[split] = infer_batch_size(split, batch, present)
        schema[split] = {name: _spec(batch[name]) for name in batch}
    return schema, widths, routes


def _routed(
    hooks: Mapping[str, Any], splits: Mapping[str, Any], reference: str, residency: Mapping[str, str], manual: bool
) -> list[tuple[str, int, str]]:
    """The hooks that take batch fields: name, arguments by position, and the split whose fields they may name."""
    evaluated, names = reference, ["forward", "loss", "metrics", "train_metrics"]
    if manual:
        evaluated = "val" if "val" in splits else next((split for split in splits if split != "train"), reference)
        names = ["forward", "loss" if "metrics" not in hooks else "metrics"]
        names += ["train_metrics"] if residency["train_metrics"] == "host" else []
    taken = [
        (name, 3 if name == "forward" else 1, reference if name == "train_metrics" else evaluated) for name in names
    ]
    step = [("train_step", 4, "train")] if manual and "train" in splits else []
    return [*step, *(row for row in taken if row[0] in hooks)]


def check_ragged(splits: Mapping[str, Any]) -> None:
    """A training split whose last batch is shorter is known at once where the loader tells its rows."""
    if "train" not in splits:
        return
    info = describe(splits["train"])
    if info.rows is None or not info.batch_size or info.dropped:
        return
    last = info.rows % info.batch_size
    if last and info.rows > info.batch_size:
        raise DataError(
            f"the last batch of 'train' would have {last} rows, the others {info.batch_size}: a program takes one size",
            f"fix: drop it (ArrayLoader(..., drop_last=True)), or take a batch_size that divides {info.rows} rows",
            split="train",
        )


def _spec(array: Any) -> Any:
    """Shape and the dtype jax will give it; for bookkeeping fields that never travel, whatever they are."""
    array = np.asarray(array)
    if array.dtype.kind in "OUSMm":
        return None
    return jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
