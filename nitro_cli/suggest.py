"""The nearest right thing for a name that does not exist."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

# Names people bring from other tools, and the field that means the same here.
ALIASES = {
    "lr": "learning_rate",
    "eta": "learning_rate",
    "bs": "batch_size",
    "batch": "batch_size",
    "epochs": "max_epochs",
    "n_epochs": "max_epochs",
    "num_epochs": "max_epochs",
    "clip": "gradient_clip_norm",
    "grad_clip": "gradient_clip_norm",
    "clip_norm": "gradient_clip_norm",
    "wd": "weight_decay",
    "lambda": "weight_decay",
    "grad_accum": "accum",
    "accumulate": "accum",
    "accumulate_grad_batches": "accum",
    "gradient_accumulation_steps": "accum",
    "random_seed": "seed",
    "out_dir": "run_dir",
    "output_dir": "run_dir",
    "log_dir": "run_dir",
}


def canonical(name: str) -> str:
    """A name as a field is spelled: ``--Max-Epochs`` becomes ``max_epochs``."""
    return name.lstrip("-").replace("-", "_").lower()


def nearest(name: str, known: Iterable[str], limit: int = 3, cutoff: float = 0.6) -> list[str]:
    """Known names that ``name`` may have meant, best first.

    Looks at, in turn: the same letters in another case or with other dashes, what other tools call it, the last part of
    a dotted name, spelling distance, and known names that contain every word of ``name``.
    """
    options = list(known)
    by_canonical = {canonical(option): option for option in options}
    wanted = canonical(name)
    found: list[str] = []

    def add(candidates: Iterable[str]) -> None:
        found.extend(c for c in candidates if c in by_canonical and c not in found)

    for part in (wanted, wanted.rsplit(".", 1)[-1]):
        add([part])
        add([ALIASES.get(part, "")])
        add(difflib.get_close_matches(part, list(by_canonical), n=limit, cutoff=cutoff))
    words = [word for word in wanted.replace(".", "_").split("_") if len(word) > 1]
    if words:
        add(option for option in by_canonical if all(word in option.split("_") for word in words))
    return [by_canonical[name] for name in found[:limit]]


def did_you_mean(name: str, known: Iterable[str], form: str = "'{}'") -> str:
    """``did you mean 'max_epochs'?`` for the nearest known name, or an empty string where none is near."""
    close = nearest(name, known, limit=1)
    return f"did you mean {form.format(close[0])}?" if close else ""


def listed(names: Sequence[str], limit: int = 8) -> str:
    """``a, b, c, ... (12 in all)``: a list that never fills the screen."""
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown}, ... ({len(names)} in all)"
