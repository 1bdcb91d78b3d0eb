"""What nitro finds out about the rule of a group by tracing it on the group's parameters, before anything runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from nitro_cli.errors import ExperimentError, NitroError
from nitro_cli.optim.elementwise import is_elementwise
from nitro_cli.optim.leaves import Leaves, structure_text
from nitro_cli.optim.pull import pulls
from nitro_cli.optim.reads import reads
from nitro_cli.optim.rule import Hyperparameters, Rule, traceable


@dataclass(frozen=True)
class Findings:
    """``fixed`` are the numbers that cannot be arguments, ``joined`` says whether the rule may run on joined leaves,
    ``pulls`` whether it decays by itself where nitro's decay is on. Of the other numbers, ``at_start`` are read before
    the first step only, and ``unread`` never."""

    fixed: list[str]
    joined: bool
    pulls: bool
    at_start: list[str]
    unread: list[str]


# ``kept(rule, facts, find)`` is the answer of ``find()``, which the rule and these facts decide.
Kept = Callable[[Rule, Mapping[str, Any], Callable[[], dict[str, Any]]], dict[str, Any]]


def of_factory(rule: Rule, leaves: Leaves, tree: Any, decaying: bool, kept: Kept) -> Findings:
    """``tree`` holds the shapes of the group among ``leaves``; ``decaying`` says that nitro's decay is on."""

    def find() -> dict[str, Any]:
        sound = traceable(rule, tree)
        seen = reads(lambda values, _: sound.build(values), sound.hyperparameters, tree)
        found = Findings(
            fixed=[name for name in rule.hyperparameters if name not in sound.hyperparameters],
            joined=_joinable(sound, tree),
            pulls=decaying and not sound.decays_itself and seen.weights and pulls(sound, tree),
            at_start=sorted(seen.at_start - seen.in_update),
            unread=sorted(seen.nowhere),
        )
        return dataclasses.asdict(found)

    facts = {
        "hyperparameters": dict(rule.hyperparameters),
        "tree": structure_text(leaves.structure),
        "leaves": [f"{jax.tree_util.keystr(path)} {spec}" for path, spec in jax.tree_util.tree_leaves_with_path(tree)],
        "decaying": decaying,
    }
    return Findings(**kept(rule, facts, find))


def of_whole(rule: Rule, group: str, tree: Any, decay_mask: Any, anchor: Any) -> Findings:
    """Of a transformation that the experiment builds by itself: it runs as it is, and nitro adds no decay to it.

    Raises ExperimentError where it fails on these parameters.
    """
    try:
        seen = reads(lambda values, anchor: rule.build(values, decay_mask, anchor), rule.hyperparameters, tree, anchor)
    except NitroError:
        raise
    except Exception as error:  # whatever the transformation raises
        raise _failed(rule, group, error) from error
    return Findings([], False, False, sorted(seen.at_start - seen.in_update), sorted(seen.nowhere))


def _joinable(rule: Rule, tree: Any) -> bool:
    if len(jax.tree.leaves(tree)) == 1:
        return False
    built = rule.build({name: np.float32(value) for name, value in rule.hyperparameters.items()})
    return is_elementwise(built.init, built.update, tree)


def _failed(rule: Rule, group: str, error: Exception) -> ExperimentError:
    note = "masks and labels need the structure of the parameters: hp.decay_mask has it"
    if isinstance(error, jax.errors.ConcretizationTypeError):
        note = "hp holds traced numbers, which Python cannot decide by: choose by a GraphConst field"
    if isinstance(error, AttributeError) and "Hyperparameters" in str(error):
        note = f"hp has: {', '.join(field.name for field in dataclasses.fields(Hyperparameters))}"
    said = str(error).strip().partition("\n")[0]
    return ExperimentError(
        f"the transformation of {rule.name} fails on the parameters of group '{group}': {type(error).__name__}: {said}",
        note,
    )
