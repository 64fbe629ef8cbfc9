"""Whether a program has something to split over each axis of a mesh."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from tpuport.core.mesh.mesh_spec import divisors
from tpuport.errors import MeshError

#: What attention splits over an axis, and the dim of the queries.
_SPLITS = {"dp": ("rows", 0), "tp": ("heads", 1), "sp": ("tokens", 2)}
#: The rows of guidance: upstream runs them as one batch, or one after the other.
_PAIR = 2


def check_used(
    name: str,
    mesh: Mapping[str, int],
    attention: Iterable[tuple[tuple[int, ...], tuple[Any, ...]]],
    weights: Iterable[Any] = (),
) -> None:
    """Refuse an axis of ``mesh`` over which a program splits nothing.

    Two devices along dp are never refused: they are for guidance, and some pipelines
    run its two rows one after the other.

    Args:
        name: of the program, for the message.
        attention: shape [B, H, L, D] of each call's queries, and its split.
        weights: the split of each weight.

    Raises:
        MeshError: which axis, what it could split, and which mesh does.
    """
    calls = list(attention)
    used = {axis for _, split in calls for axis in split}
    used |= {axis for split in weights for part in split for axis in _each(part)}
    for axis, size in mesh.items():
        if size == 1 or axis in used or (axis == "dp" and size <= _PAIR) or not calls:
            continue
        what, dim = _SPLITS[axis]
        counts = sorted({shape[dim] for shape, _ in calls})
        raise MeshError(
            f"mesh {axis}={size}: {name} has no {what} that {size} devices can split "
            f"(its attention has {', '.join(map(str, counts))}); sp splits tokens "
            f"among any number of devices: use sp={size * mesh.get('sp', 1)}"
        )


def undivided(
    name: str,
    mesh: Mapping[str, int],
    split: Mapping[tuple[str, ...], set[int]],
    heads: int | None = None,
) -> MeshError:
    """The error for axes that do not divide the dims of weights which they split.

    Args:
        name: of the component.
        split: axes -> sizes of all dims that the axes split together.
        heads: of the component's attention, where the config says so.
    """
    for axes, dims in split.items():
        size = math.prod(mesh[axis] for axis in axes)
        if any(dim % size for dim in dims):
            break
    asked, text = ",".join(f"{axis}={mesh[axis]}" for axis in axes), []
    counted = [heads] if heads and axes == ("tp",) else []
    if any(count % size for count in counted):
        text.append(f"the {heads} heads")
    sides = sorted(dim for dim in dims if dim % size)
    text.append(f"sides {' and '.join(map(str, sides[:2]))} long of the weights")
    which = "neither " + " nor ".join(text) if len(text) > 1 else "no " + text[0]
    fit = [n for n in divisors(math.gcd(*dims, *counted)) if n > 1][:8]
    would = "; ".join(
        (
            *([f"{axes[0]}={' or '.join(map(str, fit))} would"] if fit else []),
            "sp splits tokens among any number of devices: use sp="
            f"{size * mesh.get('sp', 1)}",
        )
    )
    return MeshError(f"mesh {asked}: {size} divides {which} of {name}; {would}")


def _each(part: Any) -> tuple[Any, ...]:
    return part if isinstance(part, tuple) else (part,)
