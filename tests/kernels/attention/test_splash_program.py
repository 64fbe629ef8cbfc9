"""Our splash kernel compiled for TPUs that are not there: bundles, and every chip."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path

import pytest

from tpuport.core.cost.attention_case import AttentionCase, Blocks
from tpuport.core.cost.attention_cycles import AttentionCost, attention_cost
from tpuport.kernels.attention.splash_blocks import default_blocks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)

# Bundles for 2^20 scores on v6e that the kernel may take: what the project set out to
# reach. jax's own kernel takes about 2970 at either head dim, the best hand-written one
# 2066 and 2493; all take the exact running maximum.
TARGETS = {64: 1450, 128: 1700}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keeps what was compiled for other tests of the file."""
    return tmp_path_factory.mktemp("kernels")


def compiled(
    folder: Path, chip: str, head_dim: int, length: int, *, small: bool = False
) -> AttentionCost:
    """The kernel with its default tiles, or with small ones that compile quickly."""
    found = default_blocks(length, length, head_dim, chip=chip)
    blocks = Blocks.of(found)
    if small:
        blocks = Blocks(q=512, kv=512, kv_compute=256)
    return attention_cost(
        AttentionCase(
            implementation="tpuport",
            chip=chip,
            heads=2,
            q_len=length,
            kv_len=length,
            head_dim=head_dim,
            blocks=blocks,
        ),
        cache=folder,
    )


def check_targets(folder: Path, head_dim: int, length: int) -> None:
    cost = compiled(folder, "v6e", head_dim, length)
    # All that the grid steps run, starting and finishing a row of blocks included.
    assert cost.bundles_per_tile <= TARGETS[head_dim]
    # The whole call over the scores that were asked for: padding counts against it.
    assert cost.cycles_per_tile <= TARGETS[head_dim]
    assert cost.utilization["MXU"] > 0.9


@pytest.mark.parametrize("head_dim", [64, pytest.param(128, marks=pytest.mark.aot)])
def test_bundles(head_dim: int, folder: Path) -> None:
    """Over 10 s: the kernel of a published video's size, compiled for a TPU."""
    check_targets(folder, head_dim, 39826)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bundles_of_a_long_video(head_dim: int, folder: Path) -> None:
    check_targets(folder, head_dim, 113600)


@pytest.mark.parametrize(
    "chip", [*(pytest.param(c, marks=pytest.mark.aot) for c in ("v5e", "v5p")), "v7x"]
)
def test_compiles_for_other_chips(chip: str, folder: Path) -> None:
    cost = compiled(folder, chip, 128, 1031, small=True)
    # Two heads, three blocks each way; where a chip has two cores, they share them.
    assert math.prod(cost.grid) * cost.cores == 2 * 3 * 3


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("chip", ["v5e", "v5p", "v7x"])
def test_default_tiles_fit_other_chips(chip: str, head_dim: int, folder: Path) -> None:
    cost = compiled(folder, chip, head_dim, 39826)
    assert cost.busiest == "MXU"
    assert cost.utilization["MXU"] > 0.9
