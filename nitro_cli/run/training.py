"""One call of ``train``: epochs, validation, checkpoints, the run's records, and every way in which it can end."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from nitro_cli.errors import DivergenceError, ExperimentError, NitroError
from nitro_cli.experiment.presets import dump_config
from nitro_cli.loggers.jsonl import JsonLines
from nitro_cli.programs.cache import cache_stats
from nitro_cli.run.checkpoints import Checkpoints
from nitro_cli.run.counters import cache_counters, note_run
from nitro_cli.run.directory import RunDirectory, create_run, facts
from nitro_cli.run.evaluating import evaluate_split
from nitro_cli.run.loop import AutomaticLoop, EpochLoop
from nitro_cli.run.manual_loop import ManualLoop
from nitro_cli.run.records import anchor_digest
from nitro_cli.run.stop import StopSignals

if TYPE_CHECKING:
    from nitro_cli.run.nitro import Nitro

# Waiting for batches is worth a word where it takes more than both of an epoch. A share alone says nothing where
# an epoch takes milliseconds on a busy machine.
DATA_WAIT_FRACTION, DATA_WAIT_SECONDS = 0.25, 0.2


@dataclass(frozen=True)
class Outcome:
    """How a ``train`` ended. ``best`` and ``latest`` describe checkpoints (epoch, step, metric, value, path)."""

    status: str
    exit_code: int
    epochs: int
    steps: int
    best: dict[str, Any] | None
    latest: dict[str, Any] | None
    seconds: float
    run: RunDirectory
    signal: int | None = None

    def facts(self) -> dict[str, Any]:
        """The outcome as JSON-ready values."""
        data = {name: value for name, value in vars(self).items() if name != "run"}
        return {**data, "run_dir": str(self.run.path)}


class Training:
    """The life of one run in this process."""

    def __init__(self, nitro: Nitro) -> None:
        self.nitro = nitro
        self.signals = StopSignals(lambda number: nitro.notify_stopping(number, "step or validation"), self._killed)
        self.compile_seconds = 0.0
        self.started = time.perf_counter()
        self.stats_before = cache_stats()

    def run(self) -> Outcome:
        """Train; write how it ended whatever happens, and then raise what was raised."""
        n = self.nitro
        fresh = n.run is None
        run = n.run = n.run or create_run(
            n.root, n.setup.name, n.setup.preset, n.setup.knobs.run_dir, **({"force": True} if n.force else {})
        )
        self.record = run
        self._begin(fresh)
        status, error = "failed", None
        try:
            with (
                self.signals,
                JsonLines(run.log_path, append=not fresh) as self.log,
                Checkpoints(run.checkpoints_path, n.setup.policy) as self.checkpoints,
            ):
                n.log_compile = self._log_compile
                try:
                    self._log_beginning(fresh)
                    status = self._epochs()
                except DivergenceError as caught:
                    status, error = "diverged", caught
                    self._save(None)
                except NitroError as caught:
                    error = caught
                finally:
                    n.log_compile = None
                    self.log.write("finish", status=status)
                self.checkpoints.wait()
        except BaseException as caught:
            self._end(status, getattr(caught, "exit_code", 1))
            raise
        if error is not None:
            self._end(status, error.exit_code)
            raise error
        return self._finish(status)

    def _killed(self, code: int) -> None:
        """A second signal ends the process at once: the run's record must not say that it still runs."""
        self.record.update_run(status="killed", exit_code=code, finished=_now())

    def _finish(self, status: str) -> Outcome:
        n = self.nitro
        checkpoints = Checkpoints(self.record.checkpoints_path, n.setup.policy)
        best, latest = checkpoints.best(), checkpoints.latest()
        described = [
            None
            if info is None
            else {
                "epoch": info.epoch,
                "step": info.step,
                "metric": info.metric,
                "value": info.value,
                "path": str(info.path),
            }
            for info in (best, latest)
        ]
        code = self.signals.exit_code if status == "interrupted" else 0
        outcome = Outcome(
            status=status,
            exit_code=code,
            epochs=n.state.epoch,
            steps=n.state.step,
            best=described[0],
            latest=described[1],
            seconds=time.perf_counter() - self.started,
            run=self.record,
            signal=self.signals.requested,
        )
        self._end(status, code, best=described[0], latest=described[1])
        n.notify("done", **outcome.facts())
        return outcome

    # ---- epochs ---------------------------------------------------------------------------------------------------

    def _epochs(self) -> str:
        n = self.nitro
        n.optimizer_layout()
        if n.state.epoch >= n.setup.knobs.max_epochs:
            n.notify(
                "warning",
                message=f"nothing to train: {n.state.epoch} epochs are done, max_epochs is {n.setup.knobs.max_epochs}",
            )
            return "finished"
        loop = (ManualLoop if n.setup.recipe.manual else AutomaticLoop)(n, self.log.write_many, self._stopping)
        while n.state.epoch < n.setup.knobs.max_epochs:
            began, step = time.perf_counter(), n.state.step
            complete = loop.run()
            seconds = time.perf_counter() - began
            if not complete:
                self._save(None)
                return self._stopped()
            n.set_rate((n.state.step - step) / seconds if seconds > 0 else 0.0)
            self._after_epoch(loop, began)
            if self._stopping():
                return self._stopped()
        return "finished"

    def _stopping(self) -> bool:
        return self.signals.requested is not None or self.nitro.stop_requested

    def _stopped(self) -> str:
        return "interrupted" if self.signals.requested is not None else "stopped"

    def _after_epoch(self, loop: EpochLoop, began: float) -> None:
        n, state = self.nitro, self.nitro.state
        epoch = state.epoch + 1
        train_loss = state.loss_sum / state.loss_count if state.loss_count else math.nan
        metrics: dict[str, float] = {}
        n.notify("phase", phase="validate")
        if "val" in n.setup.splits:
            metrics, n.last_rows["val"] = evaluate_split(n, "val", epoch)
        value = self._score(metrics)
        best = value is not None and self._is_best(value)
        state.epoch, state.position, state.loss_sum, state.loss_count = epoch, 0, 0.0, 0
        state.history.append({"epoch": epoch, "step": state.step, "train_loss": train_loss, **metrics})
        common = {"step": state.step, "epoch": epoch}
        frac = loop.data_wait_frac
        self.log.write_many(
            [
                {"type": "metrics", "context": "data", **common, "values": {"data_wait_frac": frac}},
                {"type": "metrics", "context": "validate", **common, "values": {"train_loss": train_loss, **metrics}},
            ]
        )
        self._save(value)
        n.notify(
            "epoch",
            **common,
            max_epochs=n.setup.knobs.max_epochs,
            metrics={"train_loss": train_loss, **metrics},
            seconds=time.perf_counter() - began,
            compile_seconds=self.compile_seconds,
            best=best,
            data_wait_frac=frac,
        )
        self.compile_seconds = 0.0
        self._warn_of_waiting(frac, loop.data_wait_seconds, epoch)

    def _warn_of_waiting(self, frac: float, seconds: float, epoch: int) -> None:
        little = frac <= DATA_WAIT_FRACTION or seconds <= DATA_WAIT_SECONDS
        if little or epoch != 2:  # the first epoch starts its loaders; once is enough
            return
        self.nitro.notify(
            "warning",
            message=f"{frac:.0%} of the time goes into waiting for data: without it, an epoch could take "
            f"{1 - frac:.2f} of its time. Give the loader source[i] so that workers can share the work, wrap it in "
            "Prefetch(source, workers=...), or make its batches cheaper",
        )

    def _score(self, metrics: Mapping[str, float]) -> float | None:
        policy = self.nitro.setup.policy
        if policy.metric in metrics:
            value = metrics[policy.metric]
            if not math.isfinite(value):
                self.nitro.notify("warning", message=f"{policy.metric} is {value}: this epoch cannot be the best one")
                return None
            return value
        if self.nitro.setup.explicit_policy:
            raise ExperimentError(
                f"checkpoints are ranked by '{policy.metric}', which no metric is called",
                f"metrics: {', '.join(metrics) or 'none, for there is no val split'}",
                "change the metric in checkpointer(self), or return it from metrics(self, ...)",
            )
        if "val" in self.nitro.setup.splits and self.nitro.state.epoch == 0:
            self.nitro.notify(
                "warning",
                message=f"no metric is called '{policy.metric}', so no checkpoint is best and the newest are kept; "
                "define checkpointer(self) to rank by another metric",
            )
        return None

    def _is_best(self, value: float) -> bool:
        policy = self.nitro.setup.policy
        earlier = [row[policy.metric] for row in self.nitro.state.history if policy.metric in row]
        earlier = [v for v in earlier if math.isfinite(v)]
        return not earlier or policy.rank(value, 1) < min(policy.rank(v, 0) for v in earlier)

    # ---- records --------------------------------------------------------------------------------------------------

    def _save(self, value: float | None) -> None:
        """Save the state under its step, unless the step is saved already (a stop before anything was trained)."""
        n, state = self.nitro, self.nitro.state
        latest = self.checkpoints.latest()
        if state.opt_state is None or state.step == 0 or (latest is not None and latest.step >= state.step):
            return
        meta = {
            "epoch": state.epoch,
            "position": state.position,
            "seed": n.setup.knobs.seed,
            "counters": state.counters(),
            "graphconst": n.setup.graphconst,
            "layout": n.setup.recipe.plan.layout.table(),
            "anchors": anchor_digest(n),
            "hyperparameters": n.hyperparameters,
            "preset": n.setup.preset,
            "run": self.record.id,
        }
        self.checkpoints.save(state.step, n.snapshot(), meta, value)
        path = str(self.record.checkpoints_path / str(state.step))
        n.notify("checkpoint", step=state.step, epoch=state.epoch, path=path)

    def _begin(self, fresh: bool) -> None:
        n = self.nitro
        n.notify("run", run_dir=str(self.record.path), resumed=not fresh)
        text = dump_config(n.setup.experiment, n.setup.sources, n.setup.preset, n.command_line)
        self.record.write_config(text)
        known = {} if fresh else {"resumed": [*self.record.read_run().get("resumed", []), _now()]}
        self.record.update_run(
            **facts(),
            **known,
            experiment=n.setup.name,
            title=n.report.title,
            preset=n.setup.preset,
            status="running",
            exit_code=None,
        )

    def _log_beginning(self, fresh: bool) -> None:
        n = self.nitro
        if not fresh:
            self.log.write("other", key="resume", value={"step": n.state.step, "epoch": n.state.epoch, "at": _now()})
        report = n.report.to_json()
        params = {row["name"]: row["value"] for row in report["fields"]}
        self.log.write("params", values=params, preset=n.setup.preset, run=n.report.run)
        self.log.write("other", key="binding_report", value=report)

    def _log_compile(self, compile_facts: dict[str, Any]) -> None:
        self.compile_seconds += compile_facts["seconds"] - compile_facts["load_seconds"]
        self.log.write("compile", **compile_facts)

    def _end(self, status: str, exit_code: int, **more: Any) -> None:
        """Write how the run ended. A disk that refuses even that must not hide what went wrong before."""
        n, counters = self.nitro, cache_counters(self.stats_before)
        if n.noted:
            note_run(str(self.record.path), status, {"experiment": n.setup.name, "preset": n.setup.preset}, counters)
        try:
            self.record.update_run(
                status=status,
                exit_code=exit_code,
                finished=_now(),
                epochs=n.state.epoch,
                steps=n.state.step,
                cache=counters,
                **more,
            )
        except (OSError, NitroError):
            if status == "finished":
                raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
