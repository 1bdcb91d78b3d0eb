"""Nitro: a command-line experiment runner for JAX. Nothing compiles again without a reason, and the reason is said.

Names are looked up on first use, so that ``nitro --help`` and declaring an experiment import no jax.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from nitro_cli.data.loader import ArrayLoader
    from nitro_cli.data.prefetch import NoPrefetch, Prefetch
    from nitro_cli.errors import NitroError
    from nitro_cli.experiment.base import Experiment
    from nitro_cli.experiment.hooks import default_no_decay
    from nitro_cli.experiment.markers import NO_DEFAULT, Device, GraphConst, Host
    from nitro_cli.experiment.presets import from_preset
    from nitro_cli.experiment.traits import config_metadata, device_fields, host_fields
    from nitro_cli.experiment.view import compile_view
    from nitro_cli.manual import backward, clip_by_global_norm, moving_average, optimizer_state, step_optimizer
    from nitro_cli.metrics.modes import Concat, Max, Min, Sum
    from nitro_cli.models import apply_model, linen_model, nnx_model
    from nitro_cli.programs.cache import cache_reset, cache_stats
    from nitro_cli.run.checkpoints import CheckpointPolicy
    from nitro_cli.run.nitro import Nitro

_HOMES = {
    "ArrayLoader": "data.loader",
    "NoPrefetch": "data.prefetch",
    "Prefetch": "data.prefetch",
    "NitroError": "errors",
    "Experiment": "experiment.base",
    "default_no_decay": "experiment.hooks",
    "NO_DEFAULT": "experiment.markers",
    "Device": "experiment.markers",
    "GraphConst": "experiment.markers",
    "Host": "experiment.markers",
    "from_preset": "experiment.presets",
    "config_metadata": "experiment.traits",
    "device_fields": "experiment.traits",
    "host_fields": "experiment.traits",
    "compile_view": "experiment.view",
    "backward": "manual",
    "clip_by_global_norm": "manual",
    "moving_average": "manual",
    "optimizer_state": "manual",
    "step_optimizer": "manual",
    "Concat": "metrics.modes",
    "Max": "metrics.modes",
    "Min": "metrics.modes",
    "Sum": "metrics.modes",
    "apply_model": "models",
    "linen_model": "models",
    "nnx_model": "models",
    "cache_reset": "programs.cache",
    "cache_stats": "programs.cache",
    "CheckpointPolicy": "run.checkpoints",
    "Nitro": "run.nitro",
}

__all__ = [
    "NO_DEFAULT",
    "ArrayLoader",
    "CheckpointPolicy",
    "Concat",
    "Device",
    "Experiment",
    "GraphConst",
    "Host",
    "Max",
    "Min",
    "Nitro",
    "NitroError",
    "NoPrefetch",
    "Prefetch",
    "Sum",
    "apply_model",
    "backward",
    "cache_reset",
    "cache_stats",
    "clip_by_global_norm",
    "compile_view",
    "config_metadata",
    "default_no_decay",
    "device_fields",
    "from_preset",
    "host_fields",
    "linen_model",
    "moving_average",
    "nnx_model",
    "optimizer_state",
    "step_optimizer",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'nitro_cli' has no attribute {name!r}")
    value = getattr(import_module(f"nitro_cli.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
