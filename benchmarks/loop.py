"""Nitro's loop against a hand-written one: the same loss, optimizer, data and number of steps, in fresh processes.

    python -m benchmarks.loop [--pairs 5] [--only null,digits,narrow,million,wide]

Prints a table of microseconds per step and their ratio. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def hand_written(name: str) -> dict:
    """jit, donation, no readback in the loop, one wait at its end: the fastest plain loop."""
    import jax
    import numpy as np
    import optax

    from benchmarks.workloads import WORKLOADS
    from nitro_cli import compile_view

    cls, epochs = WORKLOADS[name]
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
    opt = jax.jit(tx.init)(ps)

    def epoch(ps, st, opt, number):
        loader.set_epoch(number)
        for batch in loader:
            ps, st, opt, _ = step(ps, st, opt, batch)
        return ps, st, opt

    ps, st, opt = jax.block_until_ready(epoch(ps, st, opt, 0))
    first = magnitude(ps)
    seconds = []
    for number in range(1, epochs + 1):
        start = time.perf_counter()
        ps, st, opt = jax.block_until_ready(epoch(ps, st, opt, number))
        seconds.append(time.perf_counter() - start)
    return report(first, seconds, len(loader))


def nitro(name: str) -> dict:
    """The loop of ``nitro train``: every step logged, divergence checked, ready to stop at any step."""
    import jax

    from benchmarks.workloads import WORKLOADS
    from nitro_cli import Nitro
    from nitro_cli.loggers.jsonl import JsonLines
    from nitro_cli.run.loop import AutomaticLoop

    cls, epochs = WORKLOADS[name]
    handle = Nitro(cls())
    with tempfile.TemporaryDirectory() as folder, JsonLines(Path(folder) / "metrics.jsonl") as log:
        loop = AutomaticLoop(handle, log.write_many, lambda: False)
        seconds, first = [], 0.0
        for _ in range(epochs + 1):
            start = time.perf_counter()
            loop.run()
            jax.block_until_ready(handle.state.params)
            seconds.append(time.perf_counter() - start)
            first = first or magnitude(handle.parameters)
            handle.state.epoch, handle.state.position = handle.state.epoch + 1, 0
    return report(first, seconds[1:], len(handle.splits["train"]))


def magnitude(ps) -> float:
    """A number that tells whether two loops trained the same: after one epoch, before rounding differences grow."""
    import jax
    import numpy as np

    return float(sum(np.abs(leaf).sum(dtype=np.float64) for leaf in jax.tree.leaves(ps)))


def report(first: float, seconds: list[float], steps: int) -> dict:
    return {"us": 1e6 * statistics.median(seconds) / steps, "best": 1e6 * min(seconds) / steps, "sum": first}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--only", default="null,digits,narrow,million,wide")
    parser.add_argument("--child", nargs=2, metavar=("KIND", "NAME"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, name = args.child
        print(json.dumps({"hand": hand_written, "nitro": nitro}[kind](name)))
        return 0
    print(f"{'step':8} {'hand-written us':>16} {'nitro us':>10} {'ratio':>7} {'(pairs)':>15} {'overhead us':>12}")
    for name in args.only.split(","):
        runs = {"hand": [], "nitro": []}
        for pair in range(args.pairs):
            for kind in ("hand", "nitro") if pair % 2 == 0 else ("nitro", "hand"):
                runs[kind].append(child(kind, name))
        same = abs(runs["hand"][0]["sum"] - runs["nitro"][0]["sum"]) <= 1e-4 * abs(runs["hand"][0]["sum"])
        hand, ours = (statistics.median(r["us"] for r in runs[kind]) for kind in ("hand", "nitro"))
        ratios = [b["us"] / a["us"] for a, b in zip(runs["hand"], runs["nitro"], strict=True)]
        spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
        note = "" if same else "  PARAMETERS DIFFER"
        middle = statistics.median(ratios)
        print(f"{name:8} {hand:16.1f} {ours:10.1f} {middle:7.3f} {spread:>15} {ours - hand:12.1f}{note}", flush=True)
    return 0


def child(kind: str, name: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.loop", "--child", kind, name],
        cwd=ROOT,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{kind} {name} failed:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


if __name__ == "__main__":
    raise SystemExit(main())
