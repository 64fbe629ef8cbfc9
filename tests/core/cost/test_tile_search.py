"""The search for tiles, on a made-up cost, and what it writes down."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tpuport.core.cost.attention_case import AttentionCase, Blocks, kernel_source_hash
from tpuport.core.cost.attention_cycles import AttentionCost
from tpuport.core.cost.kernel_cycles import KernelError
from tpuport.core.cost.tile_search import (
    Tried,
    Tuning,
    case_of,
    is_stale,
    table_entry,
    tune,
    write_entry,
)
from tpuport.errors import UsageError
from tpuport.kernels.attention.block_table import tuned_blocks
from tpuport.kernels.padding import round_up

CASE = AttentionCase(
    implementation="tpuport", heads=2, q_len=5000, kv_len=7000, head_dim=64
)
START = Blocks(q=1280, kv=1792, kv_compute=256)


def cost_of(case: AttentionCase, speed: float) -> AttentionCost:
    blocks = case.blocks
    assert blocks is not None
    q_len, kv_len = round_up(case.q_len, blocks.q), round_up(case.kv_len, blocks.kv)
    cycles = speed * case.heads * q_len * kv_len / 2**20
    return AttentionCost(
        case=case,
        grid=(case.heads, q_len // blocks.q, kv_len // blocks.kv),
        cycles=cycles,
        utilization={"MXU": 0.5},
        busiest="MXU",
        spills=0.0,
        fills=0.0,
        cores=1,
        other_cycles=0,
        compile_seconds=0.0,
        versions={"jax": "1", "libtpu": "2"},
        source_hash="0" * 64,
    )


class Model:
    """Tiles cost what they pad, and more the further they are from a best shape."""

    def __init__(self, best: Blocks, refused: frozenset[Blocks] = frozenset()) -> None:
        self.best = best
        self.refused = refused
        self.asked: list[Blocks] = []

    def __call__(self, case: AttentionCase) -> AttentionCost:
        blocks = case.blocks
        assert blocks is not None
        self.asked.append(blocks)
        if blocks in self.refused:
            raise KernelError("too large", refused=True)
        far = sum(
            abs(mine / theirs - 1)
            for mine, theirs in (
                (blocks.q, self.best.q),
                (blocks.kv, self.best.kv),
                (blocks.kv_compute, self.best.kv_compute),
            )
        )
        return cost_of(case, 1000.0 * (1 + far))


def searched(measure: Any, **changes: Any) -> Tuning:
    """A search in which all tiles fit."""
    given = {"start": START, "fits": lambda blocks: True, "limit": 100, **changes}
    return tune(given.pop("case", CASE), measure=measure, **given)


def test_the_search_ends_at_the_best_tiles_near_its_way() -> None:
    best = Blocks(q=1024, kv=1024, kv_compute=512)
    model = Model(best)
    seen: list[Tried] = []
    found = searched(model, on_tried=seen.append)
    assert found.exhausted
    assert found.start == START
    assert found.best.blocks == best
    assert model.asked[0] == START
    assert len(set(model.asked)) == len(model.asked) == len(found.tried)
    assert list(found.tried) == seen
    cycles = [t.cycles for t in found.tried if t.cycles is not None]
    assert found.best.cycles == min(cycles) < cycles[0]


def test_the_padding_of_the_real_length_is_in_the_score() -> None:
    """Tiles twice as fast a score lose where the length is padded to three times."""

    def measure(case: AttentionCase) -> AttentionCost:
        assert case.blocks is not None
        return cost_of(case, 500.0 if case.blocks.q > 2048 else 1000.0)

    case = AttentionCase(
        implementation="tpuport", heads=1, q_len=1025, kv_len=1024, head_dim=64
    )
    start = Blocks(q=4096, kv=1024, kv_compute=256)
    found = searched(measure, case=case, start=start)
    assert found.best.blocks.q == 1152
    assert found.best.padded_scores == 1152 * 1024


def test_tiles_that_pad_much_more_than_the_best_are_not_compiled() -> None:
    model = Model(Blocks(q=4096, kv=1792, kv_compute=256))
    found = searched(model)
    assert Blocks(q=4096, kv=1792, kv_compute=256) not in model.asked
    least = min(
        round_up(5000, t.blocks.q) * round_up(7000, t.blocks.kv) for t in found.tried
    )
    for blocks in model.asked:
        assert round_up(5000, blocks.q) * round_up(7000, blocks.kv) <= least * 1.06


def test_tiles_that_do_not_fit_are_not_compiled() -> None:
    model = Model(Blocks(q=2560, kv=3584, kv_compute=512))
    found = searched(model, fits=lambda b: b.q * b.kv <= START.q * START.kv)
    assert all(b.q * b.kv <= START.q * START.kv for b in model.asked)
    assert found.exhausted


def test_tiles_that_the_compiler_refuses_are_passed_over_and_noted() -> None:
    best = Blocks(q=1280, kv=1792, kv_compute=128)
    model = Model(best, frozenset({best}))
    found = searched(model)
    assert found.best.blocks != best
    noted = [t for t in found.tried if t.blocks == best]
    assert [t.refused for t in noted] == ["too large"]
    assert noted[0].as_dict() == {"blocks": str(best), "refused": "too large"}
    with pytest.raises(KernelError, match="no tiles tried can be compiled: too"):
        searched(Model(best, frozenset({START})), fits=lambda b: False)


def test_another_failure_ends_the_search() -> None:
    def broken(case: AttentionCase) -> AttentionCost:
        raise KernelError("the compiler crashed")

    with pytest.raises(KernelError, match="the compiler crashed"):
        searched(broken)


def test_a_kernel_that_changes_during_the_search_ends_it() -> None:
    def measure(case: AttentionCase) -> AttentionCost:
        cost = cost_of(case, 1000.0)
        return cost if case.blocks == START else replace(cost, source_hash="1" * 64)

    with pytest.raises(KernelError, match="changed during the search"):
        searched(measure)


def test_the_limit_is_on_what_is_compiled() -> None:
    model = Model(Blocks(q=512, kv=512, kv_compute=128))
    found = searched(model, limit=3)
    assert len(model.asked) == 3
    assert not found.exhausted


def tuning(blocks: Blocks = START, q_len: int = 5000) -> Tuning:
    case = AttentionCase(
        implementation="tpuport",
        heads=2,
        q_len=q_len,
        kv_len=7000,
        head_dim=64,
        blocks=blocks,
    )
    cost = cost_of(case, 1000.0)
    return Tuning(
        best=cost,
        start=START,
        tried=(Tried(blocks=blocks, cycles=cost.cycles, bundles_per_tile=1000.04),),
        exhausted=True,
    )


def test_what_is_written_is_found_by_the_kernel(tmp_path: Path) -> None:
    table = tmp_path / "blocks.json"
    entry = table_entry(tuning(), "tpuport tune --write", 7)
    write_entry(table, entry)
    found = tuned_blocks("v6e", 64, 5000, 7000, table=table)
    assert found is not None
    assert (found.q, found.kv, found.kv_compute) == (1280, 1792, 256)
    assert entry["q_len"] == [3841, 5120]
    assert entry["limit"] == 7
    assert case_of(entry) == replace(tuning().best.case, blocks=None)
    assert entry["tried"] == [
        {
            "blocks": "1280/1792/256",
            "cycles": tuning().best.cycles,
            "bundles_per_2_20_scores": 1000.0,
        }
    ]


def test_a_second_search_for_a_call_takes_the_place_of_the_first(
    tmp_path: Path,
) -> None:
    table = tmp_path / "blocks.json"
    other = Blocks(q=512, kv=512, kv_compute=128)
    write_entry(table, table_entry(tuning(), "first", 1))
    write_entry(table, table_entry(tuning(q_len=20000), "other call", 1))
    write_entry(table, table_entry(tuning(other), "second", 1))
    rows = json.loads(table.read_text())["entries"]
    assert [row["command"] for row in rows] == ["second", "other call"]
    found = tuned_blocks("v6e", 64, 5000, 7000, table=table)
    assert found is not None
    assert found.q == 512


def test_an_entry_of_another_kernel_is_known() -> None:
    entry = table_entry(tuning(), "x", 1)
    assert is_stale(entry)
    now = kernel_source_hash()
    assert not is_stale({**entry, "source_hash": now})


def test_a_file_that_is_no_table_is_not_overwritten(tmp_path: Path) -> None:
    table = tmp_path / "precious.json"
    table.write_text('{"mine": 1}')
    with pytest.raises(UsageError, match="is not a table of blocks"):
        write_entry(table, table_entry(tuning(), "x", 1))
    assert table.read_text() == '{"mine": 1}'
