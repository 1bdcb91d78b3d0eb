"""Values from Python and TOML (strict, with a few widenings) and from command-line text (by type, never by guess)."""

from __future__ import annotations

import datetime
import math
from enum import Enum, IntEnum
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
from pydantic import Field

from nitro_cli.experiment.traits import FieldInfo
from nitro_cli.experiment.values import BadValue, from_python, from_text, type_name


class Color(Enum):
    RED = "red"
    BLUE = "blue"


class Level(IntEnum):
    LOW = 1
    HIGH = 2


class Swapped(Enum):
    A = "B"
    B = "A"


def field(kind: Any) -> FieldInfo:
    return FieldInfo("x", kind)


def same(value: Any, expected: Any) -> bool:
    return value == expected and type(value) is type(expected)


GOOD = [
    (float, 1, 1.0),
    (float | None, 1, 1.0),
    (int | None, None, None),
    (tuple[int, int], [3, 4], (3, 4)),
    (tuple[float, ...], [3, 4.5], (3.0, 4.5)),
    (set[int], [3, 3], {3}),
    (frozenset[str], ["a"], frozenset("a")),
    (list[tuple[int, ...]], [[1], []], [(1,), ()]),
    (dict[str, float], {"a": 1}, {"a": 1.0}),
    (Color, "red", Color.RED),
    (Color, "RED", Color.RED),
    (Color, Color.BLUE, Color.BLUE),
    (Level, 2, Level.HIGH),
    (Swapped, "A", Swapped.B),
    (list[Color], ["red"], [Color.RED]),
    (Literal["a", "b"], "a", "a"),
    (Literal[1, 2], 2, 2),
    (Path, "a/b", Path("a/b")),
    (list[Path], ["a"], [Path("a")]),
    (int | float, 5, 5),
    (int | float, 5.0, 5.0),
    (int | str, "5", "5"),
    (float, np.float32(0.5), 0.5),
    (int, np.int64(3), 3),
    (Annotated[float, Field(allow_inf_nan=True)], math.inf, math.inf),
    (datetime.date, datetime.date(2024, 1, 2), datetime.date(2024, 1, 2)),
]


@pytest.mark.parametrize(("kind", "value", "expected"), GOOD)
def test_widenings(kind: Any, value: Any, expected: Any) -> None:
    assert same(from_python(field(kind), value), expected)


BAD = [
    (int, True),
    (int, 2.5),
    (int, 2.0),
    (int, "3"),
    (float, True),
    (float, "3.0"),
    (float, "none"),
    (float, math.nan),
    (float, -math.inf),
    (float, 10**400),
    (list[float], [1.0, math.nan]),
    (bool, 1),
    (list[int], [1, True]),
    (list[int], (1, 2)),
    (tuple[int, int], [1, 2, 3]),
    (set[int], [[1]]),
    (Literal[1, 2], True),
    (Literal[1, 2] | None, 1.0),
    (Level, True),
    (Color, "Red"),
    (Literal["sgd", "adam"], "adm"),
    (str, 3),
    (str, datetime.date(2024, 1, 2)),
    (Path, ""),
    (int, None),
    (int, {"a": 1}),
    (Annotated[int, Field(ge=1)], 0),
    (int, "x" * 500),
]


def test_what_is_refused(snapshot: Any) -> None:
    said = []
    for kind, value in BAD:
        with pytest.raises(BadValue) as error:
            from_python(field(kind), value)
        said.append(f"{type_name(kind)}: {error.value}")
    assert "\n".join(said) == snapshot


