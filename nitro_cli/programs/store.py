"""The store: what nitro keeps of its programs for the next process.

    <root>/                    the user's own, mode 0700
      programs/<experiment>/<program>/<key>/<fields>.json     what one program depended on, and where its executable is
      executables/<digest>     the executable, found by the digest of the lowered program, behind a checksum
      answers/<key>            what is known of an optimizer rule: see ``answers``
      values/<key>             the first values of a model: see ``values``
      jax/<version and machine>/                              jax's own compilation cache, for all other programs
      runs.jsonl               what each run compiled and loaded
      locks/

A key is decided before any tracing (``Request.digest``); an entry under it holds in addition which GraphConst fields
the trace read, with their values, so one key can have several entries. Files are written under another name and then
renamed, so a reader sees a whole one or none; what is damaged all the same is a miss. An executable is code that will
run here: nothing is read from a folder or file that another user owns or could have written.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import operator
import os
import re
import stat
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from nitro_cli.errors import AnswerNo

FORMAT = "1"
MAX_BYTES = 4 * 10**9
MAX_DAYS = 90
NEAREST = 30  # how many of the newest entries of a program a miss is compared with
KEPT_RUNS = 1000  # lines of runs.jsonl that pruning leaves
WAIT_SECONDS = 60.0  # how long a process waits for another one that compiles the same program
RUNS_SECONDS = 5.0  # how long for the list of runs, which a process holds for milliseconds
_ABANDONED = 3600.0  # seconds after which a temporary file belongs to nobody
# What lies in the store, by folder: nothing else is ever counted or removed.
_TMP = r"(\.\d+\.[0-9a-f]+\.tmp)?"
_OWN_FOLDERS = {
    "programs": re.compile(r"[^/]+/[^/]+/[0-9a-f]{40}/[0-9a-f]{16}\.(json|uses)" + _TMP),
    "executables": re.compile("[0-9a-f]{64}" + _TMP),
    "answers": re.compile("[0-9a-f]{64}" + _TMP),
    "values": re.compile("[0-9a-f]{64}" + _TMP),
    "jax": re.compile(r"[^/]+-[0-9a-f]{12}/([^/]+-(cache|atime)|\.checked|\.lockfile)"),
    "locks": re.compile(r"([0-9a-f]{40}|prune|runs)\.lock"),
}
_ENTRY_FILE = re.compile(r"[0-9a-f]{16}\.json")
_JAX_USED = "-atime"
_OWN_FILES = ("runs.jsonl", "pruned")


class StoreWarning(UserWarning):
    """Something about the store that costs time but no result."""


@dataclass(frozen=True)
class Entry:
    """What one program depended on. ``executable`` is what ``lowered`` was compiled to, under the same name, or empty
    where it cannot be written down. With a reason in ``kept_out`` the entry is there for reasons of a miss alone, and
    its executable for those who trace and arrive at the same program. ``trees`` are the trees of the call and what the
    trace found out, pickled, as base64."""

    experiment: str
    program: str
    key: str
    code: Mapping[str, str]
    places: Mapping[str, str]
    arguments: Mapping[str, str]
    settings: Mapping[str, str]
    environment: Mapping[str, str]
    reads: Mapping[str, str]
    lowered: str
    executable: str = ""
    bytes: int = 0
    trees: str = ""
    lapack: bool = False
    kept_out: tuple[str, ...] = ()
    poisoned: str = ""
    seconds: Mapping[str, float] = field(default_factory=dict)
    created: float = 0.0
    format: str = FORMAT

    @property
    def name(self) -> str:
        """How messages and reports call it: ``MyExp/gradient/1a2b3c4d5e6f-0a1b2c3d``."""
        return f"{self.experiment}/{self.program}/{self.key[:12]}-{reads_digest(self.reads)[:8]}"

    @property
    def usable(self) -> bool:
        """Whether it may be loaded without a trace. An executable alone is not enough: that of a program which is
        kept out is there too, to be found by what it lowers to."""
        return bool(self.executable) and not self.kept_out and not self.poisoned


@dataclass(frozen=True)
class Listed:
    """An entry as ``nitro cache-stats`` shows it. ``bytes`` counts the executable, where no other entry wrote it, and
    the entry itself. ``state`` is "kept", "not kept", "poisoned" or "lost" (its executable is gone), for ``reason``."""

    entry: Entry
    path: Path
    bytes: int
    used: float
    hits: int
    seconds_saved: float
    state: str
    reason: str


class Store:
    """One store on disk. Safe to use from many processes at once; a fault of the disk is a warning and a miss."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs = root / "programs"
        self.executables = root / "executables"

    # ---- finding --------------------------------------------------------------------------------------------------

    def find(self, experiment: str, program: str, key: str, fields: Mapping[str, str]) -> Entry | None:
        """The entry for this key whose trace read fields that have the same values now; poisoned ones included."""
        for path in _files(self._folder(experiment, program, key)):
            entry = self._entry_or_damage(path)
            if entry is not None and entry.key == key and all(fields.get(n) == v for n, v in entry.reads.items()):
                return entry
        return None

    def _entry_or_damage(self, path: Path) -> Entry | None:
        """The entry of a file. One that is damaged is told of and taken out, so that it is told of once."""
        data = _read(path)
        facts = None if data is None else _facts(data)
        if data is None or facts is not None or not _ENTRY_FILE.fullmatch(path.name):
            return None if facts is None else _entry(facts)
        experiment, program, key = path.parts[-4:-1]
        settings.damaged.add(key)
        what = f"an entry of {experiment}/{program} in the store was damaged: its program is compiled anew when needed"
        warnings.warn(what, StoreWarning, 2)
        _remove(path)
        return None

    def entry_by_name(self, name: str) -> Entry | None:
        """The entry that messages and run.json call ``name``."""
        experiment, _, rest = name.partition("/")
        program, _, digests = rest.partition("/")
        key, _, reads = digests.partition("-")
        folders = _folders(self.programs / _slug(experiment) / _slug(program)) if key else []
        for path in [p for f in folders if f.name.startswith(key) for p in _files(f) if p.name.startswith(reads)]:
            entry = self._entry(path)
            if entry is not None and entry.name == name:
                return entry
        return None

    def nearest(self, experiment: str, program: str) -> Iterator[Entry]:
        """The newest entries of a program of this name, for the reason of a miss."""
        folder = self.programs / _slug(experiment) / _slug(program)
        paths = [path for key in _folders(folder) for path in _files(key)]
        for path in sorted(paths, key=_modified, reverse=True)[:NEAREST]:
            entry = self._entry_or_damage(path)
            if entry is not None:
                yield entry

    def executable(self, digest: str) -> bytes | None:
        """The serialized executable. A damaged file is removed."""
        return self._payload(self.executables / digest, f"the stored executable {digest[:12]} is damaged")

    def _payload(self, path: Path, damage: str) -> bytes | None:
        """What lies behind the checksum of a file; None where there is none, or it is damaged: then it is removed."""
        data = _read(path)
        if data is None or _checksum(path.name, data[32:]) == data[:32]:
            return None if data is None else data[32:]
        if damage:
            warnings.warn(f"{damage} and is compiled anew", StoreWarning, 3)
        _remove(path)
        return None

    # ---- keeping --------------------------------------------------------------------------------------------------

    def keep(self, entry: Entry, executable: bytes | None) -> bool:
        """Write an entry, and its executable: over what lies there, which could not be used. False where the disk
        refuses."""
        if executable is not None:
            path = self.executables / entry.executable
            if not _write(path, _checksum(path.name, executable) + executable, f"the executable of {entry.name}"):
                return False
        settings.damaged.discard(entry.key[:40])
        return _write(self._path(entry), _written(entry), f"the entry {entry.name}")

    def used(self, entry: Entry, seconds: float) -> None:
        """Note that an entry was loaded, in ``seconds``. Appended by one write, so that no process loses another's."""
        path = self._path(entry)
        settings.found += 1
        saved = sum(entry.seconds.values()) - seconds
        with contextlib.suppress(OSError):
            _append_line(path.with_suffix(".uses"), f"{time.time():.0f} {saved:.3f}")
            os.utime(path)
            os.utime(self.executables / entry.executable)

    def drop(self, entry: Entry) -> None:
        """Take out an executable that does not load or run here; the entry stays, for reasons."""
        _remove(self.executables / entry.executable)

    def note(self, folder: str, key: str) -> bytes | None:
        """What is kept under this key in ``answers`` or ``values``; None where nothing is, or its file is damaged."""
        path = self.root / folder / key
        payload = self._payload(path, "")
        if payload is not None:
            with contextlib.suppress(OSError):
                os.utime(path)
        return payload

    def keep_note(self, folder: str, key: str, payload: bytes) -> None:
        _write(self.root / folder / key, _checksum(key, payload) + payload, f"one of its {folder}")

    def drop_note(self, folder: str, key: str) -> None:
        _remove(self.root / folder / key)

    def answer(self, key: str) -> dict[str, Any] | None:
        """What was found out under this key (see ``answers``)."""
        payload = self.note("answers", key)
        return None if payload is None else json.loads(payload)

    def keep_answer(self, key: str, answer: Mapping[str, Any]) -> None:
        self.keep_note("answers", key, json.dumps(answer).encode())

    def poison(self, entry: Entry, why: str) -> None:
        """Mark an entry so that it is never used again."""
        _write(self._path(entry), _written(replace(entry, poisoned=why)), f"that {entry.name} must not be used")

    @contextlib.contextmanager
    def alone(self, key: str) -> Iterator[None]:
        """While active, no other process compiles the program of this key, unless waiting took too long. The lock is
        the system's own, so it is free as soon as its process is gone, however that ended."""
        with self._locked(key[:40], WAIT_SECONDS):
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, seconds: float) -> Iterator[bool]:
        """Hold a lock, waiting ``seconds`` at most; False where it could not be had."""
        from filelock import FileLock, Timeout  # here, since a start from the store needs no lock

        lock = None
        try:
            lock = FileLock(private(self.root / "locks") / f"{name}.lock", timeout=seconds)
            lock.acquire()
        except (Timeout, OSError, NotImplementedError):
            lock = None
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()

    def note_run(self, facts: Mapping[str, Any]) -> None:
        """Append one run's counters. Where the lock cannot be had, they are appended all the same: a line is one write,
        so only a process that trims the list at this very moment could lose it."""
        with contextlib.suppress(OSError), self._locked("runs", RUNS_SECONDS):
            _append_line(self.root / "runs.jsonl", json.dumps(facts))

    def _trim_runs(self) -> None:
        """Leave the newest lines of the list of runs, unless another process is at it."""
        with self._locked("runs", RUNS_SECONDS) as locked:
            lines = (_read(self.root / "runs.jsonl") or b"").splitlines(keepends=True) if locked else []
            if len(lines) > KEPT_RUNS:
                _write(self.root / "runs.jsonl", b"".join(lines[-KEPT_RUNS:]), "the list of runs")

    # ---- looking after --------------------------------------------------------------------------------------------

    def runs(self) -> list[dict[str, Any]]:
        """The counters of the last runs, oldest first. A line that was cut is left out."""
        rows = []
        for line in (_read(self.root / "runs.jsonl") or b"").splitlines():
            with contextlib.suppress(ValueError):
                row = json.loads(line)
                rows += [row] if isinstance(row, dict) else []
        return rows

    def listed(self) -> list[Listed]:
        """All entries, by experiment and program."""
        found = []
        for path in self._entry_paths():
            entry = self._entry(path)
            if entry is None:
                continue
            saved = _saved(_read(path.with_suffix(".uses")) or b"")
            there = bool(entry.executable) and (self.executables / entry.executable).exists()
            size = _size(path) + (entry.bytes if there else 0)
            state, reason = _state(entry, there)
            found.append(Listed(entry, path, size, _modified(path), len(saved), sum(saved), state, reason))
        return sorted(found, key=lambda row: (row.entry.experiment, row.entry.program, row.used))

    def size(self, part: str = "") -> int:
        """Bytes on disk, of everything that nitro keeps or of one folder: ``jax``, for example."""
        return sum(map(_size, self._own(part) if part else self._own()))

    def _own(self, *parts: str) -> Iterator[Path]:
        """All files of the store, or of some folders. Where the folder that the user named holds other things too,
        those are not nitro's to count or to remove."""
        for name in () if parts else _OWN_FILES:
            if (self.root / name).is_file():
                yield self.root / name
        for name in parts or _OWN_FOLDERS:
            for path in (self.root / name).rglob("*"):
                inside = str(path.relative_to(self.root / name))
                if _OWN_FOLDERS[name].fullmatch(inside) and path.is_file() and not path.is_symlink():
                    yield path

    def orphans(self) -> list[Path]:
        """Executables without an entry, damaged entries, and temporary files that their process left behind."""
        paths = self._entry_paths()
        entries = {path: self._entry(path) for path in paths}
        wanted = {entry.executable for entry in entries.values() if entry is not None}
        lost = [path for path, entry in entries.items() if entry is None]
        lost += [path for path in self._own("executables") if path.name not in wanted and not _temporary(path)]
        lost += [path for path in self._own("locks") if time.time() - _modified(path) > 86400]
        own = list(self._own())
        lost += [path for path in own if _temporary(path) and time.time() - _modified(path) > _ABANDONED]
        lost += [path for path in own if path.suffix == ".uses" and not path.with_suffix(".json").exists()]
        return lost

    def prune(self, max_bytes: int = MAX_BYTES, max_days: float = MAX_DAYS) -> int:
        """Remove orphans, then entries that nobody used for ``max_days``, then the least recently used until the rest
        fits ``max_bytes``. Returns how many files went. Does nothing while another process prunes."""
        with self._locked("prune", 0.0) as locked:
            return self._prune(max_bytes, max_days) if locked else 0

    def tidy(self) -> None:
        """Prune, unless that was done less than a day ago."""
        mark = self.root / "pruned"
        if time.time() - _modified(mark) > 86400:
            self.prune()
            _write(mark, b"", "the time of the last tidying")

    def _prune(self, max_bytes: int, max_days: float) -> int:
        # A new executable is written before its entry: one that is minutes old is not an orphan yet.
        removed = [path for path in self.orphans() if time.time() - _modified(path) > 600.0]
        for path in removed:
            _remove(path)
        entries = {path: self._entry(path) for path in self._entry_paths()}
        shared = Counter(entry.executable for entry in entries.values() if entry is not None)
        others = [path for path in self._own("jax", "answers", "values") if not path.name.endswith(_JAX_USED)]
        size, oldest = self.size(), time.time() - max_days * 86400
        used = {path: _modified(path) for path in entries} | {path: _read_last(path) for path in others}
        for path in sorted(used, key=lambda path: used[path]):
            if used[path] >= oldest and size <= max_bytes:
                break
            size -= self._evict(path, entries.get(path), shared)
            removed.append(path)
        self._sweep("programs")
        self._trim_runs()
        return len(removed)

    def _sweep(self, name: str) -> None:
        """Remove the empty folders of a part of the store."""
        for folder in [*sorted((self.root / name).rglob("*"), reverse=True), self.root / name]:
            with contextlib.suppress(OSError):
                folder.rmdir()  # refused unless empty

    def _evict(self, path: Path, entry: Entry | None, shared: Counter[str]) -> int:
        """Remove one file; of an entry also its executable, unless another entry has the same. Returns the bytes."""
        victims, size = [path, _jax_use(path)], 0
        if entry is not None:
            victims.append(path.with_suffix(".uses"))
            shared[entry.executable] -= 1
            if entry.executable and not shared[entry.executable]:
                victims.append(self.executables / entry.executable)
        for victim in victims:
            size += _size(victim)
            _remove(victim)
        return size

    def clear(self) -> int:
        """Remove everything that nitro wrote here. Returns the bytes freed."""
        before = self.size()
        for path in list(self._own()):
            _remove(path)
        for name in _OWN_FOLDERS:
            self._sweep(name)
        return before - self.size()

    def _entry_paths(self) -> list[Path]:
        return [path for path in self._own("programs") if path.suffix == ".json"]

    def _entry(self, path: Path) -> Entry | None:
        data = _read(path)
        facts = None if data is None else _facts(data)
        return None if facts is None else _entry(facts)

    def _folder(self, experiment: str, program: str, key: str) -> Path:
        return self.programs / _slug(experiment) / _slug(program) / key[:40]

    def _path(self, entry: Entry) -> Path:
        folder = self._folder(entry.experiment, entry.program, entry.key)
        return folder / f"{reads_digest(entry.reads)[:16]}.json"


