"""What ``tpuport serve`` refuses before it listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.tools import Cli


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--loras", "none"), "none: is no folder; name the folder of the LoRA files"),
        (("--loras", "."), "has no .safetensors file; put the LoRAs there"),
        (("--keep", "7"), "--keep: '7' is no time, such as 7d, 12h, 30m or 90s"),
        (("--shapes", "8x8"), "is no WIDTHxHEIGHTxFRAMES, such as 720x480x49"),
        (
            ("--api-key-file", "none"),
            "none does not exist; check the name",
        ),
        (("--host", "no.such.host."), "cannot be listened to"),
    ],
)
def test_a_wrong_value_is_one_line_that_says_what_to_do(
    cli: Cli, args: tuple[str, ...], said: str
) -> None:
    ran = cli.refused(said, "serve", *args)
    assert ran.err.count("\n") == 1
    assert list(Path().iterdir()) == []
