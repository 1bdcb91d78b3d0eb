"""Reports as lines: for a terminal, for a file (one fact a line, greppable), and as JSON facts.

Lines may hold colour (``console.paint``); whoever prints them takes it out. User text is only ever joined in, never
parsed, and numbers are never cut.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from nitro_cli.cli.console import Output, paint
from nitro_cli.cli.failures import relative

_ORDER = ("derived", "command line", "python", "preset", "run", "default")
_FOLDED = ("run", "default")  # what nobody said today: shown with -v
_WIDE = 120  # from here on there is room for a column of types
_JSON_SOURCES = {"command line": "cli"}


def number(value: Any, digits: int = 4) -> str:
    """A metric for people: ``0.0871``; very large and very small ones as ``1.2e-05``; text as it is."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int) or not math.isfinite(value):
        return str(value)
    if value != 0 and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.{digits}e}"
    return f"{value:.{digits}f}"


def clock(seconds: float) -> str:
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02d}:{whole % 60:02d}"


def place_of(row: Any) -> str:
    """Where a field's value came from: ``--max-epochs (preset 10)``."""
    from nitro_cli.experiment.content import short_value

    source = relative_source(row.source) or row.kind
    lost = [(kind, value) for kind, value in row.shadowed if kind != "default"][:1]
    return source + "".join(f"  ({kind} {short_value(value)})" for kind, value in lost)


def relative_source(text: str) -> str:
    """``/here/presets/myexp.toml:4`` as ``presets/myexp.toml:4``."""
    path, colon, line = text.rpartition(":")
    return f"{relative(path)}:{line}" if colon and line.isdigit() else text


def heading(title: str, preset: str | None, path: Any) -> str:
    parts = [paint(title, "head"), f"preset {preset}" if preset else "no preset"]
    return "  ".join([*parts, *([relative(path)] if path else [])])


def config_lines(fields: Sequence[Any], verbose: bool, width: int) -> list[str]:
    """The frozen configuration for a terminal: what was said first, class defaults folded into one line."""
    ordered = sorted(fields, key=lambda row: _ORDER.index(row.kind) if row.kind in _ORDER else 0)
    shown = [row for row in ordered if verbose or row.kind not in _FOLDED]
    folded = [row for row in ordered if not verbose and row.kind == "default"]
    words = {"derived": "derived", "command line": "overridden", "preset": "from preset", "run": "from the run"}
    counts = {kind: sum(row.kind == kind for row in fields) for kind in words}
    said = [f"{count} {words[kind]}" for kind, count in counts.items() if count]
    said.append(f"{sum(row.kind == 'default' for row in fields)} default")
    lines = [f"{paint('config', 'head')} ({', '.join(said)})", ""]
    rows = [
        [row.name, row.text, row.marker, *([row.type] if verbose or width >= _WIDE else []), place_of(row)]
        for row in shown
    ]
    lines += ["  " + line for line in grid(rows)]
    if folded:
        text = ", ".join(f"{row.name} {row.text}" for row in folded)
        count = f"{len(folded)} default{'s' if len(folded) > 1 else ''}"
        lines.append(f"  {count}: {text if len(text) < 54 else text[: text.rfind(',', 0, 54)] + ', ...'} (-v: all)")
    return [*lines, ""]


