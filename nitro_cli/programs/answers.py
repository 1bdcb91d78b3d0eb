"""What nitro finds out about an optimizer rule by tracing it, kept in the store: whether it may run on joined leaves,
say. The next process asks again only where the rule's code, its numbers, the shapes or the surroundings are others.

An answer is a few words of JSON and never code. What content does not decide is not kept, as with programs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from nitro_cli.programs.environment import environment
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.store import CacheMismatch, open_store, settings


def kept_answer(
    experiment: Any, code: Mapping[str, Any], facts: Mapping[str, Any], find: Callable[[], dict[str, Any]]
) -> dict[str, Any]:
    """What ``find()`` gives, or gave for the same ``code``, ``facts`` and surroundings in an earlier process.

    ``code`` are roots of a fingerprint; ``facts`` and the answer are made of what JSON can hold. Raises whatever
    ``find`` raises, and CacheMismatch where an answer is to be verified and is another one now.
    """
    store = open_store()
    found = fingerprint(experiment, **code) if store is not None else None
    if store is None or found is None or found.refusals:
        return find()
    parts = (found.digest(), facts, environment(found.libraries))
    key = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    known = None if settings.cold else store.answer(key)
    if known is not None and not settings.verify:
        return known
    answer = find()
    if known not in (None, answer):
        store.drop_note("answers", key)
        raise CacheMismatch(
            f"what the store says of an optimizer rule is not what it is found to be now: {known}, not {answer}",
            "the answer is removed: the next run finds it anew",
            "please report it, with the code of the experiment",
            entry=key,
        )
    store.keep_answer(key, answer)
    return answer
