"""``Experiment``: the flat, frozen, checked record of one run's configuration, and the hooks' defaults."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PydanticUserError, ValidationError, model_validator
from pydantic._internal._model_construction import ModelMetaclass
from pydantic_core import PydanticUndefined, SchemaError

from nitro_cli.errors import ExperimentError, NitroError, Problem, UsageError
from nitro_cli.experiment import checks
from nitro_cli.experiment.content import content_digest
from nitro_cli.experiment.hooks import default_no_decay, hook, unknown_field
from nitro_cli.experiment.sources import ClassSource, class_source, defined_at
from nitro_cli.experiment.traits import config_metadata, own_annotations
from nitro_cli.experiment.values import BadValue, from_python, type_name


class _ExperimentMeta(ModelMetaclass):
    """Checks a class when it is defined, so that a wrong declaration never waits for a run to be found."""

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any], **kwargs: Any) -> type:
        if not any(isinstance(base, _ExperimentMeta) for base in bases):
            cls = super().__new__(mcs, name, bases, body, **kwargs)
            _describe(cls, class_source(cls))
            return cls
        base = next(base for base in bases if isinstance(base, _ExperimentMeta))
        source = defined_at(body.get("__module__", ""), body.get("__qualname__", name))
        checks.check_body(name, body, source, base)
        try:
            cls = super().__new__(mcs, name, bases, body, **kwargs)
        except (PydanticUserError, SchemaError, RuntimeError, TypeError) as error:
            what = f"{name} cannot be declared: {str(error).splitlines()[0]}"
            raise ExperimentError(what, place=source.place()) from error
        _describe(cls, source)
        if cls.__pydantic_complete__:
            _finish(cls)
        return cls


def _describe(cls: Any, source: ClassSource) -> None:
    """The strings below fields become their descriptions. Pydantic can do it (``use_attribute_docstrings``), but looks
    at every module of the process for each frame of the stack: 70 ms once jax and flax are imported."""
    for name, doc in source.docs.items():
        field = cls.__pydantic_fields__.get(name)
        if field is not None and field.description is None:
            field.description = doc


def _finish(cls: Any) -> None:
    """Checks the fields that a class declares and stores widened defaults (an int default of a float field)."""
    infos = config_metadata(cls)
    own = [name for name in own_annotations(cls) if name in infos]
    checks.check_fields(cls, infos, own, defined_at(cls.__module__, cls.__qualname__))
    changed = False
    for name in own:
        field = cls.__pydantic_fields__[name]
        if field.default is PydanticUndefined:
            continue
        wide = from_python(infos[name], field.default)
        if type(wide) is not type(field.default):
            field.default, changed = wide, True
    if changed:
        cls.model_rebuild(force=True)
        type.__delattr__(cls, "__nitro_fields__")


class Experiment(BaseModel, metaclass=_ExperimentMeta):
    """Base of experiments: fields with markers, and the hooks ``build_data, build_model, forward, loss``.

    Instances are frozen, compare and hash by content, and refuse unknown names and values that do not fit. The fields
    below are the knobs that every experiment has; redeclare one to change its default (``max_epochs: int = 20``).
    """

    __nitro_base__ = True

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        validate_default=True,
        allow_inf_nan=False,
        arbitrary_types_allowed=True,
        protected_namespaces=(),
    )

    seed: int = Field(default=42, ge=0)
    """Seed of the parameters' first values, of shuffling and of every random draw."""
    max_epochs: int = Field(default=1, ge=0)
    """How many times training goes through the training data."""
    learning_rate: float = Field(default=1e-3, gt=0)
    """Learning rate of the optimizer; an input of the update program, so changing it compiles nothing."""
    accum: int = Field(default=1, ge=1)
    """Batches whose gradients are averaged into one optimizer step."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay, scaled by the learning rate; 0 means none. Biases and norms do not decay."""
    gradient_clip_norm: float = Field(default=0.0, ge=0)
    """Largest global norm of the gradient of one step; 0 means no clipping."""
    ema_decay: float = Field(default=0.0, ge=0, lt=1)
    """Decay of an exponential moving average of the weights; 0 means none is kept."""
    evaluate_with_ema: bool = False
    """Evaluate and predict with the moving average of the weights."""
    param_dtype: Literal["float32", "bfloat16"] | None = None
    """Dtype in which parameters are stored; none keeps what build_model returns."""
    compute_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype in which forward computes; parameters and loss keep theirs. None casts nothing."""
    parameter_layout: Literal["mix", "flat", "tree"] = "mix"
    """How parameters cross program boundaries: small leaves joined, all joined, or none."""
    run_dir: Path | None = None
    """Folder of the run; by default a new one below runs/."""
    check_divergence: bool = True
    """Stop when the loss is not finite, with the state of the last good step."""

    # -- default hooks ----------------------------------------------------------------------------------------------

    def finalize_metrics(self, metrics: dict[str, Any], split: str) -> dict[str, Any]:
        """Called on the host with the reduced metrics of a split; what it returns is logged and compared."""
        return metrics

    def metrics_residency(self, hook: str) -> str:
        """Where a metrics hook runs: ``"device"`` inside a compiled program, ``"host"`` on numpy arrays."""
        return "device" if hook == "train_metrics" else "host"

    def derive(self, data: Any) -> dict[str, Any]:
        """Field values that depend on the data, computed after ``build_data``; each key must be a field."""
        return {}

    def optimizer(self) -> Any:
        """The optax factory of the run (``optax.adamw``, or a partial of one); None means nitro's default, RAdam.

        ``optimizer(self, group)`` gives one per parameter group, and ``optimizer(self, group, hp)`` builds a whole
        transformation from the group's resolved hyperparameters.
        """
        return None

    def param_group(self, path: str, leaf: Any) -> str:
        """The parameter group of a leaf, by its dotted path (``"encoder.dense.kernel"``), shape and dtype."""
        return "default"

    def group_learning_rate(self, group: str) -> float | None:
        """The learning rate of a group; its ratio to the knob holds under every schedule. None means the knob."""
        return None

    def group_weight_decay(self, group: str) -> float | None:
        """The weight decay of a group; None means the knob."""
        return None

    def decay_anchor(self, group: str) -> Any:
        """What weights decay towards: ``"zero"``, ``"w0"`` (the weights of ``build_model``), or a tree of arrays."""
        return "zero"

    def no_decay(self, path: str, leaf: Any) -> bool:
        """Whether a leaf is excluded from weight decay: by default those of one dimension or none."""
        return default_no_decay(path, leaf)

    def schedules(self) -> dict[str, Any]:
        """Schedules by name: a number, an optax schedule, or a function of the total number of steps that returns one.

        Steps are counted from 0, as optax counts them.
        """
        return {}

    def checkpointer(self) -> Any:
        """The checkpoint policy of the run; None means nitro's default."""
        return None

    def manual_training(self) -> bool:
        """Whether ``train_step`` trains this experiment. Return False to keep the method and train automatically."""
        return hook(self, "train_step") is not None

    # -- the record -------------------------------------------------------------------------------------------------

    def replace(self, **changes: Any) -> Self:
        """A new instance with some fields changed and everything validated.

        Raises UsageError with every unknown name and every value that does not fit.
        """
        values = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self)(**{**values, **changes})

    @model_validator(mode="wrap")
    @classmethod
    def _nitro_check(cls, data: Any, handler: Any) -> Any:
        if not isinstance(data, Mapping):
            return handler(data)
        checked = check_values(cls, data)
        try:
            return handler(checked)
        except ValidationError as error:
            raise UsageError([_problem(cls, item) for item in error.errors(include_url=False)]) from None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, Experiment) or type(self) is not type(other):
            return NotImplemented
        return all(a is b or _same_content(a, b) for a, b in zip(self._held(), other._held(), strict=True))

    def __hash__(self) -> int:
        return hash(tuple(_content_key(value) for value in self._held()))

    def _held(self) -> list[Any]:
        return [getattr(self, name) for name in type(self).model_fields]

    def __reduce__(self) -> tuple[Any, ...]:
        # A worker process may not have the experiment's folder on its path: it is told the file.
        from nitro_cli.experiment.discovery import restore

        cls = type(self)
        return (restore, (cls.__module__, class_source(cls).path, cls.__qualname__), self.__getstate__())


