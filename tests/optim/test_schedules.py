"""Schedules: what a key means, what a step gets, and that every kind really takes effect."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nitro_cli import ArrayLoader, Device, cache_stats
from nitro_cli.errors import ExperimentError
from nitro_cli.loggers.jsonl import read_log
from nitro_cli.optim.schedules import BLOCK, Table, bind, parse
from tests.optim.plans import Bare, TwoGroups, assert_close, gradients, optax_run, params, plan_for, run
from tests.toys import Line, Measured, arrays, parameters

FIELDS = {
    "smoothing": jax.ShapeDtypeStruct((), np.dtype("float32")),
    "b1": jax.ShapeDtypeStruct((), np.dtype("int32")),
    "pair": None,
}


def table(e, total=1000, fields=FIELDS, own_decay=False):
    plan = plan_for(e, params())
    bound = bind(parse(e.schedules(), type(e).__name__), plan, fields, total, type(e).__name__, own_decay)
    return plan, Table(bound, plan, fields, total, type(e).__name__)


def scheduled(declared, base=Bare, factory=optax.adam, **fields):
    body = {"schedules": lambda self: declared, "optimizer": lambda self: factory, "__module__": __name__}
    return type("Scheduled", (base,), body)(**fields)


CURVES = {
    "constant": optax.constant_schedule(1e-3),
    "linear": optax.linear_schedule(1e-3, 1e-5, 1000),
    "linear, begins late": optax.linear_schedule(0.3, 0.7, 777, 50),
    "polynomial": optax.polynomial_schedule(1e-3, 1e-5, 1, 1000),
    "polynomial, square": optax.polynomial_schedule(1e-3, 1e-5, 2, 1000),
    "polynomial, root": optax.polynomial_schedule(1e-3, 1e-5, 0.5, 900, 30),
    "cosine": optax.cosine_decay_schedule(1e-3, 1000),
    "cosine, alpha": optax.cosine_decay_schedule(3e-4, 900, alpha=0.1),
    "cosine, exponent": optax.cosine_decay_schedule(3e-4, 900, alpha=0.1, exponent=1.5),
    "exponential": optax.exponential_decay(1e-3, 33, 0.97, 10, end_value=3e-4),
    "exponential, staircase": optax.exponential_decay(1e-3, 100, 0.9, staircase=True),
    "warm-up, cosine": optax.warmup_cosine_decay_schedule(0.0, 1e-3, 100, 1000, 1e-5),
    "warm-up, cosine, exponent": optax.warmup_cosine_decay_schedule(1e-5, 3e-3, 77, 1000, 1e-5, exponent=1.3),
    "warm-up, exponential": optax.warmup_exponential_decay_schedule(0.0, 1e-3, 100, 50, 0.9, end_value=1e-4),
    "warm-up, constant": optax.warmup_constant_schedule(0.0, 1e-3, 100),
    "one cycle, cosine": optax.cosine_onecycle_schedule(1000, 1e-3),
    "one cycle, linear": optax.linear_onecycle_schedule(1000, 1e-3),
    "piecewise constant": optax.piecewise_constant_schedule(1e-3, {100: 0.1, 500: 0.3, 700: 0.7}),
    "piecewise linear": optax.piecewise_interpolate_schedule("linear", 1e-3, {100: 0.1, 500: 0.3, 700: 0.7}),
    "piecewise cosine": optax.piecewise_interpolate_schedule("cosine", 1e-3, {100: 0.1, 500: 0.3, 700: 0.7}),
    "joined": optax.join_schedules(
        [optax.linear_schedule(0, 1e-3, 50), optax.constant_schedule(1e-3), optax.exponential_decay(1e-3, 10, 0.9)],
        [50, 300],
    ),
    "warm restarts": optax.sgdr_schedule(
        [
            {"init_value": 0.0, "peak_value": 1e-3 / k, "warmup_steps": 20, "decay_steps": 333, "end_value": 1e-5}
            for k in (1, 2, 4)
        ]
    ),
    "own": lambda step: 0.7 + 0.3 * jnp.sin(step / 17) * 2.0 - jnp.cos(step / 3) * 1e-3,
    "own, compiled": jax.jit(lambda step: 0.7 + 0.3 * jnp.sin(step / 17) * 2.0 - jnp.cos(step / 3) * 1e-3),
    "own, from a table": lambda step: jnp.linspace(0.0, 1.0, 1000)[step] / 3.0,
    "own, in Python": lambda step: 0.1 * 0.99**step,
}


@pytest.mark.parametrize("name", CURVES)
def test_a_thousand_steps_have_exactly_the_values_of_the_schedule_at_0_to_999(name):
    curve = CURVES[name]
    plan, values = table(scheduled({"learning_rate": curve}))
    column = plan.column("default", "learning_rate")
    expected = [float(curve(step)) for step in range(1000)]
    got = np.array([values.vector(step)[column] for step in range(1000)])
    assert got.dtype == np.float32
    assert got.tolist() == np.float32(expected).tolist()
    assert [values.shown(step)["learning_rate"] for step in range(1000)] == expected
    assert values.bound[0].kind == ("plain" if name in ("constant", "own, in Python") else "traced")


def remembering(learning_rate):
    """Gradient descent that keeps the rate of each of its first 1,000 steps."""

    def init(params):
        return jnp.zeros(1000), jnp.zeros((), jnp.int32)

    def update(gradients, state, params=None):
        rates, step = state
        return jax.tree.map(lambda g: -learning_rate * g, gradients), (rates.at[step].set(learning_rate), step + 1)

    return optax.GradientTransformation(init, update)


def test_a_thousand_steps_of_a_run_take_exactly_the_values_at_0_to_999_and_log_them(handle):
    curve = optax.warmup_cosine_decay_schedule(0.0, 1e-2, 100, 1000, 1e-5)

    class Thousand(Line):
        max_epochs: int = 1

        def build_data(self, dist):
            return {"train": ArrayLoader(arrays(4000), batch_size=4)}

        def optimizer(self):
            return remembering

        def param_group(self, path, leaf):
            return "slow" if path == "w" else "default"

        def group_learning_rate(self, group):
            return self.learning_rate / 3 if group == "slow" else None

        def schedules(self):
            return {"learning_rate": curve}

    n = handle(Thousand())
    n.train()
    assert n.state.step == 1000
    expected = [float(curve(step)) for step in range(1000)]
    rows = [r for r in read_log(n.run.log_path) if r["type"] == "metrics" and r["context"] == "train"]
    assert [r["values"]["learning_rate"] for r in rows] == expected
    slow, fast = sorted((leaf for leaf in n.state.opt_state if leaf.shape == (1000,)), key=lambda rates: rates[500])
    assert np.asarray(fast).tolist() == expected
    ratio = n.setup.recipe.plan.group("slow").ratio
    assert np.asarray(slow).tolist() == [float(np.float32(value * ratio)) for value in expected]


def test_a_function_of_ones_own_gets_the_step_as_optax_gives_it():
    def own(step):  # half of it is Python's arithmetic where the step is a Python number
        return jnp.where(step < 100, step * 0.37e-3, 1e-3 * jnp.sqrt(100 / jnp.maximum(step, 1)))

    plan, values = table(scheduled({"learning_rate": own}))
    column = plan.column("default", "learning_rate")
    expected = [float(own(jnp.int32(step))) for step in range(1000)]
    assert [float(values.vector(step)[column]) for step in range(1000)] == expected


def test_blocks_join_without_a_seam():
    curve = optax.linear_schedule(1.0, 0.0, 3 * BLOCK)
    plan, values = table(scheduled({"learning_rate": curve}), total=3 * BLOCK)
    column = plan.column("default", "learning_rate")
    steps = [0, BLOCK - 1, BLOCK, 2 * BLOCK - 1, 2 * BLOCK, 3 * BLOCK - 1, 5]
    got = [float(values.vector(step)[column]) for step in steps]
    assert got == pytest.approx([1 - step / (3 * BLOCK) for step in steps], abs=1e-6)


def test_factories_schedules_and_numbers():
    plan, values = table(
        scheduled({"learning_rate": lambda total: optax.linear_schedule(total * 1.0, 0.0, total), "b1": 0.5}, Bare),
        total=40,
        fields={},
    )
    assert values.vector(0)[plan.column("default", "learning_rate")] == 40.0
    assert values.vector(39)[plan.column("default", "learning_rate")] == pytest.approx(1.0)
    assert values.vector(17)[plan.column("default", "b1")] == 0.5
    assert [b.constant for b in values.bound] == [False, True]


def test_a_host_function_is_called_with_the_step():
    asked = []

    def by_hand(step):
        asked.append(step)
        return 0.1 if step < 2 else 0.1 * math.exp(-float(step))

    plan, values = table(scheduled({"learning_rate": by_hand}))
    asked.clear()
    column = plan.column("default", "learning_rate")
    assert [float(values.vector(step)[column]) for step in range(4)] == pytest.approx(
        [0.1, 0.1, 0.1 * math.exp(-2), 0.1 * math.exp(-3)]
    )
    assert asked == [0, 1, 2, 3]


def test_a_group_path_overrides_only_its_group_and_ratios_hold_at_every_step():
    class Ratios(TwoGroups):
        def group_learning_rate(self, group):
            return self.learning_rate / 4 if group == "encoder" else None

        def schedules(self):
            return {"learning_rate": optax.linear_schedule(1.0, 0.0, 100)}

    plan, values = table(Ratios())
    slow, fast = plan.column("encoder", "learning_rate"), plan.column("default", "learning_rate")
    for step in (0, 13, 99):
        assert values.vector(step)[slow] == pytest.approx(values.vector(step)[fast] / 4)

    class Own(TwoGroups):
        def schedules(self):
            return {
                "learning_rate": optax.linear_schedule(1.0, 0.0, 100),
                "opt": {"encoder": {"learning_rate": optax.constant_schedule(0.25)}},
            }

    plan, values = table(Own())
    assert values.vector(50)[plan.column("encoder", "learning_rate")] == pytest.approx(0.25)
    assert values.vector(50)[plan.column("default", "learning_rate")] == pytest.approx(0.5)


REACHED = {
    "learning_rate": (optax.sgd, 0.1),
    "momentum": (functools.partial(optax.sgd, momentum=0.9), 0.5),
    "b1": (optax.adam, 0.5),
    "b2": (optax.adam, 0.9),
    "eps": (optax.adam, 0.1),
    "eps_root": (optax.adam, 0.1),
    "decay": (functools.partial(optax.rmsprop, decay=0.9), 0.1),
    "threshold": (optax.radam, 1e9),
}


@pytest.mark.parametrize("name", REACHED)
def test_every_hyperparameter_takes_effect_as_in_plain_optax(name):
    """Half of the steps at the rule's own value, half at another: the parameters follow a rule given both."""
    factory, other = REACHED[name]
    curve = optax.piecewise_constant_schedule(1.0, {2: 0.0})
    e = scheduled(
        {name: lambda step: curve(step) * 0.3 + other * (1 - curve(step))}, factory=factory, learning_rate=0.3
    )
    plan, values = table(e, fields={})
    tree = params()
    vectors = [values.vector(step).copy() for step in range(5)]
    built = factory(learning_rate=0.3)
    state, reference = built.init(tree), tree
    for step in range(5):
        value = 0.3 if step < 2 else other
        built = factory(**{"learning_rate": 0.3, name: value})
        changes, state = built.update(gradients(step), state, reference)
        reference = optax.apply_updates(reference, changes)
    # radam's threshold branch subtracts nearly equal numbers, so the last digits depend on where a constant is folded
    assert_close(run(plan, tree, vectors=vectors), reference, atol=2e-3 if name == "threshold" else 1e-5)
    unscheduled = run(plan_for(scheduled({}, factory=factory, learning_rate=0.3), tree), tree)
    assert not np.allclose(unscheduled["head"]["kernel"], reference["head"]["kernel"], atol=1e-2)


