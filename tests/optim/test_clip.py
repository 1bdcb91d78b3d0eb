"""Clipping: by the global norm, once a step, at a threshold that is an input of the program."""

from __future__ import annotations

import numpy as np
import pytest
from toys import FEATURES, Compiles, Measured, arrays, assert_same, differs, parameters, splits

from nitro_cli import ArrayLoader


def one_step(handle, threshold, batch=4, accum=1):
    """Parameters after one step on the same 16 rows, however they are cut into batches."""
    loader = ArrayLoader(arrays(16), batch_size=batch)
    n = handle(
        Measured(gradient_clip_norm=threshold, accum=accum, learning_rate=1.0),
        data={"train": [loader[i] for i in range(accum)]},
    )
    n.train()
    return parameters(n)


def norm(tree) -> float:
    return float(np.sqrt(sum((leaf.astype(np.float64) ** 2).sum() for leaf in tree.values())))


def test_a_larger_gradient_comes_out_at_the_threshold_and_a_smaller_one_as_it_is(handle):
    free = one_step(handle, 0.0)
    assert norm(free) > 0.5
    clipped = one_step(handle, 0.5)  # the step from zero parameters is minus the gradient
    assert norm(clipped) == pytest.approx(0.5, rel=1e-5)
    for path, leaf in clipped.items():
        np.testing.assert_allclose(leaf, free[path] * 0.5 / norm(free), rtol=1e-5)
    loose = one_step(handle, 1e6)
    assert not differs(loose, free)


def test_the_threshold_is_an_input_and_on_or_off_another_update_program(handle, empty_cache):
    handle(Measured(gradient_clip_norm=0.5)).train()
    with Compiles() as other:
        handle(Measured(gradient_clip_norm=0.25)).train()
    assert other.misses == 0
    with Compiles() as off:
        handle(Measured()).train()
    assert off.why == {"update": "gradient_clip_norm: on -> off"}


def test_the_accumulated_gradient_is_clipped_once(handle):
    together = one_step(handle, 0.5, batch=16)
    assert not differs(one_step(handle, 0.5, accum=4), together)
    # Clipping every micro-batch by itself would give the mean of four clipped gradients, which is another one.
    singles = []
    loader = ArrayLoader(arrays(16), batch_size=4)
    for index in range(4):
        n = handle(Measured(gradient_clip_norm=0.5, learning_rate=1.0), data={"train": [loader[index]]})
        n.train()
        singles.append(parameters(n))
    mean = {path: np.mean([single[path] for single in singles], axis=0) for path in together}
    assert differs(mean, together, atol=1e-3)


def test_the_gradient_of_all_leaves_makes_one_norm(handle):
    step = one_step(handle, 0.5)
    assert set(step) == {"b", "w"}
    assert step["w"].shape == (FEATURES,)
    assert norm({"w": step["w"]}) < 0.5


def test_a_zero_gradient_stays_zero(handle):
    flat = {"x": np.zeros((4, FEATURES), np.float32), "y": np.zeros(4, np.float32)}
    n = handle(Measured(gradient_clip_norm=0.5), data={**splits(), "train": [flat]})
    before = {path: np.zeros_like(leaf) for path, leaf in one_step(handle, 0.5).items()}
    n.train()
    assert_same(parameters(n), before)
