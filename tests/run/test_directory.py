from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from nitro_cli.errors import OutputError, ProtectError, UsageError
from nitro_cli.run import directory
from nitro_cli.run.directory import RESERVED_NAMES, create_run, facts, find_run, list_runs, open_run


def shown(error: BaseException, root: Path) -> str:
    return str(error).replace(str(root), "ROOT")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_new_run_has_its_own_folder_and_latest_names_it(tmp_path):
    first = create_run(tmp_path, "myexp", "current")
    second = create_run(tmp_path, "myexp", None)
    assert first.path.parent == tmp_path / "runs" / "myexp"
    assert re.fullmatch(r"\d{8}-\d{6}-current-[0-9a-f]{4}", first.id)
    assert re.fullmatch(r"\d{8}-\d{6}-default-[0-9a-f]{4}", second.id)
    link = tmp_path / "runs" / "myexp" / "latest"
    assert os.readlink(link) == second.id
    assert sorted(path.name for path in link.parent.iterdir()) == sorted([first.id, second.id, "latest"])
    assert first.read_run()["preset"] == "current"


def test_without_symlinks_latest_is_a_text_file(tmp_path, monkeypatch):
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError("no symlinks here")

    monkeypatch.setattr(os, "symlink", refuse)
    run = create_run(tmp_path, "myexp", None)
    assert (tmp_path / "runs" / "myexp" / "latest").read_text() == run.id + "\n"


@pytest.mark.parametrize("preset", ["a/b,c=[1]", "x" * 300, "..", "ü" * 9, "a b\nc", ""])
def test_folder_names_are_safe_whatever_the_preset(tmp_path, preset):
    run = create_run(tmp_path, "my exp/ü", preset)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,80}", run.id)
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,80}", run.path.parent.name)
    assert run.path.parent.parent == tmp_path / "runs"


def test_an_explicit_folder_is_used_as_it_is_and_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = create_run(None, "myexp", None, Path("out/x"))
    assert run.path == tmp_path / "out" / "x"
    assert not (tmp_path / "runs").exists()
    monkeypatch.chdir("/")
    assert open_run(run.path).read_run()["experiment"] == "myexp"


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path, snapshot):
    run = create_run(tmp_path, "myexp", None, tmp_path / "x")
    run.write_config("[config]\nseed = 1\n")
    run.log_path.write_text('{"type":"params"}\n')
    before = contents(run.path)
    with pytest.raises(ProtectError) as caught:
        create_run(tmp_path, "myexp", None, tmp_path / "x")
    assert contents(run.path) == before
    assert shown(caught.value, tmp_path) == snapshot
    assert set(re.findall(r"--[a-z-]+", str(caught.value))) == {"--resume", "--force", "--run-dir"}


def test_a_folder_with_other_things_offers_no_resume(tmp_path, snapshot):
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "thesis.tex").write_text("years of work")
    for force in (False, True):
        with pytest.raises(ProtectError) as caught:
            create_run(tmp_path, "myexp", None, tmp_path / "x", force=force)
        assert shown(caught.value, tmp_path) == snapshot
    assert [path.name for path in (tmp_path / "x").iterdir()] == ["thesis.tex"]


