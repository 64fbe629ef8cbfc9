"""The text of a TPU core's VLIW program: its bundles, loops, branches and scalars.

Only what decides the path is understood: loops by the branch back to their head,
forward branches by what they skip, and the scalar arithmetic behind their conditions.
Scalars are in SSA form, so a condition is worked out by following its definitions. They
lead to constants, to the grid's indices (marked in a comment by the compiler), or to a
value that only the data decides, which stays a symbol.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from tpuport.core.cost.expressions import (
    ARITHMETIC,
    Known,
    Value,
    compare,
    join,
    negate,
    select,
    unknown,
    wrap,
)

_LINE = re.compile(
    r"^\s*(?:0x)?(?P<at>[0-9a-f]+)\s+(?:[A-Z]{2}\s?)*\s*:\s*>*\s*\{(?P<rest>.*)$"
)
_COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel\s*(?:\((!?)%(\w+)\))?\s*target = \$region(\d+)")
_DEFINES = re.compile(r"^%(\w+) = ([\w.]+)\s*(.*)$", re.DOTALL)
_STORES = re.compile(r"^%\w+ = sst \[smem:\[#allocation(\w+)\]\] %(\w+)$")
_LOADS = re.compile(r"^\[smem:\[#allocation(\w+)\]\]$")
_PLACE = re.compile(r"^\[smem:\[#allocation(\w+)(?: \+ [^\]]+)?\]\]$")
_INPUT = re.compile(r"%(\w+) = inlined_call_operand\..*?index: (\d+), kind: input")
_COPIES = re.compile(
    r"^\s*%\d+ = dma\.\w+_to_smem (?:\[[^\]]*\] )?(?:/\*\w+=\*/)?%(\w+), .*?"
    r"/\*smem=\*/(?:%(\w+)|\[#allocation(\w+)\])"
)
_USES = re.compile(r"%(\w+)")
_ALLOCATION = re.compile(r"^\[#allocation(\w+)\]$")
_PREDICATED = re.compile(r"^\((!?)%(\w+)(?:, (%?-?[\w]+))?\)(?:, )?(.*)$", re.DOTALL)
_INDEX = re.compile(r"iteration index, stage = (\d+)(?: iter bound = (\d+))?")
_GRID = re.compile(r"iteration_bounds: \(([\d, ]+)\)")


@dataclass(frozen=True, slots=True)
class Branch:
    """A jump to bundle ``target``, if ``predicate`` (or, negated, its opposite) holds.

    ``predicate`` is None where it always jumps.
    """

    at: int
    target: int
    predicate: str | None
    negated: bool


@dataclass(frozen=True, slots=True)
class Loop:
    """Bundles [head, end), left when the branch back at ``back`` is not taken."""

    head: int
    back: Branch
    end: int


@dataclass(frozen=True, slots=True)
class _Definition:
    operation: str
    operands: tuple[str, ...]
    predicate: tuple[bool, str, str | None]
    at: int


@dataclass(frozen=True, kw_only=True)
class Program:
    """A parsed program; see the module's text.

    Attributes:
        bundles: how many; their addresses count from 0.
        branches: by address.
        loops: inner ones after the ones around them.
        indices: variable -> (pipeline stage, grid axis); the axis is None for the
            count of all steps.
        grid: iterations of the grid of one core, if the program names them.
        delay_slots: bundles after a branch that always run.
        inputs: variable -> which operand of the kernel it is.
        scalars: place in scalar memory -> operand that is copied there. What such an
            operand holds is told by ``env`` under :func:`operand`.
    """

    bundles: int
    branches: dict[int, Branch]
    loops: list[Loop]
    indices: dict[str, tuple[int, int | None]]
    grid: tuple[int, ...] | None
    delay_slots: int
    inputs: dict[str, int]
    scalars: dict[str, int]
    _definitions: dict[str, _Definition] = field(repr=False)
    _spilled: dict[str, str | None] = field(repr=False)
    _carried: dict[int, list[str]] = field(init=False, repr=False, default_factory=dict)

    def __post_init__(self) -> None:
        for name, definition in self._definitions.items():
            if definition.operation == "sphi":
                self._carried.setdefault(definition.at, []).append(name)

    @property
    def grid_loop(self) -> Loop | None:
        """The loop over the grid, or None where there is one step only."""
        places = [self._definitions[name].at for name in self.indices]
        for loop in self.loops:
            if any(loop.head <= at < loop.end for at in places):
                return loop
        return None

    def loop_at(self, at: int, low: int, high: int) -> Loop | None:
        """The outermost loop with its head at ``at`` that is inside [low, high)."""
        for loop in self.loops:
            if loop.head == at and loop.end <= high and (at, loop.end) != (low, high):
                return loop
        return None

    def condition(self, branch: Branch, env: Known) -> bool | frozenset[str]:
        """Whether a branch jumps, or the comparisons that decide it."""
        if branch.predicate is None:
            return True
        value = self.evaluate(branch.predicate, env)
        value = negate(value) if branch.negated else value
        return value if isinstance(value, bool) else unknown(value)

    def trip_count(self, loop: Loop, env: Known) -> int | None:
        """How often a loop runs once it is entered, or None where it cannot be told."""
        for name, (first, by) in self.counters(loop, env).items():
            if not self.depends(loop.back, {name}):
                continue
            for turn in range(1_000_000):
                back = self.condition(loop.back, {**env, name: first + turn * by})
                if not isinstance(back, bool):
                    break
                if not back:
                    return turn + 1
        return None

    def counters(self, loop: Loop, env: Known) -> dict[str, tuple[int, int]]:
        """Variables that count a loop's turns -> (first value, increment)."""
        found: dict[str, tuple[int, int]] = {}
        for name in self._carried.get(loop.head, ()):
            definition = self._definitions[name]
            first = self._operand(definition.operands[0], env)
            if not isinstance(first, int) or isinstance(first, bool):
                continue
            following = self._operand(definition.operands[1], {**env, name: first})
            if isinstance(following, int) and following != first:
                found[name] = (first, following - first)
        return found

    def depends(self, branch: Branch, names: Iterable[str]) -> bool:
        """Whether a branch's condition uses one of these variables."""
        return self._reaches(branch.predicate, set(names))

    def evaluate(self, name: str, env: Known) -> Value:
        """The value of a variable where the grid's indices have the values ``env``."""
        if name in env:
            return env[name]
        if name in self.inputs:
            return env.get(operand(self.inputs[name]), name)
        definition = self._definitions.get(name)
        if definition is None or definition.operation == "sphi":
            return name
        value = self._compute(name, definition, env)
        negated, predicate, otherwise = definition.predicate
        if otherwise is None:
            return value
        holds = self.evaluate(predicate, env)
        return select(holds, negated, value, self._operand(otherwise, env))

    def _compute(self, name: str, definition: _Definition, env: Known) -> Value:
        operation = definition.operation
        if operation == "sld":
            place = definition.operands[0]
            held, loaded = _PLACE.match(place), f"load({place})"
            if held and held[1] in self.scalars:
                return env.get(operand(self.scalars[held[1]]), loaded)
            spilled = self._stored(place)
            return (
                env.get(loaded, loaded)
                if spilled is None
                else self.evaluate(spilled, env)
            )
        values = [self._operand(o, env) for o in definition.operands]
        if operation == "smov" and values:
            return values[0]
        if operation == "pneg":
            return negate(values[0])
        if operation in ("por", "pnor", "pand", "pnand"):
            joined = join(operation.removeprefix("p").removeprefix("n"), values)
            return negate(joined) if operation.startswith("pn") else joined
        if operation == "scalar_select" and len(values) == 3:
            return select(values[0], False, values[1], values[2])
        if operation.startswith("scmp.") and len(values) == 2:
            if sum(isinstance(value, int) for value in values) == 1:
                # An index against something unknown is one test in all steps, whatever
                # the index is: it keeps its name.
                values = [
                    text[1:] if isinstance(value, int) and text[0] == "%" else value
                    for text, value in zip(definition.operands, values, strict=True)
                ]
            return compare(operation.split(".")[1], values[0], values[1], env)
        numbers = [v for v in values if isinstance(v, int)]
        if operation in ARITHMETIC and len(numbers) == len(values) == 2:
            return wrap(ARITHMETIC[operation](*numbers))
        # Named, not spelt out: the same test is then the same symbol in every step.
        return name

    def _stored(self, place: str) -> str | None:
        """The variable that a load from a place gets, where one was stored there."""
        found = _LOADS.match(place)
        return self._spilled.get(found[1]) if found else None

    def _operand(self, text: str, env: Known) -> Value:
        if text.startswith("%"):
            return self.evaluate(text[1:], env)
        try:
            return wrap(int(text, 0))
        except ValueError:
            return text

    def _reaches(self, name: str | None, targets: set[str]) -> bool:
        """Whether a variable is computed from one of ``targets``."""
        seen: set[str | None] = set()
        open_names = [name]
        while open_names:
            at = open_names.pop()
            if at in targets:
                return True
            definition = None if at in seen else self._definitions.get(at or "")
            seen.add(at)
            if definition is None or definition.operation == "sphi":
                continue
            _, predicate, otherwise = definition.predicate
            for text in (f"%{predicate}", *definition.operands, otherwise or ""):
                used = text[1:] if text.startswith("%") else self._stored(text)
                open_names.append(used)
        return False


