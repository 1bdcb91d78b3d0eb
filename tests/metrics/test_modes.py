"""The wrappers are pytrees in traced code and cost nothing where jax is not there."""

from __future__ import annotations

import subprocess
import sys

import pytest

from nitro_cli.metrics.modes import Concat, Max, Min, Sum, register_modes


@pytest.mark.parametrize("mode", [Sum, Max, Min, Concat])
def test_a_mode_survives_a_traced_function(mode):
    import jax
    import jax.numpy as jnp

    result = jax.jit(lambda x: {"m": mode({"twice": 2 * x}), "pair": (x.sum(), 3)})(jnp.arange(3))
    assert type(result["m"]) is mode
    assert result["m"].value["twice"].tolist() == [0, 2, 4]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(result)]
    assert paths[0] == "['m'].value['twice']"


def test_registering_twice_is_harmless():
    register_modes()
    register_modes()


def test_modes_do_not_import_jax_and_work_when_it_comes_later():
    code = (
        "import sys\n"
        "from nitro_cli.metrics.modes import Sum\n"
        "early = Sum(1)\n"
        "assert 'jax' not in sys.modules\n"
        "import jax\n"
        "print(jax.jit(lambda x: Sum(x + 1))(1).value, early.value)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout.split(), run.returncode) == (["2", "1"], 0), run.stderr
