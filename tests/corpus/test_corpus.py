"""Every change of the corpus: no program may be taken for another one, and what changes nothing compiles nothing."""

from __future__ import annotations

import os

import pytest

from corpus.run import BASE, IMPOSSIBLE, Worker, cases, judge


@pytest.fixture(scope="module")
def worker():
    made = Worker()
    yield made
    made.close()


@pytest.fixture(scope="module")
def base(worker):
    return worker.run(BASE)


EVERY = int(os.environ.get("EDIT_CASES_EVERY", "1"))  # a sample, where time is short


@pytest.mark.parametrize("case", list(cases())[::EVERY], ids=lambda case: case["id"])
def test_a_key_changes_with_the_program_and_not_without(worker, base, case):
    found = judge(case, base, worker.run(case))
    wanted = "WRONG HIT" if case["id"] in IMPOSSIBLE else "ok"
    assert found["result"] == wanted, found
