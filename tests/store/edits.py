"""Changes to the experiments in ``project/``, one each, and which programs they must compile anew."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from forks import CHEAP

BASE, LAYERS, OPS = "experiments/base.py", "toolbox/layers.py", "toolbox/deep/ops.py"
LOSSES, RULES, TREES, LATE = "toolbox/losses.py", "toolbox/rules.py", "toolbox/trees.py", "toolbox/late.py"
FORWARD = "gradient evaluation"
MODEL = "gradient update evaluation"
ALL = "gradient update evaluation metrics"
TWO_DEVICES = "--xla_force_host_platform_device_count=2"
OTHER_OPTAX = """
from importlib import metadata
real = metadata.version
metadata.version = lambda name: "9.9" if name == "optax" else real(name)
"""
PROPERTY = "    @property\n    def twice(self):\n        return 2.0\n"
STATIC = "    @staticmethod\n    def thirded(x):\n        return x / 3\n"


@dataclass(frozen=True)
class Case:
    """``misses`` may not be loaded, ``may`` may, all other programs must be. ``refused`` are misses that are kept for
    nobody, since they depend on what code does not show. ``first`` are the fields of the run that fills the store,
    ``fields`` those of the run that follows; ``before`` and ``after`` run around the import of the experiment."""

    name: str
    edits: tuple[tuple[str, str, str], ...] = ()
    misses: str = ""
    refused: str = ""
    may: str = ""
    experiment: str = "Base"
    first: Mapping[str, Any] = field(default_factory=dict)
    fields: Mapping[str, Any] = field(default_factory=dict)
    preset: str | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    before: str = ""
    after: str = ""


def edit(name: str, file: str, before: str, after: str, misses: str = "", **facts: Any) -> Case:
    """One text, which occurs once in the file, for another."""
    return Case(name, ((file, before, after),), misses, **facts)


def given(name: str, misses: str = "", first: Mapping[str, Any] | None = None, **facts: Any) -> Case:
    """Other values of fields, or where none are given the values of the first run."""
    return Case(name, (), misses, first=first or {}, **facts)


EXPRESSION = "name"  # a field whose value is an expression in the experiment's module: {"name": "Kind.FOURTH"}


HELPERS = [
    given("nothing, with a function held by a field", experiment="Held"),
    edit("helper two below forward", OPS, "jnp.tanh(scaled)", "jnp.sinh(scaled)", FORWARD),
    edit("constant two below forward", OPS, "SHARPNESS = 2.0", "SHARPNESS = 3.0", FORWARD),
    edit("constant of the module", BASE, "SCALE = 0.5", "SCALE = 0.25", FORWARD),
    edit("array read from a file at import", "data/offset.txt", "0.25", "0.75", FORWARD),
    edit("value in a closure", LAYERS, "leveled(2.0)", "leveled(2.5)", FORWARD),
    edit("body of a closure", LAYERS, "return x * level", "return x + level", FORWARD),
    edit("default argument", LAYERS, "gain=1.5", "gain=1.25", FORWARD),
    edit("function in a partial", LAYERS, "jnp.clip(x, low, high)", "jnp.clip(x, 2 * low, high)", FORWARD),
    edit("decorator", LAYERS, "function(x) * 1.25", "function(x) * 1.5", FORWARD),
    edit("what is decorated", LAYERS, "return x + 0.5", "return x + 0.25", FORWARD),
    edit("decorator taken off", LAYERS, "@stretched\n", "", FORWARD),
    edit("function nested in a hook", BASE, "value > 0, value, 0.5 * value", "value > 0, value, 0.4 * value", FORWARD),
    edit("constant of a module imported in a hook", LATE, "LATE = 1.0", "LATE = 1.5", FORWARD),
    edit(
        "re-exported under the same name",
        "toolbox/__init__.py",
        "import squash as squash",
        "import leveling as squash",
        FORWARD,
    ),
    edit(
        "flatten of a pytree class", TREES, "(self.first, self.second), None", "(self.second, self.first), 0", FORWARD
    ),
    edit("operator of a pytree class", TREES, "a + b, self", "a - b, self", FORWARD),
    edit("rule of a custom derivative", LOSSES, "0.5 * upstream", "0.25 * upstream", "gradient", may="evaluation"),
    edit("jitted helper", LOSSES, "error * 1.5", "error * 2.5", "gradient"),
    edit("function in a dict", LOSSES, "x.mean()", "x.max()", "gradient"),
    edit("registered function", LOSSES, "    return value\n", "    return value * 3\n", "gradient"),
    edit("other registered function", LOSSES, "2 * value", "3 * value", may="gradient"),
    edit("value of an enum", LOSSES, "SQUARE = 2.0", "SQUARE = 3.0", FORWARD),
    edit("function held by a field", BASE, "return x / 2", "return x / 4", FORWARD, experiment="Held"),
]

CLASSES = [
    edit("method of a mixin", BASE, "x - self.CENTER", "x + self.CENTER", FORWARD),
    edit(
        "class constant of a mixin", BASE, "CENTER: ClassVar[float] = 0.125", "CENTER: ClassVar[float] = 1.0", FORWARD
    ),
    edit("method of a base class", BASE, "return x + self.OFFSET", "return x - 1", FORWARD),
    edit("property", BASE, "return 2.0", "return 4.0", FORWARD),
    edit("static method", BASE, "return x / 3", "return x / 5", FORWARD),
    edit("helper method and its default", BASE, "weight=0.5", "weight=0.25", "gradient"),
    edit(
        "method overridden in the subclass",
        BASE,
        "class OnHost(Base):\n",
        "class OnHost(Base):\n    def penalty(self, outputs):\n        return 0.0\n\n",
        "gradient",
        experiment="OnHost",
    ),
    edit(
        "inherited hook",
        BASE,
        "+ self.smoothing * self.penalty",
        "- self.smoothing * self.penalty",
        "gradient",
        experiment="OnHost",
    ),
    edit(
        "hook that calls the one it overrides",
        BASE,
        "class OnHost(Base):\n",
        "class OnHost(Base):\n    def loss(self, outputs, *, y):\n        return 2 * super().loss(outputs, y=y)\n\n",
        "gradient",
        experiment="OnHost",
    ),
    edit("another order of base classes", BASE, "class Base(Centered, Data)", "class Base(Data, Centered)"),
    edit(
        "method that no hook calls",
        BASE,
        "        return x / 3\n",
        "        return x / 3\n\n    def idle(self):\n        return 1\n",
    ),
]

MODELS = [
    edit("default of a linen module", BASE, "slope: float = 0.1", "slope: float = 0.2", FORWARD),
    edit("one more layer", BASE, "return nn.Dense(1)(self", "return nn.Dense(1)(nn.Dense(4)(self", MODEL)
    if False
    else edit("without a bias", BASE, "nn.Dense(self.width)(x)", "nn.Dense(self.width, use_bias=False)(x)", MODEL),
    edit("initialiser", BASE, "nn.Dense(1)(self", "nn.Dense(1, bias_init=nn.initializers.ones)(self", may=FORWARD),
    edit("call of an NNX module", BASE, "nnx.relu", "nnx.gelu", FORWARD, experiment="Graph"),
    edit(
        "attribute of an NNX module",
        BASE,
        "nnx.Dropout(0.25",
        "nnx.Dropout(0.5",
        "gradient",
        may="evaluation",
        experiment="Graph",
    ),
    edit("loss over an NNX module", BASE, "optax.huber_loss", "optax.l2_loss", "gradient", experiment="Graph"),
    edit(
        "field of a library module",
        BASE,
        "nnx.Linear(width, 1, ",
        "nnx.Linear(width, 1, use_bias=False, ",
        MODEL,
        experiment="Graph",
    ),
    given("width of an NNX module", MODEL, fields={"width": 5}, experiment="Graph"),
]

HOOKS = [
    edit("metrics on the device", BASE, "self.level * jnp.abs(outputs", "self.level * jnp.square(outputs", "metrics"),
    edit(
        "metrics on the host",
        BASE,
        'return {"error": (np.abs(outputs - y).sum(), len(y))}\n\n\nclass Held',
        'return {"error": ((outputs - y).sum(), len(y))}\n\n\nclass Held',
        experiment="OnHost",
    ),
    edit("train metrics on the device", BASE, "jnp.abs(outputs - y).max()", "jnp.abs(outputs - y).min()", "gradient"),
    edit(
        "train metrics on the host",
        BASE,
        'np.abs(outputs - y).max()}\n\n    def metrics(self, outputs, *, y):\n        return {"error": (np',
        'np.abs(outputs - y).min()}\n\n    def metrics(self, outputs, *, y):\n        return {"error": (np',
        experiment="OnHost",
    ),
    edit(
        "train metrics move to the host",
        BASE,
        '        return "device"\n',
        '        return "device" if hook == "metrics" else "host"\n',
        "gradient update",
    ),
    edit(
        "metrics move to the host",
        BASE,
        '        return "device"\n',
        '        return "host" if hook == "metrics" else "device"\n',
    ),
    edit(
        "no train metrics",
        BASE,
        '    def train_metrics(self, outputs, *, y):\n        return {"largest": jnp',
        '    def _left(self, outputs, *, y):\n        return {"largest": jnp',
        "gradient update",
    ),
    edit("finalize_metrics", BASE, "len(self.note)", "2 * len(self.note)"),
    edit("derive", BASE, "{len(data)} splits", "{len(data)} parts"),
    edit("checkpointer", BASE, "keep=1", "keep=2"),
    edit("build_data", BASE, "+ 0.25).astype", "+ 0.75).astype"),
    edit(
        "build_data reads a file",
        BASE,
        "        rng = np.random.default_rng(self.seed)\n",
        '        rng = np.random.default_rng(len(Path("data/offset.txt").read_text()))\n',
    ),
    edit(
        "build_data reads a clock and the environment",
        BASE,
        "        rng = np.random.default_rng(self.seed)\n",
        "        import os\n        import time\n\n"
        "        rng = np.random.default_rng(int(time.time()) + len(os.environ))\n",
    ),
    edit("a schedule", BASE, "0.01, 0.02, total", "0.02, 0.01, total"),
    edit("no schedules", BASE, '{"learning_rate": rising}', "{}"),
    edit("a schedule for a Device field", BASE, '{"learning_rate": rising}', '{"smoothing": rising}'),
    edit(
        "loss and forward of an experiment without a base",
        BASE,
        "jax.nn.softplus",
        "jnp.square",
        "gradient loss",
        experiment="Plain",
    ),
]

OPTIMIZERS = [
    edit("constant of an optimizer", RULES, "FACTOR = 0.5", "FACTOR = 0.25", "update"),
    edit("number given to an optimizer", BASE, "momentum=0.8", "momentum=0.7"),
    edit("default number of an optimizer", RULES, "momentum=0.9", "momentum=0.6", may="update"),
    edit("flag given to an optimizer", BASE, "momentum=0.8", "momentum=0.8, nesterov=True", "update"),
    edit("another optimizer", BASE, "functools.partial(rules.damped, momentum=0.8)", "optax.adam", "update"),
    edit("nitro's optimizer", BASE, "functools.partial(rules.damped, momentum=0.8)", "None", "update"),
    edit(
        "no_decay under decay",
        BASE,
        "return default_no_decay(path, leaf)",
        "return True",
        MODEL,
        first={"weight_decay": 0.1},
    ),
    edit(
        "no_decay that says the same",
        BASE,
        "return default_no_decay(path, leaf)",
        "return len(leaf.shape) < 2",
        first={"weight_decay": 0.1},
    ),
    edit("no_decay without decay", BASE, "return default_no_decay(path, leaf)", "return True", may="update"),
    edit("param_group", BASE, 'return "default"\n', 'return "biases" if path.endswith("bias") else "default"\n', MODEL),
    edit("param_group that says the same", BASE, 'return "default"\n', 'return "default" if path else "none"\n'),
    edit(
        "rate of a group",
        BASE,
        "    def no_decay(",
        "    def group_learning_rate(self, group):\n        return 0.5\n\n    def no_decay(",
    ),
]

MANUAL = [
    edit("step", BASE, '"loss": loss,', '"loss": 2 * loss,', "step", experiment="Manual"),
    edit("helper of a step", BASE, "jnp.square(error).mean()", "jnp.square(error).max()", "step", experiment="Manual"),
    edit(
        "class constant of a step",
        BASE,
        "BLEND: ClassVar[float] = 0.5",
        "BLEND: ClassVar[float] = 0.75",
        "step",
        experiment="Manual",
    ),
    edit(
        "forward that a step calls",
        BASE,
        '@ ps["w"] + ps["b"], st',
        '@ ps["w"] - ps["b"], st',
        "step evaluation",
        experiment="Manual",
    ),
    edit(
        "flag of an optimizer of a step",
        BASE,
        "optax.sgd, momentum=0.9",
        "optax.sgd, momentum=0.9, nesterov=True",
        "step",
        experiment="Manual",
    ),
    edit(
        "rule of an optimizer of a step",
        BASE,
        "functools.partial(optax.sgd, momentum=0.9)",
        "optax.adam",
        "step",
        experiment="Manual",
    ),
    edit("stats of a step", BASE, '"stats": {"size": optax.tree.norm(gradients)},', "", "step", experiment="Manual"),
    given("Device value of a step", fields={"smoothing": 0.5}, experiment="Manual"),
]

VALUES = [
    given("GraphConst that only loss reads", "gradient", fields={"power": 4}),
    given("GraphConst that only metrics read", "metrics", fields={"level": 2.0}),
    given("GraphConst that nothing reads", fields={"unread": 1}),
    given("GraphConst that decides shapes", MODEL, fields={"width": 5}),
    given("GraphConst enum", FORWARD, fields={"kind": {EXPRESSION: "Kind.FOURTH"}}),
    given("GraphConst function", FORWARD, fields={"reshape": {EXPRESSION: "shifted"}}, experiment="Held"),
    given("GraphConst tuple", "gradient", fields={"tags": {EXPRESSION: "('sum', 'plain')"}}),
    given("Device value", fields={"smoothing": 0.7}),
    edit(
        "default of a Device field",
        BASE,
        'smoothing: Device[float] = 0.1\n    """A',
        'smoothing: Device[float] = 0.4\n    """A',
    ),
    given("Host value", fields={"note": "something else"}),
    given("seed", fields={"seed": 7}),
    given("learning rate", fields={"learning_rate": 0.5}),
    given("max_epochs", fields={"max_epochs": 2}),
    given("more rows", fields={"rows": 24}),
    given("another batch size", "gradient evaluation metrics", fields={"batch": 8}),
    given("accumulation", "gradient", fields={"accum": 2}),
    given("more accumulation", first={"accum": 2}, fields={"accum": 4}),
    given("clipping", "update", fields={"gradient_clip_norm": 1.0}),
    given("moving average", "update", fields={"ema_decay": 0.5}),
    given("another moving average", fields={"ema_decay": 0.8, "evaluate_with_ema": True}, experiment="Graph"),
    given("weight decay", MODEL, fields={"weight_decay": 0.1}),
    given("compute_dtype", FORWARD, fields={"compute_dtype": "bfloat16"}),
    given("param_dtype", MODEL, fields={"param_dtype": "bfloat16"}),
    given("parameter_layout", MODEL, fields={"parameter_layout": "tree"}),
    given("check of divergence", fields={"check_divergence": True}),
    given("preset with other Device and Host values", preset="swept"),
    given("preset with another GraphConst", "gradient", preset="sharper"),
    edit("value in a preset", "presets/base.toml", "smoothing = 0.1", "smoothing = 0.9", preset="current"),
    edit("a field more", BASE, '    note: str = ""\n', '    note: str = ""\n    more: int = 0\n'),
    edit("a GraphConst more", BASE, '    note: str = ""\n', '    note: str = ""\n    more: GraphConst[int] = 0\n'),
    edit(
        "a Device field more",
        BASE,
        '    note: str = ""\n',
        '    note: str = ""\n    more: Device[float] = 0.0\n',
        "gradient evaluation metrics",
        may="update",
    ),
]

