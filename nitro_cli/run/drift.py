"""What has changed since a handle was constructed.

A handle is a fixed point: it keeps running what it was built with. Where a hook, or something that a hook calls, was
redefined since, every entry point says so.
"""

from __future__ import annotations

from typing import Any

from nitro_cli.experiment.hooks import hook
from nitro_cli.programs.fingerprint import Fingerprint, fingerprint
from nitro_cli.programs.recipe import Recipe

WATCHED = (
    *("forward", "loss", "metrics", "train_metrics", "finalize_metrics"),
    *("train_step", "setup_optimizers", "manual_training"),
)


class Drift:
    """Compares the code of the hooks now with that at construction; repeats nothing that was said before."""

    def __init__(self, recipe: Recipe, model_content: Any) -> None:
        self._cls = recipe.owner
        self._model = model_content
        self._at_construction = self._look()
        self._said: str | None = self._at_construction.digest()

    def _look(self) -> Fingerprint:
        roots = {name: found for name in WATCHED if (found := hook(self._cls, name)) is not None}
        return fingerprint(self._cls, **roots, model=self._model)

    def check(self) -> list[str]:
        """Messages for what has changed, empty where nothing has."""
        now = self._look()
        digest = now.digest()
        if digest == self._said:
            return []
        self._said = digest
        before = self._at_construction.entries
        names = [name for name in dict.fromkeys([*before, *now.entries]) if before.get(name) != now.entries.get(name)]
        if not names:
            return []
        return [
            f"redefined since this handle was built: {', '.join(f'`{name}`' for name in names[:5])}"
            + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            + "; it keeps running the code it was built with. Build a new Nitro to pick up the change."
        ]
