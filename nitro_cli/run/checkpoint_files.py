"""What one checkpoint's folder holds: how names, layout and arrays go in, are checked, and come out again."""

from __future__ import annotations

import gc
import importlib.util
import json
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nitro_cli.errors import OutputError, ProtectError

Arrays = Mapping[str, Mapping[str, Any]]
Layout = Mapping[str, Mapping[str, tuple[tuple[int, ...], str]]]

INVENTORY = "files.json"
DIFFERENCES_SHOWN = 6


def orbax() -> Any:
    """``orbax.checkpoint``, imported at its first use: it takes half as long as jax, and no step needs it.

    Raises ``OutputError`` where it cannot be imported.
    """
    try:
        import orbax.checkpoint as ocp
    except Exception as error:  # a broken installation fails with whatever it comes across first
        raise _no_orbax(f"cannot be imported: {type(error).__name__}: {first_line(error)}") from error
    return ocp


def check_orbax() -> None:
    """Raise ``OutputError`` where orbax is not installed: said before a run, not after its first epoch."""
    try:
        found = importlib.util.find_spec("orbax.checkpoint")
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise _no_orbax("is not installed")


def _no_orbax(what: str) -> OutputError:
    return OutputError(f"checkpoints need the package orbax-checkpoint, which {what}", "pip install orbax-checkpoint")


def _key(name: str) -> str:
    # Orbax joins names with dots and slashes into paths; quoted, any name is one part.
    return "k" + quote(name, safe="", errors="surrogatepass").replace(".", "%2E").replace("~", "%7E")


def prepared(arrays: Arrays) -> tuple[dict[str, Any], int]:
    """What orbax gets, and its bytes. It refuses arrays without elements; those live in the layout alone."""
    import jax
    import numpy as np

    state: dict[str, dict[str, Any]] = {}
    size = 0
    for component, leaves in arrays.items():
        for path, leaf in leaves.items():
            array = leaf if isinstance(leaf, jax.Array) else np.asarray(leaf)  # orbax turns numpy scalars into ints
            if array.size:
                state.setdefault(_key(component), {})[_key(path)] = array
                size += array.size * array.dtype.itemsize
    # The format mark is always there: orbax refuses a tree without arrays, too.
    return {"format": np.asarray(1, np.int32), **({"state": state} if state else {})}, size


def described(arrays: Arrays) -> list[list[Any]]:
    """The layout as JSON: ``[[component, [[path, shape, dtype], ...]], ...]``, in the order given."""
    import numpy as np

    def leaf_row(path: str, leaf: Any) -> list[Any]:
        return [path, list(np.shape(leaf)), dtype_name(leaf)]

    return [
        [component, [leaf_row(path, leaf) for path, leaf in leaves.items()]] for component, leaves in arrays.items()
    ]


def dtype_name(leaf: Any) -> str:
    """``float32``, ``bfloat16``: the name of an array's or a ShapeDtypeStruct's dtype."""
    import numpy as np

    return str(leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype)


def json_default(value: Any) -> Any:
    """numpy scalars and arrays and paths in ``meta``; nan and infinity stay, they come back as they were."""
    return value.tolist() if hasattr(value, "tolist") else os.fspath(value)


