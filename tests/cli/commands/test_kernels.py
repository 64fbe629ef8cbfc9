"""``tpuport bench attention`` and ``tpuport tune``: kernels costed without a TPU."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.cli.tools import Cli, Ran, call
from tests.processes import needs_libtpu
from tpuport.cli.commands.tune import _teller
from tpuport.core.cost import attention_cycles
from tpuport.core.cost.attention_case import AttentionCase, Blocks
from tpuport.core.cost.attention_cycles import AttentionCost, attention_cost
from tpuport.core.cost.kernel_cycles import KernelError
from tpuport.core.cost.tile_search import Tried

TINY = ("--q-len", "300", "--kv-len", "500", "--heads", "2")
SMALL = ("--q-len", "1000", "--kv-len", "2000", "--heads", "2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def rows(folder: Path) -> Ran:
    """Ours and jax's, in tiles of 512 x 512."""
    blocks = ("--blocks", "512/512/256", "--kernel", "tpuport", "--kernel", "jax")
    return call("bench", "attention", *SMALL, *blocks, "--cache-dir", folder, "--json")


@needs_libtpu
def test_each_kernel_is_a_row_with_the_keys_scripts_rely_on(rows: Ran) -> None:
    assert rows.code == 0, rows.err
    assert rows.err.startswith("compiling tpuport for v6e ...")
    ours, jaxs = rows.json
    assert [r["implementation"] for r in rows.json] == ["tpuport", "jax"]
    for row in (ours, jaxs):
        assert (row["chip"], row["head_dim"]) == ("v6e", 64)
        assert (row["q_len"], row["kv_len"], row["heads"]) == (1000, 2000, 2)
        assert row["blocks"] == "512/512/256"
        step = row["bundles_per_grid_step"]
        assert row["bundles_per_2_20_scores"] == step * 2**20 / (512 * 512)
        assert row["utilization"]["MXU"] > 0.2
        assert row["busiest"] in row["utilization"]
        assert row["spills"] >= 0
        assert row["whole_call_cycles"] == pytest.approx(step * 16)
    assert ours["bundles_per_2_20_scores"] < jaxs["bundles_per_2_20_scores"]


@needs_libtpu
def test_people_get_a_table(cli: Cli, folder: Path, rows: Ran) -> None:
    blocks = ("--blocks", "512/512/256")
    ran = cli.good("bench", "attention", *SMALL, *blocks, "--cache-dir", folder)
    lines = ran.out.splitlines()
    assert lines[0] == "v6e, head dim 64, 1000 x 2000, 2 heads"
    for line, row in zip(lines[3:5], rows.json, strict=True):
        name, tiles, bundles, *_ = line.split()
        assert (name, tiles) == (row["implementation"], "512/512/256")
        assert bundles == f"{row['bundles_per_2_20_scores']:.0f}"


