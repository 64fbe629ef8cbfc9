"""The same request, the same weights; every difference is named with both values."""

from __future__ import annotations

from pathlib import Path

from tests.core.files.runs import refusal, request
from tpuport.core.files.run_directory import RunDirectory


def test_differing_settings_are_named_with_both_values(run: RunDirectory) -> None:
    asked = {"prompt": "a dog", "size": [480, 720], "cache": {"every": 3}, "seed": 7}
    message = refusal(run.check_request, model="toy", variant="large", settings=asked)
    assert message.startswith(f"{run.file}: is of another request: ")
    for difference in (
        'variant is "small", asked "large"',
        'settings.prompt is "a cat", asked "a dog"',
        "settings.cache.every is 2, asked 3",
        "2 more; ",
    ):
        assert difference in message
    asked = {"prompt": "a cat", "size": [480, 720], "cache": {"every": 2}, "seed": 7}
    message = refusal(run.check_request, model="toy", settings=asked)
    for difference in (
        "settings.seed is not set, asked 7",
        "settings.steps is 50, asked not set",
    ):
        assert difference in message
    assert "size" not in message


def test_the_same_request_passes_whatever_the_spelling(run: RunDirectory) -> None:
    same = {"steps": 50.0, "size": (480, 720), "cache": {"every": 2}, "prompt": "a cat"}
    run.check_request(model="toy", variant="small", settings=same)
    assert "steps" in refusal(
        run.check_request, model="toy", settings=same | {"steps": 51}
    )
    # True == 1 in Python, and is not the same setting.
    once = RunDirectory.open_or_create(
        run.path / "once", **request(settings={"every": 1})
    )
    assert "every" in refusal(once.check_request, model="toy", settings={"every": True})


def test_long_values_are_shown_where_they_start_to_differ(tmp_path: Path) -> None:
    prompt = "word " * 100
    settings = {"prompt": prompt + "north\n"}
    run = RunDirectory.open_or_create(tmp_path / "run", **request(settings=settings))
    message = refusal(
        run.check_request, model="toy", settings={"prompt": prompt + "south\n"}
    )
    assert "north" in message
    assert "south" in message
    assert len(message) < 400 + len(str(run.file))


def test_other_weights_are_refused_and_unknown_ones_recorded(
    run: RunDirectory,
) -> None:
    run.check_weights("encoder", "aa" * 32)
    run.check_weights("encoder", None)
    run.check_weights("vae", "bb" * 32)
    assert run.weights == {"encoder": "aa" * 32, "vae": "bb" * 32}
    message = refusal(run.check_weights, "vae", "cc" * 32)
    assert f"{run.file}: was made with other weights for vae" in message
    assert "recorded bbbbbbbbbbbbbbbb, given cccccccccccccccc" in message
