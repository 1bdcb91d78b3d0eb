"""The store on disk: what is damaged, foreign, old or too much; and what is kept out of it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from test_processes import all_loaded, origins, same_numbers

from nitro_cli.programs import store as stores
from nitro_cli.programs.build import build
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.key import Request
from nitro_cli.programs.store import Entry, Store, StoreWarning, open_store

# ---- damage --------------------------------------------------------------------------------------------------------


def _executables(store):
    return [store.executables / row.entry.executable for row in store.listed()]


def _entries(store):
    return [row.path for row in store.listed()]


def _truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def _emptied(path):
    path.write_bytes(b"")


def _flipped(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def _of_anybody(path):
    path.chmod(0o666)


def _of_somebody_else(path):
    if os.getuid():
        pytest.skip("only root may give files away")
    os.chown(path, 12345, 12345)


def _gone(path):
    path.unlink()


def _a_link(path):
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGE = [_truncated, _emptied, _flipped, _of_anybody, _of_somebody_else, _gone, _a_link]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("files", [_executables, _entries])
def test_what_is_damaged_is_compiled_anew_and_replaced(process, files, damage):
    first = process()
    for path in files(Store(process.store)):
        damage(path)
    second = process()
    assert "loaded" not in origins(second).values()
    same_numbers(first, second)
    third = process()
    assert all_loaded(third)
    assert third["warnings"] == []
    same_numbers(first, third)


def test_a_damaged_entry_is_said_and_counted_as_a_miss(process):
    process()
    for path in _entries(Store(process.store)):
        _truncated(path)
    second = process()
    assert set(origins(second, "why").values()) == {"its entry in the store was damaged"}
    said = [warning for warning in second["warnings"] if "in the store was damaged: its program is compiled" in warning]
    assert len(said) == len(set(said)) > 3


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
def test_a_folder_or_a_pipe_in_the_place_of_a_file_is_a_miss(process, make):
    first = process()
    for path in _executables(Store(process.store)):
        path.unlink()
        make(path)
    second = process()
    assert "loaded" not in origins(second).values()
    same_numbers(first, second)


def test_the_executable_of_another_program_is_not_taken_for_this_one(process):
    first = process()
    store = Store(process.store)
    gradient, update = (
        store.executables / row.entry.executable
        for row in store.listed()
        if row.entry.program in ("gradient", "update")
    )
    gradient.write_bytes(update.read_bytes())
    second = process()
    assert origins(second)["gradient"] == "compiled"
    assert ["is damaged and is compiled anew" in warning for warning in second["warnings"]] == [True]
    same_numbers(first, second)


def test_files_that_are_not_the_stores_do_not_matter_and_stay(process):
    first = process()
    folders = [process.store, *(path for path in process.store.rglob("*") if path.is_dir())]
    strangers = [folder / "notes.txt" for folder in folders]
    strangers += [path.with_name("0.json") for path in _entries(Store(process.store))]
    for path in strangers:
        path.write_text("{}")
    second = process()
    assert all_loaded(second)
    assert second["warnings"] == []
    same_numbers(first, second)
    Store(process.store).prune(max_bytes=0)
    assert all(path.exists() for path in strangers)


@pytest.mark.parametrize("mode", [0o777, 0o770])
def test_a_folder_that_others_can_write_to_is_not_used(process, mode):
    first = process()
    process.store.chmod(mode)
    second = process()
    assert set(origins(second).values()) == {"compiled"}
    assert [warning for warning in second["warnings"] if "chmod 700" in warning]
    same_numbers(first, second)


# ---- size and age --------------------------------------------------------------------------------------------------


@pytest.fixture
def store(tmp_path, monkeypatch):
    """The store of this process, for the time of a test."""
    monkeypatch.setenv("NITRO_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(stores.settings, "opened", {})
    found = open_store()
    assert found is not None
    return found


def _kept(store, name, *, age=0.0, size=1000, executable=None):
    """An entry that was used ``age`` days ago."""
    digest = executable or name * 64
    entry = Entry("E", "gradient", name * 64, {}, {}, {}, {}, {}, {}, digest, digest, bytes=size)
    store.keep(entry, bytes(size))
    then = time.time() - age * 86400
    for path in (store._path(entry), store.executables / digest):
        os.utime(path, (then, then))
    return entry


def _names(store):
    return [row.entry.key[0] for row in store.listed()]


def test_what_nobody_used_for_long_goes(store):
    _kept(store, "a", age=10), _kept(store, "b", age=100)
    store.prune(max_days=90)
    assert _names(store) == ["a"]
    assert [path.name for path in store.executables.iterdir()] == ["a" * 64]


def test_the_least_recently_used_go_first(store):
    for name, age in zip("abcd", (3, 4, 1, 2), strict=True):
        _kept(store, name, age=age, size=10000)
    store.used(store.find("E", "gradient", "b" * 64, {}), 0.0)
    store.prune(max_bytes=25000)
    assert sorted(_names(store)) == ["b", "c"]


def test_an_executable_stays_while_one_entry_has_it(store):
    _kept(store, "a", age=100), _kept(store, "b", age=1, executable="a" * 64)
    store.prune(max_days=90)
    assert _names(store) == ["b"]
    assert store.executable("a" * 64) is not None


def test_orphans_go_and_what_is_minutes_old_stays(store):
    _kept(store, "a")
    lost = [store.executables / ("f" * 64), store._path(_kept(store, "b")), store.executables / "ab.1.0f.tmp"]
    for path in lost:
        path.write_bytes(b"{")
    (store.executables / ("c" * 64)).write_bytes(b"new")
    for path in lost[:2]:
        os.utime(path, (time.time() - 3600,) * 2)
    store.prune()
    assert _names(store) == ["a"]
    assert [path.exists() for path in lost[:2]] == [False, False]
    assert (store.executables / ("c" * 64)).exists()


PRUNE = """
import sys
from pathlib import Path
from nitro_cli.programs.store import Store
store = Store(Path(sys.argv[1]))
print(store.prune(max_bytes=20000))
"""


def test_two_processes_prune_at_once(store):
    for index in range(200):
        digest = f"{index:x}".ljust(64, "0")
        store.keep(Entry("E", "gradient", digest, {}, {}, {}, {}, {}, {}, digest, digest, bytes=1000), bytes(1000))
    command = [sys.executable, "-c", PRUNE, str(store.root)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    counts = [int(process.communicate(timeout=60)[0]) for process in both]
    assert max(counts) > 150
    assert store.size() <= 20000
    assert store.orphans() == []
    assert all(store.executable(row.entry.executable) is not None for row in store.listed())


def test_a_poisoned_entry_stays_poisoned(store):
    entry = _kept(store, "a")
    store.poison(entry, "for the test")
    found = store.find("E", "gradient", entry.key, {})
    assert found is not None
    assert not found.usable
    assert [row.state for row in store.listed()] == ["poisoned"]


def test_an_entry_of_another_format_is_no_entry(store):
    entry = _kept(store, "a")
    store.keep(replace(entry, format="0"), None)
    assert store.find("E", "gradient", entry.key, {}) is None


def test_a_lock_that_is_held_too_long_is_not_waited_for(store, monkeypatch):
    monkeypatch.setattr(stores, "WAIT_SECONDS", 0.1)
    with store.alone("k" * 64):
        start = time.perf_counter()
        with store.alone("k" * 64):
            pass
    assert time.perf_counter() - start < 5


# ---- kept out ------------------------------------------------------------------------------------------------------


def _built(store, function, code=None, **facts):
    request = Request("gradient", code or fingerprint(), {}, {}, experiment="E", **facts)
    return build(request, function, [jax.ShapeDtypeStruct((), jnp.float32)], reads=set(), found={})


def _kept_out(store, function):
    """The reasons of a program whose code the walk was not shown: twice, since none may be loaded."""
    reasons = [_built(store, function), _built(store, function)]
    assert [built.origin for built in reasons if built.origin == "loaded"] == []
    return list(reasons[1].kept_out)


TABLE = {"now": time.perf_counter_ns}
NUMBERS = iter(range(1000))


def unseen(x):
    return x * 2


def test_code_that_no_name_leads_to_keeps_a_program_out(store):
    reasons = _kept_out(store, lambda x: unseen(x))
    assert {reason.partition("` in `")[0] for reason in reasons} == {"`<lambda>", "`unseen"}
    assert all("no name in the code leads to it" in reason for reason in reasons)


def test_a_file_that_is_opened_in_the_trace(store, tmp_path):
    (tmp_path / "number").write_text("2")

    def function(x):
        return x * float((tmp_path / "number").read_text())

    assert any(
        reason.startswith("`function` in test_store.py:") and reason.endswith("reads a file while it is traced")
        for reason in _kept_out(store, function)
    )


def test_an_environment_variable_that_is_read_in_the_trace(store):
    def function(x):
        return x * len(os.environ.get("HOME", ""))

    assert any("reads the environment variable HOME while it is traced" in r for r in _kept_out(store, function))


@pytest.fixture
def seen(monkeypatch):
    """The walk says of every function that it covers it, so that the second trace alone can find something."""
    from nitro_cli.programs import witness

    monkeypatch.setattr(witness, "user_code", lambda jaxpr: ())


@pytest.mark.usefixtures("seen")
def test_a_clock_gives_another_program_in_the_second_trace(store):
    assert _kept_out(store, lambda x: x + TABLE["now"]() % 65536) == ["a second trace gave another program"]


@pytest.mark.usefixtures("seen")
def test_an_iterator_gives_another_program_in_the_second_trace(store):
    assert _kept_out(store, lambda x: x + next(NUMBERS)) == ["a second trace gave another program"]


@pytest.mark.usefixtures("seen")
def test_a_function_that_cannot_be_traced_twice(store):
    once = iter([1.0])
    built = _built(store, lambda x: x + next(once))
    assert list(built.kept_out) == ["a second trace failed (StopIteration: )"]
    assert float(built.executable(jnp.float32(2.0))) == 3.0


@pytest.mark.usefixtures("seen")
def test_what_the_second_trace_prints_is_not_heard_twice_but_other_threads_are(store, capsys):
    def function(x):
        print("traced")
        other = threading.Thread(target=print, args=("elsewhere",))
        other.start()
        other.join()
        return x + 1

    _built(store, function)
    assert capsys.readouterr().out.splitlines() == ["traced", "elsewhere", "elsewhere"]


@pytest.mark.usefixtures("seen")
def test_what_is_steady_is_kept_and_loaded(store):
    assert _built(store, lambda x: x + 1).origin == "compiled"
    assert _built(store, lambda x: x + 1).origin == "loaded"


@pytest.mark.usefixtures("seen")
def test_another_key_that_lowers_to_the_same_is_linked(store):
    _built(store, lambda x: x + 1)
    built = _built(store, lambda x: x + 1, fingerprint(other=1))
    assert built.origin == "linked"
    assert float(built.executable(jnp.float32(2.0))) == 3.0


@pytest.mark.usefixtures("seen")
def test_arrays_in_a_program_decide_what_it_is_linked_to(store):
    def adding(number):
        table = jnp.full(5000, number)
        return lambda x: x + table

    for number in (1.0, 2.0):
        built = _built(store, adding(number), fingerprint(number=number))
        assert built.origin == "compiled"
        assert float(built.executable(jnp.float32(0.0))[0]) == number


@pytest.mark.usefixtures("seen")
def test_a_wrong_executable_under_a_right_name_is_not_linked(store):
    for number in (1, 2):
        _built(store, lambda x, n=number: x + n, fingerprint(number=number))
    one, other = (store.executables / row.entry.executable for row in store.listed())
    data = other.read_bytes()
    other.write_bytes(one.read_bytes())
    one.write_bytes(data)
    with pytest.warns(StoreWarning, match="damaged"):
        built = _built(store, lambda x: x + 1, fingerprint(third=3))
    assert float(built.executable(jnp.float32(2.0))) == 3.0


def test_a_planted_entry_that_points_elsewhere_is_no_entry(store):
    entry = _kept(store, "a")
    store.keep(replace(entry, executable="b" * 64), None)
    assert store.find("E", "gradient", entry.key, {}) is None
