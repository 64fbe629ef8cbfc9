"""The checked-in table of tiles, and looking things up in a table."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from tpuport.core.cost.tile_search import is_stale
from tpuport.kernels.attention.block_table import (
    TABLE,
    bucket,
    read_entries,
    tuned_blocks,
)
from tpuport.kernels.attention.splash_blocks import SplashBlocks, vmem_bytes, vmem_limit

ENTRIES = read_entries(TABLE)


def entry(**changes: Any) -> dict[str, Any]:
    return {
        "chip": "v6e",
        "head_dim": 64,
        "q_len": [3073, 4096],
        "kv_len": [1, 2048],
        "blocks": [1024, 2048, 256],
        "measured": {"q_len": 4000, "kv_len": 2000, "heads": 2, "dtype": "bfloat16"},
        "tried": [{"blocks": "1024/2048/256", "cycles": 5.0}, {"blocks": "1/2/3"}],
        **changes,
    }


def write(folder: Path, *entries: dict[str, Any]) -> Path:
    path = folder / "table.json"
    path.write_text(json.dumps({"format": 1, "entries": entries}))
    return path


def test_a_call_in_the_bucket_gets_its_tiles(tmp_path: Path) -> None:
    table = write(tmp_path, entry(), entry(chip="v5e", blocks=[128, 128, 128]))
    found = tuned_blocks("v6e", 64, 3073, 2048, table=table)
    assert found is not None
    assert (found.q, found.kv, found.kv_compute) == (1024, 2048, 256)
    other = tuned_blocks("v5e", 64, 4096, 1, table=table)
    assert other is not None
    assert other.q == 128


@pytest.mark.parametrize(
    "call",
    [
        ("v5p", 64, 4000, 2000),
        ("v6e", 128, 4000, 2000),
        ("v6e", 64, 3072, 2000),
        ("v6e", 64, 4097, 2000),
        ("v6e", 64, 4000, 2049),
    ],
)
def test_what_is_in_no_bucket_is_left_to_the_rule(
    tmp_path: Path, call: tuple[str, int, int, int]
) -> None:
    assert tuned_blocks(*call, table=write(tmp_path, entry())) is None


@pytest.mark.parametrize(("length", "block"), [(39826, 3328), (1, 128), (128, 128)])
def test_a_bucket_is_the_lengths_that_pad_alike(length: int, block: int) -> None:
    first, last = bucket(length, block)
    assert first <= length <= last
    padded = {math.ceil(size / block) for size in range(first, last + 1)}
    assert len(padded) == 1
    assert math.ceil((last + 1) / block) not in padded
    assert math.ceil((first - 1) / block) not in padded


@pytest.mark.parametrize(
    "text", ["", "[]", '{"entries": [{"chip": "v6e"}]}', '{"entries": 3}']
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="is not a table of blocks"):
        read_entries(path)


def test_the_table_has_the_lengths_the_kernel_is_meant_for() -> None:
    calls = {
        (e["chip"], e["head_dim"], e["measured"]["q_len"], e["measured"]["kv_len"])
        for e in ENTRIES
    }
    assert {
        ("v6e", dim, length, length) for dim in (64, 128) for length in (39826, 113600)
    } <= calls


each_entry = pytest.mark.parametrize(
    "row",
    ENTRIES,
    ids=[f"{e['chip']}-{e['head_dim']}-{e['measured']['q_len']}" for e in ENTRIES],
)


@each_entry
def test_an_entry_was_found_for_the_kernel_as_it_is(row: dict[str, Any]) -> None:
    """`tpuport tune --again --write` looks anew after an edit of the kernel."""
    assert not is_stale(row)


@each_entry
def test_an_entry_is_legal_fits_and_is_the_best_of_what_was_tried(
    row: dict[str, Any],
) -> None:
    q, kv, kv_compute = row["blocks"]
    tiles = SplashBlocks(q=q, kv=kv, kv_compute=kv_compute)
    assert vmem_bytes(tiles, row["head_dim"]) <= vmem_limit(row["chip"])
    measured = row["measured"]
    assert row["q_len"] == list(bucket(measured["q_len"], q))
    assert row["kv_len"] == list(bucket(measured["kv_len"], kv))
    costs = {t["blocks"]: t["cycles"] for t in row["tried"] if "cycles" in t}
    assert costs[f"{q}/{kv}/{kv_compute}"] == min(costs.values())
    assert len(costs) > 1
    # The command that makes the entry again, and what it was made with.
    assert f"--chip {row['chip']} --head-dim {row['head_dim']} " in row["command"]
    assert {"jax", "libtpu"} <= row["versions"].keys()
    assert len(row["source_hash"]) == 64
    found = tuned_blocks(
        row["chip"], row["head_dim"], measured["q_len"], measured["kv_len"]
    )
    assert found is not None
    assert (found.q, found.kv, found.kv_compute) == (q, kv, kv_compute)
