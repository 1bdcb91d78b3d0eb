"""jax's own cache below the store: switched on as the user left it, and only where nobody else can write."""

from __future__ import annotations

import os
import zlib

import jax
import pytest

from nitro_cli.programs.jax_cache import heal, jax_folder, use_jax_cache
from nitro_cli.programs.store import Store, StoreWarning, settings

SECONDS, BYTES = "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes"


@pytest.fixture
def own(own_store, monkeypatch):
    """A store of the test's own, and jax as it is at the start of a process."""
    monkeypatch.setattr(settings, "opened", {})
    for name, value in (("jax_compilation_cache_dir", None), (SECONDS, 1.0), (BYTES, 0)):
        monkeypatch.delenv(name.upper(), raising=False)
        jax.config.update(name, value)
    return own_store


def _kept() -> tuple[float, int]:
    return jax.config.values[SECONDS], jax.config.values[BYTES]


def test_all_programs_are_kept_where_the_user_says_nothing(own):
    use_jax_cache()
    assert jax.config.values["jax_compilation_cache_dir"] == str(jax_folder(Store(own)))
    assert _kept() == (0.0, -1)


def test_what_the_user_has_set_stays(own, monkeypatch):
    jax.config.update(SECONDS, 5.0)
    monkeypatch.setenv(BYTES.upper(), "0")
    use_jax_cache()
    assert jax.config.values["jax_compilation_cache_dir"] is not None
    assert _kept() == (5.0, 0)


@pytest.mark.parametrize(("mode", "can"), [(0o755, "look into"), (0o770, "write to")])
def test_a_folder_that_others_can_reach_is_not_used(own, mode, can):
    folder = jax_folder(Store(own))
    folder.mkdir(parents=True)
    own.chmod(0o700)
    folder.chmod(mode)
    with pytest.warns(StoreWarning, match=f"jax's own cache cannot be used: other users can {can} {folder}"):
        use_jax_cache()
    assert jax.config.values["jax_compilation_cache_dir"] is None


def test_an_entry_that_is_a_link_or_was_cut_goes(tmp_path):
    folder = tmp_path / "jax"
    folder.mkdir()
    whole, cut, link = (folder / f"jit_{name}-cache" for name in ("whole", "cut", "link"))
    whole.write_bytes(zlib.compress(b"x" * 100))
    cut.write_bytes(zlib.compress(os.urandom(100))[:50])
    link.symlink_to(whole)
    assert heal(folder) == 2
    assert [os.path.lexists(path) for path in (whole, cut, link)] == [True, False, False]
