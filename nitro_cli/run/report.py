"""The frozen configuration and what it was bound to, as plain data: what ``show``, ``train`` and ``--json`` print."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from nitro_cli.experiment.content import short_value
from nitro_cli.experiment.traits import FieldInfo
from nitro_cli.experiment.values import type_name


@dataclass(frozen=True)
class FieldRow:
    """One field: its value, how it is marked, and where the value came from."""

    name: str
    value: Any
    text: str
    type: str
    marker: str
    kind: str
    source: str
    shadowed: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True)
class SplitRow:
    """One split. ``rows``, ``dropped`` and ``padded`` are None where the source does not tell."""

    split: str
    rows: int | None
    batches: int
    batch_size: int | None
    dropped: int | None
    padded: int | None
    prefetch: str


@dataclass(frozen=True)
class HookRow:
    """Which batch fields a hook receives, and where it runs (None for a hook that is always traced)."""

    hook: str
    fields: tuple[str, ...]
    residency: str | None = None


@dataclass(frozen=True)
class GroupRow:
    """One parameter group. ``ratio`` is its rate over the knob; ``joined`` says that small leaves share a buffer."""

    group: str
    rule: str
    learning_rate: float
    ratio: float
    weight_decay: float
    anchor: str
    hyperparameters: dict[str, float]
    fixed: dict[str, str]
    parameters: int
    leaves: int
    joined: bool


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule, what it drives, and who declared it."""

    key: str
    target: str
    source: str
    constant: bool


@dataclass
class Report:
    """Everything that was fixed when the handle was constructed. ``mode`` is "automatic", or "manual" for an experiment
    that owns its step; its ``groups`` are then its optimizers."""

    title: str
    experiment: str
    preset: str | None
    path: str | None
    fields: list[FieldRow]
    run: dict[str, Any]
    splits: list[SplitRow]
    model: dict[str, int]
    optimizer: dict[str, Any]
    groups: list[GroupRow]
    schedules: list[ScheduleRow]
    hooks: list[HookRow]
    devices: str
    notes: list[str] = field(default_factory=list)
    mode: str = "automatic"

    def to_json(self) -> dict[str, Any]:
        """The report as JSON-ready values; values of fields that JSON cannot say appear as their short text."""
        data = asdict(self)
        for row, shown in zip(data["fields"], self.fields, strict=True):
            row["value"] = plain_json(shown.value, shown.text)
            row["shadowed"] = {kind: plain_json(value, short_value(value)) for kind, value in shown.shadowed}
        return data


def plain_json(value: Any, text: str) -> Any:
    """``value`` where JSON has it, its parts where it is a list or dict of such, else ``text``."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, (list, tuple)):
        return [plain_json(part, short_value(part)) for part in value]
    if isinstance(value, Mapping):
        return {str(key): plain_json(part, short_value(part)) for key, part in value.items()}
    return text


def field_rows(experiment: Any, metadata: Mapping[str, FieldInfo], sources: Mapping[str, Any]) -> list[FieldRow]:
    """A row per field of ``experiment``, in the order of declaration."""
    rows = []
    for name, info in metadata.items():
        value, source = getattr(experiment, name), sources.get(name)
        rows.append(
            FieldRow(
                name,
                value,
                short_value(value),
                type_name(info.type),
                info.marker.value,
                source.kind if source else "default",
                source.text if source else "",
                tuple(source.shadowed) if source else (),
            )
        )
    return rows
