"""What a run reports while it goes, in the three forms it is read in: terminal, plain lines, JSON."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from nitro_cli import __version__
from nitro_cli.cli.console import Output, paint
from nitro_cli.cli.failures import relative
from nitro_cli.cli.progress import live_line
from nitro_cli.cli.render import (
    binding_facts,
    binding_lines,
    clock,
    config_facts,
    config_lines,
    heading,
    metrics_text,
    number,
    plain_config,
    plain_report,
)

HEARTBEAT = 60.0
COLUMN = 11


class View:
    """The observer of a run. ``report`` and ``done`` are called by the command, ``observe`` by the run."""

    def __init__(self, output: Output) -> None:
        self.out = output
        self._columns: tuple[str, ...] = ()
        self._loaded: dict[str, float] = {}  # seconds by program, of those not told yet
        self._last = time.monotonic()

    # -- whole reports

    def banner(self, name: str, preset: str | None) -> None:
        """The first line where there is no terminal: something to see before anything slow begins."""
        where = f"pid={os.getpid()} host={socket.gethostname()}"
        self._plain(f"nitro {__version__} {name} preset={preset or 'none'} {where}")

    def report(self, report: Any) -> None:
        """The configuration and what it is bound to, on stderr."""
        head = (report.title, report.preset, report.path)
        self.out.event("config", config_facts(*head, report.fields))
        self.out.event("binding", binding_facts(report))
        verbose = self.out.verbose > 0
        if self.out.screen:
            for line in (
                heading(*head),
                *config_lines(report.fields, verbose, self.out.width()),
                *binding_lines(report),
            ):
                self.out.say(line)
        for line in plain_report(report, verbose):
            self._plain(line)

    def config(self, found: Any, resolved: Any) -> None:
        """The configuration alone, for a command whose handle is built further down."""
        from nitro_cli.experiment.traits import config_metadata
        from nitro_cli.run.report import field_rows

        rows = field_rows(resolved.experiment, config_metadata(found.cls), resolved.sources)
        head = (found.qualname, resolved.preset, found.path)
        self.out.event("config", config_facts(*head, rows))
        verbose = self.out.verbose > 0
        if self.out.screen:
            for line in (heading(*head), *config_lines(rows, verbose, self.out.width())):
                self.out.say(line)
        for line in plain_config(rows, verbose):
            self._plain(line)

    def changes(self, rows: list[tuple[str, str, str]], what: str) -> None:
        """Fields that are not what they were in the run: old -> new."""
        if not rows:
            return
        self.out.event("changes", {"fields": [{"name": name, "was": was, "now": now} for name, was, now in rows]})
        for name, was, now in rows:
            self._both(f"{what}: {name}  {was} -> {now}")

    def note(self, text: str) -> None:
        self._both(text)

    # -- events of a run

    def observe(self, event: str, facts: Mapping[str, Any]) -> None:
        """Called by the run with each event; an event without a method here is left alone."""
        handler = getattr(self, f"on_{event}", None)
        if handler is not None:
            handler(facts)

    def on_run(self, facts: Mapping[str, Any]) -> None:
        path = relative(facts["run_dir"])
        self.out.event("run", {"run_dir": path})
        self._both(f"run {path}")
        if self.out.screen:
            self.out.say("")

    def on_compile(self, facts: Mapping[str, Any]) -> None:
        self.out.event("compile", facts)
        origin, program, kept_out = facts["origin"], facts["program"], facts["kept_out"]
        verb = {"compiled": "compile", "linked": "link", "loaded": "load"}[origin]
        line = f"{verb} {program}: {facts['why']} ({float(facts['seconds']):.1f}s)"
        if self.out.verbose or origin != "loaded":
            self._both(line)
        else:
            self._loaded[program] = self._loaded.get(program, 0.0) + float(facts["seconds"])
        if kept_out and facts["entry"]:
            more = len(kept_out) - 1
            rest = f", and {more} more reason{'s' if more > 1 else ''}" if more else ""
            self._both(f"{program} is traced anew in every run: {kept_out[0]}{rest}")

    def on_first_step(self, facts: Mapping[str, Any]) -> None:
        """The first step is over, and with it everything that a start costs: what measures of a start wait for."""
        self.out.event("first_step", facts)

    def on_progress(self, facts: Mapping[str, Any]) -> None:
        if self.out.bar:
            self.out.live(live_line(facts, self.out.width()))
        elif self.out.heartbeat and time.monotonic() - self._last > HEARTBEAT:
            loss = "" if facts.get("loss") is None else f" train_loss={number(float(facts['loss']))}"
            epoch, step = f"{facts['epoch']}/{facts['max_epochs']}", f"{facts['step']}/{facts['total_steps']}"
            self._plain(f"epoch {epoch} step {step}{loss}")

    def _tell_loaded(self) -> None:
        """One line for all programs that needed no compile: why nothing is said of them, and nothing is waited for."""
        if self._loaded:
            seconds = f"({sum(self._loaded.values()):.1f}s)"
            self._both(f"loaded from the store: {', '.join(self._loaded)} {seconds}")
            self._loaded.clear()

    def on_epoch(self, facts: Mapping[str, Any]) -> None:
        self.out.event("epoch", facts)
        self._tell_loaded()
        compiled = float(facts.get("compile_seconds") or 0.0)
        if self.out.screen:
            self._epoch_row(facts, compiled)
        extra = f" compile={compiled:.1f}s" if compiled >= 0.05 else ""
        best = " best" if facts.get("best") else ""
        head = f"epoch {facts['epoch']}/{facts['max_epochs']}"
        self._plain(f"{head} {metrics_text(facts['metrics'])} time={facts['seconds']:.1f}s{extra}{best}")

    def _epoch_row(self, facts: Mapping[str, Any], compiled: float) -> None:
        metrics = facts["metrics"]
        if not self._columns:
            room = max((self.out.width() - 6 - 9 - 14) // (COLUMN + 2), 1)
            self._columns = tuple(metrics)[:room]
            names = "".join(f"  {name:>{COLUMN}}" for name in self._columns)
            self.out.say(paint(f" epoch{names}     time", "head"))
            if len(metrics) > room:
                self.out.say(f"       (+{len(metrics) - room} metrics in metrics.jsonl)")
        cells = [f"  {number(metrics.get(name, '')):>{max(COLUMN, len(name))}}" for name in self._columns]
        marks = f"  compile {compiled:.1f}s" if compiled >= 0.05 else ""
        marks += f"  {paint('best', 'good')}" if facts.get("best") else ""
        self.out.say(f"{facts['epoch']:>6}{''.join(cells)}  {facts['seconds']:>6.1f}s{marks}")

    def on_checkpoint(self, facts: Mapping[str, Any]) -> None:
        self.out.event("checkpoint", {**facts, "path": relative(facts["path"])})
        line = f"checkpoint step={facts['step']} epoch={facts['epoch']} {relative(facts['path'])}"
        if self.out.screen and self.out.verbose:
            self.out.say(line)
        self._plain(line)

    def on_stopping(self, facts: Mapping[str, Any]) -> None:
        """The first signal: said at once, since what is waited for may take long."""
        self.out.event("stopping", facts)
        work, program = facts["work"], facts["compiling"]
        first = f"the {work} under way is finished first"
        if program:
            first = f"the {program} program is being compiled, which cannot be cut short"
        again = "leaves at once" if work == "batch" else "leaves without saving"
        self._both(f"stopping: {first}; Ctrl-C again {again}")

    def on_warning(self, facts: Mapping[str, Any]) -> None:
        self.out.event("warning", facts)
        self.out.log(f"warning: {facts['message']}")
        self.out.warn(str(facts["message"]))

    # -- the end

    def done(self, outcome: Any, name: str) -> None:
        """The summary: where the run is and what to do next."""
        best, latest = outcome.best, outcome.latest
        facts = {
            "status": outcome.status,
            "exit_code": outcome.exit_code,
            "epochs": outcome.epochs,
            "steps": outcome.steps,
            "seconds": outcome.seconds,
            "best": _told(best),
            "latest": _told(latest),
            "run_dir": relative(outcome.run.path),
        }
        self.out.event("done", facts)
        if self.out.screen:
            for line in self._end_lines(outcome, name):
                self.out.say(line)
        found = f" best_epoch={best['epoch']} {best['metric']}={number(best['value'])}" if best else ""
        self._plain(f"done status={outcome.status} epochs={outcome.epochs} steps={outcome.steps}{found}")
        self._plain(f"next {self._next(outcome, name)}")

    def _end_lines(self, outcome: Any, name: str) -> list[str]:
        best, latest = outcome.best, outcome.latest
        head = "done" if outcome.status == "finished" else outcome.status
        tail = f"  best epoch {best['epoch']}  {best['metric']} {number(best['value'])}" if best else ""
        lines = ["", f"{paint(head, 'head')}  {outcome.epochs} epochs in {clock(outcome.seconds)}{tail}", ""]
        kept: dict[str, list[str]] = {}
        for found, word in ((best, "best"), (latest, "latest")):
            if found:
                kept.setdefault(relative(found["path"]), []).append(word)
        lines += [f"checkpoint  {path}   ({', '.join(words)})" for path, words in kept.items()]
        return [*lines, f"next        {self._next(outcome, name)}"]

    def _next(self, outcome: Any, name: str) -> str:
        run = outcome.run.id if outcome.run.path.parent.parent.name == "runs" else relative(outcome.run.path)
        if outcome.status == "finished":
            return f"nitro validate {name} --run {run}"
        return f"nitro train {name} --resume={run}"

    # -- lines

    def _both(self, line: str) -> None:
        """A line for terminal and file alike."""
        if self.out.screen:
            self.out.say(line)
        self._plain(line)

    def _plain(self, line: str) -> None:
        """A line for files: stderr where that is not a terminal, and console.log always."""
        self._last = time.monotonic()
        self.out.log(line)
        if not self.out.screen:
            word, space, rest = line.partition(" ")
            self.out.say(f"{self.out.stamp()}{paint(word, 'word')}{space}{rest}")


def _told(checkpoint: dict[str, Any] | None) -> dict[str, Any] | None:
    return {**checkpoint, "path": relative(checkpoint["path"])} if checkpoint and checkpoint.get("path") else checkpoint
