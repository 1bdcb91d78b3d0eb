"""What ``finalize_metrics`` may return, and the numbers of it that go into logs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import numpy as np

from nitro_cli.errors import ExperimentError, Problem
from nitro_cli.metrics.accumulate import is_joined
from nitro_cli.metrics.modes import Mode


def check_final(result: Any, split: str) -> None:
    """Refuses anything but nested dicts of host numbers and arrays. Raises one ExperimentError naming every path."""
    if not isinstance(result, Mapping):
        what = f"finalize_metrics returned {type(result).__name__} for split '{split}', not a dict"
        raise ExperimentError(what, "fix: end it with `return metrics`")
    problems = []
    seen: set[str] = set()
    for path, value in _leaves(result, ""):
        what, fix = _fault(value)
        if path in seen:
            what, fix = "is there twice, once by a dot in its name", "rename one of them"
        if what:
            text = f"finalize_metrics, split '{split}': metric '{path}' {what}"
            problems.append(Problem(text, notes=(f"fix: {fix}",), facts={"metric": path}))
        seen.add(path)
    if problems:
        raise ExperimentError(problems)


def flatten_metrics(result: Mapping[str, Any]) -> dict[str, float]:
    """``{"group.name": float}`` of every single number, in order.

    Arrays of more than one element are left out: logs, checkpoints and early stopping compare numbers.
    """
    return {path: float(np.asarray(value).item()) for path, value in _leaves(result, "") if np.size(value) == 1}


def _leaves(group: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in group.items():
        path = f"{prefix}.{name}" if prefix else str(name)
        if isinstance(value, Mapping):
            yield from _leaves(value, path)
        else:
            yield path, value


def _fault(value: Any) -> tuple[str, str]:
    """What is wrong with one value, and the fix; two empty strings where nothing is."""
    if isinstance(value, Mode | tuple):
        return "still has a mode", "return the value alone; batches are already reduced"
    if is_joined(value) and value.size > 1:
        return (
            f"is the whole Concat array, shape {value.shape}",
            "compute a number from it, or leave it out of what is returned",
        )
    if isinstance(value, np.ndarray):
        return ("", "") if value.dtype.kind in "biufV" else (f"has dtype {value.dtype}", "return numbers")
    if isinstance(value, Real | np.bool_ | np.generic) and not isinstance(value, np.str_ | np.bytes_):
        return "", ""
    if hasattr(value, "devices") or type(value).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return "is a jax array, on a device", "return float(value), or np.asarray(value) for an array"
    return f"is {type(value).__name__}, not a number", "return a float, a numpy array, or a dict of them"
