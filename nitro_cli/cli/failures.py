"""How a failure is told: nitro's own errors, exceptions of the experiment's code, and faults of nitro itself."""

from __future__ import annotations

import errno
import linecache
import sysconfig
import tempfile
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

from nitro_cli.errors import NitroError, Place, Problem

FAULT = 70
USER_CODE = 3
OUTPUT = 5
_REFUSALS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO}
_MAX_FRAMES = 8
_MAX_MESSAGE_LINES = 10
_NITRO = Path(__file__).resolve().parents[1]
_STDLIB = tuple({Path(sysconfig.get_paths()[name]).resolve() for name in ("stdlib", "platstdlib")})


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The frames that lie in the user's files, outermost first."""
    return [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_file(frame.filename)]


def _is_user_file(filename: str) -> bool:
    path = Path(filename)
    if filename.startswith("<") or {"site-packages", "dist-packages"} & set(path.parts):
        return False
    path = path.resolve()
    return not any(path.is_relative_to(folder) for folder in (_NITRO, *_STDLIB))


def relative(path: str | Path) -> str:
    """A path as the user would type it from here."""
    try:
        return str(Path(path).resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def describe(error: BaseException) -> tuple[int, str, dict[str, Any]]:
    """``(exit code, text, facts)`` of an error, as it is shown and as ``--json`` says it."""
    if isinstance(error, NitroError):
        return error.exit_code, _nitro_text(error), _nitro_facts(error)
    frames = user_frames(error)
    if frames:
        problem = _user_problem(error, frames)
        facts = {"kind": "exception", "type": type(error).__name__, "message": str(error)[:2000]}
        return USER_CODE, f"error: {problem.render()}", {**facts, **_place_facts(problem.place)}
    if machine := _machine_problem(error):
        return OUTPUT, f"error: {machine.render()}", {"kind": "machine", "message": machine.what}
    path = _write_report(error)
    name = type(error).__name__
    first = next(iter(str(error).splitlines()), "")
    text = f"fault: nitro itself failed with {name}: {first}\n   = please report it, with {path}"
    return FAULT, text, {"kind": "fault", "type": name, "message": str(error)[:2000], "report": path}


def _machine_problem(error: BaseException) -> Problem | None:
    """What the machine refused: disk space, a permission, device memory. None for anything else."""
    if isinstance(error, OSError) and error.errno in _REFUSALS:
        where = f": {relative(error.filename)}" if isinstance(error.filename, str) else ""
        return Problem(f"{error.strerror}{where}")
    if "RESOURCE_EXHAUSTED" in str(error) and type(error).__module__.startswith("jax"):
        note = "make batches smaller; accum = N then keeps the size of a step"
        return Problem(f"the device ran out of memory: {_short(str(error), 2)}", notes=(note,))
    return None


def _nitro_text(error: NitroError) -> str:
    problems = list(error.problems)
    frames = user_frames(error)
    if frames and len(problems) == 1 and problems[0].place is None:
        only = problems[0]
        problems = [Problem(only.what, _place(frames[-1]), only.label, only.notes, only.facts)]
    return "\n".join(f"error: {replace(problem, place=_shown(problem.place)).render()}" for problem in problems)


def _shown(place: Place | None) -> Place | None:
    """A place as the user would type it from here, with its line of code."""
    if place is None:
        return None
    text = place.text
    if text is None and place.line is not None and place.column is None:
        line = linecache.getline(str(place.path), place.line).strip()
        text = f"    {line}" if line else None
    return replace(place, path=relative(place.path), text=text)


def _nitro_facts(error: NitroError) -> dict[str, Any]:
    told = [
        {"message": problem.what, **_place_facts(problem.place), **problem.facts, **_hint(problem)}
        for problem in error.problems
    ]
    first = told[0] if told else {}
    return {"kind": error.kind, **first, **({"problems": told} if len(told) > 1 else {})}


def _hint(problem: Problem) -> dict[str, Any]:
    hints = [hint for hint in (problem.label, *problem.notes) if hint]
    return {"hints": hints} if hints else {}


def _place_facts(place: Place | None) -> dict[str, Any]:
    if place is None:
        return {}
    return {"file": relative(place.path), **({"line": place.line} if place.line else {})}


def _place(frame: traceback.FrameSummary) -> Place:
    text = frame.line or None
    return Place(relative(frame.filename), frame.lineno, None, text=f"    {text}" if text else None)


def _user_problem(error: BaseException, frames: list[traceback.FrameSummary]) -> Problem:
    last = frames[-1]
    notes = [f"in {last.name}"]
    outer = [
        f"called from {relative(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line or ''}"
        for frame in reversed(frames[:-1])
    ]
    told = list(dict.fromkeys(outer))[:_MAX_FRAMES]  # a recursion repeats itself
    notes += [f"{line} ({outer.count(line)} times)" if outer.count(line) > 1 else line for line in told]
    cause, seen = error.__cause__ or error.__context__, {id(error)}
    while cause is not None and id(cause) not in seen and len(seen) < 4:
        seen.add(id(cause))
        where = user_frames(cause)
        if where and not isinstance(cause, NitroError) and str(cause) != str(error):
            place = f"{relative(where[-1].filename)}:{where[-1].lineno}"
            notes.append(f"after {type(cause).__name__}: {_short(str(cause), 2)} at {place}")
        cause = cause.__cause__ or cause.__context__
    notes.append("for the whole traceback: --debug")
    what = f"{type(error).__name__}: {_short(str(error), _MAX_MESSAGE_LINES)}"
    if isinstance(error, SystemExit):
        what = f"the experiment called sys.exit({error.code!r})"
    return Problem(what, _place(last), notes=tuple(notes))


def _short(message: str, lines: int) -> str:
    kept = [line[:400] for line in message.splitlines()]
    if len(kept) > lines:
        kept = [*kept[:lines], f"... ({len(kept)} lines)"]
    return "\n".join(kept)


def _write_report(error: BaseException) -> str:
    with tempfile.NamedTemporaryFile("w", prefix="nitro-", suffix=".txt", delete=False, encoding="utf-8") as report:
        traceback.print_exception(error, file=report)
    return report.name
