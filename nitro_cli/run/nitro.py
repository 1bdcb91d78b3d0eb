"""``Nitro``: one run's frozen configuration plus its state.

Constructing a handle runs set-up and nothing else. Everything that decides which programs run is fixed then; only the
state, and Device values through ``set_device``, change afterwards.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np

from nitro_cli.errors import ExperimentError, ProtectError, UsageError
from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.content import short_value
from nitro_cli.experiment.discovery import experiment_name
from nitro_cli.experiment.hooks import hook
from nitro_cli.experiment.presets import Resolved, resolve
from nitro_cli.experiment.traits import config_metadata, device_fields, graphconst_fields
from nitro_cli.experiment.values import BadValue, from_python
from nitro_cli.optim.leaves import Leaves
from nitro_cli.programs.cache import Program
from nitro_cli.programs.training import optimizer_state
from nitro_cli.run.checkpoints import CheckpointInfo, Checkpoints, resolve_checkpoint
from nitro_cli.run.directory import RunDirectory, find_run
from nitro_cli.run.drift import Drift
from nitro_cli.run.evaluating import evaluate_split, known_split, predict_batch, predict_batches
from nitro_cli.run.programs import Programs
from nitro_cli.run.report import Report
from nitro_cli.run.setup import device_value, placed, seed_words, set_up
from nitro_cli.run.state import TrainState, named_arrays, named_buffers, placed_arrays, placed_buffers, template
from nitro_cli.run.stop import StopSignals
from nitro_cli.run.training import Outcome, Training
from nitro_cli.suggest import did_you_mean, listed

Observer = Callable[[str, dict[str, Any]], None]
PROGRESS_SECONDS = 0.1


class Nitro:
    """A handle for one run of an experiment.

    ``e`` is an experiment instance. ``data`` replaces ``build_data`` (a dict of splits). ``weights`` is a
    ``(run, checkpoint)`` pair whose parameters and state are loaded; ``resume`` is a run to continue exactly from its
    newest checkpoint. Other keywords are fields or knobs: ``Nitro(e, max_epochs=1)``. ``observer(event, facts)`` is
    told what happens.

    Raises ExperimentError for what is wrong with the experiment, ProtectError for weights or a run that do not fit.
    """

    def __init__(
        self,
        e: Any,
        *,
        data: Mapping[str, Any] | None = None,
        weights: tuple[RunDirectory, CheckpointInfo] | str | Path | None = None,
        resume: RunDirectory | str | Path | bool | None = None,
        resolved: Resolved | None = None,
        observer: Observer | None = None,
        command_line: str = "",
        force: bool = False,
        root: Path | None = None,
        **knobs: Any,
    ) -> None:
        weights, resume = _named_weights(e, weights, root), _named_run(e, resume, root)
        if resume is not None and isinstance(weights, tuple):
            raise UsageError("resume and weights exclude each other", "resume continues a run; weights start a new one")
        self.observer = observer or (lambda event, facts: None)
        self.command_line, self.force, self.root = command_line, force, root
        record = _resume_record(resume) if resume is not None else None
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
        self.log_compile: Callable[[dict[str, Any]], None] | None = None
        self._optimizer: Leaves | None = None
        self._stop_requested = False
        self._signals: StopSignals | None = None
        self._next_progress = 0.0
        self._scheduled_progress: dict[str, Any] = {}
        self._drift = Drift(self.setup.recipe, self.setup.model_content)
        self.resumed = record is not None
        if record is not None:
            self._restore(*record)
        elif isinstance(weights, tuple):
            self._load_weights(*weights)

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
        self._check_device_name(name)
        value = jax.device_get(self._device_tree()[name])
        return jax.tree.map(lambda leaf: leaf.item() if np.ndim(leaf) == 0 else leaf, value)

    def set_device(self, **values: Any) -> None:
        """Change Device fields; provably compiles nothing. Raises UsageError, and changes nothing, where a value would
        make another program or change nothing that is compiled."""
        if not values:
            raise UsageError("set_device was given nothing to set", "write: set_device(smoothing=0.1)")
        tree = self._device_tree()
        for name, value in values.items():
            self._check_device_name(name)
            tree[name] = self._converted(name, tree[name], value)
        self.device = jax.tree.leaves(tree)

    # ---- what the rooms of run/ use -------------------------------------------------------------------------------

    @contextmanager
    def _interruptible(self) -> Iterator[None]:
        """While a pass runs outside of training, a signal only sets a flag that is looked at between batches: an
        exception out of Python's own handler in the middle of a compile can end the process (jax 0.10)."""
        with StopSignals() as self._signals:
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
        if self._optimizer is None:
            tree = optimizer_state(self.setup.recipe, self.state.params, self.setup.anchors)
            self._optimizer = Leaves.of(tree)
            if self.state.opt_state is None:
                self.state.opt_state = jax.device_put(jax.tree.leaves(tree), jax.devices()[0])
        return self._optimizer

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
        facts = {
            "program": info.program,
            "why": info.why,
            "trace_seconds": info.trace_seconds,
            "lower_seconds": info.lower_seconds,
            "compile_seconds": info.compile_seconds,
            "seconds": info.trace_seconds + info.lower_seconds + info.compile_seconds,
        }
        if self.log_compile is not None:
            self.log_compile(facts)
        self.notify("compile", **facts)

    def _entry(self) -> None:
        for message in self._drift.check():
            self.notify("warning", message=message)

    # ---- Device values --------------------------------------------------------------------------------------------

    def _device_tree(self) -> dict[str, Any]:
        return dict(self.setup.recipe.device.tree(self.device))

    def _check_device_name(self, name: str) -> None:
        cls = type(self.setup.experiment)
        if name in device_fields(cls):
            return
        if name in graphconst_fields(cls):
            raise UsageError(
                f"'{name}' is a GraphConst field: another value is another program",
                f"build a new handle: Nitro(e.replace({name}=...)); programs that do not read it are reused",
            )
        if name in Experiment.model_fields:
            raise UsageError(
                f"'{name}' is a knob, which the driver reads when the handle is built",
                f"build a new handle for it: Nitro(e.replace({name}=...))",
            )
        if name in config_metadata(cls):
            raise UsageError(
                f"'{name}' is a Host field: no compiled program reads it, so setting it would change nothing",
                f"mark it Device to make it a traced input, or build a new handle: Nitro(e.replace({name}=...))",
            )
        hint = did_you_mean(name, device_fields(cls))
        raise UsageError(
            f"{cls.__name__} has no field '{name}'",
            *([hint] if hint else []),
            f"Device fields: {listed(list(device_fields(cls))) or 'none'}",
        )

    def _converted(self, name: str, old: Any, value: Any) -> Any:
        before, value = Leaves.of(old), jax.tree.map(_without_axes, value)
        if all(isinstance(leaf, (bool, int, float, str)) for leaf in jax.tree.leaves(value)):
            value = self._validated(name, value)
        try:
            now = Leaves.of(raw := jax.tree.map(np.asarray, value))
            arrays = jax.tree.leaves(raw)
            cast = [_kept(array, spec) for array, spec in zip(arrays, before.specs, strict=True)]
            same = now.structure == before.structure and all(leaf is not None for leaf in cast)
        except (TypeError, ValueError, AttributeError):
            same, cast = False, []
        if not same:
            shapes = ", ".join(f"{spec.dtype}{list(spec.shape)}" for spec in before.specs) or "no value"
            raise UsageError(
                f"'{name}' holds {shapes}, and {short_value(value)} does not fit",
                "another shape or type would be another program",
                f"build a new handle for it: Nitro(e.replace({name}=...))",
            )
        return device_value(before.tree(cast))

    def _validated(self, name: str, value: Any) -> Any:
        """A plain value as the field would take it when the experiment is built: by its type and its bounds."""
        try:
            return from_python(config_metadata(type(self.setup.experiment))[name], value)
        except BadValue as error:
            notes = [note for note in (error.hint, "set_device takes what the field takes") if note]
            raise UsageError(f"'{name}' cannot be {short_value(value)}: {error.message}", *notes) from None

    # ---- checkpoints ----------------------------------------------------------------------------------------------

    def _restore(self, checkpoints: Checkpoints, meta: dict[str, Any], info: CheckpointInfo) -> None:
        self._check_graphconst(meta, info, "resumed")
        self._check_position(meta["position"], info)
        recipe, state = self.setup.recipe, self.state
        self._check_layout(meta, info)
        optimizer = self.optimizer_layout()
        wanted = {"ps": template(recipe.params), "st": template(recipe.state), "opt_state": template(optimizer)}
        if recipe.plan.ema:
            wanted["ema"] = template(recipe.params)
        stored = checkpoints.restore(info.step, wanted)
        state.params = placed_buffers(recipe.plan.layout, stored["ps"])
        state.state = placed_arrays(recipe.state, stored["st"])
        state.opt_state = placed_arrays(optimizer, stored["opt_state"])
        if recipe.plan.ema:
            state.average = placed_buffers(recipe.plan.layout, stored["ema"])
        state.restore_counters(meta["counters"])

    def _check_layout(self, meta: dict[str, Any], info: CheckpointInfo) -> None:
        """Optimizer state is stored buffer by buffer, so a run goes on only under the table it was saved with."""
        was = {row[0]: row[1:] for row in meta["layout"]}
        now = {row[0]: row[1:] for row in self.setup.recipe.plan.layout.table()}
        if {path: row[-1] for path, row in was.items()} != {path: row[-1] for path, row in now.items()}:
            return  # other parameters, not another layout: comparing the arrays says it better
        rows = [
            f"{path}: {_laid(was.get(path))} -> {_laid(now.get(path))}"
            for path in dict.fromkeys([*was, *now])
            if was.get(path) != now.get(path)
        ]
        if rows:
            raise ProtectError(
                "the run cannot be resumed: parameters lie elsewhere than when it was saved (was -> now)",
                *rows[:6],
                *([f"and {len(rows) - 6} more"] if len(rows) > 6 else []),
                f"checkpoint: {info.path}",
                "keep param_group, weight_decay and parameter_layout as they were; weights alone load into any layout",
            )

    def _check_position(self, position: int, info: CheckpointInfo) -> None:
        """A run that was ended inside an epoch goes on at the batch where it stopped: that must still be one."""
        train, accum = self.setup.splits.get("train"), self.setup.knobs.accum
        if position and (train is None or position >= len(train)):
            raise ProtectError(
                f"the checkpoint stands after {position} batches of an epoch, and the train split has "
                f"{len(train) if train is not None else 0}",
                f"checkpoint: {info.path}",
                "resume with the data that it was trained on, or start a new run",
            )
        if position % accum:
            raise ProtectError(
                f"the checkpoint stands after {position} batches of an epoch, which accum={accum} does not divide",
                "a step never spans a checkpoint: every batch belongs to a full group",
                f"checkpoint: {info.path}",
                "resume with the accum that it was trained with",
            )

    def _load_weights(self, run: RunDirectory, info: CheckpointInfo) -> None:
        checkpoints = Checkpoints(run.checkpoints_path)
        self._check_graphconst(checkpoints.read_meta(info.step), info, "used")
        recipe = self.setup.recipe
        wanted = {"ps": template(recipe.params), "st": template(recipe.state)}
        averaged = "ema" in checkpoints.layout(info.step)
        if self.setup.knobs.evaluate_with_ema and not averaged:
            raise ProtectError(
                f"the checkpoint {info.path} holds no moving average of the weights",
                "it was trained with ema_decay = 0; leave --evaluate-with-ema out",
            )
        if recipe.plan.ema and averaged:
            wanted["ema"] = template(recipe.params)
        stored = checkpoints.restore(info.step, wanted, partial=True)
        self.state.params = placed_buffers(recipe.plan.layout, stored["ps"])
        self.state.state = placed_arrays(recipe.state, stored["st"])
        if recipe.plan.ema:
            self.state.average = placed_buffers(recipe.plan.layout, stored.get("ema", stored["ps"]))

    def _check_graphconst(self, meta: dict[str, Any], info: CheckpointInfo, verb: str) -> None:
        was, now = meta["graphconst"], self.setup.graphconst
        rows = [
            f"{name}: {was.get(name, {}).get('text', 'not there')} -> {now.get(name, {}).get('text', 'not there')}"
            for name in dict.fromkeys([*was, *now])
            if was.get(name, {}).get("digest") != now.get(name, {}).get("digest")
        ]
        if rows:
            raise ProtectError(
                f"the checkpoint cannot be {verb}: GraphConst fields differ from those it was trained with "
                "(was -> now)",
                *rows,
                f"checkpoint: {info.path}",
                "leave these fields as they were, or start a new run",
                fields=[row.split(":")[0] for row in rows],
            )


