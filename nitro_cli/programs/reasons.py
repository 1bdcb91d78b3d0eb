"""Why a program must be compiled, in one line: its differences from the nearest one that is known."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nitro_cli.programs.literals import changed_constants, file_of
from nitro_cli.programs.store import Entry, settings

if TYPE_CHECKING:
    from nitro_cli.programs.key import Request


_LONG = 120  # characters from which on two texts are told by the words in which they differ
_FACTORY = re.compile(r"optimizer (\S+)\[0\]")
_GIVEN = re.compile(r"optimizer (\S+)\[1\]\['(\w+)'\]")
_MEMBER = re.compile(r"(.*) members\['(\w+)'\]")
_DIGEST = re.compile(r"(.*) [0-9a-f]{64}")
_OPTAX = re.compile(r"optax\._src\.\w+\.")  # where optax defines what everybody calls optax.adam
_SCALAR = re.compile(r"array \w+\[\] (\S+)")


@dataclass(frozen=True)
class Known:
    """A program that was compiled before, in this process or another; ``reads`` are the GraphConst values that its
    trace read. ``unused`` is why an equal one is compiled all the same."""

    code: Mapping[str, str]
    places: Mapping[str, str]
    arguments: Mapping[str, str]
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    reads: Mapping[str, str]
    unused: str = "an equal program was dropped"

    @classmethod
    def of_request(cls, request: Request, reads: Iterable[str]) -> Known:
        values = {name: request.fields[name] for name in reads if name in request.fields}
        code = request.code
        return cls(code.entries, code.places, request.arguments, request.settings, request.environment, values)

    @classmethod
    def of_entry(cls, entry: Entry) -> Known:
        parts = entry.code, entry.places, entry.arguments, entry.settings, entry.environment, entry.reads
        return cls(*parts, _unused(entry))


def _unused(entry: Entry) -> str:
    if entry.poisoned:
        return f"an equal program is marked as wrong: {entry.poisoned}"
    if entry.kept_out:
        return f"it is not kept: {entry.kept_out[0]}"
    if settings.cold:
        return "the store was not asked"
    return "the executable of an equal program is gone or does not load here"


def explain(request: Request, known: Iterable[Known]) -> str:
    """The differences from the nearest of ``known``; of equally near ones the first."""
    candidates = [(differences(old, request), old) for old in known]
    if request.digest[:40] in settings.damaged:
        return "its entry in the store was damaged"
    if not candidates:
        return "first use"
    nearest, old = min(candidates, key=lambda candidate: len(candidate[0]))
    if not nearest:
        return old.unused
    shown = "; ".join(nearest[:2])
    return shown if len(nearest) <= 2 else f"{shown}; and {_more(len(nearest) - 2, 'difference')}"


def differences(old: Known, request: Request) -> list[str]:
    """In words, causes before consequences: code, GraphConst values, settings, environment, then arguments."""
    return between(old, Known.of_request(request, [*old.reads]))


def between(old: Known, new: Known) -> list[str]:
    """What differs between two programs."""
    fields = _changed(dict(sorted(old.reads.items())), new.reads)
    found = _code_differences(old, new, fields)
    for name in fields:
        before, now = _plain(old.reads.get(name)), _plain(new.reads.get(name))
        if before != now or not found:  # of equal texts, what differs lies in the code of a value
            found.append(_value(f"`{name}`", before, now))
    found += _settings(old.settings, new.settings)
    found += _environment(old.environment, new.environment)
    return found + _arguments(old.arguments, new.arguments, causes=found)


def _code_differences(old: Known, new: Known, fields: Collection[str]) -> list[str]:
    """What changed, then what is new, then what is gone. With a body of code, what it names changes too: that is no
    news. Nor is the value of one of ``fields``, which has a line of its own."""
    names = [name for name in _changed(old.code, new.code) if name.rpartition(".")[2] not in fields]
    changed = [name for name in names if name in old.code and name in new.code]
    body = any(new.code[name].startswith("code ") or _FACTORY.fullmatch(name) for name in changed)
    found = []
    for name in changed:
        before, now = old.code[name], new.code[name]
        label = _label(name, old, new)
        if before.startswith("code ") and now.startswith("code "):
            found.append(label + _body(old.places.get(name, ""), new.places.get(name, "")))
        else:
            found.append(
                _value(label, _or_function(before, old.places.get(name)), _or_function(now, new.places.get(name)))
            )
    found += [] if body else [_label(name, old, new) + _new(name, new) for name in names if name not in old.code]
    found += [] if body else [f"{_label(name, old, new)} is no longer used" for name in names if name not in new.code]
    return found


def _body(before: str, now: str) -> str:
    """What changed in the code of a function: constants, where those are all."""
    constants = changed_constants(before, now)
    if not constants or len(constants[0]) > _LONG:
        return " changed"
    return f": {constants[0]}" + (f" (and {_more(len(constants) - 1, 'constant')})" if len(constants) > 1 else "")


def _or_function(text: str, place: str | None) -> str:
    """A function that has no name of its own is known by its file."""
    return f"a function in {file_of(place)}" if place and text.startswith("code ") else text


def _new(name: str, new: Known) -> str:
    """Of what is given to an optimizer, with its value."""
    value = _plain(new.code[name])
    return f" is new: {value}" if _GIVEN.fullmatch(name) and " " not in value else " is new"


def _label(name: str, old: Known, new: Known) -> str:
    place = new.places.get(name) or old.places.get(name)
    mixed = any(name in known.code and name not in known.places for known in (old, new))
    where = f" in {file_of(place)}" if place and not mixed else ""
    optimizer = _GIVEN.fullmatch(name) or _FACTORY.fullmatch(name)
    if optimizer:
        group = "" if optimizer[1] == "default" else f" of group {optimizer[1]}"
        both = name in old.places and name in new.places
        what = f"`{optimizer[2]}` of " if optimizer.re is _GIVEN else "the factory of " if both else ""
        return f"{what}the optimizer{group}{where if both else ''}"
    name = _MEMBER.sub(r"\1.\2", name)
    return f"`{name.removeprefix('__main__.')}`{where}"


def _settings(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    names = _changed(old, new)
    if "groups" in names:  # a text about every parameter
        names = [name for name in names if name != "groups"] or ["groups"]
    return [
        "parameters are grouped otherwise" if name == "groups" else _named(name, old.get(name), new.get(name))
        for name in names
    ]


def _environment(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    names = _changed(old, new)
    if len(names) > 1:  # what follows from another difference
        follow = {"jax trace context", *(f"files of {name}" for name in names)}
        follow |= {"processor"} if "device" in names else set()
        names = [name for name in names if name not in follow] or names
    found = []
    for name in names:
        before, now = old.get(name), new.get(name)
        if name in _IN_WORDS or name.startswith("files of "):
            found.append(_IN_WORDS.get(name, f"the installed {name} changed"))
        elif before and now and " " not in before + now and before[0].isdigit():  # a version
            found.append(f"{name} {before} -> {now}")
        else:
            found.append(_named(name, before, now))
    return found


_IN_WORDS = {
    "processor": "another processor",
    "nitro": "nitro itself changed",
    "jax trace context": "a setting of jax that holds for a while changed",
}


def _arguments(old: Mapping[str, str], new: Mapping[str, str], causes: list[str]) -> list[str]:
    """The first argument that differs. How parameters lie in buffers is said where nothing else explains it."""
    names = _changed(old, new)
    shown = [name for name in names if not name.startswith("buffer ")]
    if not shown:
        apart = "parameters lie in other buffers: groups, weight decay or parameter_layout changed"
        return [apart] if names and not causes else []
    name = "row of the log" if shown[0] == "row" else shown[0]
    text = _named(name, old.get(shown[0]), new.get(shown[0]))
    return [f"{text} (and {_more(len(shown) - 1, 'argument')})" if len(shown) > 1 else text]


def _named(name: str, before: str | None, now: str | None) -> str:
    """``name: before -> now``; of long texts the words in which they differ."""
    if before is None or now is None:
        return f"{name} {now} is new" if before is None else f"{name} {before} is no longer there"
    if len(before) + len(now) <= _LONG:
        return f"{name}: {before or 'none'} -> {now or 'none'}"
    come = [word for word in now.split() if word not in before.split()]
    gone = [word for word in before.split() if word not in now.split()]
    said = [f"now {' '.join(come)}"] if come else []
    said += [f"no longer {' '.join(gone)}"] if gone else []
    text = ", ".join(said)
    return f"{name}: {text}" if text and len(text) <= 2 * _LONG else f"{name} changed"


def _value(label: str, before: str | None, now: str | None) -> str:
    plain = _plain(before), _plain(now)
    if plain[0] == plain[1] or len(plain[0]) + len(plain[1]) > _LONG:
        return f"{label} changed"
    return f"{label} {plain[0]} -> {plain[1]}"


def _changed(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    names = dict.fromkeys([*old, *new])
    return [name for name in names if old.get(name) != new.get(name)]


def _plain(text: str | None) -> str:
    """``int 128`` as ``128``, and no digest behind a value: what is for the key is not for the reader."""
    if text is None:
        return "none"
    digest, scalar = _DIGEST.fullmatch(text), _SCALAR.fullmatch(text)
    if digest or scalar:
        return digest[1] if digest else scalar[1]  # type: ignore[index]
    kind, _, value = text.partition(" ")
    return _OPTAX.sub("optax.", value) if value and kind in _TAGS else text


_TAGS = frozenset(["bool", "int", "float", "str", "float32", "float64", "int32", "function", "library"])


def _more(count: int, what: str) -> str:
    return f"{count} more {what}{'s' if count > 1 else ''}"
