"""Help and completion: what they show, and what they do not import."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from .conftest import SMALL, spawn, write

HEAVY = ("jax", "flax", "optax", "orbax")


def rows(page: str) -> list[str]:
    return [line.strip("│ ") for line in page.splitlines()]


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["train", "--help"],
        ["train", "light", "--help"],
        ["train", "light", "--max-epochs", "x", "--bogus"],
        ["train", "--bogus"],
        ["nonsense"],
        ["list"],
        ["--version"],
    ],
)
def test_no_heavy_import_for_help_and_usage_errors(project, argv):
    write(project, "other/experiments/light.py", SMALL)
    code = (
        "import sys, warnings; from nitro_cli.cli.main import run; run(sys.argv[1:]);"
        f"print('LOADED', [name for name in {HEAVY} if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *argv], cwd=project / "other", capture_output=True, text=True, check=True
    )
    assert "LOADED []" in done.stdout


def test_help_lists_the_commands(nitro):
    result = nitro("--help")
    assert result.code == 0
    assert result.err == ""
    for command in ("train", "validate", "evaluate", "predict", "cache-stats", "list", "show"):
        assert re.search(rf"^. {command} ", result.out, re.MULTILINE)


def test_help_without_words(nitro):
    assert nitro() == nitro("--help")


def test_help_of_an_experiment(here, nitro, snapshot):
    result = nitro("train", "myexp", "--help", COLUMNS="110")
    assert result.code == 0
    panels = result.out.split("╭─")
    assert "Run knobs" in panels[4]  # its rows are the base class's own business
    assert "╭─".join(panels[:4] + panels[5:]) == snapshot


def test_help_shows_exactly_the_fields_of_the_experiment(here, nitro):
    from nitro_cli.experiment.discovery import find_experiment
    from nitro_cli.experiment.traits import config_metadata, own_fields

    page = nitro("train", "myexp", "--help", COLUMNS="200").out
    E = find_experiment("myexp").cls
    shown = [
        {name.replace("-", "_").removeprefix("field_") for name in re.findall(r"^│ +--([a-z-]+)", panel, re.MULTILINE)}
        for panel in page.split("╭─")[3:5]
    ]
    assert shown == [set(own_fields(E)), set(config_metadata(E)) - set(own_fields(E))]


def test_a_pair_of_options_shows_one_default_and_named_negatives(here, nitro):
    page = nitro("train", "myexp", "--help", COLUMNS="200").out
    (row,) = [line for line in rows(page) if line.startswith("--use-bn")]
    assert row.count("default") == 1
    assert "[sic]" in row
    negatives = re.findall(r"--no-[^ ]*", page)
    assert negatives[:2] == ["--no-use-bn", "--no-maybe"]
    assert "--no-check-divergence" in negatives
    assert "--no-" not in negatives


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_help_in_encodings_without_boxes(here, nitro, encoding):
    result = nitro("train", "myexp", "--help", encoding=encoding)
    assert result.code == 0
    assert "--learning-rate" in result.out
    assert "\\u" not in result.out


@pytest.mark.parametrize(
    ("tty", "env", "argv", "expected"),
    [
        (True, {}, [], True),
        (False, {}, [], False),
        (True, {"NO_COLOR": "1"}, [], False),
        (True, {"TERM": "dumb"}, [], False),
        (False, {"FORCE_COLOR": "1"}, [], True),
        (False, {"FORCE_COLOR": "1"}, ["--color", "never"], False),
    ],
)
def test_colour_of_help(here, nitro, tty, env, argv, expected):
    result = nitro("train", "--help", *argv, tty=tty, **env)
    assert ("\x1b" in result.out) is expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [("nitro train my", ["myexp"]), ("nitro tr", ["train"]), ("nitro train myexp --preset cur", ["current"])],
)
def test_completion_imports_no_experiment_and_is_clean(folder, words, expected):
    write(folder, "experiments/myexp.py", SMALL + "print('noise')\nraise SystemExit('imported')\n")
    write(folder, "presets/myexp.toml", "[current]\n[other]\n")
    env = {"_NITRO_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    out, err = spawn(cwd=folder, env=env).communicate()
    assert out.decode().split() == expected
    assert err == b""


def test_a_broken_experiment_is_told_instead_of_its_help(folder, nitro):
    write(folder, "experiments/broken.py", "import batrachomyomachy\n")
    result = nitro("train", "broken", "--help")
    assert result.code == 3
    assert "batrachomyomachy" in result.err
    assert result.out == ""
