"""A run that was ended is continued as if it had not been."""

from __future__ import annotations

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from toys import FEATURES, Compiles, Line, Measured, Stopping, Watcher, arrays, assert_same, everything, log_of, splits

from nitro_cli import CheckpointPolicy, GraphConst, Nitro, apply_model, linen_model, nnx_model
from nitro_cli.errors import ProtectError, UsageError
from nitro_cli.run.checkpoints import Checkpoints, resolve_checkpoint


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))[:, 0]


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(FEATURES, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.hidden(x))))[:, 0]


class Net(Measured):
    """Dropout, batch statistics, momenta and shuffled data: all that a continuation has to bring back."""

    kind: GraphConst[str] = "nnx"

    def build_data(self, dist):
        return splits(self.batch, shuffle=True, seed=self.seed)

    def build_model(self, rng):
        if self.kind == "nnx":
            return nnx_model(NnxNet, rng)
        return linen_model(LinenNet(), rng, np.zeros((1, FEATURES), np.float32), train=False)

    def forward(self, model, ps, st, *, x, train, rng):
        return apply_model(model, ps, st, x, train=train, rng=rng)

    def optimizer(self):
        return None


KINDS = [Measured(max_epochs=3), Measured(max_epochs=3, accum=2), Net(max_epochs=3), Net(max_epochs=3, kind="linen")]


@pytest.mark.parametrize("e", KINDS, ids=["plain", "accumulating", "nnx", "linen"])
@pytest.mark.parametrize("when", ["epoch boundary", "inside an epoch"])
def test_a_resumed_run_equals_the_uninterrupted_one_to_the_bit(handle, e, when):
    whole = handle(e)
    whole.train()
    n = None
    data = Nitro(e).splits
    if when == "epoch boundary":
        first = handle(e, observer=Watcher(epoch=lambda facts: first.request_stop()))
    else:
        train = Stopping(data["train"], at=1, act=lambda: first.request_stop(), epoch=1)
        first = handle(e, data={**data, "train": train})
    assert first.train().status == "stopped"
    assert first.state.epoch == 1
    assert (first.state.position > 0) == (when == "inside an epoch")
    n = handle(e, resume=first.run)
    assert n.resumed
    assert_same(everything(n), everything(first))
    n.train()
    assert_same(everything(n), everything(whole))
    assert n.history == whole.history
    resumed, unbroken = (log_of(h.run.path, "train") for h in (n, whole))
    assert resumed == unbroken


def test_a_resumed_run_compiles_nothing_that_the_process_has(handle):
    n = handle(Net(max_epochs=2), observer=Watcher(epoch=lambda facts: n.request_stop()))
    n.train()
    with Compiles() as again:
        handle(Net(max_epochs=2), resume=n.run).train()
    assert again.misses == 0


def test_more_epochs_can_be_added_to_a_finished_run(handle):
    whole = handle(Measured(max_epochs=3))
    whole.train()
    first = handle(Measured(max_epochs=1))
    first.train()
    n = handle(Measured(max_epochs=3), resume=first.run)
    outcome = n.train()
    assert outcome.run.path == first.run.path
    assert_same(everything(n), everything(whole))
    assert outcome.run.read_run()["resumed"]


def test_resuming_a_finished_run_does_nothing_and_says_so(handle):
    first = handle(Measured(max_epochs=1))
    first.train()
    watcher = Watcher()
    n = handle(Measured(max_epochs=1), resume=first.run, observer=watcher)
    n.train()
    assert watcher.warnings == ["nothing to train: 1 epochs are done, max_epochs is 1"]
    assert_same(everything(n), everything(first))


def test_a_changed_graphconst_is_refused_with_a_table(handle, snapshot, tmp_path):
    first = handle(Measured())
    first.train()
    with pytest.raises(ProtectError) as caught:
        handle(Measured(power=4, shift=0.5), resume=first.run)
    assert str(caught.value).replace(str(tmp_path), "<tmp>") == snapshot
    assert caught.value.facts["fields"] == ["power", "shift"]


def test_a_changed_device_or_host_field_is_welcome(handle):
    first = handle(Measured(max_epochs=1))
    first.train()
    n = handle(Measured(max_epochs=2, scale=0.5, note="changed", learning_rate=0.5), resume=first.run)
    n.train()
    assert n.state.step == 8


def test_the_seed_of_the_record_wins_and_that_is_said(handle):
    whole = handle(Net(max_epochs=2, seed=1))
    whole.train()
    first = handle(Net(max_epochs=1, seed=1))
    first.train()
    watcher = Watcher()
    n = handle(Net(max_epochs=2, seed=2), resume=first.run, observer=watcher)
    assert watcher.warnings == ["the run that is resumed has seed 1; the seed given is not used"]
    n.train()
    assert_same(everything(n), everything(whole))


def test_another_shape_is_refused_naming_the_leaf(handle):
    class Wide(Measured):
        width: int = 3

        def build_model(self, rng):
            return (
                None,
                {"b": np.float32(0), "w": np.zeros(3, np.float32), "more": np.zeros(self.width, np.float32)},
                {},
            )

    first = handle(Wide())
    first.train()
    with pytest.raises(ProtectError) as caught:
        handle(Wide(width=5), resume=first.run)
    message = str(caught.value)
    assert "more: " in message
    assert "f32[3] -> now f32[5]" in message


