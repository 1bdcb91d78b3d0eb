"""``nitro cache-stats`` without an experiment: the store, its upkeep, and what differs between two runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nitro_cli.cli import probing
from nitro_cli.cli.look_ups import with_store
from nitro_cli.cli.render import age_text, size_text
from nitro_cli.cli.stored import to_bytes, to_days
from nitro_cli.programs import store as store_module
from nitro_cli.programs.store import Store, open_store, settings

from .conftest import MYEXP, Result, write

SOURCES = str(Path(probing.__file__).parents[2])

READER = MYEXP.replace("(0, 4, 8)", "(0, 4)").replace(
    "return ((outputs", 'open("scale.txt").close()\n        return ((outputs'
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three runs and their store: the second has another loss, the third another one that reads a
    file."""
    root = tmp_path_factory.mktemp("trained")
    (root / "scale.txt").write_text("")
    for source in (MYEXP, MYEXP.replace(".mean()", ".sum()"), READER):
        write(root, "experiments/myexp.py", source)
        command = [sys.executable, "-m", "nitro_cli", "train", "myexp", "--max-epochs", "1", "-q"]
        env = {**os.environ, "PYTHONPATH": SOURCES, "NITRO_CACHE_DIR": str(root / "store")}  # the same jax as here
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    return root


@pytest.fixture
def there(trained, tmp_path, monkeypatch, own_store) -> Path:
    """A copy of ``trained``, to stand in."""
    here = tmp_path / "here"
    shutil.copytree(trained, here, symlinks=True)
    listed = here / "store/runs.jsonl"
    listed.write_text(listed.read_text().replace(str(trained), str(here)))
    monkeypatch.chdir(here)
    monkeypatch.setenv("NITRO_CACHE_DIR", str(here / "store"))
    return here


@pytest.fixture
def empty(folder, own_store) -> Path:
    return folder


def runs(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "runs/myexp").iterdir() if not path.is_symlink())


def tidy(text: str, root: Path) -> str:
    """``text`` with what differs from run to run named by what it is."""
    text = text.replace(str(root), "<here>")
    for number, run in enumerate(runs(root) if (root / "runs").exists() else [], 1):
        text = text.replace(run, f"RUN-{number}").replace(f"'{run[:8]}'", "'DAY'")
    text = re.sub(r"\b[0-9a-f]{12}-[0-9a-f]{8}\b", "KEY", text)
    text = re.sub(r"\b[\d.]+ (B|kB|MB)\b", "SIZE", text).replace("4 GB", "LIMIT")
    text = re.sub(r"\b\d+(\.\d+)?s\b", "SECONDS", text)
    text = re.sub(r"\b\d+ (s|min|h|d)\b|\bnow\b", "AGE", text)
    return re.sub(r"[ \t]+", " ", text)


# ---- what lies there


@pytest.mark.parametrize("tty", [True, False])
def test_the_listing(there, nitro, tty, snapshot):
    result = nitro("cache-stats", "--wide", tty=tty, NO_COLOR="1")
    assert result.code == 0, result.err
    assert tidy(result.out, there) == snapshot


def test_the_listing_as_json(there, nitro):
    result = nitro("cache-stats", "--json")
    entries = [event for event in result.events if event["event"] == "entry"]
    assert {entry["program"] for entry in entries} == {"gradient", "update", "evaluation", "loss", "optimizer_init"}
    reading = [entry for entry in entries if entry["state"] == "not kept"]
    assert {entry["program"] for entry in reading} == {"gradient", "loss"}
    assert all("reads a file" in entry["reason"] for entry in reading)
    total = result.event("store")
    assert (total["entries"], total["kept"]) == (len(entries), len(entries) - len(reading))
    assert total["hits"] == sum(entry["hits"] for entry in entries) > 0
    assert total["seconds_saved"] == pytest.approx(sum(entry["seconds_saved"] for entry in entries))
    assert total["bytes"] == Store(there / "store").size()
    assert total["root"] == str(there / "store")
    listed = [event for event in result.events if event["event"] == "run"]
    assert [Path(event["run"]).name for event in listed] == runs(there)[::-1]
    for event in listed:
        cache = event["cache"]
        assert cache["compiled"] + cache["linked"] + cache["loaded"] == cache["misses"]
    assert listed[0]["cache"]["loaded"] > 0
    assert listed[0]["cache"]["seconds_saved"] > 0
    assert result.events[-1]["event"] == "done"


