"""A ported pipeline is upstream's object; what makes no sense on a mesh says so."""

from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.hooks import FirstBlockCacheConfig, PyramidAttentionBroadcastConfig
from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0
from peft import LoraConfig

import tpuport
from tests.core.heard import Heard
from tests.pipelines.example import all_examples, made
from tests.tolerances import TOLERANCES
from tpuport import targets
from tpuport.core.drive.driving import driving
from tpuport.core.enums import Backend
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.seam.entry import PortError
from tpuport.core.seam.ported import modules_of, port_module, seam_of
from tpuport.core.spec.run_settings import RunSettings
from tpuport.core.tracing.patching import Patch
from tpuport.errors import MeshError, UsageError


def pipeline_of(name: str = "WanPipeline") -> tuple[Any, dict[str, Any]]:
    pipeline, call = made(all_examples()[name])
    return pipeline, {**call, "output_type": "latent"}


def latents(pipeline: Any, call: dict[str, Any], **more: Any) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(5)
    found: torch.Tensor = pipeline(**call, **more, generator=generator).frames
    return found


def near(found: torch.Tensor, expected: torch.Tensor) -> bool:
    return float((found - expected).abs().max()) < TOLERANCES["video float32"]


@pytest.fixture(scope="module")
def upstream() -> torch.Tensor:
    return latents(*pipeline_of())


def test_a_ported_pipeline_is_the_one_that_was_given(upstream: torch.Tensor) -> None:
    pipeline, call = pipeline_of()
    kind, parts = type(pipeline), dict(pipeline.components)
    signature = inspect.signature(pipeline.transformer.forward)
    seen: list[int] = []

    def note(pipe: Any, step: int, timestep: Any, kwargs: Any) -> dict[str, Any]:
        seen.append(step)
        return {}

    assert tpuport.port(pipeline) is pipeline
    assert type(pipeline) is kind
    assert pipeline.components == parts
    assert inspect.signature(pipeline.transformer.forward) == signature
    assert near(latents(pipeline, call, callback_on_step_end=note), upstream)
    assert seen == [0, 1]
    names = set(seam_of(pipeline).entries)
    assert names == {"text_encoder", "transformer"}


def test_unport_gives_upstreams_pipeline_back(upstream: torch.Tensor) -> None:
    pipeline, call = pipeline_of()
    own = {name: set(vars(c)) for name, c in modules_of(pipeline).items()}
    with tpuport.ported(pipeline):
        latents(pipeline, call)
    # Upstream itself notes hooks on a transformer that it calls.
    for name, module in modules_of(pipeline).items():
        assert set(vars(module)) - {"_diffusers_hook"} == own[name]
    assert torch.equal(latents(pipeline, call), upstream)
    with pytest.raises(UsageError, match="is not ported"):
        tpuport.unport(pipeline)


def test_two_ported_pipelines_do_not_see_each_other(upstream: torch.Tensor) -> None:
    (one, call), (other, _) = pipeline_of(), pipeline_of()
    tpuport.port(one)
    tpuport.port(other, mesh="sp=2")
    tpuport.unport(one)
    assert near(latents(other, call), upstream)
    assert "transformer" in seam_of(other).entries


def test_a_pipeline_that_nobody_holds_goes_with_its_arrays() -> None:
    pipeline, call = pipeline_of()
    tpuport.port(pipeline)
    latents(pipeline, call)
    entry = seam_of(pipeline).entries["transformer"]
    assert entry._weights
    array = weakref.ref(next(iter(entry._weights.values())))
    gone = weakref.ref(pipeline), weakref.ref(pipeline.transformer), array
    scheduler = pipeline.scheduler  # others may hold a part
    del pipeline, entry
    gc.collect()
    assert [one() for one in gone] == [None, None, None]
    scheduler.set_timesteps(2)
    noise = torch.zeros(1, 4, 1, 2, 2)
    assert scheduler.step(noise, scheduler.timesteps[0], noise).prev_sample is not None


def test_ports_that_share_a_scheduler_hear_of_their_own_steps() -> None:
    one, other = (pipeline_of()[0] for _ in range(2))
    other.register_modules(scheduler=one.scheduler)
    scheduler, noise = one.scheduler, torch.zeros(1, 4, 1, 2, 2)
    for pipeline in (one, other):
        tpuport.port(pipeline)
    for pipeline in (one, other):
        scheduler.set_timesteps(2)
        with driving(pipeline, seam_of(pipeline).journal, Backend.TPUPORT) as drive:
            scheduler.step(noise, scheduler.timesteps[0], noise)
        assert len(drive.steps) == 1
    for pipeline in (one, other):
        tpuport.unport(pipeline)
    assert "step" not in vars(scheduler)


