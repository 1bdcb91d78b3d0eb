"""Looking after the store: what is listed, found by name, pruned and cleared, and what is left alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from nitro_cli.programs import store as stores
from nitro_cli.programs.store import KEPT_RUNS, Entry, Store, StoreWarning, open_store, settings, store_as_it_lies

KEY = "0123456789abcdef" * 4


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store")


def entry(number: int = 0, **changes: Any) -> Entry:
    key = f"{number:02x}{KEY[2:]}"
    facts: dict[str, Any] = {
        "experiment": "MyExp",
        "program": "gradient",
        "key": key,
        "code": {"loss": f"code {number}"},
        "places": {},
        "arguments": {},
        "settings": {},
        "environment": {},
        "reads": {},
        "lowered": key,
        "executable": key,
        "bytes": 1000,
        "seconds": {"compile": 2.0},
        "created": time.time(),
    }
    return Entry(**facts | changes)


def keep(store: Store, number: int, days_ago: float = 0.0, **changes: Any) -> Entry:
    made = entry(number, **changes)
    store.keep(made, b"x" * made.bytes if made.executable and made.bytes else None)
    then = time.time() - days_ago * 86400
    for path in (store._path(made), store.executables / made.executable):
        if path.is_file():
            os.utime(path, (then, then))
    return made


def numbers(store: Store) -> list[int]:
    return sorted(int(row.entry.key[:2], 16) for row in store.listed())


def test_what_is_kept_out_is_not_loaded_though_its_executable_is_there():
    assert entry().usable
    assert not entry(kept_out=("`loss` reads a file",)).usable
    assert not entry(poisoned="verification found another program").usable
    assert not entry(executable="").usable


def test_an_entry_is_found_by_the_name_that_run_json_gives_it(store):
    first, second = keep(store, 1), keep(store, 1, reads={"width": "int 3"})
    assert first.name != second.name
    for wanted in (first, second):
        found = store.entry_by_name(wanted.name)
        assert found is not None
        assert (found.key, found.reads) == (wanted.key, wanted.reads)
    for name in ("", "MyExp", "MyExp/gradient", "MyExp/gradient/", "a/b/c-d", "../../x/y-z", first.name[:-1]):
        assert store.entry_by_name(name) is None


def test_the_states_of_an_entry(store):
    keep(store, 1)
    keep(store, 2, kept_out=("`loss` reads a file", "and more"))
    keep(store, 3, poisoned="verification found another program")
    store.drop(keep(store, 4))
    assert [(row.state, row.reason) for row in sorted(store.listed(), key=lambda row: row.entry.key)] == [
        ("kept", ""),
        ("not kept", "`loss` reads a file; and more"),
        ("poisoned", "verification found another program"),
        ("lost", "its executable did not load here, and is compiled anew"),
    ]


def test_uses_are_counted_and_a_damaged_line_is_left_out(store):
    kept = keep(store, 1)
    before = settings.found
    store.used(kept, 0.5)
    store.used(kept, 0.25)
    assert settings.found - before == 2
    with open(store._path(kept).with_suffix(".uses"), "ab") as file:
        file.write(b"12\nnonsense here\n\xff\xfe\n")
    (row,) = store.listed()
    assert (row.hits, row.seconds_saved) == (2, 3.25)


def test_sizes(store):
    keep(store, 1)
    folder = store.root / "jax" / f"0.10.2-cpu-{'a' * 12}"
    folder.mkdir(parents=True)
    (folder / "jit_f-0a-cache").write_bytes(b"y" * 500)
    (row,) = store.listed()
    assert row.bytes == 1000 + store._path(row.entry).stat().st_size
    assert store.size("jax") == 500
    assert store.size() == store.size("jax") + 1000 + 32 + store._path(row.entry).stat().st_size


def test_prune_by_age_and_by_size(store):
    for number, days in ((1, 50.0), (2, 20.0), (3, 5.0), (4, 1.0)):
        keep(store, number, days)
    store.prune(max_days=30)
    assert numbers(store) == [2, 3, 4]
    one = store.size() // 3
    store.prune(max_bytes=2 * one + 100)
    assert numbers(store) == [3, 4]
    store.prune(max_bytes=0)
    assert numbers(store) == []
    assert list(store.executables.iterdir()) == []


def test_an_executable_that_two_entries_share_stays_with_the_second(store):
    keep(store, 1, 50.0)
    keep(store, 2, 1.0, executable=entry(1).executable, lowered=entry(1).lowered, bytes=0)
    store.prune(max_days=30)
    assert numbers(store) == [2]
    assert (store.executables / entry(1).executable).exists()


def test_the_list_of_runs_is_cut_when_it_is_long(store):
    for number in range(KEPT_RUNS + 5):
        store.note_run({"run_dir": str(number)})
    with open(store.root / "runs.jsonl", "ab") as file:
        file.write(b'{"cut\n3\n\xff\n')
    assert len(store.runs()) == KEPT_RUNS + 5
    store.prune()
    assert [row["run_dir"] for row in store.runs()] == [str(n) for n in range(8, KEPT_RUNS + 5)]


def strangers(root: Path) -> list[Path]:
    """What a folder that somebody also uses for other things may hold."""
    names = [
        "notes.tmp",
        "programs/app/src/main/package.json",
        "executables/tool",
        "facts/readme.txt",
        "jax/jax/version.py",
        "locks/poetry.lock",
        "data/values.tmp",
    ]
    paths = [root / name for name in names]
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("mine")
        os.utime(path, (0, 0))
    return paths


@pytest.mark.parametrize("how", ["clear", "prune", "bounds"])
def test_nothing_but_its_own_files_is_ever_removed_or_counted(store, how):
    keep(store, 1, 100.0)
    size = store.size()
    others = strangers(store.root)
    assert store.size() == size
    assert not set(others) & set(store.orphans())
    if how == "clear":
        assert store.clear() == size
    else:
        store.prune(**({"max_bytes": 0} if how == "bounds" else {}))
    assert numbers(store) == []
    assert [path for path in others if not path.exists()] == []


def test_clear_leaves_an_empty_folder_that_can_be_used_again(store):
    keep(store, 1)
    store.note_run({"run_dir": "x"})
    store.tidy()
    assert store.clear() > 1000
    assert list(store.root.iterdir()) == []
    keep(store, 2)
    assert numbers(store) == [2]


def test_the_store_as_it_lies(tmp_path, monkeypatch):
    monkeypatch.setenv("NITRO_CACHE_DIR", "none")
    assert store_as_it_lies() == (None, "")
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("NITRO_CACHE_DIR", str(file))
    store, problem = store_as_it_lies()
    assert store is None
    assert problem.startswith(f"{file} is not a folder")
    monkeypatch.setenv("NITRO_CACHE_DIR", str(tmp_path / "made"))
    store, problem = store_as_it_lies()
    assert store is not None
    assert (store.root, problem) == (tmp_path / "made", "")
    assert open_store() is not None


# ---- damage, and what a disk refuses


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"experiment": "MyExp"}', "\xff"])
def test_a_damaged_entry_is_told_of_once_and_taken_out(store, text):
    kept = keep(store, 1)
    store._path(kept).write_text(text)
    with pytest.warns(StoreWarning, match="an entry of MyExp/gradient in the store was damaged"):
        assert store.find("MyExp", "gradient", kept.key, {}) is None
    assert kept.key[:40] in settings.damaged
    assert store.find("MyExp", "gradient", kept.key, {}) is None
    keep(store, 1)
    assert kept.key[:40] not in settings.damaged
    assert store.find("MyExp", "gradient", kept.key, {}) is not None


def test_an_entry_of_another_version_is_not_damaged(store, recwarn):
    kept = keep(store, 1, format="0")
    assert store.find("MyExp", "gradient", kept.key, {}) is None
    assert (list(recwarn), store._path(kept).exists()) == ([], True)


def test_a_disk_that_refuses_is_told_of_by_what_it_refused(store, monkeypatch, recwarn):
    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    made = entry(1)
    monkeypatch.setattr(stores.os, "replace", refuse)
    for step in (lambda: store.keep(made, b"x"), lambda: store.keep(made, None), lambda: store.poison(made, "")):
        step()
    store.tidy()
    assert [str(warning.message) for warning in recwarn] == [
        f"the store could not keep {what}: No space left on device"
        for what in (
            f"the executable of {made.name}",
            f"the entry {made.name}",
            f"that {made.name} must not be used",
            "the time of the last tidying",
        )
    ]


# ---- the list of runs


NOTE = """
import sys
from pathlib import Path
from nitro_cli.programs.store import Store
for number in range(60):
    Store(Path(sys.argv[1])).note_run({"run_dir": f"{sys.argv[2]}{number}"})
