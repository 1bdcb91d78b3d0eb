"""Named recipes of an experiment, and where each value of a run comes from.

Order: class default, then a run's own configuration, then preset, then command line or keywords. All that is wrong is
reported at once, each problem with its place.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from nitro_cli.errors import ExperimentError, NitroError, Place, Problem, UsageError
from nitro_cli.experiment import toml
from nitro_cli.experiment.base import Experiment, bad_value, required_field
from nitro_cli.experiment.content import content_digest
from nitro_cli.experiment.hooks import unknown_field
from nitro_cli.experiment.sources import class_source, shown
from nitro_cli.experiment.traits import FieldInfo, config_metadata
from nitro_cli.experiment.values import BadValue, from_python, type_name
from nitro_cli.suggest import did_you_mean, listed, nearest

E = TypeVar("E")

Values = dict[str, Any]
Places = dict[str, Place]


@dataclass(frozen=True)
class Source:
    """Where a value comes from, and what it won over."""

    kind: str  # "default", "preset", "command line", "python", "derived" or "run"
    text: str = ""
    shadowed: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.text}" if self.text and self.kind != "command line" else self.text or self.kind


@dataclass(frozen=True)
class Resolved:
    experiment: Any
    sources: dict[str, Source]
    preset: str | None = None
    preset_path: Path | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PresetTable:
    """The presets of one class. ``path`` is None where the class defines them in Python."""

    names: tuple[str, ...]
    path: Path | None
    owner: str
    tables: Mapping[str, Any] = field(default_factory=dict)
    file: toml.TomlFile | None = None
    searched: tuple[Path, ...] = ()

    def get(self, name: str) -> tuple[Values, Places]:
        """Raw values of a preset (None where ``unset`` says so) and the place of each. Raises UsageError."""
        if name not in self.names:
            raise self._unknown(name)
        values, places = dict(self.tables[name]), {}
        if self.file is not None:
            places = {key: self.file.place(name, key) for key in values}
            for key in self._unset(name, values):
                values[key], places[key] = None, places[toml.UNSET]
            values.pop(toml.UNSET, None)
        return values, places

    def _unset(self, name: str, values: Values) -> list[str]:
        unset = values.get(toml.UNSET, [])
        if not isinstance(unset, list) or not all(isinstance(key, str) for key in unset):
            note = f'write {toml.UNSET} = ["field"]'
            place = self._place(name, toml.UNSET)
            raise UsageError(f"`{toml.UNSET}` in preset [{name}] must be a list of field names", note, place=place)
        if twice := [key for key in unset if key in values]:
            what = f"preset [{name}] both sets '{twice[0]}' and lists it in `{toml.UNSET}`"
            raise UsageError(what, "keep one of the two", place=self._place(name, twice[0]), field=twice[0])
        return unset

    def _place(self, name: str, key: str | None = None) -> Place | None:
        return self.file.place(name, key) if self.file is not None else None

    def _unknown(self, name: str) -> UsageError:
        facts = {"preset": name, "suggestions": nearest(name, self.names)}
        if self.names:
            notes = f"presets of {self.owner}: {listed(self.names, 20)}"
            what = f"unknown preset '{name}'"
            where = Place(shown(self.path)) if self.path else None
            return UsageError(what, notes, place=where, label=did_you_mean(name, self.names), **facts)
        if self.path is not None:
            note = f"write a table such as [{name}] with the values of some fields"
            return UsageError(f"unknown preset '{name}': {shown(self.path)} has no presets", note, **facts)
        paths = [f"looked for {shown(path)}" for path in self.searched]
        return UsageError(f"unknown preset '{name}': {self.owner} has no preset file", *paths, **facts)


def preset_table(cls: type, preset_file: str | Path | None = None) -> PresetTable:
    """The presets of ``cls``: of ``preset_file``, of presets/<module>.toml, or of the class's own ``presets()``.

    Raises UsageError for a file that is missing, cannot be read, or has something other than tables in it, and
    ExperimentError where the class and a file both define presets.
    """
    searched = (Path(preset_file),) if preset_file is not None else _candidates(cls)
    path = next((path for path in searched if path.is_file()), None)
    if preset_file is not None and path is None:
        raise _no_preset_file(searched[0])
    own = inspect.getattr_static(cls, "presets", None)
    if own is not None and path is not None:
        what = f"{cls.__name__} has presets in two places: its method `presets` and {shown(path)}"
        raise ExperimentError(what, "keep one of them", place=class_source(cls).place("presets"))
    if own is not None:
        return _python_table(cls)
    if path is None:
        return PresetTable((), None, cls.__name__, {}, None, searched)
    file = toml.read_toml(path)
    if problems := _structure(file):
        raise UsageError(problems)
    return PresetTable(tuple(file.data), path, cls.__name__, file.data, file, searched)


def _no_preset_file(path: Path) -> UsageError:
    if not path.is_dir():
        return UsageError(f"the preset file {shown(path)} does not exist")
    inside = sorted(file.name for file in path.glob("*.toml"))
    hint = f"name a file in it: {listed(inside)}" if inside else "it holds no TOML file"
    return UsageError(f"the preset file {shown(path)} is a folder", hint)


def _candidates(cls: type) -> tuple[Path, ...]:
    file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    if file is None:
        return ()
    source = Path(file)
    stem = source.parent.name if source.stem == "__init__" else source.stem
    folder = source.parent.parent if source.stem == "__init__" else source.parent
    paths = (folder.parent / "presets" / f"{stem}.toml", Path("presets").absolute() / f"{stem}.toml")
    return tuple(dict.fromkeys(paths))


def _python_table(cls: Any) -> PresetTable:
    place = class_source(cls).place("presets")
    if not isinstance(inspect.getattr_static(cls, "presets"), classmethod | staticmethod):
        what = f"`presets` of {cls.__name__} is not a classmethod"
        raise ExperimentError(what, "write @classmethod above it, and `def presets(cls)`", place=place)
    tables = cls.presets()
    if not isinstance(tables, Mapping) or not all(isinstance(table, Mapping) for table in tables.values()):
        what = f"`presets` of {cls.__name__} must return a dict of dicts: preset name -> field -> value"
        raise ExperimentError(what, place=place)
    return PresetTable(tuple(tables), None, cls.__name__, tables)


def _structure(file: toml.TomlFile) -> list[Problem]:
    """Everything at the top of a preset file must be one plain table for each preset."""
    problems = []
    for name, table in file.data.items():
        if isinstance(table, list) and table and isinstance(table[0], dict):
            note = f"one table for each preset: write [{name}]"
            problems.append(Problem(f"preset '{name}' is a list of tables", file.place(name), "", (note,)))
        elif not isinstance(table, dict) or _is_loose(file, name):
            what = f"'{name}' stands outside any preset table"
            note = "move it below the header of a preset, such as [current]"
            problems.append(Problem(what, file.place("", name), "", (note,), {"field": name}))
    return problems


def _is_loose(file: toml.TomlFile, name: str) -> bool:
    """True for ``opt.lr = 1`` and ``opt = {...}`` above the first table, which TOML also makes a table of."""
    return not any(header[0] == name for header in file.headers)


def resolve(
    cls: type,
    preset: str | None = None,
    preset_file: str | Path | None = None,
    overrides: Mapping[str, tuple[Any, str]] | None = None,
    base: Mapping[str, tuple[Any, Source]] | None = None,
) -> Resolved:
    """The experiment that a preset, overrides and a run's configuration make, with the source of every value.

    ``overrides`` maps a field to its value and what said it (``"--max-epochs"``, ``"keyword"``). Raises UsageError
    with every unknown name, bad value and missing field of all sources.
    """
    table = preset_table(cls, preset_file)
    run = _Resolution(cls)
    run.take_base(base or {})
    if preset is not None:
        run.take_preset(table, preset)
    run.take_overrides(overrides or {})
    experiment = run.build()
    return Resolved(experiment, run.all_sources(), preset, table.path if preset else None, run.notes(table, preset))


class _Resolution:
    """Values and sources as one source after the other is laid over the defaults."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls
        self.infos = config_metadata(cls)
        self.values: Values = {}
        self.sources: dict[str, Source] = {}
        self.problems: list[Problem] = []
        self.places: Places = {}
        self.said: list[str] = []
        self.from_run = False

    def take_base(self, base: Mapping[str, tuple[Any, Source]]) -> None:
        self.from_run = bool(base)
        for name, (value, source) in base.items():
            if name in self.infos:
                self._take(name, value, source, f" of the run ({source.text})")
            else:
                self.said.append(f"the run's field '{name}' is no longer a field of {self.cls.__name__}: ignored")

    def take_preset(self, table: PresetTable, preset: str) -> None:
        try:
            values, places = table.get(preset)
        except UsageError as error:
            self.problems.extend(error.problems)
            return
        if not values:
            self.said.append(f"preset [{preset}] is empty: every value is the class's default")
        for name, value in values.items():
            place = places.get(name)
            text = f"{place.path}:{place.line}" if place else f"{self.cls.__name__}.presets"
            self._take(name, value, Source("preset", text), f" in preset [{preset}]", place)

    def take_overrides(self, overrides: Mapping[str, tuple[Any, str]]) -> None:
        for name, (value, text) in overrides.items():
            kind = "command line" if text.startswith("-") else "python"
            self._take(name, value, Source(kind, text if kind == "command line" else ""), f" ({text})")

    def _take(self, name: str, value: Any, source: Source, where: str, place: Place | None = None) -> None:
        facts = {"source": source.kind} | ({"file": str(place.path), "line": place.line} if place else {})
        if name not in self.infos:
            problem = _unknown_key(self.cls, name, value, where)
            self.problems.append(replace(problem, place=place, facts={**problem.facts, **facts}))
            return
        try:
            value = from_python(self.infos[name], value)
        except BadValue as error:
            problem = _bad_key(self.cls, self.infos[name], value, error, where)
            self.problems.append(replace(problem, place=place, facts={**problem.facts, **facts}))
            return
        self.sources[name] = replace(source, shadowed=self._shadowed(name))
        self.values[name] = value
        if place is not None:
            self.places[name] = place
        else:
            self.places.pop(name, None)

    def _shadowed(self, name: str) -> tuple[tuple[str, Any], ...]:
        if name in self.sources:
            return ((self.sources[name].kind, self.values[name]), *self.sources[name].shadowed)
        info = self.infos[name]
        return () if info.required else (("default", info.default),)

    def build(self) -> Any:
        failed = {problem.facts.get("field") for problem in self.problems}
        missing = [n for n, info in self.infos.items() if info.required and n not in self.values and n not in failed]
        self.problems.extend(required_field(self.cls, name) for name in missing)
        if self.problems:
            raise UsageError(self.problems)
        try:
            return self.cls(**self.values)
        except UsageError as error:  # what the class's own validators say
            located = [replace(p, place=self.places.get(p.facts.get("field", ""))) for p in error.problems]
            raise UsageError(located) from None

    def all_sources(self) -> dict[str, Source]:
        return {name: self.sources.get(name, Source("default")) for name in self.infos}

    def notes(self, table: PresetTable, preset: str | None) -> tuple[str, ...]:
        if preset is None and not self.said and not self.from_run:
            known = f"; presets: {listed(table.names)}" if table.names else ""
            return (f"no preset: values not given are the class's defaults{known}",)
        return tuple(self.said)


