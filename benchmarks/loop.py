"""Nitro's loop beside a hand-written one: the same loss, optimizer, data and number of steps, epoch by epoch in turn.

    python -m benchmarks.loop [--processes 3] [--only null,digits,narrow,million,wide]

Prints a table of microseconds per step and their ratio. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def hand_written(name: str) -> tuple[Callable[[int], None], Callable[[], float]]:
    """jit, donation, no readback in the loop, one wait at its end: the fastest plain loop.

    Returns what trains the epoch of a number, and what gives a number that tells the parameters.
    """
    import jax
    import numpy as np
    import optax

    from benchmarks.workloads import WORKLOADS
    from nitro_cli import compile_view

    cls, _ = WORKLOADS[name]
    e = cls()
    loader = e.build_data(None)["train"]
    model, ps, st = e.build_model(jax.random.key(e.seed))
    view = compile_view(e, {"smoothing": np.float32(e.smoothing)} if name == "digits" else {})
    label = "label" if name == "digits" else "y"
    tx = optax.radam(e.learning_rate)

    def step(ps, st, opt, batch):
        def objective(ps):
            inputs = {k: v for k, v in batch.items() if k != label}
            outputs, st_new = cls.forward(view, model, ps, st, **inputs)
            metrics = e.train_metrics(outputs, label=batch[label]) if name == "digits" else {}
            return cls.loss(view, outputs, **{label: batch[label]}), (st_new, metrics)

        (loss, (st, metrics)), grads = jax.value_and_grad(objective, has_aux=True)(ps)
        updates, opt = tx.update(grads, opt, ps)
        return optax.apply_updates(ps, updates), st, opt, (loss, metrics)

    step = jax.jit(step, donate_argnums=(0, 1, 2))
    held = [ps, st, jax.jit(tx.init)(ps)]

    def epoch(number: int) -> None:
        loader.set_epoch(number)
        ps, st, opt = held
        for batch in loader:
            ps, st, opt, _ = step(ps, st, opt, batch)
        held[:] = jax.block_until_ready([ps, st, opt])

    return epoch, lambda: magnitude(held[0])


@contextlib.contextmanager
def nitro(name: str) -> Iterator[tuple[Callable[[int], None], Callable[[], float]]]:
    """The loop of ``nitro train``: every step logged, divergence checked, ready to stop at any step."""
    import jax

    from benchmarks.workloads import WORKLOADS
    from nitro_cli import Nitro
    from nitro_cli.loggers.jsonl import JsonLines
    from nitro_cli.run.loop import AutomaticLoop

    handle = Nitro(WORKLOADS[name][0]())
    with tempfile.TemporaryDirectory() as folder, JsonLines(Path(folder) / "metrics.jsonl") as log:
        loop = AutomaticLoop(handle, log.write_many, lambda: False)

        def epoch(number: int) -> None:
            handle.state.epoch, handle.state.position = number, 0
            loop.run()
            jax.block_until_ready(handle.state.params)

        yield epoch, lambda: magnitude(handle.parameters)


def magnitude(ps) -> float:
    """A number that tells whether two loops trained the same: after one epoch, before rounding differences grow."""
    import jax
    import numpy as np

    return float(sum(np.abs(leaf).sum(dtype=np.float64) for leaf in jax.tree.leaves(ps)))


def in_turn(name: str) -> dict:
    """Both loops in this process, which goes first alternating; the first epoch of each compiles and is left out."""
    from benchmarks.workloads import WORKLOADS

    cls, epochs = WORKLOADS[name]
    steps = len(cls().build_data(None)["train"])
    with nitro(name) as ours:
        both = {"hand": hand_written(name), "nitro": ours}
        sums, seconds = {}, {kind: [] for kind in both}
        for kind, (epoch, parameters) in both.items():
            epoch(0)
            sums[kind] = parameters()
        for number in range(1, epochs + 1):
            for kind in both if number % 2 else reversed(both):
                start = time.perf_counter()
                both[kind][0](number)
                seconds[kind].append((time.perf_counter() - start) / steps)
    return {"seconds": seconds, "same": abs(sums["hand"] - sums["nitro"]) <= 1e-4 * abs(sums["hand"])}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=3)
    parser.add_argument("--only", default="null,digits,narrow,million,wide")
    parser.add_argument("--child", metavar="NAME", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(in_turn(args.child)))
        return 0
    print(f"{'step':8} {'hand-written us':>16} {'nitro us':>10} {'ratio':>7} {'(processes)':>15} {'overhead us':>12}")
    for name in args.only.split(","):
        runs = [child(name) for _ in range(args.processes)]
        seconds = {kind: [s for run in runs for s in run["seconds"][kind]] for kind in ("hand", "nitro")}
        hand, ours = (1e6 * statistics.median(values) for values in seconds.values())
        middles = [statistics.median(ratios(run)) for run in runs]
        middle = statistics.median(ratio for run in runs for ratio in ratios(run))
        spread = f"{min(middles):.3f}..{max(middles):.3f}"
        note = "" if all(run["same"] for run in runs) else "  PARAMETERS DIFFER"
        print(f"{name:8} {hand:16.1f} {ours:10.1f} {middle:7.3f} {spread:>15} {ours - hand:12.1f}{note}", flush=True)
    return 0


def ratios(run: dict) -> list[float]:
    """Nitro's epochs over the hand-written ones beside them."""
    return [ours / hand for hand, ours in zip(run["seconds"]["hand"], run["seconds"]["nitro"], strict=True)]


def child(name: str) -> dict:
    words = [sys.executable, "-m", "benchmarks.loop", "--child", name]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
