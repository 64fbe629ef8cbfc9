"""The device mesh as a value: ``dp`` splits the batch, ``sp`` tokens, ``tp`` heads.

A :class:`MeshSpec` is checked against devices, head counts and the batch before any
device is touched; :func:`build_mesh` alone imports jax.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tpuport.errors import MeshError

AXES = ("dp", "sp", "tp")
"""The mesh axes, outermost first."""

_EXAMPLE = 'write for example "dp=2,tp=4" or "2,1,4" (dp, sp, tp)'
_INTEGER = re.compile(r"-?[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSpec:
    """How many devices each axis has; at most one axis is -1, "what is left".

    Attributes:
        dp: groups of devices that each take a share of the batch.
        sp: devices that each take a share of the query tokens.
        tp: devices that each take a share of the heads and the weights.

    Raises:
        MeshError: an axis is neither a positive integer nor the only -1.
    """

    dp: int = 1
    sp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if not _is_integer(size):
                raise MeshError(
                    f"mesh axis {axis} is {size!r}, not an integer; {_EXAMPLE}"
                )
            if size < 1 and size != -1:
                raise MeshError(
                    f"mesh axis {axis} is {size}; an axis is at least 1, "
                    "or -1 for the devices that are left"
                )
        open_axes = self._open_axes()
        if len(open_axes) > 1:
            raise MeshError(
                f"mesh {self} leaves {' and '.join(open_axes)} open; "
                "only one axis can be -1"
            )

    @classmethod
    def parse(
        cls, value: MeshSpec | str | Mapping[str, Any] | Sequence[Any] | None
    ) -> MeshSpec:
        """The spec that a value from a user or a file stands for.

        Accepts a spec, ``"dp=2,tp=4"``, ``"2,1,4"``, a mapping, or three sizes in the
        order dp, sp, tp. Axes not named are 1; ``None`` is one device.

        Raises:
            MeshError: an axis is unknown or given twice, a size is not an integer, or
                there are not three of them.
        """
        if value is None:
            return cls()
        if isinstance(value, MeshSpec):
            return value
        sizes: dict[str, int] = {}
        size: Any
        for axis, size in _pairs(value):
            if isinstance(size, str) and _INTEGER.fullmatch(size.strip()):
                size = int(size)
            problem = ""
            if axis not in AXES:
                problem = f"unknown axis {axis!r}, the axes are {', '.join(AXES)}"
            elif axis in sizes:
                problem = f"axis {axis!r} is given twice"
            elif not _is_integer(size):
                problem = f"axis {axis!r} is {size!r}, not an integer"
            if problem:
                raise MeshError(f"mesh {value!r}: {problem}; {_EXAMPLE}")
            sizes[axis] = size
        return cls(**sizes)

    def resolve(self, device_count: int) -> MeshSpec:
        """The same mesh with -1 filled in, known to fit ``device_count`` devices.

        A mesh may use fewer devices than there are, unless an axis is -1: then it
        uses all of them.

        Raises:
            MeshError: the mesh needs more devices, or -1 has no whole answer.
        """
        if device_count < 1:
            raise MeshError(f"mesh {self} needs devices, there are {device_count}")
        open_axes = self._open_axes()
        known = math.prod(abs(getattr(self, axis)) for axis in AXES)
        if device_count % known if open_axes else device_count < known:
            raise MeshError(
                f"mesh {self} needs {'a multiple of ' if open_axes else ''}{known} "
                f"devices, there are {device_count}; try {self._shrunk(device_count)}"
            )
        return replace(self, **dict.fromkeys(open_axes, device_count // known))

    def within(self, slices: int, device_count: int) -> MeshSpec:
        """The part of the mesh on each of several slices: dp goes across them.

        Args:
            device_count: of all slices.

        Raises:
            MeshError: dp is not a multiple of the slices.
        """
        if self.dp % slices:
            wider = replace(self, dp=math.lcm(self.dp, slices))
            raise MeshError(
                f"mesh {self} on {slices} slices: dp alone goes across slices, so it "
                f"is a multiple of {slices}; try {wider._shrunk(device_count)}"
            )
        return replace(self, dp=self.dp // slices)

    def unused(self, device_count: int) -> str | None:
        """A remark on devices that the mesh leaves unused; ``None`` for none."""
        left = device_count - self.size
        if left <= 0:
            return None
        return (
            f"mesh {self} takes {self.size} of {device_count} devices: {left} "
            f"stay{'s' * (left == 1)} unused"
        )

    @property
    def size(self) -> int:
        """The number of devices.

        Raises:
            MeshError: an axis is still -1.
        """
        return math.prod(self.shape.values())

    @property
    def shape(self) -> dict[str, int]:
        """Axis name -> size, in the order of :data:`AXES`.

        Raises:
            MeshError: an axis is still -1.
        """
        if self._open_axes():
            raise MeshError(
                f"mesh {self} has no size before resolve(device_count) fills the -1"
            )
        return {axis: getattr(self, axis) for axis in AXES}

    def __str__(self) -> str:
        return ",".join(f"{axis}={getattr(self, axis)}" for axis in AXES)

    def _open_axes(self) -> list[str]:
        return [axis for axis in AXES if getattr(self, axis) == -1]

    def _shrunk(self, device_count: int) -> MeshSpec:
        """A mesh that fits, dp and tp divisors of what was asked.

        A divisor keeps what an axis already divided (heads, batch) divided; sp takes
        any degree, where no other axis is to take what is left.
        """
        left = device_count
        most = {} if self._open_axes() else {"sp": min}
        sizes = {}
        for axis in AXES:
            asked = getattr(self, axis)
            if asked != -1:
                sizes[axis] = most.get(axis, math.gcd)(asked, left)
                left //= sizes[axis]
        return replace(self, **sizes)


def _pairs(value: Any) -> list[tuple[Any, Any]]:
    """Axes and sizes as :meth:`MeshSpec.parse` was given them."""
    problem = " cannot be read"
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, Sequence):
        parts: list[Any] = list(value)
        if isinstance(value, str):
            parts = [part.strip() for part in value.split(",")]
        if "=" in value:
            pairs = [part.partition("=") for part in parts]
            wrong = [axis for axis, equals, _ in pairs if not equals]
            if not wrong:
                return [(axis.strip(), size.strip()) for axis, _, size in pairs]
            problem = f": {wrong[0]!r} is not axis=size"
        elif len(parts) == len(AXES):
            return list(zip(AXES, parts, strict=True))
        elif parts == ["auto"]:
            raise MeshError(
                "mesh 'auto' is for `tpuport plan`, which ranks them; a run with none "
                "named takes all chips"
            )
        elif len(parts) == 1 and not _INTEGER.fullmatch(str(parts[0])):
            problem = " is not understood"
        else:
            problem = f" gives {len(parts)} of {len(AXES)} sizes"
    raise MeshError(f"mesh {value!r}{problem}; {_EXAMPLE}")


def _is_integer(size: Any) -> bool:
    # bool is an int to Python; as an axis size it is a slip.
    return isinstance(size, int) and not isinstance(size, bool)


def divisors(number: int) -> list[int]:
    """All that divide a positive number, the smallest first."""
    return [n for n in range(1, number + 1) if number % n == 0]
