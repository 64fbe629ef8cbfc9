"""Which implementation of attention a call gets, with which blocks, and why.

Letters: B batch, H query heads, Hkv key/value heads, L tokens (Lq queries, Lk keys),
D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax.numpy as jnp

from tpuport.errors import AttentionError
from tpuport.kernels.attention.block_table import tuned_blocks
from tpuport.kernels.attention.blockwise import Tiling, default_tiling
from tpuport.kernels.attention.choice import AUTO, AttentionChoice
from tpuport.kernels.attention.problem import Problem
from tpuport.kernels.attention.splash import splash_refusal
from tpuport.kernels.attention.splash_blocks import SplashBlocks, default_blocks
from tpuport.kernels.padding import round_up

# Scores per head up to which "auto" takes the formula as it is. Measured on two CPU
# cores, 48 heads, float32: at 226 x 226 both are alike, from 700 x 700 to 2000 x 2000
# the formula takes 1.2 to 2.2 times as long as blockwise (2.7 when causal).
SMALL_SCORES = 512 * 512
# Scores that a kernel may write out as one piece of program. On two cores 5 << 20 take
# a quarter of a minute to compile, 25 << 20 more than two.
MOST_SCORES_AT_ONCE = 12 << 20
DEFAULT_CHIP = "v6e"
"""Whose blocks are taken where the chip is not known."""

Blocks = Mapping[str, int]


#: Why "auto" takes an implementation, in the order in which they are tried. Blockwise
#: refuses nothing, and is last.
REASONS = {
    "splash": "a fused TPU kernel takes this call",
    "reference": "the score matrix is small enough to be built whole",
    "blockwise": "it takes any call, block by block",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """Which implementation runs, with which blocks, and why.

    ``passed_over`` has (name, why) of those that came before it and would not do.
    ``notice`` is for the user, whose choice does not run as it was made: another
    implementation than the one named, or without an option. Empty otherwise.
    """

    implementation: str
    reason: str
    passed_over: tuple[tuple[str, str], ...] = ()
    blocks: Blocks = field(default_factory=dict)
    notice: str = ""

    @property
    def tiling(self) -> Tiling | None:
        """The block sizes of blockwise; None for empty arrays."""
        return Tiling(**self.blocks) if self.blocks else None


def _refusal(
    name: str, problem: Problem, choice: AttentionChoice, chip: str
) -> str | None:
    """Why "auto" passes an implementation over, with the options of a choice."""
    if name == "splash":
        if problem.platform == "tpu":
            return _splash_refusal(problem, choice, chip)
        return f"it is for TPU; the platform is {problem.platform!r}"
    if name == "reference" and problem.scores_per_head > SMALL_SCORES:
        return (
            f"{problem.q_len} x {problem.kv_len} scores per head are more than the "
            f"{SMALL_SCORES} up to which the whole matrix is built"
        )
    lacks = choice.lacking(name)
    return f"it has no {', '.join(lacks)}" if lacks else None


def _splash_refusal(problem: Problem, choice: AttentionChoice, chip: str) -> str | None:
    why = splash_refusal(problem, chip=chip)
    if why is not None or not choice.blocks:
        return why
    tiles = splash_tiles(_splash_blocks(problem, choice, chip))
    why = splash_refusal(problem, blocks=tiles, chip=chip)
    if why is not None or tiles.q * tiles.kv_step <= MOST_SCORES_AT_ONCE:
        return why
    return (
        f"with these blocks it writes out {tiles.q} queries by {tiles.kv_step} keys in "
        f"one piece; more than {MOST_SCORES_AT_ONCE} scores take minutes to compile. "
        "Take smaller blocks"
    )


def splash_tiles(blocks: Blocks) -> SplashBlocks:
    return SplashBlocks(
        q=blocks["block_q"],
        kv=blocks["block_kv"],
        kv_compute=blocks["block_kv_compute"],
    )


def _covering(length: int) -> int:
    """The shortest block that takes a whole length; a longer one is only padding.

    Whole numbers of 512 tokens, or fewer where these waste more than a sixteenth: a
    kernel cuts a block into even tiles.
    """
    sizes = [round_up(length, granule) for granule in (512, 256, 128)]
    fits = (size for size in sizes if 16 * (size - length) <= length)
    return next(fits, sizes[-1])


def splash_sizes(
    q_len: int, kv_len: int, head_dim: int, *, chip: str, dtype: str
) -> SplashBlocks:
    """The tiles that our kernel takes where none are named: of the table, or its rule.

    Found at another length of the bucket, tiles of the table may fit these lengths
    worse than those of the rule; then the rule's are taken.
    """

    def padded(blocks: SplashBlocks) -> int:
        """Scores of a head with whole blocks."""
        lengths = ((q_len, blocks.q), (kv_len, blocks.kv))
        return math.prod(round_up(length, block) for length, block in lengths)

    itemsize = jnp.dtype(dtype).itemsize
    found = default_blocks(q_len, kv_len, head_dim, chip=chip, itemsize=itemsize)
    if dtype == "bfloat16":
        tuned = tuned_blocks(chip, head_dim, q_len, kv_len)
        if tuned is not None and padded(tuned) <= padded(found):
            return tuned
    return found


def _splash_blocks(problem: Problem, choice: AttentionChoice, chip: str) -> Blocks:
    """The given block sizes, and the kernel's own for the rest; none beyond the tokens.

    If only block_kv or only block_kv_compute is given, the other is made to fit.
    """
    lengths = (problem.q_len, problem.kv_len)
    own = splash_sizes(*lengths, problem.head_dim, chip=chip, dtype=problem.dtype)
    q, kv, inner = own.q, own.kv, own.kv_compute
    if choice.blocks:
        q = min(choice.block_q or q, _covering(problem.q_len))
        kv, most = choice.block_kv or kv, _covering(problem.kv_len)
        if choice.block_kv_compute is None:
            kv = min(kv, most)
            inner = max(n for n in range(128, min(kv, inner) + 1, 128) if kv % n == 0)
        else:
            inner = min(choice.block_kv_compute, most)
            kv = min(round_up(kv, inner), round_up(problem.kv_len, inner))
    return {"block_q": q, "block_kv": kv, "block_kv_compute": inner}


def _blocks(name: str, problem: Problem, choice: AttentionChoice, chip: str) -> Blocks:
    """The block sizes that an implementation runs a problem with, by option name."""
    if name == "splash":
        return _splash_blocks(problem, choice, chip)
    sizes = (problem.q_len, problem.kv_len, problem.batch, problem.heads)
    if name == "reference" or 0 in sizes:
        return {}
    tiling = default_tiling(problem)
    return {
        "block_q": min(choice.block_q or tiling.block_q, problem.q_len),
        "block_kv": min(choice.block_kv or tiling.block_kv, problem.kv_len),
    }


def select(
    problem: Problem,
    implementation: str | AttentionChoice = AUTO,
    *,
    chip: str | None = None,
) -> Selection:
    """The implementation that ``attention`` uses for this problem.

    Where the named implementation refuses a call on the platform it is for, the choice
    is that of "auto"; ``passed_over`` then says why.

    Args:
        problem: the call.
        implementation: an :class:`AttentionChoice`, or its name.
        chip: whose blocks to take.

    Raises:
        AttentionError: the named implementation is for another platform.
        UsageError: no implementation has that name.
    """
    asked = as_choice(implementation)
    chip = chip or DEFAULT_CHIP
    passed_over: dict[str, str] = {}
    # An option that no implementation has is left out.
    plain = AttentionChoice(window=asked.window, k_smooth=asked.k_smooth)
    choices = dict.fromkeys((asked, plain))
    if asked.name != AUTO:
        # The others refuse nothing that is asked for by name.
        kernel = asked.name == "splash"
        why = _splash_refusal(problem, asked, chip) if kernel else None
        if why is None:
            return Selection(
                implementation=asked.name,
                reason="asked for by name",
                blocks=_blocks(asked.name, problem, asked, chip),
            )
        if problem.platform != "tpu":
            raise AttentionError(
                f"attention implementation {asked.name!r} cannot do this call: "
                f"{why}. Use {AUTO!r} or another one."
            )
        passed_over[asked.name] = why
        # Its blocks are nobody else's.
        del choices[asked]
    for given in choices:
        for name, reason in REASONS.items():
            if name == asked.name and not asked.blocks:
                continue  # it has refused this very call
            why = _refusal(name, problem, given, chip)
            if why is None:
                if given.blocks != asked.blocks:
                    reason += ", without options that it cannot take"
                return Selection(
                    implementation=name,
                    reason=reason,
                    passed_over=tuple(passed_over.items()),
                    blocks=_blocks(name, problem, given, chip),
                    notice=_notice(asked, given, name, passed_over),
                )
            passed_over.setdefault(name, why)
    raise AssertionError("blockwise takes every call without blocks")


def _notice(
    asked: AttentionChoice,
    given: AttentionChoice,
    runs: str,
    passed_over: Mapping[str, str],
) -> str:
    """Words on the user's choice, if ``runs`` with ``given`` is not that choice."""
    sizes = (f"{name}={size}" for name, size in asked.blocks.items())
    dropped = "" if given.blocks else ", ".join(sizes)
    said = f"{runs} runs" + (f", without {dropped}" if dropped else "")
    if asked.name == AUTO:
        return said if dropped else ""
    name, why = next(iter(passed_over.items()))
    return f"{said} ({why})" if runs == name else f"{name} passed over ({why}); {said}"


def as_choice(implementation: str | AttentionChoice) -> AttentionChoice:
    """The choice itself, or the choice of a name, without options."""
    if isinstance(implementation, AttentionChoice):
        return implementation
    return AttentionChoice(name=implementation)