def test_a_decay_schedule_is_scaled_by_the_rate_and_needs_no_knob():
    e = scheduled({"weight_decay": optax.linear_schedule(0.0, 0.4, 4)}, factory=optax.sgd, learning_rate=0.1)
    plan, values = table(e)
    tree = params()
    reference = tree
    for step in range(5):
        rate, decay = 0.1, float(optax.linear_schedule(0.0, 0.4, 4)(step))
        reference = jax.tree.map(
            lambda p, g, rate=rate, decay=decay: p - rate * (g + decay * p * (p.ndim > 1)), reference, gradients(step)
        )
    assert_close(run(plan, tree, vectors=[values.vector(s).copy() for s in range(5)]), reference)


def test_clip_and_average_can_be_scheduled():
    e = scheduled({"gradient_clip_norm": 2.0, "ema_decay": optax.linear_schedule(0.0, 0.9, 10)})
    plan, values = table(e)
    assert plan.clip
    assert plan.ema
    assert values.vector(5)[plan.column("", "gradient_clip_norm")] == 2.0
    assert values.vector(5)[plan.column("", "ema_decay")] == pytest.approx(0.45)


class Warm(Measured):
    """A Device field and the rate follow curves."""

    max_epochs: int = 2
    scale: Device[float] = 1.0

    def schedules(self):
        return {
            "scale": lambda total: optax.linear_schedule(2.0, 1.0, total),
            "learning_rate": lambda total: optax.linear_schedule(0.1, 0.0, total),
        }


