"""Commands that run: train, validate, evaluate, predict, show and their files, in this process."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest

from .conftest import MYEXP, SMALL, spawn, write

EPOCHS = 3


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A project with one run of three epochs, made by a real process whose output is kept in files."""
    root = tmp_path_factory.mktemp("trained")
    write(root, "experiments/myexp.py", MYEXP)
    with (root / "out").open("wb") as out, (root / "err").open("wb") as err:
        process = spawn("train", "myexp", "--max-epochs", str(EPOCHS), cwd=root, stdout=out, stderr=err)
        assert process.wait() == 0, (root / "err").read_text()
    return root


@pytest.fixture
def there(trained, monkeypatch) -> Path:
    monkeypatch.chdir(trained)
    return trained


def the_run(root: Path) -> Path:
    return root / (root / "out").read_text().strip()


def without_times(text: str) -> list[str]:
    return [line.split(" ", 1)[1] for line in text.splitlines()]


def test_stdout_has_the_run_directory_and_nothing_else(trained):
    assert (trained / "out").read_text().count("\n") == 1
    assert (the_run(trained) / "run.json").is_file()


def test_a_log_file_is_quiet_and_greppable(trained):
    text = (trained / "err").read_text()
    assert not {"\r", "\x1b"} & set(text)
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in text.splitlines())
    lines = without_times(text)
    assert re.match(r"nitro \S+ myexp:MyExp preset=none pid=\d+ host=", lines[0])
    assert "config max_epochs=3 source=--max-epochs" in lines
    for epoch in range(1, EPOCHS + 1):
        about = [line for line in lines if f"epoch {epoch}/3" in line or f"epoch={epoch} " in line]
        assert 1 <= len(about) <= 3
    assert lines[-2].startswith("done status=finished epochs=3 ")
    assert lines[-1] == f"next nitro validate myexp --run {the_run(trained).name}"


def test_console_log_holds_what_was_said(trained):
    said = without_times((trained / "err").read_text())
    logged = without_times((the_run(trained) / "console.log").read_text())
    assert [line for line in logged if line in said] == said


def logged(root: Path) -> dict[str, float]:
    """The validation metrics of the last epoch, which is the best one of this run."""
    rows = [json.loads(line) for line in (the_run(root) / "metrics.jsonl").read_text().splitlines()]
    return [row["values"] for row in rows if row.get("context") == "validate"][-1]


def test_validate_prints_what_was_logged(there, nitro):
    result = nitro("validate", "myexp")
    assert result.code == 0, result.err
    value = logged(there)["val_loss"]
    assert result.out == f"val_loss  {value:.9g}  (n=10)\n"
    assert "best by val_loss, epoch 3; latest is 3" in result.err
    event = nitro("validate", "myexp", "--json").event("validate")
    assert event["metrics"] == {"val_loss": value}
    assert (event["rows"], event["split"]) == (10, "val")
    assert event["checkpoint"].endswith("checkpoints/6")


@pytest.mark.parametrize(
    ("which", "epoch", "why"),
    [
        (lambda run: ["--checkpoint", "best"], 3, "best by val_loss"),
        (lambda run: ["--checkpoint", "latest"], 3, "latest"),
        (lambda run: ["--checkpoint", "2"], 2, "as asked"),
        (lambda run: ["--checkpoint", str(run)], 3, "best by val_loss"),
        (lambda run: ["--checkpoint", str(run / "checkpoints")], 3, "best by val_loss"),
        (lambda run: ["--checkpoint", str(run / "checkpoints" / "4")], 2, "by its path"),
        (lambda run: ["--run", run.name, "--checkpoint", "2"], 2, "as asked"),
        (lambda run: ["--run", run.name[:-2]], 3, "best by val_loss"),
        (lambda run: ["--run", str(run)], 3, "best by val_loss"),
    ],
)
def test_which_weights(there, nitro, which, epoch, why):
    result = nitro("evaluate", "myexp", *which(the_run(there)), "--json")
    assert result.code == 0, result.err
    event = result.event("evaluate")
    assert event["epoch"] == epoch
    assert why in event["why"]
    assert event["split"] == "test"


