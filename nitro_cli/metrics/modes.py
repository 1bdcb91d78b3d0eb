"""How the batches of a split are reduced to one value: the modes a ``metrics`` hook says.

A plain ``(sum, count)`` pair is a mean. The other modes wrap a value, or a dict of values that all reduce alike.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, eq=False)
class Mode:
    """Base of the wrappers; use ``Sum``, ``Max``, ``Min`` or ``Concat``."""

    value: Any

    def __post_init__(self) -> None:
        # A wrapper is a leaf to jax until it is registered, and only a process that has jax can trace one.
        if not _registered and "jax" in sys.modules:
            register_modes()


@dataclass(frozen=True, eq=False)
class Sum(Mode):
    """The sum over batches, elementwise."""


@dataclass(frozen=True, eq=False)
class Max(Mode):
    """The largest over batches, elementwise."""


@dataclass(frozen=True, eq=False)
class Min(Mode):
    """The smallest over batches, elementwise."""


@dataclass(frozen=True, eq=False)
class Concat(Mode):
    """One entry per sample, shape ``(rows, ...)``; all of them in data order reach ``finalize_metrics``."""


_registered = False


def register_modes() -> None:
    """Makes the wrappers pytrees, so that traced functions can return them. Imports jax; does its work once."""
    global _registered
    if _registered:
        return
    _registered = True
    from jax import tree_util

    for mode in (Sum, Max, Min, Concat):
        tree_util.register_dataclass(mode, data_fields=["value"], meta_fields=[])
