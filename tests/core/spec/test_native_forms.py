"""Native blocks of a port: what is put in place, and that a run with them is the same.

The toy's native form has its queries' elements in another order within each head, by a
weight transform, and its keys by a patch: either without the other gives another video.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

import tpuport
from tests.core.heard import Heard, installed_toy
from tests.tolerances import TOLERANCES
from tpuport import plugins
from tpuport.core.programs.program_key import port_packages, session_fields
from tpuport.core.seam.ported import seam_of
from tpuport.core.spec.component import NativeForm
from tpuport.core.spec.model_port import BLOCKS, ModelPort, with_blocks
from tpuport.core.tracing.forward_split import ForwardSplit
from tpuport.core.tracing.patching import Patch
from tpuport.core.weights.transforms import WeightTransform
from tpuport.errors import UsageError

ASKED: dict[str, Any] = {"prompt": ["a cat", "a dog"], "seed": [1, 2]}
HEAD_DIM = 2
DENOISE = "transformer"


def flipped(tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """The rows of each head from last to first."""
    return tensor.unflatten(0, (-1, HEAD_DIM)).flip(1).flatten(0, 1)


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """The toy's, on queries whose elements are flipped."""

    def native(self: Any, latents: torch.Tensor, embeds: torch.Tensor) -> torch.Tensor:
        x = latents.movedim(2, -1)
        q = self.to_q(x.flatten(1, 3)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = embeds.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = torch.stack(v.unbind(-1)[::-1], -1)
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        out = self.to_out(out.transpose(1, 2).flatten(2))
        return out.reshape(x.shape).movedim(-1, 2)

    return native


PATCH = Patch(
    name="toy-native-forward",
    target="toy_upstream:ToyTransformer.forward",
    replacement=forward,
    wraps=True,
    reason="keys in the order of the queries",
    upstream="",
)
TRANSFORM = WeightTransform(
    pattern=r"to_q\.(weight|bias)", apply=flipped, reason="elements in another order"
)
FORM = NativeForm(patches=(PATCH,), transforms=(TRANSFORM,))


def with_form(port: ModelPort, form: NativeForm | None = FORM) -> ModelPort:
    """The port with a native form of its transformer."""
    native = replace(port.components[DENOISE], native=form)
    return replace(port, components={**port.components, DENOISE: native})


@pytest.fixture(scope="module")
def toy() -> Iterator[ModelPort]:
    """The toy as it is installed: without native blocks."""
    with installed_toy() as plugin:
        yield plugin.model


@pytest.fixture
def install(
    toy: ModelPort, monkeypatch: pytest.MonkeyPatch
) -> Callable[[NativeForm], None]:
    """``tpuport.load("toy")`` finds a port with this native form."""
    (name, plugin), *_ = plugins.installed_plugins().items()

    def install(form: NativeForm) -> None:
        found = {name: replace(plugin, model=with_form(toy, form))}
        monkeypatch.setattr(plugins, "installed_plugins", lambda: found)

    return install


# --- what is put in place


def test_native_blocks_come_on_top_of_what_always_holds(toy: ModelPort) -> None:
    always = replace(PATCH, name="always", target="textwrap:dedent")
    split = ForwardSplit(blocks=("blocks",))
    port = replace(with_form(toy), patches=(always,))
    assert (port.blocks, port.components[DENOISE].transforms) == ("upstream", ())
    found = with_blocks(port, "native")
    assert found.blocks == "native"
    assert found.patches == (always, PATCH)
    assert found.components[DENOISE].transforms == (TRANSFORM,)
    assert found.components[DENOISE].split is None
    others = [name for name in port.components if name != DENOISE]
    assert all(found.components[n] is port.components[n] for n in others)
    assert found.stages is port.stages
    # A form that cuts its forward elsewhere, and one that leaves that alone.
    cut = with_blocks(with_form(toy, replace(FORM, split=split)), "native")
    assert cut.components[DENOISE].split is split
    component = replace(toy.components[DENOISE], split=split, native=FORM)
    kept = with_blocks(replace(toy, components={DENOISE: component}), "native")
    assert kept.components[DENOISE].split is split


def test_a_native_patch_takes_the_place_of_one_on_its_target(toy: ModelPort) -> None:
    before = replace(PATCH, name="before")
    other = replace(PATCH, name="other", target="textwrap:dedent")
    port = replace(with_form(toy), patches=(before, other))
    assert with_blocks(port, "native").patches == (other, PATCH)
    assert port.patches == (before, other)
    # Of two native ones neither gives way: they cannot be applied, and are named.
    second = NativeForm(patches=(replace(PATCH, name="second"),))
    components = {
        **port.components,
        "vae": replace(toy.components["vae"], native=second),
    }
    both = with_blocks(replace(port, components=components), "native")
    assert [p.name for p in both.patches] == ["other", PATCH.name, "second"]


def test_a_patch_that_two_components_share_is_in_force_once(toy: ModelPort) -> None:
    components = {n: replace(c, native=FORM) for n, c in toy.components.items()}
    port = replace(toy, components=components)
    assert with_blocks(port, "native").patches == (PATCH,)


def test_upstreams_blocks_are_the_port_as_it_is(toy: ModelPort) -> None:
    port = with_form(toy)
    assert with_blocks(port, "upstream") is port
    native = with_blocks(port, "native")
    assert with_blocks(native, "native") is native
    with pytest.raises(UsageError, match="toy already has native blocks in place"):
        with_blocks(native, "upstream")


def test_every_form_has_the_blocks_it_has(toy: ModelPort) -> None:
    plain = replace(toy, form="plain")
    found = with_blocks(replace(with_form(toy), forms=(plain,)), "native")
    assert [form.blocks for form in found.all_forms] == ["native", "upstream"]
    found = with_blocks(
        replace(toy, forms=(replace(with_form(toy), form="x"),)), "native"
    )
    assert [form.blocks for form in found.all_forms] == ["upstream", "native"]
    assert found.forms[0].patches == (PATCH,)


def test_a_port_without_native_blocks_is_the_same_with_either(toy: ModelPort) -> None:
    assert with_blocks(toy, "native") == toy
    assert with_blocks(with_blocks(toy, "native"), "upstream") == toy


def test_an_unknown_name_lists_the_choices(toy: ModelPort) -> None:
    for make in (
        lambda: with_blocks(toy, "fast"),
        lambda: tpuport.load("toy", blocks="fast"),
        lambda: tpuport.port(torch.nn.Linear(1, 1), "toy", blocks="fast"),
    ):
        with pytest.raises(UsageError, match=r"'fast'.* native, upstream"):
            make()
    assert BLOCKS == ("native", "upstream")


def test_the_source_of_native_blocks_counts_where_they_are_in_place(
    toy: ModelPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(package: str) -> Any:
        def function(*args: Any) -> Any:
            raise AssertionError("called by hashing it")

        function.__module__ = f"{package}.deep"
        monkeypatch.setitem(sys.modules, package, ModuleType(package))
        return function

    form = NativeForm(
        patches=(replace(PATCH, replacement=of("acme_blocks")),),
        transforms=(replace(TRANSFORM, apply=of("acme_weights")),),
    )
    port = with_form(toy, form)
    without = set(port_packages(port))
    assert set(port_packages(with_blocks(port, "native"))) - without == {
        "acme_blocks",
        "acme_weights",
    }
    assert without == set(port_packages(toy))
    other = replace(toy, form="other", forms=(port,))
    assert set(port_packages(with_blocks(other, "native"))) - without == {
        "acme_blocks",
        "acme_weights",
    }


# --- a run with them


def made(cache: Path, **options: Any) -> Any:
    with tpuport.load("toy", cache_dir=cache, **options) as session:
        return session.generate(**ASKED)


@pytest.mark.parametrize("mesh", [None, "dp=2,tp=4"], ids=["one", "mesh"])
def test_native_blocks_give_upstreams_video(
    install: Callable[[NativeForm], None], cache_dir: Path, mesh: str | None
) -> None:
    install(FORM)
    native = made(cache_dir, mesh=mesh)
    upstream = made(cache_dir, mesh=mesh, blocks="upstream")
    assert (native.report.blocks, upstream.report.blocks) == ("native", "upstream")
    difference = float((native.latents - upstream.latents).abs().max())
    assert difference <= TOLERANCES["mesh float32"]
    patched = {
        result.report.blocks: [
            p["name"] for s in result.report.stages for p in s.patches
        ]
        for result in (native, upstream)
    }
    assert PATCH.name in patched["native"]
    assert PATCH.name not in patched["upstream"]


@pytest.mark.parametrize("left_out", ["patches", "transforms"])
def test_half_of_a_native_form_gives_another_video(
    install: Callable[[NativeForm], None], cache_dir: Path, left_out: str
) -> None:
    """So the comparison above would see it."""
    install(replace(FORM, **{left_out: ()}))
    options = {"compile_cache": False}
    native = made(cache_dir, **options)
    assert native.report.blocks == "native"
    upstream = made(cache_dir, blocks="upstream", **options)
    difference = float((native.latents - upstream.latents).abs().max())
    assert difference > 100 * TOLERANCES["mesh float32"]


def test_a_bare_module_takes_blocks_too(
    toy: ModelPort, install: Callable[[NativeForm], None]
) -> None:
    import toy_upstream

    install(FORM)
    torch.manual_seed(0)
    module = toy_upstream.ToyTransformer().eval()
    inputs = torch.randn(1, 2, 8, 4, 4), torch.randn(1, 8, 8)
    wanted = module(*inputs).detach()
    for blocks in BLOCKS:
        program = tpuport.port(module, "toy", blocks=blocks)
        difference = float((program(*inputs) - wanted).abs().max())
        assert difference <= TOLERANCES["component float32"]
    # What was asked for is what is on the devices: the transform moved the rows.
    native = tpuport.port(module, "toy")
    native(*inputs)
    (entry,) = seam_of(native).entries.values()
    assert entry._weights is not None
    native = entry._weights["to_q.weight"]
    expected = flipped(module.to_q.weight.detach(), {})
    np.testing.assert_array_equal(np.asarray(native), expected.numpy())


def test_programs_of_other_blocks_are_other_programs(
    install: Callable[[NativeForm], None], tmp_path: Path
) -> None:
    install(FORM)
    made(tmp_path, blocks="upstream")
    heard = Heard()
    result = made(tmp_path, reporter=heard)
    assert not result.report.warm
    (line,) = heard.about("recompiling denoise/step")
    assert "blocks upstream -> native" in line
    assert made(tmp_path).report.warm
    assert made(tmp_path, blocks="upstream").report.warm


def test_a_plugin_without_native_blocks_has_one_set_of_programs(
    toy: ModelPort, cache_dir: Path
) -> None:
    found = []
    for blocks in BLOCKS:
        with tpuport.load("toy", cache_dir=cache_dir, blocks=blocks) as session:
            found.append(session_fields(session.components, "denoise", DENOISE))
    assert found[0] == found[1]
    assert found[0]["options"]["blocks"] == "upstream"
    first = made(cache_dir)
    second = made(cache_dir, blocks="upstream")
    assert second.report.warm
    np.testing.assert_array_equal(first.latents, second.latents)
    assert first.report.blocks == second.report.blocks == "upstream"
