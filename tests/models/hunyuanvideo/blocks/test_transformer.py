"""The HunyuanVideo-1.5 transformer under jit is upstream's, without a mask of S x S."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import pytest
import torch

from tests.tolerances import TOLERANCES
from tpuport.core.arrays import to_numpy, to_torch
from tpuport.core.layers.model_runtime import model_runtime
from tpuport.core.mesh.device_mesh import build_mesh
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.tracing.patching import Patch, applied
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.models.hunyuanvideo.patches import TRANSFORMER_15
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.torchax_slices import SLICE_ASSIGNMENT

ATOL = TOLERANCES["component float32"]
PATCHES = (*SLICE_ASSIGNMENT, *TRANSFORMER_15)

#: One block or one refiner layer cannot show what padding does to the next.
CONFIG: dict[str, Any] = {
    "in_channels": 9,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "num_layers": 3,
    "num_refiner_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
    "text_embed_2_dim": 20,
    "image_embed_dim": 12,
    "rope_axes_dim": (2, 2, 4),
}
#: Tokens: of the video (2 x 4 x 6), the language model, ByT5 and the image.
VIDEO, TEXT, GLYPHS, IMAGE = 48, 11, 7, 5
TASKS = {"t2v zeros": (IMAGE, 0.0), "t2v no tokens": (0, 0.0), "i2v": (IMAGE, 1.0)}

Inputs = dict[str, torch.Tensor]


def make(seed: int = 0, **changes: Any) -> torch.nn.Module:
    """A small transformer, with norms and biases that are not ones and zeros."""
    from diffusers import HunyuanVideo15Transformer3DModel

    torch.manual_seed(seed)
    module = HunyuanVideo15Transformer3DModel(**{**CONFIG, **changes}).eval()
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return module


def inputs_of(
    batch: int,
    task: str,
    *,
    text: int = TEXT,
    glyphs: int = GLYPHS,
    size: tuple[int, int, int] = (2, 4, 6),
) -> Inputs:
    """Ragged lengths, padding anywhere; item 0 has no valid glyph."""
    image, factor = TASKS[task]
    items = []
    for item in range(batch):
        generator = torch.Generator().manual_seed(7 + item)

        def normal(*shape: int, of: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=of)

        mask = torch.rand(text, generator=generator) < 0.6
        glyph_mask = torch.rand(glyphs, generator=generator) < 0.5 * item
        items.append(
            {
                "hidden_states": normal(9, *size),
                "timestep": torch.tensor([500.0, 37.0][item]),
                "encoder_hidden_states": normal(text, 24),
                "encoder_attention_mask": mask,
                "encoder_hidden_states_2": normal(glyphs, 20),
                "encoder_attention_mask_2": glyph_mask,
                "image_embeds": normal(image, 12) * factor,
            }
        )
    return {name: torch.stack([x[name] for x in items]) for name in items[0]}


@torch.no_grad()
def upstream(module: torch.nn.Module, inputs: Inputs, **options: Any) -> torch.Tensor:
    out: torch.Tensor = module(**inputs, **options, return_dict=False)[0]
    return out


@torch.no_grad()
def eagerly(module: torch.nn.Module, inputs: Inputs, **options: Any) -> torch.Tensor:
    """With the patches, in plain torch."""
    with applied(TRANSFORMER_15):
        return upstream(module, inputs, **options)


class Ported:
    """A module as a compiled program, its wide weights split over ``tp``."""

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: tuple[int, int, int] | None = None,
        *,
        patches: Sequence[Patch] = PATCHES,
        implementation: str = "auto",
    ) -> None:
        from jax.sharding import NamedSharding, PartitionSpec

        self.mesh = None if mesh is None else build_mesh(MeshSpec.parse(mesh))
        self.runtime = model_runtime(
            mesh=self.mesh,
            platform="cpu",
            patches=patches,
            overrides=FLOAT32_NORMS,
            attention_implementation=AttentionChoice.parse(implementation),
        )
        self.ported = PortedModule(module, self.runtime)
        names = self.ported.names
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self.weights = {
            n: to_numpy(tensors[n]) for n in (*names.stored, *names.computed)
        }
        self.whole = None
        if self.mesh is not None:
            self.whole = NamedSharding(self.mesh, PartitionSpec())
            self.weights = {
                name: jax.device_put(
                    x,
                    NamedSharding(self.mesh, PartitionSpec("tp"))
                    if x.ndim == 2 and x.shape[0] % self.mesh.shape["tp"] == 0
                    else self.whole,
                )
                for name, x in self.weights.items()
            }
        self._jitted = jax.jit(self.run, static_argnames="options")

    def run(
        self, weights: Any, inputs: Any, options: tuple[tuple[str, Any], ...] = ()
    ) -> Any:
        return self.ported.apply(weights, **inputs, **dict(options), return_dict=False)[
            0
        ]

    def __call__(self, inputs: Inputs, **options: Any) -> torch.Tensor:
        arrays = {name: to_numpy(x) for name, x in inputs.items()}
        if self.whole is not None:
            arrays = jax.device_put(arrays, self.whole)
        return to_torch(self._jitted(self.weights, arrays, tuple(options.items())))

    def trace(self, inputs: Inputs) -> Any:
        """The program as a jaxpr, compiled by nobody."""
        arrays = {name: to_numpy(x) for name, x in inputs.items()}
        return jax.make_jaxpr(self.run)(self.weights, arrays)


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return make()


@pytest.fixture(scope="module")
def ported(module: torch.nn.Module) -> Ported:
    return Ported(module)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=ATOL)


# --- equal to upstream


#: Without image tokens one video is another program, with nothing new in it.
CASES = [
    pytest.param(task, batch, marks=pytest.mark.sweep)
    if (task, batch) == ("t2v no tokens", 1)
    else (task, batch)
    for task in TASKS
    for batch in (1, 2)
]


@pytest.mark.parametrize(("task", "batch"), CASES)
def test_it_is_upstreams(
    task: str, batch: int, module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(batch, task)
    expected = upstream(module, inputs)
    assert expected.isfinite().all()
    assert_close(ported(inputs), expected)
    assert_close(eagerly(module, inputs), expected)


def test_zeros_and_an_image_are_one_program(ported: Ported) -> None:
    ported(inputs_of(1, "t2v zeros"))
    programs = ported._jitted._cache_size()
    different = ported(inputs_of(1, "i2v")) - ported(inputs_of(1, "t2v zeros"))
    assert ported._jitted._cache_size() == programs
    assert different.abs().max() > 1e-3


def test_zeros_are_told_for_the_whole_batch_as_upstream_does(
    module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(2, "i2v")
    inputs["image_embeds"][0] = 0
    assert_close(ported(inputs), upstream(module, inputs))


def test_no_image_embeds_are_no_image_tokens(
    module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(2, "t2v no tokens")
    expected = ported(inputs)
    assert_close(expected, upstream(module, inputs_of(2, "t2v zeros")))
    del inputs["image_embeds"]
    assert torch.equal(ported(inputs), expected)


@pytest.mark.parametrize(
    "task",
    [
        "t2v zeros",
        "i2v",
        pytest.param("t2v no tokens", marks=pytest.mark.sweep),
    ],
)
def test_an_item_is_the_same_alone_and_in_a_batch(task: str, ported: Ported) -> None:
    pair, alone = ported(inputs_of(2, task)), ported(inputs_of(1, task))
    assert_close(pair[:1], alone)


#: What is legal beside CONFIG, as much at once as goes together.
CONFIGS: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "meanflow, patches, remainders that are cut": (
        {"use_meanflow": True, "patch_size": 2, "patch_size_t": 2},
        (4, 5, 7),
    ),
    "layer norm, odd heads": (
        {"qk_norm": "layer_norm", "num_attention_heads": 3, "mlp_ratio": 3.0},
        (1, 3, 5),
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_any_config(name: str) -> None:
    changes, size = CONFIGS[name]
    module = make(**changes)
    inputs = inputs_of(2, "i2v", size=size)
    if "use_meanflow" in changes:
        without = upstream(module, inputs)
        inputs["timestep_r"] = torch.tensor([250.0, 12.0])
        assert not torch.allclose(without, upstream(module, inputs))
    assert_close(Ported(module)(inputs), upstream(module, inputs))


def test_the_output_class_is_upstreams(module: torch.nn.Module) -> None:
    inputs = inputs_of(1, "i2v")
    with torch.no_grad():
        expected = module(**inputs)
        with applied(TRANSFORMER_15):
            found = module(**inputs)
    assert type(found) is type(expected)
    assert_close(found.sample, expected.sample)


# --- padding


def test_padding_is_cut_off_at_no_difference(
    module: torch.nn.Module, ported: Ported
) -> None:
    """What a pipeline may do to run faster: fewer padded tokens, same video."""
    inputs = inputs_of(2, "i2v")
    index = torch.arange(TEXT)
    inputs["encoder_attention_mask"] = index < torch.tensor([[4], [6]])
    inputs["encoder_attention_mask_2"] = torch.zeros(2, GLYPHS, dtype=torch.bool)
    expected = upstream(module, inputs)
    trimmed = dict(inputs)
    for name, count in (
        ("encoder_hidden_states", 6),
        ("encoder_attention_mask", 6),
        ("encoder_hidden_states_2", 0),
        ("encoder_attention_mask_2", 0),
    ):
        trimmed[name] = inputs[name][:, :count]
    assert_close(ported(inputs), expected)
    assert_close(ported(trimmed), expected)


def test_what_padding_holds_does_not_matter_and_what_is_valid_does(
    ported: Ported,
) -> None:
    inputs = inputs_of(2, "i2v")
    expected = ported(inputs)
    names = ("encoder_hidden_states", "encoder_attention_mask")
    for suffix, worst in (("", 1e4), ("_2", float("nan"))):
        states, mask = (name + suffix for name in names)
        padded, valid = dict(inputs), dict(inputs)
        noise = torch.full_like(inputs[states], worst)
        padded[states] = inputs[states].where(inputs[mask][:, :, None], noise)
        assert torch.equal(ported(padded), expected)
        turned = inputs[states].flip(-1)
        valid[states] = turned.where(inputs[mask][:, :, None], inputs[states])
        different = (ported(valid) - expected).abs().amax(dim=(1, 2, 3, 4))
        assert different[1] > 1e-3
        # Item 0 has no valid glyph.
        assert bool(different[0] > 1e-3) == (suffix == "")


def test_no_valid_text_at_all_is_finite_as_upstream(
    module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(2, "t2v zeros")
    inputs["encoder_attention_mask"][0] = False
    expected = upstream(module, inputs)
    assert expected.isfinite().all()
    assert_close(ported(inputs), expected)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_masks_of_any_dtype(dtype: torch.dtype, module: torch.nn.Module) -> None:
    inputs = inputs_of(2, "i2v")
    expected = eagerly(module, inputs)
    for name in ("encoder_attention_mask", "encoder_attention_mask_2"):
        inputs[name] = inputs[name].to(dtype)
    assert torch.equal(eagerly(module, inputs), expected)
    assert_close(expected, upstream(module, inputs))


def test_more_valid_tokens_than_bfloat16_can_count() -> None:
    """Upstream's pipeline casts masks to the dtype of the model."""
    module = make(num_layers=1)
    inputs = inputs_of(1, "t2v no tokens", text=300)
    mask = (torch.arange(300) < 257)[None].to(torch.bfloat16)
    assert int(mask.sum()) == 256
    inputs["encoder_attention_mask"] = mask
    expected = upstream(module, inputs)
    assert_close(Ported(module)(inputs), expected)
    inputs["encoder_attention_mask"] = (torch.arange(300) < 256)[None]
    assert not torch.allclose(upstream(module, inputs), expected, rtol=0, atol=ATOL)


