"""Schedules in ``nitro show``: as lines of blocks, and as a PNG."""

from __future__ import annotations

import pytest

from nitro_cli.cli.plots import curve_lines, sparkline

SCHEDULED = '''
import numpy as np
import optax

from nitro_cli import Experiment


class Scheduled(Experiment):
    """A line with a warm-up."""

    max_epochs: int = 5

    def build_data(self, dist):
        x = np.ones((4, 1), np.float32)
        return {"train": [{"x": x, "y": x}] * 4}

    def build_model(self, rng):
        return None, {"w": np.zeros((1, 1), np.float32)}, {}

    def forward(self, model, ps, st, *, x):
        return x @ ps["w"], st

    def loss(self, outputs, *, y):
        return ((outputs - y) ** 2).mean()

    def schedules(self):
        return {"learning_rate": lambda total: optax.warmup_cosine_decay_schedule(0.0, 0.1, total // 4, total)}
'''


def test_a_curve_as_blocks():
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7], 4) == "▁▃▆█"
    assert sparkline([2.0, 2.0], 2) == "▄▄"
    assert sparkline([0, 7], 2, ascii_only=True) == "_@"


def test_lines_fit_the_terminal():
    curves = {"learning_rate": [(step, step / 99) for step in range(100)]}
    for width in (20, 40, 200):
        head, shape = curve_lines(curves, width, ascii_only=False)
        assert head == "  learning_rate  first 0, lowest 0, highest 1, last 1"
        assert len(shape) <= max(width - 2, 62)


@pytest.fixture
def scheduled(here):
    path = here / "experiments" / "scheduled.py"
    path.write_text(SCHEDULED)
    yield
    path.unlink()


def test_show_draws_the_schedules(nitro, scheduled, tmp_path):
    target = tmp_path / "curves.png"
    done = nitro("show", "scheduled", "--plot", str(target))
    assert done.code == 0, done.err
    assert "learning_rate  first 0, lowest 0, highest 0.1" in done.out
    assert target.read_bytes().startswith(b"\x89PNG")
    again = nitro("show", "scheduled", "--plot", str(target))
    assert again.code == 2
    assert "--force" in again.err
    assert nitro("show", "scheduled", "--plot", str(target), "--force").code == 0


def test_show_refuses_a_plot_it_cannot_draw(nitro, scheduled, tmp_path):
    assert "PNG" in nitro("show", "scheduled", "--plot", str(tmp_path / "x.pdf")).err
    done = nitro("show", "myexp", "--plot", str(tmp_path / "x.png"))
    assert done.code == 2
    assert "no schedules" in done.err
    assert not (tmp_path / "x.png").exists()
