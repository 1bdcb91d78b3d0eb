"""Files of predictions."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from nitro_cli.cli.writers import Target, columns_of, open_writer, target_of
from nitro_cli.errors import ExperimentError, NitroError, OutputError, UsageError

BATCHES = [
    {"y": np.array([0.1, np.nan], np.float32), "at": {"pos": np.array([[1, 2], [3, 4]])}},
    {"y": np.array([np.inf], np.float32), "at": {"pos": np.array([[5, 6]])}},
]


def written(target, batches=BATCHES):
    said: list[str] = []
    with open_writer(target, said.append) as writer:
        start = 0
        for batch in batches:
            columns = columns_of(batch)
            writer.write(start, columns)
            start += len(next(iter(columns.values())))
    return "".join(said)


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (np.zeros(2), ["outputs"]),
        ({"a": np.zeros(2), "b": {"c": np.zeros(2)}}, ["a", "b.c"]),
        ((np.zeros(2), {"z": np.zeros(2)}), ["outputs.0", "outputs.1.z"]),
    ],
)
def test_names_of_outputs(outputs, names):
    assert list(columns_of(outputs)) == names


def test_an_output_called_index_is_refused():
    with pytest.raises(ExperimentError, match="index"):
        columns_of({"index": np.zeros(2)})


def test_npz_has_every_array_and_the_index(tmp_path):
    written(Target(tmp_path / "p.npz", "npz"))
    with np.load(tmp_path / "p.npz") as found:
        assert sorted(found) == ["at.pos", "index", "y"]
        assert found["index"].tolist() == [0, 1, 2]
        assert found["y"].dtype == np.float32
        assert found["at.pos"].tolist() == [[1, 2], [3, 4], [5, 6]]


def test_csv_has_a_line_a_row_and_numbers_that_read_back_equal(tmp_path):
    written(Target(tmp_path / "p.csv", "csv"))
    rows = list(csv.reader((tmp_path / "p.csv").read_text().splitlines()))
    assert rows[0] == ["index", "at.pos_0", "at.pos_1", "y"]
    assert rows[1:] == [["0", "1", "2", repr(float(np.float32(0.1)))], ["1", "3", "4", "nan"], ["2", "5", "6", "inf"]]


def test_jsonl_is_strict_and_streams_to_stdout():
    rows = [json.loads(line) for line in written(Target(None, "jsonl")).splitlines()]
    assert rows[0] == {"index": 0, "at.pos": [1, 2], "y": float(np.float32(0.1))}
    assert [row["y"] for row in rows[1:]] == [None, None]


def test_parquet_keeps_dtypes(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    written(Target(tmp_path / "p.parquet", "parquet"))
    table = parquet.read_table(tmp_path / "p.parquet")
    assert table.column_names == ["index", "at.pos_0", "at.pos_1", "y"]
    assert str(table.schema.field("y").type) == "float"
    assert table["index"].to_pylist() == [0, 1, 2]


def test_a_failure_leaves_no_file_and_the_old_one_as_it_was(tmp_path):
    (tmp_path / "p.csv").write_text("old")
    with pytest.raises(ExperimentError):
        written(Target(tmp_path / "p.csv", "csv"), [BATCHES[0], {"y": None}])
    assert [path.name for path in tmp_path.iterdir()] == ["p.csv"]
    assert (tmp_path / "p.csv").read_text() == "old"


def test_a_folder_that_vanished_is_an_output_error(tmp_path):
    with pytest.raises(OutputError, match="could not be written"):
        written(Target(tmp_path / "gone" / "p.csv", "csv"))


def test_more_axes_than_a_table_has(tmp_path):
    with pytest.raises(UsageError, match=r"use \.npz"):
        written(Target(tmp_path / "p.csv", "csv"), [{"image": np.zeros((2, 3, 3))}])


@pytest.mark.parametrize(
    ("out", "format", "json_mode"),
    [
        (None, None, False),
        ("-", None, False),
        ("-", "npz", False),
        ("-", "csv", True),
        ("p.pt", None, False),
        ("p.jsnl", None, False),
        ("nowhere/p.npz", None, False),
        ("a.npz", None, False),
        ("full", "npz", False),
    ],
)
def test_where_predictions_cannot_go(folder, out, format, json_mode, snapshot):
    (folder / "a.npz").touch()
    (folder / "full").mkdir()
    with pytest.raises(NitroError) as error:
        target_of(out, format, False, json_mode)
    assert (error.value.exit_code, str(error.value)) == snapshot


def test_force_overwrites(folder):
    (folder / "a.npz").touch()
    assert target_of("a.npz", None, True, False).format == "npz"


def test_parquet_without_pyarrow_says_what_to_install(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"pip install 'nitro-jax\[parquet\]'"):
        target_of("p.parquet", None, False, False)
