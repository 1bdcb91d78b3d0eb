"""How failures are told."""

from __future__ import annotations

import errno
import importlib.util
import re
import sys
import types
from pathlib import Path

import pytest

from nitro_cli.cli.failures import describe
from nitro_cli.errors import ExperimentError, Place, Problem, UsageError

from .conftest import write


def load(path: Path) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("hooks_under_test", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def module(folder):
    text = """
    import json

    def deep(n):
        if n:
            return deep(n - 1)
        secret = "token"
        raise ValueError("boom [bold]\\n" + "line\\n" * 100)

    def forward(x):
        return json.loads(x)

    def caused():
        try:
            {}["key"]
        except KeyError as error:
            raise RuntimeError("no key") from error

    def leave():
        import sys
        sys.exit(0)
    """
    return load(write(folder, "experiments/hooks.py", text))


def failure(function, *arguments):
    try:
        function(*arguments)
    except BaseException as error:
        # The frame of this test file is a user's frame too: begin below it, as the boundary in main does.
        return describe(error.with_traceback(error.__traceback__.tb_next))
    raise AssertionError("nothing was raised")


def test_an_error_in_a_library_is_shown_at_the_users_line(module, snapshot):
    code, text, facts = failure(module.forward, "{")
    assert code == 3
    assert text == snapshot
    assert (facts["kind"], facts["type"], facts["file"]) == ("exception", "JSONDecodeError", "experiments/hooks.py")
    assert facts["line"] == 10


def test_a_deep_error_is_short_and_shows_no_locals(module):
    code, text, _ = failure(module.deep, 200)
    assert code == 3
    assert len(text.splitlines()) <= 40
    assert "experiments/hooks.py:7" in text
    assert "boom [bold]" in text
    assert "token" not in text


def test_a_recursion_is_told_once(folder):
    write(folder, "experiments/deeper.py", "def forward(n=0):\n    return forward(n + 1)\n")
    module = load(folder / "experiments/deeper.py")
    with pytest.raises(RecursionError) as caught:
        module.forward()
    _, text, _ = describe(caught.value)
    assert text.count("called from experiments/deeper.py:2") == 1
    assert re.search(r"\(\d{3,} times\)", text)


def test_a_cause_is_named(module, snapshot):
    assert failure(module.caused)[1] == snapshot


def test_sys_exit_in_a_hook_is_no_success(module):
    code, text, _ = failure(module.leave)
    assert code == 3
    assert "sys.exit(0)" in text


def test_a_fault_of_nitro_goes_to_a_file():
    try:
        sys.modules["nitro_cli.errors"].Problem.render(None)  # type: ignore[arg-type]
    except AttributeError as error:
        code, text, facts = describe(error.with_traceback(error.__traceback__.tb_next))
    assert code == 70
    assert len(text.splitlines()) == 2
    report = Path(facts["report"])
    assert "Traceback" in report.read_text()
    report.unlink()


def test_all_problems_and_their_facts():
    place = Place("presets/digits.toml", 4, 1, 10, "max_epohcs = 40")
    problems = [
        Problem("unknown field 'max_epohcs'", place, "did you mean 'max_epochs'?", facts={"field": "max_epohcs"}),
        Problem("no such option --lrr", facts={"option": "--lrr"}),
    ]
    code, text, facts = describe(UsageError(problems, kind="unknown_field"))
    assert code == 2
    assert text.count("error: ") == 2
    assert (facts["kind"], facts["file"], facts["line"]) == ("unknown_field", "presets/digits.toml", 4)
    assert [problem["message"] for problem in facts["problems"]] == [problem.what for problem in problems]


def test_an_error_of_nitro_inside_a_hook_gets_the_hooks_line(folder):
    write(folder, "experiments/reads.py", "def forward(error):\n    raise error\n")
    module = load(folder / "experiments/reads.py")
    code, text, _ = failure(module.forward, ExperimentError("reads a Host field", "make it Device"))
    assert code == 3
    assert "--> experiments/reads.py:2" in text


def test_a_place_is_relative_and_shows_its_line(folder):
    path = write(folder, "experiments/places.py", "def loss(self):\n    pass\n")
    _, text, _ = describe(ExperimentError("loss returned None", place=Place(path, 1)))
    assert text == "error: loss returned None\n  --> experiments/places.py:1\n   |\n 1 |     def loss(self):"


def test_a_full_disk_is_no_fault_of_nitro():
    code, text, _ = describe(OSError(errno.ENOSPC, "No space left on device", "/data/metrics.jsonl"))
    assert (code, text) == (5, "error: No space left on device: /data/metrics.jsonl")


def test_too_little_memory_is_no_fault_of_nitro():
    import jax

    code, text, _ = describe(jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes."))
    assert code == 5
    assert "out of memory" in text
