"""jax's own compilation cache, below nitro's store: for every program that is not nitro's, an operation of a hook at
set-up for example.

jax keys it by the lowered program, so it is always sound; but it never repairs an entry that was cut short, and without
its size limit (which takes a lock at every read) it never removes one. Both are done here. A folder that the user has
chosen for jax is left alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import sys
import time
import warnings
import zlib
from pathlib import Path

import jax

from nitro_cli.programs.environment import environment
from nitro_cli.programs.store import Store, StoreWarning, folder_problem, open_store, private

_FACTS = ("jax", "jaxlib", "python", "platform", "processor", "device")
_CHECKED = ".checked"
# jax keeps only what took a second to compile, unless it is told otherwise: (jax's own value, nitro's).
_KEEP_ALL = {
    "jax_persistent_cache_min_compile_time_secs": (1.0, 0.0),
    "jax_persistent_cache_min_entry_size_bytes": (0, -1),
}


def use_jax_cache() -> None:
    """Turn jax's cache on, in a folder for these versions and this machine, unless the user has set one or none."""
    store = open_store()
    if store is None or jax.config.values["jax_compilation_cache_dir"] is not None:
        return
    folder = jax_folder(store)
    try:
        problem = _made(folder)
        if not problem:
            heal(folder)
    except OSError as error:
        problem = str(error.strerror or error)
    if problem:
        warnings.warn(f"jax's own cache cannot be used: {problem}", StoreWarning, 2)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    for name, (default, all_of_it) in _KEEP_ALL.items():
        if name.upper() not in os.environ and jax.config.values[name] == default:
            jax.config.update(name, all_of_it)


def _made(folder: Path) -> str:
    """Make the folder; what speaks against it, else. jax checks nothing that it reads, and writes files that others may
    write to where the umask says so: they must not come so far."""
    private(folder)
    return folder_problem(folder, closed=True)


def jax_folder(store: Store) -> Path:
    facts = environment()
    text = "\n".join(f"{name} = {facts[name]}" for name in _FACTS if name in facts)
    name = f"{facts['jax']}-{jax.default_backend()}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    return store.root / "jax" / name


def heal(folder: Path) -> int:
    """Remove entries that are another user's, and those that a crash or a full disk cut short among those written since
    the last look. Returns how many.

    jax warns of one that was cut in every process, compiles, and leaves it as it is.
    """
    private(folder)
    mark = folder / _CHECKED
    since = mark.stat().st_mtime if mark.exists() else 0.0
    removed, now = 0, time.time()
    for item in os.scandir(folder):
        with contextlib.suppress(OSError):  # another process may have removed it
            if not item.name.endswith("-cache"):
                continue
            facts = item.stat(follow_symlinks=False)
            if not _own(facts) or (facts.st_mtime >= since and not _whole(Path(item.path))):
                os.unlink(item.path)
                removed += 1
    with contextlib.suppress(OSError):
        mark.touch()
        os.utime(mark, (now, now))
    return removed


def _own(facts: os.stat_result) -> bool:
    """Whether it is a file of this user's, and not a link to anywhere."""
    return stat.S_ISREG(facts.st_mode) and (not hasattr(os, "getuid") or facts.st_uid == os.getuid())


def _whole(path: Path) -> bool:
    """Whether an entry can be unpacked. One that is being written this moment may be removed: it is written again."""
    try:
        data = path.read_bytes()
    except OSError:
        return True
    if not data:
        return False
    if data[:4] == b"\x28\xb5\x2f\xfd":  # zstandard, where it is installed; jax then reads it with the same library
        return _unpacks_zstandard(data)
    try:
        zlib.decompress(data)
    except zlib.error:
        return False
    return True


def _unpacks_zstandard(data: bytes) -> bool:
    zstandard = sys.modules.get("zstandard")  # jax has imported it where it is there
    if zstandard is None:
        return True
    try:
        zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError:
        return False
    return True