def _named_run(e: Any, resume: Any, root: Path | None) -> RunDirectory | None:
    """The run to continue: a run, its id, its path, or True for the newest of the experiment."""
    if resume is None or resume is False or isinstance(resume, RunDirectory):
        return resume or None
    if resume is True or isinstance(resume, (str, Path)):
        return find_run(root, experiment_name(type(e)), "latest" if resume is True else resume, ProtectError)
    raise UsageError(f"resume takes a run, its id or path, or True for the newest one, not {resume!r}")


def _named_weights(e: Any, weights: Any, root: Path | None) -> tuple[RunDirectory, CheckpointInfo] | None:
    """``RUN``, ``RUN:best``, ``RUN:latest`` or ``RUN:EPOCH`` as a run and one of its checkpoints."""
    if weights is None or weights == "fresh" or isinstance(weights, tuple):
        return weights if isinstance(weights, tuple) else None
    if not isinstance(weights, (str, Path)):
        raise UsageError(f"weights takes a run, such as 'latest:best' or a path, not {weights!r}")
    name, _, which = str(weights).rpartition(":") if ":" in str(weights) else (str(weights), "", "best")
    run = find_run(root, experiment_name(type(e)), name, ProtectError)
    policy = hook(type(e), "checkpointer")
    checkpoints = Checkpoints(run.checkpoints_path, policy(e) if policy is not None else None)
    return run, resolve_checkpoint(checkpoints, int(which) if which.isdigit() else which)[0]


