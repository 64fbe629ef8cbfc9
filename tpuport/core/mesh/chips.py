"""Constants of the TPU chips, each with where it comes from.

Everything is per *jax device*, the thing a mesh is made of. A jax device is a whole
chip for v4, v5e, v5p and v6e (two cores of v4 and v5p act as one), and half a chip, one
core, for v7x.

Sources:

* cloud: Google Cloud's pages, ``docs.cloud.google.com/tpu/docs/v4`` (``v5e``, ``v5p``,
  ``v6e``, ``tpu7x``): peak FLOP/s, HBM size and bandwidth, cores per chip, pod shape.
* book: "How to Scale Your Model", ``jax-ml.github.io/scaling-book/tpus``, the tables
  of section "TPU specs": bandwidth of one interconnect link in one direction, and when
  an axis is a ring. The book's links are a tenth below the bandwidth per chip of Google
  Cloud's pages shared among the links. The link to the host: 16 GB/s of v4, about 15 of
  v5e and v5p, 32 of v6e. For v7x there is no figure: v6e's is assumed for a chip, half
  of that for each of its two devices.
* dcn: the bandwidth per chip of the data-centre network, which joins slices: 50, 100
  and 100 Gb/s of v5p, v6e and v7x in the table of
  ``docs.cloud.google.com/tpu/docs/tpu7x``; of v5e 6.4 Tb/s per Pod of 256 chips, in
  that of ``docs.cloud.google.com/tpu/docs/v5e``. The book has the same figures of v5e,
  v5p and v6e, for one direction. Google publishes none of v4.
* info: ``jax/_src/pallas/mosaic/tpu_info.py`` of jax 0.10.2: VMEM, width of the MXU,
  number of them.
* libtpu: 0.0.42.1, the error of a program that is too large: the HBM it may use.

The clock is what the peak follows from: FLOP/s over FLOPs per cycle of all MXUs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tpuport.errors import UsageError

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Chip:
    """What one jax device of a TPU generation can do.

    Attributes:
        name: ``"v6e"``; what people call the generation.
        title: Google's name of it.
        device_kinds: ``device_kind`` of its jax devices.
        devices_per_chip: jax devices on one chip.
        cores: TensorCores of one device; a Pallas kernel runs on one of them unless
            its grid is split.
        peak_flops: bfloat16 FLOP/s, multiplications and additions counted. [cloud]
        flops_per_cycle: the same per clock cycle: MXUs x rows x columns x 2, and twice
            that from v6e on. [info]
        hbm_bytes: memory of the chip, as Google gives it. [cloud]
        hbm_usable_bytes: what the compiler lets a program use. [libtpu]
        hbm_bandwidth: bytes/s. [cloud]
        host_bandwidth: bytes/s from the host's memory, in one direction. [book]
        vmem_bytes: on-chip memory of one core. [info]
        mxu_size: rows and columns of one MXU. [info]
        mxus: of one core. [info]
        ici_links: of the chip, one per direction along each axis. [cloud]
        ici_link_bandwidth: bytes/s of one link in one direction. [book]
        ici_dims: axes of the interconnect.
        dcn_bandwidth: bytes/s to other slices, in one direction; ``None`` where it is
            not known. [dcn]
        ring_size: an axis whose size is a multiple of this closes to a ring (on 3D
            chips only when every axis is such a multiple). [book]
    """

    name: str
    title: str
    device_kinds: tuple[str, ...]
    devices_per_chip: int
    cores: int
    peak_flops: float
    flops_per_cycle: int
    hbm_bytes: int
    hbm_usable_bytes: int
    hbm_bandwidth: float
    host_bandwidth: float
    vmem_bytes: int
    mxu_size: int
    mxus: int
    ici_links: int
    ici_link_bandwidth: float
    ici_dims: int
    dcn_bandwidth: float | None
    ring_size: int

    @property
    def clock_hz(self) -> float:
        """Cycles per second of a core."""
        return self.peak_flops / self.flops_per_cycle

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "clock_hz": self.clock_hz}


_NAMES = ("v4", "v5e", "v5p", "v6e", "v7x")
#: An attribute of all chips in a line, in the order of ``_NAMES``.
_TABLE: dict[str, tuple[Any, ...]] = {
    "title": ("TPU v4", "TPU v5e", "TPU v5p", "TPU v6e (Trillium)", "TPU7x (Ironwood)"),
    "device_kinds": (
        ("TPU v4",),
        ("TPU v5 lite", "TPU v5e"),
        ("TPU v5", "TPU v5p"),
        ("TPU v6 lite", "TPU v6e"),
        ("TPU7x",),
    ),
    "devices_per_chip": (1, 1, 1, 1, 2),
    "cores": (2, 1, 2, 1, 1),
    "peak_flops": (275e12, 197e12, 459e12, 918e12, 2307e12 / 2),
    "flops_per_cycle": (
        2 * 4 * 128 * 128 * 2,  # 1.05 GHz
        4 * 128 * 128 * 2,  # 1.50 GHz
        2 * 4 * 128 * 128 * 2,  # 1.75 GHz
        2 * 256 * 256 * 2 * 2,  # 1.75 GHz
        2 * 256 * 256 * 2 * 2,  # 2.20 GHz
    ),
    "hbm_bytes": tuple(size * GIB for size in (32, 16, 95, 32, 96)),
    "hbm_usable_bytes": tuple(
        int(size * GIB) for size in (30.75, 15.75, 95.74, 31.25, 94.75)
    ),
    "hbm_bandwidth": (1228e9, 819e9, 2765e9, 1638e9, 7380e9 / 2),
    "host_bandwidth": (1.6e10, 1.5e10, 1.5e10, 3.2e10, 1.6e10),
    "vmem_bytes": tuple(size * MIB for size in (16, 128, 64, 128, 64)),
    "mxu_size": (128, 128, 128, 256, 256),
    "mxus": (4, 4, 4, 2, 2),
    "ici_links": (6, 4, 6, 4, 6),
    "ici_link_bandwidth": (4.5e10, 4.5e10, 9e10, 9e10, 9e10),
    "ici_dims": (3, 2, 3, 2, 3),
    "dcn_bandwidth": (None, 3.125e9, 6.25e9, 12.5e9, 12.5e9 / 2),
    "ring_size": (4, 16, 4, 16, 4),
}
CHIPS: dict[str, Chip] = {
    name: Chip(name=name, **dict(zip(_TABLE, column, strict=True)))
    for name, column in zip(_NAMES, zip(*_TABLE.values(), strict=True), strict=True)
}


def chip(name: str) -> Chip:
    """The constants of a chip by its name, such as ``"v6e"``.

    Raises:
        UsageError: no chip has that name.
    """
    if name not in CHIPS:
        raise UsageError(f"unknown TPU chip {name!r}; known are: {', '.join(CHIPS)}")
    return CHIPS[name]


def chip_of(device: Any) -> str:
    """The name of the chip a jax device is on, by its ``device_kind``.

    Raises:
        UsageError: it is no TPU, or one that is not in the table.
    """
    kind = str(getattr(device, "device_kind", device))
    for found in CHIPS.values():
        if kind in found.device_kinds:
            return found.name
    known = ", ".join(kind for c in CHIPS.values() for kind in c.device_kinds)
    raise UsageError(f"{kind!r} is not a TPU that tpuport knows; known are: {known}")
