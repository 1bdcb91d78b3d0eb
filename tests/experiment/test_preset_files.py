"""Preset files: what TOML may look like, where problems stand, and what is written back."""

from __future__ import annotations

import tomllib
from typing import Any

import pytest
import tomli

from nitro_cli.errors import ExperimentError, NitroError, UsageError
from nitro_cli.experiment.discovery import find_experiment
from nitro_cli.experiment.presets import check_presets, from_preset, preset_table, resolve
from nitro_cli.experiment.toml import dump_table, read_toml


def test_windows_files_load(project: Any, my_exp: Any) -> None:
    project.write("presets/myexp.toml", b"\xef\xbb\xbf[current]\r\nmax_epochs = 7\r\nrun_tag = 'b'")
    e = from_preset(my_exp, "current")
    assert (e.max_epochs, e.run_tag) == (7, "b")
    assert read_toml("presets/myexp.toml").place("current", "run_tag").line == 3


def test_toml_11_loads_on_every_python(project: Any, my_exp: Any) -> None:
    project.write("presets/myexp.toml", "[current]\noptions = {\n  a = 1,\n}\nmax_epochs = 4\n")
    assert from_preset(my_exp, "current").options == {"a": 1}


@pytest.mark.parametrize("text", ["2e-5", "2E-5", "2.0e-5"])
def test_floats_in_every_spelling(text: str, project: Any, my_exp: Any) -> None:
    project.write("presets/myexp.toml", f"[current]\nlearning_rate = {text}\n")
    assert from_preset(my_exp, "current").learning_rate == 2e-5


def test_an_int_for_a_float_becomes_a_float(project: Any, my_exp: Any) -> None:
    project.write("presets/myexp.toml", "[current]\nlearning_rate = 1\n")
    assert repr(from_preset(my_exp, "current").learning_rate) == "1.0"


