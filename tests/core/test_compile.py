"""The persistent cache: on in its block, jax's settings put back, hits counted."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tpuport.core import compile as compiling
from tpuport.core.compile import cache_hits, persistent_cache


def settings() -> dict[str, object]:
    return {name: getattr(jax.config, name) for name in compiling._SETTINGS}


def compile_once(factor: float) -> None:
    """A program of its own, compiled although this process may know it."""
    jax.clear_caches()
    argument = jax.ShapeDtypeStruct((3,), jnp.float32)
    jax.jit(lambda x: x * factor + 1).lower(argument).compile()


def test_a_second_compile_comes_out_of_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    with persistent_cache(folder):
        before = cache_hits()
        compile_once(0.125)
        first = cache_hits()
        assert any(folder.iterdir())  # small and quick programs are kept too
        compile_once(0.125)
        assert (first - before, cache_hits() - first) == (0, 1)
        compile_once(0.375)
        assert cache_hits() - first == 1
    with persistent_cache(folder):  # as another process would
        compile_once(0.375)
        assert cache_hits() - first == 2


def test_nothing_is_kept_after_the_block(tmp_path: Path) -> None:
    with persistent_cache(tmp_path):
        compile_once(0.5)
    kept = sorted(tmp_path.iterdir())
    before = cache_hits()
    compile_once(0.625)
    assert sorted(tmp_path.iterdir()) == kept
    assert cache_hits() == before


@pytest.mark.parametrize("folder", ["cache", None])
def test_the_settings_of_jax_are_put_back_also_after_an_error(
    tmp_path: Path, folder: str | None
) -> None:
    before = settings()

    def fail() -> None:
        with persistent_cache(tmp_path / folder if folder else None):
            assert (settings() != before) is bool(folder)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert settings() == before


def test_caches_nest(tmp_path: Path) -> None:
    with persistent_cache(tmp_path / "outer"):
        with persistent_cache(tmp_path / "inner"):
            compile_once(0.75)
        before = cache_hits()
        compile_once(0.75)
        assert cache_hits() == before
        assert any((tmp_path / "outer").iterdir())


def test_a_folder_that_cannot_be_made_is_an_oserror(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    before = settings()
    with pytest.raises(OSError, match="file"), persistent_cache(tmp_path / "file/x"):
        pass
    assert settings() == before
