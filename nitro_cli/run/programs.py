"""The programs of one handle: each is looked up in the process-wide cache once, and then kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from nitro_cli.data.source import DataError
from nitro_cli.optim.leaves import Leaves
from nitro_cli.programs import evaluation, manual, training
from nitro_cli.programs.cache import Built, Program, program_cache
from nitro_cli.programs.key import Request
from nitro_cli.programs.recipe import Recipe

Shapes = Mapping[str, jax.ShapeDtypeStruct]


class Programs:
    """Programs by what they were made for. ``on_compile`` is told of every one that had to be compiled."""

    def __init__(self, recipe: Recipe, model_content: Any, on_compile: Callable[[Program], None]) -> None:
        self.recipe = recipe
        self.model_content = model_content
        self._on_compile = on_compile
        self._held: dict[Any, Program] = {}

    def gradient(self, batch: Shapes) -> Program:
        recipe, content = self.recipe, self.model_content
        return self._get(
            ("gradient", _shapes(batch)),
            lambda: training.gradient_request(recipe, batch, content),
            lambda request: training.build_gradient(request, recipe, batch),
        )

    def step(self, batch: Shapes) -> Program:
        recipe, content = self.recipe, self.model_content
        return self._get(
            ("step", _shapes(batch)),
            lambda: manual.step_request(recipe, batch, content),
            lambda request: manual.build_step(request, recipe, batch),
        )

    def update(self, optimizer: Leaves, columns: Sequence[str]) -> Program:
        recipe = self.recipe
        return self._get(
            ("update", len(columns)),
            lambda: training.update_request(recipe, optimizer, columns),
            lambda request: training.build_update(request, recipe, optimizer, columns),
        )

    def evaluation(self, batch: Shapes) -> Program:
        recipe, content = self.recipe, self.model_content
        return self._get(
            ("evaluation", _shapes(batch)),
            lambda: evaluation.evaluation_request(recipe, batch, content),
            lambda request: evaluation.build_evaluation(request, recipe, batch),
        )

    def metric(self, hook: str, outputs: Leaves, batch: Shapes, rows: int) -> Program:
        recipe = self.recipe
        return self._get(
            (hook, outputs.specs, _shapes(batch), rows),
            lambda: evaluation.metric_request(recipe, hook, outputs, batch, rows),
            lambda request: evaluation.build_metric(request, recipe, hook, outputs, batch, rows),
        )

    def _get(self, key: Any, request: Callable[[], Request], build: Callable[[Request], Built]) -> Program:
        if key not in self._held:
            self._held[key] = program_cache().get(request(), build, self._on_compile)
        return self._held[key]


def _shapes(batch: Shapes) -> tuple[Any, ...]:
    return tuple((name, spec.shape, spec.dtype) for name, spec in batch.items())


def specs_of(names: Sequence[str], arrays: Sequence[Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and canonical dtype of the arrays of a batch, by field."""
    return {
        name: jax.ShapeDtypeStruct(array.shape, jax.dtypes.canonicalize_dtype(array.dtype))
        for name, array in zip(names, arrays, strict=True)
    }


def batch_plan(schema: Shapes, fields: Sequence[str]) -> list[tuple[str, Any]]:
    """Name and dtype of the fields that travel, for ``as_inputs``."""
    return [(name, schema[name].dtype) for name in fields]


def as_inputs(batch: Mapping[str, Any], plan: Sequence[tuple[str, Any]]) -> list[Any]:
    """The fields that travel as arrays of the right dtype. A numpy array goes into a program as it is: on a CPU that is
    cheaper than placing it first."""
    arrays = []
    for name, dtype in plan:
        array = batch[name]
        arrays.append(array if array.dtype == dtype else as_dtype(name, array, dtype))
    return arrays


def as_dtype(name: str, array: Any, dtype: Any) -> Any:
    """``array`` in the dtype of the program. Whole numbers that do not fit would wrap without a word."""
    cast = array.astype(dtype, copy=False)
    if cast is array:
        return array
    if array.dtype.kind in "iu" and not np.array_equal(cast, array):
        raise DataError(
            f"field '{name}' is {array.dtype} and holds {array[cast != array].ravel()[0]}, which {dtype} cannot hold",
            "jax computes with 32 bits unless jax_enable_x64 is set; make the numbers smaller, or floats",
            field=name,
        )
    return cast
