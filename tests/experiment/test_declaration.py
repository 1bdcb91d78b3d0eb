"""What an experiment class is, and every mistake in declaring one."""

from __future__ import annotations

import dataclasses
import pickle
from enum import Enum
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pytest
from pydantic import BaseModel, ConfigDict, Field, field_validator

from nitro_cli.errors import ExperimentError, UsageError
from nitro_cli.experiment import hooks
from nitro_cli.experiment.base import KNOBS, Experiment
from nitro_cli.experiment.discovery import find_experiment
from nitro_cli.experiment.markers import NO_DEFAULT, Device, GraphConst, Host, Marker
from nitro_cli.experiment.traits import (
    config_metadata,
    device_fields,
    graphconst_fields,
    host_fields,
    own_fields,
)


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Small(Experiment):
    """Everything an experiment may say."""

    width: GraphConst[int]
    """Hidden width."""
    smoothing: Device[float] = 1
    depth: GraphConst[int] = Field(default=2, ge=1)
    shape: tuple[int, ...] = [1, 2]  # pyright: ignore
    color: Color = "red"  # pyright: ignore
    max_epochs: int = 20
    note: Host[str | None] = None
    data: Any = None


def test_traits_hold_type_default_marker_doc_and_line() -> None:
    infos = config_metadata(Small)
    assert list(infos)[:8] == ["width", "smoothing", "depth", "shape", "color", "max_epochs", "note", "data"]
    assert set(list(infos)[8:]) == set(KNOBS) - {"max_epochs"}
    assert infos["width"].default is NO_DEFAULT
    assert (infos["width"].type, infos["width"].marker, infos["width"].doc) == (int, Marker.GRAPHCONST, "Hidden width.")
    assert infos["smoothing"].line == infos["width"].line + 2 > 0
    assert infos["note"].default is None
    assert infos["max_epochs"].doc == config_metadata(Experiment)["max_epochs"].doc != ""
    assert graphconst_fields(Small) == ("width", "depth")
    assert device_fields(Small) == ("smoothing",)
    assert "max_epochs" in host_fields(Small)
    assert "seed" not in own_fields(Small)
    assert "max_epochs" in own_fields(Small)


def test_defaults_are_stored_as_their_type() -> None:
    e = Small(width=3)
    assert (e.smoothing, type(e.smoothing)) == (1.0, float)
    assert (e.shape, e.color) == ((1, 2), Color.RED)


def test_instances_are_frozen_and_replace_validates(snapshot: Any) -> None:
    e = Small(width=3)
    assert e.replace(width=4).width == 4
    assert e.width == 3
    with pytest.raises(ValueError, match="frozen"):
        e.width = 5
    with pytest.raises(UsageError) as error:
        e.replace(widht=1, max_epochs=2.5, depth=0, smoothing=float("nan"))
    assert str(error.value) == snapshot
    assert error.value.exit_code == 2


def test_a_required_field_must_be_given(snapshot: Any) -> None:
    with pytest.raises(UsageError) as error:
        Small()  # pyright: ignore
    assert str(error.value) == snapshot


def test_equality_and_hash_go_by_content() -> None:
    one = Small(width=1, data=np.arange(3))
    same = Small(width=1, data=np.arange(3))
    assert one == same
    assert hash(one) == hash(same)
    assert one != Small(width=1, data=np.arange(4))
    assert one != one.replace(width=2)
    assert Small(width=1, data=(i for i in ())) != one


def test_redeclared_knobs_keep_their_limits() -> None:
    with pytest.raises(UsageError, match="greater than or equal to 0"):
        Small(width=1, max_epochs=-1)
    assert Small(width=1).max_epochs == 20


def test_validators_of_the_user_give_usage_errors() -> None:
    class Checked(Experiment):
        width: int = 4

        @field_validator("width")
        @classmethod
        def even(cls, value: int) -> int:
            if value % 2:
                raise ValueError("must be even")
            return value

    with pytest.raises(UsageError, match="field 'width' of Checked: must be even"):
        Checked(width=3)


def test_instances_pickle() -> None:
    e = Small(width=3, color=Color.BLUE)
    again = pickle.loads(pickle.dumps(e))
    assert again == e
    assert again.color is Color.BLUE


@dataclasses.dataclass
class Config:
    width: int = 4


@dataclasses.dataclass(frozen=True)
class Frozen:
    width: int = 4


class Model(BaseModel):
    width: int = 4


class FrozenModel(BaseModel):
    model_config = ConfigDict(frozen=True)
    width: int = 4


class Pair(NamedTuple):
    a: int = 1


def test_a_frozen_value_may_be_one_graphconst_field() -> None:
    class Holds(Experiment):
        one: GraphConst[Frozen] = Frozen()
        two: GraphConst[FrozenModel] = FrozenModel()
        three: GraphConst[Pair] = Pair()

    assert Holds().one == Frozen()


@pytest.mark.parametrize(
    "annotation",
    [Config, Model, Pair, Frozen, list[Config], Config | None, GraphConst[Config], Device[Frozen]],
)
def test_configuration_objects_are_refused(annotation: Any) -> None:
    with pytest.raises(ExperimentError, match="holds a configuration object") as error:
        type(Experiment)("Nested", (Experiment,), {"__annotations__": {"cfg": annotation}, "__module__": __name__})
    assert "silently fall back" in str(error.value)
    with pytest.raises(ExperimentError, match="holds a configuration object"):

        class ByDefault(Experiment):
            cfg: Any = Config()


