"""Changes to a small project, and what a program's key must make of each.

    python tests/corpus/run.py [--only id,id] [--oracle] [--jobs 2] [--out results.json]

``base/`` is the project, a line of ``cases.jsonl`` a change to it: an edit of a file, another environment, or code that
runs between two measurements. The verdict of a case says what may happen:

    miss      the graph changes: an equal key is a WRONG HIT
    hit       the graph does not change: another key, or a refusal, is imprecise
    may-miss  the graph does not change: both are accepted
    refuse    not decidable from content: the key must differ or the program must be refused

The oracle (slow) traces each program and compares the graphs, so that the verdicts are tested too.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
# nitro's view of an experiment raises where a hook reads such a field, so no program can come to depend on it.
IMPOSSIBLE = {"host-field-read-by-hook"}
BASE = {"id": "base", "kind": "none", "program": "*"}


def cases() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (HERE / "cases.jsonl").read_text().splitlines()]


def lay_down(case: Mapping[str, Any], folder: Path) -> Path:
    """The project with the change of ``case`` made, in ``folder`` or where the case wants it below."""
    root = folder / case.get("where", "project")
    shutil.copytree(HERE / "base", root, ignore=shutil.ignore_patterns("__pycache__"))
    if case["kind"] == "edit":
        path = root / case["file"]
        text = path.read_text()
        if case.get("transform") == "crlf":
            path.write_bytes(text.replace("\n", "\r\n").encode())
        elif case.get("transform") == "jnp->J":
            path.write_text(text.replace("as jnp", "as J").replace("jnp.", "J."))
        else:
            assert text.count(case["before"]) == 1, (case["id"], text.count(case["before"]))
            path.write_text(text.replace(case["before"], case.get("after", "")))
    return root


class Worker:
    """A process that forks one for each case; a case that must set what the interpreter or jax reads when it starts
    gets a process of its own."""

    def __init__(self) -> None:
        self._server: Any = None

    def run(self, case: Mapping[str, Any], oracle: bool = False) -> Any:
        with tempfile.TemporaryDirectory() as folder:
            root = lay_down(case, Path(folder))
            asked = json.dumps({"root": str(root), "case": case, "oracle": oracle}) + "\n"
            early = {n: v for n, v in case.get("env", {}).items() if n.startswith(("JAX_", "PYTHON"))}
            if early:
                process = _start(early)
                out, _ = process.communicate(asked)
                return json.loads(out.splitlines()[0])
            self._server = self._server or _start({})
            self._server.stdin.write(asked)
            self._server.stdin.flush()
            return json.loads(self._server.stdout.readline())

    def close(self) -> None:
        if self._server is not None:
            self._server.communicate()
            self._server = None


def _start(env: Mapping[str, str]) -> Any:
    path = os.pathsep.join([str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    set_here = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONWARNINGS": "ignore", "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, str(HERE / "worker.py")],
        env={**os.environ, **set_here, **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def judge(case: Mapping[str, Any], base: Any, got: Any) -> dict[str, Any]:
    """``result`` is ok, imprecise, WRONG HIT or ERROR; ``outcome`` is hit, miss or refused."""
    if "error" in got:
        return {"result": "ERROR", "outcome": "error", "detail": got["error"]}
    before, after = got if case["kind"] == "runtime" else (base[0], got[0])
    x, y = before[case["program"]], after[case["program"]]
    refused = x["refusals"] or y["refusals"]
    outcome = "refused" if refused else "hit" if x["key"] == y["key"] else "miss"
    found = {"result": "ok", "outcome": outcome, "refusals": refused}
    changed = x["graph"] != y["graph"]
    if outcome == "hit" and (case["verdict"] in ("miss", "refuse") or changed):
        found["result"] = "WRONG HIT"
    elif case["verdict"] == "hit" and outcome != "hit":
        found["result"] = "imprecise"
    unexpected = not changed if case["verdict"] == "miss" else changed and case["verdict"] != "refuse"
    if case.get("oracle") is None and x["graph"] and unexpected:
        found["verdict"] = f"the graph {'changed' if changed else 'did not change'}: is the verdict right?"
    found["others"] = {
        name: _other(before[name], after[name]) for name in before if name != case["program"] and name in after
    }
    return found


def _other(x: Any, y: Any) -> str:
    if x["refusals"] or y["refusals"]:
        return "refused"
    same, changed = x["key"] == y["key"], x["graph"] != y["graph"]
    return ("WRONG HIT" if changed else "hit") if same else ("miss" if changed else "needless miss")


def run_all(todo: list[dict[str, Any]], oracle: bool, jobs: int) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    local = threading.local()
    workers: list[Worker] = []

    def one(case: dict[str, Any]) -> Any:
        if not hasattr(local, "worker"):
            local.worker = Worker()
            workers.append(local.worker)
        return local.worker.run(case, oracle)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        base = pool.submit(one, BASE).result()
        if "error" in base:
            raise SystemExit(base["error"])
        for case, got in zip(todo, pool.map(one, todo), strict=True):
            yield case, judge(case, base, got)
    for worker in workers:
        worker.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--oracle", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    only = set(filter(None, options.only.split(",")))
    results = {}
    for case, found in run_all([c for c in cases() if not only or c["id"] in only], options.oracle, options.jobs):
        results[case["id"]] = {"wanted": case["verdict"], **found}
        if only or found["result"] != "ok" or "verdict" in found:
            print(f"{case['id']:34s} {case['verdict']:9s} {found['result']:10s} {found['outcome']:8s}", end=" ")
            print(found.get("verdict", ""), *found.get("refusals", ())[:2], found.get("detail", ""), flush=True)
    table = collections.Counter((each["wanted"], each["outcome"]) for each in results.values())
    for (wanted, outcome), count in sorted(table.items()):
        print(f"{wanted:9s} {outcome:8s} {count}")
    others = collections.Counter(o for each in results.values() for o in each.get("others", {}).values())
    if options.oracle:
        print("other programs:", dict(others))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    bad = [i for i, each in results.items() if each["result"] in ("WRONG HIT", "ERROR") and i not in IMPOSSIBLE]
    print(f"{len(results) - len(bad)} right, {len(bad)} wrong: {bad}")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
