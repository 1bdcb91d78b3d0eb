"""Every rule gives what plain optax gives on the same gradients, joined or not, in one group and in two."""

from __future__ import annotations

import functools

import jax
import numpy as np
import optax
import pytest
from optax import contrib

from nitro_cli import GraphConst, cache_stats
from nitro_cli.errors import ExperimentError
from nitro_cli.optim.elementwise import is_elementwise
from nitro_cli.optim.plan import Plan
from nitro_cli.programs.cache import cache_entries
from tests.optim.plans import Bare, TwoGroups, assert_close, optax_run, params, plan_for, run
from tests.toys import Measured

RATE = 0.02
ELEMENTWISE = {
    "sgd": optax.sgd,
    "momentum": functools.partial(optax.sgd, momentum=0.9, nesterov=True),
    "adam": optax.adam,
    "adamw": functools.partial(optax.adamw, weight_decay=0.05),
    "radam": optax.radam,
    "rmsprop": functools.partial(optax.rmsprop, decay=0.8),
    "lion": optax.lion,
}
ON_THE_TREE = {
    "adafactor": optax.adafactor,
    "lamb": functools.partial(optax.lamb, weight_decay=0.01),
    "lars": functools.partial(optax.lars, weight_decay=0.01),
    "muon": contrib.muon,
}
ALL_RULES = ELEMENTWISE | ON_THE_TREE


def experiment(factory, base=Bare, **fields):
    return type("Chosen", (base,), {"optimizer": lambda self: factory, "__module__": __name__})(
        learning_rate=RATE, **fields
    )


@pytest.mark.parametrize("name", ALL_RULES)
@pytest.mark.parametrize("base", [Bare, TwoGroups])
@pytest.mark.parametrize("layout", ["flat", "tree"])
def test_five_steps_equal_plain_optax(name, base, layout):
    tree = params()
    plan = plan_for(experiment(ALL_RULES[name], base), tree, layout=layout)
    assert_close(run(plan, tree), optax_run(ALL_RULES[name](learning_rate=RATE), tree))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_wise_rules_are_joined(name):
    plan = plan_for(experiment(ELEMENTWISE[name]), params())
    assert len(plan.layout.buffers) == 1
    assert plan.layout.buffers[0].spec.shape == (5 * 4 + 4 + 4 * 4 + 4 + 4 * 3 + 3,)


@pytest.mark.parametrize("name", ON_THE_TREE)
def test_rules_that_look_at_whole_leaves_are_not(name):
    plan = plan_for(experiment(ON_THE_TREE[name]), params(), layout="flat")
    assert len(plan.layout.buffers) == 6


def momentum_beside_a_count(learning_rate):
    """An element-wise rule that keeps a count among the leaves."""

    def init(params):
        return {**jax.tree.map(lambda leaf: 0.0 * leaf, params), "count": 0}

    def update(gradients, state, params=None):
        kept = {name: state[name] for name in gradients}
        kept = jax.tree.map(lambda old, leaf: 0.9 * old + leaf, kept, gradients)
        return jax.tree.map(lambda old: -learning_rate * old, kept), {**kept, "count": state["count"] + 1}

    return optax.GradientTransformation(init, update)


def test_a_state_that_is_not_the_parameters_tree_alone_is_not_taken_apart():
    tree = params()
    plan = plan_for(experiment(momentum_beside_a_count), tree, layout="tree")
    assert plan.groups[0].elementwise
    assert_close(run(plan, tree), optax_run(optax.sgd(RATE, momentum=0.9), tree))


def is_bias(tree):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "bias", tree)


BY_NAME = {
    "a mask on biases": lambda learning_rate: optax.chain(
        optax.sgd(learning_rate), optax.masked(optax.set_to_zero(), is_bias)
    ),
    "labels by module": lambda learning_rate: optax.multi_transform(
        {"train": optax.adam(learning_rate), "freeze": optax.set_to_zero()},
        lambda tree: {name: "freeze" if name == "head" else "train" for name in tree},
    ),
    "labels as a tree": lambda learning_rate: optax.multi_transform(
        {"train": optax.adam(learning_rate), "freeze": optax.set_to_zero()}, {"encoder": "train", "head": "freeze"}
    ),
}


