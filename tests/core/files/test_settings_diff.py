"""Every difference of two sets of settings is named with both values."""

from __future__ import annotations

from tpuport.core.files.settings_diff import differences

SETTINGS = {"prompt": "a cat", "steps": 50, "size": [480, 720], "cache": {"every": 2}}


def test_differing_settings_are_named_with_both_values() -> None:
    asked = {"prompt": "a dog", "size": [480, 720], "cache": {"every": 3}, "seed": 7}
    assert differences(SETTINGS, asked) == [
        'prompt is "a cat", asked "a dog"',
        "cache.every is 2, asked 3",
        "seed is not set, asked 7",
        "steps is 50, asked not set",
    ]


def test_a_tuple_is_what_json_makes_of_it() -> None:
    assert differences(SETTINGS, {**SETTINGS, "size": (480, 720)}) == []
    # True == 1 in Python, and is not the same setting.
    assert differences({"every": 1}, {"every": True}) != []


def test_long_values_are_shown_where_they_start_to_differ() -> None:
    prompt = "word " * 100
    (told,) = differences(
        {"prompt": prompt + "north\n"}, {"prompt": prompt + "south\n"}
    )
    assert "north" in told
    assert "south" in told
    assert len(told) < 300