WORDING = [
    given("nothing, in another folder"),
    edit("comment", OPS, "# how steep", "# how very steep"),
    edit("docstring", OPS, '"""A smooth step."""', '"""Another text."""'),
    edit("lines moved", OPS, '"""Two levels below the hook."""\n', '"""Two levels below the hook."""\n\n\n\n\n'),
    edit(
        "another layout of a hook",
        BASE,
        "        return losses.passed(outputs) * self.kind.value, st",
        "        return (\n            losses.passed(outputs)\n"
        "            * self.kind.value,\n            st,\n        )",
    ),
    edit(
        "renamed local",
        OPS,
        "    scaled = SHARPNESS * x\n    return jnp.tanh(scaled)",
        "    steep = SHARPNESS * x\n    return jnp.tanh(steep)",
        may=FORWARD,
    ),
    edit("function that nobody calls", OPS, "return x - 1", "return x - 2"),
    edit("constant that nobody reads", OPS, "UNUSED = 7", "UNUSED = 8"),
    edit("import added", BASE, "import functools\n", "import functools\nimport math as _math\n"),
    edit(
        "annotation of a hook",
        BASE,
        "def penalty(self, outputs, weight=0.5):",
        "def penalty(self, outputs: Any, weight: float = 0.5) -> Any:",
    ),
    edit("help text of a field", BASE, '"""Hidden width."""', '"""How wide it is."""'),
    edit(
        "hooks in another order",
        BASE,
        f"{PROPERTY}\n{STATIC}",
        f"{STATIC}\n{PROPERTY}",
    ),
]

