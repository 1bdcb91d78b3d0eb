"""Curves of the resolved schedules: as a line of blocks in the terminal, and as a PNG with the plot extra."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from nitro_cli.errors import OutputError, UsageError

Curve = Sequence[tuple[int, float]]
_BLOCKS = "▁▂▃▄▅▆▇█"
_ASCII = "_.-=+*#@"


def curve_lines(curves: Mapping[str, Curve], width: int, ascii_only: bool) -> list[str]:
    """Two lines a schedule: its name with first, lowest, highest and last value, and its shape over the run."""
    lines = []
    for name, curve in curves.items():
        values = [value for _, value in curve]
        facts = f"first {values[0]:g}, lowest {min(values):g}, highest {max(values):g}, last {values[-1]:g}"
        lines += [f"  {name}  {facts}", "  " + sparkline(values, min(width - 4, 60), ascii_only)]
    return lines


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """``values`` as one row of blocks, the lowest value at the bottom; a constant is drawn at half height."""
    marks = _ASCII if ascii_only else _BLOCKS
    shown = [values[round(i * (len(values) - 1) / max(width - 1, 1))] for i in range(min(width, len(values)))]
    low, high = min(shown), max(shown)
    if high == low:
        return marks[3] * len(shown)
    return "".join(marks[min(int((value - low) / (high - low) * len(marks)), len(marks) - 1)] for value in shown)


def can_draw(stream: TextIO) -> bool:
    """Whether the stream's encoding has the blocks."""
    try:
        _BLOCKS.encode(getattr(stream, "encoding", None) or "utf-8")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def check_plot(path: Path, force: bool) -> None:
    """Refuse, before anything is computed, a plot that cannot be written."""
    if path.suffix.lower() != ".png":
        raise UsageError(f"--plot {path}: a plot is a PNG file", f"write: --plot {path.with_suffix('.png')}")
    if path.exists() and not force:
        raise UsageError(f"--plot {path}: the file exists", "give another name, or --force to overwrite it")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UsageError("--plot needs matplotlib", "install it: pip install 'nitro-jax[plot]'") from None


def write_png(curves: Mapping[str, Curve], path: Path, title: str) -> None:
    """One panel a schedule, over optimizer steps counted from 0."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 1.2 + 1.8 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(curves), 1, squeeze=False, sharex=True)[:, 0]
    for panel, (name, curve) in zip(axes, curves.items(), strict=True):
        panel.plot([step for step, _ in curve], [value for _, value in curve])
        panel.set_ylabel(name)
        panel.grid(alpha=0.3)
    axes[-1].set_xlabel("optimizer step (the first update is step 0)")
    figure.suptitle(title)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise OutputError(f"the plot could not be written to {path}: {error}") from error