def grid(rows: Sequence[Sequence[str]]) -> list[str]:
    """Left-aligned columns. A cell longer than 28 pushes its own row and not the others."""
    widths = [max((len(cell) for cell in column if len(cell) <= 28), default=0) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def binding_lines(report: Any) -> list[str]:
    """What the configuration was bound to: data, model, optimizer, hooks, devices."""
    run, model = report.run, report.model
    clip = run.get("gradient_clip_norm") or 0
    rows = [["data", " | ".join(_split_text(split) for split in report.splits)]]
    prefetch = sorted({str(split.prefetch) for split in report.splits if split.prefetch})
    if prefetch:
        rows.append(["prefetch", " | ".join(prefetch)])
    steps = f" | {run['total_steps']:,} optimizer steps" if run.get("total_steps") is not None else ""
    rows.append(["model", f"{model.get('parameters', 0):,} parameters in {model.get('leaves', 0)} arrays{steps}"])
    if report.mode == "manual":
        rows.append(["mode", "manual: train_step owns the step"])
    several = len(report.groups) > 1 or report.mode == "manual"
    for group in report.groups:
        size = f" | {group.parameters:,} parameters" if several else ""
        kind = "optimizer" if report.mode == "manual" else "group"
        rows.append([f"{kind} {group.group}" if several else "optimizer", f"{_group_text(group)}{size}"])
    rows += [["schedule", f"{row.key} of {row.target}, by {row.source}"] for row in report.schedules]
    if report.mode == "automatic":
        rows.append(["clip", f"global norm {clip}" if clip else "none"])
    rows.append(["run", f"seed {run.get('seed')}, accum {run.get('accum')}, max_epochs {run.get('max_epochs')}"])
    rows.append(["hooks", " | ".join(_hook_text(hook) for hook in report.hooks)])
    rows.append(["devices", report.devices])
    lines = [paint("binding", "head"), *("  " + line for line in grid(rows))]
    return [*lines, *(f"  note: {note}" for note in report.notes), ""]


def _group_text(group: Any) -> str:
    decay = [f"weight_decay {group.weight_decay:g} towards {group.anchor}"] if group.weight_decay else []
    values = [f"{name} {value:g}" for name, value in group.hyperparameters.items() if name != "weight_decay"]
    rate = [f"learning_rate {group.learning_rate:g}"] if group.learning_rate == group.learning_rate else []
    return ", ".join([group.rule, *rate, *values, *decay])


def _split_text(split: Any) -> str:
    rows = f" {split.rows} rows," if split.rows is not None else ""
    by = f" x {split.batch_size}" if split.batch_size else " batches"
    last = f", last {split.dropped} dropped" if split.dropped else ""
    return f"{split.split}{rows} {split.batches}{by}{' padded' if split.padded else ''}{last}"


def _hook_text(hook: Any) -> str:
    where = f" on the {hook.residency}" if hook.residency else ""
    return f"{hook.hook}({', '.join(hook.fields)}){where}"


def plain_config(fields: Sequence[Any], verbose: bool) -> list[str]:
    """``config learning_rate=0.003 source=--learning-rate preset=0.001`` for each field that somebody set."""
    from nitro_cli.experiment.content import short_value

    lines = []
    for row in fields:
        if verbose or row.kind not in _FOLDED:
            lost = [f" {kind}={short_value(value)}" for kind, value in row.shadowed if kind != "default"]
            source = relative_source(row.source) or row.kind
            lines.append(f"config {row.name}={row.text} source={source}{''.join(lost)}")
    return lines


def plain_report(report: Any, verbose: bool) -> list[str]:
    """Configuration and bindings, one fact a line."""
    lines = plain_config(report.fields, verbose)
    for split in report.splits:
        facts = {"rows": split.rows, "batches": split.batches, "batch": split.batch_size, "dropped": split.dropped}
        lines.append(f"binding data.{split.split} {_said(facts)}")
    lines.append(f"binding mode {report.mode}")
    lines.append(f"binding model {_said(report.model)}")
    for group in report.groups:
        facts = {"rule": group.rule, "learning_rate": group.learning_rate, **group.hyperparameters}
        facts |= {"weight_decay": group.weight_decay, "parameters": group.parameters, "leaves": group.leaves}
        kind = "optimizer" if report.mode == "manual" else "group"
        lines.append(f"binding {kind} {group.group} {_said(facts)}")
    lines += [f"binding schedule {row.key} target={row.target} source={row.source}" for row in report.schedules]
    lines.append(f"binding run {_said({k: v for k, v in report.run.items() if k != 'run_dir'})}")
    lines += [f"binding hook {_hook_text(hook)}" for hook in report.hooks]
    lines.append(f"binding devices {report.devices}")
    return [*lines, *(f"note {note}" for note in report.notes)]


def _said(facts: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in facts.items() if value is not None)


def config_facts(title: str, preset: str | None, path: Any, rows: Sequence[Any]) -> dict[str, Any]:
    """The ``config`` event: every field with its value, marker and source."""
    from nitro_cli.experiment.content import short_value
    from nitro_cli.run.report import plain_json

    fields = [
        {
            "name": row.name,
            "value": plain_json(row.value, row.text),
            "type": row.type,
            "role": row.marker,
            "source": _JSON_SOURCES.get(row.kind, row.kind),
            "from": relative_source(row.source),
            "shadowed": {kind: plain_json(value, short_value(value)) for kind, value in row.shadowed},
        }
        for row in rows
    ]
    file = relative(path) if path else None
    return {"schema": 1, "experiment": title, "preset": preset, "file": file, "fields": fields}


def binding_facts(report: Any) -> dict[str, Any]:
    """The ``binding`` event: what the configuration was bound to."""
    return {
        "mode": report.mode,
        "run": report.run,
        "splits": list(report.splits),
        "model": report.model,
        "optimizer": report.optimizer,
        "groups": list(report.groups),
        "schedules": list(report.schedules),
        "hooks": list(report.hooks),
        "devices": report.devices,
        "notes": list(report.notes),
    }


def metrics_text(metrics: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={number(value)}" for name, value in metrics.items())


def size_text(count: float) -> str:
    """``1.2 MB``: bytes in steps of 1000, as ``--to-size`` takes them."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}"
    return f"{count:.0f} GB"


def age_text(seconds: float) -> str:
    """``3 min``, ``5 h``, ``12 d``: how long ago something was."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds // length:.0f} {unit}"
    return "now" if seconds < 1 else f"{seconds:.0f} s"


def rows_or_table(out: Output, header: Sequence[str], rows: Sequence[Sequence[Any]], wide: bool) -> list[str]:
    """A table; where stdout is not a terminal, tab-separated rows that nothing is cut from."""
    if out.stdout.isatty():
        return table(header, rows, None if wide else out.width())
    head = [] if out.quiet else ["\t".join(header)]
    return head + ["\t".join(str(cell) for cell in row) for row in rows]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]], width: int | None) -> list[str]:
    """A table whose cells are whole: columns go from the right until it fits ``width`` (None: all stay)."""
    text = [[str(cell) for cell in row] for row in rows]
    keep = len(header)
    widths = [max(len(row[i]) for row in [list(header), *text]) for i in range(keep)]
    while width is not None and keep > 1 and sum(widths[:keep]) + 2 * (keep - 1) > width:
        keep -= 1
    lines = [
        "  ".join(cell.ljust(size) for cell, size in zip(row[:keep], widths, strict=False)).rstrip()
        for row in [list(header), *text]
    ]
    lines[0] = paint(lines[0], "head")
    if keep < len(header):
        lines.append(f"+{len(header) - keep} columns, use --wide")
    return lines
