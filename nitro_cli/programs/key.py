"""What a program depends on.

A ``Request`` lists everything that decides which program is meant: its code, the shapes and types of its arguments,
static settings, GraphConst values, and the environment. GraphConst values are special: only those that the trace read
count, and which those are is known after the first trace. So the key leaves them out, and an entry under the key
matches when the fields that its trace read have the same values now.

Never in it: Device and Host values, the seed, the learning rate, the clip threshold, ``max_epochs``.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from nitro_cli.programs.environment import environment
from nitro_cli.programs.fingerprint import Fingerprint


@dataclass(frozen=True)
class Request:
    """A program that is wanted. All values are texts that decide by content; ``fields`` are the GraphConst values.

    ``experiment`` is the name under which the program is kept and looked for; it decides nothing.
    """

    program: str
    code: Fingerprint
    arguments: Mapping[str, str]
    settings: Mapping[str, str]
    fields: Mapping[str, str] = field(default_factory=dict)
    experiment: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.environment:
            object.__setattr__(self, "environment", environment(self.code.libraries))

    @functools.cached_property
    def digest(self) -> str:
        lines = [self.program, self.code.digest()]
        for part in (self.arguments, self.settings, self.environment):
            lines.extend(f"{name} = {value}" for name, value in part.items())
            lines.append("")
        return hashlib.sha256("\n".join(lines).encode()).hexdigest()

    def reads_same(self, other: Request, reads: Iterable[str]) -> bool:
        return all(self.fields.get(name) == other.fields.get(name) for name in reads)
