"""What nitro says of a program that it compiles anew: one line that a person would say."""

from __future__ import annotations

import shutil

import edits
import pytest
from test_edits import edited, filled, second

NAMES = [
    "helper two below forward",
    "constant two below forward",
    "value in a closure",
    "default argument",
    "class constant of a mixin",
    "property",
    "value of an enum",
    "registered function",
    "decorator taken off",
    "default of a linen module",
    "attribute of an NNX module",
    "array read from a file at import",
    "GraphConst that only loss reads",
    "GraphConst enum",
    "another batch size",
    "accumulation",
    "clipping",
    "weight decay",
    "compute_dtype",
    "flag given to an optimizer",
    "another optimizer",
    "XLA_FLAGS",
    "number of devices",
    "x64",
    "version of a library",
    "preset with another GraphConst",
    "a Device field more",
    "train metrics move to the host",
    "hook reads the environment",
]
BY_NAME = {case.name: case for case in edits.CASES}

__all__ = ["filled"]


@pytest.mark.parametrize("name", NAMES)
def test_reasons_read_like_sentences(name, forks, filled, tmp_path, snapshot):
    case = BY_NAME[name]
    shutil.copytree(filled(case), tmp_path / "store")
    edited(case, tmp_path)
    job = second(case, tmp_path) | {"verify": False}
    programs = forks.run(**job)["programs"]
    assert {p["program"]: p["why"] for p in programs if p["why"] != "unchanged"} == snapshot
