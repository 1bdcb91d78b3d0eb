from __future__ import annotations

import json
import logging
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from nitro_cli.errors import OutputError, ProtectError, UsageError
from nitro_cli.run.checkpoints import CheckpointPolicy, Checkpoints, resolve_checkpoint


def arrays(fill: float = 1.0, rows: int = 4) -> dict:
    import jax.numpy as jnp

    return {
        "ps": {"dense/kernel": jnp.full((rows, 3), float(fill)), "dense/bias": np.full(3, fill, np.float32)},
        "opt_state": {"count": np.int32(fill)},
    }


def save_epochs(checkpoints: Checkpoints, metrics: list[float | None]) -> None:
    for epoch, metric in enumerate(metrics, start=1):
        checkpoints.save(epoch * 10, arrays(epoch), {"epoch": epoch, "position": 0}, metric)


def kept(checkpoints: Checkpoints) -> list[int]:
    return [info.step for info in checkpoints.steps()]


def tear(directory: Path, step: int) -> None:
    """Take the data away, as a crash of the machine or a half-done copy does."""
    for folder in (directory / str(step)).rglob("d"):
        shutil.rmtree(folder)


def shown(error: BaseException, root: Path) -> str:
    return str(error).replace(str(root), "ROOT")


def test_what_comes_back_is_what_went_in(tmp_path):
    import jax.numpy as jnp

    saved = {
        "odd names": {
            "a.b": np.arange(3),
            "a/b": np.arange(4),
            "a~b": np.arange(5),
            "": np.ones(1),
            "é\ud800 %2E": np.ones(2),
        },
        "a.b/c": {"x": np.array(2**53 + 1, np.int64)},
        "kinds": {
            name: jnp.ones((2, 2), name)
            for name in ("bfloat16", "float16", "float8_e4m3fn", "int8", "uint32", "bool", "complex64", "int4")
        },
        "empty": {},
        "no elements": {"e": jnp.zeros((0, 3), "bfloat16")},
        "scalars": {"python": 3, "numpy": np.float64(0.1), "zero": np.array(-0.0)},
    }
    template = {part: {path: np.asarray(leaf) for path, leaf in leaves.items()} for part, leaves in saved.items()}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(
            7, saved, {"epoch": 1, "position": 3, "seen": [1, None], "nan": float("nan"), "n": np.int64(4)}
        )
    with Checkpoints(tmp_path) as reader:
        back = reader.restore(7, template)
        meta = reader.read_meta(7)
        (info,) = reader.steps()
    assert {part: list(leaves) for part, leaves in back.items()} == {
        part: list(leaves) for part, leaves in saved.items()
    }
    for part, leaves in template.items():
        for path, leaf in leaves.items():
            got = np.asarray(back[part][path])
            assert (got.shape, got.dtype) == (leaf.shape, leaf.dtype)
            assert got.tobytes() == leaf.tobytes()
    assert np.isnan(meta.pop("nan"))
    assert meta == {"epoch": 1, "position": 3, "seen": [1, None], "n": 4}
    assert (info.step, info.epoch, info.position, info.value, info.path) == (7, 1, 3, None, tmp_path / "7")


def test_a_checkpoint_without_arrays_is_one(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"ps": {}}, {"epoch": 1})
    assert checkpoints.restore(1, {"ps": {}}) == {"ps": {}}


def test_arrays_may_change_as_soon_as_save_returns(tmp_path):
    big = np.zeros((256, 256), np.float32)
    meta = {"epoch": 1, "history": [1]}
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"ps": {"w": big}}, meta)
        big[:] = 7
        meta["history"].append(2)
    assert not checkpoints.restore(1, {"ps": {"w": big}})["ps"]["w"].any()
    assert checkpoints.read_meta(1)["history"] == [1]


def test_the_newest_is_kept_beside_the_best(tmp_path):
    with Checkpoints(tmp_path, CheckpointPolicy(keep=1)) as checkpoints:
        save_epochs(checkpoints, [0.5, 0.7, 0.8, 0.9])
        checkpoints.wait()
        assert kept(checkpoints) == [10, 40]
    assert checkpoints.best().step == 10
    assert checkpoints.latest().step == 40


