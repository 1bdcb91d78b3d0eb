"""What has changed since a handle was constructed.

A handle is a fixed point: it keeps running what it was built with. Where a hook, or something that a hook calls, was
redefined since, every entry point says so.
"""

from __future__ import annotations

from typing import Any

from nitro_cli.experiment.hooks import hook
from nitro_cli.programs.fingerprint import Recheck
from nitro_cli.programs.recipe import Recipe

WATCHED = (
    *("forward", "loss", "metrics", "train_metrics", "finalize_metrics"),
    *("train_step", "setup_optimizers", "manual_training"),
)


class Drift:
    """Compares the code of the hooks now with that at construction; repeats nothing that was said before."""

    def __init__(self, recipe: Recipe, model_content: Any) -> None:
        self._cls = recipe.owner
        self._experiment = recipe.experiment
        self._hooks = _hooks(self._cls)
        self._model = model_content
        self._look = Recheck(self._experiment, **self._hooks, model=model_content)
        self._at_construction = self._look.fingerprint.entries

    def check(self) -> list[str]:
        """Messages for what has changed, empty where nothing has."""
        if not self._changed():
            return []
        before, now = self._at_construction, self._look.fingerprint.entries
        names = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
        if not names:
            return []
        return [
            f"redefined since this handle was built: {', '.join(f'`{name}`' for name in names[:5])}"
            + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            + "; it keeps running the code it was built with. Build a new Nitro to pick up the change."
        ]

    def _changed(self) -> bool:
        """Whether anything is another than at the last look."""
        hooks = _hooks(self._cls)
        if all(hooks.get(name) is self._hooks.get(name) for name in WATCHED):
            return not self._look.unchanged()
        before, self._hooks = self._look.fingerprint, hooks
        self._look = Recheck(self._experiment, **hooks, model=self._model)
        return before.entries != self._look.fingerprint.entries


def _hooks(cls: type) -> dict[str, Any]:
    return {name: found for name in WATCHED if (found := hook(cls, name)) is not None}