def test_force_moves_a_damaged_run_aside(tmp_path):
    run = create_run(tmp_path, "myexp", None, tmp_path / "x")
    run.run_json_path.write_text("{")
    create_run(tmp_path, "myexp", None, tmp_path / "x", force=True)
    run.write_config("")
    run.log_path.touch()
    run.run_json_path.unlink()
    create_run(tmp_path, "myexp", None, tmp_path / "x", force=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x", "x.old-1", "x.old-2"]


def test_force_moves_the_old_contents_aside(tmp_path):
    for text in ("one", "two", "three"):
        create_run(tmp_path, "myexp", None, tmp_path / "x", force=True).write_config(text)
    written = [(tmp_path / name / "config.toml").read_text() for name in ("x.old-1", "x.old-2", "x")]
    assert written == ["one", "two", "three"]


def test_force_never_moves_the_folder_one_stands_in(tmp_path, monkeypatch):
    project = tmp_path / "project"
    (project / "experiments").mkdir(parents=True)
    monkeypatch.chdir(project / "experiments")
    for run_dir in (project, project / "experiments", project / ".." / "project"):
        for force in (True, False):
            (project / "experiments" / "myexp.py").touch()
            with pytest.raises(ProtectError, match="the folder that you stand in") as caught:
                create_run(tmp_path, "myexp", None, run_dir, force=force)
            assert "--force" not in str(caught.value)
    assert os.listdir(tmp_path) == ["project"]


def test_an_empty_folder_is_taken_once_by_many(tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    outcomes: list[str] = []
    all_saw_it_empty = threading.Barrier(8)
    take_folder = directory._take_folder

    def together(*arguments: Any) -> None:
        take_folder(*arguments)
        all_saw_it_empty.wait(timeout=60)

    monkeypatch.setattr(directory, "_take_folder", together)

    def take() -> None:
        try:
            create_run(tmp_path, "myexp", None, tmp_path / "x")
            outcomes.append("taken")
        except ProtectError:
            outcomes.append("refused")

    threads = [threading.Thread(target=take) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(outcomes) == ["refused"] * 7 + ["taken"]


def test_a_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "x").write_text("")
    for attempt in (
        lambda: create_run(tmp_path, "myexp", None, tmp_path / "x"),
        lambda: create_run(tmp_path, "myexp", None, tmp_path / "x" / "y"),
        lambda: create_run(tmp_path / "x", "myexp", None),
    ):
        with pytest.raises(ProtectError, match="cannot write in"):
            attempt()


def test_a_read_only_folder_is_refused_before_any_work(tmpfs, tmp_path, snapshot):
    folder = tmpfs(1)
    (folder / "x").mkdir()
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    for attempt in (
        lambda: create_run(tmp_path, "myexp", None, folder / "x"),
        lambda: create_run(tmp_path, "myexp", None, folder / "new"),
        lambda: create_run(folder, "myexp", None),
    ):
        with pytest.raises(ProtectError) as caught:
            attempt()
        assert re.sub(r"/\d{8}.*?:", "/NEW:", shown(caught.value, tmp_path)) == snapshot


def test_run_json_is_merged_and_strict(tmp_path):
    run = create_run(tmp_path, "myexp", None)
    run.update_run(status="running", best=float("nan"), path=Path("a"))
    run.update_run(status="completed", exit=0)
    kept = json.loads(run.run_json_path.read_text(), parse_constant=lambda word: pytest.fail(word))
    assert (kept["status"], kept["best"], kept["path"], kept["exit"]) == ("completed", None, "a", 0)
    assert sorted(path.name for path in run.path.iterdir()) == ["run.json"]


def test_threads_lose_no_fact(tmp_path):
    run = create_run(tmp_path, "myexp", None)
    threads = [threading.Thread(target=run.update_run, kwargs={f"k{n}": n}) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {run.read_run()[f"k{n}"] for n in range(16)} == set(range(16))


def test_a_writer_killed_at_any_moment_leaves_a_whole_run_json(tmp_path):
    run = create_run(tmp_path, "myexp", None)
    code = """
import sys
from nitro_cli.run.directory import open_run
run = open_run(sys.argv[1])
print("ready", flush=True)
n = 0
while True:
    n += 1
    run.update_run(n=n, filler="x" * 10000)
"""
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code, str(run.path)], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        while "n" not in run.read_run():
            pass
        process.kill()
        process.communicate()
        assert run.read_run()["experiment"] == "myexp"


def test_a_full_disk_keeps_the_old_run_json(tmpfs, tmp_path):
    folder = tmpfs(1)
    run = create_run(tmp_path, "myexp", None, folder / "x")
    run.update_run(status="running")
    with pytest.raises(OutputError, match=r"cannot write .*run\.json"):
        run.update_run(filler="x" * 2_000_000)
    assert run.read_run()["status"] == "running"
    assert [path.name for path in run.path.iterdir()] == ["run.json"]


def test_damaged_run_json_is_said_and_does_not_hide_other_runs(tmp_path):
    good = create_run(tmp_path, "myexp", None)
    bad = create_run(tmp_path, "myexp", None)
    for text in ("{", "[]", "null"):
        bad.run_json_path.write_text(text)
        with pytest.raises(OutputError, match=r"cannot be read, it is damaged: .*") as caught:
            bad.read_run()
        assert f"echo {{}} > {bad.run_json_path}" in str(caught.value)
    assert {run.id for run in list_runs(tmp_path)} == {good.id, bad.id}


def test_newest_is_decided_by_run_json_not_by_the_link(tmp_path):
    runs = [create_run(tmp_path, "myexp", "p") for _ in range(3)]
    runs[0].update_run(created="2999-01-01T00:00:00+00:00")
    other = create_run(tmp_path, "other", None)
    assert find_run(tmp_path, "myexp").id == runs[0].id
    assert list_runs(tmp_path, "myexp")[0].id == runs[0].id
    assert {run.id for run in list_runs(tmp_path)} == {run.id for run in [*runs, other]}


def test_a_run_is_found_by_id_prefix_and_path(tmp_path, monkeypatch):
    run = create_run(tmp_path, "myexp", "current")
    create_run(tmp_path, "myexp", "other")
    monkeypatch.chdir(tmp_path)
    for ref in (run.id, run.id[:-1], str(run.path), f"runs/myexp/{run.id}", run.path):
        assert find_run(None, "myexp", ref).path == run.path


def test_what_is_not_found_says_what_there_is(tmp_path, snapshot):
    def message(ref: str, experiment: str = "myexp", kind: type = UsageError) -> str:
        with pytest.raises(kind) as caught:
            find_run(tmp_path, experiment, ref, **({"error": kind} if kind is not UsageError else {}))
        text = shown(caught.value, tmp_path)
        for number, run in enumerate(runs):
            text = text.replace(run.id, f"RUN{number}")
        return re.sub(r"'20\d*'", "'20'", text)

    runs = []
    assert message("latest") == snapshot(name="no runs yet")
    runs = [create_run(tmp_path, "myexp", "a"), create_run(tmp_path, "myexp", "b")]
    for run, moment in zip(runs, ("2001", "2002"), strict=True):
        run.update_run(created=moment)
    assert message("19990101") == snapshot(name="unknown id")
    assert message("20") == snapshot(name="ambiguous prefix")
    (runs[0].checkpoints_path / "12").mkdir(parents=True)
    assert message(str(runs[0].checkpoints_path / "12")) == snapshot(name="too deep")
    assert message(str(tmp_path / "no" / "such"), kind=ProtectError) == snapshot(name="no such folder")
    assert message(str(tmp_path / "runs")) == snapshot(name="not a run")


def test_plug_ins_cannot_take_the_runners_names(tmp_path):
    run = create_run(tmp_path, "myexp", None)
    assert run.own_file("tensorboard/events") == run.path / "tensorboard" / "events"
    for name in [*RESERVED_NAMES, "checkpoints/x"]:
        with pytest.raises(ProtectError, match="belongs to the runner"):
            run.own_file(name)
    files = {run.config_path, run.run_json_path, run.log_path, run.console_path, run.checkpoints_path}
    assert {file.name for file in files} <= RESERVED_NAMES


def test_facts_know_the_commit_and_whether_it_is_dirty(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert facts()["git"] is None
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]
    Path("x").write_text("1")
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "add", "x"], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "one"], check=True)
    clean = facts()
    assert re.fullmatch("[0-9a-f]{40}", clean["git"]["commit"])
    assert clean["git"]["dirty"] is False
    Path("x").write_text("2")
    assert facts()["git"]["dirty"] is True
    assert set(clean["versions"]) == {"python", "nitro", "jax", "jaxlib", "flax", "optax", "orbax"}
    assert clean["versions"]["jax"]
    assert clean["pid"] == os.getpid()
    monkeypatch.setenv("PATH", "")
    assert facts()["git"] is None


def test_a_run_folder_needs_no_jax():
    modules = ", ".join(f"nitro_cli.run.{name}" for name in ("directory", "checkpoints", "stop"))
    code = f"import sys, {modules}; print('jax' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"
