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
            # bool is an int to Python; as an axis size it is a slip.
            if not isinstance(size, int) or isinstance(size, bool):
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
        if isinstance(value, str):
            parts = [part.strip() for part in value.split(",")]
            if not any("=" in part for part in parts):
                return cls._from_sizes(parts, asked=value)
            return cls._from_pairs([part.split("=", 1) for part in parts], asked=value)
        if isinstance(value, Mapping):
            return cls._from_pairs(list(value.items()), asked=value)
        if isinstance(value, Sequence):
            return cls._from_sizes(value, asked=value)
        raise MeshError(f"mesh {value!r} cannot be read; {_EXAMPLE}")

    @classmethod
    def _from_sizes(cls, sizes: Sequence[Any], *, asked: Any) -> MeshSpec:
        if list(sizes) == ["auto"]:
            raise MeshError(
                "mesh 'auto' is for `tpuport plan`, which ranks them; a run with none "
                "named takes all chips"
            )
        if len(sizes) == 1 and not re.fullmatch(r"-?[0-9]+", str(sizes[0])):
            raise MeshError(f"mesh {asked!r} is not understood; {_EXAMPLE}")
        if len(sizes) != len(AXES):
            raise MeshError(
                f"mesh {asked!r} gives {len(sizes)} of {len(AXES)} sizes; {_EXAMPLE}"
            )
        return cls._from_pairs(list(zip(AXES, sizes, strict=True)), asked=asked)

    @classmethod
    def _from_pairs(cls, pairs: Sequence[Sequence[Any]], *, asked: Any) -> MeshSpec:
        sizes: dict[str, int] = {}
        for pair in pairs:
            if len(pair) != 2:
                raise MeshError(
                    f"mesh {asked!r}: {pair[0]!r} is not axis=size; {_EXAMPLE}"
                )
            axis, size = (x.strip() if isinstance(x, str) else x for x in pair)
            if axis not in AXES:
                raise MeshError(
                    f"mesh {asked!r}: unknown axis {axis!r}, the axes are "
                    f"{', '.join(AXES)}; {_EXAMPLE}"
                )
            if axis in sizes:
                raise MeshError(
                    f"mesh {asked!r}: axis {axis!r} is given twice; {_EXAMPLE}"
                )
            sizes[axis] = _integer(size, axis, asked)
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
        machine = f"there are {device_count}"
        open_axes = self._open_axes()
        if open_axes:
            (axis,) = open_axes
            known = math.prod(abs(getattr(self, a)) for a in AXES)
            if device_count % known:
                raise MeshError(
                    f"mesh {self} needs a multiple of {known} devices, {machine}; "
                    f"try {self._shrunk(device_count)}"
                )
            return replace(self, **{axis: device_count // known})
        if self.size > device_count:
            raise MeshError(
                f"mesh {self} needs {self.size} devices, {machine}; "
                f"try {self._shrunk(device_count)}"
            )
        return self

    def unused(self, device_count: int, kind: str = "device") -> str | None:
        """A remark on devices that the mesh leaves unused; ``None`` where it has all.

        Args:
            device_count: how many there are.
            kind: what they are called, such as ``"chip"``.
        """
        left = device_count - self.size
        if left <= 0:
            return None
        return (
            f"mesh {self} takes {self.size} of {device_count} {kind}s: {left} "
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

    def validate(
        self,
        *,
        heads: Mapping[str, int] | None = None,
        batch: int | None = None,
        devices: int | None = None,
    ) -> None:
        """Check that the mesh splits the heads and the batch evenly.

        Args:
            heads: attention heads by component; ``None`` leaves tp unchecked.
            batch: rows of the batch dim; ``None`` leaves dp unchecked.
            devices: how many there are; no larger value is offered.

        Raises:
            MeshError: tp does not divide the heads of a component, or dp does not
                divide the batch; the message has both, with the legal values.
        """
        shape = self.shape
        problems = []
        uneven = {n: h for n, h in (heads or {}).items() if h % shape["tp"]}
        if heads and uneven:
            listed = ", ".join(f"{h} heads of {name}" for name, h in uneven.items())
            common = math.gcd(*heads.values())
            legal = [n for n in _divisors(common) if n <= (devices or common)]
            problems.append(
                f"tp={self.tp} does not divide the {listed}; "
                f"legal tp values: {_listed(legal)}"
                " (sp, which splits tokens, takes any degree)"
            )
        if batch is not None and batch % shape["dp"]:
            problems.append(
                f"dp={self.dp} does not divide the batch of {batch}; "
                f"legal dp values: {_listed(_divisors(batch))}"
            )
        if problems:
            raise MeshError(f"mesh {self}: " + "; ".join(problems))

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


def auto_mesh(
    device_count: int,
    *,
    heads: Mapping[str, int] | None,
    batch: int | None,
    tokens: bool = False,
) -> MeshSpec:
    """A mesh that fits, chosen by three plain rules, in this order.

    1. dp is 2 when the batch and the device count are both even (the two halves of
       classifier-free guidance share nothing but weights), else 1.
    2. tp is the largest number that divides every head count and the devices left by
       dp. Without heads nothing limits it. With ``tokens`` it is 1.
    3. sp takes what is left, so that no device stays unused.

    Args:
        device_count: of all devices.
        heads: attention heads by component.
        batch: rows of the denoiser's batch.
        tokens: the model splits its tokens as well as it would split its heads, and
            sums nothing over the network then.

    Returns a mesh of all the devices that passes :meth:`MeshSpec.validate` with
    the same heads and batch.

    Raises:
        MeshError: there is no device.
    """
    if device_count < 1:
        raise MeshError(f"a mesh needs devices, there are {device_count}")
    dp = 2 if batch and batch % 2 == 0 and device_count % 2 == 0 else 1
    left = device_count // dp
    # gcd() of nothing is 0, which every number divides: no heads, no limit.
    common = math.gcd(*(heads or {}).values())
    legal = sorted(n for n in _divisors(left) if common % n == 0)
    tp = 1 if tokens else legal[-1]
    return MeshSpec(dp=dp, sp=left // tp, tp=tp)


def _integer(value: Any, axis: str, asked: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value):
        return int(value)
    raise MeshError(
        f"mesh {asked!r}: axis {axis!r} is {value!r}, not an integer; {_EXAMPLE}"
    )


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(str(n) for n in numbers)