@pytest.mark.parametrize(
    "words",
    [["--run", "nosuch"], ["--checkpoint", "17"], ["--checkpoint", "nowhere"], ["--split", "tset"]],
    ids=" ".join,
)
def test_weights_and_splits_that_are_not_there(there, nitro, words):
    result = nitro("evaluate", "myexp", *words)
    assert result.code == 2
    assert result.out == ""
    assert words[1] in result.err
    assert "Traceback" not in result.err


def test_fresh_weights_need_no_run(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    result = nitro("validate", "myexp", "--weights", "fresh")
    assert result.code == 0, result.err
    assert "not trained" in result.err
    assert not (folder / "runs").exists()


def test_a_field_that_changed_since_the_run_is_named(there, nitro):
    result = nitro("validate", "myexp", "--smoothing", "0.5")
    assert result.code == 0, result.err
    changes = [line for line in result.err.splitlines() if "changed since the run" in line]
    assert [line.split(": ", 1)[1] for line in changes] == ["smoothing  0.1 -> 0.5"]


def test_a_changed_program_is_refused(there, nitro):
    result = nitro("validate", "myexp", "--no-use-bn")
    assert (result.code, result.out) == (4, "")
    assert "use_bn" in result.err


def test_predictions_have_one_row_a_sample_in_order(there, nitro, tmp_path):
    file = tmp_path / "p.csv"
    result = nitro("predict", "myexp", "--out", str(file))
    assert result.code == 0, result.err
    assert result.out == f"{file}\n"
    rows = list(csv.DictReader(file.read_text().splitlines()))
    assert [row["index"] for row in rows] == [str(i) for i in range(10)]
    expected = np.linspace(-1, 1, 10, dtype=np.float32).astype(float)
    assert [float(row["pair_0"]) for row in rows] == expected.tolist()
    again = nitro("predict", "myexp", "--out", str(file))
    assert again.code == 4
    assert "--force" in again.err
    assert nitro("predict", "myexp", "--out", str(file), "--force").code == 0


def test_predictions_stream_to_stdout(there, nitro):
    result = nitro("predict", "myexp", "--out", "-", "--format", "jsonl", "--split", "val")
    assert result.code == 0, result.err
    rows = [json.loads(line) for line in result.out.splitlines()]
    assert [row["index"] for row in rows] == list(range(10))
    assert list(rows[0]) == ["index", "pair", "y"]


def test_predict_checks_the_file_before_it_computes(there, nitro):
    result = nitro("predict", "myexp", "--out", "p.pt")
    assert result.code == 2
    assert "weights:" not in result.err


def test_the_same_words_mean_the_same_configuration_everywhere(there, nitro, tmp_path):
    words = ["myexp", "--hidden", "8,8", "--max_epochs", "0", "--json"]
    commands = {
        "show": [],
        "train": ["--run-dir", str(tmp_path / "run")],
        "validate": ["--weights", "fresh"],
        "evaluate": ["--weights", "fresh"],
        "predict": ["--weights", "fresh", "--out", str(tmp_path / "p.npz")],
    }
    seen = []
    for command, more in commands.items():
        result = nitro(command, *words, *more)
        assert result.code == 0, result.err
        assert result.events[-1]["event"] == "done"
        seen.append([row for row in result.event("config")["fields"] if row["name"] != "run_dir"])
    assert all(fields == seen[0] for fields in seen)


def test_show_writes_and_compiles_nothing(folder, nitro):
    from nitro_cli.programs.cache import cache_stats

    write(folder, "experiments/shown.py", MYEXP)
    before = cache_stats()
    result = nitro("show", "shown", "--max-epochs", "7")
    assert result.code == 0, result.err
    assert "config max_epochs=7 source=--max-epochs\n" in result.out
    assert cache_stats() == before
    assert [path.name for path in folder.iterdir()] == ["experiments"]
    on_screen = nitro("show", "shown", tty=True)
    assert "shown:MyExp" in on_screen.out
    assert "train 2 batches" in on_screen.out or "train 2" in on_screen.out


def test_resume_takes_the_runs_configuration_and_names_what_changed(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    first = nitro("train", "myexp", "--max-epochs", "1", "--hidden", "3")
    assert first.code == 0, first.err
    second = nitro("train", "myexp", "--resume", "--max-epochs", "2", "-v")
    assert second.code == 0, second.err
    assert second.out == first.out
    changes = [line.split(": ", 1)[1] for line in second.err.splitlines() if "changed on resume" in line]
    assert changes == ["max_epochs  1 -> 2"]
    assert "config hidden=[3] source=" in second.err
    assert "epoch 2/2" in second.err
    assert "epoch 1/2" not in second.err
    log = (folder / first.out.strip() / "console.log").read_text()
    assert "epoch 1/1" in log
    assert "epoch 2/2" in log
    refused = nitro("train", "myexp", "--resume", "--max-epochs", "3", "--no-use-bn")
    assert refused.code == 4
    assert "use_bn" in refused.err


def test_resume_of_nothing_never_starts_afresh(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    for words in (["--resume"], ["--resume=no/such/dir"]):
        result = nitro("train", "myexp", *words)
        assert result.code == 4
        assert not (folder / "runs").exists()


def test_a_folder_in_use_is_left_alone_and_the_advice_exists(folder, nitro):
    from nitro_cli.cli.options import COMMANDS

    write(folder, "experiments/myexp.py", MYEXP)
    words = ["train", "myexp", "--max-epochs", "1", "--run-dir", "out/x"]
    assert nitro(*words).code == 0
    before = {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()}
    result = nitro(*words)
    assert (result.code, result.out) == (4, "")
    assert {path: path.read_bytes() for path in (folder / "out").rglob("*") if path.is_file()} == before
    named = set(re.findall(r"--[a-z-]+", result.err.split("error:")[1]))
    assert named
    assert named <= {option.name for option in COMMANDS["train"].options} | {"--run-dir"}
    assert nitro(*words, "--force").code == 0
    assert (folder / "out" / "x.old-1" / "metrics.jsonl").read_bytes() == before[folder / "out" / "x" / "metrics.jsonl"]


def test_a_relative_run_dir_is_found_from_elsewhere(folder, nitro, monkeypatch):
    write(folder, "experiments/myexp.py", MYEXP)
    assert nitro("train", "myexp", "--max-epochs", "1", "--run-dir", "out/x").out == "out/x\n"
    (folder / "other").mkdir()
    monkeypatch.chdir(folder / "other")
    result = nitro("validate", "../experiments/myexp.py", "--run", str(folder / "out" / "x"))
    assert result.code == 0, result.err


def test_json_stays_pure_whatever_hooks_print(folder, nitro):
    noisy = MYEXP.replace("        return ((outputs", "        print('noise')\n        return ((outputs")
    write(folder, "experiments/noisy.py", "print('noise')\n" + noisy)
    result = nitro("train", "noisy", "--max-epochs", "1", "--json")
    assert result.code == 0, result.err
    assert "noise" in result.err
    names = [event["event"] for event in result.events]
    assert names[:3] == ["config", "binding", "run"]
    assert names[-1] == "done"
    assert {"compile", "epoch", "checkpoint"} <= set(names)
    assert result.event("epoch")["metrics"].keys() == {"train_loss", "val_loss"}


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_an_error_in_a_hook(folder, nitro, words, snapshot):
    broken = MYEXP.replace("        return ((outputs", "        raise ValueError('boom')\n        return ((outputs")
    write(folder, "experiments/hurt.py", broken)
    result = nitro("train", "hurt", *words)
    assert result.code == 3
    assert len(result.err.splitlines()) <= 40
    assert "Traceback" not in result.err
    if words:
        event = result.events[-1]
        assert (event["event"], event["type"], event["exit_code"]) == ("error", "ValueError", 3)
        assert event["file"] == "experiments/hurt.py"
    else:
        assert result.err[result.err.index("error: ") :] == snapshot
        full = nitro("train", "hurt", "--debug")
        assert full.code == 3
        assert "Traceback (most recent call last)" in full.err


def test_an_error_that_jax_raises_is_shown_at_the_line_of_the_hook(folder, nitro):
    write(folder, "experiments/shapes.py", MYEXP.replace('x @ ps["w"]', 'x.reshape((7,)) @ ps["w"]'))
    result = nitro("train", "shapes", "--json")
    assert result.code == 3
    event = result.events[-1]
    assert event["file"] == "experiments/shapes.py"
    assert "site-packages" not in result.err


def test_divergence_is_a_no(folder, nitro):
    write(folder, "experiments/diverges.py", MYEXP.replace("* (1 + self.smoothing)", "* np.float32('nan')"))
    result = nitro("train", "diverges", "--max-epochs", "1", "--json")
    assert result.code == 1
    assert (result.events[-1]["event"], result.events[-1]["kind"]) == ("error", "diverged")


def test_an_experiment_without_presets_says_so(folder, nitro):
    write(folder, "experiments/bare.py", MYEXP)
    result = nitro("train", "bare", "--max-epochs", "1")
    assert result.code == 0, result.err
    assert "note no preset" in result.err


@pytest.mark.parametrize("encoding", ["ascii", "cp1252"])
def test_a_screen_that_knows_few_letters(folder, nitro, encoding):
    write(folder, "experiments/myexp.py", MYEXP.replace("A line", "Ein grüßender Strich: ─│"))
    for words in (["train", "myexp", "--max-epochs", "1", "--run-tag", "µ─"], ["list"], ["show", "myexp", "-v"]):
        for tty in (True, False):
            result = nitro(*words, encoding=encoding, tty=tty)
            assert result.code == 0, result.err


def test_on_a_screen_there_are_a_bar_and_colours_and_no_color_means_none(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    words = ["train", "myexp", "--max-epochs", "2"]
    result = nitro(*words, tty=True)
    assert "\repoch 1/2 " in result.err or "\repoch 2/2 " in result.err
    assert "\x1b[" in result.err
    assert "\x1b" not in result.out
    plain = nitro(*words, tty=True, NO_COLOR="1")
    assert "\x1b" not in plain.err
    dumb = nitro(*words, tty=True, TERM="dumb")
    assert not {"\x1b", "\r"} & set(dumb.err)
    assert nitro(*words, "-q", tty=True).err == ""


def test_quiet_keeps_the_answer(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    result = nitro("train", "myexp", "--max-epochs", "1", "-q")
    assert re.fullmatch(r"runs/myexp/\S+\n", result.out)
    assert result.err == ""
    silent = nitro("train", "myexp", "--max-epochs", "1", "-qq")
    assert (silent.out, silent.err) == ("", "")


def test_cache_stats(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP.replace("(0, 4, 8)", "(0, 4)"))
    result = nitro("cache-stats", "myexp")
    assert result.code == 0, result.out
    rows = [line.split("\t") for line in result.out.splitlines()]
    assert rows[0] == ["program", "hits", "origin", "seconds", "why"]
    assert rows[-2] == ["misses 4 (compiled 4), entries 4, hits 8"]
    assert {"gradient", "update", "evaluation"} <= {row[0] for row in rows}
    events = nitro("cache-stats", "myexp", "--json").events
    assert (events[0]["event"], events[-1]["event"]) == ("config", "done")
    assert "nitro-acceptance" not in result.err
    cache = next(event for event in events if event["event"] == "cache")
    assert cache["ok"] is True
    assert cache["misses"] == cache["entries"] == cache["compiled"]
    assert (cache["linked"], cache["loaded"]) == (0, 0)


def test_counters_of_the_last_runs(there, nitro):
    result = nitro("cache-stats")
    assert result.code == 0, result.err
    *_, header, row = [line.split("\t") for line in result.out.splitlines()]
    assert header == ["run", "misses", "loaded", "entries", "hits", "compile", "saved", "status", "preset"]
    assert row[0] == f"runs/myexp/{the_run(there).name}"
    assert row[7] == "finished"
    assert int(row[1]) == int(row[3])
    assert row[2] == "0"
    shown = nitro("cache-stats", tty=True)
    assert the_run(there).name in shown.out


def test_no_runs_yet(folder, nitro):
    result = nitro("cache-stats")
    assert result.code == 0
    assert result.out.startswith("the store is switched off by NITRO_CACHE_DIR")
    assert "no runs" in result.err


def test_sys_exit_in_a_hook_is_no_success(folder, nitro):
    hook = "def build_data(self, dist): "
    write(folder, "experiments/leaves.py", SMALL.replace(hook + "...", hook + "raise SystemExit(0)"))
    assert nitro("train", "leaves").code == 3


PLAIN_CLASS = """
from __future__ import annotations
from dataclasses import dataclass
import numpy as np
from . import helper

@dataclass(frozen=True)
class Plain:
    scale: float = 2.0

    def build_data(self, dist):
        return {"train": [{"x": np.ones((2, 1), np.float32)}]}

    def build_model(self, rng):
        return None, {"w": helper.START}, {}

    def forward(self, model, ps, st, *, x):
        return x * ps["w"], st

    def loss(self, outputs):
        return (outputs**2).mean()
"""


def test_a_dataclass_with_postponed_annotations_and_a_relative_import_trains(folder, nitro):
    write(folder, "experiments/helper.py", "import numpy as np\n\nSTART = np.ones(1, np.float32)\n")
    write(folder, "experiments/plainclass.py", PLAIN_CLASS)
    result = nitro("train", "plainclass", "--scale", "3")
    assert result.code == 0, result.err
    assert "config scale=3.0 source=--scale" in result.err


def test_resume_with_a_run_directory_goes_on_there_and_nowhere_else(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    mine = ["train", "myexp", "--run-dir", "out/x", "-q"]
    assert nitro(*mine, "--max-epochs", "1").code == 0
    assert nitro("train", "myexp", "--max-epochs", "1", "-q").code == 0  # newer, below runs/
    resumed = nitro(*mine, "--resume", "--max-epochs", "2")
    assert (resumed.code, resumed.out) == (0, "out/x\n")
    nothing = nitro("train", "myexp", "--run-dir", "out/y", "--resume")
    assert nothing.code == 4
    assert "out/y" in nothing.err
    other = nitro("train", "myexp", "--run-dir", "out/y", "--resume=out/x")
    assert other.code == 2
    assert "leave out --run-dir" in other.err
    assert nitro("train", "myexp", "--run-dir", "out/x", "--resume=out/x", "--max-epochs", "2").code == 0
    both = nitro(*mine, "--resume", "--force")
    assert both.code == 2
    assert "keep one of them" in both.err
    assert not (folder / "out/y").exists()


def test_a_run_after_a_space_is_told_how_it_is_written(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    result = nitro("train", "myexp", "--resume", "20261130")
    assert result.code == 2
    assert "did you mean --resume=20261130?" in result.err


def test_a_run_without_a_checkpoint_says_how_to_go_on(folder, nitro):
    write(folder, "experiments/myexp.py", MYEXP)
    assert nitro("train", "myexp", "--max-epochs", "0", "--run-dir", "out/x").code == 0
    result = nitro("validate", "myexp", "--run", "out/x")
    assert result.code == 2
    assert "nitro train myexp --resume=out/x" in result.err
    assert "--run RUN" in result.err


def test_predictions_of_a_loader_for_training_say_what_their_rows_are(folder, nitro):
    loader = "ArrayLoader(x=x, y=x, batch_size=4, shuffle=True, drop_last=True)"
    text = MYEXP.replace('return {"train"', f'return {{"shuffled": {loader}, "train"').replace(
        "import Dev", "import ArrayLoader, Dev"
    )
    write(folder, "experiments/myexp.py", text)
    predict = ["predict", "myexp", "--weights", "fresh", "--out", "p.csv", "--force", "-q"]
    result = nitro(*predict, "--split", "shuffled")
    assert result.code == 0
    assert "split 'shuffled' drops 2 rows (drop_last)" in result.err
    assert "is shuffled: index counts in its order" in result.err
    assert "warning" not in nitro(*predict, "--split", "val").err
