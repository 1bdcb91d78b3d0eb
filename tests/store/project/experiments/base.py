"""The experiments that test_edits.py changes, one thing at a time. Small, and of everything that Python offers."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import toolbox
from flax import linen as nn
from flax import nnx
from toolbox import losses, rules
from toolbox.layers import leveling, shifted, within
from toolbox.losses import Kind
from toolbox.trees import Pair

from nitro_cli import (
    ArrayLoader,
    CheckpointPolicy,
    Device,
    Experiment,
    GraphConst,
    apply_model,
    backward,
    default_no_decay,
    linen_model,
    nnx_model,
    optimizer_state,
    step_optimizer,
)

SCALE = 0.5
TABLE = np.loadtxt(Path(__file__).parents[1] / "data" / "offset.txt")


def rising(total):
    return optax.linear_schedule(0.01, 0.02, total)


def halved(x):
    return x / 2


class MLP(nn.Module):
    """A hidden layer and one number."""

    width: int
    slope: float = 0.1

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(self.width)(x)
        return nn.Dense(1)(self.activated(x))[:, 0]

    def activated(self, x):
        return nn.leaky_relu(x, self.slope)


class Net(nnx.Module):
    """The same in NNX, with dropout."""

    def __init__(self, width, *, rngs):
        self.hidden = nnx.Linear(3, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.head = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.head(self.dropout(nnx.relu(self.hidden(x))))[:, 0]


class Centered:
    """A mixin of plain Python."""

    CENTER: ClassVar[float] = 0.125

    def centered(self, x):
        return x - self.CENTER


class Data(Experiment):
    """What the experiments share: their data, and helpers that hooks call on ``self``."""

    smoothing: Device[float] = 0.1
    """A weight of the loss."""
    rows: int = 16
    """Rows of the training data."""
    batch: int = 4
    """Rows per batch."""
    note: str = ""
    """For people."""
    width: GraphConst[int] = 4
    """Hidden width."""
    max_epochs: int = 1
    learning_rate: float = 0.01

    OFFSET: ClassVar[float] = 0.0

    def build_data(self, dist):
        rng = np.random.default_rng(self.seed)
        x = rng.normal(size=(self.rows, 3)).astype(np.float32)
        y = (x.sum(1) + 0.25).astype(np.float32)
        loader = ArrayLoader(x=x, y=y, batch_size=self.batch, shuffle=True, seed=self.seed)
        return {"train": loader, "val": ArrayLoader(x=x[:8], y=y[:8], batch_size=4)}

    def checkpointer(self):
        return CheckpointPolicy(keep=1, metric="val_error")

    def prepared(self, x):
        return x + self.OFFSET

    @property
    def twice(self):
        return 2.0

    @staticmethod
    def thirded(x):
        return x / 3


class Base(Centered, Data):
    """A linen model; metrics and train metrics on the device."""

    power: GraphConst[int] = 2
    """Read by ``loss`` only."""
    kind: GraphConst[Kind] = Kind.SQUARE
    """Read by ``forward`` only."""
    level: GraphConst[float] = 1.0
    """Read by ``metrics`` only."""
    tags: GraphConst[Any] = ("mean", "plain")
    """Keys of tables of functions, read by ``loss`` only."""
    unread: GraphConst[int] = 0
    """Read by nothing."""

    def build_model(self, rng):
        return linen_model(MLP(self.width), rng, np.zeros((1, 3), np.float32))

    def forward(self, model, ps, st, *, x):
        from toolbox.late import lately

        x = toolbox.squash(self.prepared(self.centered(x))) * SCALE + TABLE

        def bent(value):
            return jnp.where(value > 0, value, 0.5 * value)

        x = within(leveling(shifted(bent(lately(x)))))
        pair = Pair(x, self.thirded(x)) + Pair(x, x)
        outputs, st = apply_model(model, ps, st, pair.first + pair.second * self.twice)
        return losses.passed(outputs) * self.kind.value, st

    def loss(self, outputs, *, y):
        errors = losses.weighed(jnp.abs(outputs - y)) ** self.power
        reduction, extra = self.tags
        return losses.REGISTRY[extra](losses.REDUCTIONS[reduction](errors)) + self.smoothing * self.penalty(outputs)

    def penalty(self, outputs, weight=0.5):
        return weight * jnp.square(outputs).mean()

    def train_metrics(self, outputs, *, y):
        return {"largest": jnp.abs(outputs - y).max()}

    def metrics(self, outputs, *, y):
        return {"error": (self.level * jnp.abs(outputs - y).sum(), len(y))}

    def metrics_residency(self, hook):
        return "device"

    def finalize_metrics(self, metrics, split):
        return metrics | {"note": len(self.note)}

    def derive(self, data):
        return {"note": f"{len(data)} splits"}

    def optimizer(self):
        return functools.partial(rules.damped, momentum=0.8)

    def schedules(self):
        return {"learning_rate": rising}

    def param_group(self, path, leaf):
        return "default"

    def no_decay(self, path, leaf):
        return default_no_decay(path, leaf)


class OnHost(Base):
    """With both metrics on the host."""

    def metrics_residency(self, hook):
        return "host"

    def train_metrics(self, outputs, *, y):
        return {"largest": np.abs(outputs - y).max()}

    def metrics(self, outputs, *, y):
        return {"error": (np.abs(outputs - y).sum(), len(y))}


class Held(Base):
    """With a function in a field."""

    reshape: GraphConst[Any] = halved
    """Read by ``forward`` only."""

    def prepared(self, x):
        return self.reshape(x)


class Graph(Data):
    """An NNX model with dropout."""

    ema_decay: float = 0.9

    def build_model(self, rng):
        return nnx_model(lambda rngs: Net(self.width, rngs=rngs), rng)

    def forward(self, model, ps, st, *, x, train, rng):
        return apply_model(model, ps, st, self.prepared(x), train=train, rng=rng)

    def loss(self, outputs, *, y):
        return optax.huber_loss(outputs, y).mean() * self.smoothing

    def metrics(self, outputs, *, y):
        return {"error": (np.abs(outputs - y).sum(), len(y))}

    def optimizer(self):
        return optax.adamw


class Manual(Data):
    """A step of its own, with two optimizers."""

    BLEND: ClassVar[float] = 0.5

    def build_model(self, rng):
        return None, {"w": np.zeros(3, np.float32), "b": np.float32(0)}, {}

    def setup_optimizers(self, model, ps, st, mesh):
        rule = functools.partial(optax.sgd, momentum=0.9)
        return {name: optimizer_state(rule, ps[name], learning_rate=self.learning_rate) for name in ps}

    def train_step(self, model, ps, opt_state, st, *, x, y):
        def objective(ps):
            return self.mixed(self.forward(model, ps, st, x=x)[0] - y)

        loss, gradients = backward(objective, ps)
        new = {name: step_optimizer(opt_state[name], ps[name], gradients[name]) for name in ps}
        return {
            "loss": loss,
            "ps": {name: both[1] for name, both in new.items()},
            "st": st,
            "opt_state": {name: both[0] for name, both in new.items()},
            "stats": {"size": optax.tree.norm(gradients)},
        }

    def mixed(self, error):
        return self.BLEND * jnp.abs(error).mean() + self.smoothing * jnp.square(error).mean()

    def forward(self, model, ps, st, *, x):
        return self.prepared(x) @ ps["w"] + ps["b"], st

    def metrics(self, outputs, *, y):
        return {"error": (np.abs(outputs - y).sum(), len(y))}


@dataclasses.dataclass(frozen=True)
class Plain:
    """An experiment without nitro's base; its loss on the validation data is a program of its own."""

    gain: GraphConst[float] = 2.0
    smoothing: Device[float] = 0.1
    points: int = 16
    seed: int = 0

    def build_data(self, dist):
        x = np.linspace(-1, 1, 3 * self.points, dtype=np.float32).reshape(self.points, 3)
        loader = ArrayLoader(x=x, y=x.sum(1), batch_size=4)
        return {"train": loader, "val": loader}

    def build_model(self, rng):
        return None, {"w": jnp.zeros(3)}, {}

    def forward(self, model, ps, st, *, x):
        return self.gain * x @ ps["w"], st

    def loss(self, outputs, *, y):
        return jax.nn.softplus(jnp.abs(outputs - y)).mean() + self.smoothing
