"""Python's search for cyclic garbage, put off while a command starts.

Importing jax and the experiment makes a million objects that all stay, and the collector walks them again and again: a
quarter of the time that ``nitro train`` needs before it can do anything. At the end of the process it walks them once
more for nothing. Only the ``nitro`` command does this; in a program of the user's own, the collector is theirs.
"""

from __future__ import annotations

import gc

_paused = False


def pause() -> None:
    """Look for no garbage until ``resume``, unless somebody has switched the collector off anyway."""
    global _paused
    if gc.isenabled():
        gc.disable()
        _paused = True


def resume() -> None:
    """Look for garbage again, but never among what was made until now. Does nothing where nothing is paused."""
    global _paused
    if _paused:
        _paused = False
        gc.freeze()
        gc.enable()
