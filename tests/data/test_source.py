"""The source contract: what a split and a batch must be, and what is said when they are not."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from nitro_cli.data.loader import ArrayLoader
from nitro_cli.data.source import (
    DataError,
    check_batch,
    check_source,
    check_width,
    describe,
    first_batch,
    infer_batch_size,
)

BATCH = {"image": np.zeros((4, 8), np.float32), "label": np.zeros(4, np.int32)}


class TorchLike:
    """The shape of a torch DataLoader: len() and iteration, no indexing."""

    def __init__(self, rows: int = 10, batch_size: int = 4, drop_last: bool = False) -> None:
        self.dataset = range(rows)
        self.batch_size = batch_size
        self.drop_last = drop_last

    def __len__(self) -> int:
        rows = len(self.dataset)
        return rows // self.batch_size if self.drop_last else -(-rows // self.batch_size)

    def __iter__(self):
        for i in range(len(self)):
            yield {"x": np.full((self.batch_size, 1), i)}


class Lengthless:
    def __iter__(self):
        return iter([BATCH])

    def __len__(self):
        raise TypeError("IterableDataset has no length")


class Endless(TorchLike):
    def __len__(self):
        return sys.maxsize


class Tensor:
    def numpy(self):
        return np.zeros(4)


Tensor.__module__ = "torch"
Lengthless.__module__ = "loaders"


def error_of(function, *args) -> str:
    with pytest.raises(DataError) as caught:
        function(*args)
    assert caught.value.exit_code == 3
    return str(caught.value)


@pytest.mark.parametrize("source", [[BATCH], (BATCH, BATCH), TorchLike(), ArrayLoader(BATCH, batch_size=2)])
def test_good_sources_pass(source):
    check_source("train", source)


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(BATCH, id="dict of arrays"),
        pytest.param((BATCH["image"], BATCH["label"]), id="pair of arrays"),
        pytest.param(BATCH["image"], id="bare array"),
        pytest.param(iter([BATCH]), id="iterator"),
        pytest.param((b for b in [BATCH]), id="generator"),
        pytest.param(Lengthless(), id="no length"),
        pytest.param([], id="empty"),
        pytest.param(Endless(), id="endless"),
        pytest.param(7, id="number"),
    ],
)
def test_bad_sources_name_the_split_and_the_fix(source, snapshot):
    assert error_of(check_source, "val", source) == snapshot


def test_describe_says_what_is_known_and_no_more():
    loader = describe(ArrayLoader(BATCH, batch_size=3, drop_last=True))
    assert (loader.batches, loader.rows, loader.batch_size, loader.dropped) == (1, 4, 3, 1)
    torch = describe(TorchLike(rows=10, batch_size=4, drop_last=True))
    assert (torch.batches, torch.rows, torch.batch_size, torch.dropped) == (2, 10, 4, 2)
    assert describe(TorchLike(rows=10, batch_size=4)).dropped == 0
    plain = describe([BATCH, BATCH])
    assert (plain.batches, plain.rows, plain.batch_size, plain.dropped, plain.kind) == (2, None, None, None, "list")


def test_first_batch_is_drawn_by_index_where_there_is_one():
    class Indexed:
        def __len__(self):
            return 2

        def __getitem__(self, i):
            return {"x": np.full(3, i)}

        def __iter__(self):
            raise AssertionError("an iteration would start the loader's own workers")

    assert first_batch("train", Indexed())["x"].tolist() == [0, 0, 0]


def test_first_batch_closes_the_iteration_it_started():
    closed = []

    class Reader:
        def __next__(self):
            return {"x": np.zeros(2)}

        def close(self):
            closed.append(True)

    class Loader(TorchLike):
        def __iter__(self):
            return Reader()

    assert list(first_batch("train", Loader())) == ["x"]
    assert closed == [True]


def test_first_batch_of_an_exhausted_source(snapshot):
    class Once(TorchLike):
        def __iter__(self):
            return iter(())

    assert error_of(first_batch, "train", Once()) == snapshot


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param((BATCH["image"], BATCH["label"]), id="tuple"),
        pytest.param({1: BATCH["image"]}, id="key is a number"),
        pytest.param({"image": BATCH["image"], "labels": BATCH["label"]}, id="renamed field"),
        pytest.param({"image": BATCH["image"]}, id="missing field"),
        pytest.param({**BATCH, "weight": BATCH["label"]}, id="new field"),
        pytest.param({**BATCH, "label": Tensor()}, id="torch tensor"),
        pytest.param({**BATCH, "label": [0, 1, 2, 3]}, id="list"),
        pytest.param({**BATCH, "label": 3}, id="scalar"),
        pytest.param({**BATCH, "label": np.float32(3)}, id="numpy scalar"),
        pytest.param({**BATCH, "label": np.array([None] * 4)}, id="object dtype"),
    ],
)
def test_bad_batches(batch, snapshot):
    assert error_of(check_batch, "train", 5, batch, ("image", "label")) == snapshot


def test_a_batch_of_unknown_number_is_not_given_a_wrong_one():
    assert error_of(check_batch, "train", -1, (), None).startswith("split 'train', one of its batches: ")
    assert error_of(check_width, "train", -1, BATCH, ("image",), 8).startswith("split 'train', one of its batches: ")


def test_only_routed_fields_are_looked_at():
    batch = {**BATCH, "ids": ["a", "b", "c", "d"]}
    check_batch("train", 0, batch, batch.keys(), fields=("image", "label"))
    with pytest.raises(DataError, match="'ids'"):
        check_batch("train", 0, batch, batch.keys())


def test_strings_may_stay_in_a_batch_but_not_travel():
    batch = {**BATCH, "ids": np.array(["a", "b", "c", "d"])}
    check_batch("train", 0, batch, batch.keys())
    with pytest.raises(DataError, match="'ids' has dtype <U1"):
        check_batch("train", 0, batch, batch.keys(), fields=("ids",))


def test_jax_arrays_and_bfloat16_are_arrays():
    import jax.numpy as jnp

    values = jnp.zeros(4, jnp.bfloat16)
    check_batch("train", 0, {"x": values, "y": np.asarray(values)}, ("x", "y"), fields=("x", "y"))


def test_batch_size_is_the_leading_axis_that_routed_fields_share(snapshot):
    odd = {**BATCH, "table": np.zeros((9, 4))}
    assert infer_batch_size("train", odd, ("image", "label")) == 4
    assert error_of(infer_batch_size, "train", odd, ("image", "table")) == snapshot


@pytest.mark.parametrize(
    ("batch", "fields"),
    [
        pytest.param(BATCH, (), id="nothing routed"),
        pytest.param({"x": np.zeros(())}, ("x",), id="one sample"),
        pytest.param({"x": np.zeros((0, 3))}, ("x",), id="no rows"),
        pytest.param({**BATCH, "train": BATCH["label"]}, ("image",), id="train"),
        pytest.param({**BATCH, "rng": BATCH["label"]}, ("image",), id="rng"),
    ],
)
def test_no_batch_size(batch, fields, snapshot):
    assert error_of(infer_batch_size, "train", batch, fields) == snapshot


def test_training_batches_keep_their_width(snapshot):
    check_width("train", 3, BATCH, ("image", "label"), 4)
    assert error_of(check_width, "train", 3, BATCH, ("image", "label"), 8) == snapshot
