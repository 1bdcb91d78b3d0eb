"""What a program's code consists of: the functions it runs, the constants and captured values they read.

``fingerprint(forward=..., model=...)`` walks from its roots through user code and returns named entries, one per
function, constant or captured value, so that two fingerprints can be compared line by line and a difference can be put
into words. It reads what is loaded, not what lies on disk, and leaves out comments, docstrings, line numbers and paths.
Entries say the same in every process; what could not be decided so is in ``refusals``.

This is the seam for program identity: nothing else in nitro looks at code.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nitro_cli.programs.atoms import atom
from nitro_cli.programs.libraries import is_user_code
from nitro_cli.programs.literals import place_text
from nitro_cli.programs.recheck import Watch
from nitro_cli.programs.walk import Walk

__all__ = ["Fingerprint", "Recheck", "atom", "fingerprint", "is_user_code"]


@dataclass(frozen=True)
class Fingerprint:
    """``entries`` maps a name to a digest or a short value, ``functions`` names of functions to their code.

    ``refusals`` say, for people, why another process must not take its program for this one: there is something that
    content does not decide. ``codes`` are all code objects of the user's that were walked, ``libraries`` the packages
    whose content counts besides (see ``installed.library_digest``). ``again`` takes the same fingerprint anew.
    """

    entries: dict[str, str]
    functions: dict[str, types.CodeType] = field(default_factory=dict)
    refusals: tuple[str, ...] = ()
    codes: frozenset[types.CodeType] = frozenset()
    libraries: frozenset[str] = frozenset()
    again: Callable[[], Fingerprint] | None = field(default=None, compare=False, repr=False)

    @functools.cached_property
    def places(self) -> dict[str, str]:
        """Where functions stand, ``file.py:12``, with their constants: see ``literals``."""
        return {name: place_text(code) for name, code in self.functions.items()}

    def digest(self) -> str:
        text = "\n".join(f"{name} = {value}" for name, value in sorted(self.entries.items()))
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def fingerprint(owner: Any = None, /, **roots: Any) -> Fingerprint:
    """Walk from ``roots``. ``owner`` is the experiment or its class: methods and class constants that code names on it
    are looked up there. Of an experiment, GraphConst fields that code names count as far as they hold code; their
    values are for ``Request.fields``, since only the trace shows which of them are read."""
    return _walked(owner, roots)[0]


def _walked(owner: Any, roots: dict[str, Any]) -> tuple[Fingerprint, Watch]:
    walk = Walk(owner)
    walk.run(roots)
    found = Fingerprint(
        walk.entries,
        walk.places,
        tuple(walk.refusals),
        frozenset(walk.codes),
        frozenset(walk.libraries),
        functools.partial(fingerprint, owner, **roots),
    )
    return found, walk.watch


class Recheck:
    """A fingerprint that is taken again only when something it was taken from is no longer the same object."""

    def __init__(self, owner: Any = None, /, **roots: Any) -> None:
        self._owner = owner
        self._roots = roots
        self.fingerprint, self._watch = _walked(owner, roots)

    def unchanged(self) -> bool:
        """Whether the fingerprint is still that of ``self.fingerprint``. Where it is not, that is the new one from
        then on."""
        if self._watch.holds():
            return True
        before = self.fingerprint
        self.fingerprint, self._watch = _walked(self._owner, self._roots)
        return before.entries == self.fingerprint.entries
