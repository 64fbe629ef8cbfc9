"""A model with stages of its own on one page, for the tests of such models.

``toys.installed_toy`` loads it as an installed plugin.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tpuport.core.files.stage_tensors import TensorSpec
from tpuport.core.spec.component import Component
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.request import Request
from tpuport.core.spec.stage import Program, Stage
from tpuport.core.spec.stage_work import Call, StageContext, Work
from tpuport.core.spec.variant import FrameRule, SizeRule, Variant
from tpuport.core.tracing.context import AttentionPolicy
from tpuport.core.weights.checkpoint import Checkpoint
from tpuport.core.weights.sharding import ShardRule
from tpuport.hookspecs import hookimpl

CLASSES = {
    "encoder": "ToyEncoder",
    "transformer": "ToyTransformer",
    "vae": "ToyDecoder",
}

# --- encode


def letters(ctx: StageContext) -> Any:
    """Prompts as letters, [B, L]."""
    import torch

    rows = [[ord(c) % 128 for c in text[:8].ljust(8)] for text in ctx.prompts]
    return torch.tensor(rows)


def plan_encode(ctx: StageContext) -> Work:
    """One call a batch."""
    return work("run", {"ids": letters(ctx)}, "prompt_embeds")


# --- denoise: `steps` calls that hand the latents on


def latent_shape(request: Request, checkpoint: Checkpoint) -> tuple[int, ...]:
    """[videos, frames, channels, rows, columns] of a batch's noise."""
    rows, columns = request.height // 8, request.width // 8
    return (request.batch_size, request.num_frames, 8, rows, columns)


def noise(ctx: StageContext) -> Any:
    """[B, T, C, Y, X] from the seeds, as upstream would draw it."""
    import torch

    request = ctx.request
    shape = latent_shape(request, ctx.checkpoint)[1:]
    generators = ctx.generators()
    if len(generators) == 1:
        return torch.randn(request.batch_size, *shape, generator=generators[0])
    return torch.stack([torch.randn(shape, generator=g) for g in generators])


def step(model: Any, carry: Any, constants: Any, inputs: Any) -> tuple[Any, Any]:
    """One step on JAX arrays: ``model(...)`` calls upstream's forward."""
    latents = model.constrain(carry, "dp")
    return carry + inputs["size"] * model(latents, constants), None


def plan_denoise(ctx: StageContext) -> Work:
    """One call a step; what differs between calls is an input, not a constant."""
    import numpy as np

    from tpuport.core.arrays import to_torch

    steps = ctx.request.num_inference_steps
    return Work(
        carry=noise(ctx),
        constants=ctx.inputs["prompt_embeds"],
        calls=(Call("step", {"size": np.float32(1 / steps)}) for _ in range(steps)),
        total=steps,
        finish=lambda carry, outputs: {"latents": to_torch(carry)},
    )


# --- decode


def plan_decode(ctx: StageContext) -> Work:
    """One call a batch."""
    return work("run", {"latents": ctx.inputs["latents"]}, "frames")


# --- shared by the stages


def run(model: Any, carry: None, constants: None, inputs: Any) -> tuple[None, Any]:
    """Upstream's forward, nothing else."""
    return None, model(**inputs)


def work(program: str, inputs: Mapping[str, Any], name: str) -> Work:
    """One call whose output is the stage's only tensor."""
    import numpy as np

    from tpuport.core.arrays import to_torch

    convert = np.asarray if name == "frames" else to_torch
    return Work(
        carry=None,
        constants=None,
        calls=[Call(program, inputs)],
        total=1,
        finish=lambda carry, outputs: {name: convert(outputs[0])},
    )


def upstream(ctx: StageContext, component: str) -> Any:
    """The plain torch module, for ``--backend diffusers`` and the comparison."""
    import toy_upstream

    cls = getattr(toy_upstream, CLASSES[component])
    folder = ctx.checkpoint.folder / component
    # Through the context, which keeps it between runs when weights are kept loaded.
    return ctx.upstream(component, lambda: cls.from_pretrained(folder).eval())


