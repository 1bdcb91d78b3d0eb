"""The training state of a handle, and its form in a checkpoint: component, then path of the leaf, then array."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from nitro_cli.optim.layout import Layout
from nitro_cli.optim.leaves import Leaves
from nitro_cli.programs.training import new_clock
from nitro_cli.run.setup import placed


@dataclass
class TrainState:
    """Flat lists of arrays on the device, and the counters that the host keeps beside them.

    ``params`` and ``average`` (the moving average, empty without one) are buffers of the layout.
    ``step`` counts optimizer steps; ``epoch`` counts epochs completed; ``position`` is the number of batches of the
    next epoch already trained on. ``loss_sum`` and ``loss_count`` are the running mean of that epoch's steps.
    """

    params: list[jax.Array]
    state: list[jax.Array]
    average: list[jax.Array] = field(default_factory=list)
    opt_state: list[jax.Array] | None = None
    optimizer: Leaves | None = None
    clock: Any = None
    step: int = 0
    epoch: int = 0
    position: int = 0
    loss_sum: float = 0.0
    loss_count: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)

    def hold(self, params: Any, state: Any, opt_state: Any, clock: Any, average: Any) -> None:
        """Take what an update returned."""
        self.params, self.state, self.opt_state, self.clock, self.average = params, state, opt_state, clock, average

    def reset_clock(self) -> None:
        self.clock = placed(new_clock(self.step))

    def counters(self) -> dict[str, Any]:
        names = ("step", "epoch", "position", "loss_sum", "loss_count", "history")
        return {name: getattr(self, name) for name in names}

    def restore_counters(self, meta: dict[str, Any]) -> None:
        for name in self.counters():
            setattr(self, name, meta[name])


def named_arrays(leaves: Leaves, arrays: list[jax.Array]) -> dict[str, np.ndarray]:
    """Host copies by path. Copies, since the next step takes the buffers that a view would look into."""
    return {path: np.array(_raw(array)) for path, array in zip(leaves.paths, arrays, strict=True)}


def template(leaves: Leaves) -> dict[str, Any]:
    """What ``Checkpoints.restore`` compares with: shape and dtype by path."""
    return {path: _raw_spec(spec) for path, spec in zip(leaves.paths, leaves.specs, strict=True)}


def placed_arrays(leaves: Leaves, stored: dict[str, Any]) -> list[jax.Array]:
    """The arrays of a checkpoint on the device, in the order of ``leaves``."""
    arrays = []
    for path, spec in zip(leaves.paths, leaves.specs, strict=True):
        array = placed(stored[path])
        arrays.append(jax.random.wrap_key_data(array, impl=_key_impl(spec)) if _is_key(spec) else array)
    return arrays


def named_buffers(layout: Layout, buffers: list[jax.Array]) -> dict[str, np.ndarray]:
    """Host copies of the parameters by path, whatever the layout: weights are stored leaf by leaf."""
    leaves = layout.unpack([np.array(buffer) for buffer in buffers])
    return dict(zip(layout.leaves.paths, leaves, strict=True))


def placed_buffers(layout: Layout, stored: dict[str, Any]) -> list[jax.Array]:
    """Parameters of a checkpoint as buffers on the device."""
    return [placed(buffer) for buffer in layout.pack([np.asarray(stored[path]) for path in layout.leaves.paths])]


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _key_impl(spec: jax.ShapeDtypeStruct) -> Any:
    """How keys like ``spec`` make their numbers. jax tells it of keys only, so one is looked at inside a trace."""
    found: list[Any] = []
    jax.eval_shape(lambda key: found.append(jax.random.key_impl(key)), spec)
    return found[0]


def _raw(array: jax.Array) -> Any:
    return jax.random.key_data(array) if _is_key(array) else array


def _raw_spec(spec: jax.ShapeDtypeStruct) -> Any:
    return jax.eval_shape(jax.random.key_data, spec) if _is_key(spec) else spec