# ---- which store ---------------------------------------------------------------------------------------------------


@dataclass
class _Settings:
    """``cold`` looks nothing up; ``verify`` traces what it finds and compares. ``found`` counts the entries that this
    process has used; ``damaged`` are keys (as folders are called by them) of which an entry was damaged."""

    cold: bool = False
    verify: bool = False
    found: int = 0
    damaged: set[str] = field(default_factory=set)
    opened: dict[str, Store | None] = field(default_factory=dict)


settings = _Settings()


def store_root() -> Path | None:
    """Where the store lies: ``NITRO_CACHE_DIR``, else the user's cache folder. None where it is switched off."""
    given = os.environ.get("NITRO_CACHE_DIR")
    if given is not None:
        return None if given.strip().lower() in ("", "none", "off") else Path(given).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "nitro"


def open_store() -> Store | None:
    """The store of this user, or None where it is switched off or may not be used; the latter is said once."""
    root = store_root()
    if root is None:
        return None
    if str(root) not in settings.opened:
        problem = _unsafe(root)
        if problem:
            warnings.warn(f"nitro keeps no compiled programs: {problem}", StoreWarning, 2)
        settings.opened[str(root)] = None if problem else Store(root)
    return settings.opened[str(root)]


def store_as_it_lies() -> tuple[Store | None, str]:
    """The store for those who look after it, without a warning; where there is none, why. The reason is empty where it
    is switched off."""
    root = store_root()
    problem = _unsafe(root) if root is not None else ""
    return (None if root is None or problem else Store(root)), problem


