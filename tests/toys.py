"""Experiments small enough that each of their programs compiles in a few hundredths of a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from nitro_cli import ArrayLoader, Device, Experiment, GraphConst, Nitro, cache_stats
from nitro_cli.loggers.jsonl import read_log
from nitro_cli.programs.cache import cache_entries

ROWS, FEATURES = 16, 3


def arrays(rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
    """A noisy plane: ``x`` float32[rows, 3], ``y`` float32[rows]."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + 0.3 + 0.1 * rng.normal(size=rows)).astype(np.float32)
    return {"x": x, "y": y}


def splits(batch: int = 4, rows: int = ROWS, val_rows: int = 8, **options: Any) -> dict[str, ArrayLoader]:
    """Train, val and test splits of one width; only train is shuffled where ``options`` ask for it."""
    return {
        "train": ArrayLoader(arrays(rows), batch_size=batch, **options),
        "val": ArrayLoader(arrays(val_rows, seed=1), batch_size=batch),
        "test": ArrayLoader(arrays(val_rows, seed=2), batch_size=batch),
    }


class Line(Experiment):
    """A plane through noisy points: the four required hooks and one field of each marker."""

    power: GraphConst[int] = 2
    """Read by ``loss`` only."""
    shift: GraphConst[float] = 0.0
    """Read by ``forward`` only."""
    scale: Device[float] = 1.0
    note: str = "a host field"
    batch: int = 4

    def build_data(self, dist):
        return splits(self.batch)

    def build_model(self, rng):
        return None, {"b": np.float32(0), "w": np.zeros(FEATURES, np.float32)}, {}

    def forward(self, model, ps, st, *, x):
        return self.scale * (x @ ps["w"] + ps["b"]) + self.shift, st

    def loss(self, outputs, *, y):
        return (jnp.abs(outputs - y) ** self.power).mean()


class Measured(Line):
    """``Line`` with a metric on the host, so that a run has three programs, and plain gradient descent."""

    learning_rate: float = 0.05

    def optimizer(self):
        return optax.sgd

    def metrics(self, outputs, *, y):
        return {"error": (np.abs(outputs - y).sum(), len(y))}


class OnDevice(Measured):
    """``Line`` with its metric in a program of its own."""

    def metrics(self, outputs, *, y):
        return {"error": (jnp.abs(outputs - y).sum(), len(y))}

    def metrics_residency(self, hook):
        return "device"


class Watcher:
    """An observer that keeps events, and may act on one: ``Watcher(epoch=function)``."""

    def __init__(self, **actions: Callable[[dict[str, Any]], None]) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.actions = actions

    def __call__(self, event: str, facts: dict[str, Any]) -> None:
        self.events.append((event, facts))
        if event in self.actions:
            self.actions[event](facts)

    def of(self, event: str) -> list[dict[str, Any]]:
        return [facts for name, facts in self.events if name == event]

    @property
    def warnings(self) -> list[str]:
        return [facts["message"] for facts in self.of("warning")]

    @property
    def compiled(self) -> list[str]:
        return [facts["program"] for facts in self.of("compile")]


class Stopping:
    """The batches of another loader; calls ``act``, once, when batch ``at`` of epoch ``epoch`` is asked for."""

    def __init__(self, source: Any, at: int, act: Callable[[], None], epoch: int = 0) -> None:
        self.source, self.at, self.act, self.epoch = source, at, act, epoch
        self.now, self.done = 0, False

    def set_epoch(self, epoch: int) -> None:
        self.now = epoch
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.source)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.source):
            if index == self.at and self.now == self.epoch and not self.done:
                self.done = True
                self.act()
            yield batch


def parameters(n: Nitro) -> dict[str, np.ndarray]:
    """Host copies of the parameters of a handle, by path."""
    return n.snapshot()["ps"]


def everything(n: Nitro) -> dict[str, np.ndarray]:
    """Parameters, state and optimizer state of a handle by path."""
    return {f"{part}.{path}": a for part, tree in n.snapshot().items() for path, a in tree.items()}


def assert_same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> None:
    """Equal to the bit."""
    assert one.keys() == other.keys()
    for path in one:
        np.testing.assert_array_equal(one[path], other[path], err_msg=path)


def differs(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray], atol: float = 1e-6) -> bool:
    return any(not np.allclose(one[path], other[path], rtol=0, atol=atol) for path in one)


def log_of(run_dir: Path | str, context: str | None = None) -> list[dict[str, Any]]:
    """The records of a run's log, all or those of one context."""
    records = read_log(Path(run_dir) / "metrics.jsonl")
    return records if context is None else [r for r in records if r.get("context") == context]


class Compiles:
    """What nitro compiles inside a ``with`` block: names of programs, and why."""

    def __enter__(self) -> Compiles:
        self._before = len(cache_entries())
        self._misses = cache_stats().misses
        return self

    def __exit__(self, *_: object) -> None:
        self.misses = cache_stats().misses - self._misses
        fresh = cache_entries()[self._before :]
        self.why = {entry.program: entry.why for entry in fresh}
        self.programs = sorted(entry.program for entry in fresh)