# Each body goes into a file of its own, so that the message has a place.
MISTAKES = {
    "bare marker": "width: GraphConst = 3",
    "two markers": "width: GraphConst[Device[int]] = 3",
    "marker inside": "width: GraphConst[int] | None = 3",
    "no annotation": "width = 3",
    "knob without annotation": "max_epochs = 3",
    "marker assigned": "width = GraphConst[int]",
    "default of another type": 'count: int = "ten"',
    "default outside its limits": "count: int = Field(default=0, ge=1)",
    "knob marked": "learning_rate: Device[float] = 0.1",
    "knob of another type": 'seed: str = "a"',
    "field named like a hook": 'optimizer: str = "adam"',
    "field named like a method": "copy: bool = True",
    "reserved name": "unset: int = 3",
    "misspelt hook": "def forwad(self, model, ps, st): ...",
    "misspelt optional hook": "def train_metric(self, outputs): ...",
    "decorated hook": "forward = functools.partial(print)",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_in_a_declaration(mistake: str, empty: Any, snapshot: Any) -> None:
    head = "import functools\nfrom pydantic import Field\nfrom nitro_cli.experiment.base import Experiment\n"
    head += "from nitro_cli.experiment.markers import Device, GraphConst\n\n\n"
    said = []
    for number, future in enumerate(["", "from __future__ import annotations\n"]):
        name = f"wrong{number}"
        empty.write(f"experiments/{name}.py", f"{future}{head}class Wrong(Experiment):\n    {MISTAKES[mistake]}\n")
        with pytest.raises(ExperimentError) as error:
            find_experiment(name)
        text = empty.says(error.value).replace(name, "wrong")
        said.append(text.splitlines()[0])
        if number == 0:
            assert text == snapshot
            assert error.value.exit_code == 3
    assert said[0] == said[1]


def test_helpers_with_names_of_their_own_are_left_alone() -> None:
    class Fine(Experiment):
        width: int = 2

        def forward(self, model: Any, ps: Any, st: Any) -> Any: ...
        def forward_1(self) -> None: ...
        def encode(self) -> None: ...
        def _los(self) -> None: ...
        @property
        def double(self) -> int:
            return 2 * self.width

        class Inner: ...

    assert Fine().double == 4


def test_a_method_that_is_nearly_a_hook_is_refused_though_the_hook_is_inherited() -> None:
    class Parent(Small):
        def forward(self) -> None: ...

    with pytest.raises(ExperimentError, match="defines 'forwrad', which nitro never calls") as error:

        class Child(Parent):
            def forwrad(self) -> None: ...

    assert "did you mean 'forward'?" in str(error.value)

    class Both(Parent):
        def forward(self) -> None: ...
        def forwards(self) -> None: ...


def test_hooks_are_found_with_and_without_the_base(snapshot: Any) -> None:
    @dataclasses.dataclass(frozen=True)
    class Plain:
        width: GraphConst[int] = 3
        rate: Device[float] = 0.5
        name: str = "a"

        def forward(self) -> int:
            return self.width

        def los(self) -> None: ...

    assert hooks.hook(Plain, "forward") is Plain.forward
    assert hooks.hook(Plain(), "derive") is Experiment.derive
    assert hooks.hook(Plain, "metrics") is None
    assert hooks.knob(Plain(), "accum") == 1
    assert hooks.knob(Small(width=1), "max_epochs") == 20
    assert hooks.replace_fields(Plain(), rate=1) == Plain(rate=1.0)
    with pytest.raises(UsageError, match="did you mean 'rate'"):
        hooks.replace_fields(Plain(), rat=1)
    with pytest.raises(ExperimentError) as error:
        hooks.require_hooks(Plain)
    assert [problem.facts["hook"] for problem in error.value.problems] == ["build_data", "build_model", "loss"]
    assert "is 'los' meant to be it?" in str(error.value)


def test_a_hook_must_be_a_plain_method() -> None:
    class Static:
        @staticmethod
        def forward(model: Any) -> None: ...

    with pytest.raises(ExperimentError, match="not a plain method"):
        hooks.hook(Static, "forward")


def test_traits_of_a_class_without_the_base() -> None:
    @dataclasses.dataclass(frozen=True)
    class Marked:
        width: GraphConst[int] = 3
        rate: Device[float] = 0.5
        items: list = dataclasses.field(default_factory=list)

    assert graphconst_fields(Marked) == ("width",)
    assert device_fields(Marked) == ("rate",)
    assert host_fields(Marked) == ("items",)
    assert config_metadata(Marked)["items"].default == []

    class Explicit:
        device_fields = ("rate",)
        host_fields = ("name",)
        width: int
        rate: float = 0.5
        name: str = "a"

    assert graphconst_fields(Explicit) == ("width",)
    assert host_fields(Explicit) == ("name",)
    assert config_metadata(Explicit)["width"].required

    class Both:
        device_fields = ("width",)
        width: GraphConst[int] = 3

    with pytest.raises(ExperimentError, match="both GraphConst and Device"):
        config_metadata(Both)


def test_literals_and_paths_fit_knobs() -> None:
    class Fits(Experiment):
        accum: Literal[1, 4] = 4
        run_dir: Path | None = "runs/here"  # pyright: ignore

    assert Fits().run_dir == Path("runs/here")
    with pytest.raises(UsageError):
        Fits(accum=2)  # pyright: ignore
