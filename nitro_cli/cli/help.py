"""``--help`` and shell completion, drawn by Typer. Words are read by ``argv``; here they are only described."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from typing import Any

import typer
from rich.markup import escape

from nitro_cli.cli.console import Output, plain
from nitro_cli.cli.options import COMMANDS, Command, Option

BLANK = " "  # the type of a field stands in its help text: in a column of its own it would cut long names short
ABOUT = "nitro runs JAX experiments: train, validate, predict, and nothing compiles twice without saying why."


def app(options: dict[str, Iterable[Option]] | None = None, notes: str = "") -> typer.Typer:
    """The Typer application. ``options`` replaces the options of a command (once its experiment is known)."""
    made = typer.Typer(
        help=ABOUT, no_args_is_help=True, context_settings={"help_option_names": ["-h", "--help"]}, add_completion=True
    )
    made.callback()(_top)
    for command in COMMANDS.values():
        shown = (options or {}).get(command.name, command.options)
        text = escape(command.help) + (f"\n\n{escape(notes)}" if options and command.name in options else "")
        made.command(command.name, help=text)(described(command, shown))
    return made


def _top(version: bool = typer.Option(False, "--version", help="Show nitro's version.")) -> None:
    """The options that stand before a command."""


def described(command: Command, options: Iterable[Option]) -> Callable[..., None]:
    """A function whose made-up signature tells Typer what the command takes."""
    parameters = []
    if command.experiment != "none":
        parameters.append(_experiment(command.experiment == "required"))
    parameters += [_parameter(option) for option in options]

    def function(**values: Any) -> None:
        """Never called: Typer draws, it does not run."""

    function.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    function.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return function


def _experiment(required: bool) -> inspect.Parameter:
    default = typer.Argument(
        ... if required else None,
        metavar="EXPERIMENT",
        help="myexp, package.module or path/to/file.py; myexp:Class where there are several.",
        autocompletion=complete_experiment,
        show_default=False,
    )
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    return inspect.Parameter("experiment", kind, default=default, annotation=str)


def _parameter(option: Option) -> inspect.Parameter:
    names = [f"{option.name}/{option.negative}" if option.negative else option.name]
    names += [option.short] if option.short else []
    shared: dict[str, Any] = {"help": escape(option.help), "rich_help_panel": option.panel, "show_default": False}
    if option.kind == "count":
        default, annotation = typer.Option(0, *names, count=True, metavar=BLANK, **shared), int
    elif option.kind in ("flag", "bool"):
        default, annotation = typer.Option(None, *names, metavar=BLANK, **shared), bool
    else:
        complete = complete_preset if option.key == "preset" else None
        metavar = BLANK if option.field else option.metavar
        default, annotation = typer.Option(None, *names, metavar=metavar, autocompletion=complete, **shared), str
    return inspect.Parameter(option.key, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def complete_experiment(incomplete: str) -> list[str]:
    """Names of experiments that begin with ``incomplete``, found without importing one."""
    from nitro_cli.experiment.discovery import list_experiments

    return [item.name for item in list_experiments() if item.name.startswith(incomplete)]


def complete_preset(ctx: typer.Context, args: list[str], incomplete: str) -> list[str]:
    """Names of the presets of the experiment that stands in the line already."""
    from nitro_cli.experiment.discovery import list_experiments

    words = {*args, *ctx.args, *(value for value in ctx.params.values() if isinstance(value, str))}
    found = [item for item in list_experiments() if item.name in words]
    return [name for item in found for name in item.presets if name.startswith(incomplete)]


class _Page(io.StringIO):
    """Catches the page that Typer draws, and answers for the stream that it is meant for."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._output.stdout.encoding or "utf-8"

    def isatty(self) -> bool:
        return self._output.color_out


def show_help(output: Output, made: typer.Typer, words: list[str]) -> int:
    """Draw the help page of ``words`` on stdout."""
    page = _Page(output)
    with redirect_stdout(page):
        made(args=[*words, "--help"], prog_name="nitro", standalone_mode=False)
    text = page.getvalue()
    output.raw(text if output.color_out else plain(text))
    return 0
