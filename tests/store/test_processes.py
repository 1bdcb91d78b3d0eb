"""Real processes, one after another and many at once, on one real store."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from dataclasses import replace

import pytest
from forks import ChildError

from nitro_cli.programs.store import Store

BASE = {"module": "experiments.base"}
OTHER_VERSION = """
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "9.9" if name == "jaxlib" else real(name)
"""
OTHER_PROCESSOR = "import nitro_cli.programs.environment as e; e._processor = lambda: 'another one'"
# What jax's own cache returns loads, serializes, and fails when what was serialized runs.
THROUGH_JAX_CACHE = """
import contextlib
import jax
from nitro_cli.programs import executables
executables.past_jax_cache = contextlib.nullcontext
jax.config.update("jax_compilation_cache_dir", {folder!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
"""


def origins(answer, of="origin"):
    return {program["program"]: program[of] for program in answer["programs"]}


def all_loaded(answer):
    return set(origins(answer).values()) == {"loaded"}


def same_numbers(one, other):
    assert one["parameters"] == other["parameters"]
    assert [metrics(row) for row in one["history"]] == [metrics(row) for row in other["history"]]


def metrics(row):
    return {name: value for name, value in row.items() if "second" not in name and "time" not in name}


# ---- one after another ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", ["Base", "Graph", "Manual"])
def test_a_second_process_traces_and_compiles_nothing_and_gives_the_same_numbers(process, experiment):
    first = process(experiment, **BASE)
    second = process(experiment, **BASE)
    assert first["events"]
    assert second["events"] == []
    assert all_loaded(second)
    same_numbers(first, second)


def test_a_resumed_run_compiles_nothing(process):
    first = process()
    second = process(resume=first["run"], fields={"max_epochs": 2})
    assert all_loaded(second)
    assert second["events"] == []
    same_numbers(second, process(fields={"max_epochs": 2}))


def test_another_preset_compiles_what_its_graph_constants_change_and_says_which(process):
    process("Base", preset="current", **BASE)
    swept = process("Base", preset="swept", **BASE)
    assert all_loaded(swept)
    assert swept["events"] == []
    sharper = process("Base", preset="sharper", **BASE)
    compiled = {name: why for name, why in origins(sharper, "why").items() if why != "unchanged"}
    assert compiled == {"gradient": "`power` 2 -> 4"}


def test_linear_algebra_runs_in_a_process_that_traced_none(process):
    first, second = process("Decomposed"), process("Decomposed")
    assert all_loaded(second)
    assert second["events"] == []
    same_numbers(first, second)


@pytest.mark.parametrize(
    ("experiment", "kept_out"), [("Printing", {"gradient"}), ("Calling", {"gradient", "evaluation"})]
)
def test_a_program_that_calls_back_into_python_runs_and_is_not_kept(process, experiment, kept_out):
    first, second = process(experiment), process(experiment)
    same_numbers(first, second)
    assert {name for name, origin in origins(second).items() if origin != "loaded"} == kept_out
    for name in kept_out:
        assert origins(second, "kept_out")[name] == ["it calls back into Python"]
        assert origins(second, "why")[name] == "it is not kept: it calls back into Python"


@pytest.mark.parametrize(
    ("job", "why"),
    [
        ({"environment": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}}, "XLA_FLAGS"),
        ({"environment": {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}}, "device"),
        ({"before": OTHER_VERSION}, "jaxlib"),
        ({"before": OTHER_PROCESSOR}, "processor"),
    ],
)
def test_an_executable_for_another_environment_is_never_run(process, job, why):
    first = process()
    second = process(**job)
    assert set(origins(second).values()) == {"compiled"}
    assert all(why in reason for reason in origins(second, "why").values())
    assert second["parameters"]["w"] == pytest.approx(first["parameters"]["w"], rel=1e-5)
    assert all_loaded(process())


# ---- what does not load or run -------------------------------------------------------------------------------------


def test_an_executable_that_does_not_load_is_compiled_anew_and_replaced(process):
    first = process()
    store = Store(process.store)
    for row in store.listed():
        store.keep(row.entry, b"no executable")
    second = process()
    assert set(origins(second).values()) == {"compiled"}
    assert all("does not load here" in warning for warning in second["warnings"])
    same_numbers(first, second)
    assert all_loaded(process())


def test_an_executable_that_fails_when_it_runs_is_compiled_anew_with_its_arguments_whole(process, tmp_path):
    first = process("Base", **BASE)
    patched = THROUGH_JAX_CACHE.format(folder=str(tmp_path / "jax"))
    process("Base", before=patched, store=tmp_path / "warm", **BASE)
    process("Base", before=patched, store=tmp_path / "broken", **BASE)
    second = process("Base", store=tmp_path / "broken", **BASE)
    assert any("does not run here and is compiled anew" in warning for warning in second["warnings"])
    same_numbers(first, second)
    third = process("Base", store=tmp_path / "broken", **BASE)
    same_numbers(first, third)
    last = process("Base", store=tmp_path / "broken", **BASE)
    assert last["warnings"] == []
    assert all_loaded(last)


# ---- disks ---------------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_store_and_not_the_run(process, tmpfs):
    disk = tmpfs(1)
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    answer = process(store=disk / "store")
    same_numbers(answer, process())
    assert any("No space left" in warning for warning in answer["warnings"])


def test_a_store_that_cannot_be_written_to_costs_nothing_but_time(process, tmpfs):
    disk = tmpfs(8)
    first = process(store=disk / "store")
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    second = process(store=disk / "store")
    same_numbers(first, second)
    assert any("cannot be written to" in warning for warning in second["warnings"])


# ---- many at once --------------------------------------------------------------------------------------------------


def test_of_processes_that_start_together_one_compiles(process):
    answers = process(swarm=4, width=4, killed={})["answers"]
    for program in ("gradient", "update", "evaluation"):
        how = sorted(origins(answer)[program] for answer in answers)
        assert how == ["compiled", "loaded", "loaded", "loaded"], program
    for answer in answers:
        same_numbers(answers[0], answer)


def test_fifty_processes_of_which_some_are_killed_leave_a_store_that_is_right(process):
    killed = {index: 0.05 + 0.03 * (index % 17) for index in range(0, 50, 4)}
    answers = process(swarm=50, width=5, killed=killed)["answers"]
    survivors = [answer for answer in answers if answer is not None]
    assert len(survivors) >= 50 - len(killed)
    for answer in survivors:
        assert "error" not in answer, answer["error"]
        same_numbers(survivors[0], answer)
        assert answer["warnings"] == []
    last = process()
    assert all_loaded(last)
    same_numbers(survivors[0], last)
    _an_hour_passes(process.store)
    store = Store(process.store)
    store.prune()
    assert store.orphans() == []
    assert all_loaded(process())


def _an_hour_passes(folder):
    old = time.time() - 7200
    for path in folder.rglob("*"):
        os.utime(path, (old, old))


# ---- what is wrong in the store ------------------------------------------------------------------------------------


def _planted(store):
    """Make the entry of one gradient point to the executable of another one; the name of the entry."""
    one, other = (row.entry for row in store.listed() if row.entry.program == "gradient")
    store.keep(replace(one, lowered=other.lowered, executable=other.lowered), None)
    return one


def test_verification_finds_a_program_that_is_another_one(process):
    right = {power: process(fields={"power": power}) for power in (2, 4)}
    store = Store(process.store)
    entry = _planted(store)
    power = int(entry.reads["power"].split()[-1])
    wrong = process(fields={"power": power})
    assert all_loaded(wrong)
    assert wrong["parameters"] != right[power]["parameters"]  # the plant is a real one
    with pytest.raises(ChildError) as caught:
        process(fields={"power": power}, verify=True)
    assert f"CacheMismatch: the stored program {entry.name} is not what its code traces to now" in str(caught.value)
    for _ in range(2):
        healed = process(fields={"power": power})
        assert origins(healed)["gradient"] != "loaded"
        same_numbers(right[power], healed)
