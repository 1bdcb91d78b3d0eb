"""Experiments that own their step, small enough that their one program compiles in a few tenths of a second."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import optax
from toys import FEATURES, Line

from nitro_cli import ArrayLoader, Experiment, backward, optimizer_state, step_optimizer


class OwnLine(Line):
    """``Line`` by gradient descent, with the step written out."""

    learning_rate: float = 0.05

    def setup_optimizers(self, model, ps, st, mesh):
        return optimizer_state(optax.sgd, ps, learning_rate=self.learning_rate)

    def train_step(self, model, ps, opt_state, st, *, x, y):
        def objective(ps):
            outputs, st_new = self.forward(model, ps, st, x=x)
            return self.loss(outputs, y=y), st_new

        (loss, st_new), grads = backward(objective, ps, has_aux=True)
        opt_state, ps = step_optimizer(opt_state, ps, grads)
        return {"loss": loss, "ps": ps, "st": st_new, "opt_state": opt_state}

    def metrics(self, outputs, *, y):
        return {"error": (np.abs(outputs - y).sum(), len(y))}


class AutoLine(OwnLine):
    """The same experiment in the automatic loop."""

    def manual_training(self):
        return False

    def optimizer(self):
        return optax.sgd


def layer(seed, rows, columns):
    w = np.random.default_rng(seed).normal(size=(rows, columns)) / np.sqrt(rows)
    return {"w": w.astype(np.float32), "b": np.zeros(columns, np.float32)}


def network(ps, x):
    return jnp.tanh(x @ ps["in"]["w"] + ps["in"]["b"]) @ ps["out"]["w"] + ps["out"]["b"]


def disc_loss(ps_disc, x, fake):
    return jnp.mean((network(ps_disc, x) - 1) ** 2) + jnp.mean(network(ps_disc, fake) ** 2)


def gen_loss(ps_gen, ps_disc, z):
    return jnp.mean((network(ps_disc, network(ps_gen, z)) - 1) ** 2)


class TinyGAN(Experiment):
    """The GAN of the seed document: noise rides in the batch, and nothing evaluates it."""

    learning_rate: float = 0.01

    def build_data(self, dist):
        rng = np.random.default_rng(self.seed)
        x, z = rng.normal(size=(16, FEATURES)).astype(np.float32), rng.normal(size=(16, 2)).astype(np.float32)
        return {"train": ArrayLoader(x=x, z=z, batch_size=4, shuffle=True, seed=self.seed)}

    def build_model(self, rng):
        gen = {"in": layer(1, 2, 5), "out": layer(2, 5, FEATURES)}
        disc = {"in": layer(3, FEATURES, 5), "out": layer(4, 5, 1)}
        return None, {"gen": gen, "disc": disc}, {}

    def setup_optimizers(self, model, ps, st, mesh):
        return {name: optimizer_state(optax.adam, ps[name], learning_rate=self.learning_rate) for name in ps}

    def train_step(self, model, ps, opt_state, st, *, x, z):
        fake = network(ps["gen"], z)
        loss_d, grads_d = backward(disc_loss, ps["disc"], x, fake)
        loss_g, grads_g = backward(gen_loss, ps["gen"], ps["disc"], z)
        opt_g, ps_g = step_optimizer(opt_state["gen"], ps["gen"], grads_g)
        opt_d, ps_d = step_optimizer(opt_state["disc"], ps["disc"], grads_d)
        return {
            "loss": loss_d + loss_g,
            "ps": {"gen": ps_g, "disc": ps_d},
            "st": st,
            "opt_state": {"gen": opt_g, "disc": opt_d},
            "stats": {"disc": loss_d, "gen": loss_g},
        }


def placeless(error):
    """The text of an error without where it stands in a file."""
    lines = [line for line in str(error).splitlines() if not line.startswith("  -->")]
    return "\n".join(re.sub(r"^ +(\d+ )?\|", " |", line) for line in lines)
