"""A small convolutional GAN on the real handwritten digits, told which digit to draw.

Both networks see the label. The discriminator has the hinge loss and a penalty on its gradient at real images, which
keeps it smooth (Mescheder et al., 2018); samples are drawn by a moving average of the generator. After every epoch a
grid of samples, one column for each digit, is written as a PNG into the folder ``pictures``, which needs matplotlib
(the extra ``plot``). ``val_recognised`` is the share of samples whose nearest real image has the label asked for.
"""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from sklearn.datasets import load_digits

from nitro_cli import (
    ArrayLoader,
    CheckpointPolicy,
    Concat,
    Device,
    Experiment,
    GraphConst,
    NitroError,
    backward,
    linen_model,
    moving_average,
    optimizer_state,
    step_optimizer,
)


class Generator(nn.Module):
    """From noise and a label to an image of 8 by 8, in [-1, 1]."""

    channels: int

    @nn.compact
    def __call__(self, z, label):
        x = jnp.concatenate([z, nn.Embed(10, 16)(label)], -1)
        x = nn.relu(nn.Dense(16 * 2 * self.channels)(x)).reshape(-1, 4, 4, 2 * self.channels)
        x = nn.relu(nn.GroupNorm(8)(nn.Conv(2 * self.channels, (3, 3))(x)))
        x = jax.image.resize(x, (len(x), 8, 8, x.shape[-1]), "nearest")
        x = nn.relu(nn.GroupNorm(8)(nn.Conv(self.channels, (3, 3))(x)))
        return jnp.tanh(nn.Conv(1, (3, 3))(x))[..., 0]


class Discriminator(nn.Module):
    """How real an image looks as the digit it is meant to be: one number each."""

    channels: int

    @nn.compact
    def __call__(self, image, label):
        x = nn.leaky_relu(nn.Conv(self.channels, (3, 3))(image[..., None]), 0.2)
        x = nn.leaky_relu(nn.Conv(2 * self.channels, (3, 3), strides=2)(x), 0.2)
        x = nn.leaky_relu(nn.Conv(2 * self.channels, (3, 3))(x), 0.2)
        x = nn.leaky_relu(nn.Dense(128)(x.reshape(len(x), -1)), 0.2)
        return nn.Dense(1)(x)[:, 0] + (x * nn.Embed(10, 128)(label)).sum(-1) / 128**0.5


