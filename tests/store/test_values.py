"""First values of a model, read from the store: the same to the bit, and only where the program decides them."""

from __future__ import annotations

import time

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

from nitro_cli import nnx_model
from nitro_cli.programs import store as stores
from nitro_cli.programs import values
from nitro_cli.programs.cache import ProgramCache, program_cache
from nitro_cli.programs.fingerprint import fingerprint
from nitro_cli.programs.once import run_once

SPREAD = 1.0


def key(seed: int) -> jax.Array:
    return jax.random.wrap_key_data(np.array([0, seed], np.uint32), impl="threefry2x32")


def layer(rngs):
    return nnx.Linear(3, 4, kernel_init=nnx.initializers.normal(SPREAD), rngs=rngs)


@pytest.fixture
def initialised(own_store, monkeypatch):
    """``initialised(function, seed)``: whether the program was run, and what came of it, in what stands for a process
    of its own."""
    monkeypatch.setattr(stores.settings, "opened", {})
    runs: list[None] = []
    held_once = ProgramCache.held_once

    def counted(self, *arguments):
        runs.append(None)
        return held_once(self, *arguments)

    monkeypatch.setattr(ProgramCache, "held_once", counted)

    def initialised(function=layer, seed=0):
        program_cache().reset()
        runs.clear()
        _, ps, st = nnx_model(function, key(seed))
        return bool(runs), (ps, st)

    return initialised


def kept(own_store):
    return sorted((own_store / "values").glob("*"))


def same(one, other):
    jax.tree.map(np.testing.assert_array_equal, one, other)
    assert jax.tree.map(lambda leaf: leaf.dtype, one) == jax.tree.map(lambda leaf: leaf.dtype, other)


def test_the_next_process_reads_what_the_first_one_made(initialised):
    ran, first = initialised()
    assert ran
    ran, second = initialised()
    assert not ran
    same(first, second)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(second))


def test_another_seed_or_another_program_is_run(initialised, monkeypatch, own_store):
    _, first = initialised()
    ran, other = initialised(seed=1)
    assert ran
    assert not np.array_equal(first[0]["kernel"], other[0]["kernel"])
    monkeypatch.setitem(globals(), "SPREAD", 2.0)
    ran, wide = initialised()
    assert ran
    np.testing.assert_allclose(wide[0]["kernel"], 2 * first[0]["kernel"], rtol=1e-6)
    assert len(kept(own_store)) == 3


def test_what_is_read_may_be_given_away_and_changed(initialised):
    _, first = initialised()
    _, second = initialised()
    step = jax.jit(lambda ps: jax.tree.map(lambda leaf: leaf + 1, ps), donate_argnums=0)
    step(second[0])
    same(first, initialised()[1])


def test_small_floats_and_empty_arrays_come_back(initialised):
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Param(jax.random.normal(rngs.params(), (5, 2), jnp.bfloat16))
            self.none = nnx.Param(jnp.zeros((0, 3)))
            self.count = nnx.BatchStat(jnp.int32(7))

    _, first = initialised(Small)
    ran, second = initialised(Small)
    assert not ran
    assert second[0]["table"].dtype == ml_dtypes.bfloat16
    same(first, second)


def by_the_clock(rngs):
    made = layer(rngs)
    made.kernel[...] += time.perf_counter()
    return made


def test_what_content_does_not_decide_is_never_read(initialised, own_store):
    assert [initialised(by_the_clock)[0], initialised(by_the_clock)[0]] == [True, True]
    assert kept(own_store) == []


def test_keys_and_numbers_that_give_way_are_not_kept(own_store, monkeypatch):
    monkeypatch.setattr(stores.settings, "opened", {})

    def weak(seed):
        return seed, 2.0

    def a_key(seed):
        return jax.random.wrap_key_data(seed, impl="threefry2x32")

    for function in (weak, a_key):
        for _ in range(2):
            program_cache().reset()
            run_once(function, np.zeros(2, np.uint32), name="f", experiment="E", code=fingerprint(f=function))
    assert kept(own_store) == []


def test_large_values_and_large_arguments_are_left_to_the_program(initialised, own_store, monkeypatch):
    monkeypatch.setattr(values, "VALUE_BYTES", 63)  # the layer has 64
    assert [initialised()[0], initialised()[0]] == [True, True]
    assert kept(own_store) == []


def test_parameters_as_arguments_are_not_looked_for(own_store, monkeypatch):
    monkeypatch.setattr(stores.settings, "opened", {})
    large = np.ones(values.ARGUMENT_BYTES // 4 + 1, np.float32)
    run_once(lambda x: x + 1, large, name="f", experiment="E", code=fingerprint())
    assert kept(own_store) == []


def test_a_damaged_value_is_made_anew(initialised, own_store):
    _, first = initialised()
    (file,) = kept(own_store)
    good = file.read_bytes()
    for bad in (b"", good[:-1], good[:-1] + b"x"):
        file.write_bytes(bad)
        ran, again = initialised()
        assert ran
        same(first, again)
        assert file.read_bytes() == good


def test_a_poisoned_entry_takes_its_values_along(initialised):
    initialised()
    store = stores.open_store()
    (row,) = store.listed()
    store.poison(row.entry, "for a test")
    assert initialised()[0]


def test_cold_runs_and_verify_compares(initialised, own_store, monkeypatch):
    initialised()
    monkeypatch.setattr(stores.settings, "cold", True)
    assert initialised()[0]
    monkeypatch.setattr(stores.settings, "cold", False)
    monkeypatch.setattr(stores.settings, "verify", True)
    assert initialised()[0]
    store = stores.open_store()
    (file,) = kept(own_store)
    payload = bytearray(store.note("values", file.name))
    payload[-1] ^= 1
    store.keep_note("values", file.name, bytes(payload))
    with pytest.raises(stores.CacheMismatch, match="not what its initialisation gives now"):
        initialised()
    assert kept(own_store) == []


def test_values_go_with_the_rest_of_the_store(initialised, own_store):
    initialised()
    store = stores.open_store()
    assert store.prune(max_days=1) == 0
    assert store.prune(max_days=-1) == 2  # the entry, and its values
    initialised()
    assert store.clear() > 0
    assert kept(own_store) == []
