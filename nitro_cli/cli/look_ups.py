"""How a command uses the store of compiled programs: ``--cold``, ``--verify-cache``, and what the store has to say."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from nitro_cli.cli.console import Output
from nitro_cli.cli.session import Session
from nitro_cli.errors import Problem
from nitro_cli.programs.store import StoreWarning, settings


def with_store(run: Callable[[Session], int]) -> Callable[[Session], int]:
    """A command that runs programs, with its options on the store obeyed and warnings of the store told in words."""

    @functools.wraps(run)
    def command(session: Session) -> int:
        cold, verify = bool(session.value("cold")), bool(session.value("verify_cache"))
        if cold and verify:
            what = "--cold looks nothing up, so --verify-cache would have nothing to verify"
            session.parsed.problems.append(Problem(what, notes=("keep one of them",)))
        before = settings.cold, settings.verify, settings.found
        settings.cold, settings.verify, settings.found = cold, verify, 0
        try:
            with told(session.output):
                code = run(session)
            if verify:
                _say_verified(session.output, settings.found)
            return code
        finally:
            settings.cold, settings.verify, settings.found = before

    return command


def _say_verified(output: Output, count: int) -> None:
    programs = f"{count} programs were" if count != 1 else "1 program was"
    line = f"verified: {programs} in the store, and what the code traces to now is the same"
    line = line if count else "verified: nothing, for none of these programs was in the store"
    output.log(line)
    output.say(f"{output.stamp()}{line}")


@contextlib.contextmanager
def told(output: Output) -> Iterator[None]:
    """While active, a warning of the store is a line among the others, and not Python's two lines with a place."""
    with warnings.catch_warnings():
        warnings.simplefilter("always", StoreWarning)
        before, said = warnings.showwarning, set[str]()

        def show(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
            if not issubclass(category, StoreWarning):
                before(message, category, *place, **more)
            elif str(message) not in said:
                said.add(str(message))
                output.event("warning", {"message": str(message)})
                output.log(f"warning: {message}")
                output.warn(str(message))

        warnings.showwarning = show
        yield
