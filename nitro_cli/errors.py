"""What nitro raises when something is wrong, and how it reads.

An error is part of the product: one line that can be read alone, then the place, then the remedy. Every error that a
user can cause is a ``NitroError``; the command line prints ``str(error)`` and leaves with ``error.exit_code``, so a
traceback always means a fault in nitro itself or in the user's own hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a problem stands in a file. ``line`` and ``column`` count from 1; ``text`` is the line itself."""

    path: str | Path
    line: int | None = None
    column: int | None = None
    width: int = 1
    text: str | None = None

    def __str__(self) -> str:
        parts = [str(self.path)] + [str(n) for n in (self.line, self.column) if n is not None]
        return ":".join(parts)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong.

    ``what`` reads alone. ``label`` stands under the offending text (the nearest right thing), ``notes`` say what to do.
    ``facts`` are machine-readable and go into ``--json`` (field, file, line and suggestions, for example).
    """

    what: str
    place: Place | None = None
    label: str = ""
    notes: tuple[str, ...] = ()
    facts: dict[str, Any] = field(default_factory=dict)

    def render(self) -> str:
        lines = [self.what]
        if self.place is not None:
            lines.append(f"  --> {self.place}")
            lines.extend(_excerpt(self.place, self.label))
        elif self.label:
            lines.append(f"   = {self.label}")
        lines.extend(f"   = {note}" for note in self.notes)
        return "\n".join(lines)


def _excerpt(place: Place, label: str) -> list[str]:
    if place.text is None or place.line is None:
        return [f"   = {label}"] if label else []
    number = str(place.line)
    gutter = " " * (len(number) + 2)
    lines = [f"{gutter}|", f" {number} | {place.text}"]
    if place.column is not None:
        mark = " " * (place.column - 1) + "^" * max(place.width, 1)
        lines.append(f"{gutter}| {mark}{' ' + label if label else ''}")
    elif label:
        lines.append(f"{gutter}= {label}")
    return lines


class NitroError(Exception):
    """Base of everything nitro raises on purpose. Holds one or more problems; ``str()`` is the text to show."""

    exit_code = 70
    kind = "error"

    def __init__(
        self,
        what: str | Sequence[Problem],
        *notes: str,
        place: Place | None = None,
        label: str = "",
        kind: str | None = None,
        **facts: Any,
    ) -> None:
        if isinstance(what, str):
            self.problems: tuple[Problem, ...] = (Problem(what, place, label, notes, facts),)
        else:
            self.problems = tuple(what)
        if kind is not None:
            self.kind = kind
        super().__init__(self.render())

    def render(self) -> str:
        return "\n".join(problem.render() for problem in self.problems)

    @property
    def facts(self) -> dict[str, Any]:
        """Machine-readable facts of all problems; those of the first one win."""
        merged: dict[str, Any] = {}
        for problem in reversed(self.problems):
            merged.update(problem.facts)
        return merged


class AnswerNo(NitroError):
    """It ran, and the answer is no: an acceptance check not met, training that diverged."""

    exit_code = 1
    kind = "no"


class UsageError(NitroError):
    """A bad option, value, preset, experiment name or field: nothing was started."""

    exit_code = 2
    kind = "usage"


class ExperimentError(NitroError):
    """The experiment could not be loaded, is declared wrongly, or its code broke a contract."""

    exit_code = 3
    kind = "experiment"


class ProtectError(NitroError):
    """Refused to protect data: a folder in use, a resume that does not fit, a file that would be overwritten."""

    exit_code = 4
    kind = "protect"


class OutputError(NitroError):
    """Input or output failed while running: a full disk, a checkpoint that could not be written."""

    exit_code = 5
    kind = "output"


class DivergenceError(AnswerNo):
    """A loss that is not finite stopped the run."""

    kind = "diverged"
