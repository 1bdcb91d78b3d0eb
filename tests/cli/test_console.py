"""Where words go, in which colour, and what a broken pipe does."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest

from nitro_cli.cli.console import Output, Stray, paint, plain, silence
from nitro_cli.cli.progress import live_line
from nitro_cli.cli.render import number, table

from .conftest import Screen

FACTS = {
    "epoch": 4,
    "max_epochs": 40,
    "step": 75,
    "step_in_epoch": 9,
    "steps_in_epoch": 22,
    "total_steps": 920,
    "loss": 0.2117,
    "rate": 31.0,
}


def output(tty=False, env=(), encoding="utf-8", **values):
    return Output(values, Screen(encoding, tty), Screen(encoding, tty), dict(env))


@pytest.mark.parametrize(
    ("tty", "env", "values", "expected"),
    [
        (True, {}, {}, True),
        (False, {}, {}, False),
        (True, {"NO_COLOR": "1"}, {}, False),
        (True, {"NO_COLOR": ""}, {}, True),
        (False, {"FORCE_COLOR": "1"}, {}, True),
        (True, {"TERM": "dumb"}, {}, False),
        (True, {"FORCE_COLOR": "1", "NO_COLOR": "1"}, {}, False),
        (True, {"FORCE_COLOR": "1"}, {"color": "never"}, False),
        (False, {"NO_COLOR": "1", "TERM": "dumb"}, {"color": "always"}, True),
    ],
)
def test_when_there_is_colour(tty, env, values, expected):
    out = output(tty, env, **values)
    out.say(paint("words", "head"))
    out.result(paint("words", "good"))
    assert ("\x1b" in out.stderr.text()) is expected
    assert ("\x1b" in out.stdout.text()) is expected


@pytest.mark.parametrize(
    ("tty", "env", "values", "expected"),
    [
        (True, {}, {}, True),
        (False, {}, {}, False),
        (True, {"CI": "true"}, {}, False),
        (True, {"TERM": "dumb"}, {}, False),
        (False, {}, {"progress": "bar"}, True),
        (True, {}, {"progress": "lines"}, False),
        (True, {}, {"progress": "none"}, False),
        (True, {}, {"quiet": 1}, False),
        (True, {}, {"json": True}, False),
    ],
)
def test_when_there_is_a_live_line(tty, env, values, expected):
    out = output(tty, env, **values)
    out.live("moving")
    assert ("\r" in out.stderr.text()) is expected


def test_a_line_clears_the_live_one_and_needs_no_escape_for_it():
    out = output(True, {"NO_COLOR": "1"})
    out.live("moving")
    out.say("still")
    assert out.stderr.text() == "\rmoving\r" + " " * 6 + "\rstill\n"


def test_prints_of_the_experiment_go_to_stderr_above_the_live_line(monkeypatch):
    out = output(True)
    monkeypatch.setattr("sys.stderr", out.stderr)
    out.live("moving")
    print("hello", file=Stray(out))
    assert out.stderr.text().endswith("\rhello\n")
    assert out.stdout.text() == ""


@pytest.mark.parametrize(("quiet", "result", "warning"), [(0, True, True), (1, True, True), (2, False, False)])
def test_quiet(quiet, result, warning):
    out = output(quiet=quiet)
    out.say("words")
    out.warn("careful")
    out.result("answer")
    assert ("words" in out.stderr.text()) is (quiet == 0)
    assert ("careful" in out.stderr.text()) is warning
    assert ("answer" in out.stdout.text()) is result


def test_json_is_strict_and_alone_on_stdout():
    out = output(json=True)
    out.say("words")
    out.result("answer")
    out.event("epoch", {"metrics": {"loss": float("nan")}, "path": os.path, "many": (1, 2)})
    out.fail("error: it broke")
    assert json.loads(out.stdout.text())["metrics"] == {"loss": None}
    assert out.stderr.text() == "error: it broke\n"


def test_the_log_has_what_was_said_before_it_was_opened(tmp_path):
    out = output()
    out.log(paint("early", "head"))
    out.open_log(tmp_path / "console.log")
    out.log("late")
    out.close()
    lines = (tmp_path / "console.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == ["early", "late"]


def test_a_reader_that_went_away_ends_like_ctrl_c_once(monkeypatch):
    class Gone(Screen):
        def write(self, text):
            raise BrokenPipeError

    raised: list[int] = []
    monkeypatch.setattr(signal, "raise_signal", raised.append)
    out = Output({}, Gone("utf-8", False), Screen("utf-8", False), {})
    out.result("one")
    out.result("two")
    assert raised == [signal.SIGINT]
    assert out.broken


@pytest.mark.parametrize("width", [120, 80, 59, 30, 12])
def test_the_live_line_fits(width, snapshot):
    line = live_line(FACTS, width)
    assert len(line) < width
    assert line == snapshot


@pytest.mark.parametrize("width", [None, 80, 20, 5])
def test_a_table_drops_columns_and_cuts_nothing(width, snapshot):
    rows = [("runs/myexp/20261130-112931-k3f9", 3, "first use"), ("short", 12345678, "width 1 -> 2")]
    assert plain("\n".join(table(("run", "misses", "why"), rows, width))) == snapshot


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0871, "0.0871"),
        (1.2e-5, "1.2000e-05"),
        (0.0, "0.0000"),
        (float("nan"), "nan"),
        (3, "3"),
        (True, "True"),
        (1e9, "1.0000e+09"),
    ],
)
def test_numbers(value, text):
    assert number(value) == text


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_log_that_cannot_be_written_is_given_up_with_one_warning(tmp_path):
    out, err = io.StringIO(), io.StringIO()
    output = Output({}, out, err, {})
    output.log("before")
    (tmp_path / "console.log").symlink_to("/dev/full")
    output.open_log(tmp_path / "console.log")
    output.log("after")
    output.fail("error: the disk is full")
    output.close()
    assert err.getvalue().count("console.log is no longer written: No space left on device") == 1
    assert "error: the disk is full" in err.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_stderr_that_cannot_be_written_ends_nothing_and_stdout_does():
    with open("/dev/full", "w") as full:
        output = Output({}, io.StringIO(), full, {})
        output.say("a line")
        output.say("another")
    with open("/dev/full", "w") as results:
        output = Output({}, results, io.StringIO(), {})
        with pytest.raises(OSError, match="No space"):
            output.result("an answer")
        silence(results)