IMPURE = [
    edit(
        "hook reads a file",
        BASE,
        "        def bent(value):",
        '        x = x + np.loadtxt("data/offset.txt")\n\n        def bent(value):',
        refused=FORWARD,
    ),
    edit(
        "hook reads the environment",
        BASE,
        "        def bent(value):",
        '        import os\n\n        x = x + len(os.environ["HOME"])\n\n        def bent(value):',
        refused=FORWARD,
    ),
    edit(
        "hook reads a clock",
        BASE,
        "        return weight * jnp",
        "        import time\n\n        return time.time() * weight * jnp",
        refused="gradient",
    ),
    edit(
        "hook draws a random number",
        BASE,
        "        return weight * jnp",
        "        return np.random.rand() * weight * jnp",
        refused="gradient",
    ),
    edit(
        "helper of a hook draws a random number",
        OPS,
        "    return jnp.tanh(scaled)",
        "    import random\n\n    return jnp.tanh(scaled) * random.random()",
        refused=FORWARD,
    ),
    edit(
        "optimizer reads a clock",
        RULES,
        "    def scale(updates):",
        "    import time\n\n    start = time.time()\n\n"
        "    def scale(updates):\n        updates = jax.tree.map(lambda u: u * start, updates)",
        refused="update",
    ),
]