def _unsafe(root: Path) -> str:
    """Why the folder cannot hold executables, or an empty text. Makes the folder where there is none."""
    try:
        root.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
        facts = root.stat()
    except OSError as error:
        return f"{root} cannot be used ({error.strerror or error}); NITRO_CACHE_DIR names another folder, or none"
    if not stat.S_ISDIR(facts.st_mode):
        return f"{root} is not a folder; NITRO_CACHE_DIR names another one, or none"
    if problem := _open_to_others(root, facts):
        return problem
    if not os.access(root, os.W_OK | os.X_OK):
        return f"{root} cannot be written to; NITRO_CACHE_DIR names another folder, or none"
    return next(filter(None, (folder_problem(root / name) for name in _OWN_FOLDERS)), "")


def folder_problem(folder: Path, closed: bool = False) -> str:
    """Why a folder cannot hold what will run here, or an empty text; one that is not there is none. With ``closed``
    others may not even look into it."""
    try:
        facts = folder.stat()
    except OSError:
        return ""
    return _open_to_others(folder, facts, 0o077 if closed else 0o022)


def _open_to_others(folder: Path, facts: os.stat_result, mode: int = 0o022) -> str:
    if hasattr(os, "getuid") and facts.st_uid != os.getuid():
        return f"{folder} belongs to another user, who could put code there; let NITRO_CACHE_DIR name a folder of yours"
    if facts.st_mode & mode:
        can = "write to" if facts.st_mode & 0o022 else "look into"
        return f"other users can {can} {folder}, and could put code there; make it yours alone: chmod 700 {folder}"
    return ""


