"""Where words go: results to stdout, everything else to stderr, a plain copy to the run's console.log.

Nothing here knows what is being said. ``Output`` decides by its switches and its surroundings whether a line is seen,
in colour or not, and keeps the one live line out of the way of the others.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from nitro_cli.cli.jsonable import to_json

ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
STYLES = {"error": "1;31", "warning": "33", "head": "1", "good": "32", "faint": "2", "word": "36"}


def paint(text: str, style: str) -> str:
    """``text`` in one of ``STYLES``. Colour is always put in, and taken out again where it is not wanted."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m"


def plain(text: str) -> str:
    return ESCAPES.sub("", text)


class Output:
    """The streams of one command."""

    def __init__(self, values: Mapping[str, Any], stdout: TextIO, stderr: TextIO, env: Mapping[str, str]) -> None:
        self.json = bool(values.get("json"))
        self.quiet = int(values.get("quiet", 0))
        self.verbose = int(values.get("verbose", 0))
        self.debug = bool(values.get("debug") or values.get("traceback"))
        self.stdout, self.stderr = stdout, stderr
        color = values.get("color", "auto")
        dumb = env.get("TERM") == "dumb"
        self.color_out = _color(color, stdout, env, dumb)
        self.color_err = _color(color, stderr, env, dumb)
        progress = values.get("progress", "auto")
        on_screen = stderr.isatty() and not dumb and not env.get("CI")
        self.screen = not self.json and (progress == "bar" or (progress == "auto" and on_screen))
        self.bar = self.screen and not self.quiet
        self.heartbeat = progress != "none"
        self.broken = False
        self._live = ""
        self._log: TextIO | None = None
        self._log_lost = False
        self._pending: list[str] = []

    def width(self) -> int:
        """Columns of the terminal behind stderr, now: it may have been resized."""
        try:
            return os.get_terminal_size(self.stderr.fileno()).columns or 80
        except (OSError, ValueError, io.UnsupportedOperation):
            return shutil.get_terminal_size((80, 24)).columns

    # -- people

    def say(self, line: str) -> None:
        """A line for people: stderr, unless -q or --json."""
        if not self.json and not self.quiet:
            self._stderr(line)

    def warn(self, message: str) -> None:
        """A warning: stderr, unless -qq; with --json the event says it."""
        if not self.json and self.quiet < 2:
            self._stderr(f"{self.stamp()}{paint('warning:', 'warning')} {message}")

    def fail(self, text: str) -> None:
        """An error, already worded: always on stderr."""
        for line in text.splitlines():
            self.log(line)
            head, colon, rest = line.partition(": ")
            red = colon and head in ("error", "fault")
            self._stderr(f"{paint(head + ':', 'error')} {rest}" if red else line)

    def live(self, line: str) -> None:
        """Draw ``line`` over the last one, without ending it."""
        if self.bar:
            blank = " " * max(len(self._live) - len(line), 0)
            self._write(self.stderr, f"\r{line}{blank}")
            self._live = line

    def clear(self) -> None:
        if self._live:
            self._write(self.stderr, "\r" + " " * len(self._live) + "\r")
            self._live = ""

    def stamp(self) -> str:
        """The time of day, at the head of lines that are not for a terminal."""
        return "" if self.screen else f"{datetime.now():%H:%M:%S} "

    def _stderr(self, line: str) -> None:
        self.clear()
        self._write(self.stderr, (line if self.color_err else plain(line)) + "\n")

    # -- results

    def result(self, line: str) -> None:
        """A line of the answer: stdout, unless -qq or --json."""
        if not self.json and self.quiet < 2:
            self.clear()
            self._write(self.stdout, (line if self.color_out else plain(line)) + "\n")

    def raw(self, text: str) -> None:
        """Text of the answer as it is (rows of a prediction)."""
        self._write(self.stdout, text)

    def event(self, name: str, facts: Mapping[str, Any]) -> None:
        """One JSON object on stdout, where --json asked for it."""
        if self.json:
            self._write(self.stdout, json.dumps({"event": name, **to_json(facts)}, allow_nan=False) + "\n")

    # -- the copy

    def log(self, line: str) -> None:
        """A plain line for console.log; kept until the run has a directory."""
        text = f"{datetime.now():%H:%M:%S} {plain(line)}\n"
        if self._log is not None:
            self._to_log(text)
        elif not self._log_lost:
            self._pending.append(text)

    def open_log(self, path: Path) -> None:
        try:
            self._log = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        except OSError as error:
            self._lose_log(error)
        else:
            self._to_log("".join(self._pending))
        self._pending.clear()

    def close(self) -> None:
        self.clear()
        if self._log is not None:
            self._log.close()
            self._log = None

    def _to_log(self, text: str) -> None:
        assert self._log is not None
        try:
            self._log.write(text)
            self._log.flush()
        except OSError as error:
            self._lose_log(error)

    def _lose_log(self, error: OSError) -> None:
        """The copy is a convenience: a full disk ends a run where the run's own files fail, and that must be told."""
        lost, self._log, self._log_lost = self._log, None, True
        if lost is not None:
            with contextlib.suppress(OSError):
                lost.close()
        self.warn(f"console.log is no longer written: {error.strerror or error}")

    def _write(self, stream: TextIO, text: str) -> None:
        """Write now. A reader that has gone away ends the command the way Ctrl-C does, once.

        Where stderr cannot be written (a log file on a full disk), the command goes on without it.
        """
        if self.broken:
            return
        try:
            stream.write(text)
            stream.flush()
        except BrokenPipeError:
            self.broken = True
            silence(stream)
            signal.raise_signal(signal.SIGINT)
        except OSError:
            if stream is not self.stderr:
                raise
            silence(stream)


def silence(stream: TextIO) -> None:
    """Point a broken stream at nothing, so that Python's own flush at exit has nothing to complain about."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
    except (OSError, ValueError, io.UnsupportedOperation):
        return


def _color(choice: str, stream: TextIO, env: Mapping[str, str], dumb: bool) -> bool:
    if choice in ("always", "never"):
        return choice == "always"
    if env.get("NO_COLOR") or dumb:
        return False
    return bool(env.get("FORCE_COLOR")) or stream.isatty()


class Stray(io.TextIOBase):
    """What user code sees as ``sys.stdout``: its prints go to stderr, above the live line."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def write(self, text: str) -> int:
        self._output.clear()
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()

    def fileno(self) -> int:
        return sys.stderr.fileno()

    def writable(self) -> bool:
        return True
