"""``nitro cache-stats --probe``: two fresh processes, one after the other, with a store of their own.

Whether an executable of one process loads in another depends on the machine, the backend and their versions, so it is
tried out and not derived.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from nitro_cli.cli.console import Output, paint
from nitro_cli.cli.render import rows_or_table
from nitro_cli.errors import AnswerNo

WAIT_SECONDS = 600
COLUMNS = ("program", "first process", "second process", "result")
_DID = {"compiled": "compiled", "linked": "traced, then loaded", "loaded": "loaded"}


def probe_store(out: Output) -> int:
    """0 where the second process loaded nitro's programs and got the same bits, else 1 with the reason. What jax's own
    cache did is told and not judged: nitro's programs do not need it."""
    with tempfile.TemporaryDirectory(prefix="nitro-probe-") as folder:
        first, second = (_process(Path(folder), name) for name in ("first", "second"))
    pairs = list(zip(first["rows"], second["rows"], strict=True))
    reasons = [reason for a, b in pairs[:-1] for reason in _reasons(a, b)]
    code = 1 if reasons else 0
    for a, b in pairs:
        same = a["result"] == b["result"]
        facts = {"program": b["program"], "first": a["did"], "second": b["did"], "equal": same, "said": b["said"]}
        out.event("probe", {**facts, "first_seconds": a["seconds"], "second_seconds": b["seconds"]})
    out.event("done", {"status": "finished", "exit_code": code, "device": second["device"], "reasons": reasons})
    for line in rows_or_table(out, COLUMNS, [_cells(a, b) for a, b in pairs], wide=True):
        out.result(line)
    if not reasons:
        out.result(paint(f"met: on {second['device']}, a process loads what another one compiled", "good"))
    for reason in reasons:
        out.result(paint(f"not met: on {second['device']}, {reason}", "error"))
    return code


def _process(folder: Path, name: str) -> dict[str, Any]:
    """What one process did. Raises AnswerNo where it did not come to its end."""
    file = folder / f"{name}.json"
    words = [sys.executable, "-m", "nitro_cli.programs.probe", str(file), str(folder / "jax-cache")]
    try:
        done = subprocess.run(
            words,
            env={**os.environ, "NITRO_CACHE_DIR": str(folder / "store")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=WAIT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise AnswerNo(f"the {name} process was not done after {WAIT_SECONDS} seconds") from None
    if done.returncode or not file.exists():
        how = f"signal {-done.returncode}" if done.returncode < 0 else f"exit code {done.returncode}"
        raise AnswerNo(f"the {name} process ended with {how}", *done.stderr.strip().splitlines()[-5:])
    return json.loads(file.read_text())


def _reasons(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    name = second["program"]
    if second["did"] != "loaded":
        said = "; ".join(dict.fromkeys([*first["said"], *second["said"]]))
        return [f"`{name}` was {_DID[second['did']]} in the second process as well" + (f": {said}" if said else "")]
    if first["result"] != second["result"]:
        return [f"`{name}` gave other bits when it was loaded"]
    return []


def _cells(first: dict[str, Any], second: dict[str, Any]) -> tuple[str, ...]:
    did = [f"{_DID[row['did']]} {row['seconds']:.2f}s" for row in (first, second)]
    return (second["program"], *did, "equal to the bit" if first["result"] == second["result"] else "differs")
