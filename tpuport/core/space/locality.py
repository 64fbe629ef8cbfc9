"""Follows rows and columns through a program that runs on each device's part.

Every array has dims of known kind (:mod:`tpuport.core.space.factors`). An operation
that is not local in the picture makes an array that is refused if it reaches a result.
Code that exchanges what it needs marks what it makes
(:mod:`tpuport.core.mesh.picture_marks`), whatever the operations within.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jax._src import source_info_util
from jax.extend import core

from tpuport.core.mesh.picture_marks import NAME, Mark
from tpuport.core.mesh.spatial_split import Side, Space
from tpuport.core.space.factors import (
    Dims,
    Factor,
    MixedError,
    has_split,
    is_same,
    joined,
    whole,
    whole_of,
)
from tpuport.core.space.operations import RULES, Operation

#: Passes over the body of a loop until what it carries no longer changes.
_PASSES = 5


@dataclass(frozen=True, slots=True)
class Mixed:
    """An array that depends on how the picture is split.

    Attributes:
        why: the operation, and the line of upstream's code.
    """

    why: str


Known = Dims | Mixed


@dataclass(frozen=True, kw_only=True)
class Locality:
    """Follows programs that have a device's part of the picture.

    Attributes:
        space: how it is split.
    """

    space: Space

    @property
    def sides(self) -> tuple[Side, ...]:
        """Those that are split."""
        both = (self.space.rows, self.space.columns)
        return tuple(side for side in both if side.parts > 1)

    def picture(self, shape: Sequence[int]) -> Dims:
        """The dims of an array whose last two are rows and columns."""
        return self._placed(shape, (len(shape) - 2, len(shape) - 1))

    def _placed(self, shape: Sequence[int], dims: tuple[int, int]) -> Dims:
        found = list(whole(shape))
        for side, dim in zip((self.space.rows, self.space.columns), dims, strict=True):
            if side.parts > 1:
                found[dim] = (Factor(shape[dim], side.axis),)
        return tuple(found)

    def results(
        self, jaxpr: core.Jaxpr, given: Sequence[Known], at: Any = None
    ) -> list[Known]:
        """What the results of a program are.

        Args:
            given: what its arguments are.
            at: the operation that is this program; its own are told as this one. A
                function of jax is traced once, for whoever calls it first.
        """
        known: dict[Any, Known] = dict(zip(jaxpr.invars, given, strict=True))
        for const in jaxpr.constvars:
            known[const] = whole(const.aval.shape)

        def of(var: Any) -> Known:
            return (
                whole(var.aval.shape) if isinstance(var, core.Literal) else known[var]
            )

        for eqn in jaxpr.eqns:
            found = self._made(eqn, [of(var) for var in eqn.invars], at)
            known.update(zip(eqn.outvars, found, strict=True))
        return [of(var) for var in jaxpr.outvars]

    def _made(self, eqn: Any, given: list[Known], at: Any) -> Sequence[Known]:
        name, params = eqn.primitive.name, eqn.params
        shapes = [tuple(getattr(var.aval, "shape", ())) for var in eqn.outvars]
        try:
            if name == NAME:
                return [self._marked(params["mark"], shapes[0], given)]
            if name in _CALLS:
                inner = params[_CALLS[name]]
                return self.results(getattr(inner, "jaxpr", inner), given, at or eqn)
            if name == "scan":
                return self._scanned(params, given, at)
            if name == "while":
                return self._repeated(params, given, at)
            if name == "cond":
                return self._chosen(params, given, at)
            mixed = next((one for one in given if isinstance(one, Mixed)), None)
            if mixed is not None:
                return [mixed] * len(shapes)
            dims: list[Dims] = given  # type: ignore[assignment]
            if name in _EXCHANGES:
                raise MixedError(f"{name} between devices")
            if name == "optimization_barrier":
                return given
            if name in RULES:
                rule, sides = RULES[name], self.sides
                return [rule(Operation(dims, params, one, sides)) for one in shapes]
            if any(has_split(dim) for one in dims for dim in one):
                raise MixedError(name)
            return [*map(whole, shapes)]
        except MixedError as error:
            return [Mixed(f"{error}{_place_of(at or eqn)}")] * len(shapes)

    def _marked(self, mark: Mark, shape: tuple[int, ...], given: list[Known]) -> Known:
        _, *pictures = given
        sides = (self.space.rows, self.space.columns)
        for number, picture in enumerate(pictures):
            if isinstance(picture, Mixed):
                return picture
            for i, side in enumerate(sides):
                if side.parts == 1:
                    continue
                dim = picture[mark.given[i]]
                at = dim[0]
                if len(dim) > 1 or at.kind != side.axis:
                    if number and is_same(dim):
                        continue
                    raise MixedError(
                        f"{mark.name} of an array whose {mark.given[i]}. dim is not "
                        f"the picture's {side.axis}"
                    )
                if not number and mark.dims is not None:
                    _check_border(mark, i, side, at, shape[mark.dims[i]])
                elif at.border:
                    raise MixedError(f"{mark.name} of a picture with a border")
            others = [dim for n, dim in enumerate(picture) if n not in mark.given]
            if any(map(has_split, others)):
                raise MixedError(f"{mark.name} of a picture with its sides elsewhere")
        if mark.dims is None:
            return whole(shape)
        found = list(self._placed(shape, mark.dims))
        if mark.name == BORDER:
            for i, side in enumerate(sides):
                if side.parts > 1:
                    before: Any = pictures[0][mark.given[i]]  # type: ignore[index]
                    border = before[0].border + mark.added[i]
                    found[mark.dims[i]] = (
                        Factor(shape[mark.dims[i]], side.axis, border),
                    )
        return tuple(found)

    # Control flow.

    def _scanned(
        self, params: Mapping[str, Any], given: list[Known], at: Any
    ) -> list[Known]:
        consts, carries = params["num_consts"], params["num_carry"]
        fixed, carry = given[:consts], given[consts : consts + carries]
        steps = [_step(one) for one in given[consts + carries :]]
        carry, found = self._settled(params["jaxpr"], fixed, carry, steps, at)
        lead = whole((params["length"],))
        outs = [
            one if isinstance(one, Mixed) else (*lead, *one) for one in found[carries:]
        ]
        return [*carry, *outs]

    def _settled(
        self,
        body: core.ClosedJaxpr,
        fixed: list[Known],
        carry: list[Known],
        steps: list[Known],
        at: Any,
    ) -> tuple[list[Known], list[Known]]:
        """What a loop carries in all its turns, and the results of its last one."""
        for _ in range(_PASSES):
            found = self.results(body.jaxpr, [*fixed, *carry, *steps], at)
            carried = zip(carry, found[: len(carry)], strict=True)
            after = [_both(a, b) for a, b in carried]
            if after == carry:
                break
            carry = after
        return carry, found

    def _repeated(
        self, params: Mapping[str, Any], given: list[Known], at: Any
    ) -> list[Known]:
        asks, does = params["cond_nconsts"], params["body_nconsts"]
        asked, fixed, carry = given[:asks], given[asks:][:does], given[asks + does :]
        carry, _ = self._settled(params["body_jaxpr"], fixed, carry, [], at)
        (goes_on,) = self.results(params["cond_jaxpr"].jaxpr, [*asked, *carry], at)
        return [goes_on] * len(carry) if isinstance(goes_on, Mixed) else carry

    def _chosen(
        self, params: Mapping[str, Any], given: list[Known], at: Any
    ) -> list[Known]:
        which, *rest = given
        if isinstance(which, Mixed):
            return [which] * len(params["branches"][0].jaxpr.outvars)
        found = [self.results(branch.jaxpr, rest, at) for branch in params["branches"]]
        out = found[0]
        for other in found[1:]:
            out = [_both(a, b) for a, b in zip(out, other, strict=True)]
        return out


BORDER = "a border"
_CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}
_EXCHANGES = frozenset(
    ("ppermute", "psum", "pmin", "pmax", "all_gather", "all_to_all", "reduce_scatter")
)


def _check_border(mark: Mark, i: int, side: Side, at: Factor, made: int) -> None:
    """Whether a marked operation takes up the border of the picture that it is given.

    Args:
        i: 0 for rows, 1 for columns.
        at: of the picture given.
        made: elements of the result on a device.
    """
    if mark.name == BORDER:
        return
    border, own = at.border + mark.added[i], at.size - at.border
    reach, stride = mark.reach[i], mark.stride[i]
    if (reach, stride, border) != (1, 1, 0):
        if own % stride or made != own // stride:
            raise MixedError(
                f"{mark.name} with a stride of {stride} makes {made} of {own} "
                f"{side.axis} of a device"
            )
        if not 0 <= border - (reach - stride) < stride:
            raise MixedError(
                f"{mark.name} of {reach} {side.axis} with {border} around a device's"
            )
    elif made % own and own % made:
        raise MixedError(f"{mark.name} makes {made} of {own} {side.axis}")
    whole_of(side, made)


def _step(one: Known) -> Known:
    """What a step of a loop gets of an array."""
    if isinstance(one, Mixed):
        return one
    first, *rest = one
    return Mixed("a loop over rows or columns") if has_split(first) else tuple(rest)


def _both(one: Known, other: Known) -> Known:
    if isinstance(one, Mixed) or isinstance(other, Mixed):
        return one if isinstance(one, Mixed) else other
    try:
        return tuple(map(joined, one, other))
    except MixedError as error:
        return Mixed(f"a loop or a branch {error}")


def _place_of(eqn: Any) -> str:
    """The innermost line of upstream's code that made an operation."""
    own = ("jax", "torch", "torchax", "tpuport", "jaxlib", "jaxtyping")
    for frame in source_info_util.user_frames(eqn.source_info.traceback):
        path = frame.file_name.replace("\\", "/")
        if not any(f"/{part}/" in path for part in own):
            return f" at {'/'.join(path.split('/')[-2:])}:{frame.start_line}"
    return ""
