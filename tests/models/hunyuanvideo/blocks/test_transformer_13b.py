"""The HunyuanVideo 13B transformer under jit is upstream's, without masks."""

from __future__ import annotations

import math
import re
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
from tpuport.core.weights.sharding import ShardRule, named_shardings, plan_sharding
from tpuport.kernels.attention.choice import AttentionChoice
from tpuport.models.hunyuanvideo import sharding
from tpuport.models.hunyuanvideo.patches_13b import TRANSFORMER_13B
from tpuport.patches.activations import GELU_ROUNDED_ONCE
from tpuport.patches.constants import CONSTANTS
from tpuport.patches.norms import FLOAT32_NORMS
from tpuport.patches.torchax_slices import SLICE_ASSIGNMENT

ATOL = TOLERANCES["component float32"]
PATCHES = (*SLICE_ASSIGNMENT, CONSTANTS, *TRANSFORMER_13B)

#: One block or one refiner layer cannot show what padding does to the next.
CONFIG: dict[str, Any] = {
    "in_channels": 4,
    "out_channels": 4,
    "num_attention_heads": 8,
    "attention_head_dim": 8,
    "num_layers": 2,
    "num_single_layers": 3,
    "num_refiner_layers": 2,
    "mlp_ratio": 2.0,
    "text_embed_dim": 24,
    "pooled_projection_dim": 12,
    "rope_axes_dim": (2, 2, 4),
}
FORMS: dict[str, dict[str, Any]] = {
    "t2v": {},
    "no guidance input": {"guidance_embeds": False},
    "i2v latent concat": {"in_channels": 9, "image_condition_type": "latent_concat"},
    "i2v token replace": {"image_condition_type": "token_replace"},
}
#: Text tokens, and how many of each item are valid.
TEXT, VALID = 11, (6, 11)
#: Latent frames, rows and columns: 2 x 4 x 6 video tokens.
SIZE = (2, 8, 12)
VIDEO = 48

Inputs = dict[str, torch.Tensor]


def make(form: str = "t2v", **changes: Any) -> torch.nn.Module:
    """A small transformer, with norms and biases that are not ones and zeros."""
    from diffusers import HunyuanVideoTransformer3DModel

    torch.manual_seed(0)
    config = {**CONFIG, **FORMS[form], **changes}
    module = HunyuanVideoTransformer3DModel(**config).eval()
    for parameter in module.parameters():
        if parameter.ndim == 1:
            parameter.data.add_(torch.randn_like(parameter) * 0.2)
    return module