@pytest.mark.parametrize("layout", ["mix", "flat", "tree"])
@pytest.mark.parametrize("base", [Bare, TwoGroups])
@pytest.mark.parametrize("name", BY_NAME)
def test_rules_that_go_by_names_see_the_users_own_tree(name, base, layout):
    tree = params()
    plan = plan_for(experiment(BY_NAME[name], base), tree, layout=layout)
    assert_close(run(plan, tree), optax_run(BY_NAME[name](learning_rate=RATE), tree))


SHAPES = [(3, 3, 1, 8), (5, 4), (4,), (256, 256)]
OTHERS = {
    "a global clip": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), False),
    "an element-wise clip": (lambda: optax.chain(optax.clip(1.0), optax.sgd(0.1)), True),
    "random noise": (lambda: optax.noisy_sgd(0.1, key=jax.random.key(0)), False),
    "a mask by rank": (
        lambda: optax.masked(optax.sgd(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
        False,
    ),
    "a mask by name": (
        lambda: optax.chain(optax.sgd(0.1), optax.masked(optax.scale(2.0), lambda p: {k: k[-1] == "1" for k in p})),
        False,
    ),
    "scaled by the size of the leaf": (
        lambda: optax.stateless(lambda u, p: jax.tree.map(lambda x: x * x.shape[0], u)),
        False,
    ),
    "a sum over an axis": (lambda: optax.stateless(lambda u, p: jax.tree.map(lambda x: x - x.mean(), u)), False),
    "one leaf read by another": (
        lambda: optax.stateless(lambda u, p: {k: v + u["leaf2"].mean() for k, v in u.items()}),
        False,
    ),
    "per-element constants": (
        lambda: optax.stateless(lambda u, p: jax.tree.map(lambda x: x * np.ones(x.shape, np.float32), u)),
        False,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_the_check_knows_what_is_element_wise(name):
    make, expected = OTHERS[name]
    rule = optax.with_extra_args_support(make())
    tree = {f"leaf{i}": jax.ShapeDtypeStruct(shape, np.float32) for i, shape in enumerate(SHAPES)}
    assert is_elementwise(rule.init, rule.update, tree) is expected


def test_a_users_factory_is_judged_by_what_it_does():
    def clipped(learning_rate, limit=1.0):
        return optax.chain(optax.clip(limit), optax.adam(learning_rate))

    tree = params()
    plan = plan_for(experiment(clipped), tree)
    assert len(plan.layout.buffers) == 1
    assert ("default", "limit") in plan.columns
    assert_close(run(plan, tree), optax_run(clipped(RATE), tree))


def test_a_number_that_the_rule_decides_by_is_fixed_and_the_rest_stays_traced():
    def switched(learning_rate, momentum=0.9, warm=1.0):
        return optax.sgd(learning_rate, momentum=momentum if warm > 0.5 else None)

    plan = plan_for(experiment(switched), params())
    assert [name for _, name in plan.columns] == ["learning_rate", "momentum"]
    assert plan.groups[0].rule.fixed == {"warm": 1.0}


def test_a_whole_transformation_from_the_resolved_hyperparameters():
    class Whole(TwoGroups):
        learning_rate: float = RATE
        weight_decay: float = 0.1

        def optimizer(self, group, hp):
            return optax.adamw(hp.learning_rate, weight_decay=hp.weight_decay, mask=hp.decay_mask)

    tree = params()
    mask = jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
    assert_close(
        run(plan_for(Whole(), tree), tree),
        optax_run(optax.adamw(RATE, weight_decay=0.1, mask=mask), tree),
    )


def test_factories_by_group():
    class ByGroup(TwoGroups):
        learning_rate: float = RATE

        def optimizer(self, group):
            return optax.lamb if group == "encoder" else optax.adam

    tree = params()
    labels = {"encoder": jax.tree.map(lambda _: "lamb", tree["encoder"]), "head": {"kernel": "adam", "bias": "adam"}}
    reference = optax.multi_transform({"lamb": optax.lamb(RATE), "adam": optax.adam(RATE)}, labels)
    assert_close(run(plan_for(ByGroup(), tree), tree), optax_run(reference, tree))


@pytest.mark.parametrize("layout", ["flat", "tree", "mix"])
def test_no_result_depends_on_the_layout(layout, monkeypatch):
    monkeypatch.setattr("nitro_cli.optim.layout.PACKED_ELEMENTS", 15)  # so that "mix" leaves kernels alone
    e = experiment(optax.adam, TwoGroups, weight_decay=0.1)
    tree = params()
    plan = plan_for(e, tree, layout=layout)
    assert len(plan.layout.buffers) == {"flat": 4, "tree": 6, "mix": 5}[layout]
    assert_close(run(plan, tree), run(plan_for(e, tree, layout="tree"), tree))


def test_packing_and_unpacking_are_inverse():
    tree = params()
    layout = plan_for(experiment(optax.adam), tree).layout
    leaves = jax.tree.leaves(tree)
    for one, other in zip(layout.unpack(layout.pack(leaves)), leaves, strict=True):
        np.testing.assert_array_equal(one, other)
    assert [row[0] for row in layout.table()] == list(layout.leaves.paths)
    assert [row[3] for row in layout.table()][:3] == [0, 4, 24]


MISTAKES = {
    "finished": optax.adam(1e-3),
    "not a factory": 3,
    "rate fixed": functools.partial(optax.adam, learning_rate=0.1),
    "positional": functools.partial(optax.adam, 0.1),
    "no rate": optax.scale_by_adam,
    "accumulates": lambda learning_rate: optax.MultiSteps(optax.adam(learning_rate), 4),
    "accumulates inside": lambda learning_rate: optax.chain(optax.apply_every(4), optax.adam(learning_rate)),
    "no transformation": lambda learning_rate: learning_rate,
    "wants the loss": lambda learning_rate: optax.polyak_sgd(learning_rate),
    "a partial of MultiSteps": functools.partial(optax.MultiSteps, every_k_schedule=4),
    "a beta of one": functools.partial(optax.adam, b1=1.0),
    "a negative decay": functools.partial(optax.adamw, weight_decay=-0.1),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_what_is_no_factory_is_refused(name, snapshot):
    with pytest.raises(ExperimentError) as caught:
        plan_for(experiment(MISTAKES[name]), params())
    assert str(caught.value) == snapshot


def test_decaying_twice_is_refused(snapshot):
    with pytest.raises(ExperimentError) as caught:
        plan_for(experiment(optax.adamw, weight_decay=0.1), params())
    assert str(caught.value) == snapshot


def test_optax_own_partials_go_by_their_name():
    for factory in (optax.nadamw, functools.partial(optax.nadamw, b1=0.8)):
        with pytest.raises(ExperimentError, match="nadamw decays by itself") as caught:
            plan_for(experiment(factory, weight_decay=0.1), params())
        assert "functools.partial(optax.nadamw, weight_decay=0.1)" in str(caught.value)
    assert plan_for(experiment(functools.partial(optax.adam, b1=0.8)), params()).groups[0].rule.name == "adam"


def chain(*between):
    """A factory of one's own, with transformations between adam's and the rate's."""

    def own(learning_rate):
        return optax.chain(optax.scale_by_adam(), *between, optax.scale_by_learning_rate(learning_rate))

    return own


PULLS = {
    "decay": chain(optax.add_decayed_weights(0.01)),
    "decay of some": chain(optax.add_decayed_weights(0.01, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p))),
    "decay at once": lambda learning_rate: optax.chain(optax.add_decayed_weights(0.01), optax.sgd(learning_rate)),
    "optax's adamw within": lambda learning_rate, b1=0.9: optax.adamw(learning_rate, b1=b1),
}
DOES_NOT = {
    "adam": chain(),
    "a trust ratio": chain(optax.scale_by_trust_ratio()),
    "a bound": lambda learning_rate: optax.chain(optax.sgd(learning_rate), optax.keep_params_nonnegative()),
    "noise": chain(optax.add_noise(0.1, 0.5, key=0)),
}


@pytest.mark.parametrize("name", PULLS)
def test_a_chain_that_decays_by_itself_is_refused_beside_nitros_decay(name, snapshot):
    for base in (Bare, TwoGroups):
        with pytest.raises(ExperimentError) as caught:
            plan_for(experiment(PULLS[name], base, weight_decay=0.1), params())
        assert "would decay twice" in str(caught.value)
    assert str(caught.value).replace(f"{PULLS[name].__name__} moves", "CHAIN moves") == snapshot
    assert not plan_for(experiment(PULLS[name]), params()).groups[0].decays


@pytest.mark.parametrize("name", DOES_NOT)
def test_a_chain_that_does_not_decay_goes_with_nitros_decay(name):
    assert plan_for(experiment(DOES_NOT[name], weight_decay=0.1), params()).groups[0].decays


def test_a_scheduled_decay_beside_a_chain_that_decays_is_refused():
    class Scheduled(Bare):
        def optimizer(self):
            return PULLS["decay"]

        def schedules(self):
            return {"weight_decay": optax.linear_schedule(0.0, 0.1, 10)}

    with pytest.raises(ExperimentError, match="weight_decay is 0, scheduled"):
        plan_for(Scheduled(), params())


def test_decay_by_another_name_is_decay_and_decay_by_nothing_is_none():
    adafactor = functools.partial(optax.adafactor, weight_decay_rate=0.1)
    with pytest.raises(ExperimentError, match=r"partial\(optax.adafactor, weight_decay_rate=0.2\)"):
        plan_for(experiment(adafactor, weight_decay=0.2), params())
    with pytest.raises(ExperimentError, match=r"partial\(optax.contrib.muon, weight_decay=0.2\)"):
        plan_for(experiment(functools.partial(contrib.muon, weight_decay=0.1), weight_decay=0.2), params())
    assert not plan_for(experiment(adafactor, weight_decay=0.0), params()).groups[0].decays
    assert (
        plan_for(experiment(functools.partial(optax.lamb, weight_decay=0.0), weight_decay=0.2), params())
        .groups[0]
        .decays
    )


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda hp: optax.masked(optax.sgd(hp.learning_rate), {"x": True}), "hp.decay_mask has it"),
        (lambda hp: optax.sgd(1.0) if hp.learning_rate > 0 else optax.adam(1.0), "choose by a GraphConst field"),
        (lambda hp: optax.sgd(float(hp.learning_rate)), "choose by a GraphConst field"),
        (lambda hp: optax.sgd(hp.lr), "hp has: learning_rate, weight_decay, decay_mask"),
        (lambda hp: optax.adam, "call the factory"),
    ],
)
def test_a_transformation_that_fails_is_the_users_to_mend(build, said):
    class Whole(Bare):
        def optimizer(self, group, hp):
            return build(hp)

    with pytest.raises(ExperimentError, match=said):
        plan_for(Whole(), params())