"""


def test_no_run_is_lost_while_another_process_trims_the_list(store, monkeypatch):
    for number in range(120):
        store.note_run({"run_dir": str(number)})
    monkeypatch.setattr(stores, "KEPT_RUNS", 120)
    noting = [subprocess.Popen([sys.executable, "-c", NOTE, str(store.root), name]) for name in "ab"]
    while any(process.poll() is None for process in noting):
        store._trim_runs()
    store._trim_runs()
    assert {row["run_dir"] for row in store.runs()} == {f"{name}{n}" for name in "ab" for n in range(60)}


def test_a_line_that_was_cut_does_not_spoil_the_next(store):
    store.note_run({"run_dir": "one"})
    with open(store.root / "runs.jsonl", "ab") as file:
        file.write(b'{"run_dir": "tw')
    store.note_run({"run_dir": "three"})
    assert [row["run_dir"] for row in store.runs()] == ["one", "three"]


# ---- whose it is


def test_every_folder_is_made_for_this_user_alone(store):
    before = os.umask(0o002)
    try:
        keep(store, 1)
        store.note_run({})
    finally:
        os.umask(before)
    folders = [store.root, *(path for path in store.root.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o777 for path in folders} == {0o700}


@pytest.mark.parametrize("name", ["programs", "executables", "jax", "locks"])
def test_a_store_with_a_folder_that_others_can_write_to_is_not_used(store, monkeypatch, name):
    (store.root / name).mkdir(parents=True, exist_ok=True)
    (store.root / name).chmod(0o770)
    monkeypatch.setenv("NITRO_CACHE_DIR", str(store.root))
    found, problem = store_as_it_lies()
    assert found is None
    assert problem.startswith(f"other users can write to {store.root / name}, ")
    assert problem.endswith(f"chmod 700 {store.root / name}")


def test_an_entry_in_a_folder_that_others_can_write_to_is_not_read(store):
    kept = keep(store, 1)
    store._path(kept).parent.chmod(0o777)
    with pytest.warns(StoreWarning, match="is not read: other users can write to"):
        assert store.find("MyExp", "gradient", kept.key, {}) is None


# ---- jax's own


def jax_entry(store: Store, name: str, *, written: float, read: float) -> Path:
    """An entry of jax's cache that was written and read so many days ago."""
    folder = store.root / "jax" / f"0.10.2-cpu-{'a' * 12}"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"jit_{name}-0a-cache"
    path.write_bytes(b"y" * 500)
    os.utime(path, (time.time() - read * 86400, time.time() - written * 86400))
    return path


def test_what_jax_still_reads_stays(store):
    used, noted, unused = (
        jax_entry(store, name, written=100, read=read) for name, read in (("a", 3), ("b", 100), ("c", 100))
    )
    mark = noted.with_name("jit_b-0a-atime")
    mark.write_bytes(bytes(8))
    store.prune(max_days=90)
    assert [path.exists() for path in (used, noted, mark, unused)] == [True, True, True, False]
    store.prune(max_days=0)
    assert [path.exists() for path in (used, noted, mark)] == [False, False, False]
