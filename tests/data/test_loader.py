"""ArrayLoader: every row once an epoch, an order that depends on seed and epoch alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nitro_cli.data.loader import ArrayLoader, shuffled_rows
from nitro_cli.data.source import DataError


def rows_of(loader) -> list[int]:
    return [int(row) for batch in loader for row in batch["row"]]


def make(rows: int = 10, **options) -> ArrayLoader:
    return ArrayLoader(row=np.arange(rows), image=np.arange(rows * 2).reshape(rows, 2), **options)


@given(
    rows=st.integers(1, 40),
    batch=st.integers(1, 50),
    shuffle=st.booleans(),
    drop=st.booleans(),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_row_once_but_the_dropped_ones(rows, batch, shuffle, drop, epoch):
    loader = make(rows, batch_size=batch, shuffle=shuffle, seed=3, drop_last=drop)
    loader.set_epoch(epoch)
    seen = rows_of(loader)
    assert len(seen) == len(set(seen)) == rows - loader.dropped
    assert len(list(loader)) == len(loader)
    assert all(len(b["row"]) == loader.batch_size for b in list(loader)[: len(loader) - (not drop)])
    assert drop or loader.dropped == 0
    assert shuffle or seen == list(range(rows - loader.dropped))


def test_fields_stay_together_when_shuffled():
    for batch in make(batch_size=3, shuffle=True):
        assert (batch["image"][:, 0] == 2 * batch["row"]).all()


def test_order_is_a_function_of_seed_and_epoch():
    one, other = make(50, batch_size=7, shuffle=True, seed=1), make(50, batch_size=7, shuffle=True, seed=1)
    one.set_epoch(1)
    one.set_epoch(4)
    other.set_epoch(4)
    assert rows_of(one) == rows_of(other) == rows_of(one)
    epochs = []
    for epoch in range(3):
        one.set_epoch(epoch)
        epochs.append(tuple(rows_of(one)))
    assert len(set(epochs)) == 3
    other.seed = 2
    other.set_epoch(0)
    assert tuple(rows_of(other)) != epochs[0]
    assert tuple(rows_of(make(50, batch_size=7, shuffle=True, seed=1))) == epochs[0]


def test_order_does_not_change_between_versions_of_numpy():
    # Written down, because a run must continue in the same order after an upgrade.
    assert shuffled_rows(8, seed=0, epoch=0).tolist() == [0, 3, 7, 5, 1, 2, 6, 4]
    assert shuffled_rows(8, seed=7, epoch=2).tolist() == [0, 3, 5, 1, 4, 2, 6, 7]


@pytest.mark.parametrize("shuffle", [False, True])
def test_index_and_iteration_agree_from_many_threads(shuffle):
    loader = make(100, batch_size=7, shuffle=shuffle)
    with ThreadPoolExecutor(4) as pool:
        by_index = list(pool.map(loader.__getitem__, range(len(loader))))
    for batch, again in zip(by_index, loader, strict=True):
        assert (batch["row"] == again["row"]).all()
    assert (loader[-1]["row"] == by_index[-1]["row"]).all()
    assert (loader[np.int64(1)]["row"] == by_index[1]["row"]).all()
    for outside in (len(loader), -len(loader) - 1):
        with pytest.raises(IndexError, match="15 batches"):
            loader[outside]


def test_set_epoch_leaves_an_iteration_under_way_alone():
    loader = make(20, batch_size=5, shuffle=True)
    whole = rows_of(loader)
    iterator = iter(loader)
    first = next(iterator)
    loader.set_epoch(1)
    rest = [int(row) for batch in [first, *iterator] for row in batch["row"]]
    assert rest == whole


def test_unshuffled_batches_are_views_that_cannot_damage_the_data():
    data = np.arange(10)
    batch = next(iter(ArrayLoader(x=data, batch_size=4)))
    assert np.shares_memory(batch["x"], data)
    with pytest.raises(ValueError, match="read-only"):
        batch["x"][0] = 1
    data[0] = 5  # the caller's own array stays writable


def test_a_batch_larger_than_the_data_is_all_the_data():
    for drop in (False, True):
        loader = make(5, batch_size=64, drop_last=drop)
        assert (len(loader), loader.batch_size, loader.dropped) == (1, 5, 0)
        assert rows_of(loader) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"batch_size": 4}, id="no fields"),
        pytest.param({"x": np.zeros(3), "y": np.zeros((4, 2)), "batch_size": 2}, id="lengths"),
        pytest.param({"x": np.zeros((0, 2)), "batch_size": 2}, id="empty"),
        pytest.param({"x": np.zeros(3), "batch_size": 0}, id="batch size 0"),
        pytest.param({"x": np.zeros(3), "batch_size": 2.0}, id="batch size float"),
        pytest.param({"x": np.zeros(3), "batch_size": 2, "seed": -1}, id="seed"),
        pytest.param({"x": 3, "batch_size": 2}, id="scalar"),
        pytest.param({"x": [{}, {}], "batch_size": 2}, id="object"),
        pytest.param({"x": [[1], [1, 2]], "batch_size": 2}, id="ragged"),
    ],
)
def test_what_does_not_fit(arguments, snapshot):
    with pytest.raises(DataError) as caught:
        ArrayLoader(**arguments)
    assert str(caught.value) == snapshot
