"""Routing: hooks get what they declare, and a misspelt parameter never passes."""

from __future__ import annotations

import functools

import pytest

from nitro_cli.data.routing import Route, route
from nitro_cli.errors import ExperimentError

BATCH = ("image", "label", "mask")
POSITIONAL = {"forward": 3, "loss": 1, "metrics": 1, "train_metrics": 1}


def routed(hook: str, function, batch=BATCH) -> Route:
    return route(Digits, hook, function, batch, "train", POSITIONAL[hook])


class Digits:
    """Owner of the hooks below; only its name matters."""


def test_a_hook_gets_the_fields_it_declares_and_no_others():
    def forward(self, model, ps, st, *, image, train, rng): ...

    assert routed("forward", forward) == Route("forward", ("image",), False, True, True, ())


def test_a_default_makes_a_field_optional():
    def loss(self, outputs, *, label, mask=None, temperature=1.0, rng): ...

    assert routed("loss", loss) == Route(
        "loss", ("label", "mask"), False, False, True, ("temperature",), ("mask", "temperature")
    )
    assert routed("loss", loss, ("label",)).defaults == ("mask", "temperature")


def test_double_star_takes_the_whole_batch():
    def metrics(self, outputs, *, label, **rest): ...

    found = routed("metrics", metrics)
    assert (found.fields, found.everything) == (BATCH, True)


def test_a_decorated_hook_is_read_through_its_decorator():
    def loss(self, outputs, *, label): ...

    @functools.wraps(loss)
    def wrapper(*args, **kwargs): ...

    assert routed("loss", wrapper).fields == ("label",)


def test_extra_positionals_with_defaults_and_stars_are_allowed():
    def loss(self, outputs, scale=2.0, *, label): ...

    def forward(self, *args, image): ...

    assert routed("loss", loss).fields == ("label",)
    assert routed("forward", forward).fields == ("image",)


def test_an_optional_parameter_unlike_any_field_is_left_alone():
    def loss(self, outputs, *, label, label_smoothing=0.1, weight=None, task=None): ...

    assert routed("loss", loss).defaults == ("label_smoothing", "weight", "task")


def bad_hooks():
    def missing(self, outputs, *, target): ...

    def misspelt(self, outputs, *, labels): ...

    def misspelt_default(self, outputs, *, label, msak=None): ...

    def other_case(self, outputs, *, Label=None): ...

    def by_position(self, outputs, label, *, mask): ...

    def all_by_keyword(self, *, outputs, label): ...

    def too_many(self, outputs, state, *, label): ...

    def takes_train(self, outputs, *, label, train): ...

    yield from (
        ("loss", f)
        for f in (missing, misspelt, misspelt_default, other_case, by_position, all_by_keyword, too_many, takes_train)
    )

    def forgot_state(self, model, ps, image, *, train): ...

    def train_by_position(self, model, ps, st, image, train): ...

    def trian(self, model, ps, st, *, image, trian): ...

    def trian_default(self, model, ps, st, *, image, trian=False): ...

    yield from (("forward", f) for f in (forgot_state, train_by_position, trian, trian_default))

    def takes_rng(self, outputs, *, label, rng): ...

    yield "metrics", takes_rng


@pytest.mark.parametrize(("hook", "function"), [pytest.param(*case, id=case[1].__name__) for case in bad_hooks()])
def test_bad_hooks(hook, function, snapshot):
    with pytest.raises(ExperimentError) as caught:
        routed(hook, function)
    place = caught.value.problems[0].place
    assert place is not None
    assert place.path == __file__
    assert str(caught.value).replace(str(place), "experiments/digits.py:12") == snapshot


@pytest.mark.parametrize("name", ["train", "rng"])
def test_reserved_names_in_a_batch(name, snapshot):
    def loss(self, outputs, *, label): ...

    with pytest.raises(ExperimentError) as caught:
        routed("loss", loss, (*BATCH, name))
    assert str(caught.value) == snapshot
