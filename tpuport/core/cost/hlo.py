"""The text of a compiled program as values: computations, instructions, trip counts.

XLA prints a program as named computations, each a list of instructions in the order in
which they run (``is_scheduled=true``). Only what an account of time and traffic needs
is kept. Format: XLA's ``hlo_instruction.cc``,
``HloInstruction::PrintWithCanonicalNameMap``.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tpuport.errors import TpuportError

_BITS = {"pred": 8, "token": 0, "opaque": 0, "tuple": 0}
_ARRAY = re.compile(r"([a-z][a-z0-9]*)\[([0-9,<=]*)\](\{[^}]*\})?")
_TILE = re.compile(r"T\((\d+),(\d+)\)")
_START = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_END = re.compile(r"\}(, execution_thread=.*)?")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|(?:true|false|branch)_computations?)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_OP_NAME = re.compile(r'\bop_name="((?:[^"\\]|\\.)*)"')
_TARGET = re.compile(r'\bcustom_call_target="([^"]*)"')


class HloError(TpuportError):
    """A compiled program could not be read."""


@dataclass(frozen=True, slots=True)
class Array:
    """A dtype and a shape, and how XLA lays them out."""

    dtype: str
    shape: tuple[int, ...]
    layout: str = field(default="", compare=False)

    @property
    def bytes(self) -> int:
        """Without the padding of the layout."""
        return math.ceil(math.prod(self.shape) * self._bits / 8)

    @property
    def hbm_bytes(self) -> float:
        """With the padding of tiles; 0 of what is in another memory (``S(n)``)."""
        # Scalars are in the core's own memory.
        if "S(" in self.layout or not self.shape:
            return 0.0
        dims = list(self.shape)
        order = [int(d) for d in re.findall(r"\d+", self.layout.split(":")[0])]
        tile = _TILE.search(self.layout)
        if tile and len(order) >= 2:
            for dim, part in ((order[0], int(tile[2])), (order[1], int(tile[1]))):
                dims[dim] = math.ceil(dims[dim] / part) * part
        return math.prod(dims) * self._bits / 8

    @property
    def _bits(self) -> int:
        if self.dtype in _BITS:
            return _BITS[self.dtype]
        found = re.match(r"[a-z]+(\d+)", self.dtype)
        if found is None:
            raise HloError(f"unknown dtype {self.dtype!r} in a compiled program")
        return int(found[1])


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
        return arrays_of(self.shape)

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def hbm_bytes(self) -> float:
        """Bytes of the result that lie in HBM, with the padding of tiles."""
        return sum(array.hbm_bytes for array in self.arrays)

    @property
    def from_host(self) -> bool:
        """Whether it starts a transfer from the host's memory (``S(5)``)."""
        places = ["S(5)" in a.layout for a in self.arrays if a.shape]
        if not self.opcode.endswith("-start") or len(places) < 2:
            return False
        # The result has the operand and the destination, of a copy the latter first.
        source, to = places[1::-1] if self.opcode == "copy-start" else places[:2]
        return source and not to

    @property
    def config(self) -> dict[str, Any]:
        """The JSON of ``backend_config``; empty where there is none."""
        _, _, text = self.attributes.partition("backend_config=")
        with contextlib.suppress(ValueError):  # as of an empty or another text
            return dict(json.JSONDecoder(strict=False).raw_decode(text)[0])
        return {}

    @property
    def estimated_cycles(self) -> int | None:
        """The compiler's own estimate, where it makes one."""
        window = self.config.get("window_config") or {}
        cycles = window.get("estimated_cycles")
        return None if cycles is None else int(cycles)

    @property
    def trip_count(self) -> int | None:
        """How often a ``while`` runs its body, where the compiler knows."""
        found = first(_TRIPS, self.attributes)
        return int(found) if found else None

    @property
    def op_name(self) -> str:
        """Where in the traced program it is from."""
        return first(_OP_NAME, self.attributes)

    @property
    def target(self) -> str:
        """The target of a custom call; empty for other instructions."""
        return first(_TARGET, self.attributes)


Computation = dict[str, Instruction]
"""Instructions by name, in the order in which they run."""


@dataclass(slots=True)
class Program:
    """A compiled program: its computations by name, and which one it begins with."""

    entry: str
    computations: dict[str, Computation]

    def inner(self, instruction: Instruction) -> list[Instruction]:
        """All instructions of what a fusion calls, nested ones included."""
        names = (name for names in instruction.called.values() for name in names)
        called = (found for name in names for found in self.computations[name].values())
        return [each for found in called for each in (found, *self.inner(found))]


def first(pattern: re.Pattern[str], text: str) -> str:
    """What a pattern's first group finds in a text; empty where it finds nothing."""
    found = pattern.search(text)
    return found[1] if found else ""


def arrays_of(shape: str) -> tuple[Array, ...]:
    return tuple(
        Array(dtype, tuple(int(s.lstrip("<=")) for s in sizes.split(",") if s), layout)
        for dtype, sizes, layout in _ARRAY.findall(shape)
    )


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
                current = computations[name] = {}
                if line.startswith("ENTRY "):
                    entry = name
        elif (instruction := _instruction(line)) is not None:
            current[instruction.name] = instruction
    if not entry:
        raise HloError("no ENTRY computation; is this the text of a compiled program?")
    return Program(entry, computations)


def _logical_lines(text: str) -> list[str]:
    """Lines, with attributes that are printed over several joined to the first."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = _START.match(line) is not None
        # A computation ends with "}", maybe followed by the name of its thread.
        if inside and not starts and not _END.fullmatch(line.rstrip()):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
            inside = starts
    return lines


def _instruction(line: str) -> Instruction | None:
    start = _START.match(line)
    if start is None:
        return None
    at = start.end()
    end = _outside(line, at, " ")
    opened = line.index("(", end)
    opcode = line[end:opened].strip()
    closed = _outside(line, opened, ")")
    attributes = line[closed + 1 :]
    # What a string or a JSON value holds names no computation.
    plain = attributes.split("backend_config=", 1)[0]
    called: dict[str, tuple[str, ...]] = {}
    for role, names in _CALLED.findall(plain):
        called[role] = (*called.get(role, ()), *re.findall(r"[\w.\-]+", names))
    return Instruction(
        name=start[2],
        opcode=opcode,
        shape=line[at:end],
        operands=tuple(_NAME.findall(line[opened : closed + 1])),
        attributes=attributes,
        called=called,
        literal=line[opened + 1 : closed] if opcode == "constant" else "",
    )


def _outside(line: str, at: int, wanted: str) -> int:
    """Where from ``at`` on a character stands that is in no brackets (or ends them)."""
    depth = 0
    for index in range(at, len(line)):
        char = line[index]
        depth += (char in "([{") - (char in ")]}")
        if char == wanted and depth == 0:
            return index
    raise HloError(f"a line of a program that does not end: {line[:120]!r}")


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
