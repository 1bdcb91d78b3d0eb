"""What a program depends on.

A ``Request`` lists everything that decides which program is meant: its code, the shapes and types of its arguments,
static settings, GraphConst values, and the environment. GraphConst values are special: only those that the trace read
count, and which those are is known after the first trace. So the key leaves them out, and an entry under the key
matches when the fields that its trace read have the same values now.

Never in it: Device and Host values, the seed, the learning rate, the clip threshold, ``max_epochs``.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import os
import platform
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import jax

from nitro_cli.programs.fingerprint import Fingerprint
from nitro_cli.programs.libraries import ALWAYS, library_digest

_VERSIONED = ("jax", "jaxlib", "flax", "optax", "numpy")
# Settings of jax that say how it reports or stores, and change no program.
_SILENT = ("log", "cache", "traceback", "dump", "explain", "profil", "check_", "transfer_guard", "compiler_detailed")


@dataclass(frozen=True)
class Request:
    """A program that is wanted. All values are texts that decide by content; ``fields`` are the GraphConst values.

    ``experiment`` is the name under which the program is kept and looked for; it decides nothing.
    """

    program: str
    code: Fingerprint
    arguments: Mapping[str, str]
    settings: Mapping[str, str]
    fields: Mapping[str, str] = field(default_factory=dict)
    experiment: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.environment:
            object.__setattr__(self, "environment", environment(self.code.libraries))

    @functools.cached_property
    def digest(self) -> str:
        lines = [self.program, self.code.digest()]
        for part in (self.arguments, self.settings, self.environment):
            lines.extend(f"{name} = {value}" for name, value in part.items())
            lines.append("")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def reads_same(self, other: Request, reads: Iterable[str]) -> bool:
        return all(self.fields.get(name) == other.fields.get(name) for name in reads)


def environment(libraries: Iterable[str] = ()) -> dict[str, str]:
    """Versions, devices, and the settings of jax that change what it compiles; ``libraries`` are packages that count
    besides those that nitro itself stands on."""
    facts = dict(_machine())
    facts |= {f"files of {name}": library_digest(name) for name in sorted({*ALWAYS, *libraries})}
    facts |= {name: os.environ.get(name, "") for name in ("XLA_FLAGS", "LIBTPU_INIT_ARGS")}
    facts["--xla"] = " ".join(word for word in sys.argv if word.startswith("--xla"))
    facts["device"] = f"{jax.default_backend()} {jax.devices()[0].device_kind} x {len(jax.devices())}"
    facts["platform"] = " ".join(str(jax.devices()[0].client.platform_version).split())
    facts["process"] = f"{jax.process_index()} of {jax.process_count()}"
    for name, value in sorted(jax.config.values.items()):
        if not any(word in name for word in _SILENT):
            facts[name] = str(value)
    facts["trace context"] = _trace_context()
    return facts | (_flax_settings() if "flax" in libraries else {})


@functools.cache
def _machine() -> dict[str, str]:
    """What cannot change while the process runs."""
    facts = {name: metadata.version(name) for name in _VERSIONED}
    facts["python"] = (
        f"{sys.implementation.cache_tag} {'.'.join(map(str, sys.version_info[:3]))} -O{sys.flags.optimize}"
    )
    facts["machine"] = f"{platform.system()} {platform.machine()}"
    facts["processor"] = hashlib.sha256(_processor().encode()).hexdigest()
    return facts


def _processor() -> str:
    """Instructions that the processor has: an executable for a CPU uses what the one it was made on had."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _trace_context() -> str:
    """Settings of jax that are in force here only: ``with jax.default_matmul_precision(...)``."""
    trace_context = getattr(sys.modules.get("jax._src.config"), "trace_context", tuple)
    plain = (type(None), bool, int, float, str, enum.Enum)
    return " ".join(str(value) if isinstance(value, plain) else type(value).__name__ for value in trace_context())


def _flax_settings() -> dict[str, str]:
    config = getattr(sys.modules.get("flax.configurations"), "config", None)
    return {f"flax {name}": str(getattr(config, name)) for name in getattr(config, "_values", None) or ()}
