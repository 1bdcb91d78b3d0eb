"""What a run looks like: on a terminal, in a file, as JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nitro_cli.cli import views
from nitro_cli.cli.console import Output, plain
from nitro_cli.cli.views import View
from nitro_cli.run.report import FieldRow, GroupRow, HookRow, Report, ScheduleRow, SplitRow

from .conftest import Screen

REPORT = Report(
    title="digits:Digits",
    experiment="digits",
    preset="current",
    path="experiments/digits.py",
    fields=[
        FieldRow("batch_size", 64, "64", "int", "const", "preset", "presets/digits.toml:4"),
        FieldRow(
            "layers", list(range(40)), str(list(range(40))), "list[int]", "const", "preset", "presets/digits.toml:5"
        ),
        FieldRow("dropout", 0.1, "0.1", "float", "device", "default", ""),
        FieldRow(
            "learning_rate", 0.003, "0.003", "float", "host", "command line", "--learning-rate", (("preset", 0.001),)
        ),
        FieldRow("classes", 10, "10", "int", "const", "derived", "derive"),
        FieldRow("seed", 0, "0", "int", "host", "default", ""),
    ],
    run={
        "seed": 0,
        "accum": 1,
        "max_epochs": 40,
        "total_steps": 920,
        "gradient_clip_norm": 0.0,
        "run_dir": None,
    },
    splits=[
        SplitRow("train", 1437, 22, 64, 29, None, "auto"),
        SplitRow("val", None, 6, 64, None, 24, "auto"),
    ],
    model={"parameters": 28938, "leaves": 4, "state_leaves": 0},
    optimizer={"rule": "radam", "learning_rate": 0.003, "hyperparameters": {"b1": 0.9}, "fixed": {}},
    groups=[GroupRow("all", "radam", 0.003, 1.0, 0.01, "zero", {"b1": 0.9}, {}, 28938, 4, True)],
    schedules=[ScheduleRow("learning_rate", "all", "schedules(self)", False)],
    hooks=[HookRow("forward", ("image",)), HookRow("metrics", ("label",), "host")],
    devices="cpu x 1 | jax 0.10.2",
    notes=["the preset file has one table"],
)

EPOCH = {
    "epoch": 1,
    "max_epochs": 40,
    "step": 22,
    "metrics": {"train_loss": 1.2041, "val_loss": 0.612, "val_acc": 0.8417, "val_top5": 1.2e-7, "val_f1": float("nan")},
    "seconds": 4.12,
    "compile_seconds": 3.2,
    "best": True,
    "data_wait_frac": 0.0,
}


@pytest.fixture
def inside(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def told(inside):
    """``told(tty, width, **switches)`` -> a view and its output; their log is closed in the end."""
    made: list[Output] = []

    def make(tty: bool, width: int = 80, **values) -> tuple[View, Output]:
        out = Output(values, Screen("utf-8", tty), Screen("utf-8", tty), {})
        out.width = lambda: width  # type: ignore[method-assign]
        out.open_log(inside / "console.log")
        made.append(out)
        return View(out), out

    yield make
    for out in made:
        out.close()


def program(name: str, origin: str, why: str, seconds: float, *kept_out: str) -> dict[str, Any]:
    """The facts of one program, as a run tells them."""
    entry = f"Digits/{name}/1a2b3c4d5e6f-0a1b2c3d"
    return {"program": name, "origin": origin, "why": why, "seconds": seconds, "entry": entry, "kept_out": kept_out}


def story(view: View, tmp_path: Path) -> None:
    """A whole run, told to ``view``."""
    run = SimpleNamespace(path=tmp_path / "runs/digits/20261130-k3f9", id="20261130-k3f9")
    view.banner("digits:Digits", "current")
    view.changes([("learning_rate", "0.001", "0.003")], "changed on resume")
    view.report(REPORT)
    view.observe("run", {"run_dir": run.path})
    view.observe("compile", program("gradient", "compiled", "first use", 1.5))
    view.observe("compile", program("update", "loaded", "unchanged", 0.02))
    view.observe("compile", program("evaluation", "loaded", "unchanged", 0.03))
    view.observe("progress", {"epoch": 1, "max_epochs": 40, "step": 3, "total_steps": 920, "step_in_epoch": 3,
                              "steps_in_epoch": 22, "loss": 0.5, "rate": 20.0})  # fmt: skip
    view.observe("epoch", EPOCH)
    view.observe("compile", program("gradient", "compiled", "`width` 128 -> 256", 1.5, "it calls back into Python"))
    view.observe("compile", program("update", "linked", "`clip` in steps.py changed", 0.21))
    view.observe("compile", program("loss", "compiled", "first use", 0.4, "`loss` reads a file", "and more"))
    view.observe("epoch", {**EPOCH, "epoch": 2, "best": False, "compile_seconds": 0.0})
    view.observe("checkpoint", {"step": 44, "epoch": 2, "path": run.path / "checkpoints/44"})
    view.observe("warning", {"message": "data took 40 % of the time"})
    view.observe("unheard of", {})
    best = {"epoch": 1, "metric": "val_loss", "value": 0.612, "path": run.path / "checkpoints/22"}
    latest = {"epoch": 2, "step": 44, "path": run.path / "checkpoints/44"}
    outcome = SimpleNamespace(
        status="finished", exit_code=0, epochs=2, steps=44, best=best, latest=latest, seconds=21.0, run=run, signal=None
    )
    view.done(outcome, "digits")


def tidy(text: str) -> str:
    text = re.sub(r"^\d\d:\d\d:\d\d ", "", text, flags=re.MULTILINE)
    return re.sub(r"nitro \S+ (.*) pid=\d+ host=\S+", r"nitro VERSION \1 pid=PID host=HOST", text)


@pytest.mark.parametrize(("width", "verbose"), [(80, 0), (120, 0), (50, 0), (80, 1)])
def test_on_a_terminal(inside, told, width, verbose, snapshot):
    view, out = told(True, width, color="never", verbose=verbose)
    story(view, inside)
    text = out.stderr.text()
    assert "\x1b" not in text
    assert text.replace("\r", "<r>") == snapshot
    assert out.stdout.text() == ""


def test_in_a_file(inside, told, snapshot):
    view, out = told(False)
    story(view, inside)
    text = out.stderr.text()
    assert "\r" not in text
    assert tidy(text) == snapshot
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in text.splitlines())


@pytest.mark.parametrize(("tty", "values"), [(True, {}), (False, {"json": True}), (True, {"quiet": 2})])
def test_the_log_is_the_same_however_the_run_was_watched(inside, told, tty, values):
    view, out = told(tty, **values)
    story(view, inside)
    out.close()
    watched = (inside / "console.log").read_text()
    (inside / "console.log").unlink()
    view, out = told(False, verbose=0)
    story(view, inside)
    assert tidy(watched) == tidy((inside / "console.log").read_text())
    assert "compile gradient: first use" in watched
    assert "epoch 1/40 " in watched


def test_as_json(inside, told):
    view, out = told(False, json=True)
    story(view, inside)
    events = [json.loads(line) for line in out.stdout.text().splitlines()]
    assert out.stderr.text() == ""
    assert [event["event"] for event in events] == [
        "changes", "config", "binding", "run", *["compile"] * 3, "epoch", *["compile"] * 3, "epoch", "checkpoint",
        "warning", "done"
    ]  # fmt: skip
    config = events[1]
    assert config["schema"] == 1
    assert config["fields"][3] == {
        "name": "learning_rate",
        "value": 0.003,
        "type": "float",
        "role": "host",
        "source": "cli",
        "from": "--learning-rate",
        "shadowed": {"preset": 0.001},
    }
    assert events[7]["metrics"]["val_f1"] is None
    assert (events[9]["origin"], events[10]["kept_out"]) == ("linked", ["`loss` reads a file", "and more"])
    assert events[12]["path"] == "runs/digits/20261130-k3f9/checkpoints/44"
    assert events[-1]["best"]["value"] == 0.612
    assert events[-1]["exit_code"] == 0


def test_quiet_says_nothing(inside, told):
    view, out = told(True, quiet=1)
    story(view, inside)
    assert plain(out.stderr.text()) == "warning: data took 40 % of the time\n"


def test_a_long_epoch_is_heard_of_once_a_minute(inside, told, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(views.time, "monotonic", lambda: now[0])
    view, out = told(False)
    facts = {"epoch": 7, "max_epochs": 40, "step": 120, "total_steps": 920, "loss": 0.1902}
    for second in range(0, 150, 10):
        now[0] = float(second)
        view.observe("progress", facts)
    assert tidy(out.stderr.text()).splitlines() == ["epoch 7/40 step 120/920 train_loss=0.1902"] * 2


def test_after_an_interrupt_the_next_thing_is_to_resume(inside, told):
    view, out = told(False)
    run = SimpleNamespace(path=inside / "elsewhere", id="elsewhere")
    outcome = SimpleNamespace(
        status="interrupted", exit_code=130, epochs=2, steps=44, best=None, latest=None, seconds=21.0, run=run, signal=2
    )
    view.done(outcome, "digits")
    assert tidy(out.stderr.text()).splitlines() == [
        "done status=interrupted epochs=2 steps=44",
        "next nitro train digits --resume=elsewhere",
    ]


def test_several_groups_are_told_apart(inside, told):
    groups = [replace(REPORT.groups[0], group="body"), replace(REPORT.groups[0], group="head", weight_decay=0.0)]
    report = replace(REPORT, groups=groups)
    for tty, expected in ((True, "  group head  radam, learning_rate 0.003, b1 0.9 | 28,938 parameters"),
                          (False, "binding group head rule=radam learning_rate=0.003")):  # fmt: skip
        view, out = told(tty, color="never")
        view.report(report)
        assert expected in out.stderr.text()
