"""Reads the fenced blocks of a Markdown page and runs them for real, in one project folder, in order.

- ``python`` runs in the page's namespace; with a first line such as ``# experiments/line.py`` it is written there
  instead. ``python error`` must raise a NitroError, whose text is what it prints.
- ``toml`` must be valid; with a first line such as ``# presets/line.toml`` it is written there, and every preset in it
  must fit its experiment, where there is one of that name.
- ``text`` is what the block before it printed.
- ``console`` holds ``$ command`` lines and what they print. ``$ echo $?`` shows an exit code other than 0.
- ``sh`` is a script that must succeed.

Output is compared line by line. A line ``...`` stands for any lines, and ``...`` at the end of one for any end; numbers
with a decimal point, sizes, ages, versions, times, run ids, numbers of epochs, checkpoints and defaults stand for any
others, and which epochs are best is not compared.
"""

from __future__ import annotations

import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import tomli

from nitro_cli.errors import NitroError

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(r"^```([a-z]*)([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r"# ((?:experiments|presets|[a-z]+)/\w+\.(?:py|toml))\n")
SHELL = set("|<>&;$*`(")
LOOSE = [
    (re.compile(r"\x1b\[[0-9;]*[A-Za-z]"), ""),
    (re.compile(r"\b\d+(\.\d+)? (B|kB|MB)\b"), "SIZE"),
    (re.compile(r"\b(\d+ (s|min|h|d)|now)\b"), "AGE"),
    (re.compile(r"\b[0-9a-f]{12}-[0-9a-f]{8}\b"), "KEY"),
    (re.compile(r"\b\d+ (entries|files|of them kept|times)\b"), r"N \1"),
    (re.compile(r"(~|/\S+)/(store|\.cache/nitro)\b"), "STORE"),
    (re.compile(r"\b\d{8}-\d{6}-([\w.-]+)-[0-9a-f]{4}\b"), r"RUN-\1"),
    (re.compile(r"\b\d+\.\d+\.\d+(\.\d+)?\b"), "VERSION"),
    (re.compile(r"\b\d+:\d\d:\d\d\b"), "TIME"),
    (re.compile(r"-?\b\d+\.\d+(e[-+]?\d+)?"), "NUMBER"),
    (re.compile(r"\b\d+e[-+]?\d+"), "NUMBER"),
    (re.compile(r"\b(epoch|checkpoints)([ /])\d+"), r"\1\2N"),
    (re.compile(r"\b\d+ default"), "N default"),
    (re.compile(r" +best$"), ""),
    (re.compile(r"[ \t]+"), " "),
]


@dataclass(frozen=True)
class Block:
    kind: str
    note: str
    text: str
    line: int

    @property
    def file(self) -> str | None:
        """The file that the block says it is."""
        found = FILE.match(self.text)
        return found[1] if found else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(found[1], found[2].strip(), found[3], text.count("\n", 0, found.start()) + 1)
        for found in FENCE.finditer(text)
    ]


def commands_of(text: str) -> Iterator[tuple[str, list[str]]]:
    """Each command of a console block with the lines that it should print."""
    command: str | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("$ "):
            if command is not None:
                yield command, lines
            command, lines = line[2:], []
        else:
            lines.append(line)
    assert command is not None, "a console block begins with a command: $ ..."
    yield command, lines


class Screen(io.TextIOWrapper):
    """A terminal in memory, for stdout and stderr at once."""

    def __init__(self) -> None:
        self.bytes = io.BytesIO()
        super().__init__(self.bytes, encoding="utf-8", write_through=True)

    def isatty(self) -> bool:
        return True

    def shown(self) -> str:
        """What stays to be read once every carriage return has taken effect."""
        return "\n".join(_overwritten(line) for line in self.bytes.getvalue().decode().split("\n"))


def _overwritten(line: str) -> str:
    shown = ""
    for piece in re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", line).split("\r"):
        shown = piece + shown[len(piece) :]
    return shown.rstrip()


def same_output(expected: list[str], actual: list[str]) -> bool:
    """Whether ``actual`` is what ``expected`` shows; a line ``...`` stands for any lines."""
    want = [line for line in map(loosened, expected) if line]
    have = [line for line in map(loosened, actual) if line]
    pattern = "".join(map(_pattern, want))
    return re.fullmatch(pattern, "".join(line + "\n" for line in have)) is not None


def _pattern(line: str) -> str:
    if line == "...":
        return "(?:.*\n)*?"
    return (re.escape(line[:-3]) + ".*\n") if line.endswith("...") else re.escape(line) + "\n"


def loosened(line: str) -> str:
    for pattern, text in LOOSE:
        line = pattern.sub(text, line)
    return line.strip()


