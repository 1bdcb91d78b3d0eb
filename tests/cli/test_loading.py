"""Finding and loading the experiment from the command line (command-line rows 1 to 10 and 55 to 66)."""

from __future__ import annotations

import json
import re

import pytest

from .conftest import MYEXP, SMALL, write

TWO = """
from nitro_cli import Experiment
from .base import Base

class A(Base):
    width: int = 1

class B(Base):
    width: int = 2
"""


def tidy(text: str, folder) -> str:
    return text.replace(str(folder), "<here>")


@pytest.mark.parametrize("spec", ["experiments/myexp.py", "experiments.myexp", "myexp", "myexp:MyExp"])
def test_an_experiment_by_file_by_module_and_by_name(here, nitro, spec):
    result = nitro("show", spec, "--json", "--preset", "current")
    assert result.code == 0, result.err
    assert result.event("config")["preset"] == "current"


def test_from_the_wrong_folder_the_folders_searched_are_named(folder, nitro, monkeypatch):
    write(folder, "experiments/elsewhere.py", SMALL)
    monkeypatch.chdir(folder / "experiments")
    result = nitro("train", "elsewhere")
    assert result.code == 2
    assert str(folder / "experiments" / "experiments") in result.err


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "--bogus"],
        ["train", "--bogus", "5"],
        ["train"],
        ["train", "mexp"],
        ["train", "myexp", "--preset", "curent"],
        ["train", "myexp", "--resum", "auto"],
        ["train", "myexp", "--learningrate", "0.1"],
        ["train", "myexp", "--max-epoch", "5"],
        ["train", "myexp", "--batch", "8"],
        ["train", "myexp", "other"],
        ["list", "myexp"],
        ["validate", "myexp", "--weights", "best"],
        ["validate", "myexp", "--weights", "fresh", "--run", "latest"],
        ["validate", "myexp"],
        ["predict", "myexp"],
    ],
    ids=" ".join,
)
def test_usage_errors(here, nitro, argv, snapshot, monkeypatch, tmp_path):
    result = nitro(*argv)
    assert (result.code, result.out) == (2, "")
    assert tidy(result.err, here) == snapshot


def test_a_usage_error_as_json(here, nitro):
    result = nitro("train", "myexp", "--preset", "curent", "--json")
    assert result.code == 2
    (event,) = result.events
    assert (event["event"], event["exit_code"]) == ("error", 2)
    assert "curent" in event["message"]
    assert event["suggestions"] == ["current"]
    assert result.err.startswith("error: ")


def test_a_bad_option_as_json(here, nitro):
    (event,) = nitro("train", "myexp", "--max-epochs", "2.5", "--json").events
    assert (event["event"], event["field"], event["value"], event["type"]) == ("error", "max_epochs", "2.5", "int")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing", "import batrachomyomachy\n"),
        ("syntax", "class MyExp(:\n    pass\n"),
        ("raises", "def deep():\n    raise ValueError('at import')\n\ndeep()\n"),
        ("default", SMALL.replace('"a", "b"] = "a"', '"a", "b"] = "c"')),
        ("hookless", "from nitro_cli import Experiment\n\nclass E(Experiment):\n    def forwad(self): ...\n"),
    ],
)
def test_an_experiment_that_cannot_be_loaded(folder, nitro, name, text, snapshot):
    write(folder, f"experiments/{name}.py", text)
    result = nitro("train", name)
    assert (result.code, result.out) == (3, "")
    assert "Traceback" not in result.err
    assert "nitro_cli/" not in result.err
    assert f"experiments/{name}.py:" in result.err
    assert tidy(result.err, folder) == snapshot


def test_traceback_shows_everything(folder, nitro):
    write(folder, "experiments/alltb.py", "import batrachomyomachy\n")
    for switch in ("--traceback", "--debug"):
        result = nitro("train", "alltb", switch)
        assert result.code == 3
        assert "Traceback (most recent call last)" in result.err


def test_several_experiments_in_a_file(folder, nitro, snapshot):
    write(folder, "experiments/base.py", SMALL.replace("MyExp", "Base"))
    write(folder, "experiments/two.py", TWO)
    result = nitro("train", "two")
    assert result.code == 2
    assert "two:A" in result.err
    assert "two:B" in result.err
    assert "Base" not in result.err
    assert nitro("train", "two:A", "--width", "x").err == snapshot


def test_prints_at_import_stay_out_of_stdout(folder, nitro):
    write(folder, "experiments/noisy.py", "print('noise')\n" + SMALL)
    result = nitro("train", "noisy", "--json", "--max-epochs", "x")
    assert [json.loads(line)["event"] for line in result.out.splitlines()] == ["error"]
    assert "noise" in result.err


def test_list_imports_nothing(folder, nitro):
    write(folder, "experiments/one.py", '"""Module."""\nraise SystemExit("imported")\n')
    write(folder, "experiments/two.py", SMALL.replace("(Experiment):\n", '(Experiment):\n    """Says [a] thing."""\n'))
    write(folder, "presets/two.toml", "[current]\n[old]\n")
    result = nitro("list")
    assert result.code == 0
    lines = [line.split("\t") for line in result.out.splitlines()]
    assert ["two", "current, old", "Says [a] thing."] in lines
    events = nitro("list", "--json").events
    assert events[-1] == {"event": "done", "status": "finished", "exit_code": 0}
    assert {"two"} <= {event["name"] for event in events[:-1]}
    shown = nitro("list", tty=True).out
    assert re.search(r"two +current, old +Says \[a\] thing\.", shown)


def test_list_where_there_is_nothing(folder, nitro):
    result = nitro("list")
    assert (result.code, result.out) == (0, "")
    assert "no experiments" in result.err


def test_a_knob_that_a_plain_class_lacks_is_explained(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    hooks = "".join(f"    {name} = MyExp.{name}\n" for name in ("build_data", "build_model", "forward", "loss"))
    write(folder, "experiments/plain.py", f"from .myexp import MyExp\n\nclass Plain:\n    seed: int = 0\n{hooks}")
    result = nitro("train", "plain", "--learning-rate", "0.1", "--seeed", "3")
    assert result.code == 2
    assert "Plain has no field 'learning_rate': declare it, or derive from nitro_cli.Experiment" in result.err
    assert "did you mean --seed?" in result.err