def inputs_of(
    batch: int,
    form: str = "t2v",
    *,
    text: int = TEXT,
    valid: Sequence[int] = VALID,
    size: tuple[int, int, int] = SIZE,
) -> Inputs:
    """Ragged lengths; padded text is noise, not zeros."""
    channels = FORMS[form].get("in_channels", CONFIG["in_channels"])
    items = []
    for item in range(batch):
        generator = torch.Generator().manual_seed(7 + item)

        def normal(*shape: int, of: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(shape, generator=of)

        given = {
            "hidden_states": normal(channels, *size),
            "timestep": torch.tensor([500.0, 37.0][item]),
            "encoder_hidden_states": normal(text, 24),
            "encoder_attention_mask": (torch.arange(text) < valid[item]).long(),
            "pooled_projections": normal(12),
            "guidance": torch.tensor([6000.0, 1000.0][item]),
        }
        if FORMS[form].get("guidance_embeds") is False:
            del given["guidance"]
        items.append(given)
    return {name: torch.stack([x[name] for x in items]) for name in items[0]}


@torch.no_grad()
def upstream(module: torch.nn.Module, inputs: Inputs) -> torch.Tensor:
    out: torch.Tensor = module(**inputs, return_dict=False)[0]
    return out


class Ported:
    """The module as a compiled program, placed by the rules."""

    def __init__(
        self,
        module: torch.nn.Module,
        mesh: str = "dp=1",
        *,
        rules: tuple[ShardRule, ...] = sharding.TRANSFORMER_13B,
        patches: Sequence[Patch] = PATCHES,
        implementation: str = "auto",
        platform: str = "cpu",
    ) -> None:
        self.mesh = build_mesh(MeshSpec.parse(mesh))
        self.runtime = model_runtime(
            mesh=self.mesh,
            platform=platform,
            patches=patches,
            overrides=(*FLOAT32_NORMS, GELU_ROUNDED_ONCE),
            attention=sharding.ATTENTION,
            attention_implementation=AttentionChoice.parse(implementation),
        )
        self.ported = PortedModule(module, self.runtime)
        tensors = dict(module.named_parameters())
        self.plan = plan_sharding(
            rules, tensors, dict(self.mesh.shape), component="transformer"
        )
        placed = named_shardings(self.plan, self.mesh)
        self.weights = {
            name: jax.device_put(to_numpy(tensor), placed[name])
            for name, tensor in tensors.items()
        }
        self._jitted: dict[str, Any] = {}

    def program(self, method: str = "forward") -> Any:
        """The pure function of (weights, inputs)."""

        def run(weights: Any, inputs: Any) -> Any:
            options: dict[str, Any] = (
                {"return_dict": False} if method == "forward" else {}
            )
            out = self.ported.apply(weights, method=method, **inputs, **options)
            return out[0] if method == "forward" else out

        return run

    def jitted(self, method: str) -> Any:
        if method not in self._jitted:
            self._jitted[method] = jax.jit(self.program(method))
        return self._jitted[method]

    def arrays(self, inputs: dict[str, Any]) -> Any:
        return jax.tree.map(
            to_numpy, inputs, is_leaf=lambda x: isinstance(x, torch.Tensor)
        )

    def __call__(self, inputs: dict[str, Any], method: str = "forward") -> torch.Tensor:
        return to_torch(self.jitted(method)(self.weights, self.arrays(inputs)))

    def trace(self, inputs: Inputs) -> Any:
        """What is traced, as a jaxpr; nothing is compiled."""
        return jax.make_jaxpr(self.program())(self.weights, self.arrays(inputs))

    def compiled(self, inputs: Inputs) -> tuple[torch.Tensor, str]:
        """The result, and the text of the program that XLA makes."""
        arrays = self.arrays(inputs)
        program = self.jitted("forward").lower(self.weights, arrays).compile()
        return to_torch(program(self.weights, arrays)), program.as_text()


def assert_close(ours: torch.Tensor, theirs: torch.Tensor, atol: float = ATOL) -> None:
    assert ours.shape == theirs.shape
    assert ours.dtype == theirs.dtype
    assert theirs.isfinite().all()
    assert float((ours - theirs).abs().max()) <= atol


@pytest.fixture(scope="module")
def module() -> torch.nn.Module:
    return make()


@pytest.fixture(scope="module")
def ported(module: torch.nn.Module) -> Ported:
    return Ported(module)


# --- the numbers


@pytest.mark.parametrize("form", FORMS)
def test_it_is_upstreams(form: str) -> None:
    module, inputs = make(form), inputs_of(2, form)
    assert_close(Ported(module)(inputs), upstream(module, inputs))


@pytest.mark.parametrize(
    "form",
    [
        "i2v token replace",
        *(
            pytest.param(form, marks=pytest.mark.sweep)
            for form in FORMS
            if form != "i2v token replace"
        ),
    ],
)
def test_one_is_the_first_of_two(form: str) -> None:
    module = make(form)
    ours = Ported(module)
    two = inputs_of(2, form)
    one = {name: x[:1] for name, x in two.items()}
    both, alone = ours(two), ours(one)
    assert_close(alone, upstream(module, one))
    assert_close(both[:1], alone)


@torch.no_grad()
def test_the_patches_are_upstreams_in_plain_torch_too(module: torch.nn.Module) -> None:
    inputs = inputs_of(2)
    with applied(TRANSFORMER_13B):
        ours = module(**inputs)
    assert type(ours) is type(module(**inputs))
    assert_close(ours.sample, upstream(module, inputs))


def test_it_is_no_further_from_the_truth_than_upstream(
    module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(2)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    truth = upstream(make().double(), exact)
    ours = float((ported(inputs) - truth).abs().max())
    theirs = float((upstream(module, inputs) - truth).abs().max())
    assert ours <= 2 * theirs


#: Rows of valid tokens, [2, TEXT]. Upstream counts them and takes that many from the
#: front; what it does with the last two is odd, and the same here.
MASKS: dict[str, list[list[int]]] = {
    "ragged": [[1] * 6 + [0] * 5, [1] * 9 + [0] * 2],
    "one token": [[1] + [0] * 10, [1] * 11],
    "holes": [[1, 0, 1, 1, 0, 0, 1, 0, 0, 0, 0], [1, 1, 1, 0, 1] + [0] * 6],
    "left padded": [[0] * 4 + [1] * 7, [0] * 9 + [1] * 2],
}


@pytest.mark.parametrize("name", MASKS)
def test_any_mask_is_read_as_upstream_reads_it(
    name: str, module: torch.nn.Module, ported: Ported
) -> None:
    inputs = {**inputs_of(2), "encoder_attention_mask": torch.tensor(MASKS[name])}
    assert_close(ported(inputs), upstream(module, inputs))


@pytest.mark.parametrize("name", MASKS)
def test_every_row_of_the_refined_text_is_upstreams(
    name: str, module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(2)
    given = {
        "hidden_states": inputs["encoder_hidden_states"],
        "timestep": inputs["timestep"],
        "attention_mask": torch.tensor(MASKS[name]),
    }
    with torch.no_grad():
        expected = module.context_embedder(**given)
    assert_close(ported(given, method="context_embedder"), expected)


@torch.no_grad()
def test_bfloat16_is_as_good_as_upstreams() -> None:
    """Against upstream in float32 on the same rounded weights and inputs."""
    module = make().to(torch.bfloat16)
    low = {
        name: x.bfloat16() if x.is_floating_point() else x
        for name, x in inputs_of(2).items()
    }
    wide = {k: x.float() if x.is_floating_point() else x for k, x in low.items()}
    exact = upstream(make().to(torch.bfloat16).float(), wide)
    ours = Ported(module)(low)
    assert ours.dtype == torch.bfloat16
    our_error = float((ours.float() - exact).abs().mean())
    their_error = float((upstream(module, low).float() - exact).abs().mean())
    assert our_error <= 1.1 * their_error


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16], ids=str)
def test_a_mask_may_have_any_dtype_and_is_counted_in_integers(
    dtype: torch.dtype, module: torch.nn.Module, ported: Ported
) -> None:
    # 257 ones make 256 in bfloat16, which upstream's pipeline casts the mask to.
    inputs = inputs_of(1, text=260, valid=(257,))
    expected = upstream(module, inputs)
    inputs["encoder_attention_mask"] = inputs["encoder_attention_mask"].to(dtype)
    assert_close(ported(inputs), expected)


def test_padded_text_reaches_no_video_token(ported: Ported) -> None:
    inputs = inputs_of(2)
    before = ported(inputs)
    padded = inputs["encoder_attention_mask"] == 0
    inputs["encoder_hidden_states"][padded] = 1e3
    assert torch.equal(ported(inputs), before)
    inputs["encoder_hidden_states"][0, VALID[0] - 1] = 1e3
    assert not torch.equal(ported(inputs), before)


def test_text_may_be_trimmed_to_the_longest_prompt(ported: Ported) -> None:
    inputs = inputs_of(2, valid=(6, 8))
    short = dict(inputs)
    for name in ("encoder_hidden_states", "encoder_attention_mask"):
        short[name] = inputs[name][:, :8]
    assert_close(ported(short), ported(inputs))


def test_rotary_tables_may_be_given(module: torch.nn.Module, ported: Ported) -> None:
    inputs = inputs_of(1)
    tables = module.rope(inputs["hidden_states"])
    ours = ported({**inputs, "image_rotary_emb": tables})
    assert_close(ours, upstream(module, inputs))
    other = (tables[0], -tables[1])
    assert not torch.allclose(ported({**inputs, "image_rotary_emb": other}), ours)


def test_lengths_are_made_once_and_handed_to_every_block(
    module: torch.nn.Module,
) -> None:
    seen: list[tuple[Any, ...]] = []

    def look(block: torch.nn.Module, args: tuple[Any, ...]) -> None:
        seen.append(args)

    blocks = [*module.transformer_blocks, *module.single_transformer_blocks]
    hooks = [block.register_forward_pre_hook(look) for block in blocks]
    try:
        with torch.no_grad(), applied(TRANSFORMER_13B):
            module(**inputs_of(2))
    finally:
        for hook in hooks:
            hook.remove()
    assert len(seen) == len(blocks) == 5
    assert seen[0][3].tolist() == [VIDEO + n for n in VALID]
    assert all(args[3] is seen[0][3] for args in seen)


# --- meshes


@pytest.mark.parametrize(
    "mesh",
    [
        "dp=2,sp=2,tp=2",
        *(
            pytest.param(mesh, marks=pytest.mark.sweep)
            for mesh in ("dp=2,tp=4", "tp=8", "sp=8")
        ),
    ],
)
def test_a_mesh_gives_what_one_device_gives(
    mesh: str, module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(2)
    many = Ported(module, mesh)
    assert_close(many(inputs), ported(inputs), TOLERANCES["mesh float32"])
    sizes = dict(many.mesh.shape)
    split = tuple(a if sizes.get(a, 1) > 1 else None for a in ("dp", "tp", "sp", ""))
    assert {r.split for r in many.runtime.records} == {split}
    if sizes["tp"] > 1:
        assert many.plan.bytes_per_device < many.plan.total_bytes * 0.6


def exchanged(text: str, *kinds: str) -> int:
    """How many elements the collectives of a compiled program make, of those kinds."""
    count = 0
    for shapes in re.findall(rf"= (.*?) (?:{'|'.join(kinds)})(?:-start)?\(", text):
        for shape in re.findall(r"\[([\d,]+)\]", shapes):
            count += math.prod(int(n) for n in shape.split(","))
    return count


def test_replicated_attention_changes_memory_and_traffic_alone(
    module: torch.nn.Module, ported: Ported
) -> None:
    inputs = inputs_of(1)
    expected = ported(inputs)
    traffic = []
    layouts = sharding.LAYOUTS_13B
    for rules in (sharding.TRANSFORMER_13B, layouts["replicated-attention"]):
        ours = Ported(module, "tp=8", rules=rules)
        found, text = ours.compiled(inputs)
        assert_close(found, expected, TOLERANCES["mesh float32"])
        # A sum travels twice: once to be added up, once to be handed back.
        gathers = exchanged(text, "all-gather")
        traffic.append(gathers + 2 * exchanged(text, "all-reduce"))
    assert traffic[1] < 0.7 * traffic[0]
