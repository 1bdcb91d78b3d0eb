"""What a program depends on, and how a difference is said.

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
from typing import TYPE_CHECKING, Any

import jax

from nitro_cli.programs.fingerprint import Fingerprint

if TYPE_CHECKING:
    from nitro_cli.programs.cache import Program

_VERSIONED = ("jax", "jaxlib", "flax", "optax", "numpy")
# Settings of jax that say how it reports or stores, and change no program.
_SILENT = ("log", "cache", "traceback", "dump", "explain", "profil", "check_", "transfer_guard", "compiler_detailed")


@dataclass(frozen=True)
class Request:
    """A program that is wanted. All values are texts that decide by content; ``fields`` are the GraphConst values."""

    program: str
    code: Fingerprint
    arguments: Mapping[str, str]
    settings: Mapping[str, str]
    fields: Mapping[str, str] = field(default_factory=dict)

    @functools.cached_property
    def digest(self) -> str:
        lines = [self.program, self.code.digest()]
        for part in (self.arguments, self.settings, environment()):
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


def explain(request: Request, programs: Iterable[Program]) -> str:
    """Why ``request`` must be compiled: its differences from the nearest program of the same name, in one line."""
    candidates = [_differences(request, program) for program in programs if program.request.program == request.program]
    if not candidates:
        return "first use"
    nearest = min(candidates, key=len)
    if not nearest:
        return "an equal program was dropped"
    shown = "; ".join(nearest[:2])
    return shown if len(nearest) <= 2 else f"{shown}; and {len(nearest) - 2} more differences"


def _differences(request: Request, program: Program) -> list[str]:
    """Differences, causes before consequences: code, GraphConst values, settings, then arguments."""
    old = program.request
    found = _code_differences(old.code, request.code)
    for name in sorted(program.built.reads):
        before, now = old.fields.get(name), request.fields.get(name)
        if before != now:
            found.append(f"`{name}` {_plain(before)} -> {_plain(now)}")
    for name in _changed(old.settings, request.settings):
        found.append(f"{name}: {old.settings.get(name, 'none')} -> {request.settings.get(name, 'none')}")
    arguments = _changed(old.arguments, request.arguments)
    if arguments:
        name = arguments[0]
        text = f"{name}: {old.arguments.get(name, 'none')} -> {request.arguments.get(name, 'none')}"
        found.append(text + (f" (and {len(arguments) - 1} more arguments)" if len(arguments) > 1 else ""))
    return found


def _code_differences(old: Fingerprint, new: Fingerprint) -> list[str]:
    found = []
    for name in _changed(old.entries, new.entries):
        before, now = old.entries.get(name), new.entries.get(name)
        label = f"`{name.removeprefix('__main__.')}`"
        place = new.places.get(name) or old.places.get(name)
        if place:
            label += f" in {place.rsplit(':', 1)[0]}"
        if before is None or now is None:
            found.append(f"{label} is {'new' if before is None else 'no longer used'}")
        elif now.startswith("code ") or len(before) + len(now) > 120:
            found.append(f"{label} changed")
        else:
            found.append(f"{label} {_plain(before)} -> {_plain(now)}")
    return found


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*old, *new])
    return [name for name in names if old.get(name) != new.get(name)]


def _plain(text: str | None) -> str:
    """``int 128`` as ``128``: the type tag is for the key, not for the reader."""
    if text is None:
        return "none"
    kind, _, value = text.partition(" ")
    return value if value and kind in ("bool", "int", "float", "str", "float32", "float64", "int32") else text
