"""What a program depends on besides its own code and arguments: versions, settings, the machine."""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nitro_cli.programs.installed import library_digest, version
from nitro_cli.programs.libraries import ALWAYS

_VERSIONED = ("jax", "jaxlib", "flax", "optax", "numpy")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Settings of jax that say how it reports or stores, or how it comes to the device that is named here anyway.
_SILENT = (
    *("log", "cache", "traceback", "dump", "explain", "profil", "check_", "transfer_guard", "compiler_detailed"),
    *("pprint", "jax_platform"),
)
_TRACED = ("programs/*.py", "optim/*.py", "experiment/*.py", "metrics/*.py", "data/*.py", "*.py")


def environment(libraries: Iterable[str] = ()) -> dict[str, str]:
    """Facts by name, in words that decide. Asked at every request, since settings may change.

    ``libraries`` are packages that count besides those that nitro itself stands on.
    """
    facts = dict(_fixed())
    facts |= {f"files of {name}": library_digest(name) for name in sorted({*ALWAYS, *libraries})}
    facts |= {name: os.environ.get(name, "") for name in _VARIABLES}
    flags = [word for word in sys.argv if word.startswith("--xla")]  # jax reads these too
    facts |= {"XLA_FLAGS on the command line": " ".join(flags)} if flags else {}
    for name, value in sorted(jax.config.values.items()):
        if not any(word in name for word in _SILENT):
            facts[name] = str(value)
    facts["numpy error mode"] = _words(np.geterr())
    facts["numpy print options"] = _words(np.get_printoptions())
    facts["jax trace context"] = _trace_context()
    return facts | (_flax_settings() if "flax" in libraries else {})


@functools.cache
def _fixed() -> dict[str, str]:
    """What cannot change while the process lives."""
    facts = {name: str(version(name)) for name in _VERSIONED}
    facts["python"] = (
        f"{sys.implementation.cache_tag} {'.'.join(map(str, sys.version_info[:3]))} -O{sys.flags.optimize}"
    )
    facts["nitro"] = _own_code()
    device = jax.devices()[0]
    facts["device"] = f"{jax.default_backend()} {device.device_kind} x {len(jax.devices())}"
    facts["process"] = f"{jax.process_index()} of {jax.process_count()}"
    facts["platform"] = f"{platform.system()} {platform.machine()} {' '.join(device.client.platform_version.split())}"
    facts["processor"] = _processor()
    return facts


def _processor() -> str:
    """A digest of what the processor can do. An executable made for another one may end the process."""
    text = platform.processor()
    try:
        from jax._src import lib

        client: Any = lib.xla_client  # pyright: ignore[reportPrivateImportUsage]
        text += str(client.get_topology_for_devices(jax.devices()).fingerprint())
    except Exception:  # jax has no public name for it, so any of this may be gone one day
        pass
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        text += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    except OSError:
        pass
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _own_code() -> str:
    """A digest of nitro's own files that take part in a trace, so that a store outlives no edit of them."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(path for files in _TRACED for path in root.glob(files)):
        digest.update(path.name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _words(settings: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in sorted(settings.items()))


def _trace_context() -> str:
    """What stands in the key of jax's own caches, a mesh for example, and in none of its settings.

    A module of jax adds items of its own when it is imported, all of them off. They count once they are on, so that an
    import, which may come early in one process and late in another, changes nothing.
    """
    config: Any = sys.modules.get("jax._src.config")  # jax has no public name for any of this
    values = getattr(config, "trace_context", tuple)()
    try:
        names = list(config.trace_context_names())
    except (AttributeError, NotImplementedError):
        names = [str(position) for position in range(len(values))]
    flags = jax.config.values
    on = {k: v for k, v in zip(names, values, strict=True) if k in flags or not (v is None or v is False)}
    return " ".join(f"{name}={_setting(value)}" for name, value in sorted(on.items()))


def _setting(value: Any) -> str:
    """A setting as a text that decides it. What is not known to have one counts in this process only."""
    if isinstance(value, (type(None), bool, int, float, str, enum.Enum)):
        return str(value)
    if isinstance(value, (tuple, frozenset)):
        return f"({' '.join(sorted(map(_setting, value)) if isinstance(value, frozenset) else map(_setting, value))})"
    if type(value).__name__ == "AxisEnv":  # which axes a trace is under; none, where a program is asked for
        return "AxisEnv"
    if isinstance(value, (jax.sharding.AbstractMesh, jax.sharding.Mesh, jax.Device)):
        return f"{type(value).__name__} {value}"
    return f"{type(value).__name__} {id(value)} of process {os.getpid()}"


def _flax_settings() -> dict[str, str]:
    config = getattr(sys.modules.get("flax.configurations"), "config", None)
    return {f"flax {name}": str(getattr(config, name)) for name in getattr(config, "_values", None) or ()}
