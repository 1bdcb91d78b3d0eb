"""The boundary: whatever happens, an exit code and a short text."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from nitro_cli.cli import main
from nitro_cli.cli.commands import list as list_command

from .conftest import Result


@pytest.fixture
def raising(monkeypatch, nitro):
    """``raising(error, *words)``: ``nitro list`` with a command that raises ``error``."""

    def call(error: BaseException, *words: str) -> Result:
        monkeypatch.setattr(list_command, "run", Mock(side_effect=error))
        return nitro("list", *words)

    return call


def report_of(result: Result) -> Path:
    found = re.search(r"\S+nitro-\S+\.txt", result.err)
    assert found
    return Path(found.group())


def test_a_fault_of_nitro(raising):
    result = raising(ZeroDivisionError("inside"))
    assert (result.code, result.out) == (70, "")
    assert result.err.startswith("fault: nitro itself failed with ZeroDivisionError: inside\n")
    assert "Traceback" not in result.err
    assert "ZeroDivisionError" in report_of(result).read_text()
    report_of(result).unlink()


def test_a_fault_as_json(raising):
    result = raising(ZeroDivisionError("inside"), "--json")
    (event,) = result.events
    assert (event["event"], event["kind"], event["exit_code"]) == ("error", "fault", 70)
    Path(event["report"]).unlink()


def test_debug_shows_all_of_it(raising):
    result = raising(ZeroDivisionError("inside"), "--debug")
    assert "Traceback (most recent call last)" in result.err
    report_of(result).unlink()


def test_ctrl_c(raising):
    result = raising(KeyboardInterrupt(), "--json")
    assert result.code == 130
    assert result.events == [{"event": "error", "exit_code": 130, "kind": "interrupted"}]
    assert result.err == "interrupted\n"


def test_ctrl_c_is_not_lost_where_python_drops_exceptions(monkeypatch, nitro):
    class Dropping:
        def __del__(self):
            raise KeyboardInterrupt

    def run(session):
        Dropping()  # dropped here, as in a callback of the garbage collector
        for _ in range(1000):
            time.sleep(0.01)
        raise AssertionError("never interrupted")

    monkeypatch.setattr(list_command, "run", run)
    before = sys.unraisablehook
    assert nitro("list").code == 130
    assert sys.unraisablehook is before


def test_version(nitro):
    from nitro_cli import __version__

    assert nitro("--version").out == f"nitro {__version__}\n"


def test_main_leaves_with_the_code(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["nitro", "nonsense"])
    with pytest.raises(SystemExit) as left:
        main.main()
    assert left.value.code == 2
