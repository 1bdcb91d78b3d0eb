"""A least-squares GAN that learns a normal distribution: two networks, two optimizers, one step that is written out."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from nitro_cli import (
    ArrayLoader,
    CheckpointPolicy,
    Concat,
    Device,
    Experiment,
    GraphConst,
    backward,
    linen_model,
    moving_average,
    optimizer_state,
    step_optimizer,
)


class MLP(nn.Module):
    """Two hidden layers and one number."""

    width: int

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.leaky_relu(nn.Dense(self.width)(x), 0.2)
        return nn.Dense(1)(x)


class ToyGAN(Experiment):
    """A GAN on numbers drawn from a normal distribution."""

    width: GraphConst[int] = 32
    """Hidden width of both networks."""
    noise: GraphConst[int] = 2
    """Numbers that the generator makes one sample from."""
    average: Device[float] = 0.99
    """Decay of the moving average of the generator, which is the one that is evaluated."""
    mean: float = 1.5
    """Mean of the distribution to learn."""
    std: float = 0.5
    """Standard deviation of the distribution to learn."""
    batch_size: int = 128
    """Rows per batch."""
    learning_rate: float = 2e-3
    max_epochs: int = 20

    def build_data(self, dist):
        rng = np.random.default_rng(self.seed)
        x = rng.normal(self.mean, self.std, (8192, 1)).astype(np.float32)
        z = rng.normal(size=(2048, self.noise)).astype(np.float32)
        return {
            "train": ArrayLoader(x=x, batch_size=self.batch_size, shuffle=True, seed=self.seed),
            "val": ArrayLoader(z=z, batch_size=1024),
        }

    def build_model(self, rng):
        keys = jax.random.split(rng)
        gen, ps_gen, _ = linen_model(MLP(self.width), keys[0], np.zeros((1, self.noise), np.float32))
        disc, ps_disc, _ = linen_model(MLP(self.width), keys[1], np.zeros((1, 1), np.float32))
        return {"gen": gen, "disc": disc}, {"gen": ps_gen, "disc": ps_disc}, {"average": ps_gen}

    def setup_optimizers(self, model, ps, st, mesh):
        rule = functools.partial(optax.adam, b1=0.5, learning_rate=self.learning_rate)
        return {"gen": optimizer_state(rule, ps["gen"]), "disc": optimizer_state(rule, ps["disc"])}

    def schedules(self):
        return {"learning_rate": lambda total: optax.linear_schedule(self.learning_rate, 0.0, total)}

    def train_step(self, model, ps, opt_state, st, *, x, rng):
        z = jax.random.normal(rng, (len(x), self.noise))
        fake = model["gen"].apply({"params": ps["gen"]}, z)

        def judge(ps_disc, values):
            return model["disc"].apply({"params": ps_disc}, values)

        def disc_loss(ps_disc):  # real -> 1, fake -> 0
            return jnp.mean((judge(ps_disc, x) - 1) ** 2) + jnp.mean(judge(ps_disc, fake) ** 2)

        def gen_loss(ps_gen):  # fake -> 1; the discriminator is a constant here
            return jnp.mean((judge(ps["disc"], model["gen"].apply({"params": ps_gen}, z)) - 1) ** 2)

        loss_disc, grads_disc = backward(disc_loss, ps["disc"])
        loss_gen, grads_gen = backward(gen_loss, ps["gen"])
        opt_disc, ps_disc = step_optimizer(opt_state["disc"], ps["disc"], grads_disc)
        opt_gen, ps_gen = step_optimizer(opt_state["gen"], ps["gen"], grads_gen)
        return {
            "loss": loss_disc + loss_gen,
            "ps": {"gen": ps_gen, "disc": ps_disc},
            "st": {"average": moving_average(st["average"], ps_gen, self.average)},
            "opt_state": {"gen": opt_gen, "disc": opt_disc},
            "stats": {"disc": loss_disc, "gen": loss_gen},
        }

    def forward(self, model, ps, st, *, z):
        return model["gen"].apply({"params": st["average"]}, z), st

    def metrics(self, outputs):
        return {"samples": Concat(outputs[:, 0])}

    def finalize_metrics(self, metrics, split):
        samples = metrics["samples"]
        mean, std = samples.mean(), samples.std()
        return {"mean": mean, "std": std, "error": abs(mean - self.mean) + abs(std - self.std)}

    def checkpointer(self):
        return CheckpointPolicy(metric="val_error")