def operand(number: int) -> str:
    """The name under which the value of a kernel's scalar operand is told."""
    return f"operand {number}"


def parse_program(text: str, *, delay_slots: int) -> Program:
    """The program in the text of a ``final_bundles`` file.

    Raises:
        ValueError: a line or a branch is not in the form that is known.
    """
    bundles = 0
    definitions: dict[str, _Definition] = {}
    spilled: dict[str, str | None] = {}
    indices: dict[str, tuple[int, int | None]] = {}
    regions: dict[int, int] = {}
    jumps: list[tuple[int, bool, str | None, int]] = []
    inputs: dict[str, int] = {}
    copies: list[tuple[str, str]] = []
    leaves: int | None = None
    grid = _GRID.search(text)
    for at, body in _bundle_texts(text):
        if at != bundles:
            raise ValueError(f"bundle {at:#x} follows {bundles - 1:#x}")
        bundles += 1
        for region in _STARTS.findall(body):
            regions.setdefault(int(region), at)
        if "/* exit bundle:" in body:
            leaves = at
        for raw in body.split(";;"):
            if "sbr." in raw:
                found = _BRANCH.search(raw)
                if found is None:
                    raise ValueError(f"unknown branch in bundle {at:#x}: {raw.strip()}")
                jumps.append((at, bool(found[1]), found[2], int(found[3])))
                continue
            if given := _INPUT.search(raw):
                inputs[given[1]] = int(given[2])
                continue
            if copied := _COPIES.match(raw):
                copies.append((copied[1], copied[2] or f"[#allocation{copied[3]}]"))
                continue
            index = _INDEX.search(raw)
            plain = _COMMENT.sub("", raw).strip().rstrip("}").strip()
            if stored := _STORES.match(plain):
                # Written twice: which one a load sees is not followed.
                known = stored[1] in spilled
                spilled[stored[1]] = None if known else stored[2]
                continue
            if not (defined := _DEFINES.match(plain)):
                continue
            name = defined[1]
            if name[0] not in "sp":
                continue
            definitions[name] = _definition(defined[2], defined[3], at)
            if index and defined[2] == "sphi":
                axis = int(index[2]) if index[2] is not None else None
                indices[name] = (int(index[1]), axis)
    if bundles == 0:
        raise ValueError("it has no bundles")
    # A jump to the end names a region that is marked nowhere.
    for _, _, _, region in jumps:
        if leaves is not None:
            regions.setdefault(region, leaves)
    branches, loops = _structure(jumps, regions, delay_slots, bundles)
    return Program(
        bundles=bundles,
        branches=branches,
        loops=loops,
        indices=indices,
        grid=tuple(int(n) for n in grid[1].split(",") if n.strip()) if grid else None,
        delay_slots=delay_slots,
        inputs=inputs,
        scalars=_scalars(copies, spilled, inputs, definitions),
        _definitions=definitions,
        _spilled=spilled,
    )