def test_a_number_is_no_anchor():
    class Number(Bare):
        def decay_anchor(self, group):
            return {"w": 1.0}

    with pytest.raises(ExperimentError, match="it is 'zero', 'w0' or a tree of arrays"):
        plan_for(Number(weight_decay=0.1), params())


class BadGroup(Bare):
    def param_group(self, path, leaf):
        return None


class BadRate(Bare):
    def group_learning_rate(self, group):
        return float("nan")


class BadExclusion(Bare):
    def no_decay(self, path, leaf):
        return "no"


class NoExclusion(Bare):
    def no_decay(self, path, leaf):
        _ = leaf.ndim <= 1  # where a return was meant


class BadAnchor(Bare):
    def decay_anchor(self, group):
        return "initial"


class BadSignature(Bare):
    def optimizer(self, group, hp, extra):
        return optax.adam


@pytest.mark.parametrize("cls", [BadGroup, BadRate, BadExclusion, NoExclusion, BadAnchor, BadSignature])
def test_hooks_that_answer_wrongly(cls, snapshot):
    with pytest.raises(ExperimentError) as caught:
        plan_for(cls(), params())
    assert str(caught.value) == snapshot


def test_a_group_of_its_own_without_axes_is_left_alone():
    tree = {"scale": np.float32(2), "w": np.ones(3, np.float32), "v": np.ones((2, 2), np.float32)}
    plan = plan_for(experiment(optax.adam), tree)
    assert sorted(buffer.name for buffer in plan.layout.buffers) == ["default:float32", "scale"]
    assert isinstance(plan, Plan)