@needs_libtpu
def test_a_kernel_that_refuses_is_named_and_the_others_are_shown(
    cli: Cli, folder: Path, rows: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(case: AttentionCase, **where: Any) -> AttentionCost:
        if case.implementation == "tpuport":
            raise KernelError("tpuport attention, 2 heads of 64 cannot be compiled")
        return attention_cost(case, **where)

    monkeypatch.setattr(attention_cycles, "attention_cost", refusing)
    asked = ("bench", "attention", *SMALL, "--blocks", "512/512/256", "--json")
    ran = cli(*asked, "--cache-dir", folder)
    assert ran.code == 1
    assert ran.json == rows.json[1:]
    assert "tpuport is left out: tpuport attention, 2 heads of 64" in ran.err
    none = cli(*asked, "--kernel", "tpuport", "--cache-dir", folder)
    assert (none.code, none.out) == (1, "")
    assert none.last.startswith("error: tpuport attention, 2 heads of 64")


@needs_libtpu
def test_tiles_that_were_found_for_another_kernel_are_said_to_be(
    cli: Cli, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tpuport.kernels.attention import block_table

    entry = {
        "chip": "v6e",
        "head_dim": 64,
        "q_len": [1, 1024],
        "kv_len": [1, 2048],
        "blocks": [512, 512, 256],
        "measured": {"q_len": 1000, "kv_len": 2000, "heads": 2, "dtype": "bfloat16"},
        "tried": [],
        "source_hash": "of another",
    }
    monkeypatch.setattr(block_table, "read_entries", lambda table: (entry,))
    asked = ("bench", "attention", *SMALL, "--kernel", "tpuport", "--json")
    ran = cli.good(*asked, "--cache-dir", folder)
    assert "were found for another form of the kernel" in ran.err
    # The table is where tiles come from when none are named.
    assert [row["blocks"] for row in ran.json] == ["512/512/256"]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("bench", "attention", "--blocks", "1/2"), "blocks '1/2' are not Q/KV"),
        (
            ("bench", "attention", "--blocks", "100/100/100"),
            "blocks '100/100/100': all three must be multiples of 128",
        ),
        (("bench", "attention", "--chip", "v9"), "--chip: unknown TPU chip 'v9'"),
        (
            ("bench", "attention", "--kernel", "x"),
            "--kernel 'x': is unknown; known are",
        ),
        (("bench", "--steps", "3", "attention"), "--steps before 'attention'"),
        (("tune", "--again", "--head-dim", "64"), "--head-dim would not be used"),
        (("tune", "--again", "--table", "no.json"), "no.json is not a table of blocks"),
    ],
)
def test_a_request_that_cannot_be_right_is_one_line(
    cli: Cli, tmp_path: Path, args: tuple[str, ...], said: str
) -> None:
    cache = ("--cache-dir", tmp_path) if args[-1] != "attention" else ()
    ran = cli(*args, *cache)
    assert ran.code == 2
    assert ran.out == ""
    assert said in ran.last
    assert ran.err.startswith("error: ")
    assert ran.err.count("\n") == 1


def test_without_libtpu_one_line_says_what_to_install(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for command in (("bench", "attention"), ("tune",)):
        ran = cli(*command, *SMALL, "--cache-dir", tmp_path)
        assert ran.code == 1
        assert ran.err.count("needs libtpu") == 1
        assert ran.last.startswith("error: compiling for v6e-1 needs libtpu")


@needs_libtpu
def test_tune_writes_what_it_tried_to_the_table_it_is_given(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    table = tmp_path / "blocks.json"
    ran = cli.good(
        *("tune", *TINY, "--limit", "2", "--cache-dir", folder, "--json"),
        *("--write", "--table", table),
    )
    assert f"wrote {table}" in ran.err
    assert json.loads(table.read_text())["entries"] == [ran.json]
    assert len(ran.json["tried"]) == 2
    assert ran.json["command"] == (
        "tpuport tune --chip v6e --head-dim 64 --q-len 300 --kv-len 500 --heads 2 "
        "--limit 2 --write"
    )
    best = "/".join(map(str, ran.json["blocks"]))
    cycles = {t["blocks"]: t["cycles"] for t in ran.json["tried"]}
    assert cycles[best] == min(cycles.values())
    # Without --write nothing is written, and people get the candidates.
    before = table.read_bytes()
    again = cli.good(
        *("tune", *TINY, "--limit", "2", "--cache-dir", folder, "--table", table)
    )
    assert table.read_bytes() == before
    assert f"best: {best}, of 2 candidates; stopped at the limit" in again.out
    # All that the table has, searched anew: here the same, out of the cache.
    anew = cli.good(
        *("tune", "--again", "--cache-dir", folder, "--json"),
        *("--write", "--table", table),
    )
    assert anew.json == [ran.json]
    assert table.read_bytes() == before


def test_a_search_tells_how_long_it_may_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter([0.0, 60.0, 120.0])
    clock = SimpleNamespace(monotonic=lambda: next(times))
    monkeypatch.setattr("tpuport.cli.commands.tune.time", clock)
    tell = _teller(4)
    blocks = Blocks(q=128, kv=256, kv_compute=128)
    tell(Tried(blocks=blocks, cycles=1234.0))
    tell(Tried(blocks=blocks, refused="too large"))
    first, second = capsys.readouterr().err.splitlines()
    assert first == (
        "candidate 1 of at most 4, at most about 3 min left: 128/256/128: 1,234 cycles"
    )
    assert second.startswith("candidate 2 of at most 4, at most about 2 min left: ")
    assert second.endswith(": too large")
