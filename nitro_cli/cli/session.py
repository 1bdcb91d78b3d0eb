"""What one command works with: its words, its experiment, its output, and the configuration they make together."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nitro_cli.cli.argv import Parsed
from nitro_cli.cli.console import Output
from nitro_cli.cli.options import Option
from nitro_cli.errors import Problem, UsageError

KNOWN_ENVIRONMENT = frozenset({"NITRO_CACHE_DIR"})


@dataclass
class Session:
    """One call of ``nitro``. ``found`` is what discovery gave, None for commands without an experiment."""

    command: str
    command_line: str
    output: Output
    parsed: Parsed
    options: tuple[Option, ...] = ()
    found: Any = None

    def value(self, key: str, default: Any = None) -> Any:
        return self.parsed.values.get(key, default)

    def check(self) -> None:
        """Raise what is wrong with the words themselves."""
        if self.parsed.problems:
            raise UsageError(self.parsed.problems)

    def configure(self, base: Mapping[str, Any] | None = None) -> Any:
        """The configuration: class default < ``base`` (a run's config) < preset < command line.

        Raises UsageError with everything that is wrong, in the words, in their values and in the preset.
        """
        from nitro_cli.experiment.presets import resolve

        overrides, problems = self._overrides()
        problems = [*self.parsed.problems, *problems]
        failed = {problem.facts.get("field") for problem in problems}
        try:
            resolved = resolve(
                self.found.cls, self.value("preset"), self.value("preset_file"), overrides=overrides, base=base or {}
            )
        except UsageError as error:
            others = [p for p in error.problems if p.place is not None or p.facts.get("field") not in failed - {None}]
            raise UsageError([*problems, *others], kind=None if problems else error.kind) from None
        if problems:
            raise UsageError(problems)
        return resolved

    def _overrides(self) -> tuple[dict[str, tuple[Any, str]], list[Problem]]:
        from nitro_cli.experiment.values import BadValue, from_text

        overrides: dict[str, tuple[Any, str]] = {}
        problems: list[Problem] = []
        for option in self.options:
            if not option.field or option.key not in self.parsed.values:
                continue
            text, name = self.parsed.values[option.key], self.parsed.given[option.key]
            try:
                overrides[option.field] = (from_text(option.info, text), name)
            except BadValue as bad:
                notes = (bad.hint,) if bad.hint else ()
                facts = {"field": option.field, "value": text, "type": option.metavar}
                problems.append(Problem(f"{name}: {bad.message}", notes=notes, facts=facts))
        self._unset(overrides, problems)
        return overrides, problems

    def _unset(self, overrides: dict[str, tuple[Any, str]], problems: list[Problem]) -> None:
        from nitro_cli.experiment.values import BadValue, from_python
        from nitro_cli.suggest import canonical, did_you_mean

        fields = {option.field: option.info for option in self.options if option.field}
        for word in filter(None, (part.strip() for part in (self.value("unset") or "").split(","))):
            name = canonical(word)
            facts: dict[str, Any] = {"field": name}
            if name not in fields:
                label = did_you_mean(word, fields)
                problems.append(Problem(f"--unset: no such field {word!r}", label=label, facts=facts))
            elif name in overrides:
                problems.append(Problem(f"{name} is given twice: {overrides[name][1]} and --unset", facts=facts))
            else:
                try:
                    overrides[name] = (from_python(fields[name], None), "--unset")
                except BadValue as bad:
                    problems.append(Problem(f"--unset {word}: {bad.message}", facts=facts))


def stray_environment(env: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings for ``NITRO_...`` variables that nitro does not read: fields are never set by the environment."""
    stray = sorted(name for name in env if name.startswith("NITRO_") and name not in KNOWN_ENVIRONMENT)
    return [
        f"the environment variable {name} is not read by nitro; fields are set by presets and options" for name in stray
    ]


def changed_fields(session: Session, old: Mapping[str, Any], experiment: Any) -> list[tuple[str, str, str]]:
    """``(field, was, now)`` for each field of a run's configuration that ``experiment`` has otherwise.

    ``old`` holds values as TOML says them, so they are read by their fields' types before they are compared.
    """
    from nitro_cli.experiment.content import content_digest, short_value
    from nitro_cli.experiment.values import BadValue, from_python

    infos = {option.field: option.info for option in session.options if option.field}
    rows = []
    for name, entry in old.items():
        if name not in infos:
            continue
        try:
            was, now = from_python(infos[name], entry[0]), getattr(experiment, name)
            same = content_digest(was) == content_digest(now)
        except (BadValue, TypeError):
            continue  # what cannot be read or compared here is refused, or decided, by the run itself
        if not same:
            rows.append((name, short_value(was), short_value(now)))
    return rows