REFUSED: dict[str, Callable[[Any], Any]] = {
    "to a GPU": lambda pipe: pipe.to("cuda"),
    "a module to a GPU": lambda pipe: pipe.transformer.to("cuda:1"),
    "offload": lambda pipe: pipe.enable_model_cpu_offload(),
    "offload in sequence": lambda pipe: pipe.enable_sequential_cpu_offload(),
    "another backend": lambda pipe: pipe.transformer.set_attention_backend("flash"),
    "parallelism": lambda pipe: pipe.transformer.enable_parallelism(config=None),
    "a second port": lambda pipe: tpuport.port(pipe),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_makes_no_sense_says_so(name: str) -> None:
    pipeline, _ = pipeline_of()
    tpuport.port(pipeline)
    with pytest.raises(UsageError, match=r"tpuport|port\("):
        REFUSED[name](pipeline)


def cast_by_layers(module: Any) -> None:
    module.enable_layerwise_casting(
        storage_dtype=torch.bfloat16, compute_dtype=torch.float32
    )


def offloaded(module: Any) -> None:
    module.enable_group_offload(
        onload_device=torch.device("cpu"), offload_type="leaf_level"
    )


def reusing(module: Any) -> None:
    module.enable_cache(FirstBlockCacheConfig(threshold=10.0))


@pytest.mark.parametrize(
    ("change", "told", "after"),
    [
        (cast_by_layers, "layerwise casting: leave it out", "leave it out"),
        (offloaded, "offloading: leave it out", "components take turns"),
        (reusing, "port the pipeline first, and call enable_cache after", None),
    ],
)
def test_the_remedy_for_hooks_is_one_that_works(
    change: Callable[[Any], None], told: str, after: str | None
) -> None:
    pipeline, _ = pipeline_of()
    change(pipeline.transformer)
    with pytest.raises(UsageError, match=told):
        tpuport.port(pipeline)
    other, _ = pipeline_of()
    tpuport.port(other)
    if after is None:
        change(other.transformer)
        return
    with pytest.raises(UsageError, match=after):
        change(other.transformer)


def test_a_mesh_that_divides_no_heads_is_one_line() -> None:
    with pytest.raises(MeshError, match=r"the 2 heads nor .*use sp=3$") as caught:
        tpuport.port(pipeline_of()[0], mesh="tp=3")
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)


def test_what_means_the_same_is_honoured() -> None:
    pipeline, _ = pipeline_of()
    tpuport.port(pipeline)
    pipeline.transformer.set_attention_backend("native")
    assert pipeline.to("cpu") is pipeline
    assert pipeline.to(torch.bfloat16) is pipeline
    assert pipeline.transformer.dtype == torch.bfloat16
    with pytest.raises(UsageError, match=r"'nativ'.*: diffusers has no such backend"):
        pipeline.transformer.set_attention_backend("nativ")


def test_a_component_may_stay_on_the_host(upstream: torch.Tensor) -> None:
    pipeline, call = pipeline_of()
    tpuport.port(pipeline, on_host="text_encoder")
    assert near(latents(pipeline, call), upstream)
    assert set(seam_of(pipeline).entries) == {"transformer"}
    with pytest.raises(UsageError, match="did you mean text_encoder"):
        tpuport.port(pipeline_of()[0], on_host=["text_encode"])


def adapted(pipeline: Any, seed: int = 1) -> None:
    torch.manual_seed(seed)
    config = LoraConfig(r=2, target_modules=["to_q", "to_v"], init_lora_weights=False)
    pipeline.transformer.add_adapter(config, adapter_name="a")


def scaled(pipeline: Any) -> None:
    pipeline.transformer.set_adapters("a", 0.5)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_an_adapter_is_in_the_numbers(after: bool, upstream: torch.Tensor) -> None:
    (theirs, call), (mine, _) = pipeline_of(), pipeline_of()
    adapted(theirs)
    expected = latents(theirs, call)
    assert not near(expected, upstream)
    if after:
        tpuport.port(mine)
        assert near(latents(mine, call), upstream)
        adapted(mine)
    else:
        adapted(mine)
        tpuport.port(mine)
    assert near(latents(mine, call), expected)
    if after:  # peft changes a dict, then weights, in place
        for change in (scaled, lambda pipeline: pipeline.fuse_lora()):
            change(theirs), change(mine)
            assert near(latents(mine, call), latents(theirs, call))
        mine.unfuse_lora()
    mine.transformer.disable_adapters()
    assert near(latents(mine, call), upstream)