def upstream_encode(ctx: StageContext) -> dict[str, Any]:
    """The same by upstream's own code."""
    return {"prompt_embeds": upstream(ctx, "encoder")(letters(ctx)).detach()}


def upstream_denoise(ctx: StageContext) -> dict[str, Any]:
    """The same by upstream's own code."""
    model, latents = upstream(ctx, "transformer"), noise(ctx)
    for _ in range(steps := ctx.request.num_inference_steps):
        latents = latents + model(latents, ctx.inputs["prompt_embeds"]).detach() / steps
    return {"latents": latents}


def upstream_decode(ctx: StageContext) -> dict[str, Any]:
    """The same by upstream's own code."""
    return {"frames": upstream(ctx, "vae")(ctx.inputs["latents"]).detach().numpy()}


def make_demo(folder: Path, variant: str) -> None:
    """A checkpoint in the diffusers layout, with random weights."""
    import torch
    import toy_upstream

    torch.manual_seed(0)
    index: dict[str, Any] = {"_class_name": "ToyPipeline"}
    for name, cls in CLASSES.items():
        getattr(toy_upstream, cls)().save_pretrained(folder / name)
        index[name] = ["toy_upstream", cls]
    (folder / "model_index.json").write_text(json.dumps(index))


# --- the port


def component(name: str, *rules: ShardRule, **options: Any) -> Component:
    """A component of the class that ``CLASSES`` names."""
    path = f"toy_upstream:{CLASSES[name]}"
    return Component(name=name, class_path=path, sharding=rules, **options)


def tensor(name: str, *shape: str, role: str = "") -> TensorSpec:
    """What a stage hands on, in float32."""
    return TensorSpec(name=name, shape=shape, dtypes=("float32",), role=role)


DEMO = Variant(
    name="demo",
    title="random weights",
    repo_id="",
    height=64,
    width=64,
    num_frames=5,
    fps=8,
    num_inference_steps=3,
    guidance_scale=1.0,
    dtype="float32",
    frames=FrameRule(step=4),
    sizes=SizeRule(multiple=8),
)

PORT = ModelPort(
    name="toy",
    title="a toy, to read",
    pipelines=("ToyPipeline",),
    components={
        "encoder": component("encoder", ShardRule(pattern=r"embed\.weight", spec=())),
        "transformer": component(
            "transformer",
            ShardRule(pattern=r"to_q\.weight", spec=("tp", None), note="heads over tp"),
            ShardRule(pattern=r"to_q\.bias", spec=("tp",)),
            ShardRule(pattern=r"to_out\.weight", spec=(None, "tp")),
            ShardRule(pattern=r"to_out\.bias", spec=()),
            heads=lambda config: int(config["heads"]),
        ),
        "vae": component("vae", ShardRule(pattern=r"to_rgb\.(weight|bias)", spec=())),
    },
    stages=(
        Stage(
            name="encode",
            unit="batch",
            components=("encoder",),
            programs={"run": Program(component="encoder", fn=run)},
            plan=plan_encode,
            upstream=upstream_encode,
            writes=(
                tensor("prompt_embeds", "videos", "letters", "width", role="prompt"),
            ),
        ),
        Stage(
            name="denoise",
            unit="step",
            components=("transformer",),
            programs={"step": Program(component="transformer", fn=step)},
            plan=plan_denoise,
            upstream=upstream_denoise,
            writes=(tensor("latents", "videos", "T", "C", "Y", "X"),),
            batch_rows=lambda request: request.batch_size,
        ),
        Stage(
            name="decode",
            unit="batch",
            components=("vae",),
            programs={"run": Program(component="vae", fn=run)},
            plan=plan_decode,
            upstream=upstream_decode,
            writes=(),
        ),
    ),
    variants=(DEMO,),
    patches=(),
    overrides=(),
    attention=AttentionPolicy(batch="dp", heads="tp", sequence="sp"),
    options=(),
    detect=lambda checkpoint: DEMO,
    check=lambda request, variant, checkpoint: None,
    latent_shape=latent_shape,
    make_demo=make_demo,
    demo_version="1",
)


@hookimpl
def tpuport_model() -> ModelPort:
    """Hand over the port."""
    return PORT
