"""A forward cut at its last block: what is kept is what goes on, the rest is gone."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
from diffusers import CogVideoXTransformer3DModel

from tests.core.tracing.towers import arrays, captured, port, resumed
from tests.patches.tools import apply
from tpuport.core.tracing.forward_split import ForwardSplit, Where, capture, resume
from tpuport.core.tracing.ported_module import PortedModule
from tpuport.errors import PluginError

BLOCKS = ForwardSplit(blocks=("transformer_blocks",), head=("hidden_states",))
BOTH_LISTS = ForwardSplit(
    blocks=("transformer_blocks", "single_transformer_blocks"),
    head=("hidden_states",),
)
WHERE: tuple[Where, ...] = ("before_last", "after_last")


# --------------------------------------------------- a real transformer, traced to JAX


class Plain(torch.nn.Module):
    """CogVideoX's transformer, called with tensors alone."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=8,
            text_embed_dim=8,
            num_layers=layers,
            sample_width=8,
            sample_height=4,
            sample_frames=5,
            max_text_seq_length=6,
        ).eval()

    def forward(self, x: torch.Tensor, text: torch.Tensor, t: torch.Tensor) -> Any:
        return self.model(x, text, t, return_dict=False)[0]


OF_PLAIN = ForwardSplit(blocks=("model.transformer_blocks",), head=("hidden_states",))


def ported(layers: int = 2) -> tuple[PortedModule, dict[str, jax.Array]]:
    return port(Plain(layers), stacked=False)


def given() -> tuple[jax.Array, ...]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 2, 4, 4, 8, generator=generator)
    text = torch.randn(2, 6, 8, generator=generator)
    return arrays((x, text, torch.tensor([500, 500])))


def products(function: Callable[..., Any], *args: Any) -> int:
    """Matrix products in the compiled program."""
    text = jax.jit(function).lower(*args).compile().as_text()
    assert "dot(" in text
    return len(re.findall(r"= \S+ dot\(", text))


def test_a_resumed_forward_compiles_to_what_it_needs() -> None:
    counts: dict[tuple[int, str], int] = {}
    inputs = given()
    for layers in (2, 4):
        program, weights = ported(layers)

        def plain(w: Any, x: Any, program: PortedModule = program) -> Any:
            return apply(program, w, *x)

        counts[layers, "plain"] = products(plain, weights, inputs)
        for where in WHERE:

            def full(w: Any, x: Any, p: Any = program, where: Where = where) -> Any:
                return captured(p, w, OF_PLAIN, where, *x)

            def cached(
                w: Any, s: Any, x: Any, p: Any = program, where: Where = where
            ) -> Any:
                return resumed(p, w, OF_PLAIN, where, s, *x)

            _, state = jax.eval_shape(full, weights, inputs)
            counts[layers, where] = products(cached, weights, state, inputs)
    block = (counts[4, "plain"] - counts[2, "plain"]) // 2
    assert block >= 8  # q, k, v, out, two of the MLP, two of the modulation
    # The same whatever the depth; the head alone is the time embedding's two, the
    # modulation and the output projection.
    assert counts[2, "after_last"] == counts[4, "after_last"] == 4
    assert counts[2, "before_last"] == counts[4, "before_last"] == 4 + block


# ----------------------------------------------- other upstream classes, plain torch


def hunyuan() -> tuple[torch.nn.Module, dict[str, Any]]:
    from diffusers import HunyuanVideoTransformer3DModel

    torch.manual_seed(0)
    module = HunyuanVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        num_single_layers=2,
        num_refiner_layers=1,
        patch_size=1,
        patch_size_t=1,
        guidance_embeds=True,
        text_embed_dim=16,
        pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    ).eval()
    inputs = {
        "hidden_states": torch.randn(2, 4, 2, 4, 6),
        "timestep": torch.tensor([500, 500]),
        "encoder_hidden_states": torch.randn(2, 7, 16),
        "encoder_attention_mask": torch.tensor([[1] * 7, [1] * 4 + [0] * 3]),
        "pooled_projections": torch.randn(2, 8),
        "guidance": torch.tensor([6000.0, 6000.0]),
    }
    return module, inputs


