"""What all programs of a handle are built from, and the hooks as traced code calls them.

A ``Recipe`` is frozen when the handle is constructed: nothing that happens later changes which program it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from nitro_cli.data.routing import Route
from nitro_cli.errors import ExperimentError, Place
from nitro_cli.experiment.view import compile_view, tracing
from nitro_cli.optim.bindings import Optimizers
from nitro_cli.optim.leaves import Leaves, spec_text
from nitro_cli.optim.plan import Plan

# Streams of random numbers, apart by use; the step and micro-batch are folded in besides.
FORWARD, LOSS, TRAIN_METRICS, EVALUATION = range(4)


@dataclass(frozen=True)
class Recipe:
    """Everything that decides which programs a handle runs, apart from the shapes of its batches."""

    experiment: Any
    hooks: Mapping[str, Callable[..., Any]]
    routes: Mapping[str, Route]
    residency: Mapping[str, str]
    model: Any
    params: Leaves
    state: Leaves
    device: Leaves
    plan: Plan
    accum: int
    compute_dtype: str | None
    fields: Mapping[str, str]
    optimizers: Optimizers | None = None

    @property
    def owner(self) -> type:
        return type(self.experiment)

    @property
    def name(self) -> str:
        """What the store calls the experiment."""
        return self.owner.__qualname__

    @property
    def manual(self) -> bool:
        """Whether the experiment owns its step: there are then ``optimizers``, and the plan has no groups."""
        return self.optimizers is not None

    @property
    def host_metrics(self) -> bool:
        """Whether ``train_metrics`` runs on the host, after each step."""
        return "train_metrics" in self.hooks and self.residency["train_metrics"] == "host"

    def described(self) -> dict[str, str]:
        """What every program with the model in it takes, for its key: parameters as they lie in buffers, state and
        Device values."""
        buffers = {b.name: ",".join(self.params.paths[i] for i in b.leaves) for b in self.plan.layout.buffers}
        laid = {f"buffer {name}": paths for name, paths in buffers.items() if "," in paths}
        return self.params.described("ps") | laid | self.state.described("st") | self.device.described("device")

    def settings(self) -> dict[str, str]:
        return {"compute_dtype": self.compute_dtype or "none"}

    def routed(self, *hooks: str) -> tuple[str, ...]:
        """Batch fields that any of ``hooks`` takes, each once."""
        return tuple(dict.fromkeys(f for hook in hooks if hook in self.routes for f in self.routes[hook].fields))

    def view(self, device_leaves: Any) -> Any:
        """The experiment as traced code sees it, with these Device values."""
        return compile_view(self.experiment, self.device.tree(device_leaves))

    def forward(
        self, view: Any, ps: Any, st: Any, batch: Mapping[str, Any], *, train: bool, key: Any, reads: set[str]
    ) -> tuple[Any, Any]:
        """Call ``forward`` and check what it returns: ``(outputs, st_new)`` with ``st_new`` shaped like ``st``.

        Under a compute dtype, parameters and floating batch fields go in as that dtype; outputs come back as float32
        and the state in its own dtypes, so that losses and running statistics keep their precision.
        """
        route = self.routes["forward"]
        if self.compute_dtype is not None:
            ps, batch = _cast((ps, dict(batch)), self.compute_dtype)
        reserved = ({"train": train} if route.train else {}) | ({"rng": self._key(key, FORWARD)} if route.rng else {})
        with tracing("forward", reads):
            returned = self.hooks["forward"](view, self.model, ps, st, **pick(route, batch), **reserved)
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise self.broken(
                "forward",
                f"must return (outputs, st_new), and returned {kind_of(returned)}",
                "a stateless model returns its state unchanged: return outputs, st",
            )
        outputs, st_new = returned
        if self.compute_dtype is not None:
            outputs = _cast(outputs, "float32")
            st_new = self._state_dtypes(st_new)
        self._check_state(st_new)
        width = next(iter(batch.values())).shape[0] if batch else None
        self._check_outputs(outputs, width)
        return outputs, st_new

    def loss(self, view: Any, outputs: Any, batch: Mapping[str, Any], *, key: Any, reads: set[str]) -> jax.Array:
        """Call ``loss`` and check that it is a real floating-point scalar."""
        route = self.routes["loss"]
        reserved = {"rng": self._key(key, LOSS)} if route.rng else {}
        with tracing("loss", reads):
            value = self.hooks["loss"](view, outputs, **pick(route, batch), **reserved)
        return self.checked_loss("loss", value, "reduce it over the batch: return loss.mean()")

    def checked_loss(self, hook: str, value: Any, reduced: str) -> jax.Array:
        """``value`` as a real floating-point scalar. Raises ExperimentError with ``reduced``, how it becomes one."""
        shape, role = getattr(value, "shape", None), "" if hook == "loss" else " as its loss"
        if isinstance(value, (tuple, dict, list)) or value is None or (shape is None and not _is_number(value)):
            what = f"must return one scalar{role}, and returned {kind_of(value)}"
            raise self.broken(hook, what, "return loss.mean()")
        value = jnp.asarray(value)
        if value.shape != ():
            what = f"must return one scalar{role}, and returned an array of shape {tuple(value.shape)}"
            raise self.broken(hook, what, reduced)
        if not jnp.issubdtype(value.dtype, jnp.floating):
            raise self.broken(
                hook, f"must {'be' if not role else 'return'} a floating-point number{role}, and is {value.dtype}"
            )
        return value

    def train_metrics(
        self, view: Any, outputs: Any, batch: Mapping[str, Any], *, key: Any, reads: set[str]
    ) -> dict[str, jax.Array]:
        """Scalars of ``train_metrics`` where it runs on the device, else an empty dict."""
        hook = self.hooks.get("train_metrics")
        if hook is None or self.residency["train_metrics"] != "device":
            return {}
        route = self.routes["train_metrics"]
        reserved = {"rng": self._key(key, TRAIN_METRICS)} if route.rng else {}
        with tracing("train_metrics", reads):
            values = hook(view, outputs, **pick(route, batch), **reserved)
        return self.checked_scalars("train_metrics", values)

    def checked_scalars(self, hook: str, values: Any, role: str = "") -> dict[str, Any]:
        """``values`` as a dict of scalars. Raises ExperimentError naming what is none; ``role`` ends "must return"."""
        if not isinstance(values, Mapping):
            raise self.broken(hook, f"must return a dict of scalars{role}, and returned {kind_of(values)}")
        if "loss" in values:
            raise self.broken(
                hook,
                f"returns 'loss'{role}, which is the name of the loss itself in every row",
                "nitro logs the loss; give this number another name",
            )
        for name, value in values.items():
            if getattr(value, "shape", ()) != () or isinstance(value, (tuple, list, dict, str)) or value is None:
                raise self.broken(
                    hook,
                    f"must return scalars{role}, and '{name}' is {kind_of(value)}",
                    f"reduce it over the batch: '{name}': value.mean()",
                )
        return dict(values)

    def _key(self, key: Any, stream: int) -> jax.Array:
        return jax.random.fold_in(key, stream)

    def _state_dtypes(self, st_new: Any) -> Any:
        leaves, structure = jax.tree.flatten(st_new)
        if structure != self.state.structure:
            return st_new  # the check that follows says what is wrong
        return self.state.tree(
            [jnp.asarray(leaf).astype(spec.dtype) for leaf, spec in zip(leaves, self.state.specs, strict=True)]
        )

    def _check_state(self, st_new: Any) -> None:
        new = Leaves.of(jax.tree.map(jnp.asarray, st_new))
        if new.structure != self.state.structure:
            gone = sorted(set(self.state.paths) - set(new.paths))
            come = sorted(set(new.paths) - set(self.state.paths))
            notes = [f"missing: {', '.join(gone)}"] if gone else []
            notes += [f"unexpected: {', '.join(come)}"] if come else []
            raise self.broken(
                "forward", "must return st_new with the structure of st", *notes, "a stateless model returns st itself"
            )
        for path, before, now in zip(self.state.paths, self.state.specs, new.specs, strict=True):
            if (before.shape, before.dtype) != (now.shape, now.dtype):
                raise self.broken(
                    "forward",
                    f"changed the state leaf '{path}' from {spec_text(before)} to {spec_text(now)}",
                    "state keeps its shape and dtype: cast it back with .astype(...)",
                )

    def _check_outputs(self, outputs: Any, width: int | None) -> None:
        for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]:
            shape = getattr(leaf, "shape", None)
            if shape is None or (width is not None and (not shape or shape[0] != width)):
                where = jax.tree_util.keystr(path, simple=True, separator=".") or "outputs"
                raise self.broken(
                    "forward",
                    f"returned '{where}' as {kind_of(leaf)}; every output has the batch axis first"
                    + (f" ({width} here)" if width is not None else ""),
                    "short batches are padded and outputs are cut back to the real rows along that axis",
                    "what is already reduced over the batch belongs into loss or metrics",
                )

    def broken(self, hook: str, what: str, *notes: str) -> ExperimentError:
        code = getattr(self.hooks[hook], "__code__", None)
        place = Place(code.co_filename, code.co_firstlineno) if code is not None else None
        return ExperimentError(f"{self.owner.__name__}.{hook} {what}", *notes, place=place, hook=hook)


def _cast(tree: Any, dtype: str) -> Any:
    """Floating-point leaves of ``tree`` in ``dtype``; others as they are."""

    def cast(leaf: Any) -> Any:
        floating = hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
        return jnp.asarray(leaf).astype(dtype) if floating else leaf

    return jax.tree.map(cast, tree)


def pick(route: Route, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The hook's fields. One with a default may be missing from a split; the hook then takes its default."""
    return {name: batch[name] for name in route.fields if name in batch or name not in route.optional}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def kind_of(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"an array {spec_text(value)}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"
