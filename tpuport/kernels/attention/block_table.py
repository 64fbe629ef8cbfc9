"""Tiles of the splash kernel that a search found best, with the reason for each.

``blocks.json`` beside this file is written by ``tpuport tune --write``. An entry holds
for one chip, one head dim and a bucket of lengths. All lengths of a bucket are padded
to one length, so they take equal cycles. The kernel's own rule serves lengths in no
bucket.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tpuport.kernels.attention.splash_blocks import SplashBlocks

_KEYS = ("chip", "head_dim", "q_len", "kv_len", "blocks", "measured", "tried")
TABLE = Path(__file__).with_name("blocks.json")


def tuned_blocks(
    chip: str, head_dim: int, q_len: int, kv_len: int, *, table: Path = TABLE
) -> SplashBlocks | None:
    """The best tiles found for a call, or None where none were looked for.

    Args:
        chip: generation, such as ``v6e``.

    Raises:
        ValueError: the file is not a table of blocks.
    """
    entry = find_entry(chip, head_dim, q_len, kv_len, table=table)
    if entry is None:
        return None
    q, kv, kv_compute = entry["blocks"]
    return SplashBlocks(q=q, kv=kv, kv_compute=kv_compute)


def find_entry(
    chip: str, head_dim: int, q_len: int, kv_len: int, *, table: Path = TABLE
) -> dict[str, Any] | None:
    """The entry whose bucket a call is in; see :func:`tuned_blocks`."""
    found = (
        entry
        for entry in read_entries(table)
        if (entry["chip"], entry["head_dim"]) == (chip, head_dim)
        and entry["q_len"][0] <= q_len <= entry["q_len"][1]
        and entry["kv_len"][0] <= kv_len <= entry["kv_len"][1]
    )
    return next(found, None)


def bucket(length: int, block: int) -> tuple[int, int]:
    """The first and last length that ``block`` pads to the padded ``length``."""
    count = -(-length // block)
    return (count - 1) * block + 1, count * block


@functools.lru_cache(maxsize=8)
def read_entries(table: Path) -> tuple[dict[str, Any], ...]:
    """All entries of a table, as they are in the file.

    Raises:
        ValueError: the file is not a table of blocks.
    """
    try:
        document = json.loads(table.read_text(encoding="utf-8"))
        entries = tuple(document["entries"])
        for entry in entries:
            for key in _KEYS:
                entry[key]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{table} is not a table of blocks: {error!r}") from error
    return entries