def _bundle_texts(text: str) -> Iterator[tuple[int, str]]:
    """(address, text) of each bundle; a bundle may be on several lines."""
    at: int | None = None
    lines: list[str] = []
    for line in text.splitlines():
        if found := _LINE.match(line):
            if at is not None:
                yield at, "\n".join(lines)
            at = int(found["at"], 16)
            lines = [found["rest"]]
        elif at is not None:
            lines.append(line)
    if at is not None:
        yield at, "\n".join(lines)


def _definition(operation: str, rest: str, at: int) -> _Definition:
    predicate: tuple[bool, str, str | None] = (False, "", None)
    if found := _PREDICATED.match(rest):
        predicate = (bool(found[1]), found[2], found[3])
        rest = found[4]
    # A load has its predicate last.
    rest = re.sub(r"\s*\(!?%\w+\)$", "", rest)
    operands = tuple(part.strip() for part in rest.split(",") if part.strip())
    return _Definition(operation, operands, predicate, at)


def _scalars(
    copies: list[tuple[str, str]],
    stored: Mapping[str, str | None],
    inputs: Mapping[str, int],
    definitions: Mapping[str, _Definition],
) -> dict[str, int]:
    """Allocation -> operand, for what is copied or stored to scalar memory whole."""
    found = {at: inputs[name] for at, name in stored.items() if name and name in inputs}
    for source, target in copies:
        name: str | None = source
        while name is not None and name not in inputs:
            definition = definitions.get(name)
            used = _USES.search(" ".join(definition.operands)) if definition else None
            name = used[1] if used else None
        if not target.startswith("["):
            definition = definitions.get(target)
            target = definition.operands[0] if definition else ""
        place = _ALLOCATION.match(target)
        if name is not None and place:
            found[place[1]] = inputs[name]
    return found


def _structure(
    jumps: list[tuple[int, bool, str | None, int]],
    regions: Mapping[int, int],
    delay_slots: int,
    count: int,
) -> tuple[dict[int, Branch], list[Loop]]:
    branches: dict[int, Branch] = {}
    loops: list[Loop] = []
    for at, negated, predicate, region in jumps:
        if region not in regions:
            raise ValueError(f"branch at {at:#x} to region {region}, which is nowhere")
        branch = Branch(at, regions[region], predicate, negated)
        branches[at] = branch
        if branch.target <= at:
            end = min(at + 1 + delay_slots, count)
            loops.append(Loop(branch.target, branch, end))
    loops.sort(key=lambda loop: (loop.head, -loop.end))
    return branches, loops
