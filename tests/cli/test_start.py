"""What a start does to the process: the garbage collector, and the event that says that the first step is over."""

from __future__ import annotations

import gc
import json

import pytest

from nitro_cli.cli import garbage

from .conftest import MYEXP, spawn, write

TOLD = MYEXP.replace("import numpy as np", "import gc\nimport sys\n\nimport numpy as np\n\nsay = sys.stderr.write", 1)
TOLD = TOLD.replace(
    "    def build_data(self, dist):\n",
    '    def build_data(self, dist):\n        say(f"hook {gc.isenabled()} {gc.get_freeze_count() > 10_000}\\n")\n',
)
TOLD += '\nsay(f"import {gc.isenabled()}\\n")\n'


def finish(*words: str, cwd) -> tuple[int, str, str]:
    process = spawn(*words, cwd=cwd)
    out, err = process.communicate()
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
def told(tmp_path):
    write(tmp_path, "experiments/told.py", TOLD)
    return tmp_path


def test_imports_run_without_the_collector_and_hooks_with_it(told):
    code, _, err = finish("show", "told", cwd=told)
    assert code == 0, err
    assert "import False" in err
    assert "hook True True" in err


def test_an_experiment_that_switches_the_collector_on_keeps_it_on(told):
    path = told / "experiments" / "told.py"
    path.write_text("import gc\ngc.enable()\n" + path.read_text())
    code, _, err = finish("show", "told", cwd=told)
    assert code == 0, err
    assert "import True" in err
    assert "hook True True" in err


def test_a_command_called_from_python_leaves_the_collector_alone(nitro, here):
    frozen = gc.get_freeze_count()
    assert nitro("show", "myexp").code == 0
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


def test_a_collector_that_is_off_already_stays_off(monkeypatch):
    calls: list[str] = []
    monkeypatch.setattr(gc, "isenabled", lambda: False)
    monkeypatch.setattr(gc, "enable", lambda: calls.append("enable"))
    monkeypatch.setattr(gc, "freeze", lambda: calls.append("freeze"))
    garbage.pause()
    garbage.resume()
    assert calls == []


def test_the_first_step_is_told_once_after_its_programs(nitro, folder):
    write(folder, "experiments/myexp.py", MYEXP)
    result = nitro("train", "myexp", "--json", "--max-epochs", "2")
    assert result.code == 0, result.err
    names = [event["event"] for event in result.events]
    assert names.count("first_step") == 1
    assert result.event("first_step") == {"event": "first_step", "step": 1}
    assert names.index("run") < names.index("first_step") < names.index("epoch")
    resumed = nitro("train", "myexp", "--json", "--resume", "--max-epochs", "3")
    assert resumed.event("first_step")["step"] == 5


def test_no_first_step_is_told_where_none_was_made(nitro, folder):
    broken = MYEXP.replace('"train": batches[:2]', '"train": Broken(batches[:2])')
    broken += """

class Broken(list):
    def __getitem__(self, index):
        raise OSError("the data is gone")

    def __iter__(self):
        raise OSError("the data is gone")
"""
    write(folder, "experiments/myexp.py", broken)
    result = nitro("train", "myexp", "--json")
    assert result.code != 0
    assert "first_step" not in [json.loads(line)["event"] for line in result.out.splitlines()]