def test_another_optimizer_is_refused(handle):
    first = handle(Line())
    first.train()

    class Sgd(Line):
        def optimizer(self):
            return optax.sgd

    with pytest.raises(ProtectError, match="opt_state"):
        handle(Sgd(), resume=first.run)


def test_a_run_without_a_checkpoint_cannot_be_resumed(handle):
    n = handle(Measured(max_epochs=0))
    n.train()
    with pytest.raises(ProtectError, match="no checkpoint to resume from"):
        handle(Measured(), resume=n.run)


def test_resume_and_weights_exclude_each_other(handle):
    first = handle(Measured())
    first.train()
    info = Checkpoints(first.run.checkpoints_path).latest()
    with pytest.raises(UsageError, match="exclude each other"):
        handle(Measured(), resume=first.run, weights=(first.run, info))


def test_weights_start_a_new_run_from_parameters_and_state(handle):
    first = handle(Net(max_epochs=2))
    first.train()
    checkpoints = Checkpoints(first.run.checkpoints_path)
    n = handle(Net(max_epochs=1), weights=(first.run, checkpoints.latest()))
    assert n.state.epoch == n.state.step == 0
    assert n.validate() == first.validate()
    n.train()
    assert n.run.path != first.run.path
    assert n.state.step == 4


def test_validation_from_the_best_checkpoint_gives_the_metrics_that_were_logged(handle):
    class Scored(Net):
        def checkpointer(self):
            return CheckpointPolicy(metric="val_error")

    first = handle(Scored(max_epochs=4))
    outcome = first.train()
    info, why = resolve_checkpoint(Checkpoints(first.run.checkpoints_path, Scored().checkpointer()), "best")
    assert info.epoch == outcome.best["epoch"]
    assert why.startswith("best by val_error")
    n = handle(Scored(), weights=(first.run, info))
    row = first.history[info.epoch - 1]
    assert n.validate()["val_error"] == row["val_error"] == info.value


def test_weights_of_another_structure_are_refused(handle):
    first = handle(Measured())
    first.train()
    info = Checkpoints(first.run.checkpoints_path).latest()
    with pytest.raises(ProtectError):
        handle(Net(), weights=(first.run, info))


def test_accumulation_cannot_change_inside_an_epoch_where_it_would_split_a_step(handle, snapshot, tmp_path):
    e = Measured(max_epochs=2)
    train = Stopping(splits()["train"], at=2, act=lambda: first.request_stop())
    first = handle(e, data={**splits(), "train": train})
    first.train()
    assert first.state.position == 3
    with pytest.raises(ProtectError) as caught:
        handle(e.replace(accum=2), resume=first.run)
    assert str(caught.value).replace(str(tmp_path), "<tmp>") == snapshot


def test_an_epoch_that_is_shorter_than_the_position_in_it_is_refused(handle, snapshot, tmp_path):
    train = Stopping(splits()["train"], at=2, act=lambda: first.request_stop())
    first = handle(Measured(max_epochs=2), data={**splits(), "train": train})
    first.train()
    with pytest.raises(ProtectError) as caught:
        handle(Measured(max_epochs=2), data=splits(rows=12), resume=first.run)
    assert str(caught.value).replace(str(tmp_path), "<tmp>") == snapshot


def test_the_best_value_before_a_resume_still_counts(handle):
    watcher = Watcher()
    first = handle(Line(max_epochs=1, learning_rate=0.05))
    first.train()
    n = handle(Line(max_epochs=2, scale=0.0), resume=first.run, observer=watcher)
    n.train()
    (epoch,) = watcher.of("epoch")
    assert n.history[1]["val_loss"] > n.history[0]["val_loss"]
    assert epoch["best"] is False


@pytest.mark.parametrize("accum", [1, 2])
def test_random_keys_in_the_state_come_back(handle, accum):
    class Keyed(Measured):
        def build_model(self, rng):
            return None, {"b": np.float32(0), "w": np.zeros(FEATURES, np.float32)}, {"key": jax.random.key(3)}

        def forward(self, model, ps, st, *, x, train):
            here, following = jax.random.split(st["key"])
            noise = jax.random.normal(here, (len(x),)) if train else 0.0
            return x @ ps["w"] + ps["b"] + noise, {"key": following if train else st["key"]}

    whole = handle(Keyed(accum=accum, max_epochs=2))
    whole.train()
    first = handle(Keyed(accum=accum, max_epochs=1))
    first.train()
    n = handle(Keyed(accum=accum, max_epochs=2), resume=first.run)
    n.train()
    assert_same(everything(n), everything(whole))
    assert n.predict(arrays(4)).shape == (4,)


@pytest.mark.parametrize(("before", "now"), [(0.5, 0.0), (0.0, 0.5)])
def test_a_moving_average_cannot_come_or_go(handle, before, now):
    first = handle(Line(ema_decay=before))
    first.train()
    with pytest.raises(ProtectError, match="set ema_decay back"):
        handle(Line(ema_decay=now, max_epochs=2), resume=first.run)
