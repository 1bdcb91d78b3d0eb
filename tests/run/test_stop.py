"""Real signals to real processes. The child says when it is ready, so nothing here depends on time."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from nitro_cli.run.stop import StopSignals

GRACEFUL = """
import sys, time
from nitro_cli.run.stop import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    while stop.requested is None:
        time.sleep(0.01)
    print("saved", stop.name, stop.exit_code, flush=True)
sys.exit(stop.exit_code)
"""

# The main thread sits in native code that never gives Python a chance to run a handler, as a long compilation does.
STUCK = """
import hashlib, os, sys, threading, time
from nitro_cli.run.stop import StopSignals
def report():
    while stop.requested is None:
        time.sleep(0.01)
    sys.stdout.write("unflushed")
    os.write(1, b"seen\\n")
with StopSignals() as stop:
    threading.Thread(target=report, daemon=True).start()
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
sys.exit(99)
"""


@pytest.fixture
def child():
    """``child(code)`` starts a process and returns it when it has said that it is ready."""
    processes: list[subprocess.Popen] = []

    def start(code: str, *, ignore: tuple[int, ...] = ()) -> subprocess.Popen:
        # A test runner in the background passes ignored signals on, so the child sets what it starts from.
        first = "import signal\n" + "".join(
            f"signal.signal({int(number)}, signal.{'SIG_IGN' if number in ignore else 'SIG_DFL'})\n"
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        )
        process = subprocess.Popen(
            [sys.executable, "-c", first + code],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
        processes.append(process)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        return process

    yield start
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()


def finish(process: subprocess.Popen) -> tuple[str, str, int]:
    out, err = process.communicate(timeout=60)
    return out, err, process.returncode


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_the_first_signal_asks_and_the_work_ends_in_order(child, number, code):
    process = child(GRACEFUL)
    process.send_signal(number)
    assert finish(process) == (f"saved {number.name} {code}\n", "", code)


@pytest.mark.parametrize(
    ("first", "second", "code"),
    [(signal.SIGINT, signal.SIGINT, 130), (signal.SIGTERM, signal.SIGINT, 130), (signal.SIGHUP, signal.SIGINT, 130)],
)
def test_a_second_ctrl_c_leaves_at_once_even_from_native_code(child, first, second, code):
    process = child(STUCK)
    process.send_signal(first)
    assert process.stdout is not None
    assert process.stdout.readline() == "seen\n"
    process.send_signal(second)
    assert finish(process) == ("unflushed", "", code)


def test_the_same_signal_twice_in_a_row_is_one_request(child):
    process = child(GRACEFUL.replace("print", "time.sleep(0.3); print"))
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == ("saved SIGTERM 143\n", "", 143)


def test_the_same_signal_again_later_leaves_at_once(child):
    code = STUCK.replace(
        "with StopSignals", "import nitro_cli.run.stop as s; s.REPEAT_GRACE_SECONDS = 0.0\nwith StopSignals"
    )
    process = child(code)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert process.stdout.readline() == "seen\n"
    process.send_signal(signal.SIGTERM)
    assert finish(process) == ("unflushed", "", 143)


def test_a_full_pipe_does_not_keep_the_process_alive(child):
    code = """
import os, sys, threading, time
from nitro_cli.run.stop import StopSignals
with StopSignals() as stop:
    print("ready", flush=True)
    threading.Thread(target=lambda: sys.stdout.write("x" * 10_000_000), daemon=True).start()
    while True:
        time.sleep(0.01)
"""
    process = child(code)
    assert process.stdout is not None
    assert process.stdout.read(1) == "x"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    process.communicate()


def test_ignored_signals_stay_ignored(child):
    process = child(GRACEFUL, ignore=(signal.SIGHUP,))
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGTERM)
    assert finish(process) == ("saved SIGTERM 143\n", "", 143)


def test_a_forked_child_has_the_old_handlers_and_does_not_stop_its_parent(child):
    code = """
import os, signal, sys, time, warnings
warnings.simplefilter("ignore", DeprecationWarning)
from nitro_cli.run.stop import StopSignals
with StopSignals() as stop:
    pid = os.fork()
    if pid == 0:
        while True:
            time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    print("ready", flush=True)
    time.sleep(0.5)  # lines that arrive together are read together, and the test reads the first one by itself
    print(os.WTERMSIG(status), stop.requested)
"""
    assert finish(child(code)) == (f"{int(signal.SIGTERM)} None\n", "", 0)


def test_handlers_and_wakeup_descriptor_come_back():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    threads = threading.active_count()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    old = signal.set_wakeup_fd(writer)
    try:
        with StopSignals() as stop:
            assert signal.getsignal(signal.SIGTERM) != before[signal.SIGTERM]
            os.kill(os.getpid(), signal.SIGTERM)
        assert (stop.requested, stop.exit_code, stop.name) == (signal.SIGTERM, 143, "SIGTERM")
        assert {number: signal.getsignal(number) for number in before} == before
        assert signal.set_wakeup_fd(old) == writer
        assert threading.active_count() == threads
    finally:
        signal.set_wakeup_fd(old)
        os.close(reader)
        os.close(writer)


def test_off_the_main_thread_nothing_is_installed():
    seen = []

    def work() -> None:
        with StopSignals() as stop:
            seen.append((signal.getsignal(signal.SIGTERM), stop.requested, stop.exit_code, stop.name))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(before, None, 0, "")]
