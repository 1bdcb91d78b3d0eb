"""Every compile that jax itself makes in this process, as jax reports it.

Nitro's own cache counts what nitro asks for. The ledger counts what happened: it listens to ``jax.monitoring``, so an
eager operation in a user's hook, or a compile that nitro did not know of, shows up here under jax's own name for it.

The event names are strings that jax may change. ``verified`` is True once an event was seen; until then nobody may
conclude "nothing was compiled" from an empty ledger.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

import jax

COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


class LedgerRow(NamedTuple):
    """One backend compile: jax's name of the function, seconds spent, and ``time.perf_counter()`` at its end."""

    name: str
    seconds: float
    when: float


class Ledger:
    """Rows in the order in which jax reported them; ``mark()`` and ``since(mark)`` delimit a stretch."""

    def __init__(self) -> None:
        self.rows: list[LedgerRow] = []

    @property
    def verified(self) -> bool:
        return bool(self.rows)

    def mark(self) -> int:
        return len(self.rows)

    def since(self, mark: int) -> list[LedgerRow]:
        return self.rows[mark:]

    def counts(self, start: int = 0, end: int | None = None) -> list[tuple[str, int]]:
        """``(name, number of compiles)`` between two marks, in order of first appearance."""
        return list(Counter(row.name for row in self.rows[start:end]).items())

    def _on_duration(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == COMPILE_EVENT:
            self.rows.append(LedgerRow(str(kwargs.get("fun_name", "unknown")), duration_secs, time.perf_counter()))


ledger = Ledger()
jax.monitoring.register_event_duration_secs_listener(ledger._on_duration)