def _laid(row: list[Any] | None) -> str:
    if row is None:
        return "not there"
    group, buffer, offset, shape = row
    return f"group {group}, buffer {buffer} at {offset}, shape {tuple(shape)}"


def _without_axes(leaf: Any) -> Any:
    """A number instead of an array without axes, which stands for one."""
    return leaf.item() if hasattr(leaf, "item") and np.ndim(leaf) == 0 else leaf


def _kept(array: np.ndarray, spec: jax.ShapeDtypeStruct) -> np.ndarray | None:
    """``array`` in the shape and dtype of ``spec``; None where that would lose more than precision."""
    kind = _kind(spec.dtype)
    if array.shape != spec.shape or _kind(array.dtype) not in {"b": "b", "f": "fi"}.get(kind, "i"):
        return None
    with np.errstate(over="ignore"):
        cast = array.astype(spec.dtype)
    whole = np.array_equal(np.isfinite(array), np.isfinite(cast)) if kind == "f" else (cast == array).all()
    return cast if whole else None


def _kind(dtype: Any) -> str:
    """``b``, ``i`` or ``f`` for truth values, whole numbers and reals, those of jax's own dtypes too; else ``-``."""
    kinds = {"b": np.bool_, "i": np.integer, "f": np.floating}
    return next((kind for kind, of in kinds.items() if jax.numpy.issubdtype(dtype, of)), "-")


def _resume_record(run: RunDirectory) -> tuple[Checkpoints, dict[str, Any], CheckpointInfo]:
    checkpoints = Checkpoints(run.checkpoints_path)
    info = checkpoints.latest()
    if info is None:
        raise ProtectError(
            f"the run {run.path} has no checkpoint to resume from", "start a new run: leave --resume out"
        )
    return checkpoints, checkpoints.read_meta(info.step), info
