"""Tiles of our splash kernel: what is legal, what fits, what to take by default.

Letters: L tokens, D head dim of queries and keys, Dv head dim of values.
"""

from __future__ import annotations

from dataclasses import dataclass

from tpuport.kernels.padding import ceil_div, round_up

LANES = 128
MIB = 1 << 20
# VMEM of one core in MiB. Source: jax 0.10.2, pltpu.get_tpu_info_for_chip, written
# down here because that of the attached device must never be asked for.
VMEM_MIB = {"v4": 16, "v5e": 128, "v5p": 64, "v6e": 128, "v7x": 64}
# What the compiler keeps for spilled registers and its own buffers, measured at up
# to 6 MiB for the largest tiles.
RESERVED = 10 * MIB
# Scores of a round of the kernel's loop: more take the compiler longer, and fewer leave
# the matrix unit waiting for about 100 bundles at the end of each.
MOST_WRITTEN_OUT = 5 << 20
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
    the first product of the tile ``lag`` later, so that the exponentials between them
    have time. ``q_compute`` 0 means the largest of 512, 384, 256 and 128 that divides
    ``q``, ``kv_step`` 0 the largest that keeps a round below ``MOST_WRITTEN_OUT``
    scores.

    Raises:
        ValueError: a size that is no positive multiple of 128, that does not divide
            the size it must divide, or a ``lag`` below 1.
    """

    q: int
    kv: int
    kv_compute: int
    q_compute: int = 0
    kv_step: int = 0
    lag: int = 2

    def __post_init__(self) -> None:
        if self.q_compute == 0 and self.q > 0:
            fits = (size for size in (512, 384, 256, LANES) if self.q % size == 0)
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
        if self.lag < 1:
            raise ValueError(f"lag={self.lag} must be at least 1")

    def keys_written_out(self, most: int) -> int:
        """The largest part of ``kv`` that meets ``q`` in at most ``most`` scores.

        Whole parts in whole ``kv_compute``, at least one.
        """
        steps = range(self.kv_compute, self.kv + 1, self.kv_compute)
        fits = [step for step in steps if self.kv % step == 0 and step * self.q <= most]
        return max(fits, default=self.kv_compute)


def default_blocks(
    q_len: int,
    kv_len: int,
    head_dim: int,
    *,
    chip: str = "v6e",
    itemsize: int = 2,
) -> SplashBlocks:
    """Large tiles that waste little padding, from the sizes alone.

    The largest blocks of whole 512 tokens, 2048 to 3072, that divide the length. Else
    few blocks of at most 3072 that cover it and leave little over, whole numbers of 512
    tokens, or of 256, 384 keys or 128 queries, where more than a sixteenth is wasted.
    Fewer tokens where the blocks would not fit the chip's VMEM. The attached device is
    never asked, so a program can be compiled for another one.

    Args:
        q_len: queries.
        kv_len: keys.
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
    most = 3072 if itemsize <= 2 else 1024
    while True:
        q = _even_block(q_len, most, (512, 256, LANES))
        # An odd number of 256 keys may have no divisor: its rounds would be short. Of
        # parts of 128 keys half the matrix unit is idle: padding wastes less.
        whole = kv_len > LANES and most >= 256
        kv = _even_block(kv_len, most, (512, 256) if whole else (LANES,))
        compute = 256 if kv % 256 == 0 else LANES
        if whole and most >= 384:
            # Parts of 384 fill it as well: where they leave a sixteenth less over.
            other = _even_block(kv_len, most, (384,))
            padded = [ceil_div(kv_len, size) * size for size in (kv, other)]
            if 17 * padded[1] < 16 * padded[0]:
                kv, compute = other, 384
        blocks = SplashBlocks(q=q, kv=kv, kv_compute=compute)
        if most <= 128 or vmem_bytes(blocks, head_dim, itemsize=itemsize) <= limit:
            return blocks
        most //= 2


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

    Args:
        head_dim: D.
        v_dim: Dv; None means D.
        itemsize: bytes of an element of q, k and v.
    """
    depth = padded_dim(head_dim)
    rows = padded_dim(head_dim if v_dim is None else v_dim)
    # The buffers of q, k, v and the output, as blocks come and go.
    moving = (depth + rows) * (blocks.q + blocks.kv) * itemsize
    turned = 2 * blocks.kv_compute * round_up(depth, LANES) * itemsize
    weights = (blocks.lag + 2) * blocks.kv_compute * blocks.q_compute * itemsize
    rescales = (blocks.lag + 2) * 8 * blocks.q_compute * 4
    sums = (rows + SUM_ROWS + 8) * blocks.q * 4
    return 2 * moving + turned + weights + rescales + sums


def padded_dim(dim: int) -> int:
    """A head dim rounded up to a whole number of sublanes in either dtype."""
    return round_up(dim, 16)


def _even_block(length: int, most: int, granules: tuple[int, ...]) -> int:
    """A block of few that waste little, in the first granule that can.

    One that divides the length, of whole numbers of the first granule and no less than
    two thirds of ``most``, comes before all others. Else a third more blocks than the
    fewest are taken where they leave less over.
    """
    first = granules[0]
    for size in range(most // first * first, max(2 * most // 3, 1) - 1, -first):
        if length % size == 0:
            return size
    fewest = ceil_div(length, most)
    counts = range(fewest, fewest + fewest // 3 + 1)
    sizes: list[int] = []
    for granule in (size for size in granules if size <= max(most, LANES)):
        each = {n: round_up(ceil_div(length, n), granule) for n in counts}
        sizes.append(min(each.items(), key=lambda one: (one[0] * one[1], one[0]))[1])
    fits = (
        size
        for size in sizes
        if 16 * (ceil_div(length, size) * size - length) <= length
    )
    return next(fits, sizes[-1])