def test_a_run_with_schedules_trains_with_two_programs_and_logs_their_values(handle, empty_cache):
    n = handle(Warm())
    n.train()
    assert cache_stats().misses == 3
    rows = [r for r in read_log(n.run.log_path) if r["type"] == "metrics" and r["context"] == "train"]
    assert [r["values"]["learning_rate"] for r in rows] == pytest.approx([0.1 * (1 - s / 8) for s in range(8)])
    assert [r["values"]["scale"] for r in rows] == pytest.approx([2.0 - s / 8 for s in range(8)])
    ps = {"b": 0.0, "w": jnp.zeros(3)}
    batches = list(n.splits["train"])
    for step in range(8):
        batch = batches[step % 4]

        def loss(ps, batch=batch, scale=2.0 - step / 8):
            return ((scale * (batch["x"] @ ps["w"] + ps["b"]) - batch["y"]) ** 2).mean()

        ps = jax.tree.map(lambda p, g, s=step: p - 0.1 * (1 - s / 8) * g, ps, jax.grad(loss)(ps))
    np.testing.assert_allclose(parameters(n)["w"], ps["w"], rtol=1e-5)


def test_changing_a_schedule_rate_decay_or_average_compiles_nothing(handle):
    class Base(Warm):
        weight_decay: float = 0.1
        ema_decay: float = 0.5
        start: float = 2.0

        def no_decay(self, path, leaf):
            return path == "b"

        def schedules(self):
            return {"scale": optax.linear_schedule(self.start, 1.0, 8), "learning_rate": lambda total: 0.01}

    handle(Base()).train()
    before = cache_stats()
    for changes in (
        {"weight_decay": 0.3},
        {"ema_decay": 0.9},
        {"start": 3.0},
        {"learning_rate": 0.5},
        {"max_epochs": 3},
    ):
        handle(Base(**changes)).train()
    assert cache_stats().misses == before.misses


