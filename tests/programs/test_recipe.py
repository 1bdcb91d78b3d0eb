"""What the hooks that are traced may return: every wrong return has its own message, and nothing stays behind."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from toys import FEATURES, Measured, OnDevice, arrays

from nitro_cli import Concat, Max, Min, Sum, cache_stats
from nitro_cli.errors import ExperimentError, NitroError


def message(error: NitroError) -> str:
    """The text of an error without the place, which holds a path and a line."""
    return "\n".join(line for line in str(error).splitlines() if not line.startswith("  -->"))


def with_hook(base=Measured, **hooks):
    return type("Other", (base,), {**hooks, "__module__": __name__})()


def stateful(self, rng):
    return None, {"b": np.float32(0), "w": np.zeros(FEATURES, np.float32)}, {"mean": np.zeros(2, np.float32)}


def linear(ps, x):
    return x @ ps["w"] + ps["b"]


FORWARD = {
    "only outputs": lambda self, model, ps, st, *, x: linear(ps, x),
    "three values": lambda self, model, ps, st, *, x: (linear(ps, x), st, 0),
    "nothing": lambda self, model, ps, st, *, x: None,
    "no state": lambda self, model, ps, st, *, x: (linear(ps, x), None),
    "another state": lambda self, model, ps, st, *, x: (linear(ps, x), {"man": st["mean"], "n": 1}),
    "a state of another shape": lambda self, model, ps, st, *, x: (linear(ps, x), {"mean": st["mean"][:1]}),
    "a state of another dtype": lambda self, model, ps, st, *, x: (
        linear(ps, x),
        {"mean": st["mean"].astype(jnp.bfloat16)},
    ),
    "outputs reduced over the batch": lambda self, model, ps, st, *, x: ({"logits": linear(ps, x).mean()}, st),
    "the batch axis last": lambda self, model, ps, st, *, x: (x.T, st),
    "a number among the outputs": lambda self, model, ps, st, *, x: ((linear(ps, x), 3.0), st),
}


@pytest.mark.parametrize("kind", FORWARD)
def test_what_forward_may_not_return(handle, snapshot, kind):
    n = handle(with_hook(build_model=stateful, forward=FORWARD[kind]))
    before = cache_stats()
    for run in (n.train, n.validate):
        with pytest.raises(ExperimentError) as caught:
            run()
        assert message(caught.value) == snapshot(name="one message")
        assert caught.value.facts["hook"] == "forward"
    assert cache_stats() == before


LOSS = {
    "nothing": lambda self, outputs, *, y: None,
    "a vector": lambda self, outputs, *, y: (outputs - y) ** 2,
    "a vector of one": lambda self, outputs, *, y: ((outputs - y) ** 2).mean(keepdims=True),
    "a pair": lambda self, outputs, *, y: (outputs.mean(), {}),
    "a dict": lambda self, outputs, *, y: {"loss": outputs.mean()},
    "a whole number": lambda self, outputs, *, y: (outputs > y).sum(),
    "a truth value": lambda self, outputs, *, y: True,
    "a complex number": lambda self, outputs, *, y: outputs.mean() * 1j,
    "a text": lambda self, outputs, *, y: "small",
}


@pytest.mark.parametrize("kind", LOSS)
def test_what_loss_may_not_return(handle, snapshot, kind):
    with pytest.raises(ExperimentError) as caught:
        handle(with_hook(loss=LOSS[kind])).train()
    assert message(caught.value) == snapshot


TRAIN_METRICS = {
    "nothing": lambda self, outputs, *, y: None,
    "a number": lambda self, outputs, *, y: outputs.mean(),
    "an array": lambda self, outputs, *, y: {"error": outputs - y},
    "a pair": lambda self, outputs, *, y: {"error": (outputs.sum(), len(y))},
    "a nested dict": lambda self, outputs, *, y: {"error": {"mean": outputs.mean()}},
}


@pytest.mark.parametrize("where", ["device", "host"])
@pytest.mark.parametrize("kind", TRAIN_METRICS)
def test_what_train_metrics_may_not_return(handle, snapshot, kind, where):
    e = with_hook(
        train_metrics=TRAIN_METRICS[kind],
        metrics_residency=lambda self, hook: where if hook == "train_metrics" else "host",
    )
    with pytest.raises(ExperimentError) as caught:
        handle(e).train()
    assert message(caught.value) == snapshot


METRICS = {
    "not a dict": lambda self, outputs, *, y: outputs.mean(),
    "no mode": lambda self, outputs, *, y: {"error": outputs.mean()},
    "two modes": lambda self, outputs, *, y: {"error": Sum(Max(outputs.mean()))},
    "concat of other rows": lambda self, outputs, *, y: {"all": Concat(outputs[:2])},
}


@pytest.mark.parametrize("kind", METRICS)
def test_what_metrics_on_the_device_may_not_return(handle, snapshot, kind):
    with pytest.raises(ExperimentError) as caught:
        handle(with_hook(OnDevice, metrics=METRICS[kind])).validate()
    assert message(caught.value) == snapshot


def test_modes_go_through_a_program(handle):
    def metrics(self, outputs, *, y):
        return {"a": Max(y.max()), "b": Min(y.min()), "c": {"d": Sum(y.sum())}, "e": (y.sum(), len(y))}

    y = arrays(8, seed=1)["y"]
    found = handle(with_hook(OnDevice, metrics=metrics)).validate()
    wanted = {"val_a": y.max(), "val_b": y.min(), "val_c.d": y.sum(), "val_e": y.mean()}
    assert found == pytest.approx({name: float(value) for name, value in wanted.items()}, rel=1e-6)


HOST_READS = {
    "forward": {"forward": lambda self, model, ps, st, *, x: (linear(ps, x) * (self.note == "x"), st)},
    "loss": {"loss": lambda self, outputs, *, y: outputs.mean() * self.learning_rate},
    "train_metrics": {"train_metrics": lambda self, outputs, *, y: {"m": 1.0 if self.batch else 0.0}},
}


@pytest.mark.parametrize("hook", HOST_READS)
def test_a_host_field_read_in_traced_code_is_named_with_three_fixes(handle, snapshot, hook):
    with pytest.raises(ExperimentError) as caught:
        handle(with_hook(**HOST_READS[hook])).train()
    assert message(caught.value) == snapshot


def test_a_metric_on_the_host_may_read_every_field_and_one_on_the_device_may_not(handle):
    def metrics(self, outputs, *, y):
        return {"batch": (self.batch, 1)}

    assert handle(with_hook(metrics=metrics)).validate() == {"val_batch": 4.0}
    with pytest.raises(ExperimentError, match="'batch'"):
        handle(with_hook(OnDevice, metrics=metrics)).validate()


def test_train_tells_training_from_evaluation_and_the_key_differs_by_use(handle):
    def forward(self, model, ps, st, *, x, train, rng):
        assert type(train) is bool
        noise = jax.random.normal(rng, (len(x),)) if train else 0.0
        return linear(ps, x) + noise, st

    n = handle(with_hook(forward=forward))
    n.train()
    np.testing.assert_allclose(n.predict(arrays(4)), linear(n.snapshot()["ps"], arrays(4)["x"]), rtol=1e-5, atol=1e-6)


def test_evaluation_draws_the_same_numbers_every_time(handle):
    def forward(self, model, ps, st, *, x, rng):
        return linear(ps, x) + jax.random.normal(rng, (len(x),)), st

    n = handle(with_hook(forward=forward))
    np.testing.assert_array_equal(n.predict(arrays(4)), n.predict(arrays(4)))
    other = handle(with_hook(forward=forward).replace(seed=1))
    assert not np.array_equal(n.predict(arrays(4)), other.predict(arrays(4)))


def test_a_hook_that_takes_everything_gets_the_whole_batch(handle):
    seen = {}

    def loss(self, outputs, **batch):
        seen.update({name: array.shape for name, array in batch.items()})
        return ((outputs - batch["y"]) ** 2).mean()

    handle(with_hook(loss=loss)).train()
    assert seen == {"x": (4, FEATURES), "y": (4,)}


def test_a_default_stays_where_no_batch_has_the_field(handle):
    def loss(self, outputs, *, y, weight=None):
        assert weight is None
        return ((outputs - y) ** 2).mean()

    handle(with_hook(loss=loss)).train()