@dataclass
class Page:
    """One page under way. ``root`` is its project folder, ``printed`` what the last block printed."""

    path: Path
    root: Path
    namespace: dict[str, Any] = field(default_factory=lambda: {"__name__": "__main__"})
    printed: str = ""
    code: int = 0
    shim: Path | None = None

    def run(self, block: Block) -> None:
        runner = getattr(self, f"_{block.kind}", None)
        if runner is None:
            self.fail(block, f"a block of kind '{block.kind}' cannot be run")
        runner(block)

    def fail(self, block: Block, why: str) -> None:
        pytest.fail(f"{self.path.relative_to(ROOT)}:{block.line}: {why}", pytrace=False)

    def compare(self, block: Block, expected: list[str], actual: str, what: str) -> None:
        if not same_output(expected, actual.splitlines()):
            shown = "\n".join(expected)
            self.fail(block, f"{what} prints otherwise.\n--- the page says\n{shown}\n--- it printed\n{actual}")

    # -- one method a kind of block

    def _python(self, block: Block) -> None:
        code = compile(block.text, f"{self.path.name}:{block.line}", "exec", dont_inherit=True)
        if block.file:
            self._write(block)
            return
        out = io.StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            if block.note == "error":
                with pytest.raises(NitroError) as raised:
                    exec(code, self.namespace)
                out.write(str(raised.value).replace(f"{self.root}/", ""))
            else:
                exec(code, self.namespace)
        self.printed = out.getvalue()

    def _text(self, block: Block) -> None:
        self.compare(block, block.text.splitlines(), self.printed, "the block above")

    def _toml(self, block: Block) -> None:
        tomli.loads(block.text)
        if block.file:
            self._write(block)
            if (self.root / "experiments" / f"{Path(block.file).stem}.py").exists():
                self._check_presets(block)

    def _check_presets(self, block: Block) -> None:
        from nitro_cli.experiment.discovery import find_experiment
        from nitro_cli.experiment.presets import check_presets

        found = find_experiment(Path(str(block.file)).stem)
        problems = check_presets(found.cls)
        if problems:
            self.fail(block, "\n".join(problem.render() for problem in problems))

    def _console(self, block: Block) -> None:
        commands = list(commands_of(block.text))
        for index, (command, expected) in enumerate(commands):
            if command == "echo $?":
                if expected != [str(self.code)]:
                    self.fail(block, f"the exit code is {self.code}, the page says {expected}")
                continue
            self.code, printed = self.execute(command)
            said = index + 1 < len(commands) and commands[index + 1][0] == "echo $?"
            if self.code and not said:
                self.fail(block, f"`{command}` ends with {self.code}:\n{printed}")
            self.compare(block, expected, printed, f"`{command}`")

    def _sh(self, block: Block) -> None:
        if self.path == ROOT / "README.md":
            self._readme(block)
            return
        code, printed = self._shell(block.text)
        if code:
            self.fail(block, f"the script ends with {code}:\n{printed}")

    def _readme(self, block: Block) -> None:
        """The set-up blocks install things, which tools outside the tests try; here their last command counts."""
        last = block.text.rpartition("&& ")[2].strip().removeprefix(".venv/bin/")
        if last.startswith("nitro "):
            self.code, printed = self.execute(last)
            if self.code:
                self.fail(block, f"`{last}` ends with {self.code}:\n{printed}")
        elif not last.startswith("python -m pytest"):
            self.fail(block, f"the last command is neither nitro nor pytest: {last}")

    # -- how a command is run

    def execute(self, command: str) -> tuple[int, str]:
        """``nitro ...`` in this process, as on a terminal; anything else in a shell."""
        words = shlex.split(command)
        if words[0] == "nitro" and not SHELL & set(command):
            return self._nitro(words[1:])
        return self._shell(command)

    def _nitro(self, words: list[str]) -> tuple[int, str]:
        from nitro_cli.cli import main
        from nitro_cli.programs.cache import cache_reset

        cache_reset()  # as in a process of its own
        screen = Screen()
        with redirect_stdout(screen), redirect_stderr(screen):
            code = main.run(words)
        return code, screen.shown()

    def _shell(self, text: str) -> tuple[int, str]:
        folder = self.root / ".shim"
        if not folder.exists():
            folder.mkdir()
            for name, words in (("nitro", "-m nitro_cli"), ("python", "")):
                (folder / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {words} "$@"\n')
                (folder / name).chmod(0o755)
        env = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["bash", "-e", "-o", "pipefail", "-c", text],
            cwd=self.root,
            env={**env, "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout

    def _write(self, block: Block) -> None:
        path = self.root / str(block.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
