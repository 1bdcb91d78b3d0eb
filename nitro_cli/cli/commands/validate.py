"""``nitro validate`` and ``nitro evaluate``: metrics of a run's weights, one row a metric."""

from __future__ import annotations

from typing import Any

from nitro_cli.cli.look_ups import with_store
from nitro_cli.cli.session import Session
from nitro_cli.cli.weights import prepare


@with_store
def run(session: Session) -> int:
    """Evaluate the ``val`` split."""
    return measure(session, "val")


def measure(session: Session, split: str) -> int:
    """Print ``name value  (n=rows)`` for each metric of ``split``; with --json one object."""
    prepared = prepare(session)
    nitro, out = prepared.nitro, session.output
    metrics: dict[str, Any] = nitro.validate() if split == "val" else nitro.evaluate(split)
    rows = nitro.last_rows.get(split)
    facts = {"split": split, "rows": rows, "metrics": metrics, **prepared.weights}
    out.event(session.command, facts)
    out.event("done", {"status": "finished", "exit_code": 0})
    width = max((len(name) for name in metrics), default=0)
    for name, value in metrics.items():
        out.result(f"{name:<{width}}  {_digits(value)}  (n={rows})")
    return 0


def _digits(value: Any) -> str:
    """Nine significant digits: enough to see that a float32 is the one in the log."""
    return f"{value:.9g}" if isinstance(value, float) else str(value)
