"""What a program depends on.

A ``Request`` lists everything that decides which program is meant: its code, the shapes and types of its arguments,
static settings, GraphConst values, and the environment. GraphConst values are special: only those that the trace read
count, and which those are is known after the first trace. So the key leaves them out, and an entry under the key
matches when the fields that its trace read have the same values now.

Never in it: Device and Host values, the seed, the learning rate, the clip threshold, ``max_epochs``.
"""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata

import jax

from nitro_cli.programs.fingerprint import Fingerprint

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
    environment: Mapping[str, str] = field(default_factory=lambda: environment())

    @functools.cached_property
    def digest(self) -> str:
        lines = [self.program, self.code.digest()]
        for part in (self.arguments, self.settings, self.environment):
            lines.extend(f"{name} = {value}" for name, value in part.items())
            lines.append("")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def reads_same(self, other: Request, reads: Iterable[str]) -> bool:
        return all(self.fields.get(name) == other.fields.get(name) for name in reads)


def environment() -> dict[str, str]:
    """Versions, devices, and the settings of jax that change what it compiles."""
    facts = _installed() | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    facts["device"] = f"{jax.default_backend()} {jax.devices()[0].device_kind} x {len(jax.devices())}"
    for name, value in sorted(jax.config.values.items()):
        if not any(word in name for word in _SILENT):
            facts[name] = str(value)
    return facts


@functools.cache
def _installed() -> dict[str, str]:
    return {name: metadata.version(name) for name in _VERSIONED}
