"""What a program depends on besides its own code and arguments: versions, settings, the machine."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

_VERSIONED = ("jax", "jaxlib", "flax", "optax", "numpy")
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
# Settings of jax that say how it reports or stores, and change no program.
_SILENT = ("log", "cache", "traceback", "dump", "explain", "profil", "check_", "transfer_guard", "compiler_detailed")
_TRACED = ("programs/*.py", "optim/*.py", "experiment/*.py", "metrics/*.py", "data/*.py", "*.py")


def environment() -> dict[str, str]:
    """Facts by name, in words that decide. Asked at every request, since settings may change."""
    facts = dict(_fixed())
    facts |= {name: os.environ.get(name, "") for name in _VARIABLES}
    flags = [word for word in sys.argv if word.startswith("--xla")]  # jax reads these too
    facts |= {"XLA_FLAGS on the command line": " ".join(flags)} if flags else {}
    for name, value in sorted(jax.config.values.items()):
        if not any(word in name for word in _SILENT):
            facts[name] = str(value)
    return facts | _for_a_while()


def _for_a_while() -> dict[str, str]:
    """What stands in the key of jax's own caches, a mesh for example, and in none of its settings."""
    try:
        from jax._src import config

        return {"jax trace context": re.sub(r" at 0x[0-9a-f]+", "", str(config.trace_context()))}
    except Exception:  # jax has no public name for it
        return {}


@functools.cache
def _fixed() -> dict[str, str]:
    """What cannot change while the process lives."""
    facts = {f"version of {name}": metadata.version(name) for name in _VERSIONED}
    facts["python"] = f"{platform.python_implementation()} {platform.python_version()}"
    facts["nitro"] = _own_code()
    device = jax.devices()[0]
    facts["device"] = f"{jax.default_backend()} {device.device_kind} x {len(jax.devices())}"
    facts["platform"] = f"{sys.platform} {platform.machine()} {device.client.platform_version}"
    facts["processor"] = _processor()
    return facts


def _processor() -> str:
    """A digest of what the processor can do. An executable made for another one may end the process."""
    text = platform.processor()
    try:
        from jax._src.lib import xla_client

        client: Any = xla_client
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
