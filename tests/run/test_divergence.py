"""A loss that is no number: where the run stops, and what the handle then holds."""

from __future__ import annotations

import math

import numpy as np
import pytest
from toys import FEATURES, Measured, arrays, assert_same, everything, log_of, splits

from nitro_cli import ArrayLoader
from nitro_cli.errors import DivergenceError


class Remembering(Measured):
    """With a state that every forward moves, so that a withheld step would show there as well."""

    def build_model(self, rng):
        return None, {"b": np.float32(0), "w": np.zeros(FEATURES, np.float32)}, {"mean": np.zeros(FEATURES, np.float32)}

    def forward(self, model, ps, st, *, x, train):
        mean = 0.9 * st["mean"] + 0.1 * x.mean(0)
        return x @ ps["w"] + ps["b"], {"mean": mean if train else st["mean"]}


def poisoned(batch, value=np.nan, count=6):
    """``count`` batches of four; batch ``batch`` (from 0) makes the loss ``value``."""
    loader = ArrayLoader(arrays(4 * count), batch_size=4)
    batches = [{name: array.copy() for name, array in loader[i].items()} for i in range(count)]
    batches[batch]["y"][2] = value
    return batches


def good_steps(handle, batches, accum=1):
    n = handle(Remembering(accum=accum), data={"train": batches})
    n.train()
    return everything(n)


@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("bad", [2, 5])
def test_the_run_stops_with_the_state_of_the_last_good_step(handle, accum, bad):
    batches = poisoned(bad)
    step = bad // accum + 1
    n = handle(Remembering(accum=accum), data={"train": batches})
    with pytest.raises(DivergenceError) as caught:
        n.train()
    assert caught.value.facts == {"value": "nan", "step": step, "epoch": 1}
    assert (n.state.step, n.state.position) == (step - 1, (step - 1) * accum)
    assert_same(everything(n), good_steps(handle, batches[: (step - 1) * accum], accum))


def test_with_four_micro_batches_a_step_is_good_or_withheld_as_a_whole(handle):
    batches = poisoned(6, count=8)
    n = handle(Remembering(accum=4), data={"train": batches})
    with pytest.raises(DivergenceError) as caught:
        n.train()
    assert caught.value.facts["step"] == 2
    assert_same(everything(n), good_steps(handle, batches[:4], 4))


def test_the_message_names_value_step_and_epoch_and_the_ways_on(handle, snapshot):
    batches = poisoned(1, value=np.inf)
    with pytest.raises(DivergenceError) as caught:
        handle(Remembering(), data={"train": batches}).train()
    assert str(caught.value) == snapshot
    assert caught.value.exit_code == 1


def test_a_loss_that_breaks_in_a_later_epoch_says_so(handle):
    class Later:
        """Sound batches in the first epoch, a poisoned one in the second."""

        def set_epoch(self, epoch):
            self.batches = poisoned(1) if epoch else poisoned(1, value=0.0)

        def __len__(self):
            return 6

        def __iter__(self):
            self.batches = getattr(self, "batches", poisoned(1, value=0.0))
            return iter(self.batches)

    n = handle(Remembering(max_epochs=3), data={"train": Later()})
    with pytest.raises(DivergenceError) as caught:
        n.train()
    assert (caught.value.facts["step"], caught.value.facts["epoch"]) == (8, 2)
    assert (n.state.epoch, n.state.step, n.state.position) == (1, 7, 1)
    assert len(n.history) == 1


def test_the_first_step_of_all_may_be_the_broken_one(handle):
    n = handle(Remembering(), data={"train": poisoned(0)})
    before = {path: leaf.copy() for path, leaf in _parameters_before(n).items()}
    with pytest.raises(DivergenceError) as caught:
        n.train()
    assert caught.value.facts["step"] == 1
    assert_same({p: a for p, a in everything(n).items() if p.startswith(("ps.", "st."))}, before)
    assert not list((n.run.path / "checkpoints").glob("[0-9]*"))


def _parameters_before(n):
    n.optimizer_layout()
    return {p: a for p, a in everything(n).items() if p.startswith(("ps.", "st."))}


def test_records_say_diverged_and_hold_the_good_steps_only(handle):
    n = handle(Remembering(), data={"train": poisoned(3)})
    with pytest.raises(DivergenceError):
        n.train()
    assert [row["step"] for row in log_of(n.run.path, "train")] == [1, 2, 3]
    assert log_of(n.run.path)[-1]["status"] == "diverged"
    run = n.run.read_run()
    assert (run["status"], run["exit_code"], run["steps"]) == ("diverged", 1, 3)
    assert [p.name for p in n.run.checkpoints_path.glob("[0-9]*")] == ["3"]


@pytest.mark.parametrize("accum", [1, 2])
def test_without_the_check_the_run_goes_on(handle, accum):
    n = handle(Remembering(check_divergence=False, accum=accum), data={"train": poisoned(3)})
    outcome = n.train()
    assert outcome.status == "finished"
    assert n.state.step == 6 // accum
    assert math.isnan(n.history[0]["train_loss"])
    rows = [row["values"]["loss"] for row in log_of(outcome.run.path, "train")]
    broken = [index for index, loss in enumerate(rows) if loss is None]
    assert broken[0] == 3 // accum
    assert len(rows) == 6 // accum
    assert np.isnan(n.snapshot()["ps"]["w"]).all()


def test_a_broken_gradient_under_a_sound_loss_shows_in_the_next_loss(handle):
    class Root(Measured):
        def loss(self, outputs, *, y):
            return abs(outputs * 0).mean() + (outputs * 0).sum() ** 0.5 + 1.0

    n = handle(Root(), data={"train": splits()["train"]})
    with pytest.raises(DivergenceError) as caught:
        n.train()
    assert caught.value.facts["step"] == 2


def test_a_run_that_diverged_can_be_resumed_from_its_last_good_step(handle):
    batches = poisoned(3)
    n = handle(Remembering(max_epochs=1), data={"train": batches})
    with pytest.raises(DivergenceError):
        n.train()
    mended = [*batches[:3], {**batches[3], "y": np.zeros(4, np.float32)}, *batches[4:]]
    again = handle(Remembering(max_epochs=1), data={"train": mended}, resume=n.run)
    again.train()
    assert_same(everything(again), good_steps(handle, mended))
