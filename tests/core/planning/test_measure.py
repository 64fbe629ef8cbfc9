"""What the compiler says of a program that is too large."""

from __future__ import annotations

import pytest

from tpuport.core.device_memory import refused_bytes


@pytest.mark.parametrize(
    ("message", "size"),
    [
        (
            "RESOURCE_EXHAUSTED: Allocation (size=3) XLA:TPU compile permanent error. "
            "Ran out of memory in memory space hbm. Used 48.25G of 31.25G hbm. "
            "Exceeded hbm capacity by 17.00G.",
            int(48.25 * 2**30),
        ),
        (
            "RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required "
            "for HLO temporaries (54.50G) exceeds available HBM (31.25G).",
            int(54.5 * 2**30),
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.", None),
        ("INTERNAL: something else", None),
    ],
    ids=["allocation", "temporaries", "vmem", "other"],
)
def test_the_size_is_read_from_the_compilers_words(
    message: str, size: int | None
) -> None:
    assert refused_bytes(message) == size