# ---- files ---------------------------------------------------------------------------------------------------------


def _read(path: Path) -> bytes | None:
    """The content of a file that is this user's alone; None where there is none, or others could have written it."""
    flags = (getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK"))  # the last one for pipes
    try:
        descriptor = os.open(path, functools.reduce(operator.or_, flags, os.O_RDONLY))
    except OSError:
        return None
    try:
        facts = os.fstat(descriptor)
        own = not hasattr(os, "getuid") or facts.st_uid == os.getuid()
        if not (stat.S_ISREG(facts.st_mode) and own and not facts.st_mode & 0o022):
            warnings.warn(f"{path} is not this user's alone and is not read", StoreWarning, 2)
            return None
        if problem := folder_problem(path.parent):
            warnings.warn(f"{path.name} is not read: {problem}", StoreWarning, 2)
            return None
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    except OSError:
        return None
    finally:
        os.close(descriptor)


def _write(path: Path, data: bytes, what: str) -> bool:
    """Write a file whole, under another name first. False, with a warning that names ``what``, where the disk
    refuses."""
    partial = path.with_name(f"{path.name}.{os.getpid()}.{os.urandom(4).hex()}.tmp")
    try:
        private(path.parent)
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(partial, path)
    except OSError as error:
        _remove(partial)
        warnings.warn(f"the store could not keep {what}: {error.strerror or error}", StoreWarning, 2)
        return False
    return True


def _append_line(path: Path, line: str) -> None:
    """Append a line by one write. After one that was cut (a full disk) it begins on a line of its own."""
    private(path.parent)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        end = os.lseek(descriptor, 0, os.SEEK_END)
        cut = end > 0 and os.pread(descriptor, 1, end - 1) != b"\n"
        os.write(descriptor, (b"\n" if cut else b"") + line.encode() + b"\n")
    finally:
        os.close(descriptor)


def private(folder: Path) -> Path:
    """Make a folder, and those above it that are missing, for this user alone: ``mkdir`` gives its mode to the last
    one only, and others may be allowed to write to the rest."""
    if not folder.is_dir():
        private(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _remove(path: Path) -> None:
    with contextlib.suppress(OSError):
        path.unlink()


def _files(folder: Path) -> list[Path]:
    try:
        return sorted(Path(item.path) for item in os.scandir(folder) if item.name.endswith(".json") and item.is_file())
    except OSError:
        return []


def _folders(folder: Path) -> list[Path]:
    try:
        return sorted(Path(item.path) for item in os.scandir(folder) if item.is_dir(follow_symlinks=False))
    except OSError:
        return []


def _written(entry: Entry) -> bytes:
    """An entry as its file holds it."""
    facts = asdict(entry)
    return json.dumps(facts | {"checksum": _checksum("entry", json.dumps(facts).encode()).hex()}).encode()


def _facts(data: bytes) -> dict[str, Any] | None:
    """What the file of an entry says; None where it is damaged."""
    try:
        facts = json.loads(data)
        checksum = facts.pop("checksum", "")
    except (ValueError, TypeError, AttributeError):
        return None
    return facts if checksum == _checksum("entry", json.dumps(facts).encode()).hex() else None


def _entry(facts: Mapping[str, Any]) -> Entry | None:
    """The entry that a file holds; None for one that another version of nitro wrote, or that points elsewhere."""
    try:
        entry = Entry(**facts)
    except TypeError:
        return None
    return entry if entry.format == FORMAT and entry.executable in ("", entry.lowered) else None


def _checksum(name: str, payload: bytes) -> bytes:
    """Of an executable together with its name: a whole file of another program is as wrong as half a file."""
    return hashlib.sha256(name.encode() + payload).digest()


def _temporary(path: Path) -> bool:
    return path.suffix == ".tmp"


def _saved(uses: bytes) -> list[float]:
    """Seconds saved by each use of an entry, from the lines that ``Store.used`` appended."""
    seconds = []
    for line in uses.splitlines():
        with contextlib.suppress(ValueError, IndexError):
            seconds.append(float(line.split()[1]))
    return seconds


def _state(entry: Entry, there: bool) -> tuple[str, str]:
    if entry.poisoned:
        return "poisoned", entry.poisoned
    if entry.kept_out or not entry.executable:
        return "not kept", "; ".join(entry.kept_out)
    return ("kept", "") if there else ("lost", "its executable did not load here, and is compiled anew")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _read_last(path: Path) -> float:
    """When a file of jax's was used: jax notes it in a file beside it where its cache has a size limit, and else the
    file system knows, to a day or so (``relatime``), or not at all (``noatime``)."""
    try:
        facts = path.stat()
    except OSError:
        return 0.0
    return max(facts.st_mtime, facts.st_atime, _modified(_jax_use(path)))


def _jax_use(path: Path) -> Path:
    """Where jax notes the last use of an entry of its cache; it cannot do without where the entry is there."""
    return path.with_name(path.name.removesuffix("-cache") + _JAX_USED)


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-") or "unnamed"


def reads_digest(reads: Mapping[str, str]) -> str:
    """A name for the values of the GraphConst fields that a trace read."""
    return hashlib.sha256("\n".join(f"{name} = {value}" for name, value in sorted(reads.items())).encode()).hexdigest()


class CacheMismatch(AnswerNo):
    """A stored program is not what its code traces to now."""

    kind = "cache"
