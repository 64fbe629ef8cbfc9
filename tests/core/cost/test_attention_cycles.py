"""Cycles of an attention call, by compiling it for a chip that is not here."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.processes import needs_libtpu
from tpuport.core.cost import attention_case, kernel_cycles
from tpuport.core.cost.attention_case import AttentionCase, Blocks, kernel_source_hash
from tpuport.core.cost.attention_cycles import AttentionCost, attention_cost
from tpuport.core.cost.kernel_cycles import KernelError
from tpuport.core.cost.kernel_worker import build
from tpuport.errors import UsageError

SMALL = AttentionCase(
    implementation="jax",
    heads=2,
    q_len=1000,
    kv_len=2000,
    head_dim=64,
    blocks=Blocks(q=512, kv=512, kv_compute=256),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def cost(folder: Path) -> AttentionCost:
    return attention_cost(SMALL, cache=folder)


@needs_libtpu
def test_a_call_is_counted_over_its_whole_grid(cost: AttentionCost) -> None:
    assert cost.grid == (2, 2, 4)
    assert cost.blocks == SMALL.blocks
    assert cost.padded_scores == 2 * 1024 * 2048
    assert SMALL.scores == 2 * 1000 * 2000
    assert cost.step_bundles == cost.cycles / 16
    assert cost.bundles_per_tile == cost.step_bundles * 2**20 / (512 * 512)
    assert cost.cycles_per_tile == cost.cycles * 2**20 / SMALL.scores
    assert all(0 <= share <= 1 for share in cost.utilization.values())
    assert cost.utilization[cost.busiest] == max(cost.utilization.values())
    # 2 products of [512, 64] x [64, 512]: some share of the MXU, far from all.
    assert 0.2 < cost.utilization["MXU"] < 0.8
    assert cost.spills > 0
    assert cost.other_cycles > 0  # q is scaled, and all are padded
    assert cost.versions.keys() == {"jax", "jaxlib", "libtpu"}
    assert cost.source_hash == kernel_source_hash()


@needs_libtpu
def test_a_cost_is_kept_and_found_again_without_a_compile(
    cost: AttentionCost, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("compiled again")

    monkeypatch.setattr(subprocess, "run", fail)
    assert attention_cost(SMALL, cache=folder) == cost
    with pytest.raises(AssertionError, match="compiled again"):
        attention_cost(replace(SMALL, heads=3), cache=folder)
    monkeypatch.setattr(kernel_cycles, "compiler_versions", lambda: {"jax": "x"})
    with pytest.raises(AssertionError, match="compiled again"):
        attention_cost(SMALL, cache=folder)


@pytest.fixture(scope="module")
def ours(folder: Path) -> AttentionCost:
    return attention_cost(replace(SMALL, implementation="tpuport"), cache=folder)


@needs_libtpu
def test_our_kernel_is_costed_beside(ours: AttentionCost, cost: AttentionCost) -> None:
    assert ours.grid == (1, 2, 2, 4)
    assert ours.cycles < cost.cycles


@needs_libtpu
def test_tiles_that_a_kernel_does_not_take_are_refused_by_name(tmp_path: Path) -> None:
    case = replace(SMALL, blocks=Blocks(q=512, kv=512, kv_compute=384))
    with pytest.raises(KernelError, match="512/512/384 cannot be compiled") as caught:
        attention_cost(case, cache=tmp_path)
    assert caught.value.refused
    assert "\n" not in str(caught.value)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("head_dim", "blocks", "length", "bundles"),
    [
        (64, "2048/2048/512", 40960, 2944.3),
        (64, "3328/2816/256", 39826, 2808.7),
        (128, "2048/2048/1024", 40960, 2700.0),
    ],
)
def test_jaxs_kernel_has_the_bundles_counted_by_hand(
    head_dim: int, blocks: str, length: int, bundles: float, folder: Path
) -> None:
    """Counted by hand in dumps of jax 0.10.2 and libtpu 0.0.42.1: of a step, 257 to 264
    bundles around the body of 11465, 24721 and 10488, and a share of what the first and
    the last step of a row run, 1105, 1772 and 1097, of 20, 15 and 20 steps."""
    case = AttentionCase(
        implementation="jax",
        heads=12,
        q_len=length,
        kv_len=length,
        head_dim=head_dim,
        blocks=Blocks.parse(blocks),
    )
    cost = attention_cost(case, cache=folder)
    assert cost.bundles_per_tile == pytest.approx(bundles, rel=1e-4)


def test_of_the_baseline_only_what_is_compared_is_costed() -> None:
    with pytest.raises(NotImplementedError, match="only bfloat16"):
        build(replace(SMALL, dtype="float32"))


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ("|auto|1/2|1/2/x|0/1/1|-1/1/1", "are not Q/KV/COMPUTE"),
        (
            "100/100/100|128/128/100|64/128/128|128/192/64|128/384/256",
            "all three must be multiples of 128",
        ),
    ],
)
def test_blocks_that_no_kernel_takes_are_refused(texts: str, said: str) -> None:
    for text in texts.split("|"):
        with pytest.raises(UsageError, match=said):
            Blocks.parse(text)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"implementation": "other"}, "--kernel 'other': is unknown"),
        ({"chip": "v9"}, "unknown TPU chip 'v9'"),
        ({"q_len": 0}, "--q-len 0: give at least 1"),
    ],
)
def test_a_case_that_is_none_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        replace(SMALL, **change)


def test_the_hash_of_a_kernel_is_of_the_code_of_its_own_files(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "tpuport"
    kernels = package / "kernels"
    (kernels / "attention").mkdir(parents=True)
    files = {
        "attention/splash": "from tpuport.kernels.padding import round_up\n"
        "from tpuport.kernels.attention.block_table import tuned_blocks\n"
        "def call(x: int) -> int:\n    return x\n",
        "attention/block_table": "one = 1\n",
        "attention/reference": "one = 1\n",
        "padding": "one: int = 1\n",
    }
    for name, text in files.items():
        (kernels / f"{name}.py").write_text(text)
    monkeypatch.setattr(attention_case, "_PACKAGE", package)
    before = kernel_source_hash()

    def changed(name: str, text: str) -> bool:
        path = kernels / f"{name}.py"
        path.write_text(text)
        found = kernel_source_hash()
        path.write_text(files[name])
        return found != before

    more = "two = 2\n"
    assert changed("padding", files["padding"] + more)
    assert changed("attention/splash", files["attention/splash"] + more)
    assert changed("attention/splash", files["attention/splash"][:-2] + "3\n")
    assert not changed("attention/reference", more)
    assert not changed("attention/block_table", more)
    assert not changed("padding", '"""What it is."""\none: float = 1  # one\n')
    call = files["attention/splash"]
    assert not changed("attention/splash", call.replace("x: int) -> int", "x)"))
    (kernels / "padding.py").unlink()
    with pytest.raises(UsageError, match="padding is missing"):
        kernel_source_hash()