BROKEN: dict[str, str | bytes] = {
    "misspelt key": "[current]\nseed = 1\n\nmax_epohcs = 40\n",
    "name from another tool": "[current]\nlr = 0.1\n",
    "dashes": "[current]\nmax-epochs = 3\n",
    "three at once": '[current]\nwidht = 1\nmax_epochs = 2.5\nalgorithm = "adm"\n',
    "bool for int": "[current]\nmax_epochs = true\nlearning_rate = true\n",
    "whole float for int": "[current]\nmax_epochs = 2.0\n",
    "nan": "[current]\nlearning_rate = nan\n",
    "date for text": "[current]\nrun_tag = 2024-01-02\n",
    "out of limits": "[current]\naccum = 0\n",
    "key twice": "[current]\nlearning_rate = 0.1\nlearning_rate = 0.2 # again\n",
    "table twice": "[current]\n[current]\n",
    "null": "[current]\nwarmup = null\n",
    "none as text": '[current]\nwarmup = "none"\n',
    "backslash": '[current]\nrun_tag = "C:\\data"\n',
    "no quotes": "[current]\nrun_tag = fast\n",
    "python bool": "[current]\nuse_bn = True\n",
    "outside any table": "learning_rate = 1\n[current]\n",
    "loose table": "opt.lr = 1\n[current]\n",
    "nested table": "[current.opt]\nlr = 1\n",
    "dotted key": "[current]\nopt.lr = 1\n",
    "quoted dotted key": '[current]\n"opt.lr" = 1\n',
    "list of tables": "[[current]]\nseed = 1\n",
    "unset not optional": '[current]\nunset = ["width"]\n',
    "unset and set": '[current]\nwarmup = 3\nunset = ["warmup"]\n',
    "unset unknown": '[current]\nunset = ["warmpu"]\n',
    "unset is text": '[current]\nunset = "warmup"\n',
    "unknown preset": "[curent]\n[reference_v1]\n",
    "empty file": "",
    "utf-16": "[current]\n".encode("utf-16"),
    "latin-1": "[current]\nrun_tag = '\u00e9'\n".encode("latin-1"),
    "table inside a string": '[other]\nrun_tag = """\n[current]\nmax_epohcs = 1\n"""\n[current]\nmax_epohcs = 2\n',
    "key after an array": "[current]\nhidden = [\n  1, # ]\n  2,\n]\nwidht = 3\n",
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_a_preset_file_may_not_say(case: str, project: Any, my_exp: Any, snapshot: Any) -> None:
    project.write("presets/myexp.toml", BROKEN[case])
    before = sorted(project.root.rglob("*"))
    with pytest.raises(UsageError) as error:
        resolve(my_exp, "current")
    assert project.says(error.value) == snapshot
    assert error.value.exit_code == 2
    assert "+" not in str(error.value)  # no way to force an unknown key in is ever proposed
    assert sorted(project.root.rglob("*")) == before


def test_problems_carry_facts_for_machines(project: Any, my_exp: Any) -> None:
    project.write("presets/myexp.toml", "[current]\nmax_epohcs = 40\n")
    with pytest.raises(UsageError) as error:
        from_preset(my_exp, "current")
    facts = error.value.facts
    assert (facts["field"], facts["file"], facts["line"]) == ("max_epohcs", "presets/myexp.toml", 2)
    assert facts["suggestions"] == ["max_epochs"]


def test_an_empty_table_and_no_preset_say_so(project: Any, my_exp: Any) -> None:
    assert resolve(my_exp, "reference_v1").notes == (
        "preset [reference_v1] is empty: every value is the class's default",
    )
    assert resolve(my_exp).notes == (
        "no preset: values not given are the class's defaults; presets: current, reference_v1",
    )


def test_no_file_is_fine_until_a_preset_is_asked_for(project: Any, my_exp: Any, snapshot: Any) -> None:
    (project.root / "presets/myexp.toml").unlink()
    assert resolve(my_exp).experiment == my_exp()
    with pytest.raises(UsageError) as error:
        resolve(my_exp, "current")
    assert project.says(error.value) == snapshot
    with pytest.raises(UsageError, match="does not exist"):
        resolve(my_exp, "current", preset_file="other.toml")
    other = project.write("other.toml", "[current]\nmax_epochs = 3\n")
    assert resolve(my_exp, "current", preset_file=other).experiment.max_epochs == 3


def test_presets_beside_the_experiment_come_before_those_of_the_working_directory(
    project: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cls = find_experiment("myexp").cls
    other = project.root / "other"
    project.write("other/presets/myexp.toml", "[current]\nmax_epochs = 1\n")
    monkeypatch.chdir(other)
    assert from_preset(cls, "current").max_epochs == 20
    (project.root / "presets/myexp.toml").unlink()
    assert from_preset(cls, "current").max_epochs == 1


def test_unset_says_none(project: Any, my_exp: Any) -> None:
    project.write("presets/myexp.toml", '[current]\nunset = ["warmup"]\n')
    resolved = resolve(my_exp, "current")
    assert resolved.experiment.warmup is None
    assert resolved.sources["warmup"].text == "presets/myexp.toml:2"


def test_dict_fields_may_be_inline_or_dotted(project: Any, my_exp: Any) -> None:
    project.write("presets/myexp.toml", "[a]\noptions = {x = 1}\n[b]\noptions.x = 1\n[c.options]\nx = 1\n")
    assert [from_preset(my_exp, name).options for name in "abc"] == [{"x": 1}] * 3


def test_checking_finds_all_problems_of_all_tables(project: Any, my_exp: Any) -> None:
    assert check_presets(my_exp) == []
    project.write("presets/myexp.toml", "[current]\ngone = 1\n[other]\ngone = 2\nmax_epochs = 2.5\n[fine]\n")
    problems = check_presets(my_exp)
    assert [str(problem.place) for problem in problems] == [f"presets/myexp.toml:{line}:1" for line in (2, 4, 5)]
    assert "[current]" in problems[0].what
    assert "[other]" in problems[1].what
    project.write("presets/myexp.toml", "a = 1\n")
    assert "outside any preset table" in check_presets(my_exp)[0].what


def test_presets_in_python(project: Any, snapshot: Any) -> None:
    text = (project.root / "experiments/myexp.py").read_text()
    tables = "{'fast': {'max_epochs': 1, 'hidden': [1]}, 'bad': {'widht': 1}}"
    method = f"\n    @classmethod\n    def presets(cls):\n        return {tables}\n"
    project.write("experiments/coded.py", text + method)
    cls = find_experiment("coded").cls
    assert preset_table(cls).names == ("fast", "bad")
    resolved = resolve(cls, "fast")
    assert resolved.experiment.max_epochs == 1
    assert str(resolved.sources["max_epochs"]) == "preset MyExp.presets"
    with pytest.raises(UsageError, match=r"unknown field 'widht' in preset \[bad\]"):
        resolve(cls, "bad")
    project.write("presets/coded.toml", "[fast]\n")
    with pytest.raises(NitroError) as error:
        resolve(cls, "fast")
    assert project.says(error.value) == snapshot
    project.write("experiments/plain.py", text + "\n    def presets(self):\n        return {}\n")
    with pytest.raises(ExperimentError, match="not a classmethod"):
        resolve(find_experiment("plain").cls, "fast")


def test_places_respect_strings_and_nesting(empty: Any) -> None:
    text = """
    # [a] in a comment
    "quoted.key" = "[a]"
    [a]
    x = '''
    y = 1
    '''
    y = {z = 1, w = [1, "}"]}
    v = [
    [1],
    ]
    u = 1
    [a.b]
    q . r = 1
    """
    file = read_toml(empty.write("x.toml", text))
    lines = {
        key: file.place(*key).line
        for key in (("", "quoted.key"), ("a", None), ("a", "x"), ("a", "y"), ("a", "u"), ("a", "b"))
    }
    assert lines == {
        ("", "quoted.key"): 2,
        ("a", None): 3,
        ("a", "x"): 4,
        ("a", "y"): 7,
        ("a", "u"): 11,
        ("a", "b"): 12,
    }
    assert file.place("a", "missing").line is None


def test_what_is_written_is_one_line_a_value_for_every_parser() -> None:
    values = {
        "rate": (1e-5, "preset\nx"),
        "big": (2**70, ""),
        "text": ('a"b\\c\n#d', "default"),
        "items": ([1, [2.0, "x"]], ""),
        "table": ({"a b": 1}, ""),
        "none": (None, ""),
        "odd": (object(), "default"),
        "unicode": ("é\u2028", ""),
    }
    text = dump_table("config", values)
    expected = {
        "rate": 1e-5, "big": 2**70, "text": 'a"b\\c\n#d', "items": [1, [2.0, "x"]], "table": {"a b": 1},
        "unicode": "é\u2028", "unset": ["none"],
    }  # fmt: skip
    assert tomli.loads(text)["config"] == tomllib.loads(text)["config"] == expected
    assert "# odd: not written (object)  # default" in text
    assert "rate = 1e-05  # preset x\n" in text