def test_the_listing_and_the_upkeep_import_no_jax_and_answer_at_once(there):
    code = (
        "import sys, time; start = time.perf_counter(); from nitro_cli.cli.main import run; code = run(sys.argv[1:]);"
        "print('LOADED', [n for n in ('jax', 'numpy', 'flax', 'orbax') if n in sys.modules], code, file=sys.stderr);"
        "print('TOOK', time.perf_counter() - start, file=sys.stderr)"
    )
    explained = ["--explain", *runs(there)[:2]]
    for words in ([], explained, ["--prune", "--unused-for", "30d"], ["--clear"]):
        done = subprocess.run(
            [sys.executable, "-c", code, "cache-stats", *words],
            env={**os.environ, "PYTHONPATH": SOURCES},
            capture_output=True,
            text=True,
            check=True,
        )
        assert "LOADED [] 0" in done.stderr, done.stderr
        assert float(done.stderr.rpartition("TOOK")[2]) < 3.0


def test_runs_of_other_folders_stand_below_those_of_this_one(there, nitro, monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    result = nitro("cache-stats", "--json")
    listed = [event for event in result.events if event["event"] == "run"]
    assert len(listed) == 3
    assert Path(listed[0]["run"]).name == runs(there)[-1]
    assert all(event["status"] == "finished" and event["preset"] is None for event in listed)


def test_a_damaged_entry_and_a_cut_line_are_no_hindrance(there, nitro):
    store = Store(there / "store")
    first = store.listed()[0]
    first.path.write_text('{"experiment": "My')
    with open(there / "store" / "runs.jsonl", "a") as file:
        file.write('{"run_dir": "/some')
    result = nitro("cache-stats", tty=True)
    assert result.code == 0
    assert "Traceback" not in result.err
    assert "files (" in result.out  # the damaged entry, its uses and its executable
    assert "nitro cache-stats --prune removes them" in result.out


def test_a_damaged_run_json_is_said_in_its_row(there, nitro):
    (there / "runs/myexp" / runs(there)[-1] / "run.json").write_text("{")
    result = nitro("cache-stats")
    assert result.code == 0
    assert "run.json is damaged" in result.out


def test_an_empty_store(empty, nitro, snapshot):
    result = nitro("cache-stats", tty=True, NO_COLOR="1")
    assert (result.code, tidy(result.out, empty)) == (0, snapshot)


@pytest.mark.parametrize("words", [[], ["--clear"], ["--prune"], ["--explain", "a", "b"]], ids=" ".join)
@pytest.mark.parametrize("kind", ["none", "file", "open", "foreign", "readonly"])
def test_without_a_store(folder, nitro, monkeypatch, snapshot, kind, words):
    root = folder / "store"
    if kind == "file":
        root.write_text("")
    elif kind != "none":
        root.mkdir(mode=0o700)
    if kind == "open":
        root.chmod(0o777)
    elif kind == "foreign":
        monkeypatch.setattr(store_module.os, "getuid", lambda: os.geteuid() + 1)
    elif kind == "readonly":
        monkeypatch.setattr(store_module.os, "access", lambda *_: False)
    for run in ("a", "b"):
        write(folder, f"runs/x/{run}/run.json", '{"cache": {"programs": [{"program": "step", "entry": "X/step/1-2"}]}}')
    result = nitro("cache-stats", *words, NITRO_CACHE_DIR="none" if kind == "none" else str(root), NO_COLOR="1")
    assert "Traceback" not in result.err
    text = f"{result.code}\n{result.out}{result.err}".replace(str(folder), "<here>")
    assert text == snapshot


# ---- what is removed


def test_clear(there, nitro):
    size, count = Store(there / "store").size(), len(Store(there / "store").listed())
    result = nitro("cache-stats", "--clear")
    assert result.code == 0
    assert result.out == f"removed {count} entries, {size_text(size)} freed in {there / 'store'}\n"
    assert Store(there / "store").size() == 0
    again = nitro("cache-stats", "--clear", "--json")
    assert again.event("clear") == {
        "event": "clear", "root": str(there / "store"), "entries": 0, "freed_bytes": 0, "left_bytes": 0
    }  # fmt: skip
    assert nitro("cache-stats", "--clear").out == f"{there / 'store'} is empty\n"
    assert len(runs(there)) == 3


def test_what_cannot_be_removed_is_said(there, nitro, monkeypatch):
    monkeypatch.setattr(store_module, "_remove", lambda path: None)
    result = nitro("cache-stats", "--clear")
    assert result.code == 5
    assert re.search(r"error: \S+ kB could not be removed from ", result.err)


def test_prune(there, nitro):
    store = Store(there / "store")
    old = time.time() - 40 * 86400
    for row in store.listed():
        if row.entry.program == "update":
            os.utime(row.path, (old, old))
    assert nitro("cache-stats", "--prune").out.startswith("nothing to remove; ")
    result = nitro("cache-stats", "--prune", "--unused-for", "30d")
    assert result.code == 0
    assert result.out.startswith("removed 1 file or entry, ")
    assert "update" not in {row.entry.program for row in store.listed()}
    assert nitro("cache-stats", "--prune", "--to-size", "40kB", "--json").event("prune")["left_bytes"] <= 40_000
    assert store.size() <= 40_000


@pytest.mark.parametrize(
    ("text", "count"),
    [("0", 0), ("500MB", 5 * 10**8), ("1.5gb", 15 * 10**8), ("2GiB", 2**31), ("10 kB", 10**4), ("7B", 7)],
)
def test_a_size_is_read(text, count):
    assert to_bytes(text) == count


@pytest.mark.parametrize(("text", "days"), [("0", 0.0), ("30d", 30.0), ("12h", 0.5), ("2W", 14.0), ("1.5 d", 1.5)])
def test_an_age_is_read(text, days):
    assert to_days(text) == days


@pytest.mark.parametrize("text", ["", "500", "MB", "-5MB", "5XB", "1e3MB", "nan", "5MB3"])
def test_a_size_that_is_none_is_refused(empty, nitro, text):
    result = nitro("cache-stats", "--prune", f"--to-size={text}")
    assert (result.code, result.out) == (2, "")
    assert result.err == f"error: --to-size {text}: a size is a number and its unit: 500MB, 1.5GB or 2GiB\n"


@pytest.mark.parametrize("text", ["", "30", "d", "-3d", "5m", "two weeks"])
def test_an_age_that_is_none_is_refused(empty, nitro, text):
    result = nitro("cache-stats", "--prune", f"--unused-for={text}", "--to-size", "x")
    assert result.code == 2
    assert len(re.findall("^error: ", result.err, re.MULTILINE)) == 2
    assert "12h, 30d or 2w" in result.err


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1234567, "1.23 MB"), (999_600, "1 MB"), (4 * 10**9, "4 GB")],
)
def test_sizes_for_people(count, text):
    assert size_text(count) == text


