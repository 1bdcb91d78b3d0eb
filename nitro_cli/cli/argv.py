"""Reading the words of a command line.

Typer is not asked to read them: left to itself it takes a negative number for a bundle of letters, keeps the last of
two values, and reads ``--use-bn false`` as a flag and a stray word. Here every word is understood or refused by name.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from nitro_cli.cli.options import COMMANDS, Option
from nitro_cli.errors import Problem, UsageError
from nitro_cli.suggest import canonical, did_you_mean, nearest

_NEGATIVE = re.compile(r"-(\d|\.\d|inf|nan)", re.IGNORECASE)
_BOOL_WORDS = {"true", "false", "yes", "no", "on", "off", "0", "1"}


@dataclass
class Parsed:
    """What the words said: values by option key, how each option was written, free words, and all that was wrong."""

    values: dict[str, Any] = field(default_factory=dict)
    given: dict[str, str] = field(default_factory=dict)
    words: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def is_option(token: str) -> bool:
    """``-1e-3``, ``-`` and ``[-1]`` are values; other words that begin with a dash are options."""
    return token.startswith("-") and token != "-" and not _NEGATIVE.match(token)


def spelled(token: str) -> str:
    """``--max_epochs`` as nitro writes it: ``--max-epochs``. One-letter options stay as they are."""
    return token.replace("_", "-") if token.startswith("--") else token


class _Reader:
    """Reads tokens against a table of options. ``keep`` names the free word that no unknown option may swallow."""

    def __init__(self, tokens: Sequence[str], options: Iterable[Option], keep: str | None) -> None:
        self.tokens = list(tokens)
        self.keep = keep
        self.out = Parsed()
        self.positive: dict[str, Option] = {}
        self.negative: dict[str, Option] = {}
        for option in options:
            self.positive[option.name] = option
            if option.short:
                self.positive[option.short] = option
            if option.negative:
                self.negative[option.negative] = option

    def read(self) -> Parsed:
        while self.tokens:
            token = self.tokens.pop(0)
            if token == "--":
                self.out.words.extend(self.tokens)
                break
            if not is_option(token):
                self.out.words.append(token)
            elif re.fullmatch(r"-[qv]{2,}", token):
                self.tokens[:0] = [f"-{letter}" for letter in token[1:]]
            else:
                self._option(token)
        return self.out

    def _option(self, token: str) -> None:
        head, equals, value = token.partition("=")
        name = spelled(head)
        if name in self.negative:
            self._plain(self.negative[name], name, "false", bool(equals))
        elif name not in self.positive:
            self._unknown(head, name, bool(equals))
        else:
            option = self.positive[name]
            if option.kind == "count":
                self.out.values[option.key] = self.out.values.get(option.key, 0) + 1
                self.out.given[option.key] = name
            elif option.kind == "flag":
                self._plain(option, name, True, bool(equals))
            elif option.kind == "bool":
                self._bool(option, name, value if equals else None)
            elif option.kind == "maybe":
                self._store(option, name, value if equals else option.bare)
            elif option.kind == "pair":
                self._pair(option, name, [value] if equals else [])
            else:
                self._valued(option, name, value if equals else None)

    def _plain(self, option: Option, name: str, value: Any, equals: bool) -> None:
        if equals:
            self._problem(f"{name} takes no value", f"write {name} alone", option=name)
        else:
            self._store(option, name, value)

    def _bool(self, option: Option, name: str, value: str | None) -> None:
        follows = self.tokens[0] if self.tokens else ""
        if value is None and follows.lower() in _BOOL_WORDS and follows != self.keep:
            self.tokens.pop(0)
            forms = [option.name, *([option.negative] if option.negative else []), f"{option.name}=false"]
            self._problem(
                f"{name} {follows}: a yes-or-no option takes no word after it",
                "write one of " + ", ".join(forms),
                option=name,
                field=option.field,
            )
        else:
            self._store(option, name, "true" if value is None else value)

    def _valued(self, option: Option, name: str, value: str | None) -> None:
        if value is None:
            if not self.tokens or is_option(self.tokens[0]):
                note = f"write {name} {option.metavar}"
                if self.tokens and not self._knows(self.tokens[0]):
                    note += f"; for a value that begins with a dash, write {name}={self.tokens[0]}"
                self._problem(f"{name} needs a value", note, option=name)
                return
            value = self.tokens.pop(0)
        self._store(option, name, value)

    def _pair(self, option: Option, name: str, values: list[str]) -> None:
        while len(values) < 2 and self.tokens and not is_option(self.tokens[0]):
            values.append(self.tokens.pop(0))
        if len(values) < 2:
            self._problem(f"{name} needs two values", f"write {name} {option.metavar}", option=name)
        else:
            self._store(option, name, tuple(values))

    def _knows(self, token: str) -> bool:
        name = spelled(token.partition("=")[0])
        return name in self.positive or name in self.negative

    def _store(self, option: Option, name: str, value: Any) -> None:
        if option.key in self.out.values:
            first = f"{self.out.given[option.key]} ({self.out.values[option.key]})"
            second = f"{name} ({value})"
            self._problem(f"{option.name} is given twice: {first} and {second}", "keep one of them", option=option.name)
            return
        self.out.values[option.key] = value
        self.out.given[option.key] = name

    def _unknown(self, head: str, name: str, equals: bool) -> None:
        if not equals and self.tokens and not is_option(self.tokens[0]) and self.tokens[0] != self.keep:
            self.tokens.pop(0)  # most likely its value: no second complaint about that
        known = [n for n in (*self.positive, *self.negative) if n.startswith("--")]
        close = nearest(name, known) if name.startswith("--") else []
        hint = f"did you mean {close[0]}?" if close else ""
        if "." in name:
            hint = f"fields are flat, there are no dotted options{'; ' + hint if hint else ''}"
        problem = Problem(f"no such option {head}", label=hint, facts={"option": head, "suggestions": close})
        self.out.problems.append(problem)

    def _problem(self, what: str, *notes: str, **facts: Any) -> None:
        self.out.problems.append(Problem(what, notes=notes, facts={k: v for k, v in facts.items() if v}))


def parse(tokens: Sequence[str], options: Iterable[Option], keep: str | None = None) -> Parsed:
    """Read ``tokens``. Nothing is raised: whatever is wrong is in ``problems``, all at once."""
    return _Reader(tokens, options, keep).read()


def experiment_word(tokens: Sequence[str], options: Iterable[Option], exists: Callable[[str], bool]) -> str | None:
    """The experiment's name among ``tokens``, before its fields are known.

    A word after an option that nitro does not know may be that option's value, so such a word counts only where an
    experiment of that name exists, and only if no other word will do.
    """
    known = {option.name: option for option in options}
    free: list[str] = []
    doubtful: list[str] = []
    before, taken = "", 0  # the option that stands before, and how many words it still takes of a pair
    for token in tokens:
        if token == "--":
            before, taken = "", 0
        elif is_option(token):
            before = "" if "=" in token else spelled(token)
            option = known.get(spelled(token.partition("=")[0]))
            taken = 0 if option is None or option.kind != "pair" else 1 if "=" in token else 2
        elif taken:
            before, taken = "", taken - 1
        else:
            option = known.get(before)
            if not before or (option is not None and option.kind != "text") or re.fullmatch(r"-[qv]+", before):
                free.append(token)
            elif option is None:
                doubtful.append(token)
            before = ""
    for word in (*(w for w in free if exists(w)), *free, *(w for w in doubtful if exists(w))):
        return word
    return None


def check_words(parsed: Parsed, word: str | None, options: Iterable[Option]) -> None:
    """Add a problem for every free word besides the experiment's name."""
    extra = list(parsed.words)
    if word in extra:
        extra.remove(word)
    options = list(options)
    names = [option.name for option in options]
    bare = [o for o in options if o.kind == "maybe" and parsed.values.get(o.key) == o.bare]
    for found in extra:
        head, equals, value = found.partition("=")
        close = nearest(head, names) if equals else []
        label = f"did you mean {close[0]} {shlex.quote(value)}?" if close else ""
        if not label and bare:
            label = f"did you mean {bare[0].name}={shlex.quote(found)}?"
        elif not label and (found[:1].isdigit() or _NEGATIVE.match(found)):
            label = "lists are written [1,2,3] or 1,2,3, without spaces"
        notes = (f"the experiment is {word!r}",) if word and not label else ()
        parsed.problems.append(Problem(f"unexpected word {found!r}", label=label, notes=notes, facts={"word": found}))


def command_of(argv: Sequence[str], exists: Callable[[str], bool]) -> str:
    """The command, which is the first word. Raises UsageError, with the right order where the order was wrong."""
    first = argv[0]
    if first in COMMANDS:
        return first
    if is_option(first):
        at = next((i for i, token in enumerate(argv) if token in COMMANDS), None)
        if at is None:
            label = "nitro COMMAND [EXPERIMENT] [OPTIONS]"
            raise UsageError(f"{first} stands where a command is expected", label=f"write {label}", kind="order")
        right = ["nitro", argv[at], *argv[at + 1 :], *argv[:at]]
        raise UsageError(f"options come after the command: {first}", label=f"write {shlex.join(right)}", kind="order")
    if canonical(first) in {canonical(name) for name in COMMANDS} or not exists(first):
        notes = ("commands: " + ", ".join(COMMANDS),)
        raise UsageError(f"no such command {first!r}", *notes, label=did_you_mean(first, COMMANDS), kind="command")
    raise UsageError(f"{first!r} is an experiment, not a command", label=f"write nitro train {first}", kind="command")
