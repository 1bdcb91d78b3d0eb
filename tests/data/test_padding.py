"""Short batches: the last row repeated in, and cut away again."""

from __future__ import annotations

import numpy as np
import pytest

from nitro_cli.data.padding import pad_batch, slice_rows
from nitro_cli.data.source import DataError
from nitro_cli.errors import ExperimentError


def test_padding_repeats_the_last_row_of_routed_fields_only():
    batch = {"x": np.arange(6, dtype=np.float32).reshape(3, 2), "label": np.array([1, 2, 3]), "ids": ["a", "b", "c"]}
    padded, rows = pad_batch(batch, ("x", "label"), 5)
    assert rows == 3
    assert padded["x"].tolist() == [[0, 1], [2, 3], [4, 5], [4, 5], [4, 5]]
    assert padded["x"].dtype == np.float32
    assert padded["label"].tolist() == [1, 2, 3, 3, 3]
    assert padded["ids"] is batch["ids"]
    assert len(batch["x"]) == 3


def test_a_full_batch_is_not_copied():
    batch = {"x": np.zeros((4, 2))}
    padded, rows = pad_batch(batch, ("x",), 4)
    assert padded is batch
    assert rows == 4


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param({"x": np.zeros(9)}, id="wider"),
        pytest.param({"x": np.zeros(0)}, id="no rows"),
        pytest.param({"x": np.zeros(2), "y": np.zeros(3)}, id="lengths"),
    ],
)
def test_batches_that_cannot_be_padded(batch, snapshot):
    with pytest.raises(DataError) as caught:
        pad_batch(batch, tuple(batch), 4)
    assert str(caught.value) == snapshot


@pytest.mark.parametrize("rows", [3, 4])
def test_slicing_undoes_padding_leaf_by_leaf(rows):
    import jax.numpy as jnp

    tree = {"logits": jnp.arange(8.0).reshape(4, 2), "aux": (np.arange(4), None, "name")}
    cut = slice_rows(tree, rows, 4)
    assert type(cut["logits"]) is np.ndarray
    assert cut["logits"].shape == (rows, 2)
    assert cut["aux"][0].tolist() == list(range(rows))
    assert cut["aux"][1:] == (None, "name")


def test_cut_leaves_are_copies():
    tree = np.arange(4)
    assert not np.shares_memory(slice_rows(tree, 3, 4), tree)


@pytest.mark.parametrize("rows", [3, 4])
@pytest.mark.parametrize("leaf", [np.zeros((10, 4)), np.zeros(())], ids=["batch last", "scalar"])
def test_a_leaf_without_the_batch_first_is_named_on_full_batches_too(rows, leaf, snapshot):
    with pytest.raises(ExperimentError) as caught:
        slice_rows({"heads": [np.zeros((4, 1)), leaf]}, rows, 4)
    assert str(caught.value) == snapshot
