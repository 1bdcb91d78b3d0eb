"""Checkpoints of a run, through orbax.

A checkpoint is a folder ``<step>`` with two items that orbax commits together: ``arrays`` (component, then path of
the leaf) and ``record`` (JSON: the caller's facts, the metric, and shape and dtype of every array). ``files.json``
beside them lists all files with their sizes, so that a checkpoint that lost a file is recognised before anything is
read from it.

Reading never makes a manager, so it never touches what another process is writing.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from nitro_cli.errors import OutputError, ProtectError, UsageError
from nitro_cli.run.checkpoint_files import (
    DIFFERENCES_SHOWN,
    Arrays,
    check_orbax,
    compare,
    described,
    dtype_name,
    first_line,
    inspect_folder,
    json_default,
    let_go,
    orbax,
    prepared,
    quiet_orbax,
    read_arrays,
    write_inventory,
)
from nitro_cli.suggest import listed

UNFINISHED = ".orbax-checkpoint-tmp"


@dataclass(frozen=True)
class CheckpointPolicy:
    """Keep the newest checkpoint and the ``keep`` best by ``metric``; ``mode`` says whether small or large is good."""

    keep: int = 3
    metric: str = "val_loss"
    mode: str = "min"

    def __post_init__(self) -> None:
        if isinstance(self.keep, bool) or not isinstance(self.keep, int) or self.keep < 1:
            raise UsageError(f"a checkpoint policy keeps at least 1 checkpoint, not {self.keep!r}")
        if self.mode not in ("min", "max"):
            raise UsageError(f"the mode of a checkpoint policy is 'min' or 'max', not {self.mode!r}")
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"the metric of a checkpoint policy is a metric's name, not {self.metric!r}")

    def rank(self, value: float, step: int) -> tuple[float, int]:
        """Smaller is better; of equal values the earlier step."""
        return (value if self.mode == "min" else -value, step)


@dataclass(frozen=True)
class CheckpointInfo:
    """A whole checkpoint. ``value`` is that of ``metric`` at this step; None where there was none, or not a finite
    one."""

    step: int
    epoch: int | None
    position: int | None
    metric: str
    value: float | None
    path: Path


class Skipped(NamedTuple):
    """A checkpoint folder that cannot be used, and why."""

    path: Path
    reason: str


class Checkpoints:
    """The checkpoints below ``directory``; one process writes, any number read.

    ``save`` copies the arrays and returns; the files are written in the background. A background failure is raised
    by the next ``save``, ``wait`` or ``close`` as ``OutputError``. ``close`` must be called after the last save.
    """

    def __init__(self, directory: Path, policy: CheckpointPolicy | None = None) -> None:
        self.directory = Path(os.path.abspath(directory))
        self.policy = policy or CheckpointPolicy()
        self.skipped: tuple[Skipped, ...] = ()
        self._manager: Any = None
        self._in_flight: tuple[int, int] | None = None  # step, bytes

    def save(self, step: int, arrays: Arrays, meta: Mapping[str, Any], metric: float | None = None) -> None:
        """Start saving a checkpoint.

        ``arrays``: component -> path -> array of any shape (numpy or jax, any dtype but typed keys). ``meta``:
        JSON; its ``epoch`` and ``position`` appear in ``CheckpointInfo``. ``metric``: None or non-finite never
        ranks as best. Raises ``ProtectError`` where the step, or a later one, is saved already.
        """
        ocp = orbax()
        self.wait()
        value = float(metric) if metric is not None and math.isfinite(metric) else None
        hosted, size = prepared(arrays)
        record = {
            "format": 1,
            "step": step,
            "metric": self.policy.metric,
            "value": value,
            "arrays": described(arrays),
            "meta": meta,
        }
        self._in_flight = (step, size)
        try:
            manager = self._writer()
            newest = manager.latest_step()
            if newest is not None and step <= newest:
                self._in_flight = None
                raise _would_rewind(self.directory, step, newest)
            manager.save(
                step,
                args=ocp.args.Composite(
                    arrays=ocp.args.PyTreeSave(hosted),
                    record=ocp.args.JsonSave(json.loads(json.dumps(record, default=json_default))),
                ),
                metrics=None if value is None else {self.policy.metric: value, "step": step},
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error

    def wait(self) -> None:
        """Return when what was saved is on disk. Raises ``OutputError`` where it could not be written."""
        if self._manager is None or self._in_flight is None:
            return
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(error) from error
        self._in_flight = None

    def close(self) -> None:
        """``wait``, then let go of all threads. A second call does nothing."""
        try:
            self.wait()
        finally:
            self._drop_manager()

    def __enter__(self) -> Checkpoints:
        check_orbax()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def steps(self) -> list[CheckpointInfo]:
        """All whole checkpoints, newest last. Torn and unfinished ones are left out and named in ``skipped``."""
        found, skipped = [], []
        for path in sorted(_entries(self.directory), key=_step_of):
            writing = self._in_flight is not None and _step_of(path) == self._in_flight[0]
            if path.name.endswith(UNFINISHED):
                if not writing:
                    skipped.append(Skipped(path, "a save that never finished"))
                continue
            record, damage = inspect_folder(path)
            if record is None:
                skipped.append(Skipped(path, damage))
            else:
                found.append(_info(path, record))
        self.skipped = tuple(skipped)
        return found

    def latest(self) -> CheckpointInfo | None:
        """The newest whole checkpoint."""
        found = self.steps()
        return found[-1] if found else None

    def best(self) -> CheckpointInfo | None:
        """The best one by the policy's metric; None where no checkpoint has a finite value of it."""
        ranked = {
            self.policy.rank(info.value, info.step): info
            for info in self.steps()
            if info.value is not None and info.metric == self.policy.metric
        }
        return ranked[min(ranked)] if ranked else None

    def at_epoch(self, epoch: int) -> CheckpointInfo | None:
        """The newest checkpoint of that epoch."""
        found = [info for info in self.steps() if info.epoch == epoch]
        return found[-1] if found else None

    def read_meta(self, step: int) -> dict[str, Any]:
        """The ``meta`` that was saved with ``step``. Raises ``OutputError`` where there is no whole checkpoint."""
        return self._record(step)["meta"]

    def layout(self, step: int) -> dict[str, dict[str, tuple[tuple[int, ...], str]]]:
        """Component -> path -> (shape, dtype name) of what ``step`` holds, without reading an array."""
        stored = self._record(step)["arrays"]
        return {
            component: {path: (tuple(shape), dtype) for path, shape, dtype in leaves} for component, leaves in stored
        }

    def restore(self, step: int, template: Arrays, partial: bool = False) -> dict[str, dict[str, Any]]:
        """The arrays of ``step`` as numpy arrays, in the template's components, paths, shapes and dtypes.

        The template's leaves need ``shape`` and ``dtype`` only. Anything that differs from what is stored raises
        ``ProtectError`` before an array is read: nothing is cast, dropped or filled in. With ``partial`` the stored
        components that the template does not name are left alone. Raises ``OutputError`` where reading fails.
        """
        stored = self.layout(step)
        wanted = {
            component: {path: (tuple(leaf.shape), dtype_name(leaf)) for path, leaf in leaves.items()}
            for component, leaves in template.items()
        }
        if partial:
            stored = {component: leaves for component, leaves in stored.items() if component in wanted}
        compare(self.directory / str(step), stored, wanted)
        return read_arrays(self.directory / str(step), wanted)

    def _record(self, step: int) -> dict[str, Any]:
        path = self.directory / str(step)
        record, damage = inspect_folder(path)
        if record is None:
            raise OutputError(f"checkpoint {path} cannot be used: {damage}", *_others(self, step), path=str(path))
        return record

    def _writer(self) -> Any:
        if self._manager is None:
            quiet_orbax()
            self.directory.mkdir(parents=True, exist_ok=True)
            for path, _ in self._torn():
                _set_aside(path)
            self._manager = _manager(self.directory, self.policy, self._list_files)
        return self._manager

    def _torn(self) -> list[Skipped]:
        self.steps()
        return [skipped for skipped in self.skipped if not skipped.path.name.endswith(UNFINISHED)]

    def _list_files(self) -> None:
        # In orbax's thread, when all is written and not yet committed: the list is part of the commit.
        if self._in_flight is not None:
            write_inventory(self.directory / f"{self._in_flight[0]}{UNFINISHED}")

    def _failed(self, error: Exception) -> OutputError:
        step, size = self._in_flight or (-1, 0)
        self._drop_manager()  # its view of the folder is wrong now; the next save starts from what is on disk
        path = self.directory / str(step)
        shutil.rmtree(f"{path}{UNFINISHED}", ignore_errors=True)
        let_go(error)
        notes = [_space(self.directory, size)] if _is_full(error) else []
        reason = "the disk is full" if _is_full(error) else first_line(error)
        return OutputError(
            f"the checkpoint of step {step} could not be written to {path}: {reason}",
            *notes,
            *_others(self, step),
            step=step,
            path=str(path),
            needed_bytes=size,
        )

    def _drop_manager(self) -> None:
        manager, self._manager, self._in_flight = self._manager, None, None
        if manager is not None:
            with contextlib.suppress(OSError, ValueError, RuntimeError):
                manager.close()