def test_steps_of_a_group_of_micro_batches_share_one_value(handle):
    class Grouped(Warm):
        accum: int = 2

    n = handle(Grouped())
    n.train()
    rows = [r for r in read_log(n.run.log_path) if r["type"] == "metrics" and r["context"] == "train"]
    assert [r["values"]["scale"] for r in rows] == pytest.approx([2.0, 1.75, 1.5, 1.25])


class OneField(Line):
    scale: Device[float] = 1.0
    pair: Device[tuple[float, float]] = (1.0, 2.0)
    b1: Device[float] = 0.1


MISTAKES = {
    "not a dict": [1],
    "unknown": {"learnin_rate": 0.1},
    "another tool's name": {"lr": 0.1},
    "means two things": {"b1": 0.1},
    "a namespace is no schedule": {"opt": 0.1},
    "unknown group": {"opt.decoder.learning_rate": 0.1},
    "not in the group": {"opt.default.smoothing": 0.1},
    "too deep": {"opt": {"default": {"adam": {"b1": 0.1}}}},
    "device path": {"device.default.smoothing": 0.1},
    "not a Device field": {"device.learning_rate": 0.1},
    "no schedule": {"learning_rate": "cosine"},
    "nan": {"learning_rate": float("nan")},
    "the factory fails": {"learning_rate": lambda total: optax.cosine_decay_schedule(1e-3, total - 1000)},
    "the curve is not finite": {"learning_rate": lambda step: 0.1 / (step - 3.0)},
    "gives arrays": {"learning_rate": lambda step: jnp.ones(2) * step},
    "gives texts": {"learning_rate": lambda step: "fast"},
    "fails on the way": {"learning_rate": lambda step: [0.1, 0.2][int(step)]},
    "wrong shape": {"smoothing": lambda step: jnp.ones(2) * step},
    "wrong shape, by hand": {"smoothing": lambda step: [[0.1, 0.2], [0.3, 0.4]][int(step) % 2]},
    "given twice": {"opt.learning_rate": 0.1, "opt": {"learning_rate": 0.2}},
    "two keys for one rate": {"learning_rate": 0.1, "opt.learning_rate": 0.2},
    "two keys for one field": {"smoothing": 0.1, "device.smoothing": 0.2},
    "an empty part": {"opt..learning_rate": 0.1},
    "a group": {"opt.default": 0.1},
    "takes two": {"learning_rate": lambda total, peak: optax.constant_schedule(peak)},
    "a clip below zero": {"gradient_clip_norm": -1.0},
    "an average past one": {"ema_decay": lambda step: 0.5 + step},
    "a beta of one": {"opt.b1": optax.linear_schedule(0.5, 1.0, 3)},
    "a rate below zero": {"learning_rate": lambda total: optax.linear_schedule(0.1, -0.1, total)},
    "a decay below zero": {"weight_decay": -0.1},
    "a clip of nothing": {"gradient_clip_norm": 0.0},
    "infinite in the program": {"learning_rate": lambda step: step * 1e39},
    "one in the program": {"opt.b1": lambda step: 0.99999999},
    "a clip by group": {"opt.default.gradient_clip_norm": 1.0},
    "drives nothing": {"learning_rate": 0.1, "opt.default.learning_rate": 0.2},
    "several arrays": {"pair": 0.5},
}


