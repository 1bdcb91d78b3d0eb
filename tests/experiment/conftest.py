"""A small project on disk: experiments/, presets/, and the working directory inside it."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

MYEXP = '''
from __future__ import annotations

from typing import Literal

from nitro_cli.experiment.base import Experiment
from nitro_cli.experiment.markers import Device, GraphConst


class MyExp(Experiment):
    """Handwritten digits, a small MLP."""

    width: GraphConst[int] = 128
    """Hidden width."""
    smoothing: Device[float] = 0.05
    max_epochs: int = 10
    batch_size: int = 64
    use_bn: bool = True
    warmup: int | None = 3
    grad_clip: float | None = None
    hidden: list[int] = [64, 64]
    layers: list[int] | None = None
    image_shape: tuple[int, int] = (8, 8)
    algorithm: Literal["sgd", "adam"] = "adam"
    run_tag: str = "x"
    options: dict[str, int] = {}

    def build_data(self, dist): ...
    def build_model(self, rng): ...
    def forward(self, model, ps, st, *, image): ...
    def loss(self, outputs, *, label): ...
'''

PRESETS = """
[current]
max_epochs = 20
hidden = [32, 32]

[reference_v1]
"""


class Project:
    def __init__(self, root: Path) -> None:
        self.root = root

    def write(self, name: str, text: str | bytes) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(textwrap.dedent(text).lstrip("\n"), encoding="utf-8")
        return path

    def says(self, error: object) -> str:
        """An error's text without the folder of this test."""
        return str(error).replace(str(self.root.resolve()), "<root>")


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    monkeypatch.chdir(tmp_path)
    modules, path = dict(sys.modules), list(sys.path)
    yield Project(tmp_path)
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if name.startswith(("experiments", "pkg", "nitro_")) and not name.startswith("nitro_cli"):
            del sys.modules[name]


@pytest.fixture
def project(empty: Project) -> Project:
    empty.write("experiments/myexp.py", MYEXP)
    empty.write("presets/myexp.toml", PRESETS)
    return empty


@pytest.fixture
def my_exp(project: Project) -> type:
    from nitro_cli.experiment.discovery import find_experiment

    return find_experiment("myexp").cls
