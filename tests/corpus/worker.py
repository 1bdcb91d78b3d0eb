"""Forks a process for each case that it is told of, and says what the case's programs are keyed by.

A line on stdin is a JSON object ``{"root": folder, "case": case, "oracle": bool}``; the answer is a line with a JSON
object: for each measurement (one, or two around what a run-time case does), for each program, its key, its refusals
and, with the oracle, a digest of its StableHLO. The libraries are imported once, the project's files in each child: no
child may find a backend of jax that its parent has started.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import pathlib
import re
import sys
import threading
import traceback
from typing import Any

import flax.linen
import flax.nnx  # noqa: F401
import jax
import optax  # noqa: F401

from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.key import Request

# Programs that are measured besides the one that a case is about, with the oracle: they show needless misses.
OTHERS = ("train_step", "eval_step", "nnx")


def key(program: Any) -> tuple[str, list[str]]:
    """What nitro keys such a program by. An experiment's fields that are marked as the host's do not count, as in
    nitro, where a hook's view of the experiment cannot read them."""
    owner, roots = None, {"hook": program.fn}
    if hasattr(program.fn, "__self__"):
        experiment = program.fn.__self__
        owner, roots = type(experiment), {"hook": program.fn.__func__}
        fields = {f.name: f.metadata.get("nitro") for f in experiment.__dataclass_fields__.values()}
        roots |= {name: getattr(experiment, name) for name, kind in fields.items() if kind != "host"}
    code = fingerprint(owner, **roots)
    leaves, structure = jax.tree.flatten(program.args)
    arguments = {str(index): f"{leaf} weak={leaf.weak_type}" for index, leaf in enumerate(leaves)}
    arguments["tree"] = re.sub(r"0x[0-9a-f]+", "", str(structure))
    settings = {"donate": str(program.donate), "static": str(program.static)}
    return Request("corpus", code, arguments, settings).digest, list(code.refusals)


def graph(program: Any) -> str:
    """The oracle: digest of the StableHLO. jax's own caches would keep what was read the first time."""
    jax.clear_caches()
    try:
        text = jax.jit(lambda *a: program.fn(*a), donate_argnums=program.donate).lower(*program.args).as_text()
    except Exception as error:  # a case may break the program; then it has no graph
        return f"error {type(error).__name__}: {str(error)[:120]}"
    return hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", text).encode()).hexdigest()


def measure(programs: dict[str, Any], names: list[str], in_thread: bool, oracle: bool) -> dict[str, Any]:
    found = {}
    for name in names:
        box: list[Any] = []

        def look(program: Any = programs[name], box: list[Any] = box) -> None:
            box.append(key(program))

        if in_thread:
            thread = threading.Thread(target=look)
            thread.start()
            thread.join()
        else:
            look()
        digest, refusals = box[0]
        found[name] = {"key": digest, "refusals": refusals, "graph": graph(programs[name]) if oracle else ""}
    return found


def run(root: str, case: dict[str, Any], oracle: bool) -> list[dict[str, Any]]:
    sys.path.insert(0, root)
    os.environ.update(case.get("env", {}))
    names = [case["program"], *(OTHERS if oracle else ())] if case["program"] != "*" else None
    space: dict[str, Any] = {"importlib": importlib, "sys": sys, "jax": jax, "ROOT": pathlib.Path(root)}
    import entry  # pyright: ignore
    import jax.numpy as jnp

    space |= {"jnp": jnp, "entry": entry, "exp": sys.modules["exp"]}
    for module in ("config", "consts", "deep", "dynamic", "losses", "ops", "registry"):
        importlib.import_module(f"exp.{module}")
    if "prepare" in case:
        exec(case["prepare"], space)
    programs = space["programs"] = entry.build(names)
    names = list(dict.fromkeys(names)) if names else list(programs)
    found = [measure(programs, names, case.get("thread", False), oracle)]
    if case["kind"] == "runtime":
        exec(case["exec"], space)
        if case.get("rebuild"):
            programs = entry.build(names)
        found.append(measure(programs, names, case.get("thread", False), oracle))
    return found


def answer(line: str) -> str:
    asked = json.loads(line)
    try:
        return json.dumps(run(asked["root"], asked["case"], asked["oracle"]))
    except BaseException:
        return json.dumps({"error": traceback.format_exc()[-1500:]})


def serve() -> None:
    real = os.dup(1)
    os.dup2(2, 1)  # what the programs print is no answer
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            os.write(real, (answer(line) + "\n").encode())
            os._exit(0)
        os.waitpid(child, 0)


if __name__ == "__main__":
    serve()
