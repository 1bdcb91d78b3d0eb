"""build() returns the programs of the experiment: name -> Program.

A Program is what a compile cache keys: the callable, its static objects, the abstract arguments and
the jit options. Nothing here computes: parameters are made with jax.eval_shape.
"""
import dataclasses
import os
import sys
from typing import Any

HERE = os.path.dirname(os.path.abspath(__file__))
for p in (HERE, os.path.join(HERE, "vendor", "site-packages")):
    if p not in sys.path:
        sys.path.insert(0, p)

import jax
import jax.numpy as jnp

# PRE-IMPORT (configuration set before the user's modules load)

from exp import dynamic, nnx_model, ops
from exp.train import Experiment
from flax import nnx

BATCH = 8
FEATURES = 6
X_DTYPE = jnp.float32


@dataclasses.dataclass
class Program:
    fn: Any
    args: tuple
    donate: tuple = ()
    static: tuple = ()


def make_experiment():
    return Experiment()


def build(wanted=None):
    """All programs, or those whose names are in wanted."""
    programs = {}
    if wanted is None or {"train_step", "eval_step"} & set(wanted):
        programs |= build_trained()
    if wanted is None or "nnx" in wanted:
        programs["nnx"] = build_nnx()
    one = jax.ShapeDtypeStruct((3,), jnp.float32)
    for name, fn in dynamic.DYNAMIC.items():
        programs["dyn_" + name] = Program(fn, (one,))
    if wanted is None or {"held", "held_c"} & set(wanted):
        from exp import held

        programs["held_c"] = Program(held.held_c, (one,))
        programs["held"] = Program(held.held, (one,))
    # POST-BUILD (run-time changes)
    return programs


def build_trained():
    e = make_experiment()
    sds = jax.ShapeDtypeStruct
    batch = {"x": sds((BATCH, FEATURES), X_DTYPE), "y": sds((BATCH,), jnp.int32)}
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(lambda k: e.model.init(k, jnp.zeros(batch["x"].shape, X_DTYPE))["params"], key)
    opt_state = jax.eval_shape(e.optimizer.init, params)
    return {
        "train_step": Program(e.train_step, ((params, opt_state), batch), donate=(0,)),
        "eval_step": Program(e.eval_step, (params, batch)),
    }


def build_nnx():
    gdef, st = nnx.split(nnx_model.make())

    def nnx_forward(state, x):
        return nnx.merge(gdef, state)(x)

    sds = jax.ShapeDtypeStruct
    shapes = jax.tree.map(lambda v: sds(v.shape, v.dtype), st)
    return Program(nnx_forward, (shapes, sds((2, 4), jnp.float32)))


if __name__ == "__main__":
    for n, p in build().items():
        text = jax.jit(p.fn, donate_argnums=p.donate).lower(*p.args).as_text()
        print(n, len(text))
