"""Loading an experiment's file as a module.

A file is always loaded under a dotted name that is in ``sys.modules`` before it runs, in a package that points at its
folder. That is what dataclasses, pydantic, relative imports and pickle need.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import linecache
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from nitro_cli.errors import ExperimentError, NitroError, Place, UsageError
from nitro_cli.experiment.objects import library_folders
from nitro_cli.experiment.sources import shown

FOLDER = "experiments"

_LOADED: dict[str, str] = {}  # module name -> digest of the source it ran


def load_experiment_module(path: str | Path) -> ModuleType:
    """The module of an experiment file, loaded once and again when the file has changed.

    A fresh process that calls this can unpickle what the file defines. Raises ExperimentError where it cannot be
    imported.
    """
    path = Path(path).resolve()
    name = _module_name(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{shown(path)} cannot be read: {error.strerror}") from None
    digest = hashlib.sha256(source).hexdigest()
    loaded = sys.modules.get(name)
    if loaded is not None and _LOADED.get(name, digest) == digest:
        return loaded
    _execute(path, name, source)
    _LOADED[name] = digest
    return sys.modules[name]


def _module_name(path: Path) -> str:
    """``experiments.myexp`` for a file; a package name of its own where that one belongs to another folder."""
    stem = path.parent.name if path.stem == "__init__" else path.stem
    folder = path.parent.parent if path.stem == "__init__" else path.parent
    parts = [folder.name]
    top = folder
    while (top / "__init__.py").is_file() and (top.parent / "__init__.py").is_file():
        top = top.parent
        parts.insert(0, top.name)
    package = ".".join(parts)
    if not _usable(package, folder, top):
        package = f"nitro_{hashlib.sha256(str(folder).encode()).hexdigest()[:12]}"
        _make_package(package, folder)
    return f"{package}.{stem}"


def _usable(package: str, folder: Path, top: Path) -> bool:
    """Makes the folder's natural package importable; False where that name means something else."""
    if not all(part.isidentifier() for part in package.split(".")):
        return False
    present = sys.modules.get(package)
    if present is not None:
        return any(Path(entry).resolve() == folder for entry in list(getattr(present, "__path__", []))[:1])
    on_path(top.parent)
    if (folder / "__init__.py").is_file():
        with importing(folder / "__init__.py"):
            imported = importlib.import_module(package)
        return Path(imported.__file__ or "").parent.resolve() == folder
    if importlib.util.find_spec(package) is None or package == FOLDER:
        _make_package(package, folder)
        return True
    return [Path(entry).resolve() for entry in importlib.import_module(package).__path__] == [folder]


def _make_package(name: str, folder: Path) -> None:
    if name not in sys.modules:
        package = ModuleType(name, "The folder of an experiment.")
        package.__path__ = [str(folder)]
        sys.modules[name] = package


def on_path(folder: Path) -> None:
    """The parent of ``experiments/`` goes on the path, so that its files can import each other; never the folder."""
    if str(folder.resolve()) not in sys.path:
        sys.path.insert(0, str(folder.resolve()))


def _execute(path: Path, name: str, source: bytes) -> None:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # a path that ends in .py always has one
    module = importlib.util.module_from_spec(spec)
    before = sys.modules.get(name)
    sys.modules[name] = module
    importlib.invalidate_caches()
    linecache.checkcache(str(path))
    spec.__dict__["_initializing"] = True  # what Python's message about a circular import goes by
    try:
        with importing(path):  # compiled here: a .pyc is told from a newer file by whole seconds only
            exec(compile(source, str(path), "exec", dont_inherit=True), module.__dict__)
    except BaseException:
        sys.modules.pop(name, None)
        if before is not None:
            sys.modules[name] = before
        raise
    finally:
        spec.__dict__["_initializing"] = False
    setattr(sys.modules[name.rpartition(".")[0]], name.rpartition(".")[2], module)


@contextlib.contextmanager
def importing(path: Path) -> Iterator[None]:
    """Output of the user's module goes to stderr, and what it raises becomes one error with the user's frames."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except NitroError:
        raise
    except SyntaxError as error:
        raise _syntax_error(path, error) from error
    except (Exception, SystemExit) as error:
        raise _import_error(path, error) from error


def _syntax_error(path: Path, error: SyntaxError) -> ExperimentError:
    text = (error.text or "").rstrip("\n")
    width = (error.end_offset or 0) - (error.offset or 0) if error.end_lineno == error.lineno else 1
    place = Place(shown(error.filename or path), error.lineno, error.offset, max(width, 1), text or None)
    return ExperimentError(f"{shown(path)} could not be imported: {error.msg}", place=place, label="SyntaxError")


def _import_error(path: Path, error: BaseException) -> ExperimentError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_frame(frame.filename)]
    own = next((frame for frame in frames if Path(frame.filename).resolve() == path.resolve()), None)
    where = f"{shown(path)}:{own.lineno}" if own else shown(path)
    notes = [f"at {shown(frame.filename)}:{frame.lineno}: {frame.line}" for frame in frames if frame is not own]
    notes.extend(f"caused by {_said(cause)}" for cause in _chain(error))
    place = Place(shown(path), own.lineno, None, 1, own.line) if own else None
    what = _said(error) if not isinstance(error, ImportError) else str(error)
    return ExperimentError(f"{where} could not be imported: {what}", *notes[:12], place=place)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen = {id(error)}
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _is_user_frame(filename: str) -> bool:
    if filename.startswith("<"):
        return False
    nitro = str(Path(__file__).parent.parent)
    return not filename.startswith((nitro, *library_folders()))
