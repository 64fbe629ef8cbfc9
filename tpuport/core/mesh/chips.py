"""Constants of the TPU chips, each with where it comes from.

Everything is per *jax device*, the thing a mesh is made of. That is a whole chip for
v4, v5e, v5p and v6e (two cores of v4 and v5p act as one), and half a chip, one core,
for v7x.

Sources:

* cloud: Google Cloud's pages, ``docs.cloud.google.com/tpu/docs/v4`` (``v5e``, ``v5p``,
  ``v6e``, ``tpu7x``): peak FLOP/s, HBM size and bandwidth, cores per chip, pod shape.
* book: "How to Scale Your Model", ``jax-ml.github.io/scaling-book/tpus``, the tables
  of section "TPU specs": bandwidth of one interconnect link in one direction, and when
  an axis is a ring. The book's links are a tenth below the bandwidth per chip of Google
  Cloud's pages shared among the links.
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
        vmem_bytes: on-chip memory of one core. [info]
        mxu_size: rows and columns of one MXU. [info]
        mxus: of one core. [info]
        ici_links: of the chip, one per direction along each axis. [cloud]
        ici_link_bandwidth: bytes/s of one link in one direction. [book]
        ici_dims: axes of the interconnect.
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
    vmem_bytes: int
    mxu_size: int
    mxus: int
    ici_links: int
    ici_link_bandwidth: float
    ici_dims: int
    ring_size: int

    @property
    def clock_hz(self) -> float:
        """Cycles per second of a core."""
        return self.peak_flops / self.flops_per_cycle

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "clock_hz": self.clock_hz}


CHIPS: dict[str, Chip] = {
    chip.name: chip
    for chip in (
        Chip(
            name="v4",
            title="TPU v4",
            device_kinds=("TPU v4",),
            devices_per_chip=1,
            cores=2,
            peak_flops=275e12,
            flops_per_cycle=2 * 4 * 128 * 128 * 2,  # 1.05 GHz
            hbm_bytes=32 * GIB,
            hbm_usable_bytes=int(30.75 * GIB),
            hbm_bandwidth=1228e9,
            vmem_bytes=16 * MIB,
            mxu_size=128,
            mxus=4,
            ici_links=6,
            ici_link_bandwidth=4.5e10,
            ici_dims=3,
            ring_size=4,
        ),
        Chip(
            name="v5e",
            title="TPU v5e",
            device_kinds=("TPU v5 lite", "TPU v5e"),
            devices_per_chip=1,
            cores=1,
            peak_flops=197e12,
            flops_per_cycle=4 * 128 * 128 * 2,  # 1.50 GHz
            hbm_bytes=16 * GIB,
            hbm_usable_bytes=int(15.75 * GIB),
            hbm_bandwidth=819e9,
            vmem_bytes=128 * MIB,
            mxu_size=128,
            mxus=4,
            ici_links=4,
            ici_link_bandwidth=4.5e10,
            ici_dims=2,
            ring_size=16,
        ),
        Chip(
            name="v5p",
            title="TPU v5p",
            device_kinds=("TPU v5", "TPU v5p"),
            devices_per_chip=1,
            cores=2,
            peak_flops=459e12,
            flops_per_cycle=2 * 4 * 128 * 128 * 2,  # 1.75 GHz
            hbm_bytes=95 * GIB,
            hbm_usable_bytes=int(95.74 * GIB),
            hbm_bandwidth=2765e9,
            vmem_bytes=64 * MIB,
            mxu_size=128,
            mxus=4,
            ici_links=6,
            ici_link_bandwidth=9e10,
            ici_dims=3,
            ring_size=4,
        ),
        Chip(
            name="v6e",
            title="TPU v6e (Trillium)",
            device_kinds=("TPU v6 lite", "TPU v6e"),
            devices_per_chip=1,
            cores=1,
            peak_flops=918e12,
            flops_per_cycle=2 * 256 * 256 * 2 * 2,  # 1.75 GHz
            hbm_bytes=32 * GIB,
            hbm_usable_bytes=int(31.25 * GIB),
            hbm_bandwidth=1638e9,
            vmem_bytes=128 * MIB,
            mxu_size=256,
            mxus=2,
            ici_links=4,
            ici_link_bandwidth=9e10,
            ici_dims=2,
            ring_size=16,
        ),
        Chip(
            name="v7x",
            title="TPU7x (Ironwood)",
            device_kinds=("TPU7x",),
            devices_per_chip=2,
            cores=1,
            peak_flops=2307e12 / 2,
            flops_per_cycle=2 * 256 * 256 * 2 * 2,  # 2.20 GHz
            hbm_bytes=96 * GIB,
            hbm_usable_bytes=int(94.75 * GIB),
            hbm_bandwidth=7380e9 / 2,
            vmem_bytes=64 * MIB,
            mxu_size=256,
            mxus=2,
            ici_links=6,
            ici_link_bandwidth=9e10,
            ici_dims=3,
            ring_size=4,
        ),
    )
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
