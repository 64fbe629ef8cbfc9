"""Rotary tables: one entry per key, no two tables share one, the oldest goes first."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from tpuport.core.layers.rotary_tables import RotaryCache, RotaryKey

KEY = RotaryKey(
    grid=(2, 3, 4), axes_dim=(4, 6, 6), theta=1e4, positions="all", interleaved=True
)
OTHER: dict[str, Any] = {
    "grid": (2, 4, 3),
    "axes_dim": (6, 4, 6),
    "theta": 256.0,
    "positions": ("slice", (8, 8)),
    "interleaved": False,
    "dtype": "bfloat16",
}


class Builder:
    """Counts what it builds, and writes the count into the tables."""

    def __init__(self) -> None:
        self.built: list[RotaryKey] = []

    def __call__(self, key: RotaryKey) -> tuple[np.ndarray, np.ndarray]:
        self.built.append(key)
        table = np.full((key.tokens, key.head_dim), float(len(self.built)))
        return table, -table


def test_a_key_knows_the_shape_of_its_tables() -> None:
    assert (KEY.tokens, KEY.head_dim) == (24, 16)


@pytest.mark.parametrize("field", OTHER)
def test_keys_that_differ_in_one_field_have_tables_of_their_own(field: str) -> None:
    assert set(OTHER) == {f.name for f in fields(RotaryKey)}
    cache, build = RotaryCache(), Builder()
    other = replace(KEY, **{field: OTHER[field]})
    first = cache.get(KEY, build)
    assert cache.get(other, build)[0][0, 0] == 2
    assert cache.get(KEY, build) is not None
    assert cache.get(replace(KEY), build)[0] is first[0]
    assert build.built == [KEY, other]


def test_the_least_recently_used_table_goes_first() -> None:
    cache, build = RotaryCache(limit=2), Builder()
    a, b, c = (replace(KEY, theta=theta) for theta in (1.0, 2.0, 3.0))
    for key in (a, b, a, c):  # b is the oldest by use, a by making
        cache.get(key, build)
    cache.get(a, build)
    assert build.built == [a, b, c]
    cache.get(b, build)
    assert build.built == [a, b, c, b]


def test_a_table_of_another_shape_is_refused_and_not_kept() -> None:
    cache = RotaryCache()
    good, bad = np.zeros((24, 16)), np.zeros((24, 8))
    for tables in ((bad, good), (good, bad)):
        with pytest.raises(ValueError, match=r"expected \(24, 16\)"):
            cache.get(KEY, lambda key, tables=tables: tables)
    assert cache.get.cache_info().currsize == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": ()}, r"rotary grid \(\)"),
        ({"grid": (2, 0, 4)}, r"rotary grid \(2, 0, 4\)"),
        ({"axes_dim": (4, 5, 6)}, r"rotary axes \(4, 5, 6\): each must be even"),
        ({"axes_dim": (0, 8, 8)}, r"rotary axes \(0, 8, 8\)"),
    ],
)
def test_a_key_without_positions_or_pairs_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        replace(KEY, **change)
