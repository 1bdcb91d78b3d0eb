"""``Nitro``: one run's frozen configuration plus its state.

Constructing a handle runs set-up and nothing else. Everything that decides which programs run is fixed then; only the
state, and Device values through ``set_device``, change afterwards.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nitro_cli.errors import ExperimentError, UsageError
from nitro_cli.experiment.presets import Resolved, resolve
from nitro_cli.experiment.traits import config_metadata
from nitro_cli.optim.leaves import Leaves
from nitro_cli.programs.cache import Program, being_made, making
from nitro_cli.programs.jax_cache import use_jax_cache
from nitro_cli.programs.training import optimizer_state
from nitro_cli.run.checkpoints import CheckpointInfo
from nitro_cli.run.device_values import check_device_field, converted
from nitro_cli.run.directory import RunDirectory
from nitro_cli.run.drift import Drift
from nitro_cli.run.evaluating import check_forward, evaluate_split, known_split, predict_batch, predict_batches
from nitro_cli.run.programs import Programs
from nitro_cli.run.records import load_weights, named_run, named_weights, restore, resume_record
from nitro_cli.run.report import Report
from nitro_cli.run.setup import placed, seed_words, set_up
from nitro_cli.run.state import TrainState, named_arrays, named_buffers, placed_arrays
from nitro_cli.run.stop import StopSignals
from nitro_cli.run.training import Outcome, Training
from nitro_cli.suggest import listed

Observer = Callable[[str, dict[str, Any]], None]
PROGRESS_SECONDS = 0.1


class Nitro:
    """A handle for one run of an experiment.

    ``e`` is an experiment instance. ``data`` replaces ``build_data`` (a dict of splits). ``weights`` is a
    ``(run, checkpoint)`` pair whose parameters and state are loaded; ``resume`` is a run to continue exactly from its
    newest checkpoint. Either may be named: ``weights="latest:best"``, ``resume=True``. ``w0`` says what the decay
    anchor "w0" means: the weights of ``build_model``, or those loaded. Other keywords are fields or knobs:
    ``Nitro(e, max_epochs=1)``. ``observer(event, facts)`` is told what happens.

    Raises ExperimentError for what is wrong with the experiment, ProtectError for weights or a run that do not fit.
    """

    def __init__(
        self,
        e: Any,
        *,
        data: Mapping[str, Any] | None = None,
        weights: tuple[RunDirectory, CheckpointInfo] | str | Path | None = None,
        resume: RunDirectory | str | Path | bool | None = None,
        w0: str = "build_model",
        resolved: Resolved | None = None,
        observer: Observer | None = None,
        command_line: str = "",
        force: bool = False,
        root: Path | None = None,
        **knobs: Any,
    ) -> None:
        use_jax_cache()
        weights, resume = named_weights(e, weights, root), named_run(e, resume, root)
        if resume is not None and isinstance(weights, tuple):
            raise UsageError("resume and weights exclude each other", "resume continues a run; weights start a new one")
        if w0 not in ("build_model", "weights") or (w0 == "weights" and weights is None):
            raise UsageError(
                f"w0={w0!r}: what the decay anchor 'w0' means is 'build_model' or 'weights'",
                "'weights' needs weights=..., whose parameters decay then pulls towards",
            )
        self.observer = observer or (lambda event, facts: None)
        self.command_line, self.force, self.root = command_line, force, root
        record = resume_record(resume) if resume is not None else None
        if record is not None and resume is not None:
            seed = record[1]["seed"]
            if knobs.get("seed", getattr(e, "seed", seed)) != seed:
                self.notify("warning", message=f"the run that is resumed has seed {seed}; the seed given is not used")
                knobs["seed"] = seed
        self.setup = set_up(e, data, resolved, knobs)
        self.device = list(self.setup.device)
        self.seed_words = placed(seed_words(self.setup.knobs.seed))
        self.state = TrainState(self.setup.params, self.setup.state)
        if self.setup.recipe.plan.ema:
            self.state.average = [placed(buffer) for buffer in self.setup.params]
        self.setup.params, self.setup.state = [], []  # programs take these buffers: only the state may hold them
        self.programs = Programs(self.setup.recipe, self.setup.model_content, self._compiled)
        self.run: RunDirectory | None = resume
        self.last_rows: dict[str, int] = {}
        self.loaded_step = 0
        self.noted = True
        self.log_compile: Callable[[dict[str, Any]], None] | None = None
        self._optimizer: Leaves | None = None
        self._stop_requested = False
        self._signals: StopSignals | None = None
        self._next_progress = 0.0
        self._scheduled_progress: dict[str, Any] = {}
        self._drift = Drift(self.setup.recipe, self.setup.model_content)
        self.resumed = record is not None
        if record is not None:
            restore(self, *record)
        elif isinstance(weights, tuple):
            load_weights(self, *weights, w0)

    @classmethod
    def from_preset(cls, E: type, name: str, /, **options: Any) -> Nitro:
        """A handle on ``E`` with the values of preset ``name``, which the run's records then name.

        ``options`` are fields of the experiment, or keywords of ``Nitro``; fields win over the preset.
        """
        fields = {key: (value, "keyword") for key, value in options.items() if key in config_metadata(E)}
        rest = {key: value for key, value in options.items() if key not in fields}
        if "data" in rest:
            raise UsageError(
                "from_preset builds its own data: data= was built by another experiment instance",
                f"build the experiment first: Nitro(from_preset({E.__name__}, {name!r}), data=...)",
            )
        resolved = resolve(E, name, overrides=fields)
        return cls(resolved.experiment, resolved=resolved, **rest)

    # ---- what a user asks for -------------------------------------------------------------------------------------

    @property
    def report(self) -> Report:
        """The frozen configuration and bindings."""
        return self.setup.report

    def schedule_curves(self, points: int = 60) -> dict[str, list[tuple[int, float]]]:
        """``(step, value)`` of every schedule at evenly spaced steps of the run. Steps are counted from 0."""
        return self.setup.schedules.curves(points)

    @property
    def splits(self) -> dict[str, Any]:
        return self.setup.splits

    @property
    def history(self) -> list[dict[str, Any]]:
        """One row per finished epoch: epoch, step, train_loss and the validation metrics."""
        return self.state.history

    def train(self) -> Outcome:
        """Train until ``max_epochs``, a stop request or a signal. Writes the run's directory.

        Raises DivergenceError for a loss that is not finite, OutputError where a checkpoint cannot be written.
        """
        if "train" not in self.setup.splits:
            raise ExperimentError(
                f"{type(self.setup.experiment).__name__}.build_data gives no 'train' split to train on",
                f"splits: {listed(list(self.setup.splits))}",
            )
        self._entry()
        self.setup.schedules.check(self.state.step)
        self._stop_requested = False
        return Training(self).run()

    def validate(self) -> dict[str, float]:
        """Metrics of the ``val`` split with the handle's parameters."""
        return self.evaluate("val")

    def evaluate(self, split: str = "test") -> dict[str, float]:
        """Metrics of any split, by name; names carry the split (``test_loss``)."""
        known_split(self, split)
        self._entry()
        with self._interruptible():
            metrics, rows = evaluate_split(self, split, self.state.epoch)
        self.last_rows[split] = rows
        return metrics

    def predict(self, data: Any) -> Any:
        """Outputs of ``forward`` as numpy arrays, real rows only.

        A batch (a dict of arrays, batch axis first) gives one output tree; a loader gives an iterator of trees, one per
        batch in order. Only the fields that ``forward`` takes are needed.
        """
        if isinstance(data, Mapping):
            self._entry()
            return predict_batch(self, data)
        if isinstance(data, np.ndarray) or hasattr(data, "__array__"):
            check_forward(self)
            fields = self.setup.recipe.routes["forward"].fields
            raise UsageError(
                "predict takes a batch (a dict of arrays) or a loader, not an array",
                f"write: predict({{{', '.join(f'{name!r}: ...' for name in fields)}}})",
            )
        return self._predicting(data)

    def _predicting(self, loader: Any) -> Iterator[Any]:
        self._entry()
        with self._interruptible():
            yield from predict_batches(self, loader, "predict")

    def request_stop(self) -> None:
        """Ask a running ``train`` to end after the current step; callable from any thread."""
        self._stop_requested = True

    def device_value(self, name: str) -> Any:
        """The value of a Device field, as a host value."""
        check_device_field(type(self.setup.experiment), name)
        value = jax.device_get(self._device_tree()[name])
        return jax.tree.map(lambda leaf: leaf.item() if np.ndim(leaf) == 0 else leaf, value)

    def set_device(self, **values: Any) -> None:
        """Change Device fields; provably compiles nothing. Raises UsageError, and changes nothing, where a value would
        make another program or change nothing that is compiled."""
        if not values:
            raise UsageError("set_device was given nothing to set", "write: set_device(smoothing=0.1)")
        cls, tree = type(self.setup.experiment), self._device_tree()
        for name, value in values.items():
            check_device_field(cls, name)
            if name in self.setup.schedules.driven:
                raise UsageError(
                    f"'{name}' follows a schedule, which would overwrite it at every step",
                    "leave it out of schedules(self) in a new handle, or change the schedule",
                )
            tree[name] = converted(cls, name, tree[name], value)
        self.device = jax.tree.leaves(tree)

    # ---- what the rooms of run/ use -------------------------------------------------------------------------------

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """While a pass runs outside of training, a signal only sets a flag that is looked at between batches: an
        exception out of Python's own handler in the middle of a compile can end the process (jax 0.10)."""
        with StopSignals(lambda number: self.notify_stopping(number, "batch")) as self._signals:
            try:
                yield
                self.leave_if_interrupted()
            finally:
                self._signals = None

    def leave_if_interrupted(self) -> None:
        """Raise KeyboardInterrupt after a Ctrl-C, SystemExit after another signal, where a pass is interruptible."""
        if self._signals is None or self._signals.requested is None:
            return
        code = self._signals.exit_code
        if code == 128 + signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(code)

    @property
    def stop_requested(self) -> bool:
        return self._stop_requested

    def notify(self, event: str, /, **facts: Any) -> None:
        self.observer(event, facts)

    def notify_stopping(self, number: int, work: str) -> None:
        """Tell the observer of the first signal, and what is waited for: the ``work`` under way, or a compile."""
        self.notify("stopping", signal=number, work=work, compiling=being_made())

    def notify_progress(self, loss: float | None = None) -> None:
        """Tell the observer how far the run is, ten times a second at most."""
        now = time.perf_counter()
        if now < self._next_progress:
            return
        self._next_progress = now + PROGRESS_SECONDS
        train = self.setup.splits.get("train")
        per_epoch = len(train) // self.setup.knobs.accum if train is not None else 0
        if loss is not None:
            self._scheduled_progress["loss"] = loss
        self.notify(
            "progress",
            epoch=self.state.epoch + 1,
            max_epochs=self.setup.knobs.max_epochs,
            step=self.state.step,
            steps_in_epoch=per_epoch,
            step_in_epoch=self.state.position // self.setup.knobs.accum,
            total_steps=per_epoch * self.setup.knobs.max_epochs,
            loss=self._scheduled_progress.get("loss"),
            rate=self._scheduled_progress.get("rate"),
        )

    def set_rate(self, rate: float) -> None:
        """Steps per second of the stretch that is under way, for progress."""
        self._scheduled_progress["rate"] = rate

    def constants(self) -> tuple[Any, ...]:
        """Arguments of the training programs that no step changes, placed once: seed, hyperparameters, divergence
        check, decay anchors, 1 / accum."""
        knobs, dtype = self.setup.knobs, jax.dtypes.canonicalize_dtype(np.float64)
        return (
            self.seed_words,
            placed(self.setup.recipe.plan.vector()),
            placed(np.bool_(knobs.check_divergence)),
            self.setup.anchors,
            placed(np.asarray(1.0 / knobs.accum, dtype)),
        )

    def scheduled_device(self, step: int) -> list[Any]:
        """The Device values of ``step``: those that a schedule drives as numpy arrays, the others as they are."""
        tree = self._device_tree() | self.setup.schedules.fields(step)
        return jax.tree.leaves(tree)

    def evaluated_device(self) -> list[Any]:
        """The Device values that evaluation uses: a scheduled one as it was at the last step trained."""
        step = self.state.step or self.loaded_step
        return self.scheduled_device(step - 1) if step and self.setup.schedules.driven else self.device

    def evaluated_params(self) -> list[jax.Array]:
        """The parameters that evaluation uses: the current ones, or their moving average where it is asked for."""
        return self.state.average if self.setup.knobs.evaluate_with_ema else self.state.params

    @property
    def parameters(self) -> Any:
        """The parameter tree as ``build_model`` made it, with the current values as numpy arrays."""
        layout = self.setup.recipe.plan.layout
        return layout.tree([np.array(buffer) for buffer in self.state.params])

    def optimizer_layout(self) -> Leaves:
        """Structure of the optimizer state, which is made on first use: a handle that only evaluates never pays it."""
        if self._optimizer is None and self.setup.recipe.optimizers is not None:
            self._optimizer = self.setup.recipe.optimizers.leaves
            if self.state.opt_state is None:
                self.state.opt_state = [placed(leaf) for leaf in self.setup.opt_state or ()]
        elif self._optimizer is None:
            with making("optimizer_init"):
                tree = optimizer_state(self.setup.recipe, self.state.params, self.setup.anchors)
            self._optimizer = Leaves.of(tree)
            if self.state.opt_state is None:
                self.state.opt_state = jax.device_put(jax.tree.leaves(tree), jax.devices()[0])
        assert self._optimizer is not None
        return self._optimizer

    @property
    def hyperparameters(self) -> dict[str, float]:
        """What ``setup_optimizers`` gave the optimizers of an experiment that owns its step, by path."""
        found = self.setup.recipe.optimizers
        return found.values(self.setup.opt_state or ()) if found is not None else {}

    def empty_pending(self, columns: int) -> list[Any]:
        """The accumulator before the first micro-batch: its content is never read."""
        recipe, dtype = self.setup.recipe, jax.dtypes.canonicalize_dtype(np.float64)
        gradients = [placed(np.zeros(spec.shape, spec.dtype)) for spec in recipe.plan.layout.specs]
        state = placed_arrays(recipe.state, named_arrays(recipe.state, self.state.state))
        return [gradients, state, placed(np.zeros(columns, dtype))]

    def snapshot(self) -> dict[str, dict[str, Any]]:
        """Host copies of everything that an exact continuation needs, for a checkpoint."""
        recipe, state = self.setup.recipe, self.state
        assert state.opt_state is not None
        arrays = {
            "ps": named_buffers(recipe.plan.layout, state.params),
            "st": named_arrays(recipe.state, state.state),
            "opt_state": named_arrays(self.optimizer_layout(), state.opt_state),
        }
        if state.average:
            arrays["ema"] = named_buffers(recipe.plan.layout, state.average)
        return arrays

    def _compiled(self, program: Program) -> None:
        info = program.info()
        facts = {name: value for name, value in asdict(info).items() if name != "hits"} | {"seconds": info.seconds}
        if self.log_compile is not None:
            self.log_compile(facts)
        self.notify("compile", **facts)
        for array in program.built.large:
            self.notify(
                "warning",
                message=f"the {info.program} program holds {array}: as a constant it is compiled and stored with the "
                "program. Make it an input: return it in st from build_model, or give it with the batch",
            )

    def _entry(self) -> None:
        for message in self._drift.check():
            self.notify("warning", message=message)

    def _device_tree(self) -> dict[str, Any]:
        return dict(self.setup.recipe.device.tree(self.device))
