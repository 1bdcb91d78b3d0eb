"""Fresh interpreters at the price of a fork.

``Forks`` starts a process that has imported jax, flax, optax and nitro, and has not started any backend of jax. It
forks a child for each job, which goes to a project, imports its experiment and trains it, as a new process would.

A job is a dict: ``project``, ``store`` and ``runs`` (folders), ``module`` (``experiments.base``, unless another is
given) and ``experiment`` (a class of it), ``preset``, ``fields``, ``environment``, ``before`` and ``after`` (code that
runs before and after the import of the experiment), ``verify``, ``resume`` (a run). The answer has ``programs`` (what
nitro says of each), ``events`` (traces and compiles of nitro's programs, as jax tells them), ``warnings``, ``history``,
``parameters``, ``run``, and ``error`` where the child failed.

A job with ``swarm``, a number, is done by so many children, ``width`` at a time, of which those in ``killed`` get a
SIGKILL after so many seconds. The answer then has ``answers``, one for each child, None for those that were killed.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROJECT = Path(__file__).resolve().with_name("project")
SECONDS = 150  # after which a child has hung; a busy machine stands still for many seconds
CHEAP = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
PROGRAMS = ("gradient", "update", "step", "evaluation", "metrics", "loss", "initialise", "optimizer_init")
IMPORTED = (
    *("flax.linen", "flax.nnx", "jax._src.interpreters.mlir", "optax", "orbax.checkpoint", "filelock"),
    *("nitro_cli.run.nitro", "nitro_cli.run.checkpoint_files", "nitro_cli.programs.build"),
)
EVENTS = ("/jax/core/compile/jaxpr_trace_duration", "/jax/core/compile/backend_compile_duration")


class ChildError(Exception):
    """What a child raised, as text."""


class Forks:
    """The server, seen from a test."""

    def __init__(self) -> None:
        command = [sys.executable, __file__]
        # One thread until the fork: a thread of a linear algebra library would not live on in the child.
        environment = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "XLA_FLAGS": CHEAP}
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
        )

    def run(self, **job: Any) -> dict[str, Any]:
        """The answer of one child. Fails where the child died."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps({name: _plain(value) for name, value in job.items()}) + "\n")
        self._server.stdin.flush()
        answer = json.loads(self._server.stdout.readline())
        if "error" in answer:
            raise ChildError(answer["error"])
        return answer

    def close(self) -> None:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.close()
        self._server.wait(SECONDS)
        self._server.stdout.close()


def copied(folder: Path) -> Path:
    """The project, in a folder of its own."""
    return shutil.copytree(PROJECT, folder / "project", ignore=shutil.ignore_patterns("__pycache__", "runs"))


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


# ---- in the server -------------------------------------------------------------------------------------------------


def serve() -> None:
    _import_all()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread was started before the fork"
    # A collection in a child would touch, and so copy, all that it shares with this process.
    gc.collect()
    gc.freeze()
    gc.disable()
    for line in sys.stdin:
        job = json.loads(line)
        print(json.dumps(_swarm(job) if "swarm" in job else _forked(job)), flush=True)


def _import_all() -> None:
    for name in IMPORTED:
        importlib.import_module(name)


def _forked(job: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryFile("w+") as file:
        child = _start(job, file)
        _, status = os.waitpid(child, 0)
        return _answer(file) or {"error": f"the child ended with status {status}"}


def _start(job: dict[str, Any], file: Any) -> int:
    child = os.fork()
    if child == 0:
        signal.alarm(SECONDS)
        try:
            answer = work(job)
        except BaseException:
            answer = {"error": traceback.format_exc()}
        json.dump(answer, file)
        file.flush()
        os._exit(0)
    return child


def _answer(file: Any) -> Any:
    file.seek(0)
    text = file.read()
    return json.loads(text) if text else None


def _swarm(job: dict[str, Any]) -> dict[str, Any]:
    files = [tempfile.TemporaryFile("w+") for _ in range(job["swarm"])]  # noqa: SIM115 - closed below
    killed = {int(index): seconds for index, seconds in job["killed"].items()}
    running: dict[int, float] = {}
    waiting = list(range(job["swarm"]))
    while waiting or running:
        while waiting and len(running) < job["width"]:
            index = waiting.pop(0)
            running[_start(job, files[index])] = time.monotonic() + killed.get(index, SECONDS)
        for child, end in list(running.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del running[child]
            elif time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    answers = [_answer(file) for file in files]
    for file in files:
        file.close()
    return {"answers": answers}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """Train and validate the job's experiment in this process."""
    sys.dont_write_bytecode = True
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.chdir(job["project"])
    sys.path.insert(0, job["project"])
    os.environ["NITRO_CACHE_DIR"] = job["store"]
    os.environ.update(job.get("environment", {}))
    exec(job.get("before", ""), {})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        answer = _trained(job)
    return answer | {"warnings": [str(warning.message) for warning in caught if _concerns_nitro(warning)]}


def _concerns_nitro(warning: Any) -> bool:
    return "nitro" in type(warning.message).__module__


def _trained(job: dict[str, Any]) -> dict[str, Any]:
    import jax

    from nitro_cli import Nitro
    from nitro_cli.programs.cache import cache_entries
    from nitro_cli.programs.store import settings

    events: list[str] = []

    def note(event: str, seconds: float, **facts: Any) -> None:
        if event in EVENTS and any(f"nitro_{name}" in str(facts.get("fun_name")) for name in PROGRAMS):
            events.append(f"{event.rpartition('/')[2]} {facts['fun_name']}")

    jax.monitoring.register_event_duration_secs_listener(note)
    settings.verify = job.get("verify", False)
    module = importlib.import_module(job.get("module", "experiments.base"))
    exec(job.get("after", ""), {"base": module})
    E = getattr(module, job["experiment"])
    # Which numbers come out does not matter here, so they may be any.
    options: dict[str, Any] = {"check_divergence": False}
    options |= {"resume": job["resume"]} if "resume" in job else {"run_dir": tempfile.mkdtemp(dir=job["runs"])}
    options |= _fields(module, job.get("fields", {}))
    preset = job.get("preset")
    handle = Nitro(E(), **options) if preset is None else Nitro.from_preset(E, preset, **options)
    handle.train()
    handle.validate()
    fields_of = ("program", "origin", "why", "kept_out", "entry")
    return {
        "programs": [{name: getattr(entry, name) for name in fields_of} for entry in cache_entries()],
        "events": events,
        "run": str(handle.run.path) if handle.run is not None else None,
        "history": handle.history,
        "parameters": {name: array.tolist() for name, array in handle.snapshot()["ps"].items()},
    }


def _fields(module: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Values as JSON gives them; ``{"name": ...}`` is an expression in the experiment's module."""
    return {name: eval(v["name"], vars(module)) if isinstance(v, dict) else v for name, v in given.items()}


if __name__ == "__main__":
    serve()
