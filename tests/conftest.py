"""Handles whose runs lie in the test's own folder."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

# What a test compiles must not depend on what an earlier one left behind. Tests of the store have one of their own.
os.environ["NITRO_CACHE_DIR"] = "none"


@pytest.fixture
def handle(tmp_path) -> Callable[..., Any]:
    """``handle(experiment, **options)``: a ``Nitro`` with a run directory of its own."""
    from nitro_cli import Nitro

    count = itertools.count()

    def make(e: Any, **options: Any) -> Any:
        if "resume" not in options:
            options.setdefault("run_dir", tmp_path / f"run-{next(count)}")
        return Nitro(e, **options)

    return make


@pytest.fixture(autouse=True)
def _forget_experiments() -> Iterator[None]:
    """Modules below a test's own ``experiments`` folder, which another test must not find again."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "experiments":
            del sys.modules[name]


@pytest.fixture
def own_store(tmp_path, monkeypatch):
    """A store of the test's own, at ``tmp_path / "store"``. jax then stops using its own cache, which lies in there."""
    import jax
    from jax.experimental.compilation_cache import compilation_cache

    monkeypatch.setenv("NITRO_CACHE_DIR", str(tmp_path / "store"))
    before = {name: value for name, value in jax.config.values.items() if "_cache_" in name}
    yield tmp_path / "store"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def empty_cache():
    """Starts from an empty cache of programs, for tests that count all of them."""
    from nitro_cli import cache_reset

    cache_reset()


@pytest.fixture
def tmpfs(tmp_path):
    """``tmpfs(megabytes)`` mounts a real, small file system; skips where this user may not mount."""
    mounted = []

    def mount(megabytes: int):
        folder = tmp_path / f"tmpfs{len(mounted)}"
        folder.mkdir()
        if shutil.which("mount") is None:
            pytest.skip("there is no mount command here")
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