def resolve_checkpoint(checkpoints: Checkpoints, ref: str | int | Path = "best") -> tuple[CheckpointInfo, str]:
    """The checkpoint that ``ref`` means (``best``, ``latest``, an epoch, or a path) and a sentence that says why."""
    found = checkpoints.steps()
    if not found:
        lost = [f"{skipped.path}: {skipped.reason}" for skipped in checkpoints.skipped]
        raise UsageError(f"there is no whole checkpoint in {checkpoints.directory}", *lost[:DIFFERENCES_SHOWN])
    text = str(ref)
    latest = found[-1]
    if text == "latest":
        return latest, f"latest, {_moment(latest)}"
    if text == "best":
        return _resolve_best(checkpoints, latest)
    if text.isascii() and text.isdigit():
        chosen = checkpoints.at_epoch(int(text))
        if chosen is None:
            epochs = sorted({str(info.epoch) for info in found if info.epoch is not None}, key=int)
            raise UsageError(f"no checkpoint of epoch {text} is kept", f"epochs that are: {listed(epochs)}")
        return chosen, f"{_moment(chosen)}, as asked; latest is {latest.epoch}"
    return _resolve_path(checkpoints, Path(text), found)


def _resolve_best(checkpoints: Checkpoints, latest: CheckpointInfo) -> tuple[CheckpointInfo, str]:
    best = checkpoints.best()
    metric = checkpoints.policy.metric
    if best is None:
        return latest, f"latest, {_moment(latest)}; no checkpoint has a finite {metric}"
    return best, f"best by {metric}, {_moment(best)}; latest is {latest.epoch}"