def five_steps(e):
    _, values = table(e)
    for step in range(5):
        values.vector(step)
        values.fields(step)


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, snapshot):
    with pytest.raises(ExperimentError) as caught:
        five_steps(scheduled(MISTAKES[name]))
    assert str(caught.value) == snapshot


def takes_more(learning_rate, momentum=0.9):
    """A factory that has a number and forgets it."""
    return optax.sgd(learning_rate)


def keeps_its_rate(learning_rate):
    return optax.inject_hyperparams(optax.sgd)(learning_rate)


class Whole(Bare):
    def optimizer(self, group, hp):
        return optax.adam(hp.learning_rate)

    def schedules(self):
        return {"weight_decay": 0.1}


CHANGES_NOTHING = {
    "adagrad reads it once": scheduled(
        {"initial_accumulator_value": optax.linear_schedule(0.1, 0.2, 10)}, factory=optax.adagrad
    ),
    "rmsprop reads it once": scheduled({"opt.default.initial_scale": 0.5}, factory=optax.rmsprop),
    "a rate in the state": scheduled({"learning_rate": 0.1}, factory=keeps_its_rate),
    "a factory forgets it": scheduled({"momentum": 0.5}, factory=takes_more),
    "a transformation of one's own": Whole(),
}


@pytest.mark.parametrize("name", CHANGES_NOTHING)
def test_a_schedule_that_would_change_nothing_is_refused(name, snapshot):
    with pytest.raises(ExperimentError) as caught:
        table(CHANGES_NOTHING[name])
    assert str(caught.value) == snapshot


