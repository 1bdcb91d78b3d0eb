"""The entry: words in, one command run, an exit code out. Every failure is told here and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import io
import logging
import os
import shlex
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from nitro_cli import __version__
from nitro_cli.cli import garbage
from nitro_cli.cli.argv import check_words, command_of, experiment_word, parse
from nitro_cli.cli.console import Output, Stray
from nitro_cli.cli.failures import describe, user_frames
from nitro_cli.cli.interrupts import kept_interrupts, told_signals
from nitro_cli.cli.lookup import looks_like_experiment
from nitro_cli.cli.options import COLORS, COMMANDS, OUTPUT, PROGRESS, Command, Option, field_options
from nitro_cli.cli.session import Session, stray_environment
from nitro_cli.errors import NitroError, Problem, UsageError
from nitro_cli.suggest import did_you_mean

BROKEN_PIPE = 141
INTERRUPTED = 130
HELP = ("-h", "--help")
LIBRARIES = ("absl", "jax", "jaxlib", "flax", "optax", "orbax")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run ``nitro`` with ``argv`` (default: this process's) and leave with its exit code."""
    if "_NITRO_COMPLETE" in os.environ:
        from nitro_cli.cli.help import app

        app()(prog_name="nitro", complete_var="_NITRO_COMPLETE")
    if argv is None:
        garbage.pause()
    code = run(sys.argv[1:] if argv is None else argv)
    garbage.resume()
    sys.stdout.flush()
    sys.exit(code)


def run(argv: Sequence[str]) -> int:
    """Run one command and return its exit code. Raises nothing."""
    argv = list(argv)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # the caller closed it (>&-); what is opened next must not take its place
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - lives as long as the process
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a screen that cannot show a letter must not end a run
    output = Output(parse(argv, OUTPUT).values, sys.stdout, sys.stderr, os.environ)
    _set_logging(output.verbose)
    try:
        with kept_interrupts(), told_signals(functools.partial(_tell_signal, output)):
            code = _dispatch(argv, output)
    except KeyboardInterrupt:
        code = INTERRUPTED
        if not output.broken:
            output.fail("interrupted")
            output.event("error", {"exit_code": code, "kind": "interrupted"})
    except BaseException as error:
        code = _fail(error, output)
    finally:
        with contextlib.suppress(KeyboardInterrupt):
            output.close()
    return BROKEN_PIPE if output.broken else code


def _fail(error: BaseException, output: Output) -> int:
    """Tell an error and return its exit code."""
    if isinstance(error, SystemExit) and not user_frames(error):
        return error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    code, text, facts = describe(error)
    with contextlib.suppress(KeyboardInterrupt):
        if output.debug:
            output.fail("".join(traceback.format_exception(error)).rstrip())
        output.fail(text)
        output.event("error", {"exit_code": code, **facts})
    return code


def _tell_signal(output: Output, name: str, code: int) -> None:
    output.event("error", {"exit_code": code, "kind": "interrupted", "message": f"ended by {name}"})
    output.fail(f"ended by {name}")


def _set_logging(verbose: int) -> None:
    for name in LIBRARIES:
        logging.getLogger(name).setLevel(logging.INFO if verbose > 1 else logging.WARNING)
    if verbose > 1:
        logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    else:
        logging.getLogger("absl").addFilter(_worth_telling)


def _worth_telling(record: logging.LogRecord) -> bool:
    """Orbax warns of each save without a metric; for a run without a val split that is every one."""
    return "did not provide metrics" not in record.getMessage()


def _dispatch(argv: list[str], output: Output) -> int:
    if not argv or argv[0] in HELP:
        return _help(output, [])
    if argv[0] == "--version":
        output.result(f"nitro {__version__}")
        return 0
    if argv[0] in ("--install-completion", "--show-completion"):
        from nitro_cli.cli.help import app

        app()(args=argv, prog_name="nitro")
    command = COMMANDS[command_of(argv, looks_like_experiment)]
    tokens = argv[1:]
    word = None if command.experiment == "none" else experiment_word(tokens, command.options, looks_like_experiment)
    if _asks_for_help(tokens):
        return _command_help(output, command, word)
    session = _read(output, command, tokens, word, shlex.join(["nitro", *argv]))
    for warning in stray_environment():
        output.warn(warning)
    module = importlib.import_module(command.module)
    garbage.resume()  # what is imported is imported; the experiment's hooks find the collector as they know it
    with contextlib.redirect_stdout(Stray(output)):
        return module.run(session)


