"""Data and metrics read batches in threads and reports; neither needs jax to be loaded."""

from __future__ import annotations

import subprocess
import sys


def test_no_module_imports_jax():
    modules = "data.source data.loader data.routing data.padding data.prefetch metrics.accumulate metrics.finalize"
    code = f"import sys, importlib\nfor m in '{modules}'.split(): importlib.import_module('nitro_cli.' + m)\n"
    code += "print(sorted(m for m in sys.modules if m in ('jax', 'flax', 'optax', 'orbax')))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (run.stdout.strip(), run.returncode) == ("[]", 0), run.stderr
