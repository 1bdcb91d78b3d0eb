"""The folder of a run: how it is made, found again, and never written over."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import socket
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from nitro_cli.errors import NitroError, OutputError, ProtectError, UsageError
from nitro_cli.loggers.jsonl import plain
from nitro_cli.programs.installed import version
from nitro_cli.suggest import did_you_mean, listed

RUNS = "runs"
LATEST = "latest"
RESERVED_NAMES = frozenset({"config.toml", "run.json", "metrics.jsonl", "console.log", "checkpoints", LATEST})
NAME_LIMIT = 80


class RunDirectory:
    """One run's folder. ``path`` is absolute; ``id`` is the folder's name."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.abspath(path))
        self.id = self.path.name
        self.config_path = self.path / "config.toml"
        self.run_json_path = self.path / "run.json"
        self.log_path = self.path / "metrics.jsonl"
        self.console_path = self.path / "console.log"
        self.checkpoints_path = self.path / "checkpoints"
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    def write_config(self, text: str) -> None:
        """Write config.toml, whole or not at all."""
        _write_atomically(self.config_path, text)

    def update_run(self, **facts: Any) -> None:
        """Merge ``facts`` into run.json, whole or not at all. Raises ``OutputError`` where it cannot be written."""
        with self._lock:
            merged = {**self.read_run(), **facts}
            _write_atomically(self.run_json_path, json.dumps(plain(merged), indent=2, allow_nan=False) + "\n")

    def read_run(self) -> dict[str, Any]:
        """The facts in run.json; empty where there is none. Raises ``OutputError`` where it is damaged."""
        try:
            facts = json.loads(self.run_json_path.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise OutputError(f"{self.run_json_path} cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise self._damaged(str(error)) from error
        if not isinstance(facts, dict):
            raise self._damaged(f"it holds a {type(facts).__name__}")
        return facts

    def _damaged(self, how: str) -> OutputError:
        return OutputError(
            f"{self.run_json_path} cannot be read, it is damaged: {how}",
            "nothing else of the run is lost: its configuration, log and checkpoints lie beside it",
            f"to go on without it: echo {{}} > {shlex.quote(str(self.run_json_path))}",
            path=str(self.run_json_path),
        )

    def looks_like_one(self) -> bool:
        """Whether the folder holds a run, a damaged one perhaps."""
        return self.run_json_path.is_file() or (self.config_path.is_file() and self.log_path.is_file())

    def own_file(self, name: str) -> Path:
        """Where a logger or plug-in may write ``name``; refuses the names that the runner itself uses."""
        if Path(name).parts[:1] and Path(name).parts[0] in RESERVED_NAMES:
            raise ProtectError(
                f"the name {name!r} belongs to the runner", f"reserved: {', '.join(sorted(RESERVED_NAMES))}"
            )
        return self.path / name

    def created(self) -> str:
        """When the run was made, as sortable text; from the folder itself where run.json does not say."""
        with contextlib.suppress(OutputError):
            said = self.read_run().get("created")
            if isinstance(said, str):
                return said
        return datetime.fromtimestamp(self.path.stat().st_mtime, UTC).isoformat(timespec="microseconds")


def create_run(
    root: Path | None,
    experiment_name: str,
    preset: str | None = None,
    run_dir: Path | None = None,
    *,
    force: bool = False,
) -> RunDirectory:
    """Make the folder of a new run and claim it by writing its first run.json.

    ``root`` (default: the working folder) holds ``runs/``; ``run_dir`` is used as it is instead. Raises
    ``ProtectError`` where the folder is not empty or cannot be written. ``force`` moves a run that is there aside, to
    ``<run_dir>.old-<n>``, and nothing but a run.
    """
    if run_dir is None:
        parent = Path(os.path.abspath(root or Path.cwd())) / RUNS / clean_name(experiment_name, "experiment")
        run = _new_folder(parent, preset)
    else:
        run = RunDirectory(run_dir)
        _take_folder(run, force)
    _claim(run, experiment_name, preset)
    if run_dir is None:
        _point_latest(run)
    return run


def clean_name(name: str | None, default: str, limit: int = NAME_LIMIT) -> str:
    """``name`` with only ``[A-Za-z0-9._-]``, at most ``limit`` characters."""
    cleaned = re.sub(r"[^A-Za-z0-9._-]+", "-", name or "").strip("-.")[:limit].strip("-.")
    return cleaned or default


def _new_folder(parent: Path, preset: str | None) -> RunDirectory:
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    middle = clean_name(preset, "default", NAME_LIMIT - len(stamp) - 6)
    while True:
        path = parent / f"{stamp}-{middle}-{secrets.token_hex(2)}"
        try:
            path.mkdir(parents=True)
            return RunDirectory(path)
        except FileExistsError:
            if not path.is_dir():  # a file stands where a parent should be
                raise _not_writable(parent, "a file is in the way") from None
        except OSError as error:
            raise _not_writable(path, error.strerror or str(error)) from error


def _take_folder(run: RunDirectory, force: bool) -> None:
    try:
        if run.path.is_dir() and any(run.path.iterdir()):
            if Path.cwd().is_relative_to(run.path.resolve()):
                what = f"the run folder {run.path} is the folder that you stand in, or one above it, and not empty"
                raise ProtectError(what, "choose another --run-dir", path=str(run.path))
            if not run.looks_like_one():
                raise _no_run(run)
            if not force:
                raise _in_use(run)
            _move_aside(run.path)
        run.path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _not_writable(run.path, error.strerror or str(error)) from error


def _move_aside(path: Path) -> None:
    number = 1
    while os.path.lexists(f"{path}.old-{number}"):
        number += 1
    os.rename(path, f"{path}.old-{number}")


def _claim(run: RunDirectory, experiment_name: str, preset: str | None) -> None:
    created = datetime.now(UTC).isoformat(timespec="microseconds")
    facts = {"id": run.id, "experiment": experiment_name, "preset": preset, "created": created, "status": "created"}
    try:
        # "x": of two processes that saw the same empty folder, one gets it.
        with open(run.run_json_path, "x", encoding="utf-8") as file:
            file.write(json.dumps(plain(facts), indent=2) + "\n")
    except FileExistsError:
        raise _in_use(run) from None
    except OSError as error:
        raise _not_writable(run.path, error.strerror or str(error)) from error


def _no_run(run: RunDirectory) -> ProtectError:
    inside = sorted(path.name for path in run.path.iterdir())
    return ProtectError(
        f"the run folder {run.path} is not empty, and holds no run",
        f"it holds {listed(inside)}; --force moves runs aside, and nothing else",
        "choose another --run-dir, or move away yourself what is there",
        path=str(run.path),
    )


def _in_use(run: RunDirectory) -> ProtectError:
    return ProtectError(
        f"the run folder {run.path} is not empty, it holds a run",
        "--resume continues the run that is there",
        "--force moves what is there aside and starts fresh",
        "another --run-dir leaves it alone",
        path=str(run.path),
    )


def _not_writable(path: Path, reason: str) -> ProtectError:
    return ProtectError(f"cannot write in {path}: {reason}", "choose another --run-dir", path=str(path))


def _point_latest(run: RunDirectory) -> None:
    """Make ``latest`` name this run. Only a convenience, so what prevents it is not an error."""
    link = run.path.parent / LATEST
    fresh = run.path.parent / f".{LATEST}-{secrets.token_hex(4)}"
    try:
        os.symlink(run.id, fresh, target_is_directory=True)
    except (OSError, NotImplementedError):  # no symlinks here
        with contextlib.suppress(OSError):
            fresh.write_text(run.id + "\n", encoding="utf-8")
    try:
        os.replace(fresh, link)
    except OSError:
        fresh.unlink(missing_ok=True)


def _write_atomically(path: Path, text: str) -> None:
    fresh = path.with_name(f".{path.name}-{secrets.token_hex(4)}")
    try:
        with open(fresh, "x", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise OutputError(f"cannot write {path}: {error.strerror or error}", path=str(path)) from error


def open_run(path: Path | str, error: type[NitroError] = UsageError) -> RunDirectory:
    """The run whose folder ``path`` is. A path into a run's folder is refused with the folder's name."""
    run = RunDirectory(Path(path))
    if run.run_json_path.is_file():
        return run
    if not run.path.exists():
        raise error(f"there is no run at {path}: no such folder")
    for parent in run.path.parents:
        if (parent / "run.json").is_file():
            raise error(f"{path} lies inside a run, one level or more too deep", f"the run is {parent}")
    raise error(f"{path} is not a run: it holds no run.json")


def list_runs(root: Path | None = None, experiment_name: str | None = None) -> list[RunDirectory]:
    """The runs below ``root``/runs, newest first, of one experiment or of all."""
    runs = Path(os.path.abspath(root or Path.cwd())) / RUNS
    pattern = f"{clean_name(experiment_name, 'experiment')}/*/run.json" if experiment_name else "*/*/run.json"
    found = [RunDirectory(file.parent) for file in runs.glob(pattern) if not file.parent.is_symlink()]
    return sorted(found, key=lambda run: (run.created(), run.id), reverse=True)


def find_run(
    root: Path | None, experiment_name: str | None, ref: str | Path = LATEST, error: type[NitroError] = UsageError
) -> RunDirectory:
    """The run that ``ref`` means: ``latest``, an id, the beginning of one id, or a path.

    Newest is decided by the time in run.json. Without a name, runs of all experiments are meant. What is not found
    raises ``error`` with the newest runs.
    """
    text = str(ref)
    runs = list_runs(root, experiment_name)
    if text == LATEST:
        if not runs:
            name = experiment_name or "EXPERIMENT"
            raise error(
                f"no run of {name} yet" if experiment_name else "no run here yet", f"start one with: nitro train {name}"
            )
        return runs[0]
    matches = [run for run in runs if run.id == text] or [run for run in runs if text and run.id.startswith(text)]
    if len(matches) == 1:
        return matches[0]
    ids = [run.id for run in runs]
    if matches:
        raise error(f"{text!r} begins the names of {len(matches)} runs", f"say more: {listed([m.id for m in matches])}")
    if os.sep in text or os.path.isdir(text):
        return open_run(Path(text), error)
    hint = did_you_mean(text, ids)
    newest = f"newest runs: {listed(ids)}" if ids else f"{experiment_name or 'this folder'} has no runs yet"
    raise error(
        f"no run {text!r} of {experiment_name}" if experiment_name else f"no run {text!r} here",
        *([hint] if hint else []),
        newest,
    )


def facts() -> dict[str, Any]:
    """What a run should remember of where it ran: versions, host, process, code, time and command line."""
    return {
        "versions": _versions(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        "git": _git(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def _versions() -> dict[str, str | None]:
    names = {"nitro": "nitro-jax", "orbax": "orbax-checkpoint"}
    found = {name: version(names.get(name, name)) for name in ("nitro", "jax", "jaxlib", "flax", "optax", "orbax")}
    return {"python": sys.version.split()[0], **found}


def _git() -> dict[str, Any] | None:
    """Commit of the working folder and whether tracked files differ from it; None outside a repository."""
    commit = _git_says("rev-parse", "HEAD")
    if commit is None:
        return None
    return {"commit": commit, "dirty": bool(_git_says("status", "--porcelain", "--untracked-files=no"))}


def _git_says(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *arguments],
            capture_output=True,
            text=True,
            timeout=5,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
