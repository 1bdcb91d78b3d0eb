"""A project folder, and ``nitro`` run in this process or in a real one."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nitro_cli.cli import main

MYEXP = '''
"""A small experiment with many kinds of fields."""
from enum import Enum
from typing import Literal

import numpy as np

from nitro_cli import Device, Experiment, GraphConst


class Size(Enum):
    SMALL = "s"
    LARGE = "l"


class MyExp(Experiment):
    """A line through four points."""

    max_epochs: int = 10
    learning_rate: float = 1e-3
    batch_size: int = 64
    """Rows in a batch."""
    use_bn: GraphConst[bool] = True
    """Whether to normalise [sic]."""
    maybe: bool | None = None
    warmup: int | None = None
    grad_clip: float | None = None
    hidden: list[int] = [64, 64]
    layers: list[int] | None = None
    image_shape: tuple[int, int] = (8, 8)
    optimizer_name: Literal["sgd", "adam"] = "adam"
    size: Size = Size.SMALL
    run_tag: str = "x"
    note: str | None = "a note"
    smoothing: Device[float] = 0.1
    split: str = "a field that is called like an option"
    path: str = "untouched"
    seed: int = 0

    def build_data(self, dist):
        x = np.linspace(-1, 1, 10, dtype=np.float32)[:, None]
        batches = [{"x": x[i : i + 4], "y": 2 * x[i : i + 4]} for i in (0, 4, 8)]
        return {"train": batches[:2], "val": batches, "test": batches}

    def build_model(self, rng):
        return None, {"w": np.ones((1, 1), np.float32)}, {}

    def forward(self, model, ps, st, *, x):
        return {"y": x @ ps["w"], "pair": x * np.ones((1, 2), np.float32)}, st

    def loss(self, outputs, *, y):
        return ((outputs["y"] - y) ** 2).mean() * (1 + self.smoothing)
'''

PRESETS = """\
[current]
max_epochs = 40
learning_rate = 2e-3

[reference_v1]
max_epochs = 5
"""

SMALL = """
from typing import Literal
from nitro_cli import Experiment

class MyExp(Experiment):
    mode: Literal["a", "b"] = "a"

    def build_data(self, dist): ...
    def build_model(self, rng): ...
    def forward(self, model, ps, st): ...
    def loss(self, outputs): ...
"""


@dataclass
class Result:
    """What a command did: its exit code and what it wrote."""

    code: int
    out: str
    err: str

    @property
    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.out.splitlines()]

    def event(self, name: str) -> dict[str, Any]:
        return next(event for event in self.events if event["event"] == name)


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("project")
    write(root, "experiments/myexp.py", MYEXP)
    write(root, "presets/myexp.toml", PRESETS)
    return root


def write(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text).lstrip("\n"))
    return path


@pytest.fixture
def here(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(project)
    return project


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to stand in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Screen(io.TextIOWrapper):
    """A stream in memory that can pass for a terminal."""

    def __init__(self, encoding: str, terminal: bool) -> None:
        self.bytes = io.BytesIO()
        self.terminal = terminal
        super().__init__(self.bytes, encoding=encoding, write_through=True)

    def isatty(self) -> bool:
        return self.terminal

    def text(self) -> str:
        self.flush()
        return self.bytes.getvalue().decode(self.encoding)


@pytest.fixture
def nitro(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """``nitro("train", "myexp")`` in this process, with streams and environment of its own."""

    for name in ("NO_COLOR", "FORCE_COLOR", "CI", "COLUMNS", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")

    def call(*argv: str, tty: bool = False, encoding: str = "utf-8", **env: str) -> Result:
        with monkeypatch.context() as patch:
            out, err = Screen(encoding, tty), Screen(encoding, tty)
            patch.setattr(sys, "stdout", out)
            patch.setattr(sys, "stderr", err)
            for name, value in env.items():
                patch.setenv(name, value)
            code = main.run(list(argv))
            return Result(code, out.text(), err.text())

    return call


def spawn(*argv: str, cwd: Path, **options: Any) -> subprocess.Popen[bytes]:
    """``nitro`` as a real process, on one CPU device."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", **options.pop("env", {})}
    command = [sys.executable, "-m", "nitro_cli", *argv]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.Popen(command, cwd=cwd, env={**env, "PYTHONPATH": str(Path(main.__file__).parents[2])}, **pipes)
