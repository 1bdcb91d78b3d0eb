"""An experiment that owns its step, from the first step to the last record."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from manual_toys import AutoLine, OwnLine, TinyGAN, disc_loss, gen_loss, network, placeless
from toys import (
    FEATURES,
    Compiles,
    Line,
    Stopping,
    Watcher,
    arrays,
    assert_same,
    differs,
    everything,
    log_of,
    parameters,
    splits,
)

from nitro_cli import (
    ArrayLoader,
    Device,
    GraphConst,
    Nitro,
    Prefetch,
    backward,
    clip_by_global_norm,
    moving_average,
    optimizer_state,
    step_optimizer,
)
from nitro_cli.cli.render import binding_lines, plain_report
from nitro_cli.errors import DivergenceError, ExperimentError, NitroError, ProtectError
from nitro_cli.run.acceptance import acceptance_check


def rows_of(n):
    return log_of(n.run.path, "train")


def test_a_step_that_is_written_out_trains_like_the_automatic_loop_to_the_log_row(handle):
    own, auto = handle(OwnLine(max_epochs=3)), handle(AutoLine(max_epochs=3))
    assert (own.report.mode, auto.report.mode) == ("manual", "automatic")
    one, other = own.train(), auto.train()
    assert (one.status, one.steps) == (other.status, other.steps) == ("finished", 12)
    assert [row["step"] for row in rows_of(own)] == list(range(1, 13))
    assert [{**row, "values": None} for row in rows_of(own)] == [{**row, "values": None} for row in rows_of(auto)]
    np.testing.assert_allclose(
        [row["values"]["loss"] for row in rows_of(own)], [row["values"]["loss"] for row in rows_of(auto)], rtol=1e-6
    )
    for path, value in parameters(auto).items():
        np.testing.assert_allclose(parameters(own)[path], value, rtol=1e-5, atol=1e-6)
    assert own.history[-1]["val_error"] == pytest.approx(auto.history[-1]["val_error"], rel=1e-5)


def test_generator_and_discriminator_move_by_the_gradients_that_jax_gives(handle):
    n = handle(TinyGAN())
    n.train()
    ps = TinyGAN().build_model(None)[1]
    rule = optax.adam(0.01)
    states = {name: rule.init(ps[name]) for name in ps}
    batches = TinyGAN().build_data(None)["train"]
    batches.set_epoch(0)
    for batch, row in zip(batches, rows_of(n), strict=True):
        fake = network(ps["gen"], batch["z"])
        loss_d, grads_d = jax.value_and_grad(disc_loss)(ps["disc"], batch["x"], fake)
        loss_g, grads_g = jax.value_and_grad(gen_loss)(ps["gen"], ps["disc"], batch["z"])
        for name, grads in (("disc", grads_d), ("gen", grads_g)):
            updates, states[name] = rule.update(grads, states[name], ps[name])
            ps[name] = optax.apply_updates(ps[name], updates)
        values = row["values"]
        assert values["disc"] == pytest.approx(float(loss_d), rel=1e-5)
        assert values["gen"] == pytest.approx(float(loss_g), rel=1e-5)
        assert values["loss"] == pytest.approx(float(loss_d + loss_g), rel=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), n.parameters, ps)


def test_the_loss_of_the_generator_moves_no_parameter_of_the_discriminator(handle):
    class OnlyGen(TinyGAN):
        def train_step(self, model, ps, opt_state, st, *, z):
            loss, grads = backward(gen_loss, ps["gen"], ps["disc"], z)
            opt, ps_gen = step_optimizer(opt_state["gen"], ps["gen"], grads)
            return {"loss": loss, "ps": {**ps, "gen": ps_gen}, "st": st, "opt_state": {**opt_state, "gen": opt}}

    n = handle(OnlyGen())
    n.optimizer_layout()
    before = parameters(n)
    n.train()
    after = parameters(n)
    for path, value in before.items():
        assert np.array_equal(after[path], value) == path.startswith("disc."), path
    state = n.snapshot()["opt_state"]
    assert (state["gen.count"], state["disc.count"]) == (4, 0)


def test_one_program_serves_every_step_schedule_and_rate(handle, empty_cache):
    class Scheduled(OwnLine):
        rate: float = 0.1

        def schedules(self):
            return {"learning_rate": lambda total: optax.linear_schedule(self.rate, 0.0, total)}

    with Compiles() as first:
        handle(OwnLine(max_epochs=2)).train()
    assert first.programs == ["evaluation", "step"]
    with Compiles() as more:
        handle(OwnLine(max_epochs=2, learning_rate=0.01)).train()
        handle(OwnLine(seed=7, check_divergence=False)).train()
    assert more.misses == 0
    with Compiles() as scheduled:
        handle(Scheduled(max_epochs=2)).train()
        handle(Scheduled(max_epochs=3, rate=0.3)).train()
    assert scheduled.programs in ([], ["step"], ["evaluation", "step"])


def test_the_acceptance_check_is_met_and_counts_one_step_program(empty_cache):
    check = acceptance_check(OwnLine(max_epochs=5))
    assert check.ok, check.verdict
    assert [entry.program for entry in check.entries] == ["step", "evaluation"]
    only = acceptance_check(TinyGAN())
    assert only.ok, only.verdict
    assert [entry.program for entry in only.entries] == ["step"]


def test_an_edited_step_misses_and_says_so(handle):
    class Edited(OwnLine):
        gain: GraphConst[float] = 1.0

        def train_step(self, model, ps, opt_state, st, *, x, y):
            returned = super().train_step(model, ps, opt_state, st, x=x, y=y)
            return {**returned, "loss": returned["loss"] * self.gain}

    handle(Edited()).train()
    with Compiles() as again:
        handle(Edited(gain=2.0)).train()
    assert again.why == {"step": "`gain` 1.0 -> 2.0"}


@pytest.mark.parametrize("when", ["epoch boundary", "inside an epoch"])
def test_a_run_stopped_and_resumed_equals_the_unbroken_one_to_the_bit(handle, when):
    e = TinyGAN(max_epochs=3)
    whole = handle(e)
    whole.train()
    if when == "epoch boundary":
        first = handle(e, observer=Watcher(epoch=lambda facts: first.request_stop()))
    else:
        train = Stopping(Nitro(e).splits["train"], at=1, act=lambda: first.request_stop(), epoch=1)
        first = handle(e, data={"train": train})
    assert first.train().status == "stopped"
    assert (first.state.position > 0) == (when == "inside an epoch")
    n = handle(e, resume=first.run)
    assert_same(everything(n), everything(first))
    n.train()
    assert_same(everything(n), everything(whole))
    assert rows_of(n) == rows_of(whole)


def test_a_rate_that_is_changed_on_resume_holds_and_what_a_step_changed_stays(handle):
    class Decaying(OwnLine):
        """Its step halves the rate by itself."""

        decay: float = 0.9

        def setup_optimizers(self, model, ps, st, mesh):
            return optimizer_state(optax.sgd, ps, learning_rate=self.learning_rate, momentum=self.decay)

        def train_step(self, model, ps, opt_state, st, *, x, y):
            returned = super().train_step(model, ps, opt_state, st, x=x, y=y)
            opt = returned["opt_state"]
            return {**returned, "opt_state": opt.replace(learning_rate=opt.hyperparameters["learning_rate"] / 2)}

    first = handle(Decaying(max_epochs=1))
    first.train()
    assert first.snapshot()["opt_state"]["learning_rate"] == pytest.approx(0.05 / 16)
    same = handle(Decaying(max_epochs=2), resume=first.run)
    assert same.snapshot()["opt_state"]["learning_rate"] == pytest.approx(0.05 / 16)
    changed = handle(Decaying(max_epochs=2, decay=0.5), resume=first.run)
    held = changed.snapshot()["opt_state"]
    assert held["learning_rate"] == pytest.approx(0.05 / 16)
    assert held["momentum"] == pytest.approx(0.5)


def test_a_checkpoint_with_another_optimizer_does_not_fit(handle):
    first = handle(OwnLine())
    first.train()

    class Momentum(OwnLine):
        def setup_optimizers(self, model, ps, st, mesh):
            return optimizer_state(optax.adam, ps, learning_rate=0.1)

    with pytest.raises(ProtectError, match="does not fit"):
        handle(Momentum(), resume=first.run)
    weights = handle(Momentum(), weights=str(first.run.path))
    weights.optimizer_layout()
    assert_same(parameters(weights), parameters(first))


@pytest.mark.parametrize("bad", [0, 2])
def test_a_loss_that_is_not_finite_leaves_the_last_good_step(handle, bad):
    batches = [dict(batch) for batch in splits()["train"]]
    batches[bad] = {**batches[bad], "y": np.full(4, np.nan, np.float32)}
    good = handle(OwnLine(), data={"train": batches[:bad] or batches[1:2]})
    before = everything_of(good)
    if bad:
        good.train()
    n = handle(OwnLine(), data={"train": batches})
    with pytest.raises(DivergenceError) as caught:
        n.train()
    assert caught.value.facts == {"value": "nan", "step": bad + 1, "epoch": 1}
    assert (n.state.step, n.state.position) == (bad, bad)
    assert_same(everything(n), everything(good) if bad else before)
    assert [row["step"] for row in rows_of(n)] == list(range(1, bad + 1))


def everything_of(n):
    n.optimizer_layout()
    return everything(n)


def test_without_the_check_a_broken_loss_goes_on(handle):
    batches = [dict(batch) for batch in splits()["train"]]
    batches[1] = {**batches[1], "y": np.full(4, np.nan, np.float32)}
    n = handle(OwnLine(check_divergence=False), data={"train": batches})
    assert n.train().status == "finished"
    assert n.state.step == 4


def test_random_numbers_are_those_of_the_automatic_loop(handle):
    class Drawing(OwnLine):
        def forward(self, model, ps, st, *, x, rng):
            return x @ ps["w"] + ps["b"] + jax.random.normal(rng, (len(x),)), st

        def train_step(self, model, ps, opt_state, st, *, x, y, rng):
            def objective(ps):
                return self.loss(self.forward(model, ps, st, x=x, rng=rng)[0], y=y)

            loss, grads = backward(objective, ps)
            opt_state, ps = step_optimizer(opt_state, ps, grads)
            return {"loss": loss, "ps": ps, "st": st, "opt_state": opt_state}

    class Automatic(Drawing):
        def manual_training(self):
            return False

        def optimizer(self):
            return optax.sgd

    own, auto = handle(Drawing(max_epochs=2)), handle(Automatic(max_epochs=2))
    own.train(), auto.train()
    for path, value in parameters(auto).items():
        np.testing.assert_allclose(parameters(own)[path], value, rtol=1e-5, atol=1e-6)
    assert len({row["values"]["loss"] for row in rows_of(own)}) == 8


class Grouped(OwnLine):
    """Takes groups of micro-batches: the mean of their gradients, as the automatic loop would."""

    def train_step(self, model, ps, opt_state, st, *, x, y, accum):
        def objective(ps):
            losses = [self.loss(self.forward(model, ps, st, x=x[i])[0], y=y[i]) for i in range(accum)]
            return sum(losses) / accum

        loss, grads = backward(objective, ps)
        opt_state, ps = step_optimizer(opt_state, ps, grads)
        return {"loss": loss, "ps": ps, "st": st, "opt_state": opt_state, "stats": {"rows": float(x.size)}}


class GroupedAutomatic(Grouped):
    def manual_training(self):
        return False

    def optimizer(self):
        return optax.sgd


@pytest.mark.parametrize("accum", [1, 2, 4])
def test_a_group_of_micro_batches_comes_in_one_call_and_equals_accumulation(handle, accum):
    own, auto = handle(Grouped(max_epochs=2, accum=accum)), handle(GroupedAutomatic(max_epochs=2, accum=accum))
    one, other = own.train(), auto.train()
    assert one.steps == other.steps == 8 // accum
    for path, value in parameters(auto).items():
        np.testing.assert_allclose(parameters(own)[path], value, rtol=1e-5, atol=1e-6)
    assert [row["step"] for row in rows_of(own)] == list(range(1, 8 // accum + 1))
    assert rows_of(own)[0]["values"]["rows"] == accum * 4 * FEATURES


def test_keys_of_a_group_are_those_of_its_micro_batches(handle):
    class Keys(OwnLine):
        def train_step(self, model, ps, opt_state, st, *, x, y, rng, accum):
            assert rng.shape == (accum,)
            drawn = jax.vmap(jax.random.normal)(rng)
            stats = {f"n{i}": drawn[i] for i in range(accum)}
            return {"loss": y.mean(), "ps": ps, "st": st, "opt_state": opt_state, "stats": stats}

    n = handle(Keys(accum=2))
    n.train()
    values = [value for row in rows_of(n) for name, value in row["values"].items() if name != "loss"]
    assert len(set(values)) == 4


ACCUM = {
    "not declared": (OwnLine, 2),
    "indivisible": (Grouped, 3),
}


@pytest.mark.parametrize("kind", ACCUM)
def test_what_is_wrong_with_accumulation_is_said_at_set_up(handle, kind, snapshot):
    cls, accum = ACCUM[kind]
    with pytest.raises(NitroError) as caught:
        handle(cls(accum=accum))
    assert placeless(caught.value) == snapshot


def test_a_loss_per_micro_batch_is_refused(handle, snapshot):
    class PerBatch(Grouped):
        def train_step(self, model, ps, opt_state, st, *, y, accum):
            return {"loss": y.mean(1), "ps": ps, "st": st, "opt_state": opt_state}

    with pytest.raises(ExperimentError) as caught:
        handle(PerBatch(accum=2)).train()
    assert placeless(caught.value) == snapshot


def test_optimizers_count_their_own_steps_within_one_step(handle):
    class Critic(TinyGAN):
        """Three steps of the discriminator for one of the generator."""

        def train_step(self, model, ps, opt_state, st, *, x, z):
            opt_d, ps_d, fake = opt_state["disc"], ps["disc"], network(ps["gen"], z)
            for _ in range(3):
                _, grads = backward(disc_loss, ps_d, x, fake)
                opt_d, ps_d = step_optimizer(opt_d, ps_d, grads)
            loss, grads = backward(gen_loss, ps["gen"], ps_d, z)
            opt_g, ps_g = step_optimizer(opt_state["gen"], ps["gen"], grads)
            opt_state = {"gen": opt_g, "disc": opt_d}
            return {"loss": loss, "ps": {"gen": ps_g, "disc": ps_d}, "st": st, "opt_state": opt_state}

    n = handle(Critic())
    n.train()
    state = n.snapshot()["opt_state"]
    assert (state["gen.count"], state["disc.count"]) == (4, 12)
    assert (state["gen.state.0.count"], state["disc.state.0.count"]) == (4, 12)


def test_clipping_and_an_average_inside_a_step(handle):
    class Clipped(OwnLine):
        decay: Device[float] = 0.5

        def build_model(self, rng):
            model, ps, _ = super().build_model(rng)
            return model, ps, {"average": ps}

        def train_step(self, model, ps, opt_state, st, *, x, y):
            loss, grads = backward(lambda p: self.loss(x @ p["w"] + p["b"], y=y), ps)
            grads = clip_by_global_norm(grads, 0.1)
            opt_state, ps = step_optimizer(opt_state, ps, grads)
            average = moving_average(st["average"], ps, self.decay)
            norm = optax.tree.norm(grads)
            st = {"average": average}
            return {"loss": loss, "ps": ps, "st": st, "opt_state": opt_state, "stats": {"norm": norm}}

        def forward(self, model, ps, st, *, x):
            return x @ st["average"]["w"] + st["average"]["b"], st

    n = handle(Clipped(), data={"train": list(splits()["train"])[:2]})
    n.train()
    assert [row["values"]["norm"] for row in rows_of(n)] == pytest.approx([0.1, 0.1], rel=1e-5)
    st, ps = n.snapshot()["st"], parameters(n)
    assert differs({"w": st["average.w"]}, {"w": ps["w"]}, 1e-7)
    np.testing.assert_allclose(n.predict(arrays(4)), arrays(4)["x"] @ st["average.w"] + st["average.b"], rtol=1e-5)


def test_an_average_is_the_one_of_the_formula():
    average, values = {"a": jnp.array([1.0, 2.0])}, {"a": jnp.array([3.0, 0.0])}
    np.testing.assert_allclose(moving_average(average, values, 0.75)["a"], [1.5, 1.5])
    half = moving_average({"a": jnp.ones(2, jnp.bfloat16)}, {"a": jnp.zeros(2, jnp.bfloat16)}, 0.5)["a"]
    assert half.dtype == jnp.bfloat16


def test_metrics_on_the_host_take_what_the_step_returns(handle):
    class OnHost(OwnLine):
        def train_step(self, model, ps, opt_state, st, *, x, y):
            returned = super().train_step(model, ps, opt_state, st, x=x, y=y)
            return {**returned, "stats": {"rows": x, "gain": 2.0}}

        def train_metrics(self, stats, *, y):
            assert isinstance(stats["rows"], np.ndarray)
            assert isinstance(y, np.ndarray)
            return {"largest": stats["rows"].max(), "mean": y.mean()}

        def metrics_residency(self, hook):
            return "host"

    n = handle(OnHost(max_epochs=2))
    n.train()
    batches = list(splits()["train"]) * 2
    for row, batch in zip(rows_of(n), batches, strict=True):
        values = row["values"]
        assert set(values) == {"loss", "gain", "largest", "mean"}
        assert values["largest"] == pytest.approx(batch["x"].max())
        assert values["mean"] == pytest.approx(batch["y"].mean(), rel=1e-5)


def test_stops_prefetch_and_waiting_are_those_of_the_automatic_loop(handle):
    watcher = Watcher()
    data = splits()
    data["train"] = Prefetch(data["train"], workers=2)
    n = handle(OwnLine(max_epochs=3), data=data, observer=watcher)
    n.train()
    plain = handle(OwnLine(max_epochs=3))
    plain.train()
    assert_same(everything(n), everything(plain))
    waited = [facts["data_wait_frac"] for facts in watcher.of("epoch")]
    assert all(0 <= frac < 1 for frac in waited)
    assert [r["values"]["data_wait_frac"] for r in log_of(n.run.path, "data")] == pytest.approx(waited)
    train = Stopping(splits()["train"], 2, lambda: stopped.request_stop())
    stopped = handle(OwnLine(max_epochs=9), data={**splits(), "train": train})
    assert stopped.train().status == "stopped"
    assert (stopped.state.epoch, stopped.state.step) == (0, 2 + 1)


def test_a_device_field_is_set_and_scheduled_without_a_compile(handle):
    class Weighted(OwnLine):
        weight: Device[float] = 1.0

        def train_step(self, model, ps, opt_state, st, *, x, y):
            loss, grads = backward(lambda p: self.weight * self.loss(x @ p["w"] + p["b"], y=y), ps)
            opt_state, ps = step_optimizer(opt_state, ps, grads)
            stats = {"weight": self.weight}
            return {"loss": loss, "ps": ps, "st": st, "opt_state": opt_state, "stats": stats}

    class Scheduled(Weighted):
        def schedules(self):
            return {"device": {"weight": lambda total: lambda step: step + 1.0}}

    n = handle(Weighted())
    n.train()
    m = handle(Weighted())
    with Compiles() as none:
        m.set_device(weight=0.5)
        m.train()
    assert none.misses == 0
    assert [row["values"]["weight"] for row in rows_of(m)] == [0.5] * 4
    s = handle(Scheduled())
    s.train()
    assert [row["values"]["weight"] for row in rows_of(s)] == [1.0, 2.0, 3.0, 4.0]


class Paths(TinyGAN):
    def schedules(self):
        return {
            "opt": {"disc": {"learning_rate": lambda total: lambda step: 0.2 * (step + 1)}, "gen.b1": 0.5},
            "learning_rate": lambda total: lambda step: 0.1 / (step + 1),
        }


def test_schedules_are_bound_by_path_and_absolute(handle):
    n = handle(Paths())
    assert [(row.key, row.target) for row in n.report.schedules] == [
        ("opt.disc.learning_rate", "learning_rate of disc"),
        ("opt.gen.b1", "b1 of gen"),
        ("learning_rate", "learning_rate of gen"),
    ]
    n.train()
    state = n.snapshot()["opt_state"]
    assert state["gen.learning_rate"] == pytest.approx(0.1 / 4)
    assert state["disc.learning_rate"] == pytest.approx(0.8)
    assert (state["gen.b1"], state["disc.b1"]) == (np.float32(0.5), np.float32(0.9))
    assert [row["values"]["opt.disc.learning_rate"] for row in rows_of(n)] == pytest.approx([0.2, 0.4, 0.6, 0.8])


def test_a_scheduled_rate_is_the_one_that_the_step_uses(handle):
    class Halved(OwnLine):
        def schedules(self):
            return {"learning_rate": lambda total: lambda step: 0.05 / (step + 1)}

    n = handle(Halved(), data={"train": splits()["train"]})
    n.train()
    w, b = np.zeros(FEATURES), 0.0
    for step, batch in enumerate(splits()["train"]):
        error = batch["x"] @ w + b - batch["y"]
        rate = 0.05 / (step + 1)
        w, b = w - rate * 2 * (error[:, None] * batch["x"]).mean(0), b - rate * 2 * error.mean()
    np.testing.assert_allclose(parameters(n)["w"], w, rtol=1e-4)


WRONG_SCHEDULES = {
    "unknown path": {"opt": {"gem": {"learning_rate": 0.1}}},
    "unknown field": {"opt": {"gen": {"learning_rat": 0.1}}},
    "unknown bare key": {"weight_decay": 0.1},
    "not a number": {"opt": {"gen": {"nesterov": 0.1}}},
    "into the state": {"opt": {"gen": {"state": {"count": 1}}}},
    "the count": {"opt": {"gen": {"count": 1.0}}},
    "an optimizer": {"opt": {"gen": 0.1}},
    "two things": {"eps": 0.1},
    "not finite": {"learning_rate": float("nan")},
}


@pytest.mark.parametrize("kind", WRONG_SCHEDULES)
def test_what_a_schedule_may_not_name(handle, kind, snapshot):
    class Wrong(TinyGAN):
        eps: Device[float] = 0.1

        def setup_optimizers(self, model, ps, st, mesh):
            return {name: optimizer_state(optax.adam, ps[name], learning_rate=0.1, nesterov=True) for name in ps}

        def schedules(self):
            return WRONG_SCHEDULES[kind]

    with pytest.raises(ExperimentError) as caught:
        handle(Wrong())
    assert placeless(caught.value) == snapshot


def test_the_mode_is_shown_in_every_report_and_record(handle):
    n = handle(TinyGAN())
    n.train()
    assert n.report.to_json()["mode"] == "manual"
    (record,) = [r for r in log_of(n.run.path) if r.get("key") == "binding_report"]
    assert record["value"]["mode"] == "manual"
    assert [(row.group, row.rule, row.parameters) for row in n.report.groups] == [
        ("disc", "adam", 26),
        ("gen", "adam", 33),
    ]
    assert n.report.groups[0].learning_rate == 0.01
    assert [(row.hook, row.fields) for row in n.report.hooks] == [("train_step", ("x", "z"))]
    json.dumps(n.report.to_json())
    plain, screen = plain_report(n.report, False), binding_lines(n.report)
    assert "binding mode manual" in plain
    assert [line.split(" rule=")[0] for line in plain if "rule=" in line] == [
        "binding optimizer disc",
        "binding optimizer gen",
    ]
    assert any(line.split() == ["mode", "manual:", "train_step", "owns", "the", "step"] for line in screen)


def test_declining_keeps_the_step_and_trains_automatically(handle):
    n = handle(AutoLine())
    assert n.report.notes == ["manual_training returns False: train_step is not called, and the automatic loop trains"]
    with Compiles() as programs:
        n.train()
    assert "step" not in programs.programs


def test_the_mode_may_hang_on_a_field_and_is_frozen(handle):
    class Either(OwnLine):
        manual: bool = True

        def manual_training(self):
            return self.manual

        def optimizer(self):
            return optax.sgd

    assert [handle(Either(manual=flag)).report.mode for flag in (True, False)] == ["manual", "automatic"]
    n = handle(Either(), manual=False)
    assert n.report.mode == "automatic"
    assert n.train().status == "finished"


def test_a_handle_says_that_its_step_was_redefined_and_keeps_it(handle):
    class Redefined(OwnLine):
        pass

    watcher = Watcher()
    n = handle(Redefined(), observer=watcher)
    Redefined.manual_training = lambda self: False
    n.train()
    assert [text for text in watcher.warnings if "redefined" in text and "`manual_training`" in text]
    assert n.report.mode == "manual"


def test_what_nitro_does_not_do_in_manual_mode_is_said(handle, snapshot):
    class Asking(OwnLine):
        def optimizer(self):
            return optax.sgd

        def train_metrics(self, outputs):
            return {}

    n = handle(Asking(gradient_clip_norm=1.0, weight_decay=0.1, ema_decay=0.9))
    assert n.report.notes == snapshot
    with pytest.raises(ExperimentError) as caught:
        handle(OwnLine(evaluate_with_ema=True, ema_decay=0.9))
    assert placeless(caught.value) == snapshot


class Bare(TinyGAN):
    """With a validation split, and nothing to evaluate it with."""

    def build_data(self, dist):
        data = super().build_data(dist)
        return {**data, "val": data["train"]}


def test_a_val_split_that_nothing_can_evaluate_is_refused(handle, snapshot):
    with pytest.raises(ExperimentError) as caught:
        handle(Bare())
    assert placeless(caught.value) == snapshot


def test_without_forward_there_is_no_evaluation_and_no_prediction(handle, snapshot):
    n = handle(TinyGAN())
    said = []
    for attempt in (lambda: n.evaluate("train"), lambda: n.predict({"z": np.zeros((1, 2), np.float32)})):
        with pytest.raises(ExperimentError) as caught:
            attempt()
        said.append(str(caught.value))
    assert said == snapshot


def test_a_loss_alone_gives_val_loss(handle):
    class Lossy(Line):
        setup_optimizers = OwnLine.setup_optimizers
        train_step = OwnLine.train_step

    n = handle(Lossy())
    n.train()
    assert np.isfinite(n.history[0]["val_loss"])


def test_splits_may_have_other_fields_than_training(handle):
    class Split(TinyGAN):
        def build_data(self, dist):
            train = super().build_data(dist)["train"]
            z = np.zeros((6, 2), np.float32)
            return {"train": train, "val": ArrayLoader(noise=z, batch_size=4)}

        def forward(self, model, ps, st, *, noise):
            return network(ps["gen"], noise), st

        def metrics(self, outputs):
            return {"mean": (outputs.sum(), outputs.size)}

    n = handle(Split(max_epochs=2))
    n.train()
    assert np.isfinite(n.history[-1]["val_mean"])
    assert n.predict({"noise": np.zeros((2, 2), np.float32)}).shape == (2, FEATURES)
    with pytest.raises(ExperimentError, match="split 'train' has no field 'noise'"):
        n.evaluate("train")


def test_other_shapes_in_training_are_another_program(handle):
    class Pooled(OwnLine):
        def train_step(self, model, ps, opt_state, st, *, x, y):
            return super().train_step(model, ps, opt_state, st, x=x.mean(1), y=y)

        def forward(self, model, ps, st, *, x):
            return x @ ps["w"] + ps["b"], st

    batches = [{"x": np.ones((4, n, FEATURES), np.float32), "y": np.ones(4, np.float32)} for n in (2, 3)]
    n = handle(Pooled(), data={"train": batches})
    with Compiles() as programs:
        n.train()
    assert programs.programs == ["step", "step"]
    assert n.state.step == 2
