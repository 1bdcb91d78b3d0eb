"""Stopping a run in good order: a signal only leaves a note, the loop reads it between two steps.

A second Ctrl-C leaves at once. Python runs its own signal handlers only when the main thread comes back from native
code, which a compilation may not do for minutes; so a small thread listens on the wake-up descriptor that the C
handler writes to, and leaves from there.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
)  # SIGHUP does not exist everywhere

# `timeout`, shells that hang up and schedulers send the same signal twice in a row and mean one request.
# A person presses Ctrl-C twice on purpose, so for SIGINT there is no such grace.
REPEAT_GRACE_SECONDS = 1.0

_active: list[StopSignals] = []


class StopSignals:
    """While entered, SIGINT, SIGTERM and SIGHUP set ``requested`` instead of ending the process.

    Ctrl-C while a stop is under way, or another signal a second time, ends the process at once with exit code 128 + n.
    ``announce`` is called once with the first signal, at once and in a thread of its own: the main thread may be busy
    for minutes. ``last_word`` is called with the exit code before the process is ended, and has half a second. Only
    ``signals`` are watched for; those that were ignored on entry (``nohup``) stay ignored. Off the main thread nothing
    is installed and nothing is ever requested. Children made by ``fork`` get the old handlers back.
    """

    def __init__(
        self,
        announce: Callable[[int], None] = lambda number: None,
        last_word: Callable[[int], None] = lambda code: None,
        signals: Sequence[signal.Signals] = SIGNALS,
    ) -> None:
        self._announce, self._last_word, self._signals = announce, last_word, signals
        self.requested: int | None = None
        self._seen: dict[int, float] = {}
        self._old: dict[int, Any] = {}
        self._old_wakeup = -1
        self._pair: tuple[socket.socket, socket.socket] | None = None
        self._watcher: threading.Thread | None = None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number; 0 where none was received."""
        return 0 if self.requested is None else 128 + self.requested

    @property
    def name(self) -> str:
        """``SIGINT``, for example; empty where none was received."""
        return "" if self.requested is None else signal.Signals(self.requested).name

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            return self
        self._pair = socket.socketpair()
        for end in self._pair:
            end.setblocking(end is self._pair[0])
        self._watcher = threading.Thread(target=self._watch, name="nitro-stop-signals", daemon=True)
        self._watcher.start()
        self._old_wakeup = signal.set_wakeup_fd(self._pair[1].fileno(), warn_on_full_buffer=False)
        _active.append(self)
        for number in self._signals:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._old[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._pair is None or self._watcher is None:
            return
        self._restore()
        _active.remove(self)
        self._pair[1].send(b"\0")
        self._watcher.join()
        for end in self._pair:
            end.close()
        self._pair = self._watcher = None

    def _restore(self) -> None:
        for number, old in self._old.items():
            signal.signal(number, signal.SIG_DFL if old is None else old)
        self._old.clear()
        signal.set_wakeup_fd(self._old_wakeup, warn_on_full_buffer=False)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.requested is None:
            self.requested = number

    def _watch(self) -> None:
        assert self._pair is not None
        listening = self._pair[0]
        while True:
            for number in listening.recv(64):
                if number == 0:
                    return
                if number in self._old:  # other signals with Python handlers wake us up too
                    self._received(number)

    def _received(self, number: int) -> None:
        now = time.monotonic()
        if self.requested is None:
            self.requested = number
        if number == signal.SIGINT:
            again = bool(self._seen)
        else:
            again = now - self._seen.get(number, now) > REPEAT_GRACE_SECONDS
        first = not self._seen
        self._seen.setdefault(number, now)
        if again:
            leave(128 + number, self._last_word)
        if first:
            self._announce(number)


def leave(code: int, last_word: Callable[[int], None]) -> None:
    """End the process at once, with a last word for which there is half a second."""
    # Either can block for ever: on a full pipe, on a lock that the main thread holds, on a file system that hangs.
    ending = threading.Thread(target=_flush, args=(code, last_word), daemon=True)
    ending.start()
    ending.join(timeout=0.5)
    os._exit(code)


def _flush(code: int, last_word: Callable[[int], None]) -> None:
    with contextlib.suppress(Exception):
        last_word(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


# A forked child shares the wake-up descriptor: a signal to it would stop its parent, and it would not end itself.
# So the child gets the old handlers back, and signals wait while it has not got them yet.
_masks = threading.local()


def _before_fork() -> None:
    if _active:
        _masks.old = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    old = getattr(_masks, "old", None)
    if old is not None:
        _masks.old = None
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _after_fork_in_child() -> None:
    for stop in reversed(_active):
        stop._restore()
        stop._pair = stop._watcher = None
    _active.clear()
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
