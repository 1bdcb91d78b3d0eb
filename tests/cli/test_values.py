"""Values on the command line, as ``show`` reports them (command-line rows 11 to 34)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from .conftest import MYEXP, SMALL, write


@pytest.fixture
def show(here, nitro):
    """``show("--max-epochs", "3")`` -> field name -> its row in the ``config`` event."""

    def call(*words: str) -> dict[str, Any]:
        result = nitro("show", "myexp", "--json", *words)
        assert result.code == 0, result.err
        return {row["name"]: row for row in result.event("config")["fields"]}

    return call


@pytest.fixture
def refused(here, nitro):
    """The text of the usage error that the words make. Nothing may have been written to disk."""

    def call(*words: str) -> str:
        before = sorted(here.rglob("*.*"))
        result = nitro("train", "myexp", *words)
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: ")
        assert "Traceback" not in result.err
        assert [
            path for path in sorted(here.rglob("*.*")) if path not in before and "__pycache__" not in str(path)
        ] == []
        return result.err

    return call


@pytest.mark.parametrize(
    ("words", "field", "value"),
    [
        (["--learning-rate", "1e-05"], "learning_rate", 1e-05),
        (["--learning-rate", "1"], "learning_rate", 1.0),
        (["--grad-clip", "1e-5"], "grad_clip", 1e-05),
        (["--smoothing", "-1e-3"], "smoothing", -1e-3),
        (["--smoothing=-1e-3"], "smoothing", -1e-3),
        (["--hidden", "-1,-2"], "hidden", [-1, -2]),
        (["--hidden", "[]"], "hidden", []),
        (["--hidden", "1,2"], "hidden", [1, 2]),
        (["--hidden", "[1, 2, 3]"], "hidden", [1, 2, 3]),
        ([], "layers", None),
        (["--layers", "[]"], "layers", []),
        (["--image-shape", "3,4"], "image_shape", [3, 4]),
        (["--warmup", "none"], "warmup", None),
        (["--warmup", "1_000"], "warmup", 1000),
        (["--use-bn"], "use_bn", True),
        (["--no-use-bn"], "use_bn", False),
        (["--use-bn=false"], "use_bn", False),
        (["--use-bn=true"], "use_bn", True),
        ([], "maybe", None),
        (["--maybe"], "maybe", True),
        (["--no-maybe"], "maybe", False),
        (["--maybe=none"], "maybe", None),
        (["--run-tag", "a=b=c"], "run_tag", "a=b=c"),
        (["--run-tag=-x"], "run_tag", "-x"),
        (["--note", "none"], "note", "none"),
        (["--unset", "note"], "note", None),
        (["--field-split", "other"], "split", "other"),
        (["--max_epochs", "7"], "max_epochs", 7),
    ],
)
def test_a_value_is_read_by_its_fields_type(show, words, field, value):
    row = show(*words)[field]
    assert row["value"] == value
    assert type(row["value"]) is type(value)
    assert row["source"] == ("cli" if words else "default")


@pytest.mark.parametrize("words", [["--size", "l"], ["--size", "LARGE"]])
def test_an_enum_by_value_and_by_name(show, words):
    assert "LARGE" in str(show(*words)["size"]["value"]) or show(*words)["size"]["value"] == "l"


@pytest.mark.parametrize(
    "words",
    [
        ["--max-epochs", "1e3"],
        ["--max-epochs", "2.5"],
        ["--max-epochs", "2.0"],
        ["--max-epochs", "true"],
        ["--max-epochs", "inf"],
        ["--max-epochs", "none"],
        ["--learning-rate", "0_e0"],
        ["--learning-rate", "1__0"],
        ["--learning-rate", "0x10"],
        ["--learning-rate", "nan"],
        ["--learning-rate", "-1e-3"],
        ["--learning-rate", ""],
        ["--image-shape", "1,2,3"],
        ["--hidden", "1", "2", "3"],
        ["--optimizer-name", "sdg"],
        ["--size", "large"],
        ["--use-bn", "false"],
        ["--use-bn=perhaps"],
        ["--learning-rate", "1", "--learning-rate", "2"],
        ["--optimizer.lr", "1"],
        ["--unset", "max_epochs"],
        ["--unset", "warmpu"],
        ["--warmup", "3", "--unset", "warmup"],
        ["max_epochs=3"],
        ["--color", "alwyas"],
    ],
    ids=" ".join,
)
def test_a_bad_value_names_option_value_and_way_out(refused, words, snapshot):
    assert refused(*words) == snapshot


def test_everything_wrong_is_told_at_once(folder, nitro, snapshot):
    write(folder, "experiments/myexp.py", SMALL)
    write(folder, "presets/myexp.toml", "[bad]\nmax_epohcs = 5\nlearning_rate = true\nmode = 'c'\n")
    result = nitro("train", "myexp", "--preset", "bad", "--max-epohcs", "3", "--accum", "x", "--seed", "1.5")
    assert result.code == 2
    text = re.sub(r"has \d+ fields: .*", "has N fields: ...", result.err)
    assert text.replace(str(folder), "<here>") == snapshot
    assert sorted(path.name for path in folder.iterdir()) == ["experiments", "presets"]


@pytest.mark.parametrize("words", [["--preset", "bad", "--max-epohcs", "3"], ["--max-epohcs", "3"]])
def test_no_message_offers_a_way_to_force_an_unknown_name_in(folder, nitro, words):
    write(folder, "experiments/myexp.py", SMALL)
    write(folder, "presets/myexp.toml", "[bad]\nmax_epohcs = 5\n")
    text = nitro("train", "myexp", *words).err
    assert "max-epochs" in text or "max_epochs" in text
    assert not {"+", "--force", "extra", "allow"} & set(text.replace("'", " ").split())


@pytest.mark.parametrize(
    ("words", "value", "source"),
    [
        ([], 10, "default"),
        (["--max-epochs", "30"], 30, "cli"),
        (["--preset", "current"], 40, "preset"),
        (["--preset", "current", "--max-epochs", "30"], 30, "cli"),
        (["--max-epochs", "30", "--preset", "current"], 30, "cli"),
        (["--preset", "current", "--max-epochs", "10"], 10, "cli"),
    ],
)
def test_command_line_wins_over_preset_over_default(show, words, value, source):
    row = show(*words)["max_epochs"]
    assert (row["value"], row["source"]) == (value, source)
    if source == "cli":
        assert row["from"] == "--max-epochs"
        assert row["shadowed"].get("preset") == (40 if "--preset" in words else None)


def test_one_override_leaves_the_other_fields_alone(show):
    before, after = show("--preset", "current"), show("--preset", "current", "--warmup", "3")
    assert {name for name in before if before[name] != after[name]} == {"warmup"}


@pytest.mark.parametrize(
    "argv",
    [
        ["show", "myexp", "--hidden", "8,8", "--preset", "current"],
        ["show", "--hidden", "8,8", "myexp", "--preset", "current"],
        ["show", "--preset", "current", "--hidden", "8,8", "myexp"],
        ["show", "--preset=current", "--hidden=8,8", "--", "myexp"],
    ],
)
def test_the_order_of_words_never_changes_the_configuration(here, nitro, argv):
    first = ["show", "myexp", "--preset", "current", "--hidden", "8,8", "--json"]
    expected = nitro(*first).event("config")
    assert nitro(argv[0], "--json", *argv[1:]).event("config") == expected


def test_fields_are_not_set_by_the_environment(here, nitro):
    result = nitro("show", "myexp", "--json", NITRO_MAX_EPOCHS="3", PATH="/else", MAX_EPOCHS="3")
    rows = {row["name"]: row["value"] for row in result.event("config")["fields"]}
    assert (rows["path"], rows["max_epochs"]) == ("untouched", 10)
    shown = nitro("show", "myexp", NITRO_MAX_EPOCHS="3")
    assert shown.err.splitlines()[0].endswith(
        "warning: the environment variable NITRO_MAX_EPOCHS is not read by nitro; fields are set by presets and options"
    )


def test_a_required_field_is_asked_for_before_data_is_loaded(folder, nitro, snapshot):
    text = SMALL.replace('mode: Literal["a", "b"] = "a"', "flag: bool\n    size: int")
    write(folder, "experiments/needs.py", text.replace("...", "print('hook')"))
    result = nitro("train", "needs")
    assert result.code == 2
    assert "hook" not in result.err
    assert result.err.replace(str(folder), "<here>") == snapshot


def test_a_folder_is_no_preset_file(nitro, folder):
    write(folder, "experiments/myexp.py", MYEXP)
    write(folder, "presets/one.toml", "[current]\n")
    (folder / "empty").mkdir()
    for name, note in (("presets", "name a file in it: one.toml"), ("empty", "it holds no TOML file")):
        result = nitro("show", "myexp", "--preset-file", name)
        assert (result.code, result.out) == (2, "")
        assert result.err == f"error: the preset file {name} is a folder\n   = {note}\n"
