"""Executables loaded ahead: only ever the entry that is asked for, whole, and only where the last run left a note."""

from __future__ import annotations

import threading
import types
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from nitro_cli.programs import ahead
from nitro_cli.programs import store as stores
from nitro_cli.programs.build import build
from nitro_cli.programs.cache import Program, program_cache
from nitro_cli.programs.executables import loaded
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.key import Request


class Runs:
    """Stands for an experiment."""


def add(x):
    return x + 1


def get():
    """The program, as a handle asks for it."""
    request = Request("gradient", fingerprint(add=add), {}, {}, experiment="E")
    program = types.FunctionType(add.__code__, globals())  # a copy, since lowering gives it another name
    arguments = [jax.ShapeDtypeStruct((), jnp.float32)]
    return program_cache().get(request, lambda r: build(r, program, arguments, reads=set(), found={}))


@pytest.fixture
def start(own_store, empty_cache, monkeypatch):
    """``start()`` is the beginning of another process: ahead has begun, and its thread is done."""
    monkeypatch.setattr(stores.settings, "opened", {})

    def start():
        program_cache().reset()
        ahead.begin(Runs)
        for thread in threading.enumerate():
            if thread.name == "nitro-ahead":
                thread.join()

    yield start
    ahead._loading.clear()
    ahead._keys.clear()


@pytest.fixture
def calls(monkeypatch):
    """Names of the threads in which executables were loaded."""
    found: list[str] = []

    def told(*arguments):
        found.append(threading.current_thread().name)
        return loaded(*arguments)

    monkeypatch.setattr("nitro_cli.programs.executables.loaded", told)
    return found


def first_run(start) -> Program:
    start()
    program = get()
    ahead.note(Runs)
    return program


def test_the_next_run_loads_in_a_thread_what_the_last_one_used(start, calls):
    assert first_run(start).built.origin == "compiled"
    start()
    program = get()
    assert calls == ["nitro-ahead"]
    assert program.built.origin == "loaded"
    assert float(program.run(jnp.float32(2))) == 3
    program_cache().reset()
    assert get().built.origin == "loaded"
    assert calls == ["nitro-ahead", "MainThread"]  # it is given once


def test_another_entry_than_was_loaded_is_not_taken(start, calls):
    first_run(start)
    store = stores.open_store()
    entry = store.entry_by_name(get().built.entry)
    start()
    store.keep(replace(entry, seconds={"trace": 1.0}), None)
    assert get().built.origin == "loaded"
    assert calls == ["nitro-ahead", "MainThread"]


def test_nothing_is_loaded_for_a_cold_start_or_in_other_surroundings(start, calls, monkeypatch):
    first_run(start)
    monkeypatch.setattr(stores.settings, "cold", True)
    start()
    monkeypatch.setattr(stores.settings, "cold", False)
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    start()
    assert calls == []


def test_a_damaged_executable_is_compiled_anew(start, calls, own_store):
    first_run(start)
    (file,) = (own_store / "executables").iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(stores.StoreWarning, match="damaged and is compiled anew"):
        start()
    assert get().built.origin == "compiled"
    assert calls == []


def test_whatever_fails_in_the_thread_is_left_to_who_asks(start, monkeypatch):
    first_run(start)

    def fails(*arguments):
        raise ValueError("not here")

    with monkeypatch.context() as patch:
        patch.setattr("nitro_cli.programs.executables.loaded", fails)
        start()
    assert get().built.origin == "loaded"
