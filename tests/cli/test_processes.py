"""Signals, pipes and terminals, with real processes."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import nitro_cli
from nitro_cli.cli.console import plain

from .conftest import MYEXP, spawn, write

SLOW = MYEXP.replace("        batches = [", "        self.announce()\n        batches = [").replace(
    "    def build_model",
    """    def announce(self):
        import pathlib
        pathlib.Path("started").touch()

    def build_model""",
)
PACE = '        return {"train": batches[:2]'
SLOW = (
    SLOW.replace(PACE, PACE.replace("batches[:2]", "Paced(batches * 100)"))
    + """

class Paced:
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        import time
        for batch in self.batches:
            time.sleep(0.02)
            yield batch
"""
)
SLOW = SLOW.replace("    (0, 4, 8)]", "    (0, 4)]").replace("for i in (0, 4, 8)", "for i in (0, 4)")


@pytest.fixture(scope="module")
def slow(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("slow")
    write(root, "experiments/slow.py", SLOW)
    return root


@pytest.fixture
def start(slow):
    """``start(*words)`` -> a process in the slow project, that does not outlive the test."""
    started: list[subprocess.Popen[bytes]] = []

    def call(*words: str) -> subprocess.Popen[bytes]:
        started.append(spawn(*words, cwd=slow))
        return started[-1]

    yield call
    for process in started:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def until(process: subprocess.Popen[bytes], word: bytes) -> bytes:
    """Read stdout of ``process`` until a line holds ``word``."""
    assert process.stdout is not None
    for line in process.stdout:
        if word in line:
            return line
    raise AssertionError(f"{word!r} never came: {process.stderr.read().decode() if process.stderr else ''}")


def finished(process: subprocess.Popen[bytes]) -> tuple[int, list[dict], str]:
    out, err = process.communicate()
    return process.returncode, [json.loads(line) for line in out.splitlines()], err.decode()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_ends_the_step_saves_and_says_so(slow, start, number, code):
    process = start("train", "slow", "--json", "--max-epochs", "50")
    run = slow / json.loads(until(process, b'"event": "run"'))["run_dir"]
    until(process, b'"event": "compile"')
    until(process, b'"event": "compile"')
    process.send_signal(number)
    got, events, _ = finished(process)
    assert got == code
    assert (events[-1]["event"], events[-1]["status"], events[-1]["exit_code"]) == ("done", "interrupted", code)
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("interrupted", code)
    assert "next nitro train slow --resume=" in (run / "console.log").read_text()


def test_ctrl_c_before_anything_started(slow, start):
    process = start("train", "slow", "--json", "--max-epochs", "50")
    (slow / "started").unlink(missing_ok=True)
    while not (slow / "started").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    code, events, err = finished(process)
    assert code == 130
    assert events[-1]["exit_code"] == 130
    assert "Traceback" not in err


# Stays in set-up, in a sleep of C code that no signal handler of Python's interrupts.
SETTING_UP = SLOW.replace(
    'pathlib.Path("started").touch()',
    'pathlib.Path("started").touch(); import ctypes; ctypes.CDLL(None).sleep(60); ctypes.CDLL(None).sleep(60)',
)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_before_anything_started_ends_at_once_with_a_last_event(slow, start, number, code):
    write(slow, "experiments/setting_up.py", SETTING_UP)
    (slow / "started").unlink(missing_ok=True)
    process = start("train", "setting_up", "--json", "--max-epochs", "50")
    while not (slow / "started").exists():
        assert process.poll() is None
    process.send_signal(number)
    got, events, err = finished(process)
    assert got == code
    assert events[-1]["event"] == "error"
    assert (events[-1]["exit_code"], events[-1]["kind"]) == (code, "interrupted")
    assert err == f"ended by {signal.Signals(number).name}\n"


TRACING = MYEXP.replace(
    "        return ((outputs",
    """        import pathlib, time
        pathlib.Path("tracing").touch()
        time.sleep(1.0)
        return ((outputs""",
)


@pytest.mark.parametrize(
    ("words", "program", "again"),
    [
        (["train", "tracing"], "gradient", "leaves without saving"),
        (["validate", "tracing", "--weights", "fresh"], "loss", "leaves at once"),
    ],
    ids=["train", "validate"],
)
def test_ctrl_c_while_a_program_compiles_says_that_it_waits_for_it(slow, start, words, program, again):
    write(slow, "experiments/tracing.py", TRACING)
    (slow / "tracing").unlink(missing_ok=True)
    process = start(*words)
    while not (slow / "tracing").exists():
        assert process.poll() is None
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode == 130
    said = f"the {program} program is being compiled, which cannot be cut short; Ctrl-C again {again}\n"
    assert said in err.decode()


def test_a_reader_that_leaves_ends_a_training_like_an_interrupt(slow, start):
    process = start("train", "slow", "--json", "--max-epochs", "50")
    run = slow / json.loads(until(process, b'"event": "run"'))["run_dir"]
    until(process, b'"event": "compile"')
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait() == 141
    assert "Traceback" not in err
    assert "Broken" not in err
    assert json.loads((run / "run.json").read_text())["status"] == "interrupted"


@pytest.mark.parametrize("words", [["show", "slow", "-v"], ["list"], ["train", "slow", "--help"], ["trainn", "--json"]])
def test_a_reader_that_is_gone_is_no_error(start, words):
    process = start(*words)
    process.stdout.close()
    err = process.stderr.read().decode()
    assert process.wait() == 141
    assert "Traceback" not in err
    assert "Broken" not in err
    assert err == "" or words[-1] == "--json"


def on_a_terminal(cwd: Path, *words: str, **env: str) -> tuple[int, str]:
    """Run ``nitro`` on a pseudo-terminal of 80 columns; its exit code, and all that it drew."""
    ours, theirs = pty.openpty()
    settings = {"COLUMNS": "80", "TERM": "xterm", "CI": "", **env}
    process = spawn(*words, cwd=cwd, stdout=theirs, stderr=theirs, stdin=theirs, env=settings)
    os.close(theirs)
    drawn = b""
    while True:
        ready, _, _ = select.select([ours], [], [], 60)
        try:
            piece = os.read(ours, 65536) if ready else b""
        except OSError:  # the other side has closed
            piece = b""
        if not piece:
            break
        drawn += piece
    os.close(ours)
    return process.wait(), drawn.decode()


def test_a_real_terminal_gets_the_table_the_bar_and_the_summary(tmp_path):
    write(tmp_path, "experiments/myexp.py", MYEXP)
    code, drawn = on_a_terminal(tmp_path, "train", "myexp", "--max-epochs", "2")
    assert code == 0, drawn
    for piece in (
        "config (1 overridden",
        "binding",
        " epoch ",
        "train_loss",
        "done",
        "checkpoint  runs/myexp/",
        "next ",
    ):
        assert piece in plain(drawn)
    assert "\repoch " in drawn
    assert "\x1b[" in drawn


def test_no_color_on_a_real_terminal_has_no_escape_at_all(tmp_path):
    write(tmp_path, "experiments/myexp.py", MYEXP)
    code, drawn = on_a_terminal(tmp_path, "train", "myexp", "--max-epochs", "1", NO_COLOR="1")
    assert code == 0, drawn
    assert "\x1b" not in drawn
    assert "\repoch " in drawn


def test_closed_streams_are_no_error(slow):
    """``nitro ... >&- 2>&-``, as some schedulers start programs."""
    command = f"{sys.executable} -m nitro_cli list"
    env = {**os.environ, "PYTHONPATH": str(Path(nitro_cli.__file__).parents[1])}
    for redirection in (">&-", "2>&-", ">&- 2>&-"):
        done = subprocess.run(["sh", "-c", f"{command} {redirection}"], cwd=slow, env=env, capture_output=True)
        assert (done.returncode, done.stderr) == (0, b""), redirection


def test_a_second_ctrl_c_leaves_at_once_and_the_run_no_longer_says_that_it_runs(slow, start):
    write(
        slow,
        "experiments/stuck.py",
        SLOW.replace("time.sleep(0.02)", "time.sleep(0.02 if batch is self.batches[0] else 60)"),
    )
    process = start("train", "stuck", "--json", "--max-epochs", "50")
    run = slow / json.loads(until(process, b'"event": "run"'))["run_dir"]
    until(process, b'"event": "compile"')
    until(process, b'"event": "compile"')
    process.send_signal(signal.SIGINT)
    assert json.loads(until(process, b'"event": "stopping"'))["signal"] == signal.SIGINT
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) == 130
    facts = json.loads((run / "run.json").read_text())
    assert (facts["status"], facts["exit_code"]) == ("killed", 130)
