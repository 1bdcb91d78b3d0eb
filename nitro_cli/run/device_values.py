"""Changing Device fields on a live handle: what fits goes in without a compile, everything else is refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from nitro_cli.errors import UsageError
from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.content import short_value
from nitro_cli.experiment.traits import config_metadata, device_fields, graphconst_fields
from nitro_cli.experiment.values import BadValue, from_python
from nitro_cli.optim.leaves import Leaves
from nitro_cli.run.setup import device_value
from nitro_cli.suggest import did_you_mean, listed


def check_device_field(cls: type, name: str) -> None:
    """Raises UsageError for a name that is no Device field, with what it is and what to do instead."""
    if name in device_fields(cls):
        return
    if name in graphconst_fields(cls):
        raise UsageError(
            f"'{name}' is a GraphConst field: another value is another program",
            f"build a new handle: Nitro(e.replace({name}=...)); programs that do not read it are reused",
        )
    if name in Experiment.model_fields:
        raise UsageError(
            f"'{name}' is a knob, which the driver reads when the handle is built",
            f"build a new handle for it: Nitro(e.replace({name}=...))",
        )
    if name in config_metadata(cls):
        raise UsageError(
            f"'{name}' is a Host field: no compiled program reads it, so setting it would change nothing",
            f"mark it Device to make it a traced input, or build a new handle: Nitro(e.replace({name}=...))",
        )
    hint = did_you_mean(name, device_fields(cls))
    raise UsageError(
        f"{cls.__name__} has no field '{name}'",
        *([hint] if hint else []),
        f"Device fields: {listed(list(device_fields(cls))) or 'none'}",
    )


def converted(cls: type, name: str, old: Any, value: Any) -> Any:
    """``value`` on the device, in the structure, shapes and dtypes of ``old``. Raises UsageError where it cannot be."""
    before, value = Leaves.of(old), jax.tree.map(_without_axes, value)
    if all(isinstance(leaf, (bool, int, float, str)) for leaf in jax.tree.leaves(value)):
        value = _validated(cls, name, value)
    try:
        now = Leaves.of(raw := jax.tree.map(np.asarray, value))
        arrays = jax.tree.leaves(raw)
        cast = [_kept(array, spec) for array, spec in zip(arrays, before.specs, strict=True)]
        same = now.structure == before.structure and all(leaf is not None for leaf in cast)
    except (TypeError, ValueError, AttributeError):
        same, cast = False, []
    if not same:
        shapes = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in before.specs) or "no value"
        raise UsageError(
            f"'{name}' holds {shapes}, and {short_value(value)} does not fit",
            "another shape or type would be another program",
            f"build a new handle for it: Nitro(e.replace({name}=...))",
        )
    return device_value(before.tree(cast))


def _validated(cls: type, name: str, value: Any) -> Any:
    """A plain value as the field would take it when the experiment is built: by its type and its bounds."""
    try:
        return from_python(config_metadata(cls)[name], value)
    except BadValue as error:
        notes = [note for note in (error.hint, "set_device takes what the field takes") if note]
        raise UsageError(f"'{name}' cannot be {short_value(value)}: {error.message}", *notes) from None


def _without_axes(leaf: Any) -> Any:
    """A number instead of an array without axes, which stands for one."""
    return leaf.item() if hasattr(leaf, "item") and np.ndim(leaf) == 0 else leaf


def _kept(array: np.ndarray, spec: jax.ShapeDtypeStruct) -> np.ndarray | None:
    """``array`` in the shape and dtype of ``spec``; None where that would lose more than precision."""
    kind = _kind(spec.dtype)
    if array.shape != spec.shape or _kind(array.dtype) not in {"b": "b", "f": "fi"}.get(kind, "i"):
        return None
    with np.errstate(over="ignore"):
        cast = array.astype(spec.dtype)
    whole = np.array_equal(np.isfinite(array), np.isfinite(cast)) if kind == "f" else (cast == array).all()
    return cast if whole else None


def _kind(dtype: Any) -> str:
    """``b``, ``i`` or ``f`` for truth values, whole numbers and reals, those of jax's own dtypes too; else ``-``."""
    kinds = {"b": np.bool_, "i": np.integer, "f": np.floating}
    return next((kind for kind, of in kinds.items() if jax.numpy.issubdtype(dtype, of)), "-")
