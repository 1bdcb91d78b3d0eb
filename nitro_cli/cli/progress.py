"""The live line of a run: epoch, bar, share, loss, rate, time left."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nitro_cli.cli.render import clock, number

BAR = 30
NARROW = 60


def live_line(facts: Mapping[str, Any], width: int) -> str:
    """``epoch 4/40 [####----]  41%  0.2117   31 it/s  eta 0:00:14`` in at most ``width`` - 1 columns."""
    steps = max(int(facts.get("steps_in_epoch") or 1), 1)
    share = min(float(facts.get("step_in_epoch") or 0) / steps, 1.0)
    head = f"epoch {facts['epoch']}/{facts['max_epochs']}"
    tail = [f"{100 * share:3.0f}%"]
    if facts.get("loss") is not None:
        tail.append(number(float(facts["loss"])))
    tail += _pace(facts)
    while tail and len("  ".join([head, *tail])) >= width:
        tail.pop()
    text = "  ".join(tail)
    room = width - 1 - len(head) - len(text) - 5
    if width < NARROW or room < 5:
        return f"{head}  {text}".rstrip()[: max(width - 1, 0)]
    size = min(BAR, room)
    full = round(share * size)
    return f"{head} [{'#' * full}{'-' * (size - full)}]  {text}"


def _pace(facts: Mapping[str, Any]) -> list[str]:
    rate = float(facts.get("rate") or 0.0)
    if rate <= 0 or not math.isfinite(rate):
        return []
    left = max((facts.get("total_steps") or 0) - (facts.get("step") or 0), 0)
    return [f"{rate:4.0f} it/s" if rate >= 10 else f"{rate:.2g} it/s", f"eta {clock(left / rate)}"]
