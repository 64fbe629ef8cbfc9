"""Tiles of our splash kernel: what is legal, what fits, what to take by default.

Letters: L tokens, D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from tpuport.kernels.padding import ceil_div, round_up

LANES = 128
SUBLANES = 8
MIB = 1 << 20
# VMEM of one core in MiB. Source: jax 0.10.2, pltpu.get_tpu_info_for_chip, written
# down here because that of the attached device must never be asked for.
VMEM_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "v7x": 64}
# What the compiler keeps for spilled registers and its own buffers, measured at up
# to 6 MiB for the largest tiles.
RESERVED = 10 * MIB
# Scores of a round of the kernel's loop: more take the compiler longer and more VMEM,
# and fewer leave the matrix unit waiting for about 250 bundles at the end of each.
MOST_WRITTEN_OUT = 5 << 20
# Cycles of a v6e for which a round waits for its last products, and rounds more than
# their number that a block of queries takes: its first one only makes scores, and its
# last one only weighs.
WAIT = 270
ALONE = 0.45
# Tokens of a block, and numbers of blocks that are looked at.
MOST_TOKENS = 9984
# What tiles that divide the parts of a sequence may take more than the fastest ones:
# less than to join the parts.
MOST_SLOWER = 0.02
# Scores of a round and tokens of a block, on such parts. The kernel compiles three
# times as long as with the sizes above, for 2 % fewer cycles.
MOST_WRITTEN_OUT_IN_PARTS = 10 << 20
MOST_TOKENS_IN_PARTS = 2 * MOST_TOKENS
MOST_BLOCKS = 32
# Rows appended to the values, a whole number of sublanes in either dtype, and those
# that are kept of what they give, one of float32; see splash_kernel.py.
COUNT_ROWS = 16
SUM_ROWS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class SplashBlocks:
    """Tokens per step of the kernel.

    ``q`` queries meet ``kv`` keys held in VMEM, in a loop that takes ``kv_step`` keys
    at a time. One round of it is a sequence of tiles of ``kv_compute`` keys by
    ``q_compute`` queries, written out in full; the second product of a tile follows
    its exponentials, or stands :func:`default_lag` tiles later. ``q_compute`` 0 means
    the larger of 256 and 128 that divides ``q``, ``kv_step`` 0 the largest that keeps a
    round below ``MOST_WRITTEN_OUT`` scores.

    Raises:
        ValueError: a size that is no positive multiple of 128, that does not divide
            the size it must divide.
    """

    q: int
    kv: int
    kv_compute: int
    q_compute: int = 0
    kv_step: int = 0

    def __post_init__(self) -> None:
        if self.q_compute == 0 and self.q > 0:
            fits = (size for size in (256, LANES) if self.q % size == 0)
            object.__setattr__(self, "q_compute", next(fits, LANES))
        if self.kv_step == 0 and min(self.q, self.kv, self.kv_compute) > 0:
            object.__setattr__(self, "kv_step", self.keys_written_out(MOST_WRITTEN_OUT))
        for name in ("q", "kv", "kv_compute", "q_compute", "kv_step"):
            size = getattr(self, name)
            if size < LANES or size % LANES:
                raise ValueError(
                    f"block size {name}={size} must be a positive multiple of {LANES}"
                )
        for whole, part in (
            ("kv", "kv_compute"),
            ("q", "q_compute"),
            ("kv", "kv_step"),
            ("kv_step", "kv_compute"),
        ):
            if getattr(self, whole) % getattr(self, part):
                raise ValueError(
                    f"block size {whole}={getattr(self, whole)} must be a multiple "
                    f"of {part}={getattr(self, part)}"
                )

    def keys_written_out(self, most: int) -> int:
        """The largest part of ``kv`` that meets ``q`` in at most ``most`` scores.

        Whole parts in whole ``kv_compute``, at least one.
        """
        steps = range(self.kv_compute, self.kv + 1, self.kv_compute)
        fits = [step for step in steps if self.kv % step == 0 and step * self.q <= most]
        return max(fits, default=self.kv_compute)


@functools.cache
def default_blocks(
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    chip: str = "v6e",
    itemsize: int = 2,
) -> SplashBlocks:
    """The tiles that take the fewest cycles by a simple model, from the sizes alone.

    Padding is computed like everything else; a round costs its scores and a wait at its
    end (``WAIT``), a block of queries a round that is not overlapped (``ALONE``), a
    grid step a little. Only tiles that fit the chip's VMEM are looked at. The attached
    device is never asked, so a program can be compiled for another one.

    Args:
        head_dim: the larger of D and Dv.
        chip: a key of ``VMEM_MIB``.
        itemsize: bytes of an element of q, k and v.

    Raises:
        ValueError: a size below 1 or an unknown chip.
    """
    if min(q_len, kv_len, head_dim) < 1:
        raise ValueError(
            "block sizes need lengths and a head dim of at least 1; got "
            f"q_len={q_len}, kv_len={kv_len}, head_dim={head_dim}"
        )
    limit = vmem_limit(chip)
    # Products of float32 are written out in six passes.
    most = MOST_TOKENS if itemsize <= 2 else 1024
    while True:
        found = [
            SplashBlocks(q=q, kv=kv, kv_compute=compute)
            for q in _covering(q_len, most, (256, LANES))
            for compute in (256, 384, LANES)
            for kv in _covering(kv_len, most, (compute,))
        ]
        fits = [b for b in found if vmem_bytes(b, head_dim, itemsize=itemsize) <= limit]
        if fits or most <= LANES:
            # The smallest there are may be refused, but that is not said here.
            best = fits or found
            return min(best, key=lambda b: _cycles(b, q_len, kv_len, head_dim))
        most = max(most // 2, LANES)


@functools.cache
def part_blocks(
    part: int, parts: int, head_dim: int, *, chip: str = "v6e", itemsize: int = 2
) -> SplashBlocks | None:
    """Tiles for tokens that lie in several arrays of ``part`` tokens, if they are fast.

    Args:
        parts: arrays of queries, and as many of keys.
        head_dim, chip, itemsize: as of :func:`default_blocks`.

    Raises:
        ValueError: an unknown chip.
    """
    length, limit = part * parts, vmem_limit(chip)
    sizes = [n for n in range(256, part + 1, 256) if part % n == 0]
    small = [
        SplashBlocks(q=q, kv=kv, kv_compute=256)
        for q in sizes
        for kv in sizes
        if q <= MOST_TOKENS_IN_PARTS
    ]
    found = [
        replace(b, kv_step=b.keys_written_out(MOST_WRITTEN_OUT_IN_PARTS)) for b in small
    ]
    fits = [b for b in found if vmem_bytes(b, head_dim, itemsize=itemsize) <= limit]
    if not fits or itemsize > 2:
        return None
    whole = default_blocks(length, length, head_dim, chip=chip, itemsize=itemsize)
    *cycles, least = (_cycles(b, length, length, head_dim) for b in (*fits, whole))
    best = min(cycles)
    return fits[cycles.index(best)] if best <= (1 + MOST_SLOWER) * least else None


def _covering(length: int, most: int, granules: tuple[int, ...]) -> list[int]:
    """Blocks of at most ``most`` tokens, for each number of them one that wastes least.

    Whole numbers of each granule; the finer ones only where they waste less.
    """
    sizes: dict[int, None] = {}
    for count in range(ceil_div(length, most), ceil_div(length, most) + MOST_BLOCKS):
        least = length + granules[0]
        for granule in granules:
            size = round_up(ceil_div(length, count), granule)
            if size < least and size <= most:
                least = size
                sizes[size] = None
    return list(sizes)


def _cycles(blocks: SplashBlocks, q_len: int, kv_len: int, head_dim: int) -> float:
    """About what one head takes; for choosing among tiles, not for predicting."""
    # For 2^20 scores on a v6e. Tiles that fill half of the matrix unit take longer.
    rate = 1400.0 + 4 * max(head_dim - 64, 0)
    rate *= {256: 1.0, 384: 1.08, LANES: 1.25}[blocks.kv_compute]
    rate *= 1.0 if blocks.q_compute == 256 else 1.22
    scores = blocks.q * blocks.kv_step * rate / (1 << 20)
    steps = ceil_div(kv_len, blocks.kv)
    rounds = steps * blocks.kv // blocks.kv_step
    each = rounds * (scores + WAIT) + ALONE * scores + steps * WAIT
    return ceil_div(q_len, blocks.q) * each


def vmem_limit(chip: str) -> int:
    """Bytes of VMEM that blocks may take on ``chip``.

    Raises:
        ValueError: an unknown chip.
    """
    if chip not in VMEM_MIB:
        raise ValueError(f"unknown chip {chip!r}; known are {', '.join(VMEM_MIB)}")
    return VMEM_MIB[chip] * MIB - RESERVED


def vmem_bytes(
    blocks: SplashBlocks,
    head_dim: int,
    v_dim: int | None = None,
    *,
    itemsize: int = 2,
) -> int:
    """Bytes of VMEM that the kernel's blocks and scratch take, without spills.

    ``v_dim`` None means D; ``itemsize`` is the bytes of an element of q, k and v.
    """
    depth = padded_dim(head_dim)
    rows = padded_dim(head_dim if v_dim is None else v_dim)
    # The buffers of q, k and v, as blocks come and go, and of the sums, in float32,
    # that do so where keys are taken in chunks. The output takes less.
    moving = depth * (blocks.q + blocks.kv) * itemsize + rows * blocks.kv * itemsize
    moving += 2 * (rows + SUM_ROWS) * blocks.q * 4
    # Scores, turned keys and values of one round.
    scores = blocks.kv_step * blocks.q * 4
    turned = blocks.kv_step * round_up(depth, LANES) * itemsize
    held = blocks.kv_step * (rows + COUNT_ROWS) * itemsize
    one = depth * LANES * itemsize
    sums = (rows + SUM_ROWS + 3 * SUBLANES) * blocks.q * 4
    return 2 * moving + scores + turned + held + one + sums


def default_lag(head_dim: int, chip: str) -> int:
    """Tiles by which sums stay behind exponentials, as was found to be fastest."""
    return 1 if head_dim > 64 and chip != "v7x" else 0


def padded_dim(dim: int) -> int:
    """A head dim rounded up to a whole number of sublanes in either dtype."""
    return round_up(dim, 16)