def test_a_bare_key_drives_those_groups_that_read_the_number():
    class Mixed(TwoGroups):
        def optimizer(self, group):
            return takes_more if group == "encoder" else functools.partial(optax.sgd, momentum=0.9)

        def schedules(self):
            return {"momentum": 0.5, "learning_rate": 0.1}

    plan, values = table(Mixed())
    assert [b.target for b in values.bound] == ["momentum of default", "learning_rate of default, encoder"]
    assert plan.group("encoder").unread == ("momentum",)


def test_the_rate_of_a_rule_that_ignores_it_still_scales_nitros_decay():
    def ignores(learning_rate):
        return optax.scale(-1e-3)

    assert plan_for(scheduled({}, factory=ignores), params()).groups[0].unread == ("learning_rate",)
    _, values = table(scheduled({"learning_rate": 0.1}, factory=ignores, weight_decay=0.1))
    assert [b.target for b in values.bound] == ["learning_rate of default"]


def test_a_group_path_and_a_bare_key_are_no_rivals_and_each_says_what_it_drives():
    both = {"learning_rate": 0.1, "opt.encoder.learning_rate": 0.2}
    plan, values = table(scheduled(both, base=TwoGroups))
    other = next(group.name for group in plan.groups if group.name != "encoder")
    assert values.vector(0)[plan.column("encoder", "learning_rate")] == pytest.approx(0.2)
    assert [b.target for b in values.bound] == [f"learning_rate of {other}", "learning_rate of encoder"]


def test_a_schedule_on_the_host_is_called_once_for_a_step_and_the_log_shows_what_was_used():
    asked = []

    def draw(step):
        asked.append(int(step))
        return [0.1, 0.2, 0.3][len(asked) % 3]

    plan, values = table(scheduled({"learning_rate": draw}), total=4)
    for step in range(4):
        used = values.vector(step)[plan.column("default", "learning_rate")]
        assert values.shown(step)["learning_rate"] == pytest.approx(used)
    assert asked == [4, 0, 1, 2, 3]  # first with the horizon, for it might be a factory


def test_without_a_train_split_a_field_keeps_its_own_value_and_the_report_says_so(handle):
    class Scheduled(OneField):
        def schedules(self):
            return {"scale": optax.linear_schedule(1.0, 0.0, 10), "learning_rate": 0.1}

    n = handle(Scheduled(), data={"val": ArrayLoader(arrays(8), batch_size=4)})
    assert n.report.schedules == []
    assert [note for note in n.report.notes if "scale" in note] == [
        "Device field 'scale' has its own value: its schedule needs the steps of a run, and there is no train split"
    ]
    assert n.evaluate("val")


def test_a_held_value_is_held_past_the_horizon_only():
    _, values = table(scheduled({"learning_rate": lambda step: [0.1, 0.2, 0.3][int(step)]}), total=3)
    with pytest.warns(UserWarning, match="holds"):
        assert values.vector(3)[0] == pytest.approx(0.3)
    assert values.vector(1)[0] == pytest.approx(0.2)


@pytest.mark.parametrize("value", [np.array(0.25), jnp.array(0.25), np.float32(0.25), lambda step: jnp.bfloat16(0.25)])
def test_scalars_of_every_library_are_numbers(value):
    _, values = table(scheduled({"learning_rate": value}))
    assert values.vector(2)[0] == pytest.approx(0.25)


