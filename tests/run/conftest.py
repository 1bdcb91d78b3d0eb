from __future__ import annotations

import shutil
import subprocess

import pytest


@pytest.fixture
def tmpfs(tmp_path):
    """``tmpfs(megabytes)`` mounts a real, small file system; skips where this user may not mount."""
    mounted = []

    def mount(megabytes: int):
        folder = tmp_path / f"tmpfs{len(mounted)}"
        folder.mkdir()
        if shutil.which("mount") is None:
            pytest.skip("there is no mount command here")
        command = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"mounting a small file system is not permitted here: {done.stderr.strip()}")
        mounted.append(folder)
        return folder

    yield mount
    for folder in mounted:
        subprocess.run(["umount", "-l", str(folder)], check=True)