def cogvideox() -> tuple[torch.nn.Module, dict[str, Any]]:
    names = ("hidden_states", "encoder_hidden_states", "timestep")
    inputs = (torch.from_numpy(np.array(x)) for x in given())
    return Plain(layers=3).model, dict(zip(names, inputs, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("make", "split"),
    [(cogvideox, BLOCKS), (hunyuan, BOTH_LISTS)],
    ids=["cogvideox", "hunyuanvideo"],
)
def test_upstream_transformers_split_as_declared(
    make: Callable[[], tuple[torch.nn.Module, dict[str, Any]]],
    split: ForwardSplit,
    where: Where,
) -> None:
    module, inputs = make()
    expected = module(**inputs).sample
    with capture(module, split, where) as state:
        assert torch.equal(module(**inputs).sample, expected)
    before = [len(module.get_submodule(path)) for path in split.blocks]
    noise = {**inputs, "hidden_states": torch.randn_like(inputs["hidden_states"])}
    with resume(module, split, where, state):
        assert torch.equal(module(**noise).sample, expected)
    # Outside of it the module is upstream's again.
    assert before == [len(module.get_submodule(path)) for path in split.blocks]
    assert torch.equal(module(**inputs).sample, expected)
    assert not torch.equal(module(**noise).sample, expected)


# ------------------------------------------------------------------ a module to break


class Block(torch.nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        x += y  # in place, as upstream code may
        return x


class Toy(torch.nn.Module):
    """Blocks that hand on one tensor, bare, and take it by position."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(3))
        self.single = Block()
        self.empty = torch.nn.ModuleList()

    def forward(self, x: torch.Tensor, times: int = 1) -> torch.Tensor:
        for _ in range(times):
            for block in self.blocks:
                x = block(x, torch.ones(1))
        return 10 * x


ONE = ForwardSplit(blocks=("blocks",), state=("x",))


def test_a_state_is_not_changed_by_later_writes_in_place() -> None:
    toy = Toy()
    with capture(toy, ONE, "before_last") as state:
        assert toy(torch.zeros(1)) == 30
    assert state == {"x": torch.tensor([2.0])}
    with resume(toy, ONE, "before_last", {"x": torch.tensor([5.0])}):
        assert toy(torch.zeros(1)) == 60
    with resume(toy, ONE, "after_last", {"x": torch.tensor([5.0])}):
        assert toy(torch.zeros(1)) == 50


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("resumes", [False, True])
def test_forwards_are_restored_also_after_an_error(resumes: bool, where: Where) -> None:
    toy = Toy()
    own = toy.blocks[2].forward = lambda x, y: x * 7
    context = capture(toy, ONE, where)
    if resumes:
        context = resume(toy, ONE, where, {"x": torch.zeros(1)})
    with pytest.raises(RuntimeError, match="upstream failed"), context:
        raise RuntimeError("upstream failed")
    assert toy.blocks[2].forward is own
    assert not any("forward" in vars(block) for block in toy.blocks[:2])


@pytest.mark.parametrize(
    ("split", "message"),
    [
        (ForwardSplit(blocks=("blokcs",), state=("x",)), "has no blocks 'blokcs'"),
        (
            ForwardSplit(blocks=("single",), state=("x",)),
            "is a Block, not a ModuleList",
        ),
        (ForwardSplit(blocks=("empty",), state=("x",)), "has no block"),
        (ForwardSplit(blocks=("blocks", "blocks"), state=("x",)), "more than once"),
        (ForwardSplit(blocks=("blocks",), state=("x", "y", "z")), "without 'z'"),
        (ForwardSplit(blocks=("blocks",), state=("x", "y")), "returned a Tensor"),
    ],
    ids=["name", "kind", "empty", "twice", "argument", "result"],
)
def test_a_wrong_declaration_is_named(split: ForwardSplit, message: str) -> None:
    toy = Toy()
    with pytest.raises(PluginError, match=message), capture(toy, split, "after_last"):
        toy(torch.zeros(1))


@pytest.mark.parametrize(
    ("state", "times", "message"),
    [
        (None, 2, "ran twice"),
        (None, 0, r"blocks\.2 did not run"),
        ("x", 0, "the state was not used"),
        ("hidden", 1, r"has \['x'\], not \['hidden'\]"),
    ],
)
def test_a_forward_that_runs_otherwise_is_an_error(
    state: str | None, times: int, message: str
) -> None:
    toy = Toy()
    context = capture(toy, ONE, "after_last")
    if state is not None:
        context = resume(toy, ONE, "after_last", {state: torch.zeros(1)})
    with pytest.raises(PluginError, match=message), context:
        toy(torch.zeros(1), times=times)


def test_the_head_is_part_of_the_state() -> None:
    assert BLOCKS.names("after_last") == ("hidden_states",)
    assert BLOCKS.names("before_last") == BLOCKS.state
    assert ONE.names("after_last") == ("x",)
    for head in (("temb",), ()):
        with pytest.raises(PluginError, match="must be some of its state"):
            ForwardSplit(blocks=("blocks",), head=head)
    with pytest.raises(PluginError, match="names blocks and state"):
        ForwardSplit(blocks=())