def _resolve_path(checkpoints: Checkpoints, path: Path, found: list[CheckpointInfo]) -> tuple[CheckpointInfo, str]:
    path = Path(os.path.realpath(path))
    own = Path(os.path.realpath(checkpoints.directory))
    if path in (own, own.parent):
        return _resolve_best(checkpoints, found[-1])
    for info in found:
        if path == own / str(info.step):
            return info, f"{_moment(info)}, by its path"
    names = f"checkpoints of this run: {listed([str(info.path) for info in found])}"
    if own in path.parents:
        step = own / path.relative_to(own).parts[0]
        deeper = f"{path} lies inside the checkpoint {step}; give that folder"
        raise UsageError(deeper if path != step else f"{path} is not a whole checkpoint", names)
    raise UsageError(f"{path} is not a checkpoint of the run {own.parent}", names, "--run names another run")


def _moment(info: CheckpointInfo) -> str:
    return f"step {info.step}" if info.epoch is None else f"epoch {info.epoch}"


def _manager(directory: Path, policy: CheckpointPolicy, written: Any) -> Any:
    ocp = orbax()
    managers = ocp.checkpoint_managers

    def rank(metrics: Mapping[str, Any]) -> Any:  # orbax only sorts by it
        value = metrics.get(policy.metric)  # absent where the run was begun with another metric
        return policy.rank(value, metrics["step"]) if value is not None else (math.inf, metrics["step"])

    best = managers.BestN(get_metric_fn=rank, n=policy.keep, reverse=True, keep_checkpoints_without_metrics=False)
    return ocp.CheckpointManager(
        directory,
        options=ocp.CheckpointManagerOptions(
            preservation_policy=managers.AnyPreservationPolicy([managers.LatestN(1), best]),
            best_fn=rank,
            cleanup_tmp_directories=True,
            # Folders made in the background leave threads waiting for them where they cannot be made.
            async_options=ocp.AsyncOptions(post_finalization_callback=written, create_directories_asynchronously=False),
        ),
    )


def _set_aside(path: Path) -> None:
    """Rename a torn checkpoint so that its step can be saved again; what is left of it is not deleted."""
    number = 1
    while os.path.lexists(f"{path}.torn-{number}"):
        number += 1
    os.rename(path, f"{path}.torn-{number}")


# What is there --------------------------------------------------------------------------------------------------------


def _entries(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    return [path for path in directory.iterdir() if path.is_dir() and path.name.removesuffix(UNFINISHED).isdigit()]


def _step_of(path: Path) -> int:
    return int(path.name.removesuffix(UNFINISHED))


def _info(path: Path, record: dict[str, Any]) -> CheckpointInfo:
    meta = record["meta"]
    return CheckpointInfo(
        record["step"], meta.get("epoch"), meta.get("position"), record["metric"], record["value"], path
    )


# What goes wrong ------------------------------------------------------------------------------------------------------


def _would_rewind(directory: Path, step: int, newest: int) -> ProtectError:
    what = f"step {step} is saved already" if step == newest else f"step {newest}, later than {step}, is saved already"
    return ProtectError(f"{what} in {directory}", "a checkpoint is never replaced; --run-dir starts another run")


def _is_full(error: BaseException) -> bool:
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "No space left" in text or "quota exceeded" in text.lower()


def _space(directory: Path, needed: int) -> str:
    free = shutil.disk_usage(directory).free
    return f"needed: {needed:,} bytes and a little more; free in {directory}: {free:,} bytes"


def _others(checkpoints: Checkpoints, step: int) -> list[str]:
    whole = [info for info in checkpoints.steps() if info.step != step]
    return [f"the newest whole checkpoint is {whole[-1].path} ({_moment(whole[-1])})"] if whole else []
