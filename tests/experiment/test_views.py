"""What traced code sees of an experiment, and what it may not touch."""

from __future__ import annotations

import copy
import dataclasses
import math
import operator
import subprocess
import sys
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import PrivateAttr

from nitro_cli.errors import ExperimentError
from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.markers import Device, GraphConst
from nitro_cli.experiment.traits import config_metadata, device_fields, graphconst_fields
from nitro_cli.experiment.view import HostFieldError, StrippedHost, compile_view, in_trace, tracing


class Full(Experiment):
    width: GraphConst[int] = 3
    rate: Device[float] = 0.5
    images: Any = None
    _cache: dict[str, int] = PrivateAttr(default_factory=dict)

    def double(self) -> Any:
        return self.width * 2 * self.rate

    @cached_property
    def tripled(self) -> int:
        return self.width * 3


@dataclasses.dataclass(frozen=True)
class Plain:
    width: GraphConst[int] = 3
    rate: Device[float] = 0.5
    images: Any = None

    def double(self) -> Any:
        return self.width * 2 * self.rate


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    width: GraphConst[int] = 3
    rate: Device[float] = 0.5
    images: Any = None

    def double(self) -> Any:
        return self.width * 2 * self.rate


EVERY = pytest.mark.parametrize("cls", [Full, Plain, Slotted])


@EVERY
def test_a_view_is_the_class_with_other_values(cls: Any) -> None:
    e = cls(images=[1, 2])
    view = compile_view(e, {"rate": jnp.float32(2.0)})
    assert isinstance(view, cls)
    assert (type(view).__name__, type(view).__qualname__, type(view).__module__) == (
        cls.__name__,
        cls.__qualname__,
        cls.__module__,
    )
    assert (view.width, float(view.rate), float(view.double())) == (3, 2.0, 12.0)
    assert compile_view(e).rate == 0.5
    assert isinstance(view.images, StrippedHost)
    assert not any(value is e.images for value in vars(view).values())
    assert type(compile_view(e)) is type(view)
    assert compile_view(view).width == 3
    assert config_metadata(type(view)) is config_metadata(cls)
    assert device_fields(type(view)) == ("rate",)
    assert "Host field 'images'" in repr(view)


@EVERY
def test_views_refuse_assignment(cls: Any) -> None:
    view = compile_view(cls())
    with pytest.raises(ExperimentError, match="frozen"):
        view.width = 4
    with pytest.raises(ExperimentError, match="frozen"):
        del view.width


def test_only_device_fields_may_be_given() -> None:
    for name in ("width", "images", "other"):
        with pytest.raises(ExperimentError, match="not a Device field of Full"):
            compile_view(Full(), {name: 1})


def test_private_state_and_cached_properties_work() -> None:
    e = Full()
    e._cache["a"] = 1
    view = compile_view(e)
    assert view._cache == {"a": 1}
    assert view.tripled == 9


@pytest.mark.parametrize("what", [vars, copy.copy, lambda view: view.__dict__, lambda view: view.__getstate__()])
def test_what_takes_all_attributes_reads_every_graphconst_field(what) -> None:
    reads: set[str] = set()
    with tracing("loss", reads):
        what(compile_view(Full()))
    assert reads == set(graphconst_fields(Full))


class Sets(Experiment):
    names: GraphConst[set[str]]
    frozen: GraphConst[frozenset[Any]] = frozenset({"a", 1, ("b", 2), 2.5})
    numbers: GraphConst[frozenset[int]] = frozenset({8, 0})


SHOW_SETS = """
import sys
from test_views import Sets, compile_view
view = compile_view(Sets(names={"a", "b", "c", "d"}))
print([*view.names], list(view.frozen), tuple(view.numbers))
"""


def test_a_set_is_gone_through_in_one_order_in_every_process() -> None:
    view = compile_view(Sets(names={"a", "b", "c", "d"}))
    assert view.names == {"a", "b", "c", "d"}
    assert "a" in view.names
    assert isinstance(view.names, set)
    assert type(view.numbers) is frozenset
    said = set()
    for seed in "0123":
        env = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(Path(__file__).parent), *sys.path])}
        words = [sys.executable, "-c", SHOW_SETS]
        said.add(subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout)
    assert len(said) == 1


