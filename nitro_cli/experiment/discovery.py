"""Finding experiments: ``myexp``, ``experiments.myexp``, ``path/to/file.py``, each with ``:Class``."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
import weakref
from collections.abc import Iterator, Mapping
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
    trees = [(file, _tree(file)) for file in files if not file.name.startswith("_") or file.parent != folder]
    elsewhere: dict[str, set[str]] = {}
    before = -1
    while before < len(elsewhere):  # a base class may lie in another file, and its own base in a third one
        before = len(elsewhere)
        for _, tree in trees:
            if isinstance(tree, ast.Module):
                elsewhere |= _methods_of_experiments(tree, elsewhere)
    found = [listing for file, tree in trees for listing in _listings(file, tree, elsewhere)]
    return sorted(found, key=lambda listing: listing.name)


def _tree(file: Path) -> ast.Module | Exception:
    try:
        return parsed(file.read_bytes(), str(file))
    except (SyntaxError, ValueError) as error:
        return error


def _listings(file: Path, tree: ast.Module | Exception, elsewhere: Mapping[str, set[str]]) -> list[Listing]:
    stem = file.parent.name if file.name == "__init__.py" else file.stem
    if isinstance(tree, Exception):
        line = getattr(tree, "lineno", None)
        return [Listing(stem, file, error=f"{shown(file)}{f':{line}' if line else ''}: {tree.args[0]}")]
    methods = _methods_of_experiments(tree, elsewhere)
    classes = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in methods and not n.name.startswith("_")]
    classes = [node for node in classes if is_complete(methods[node.name])] or classes
    names = [stem] if len(classes) == 1 else [f"{stem}:{node.name}" for node in classes]
    presets, error = _preset_names(file, stem)
    docs = [(ast.get_docstring(node) or ast.get_docstring(tree) or "").partition("\n")[0] for node in classes]
    return [Listing(name, file, doc, presets, error) for name, doc in zip(names, docs, strict=True)]


def _methods_of_experiments(tree: ast.Module, elsewhere: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """The experiments that a file defines, each with its methods.

    They derive from ``Experiment`` by name, from another such class here or in ``elsewhere``, or have the required
    hooks. ``elsewhere`` holds the experiments of the other files by name.
    """
    imports = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    names = {"Experiment"} | {name for name, was in imports.items() if was == "Experiment" or was in elsewhere}
    complete = {name: set(elsewhere[was]) for name, was in imports.items() if was in elsewhere}
    found: dict[str, set[str]] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        methods = {name for item in node.body for name in _defines(item)}
        derives = False
        for base in map(ast.unparse, node.bases):
            module, _, last = base.rpartition(".")
            methods |= complete.get(last) or (elsewhere.get(last, set()) if module else set())
            derives |= last in names or (bool(module) and last in elsewhere)
        complete[node.name] = methods
        if derives or is_complete(methods):
            names.add(node.name)
            found[node.name] = methods
    return found


def _defines(item: ast.stmt) -> list[str]:
    """Names of methods that a line of a class body defines, ``loss = Other.loss`` included."""
    if isinstance(item, ast.FunctionDef):
        return [item.name]
    if isinstance(item, ast.Assign):
        return [target.id for target in item.targets if isinstance(target, ast.Name)]
    return []


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
