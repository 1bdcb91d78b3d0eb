"""One pass over a split without gradients: metrics for validate and evaluate, outputs for predict.

Batches are padded to one width, so that there is one evaluation program; metrics see real rows only. While the device
works on a batch, the host reduces the one before.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from nitro_cli.data.padding import pad_batch, slice_rows
from nitro_cli.data.prefetch import open_stream
from nitro_cli.data.source import check_batch, first_batch
from nitro_cli.errors import ExperimentError, UsageError
from nitro_cli.metrics.accumulate import Accumulator
from nitro_cli.metrics.finalize import check_final, flatten_metrics
from nitro_cli.programs.cache import Program
from nitro_cli.run.programs import as_dtype, as_inputs, batch_plan, specs_of
from nitro_cli.suggest import did_you_mean

if TYPE_CHECKING:
    from nitro_cli.run.nitro import Nitro


def check_forward(nitro: Nitro) -> None:
    """Raises ExperimentError where an experiment that owns its step has no ``forward`` to evaluate or predict with."""
    recipe = nitro.setup.recipe
    if "forward" not in recipe.routes:
        raise ExperimentError(
            f"{recipe.owner.__name__} has no hook 'forward', so it cannot be evaluated and cannot predict",
            "in manual mode forward serves evaluation alone: def forward(self, model, ps, st, *, <batch fields>)",
        )


class _Forward:
    """Calls of the evaluation program, for batches of whatever shapes come. ``present`` are the fields of the split;
    one with a default in ``forward`` may be missing."""

    def __init__(self, nitro: Nitro, present: Collection[str]) -> None:
        self.nitro = nitro
        check_forward(nitro)
        route = nitro.setup.recipe.routes["forward"]
        self.fields = tuple(f for f in route.fields if f in present or f not in route.optional)
        self.device = nitro.evaluated_device()
        self.program: Program | None = None
        self.calls = 0

    def __call__(self, arrays: Sequence[Any]) -> list[Any]:
        n = self.nitro
        if self.program is None:
            self.program = n.programs.evaluation(specs_of(self.fields, arrays))
        arguments = (n.evaluated_params(), n.state.state, self.device, n.seed_words, list(arrays))
        try:
            outputs = self.program.run(*arguments)
        except TypeError:
            specs = specs_of(self.fields, arrays)
            other = n.programs.evaluation(specs)
            if other is self.program:
                raise
            self._book()
            self.program = other
            outputs = self.program.run(*arguments)
        self.calls += 1
        return outputs

    def tree(self, leaves: list[Any]) -> Any:
        assert self.program is not None
        return self.program.found["outputs"].tree(leaves)

    def _book(self) -> None:
        if self.program is not None:
            self.program.used(self.calls)
            self.calls = 0

    close = _book


def evaluate_split(nitro: Nitro, split: str, epoch: int) -> tuple[dict[str, float], int]:
    """``(metrics by name, number of real rows)`` of one pass. Names carry the split: ``val_accuracy``.

    Raises ExperimentError for what the ``metrics`` or ``finalize_metrics`` hook returns wrongly.
    """
    setup = nitro.setup
    recipe, source, schema = setup.recipe, setup.splits[split], setup.schema[split]
    name = "metrics" if "metrics" in recipe.hooks else "loss"
    check_forward(nitro)
    if name not in recipe.hooks:
        raise ExperimentError(
            f"{recipe.owner.__name__} has neither 'metrics' nor 'loss', so there is nothing to evaluate '{split}' with",
            "define metrics(self, outputs, *, <batch fields>)",
        )
    _check_fields(nitro, split, "forward", schema)
    on_device = name == "loss" or recipe.residency["metrics"] == "device"
    needed = [f for f in recipe.routes[name].fields if f in schema]
    _check_fields(nitro, split, name, schema)
    forward = _Forward(nitro, schema)
    measure: Any = (_DeviceMetric if on_device else _HostMetric)(nitro, name, needed, forward)
    travelling: tuple[str, ...] = tuple(dict.fromkeys((*forward.fields, *(needed if on_device else ()))))
    plan = batch_plan(schema, forward.fields)

    def prepare(batch: Any) -> Any:
        padded, rows = pad_batch(batch, travelling, setup.eval_width)
        return as_inputs(padded, plan), padded if on_device else batch, rows

    def check(index: int, batch: Any) -> None:
        check_batch(split, index, batch, schema, travelling)

    total = 0
    try:
        with open_stream(split, source, epoch=epoch, prepare=prepare, check=check) as stream:
            for index, (arrays, batch, rows) in stream:
                measure.add(forward(arrays), batch, rows, index)
                total += rows
                nitro.notify_progress()
                nitro.leave_if_interrupted()
        reduced = measure.result()
    finally:
        forward.close()
        measure.close()
    finalize = recipe.hooks["finalize_metrics"]
    final = finalize(setup.experiment, reduced, split)
    check_final(final, split)
    return {_named(split, key): value for key, value in flatten_metrics(final).items()}, total


def _check_fields(nitro: Nitro, split: str, hook: str, schema: Mapping[str, Any]) -> None:
    route = nitro.setup.recipe.routes[hook]
    lacking = [f for f in route.fields if f not in schema and f not in route.optional]
    if lacking:
        raise ExperimentError(
            f"split '{split}' has no field '{lacking[0]}', which {hook} takes",
            f"its batches have: {', '.join(sorted(schema))}",
            f"a split without labels can be predicted, not evaluated: nitro predict ... --split {split}",
        )


def _named(split: str, metric: str) -> str:
    return metric if metric.startswith(f"{split}_") else f"{split}_{metric}"


class _HostMetric:
    """The ``metrics`` hook on host arrays, one batch behind the device."""

    def __init__(self, nitro: Nitro, name: str, fields: Sequence[str], forward: _Forward) -> None:
        self.nitro, self.fields, self.forward = nitro, fields, forward
        self.hook = nitro.setup.recipe.hooks[name]
        self.accumulator = Accumulator()
        self.waiting: tuple[Any, ...] | None = None

    def add(self, outputs: list[Any], batch: Mapping[str, Any], rows: int, index: int) -> None:
        self._finish()
        self.waiting = (outputs, {f: np.asarray(batch[f]) for f in self.fields}, rows, index)

    def _finish(self) -> None:
        if self.waiting is None:
            return
        outputs, fields, rows, index = self.waiting
        self.waiting = None
        tree = slice_rows(self.forward.tree(outputs), rows, self.nitro.setup.eval_width)
        values = self.hook(self.nitro.setup.experiment, tree, **fields)
        self.accumulator.add(jax.device_get(values), rows, index)

    def result(self) -> dict[str, Any]:
        self._finish()
        return self.accumulator.result()

    def close(self) -> None:
        self.waiting = None


class _DeviceMetric:
    """The ``metrics`` hook, or ``loss`` where there is none, as a program; its values are fetched at the end."""

    def __init__(self, nitro: Nitro, name: str, fields: Sequence[str], forward: _Forward) -> None:
        self.nitro, self.name, self.fields, self.forward = nitro, name, fields, forward
        self.values: list[tuple[Any, int, int]] = []
        self.calls: dict[int, tuple[Program, int]] = {}

    def add(self, outputs: list[Any], batch: Mapping[str, Any], rows: int, index: int) -> None:
        n = self.nitro
        assert self.forward.program is not None
        arrays = [np.asarray(batch[f]) for f in self.fields]
        dtypes = [jax.dtypes.canonicalize_dtype(a.dtype) for a in arrays]
        arrays = [as_dtype(f, a, dtype) for f, a, dtype in zip(self.fields, arrays, dtypes, strict=True)]
        described = self.forward.program.found["outputs"]
        program = n.programs.metric(self.name, described, specs_of(self.fields, arrays), rows)
        self.values.append((program.run(outputs, self.forward.device, n.seed_words, arrays), rows, index))
        count = self.calls.get(id(program), (program, 0))[1]
        self.calls[id(program)] = (program, count + 1)

    def result(self) -> dict[str, Any]:
        accumulator = Accumulator()
        for values, rows, index in self.values:
            host = jax.device_get(values)
            if self.name == "loss":
                host = {"loss": (float(host) * rows, rows)}
            accumulator.add(host, rows, index)
        return accumulator.result()

    def close(self) -> None:
        for program, calls in self.calls.values():
            program.used(calls)
        self.calls = {}
        self.values = []


def predict_batches(nitro: Nitro, source: Any, split: str) -> Iterator[Any]:
    """Outputs of ``forward`` per batch of ``source``, in order: numpy arrays, real rows only."""
    forward = _Forward(nitro, first_batch(split, source))
    width = nitro.setup.eval_width
    waiting: tuple[list[Any], int] | None = None

    def check(index: int, batch: Any) -> None:
        _check_predictable(split, index, batch, forward.fields)

    def finished(item: tuple[list[Any], int]) -> Any:
        return slice_rows(forward.tree(item[0]), item[1], width)

    prepare = _predict_prepare(nitro, forward.fields)
    try:
        with open_stream(split, source, epoch=0, prepare=prepare, check=check) as stream:
            for _, (arrays, rows) in stream:
                outputs = forward(arrays)
                if waiting is not None:
                    yield finished(waiting)
                waiting = (outputs, rows)
                nitro.leave_if_interrupted()
        if waiting is not None:
            yield finished(waiting)
    finally:
        forward.close()


def predict_batch(nitro: Nitro, batch: Mapping[str, Any]) -> Any:
    """Outputs for one batch of at most the evaluation width."""
    forward = _Forward(nitro, batch)
    _check_predictable("predict", 0, batch, forward.fields)
    arrays, rows = _predict_prepare(nitro, forward.fields)(batch)
    try:
        return slice_rows(forward.tree(forward(arrays)), rows, nitro.setup.eval_width)
    finally:
        forward.close()


def _check_predictable(split: str, index: int, batch: Any, fields: Sequence[str]) -> None:
    lacking = [f for f in fields if f not in batch]
    if lacking:
        raise ExperimentError(
            f"a batch to predict has no field '{lacking[0]}', which forward takes",
            f"it has: {', '.join(sorted(batch))}",
        )
    check_batch(split, index, batch, None, fields)


def _predict_prepare(nitro: Nitro, fields: Sequence[str]) -> Callable[[Any], tuple[list[Any], int]]:
    setup = nitro.setup
    known = {name: spec for schema in reversed(setup.schema.values()) for name, spec in schema.items()}
    plan = batch_plan(known, fields)

    def prepare(batch: Any) -> tuple[list[Any], int]:
        padded, rows = pad_batch(batch, fields, setup.eval_width)
        return as_inputs(padded, plan), rows

    return prepare


def known_split(nitro: Nitro, split: str) -> str:
    """``split`` where it exists. Raises UsageError listing the splits."""
    if split not in nitro.setup.splits:
        names = list(nitro.setup.splits)
        hint = did_you_mean(split, names)
        raise UsageError(f"there is no split '{split}'", *([hint] if hint else []), f"splits: {', '.join(names)}")
    return split