@pytest.mark.parametrize(("seconds", "text"), [(-3, "now"), (0.2, "now"), (59, "59 s"), (3599, "59 min"), (7e5, "8 d")])
def test_ages_for_people(seconds, text):
    assert age_text(seconds) == text


# ---- words that do not go together


@pytest.mark.parametrize(
    "words",
    [
        ["--clear", "--prune"],
        ["--clear", "--probe", "--prune"],
        ["myexp", "--clear"],
        ["myexp", "--explain", "a", "b"],
        ["--to-size", "5MB"],
        ["--unused-for", "30d", "--clear"],
        ["--cold"],
        ["--verify-cache", "--preset", "current"],
        ["myexp", "--cold", "--verify-cache"],
        ["--claer"],
        ["--explain", "latest"],
        ["--explain=latest"],
        ["--explain", "latest", "--wide"],
        ["--explain", "latest", "latest", "latest"],
        ["--prune", "--to-size"],
        ["--prune", "--to-size", "5MB", "--to-size", "6MB"],
        ["--clear=all"],
        ["--max-size", "5MB"],
    ],
    ids=" ".join,
)
def test_words_that_do_not_go_together(here, nitro, monkeypatch, tmp_path, words, snapshot):
    monkeypatch.setenv("NITRO_CACHE_DIR", str(tmp_path / "store"))
    result = nitro("cache-stats", *words)
    assert (result.code, result.out) == (2, "")
    assert result.err.replace(str(here), "<here>") == snapshot


# ---- what differs


@pytest.mark.parametrize("tty", [True, False])
def test_what_differs_between_two_runs(there, nitro, tty, snapshot):
    first, second, _ = runs(there)
    result = nitro("cache-stats", "--explain", first, second, tty=tty, NO_COLOR="1")
    assert result.code == 0, result.err
    assert tidy(result.out + result.err, there) == snapshot


def test_equal_runs_and_the_names_of_runs(there, nitro):
    first, _, third = runs(there)
    result = nitro("cache-stats", "--explain", first[:-1], f"runs/myexp/{first}", "--json")
    rows = [event for event in result.events if event["event"] == "difference"]
    assert [row["program"] for row in rows] == ["gradient", "update", "evaluation", "loss", "loss"]
    assert all(row["equal"] and not row["differences"] for row in rows)
    newest = nitro("cache-stats", "--explain", first, "latest")
    assert newest.err.endswith(f"runs/myexp/{first} -> runs/myexp/{third}\n")