@pytest.mark.parametrize("worthless", [float("nan"), float("-inf"), float("inf"), None])
@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_metric_that_is_no_number_never_ranks(tmp_path, mode, worthless):
    policy = CheckpointPolicy(keep=1, metric="score", mode=mode)
    with Checkpoints(tmp_path, policy) as checkpoints:
        save_epochs(checkpoints, [worthless, 0.5, worthless, worthless])
        checkpoints.wait()
        assert kept(checkpoints) == [20, 40]
    assert checkpoints.best().step == 20


def test_of_equal_metrics_the_earlier_is_best_also_after_a_restart(tmp_path):
    policy = CheckpointPolicy(keep=2, metric="acc", mode="max")
    with Checkpoints(tmp_path, policy) as checkpoints:
        save_epochs(checkpoints, [0.9, 0.9, 0.1])
    with Checkpoints(tmp_path, policy) as checkpoints:
        for step in (40, 50):
            checkpoints.save(step, arrays(), {"epoch": step // 10}, np.float64(0.9))
        checkpoints.wait()
        assert kept(checkpoints) == [10, 20, 50]
        assert checkpoints.best().step == 10


def test_a_resumed_run_may_rank_by_another_metric(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save_epochs(checkpoints, [0.1, 0.2])
    with Checkpoints(tmp_path, CheckpointPolicy(keep=1, metric="acc", mode="max")) as checkpoints:
        assert checkpoints.best() is None
        checkpoints.save(30, arrays(), {"epoch": 3}, 0.5)
        checkpoints.save(40, arrays(), {"epoch": 4}, 0.4)
        checkpoints.wait()
        assert kept(checkpoints) == [30, 40]
        assert checkpoints.best().step == 30


def test_a_saved_step_is_never_replaced(tmp_path, snapshot):
    with Checkpoints(tmp_path) as checkpoints:
        save_epochs(checkpoints, [0.1, 0.2])
        for step in (20, 15):
            with pytest.raises(ProtectError) as caught:
                checkpoints.save(step, arrays(9), {"epoch": 9}, 0.0)
            assert shown(caught.value, tmp_path) == snapshot
        checkpoints.save(30, arrays(3), {"epoch": 3}, 0.3)
    assert kept(checkpoints) == [10, 20, 30]
    assert checkpoints.read_meta(20)["epoch"] == 2


def test_a_checkpoint_of_another_shape_is_refused_with_a_table(tmp_path, snapshot):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, arrays(), {"epoch": 1})
    changed = arrays(rows=5)
    changed["ps"]["extra/kernel"] = np.ones((2, 2), "uint8")
    changed["opt_state"] = {}
    changed["st"] = {}
    with pytest.raises(ProtectError) as caught:
        checkpoints.restore(1, changed)
    assert shown(caught.value, tmp_path) == snapshot
    many = {"ps": {f"w{number}": np.ones(1) for number in range(9)}}
    with pytest.raises(ProtectError) as caught:
        checkpoints.restore(1, many)
    assert shown(caught.value, tmp_path) == snapshot(name="long tables are cut")


def test_a_counter_is_never_cast(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, {"st": {"n": np.int32(16777217)}}, {"epoch": 1})
    with pytest.raises(ProtectError, match=re.escape("st/n: was i32[] -> now f32[]")):
        checkpoints.restore(1, {"st": {"n": np.float32(0)}})
    assert checkpoints.restore(1, {"st": {"n": np.int32(0)}})["st"]["n"] == 16777217


def test_weights_alone_are_read_only_when_asked(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, arrays(2), {"epoch": 1})
    weights = {"ps": arrays()["ps"]}
    with pytest.raises(ProtectError, match="opt_state/count: was i32"):
        checkpoints.restore(1, weights)
    assert (checkpoints.restore(1, weights, partial=True)["ps"]["dense/bias"] == 2).all()


@pytest.mark.parametrize("damage", ["data gone", "data short", "record gone", "record torn", "list gone"])
def test_a_torn_newest_checkpoint_is_skipped_and_named(tmp_path, damage):
    with Checkpoints(tmp_path) as checkpoints:
        save_epochs(checkpoints, [0.3, 0.2, 0.1])
    step = tmp_path / "30"
    if damage == "data gone":
        tear(tmp_path, 30)
    elif damage == "data short":
        data = max(step.rglob("d/*"), key=lambda file: file.stat().st_size)
        os.truncate(data, data.stat().st_size - 1)
    elif damage == "record gone":
        shutil.rmtree(step / "record")
    elif damage == "record torn":
        (step / "record" / "metadata").write_text("{")
    else:
        (step / "files.json").unlink()
    with Checkpoints(tmp_path) as checkpoints:
        assert kept(checkpoints) == [10, 20]
        assert [skipped.path for skipped in checkpoints.skipped] == [step]
        assert checkpoints.latest().step == 20
        assert (checkpoints.restore(20, arrays())["ps"]["dense/bias"] == 2).all()
        with pytest.raises(OutputError, match="cannot be used"):
            checkpoints.restore(30, arrays())
        # The run goes on from 20 and comes to step 30 again; what is left of the torn one is not deleted.
        checkpoints.save(30, arrays(3), {"epoch": 3}, 0.1)
        checkpoints.wait()
        assert kept(checkpoints) == [10, 20, 30]
        assert (tmp_path / "30.torn-1").is_dir()


def test_damage_that_no_list_shows_is_an_output_error(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save_epochs(checkpoints, [0.3])
    for data in (tmp_path / "10" / "arrays").rglob("d/*"):
        data.write_bytes(b"\0" * data.stat().st_size)
    with pytest.raises(OutputError, match="cannot be read"):
        checkpoints.restore(10, arrays())


def test_a_killed_process_leaves_its_older_checkpoints(tmp_path):
    code = """
import os, signal, sys
import numpy as np
from nitro_cli.run.checkpoints import Checkpoints
checkpoints = Checkpoints(sys.argv[1])
data = {"ps": {"w": np.ones((1000, 2000), np.float32)}}
checkpoints.save(1, data, {"epoch": 1}, 0.1)
checkpoints.save(2, data, {"epoch": 2}, 0.2)
checkpoints.wait()
checkpoints.save(3, data, {"epoch": 3}, 0.3)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)])
    assert done.returncode == -9
    template = {"ps": {"w": np.ones((1000, 2000), np.float32)}}
    with Checkpoints(tmp_path) as checkpoints:
        whole = kept(checkpoints)
        assert whole in ([1, 2], [1, 2, 3])
        unfinished = [skipped.path.name.partition(".")[0] for skipped in checkpoints.skipped]
        assert [*map(str, whole), *unfinished] in (["1", "2", "3"], ["1", "2"])
        assert checkpoints.restore(whole[-1], template)["ps"]["w"].all()
        checkpoints.save(4, template, {"epoch": 4}, 0.4)
    assert kept(checkpoints) == [*whole, 4][-4:]
    assert checkpoints.skipped == ()


def test_a_reader_leaves_a_save_in_progress_alone(tmp_path):
    with Checkpoints(tmp_path) as writer:
        writer.save(1, arrays(), {"epoch": 1})
        writer.wait()
        unfinished = tmp_path / "2.orbax-checkpoint-tmp"
        unfinished.mkdir()
        with Checkpoints(tmp_path) as reader:
            assert kept(reader) == [1]
            reader.restore(1, arrays())
            assert [skipped.reason for skipped in reader.skipped] == ["a save that never finished"]
        assert unfinished.is_dir()


def test_a_full_disk_says_what_it_needed_and_what_is_left(tmpfs, capfd, snapshot):
    folder = tmpfs(12)
    data = {"ps": {"w": np.random.default_rng(0).random(500_000)}}
    with Checkpoints(folder / "c") as checkpoints:
        checkpoints.save(1, data, {"epoch": 1}, 0.5)
        checkpoints.wait()
        with open(folder / "filler", "wb") as file:
            file.write(b"x" * (shutil.disk_usage(folder).free - 2_000_000))
        checkpoints.save(2, data, {"epoch": 2}, 0.4)
        with pytest.raises(OutputError) as caught:
            checkpoints.wait()
        checkpoints.wait()  # said once
        text = re.sub(r"free in (\S+): [\d,]+ bytes", r"free in \1: FREE bytes", shown(caught.value, folder))
        assert text == snapshot
        assert [path.name for path in (folder / "c").iterdir()] == ["1"]
        assert (checkpoints.restore(1, data)["ps"]["w"] == data["ps"]["w"]).all()
        (folder / "filler").unlink()
        checkpoints.save(2, data, {"epoch": 2}, 0.4)
    assert kept(checkpoints) == [1, 2]
    out, err = capfd.readouterr()
    assert "absl" not in err
    assert out == ""


def test_a_failed_save_is_raised_by_the_next_save_and_by_close(tmpfs):
    folder = tmpfs(4)
    data = {"ps": {"w": np.random.default_rng(0).random(1_000_000)}}
    checkpoints = Checkpoints(folder / "c")
    checkpoints.save(1, data, {"epoch": 1})
    with pytest.raises(OutputError, match="checkpoint of step 1 could not be written"):
        checkpoints.save(2, data, {"epoch": 2})
    checkpoints.save(3, data, {"epoch": 3})
    with pytest.raises(OutputError, match="checkpoint of step 3 could not be written"):
        checkpoints.close()
    checkpoints.close()


def test_a_folder_that_became_read_only_is_reported_with_its_step(tmpfs):
    folder = tmpfs(4)
    with Checkpoints(folder / "c") as checkpoints:
        checkpoints.save(1, arrays(), {"epoch": 1})
        checkpoints.wait()
        subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
        with pytest.raises(OutputError, match="checkpoint of step 2 could not be written"):  # noqa: PT012
            checkpoints.save(2, arrays(), {"epoch": 2})
            checkpoints.wait()
        assert kept(checkpoints) == [1]


def test_no_thread_and_no_log_line_is_left_behind(tmp_path, capfd):
    before = set(threading.enumerate())
    checkpoints = Checkpoints(tmp_path)
    save_epochs(checkpoints, [0.1, None])
    checkpoints.close()
    checkpoints.close()
    checkpoints.restore(20, arrays())
    assert set(threading.enumerate()) == before
    assert capfd.readouterr() == ("", "")


def test_native_callbacks_after_a_failure_are_not_shown_but_other_faults_are():
    code = """
from nitro_cli.run.checkpoint_files import quiet_orbax
class Late:
    def __init__(self, text): self.text = text
    def __del__(self): raise RuntimeError(self.text)
quiet_orbax()
quiet_orbax()
Late("Event loop is closed")
Late("a fault")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Event loop" not in done.stderr
    assert done.stderr.count("RuntimeError: a fault") == 1


def test_absl_asked_to_talk_does(tmp_path):
    from absl import logging as absl_logging

    records: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, level = Keep(), absl_logging.get_verbosity()
    logging.getLogger("absl").addHandler(handler)
    absl_logging.set_verbosity(absl_logging.INFO)
    try:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, arrays(), {"epoch": 1})
    finally:
        absl_logging.set_verbosity(level)
        logging.getLogger("absl").removeHandler(handler)
    # by its words: the record's path is absl's own where the logger was named before absl was imported
    assert any("save checkpoint" in record.getMessage() for record in records)


def test_a_save_compiles_nothing(tmp_path):
    import jax

    compiled: list[str] = []
    data = arrays()

    def listen(event: str, seconds: float, **facts: object) -> None:
        if "compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with Checkpoints(tmp_path) as checkpoints:
            checkpoints.save(1, data, {"epoch": 1})
        checkpoints.restore(1, data)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert compiled == []


def test_every_way_of_naming_a_checkpoint(tmp_path):
    run = tmp_path / "run"
    with Checkpoints(run / "checkpoints", CheckpointPolicy(keep=3)) as checkpoints:
        save_epochs(checkpoints, [0.3, 0.1, 0.2])
        checkpoints.save(35, arrays(), {"epoch": 3, "position": 5}, None)
    by_best = (20, "best by val_loss, epoch 2; latest is 3")
    folder = run / "checkpoints"
    for ref, (step, why) in {
        "best": by_best,
        "latest": (35, "latest, epoch 3"),
        1: (10, "epoch 1, as asked; latest is 3"),
        "3": (35, "epoch 3, as asked; latest is 3"),
        run: by_best,
        str(folder) + "/": by_best,
        folder / "10": (10, "epoch 1, by its path"),
    }.items():
        info, said = resolve_checkpoint(checkpoints, ref)
        assert (info.step, said) == (step, why)


def test_without_a_ranked_checkpoint_best_is_the_latest_and_says_so(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        save_epochs(checkpoints, [None, float("nan")])
    info, why = resolve_checkpoint(checkpoints, "best")
    assert (info.step, why) == (20, "latest, epoch 2; no checkpoint has a finite val_loss")


def test_a_checkpoint_that_is_not_there(tmp_path, snapshot):
    run = tmp_path / "run"
    checkpoints = Checkpoints(run / "checkpoints")

    def message(ref: object) -> str:
        with pytest.raises(UsageError) as caught:
            resolve_checkpoint(checkpoints, ref)
        return shown(caught.value, tmp_path)

    assert message("best") == snapshot(name="none yet")
    with checkpoints:
        save_epochs(checkpoints, [0.3, 0.1])
    assert message("7") == snapshot(name="no such epoch")
    assert message(run / "checkpoints" / "20" / "arrays") == snapshot(name="too deep")
    assert message(run / "checkpoints" / "99") == snapshot(name="no such step")
    assert message(tmp_path / "other" / "checkpoints" / "10") == snapshot(name="another run")
    for step in (10, 20):
        tear(run / "checkpoints", step)
    assert re.sub(r": .*/d/\S+ ", ": FILE ", message("latest")) == snapshot(name="all torn")


@pytest.mark.parametrize("fields", [{"keep": 0}, {"keep": True}, {"keep": 1.5}, {"mode": "best"}, {"metric": ""}])
def test_a_policy_that_makes_no_sense(fields, snapshot):
    with pytest.raises(UsageError) as caught:
        CheckpointPolicy(**fields)
    assert str(caught.value) == snapshot


def test_the_record_is_plain_json_beside_arrays_that_orbax_reads_alone(tmp_path):
    import orbax.checkpoint as ocp

    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, arrays(5), {"epoch": 1}, 0.25)
    record = json.loads((tmp_path / "1" / "record" / "metadata").read_text())
    assert (record["step"], record["metric"], record["value"]) == (1, "val_loss", 0.25)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        stored = reader.metadata(tmp_path / "1" / "arrays").item_metadata.tree
    assert set(stored["state"]["kps"]) == {"kdense%2Fkernel", "kdense%2Fbias"}


def test_orbax_is_quiet_where_its_logger_was_named_before_absl_was_imported(tmp_path):
    """As the command line does, which sets levels before anything heavy is imported."""
    script = f"""
import logging
logging.getLogger("absl").setLevel(logging.WARNING)
import pathlib
import numpy as np
from nitro_cli.run.checkpoints import Checkpoints
with Checkpoints(pathlib.Path({str(tmp_path)!r})) as checkpoints:
    checkpoints.save(1, {{"ps": {{"w": np.ones(3)}}}}, {{"epoch": 1}}, None)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == ""


def test_the_noise_of_closed_event_loops_stays_away_when_somebody_reset_the_hook(monkeypatch):
    from nitro_cli.run.checkpoint_files import quiet_orbax

    said = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    quiet_orbax()
    quiet_orbax()
    for error in (RuntimeError("Event loop is closed"), ValueError("something else")):
        sys.unraisablehook(SimpleNamespace(exc_value=error))
    assert [str(unraisable.exc_value) for unraisable in said] == ["something else"]


def test_a_missing_orbax_is_told_before_a_run_and_a_broken_one_by_the_first_save(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(OutputError, match="need the package orbax-checkpoint, which is not installed"):
        Checkpoints(tmp_path).__enter__()
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    with pytest.raises(OutputError, match="which cannot be imported: ModuleNotFoundError"):
        checkpoints.save(1, arrays(), {})
    checkpoints.close()
    assert not (tmp_path / "checkpoints").exists()


def test_orbax_is_imported_by_the_first_save_and_not_before(tmp_path):
    code = """
import sys
from pathlib import Path

import numpy as np

from nitro_cli.run.checkpoints import Checkpoints

with Checkpoints(Path(sys.argv[1])) as checkpoints:
    assert checkpoints.latest() is None
    assert "orbax.checkpoint" not in sys.modules
    checkpoints.save(1, {"ps": {"w": np.ones(2)}}, {})
    assert "orbax.checkpoint" in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
