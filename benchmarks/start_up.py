"""How long until the first step is over: ``nitro train`` beside a script by hand, both in new processes.

    python -m benchmarks.start_up [--pairs 7] [--only cnn,transformer,mlp] [--cold]

Prints seconds from the start of the process to the end of its first optimizer step, and their ratio. See
benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
BY_HAND = ROOT / "benchmarks" / "by_hand"


class Workload(NamedTuple):
    """The file of an experiment, and the script that does the same by hand."""

    experiment: Path
    script: Path


class Start(NamedTuple):
    """One process: seconds and processor seconds to the end of its first step, the number of its parameters, and the
    programs that it compiled until then."""

    seconds: float
    cpu: float
    parameters: int
    compiled: int


WORKLOADS = {
    "cnn": Workload(ROOT / "experiments" / "digits_cnn.py", BY_HAND / "digits_cnn.py"),
    "transformer": Workload(ROOT / "benchmarks" / "transformer.py", BY_HAND / "transformer.py"),
    "mlp": Workload(ROOT / "experiments" / "myexp.py", BY_HAND / "digits_mlp.py"),
}


class Bench:
    """The folders of one workload: a project with the experiment, and a cache for each side."""

    def __init__(self, workload: Workload, folder: Path, cold: bool) -> None:
        self.workload, self.cold = workload, cold
        self.project, self.cache, self.jax_cache = folder / "project", folder / "cache", folder / "jax"
        (self.project / "experiments").mkdir(parents=True)
        shutil.copy(workload.experiment, self.project / "experiments")

    def nitro(self) -> Start:
        """``nitro train`` in a project of its own. A cold start finds no cache, and pays for leaving one behind."""
        if self.cold:
            shutil.rmtree(self.cache, ignore_errors=True)
        shutil.rmtree(self.project / "runs", ignore_errors=True)
        name = self.workload.experiment.stem
        words = ["-m", "nitro_cli", "train", name, "--max-epochs", "1", "--json"]
        *times, lines = _timed(words, self.project, {"NITRO_CACHE_DIR": str(self.cache)}, '"event": "first_step"')
        events = [json.loads(line) for line in lines]
        parameters = next(event["model"]["parameters"] for event in events if event["event"] == "binding")
        return Start(*times, parameters, sum(event.get("origin") == "compiled" for event in events))

    def by_hand(self) -> Start:
        """The script, with jax's own cache told to keep everything."""
        settings = {
            "JAX_COMPILATION_CACHE_DIR": str(self.jax_cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        *times, lines = _timed([str(self.workload.script)], self.project, {} if self.cold else settings, "first_step")
        return Start(*times, int(lines[-1].split()[1]), 0)


def _timed(words: list[str], cwd: Path, settings: dict[str, str], mark: str) -> tuple[float, float, list[str]]:
    """Run Python: seconds until a line of its stdout holds ``mark``, and the lines until then. Waits for its end."""
    foreign = ("JAX_", "XLA_", "NITRO_", "PYTHON")  # without .pyc files nitro would compile all of itself each time
    kept = {
        name: value for name, value in os.environ.items() if name == "JAX_PLATFORMS" or not name.startswith(foreign)
    }
    env = {**kept, "PYTHONPATH": str(ROOT), **settings}
    lines: list[str] = []
    seconds = cpu = None
    with tempfile.TemporaryFile("w+") as errors:
        start = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, *words], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=errors, text=True
        )
        assert process.stdout is not None
        for line in process.stdout:
            if seconds is None:
                lines.append(line)
            if seconds is None and mark in line:
                seconds, cpu = time.perf_counter() - start, _cpu_seconds(process.pid)
        if process.wait() or seconds is None or cpu is None:
            errors.seek(0)
            raise SystemExit(f"{' '.join(words)} failed:\n{errors.read()}")
    return seconds, cpu, lines


def _cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, which other processes disturb less; nan where there is no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return math.nan
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(name: str, pairs: int, cold: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(WORKLOADS[name], Path(folder), cold)
        kinds = {"hand": bench.by_hand, "nitro": bench.nitro}
        first = {kind: run() for kind, run in kinds.items()}  # fills caches, and Python's own files
        runs: dict[str, list[Start]] = {kind: [] for kind in kinds}
        for pair in range(pairs):
            for kind in kinds if pair % 2 == 0 else reversed(kinds):
                runs[kind].append(kinds[kind]())
    hand, ours = (statistics.median(run.seconds for run in runs[kind]) for kind in kinds)
    both = list(zip(runs["hand"], runs["nitro"], strict=True))
    ratios = [ours.seconds / hand.seconds for hand, ours in both]
    cpu = statistics.median(ours.cpu / hand.cpu for hand, ours in both)
    spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
    note = "" if first["hand"].parameters == first["nitro"].parameters else "  PARAMETERS DIFFER"
    compiled = max(run.compiled for run in runs["nitro"])
    numbers = f"{hand:14.3f} {ours:8.3f} {statistics.median(ratios):6.2f} {spread:>11} {cpu:10.2f} {compiled:9}"
    print(f"{name:12} {numbers}{note}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--only", default="cnn,transformer,mlp")
    parser.add_argument("--cold", action="store_true", help="no cache on either side")
    args = parser.parse_args()
    heads = f"{'hand-written s':>14} {'nitro s':>8} {'ratio':>6} {'(pairs)':>11} {'cpu ratio':>10} {'compiled':>9}"
    print(f"{'model':12} {heads}")
    for name in args.only.split(","):
        compare(name, args.pairs, args.cold)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
