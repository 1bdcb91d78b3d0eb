"""Which options a command has: nitro's own, and one for each field of the experiment."""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

Kind = Literal["text", "bool", "flag", "count", "maybe", "pair"]
NITRO_PANEL = "Options of nitro"
OUTPUT_PANEL = "Output"
STORE_PANEL = "The store of compiled programs"
KNOB_PANEL = "Run knobs (fields that every experiment has)"


@dataclass(frozen=True)
class Option:
    """One option. ``kind``: ``text`` takes a value, ``bool`` is a pair with ``negative``, ``flag`` and ``count`` take
    none, ``maybe`` takes one only after ``=``, ``pair`` takes two. ``field`` names the experiment's field that it
    sets."""

    name: str
    key: str
    kind: Kind
    help: str
    panel: str = NITRO_PANEL
    metavar: str = "TEXT"
    short: str = ""
    negative: str = ""
    bare: str = ""
    field: str = ""
    info: Any = None


@dataclass(frozen=True)
class Command:
    """A command: its one-line help, whether it names an experiment, and its own options."""

    name: str
    help: str
    experiment: Literal["required", "optional", "none"]
    options: tuple[Option, ...]

    @property
    def module(self) -> str:
        return "nitro_cli.cli.commands." + self.name.replace("-", "_")


def _text(name: str, help: str, metavar: str = "TEXT", panel: str = NITRO_PANEL) -> Option:
    return Option(f"--{name}", name.replace("-", "_"), "text", help, panel, metavar)


def _flag(name: str, help: str, panel: str = NITRO_PANEL) -> Option:
    return Option(f"--{name}", name.replace("-", "_"), "flag", help, panel)


COLORS = ("auto", "always", "never")
PROGRESS = ("auto", "bar", "lines", "none")

OUTPUT = (
    _flag("json", "One JSON object per event on stdout and nothing else there.", OUTPUT_PANEL),
    Option("--quiet", "quiet", "count", "Only the result; twice: nothing.", OUTPUT_PANEL, short="-q"),
    Option("--verbose", "verbose", "count", "Every field and compile; twice: library logs.", OUTPUT_PANEL, short="-v"),
    _text("color", "auto, always or never.", "WHEN", OUTPUT_PANEL),
    _text("progress", "auto, bar, lines or none.", "HOW", OUTPUT_PANEL),
    _flag("debug", "Full Python tracebacks.", OUTPUT_PANEL),
    _flag("traceback", "The same as --debug.", OUTPUT_PANEL),
)
CONFIG = (
    _text("preset", "A table of the preset file, applied over the class defaults.", "NAME"),
    _text("preset-file", "A TOML file to take presets from, instead of presets/NAME.toml.", "FILE"),
    _text("unset", "Fields to set to None, separated by commas.", "FIELDS"),
)
WEIGHTS = (
    _text("run", "latest, a run id or the beginning of one, or a path.", "RUN"),
    _text("checkpoint", "best, latest, an epoch, or a path.", "WHICH"),
    _text("weights", "'fresh' takes newly initialised weights and needs no run.", "fresh"),
)
LOOK_UPS = (
    _flag("cold", "Compile everything, whatever the store of programs has."),
    _flag("verify-cache", "Trace also what the store has, and compare the two."),
)
STORE = (
    _flag("clear", "Remove everything that nitro keeps for other processes.", STORE_PANEL),
    _flag("prune", "Remove what nothing needs, what is old, and what is too much.", STORE_PANEL),
    _text(
        "to-size",
        "With --prune: the least recently used go until the rest fits, 500MB for example.",
        "SIZE",
        STORE_PANEL,
    ),
    _text("unused-for", "With --prune: what nobody used for so long goes, 30d for example.", "AGE", STORE_PANEL),
    _flag("probe", "Try out whether a second process loads here what a first one compiled.", STORE_PANEL),
    Option(
        "--explain", "explain", "pair", "What differs between the programs of two runs.", STORE_PANEL, "RUN_A RUN_B"
    ),
)
SPLIT = _text("split", "Which split of build_data to use.", "NAME")
FORCE_RUN = _flag("force", "Move the run that is in the run directory aside, and start anew there.")
FORCE_OUT = _flag("force", "Overwrite the output file.")
WIDE = _flag("wide", "Show every column, however wide.")
RESUME = Option(
    "--resume",
    "resume",
    "maybe",
    "Continue a run exactly: the newest, or the one named by --resume=RUN.",
    metavar="RUN",
    bare="latest",
)