def _asks_for_help(tokens: Sequence[str]) -> bool:
    before = tokens[: tokens.index("--")] if "--" in tokens else tokens
    return any(token in HELP for token in before)


def _read(output: Output, command: Command, tokens: list[str], word: str | None, line: str) -> Session:
    """Understand the words: load the experiment that they name, and read them again with its fields."""
    options: tuple[Option, ...] = command.options
    found: Any = None
    if word is not None:
        found, fields = _load(word)
        options = (*fields, *options)
    elif command.experiment == "required":
        raise _no_experiment(command, tokens)
    parsed = parse(tokens, options, keep=word)
    check_words(parsed, word, options)
    if found is not None:
        parsed.problems = [_missing_knob(problem, found.cls) for problem in parsed.problems]
    for key, allowed in (("color", COLORS), ("progress", PROGRESS)):
        value = parsed.values.get(key)
        if value is not None and value not in allowed:
            label = did_you_mean(value, allowed)
            parsed.problems.append(Problem(f"--{key} {value}: one of {', '.join(allowed)}", label=label))
    return Session(command.name, line, output, parsed, options, found)


def _missing_knob(problem: Problem, cls: type) -> Problem:
    """A class without nitro's base has only the knobs that it declares: say so where one of the others is given."""
    from nitro_cli.experiment.base import KNOBS, Experiment
    from nitro_cli.suggest import canonical

    name = canonical(str(problem.facts.get("option", "")).lstrip("-"))
    if issubclass(cls, Experiment) or name not in KNOBS or not problem.what.startswith("no such option"):
        return problem
    note = f"{cls.__name__} has no field '{name}': declare it, or derive from nitro_cli.Experiment, which has it"
    return dataclasses.replace(problem, label="", notes=(note,))


def _load(word: str) -> tuple[Any, list[Option]]:
    from nitro_cli.experiment.discovery import find_experiment

    found = find_experiment(word)
    return found, field_options(found.cls, found.name)


def _no_experiment(command: Command, tokens: list[str]) -> UsageError:
    """No experiment is named: unknown options come first, for they may be why."""
    from nitro_cli.experiment.base import Experiment
    from nitro_cli.experiment.discovery import list_experiments
    from nitro_cli.suggest import listed

    parsed = parse(tokens, (*command.options, *field_options(Experiment, "")))
    problems = [problem for problem in parsed.problems if "suggestions" in problem.facts]
    names = [item.name for item in list_experiments()]
    notes = (
        (f"experiments here: {listed(names)}",) if names else ("there is no experiments/ folder with experiments here",)
    )
    missing = Problem(f"which experiment? write nitro {command.name} EXPERIMENT", notes=notes)
    return UsageError([*problems, missing], kind="unknown_option" if problems else "no_experiment")


def _help(output: Output, words: list[str], **changes: Any) -> int:
    from nitro_cli.cli.help import app, show_help

    return show_help(output, app(**changes), words)


def _command_help(output: Output, command: Command, word: str | None) -> int:
    """Help of a command; with an experiment, also its fields and presets."""
    if word is None:
        return _help(output, [command.name])
    found, fields = _load(word)
    notes = _presets_of(found)
    options = {command.name: [*fields, *command.options]}
    return _help(output, [command.name], options=options, notes=notes)


def _presets_of(found: Any) -> str:
    from nitro_cli.cli.failures import relative
    from nitro_cli.experiment.presets import preset_table

    doc = " ".join((found.cls.__doc__ or "").split())
    try:
        table = preset_table(found.cls)
    except NitroError as error:
        return f"{found.qualname}: {doc}\n\nPresets cannot be read: {error.problems[0].what}"
    where = f" ({relative(table.path)})" if table.path else ""
    presets = f"Presets{where}: {', '.join(table.names)}" if table.names else "No presets"
    return f"{found.qualname}: {doc}\n\n{presets}\n\nLists and tables are replaced as a whole."
