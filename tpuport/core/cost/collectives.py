"""Collectives of a compiled program: kind, devices, bytes, mesh axes crossed.

Devices are places in the mesh: a compiled program numbers them in the order of its
device assignment, which is that of ``mesh.devices``.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tpuport.core.cost.hlo import HloError, Instruction
from tpuport.core.cost.network import HOP_SECONDS, Link, Network

KINDS = (
    "all-reduce",
    "all-gather",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
    "collective-broadcast",
    "ragged-all-to-all",
)

_LISTED = re.compile(r"\breplica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"\breplica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"\breplica_groups=(?:@\w+)?mesh\[([^\]]*)\]"
    r"(?:, device_ids=\((.*?)\)(?= \{))? ?\{([^}]*)\}"
)
_PAIRS = re.compile(r"\bsource_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective instruction.

    Attributes:
        kind: one of :data:`KINDS`.
        axis: the mesh axes it crosses, joined by ``+``; empty where it crosses none.
        bytes: of its array on one device: the result, of a reduce-scatter the operand.
        seconds: how long it takes when nothing else uses its links.
        loads: bytes on each link.
    """

    kind: str
    axis: str
    bytes: int
    seconds: float
    loads: Mapping[Link, float]


def collective_kind(opcode: str) -> str | None:
    """The kind of an opcode, ``-start`` forms included; ``None`` for other opcodes."""
    base = opcode.removesuffix("-start")
    return base if base in KINDS else None


def read_collective(
    instruction: Instruction,
    operands: Sequence[Instruction],
    mesh: Mapping[str, int],
    network: Network,
) -> Collective:
    """What a collective does, on the links of a network.

    Args:
        instruction: its opcode is a collective's, or its ``-start``.
        operands: the instructions it reads.
        mesh: axis name -> size, in order.
        network: of the same mesh.

    Raises:
        HloError: its groups are written in a way that is not known.
    """
    kind = collective_kind(instruction.opcode)
    assert kind is not None
    given = sum(operand.bytes for operand in operands)
    if kind == "collective-permute":
        pairs = read_pairs(instruction.attributes)
        loads = network.permute(pairs, given)
        seconds = network.seconds(loads) + HOP_SECONDS * network.hops(pairs)
        return Collective(kind, _axes(pairs, mesh), given, seconds, loads)
    groups = read_groups(instruction.attributes, math.prod(mesh.values()))
    size = len(groups[0])
    axis = _axes([p for g in groups for p in itertools.pairwise(g)], mesh)
    payload = given * size if kind == "all-gather" else given
    moved = {
        "all-gather": given * (size - 1),
        "reduce-scatter": given * (size - 1) // size,
        "all-reduce": 2 * given * (size - 1) // size,
    }.get(kind, given)
    if kind in ("all-to-all", "ragged-all-to-all"):
        loads = network.all_to_all(groups, given)
        steps = network.hops(itertools.permutations(groups[0], 2))
    else:
        loads = network.ring(groups, moved)
        steps = (size // 2) * (2 if kind == "all-reduce" else 1)
    seconds = network.seconds(loads) + HOP_SECONDS * steps if size > 1 else 0.0
    return Collective(kind, axis, payload, seconds, loads)


def read_pairs(attributes: str) -> tuple[tuple[int, int], ...]:
    """The pairs of a permute.

    Raises:
        HloError: there are none.
    """
    found = _PAIRS.search(attributes)
    if found is None:
        raise HloError(f"no source_target_pairs in {attributes[:200]!r}")
    pairs = re.findall(r"(\d+),(\d+)", found[1])
    return tuple((int(source), int(target)) for source, target in pairs)


def read_groups(attributes: str, devices: int) -> tuple[tuple[int, ...], ...]:
    """The groups of a collective, in any of the three ways XLA writes them.

    Raises:
        HloError: in none of them.
    """
    if found := _LISTED.search(attributes):
        groups = [_numbers(g) for g in re.findall(r"\{([\d,]*)\}", found[1])]
        return tuple(g for g in groups if g) or (tuple(range(devices)),)
    if found := _IOTA.search(attributes):
        rows = _iota(found[2], found[3]).reshape(_numbers(found[1]))
        return tuple(tuple(map(int, row)) for row in rows)
    if found := _MESH.search(attributes):
        return _mesh_groups(found[1], found[2], found[3])
    raise HloError(f"no replica_groups in {attributes[:200]!r}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(dims: str, order: str | None) -> np.ndarray:
    """All numbers from 0 on in an array of these dims, in another order of them."""
    grid = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return grid.transpose(_numbers(order)) if order else grid


def _mesh_groups(
    axes: str, order: str | None, across: str
) -> tuple[tuple[int, ...], ...]:
    """``mesh['a'=2,'b'=4] {'b'}``, also of a part of an axis: ``'b':(1)2``."""

    named = {n: int(s) for n, s in re.findall(r"'([^']+)'=(\d+)", axes)}
    ids = np.arange(math.prod(named.values()))
    if order:
        shaped = re.search(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", order)
        if shaped is None:
            raise HloError(f"device ids {order!r} of a collective are not understood")
        ids = _iota(shaped[1], shaped[2])
    dims: list[int] = []
    chosen: list[int] = []
    wanted = {
        n: (int(before or 1), int(size) if size else None)
        for n, before, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", across)
    }
    for name, size in named.items():
        if name not in wanted:
            dims.append(size)
            continue
        before, part = wanted[name]
        part = part or size
        dims += [before, part, size // (before * part)]
        chosen.append(len(dims) - 2)
    grid = ids.reshape(dims)
    kept = [d for d in range(len(dims)) if d not in chosen]
    count = math.prod(dims[d] for d in chosen)
    rows = grid.transpose([*kept, *chosen]).reshape(-1, count)
    return tuple(tuple(map(int, row)) for row in rows)


def _axes(pairs: Sequence[tuple[int, int]], mesh: Mapping[str, int]) -> str:
    """The axes along which some pair differs."""
    sizes = list(mesh.items())
    crossed: Counter[str] = Counter()
    for a, b in pairs:
        for name, size in reversed(sizes):
            crossed[name] += a % size != b % size
            a, b = a // size, b // size
    return "+".join(name for name, _ in sizes if crossed[name])