COMMANDS: dict[str, Command] = {
    command.name: command
    for command in (
        Command("train", "Train an experiment.", "required", (*CONFIG, RESUME, FORCE_RUN, *LOOK_UPS, *OUTPUT)),
        Command(
            "validate",
            "Evaluate a run's weights on the val split.",
            "required",
            (*CONFIG, *WEIGHTS, *LOOK_UPS, *OUTPUT),
        ),
        Command(
            "evaluate",
            "Evaluate a run's weights on any split.",
            "required",
            (*CONFIG, *WEIGHTS, SPLIT, *LOOK_UPS, *OUTPUT),
        ),
        Command(
            "predict",
            "Write a run's outputs, one row per sample.",
            "required",
            (
                *CONFIG,
                *WEIGHTS,
                SPLIT,
                _text("out", "Where to write: .npz, .csv, .jsonl or .parquet; - is stdout.", "FILE"),
                _text("format", "npz, csv, jsonl or parquet, where the suffix does not say.", "NAME"),
                FORCE_OUT,
                *LOOK_UPS,
                *OUTPUT,
            ),
        ),
        Command(
            "cache-stats",
            "Check that nothing compiles twice; without an experiment, show the store of compiled programs.",
            "optional",
            (*CONFIG, *LOOK_UPS, *STORE, WIDE, *OUTPUT),
        ),
        Command(
            "list",
            "List experiments and their presets. Their runs lie in runs/, or where --run-dir has put them.",
            "none",
            (WIDE, *OUTPUT),
        ),
        Command(
            "show",
            "Show the configuration, bindings and schedules of a run, unstarted.",
            "required",
            (*CONFIG, _text("plot", "Draw the schedules into this PNG file.", "FILE"), FORCE_OUT, *OUTPUT),
        ),
    )
}


def is_bool(annotation: Any) -> bool:
    """Whether a field takes only true and false (and None): such a field is a pair of options."""
    if get_origin(annotation) is Annotated:
        return is_bool(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        parts = [part for part in get_args(annotation) if part is not type(None)]
        return bool(parts) and all(is_bool(part) for part in parts)
    return annotation is bool


def field_options(E: Any, name: str) -> list[Option]:
    """One option for each field of ``E``, the same for every command.

    A field that is called like an option of nitro's, of any command, gets ``--field-NAME``.
    """
    from nitro_cli.experiment.traits import config_metadata, own_fields
    from nitro_cli.experiment.values import type_name

    fields = config_metadata(E)
    own = set(own_fields(E))
    used = {option.name for command in COMMANDS.values() for option in command.options} | {"--help", "--version"}
    names = {field: _option_name(field, used) for field in fields}
    used |= set(names.values())
    options = []
    for field, info in fields.items():
        dashed = names[field].removeprefix("--")
        pair = is_bool(info.type)
        negative = f"--no-{dashed}" if pair and f"--no-{dashed}" not in used else ""
        options.append(
            Option(
                names[field],
                f"field_{field}",
                "bool" if pair else "text",
                _describe(info),
                f"Fields of {name}" if field in own else KNOB_PANEL,
                type_name(info.type),
                negative=negative,
                field=field,
                info=info,
            )
        )
    return sorted(options, key=lambda option: option.panel == KNOB_PANEL)


def _option_name(field: str, used: set[str]) -> str:
    dashed = field.replace("_", "-")
    return f"--field-{dashed}" if f"--{dashed}" in used else f"--{dashed}"


def _describe(info: Any) -> str:
    from nitro_cli.experiment.content import short_value
    from nitro_cli.experiment.markers import NO_DEFAULT
    from nitro_cli.experiment.values import type_name

    default = "required" if info.default is NO_DEFAULT else f"default {short_value(info.default)}"
    doc = " ".join((info.doc or "").split())
    return f"{doc} ({type_name(info.type)}, {info.marker.value}, {default})".strip()
