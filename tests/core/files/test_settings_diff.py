"""Every difference of two sets of settings is named with both values."""

from __future__ import annotations

from typing import Any

import pytest

from tpuport.core.files.settings_diff import differences, flatten

SETTINGS = {"prompt": "a cat", "steps": 50, "size": [480, 720], "cache": {"every": 2}}


def of(asked: dict[str, Any], recorded: dict[str, Any] = SETTINGS) -> list[str]:
    """The differences; what is recorded is as it reads back from JSON."""
    return differences(flatten(recorded), flatten(asked))


def test_differing_settings_are_named_with_both_values() -> None:
    asked = {"prompt": "a dog", "size": [480, 720], "cache": {"every": 3}, "seed": 7}
    assert of(asked) == [
        'settings.prompt is "a cat", asked "a dog"',
        "settings.cache.every is 2, asked 3",
        "settings.seed is not set, asked 7",
        "settings.steps is 50, asked not set",
    ]
    model = differences({"settings.a": 1, "weights": "x"}, {"settings.a": 2})
    assert model == ['weights is "x", asked not set', "settings.a is 1, asked 2"]


@pytest.mark.parametrize("asked", [{"steps": 50.0}, {"size": (480, 720)}])
def test_the_same_settings_pass_whatever_the_spelling(asked: dict[str, Any]) -> None:
    assert of({**SETTINGS, **asked}) == []
    # True == 1 in Python, and is not the same setting.
    assert of({"every": True}, {"every": 1}) != []


def test_long_values_are_shown_where_they_start_to_differ() -> None:
    prompt = "word " * 100
    (told,) = of({"prompt": prompt + "south\n"}, {"prompt": prompt + "north\n"})
    assert "north" in told
    assert "south" in told
    assert len(told) < 300