TEXT = [
    (float, "1e-3", 0.001),
    (float, "1e-05", 1e-05),
    (float | None, "1e-5", 1e-05),
    (float, "-1e-3", -0.001),
    (float, "1", 1.0),
    (float, "1_000.5", 1000.5),
    (float, ".5", 0.5),
    (int, "1_000", 1000),
    (int, "-7", -7),
    (int, "0x10", 16),
    (int | None, "none", None),
    (int | None, "3", 3),
    (float | None, "none", None),
    (str | None, "none", "none"),
    (Path | None, "none", Path("none")),
    (Literal["none", "some"] | None, "none", "none"),
    (bool, "false", False),
    (bool | None, "true", True),
    (bool | None, "none", None),
    (int | float, "5.0", 5.0),
    (int | float, "5", 5),
    (int | str, "abc", "abc"),
    (list[int], "[1,2,3]", [1, 2, 3]),
    (list[int], "1,2,3", [1, 2, 3]),
    (list[int], "1,", [1]),
    (list[int], "[]", []),
    (list[int], "-1,-2", [-1, -2]),
    (list[int] | None, "[]", []),
    (list[str], "a, b", ["a", "b"]),
    (list[str], '["a,b", "c"]', ["a,b", "c"]),
    (tuple[int, int], "3,4", (3, 4)),
    (tuple[int, ...], "[3]", (3,)),
    (set[int], "1,1", {1}),
    (list[list[int]], "[[1], [2, 3]]", [[1], [2, 3]]),
    (list[float], "[1, 2.5]", [1.0, 2.5]),
    (dict[str, int], "{a = 1}", {"a": 1}),
    (str, "a=b=c", "a=b=c"),
    (str, "-x", "-x"),
    (str, "", ""),
    (Color, "red", Color.RED),
    (Color, "RED", Color.RED),
    (Swapped, "A", Swapped.B),
    (Level, "2", Level.HIGH),
    (Level, "HIGH", Level.HIGH),
    (Literal[1, 2], "2", 2),
    (Path, "a/b", Path("a/b")),
    (datetime.date, "2024-01-02", datetime.date(2024, 1, 2)),
    (complex, "1+2j", 1 + 2j),
    (Any, "[1, 'a']", [1, "a"]),
    (Annotated[float, Field(allow_inf_nan=True)], "inf", math.inf),
]


@pytest.mark.parametrize(("kind", "text", "expected"), TEXT)
def test_text_is_read_by_type(kind: Any, text: str, expected: Any) -> None:
    assert same(from_text(field(kind), text), expected)


BAD_TEXT = [
    (int, "1e3"),
    (int, "2.0"),
    (int, "2.5"),
    (int, "inf"),
    (int, "true"),
    (int, "007"),
    (int, "1__0"),
    (int, "٣"),
    (int, ""),
    (int, " 3"),
    (int | None, "1e3"),
    (int | None, "null"),
    (float, "0_e0"),
    (float, "1__0"),
    (float, "0x10"),
    (float, "nan"),
    (float, "abc"),
    (bool, "yes"),
    (list[int], "1 2 3"),
    (list[int], ""),
    (list[int], "[1, 2"),
    (list[int], "1,2.0"),
    (list[str], "[a, b]"),
    (list[list[int]], "1,2"),
    (tuple[int, int], "3,4,5"),
    (Color, "Red"),
    (Color, "green"),
    (Literal["sgd", "adam"], "adm"),
    (dict[str, int], "a=1"),
    (dict[str, int], "{a = 1}\ny = 2"),
    (Path, ""),
    (datetime.date, "0"),
    (np.ndarray, "[1]"),
    (Annotated[float, Field(gt=0)], "-1e-3"),
]


def test_text_that_is_refused(snapshot: Any) -> None:
    said = []
    for kind, text in BAD_TEXT:
        with pytest.raises(BadValue) as error:
            from_text(field(kind), text)
        said.append(f"{type_name(kind)} <- {text!r}: {error.value}")
    assert "\n".join(said) == snapshot


def test_type_names() -> None:
    kinds = [int, float | None, list[int], tuple[int, ...], dict[str, float], Literal["a", 1], Color, Any, np.ndarray]
    names = "int, float | None, list[int], tuple[int, ...], dict[str, float], 'a' | 1, Color, Any, ndarray"
    assert ", ".join(type_name(kind) for kind in kinds) == names
    assert type_name(Annotated[int, Field(ge=0)]) == "int"