def came_and_went(pipeline: Any, seed: int = 1) -> None:
    adapted(pipeline, seed)
    pipeline.fuse_lora()
    pipeline.unload_lora_weights()


def fused_weakly(pipeline: Any) -> None:
    adapted(pipeline)
    pipeline.transformer.set_adapters("a", 0.25)
    pipeline.fuse_lora()


def fused_again(pipeline: Any, scale: float) -> None:
    """The second time the programs are known."""
    pipeline.unfuse_lora()
    pipeline.transformer.set_adapters("a", scale)
    pipeline.fuse_lora()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("WanPipeline", (came_and_went, partial(came_and_went, seed=2))),
        (
            "CogVideoXPipeline",
            (fused_weakly, *(partial(fused_again, scale=s) for s in (1.0, 0.25))),
        ),
    ],
    ids=["came and went", "fused again"],
)
def test_weights_that_an_adapter_changed_between_two_calls_are_placed_again(
    name: str, changes: tuple[Callable[[Any], None], ...]
) -> None:
    """Modules, tensors, versions and addresses are as they were before."""
    (theirs, call), (mine, _) = pipeline_of(name), pipeline_of(name)
    before = latents(theirs, call)
    tpuport.port(mine)
    assert near(latents(mine, call), before)
    for change in changes:
        change(theirs), change(mine)
        expected = latents(theirs, call)
        assert not near(expected, before)
        assert near(latents(mine, call), expected)
        before = expected


def test_a_call_without_a_change_places_no_weights_again() -> None:
    mine, call = pipeline_of()
    tpuport.port(mine)
    latents(mine, call)
    placed = {name: e._weights for name, e in seam_of(mine).entries.items()}
    latents(mine, call)
    pipeline_of()  # modules of another pipeline are made, children and all
    latents(mine, call)
    for name, entry in seam_of(mine).entries.items():
        assert entry._weights is placed[name]


def test_a_component_that_was_replaced_is_refused() -> None:
    """Also a deep copy: both would run what nobody ported."""
    mine, call = pipeline_of()
    other = mine.transformer
    theirs, _ = pipeline_of()
    tpuport.port(theirs)
    with pytest.raises(UsageError, match="deepcopy"):
        copy.deepcopy(theirs.transformer)
    for whole in (theirs, theirs.transformer):
        with pytest.raises(UsageError, match="pickle"):
            pickle.dumps(whole)
    theirs.transformer = other
    with pytest.raises(UsageError, match="transformer was replaced"):
        latents(theirs, call)


def caching(pipeline: Any) -> list[Any]:
    return [
        PyramidAttentionBroadcastConfig(
            spatial_attention_block_skip_range=2,
            spatial_attention_timestep_skip_range=(-1, 1001),
            current_timestep_callback=lambda: pipeline.current_timestep,
        ),
        FirstBlockCacheConfig(threshold=10.0),
    ]


@pytest.mark.parametrize(
    ("name", "which"),
    [("WanPipeline", 0), ("WanPipeline", 1), ("CogVideoXPipeline", 1)],
    ids=["broadcast", "first block", "a plugin's blocks"],
)
def test_upstreams_caches_are_honoured(
    name: str, which: int, upstream: torch.Tensor
) -> None:
    """Blocks of a plugin that hooks call are upstream's."""
    theirs, call = pipeline_of(name)
    theirs.transformer.enable_cache(caching(theirs)[which])
    expected = latents(theirs, call)
    assert not torch.equal(expected, upstream)
    mine, _ = pipeline_of(name)
    tpuport.port(mine)
    mine.transformer.enable_cache(caching(mine)[which])
    assert near(latents(mine, call), expected)


@pytest.mark.parametrize(
    "keywords",
    [
        {"model": "cogvideox"},
        {"sharding": "fsdp"},
        {"on_host": ["vae"]},
        {"executables": "built"},
    ],
    ids=lambda keywords: next(iter(keywords)),
)
def test_a_keyword_for_another_target_is_refused(keywords: dict[str, Any]) -> None:
    pipeline, _ = pipeline_of()
    module = {"on_host", "executables"} & keywords.keys()
    target = pipeline.transformer if module else pipeline
    if "sharding" in keywords:  # no plugin knows it
        target = pipeline.vae
    with pytest.raises(UsageError, match=f"{next(iter(keywords))}: is for a"):
        tpuport.port(target, **keywords)


