"""Step caching: its settings, its schedule, its extrapolation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tpuport.core.spec.step_cache import StepCache
from tpuport.errors import UsageError


def table_of(cache: StepCache, steps: int) -> np.ndarray:
    """The weights of the states kept at each cached step; zeros for full steps."""
    table = np.zeros((steps, cache.depth), np.float32)
    nodes: list[int] = []
    for step, full in enumerate(cache.schedule(steps)):
        if full:
            nodes = [step, *nodes][: cache.depth]
        else:
            table[step] = cache.weights_at(step, nodes)
    return table


def parse(text: str) -> StepCache:
    cache = StepCache.parse(text)
    assert cache is not None
    return cache


# -------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("deepcache", "deepcache:interval=4"),
        ("deepcache:start=11,end=45", "deepcache:start=11,end=45,interval=4"),
        (" deepcache : interval = 3 ,start=2", "deepcache:start=2,interval=3"),
        ("taylorseer", "taylorseer:interval=4,order=1"),
        ("taylorseer:order=2,end=9", "taylorseer:end=9,interval=4,order=2"),
    ],
)
def test_settings_have_a_normal_form_that_reads_back(text: str, normal: str) -> None:
    cache = parse(text)
    assert str(cache) == normal
    assert StepCache.parse(normal) == cache
    assert StepCache.parse(cache) is cache


def test_no_cache_is_none() -> None:
    assert StepCache.parse(None) is None
    assert StepCache.parse("none") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("deepcash", r"'deepcash' is unknown.*deepcache, taylorseer, none; did you"),
        ("", "'' is unknown"),
        ("none:start=1", "is unknown"),
        ("deepcache:", "'' is not a setting of deepcache; it has start, end, interval"),
        ("deepcache:strat=3", r"'strat=3' is not a setting.*did you mean start\?"),
        ("deepcache:11,45,4", "'11' is not a setting"),
        ("deepcache:order=1", "'order=1' is not a setting of deepcache"),
        ("deepcache:start=2,start=3", "start is given twice"),
        ("deepcache:start=2.5", "start '2.5' is not a whole number"),
        ("deepcache:interval=1", "interval=1.*at least 2; nearest valid: 2"),
        ("deepcache:start=0", "start=0.*at least 1; nearest valid: 1"),
        ("deepcache:start=-3", "start=-3.*nearest valid: 1"),
        ("deepcache:start=9,end=10", "end=10.*at least 11; nearest valid: 11"),
        ("deepcache:end=2", "end=2.*at least 3"),
        ("taylorseer:order=0", "order=0.*1 to 4; nearest valid: 1"),
        ("taylorseer:order=7", "order=7.*1 to 4; nearest valid: 4"),
        ("taylorseer:order=2,start=1", "start=1.*at least 2; nearest valid: 2"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_legal(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StepCache.parse(text)


def test_what_is_no_string_and_an_order_of_deepcache_are_refused() -> None:
    value: Any = {"method": "deepcache"}
    with pytest.raises(UsageError, match="is not a string"):
        StepCache.parse(value)
    with pytest.raises(UsageError, match="deepcache has no order"):
        StepCache(method="deepcache", order=1)


# -------------------------------------------------------------------- schedule


def test_the_ports_schedule_has_25_full_and_25_cached_steps() -> None:
    for text in ("deepcache", "deepcache:start=11,end=45,interval=4", "taylorseer"):
        full = parse(text).schedule(50)
        assert len(full) == 50
        expected = [*range(11), 11, 15, 19, 23, 27, 31, 35, 39, 43, *range(45, 50)]
        assert [step for step in range(50) if full[step]] == expected
        assert full.count(False) == 25


@pytest.mark.parametrize(
    ("text", "steps", "cached"),
    [
        ("deepcache:start=2,end=9,interval=3", 10, [3, 4, 6, 7]),
        ("deepcache:start=1,end=3,interval=2", 3, [2]),
        ("deepcache:start=1,interval=9", 8, [2, 3, 4, 5, 6]),
        ("deepcache", 3, [2]),
        ("deepcache", 4, [2, 3]),
        ("deepcache", 10, [3, 4, 5, 7, 8]),
        ("deepcache:end=4", 50, [3]),
        ("deepcache:start=47", 50, [48]),
        ("taylorseer:order=3", 5, [4]),
    ],
)
def test_cached_steps_of_other_schedules(
    text: str, steps: int, cached: list[int]
) -> None:
    full = parse(text).schedule(steps)
    assert [step for step in range(steps) if not full[step]] == cached


@pytest.mark.parametrize("method", ["deepcache", "taylorseer"])
def test_defaults_are_in_proportion_and_always_in_range(method: str) -> None:
    for steps in range(3, 120):
        cache = parse(method).resolve(steps)
        assert cache.start is not None
        assert cache.end is not None
        assert 1 <= cache.start <= cache.end - 2 <= steps - 2
        assert abs(cache.start - 0.22 * steps) <= 0.5 or steps < 10
        full = cache.schedule(steps)
        assert full[0]
        assert not all(full)
        assert StepCache.parse(str(cache)) == cache
    assert str(parse(method).resolve(50)).startswith(f"{method}:start=11,end=45")


@pytest.mark.parametrize(
    ("text", "steps", "message"),
    [
        ("deepcache:start=49", 50, "start=49 of 50 steps.*1 to 48; nearest valid: 48"),
        ("deepcache:start=9,end=40", 20, "end=40 of 20 steps.*11 to 20.*valid: 20"),
        ("deepcache:end=51", 50, "end=51 of 50 steps"),
        ("deepcache", 2, "none of 2 steps; it needs at least 3"),
        ("taylorseer:order=3", 4, "none of 4 steps; it needs at least 5"),
    ],
)
def test_a_setting_that_the_steps_rule_out(text: str, steps: int, message: str) -> None:
    cache = parse(text)
    with pytest.raises(UsageError, match=message):
        cache.schedule(steps)
    with pytest.raises(UsageError, match=message):
        table_of(cache, steps)


# --------------------------------------------------------------------- weights


@pytest.mark.parametrize("order", [1, 2, 3, 4])
def test_polynomials_of_the_order_are_extrapolated_exactly(order: int) -> None:
    # Also across the uneven gap at the start: 9, 10, 11 are full, then every fourth.
    cache = parse(f"taylorseer:start=11,end=45,interval=4,order={order}")
    table, full = table_of(cache, 50), cache.schedule(50)
    assert table.shape == (50, order + 1)
    assert table.dtype == np.float32
    values = np.polynomial.Polynomial([0.5, -1.0, 0.25, 0.03, -0.001][: order + 1])
    kept: list[float] = []
    for step in range(50):
        if full[step]:
            kept = [float(values(step)), *kept][: order + 1]
            assert not table[step].any()
        else:
            size = max(abs(v) for v in kept) * np.abs(table[step]).sum()
            assert abs(table[step] @ kept - values(step)) <= 1e-6 * size
    # One degree more is not: the weights are of that order and no higher.
    higher = [float(s ** (order + 1)) for s in (43, 39, 35, 31, 27)[: order + 1]]
    assert abs(table[44] @ higher - 44.0 ** (order + 1)) > 1


def test_order_one_is_the_newest_plus_its_slope() -> None:
    table = table_of(parse("taylorseer"), 50)
    np.testing.assert_array_equal(table[12:15], [[2, -1], [3, -2], [4, -3]])
    np.testing.assert_array_equal(
        table[16:19], [[1.25, -0.25], [1.5, -0.5], [1.75, -0.75]]
    )


def test_deepcache_repeats_the_newest() -> None:
    cache = parse("deepcache")
    table = table_of(cache, 50)
    np.testing.assert_array_equal(table[:, 0], [not f for f in cache.schedule(50)])
