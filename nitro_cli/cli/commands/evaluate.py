"""``nitro evaluate``: as validate, on any split."""

from __future__ import annotations

from nitro_cli.cli.commands.validate import measure
from nitro_cli.cli.look_ups import with_store
from nitro_cli.cli.session import Session


@with_store
def run(session: Session) -> int:
    """Evaluate ``--split`` (test where it is not given)."""
    return measure(session, session.value("split", "test"))