def test_a_program_that_only_one_run_has(there, nitro):
    first, second, _ = runs(there)
    path = there / "runs/myexp" / second / "run.json"
    facts = json.loads(path.read_text())
    facts["cache"]["programs"] = [p for p in facts["cache"]["programs"] if p["program"] != "update"]
    path.write_text(json.dumps(facts))
    assert "update\tonly the first run has it" in nitro("cache-stats", "--explain", first, second).out
    assert "update\tonly the second run has it" in nitro("cache-stats", "--explain", second, first).out


def test_entries_that_are_gone(there, nitro, snapshot):
    first, second, _ = runs(there)
    for row in Store(there / "store").listed():
        if row.entry.program == "gradient":
            row.path.unlink()
    result = nitro("cache-stats", "--explain", first, second)
    assert result.code == 1
    assert tidy(result.out, there) == snapshot
    assert "gradient\tequal" in nitro("cache-stats", "--explain", first, first).out  # a name says that much


def test_runs_without_a_store_cannot_be_explained(there, nitro):
    first, second, _ = runs(there)
    for run in (first, second):
        path = there / "runs/myexp" / run / "run.json"
        path.write_text(re.sub(r'"entry": "[^"]*"', '"entry": ""', path.read_text()))
    result = nitro("cache-stats", "--explain", first, second)
    assert result.code == 1
    assert "gradient\ta run without a store does not know what its programs depend on" in result.out


def test_a_run_without_a_store_is_named(there, nitro):
    first, second, _ = runs(there)
    path = there / "runs/myexp" / second / "run.json"
    path.write_text(re.sub(r'"entry": "[^"]*"', '"entry": ""', path.read_text()))
    result = nitro("cache-stats", "--explain", first, second)
    assert result.code == 1
    said = [line for line in result.err.splitlines() if "warning" in line]
    assert [line.partition(": ")[2] for line in said] == [
        f"runs/myexp/{second} ran without a store (NITRO_CACHE_DIR=none, or one that could not be used), so nobody "
        "noted what its programs depend on: run it again with one to compare it"
    ]
    events = nitro("cache-stats", "--explain", first, second, "--json").events
    assert [f"runs/myexp/{second} ran without" in event["message"] for event in events if event["event"] == "warning"]


def test_runs_that_are_not_there(there, nitro, snapshot):
    first, *_ = runs(there)
    for words in ((first, "nonsense"), (first, "runs/nowhere"), (first[:8], first)):
        result = nitro("cache-stats", "--explain", *words)
        assert (result.code, result.out) == (2, "")
        assert tidy(result.err, there) == snapshot


def test_runs_that_name_no_programs(empty, nitro):
    for run in ("a", "b"):
        write(empty, f"runs/x/{run}/run.json", "{}")
    result = nitro("cache-stats", "--explain", "a", "b")
    assert result.code == 2
    assert result.err.startswith("error: the run.json of these runs names no programs\n")


# ---- where programs run


def test_what_the_store_has_to_say_is_a_warning_in_words(there, nitro):
    for path in (there / "store" / "executables").iterdir():
        path.write_bytes(path.read_bytes()[:-1])
    result = nitro("validate", "myexp")
    assert result.code == 0, result.err
    lines = [line for line in result.err.splitlines() if "is damaged" in line]
    assert lines
    assert all(re.match(r"\d\d:\d\d:\d\d warning: the stored executable \w+ is damaged and is comp", x) for x in lines)
    assert "StoreWarning" not in result.err


def test_a_store_that_cannot_be_used_is_a_warning_and_not_the_end(there, nitro):
    file = there / "file"
    file.write_text("")
    result = nitro("validate", "myexp", "--json", NITRO_CACHE_DIR=str(file))
    assert result.code == 0
    (warning,) = [event for event in result.events if event["event"] == "warning"]
    assert warning["message"].startswith(f"nitro keeps no compiled programs: {file} is not a folder")


def test_verify_traces_what_is_there_and_says_how_much(there, nitro, empty_cache):
    write(there, "experiments/myexp.py", MYEXP)
    result = nitro("validate", "myexp", "--verify-cache")
    assert result.code == 0, result.err
    found = re.search(r"verified: (\d+) programs were in the store, and what the code traces to now is", result.err)
    assert found
    assert int(found[1]) >= 2
    assert (settings.verify, settings.cold, settings.found) == (False, False, 0)
    nothing = nitro("validate", "myexp", "--verify-cache", NITRO_CACHE_DIR="none")
    assert "verified: nothing, for none of these programs was in the store" in nothing.err


