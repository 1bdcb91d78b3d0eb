"""Why a program must be compiled, in one line: its differences from the nearest one that is known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nitro_cli.programs.store import Entry, settings

if TYPE_CHECKING:
    from nitro_cli.programs.key import Request


@dataclass(frozen=True)
class Known:
    """A program that was compiled before, in this process or another; ``reads`` are the GraphConst values that its
    trace read."""

    code: Mapping[str, str]
    places: Mapping[str, str]
    arguments: Mapping[str, str]
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    reads: Mapping[str, str]

    @classmethod
    def of_request(cls, request: Request, reads: Iterable[str]) -> Known:
        values = {name: request.fields[name] for name in reads if name in request.fields}
        code = request.code
        return cls(code.entries, code.places, request.arguments, request.settings, request.environment, values)

    @classmethod
    def of_entry(cls, entry: Entry) -> Known:
        return cls(entry.code, entry.places, entry.arguments, entry.settings, entry.environment, entry.reads)


def explain(request: Request, known: Iterable[Known]) -> str:
    """The differences from the nearest of ``known``; of equally near ones the first."""
    candidates = [differences(old, request) for old in known]
    if not candidates:
        return "first use"
    nearest = min(candidates, key=len)
    if not nearest:
        return "nothing is looked up" if settings.cold else "an equal program was dropped"
    shown = "; ".join(nearest[:2])
    return shown if len(nearest) <= 2 else f"{shown}; and {len(nearest) - 2} more differences"


def differences(old: Known, request: Request) -> list[str]:
    """In words, causes before consequences: code, GraphConst values, settings, environment, then arguments."""
    return between(old, Known.of_request(request, [*old.reads]))


def between(old: Known, new: Known) -> list[str]:
    """What differs between two programs."""
    found = _code_differences(old, new)
    for name in _changed(dict(sorted(old.reads.items())), new.reads):
        found.append(f"`{name}` {_plain(old.reads.get(name))} -> {_plain(new.reads.get(name))}")
    for part in ("settings", "environment"):
        before, now = getattr(old, part), getattr(new, part)
        changed = _changed(before, now)
        # a library whose version changed is said once, by that
        changed = [name for name in changed if not (name.startswith("files of ") and name[9:] in changed)]
        found += [_said(name, before.get(name), now.get(name)) for name in changed]
    arguments = _changed(old.arguments, new.arguments)
    if arguments:
        name = arguments[0]
        text = f"{name}: {old.arguments.get(name, 'none')} -> {new.arguments.get(name, 'none')}"
        found.append(text + (f" (and {len(arguments) - 1} more arguments)" if len(arguments) > 1 else ""))
    return found


def _said(name: str, before: str | None, now: str | None) -> str:
    """A setting that changed. A library is said by its version, unless only its files differ."""
    name = name.removeprefix("files of ")
    old, new = (before or "none").split(" "), (now or "none").split(" ")
    if len(old[-1]) == len(new[-1]) == 64 and old[0] == new[0]:
        return f"{name} {old[0]}: its files changed"
    if len(old[-1]) == 64 or len(new[-1]) == 64:
        return f"{name} {old[0]} -> {new[0]}"
    return f"{name}: {before or 'none'} -> {now or 'none'}"


def _code_differences(old: Known, new: Known) -> list[str]:
    found = []
    for name in _changed(old.code, new.code):
        before, now = old.code.get(name), new.code.get(name)
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
