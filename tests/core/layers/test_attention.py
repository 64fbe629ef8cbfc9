"""The override is torch's scaled_dot_product_attention, on one device and on a mesh."""

from __future__ import annotations

import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import torch.nn.functional as F

from tests.models.jaxprs import arrays_in
from tests.sweeps import sweep
from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_torch
from tpuport.core.layers.attention import scaled_dot_product_attention
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.context import AttentionRecord, OpContext
from tpuport.errors import AttentionError
from tpuport.kernels.attention.choice import AttentionChoice

TOLERANCE = TOLERANCES["attention torch float32"]
MESHES = [(2, 1, 4), (1, 1, 8), (2, 2, 2), (1, 8, 1), (8, 1, 1)]


def context(
    mesh: tuple[int, int, int] | None = None,
    *,
    implementation: str = "auto",
) -> OpContext:
    return OpContext(
        mesh=None if mesh is None else build_mesh(MeshSpec.parse(mesh)),
        platform="cpu",
        implementation=AttentionChoice.parse(implementation),
        records=[],
    )


def tensors(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def mask_of(shape: tuple[int, ...], kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    if kind == "bool":
        return torch.rand(shape, generator=generator) < 0.6
    mask = torch.randn(shape, generator=generator) * 2
    return mask.masked_fill(torch.rand(shape, generator=generator) < 0.2, -torch.inf)


def ours(*args: torch.Tensor, on: OpContext | None = None, **options: Any) -> Any:
    """The override on torch tensors, as one compiled program."""
    arrays = [jnp.asarray(x.numpy()) for x in args]
    mask = options.pop("attn_mask", None)
    if mask is not None:
        arrays.append(jnp.asarray(mask.numpy()))

    def call(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        return scaled_dot_product_attention(
            on or context(), q, k, v, attn_mask=mask, **options
        )

    return to_torch(jax.jit(call)(*arrays))


def assert_is_torch(*args: torch.Tensor, on: OpContext | None = None, **options: Any):
    expected = F.scaled_dot_product_attention(*args, **options)
    found = ours(*args, on=on, **options)
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


# --- shapes


SHAPES = {
    "two dims": [(7, 8), (9, 8), (9, 8)],
    "three dims": [(3, 7, 8), (3, 9, 8), (3, 9, 8)],
    "four dims": [(2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8)],
    "five dims": [(2, 2, 3, 7, 8), (2, 2, 3, 9, 8), (2, 2, 3, 9, 8)],
    "batch broadcast": [(2, 3, 7, 8), (1, 3, 9, 8), (2, 3, 9, 8)],
    "two batch dims broadcast": [(2, 1, 3, 7, 8), (1, 4, 3, 9, 8), (2, 4, 3, 9, 8)],
    "query without batch": [(3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 8)],
    "keys without heads": [(3, 7, 8), (9, 8), (9, 8)],
    "one key head": [(2, 4, 7, 8), (2, 1, 9, 8), (2, 1, 9, 8)],
    "one query head": [(2, 1, 7, 8), (2, 4, 9, 8), (2, 4, 9, 8)],
    "one value head": [(2, 4, 7, 8), (2, 4, 9, 8), (2, 1, 9, 8)],
    "many value heads only": [(2, 1, 7, 8), (2, 1, 9, 8), (2, 4, 9, 8)],
    "values of another size": [(2, 3, 7, 8), (2, 3, 9, 8), (2, 3, 9, 5)],
    "one query": [(2, 3, 1, 8), (2, 3, 9, 8), (2, 3, 9, 8)],
    "one key": [(2, 3, 7, 8), (2, 3, 1, 8), (2, 3, 1, 8)],
    "no key": [(2, 3, 7, 8), (2, 3, 0, 8), (2, 3, 0, 8)],
    "no batch": [(0, 3, 7, 8), (0, 3, 9, 8), (0, 3, 9, 8)],
}


def grouped(leading: tuple[int, ...], *heads: int) -> list[tuple[int, ...]]:
    lengths = (7, 9, 9)
    return [(*leading, n, length, 8) for n, length in zip(heads, lengths, strict=True)]


GROUPS = [(4, 2, 2), (4, 1, 1), (4, 4, 4), (8, 2, 4), (12, 2, 3)]
Call = tuple[list[tuple[int, ...]], dict[str, Any]]
CAUSAL = {"is_causal": True}
#: Shapes, and options; of a mask its shape.
CALLS: dict[str, Call] = {
    **{name: (shapes, {}) for name, shapes in SHAPES.items()},
    **{
        f"causal, {m} on {n}": (
            [(2, 3, m, 8), *[(2, 3, n, 8)] * 2],
            {"is_causal": True},
        )
        for m, n in ((7, 7), (5, 9), (9, 5), (1, 6))
    },
    **{
        f"groups {heads} of {leading}": (grouped(leading, *heads), {"enable_gqa": True})
        for leading in ((), (2,), (2, 3))
        for heads in GROUPS
    },
    **{
        f"a mask, {name}": (SHAPES[name], {"attn_mask": mask})
        for name, mask in (
            ("two dims", (7, 9)),
            ("three dims", (3, 1, 9)),
            ("five dims", (2, 3, 7, 9)),
            ("two batch dims broadcast", (1, 4, 1, 7, 9)),
        )
    },
}
#: Each number of heads once, and each of leading dims.
KEPT = ((), (2,), (2,), (2, 3), (2,))
SWEPT = {name for name in CALLS if name.startswith("groups")} - {
    f"groups {heads} of {leading}" for heads, leading in zip(GROUPS, KEPT, strict=True)
}


def check(name: str, calls: dict[str, Call], on: OpContext | None = None) -> None:
    shapes, options = calls[name]
    options = dict(options)
    if "attn_mask" in options:
        options["attn_mask"] = mask_of(options["attn_mask"], "float")
    assert_is_torch(*tensors(*shapes), on=on, **options)


@pytest.mark.parametrize(
    "name", sweep([n for n in CALLS if n not in SWEPT], CALLS, single=True)
)
def test_calls_are_torchs(name: str) -> None:
    check(name, CALLS)


@pytest.mark.parametrize(
    ("implementation", "scale"),
    sweep(
        [("reference", 0.3), ("reference", 0.0), ("blockwise", -0.5)],
        itertools.product(["reference", "blockwise"], [None, 0.3, 1.0, 0.0, -0.5]),
    ),
)
def test_the_scale_is_torchs(implementation: str, scale: float | None) -> None:
    q, k, v = tensors(*SHAPES["four dims"])
    on = context(implementation=implementation)
    assert_is_torch(q, k, v, on=on, scale=scale)


# --- masks


MASKS = [
    (7, 9),
    (1, 9),
    (7, 1),
    (3, 7, 9),
    (1, 7, 9),
    (2, 1, 1, 9),
    (2, 1, 7, 9),
    (1, 3, 7, 9),
    (1, 1, 7, 9),
    (2, 3, 7, 9),
    (2, 3, 1, 9),
    (2, 3, 7, 1),
]


@pytest.mark.parametrize(
    ("kind", "shape"),
    sweep(
        # One kind of each shape, in turn.
        [(("bool", "float")[n % 2], shape) for n, shape in enumerate(MASKS)],
        itertools.product(["bool", "float"], MASKS),
    ),
    ids=str,
)
def test_masks_broadcast_as_in_torch(kind: str, shape: tuple[int, ...]) -> None:
    mask = mask_of(shape, kind)
    assert_is_torch(*tensors(*SHAPES["four dims"]), attn_mask=mask)


# --- refusals


def call(*shapes: tuple[int, ...], on: OpContext | None = None, **options: Any) -> Any:
    arrays = [jnp.asarray(x.numpy()) for x in tensors(*shapes)]
    return scaled_dot_product_attention(on or context(), *arrays, **options)


SQUARE = [(1, 2, 4, 8)] * 3


def test_what_cannot_be_honoured_is_refused() -> None:
    with pytest.raises(AttentionError, match=r"dropout_p=0\.1"):
        call(*SQUARE, dropout_p=0.1)
    mask = jnp.ones((4, 4), bool)
    with pytest.raises(RuntimeError, match="attn_mask and is_causal exclude"):
        call(*SQUARE, attn_mask=mask, is_causal=True)
    with pytest.raises(TypeError, match="attn_mask of dtype int32"):
        call(*SQUARE, attn_mask=mask.astype(jnp.int32))


@pytest.mark.parametrize(
    ("shapes", "options", "message"),
    [
        ([(8,)] * 3, {}, "needs at least"),
        ([(1, 4, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)], {}, "pass enable_gqa=True"),
        ([(1, 4, 4, 8), (1, 4, 4, 8), (1, 2, 4, 8)], {}, "4 key and 2 value heads"),
        (
            [(1, 4, 4, 8), (1, 3, 4, 8), (1, 3, 4, 8)],
            {"enable_gqa": True},
            "both must divide",
        ),
        ([(2, 2, 4, 8), (3, 2, 4, 8), (3, 2, 4, 8)], {}, "broadcast"),
        ([(1, 2, 4, 8), (1, 2, 4, 6), (1, 2, 4, 8)], {}, "share a head dim"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    shapes: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        call(*shapes, **options)
    with pytest.raises(RuntimeError):  # torch refuses them as well
        F.scaled_dot_product_attention(*tensors(*shapes), **options)


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (3, 4, 4), (1, 1, 1, 4, 4)], ids=str)
def test_masks_that_do_not_broadcast_to_the_scores_are_refused(shape: Any) -> None:
    with pytest.raises(ValueError, match="mask"):
        call(*SQUARE, attn_mask=jnp.ones(shape, bool))


# --- on a mesh


WIDE = [(2, 8, 13, 8), (2, 8, 11, 8), (2, 8, 11, 8)]
SPLIT: dict[str, Call] = {
    "plain": (WIDE, {}),
    **{
        f"mask {mask}": (WIDE, {"attn_mask": mask})
        for mask in ((2, 8, 13, 11), (2, 1, 1, 11), (13, 1))
    },
    "causal": ([(2, 8, 13, 8)] * 3, CAUSAL),
    "grouped": ([(2, 8, 13, 8), *[(2, 2, 11, 8)] * 2], {"enable_gqa": True}),
    "one key head": ([(2, 8, 13, 8), *[(2, 1, 11, 8)] * 2], {}),
    "one value head": ([(2, 8, 13, 8), (2, 8, 11, 8), (2, 1, 11, 8)], {}),
    "odd": ([(3, 5, 1, 8), (3, 5, 11, 8), (3, 5, 11, 4)], {"scale": 0.5}),
    "3d": ([(8, 13, 8), (8, 11, 8), (8, 11, 8)], {}),
    "5d": ([(2, 4, 8, 5, 8)] * 3, {}),
}


@pytest.mark.parametrize(
    ("mesh", "name"),
    sweep(
        [
            *(((2, 2, 2), name) for name in SPLIT if "mask (2, 1" not in name),
            ((2, 1, 4), "mask (2, 1, 1, 11)"),
            ((1, 8, 1), "mask (13, 1)"),
            ((1, 8, 1), "mask (2, 8, 13, 11)"),
            ((1, 1, 8), "mask (2, 8, 13, 11)"),
            ((8, 1, 1), "plain"),
            ((1, 8, 1), "causal"),
            ((1, 8, 1), "odd"),
            ((1, 1, 8), "grouped"),
            ((2, 1, 4), "one key head"),
            ((8, 1, 1), "3d"),
        ],
        itertools.product(MESHES, SPLIT),
    ),
    ids=str,
)
def test_a_mesh_gives_what_one_device_gives(
    mesh: tuple[int, int, int], name: str
) -> None:
    check(name, SPLIT, context(mesh))


def test_a_bool_mask_with_empty_rows_survives_the_padding_of_a_split() -> None:
    q, k, v = tensors((1, 2, 13, 8), (1, 2, 11, 8), (1, 2, 11, 8))
    mask = mask_of((1, 2, 13, 11), "bool")
    mask[:, :, 12] = False
    assert_is_torch(q, k, v, on=context((1, 8, 1)), attn_mask=mask)


# --- records


def test_records_say_once_what_a_call_runs_as() -> None:
    on = context((2, 2, 2))
    q, k, v = tensors((2, 4, 13, 8), (2, 4, 11, 8), (2, 4, 11, 8))
    ours(q, k, v, on=on)
    ours(q, k, v, on=on)
    assert on.records == [
        AttentionRecord(
            query=(2, 4, 13, 8),
            key=(2, 4, 11, 8),
            implementation="reference",
            reason="the score matrix is small enough to be built whole; not splash: "
            "it is for TPU; the platform is 'cpu'",
            split=("dp", "tp", "sp", None),
        )
    ]
    ours(q, q, q, on=on, is_causal=True)
    assert on.records[1].split == ("dp", "tp", None, None)


def test_only_what_divides_is_split() -> None:
    shapes = [(3, 5, 13, 8)] * 3
    on = context((2, 1, 4))
    ours(*tensors(*shapes), on=on)
    assert on.records[0].split == (None, None, None, None)


# --- memory


def sizes_in(jaxpr: Any) -> set[int]:
    """The number of elements of every value that a program makes."""
    return {math.prod(shape) for shape in arrays_in(jaxpr)}


@pytest.mark.parametrize("mesh", [None, (1, 8, 1), (1, 1, 8)], ids=str)
@pytest.mark.parametrize("is_causal", [False, True])
def test_long_sequences_make_no_array_of_queries_by_keys(
    mesh: tuple[int, int, int] | None, is_causal: bool
) -> None:
    # Legend: 8 heads; 20000 tokens of each.
    length, on = 20_000, context(mesh)
    array = jax.ShapeDtypeStruct((1, 8, length, 16), jnp.bfloat16)

    def call(q: Any, k: Any, v: Any) -> Any:
        return scaled_dot_product_attention(on, q, k, v, is_causal=is_causal)

    sizes = sizes_in(jax.make_jaxpr(call)(array, array, array).jaxpr)
    assert max(sizes) >= array.size  # the walk sees something
    assert max(sizes) < length * length / 8
    assert on.records[0].implementation == "blockwise"