def inspect_folder(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The record of a checkpoint, or None and what is wrong with its files."""
    if not path.is_dir():
        return None, "there is no such folder"
    try:
        for name, size in json.loads((path / INVENTORY).read_bytes()).items():
            if not (path / name).is_file():
                return None, f"{name} is missing"
            if (path / name).stat().st_size != size:
                return None, f"{name} does not have its {size} bytes"
        return json.loads((path / "record" / "metadata").read_bytes()), ""
    except FileNotFoundError:
        return None, f"{INVENTORY} is missing"
    except (OSError, ValueError, AttributeError) as error:
        return None, f"its record cannot be read ({first_line(error)})"


def write_inventory(path: Path) -> None:
    """List the files of a checkpoint with their sizes. Orbax's own notes beside the items still change, they are
    not in."""
    files = [file for item in ("arrays", "record") for file in (path / item).rglob("*") if file.is_file()]
    sizes = {str(file.relative_to(path)): file.stat().st_size for file in files}
    (path / INVENTORY).write_text(json.dumps(sizes), encoding="utf-8")


def compare(path: Path, stored: Layout, wanted: Layout) -> None:
    """Raise ``ProtectError`` with a was -> now table where paths, shapes or dtypes differ."""
    was, now = _flat(stored), _flat(wanted)
    keys = [*was, *(key for key in now if key not in was)]
    different = [
        f"{'/'.join(key)}: was {was.get(key, 'absent')} -> now {now.get(key, 'absent')}"
        for key in keys
        if was.get(key) != now.get(key)
    ]
    if different:
        more = len(different) - DIFFERENCES_SHOWN
        rest = [f"and {more} more"] if more > 0 else []
        raise ProtectError(
            f"the checkpoint {path} does not fit this experiment", *different[:DIFFERENCES_SHOWN], *rest, path=str(path)
        )


def _flat(layout: Layout) -> dict[tuple[str, ...], str]:
    flat: dict[tuple[str, ...], str] = {}
    for component, leaves in layout.items():
        if not leaves:
            flat[(component,)] = "empty"
        for path, (shape, dtype) in leaves.items():
            flat[(component, path)] = f"{_short(dtype)}[{','.join(map(str, shape))}]"
    return flat


def _short(dtype: str) -> str:
    for long, short in (
        ("bfloat", "bf"),
        ("float8_", "f8_"),
        ("float", "f"),
        ("uint", "u"),
        ("int", "i"),
        ("complex", "c"),
    ):
        if dtype.startswith(long):
            return short + dtype.removeprefix(long)
    return dtype


def read_arrays(path: Path, wanted: Layout) -> dict[str, dict[str, Any]]:
    """The wanted arrays as numpy arrays. Raises ``OutputError`` where the files do not give them."""
    import numpy as np

    ocp = orbax()
    quiet_orbax()
    empty = {
        (component, name) for component, leaves in wanted.items() for name, (shape, _) in leaves.items() if 0 in shape
    }
    state: dict[str, dict[str, Any]] = {}
    for component, leaves in wanted.items():
        for name in leaves:
            if (component, name) not in empty:
                state.setdefault(_key(component), {})[_key(name)] = ocp.RestoreArgs(restore_type=np.ndarray)
    read: dict[str, Any] = {}
    if state:
        try:
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
                args = ocp.args.PyTreeRestore(
                    item={"state": state}, restore_args={"state": state}, partial_restore=True
                )
                read = reader.restore(path / "arrays", args)["state"]
        except (OSError, ValueError, RuntimeError) as error:
            raise OutputError(f"the checkpoint {path} cannot be read: {first_line(error)}", path=str(path)) from error
    return {
        component: {
            name: np.zeros(shape, dtype) if (component, name) in empty else read[_key(component)][_key(name)]
            for name, (shape, dtype) in leaves.items()
        }
        for component, leaves in wanted.items()
    }


def first_line(error: BaseException) -> str:
    """The beginning of an error's text, fit for one line."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def let_go(error: BaseException | None) -> None:
    """Drop what a failed save left half begun, so that Python does not complain about it on stderr later."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
        while error is not None:
            traceback.clear_frames(error.__traceback__)
            error = error.__cause__ or error.__context__
        gc.collect()


class _OrbaxFilter(logging.Filter):
    """Drops what orbax says through absl, unless absl was asked to be more talkative than it is by default."""

    def filter(self, record: logging.LogRecord) -> bool:
        return _asked_to_talk() or not _said_by_orbax()


def _said_by_orbax() -> bool:
    """Whether a frame of orbax is nearer than one of the user's. The record's own path is absl's where the logger was
    named before absl was imported."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if f"{os.sep}orbax{os.sep}" in name:
            return True
        if not any(f"{os.sep}{part}{os.sep}" in name for part in ("absl", "logging")):
            return False
        frame = frame.f_back
    return False


def _asked_to_talk() -> bool:
    return 0 < logging.getLogger("absl").level <= logging.INFO


_filter = _OrbaxFilter()


def quiet_orbax() -> None:
    """Keep orbax's own words off stderr; nitro says what matters. absl's verbosity brings them back."""
    logging.getLogger("absl").addFilter(_filter)  # once: a logger keeps no filter twice
    if getattr(sys.unraisablehook, "from_nitro", False):
        return
    before = sys.unraisablehook  # looked at each time, for others put hooks of their own in its place and take them out

    def hook(unraisable: Any) -> None:
        # After a failed read or write, native code calls back into an event loop that is gone by then.
        gone = isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value)
        if not gone or _asked_to_talk():
            before(unraisable)

    hook.from_nitro = True
    sys.unraisablehook = hook