def test_a_faulty_curve_ends_a_run_before_any_work_and_leaves_no_folder(handle, tmp_path, monkeypatch):
    """The fault lies at the last step alone."""
    monkeypatch.chdir(tmp_path)

    class Faulty(Warm):
        def schedules(self):
            return {"learning_rate": lambda total: lambda step: jnp.where(step == total - 1, jnp.nan, 0.1)}

    with pytest.raises(ExperimentError, match=r"'learning_rate' is nan at step 7 of 8"):
        handle(Faulty()).train()
    assert not [path for path in tmp_path.rglob("*") if path.name == "run.json"]


def test_a_bare_decay_schedule_does_not_silently_override_the_hook(snapshot):
    with pytest.raises(ExperimentError) as caught:
        table(scheduled({"weight_decay": 0.1}), own_decay=True)
    assert str(caught.value) == snapshot


def test_past_the_horizon_a_host_schedule_holds_its_last_value_and_says_so_once():
    plan, values = table(scheduled({"learning_rate": lambda step: [0.3, 0.2, 0.1][int(step)]}), total=3)
    column = plan.column("default", "learning_rate")
    assert [float(values.vector(step)[column]) for step in range(3)] == pytest.approx([0.3, 0.2, 0.1])
    with pytest.warns(UserWarning, match="holds its last value"):
        assert values.vector(3)[column] == pytest.approx(0.1)
    assert values.vector(4)[column] == pytest.approx(0.1)


def test_past_the_horizon_a_traced_schedule_holds_its_last_value():
    plan, values = table(scheduled({"learning_rate": optax.linear_schedule(1.0, 0.0, 10)}), total=5)
    column = plan.column("default", "learning_rate")
    assert values.vector(9)[column] == values.vector(4)[column] == pytest.approx(0.6)


def test_one_cycle_equals_pytorchs_formula():
    """``OneCycleLR`` with two cosine phases, from its published formula: up from max/25 to max over 30 % of the steps
    less one, down to max/25e4 over the rest."""
    total, top = 50, 0.1
    up = 0.3 * total - 1

    def formula(step):
        def between(a, b, share):
            return b + (a - b) / 2 * (1 + math.cos(math.pi * share))

        if step <= up:
            return between(top / 25, top, step / up)
        return between(top, top / 25 / 1e4, (step - up) / (total - 1 - up))

    curve = optax.cosine_onecycle_schedule(
        total - 1, top, pct_start=up / (total - 1), div_factor=25, final_div_factor=1e4
    )
    plan, values = table(scheduled({"learning_rate": curve}), total=total)
    column = plan.column("default", "learning_rate")
    got = [float(values.vector(step)[column]) for step in range(total)]
    assert got == pytest.approx([formula(step) for step in range(total)], rel=2e-5, abs=1e-8)


@pytest.mark.parametrize("curve", [lambda step: jnp.where(step == 50, jnp.nan, 0.1), lambda step: jnp.ones(2) * step])
def test_a_plot_of_a_curve_that_no_run_could_follow_is_refused(curve):
    _, values = table(scheduled({"learning_rate": curve}), 101)
    with pytest.raises(ExperimentError, match="'learning_rate'"):
        values.curves(points=5)


def test_curves_for_a_plot():
    _, values = table(
        scheduled({"learning_rate": optax.linear_schedule(1.0, 0.0, 100), "eps": lambda step: [5][0]}), 101
    )
    curves = values.curves(points=5)
    assert [step for step, _ in curves["learning_rate"]] == [0, 25, 50, 75, 100]
    assert [value for _, value in curves["learning_rate"]] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert [value for _, value in curves["eps"]] == [5.0] * 5


def test_optax_run_is_a_reference():
    assert_close(optax_run(optax.sgd(0.0), params()), params())
