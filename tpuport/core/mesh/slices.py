"""TPU slices by the names people use, and their devices without having any.

Names follow Google Cloud's accelerator types. The number counts **chips** for v5e and
v6e, and **TensorCores** for v4, v5p and v7x, which have two a chip: ``v5p-8`` is four
chips. jax shows one device a chip for v4, v5e, v5p and v6e, and two a chip, one for
each core, for v7x: ``v7x-8`` is four chips and eight devices.

Sources: ``docs.cloud.google.com/tpu/docs/v4`` (``v5e``, ``v5p``, ``v6e``, ``tpu7x``),
the tables of supported configurations.
"""

from __future__ import annotations

import difflib
import importlib.util
import math
import re
from dataclasses import dataclass, field, replace
from typing import Any

from tpuport.core.mesh.chips import chip
from tpuport.errors import TpuportError, UsageError


class TopologyError(TpuportError):
    """The devices of a TPU slice cannot be described on this machine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """A slice of a TPU pod, or several alike, joined by the data-centre network.

    Attributes:
        name: ``"v6e-8"``.
        chip: the generation, a key of :data:`tpuport.core.mesh.chips.CHIPS`.
        chips: how many chips, of all slices.
        devices: how many jax devices; twice ``chips`` for v7x.
        dims: chips along each axis of the interconnect, such as (2, 4).
        rings: whether the last chip of each axis is linked to the first.
        libtpu_name: what libtpu calls it, such as ``"v6e:2x4"``.
        options: further arguments of ``jax.experimental.topologies``.
        slices: how many slices.
    """

    name: str
    chip: str
    chips: int
    devices: int
    dims: tuple[int, ...]
    rings: tuple[bool, ...]
    libtpu_name: str
    options: dict[str, Any] = field(default_factory=dict)
    slices: int = 1

    @property
    def title(self) -> str:
        """For people: ``"v6e-8"``, or ``"2 x v6e-8"``."""
        return self.name if self.slices == 1 else f"{self.slices} x {self.name}"

    def times(self, slices: int) -> Topology:
        """So many of this slice.

        Raises:
            UsageError: what joins slices of this chip is not known.
        """
        if slices == 1:
            return self
        if chip(self.chip).dcn_bandwidth is None:
            raise UsageError(
                f"--slices {slices}: Google publishes no bandwidth of the data-centre "
                f"network of {self.chip}; plan one slice, or another chip"
            )
        return replace(
            self,
            chips=self.chips * slices,
            devices=self.devices * slices,
            options=self.options | {"num_slices": slices},
            slices=slices,
        )


#: Axes of a slice by its size in chips.
_FLAT: tuple[tuple[int, ...], ...] = (
    *((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)),
)
_CUBES: tuple[tuple[int, ...], ...] = (
    *((2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8)),
    *((4, 8, 8), (8, 8, 8), (8, 8, 16), (8, 16, 16)),
)
#: Chip -> (libtpu's name of it, what the number of a slice counts per chip, slices).
_SLICES: dict[str, tuple[str, int, tuple[tuple[int, ...], ...]]] = {
    "v4": ("v4", 2, _CUBES),
    "v5e": ("v5e", 1, _FLAT),
    "v5p": ("v5p", 2, _CUBES),
    "v6e": ("v6e", 1, _FLAT),
    "v7x": ("tpu7x", 2, ((1, 1, 1), *_CUBES)),
}
#: Other spellings of the first half of a name.
_ALIASES = {"v5litepod": "v5e", "tpu7x": "v7x", "v7": "v7x", "tpuv6e": "v6e"}


def _topology(name: str, dims: tuple[int, ...]) -> Topology:
    libtpu, per_chip, _ = _SLICES[name]
    chips, constants = math.prod(dims), chip(name)
    rings = tuple(dim % constants.ring_size == 0 for dim in dims)
    if len(dims) == 3:  # rings go through the optical switches between whole cubes
        rings = (all(rings),) * 3
    options: dict[str, Any] = {}
    if chips == 1:
        options["chips_per_host_bounds"] = [1, 1, 1]
    elif dims == (2, 4):  # one machine with eight chips, not two with four
        options["chips_per_host_bounds"] = [2, 4, 1]
    if name == "v4":  # two cores as one device, as jax shows them on a v4 machine
        options["chip_config_name"] = "megacore"
    return Topology(
        name=f"{name}-{chips * per_chip}",
        chip=name,
        chips=chips,
        devices=chips * constants.devices_per_chip,
        dims=dims,
        rings=rings,
        libtpu_name=f"{libtpu}:{'x'.join(map(str, dims))}",
        options=options,
    )


_TOPOLOGIES = {
    found.name: found
    for name, (*_, slices) in _SLICES.items()
    for found in (_topology(name, dims) for dims in slices)
}
#: Every name that :func:`parse_topology` knows, in the order of the chips' ages.
TOPOLOGY_NAMES: tuple[str, ...] = tuple(_TOPOLOGIES)


def known_topologies() -> str:
    """The smallest and the largest slice of each generation, in words."""
    found = []
    for family in _SLICES:
        names = [name for name in TOPOLOGY_NAMES if name.startswith(f"{family}-")]
        found.append(f"{names[0]} to {names[-1]}")
    return ", ".join(found)


def parse_topology(name: str, *, others: str = "") -> Topology:
    """The slice called ``name``, such as ``v5e-4``, ``v5p-8``, ``v6e-8``, ``v7x-8``.

    ``v5litepod-4`` and ``tpu7x-8`` are understood too. ``others`` are names that the
    caller takes beside these, for the message.

    Raises:
        UsageError: there is no such slice; the message names near ones.
    """
    family, _, size = name.strip().lower().partition("-")
    family = _ALIASES.get(family, family)
    found = _TOPOLOGIES.get(f"{family}-{size}")
    if found is not None:
        return found
    if family in _SLICES:
        near = [n for n in TOPOLOGY_NAMES if n.startswith(f"{family}-")]
        counted = "TensorCores" if _SLICES[family][1] == 2 else "chips"
        hint = f"of {family} there are {', '.join(near)} (the number counts {counted})"
    else:
        hint = f"there are {known_topologies()}"
        # The size says nothing: every generation has a slice of eight.
        if not size and (parts := re.fullmatch(r"(.*?[a-z])([0-9]+)", family)):
            family, size = parts.groups()
        close = difflib.get_close_matches(family, [*_SLICES, *_ALIASES], 3, 0.6)
        found_in = dict.fromkeys(_ALIASES.get(one, one) for one in close)
        near = [f"{one}-{size}" for one in found_in if f"{one}-{size}" in _TOPOLOGIES]
        if near:
            hint = f"did you mean {' or '.join(near)}? {hint}"
    if others:
        hint += f", or {others}"
    raise UsageError(f"unknown TPU topology {name!r}; {hint}")


def smallest_of(chip_name: str) -> Topology:
    """The smallest slice of a chip, for what is compiled for one of them.

    Raises:
        UsageError: no chip has that name.
    """
    chip(chip_name)
    found = (t for t in _TOPOLOGIES.values() if t.chip == chip_name)
    return min(found, key=lambda topology: topology.devices)


def compile_environment(topology: Topology) -> dict[str, str]:
    """Environment variables under which libtpu compiles for chips that are not there.

    libtpu reads the variables when it is loaded, at the first use of a topology.
    Without the last variable libtpu takes a lock for the whole machine, and a second
    process that compiles fails.
    """
    return {
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # libtpu says on stderr that it does not know "v7x".
        "TPU_ACCELERATOR_TYPE": topology.name.replace("v7x", "tpu7x"),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "true",
    }


def check_libtpu(topology: Topology) -> None:
    """Refuse a machine without the TPU compiler; loads nothing.

    Raises:
        TopologyError: libtpu is not installed.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise TopologyError(
            f"compiling for {topology.name} needs libtpu, the TPU compiler, which is "
            "not installed; it exists for Linux on x86-64 only: pip install 'jax[tpu]'"
        )


def topology_devices(topology: Topology) -> list[Any]:
    """The jax devices of a slice, none of which need exist, in libtpu's order.

    Of several slices, those of the first one come first.

    Programs are compiled for them by placing abstract arrays on a mesh of them. The
    process should have been given :func:`compile_environment`.

    Raises:
        TopologyError: libtpu, the TPU compiler, is not installed, is locked by another
            process, or does not know the slice.
    """
    check_libtpu(topology)
    from jax.experimental import topologies

    try:
        described = topologies.get_topology_desc(
            topology_name=topology.libtpu_name, platform="tpu", **topology.options
        )
    except Exception as error:
        if "lockfile" in str(error):
            raise TopologyError(
                "another process on this machine has loaded libtpu; set "
                "ALLOW_MULTIPLE_LIBTPU_LOAD=true before libtpu is loaded"
            ) from error
        text = " ".join(str(error).split())
        raise TopologyError(
            f"libtpu cannot describe {topology.title} ({topology.libtpu_name}): {text}"
        ) from error
    devices = list(described.devices)
    if len(devices) != topology.devices:
        raise TopologyError(
            f"libtpu describes {topology.title} ({topology.libtpu_name}) with "
            f"{len(devices)} devices; {topology.devices} were expected"
        )
    return devices