OPERATIONS: dict[str, Any] = {
    "add": lambda x: x + 1,
    "radd": lambda x: 1 + x,
    "matmul": lambda x: x @ x,
    "neg": operator.neg,
    "eq": lambda x: x == 1,
    "ne": lambda x: x != 1,
    "lt": lambda x: x < 1,
    "bool": bool,
    "len": len,
    "iter": iter,
    "list": list,
    "in": lambda x: 1 in x,
    "getitem": lambda x: x[0],
    "setitem": lambda x: operator.setitem(x, 0, 1),
    "call": lambda x: x(),
    "getattr": lambda x: x.shape,
    "setattr": lambda x: setattr(x, "a", 1),
    "hasattr": lambda x: hasattr(x, "a"),
    "hash": hash,
    "dict key": lambda x: {x: 1},
    "str": str,
    "format": lambda x: f"{x}",
    "print": print,
    "int": int,
    "float": float,
    "index": lambda x: [1][x],
    "round": round,
    "floor": math.floor,
    "numpy": np.asarray,
    "numpy add": lambda x: np.ones(2) + x,
    "ufunc": np.sin,
    "jax": jnp.asarray,
    "jax add": lambda x: jnp.ones(2) + x,
    "with": lambda x: x.__enter__(),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_on_a_host_field_raises(operation: str) -> None:
    view = compile_view(Full(images=[1]))
    with pytest.raises(HostFieldError, match="Host field 'images'"):
        OPERATIONS[operation](view.images)


def test_looking_at_a_sentinel_is_fine() -> None:
    assert repr(compile_view(Full()).images) == "<Host field 'images', not available in traced code>"


def test_the_message_names_field_hook_operation_and_the_fixes(snapshot: Any) -> None:
    view = compile_view(Full())
    with tracing("loss"), pytest.raises(HostFieldError) as error:
        _ = view.images
    assert str(error.value) == snapshot
    assert error.value.facts == {"field": "images", "hook": "loss", "operation": "read"}


def test_inside_a_jax_trace_reading_is_enough() -> None:
    view: Any = compile_view(Full(images=[1]))
    silent = {
        "is None": lambda: view.images is None,
        "isinstance": lambda: isinstance(view.images, list),
        "stored": lambda: [view.images],
        "default": lambda: getattr(view, "images", 0),
    }
    for use in silent.values():
        use()
        for transform in (jax.jit, jax.grad, jax.vmap, jax.checkpoint):
            with pytest.raises(HostFieldError):
                transform(lambda x, use=use: (use(), x)[1])(
                    jnp.ones(1)[0] if transform is not jax.vmap else jnp.ones(1)
                )
    assert not in_trace()


def test_device_values_are_tracers_and_graphconst_values_are_not() -> None:
    e = Full()
    seen = []

    @jax.jit
    def program(rate: Any) -> Any:
        view = compile_view(e, {"rate": rate})
        seen.append((type(view.width), isinstance(view.rate, jax.core.Tracer)))
        return view.double()

    assert float(program(2.0)) == 12.0
    assert float(program(3.0)) == 18.0
    assert seen == [(int, True)]


def test_tracing_collects_the_graphconst_fields_that_are_read() -> None:
    view = compile_view(Full())
    reads: set[str] = set()
    with tracing("forward", reads):
        assert in_trace()
        view.double()
        with tracing("loss", set()):
            pass
        assert reads == {"width"}
    reads.clear()
    view.double()
    assert reads == set()
    assert not in_trace()


@pytest.mark.parametrize(
    "look", [lambda view: dict(view)["width"], lambda view: view.model_dump(include={"width"}), repr, str]
)
def test_what_shows_the_whole_view_reads_every_graphconst_field(look):
    class Shown(Experiment):
        width: GraphConst[int] = 3
        rate: Device[float] = 0.5

    reads: set[str] = set()
    with tracing("loss", reads):
        look(compile_view(Shown()))
    assert reads == {"width"}
