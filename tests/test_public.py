"""The names that users import, and that importing them costs no jax."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version

import pytest

import nitro_cli

EXPECTED = {
    *("Experiment", "GraphConst", "Device", "Host", "NO_DEFAULT"),
    *("compile_view", "config_metadata", "device_fields", "host_fields", "from_preset"),
    *("ArrayLoader", "Prefetch", "NoPrefetch", "Sum", "Max", "Min", "Concat"),
    *("linen_model", "nnx_model", "apply_model"),
    *("backward", "step_optimizer", "optimizer_state", "clip_by_global_norm", "moving_average"),
    *("Nitro", "CheckpointPolicy", "NitroError", "cache_stats", "cache_reset"),
}


def test_the_public_names_are_there():
    assert set(nitro_cli.__all__) >= EXPECTED
    assert list(nitro_cli.__all__) == sorted(nitro_cli.__all__, key=lambda name: (not name.isupper(), name))
    for name in nitro_cli.__all__:
        assert getattr(nitro_cli, name) is not None
        assert name in dir(nitro_cli)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Trainer'"):
        _ = nitro_cli.Trainer


def test_public_functions_and_classes_are_documented():
    for name in EXPECTED - {"GraphConst", "Device", "Host", "NO_DEFAULT"}:
        assert getattr(nitro_cli, name).__doc__, name


def test_declaring_an_experiment_imports_no_jax():
    code = """
import sys
from nitro_cli import ArrayLoader, Device, Experiment, GraphConst, Prefetch
class E(Experiment):
    width: GraphConst[int] = 3
    scale: Device[float] = 1.0
E(width=4)
heavy = [name for name in ("jax", "flax", "optax", "orbax") if name in sys.modules]
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_version_is_that_of_the_distribution():
    assert nitro_cli.__version__ == version("nitro-jax")