def _same_content(a: Any, b: Any) -> bool:
    try:
        return content_digest(a) == content_digest(b)
    except TypeError:  # no content to compare, such as an open file: only the same object is equal
        return False


def _content_key(value: Any) -> str:
    try:
        return content_digest(value)
    except TypeError:
        return type(value).__qualname__


KNOBS: dict[str, Any] = {name: info.type for name, info in config_metadata(Experiment).items()}


def check_values(cls: type, data: Mapping[str, Any]) -> dict[str, Any]:
    """``data`` with every value as its field holds it. Raises UsageError with all unknown names and bad values."""
    infos = config_metadata(cls)
    checked, problems = {}, []
    for name, value in data.items():
        if name not in infos:
            problems.append(unknown_field(cls, name, f" of {cls.__name__}"))
            continue
        try:
            checked[name] = from_python(infos[name], value)
        except BadValue as error:
            problems.append(bad_value(cls, name, error))
    if problems:
        raise UsageError(problems)
    return checked


def bad_value(cls: type, name: str, error: BadValue) -> Problem:
    notes = (error.hint,) if error.hint else ()
    return Problem(f"field '{name}' of {cls.__name__}: {error.message}", None, "", notes, {"field": name})


def required_field(cls: type, name: str) -> Problem:
    kind = type_name(config_metadata(cls)[name].type)
    note = f"it has no default; give it with --{name.replace('_', '-')} or in a preset"
    return Problem(f"field '{name}' of {cls.__name__} is required", None, "", (note, f"type: {kind}"), {"field": name})


def _problem(cls: type, item: Any) -> Problem:
    """The problem of one pydantic error: a missing field, or what a validator of the user's own said."""
    name = str(item["loc"][0]) if item["loc"] else ""
    if item["type"] == "missing":
        return required_field(cls, name)
    message = item["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    what = f"field '{name}' of {cls.__name__}: {message}" if name else f"{cls.__name__}: {message}"
    return Problem(what, None, "", (), {"field": name} if name else {})


__all__ = ["KNOBS", "Experiment", "NitroError", "bad_value", "check_values", "required_field"]
