from __future__ import annotations

import contextlib
import enum
import json
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from nitro_cli.errors import OutputError, ProtectError
from nitro_cli.loggers.jsonl import JsonLines, plain, read_log


class Color(enum.Enum):
    RED = "red"


class Mode(str, enum.Enum):  # noqa: UP042 (a user's field may be one)
    FAST = "fast"


def strict(line: str) -> dict:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not strict JSON")

    return json.loads(line, parse_constant=refuse)


def test_every_value_becomes_strict_json(tmp_path):
    import ml_dtypes

    values = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "scalar": np.float32(0.5),
        "half": ml_dtypes.bfloat16(1.5),
        "long": np.longdouble(2.0),
        "count": np.int64(7),
        "flag": np.bool_(True),
        "array": np.array([[1.0, np.nan]]),
        "path": Path("a/b"),
        "enum": Color.RED,
        "mode": Mode.FAST,
        "set": {2, 1},
        3: ("x", None),
        "text": "line\nbreak \u2028 \ud800",
    }
    with JsonLines(tmp_path / "log") as log:
        log.write("metrics", context="train", step=1, values=values)
    (line,) = (tmp_path / "log").read_text().splitlines()
    record = strict(line)
    assert list(record) == ["type", "context", "step", "values"]
    assert record["values"] == {
        "nan": None,
        "inf": None,
        "scalar": 0.5,
        "half": 1.5,
        "long": 2.0,
        "count": 7,
        "flag": True,
        "array": [[1.0, None]],
        "path": "a/b",
        "enum": "red",
        "mode": "fast",
        "set": [1, 2],
        "3": ["x", None],
        "text": "line\nbreak \u2028 \ud800",
    }
    assert type(record["values"]["count"]) is int


def test_jax_values_and_unknown_objects_do_not_stop_a_log():
    import jax.numpy as jnp

    assert plain({"loss": jnp.float32(0.25), "x": jnp.arange(2)}) == {"loss": 0.25, "x": [0, 1]}
    assert isinstance(plain(object()), str)


def test_a_record_is_on_disk_when_write_returns(tmp_path):
    log = JsonLines(tmp_path / "log")
    log.write("params", n=1)
    assert read_log(tmp_path / "log") == [{"type": "params", "n": 1}]
    log.write_many([("metrics", {"step": 1}), {"type": "finish", "status": "completed"}])
    log.write_many([])
    assert [record["type"] for record in read_log(tmp_path / "log")] == ["params", "metrics", "finish"]
    log.close()
    log.close()
    with pytest.raises(ValueError, match="closed"):
        log.write("other", key="a", value=1)


def test_a_second_run_never_overwrites_a_log(tmp_path):
    (tmp_path / "log").write_text('{"type":"params"}\n')
    with pytest.raises(ProtectError, match="would be overwritten"):
        JsonLines(tmp_path / "log")
    assert (tmp_path / "log").read_text() == '{"type":"params"}\n'


@pytest.mark.parametrize("torn", ['{"type":"met', "\0\0\0", '"text"', "é".encode()[:1]])
def test_append_cuts_a_torn_last_line(tmp_path, torn):
    tail = torn if isinstance(torn, bytes) else torn.encode()
    (tmp_path / "log").write_bytes(b'{"type":"params"}\n' + tail)
    assert read_log(tmp_path / "log") == [{"type": "params"}]
    with JsonLines(tmp_path / "log", append=True) as log:
        log.write("finish", status="completed")
    assert (tmp_path / "log").read_text() == '{"type":"params"}\n{"type":"finish","status":"completed"}\n'


def test_append_keeps_a_last_line_that_lacks_only_its_newline(tmp_path):
    (tmp_path / "log").write_text('{"type":"params"}\n{"type":"metrics","step":9}')
    with JsonLines(tmp_path / "log", append=True) as log:
        log.write("finish", status="completed")
    assert [record["type"] for record in read_log(tmp_path / "log")] == ["params", "metrics", "finish"]


def test_a_killed_writer_leaves_whole_lines(tmp_path):
    code = """
import os, signal, sys
from nitro_cli.loggers.jsonl import JsonLines
log = JsonLines(sys.argv[1])
for step in range(100):
    log.write("metrics", step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "log")])
    assert done.returncode == -9
    assert [record["step"] for record in read_log(tmp_path / "log")] == list(range(100))


def test_damage_in_the_middle_is_named_with_its_line(tmp_path):
    (tmp_path / "log").write_text('{"type":"params"}\n{"ty\n{"type":"finish"}\n')
    with pytest.raises(OutputError) as caught:
        read_log(tmp_path / "log")
    assert f"{tmp_path / 'log'}:2" in str(caught.value)


def test_no_log_reads_as_empty(tmp_path):
    assert read_log(tmp_path / "none") == []


def test_threads_share_a_log(tmp_path):
    with JsonLines(tmp_path / "log") as log:
        threads = [
            threading.Thread(target=lambda k=k: [log.write("other", key=k, value="x" * 200) for _ in range(200)])
            for k in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    records = read_log(tmp_path / "log")
    assert sorted(record["key"] for record in records) == sorted([0, 1, 2, 3] * 200)


def test_a_full_disk_leaves_whole_lines_and_the_log_goes_on_later(tmpfs):
    folder = tmpfs(1)
    with JsonLines(folder / "log") as log:
        log.write("params", n=1)
        filler = folder / "filler"
        with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(b"x" * 4096)
        with pytest.raises(OutputError, match="No space left"):
            log.write("other", key="big", value="y" * 300_000)
        assert read_log(folder / "log") == [{"type": "params", "n": 1}]
        filler.unlink()
        log.write("finish", status="completed")
    assert [record["type"] for record in read_log(folder / "log")] == ["params", "finish"]