def test_a_stored_program_that_is_another_one_ends_the_command(there, nitro, empty_cache):
    write(there, "experiments/myexp.py", MYEXP)
    store = open_store()
    assert store is not None
    for row in store.listed():
        if row.entry.program == "evaluation":
            payload, name = store.executable(row.entry.executable), "f" * 64
            store.keep(store_module.replace(row.entry, lowered=name, executable=name), payload)
    result = nitro("validate", "myexp", "--verify-cache")
    assert (result.code, result.out) == (1, "")
    assert re.search("^error: the stored program MyExp/evaluation/[^ ]+ is not what its code", result.err, re.MULTILINE)
    states = {row.state for row in store.listed() if row.entry.program == "evaluation"}
    assert "poisoned" in states


def test_cold_looks_nothing_up(there, nitro):
    from nitro_cli import cache_reset

    write(there, "experiments/myexp.py", MYEXP)
    origins: dict[bool, set[str]] = {}
    for cold in (False, True):
        cache_reset()
        result = nitro("validate", "myexp", "--json", *(["--cold"] if cold else []))
        assert result.code == 0, result.err
        origins[cold] = {event["origin"] for event in result.events if event["event"] == "compile"}
    assert origins == {False: {"loaded"}, True: {"compiled"}}


def test_warnings_that_are_not_the_stores_go_where_they_went(nitro, capsys):
    import warnings

    from nitro_cli.cli.console import Output
    from nitro_cli.cli.session import Session

    @with_store
    def command(session: Any) -> int:
        warnings.warn("something else", DeprecationWarning, 1)
        return 0

    session = Session("train", "", Output({}, sys.stdout, sys.stderr, {}), _nothing_said())
    with pytest.warns(DeprecationWarning, match="something else"):
        assert command(session) == 0


def _nothing_said() -> Any:
    from nitro_cli.cli.argv import Parsed

    return Parsed()


# ---- whether this machine hits


def test_the_probe_of_this_machine(folder, nitro, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", SOURCES)
    result = nitro("cache-stats", "--probe", "--json")
    assert result.code == 0, result.out
    rows = {event["program"]: event for event in result.events if event["event"] == "probe"}
    assert {name: (row["first"], row["second"], row["equal"]) for name, row in rows.items()} == {
        "gradient": ("compiled", "loaded", True),
        "cholesky": ("compiled", "loaded", True),
        "jax's own": ("compiled", "loaded", True),
    }
    assert list(folder.iterdir()) == []


@pytest.fixture
def acting(monkeypatch) -> Callable[..., None]:
    """Sets what the two processes of a probe did."""

    def act(*second: tuple[str, str, str], said: tuple[str, ...] = ()) -> None:
        def process(folder: Path, name: str) -> dict[str, Any]:
            rows = [
                {"program": p, "did": "compiled" if name == "first" else d, "seconds": 0.5, "said": list(said),
                 "result": "a" if name == "first" else r}
                for p, d, r in second
            ]  # fmt: skip
            return {"device": "cpu x", "rows": rows}

        monkeypatch.setattr(probing, "_process", process)

    return act


@pytest.mark.parametrize(
    ("second", "said", "code"),
    [
        ((("gradient", "loaded", "a"), ("cholesky", "loaded", "a"), ("jax's own", "compiled", "a")), (), 0),
        ((("gradient", "linked", "a"), ("cholesky", "compiled", "a"), ("jax's own", "loaded", "a")), (), 1),
        ((("gradient", "compiled", "a"), ("jax's own", "loaded", "a")), ("it does not load", "it does not load"), 1),
        ((("gradient", "loaded", "b"), ("jax's own", "loaded", "a")), (), 1),
    ],
)
def test_verdicts_of_a_probe(folder, nitro, acting, second, said, code, snapshot):
    acting(*second, said=said)
    result: Result = nitro("cache-stats", "--probe", tty=True, NO_COLOR="1")
    assert result.code == code
    assert result.out == snapshot


@pytest.mark.parametrize(("words", "how"), [("exit 3", "exit code 3"), ("kill -SEGV $$", "signal 11")])
def test_a_probe_whose_process_dies(folder, nitro, monkeypatch, words, how):
    python = write(folder, "python", f"#!/bin/bash\necho one >&2\necho two >&2\n{words}\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    result = nitro("cache-stats", "--probe")
    assert result.code == 1
    assert result.err == f"error: the first process ended with {how}\n   = one\n   = two\n"