def _unknown_key(cls: type, name: str, value: Any, where: str) -> Problem:
    problem = unknown_field(cls, name, where)
    if isinstance(value, dict):
        note = f"fields are flat: a preset is one table, and each key of '{name}' must be a field of its own"
        return replace(problem, notes=(note, *problem.notes))
    return problem


def _bad_key(cls: type, info: FieldInfo, value: Any, error: BadValue, where: str) -> Problem:
    if value is None:
        error = BadValue(
            f"it cannot be None, its type is {type_name(info.type)}", "leave it out for the class's default"
        )
    problem = bad_value(cls, info.name, error)
    return replace(problem, what=f"field '{info.name}'{where}: {error.message}")


def from_preset(cls: type[E], name: str, **overrides: Any) -> E:
    """The experiment of a preset, with some fields given by keyword. Raises UsageError with all that is wrong."""
    given = {field: (value, "keyword") for field, value in overrides.items()}
    return resolve(cls, name, overrides=given).experiment


def check_presets(cls: type, preset_file: str | Path | None = None) -> list[Problem]:
    """Every problem of every preset of a class: unknown keys, bad values, wrong structure."""
    try:
        table = preset_table(cls, preset_file)
    except NitroError as error:
        return list(error.problems)
    problems = []
    for name in table.names:
        check = _Resolution(cls)
        check.take_preset(table, name)
        problems.extend(check.problems)
    return problems


