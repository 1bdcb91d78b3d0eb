"""What an installed library consists of, as a digest: its version, its record, and what was edited since."""

from __future__ import annotations

import csv
import functools
import hashlib
import importlib.util
import os
import sys
from importlib import metadata
from pathlib import Path


@functools.cache
def version(distribution: str) -> str | None:
    """The version of a distribution that is installed, else None. To read it from its metadata takes a millisecond."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


@functools.cache
def library_digest(package: str) -> str:
    """Version and digest of the files of the distribution that ``package`` comes from, as they are now: what its
    record says, and the content of Python files that were edited since it was installed."""
    folder = _site(package)
    if folder is None:
        return "unknown"
    info = _distribution(folder, package)
    if info is None:
        return f"no record {_tree(folder, package)}"
    record = (info / "RECORD").read_bytes()
    _, _, version = info.name.removesuffix(".dist-info").partition("-")
    edited = _edited(folder, record.decode("utf-8", "replace"), (info / "RECORD").stat().st_mtime_ns)
    return f"{version} {hashlib.sha256(record + edited.encode()).hexdigest()}"


def _site(package: str) -> Path | None:
    """The folder that a package was installed into; it need not be imported."""
    module = sys.modules.get(package)
    spec = getattr(module, "__spec__", None) or importlib.util.find_spec(package)
    places = [*(getattr(spec, "submodule_search_locations", None) or ()), getattr(spec, "origin", None) or ""]
    return Path(places[0]).parent if places[0] else None


def _distribution(folder: Path, package: str) -> Path | None:
    """The dist-info folder whose record lists ``package``; those of the same name come first."""
    infos = sorted(folder.glob("*.dist-info"))
    infos.sort(key=lambda path: not path.name.lower().replace("-", "_").startswith(f"{package.lower()}_"))
    for info in infos:
        record = info / "RECORD"
        if record.is_file():
            text = "\n" + record.read_text(errors="replace")
            if f"\n{package}/" in text or f"\n{package}.py," in text:
                return info
    return None


def _edited(folder: Path, record: str, installed: int) -> str:
    """Content of the Python files that are newer than the record, of another size, or listed without a digest."""
    found = []
    for row in csv.reader(record.splitlines()):
        if len(row) < 3 or not row[0].endswith(".py"):
            continue
        path = f"{folder}/{row[0]}"  # a Path for each of a thousand files would take longer than all the rest
        try:
            facts = os.stat(path)
        except OSError:
            found.append(f"{row[0]} is gone")
            continue
        if row[1] and facts.st_mtime_ns <= installed and str(facts.st_size) == row[2]:
            continue
        found.append(f"{row[0]} {hashlib.sha256(Path(path).read_bytes()).hexdigest()}")
    return "\n".join(found)


def _tree(folder: Path, package: str) -> str:
    """Digest of the code of a package or of a module that is one file, compiled ones included."""
    hasher = hashlib.sha256()
    paths = [path for kind in ("py", "so", "pyd") for path in (folder / package).rglob(f"*.{kind}")]
    paths += [path for kind in ("py", "so", "pyd") for path in folder.glob(f"{package}.*{kind}")]
    for path in sorted(set(paths)):
        hasher.update(f"{path.relative_to(folder)} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return hasher.hexdigest()
