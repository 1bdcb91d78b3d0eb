"""The programs of two runs, one by one: what made them different programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nitro_cli.programs.reasons import Known, between
from nitro_cli.programs.store import Store


@dataclass(frozen=True)
class Compared:
    """One program in both runs. ``unknown`` says why nothing can be said; ``differences`` is empty where the two are
    equal."""

    program: str
    equal: bool
    differences: Sequence[str]
    unknown: str = ""

    def lines(self) -> list[str]:
        if self.equal:
            return ["equal"]
        return [self.unknown] if self.unknown else list(self.differences)


def compare(old: Mapping[str, Any], new: Mapping[str, Any], store: Store) -> list[Compared]:
    """``old`` and ``new`` are what run.json says of two runs."""
    before, now = _programs(old), _programs(new)
    rows = []
    for name in dict.fromkeys([*before, *now]):
        left, right = before.get(name, []), now.get(name, [])
        if not left or not right:
            where = "first" if left else "second"
            rows.append(Compared(name, False, [f"only the {where} run has it"]))
        for entry in right if left else []:
            rows.append(_against(name, left, entry, store))
    return rows


def _programs(run: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of entries by program."""
    found: dict[str, list[str]] = {}
    for program in (run.get("cache") or {}).get("programs") or []:
        found.setdefault(str(program.get("program")), []).append(str(program.get("entry") or ""))
    return found


def _against(name: str, left: list[str], entry: str, store: Store) -> Compared:
    """One program of the second run against those of that name in the first: the nearest counts."""
    if entry and entry in left:
        return Compared(name, True, [])
    now = store.entry_by_name(entry) if entry else None
    known = [found for found in (store.entry_by_name(e) for e in left if e) if found is not None]
    if now is None or not known:
        gone = entry if now is None else left[0]
        return Compared(name, False, [], f"its entry {gone} is no longer in the store" if gone else _NEVER)
    found = min((between(Known.of_entry(old), Known.of_entry(now)) for old in known), key=len)
    return Compared(name, not found, found)


def ran_without_store(run: Mapping[str, Any]) -> bool:
    """Whether a run had programs and no store, so that nothing was noted of what these depend on."""
    programs = _programs(run)
    return bool(programs) and not any(entry for entries in programs.values() for entry in entries)


NO_STORE = (
    "ran without a store (NITRO_CACHE_DIR=none, or one that could not be used), so nobody noted what its programs "
    "depend on: run it again with one to compare it"
)
_NEVER = "a run without a store does not know what its programs depend on"