def dump_config(
    resolved: Resolved | Any,
    sources: Mapping[str, Source] | None = None,
    preset: str | None = None,
    command_line: str = "",
) -> str:
    """The config.toml of a run: every field with its value and where it came from. ``load_run_config`` reads it."""
    if isinstance(resolved, Resolved):
        experiment, preset = resolved.experiment, preset or resolved.preset
        sources = resolved.sources if sources is None else sources
    else:
        experiment = resolved
    header = [f"# experiment: {type(experiment).__name__}", f"# preset: {preset or 'none'}"]
    if command_line:
        header.append(f"# command: {' '.join(command_line.split())}")
    values = {}
    for name, info in config_metadata(type(experiment)).items():
        source = (sources or {}).get(name, Source("default"))
        values[name] = (_reloadable(info, getattr(experiment, name)), str(source))
    return "\n".join(header) + "\n\n" + toml.dump_table("config", values)


def _reloadable(info: FieldInfo, value: Any) -> Any:
    """The value itself where reading its TOML text back gives an equal one of the same type."""
    if value is None:
        return None
    try:
        again = from_python(info, toml.tomli.loads(f"x = {toml.inline(value)}")["x"])
        if content_digest(again) == content_digest(value):
            return value
    except (BadValue, TypeError, ValueError):
        pass
    return toml.Unsayable(type(value).__name__)


def load_run_config(path: str | Path) -> dict[str, tuple[Any, Source]]:
    """Field -> value and source of a run's config.toml, as ``resolve(base=...)`` takes it. Raises UsageError."""
    file = toml.read_toml(path)
    table = file.data.get("config")
    if not isinstance(table, dict):
        what = f"{shown(path)} is not the configuration of a run: it has no table [config]"
        raise UsageError(what, "give the config.toml that nitro wrote into the run's folder")
    values, places = PresetTable(("config",), file.path, "the run", file.data, file).get("config")
    return {name: (value, Source("run", f"{places[name].path}:{places[name].line}")) for name, value in values.items()}


__all__ = [
    "Experiment",
    "PresetTable",
    "Resolved",
    "Source",
    "check_presets",
    "dump_config",
    "from_preset",
    "load_run_config",
    "preset_table",
    "resolve",
]
