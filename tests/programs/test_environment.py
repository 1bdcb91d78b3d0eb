"""What a program depends on besides its own code: an import alone is none of it, a setting is."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from nitro_cli.programs.environment import environment


def test_what_a_late_import_brings_counts_once_it_is_on():
    """In a process of its own, since what jax's caches go by cannot be taken back."""
    script = """
        import jax, optax, nitro_cli
        from jax._src import config
        from nitro_cli.programs.environment import environment

        before = environment()
        import jax.experimental.pallas, flax.linen, orbax.checkpoint
        late = config.config_ext.Config("late", None, include_in_jit_key=True, include_in_trace_context=True)
        also = config.config_ext.Config("also_late", False, include_in_jit_key=True, include_in_trace_context=True)
        after = environment()
        assert after == before, set(after.items()) ^ set(before.items())
        seen = [after]
        for item, value in ((late, 0), (late, "a"), (late, None), (also, True)):
            item.set_global(value)
            seen.append(environment())
        assert seen[3] == before
        assert len({tuple(sorted(facts.items())) for facts in seen}) == 4
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_setting_that_holds_for_a_while_counts():
    import jax

    before = environment()
    for setting in (jax.default_matmul_precision("highest"), jax.numpy_rank_promotion("warn"), jax.disable_jit()):
        with setting:
            assert environment()["jax trace context"] != before["jax trace context"]
    assert environment() == before