def test_a_keyword_that_there_is_not_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="did you mean mesh"):
        tpuport.port(torch.nn.Linear(2, 2), meshes="sp=2")
    with pytest.raises(TypeError, match="cache_dir, executables, lora, mesh, model"):
        tpuport.port(torch.nn.Linear(2, 2), quantized=True)


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_chips_that_stay_unused_are_told(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tpuport.core.mesh.device_mesh.place_mesh", lambda *_: None)
    devices: Any = [SimpleNamespace(platform=platform)] * 8
    told = Heard()
    targets.place(MeshSpec(sp=3), devices, told)
    assert len(told.lines) == (platform == "tpu")
    assert all("3 of 8" in line for line in told.lines)


def test_a_plugin_that_knows_the_class_is_used_and_says_so() -> None:
    pipeline, call = pipeline_of("CogVideoXPipeline")
    expected = latents(pipeline, call)
    told = Heard()
    tpuport.port(pipeline, mesh="sp=2", reporter=told)
    assert near(latents(pipeline, call), expected)
    assert "with the plugin of cogvideox and native blocks" in told.lines[0]
    seam = seam_of(pipeline)
    applied = {p["name"] for p in seam.patches() if p["state"] == "applied"}
    assert any("native" in name for name in applied), applied
    entry = seam.entries["transformer"]
    assert entry.plan is not None
    assert len(entry.plan.rules) > 1
    with pytest.raises(PortError) as refused:
        pipeline(**call, attention_kwargs={"scale": 1})
    said = str(refused.value)
    assert "the native blocks take no attention_kwargs, got scale" in said
    assert "Native blocks of cogvideox are in place: --blocks upstream" in said


class Halved(CogVideoXAttnProcessor2_0):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return tuple(x / 2 for x in super().__call__(*args, **kwargs))


def halved(pipeline: Any) -> None:
    pipeline.transformer.set_attn_processor(Halved())


@pytest.mark.parametrize("change", [adapted, halved])
def test_native_blocks_pass_over_no_adapter_and_no_attention(
    change: Callable[[Any], None],
) -> None:
    theirs, call = pipeline_of("CogVideoXPipeline")
    plain = latents(theirs, call)
    change(theirs)
    expected = latents(theirs, call)
    assert not near(expected, plain)
    told = Heard()
    tpuport.port(theirs, reporter=told)
    assert near(latents(theirs, call), expected)
    assert told.about("without the plugin")


def test_the_plugin_comes_back_when_the_adapter_goes() -> None:
    pipeline, call = pipeline_of("CogVideoXPipeline")
    expected = latents(pipeline, call)
    tpuport.port(pipeline)
    entries = seam_of(pipeline).entries
    config = LoraConfig(r=2, target_modules=["to_q"])
    for change, claimed in (
        (lambda: None, True),
        (lambda: pipeline.transformer.add_adapter(config), False),
        (pipeline.unload_lora_weights, True),
    ):
        change()
        assert near(latents(pipeline, call), expected)
        assert (entries["transformer"]._claim is not None) == claimed


def test_a_cache_that_outlives_the_port_leaves_upstream_as_it_was() -> None:
    pipeline, call = pipeline_of()
    expected = latents(pipeline, call)
    tpuport.port(pipeline)
    pipeline.transformer.enable_cache(caching(pipeline)[1])
    latents(pipeline, call)
    tpuport.unport(pipeline)
    pipeline.transformer.disable_cache()
    assert torch.equal(latents(pipeline, call), expected)
    tpuport.port(pipeline)
    assert near(latents(pipeline, call), expected)


def test_a_patch_on_a_forward_is_in_force() -> None:
    """Of a module within, where the seam stands too."""
    inner = torch.nn.Linear(4, 4)
    module = torch.nn.Sequential(inner, torch.nn.Tanh())
    patch = Patch(
        name="twice",
        target="torch.nn:Linear.forward",
        replacement=lambda self, x: 2 * torch.nn.functional.linear(x, self.weight),
        reason="a test",
        upstream="",
    )
    target = targets.general_target(targets.place_for_port(None), RunSettings())
    ported = port_module(module, replace(target, patches=(patch,)))
    x = torch.linspace(-1, 1, 4)[None]
    expected = torch.tanh(2 * x @ inner.weight.T)
    assert torch.allclose(ported(x), expected, rtol=0, atol=1e-6)
    assert not torch.allclose(module(x), expected, rtol=0, atol=1e-3)