PATCHED = [
    Case(
        "helper patched",
        after="import toolbox.layers as l, toolbox.deep.ops as o; l.soften = o.nobody_calls_this",
        misses=FORWARD,
    ),
    Case("function of jax patched", after="import jax; jax.numpy.tanh = jax.numpy.sinh", misses=FORWARD),
    Case(
        "function of jax patched by one of the user's",
        after="import jax; jax.numpy.tanh = lambda x: x * 2.0",
        misses=FORWARD,
        may="update metrics",
    ),
    Case(
        "function of flax patched",
        after="import flax.linen as nn; nn.leaky_relu = lambda x, slope: slope * x",
        misses=FORWARD,
    ),
    Case("function of optax patched", after="import optax; optax.trace = lambda *a: optax.identity()", misses="update"),
    Case(
        "function of optax that only a schedule calls patched",
        after="import optax; optax.linear_schedule = lambda *a: optax.constant_schedule(0.5)",
        may="update",
    ),
    Case("method patched", after="base.Base.penalty = lambda self, outputs: 0.0", misses="gradient"),
    Case("dict changed", after="base.losses.REDUCTIONS['mean'] = lambda x: x.sum()", misses="gradient"),
    Case("registry changed", after="base.losses.REGISTRY['plain'] = base.losses.doubled", misses="gradient"),
]

