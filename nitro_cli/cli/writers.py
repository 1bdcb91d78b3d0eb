"""Files of predictions: npz, csv, jsonl and parquet. A file appears whole or not at all."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from nitro_cli.cli.failures import relative
from nitro_cli.cli.jsonable import to_json
from nitro_cli.errors import ExperimentError, OutputError, ProtectError, UsageError
from nitro_cli.suggest import did_you_mean

FORMATS = ("npz", "csv", "jsonl", "parquet")
Columns = dict[str, Any]


@dataclass(frozen=True)
class Target:
    """Where predictions go: a file, or stdout where ``path`` is None."""

    path: Path | None
    format: str


class Writer(Protocol):
    """Takes batches of columns: name -> array with rows first. ``start`` is the index of the first row."""

    def write(self, start: int, columns: Columns) -> None: ...

    def finish(self) -> None: ...


def target_of(out: str | None, format: str | None, force: bool, json_mode: bool) -> Target:
    """Check where predictions are to go. Raises UsageError or ProtectError, before anything is computed."""
    if out is None:
        raise UsageError(
            "predict needs --out FILE", "for example --out predictions.npz (or .csv, .jsonl, .parquet, or -)"
        )
    if format is None and out == "-":
        raise UsageError("--out - needs a format", "add --format csv or --format jsonl")
    name = format or Path(out).suffix.lstrip(".").lower()
    if name not in FORMATS:
        raise UsageError(
            f"unknown format {name!r} for --out {out}",
            "formats: " + ", ".join(FORMATS),
            label=did_you_mean(name, FORMATS),
        )
    if name == "parquet" and importlib.util.find_spec("pyarrow") is None:
        raise UsageError("parquet needs the package pyarrow", "pip install 'nitro-jax[parquet]'")
    if out == "-":
        if name not in ("csv", "jsonl"):
            raise UsageError(f"{name} cannot be written to stdout", "use --format csv or --format jsonl, or a file")
        if json_mode:
            raise UsageError("--json and --out - both want stdout", "write the rows to a file, or leave out --json")
        return Target(None, name)
    path = Path(out)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for --out", "make it first, or choose another place")
    if path.is_dir():
        raise UsageError(f"--out {out} is a folder", "name a file in it")
    if path.exists() and not force:
        raise ProtectError(f"{relative(path)} exists", "overwrite it with --force, or choose another --out")
    return Target(path, name)


def columns_of(outputs: Any) -> Columns:
    """A pytree of arrays, batch axis first, as named columns. A bare array is ``outputs``."""
    import numpy as np
    from jax import tree_util

    columns: Columns = {}
    for path, leaf in tree_util.tree_flatten_with_path(outputs)[0]:
        parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
        if not path or hasattr(path[0], "idx"):
            parts.insert(0, "outputs")
        array = np.asarray(leaf)
        columns[".".join(parts)] = array.astype(np.float32) if array.dtype.kind == "V" else array
    if "index" in columns:
        raise ExperimentError(
            "an output is called 'index', the name of the column with the row numbers",
            "give it another name in forward",
        )
    if not columns:
        raise ExperimentError("forward returns no arrays: there is nothing to write")
    return columns


@contextmanager
def open_writer(target: Target, to_stdout: Callable[[str], None]) -> Iterator[Writer]:
    """A writer for ``target``. The file gets its name when all rows are in it; a failure leaves nothing behind."""
    if target.path is None:
        yield _TEXT[target.format](to_stdout)
        return
    part = target.path.with_name(f".{target.path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            writer = _writer(target.format, file)
            yield writer
            writer.finish()
        os.replace(part, target.path)
    except OSError as error:
        raise OutputError(f"{relative(target.path)} could not be written: {error.strerror or error}") from error
    finally:
        part.unlink(missing_ok=True)


def _writer(format: str, file: Any) -> Writer:
    if format in _TEXT:
        return _TEXT[format](lambda text: file.write(text.encode("utf-8")))
    return Npz(file) if format == "npz" else Parquet(file)


class Npz:
    """Arrays by output name, and ``index``. The one format that holds everything until the end."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._pieces: dict[str, list[Any]] = {}

    def write(self, start: int, columns: Columns) -> None:
        for name, array in columns.items():
            self._pieces.setdefault(name, []).append(array)

    def finish(self) -> None:
        import numpy as np

        arrays = {name: np.concatenate(pieces) for name, pieces in self._pieces.items()}
        rows = len(next(iter(arrays.values()), ()))
        np.savez(self._file, allow_pickle=False, **{"index": np.arange(rows), **arrays})


class Csv:
    """One line a row; a vector of k numbers becomes k columns ``name_0`` ... ``name_k-1``."""

    def __init__(self, put: Callable[[str], Any]) -> None:
        self._put = put
        self._begun = False

    def write(self, start: int, columns: Columns) -> None:
        flat = flat_columns(columns)
        text = io.StringIO()
        lines = csv.writer(text, lineterminator="\n")
        if not self._begun:
            lines.writerow(["index", *flat])
            self._begun = True
        values = [array.tolist() for array in flat.values()]
        lines.writerows((start + i, *row) for i, row in enumerate(zip(*values, strict=True)))
        self._put(text.getvalue())

    def finish(self) -> None:
        """Every row is written already."""


class JsonLines:
    """One object a row; arrays of any rank are nested lists, numbers that are not finite are null."""

    def __init__(self, put: Callable[[str], Any]) -> None:
        self._put = put

    def write(self, start: int, columns: Columns) -> None:
        values = [to_json(array) for array in columns.values()]
        rows = (
            json.dumps({"index": start + i, **dict(zip(columns, row, strict=True))}, allow_nan=False) + "\n"
            for i, row in enumerate(zip(*values, strict=True))
        )
        self._put("".join(rows))

    def finish(self) -> None:
        """Every row is written already."""


class Parquet:
    """Columns as in csv, with the dtypes of the arrays."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._writer: Any = None

    def write(self, start: int, columns: Columns) -> None:
        import numpy as np

        pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
        flat = flat_columns(columns)
        rows = len(next(iter(flat.values())))
        table = pyarrow.table({"index": np.arange(start, start + rows), **flat})
        if self._writer is None:
            self._writer = parquet.ParquetWriter(self._file, table.schema)
        self._writer.write_table(table)

    def finish(self) -> None:
        if self._writer is not None:
            self._writer.close()


_TEXT: dict[str, Callable[[Callable[[str], Any]], Writer]] = {"csv": Csv, "jsonl": JsonLines}


def flat_columns(columns: Columns) -> Columns:
    """Columns of rank 1: a matrix (rows, k) becomes k columns. Raises UsageError for more axes."""
    flat: Columns = {}
    for name, array in columns.items():
        if array.ndim == 1:
            flat[name] = array
        elif array.ndim == 2:
            flat.update({f"{name}_{k}": array[:, k] for k in range(array.shape[1])})
        else:
            raise UsageError(
                f"output {name!r} has shape {array.shape[1:]} per row: no table holds that", "use .npz or .jsonl"
            )
    return flat
