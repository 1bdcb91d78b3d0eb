"""The examples of manual mode: what they learn, and that they do what they say."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from toys import log_of

from nitro_cli import Nitro, cache_reset, cache_stats
from nitro_cli.cli import main
from nitro_cli.experiment.discovery import find_experiment
from nitro_cli.experiment.presets import check_presets
from nitro_cli.programs.ledger import ledger

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("experiments", "presets")


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project folder with the examples, to stand in; modules loaded from it are forgotten afterwards."""
    for folder in FOLDERS:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.chdir(tmp_path)
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] in FOLDERS}
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield tmp_path
    for name in list(sys.modules):
        if name.split(".")[0] in FOLDERS:
            del sys.modules[name]
    sys.modules.update(before)


def test_the_toy_gan_learns_its_distribution_from_five_seeds_with_two_programs(project, capsys):
    cache_reset()
    for seed in range(5):
        mark = ledger.mark()
        run = project / f"run-{seed}"
        assert main.run(["train", "toy_gan", "--seed", str(seed), "--run-dir", str(run), "-q"]) == 0
        last = log_of(run, "validate")[-1]["values"]
        assert abs(last["val_mean"] - 1.5) < 0.15, (seed, last)
        assert abs(last["val_std"] / 0.5 - 1) < 0.20, (seed, last)
        if seed:
            names = [row.name for row in ledger.since(mark)]
            assert not [name for name in names if "nitro_step" in name or "nitro_evaluation" in name]
    stats = cache_stats()
    assert (stats.misses, stats.entries) == (2, 2)
    capsys.readouterr()


def test_the_toy_gan_is_met_by_the_acceptance_check_and_reports_say_manual(project, capsys):
    assert main.run(["cache-stats", "toy_gan", "--json"]) == 0
    capsys.readouterr()
    assert main.run(["show", "toy_gan", "--json"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["mode"] for event in events if "mode" in event] == ["manual"]


@pytest.mark.parametrize("name", ["toy_gan", "sam", "digits_gan"])
def test_presets_fit(project, name):
    assert check_presets(find_experiment(name).cls) == []


def test_twenty_steps_of_sam_to_a_millionth(project):
    cls = find_experiment("sam").cls
    data = cls().build_data(None)
    twenty = [data["train"][i] for i in range(19)] + [data["train"][0]]
    n = Nitro(cls(rho=0.1, learning_rate=0.01, max_epochs=1), data={**data, "train": twenty}, run_dir=project / "run")
    ps = jax.tree.map(jnp.asarray, n.parameters)
    model = n.setup.recipe.model
    n.train()
    trace = jax.tree.map(jnp.zeros_like, ps)

    @jax.jit
    def step(ps, trace, image, label):
        def loss(ps):
            logits = model.apply({"params": ps}, image)
            return optax.softmax_cross_entropy_with_integer_labels(logits, label).mean()

        g = jax.grad(loss)(ps)
        norm = jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(g)))
        there = jax.tree.map(lambda p, d: p + 0.1 * d / (norm + 1e-12), ps, g)
        trace = jax.tree.map(lambda t, d: 0.9 * t + d, trace, jax.grad(loss)(there))
        return jax.tree.map(lambda p, t: p - 0.01 * t, ps, trace), trace

    for batch in twenty:
        ps, trace = step(ps, trace, batch["image"], batch["label"])
    assert n.state.step == 20
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6), n.parameters, ps)


def test_the_digits_gan_draws_a_grid_after_every_epoch(project):
    module = find_experiment("digits_gan")
    e = module.cls(channels=8, noise=4, rows=2, max_epochs=2, pictures=project / "pictures", batch_size=256)
    n = Nitro(e, run_dir=project / "run")
    n.train()
    pictures = sorted(path.name for path in (project / "pictures").iterdir())
    assert pictures == ["val-001.png", "val-002.png"]
    from matplotlib.image import imread

    assert imread(project / "pictures" / "val-001.png").shape == (2 * 10 * 6, 10 * 10 * 6, 4)
    assert 0 <= n.history[-1]["val_recognised"] <= 1
    assert n.history[-1]["val_nearest"] > 0


def test_a_real_image_is_found_as_its_own_copy(project):
    nearest_real = sys.modules[find_experiment("digits_gan").cls.__module__].nearest_real
    from sklearn.datasets import load_digits

    digits = load_digits()
    distance, label = nearest_real(digits.images[:5] / 8.0 - 1.0)
    np.testing.assert_allclose(distance, 0, atol=2e-3)
    np.testing.assert_array_equal(label, digits.target[:5])