def test_what_a_whole_transformation_leaves_unused_is_known():
    class Whole(Bare):
        def optimizer(self, group, hp):
            return optax.sgd(hp.learning_rate)

    assert plan_for(Whole(), params()).groups[0].unread == ("weight_decay",)


@pytest.mark.parametrize(
    "factory",
    [
        functools.partial(optax.adam, b9=1.0),
        lambda learning_rate: optax.multi_transform({"a": optax.sgd(learning_rate)}, {"no": "such tree"}),
        lambda learning_rate, own: optax.sgd(learning_rate),
    ],
    ids=["unknown argument", "optax refuses", "required argument"],
)
def test_a_factory_that_fails_says_so_before_anything_runs(factory, snapshot):
    with pytest.raises(ExperimentError) as caught:
        plan_for(experiment(factory), params())
    assert str(caught.value).splitlines()[0][:90] == snapshot(name="what")
    assert str(caught.value).splitlines()[-1] == snapshot(name="note")


class ReadsFields(Measured):
    nesterov: GraphConst[bool] = False

    def optimizer(self, group, hp):
        return optax.sgd(hp.learning_rate, momentum=0.9, nesterov=self.nesterov)


def test_a_whole_transformation_is_compiled_again_for_the_fields_that_it_reads_only(handle):
    handle(ReadsFields()).train()
    before = cache_stats().misses
    for changes in ({"note": "other"}, {"seed": 7}, {"learning_rate": 0.2}, {"max_epochs": 2}, {"scale": 2.0}):
        handle(ReadsFields(**changes)).train()
    assert cache_stats().misses == before
    n = handle(ReadsFields(nesterov=True))
    n.train()
    assert cache_stats().misses == before + 1
    assert cache_entries()[-1].why == "`nesterov` False -> True"