@torch.no_grad()
def test_bfloat16_is_as_good_as_upstreams() -> None:
    """Against upstream in float32 on the same rounded weights and inputs."""
    module = make().to(torch.bfloat16)
    inputs = inputs_of(2, "i2v")
    low = {k: x.bfloat16() if k != "timestep" else x for k, x in inputs.items()}
    # As the pipeline does, which the embedding of the timestep takes its dtype from.
    low["timestep"] = low["timestep"].bfloat16()
    exact = upstream(
        make().to(torch.bfloat16).float(), {k: x.float() for k, x in low.items()}
    )
    ours = Ported(module)(low)
    assert ours.dtype == torch.bfloat16
    our_error = float((ours.float() - exact).abs().mean())
    their_error = float((upstream(module, low).float() - exact).abs().mean())
    assert our_error <= 1.1 * their_error


# --- on a mesh


@pytest.mark.parametrize(
    "mesh",
    [
        (2, 2, 2),
        *(
            pytest.param(mesh, marks=pytest.mark.sweep)
            for mesh in ((2, 1, 4), (1, 8, 1), (1, 1, 8))
        ),
    ],
    ids=str,
)
def test_a_mesh_gives_what_one_device_gives(
    mesh: tuple[int, int, int], module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(2, "i2v")
    many = Ported(module, mesh)
    found = many(inputs)
    torch.testing.assert_close(
        found, ported(inputs), rtol=0, atol=TOLERANCES["mesh float32"]
    )
    assert_close(found, upstream(module, inputs))
    dp, sp, tp = (n > 1 for n in mesh)
    split = ("dp" if dp else None, "tp" if tp else None, "sp" if sp else None, None)
    records = many.runtime.records
    assert {r.query[2] for r in records} == {TEXT, VIDEO + TEXT + GLYPHS + IMAGE}
    assert all(r.split == split and r.key_lengths for r in records)
