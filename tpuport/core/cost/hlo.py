"""The text of a compiled program as values: computations, instructions, trip counts.

XLA prints a program as named computations, each a list of instructions in the order in
which they run (``is_scheduled=true``). Only what an account of time and traffic needs
is kept. Format: XLA's ``hlo_instruction.cc``,
``HloInstruction::PrintWithCanonicalNameMap``.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tpuport.errors import TpuportError

_BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_START = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"\}(, execution_thread=.*)?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|true_computation|false_computation)="
    r"%?([\w.\-]+)"
)
_BRANCHES = re.compile(r"\bbranch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')


class HloError(TpuportError):
    """A compiled program could not be read."""


@dataclass(frozen=True, slots=True)
class Array:
    """A dtype and a shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """Without the padding of the layout."""
        return math.ceil(math.prod(self.shape) * _bits(self.dtype) / 8)


@dataclass(slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
        name: unique in the program.
        opcode: such as ``"fusion"``.
        shape: the text of the result's shape.
        operands: names of instructions of the same computation.
        attributes: the text after the operands.
        called: role -> names of the computations it runs.
        literal: the value of a constant, as text.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    called: dict[str, tuple[str, ...]] = field(default_factory=dict)
    literal: str = ""

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The arrays of the result, of a tuple all of them."""
        return tuple(arrays_of(self.shape))

    @property
    def bytes(self) -> int:
        """Of the result."""
        return sum(array.bytes for array in self.arrays)

    @property
    def config(self) -> dict[str, Any]:
        """The JSON of ``backend_config``; empty where there is none."""
        at = self.attributes.find("backend_config={")
        if at < 0:
            return {}
        try:
            found, _ = json.JSONDecoder(strict=False).raw_decode(
                self.attributes, at + len("backend_config=")
            )
        except ValueError:
            return {}
        return dict(found)

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate, where it makes one."""
        window = self.config.get("window_config") or {}
        cycles = window.get("estimated_cycles")
        return None if cycles is None else int(cycles)

    @property
    def trip_count(self) -> int | None:
        """How often a ``while`` runs its body, where the compiler knows."""
        found = _TRIPS.search(self.attributes)
        return int(found[1]) if found else None

    @property
    def op_name(self) -> str:
        """Where in the traced program it is from."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def target(self) -> str:
        """Of a custom call; empty for others."""
        found = _TARGET.search(self.attributes)
        return found[1] if found else ""


@dataclass(slots=True)
class Computation:
    """Instructions in the order in which they run."""

    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def by_name(self) -> dict[str, Instruction]:
        """Each instruction under its name."""
        return {i.name: i for i in self.instructions}


@dataclass(slots=True)
class Program:
    """A compiled program."""

    name: str
    entry: str
    computations: dict[str, Computation]

    def inner(self, instruction: Instruction) -> Iterator[Instruction]:
        """All instructions of what a fusion calls, nested ones included."""
        for names in instruction.called.values():
            for name in names:
                for found in self.computations[name].instructions:
                    yield found
                    yield from self.inner(found)


def arrays_of(shape: str) -> Iterator[Array]:
    """The arrays that the text of a shape names."""
    for dtype, sizes in _ARRAY.findall(shape):
        dims = [s.lstrip("<=") for s in sizes.split(",") if s]
        yield Array(dtype, tuple(int(s) for s in dims))


def _bits(dtype: str) -> int:
    if dtype in _BITS:
        return _BITS[dtype]
    found = re.match(r"[a-z]+(\d+)", dtype)
    if found is None:
        raise HloError(f"unknown dtype {dtype!r} in a compiled program")
    return int(found[1])


def parse(text: str) -> Program:
    """Read ``compiled.as_text()``.

    Raises:
        HloError: it is not the text of a program.
    """
    computations: dict[str, Computation] = {}
    entry = ""
    current: Computation | None = None
    for line in _logical_lines(text):
        if current is None or not line[:1].isspace():
            if line.startswith("}"):
                current = None
            elif line.rstrip().endswith("{") and "(" in line:
                name = line.removeprefix("ENTRY ").lstrip("%").split(" ", 1)[0]
                current = computations[name] = Computation(name)
                if line.startswith("ENTRY "):
                    entry = name
            continue
        instruction = _instruction(line)
        if instruction is not None:
            current.instructions.append(instruction)
    if not entry:
        raise HloError("no ENTRY computation; is this the text of a compiled program?")
    head = text.split(None, 2)
    return Program(head[1].rstrip(",") if len(head) > 1 else "", entry, computations)


def _logical_lines(text: str) -> Iterator[str]:
    """Lines, with attributes that are printed over several joined to the first."""
    held: list[str] = []
    for line in text.splitlines():
        starts = _START.match(line) is not None
        # A computation ends with "}", maybe followed by the name of its thread.
        if held and not starts and not _END.fullmatch(line.rstrip()):
            held.append(line)
            continue
        if held:
            yield " ".join(held)
            held = []
        if starts:
            held = [line]
        else:
            yield line
    if held:
        yield " ".join(held)


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    at = start.end()
    end = _shape_end(line, at)
    opened = line.index("(", end)
    opcode = line[end:opened].strip()
    closed = _closing(line, opened)
    attributes = line[closed + 1 :]
    # What a string or a JSON value holds names no computation.
    plain = attributes.split("backend_config=", 1)[0]
    called: dict[str, tuple[str, ...]] = {}
    for role, name in _CALLED.findall(plain):
        called[role] = (*called.get(role, ()), name)
    branches = _BRANCHES.search(plain)
    if branches:
        called["branch"] = tuple(
            n.strip().lstrip("%") for n in branches[1].split(",") if n.strip()
        )
    return Instruction(
        name=start[2],
        opcode=opcode,
        shape=line[at:end],
        operands=tuple(_NAME.findall(line[opened : closed + 1])),
        attributes=attributes,
        called=called,
        literal=line[opened + 1 : closed] if opcode == "constant" else "",
    )


def _shape_end(line: str, at: int) -> int:
    """Where the shape that starts at ``at`` ends: at a space outside of brackets."""
    depth = 0
    for index in range(at, len(line)):
        char = line[index]
        if char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
        elif char == " " and depth == 0:
            return index
    raise HloError(f"a line without an opcode: {line[:120]!r}")


def _closing(line: str, opened: int) -> int:
    depth = 0
    for index in range(opened, len(line)):
        if line[index] == "(":
            depth += 1
        elif line[index] == ")":
            depth -= 1
            if depth == 0:
                return index
    raise HloError(f"a line without an end: {line[:120]!r}")


_LAID_OUT = re.compile(r"([a-z][a-z0-9]*)\[([0-9,]*)\](\{[^}]*\})?")
_TILE = re.compile(r"T\((\d+),(\d+)\)")


def convolution_flops(
    instruction: Instruction, siblings: Mapping[str, Instruction]
) -> float:
    """Multiplications and additions of a ``dot`` or ``convolution``.

    A ``dot`` multiplies its contracted dims; a convolution each output by all of the
    kernel but its output features.
    """
    operands = [siblings[n] for n in instruction.operands if n in siblings]
    if len(operands) < 2 or not instruction.arrays:
        return 0.0
    out = math.prod(instruction.arrays[0].shape)
    left, right = operands[0].arrays[0].shape, operands[1].arrays[0].shape
    if instruction.opcode == "dot":
        found = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        dims = [int(d) for d in found[1].split(",") if d] if found else []
        return 2.0 * out * math.prod(left[d] for d in dims)
    labels = re.search(r"dim_labels=\w+_(\w+)->(\w+)", instruction.attributes)
    if labels is None:
        return 0.0
    features = right[labels[1].index("o")]
    # A batched product is written as a convolution over a window that is mostly
    # padding; its batch dim is not multiplied twice.
    window = re.search(r"window=\{([^}]*)\}", instruction.attributes)
    kernel = math.prod(right) / features
    if window and "lhs_dilate" in window[1]:
        sizes = re.search(r"size=([\dx]+)", window[1])
        if sizes:
            kernel /= math.prod(int(s) for s in sizes[1].split("x"))
    return 2.0 * out * kernel


def transfer_bytes(instruction: Instruction, size: float) -> float:
    """Of a copy between memories: its smaller array, once."""
    arrays = [a.bytes for a in instruction.arrays if len(a.shape)]
    return float(min(arrays)) if arrays else size


def hbm_bytes(shape: str) -> float:
    """Of arrays that lie in HBM, with the padding of their tiles.

    ``S(n)`` in a layout names another memory.
    """
    total = 0.0
    for dtype, sizes, layout in _LAID_OUT.findall(shape):
        if "S(" in layout or not sizes:  # scalars are in the core's own memory
            continue
        dims = [int(s) for s in sizes.split(",") if s]
        order = [int(d) for d in re.findall(r"\d+", layout.split(":")[0])]
        tile = _TILE.search(layout)
        if tile and len(order) >= 2:
            for dim, part in ((order[0], int(tile[2])), (order[1], int(tile[1]))):
                dims[dim] = math.ceil(dims[dim] / part) * part
        bits = 8 if dtype == "pred" else int((re.findall(r"\d+", dtype) or ["0"])[0])
        total += math.prod(dims) * bits / 8
    return total
