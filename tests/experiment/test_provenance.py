"""Which source wins, what it won over, and a run's configuration that reads back equal."""

from __future__ import annotations

import datetime
import itertools
from enum import Enum
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from nitro_cli.errors import UsageError
from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.markers import Device, GraphConst
from nitro_cli.experiment.presets import Source, dump_config, from_preset, load_run_config, resolve


def test_command_line_beats_preset_beats_run_beats_default(project: Any, my_exp: Any) -> None:
    for preset, said, base in itertools.product([None, "current"], [False, True], [False, True]):
        overrides = {"max_epochs": (30, "--max-epochs")} if said else {}
        run = {"max_epochs": (15, Source("run", "config.toml:3"))} if base else {}
        resolved = resolve(my_exp, preset, overrides=overrides, base=run)
        expected = [(30, "command line")] * said + [(20, "preset")] * bool(preset) + [(15, "run")] * base
        expected.append((10, "default"))
        source = resolved.sources["max_epochs"]
        assert (resolved.experiment.max_epochs, source.kind) == expected[0]
        assert [(value, kind) for kind, value in source.shadowed] == expected[1:]


def test_a_value_equal_to_the_default_still_wins(project: Any, my_exp: Any) -> None:
    resolved = resolve(my_exp, "current", overrides={"max_epochs": (10, "--max-epochs")})
    assert resolved.experiment.max_epochs == 10
    assert str(resolved.sources["max_epochs"]) == "--max-epochs"
    assert str(resolve(my_exp, "current").sources["max_epochs"]) == "preset presets/myexp.toml:2"


def test_one_override_leaves_the_other_fields_alone(project: Any, my_exp: Any) -> None:
    e = from_preset(my_exp, "current", width=3)
    assert e == from_preset(my_exp, "current").replace(width=3)
    assert e.hidden == [32, 32]


def test_list_fields_are_replaced_as_a_whole(project: Any, my_exp: Any) -> None:
    assert from_preset(my_exp, "current", hidden=[1]).hidden == [1]


def test_the_order_of_overrides_never_matters(project: Any, my_exp: Any) -> None:
    given = {"width": (1, "--width"), "max_epochs": (2, "--max-epochs"), "use_bn": (False, "--no-use-bn")}
    results = [resolve(my_exp, "current", overrides=dict(order)) for order in itertools.permutations(given.items())]
    assert all(result == results[0] for result in results)


def test_problems_of_all_sources_come_together(project: Any, my_exp: Any, snapshot: Any) -> None:
    project.write("presets/myexp.toml", "[current]\nmax_epohcs = 1\n")
    overrides = {"max_epohcs": (3, "--max-epohcs"), "width": (2.5, "--width"), "seed": (True, "keyword")}
    base = {"smoothing": ("a", Source("run", "config.toml:3"))}
    with pytest.raises(UsageError) as error:
        resolve(my_exp, "current", overrides=overrides, base=base)
    assert project.says(error.value) == snapshot


def test_the_environment_never_reaches_a_field(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(Experiment):
        path: str = "a"
        user: str = "b"
        home: str = "c"

    for name in ("PATH", "USER", "HOME"):
        monkeypatch.setenv(name, "/from/env")
    e = resolve(Named).experiment
    assert (e.path, e.user, e.home) == ("a", "b", "c")


def test_required_fields_must_come_from_somewhere(snapshot: Any) -> None:
    class Needs(Experiment):
        flag: bool
        width: GraphConst[int]

    assert resolve(Needs, overrides={"flag": (True, "--flag"), "width": (1, "--width")}).experiment.flag is True
    with pytest.raises(UsageError) as error:
        resolve(Needs, overrides={"width": ("x", "--width")})
    assert str(error.value) == snapshot


def test_a_field_the_experiment_dropped_is_noted(project: Any, my_exp: Any) -> None:
    resolved = resolve(my_exp, base={"gone": (1, Source("run", "c.toml:2")), "width": (7, Source("run", "c.toml:3"))})
    assert resolved.experiment.width == 7
    assert resolved.notes == ("the run's field 'gone' is no longer a field of MyExp: ignored",)


class Color(Enum):
    RED = "red"
    BLUE = 2
    BOTH = (1, 2)


texts = st.text(st.characters(exclude_categories=["Cs"]))


class Everything(Experiment):  # pydantic copies mutable defaults
    flag: bool = False
    count: GraphConst[int] = 0
    rate: Device[float] = Field(default=0.0, allow_inf_nan=True)
    text: str = ""
    maybe: int | None = None
    widths: list[int] = []  # noqa: RUF012
    shape: tuple[float, ...] = ()
    pair: tuple[int, str] = (1, "a")
    names: frozenset[str] = frozenset()
    numbers: set[int] = set()  # noqa: RUF012
    color: Color = Color.RED
    choice: Literal["a", 1] = "a"
    where: Path = Path("a")
    both: int | float = 0
    table: dict[str, tuple[int, ...]] = {}  # noqa: RUF012
    day: datetime.date | None = None
    colors: list[Color] = []  # noqa: RUF012


@given(
    st.fixed_dictionaries(
        {
            "flag": st.booleans(),
            "count": st.integers(),
            "rate": st.floats(),
            "text": texts,
            "maybe": st.none() | st.integers(),
            "widths": st.lists(st.integers()),
            "shape": st.lists(st.floats(allow_nan=False, allow_infinity=False)).map(tuple),
            "pair": st.tuples(st.integers(), texts),
            "names": st.frozensets(texts),
            "numbers": st.sets(st.integers()),
            "color": st.sampled_from(Color),
            "choice": st.sampled_from(["a", 1]),
            "where": st.sampled_from([Path("a"), Path("/b c/é"), Path(".")]),
            "both": st.integers() | st.floats(allow_nan=False, allow_infinity=False),
            "table": st.dictionaries(texts, st.lists(st.integers()).map(tuple)),
            "day": st.none() | st.dates(),
            "colors": st.lists(st.sampled_from(Color)),
        }
    )
)
def test_a_runs_configuration_reads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    resolved = resolve(Everything, overrides={name: (value, "keyword") for name, value in values.items()})
    path = tmp_path_factory.getbasetemp() / "config.toml"
    path.write_bytes(dump_config(resolved, preset="current", command_line="nitro train\nx").encode())
    again = resolve(Everything, base=load_run_config(path))
    assert again.experiment == resolved.experiment
    assert {source.kind for source in again.sources.values()} == {"run"}


def test_values_that_toml_cannot_say_are_comments(tmp_path: Path) -> None:
    class Holds(Experiment):
        data: Any = None
        items: Any = None
        width: int = 3

    text = dump_config(Holds(data=np.ones(3), items=(1, 2)), {"width": Source("command line", "--width")})
    assert "# data: not written (ndarray)  # default\n# items: not written (tuple)" in text
    assert "width = 3  # --width\n" in text
    path = tmp_path / "config.toml"
    path.write_text(text)
    assert "data" not in load_run_config(path)


def test_a_file_that_is_no_runs_configuration(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text("[other]\n")
    with pytest.raises(UsageError, match=r"no table \[config\]"):
        load_run_config(path)
    with pytest.raises(UsageError, match="cannot be read"):
        load_run_config(tmp_path / "none.toml")
