"""Ctrl-C that cannot get lost, and other signals that end a command with a word.

Python raises KeyboardInterrupt wherever the main thread happens to be. Where that is a ``__del__`` or a callback of the
garbage collector (jax has one), the exception is printed and dropped, and the program goes on as if nobody had pressed
anything.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from nitro_cli.run.stop import SIGNALS, StopSignals, leave

ENDING = [number for number in SIGNALS if number.name != "SIGINT"]  # Ctrl-C is an exception, told as one
SOON = 0.02  # seconds: by then the main thread has left the place that drops exceptions


@contextmanager
def kept_interrupts() -> Iterator[None]:
    """Raise a dropped KeyboardInterrupt again, as a signal: whichever handler is installed by then receives it."""
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if unraisable.exc_type is not KeyboardInterrupt:
            before(unraisable)
            return
        again = threading.Timer(SOON, _thread.interrupt_main)
        again.daemon = True
        again.start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def told_signals(tell: Callable[[str, int], None]) -> Iterator[None]:
    """While active, SIGTERM and SIGHUP end the process as they always do, after ``tell(name, exit code)``: who reads
    the events must not wait for a last one. A training takes these signals over and saves."""
    with StopSignals(lambda number: leave(128 + number, lambda code: tell(_name(number), code)), signals=ENDING):
        yield


def _name(number: int) -> str:
    return next(known.name for known in SIGNALS if known == number)
