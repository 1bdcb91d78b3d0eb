"""Finding experiments: ``myexp``, ``experiments.myexp``, ``path/to/file.py``, each with ``:Class``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from nitro_cli.errors import ExperimentError, UsageError
from nitro_cli.experiment import toml
from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.hooks import ALL, REQUIRED, is_complete
from nitro_cli.experiment.loading import FOLDER, importing, load_experiment_module, on_path
from nitro_cli.experiment.sources import parsed, shown
from nitro_cli.suggest import did_you_mean, listed, nearest


@dataclass(frozen=True)
class Found:
    """An experiment class: ``name`` for run folders, ``spec`` as asked for, ``qualname`` such as ``myexp:MyExp``."""

    cls: type
    name: str
    spec: str
    path: Path | None
    qualname: str


@dataclass(frozen=True)
class Listing:
    """An experiment as ``nitro list`` shows it, read without importing it. ``name`` is what find_experiment takes."""

    name: str
    path: Path
    doc: str = ""
    presets: tuple[str, ...] = ()
    error: str | None = None


_NAMES: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()


def find_experiment(spec: str, root: str | Path | None = None) -> Found:
    """The class that ``spec`` names, looked up from ``root`` (the working directory).

    Raises UsageError where there is no such experiment or several, ExperimentError where its module cannot be imported.
    """
    base = Path(root) if root is not None else Path.cwd()
    target, class_name = _split(spec)
    module = _load_target(target, base)
    stem = _stem(module)
    classes = _candidates(module)
    cls = _named_class(module, class_name, stem) if class_name else _only_class(module, classes, stem)
    several = len(classes) > 1
    name = f"{stem}-{cls.__name__}" if several else stem
    _NAMES[cls] = name
    path = Path(module.__file__) if module.__file__ else None
    return Found(cls, name, spec, path, f"{stem}:{cls.__name__}")


def experiment_name(cls: type) -> str:
    """The name of a class's run folders: its module's where that is an experiment file, else its own."""
    cls = getattr(cls, "__nitro_viewed__", cls)
    if cls in _NAMES:
        return _NAMES[cls]
    module = sys.modules.get(cls.__module__)
    file = getattr(module, "__file__", None)
    if module is not None and file is not None and Path(file).parent.name == FOLDER:
        return f"{Path(file).stem}-{cls.__name__}" if len(_candidates(module)) > 1 else Path(file).stem
    return cls.__name__


# -- from a spec to a module ------------------------------------------------------------------------------------------


def _split(spec: str) -> tuple[str, str | None]:
    target, colon, name = spec.rpartition(":")
    return (target, name) if colon and name.isidentifier() else (spec, None)


def _load_target(target: str, root: Path) -> ModuleType:
    if target.endswith(".py") or "/" in target or "\\" in target:
        path = root / target
        path = path if path.is_file() else path.with_suffix(".py")
        if path.is_file():
            return load_experiment_module(path)
        raise _not_found(target, root, [path.parent])
    for path in _files_of(target, root):
        if path.is_file():
            return load_experiment_module(path)
    if "." in target:
        return _import_dotted(target, root)
    raise _not_found(target, root, [root / FOLDER])


def _files_of(target: str, root: Path) -> Iterator[Path]:
    parts = target.split(".")
    folders = [root.joinpath(*parts)] if len(parts) > 1 else [root / FOLDER / target]
    for folder in folders:
        yield folder.with_name(folder.name + ".py")
        yield folder / "__init__.py"


def _import_dotted(name: str, root: Path) -> ModuleType:
    on_path(root)
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError, AttributeError):
        spec = None
    if spec is None:
        raise _not_found(name, root, [root, root / FOLDER])
    with importing(Path(spec.origin or name)):
        return importlib.import_module(name)


def _not_found(target: str, root: Path, folders: list[Path]) -> UsageError:
    known = [listing.name for listing in list_experiments(root)]
    searched = ", ".join(sorted({str(folder) for folder in folders}))
    notes = [f"looked in {searched}"]
    if root.name == FOLDER:
        notes.append(f"nitro runs in the folder above {FOLDER}/: cd ..")
    notes.append(f"experiments here: {listed(known, 20)}" if known else f"no experiments in {root / FOLDER}")
    label = did_you_mean(target.rpartition("/")[2].removesuffix(".py"), known)
    return UsageError(f"experiment '{target}' not found", *notes, label=label, suggestions=nearest(target, known))


# -- from a module to a class -----------------------------------------------------------------------------------------


def _stem(module: ModuleType) -> str:
    return module.__name__.rpartition(".")[2]


def _candidates(module: ModuleType) -> list[type]:
    """Experiments that the module itself defines; complete ones alone where there are any."""
    defined = [
        value
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and not value.__name__.startswith("_")
        and not name.startswith("_") and _is_experiment(value)
    ]  # fmt: skip
    defined = list(dict.fromkeys(defined))
    return [cls for cls in defined if _is_complete(cls)] or defined


def _is_experiment(cls: type) -> bool:
    return issubclass(cls, Experiment) or _is_complete(cls)


def _is_complete(cls: type) -> bool:
    return is_complete(name for name in ALL if callable(getattr(cls, name, None)))


def _only_class(module: ModuleType, classes: list[type], stem: str) -> type:
    if len(classes) == 1:
        return classes[0]
    if classes:
        specs = [f"{stem}:{cls.__name__}" for cls in classes]
        raise UsageError(
            f"{stem} defines {len(classes)} experiments", f"choose one of {', '.join(specs)}", choices=specs
        )
    file = shown(module.__file__ or stem)
    note = "write a class that derives from nitro_cli.Experiment, with the hooks " + ", ".join(REQUIRED)
    imported = [name for name, value in vars(module).items() if _is_foreign(module, value)]
    other = (f"imported classes do not count: {listed(imported)}",) if imported else ()
    raise ExperimentError(f"{file} defines no experiment", note, *other)


def _is_foreign(module: ModuleType, value: Any) -> bool:
    return (
        isinstance(value, type)
        and value.__module__ != module.__name__
        and _is_experiment(value)
        and value is not Experiment
    )


def _named_class(module: ModuleType, name: str, stem: str) -> type:
    found = getattr(module, name, None)
    if isinstance(found, type) and _is_experiment(found):
        return found
    known = [cls.__name__ for cls in _candidates(module)]
    what = f"{stem} has no experiment '{name}'"
    if found is not None:
        what = f"'{name}' in {stem} is not an experiment"
    label = did_you_mean(name, known, f"'{stem}:{{}}'")
    raise UsageError(what, f"{stem} has {listed(known) or 'none'}", label=label, suggestions=nearest(name, known))


# -- listing without importing ----------------------------------------------------------------------------------------


def list_experiments(root: str | Path | None = None) -> list[Listing]:
    """Every experiment below ``root``/experiments, by name, read from the source text: nothing is imported."""
    folder = (Path(root) if root is not None else Path.cwd()) / FOLDER
    files = [*folder.glob("*.py"), *folder.glob("*/__init__.py")]
    found = [
        listing for file in files if not file.name.startswith("_") or file.parent != folder for listing in _read(file)
    ]
    return sorted(found, key=lambda listing: listing.name)


def _read(file: Path) -> list[Listing]:
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    try:
        tree = parsed(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        return [Listing(stem, file, error=f"{shown(file)}:{getattr(error, 'lineno', 1)}: {error.args[0]}")]
    classes = _experiment_classes(tree)
    names = [stem] if len(classes) == 1 else [f"{stem}:{node.name}" for node in classes]
    presets, error = _preset_names(file, stem)
    docs = [(ast.get_docstring(node) or ast.get_docstring(tree) or "").partition("\n")[0] for node in classes]
    return [Listing(name, file, doc, presets, error) for name, doc in zip(names, docs, strict=True)]


def _experiment_classes(tree: ast.Module) -> list[ast.ClassDef]:
    """Classes that derive from ``Experiment`` by name or from another such class here, or have the required hooks."""
    found: list[ast.ClassDef] = []
    names = {"Experiment"} | {
        alias.asname
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.name == "Experiment" and alias.asname
    }
    complete: dict[str, set[str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        bases = {ast.unparse(base).rpartition(".")[2] for base in node.bases}
        methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
        complete[node.name] = methods.union(*(complete.get(base, set()) for base in bases))
        if bases & names or is_complete(complete[node.name]):
            names.add(node.name)
            found.append(node)
    found = [node for node in found if not node.name.startswith("_")]
    return [node for node in found if is_complete(complete[node.name])] or found


def _preset_names(file: Path, stem: str) -> tuple[tuple[str, ...], str | None]:
    folder = file.parent.parent if file.name == "__init__.py" else file.parent
    path = folder.parent / "presets" / f"{stem}.toml"
    if not path.is_file():
        return (), None
    try:
        return tuple(name for name, table in toml.read_toml(path).data.items() if isinstance(table, dict)), None
    except UsageError as error:
        return (), str(error).partition("\n")[0]


# -- unpickling in a fresh process ------------------------------------------------------------------------------------


def restore(module: str, path: str | None, qualname: str) -> Any:
    """An empty instance for pickle to fill: of the class as it is loaded, or loaded from its file."""
    if module not in sys.modules and path is not None and module.rpartition(".")[0]:
        loaded = load_experiment_module(path)
    else:
        loaded = importlib.import_module(module)
    found: Any = loaded
    for part in qualname.split("."):
        found = getattr(found, part)
    return found.__new__(found)


__all__ = [
    "Found",
    "Listing",
    "experiment_name",
    "find_experiment",
    "list_experiments",
    "load_experiment_module",
    "restore",
]