@pytest.mark.parametrize("field", ["note", "scale"])
def test_a_whole_transformation_cannot_read_what_would_be_baked_in_unseen(field, handle):
    class Peeks(Measured):
        def optimizer(self, group, hp):
            return optax.sgd(hp.learning_rate, momentum=0.9 if getattr(self, field) == 1 else None)

    with pytest.raises(ExperimentError, match=field):
        handle(Peeks()).train()


BY_WHOLE_NUMBERS = {
    "adamw": functools.partial(optax.adamw, weight_decay=1),
    "adamw, an array": functools.partial(optax.adamw, weight_decay=jax.numpy.float32(0.1)),
    "muon": functools.partial(contrib.muon, adam_weight_decay=0.1),
    "fromage": optax.fromage,
}


@pytest.mark.parametrize("name", BY_WHOLE_NUMBERS)
def test_a_factory_that_decays_however_that_is_written_is_refused_beside_nitros_decay(name):
    with pytest.raises(ExperimentError, match="decay"):
        plan_for(experiment(BY_WHOLE_NUMBERS[name], weight_decay=0.1), params())


def test_a_whole_number_is_held_to_the_same_limits():
    with pytest.raises(ExperimentError, match="adam has b1=1; b1 must be 0 or more and under 1"):
        plan_for(experiment(functools.partial(optax.adam, b1=1)), params())


def test_a_factory_that_decides_by_the_rate_is_refused():
    def mine(learning_rate):
        return optax.sgd(learning_rate if learning_rate > 0.1 else 0.1)

    with pytest.raises(ExperimentError, match="the optimizer mine decides by learning_rate in Python"):
        plan_for(experiment(mine), params())


def test_a_type_of_pythons_own_is_no_factory():
    with pytest.raises(ExperimentError, match="optimizer returns dict, not an optax factory"):
        plan_for(experiment(dict), params())


@pytest.mark.parametrize("hook", [lambda self, hp: optax.adam, lambda self, *, group: optax.adam])
def test_a_hook_that_takes_something_else_is_refused(hook):
    chosen = type("Chosen", (Bare,), {"optimizer": hook, "__module__": __name__})(learning_rate=RATE)
    with pytest.raises(ExperimentError, match=r"it is optimizer\(self\), \(self, group\) or \(self, group, hp\)"):
        plan_for(chosen, params())
