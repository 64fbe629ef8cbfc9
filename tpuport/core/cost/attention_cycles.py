"""Cycles of an attention call on a TPU that is not there.

The call is compiled in a process of its own (:mod:`tpuport.core.cost.kernel_cycles`)
and its kernel's bundles are multiplied by trip counts.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from tpuport.core.cost.attention_case import AttentionCase, Blocks, kernel_source_hash
from tpuport.core.cost.kernel_cycles import compiler_versions, kept_cost
from tpuport.core.cost.kernel_worker import jax_blocks
from tpuport.kernels.attention.selection import splash_sizes
from tpuport.kernels.padding import round_up

#: Scores that "bundles per 2^20 scores" are of: a tile of 1024 x 1024.
TILE = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionCost:
    """What an attention call costs by the compiler's schedule.

    Attributes:
        case: the call, with the tiles of the kernel.
        grid: steps of one core along each axis.
        cycles: of the whole call on one core, parts weighed by how often they run.
        utilization: unit -> share of its slots filled during ``cycles``.
        busiest: the unit with the fewest slots to spare.
        spills, fills: stores and loads of a step that serve registers only.
        cores: that share the grid; ``cycles`` is of each.
        other_cycles: the compiler's estimate for the rest of the call: padding,
            transposes, scaling.
        compile_seconds: what the compile took.
        versions: of jax, jaxlib and libtpu.
        source_hash: of our kernel's source.
    """

    case: AttentionCase
    grid: tuple[int, ...]
    cycles: float
    utilization: dict[str, float]
    busiest: str
    spills: float
    fills: float
    cores: int
    other_cycles: int
    compile_seconds: float
    versions: dict[str, str]
    source_hash: str

    @property
    def blocks(self) -> Blocks:
        """Tiles of the kernel."""
        assert self.case.blocks is not None
        return self.case.blocks

    @property
    def step_bundles(self) -> float:
        """Bundles of one grid step, the mean over all steps: the first and last steps
        of a row of blocks run more."""
        return self.cycles / math.prod(self.grid)

    @property
    def padded_scores(self) -> int:
        """Scores the kernel computes on all cores, padding included."""
        queries = round_up(self.case.q_len, self.blocks.q)
        keys = round_up(self.case.kv_len, self.blocks.kv)
        return self.case.heads * queries * keys

    @property
    def bundles_per_tile(self) -> float:
        """Bundles for 2^20 computed scores, padding included."""
        return self.cycles * self.cores / self.padded_scores * TILE

    @property
    def cycles_per_tile(self) -> float:
        """Cycles for 2^20 scores that were asked for, in the whole call."""
        return self.cycles * self.cores / self.case.scores * TILE


def attention_cost(case: AttentionCase, *, cache: Path) -> AttentionCost:
    """Compile an attention call for its chip and read what it costs.

    Args:
        case: the call.
        cache: folder that keeps results.

    Raises:
        TopologyError: libtpu is not installed.
        KernelError: the call is refused, or something else went wrong.
    """
    case = with_blocks(case)
    source = kernel_source_hash()
    request = {
        "chip": case.chip,
        "case": asdict(case),
        "source": source,
        # Our kernel is given the keys that count; what jax's is given is left open.
        "scalars": {0: case.kv_len} if case.implementation == "tpuport" else {},
    }
    what = (
        f"{case.implementation} attention, {case.heads} heads of {case.head_dim}, "
        f"{case.q_len} x {case.kv_len} for {case.chip}, blocks {case.blocks}"
    )
    found, _ = kept_cost(request, cache, what, keep_schedule=False)
    found |= {"case": case, "versions": compiler_versions(), "source_hash": source}
    found["grid"] = tuple(found["grid"])
    return AttentionCost(**{one.name: found[one.name] for one in fields(AttentionCost)})


def with_blocks(case: AttentionCase) -> AttentionCase:
    """The case with the tiles that a run would take, where it names none.

    For ``tpuport`` those are of the block table, or by the kernel's rule where they pad
    less; for ``jax`` they are our rule for it.
    """
    if case.blocks is not None:
        return case
    if case.implementation == "jax":
        return replace(case, blocks=jax_blocks(case))
    lengths = (case.q_len, case.kv_len, case.head_dim)
    found = splash_sizes(*lengths, chip=case.chip, dtype=case.dtype)
    return replace(case, blocks=Blocks.of(found))