ENVIRONMENT = [
    Case("XLA_FLAGS", environment={"XLA_FLAGS": f"{CHEAP} --xla_cpu_enable_fast_math=true"}, misses=ALL),
    Case(
        "number of devices", environment={"XLA_FLAGS": f"{CHEAP} --xla_force_host_platform_device_count=2"}, misses=ALL
    ),
    Case("another environment variable", environment={"NITRO_TEST": "1"}),
    Case("x64", before="import jax; jax.config.update('jax_enable_x64', True)", misses=ALL),
    Case(
        "precision of products",
        before="import jax; jax.config.update('jax_default_matmul_precision', 'float32')",
        misses=ALL,
    ),
    Case(
        "random numbers of jax", before="import jax; jax.config.update('jax_threefry_partitionable', False)", misses=ALL
    ),
    Case("logging of jax", before="import jax; jax.config.update('jax_log_compiles', False)"),
    Case("tracebacks of jax", before="import jax; jax.config.update('jax_traceback_filtering', 'off')"),
    Case(
        "version of a library",
        before=OTHER_OPTAX,
        misses=ALL,
    ),
]

CASES = [*HELPERS, *CLASSES, *MODELS, *HOOKS, *OPTIMIZERS, *MANUAL, *VALUES, *WORDING, *IMPURE, *PATCHED, *ENVIRONMENT]
