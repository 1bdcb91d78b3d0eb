"""How parameters should cross program boundaries: flat, tree or mix, at several numbers and sizes of leaves.

    python -m benchmarks.layout [--leaves 10,100,1000] [--sizes 64,4096,65536] [--seconds 1.5]

For each combination, in a fresh process: seconds to compile both training programs, microseconds per step, and peak
memory; beside them a hand-written fused step over the tree. The rule is adam; the model touches every number once, so
that what is measured is the layout. See benchmarks/README.md for how to read it.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KINDS = ("hand", "tree", "flat", "mix")
LIMIT = 20_000_000  # numbers in all: larger combinations are left out


def tree_of(leaves: int, size: int) -> dict:
    import numpy as np

    rng = np.random.default_rng(0)
    return {f"w{i:04d}": rng.normal(size=(size // 8, 8)).astype(np.float32) for i in range(leaves)}


def experiment(leaves: int, size: int, layout: str):
    import jax.numpy as jnp
    import numpy as np
    import optax

    from nitro_cli import ArrayLoader, Experiment

    class Leaves(Experiment):
        def build_data(self, dist):
            return {"train": ArrayLoader(x=np.ones((64, 1), np.float32), batch_size=1)}

        def build_model(self, rng):
            return None, tree_of(leaves, size), {}

        def forward(self, model, ps, st, *, x):
            return jnp.broadcast_to(sum((leaf * leaf).sum() for leaf in ps.values()), x.shape) * x, st

        def loss(self, outputs):
            return outputs.mean()

        def optimizer(self):
            return optax.adam

    return Leaves(parameter_layout=layout)


def measure_nitro(leaves: int, size: int, layout: str, seconds: float) -> dict:
    import jax

    from nitro_cli import Nitro
    from nitro_cli.loggers.jsonl import JsonLines
    from nitro_cli.programs.cache import cache_entries
    from nitro_cli.run.loop import AutomaticLoop

    handle = Nitro(experiment(leaves, size, layout))
    with tempfile.TemporaryDirectory() as folder, JsonLines(Path(folder) / "metrics.jsonl") as log:
        loop = AutomaticLoop(handle, log.write_many, lambda: False)

        def epoch():
            loop.run()
            jax.block_until_ready(handle.state.params)
            handle.state.epoch, handle.state.position = handle.state.epoch + 1, 0

        us = timed(epoch, len(handle.splits["train"]), seconds)
    built = [e.trace_seconds + e.lower_seconds + e.compile_seconds for e in cache_entries()]
    return {"compile": sum(built), "us": us, "buffers": len(handle.setup.recipe.plan.layout.buffers)}


def measure_hand(leaves: int, size: int, seconds: float) -> dict:
    import jax
    import optax

    e = experiment(leaves, size, "tree")
    tx = optax.adam(1e-3)

    def step(ps, opt, x):
        loss, grads = jax.value_and_grad(lambda p: e.loss(e.forward(None, p, {}, x=x)[0]))(ps)
        changes, opt = tx.update(grads, opt, ps)
        return optax.apply_updates(ps, changes), opt, loss

    state = {"ps": jax.device_put(tree_of(leaves, size))}
    state["opt"] = jax.jit(tx.init)(state["ps"])
    loader = e.build_data(None)["train"]
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(state["ps"], state["opt"], loader[0]["x"]).compile()
    built = time.perf_counter() - start

    def epoch():
        for batch in loader:
            state["ps"], state["opt"], _ = compiled(state["ps"], state["opt"], batch["x"])
        jax.block_until_ready(state["ps"])

    return {"compile": built, "us": timed(epoch, len(loader), seconds), "buffers": leaves}


def timed(epoch, steps: int, seconds: float) -> float:
    """Median microseconds per step over epochs, after one that warms up."""
    epoch()
    times, end = [], time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        epoch()
        times.append((time.perf_counter() - start) / steps * 1e6)
    return statistics.median(times)


def child(kind: str, leaves: int, size: int, seconds: float) -> dict:
    result = measure_hand(leaves, size, seconds) if kind == "hand" else measure_nitro(leaves, size, kind, seconds)
    return result | {"peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--leaves", default="10,100,1000")
    parser.add_argument("--sizes", default="64,4096,65536")
    parser.add_argument("--seconds", type=float, default=1.5)
    parser.add_argument("--child", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        kind, leaves, size = args.child
        print(json.dumps(child(kind, int(leaves), int(size), args.seconds)))
        return 0
    columns = ("leaves", "size", "kind", "buffers", "compile s", "us/step", "ratio", "peak MB")
    print("{:>6} {:>7} {:>5} {:>7} {:>9} {:>9} {:>6} {:>8}".format(*columns))
    for leaves in map(int, args.leaves.split(",")):
        for size in map(int, args.sizes.split(",")):
            if leaves * size > LIMIT:
                continue
            hand = 0.0
            for kind in KINDS:
                command = [sys.executable, "-m", "benchmarks.layout", "--seconds", str(args.seconds)]
                command += ["--child", kind, str(leaves), str(size)]
                done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise SystemExit(done.stderr)
                r = json.loads(done.stdout.splitlines()[-1])
                hand = r["us"] if kind == "hand" else hand
                print(
                    f"{leaves:6} {size:7} {kind:>5} {r['buffers']:7} {r['compile']:9.2f} {r['us']:9.1f} "
                    f"{r['us'] / hand:6.2f} {r['peak']:8.0f}",
                    flush=True,
                )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
