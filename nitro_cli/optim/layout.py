"""How parameters cross program boundaries: small leaves joined into one flat buffer, large ones on their own.

A leaf costs 1.3 to 2 us in every call it goes through, and it goes through about nine a step (parameters, gradient and
optimizer state, in and out); joining it costs copies that grow with its size. ``mix``, the default, joins leaves of at
most ``PACKED_ELEMENTS`` numbers and leaves the others alone; ``flat`` joins all, ``tree`` none. The figures behind the
limit are in benchmarks/README.md. Only leaves of one group, dtype and decay setting are joined, and only where the
group's rule is element-wise, so that no result depends on the layout.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nitro_cli.optim.leaves import Leaves

KINDS = ("mix", "flat", "tree")
PACKED_ELEMENTS = 16384


@dataclass(frozen=True)
class Buffer:
    """One array at the boundary: ``leaves`` are indices into the parameter tree, in order. A buffer of one leaf has
    that leaf's shape, one of several is flat."""

    name: str
    group: str
    decays: bool
    leaves: tuple[int, ...]
    spec: jax.ShapeDtypeStruct


@dataclass(frozen=True)
class Layout:
    """Which leaf lies where. ``pack`` and ``unpack`` work on numpy arrays, on jax arrays and while tracing."""

    leaves: Leaves
    buffers: tuple[Buffer, ...]

    @property
    def specs(self) -> list[jax.ShapeDtypeStruct]:
        return [buffer.spec for buffer in self.buffers]

    def pack(self, leaves: Sequence[Any]) -> list[Any]:
        """Leaves in the order of the tree, as buffers."""
        return [_joined([leaves[i] for i in buffer.leaves]) for buffer in self.buffers]

    def unpack(self, buffers: Sequence[Any]) -> list[Any]:
        """Buffers as leaves in the order of the tree."""
        leaves: list[Any] = [None] * len(self.leaves.specs)
        for buffer, array in zip(self.buffers, buffers, strict=True):
            if len(buffer.leaves) == 1:
                leaves[buffer.leaves[0]] = array
                continue
            start = 0
            for index in buffer.leaves:
                shape = self.leaves.specs[index].shape
                size = math.prod(shape)
                leaves[index] = array[start : start + size].reshape(shape)
                start += size
        return leaves

    def tree(self, buffers: Sequence[Any]) -> Any:
        return self.leaves.tree(self.unpack(buffers))

    def table(self) -> list[list[Any]]:
        """Rows ``[path, group, buffer, offset, shape]`` for checkpoints: optimizer state is stored by buffer, so a run
        can only be resumed under the same table."""
        rows = []
        for buffer in self.buffers:
            start = 0
            for index in buffer.leaves:
                spec = self.leaves.specs[index]
                rows.append([self.leaves.paths[index], buffer.group, buffer.name, start, list(spec.shape)])
                start += math.prod(spec.shape)
        return rows


def make_layout(
    leaves: Leaves, groups: Sequence[str], decays: Sequence[bool], joinable: Sequence[str], kind: str
) -> Layout:
    """``groups`` and ``decays`` are per leaf; ``joinable`` names the groups whose leaves may be joined."""
    limit = {"mix": PACKED_ELEMENTS, "flat": math.inf, "tree": -1}[kind]
    together: dict[tuple[Any, ...], list[int]] = {}
    for index, spec in enumerate(leaves.specs):
        small = groups[index] in joinable and spec.shape != () and math.prod(spec.shape) <= limit
        alone = () if small else (index,)
        together.setdefault((groups[index], decays[index], str(spec.dtype), *alone), []).append(index)
    buffers = []
    for (group, decay, dtype, *_), members in together.items():
        first = leaves.specs[members[0]]
        if len(members) == 1:
            name, spec = leaves.paths[members[0]], first
        else:
            size = sum(math.prod(leaves.specs[i].shape) for i in members)
            name = f"{group}:{dtype}{':decays' if decay else ''}"
            spec = jax.ShapeDtypeStruct((size,), first.dtype)
        buffers.append(Buffer(name, group, decay, tuple(members), spec))
    return Layout(leaves, tuple(buffers))


def _joined(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    if all(isinstance(part, np.ndarray) for part in parts):
        return np.concatenate([part.ravel() for part in parts])
    return jnp.concatenate([part.ravel() for part in parts])
