"""Ctrl-C that cannot get lost.

Python raises KeyboardInterrupt wherever the main thread happens to be. Where that is a ``__del__`` or a callback of the
garbage collector (jax has one), the exception is printed and dropped, and the program goes on as if nobody had pressed
anything.
"""

from __future__ import annotations

import _thread
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
