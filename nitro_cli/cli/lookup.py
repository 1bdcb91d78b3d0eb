"""Does a word name an experiment? Answered by looking at files, never by importing."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def looks_like_experiment(word: str) -> bool:
    """Whether ``word`` names a file of experiments/, a path to a Python file, or an importable dotted module."""
    spec = word.split(":", 1)[0]
    if spec.endswith(".py"):
        return Path(spec).is_file()
    parts = spec.split(".")
    if not all(part.isidentifier() for part in parts):
        return False
    if len(parts) == 1:
        return Path("experiments", f"{spec}.py").is_file()
    if Path(*parts).with_suffix(".py").is_file():
        return True
    try:
        return importlib.util.find_spec(parts[0]) is not None
    except (ImportError, ValueError):
        return False