class DigitsGAN(Experiment):
    """Handwritten digits drawn by a conditional GAN."""

    channels: GraphConst[int] = 32
    """Channels of the widest images; the layers at half the size have twice as many."""
    noise: GraphConst[int] = 32
    """Numbers that one sample is made from, besides its label."""
    penalty: Device[float] = 1.0
    """Weight of the penalty on the discriminator's gradient."""
    average: Device[float] = 0.995
    """Decay of the moving average of the generator."""
    rows: int = 8
    """Rows of the grid of samples."""
    pictures: Path | None = Path("pictures/digits_gan")
    """Folder for the grids of samples; none draws none."""
    batch_size: int = 64
    """Rows per batch."""
    learning_rate: float = 1e-3
    max_epochs: int = 60

    def build_data(self, dist):
        digits = load_digits()
        image = (digits.images / 8.0 - 1.0).astype(np.float32)
        label = digits.target.astype(np.int32)
        drawn = np.tile(np.arange(10, dtype=np.int32), self.rows)
        z = np.random.default_rng(self.seed).normal(size=(len(drawn), self.noise)).astype(np.float32)
        return {
            "train": ArrayLoader(
                image=image, label=label, batch_size=self.batch_size, shuffle=True, seed=self.seed, drop_last=True
            ),
            "val": ArrayLoader(z=z, label=drawn, batch_size=len(drawn)),
        }

    def build_model(self, rng):
        keys = jax.random.split(rng)
        image, z, label = np.zeros((1, 8, 8), np.float32), np.zeros((1, self.noise), np.float32), np.zeros(1, np.int32)
        gen, ps_gen, _ = linen_model(Generator(self.channels), keys[0], z, label)
        disc, ps_disc, _ = linen_model(Discriminator(self.channels), keys[1], image, label)
        return {"gen": gen, "disc": disc}, {"gen": ps_gen, "disc": ps_disc}, {"average": ps_gen}

    def setup_optimizers(self, model, ps, st, mesh):
        rule = functools.partial(optax.adam, b1=0.0, b2=0.99, learning_rate=self.learning_rate)
        return {"gen": optimizer_state(rule, ps["gen"]), "disc": optimizer_state(rule, ps["disc"])}

    def schedules(self):
        return {"learning_rate": lambda total: optax.cosine_decay_schedule(self.learning_rate, total, 0.05)}

    def train_step(self, model, ps, opt_state, st, *, image, label, rng):
        z = jax.random.normal(rng, (len(image), self.noise))
        fake = model["gen"].apply({"params": ps["gen"]}, z, label)

        def judge(ps_disc, images):
            return model["disc"].apply({"params": ps_disc}, images, label)

        def disc_loss(ps_disc):
            real, slope = jax.vjp(lambda images: judge(ps_disc, images), image)
            steepness = jnp.square(slope(jnp.ones_like(real))[0]).sum((1, 2)).mean()
            hinge = nn.relu(1 - real).mean() + nn.relu(1 + judge(ps_disc, fake)).mean()
            return hinge + self.penalty * steepness, steepness

        def gen_loss(ps_gen):
            return -judge(ps["disc"], model["gen"].apply({"params": ps_gen}, z, label)).mean()

        (loss_disc, steepness), grads_disc = backward(disc_loss, ps["disc"], has_aux=True)
        loss_gen, grads_gen = backward(gen_loss, ps["gen"])
        opt_disc, ps_disc = step_optimizer(opt_state["disc"], ps["disc"], grads_disc)
        opt_gen, ps_gen = step_optimizer(opt_state["gen"], ps["gen"], grads_gen)
        return {
            "loss": loss_disc + loss_gen,
            "ps": {"gen": ps_gen, "disc": ps_disc},
            "st": {"average": moving_average(st["average"], ps_gen, self.average)},
            "opt_state": {"gen": opt_gen, "disc": opt_disc},
            "stats": {"disc": loss_disc, "gen": loss_gen, "steepness": steepness},
        }

    def forward(self, model, ps, st, *, z, label):
        return model["gen"].apply({"params": st["average"]}, z, label), st

    def metrics(self, outputs, *, label):
        return {"samples": Concat(outputs), "label": Concat(label)}

    def finalize_metrics(self, metrics, split):
        samples = metrics["samples"]
        if self.pictures is not None:
            number = len(list(self.pictures.glob("*.png"))) + 1
            draw_grid(samples, self.pictures / f"{split}-{number:03d}.png")
        distance, likest = nearest_real(samples)
        recognised = (likest == metrics["label"]).mean()
        return {"recognised": recognised, "nearest": distance.min(), "distance": distance.mean()}

    def checkpointer(self):
        return CheckpointPolicy(keep=1, metric="val_recognised", mode="max")


def nearest_real(samples):
    """For each sample the real image that is nearest: its root mean square difference, and its label.

    Images lie in [-1, 1]. A copy would be at 0; a real image and the nearest other one are 0.26 apart on average.
    """
    digits = load_digits()
    known = (digits.images / 8.0 - 1.0).reshape(-1, 64).astype(np.float32)
    flat = np.asarray(samples).reshape(-1, 64)
    squares = (flat**2).sum(1)[:, None] + (known**2).sum(1) - 2 * flat @ known.T
    return np.sqrt(np.maximum(squares.min(1), 0) / 64), digits.target[squares.argmin(1)]


def draw_grid(samples, path):
    """Write images in rows of ten as one PNG, each pixel of an image 6 pixels wide."""
    try:
        from matplotlib.image import imsave
    except ImportError:
        what = "pictures of samples need matplotlib, which is not installed"
        raise NitroError(what, "pip install 'nitro-jax[plot]', or draw none: --pictures none") from None

    tiles = np.pad(np.asarray(samples), ((0, 0), (1, 1), (1, 1)), constant_values=-1.0)
    grid = np.concatenate([np.concatenate(list(row), axis=1) for row in tiles.reshape(-1, 10, 10, 10)])
    path.parent.mkdir(parents=True, exist_ok=True)
    imsave(path, np.kron(grid, np.ones((6, 6))), cmap="gray", vmin=-1, vmax=1)
