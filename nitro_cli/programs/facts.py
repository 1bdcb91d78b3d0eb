"""Small answers that take a trace to find, kept in the store: how an optimizer rule has to be run, for example."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from nitro_cli.programs.fingerprint import Fingerprint
from nitro_cli.programs.key import Request
from nitro_cli.programs.store import open_store, settings


def remembered(name: str, code: Fingerprint, arguments: Mapping[str, str], answer: Callable[[], Any]) -> Any:
    """``answer()``, which is plain JSON and depends on ``code`` and ``arguments`` alone, or what it was before."""
    store = open_store()
    if store is None or settings.cold or settings.verify or code.refusals:
        return answer()
    key = Request(name, code, arguments, {}).digest
    known = store.fact(key)
    if known is not None:
        return json.loads(known)
    found = answer()
    store.keep_fact(key, json.dumps(found).encode())
    return found
