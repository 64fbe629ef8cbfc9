"""The requests whose videos are recorded, and how each pipeline makes them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from tests.models.hunyuanvideo import upstream
from tests.models.recorded import Record, made_from
from tpuport.models.hunyuanvideo import demo

PROMPT = 'a fox reads "slow down" on a sign'
PLAIN = "two pandas play chess in the rain while a long train of cars goes by"
NEGATIVE = "blur"
#: Three latent frames, which are decoded in two chunks.
SHAPE = {"height": 48, "width": 80, "num_frames": 9, "num_inference_steps": 3}
#: One chunk.
SHORT = {**SHAPE, "num_frames": 5, "num_inference_steps": 2}
#: From an image, whose size is that of SHAPE: decode is compiled once.
LENGTH = {"num_frames": 9, "num_inference_steps": 2}

#: Settings of ``enable_tiling``: small videos take four tiles.
TILES = {
    "tile_sample_min_height": 64,
    "tile_sample_min_width": 64,
    "tile_latent_min_height": 4,
    "tile_latent_min_width": 4,
}

#: The checkpoints: a demo, and what its transformer's config has in place of the
#: demo's. A size class of 64 x 64 pixels makes small videos of images.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any]]] = {
    "1.5": ("1.5", {}),
    "13b": ("13b", {}),
    "small images": ("1.5", {"target_size": 64}),
    "step-distilled": ("1.5", {"target_size": 64, "use_meanflow": True}),
}


@dataclass(frozen=True, kw_only=True)
class Video:
    """A request, of one video or more.

    Attributes:
        checkpoint: of ``CHECKPOINTS``.
        asked: arguments that upstream's pipeline and ``generate`` share.
        seed: one for all, or one for each video.
        guidance: scale of 1.5, where upstream asks its guider for the scale.
        flow_shift: of the noise levels; ``None`` for the scheduler's own.
        embedded: give the prompt as embeddings.
        tiled: decode in ``TILES``.
    """

    checkpoint: str
    asked: Mapping[str, Any]
    seed: int | tuple[int, ...] = 7
    guidance: float | None = None
    flow_shift: float | None = None
    embedded: bool = False
    tiled: bool = False

    def source(self, folder: Path) -> dict[str, str]:
        """What its record must agree on."""
        return made_from(folder, asdict(self))

    def pipeline(self, folder: Path) -> Any:
        """Upstream's, as the request wants it."""
        if self.checkpoint == "13b":
            return upstream.pipeline_13b(folder)
        image = "image" in self.asked
        pipe = upstream.pipeline_15(folder, self.guidance or 6.0, image)
        if self.flow_shift is not None:
            pipe.scheduler.set_shift(self.flow_shift)
        if self.tiled:
            pipe.vae.enable_tiling(**TILES)
        return pipe

    def live(self, folder: Path) -> Record:
        """What upstream makes of it here and now."""
        pipe, asked = self.pipeline(folder), dict(self.asked)
        if self.embedded:
            asked |= embeddings(pipe, asked.pop("prompt"))
        seed = self.seed if isinstance(self.seed, int) else list(self.seed)
        made = upstream.run(pipe, seed, **asked)
        return Record.of(made["frames"], made["latents"])

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate`` for the same."""
        seed = self.seed if isinstance(self.seed, int) else list(self.seed)
        options: dict[str, Any] = {**self.asked, "seed": seed}
        if self.guidance is not None:
            options["guidance_scale"] = self.guidance
        if self.flow_shift is not None:
            options["flow_shift"] = self.flow_shift
        return options


def embeddings(pipe: Any, prompt: str) -> dict[str, torch.Tensor]:
    """What the 1.5 pipeline makes of a prompt, by the names of its arguments."""
    names = ("prompt_embeds", "prompt_embeds_mask")
    names += tuple(f"{name}_2" for name in names)
    return dict(zip(names, pipe.encode_prompt(prompt, device="cpu"), strict=True))


def make_checkpoint(name: str, folder: Path) -> Path:
    """Write a checkpoint into a folder that is not there yet."""
    form, changes = CHECKPOINTS[name]
    folder.mkdir(parents=True)
    (demo.make_demo if form == "1.5" else demo.make_demo_13b)(folder)
    return changed(folder, folder, changes)


def changed(demo_folder: Path, folder: Path, changes: Mapping[str, Any]) -> Path:
    """A checkpoint with another transformer config; weights are made where it needs."""
    from diffusers import HunyuanVideo15Transformer3DModel

    if folder != demo_folder:
        shutil.copytree(demo_folder, folder)
    path = folder / "transformer" / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps(config))
    if changes.get("use_meanflow"):
        torch.manual_seed(0)
        module = HunyuanVideo15Transformer3DModel.from_config(config)
        module.save_pretrained(path.parent)
        # A model that is distilled runs without guidance.
        guider = folder / "guider" / "guider_config.json"
        values = {**json.loads(guider.read_text()), "guidance_scale": 1.0}
        guider.write_text(json.dumps(values))
    return folder


def _initial_latents() -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(1, 32, 3, 3, 5, generator=draw)


#: By the name of their records.
VIDEOS: dict[str, Video] = {
    "hunyuanvideo-1.5-glyphs": Video(
        checkpoint="1.5",
        asked={"prompt": PROMPT, "negative_prompt": NEGATIVE, **SHAPE},
    ),
    "hunyuanvideo-1.5-no-glyphs": Video(
        checkpoint="1.5",
        asked={"prompt": PLAIN, "negative_prompt": NEGATIVE, **SHAPE},
    ),
    "hunyuanvideo-1.5-two-videos-one-seed": Video(
        checkpoint="1.5", asked={"prompt": [PROMPT, PLAIN], **SHAPE}, seed=5
    ),
    "hunyuanvideo-1.5-two-videos-two-seeds": Video(
        checkpoint="1.5", asked={"prompt": [PROMPT, PLAIN], **SHAPE}, seed=(5, 6)
    ),
    "hunyuanvideo-1.5-no-guidance": Video(
        checkpoint="1.5", asked={"prompt": PROMPT, **SHAPE}, guidance=1.0
    ),
    "hunyuanvideo-1.5-flow-shift": Video(
        checkpoint="1.5",
        asked={"prompt": PROMPT, **SHAPE, "num_inference_steps": 5},
        seed=1,
        flow_shift=2.5,
    ),
    "hunyuanvideo-1.5-embeddings": Video(
        checkpoint="1.5",
        asked={"prompt": PROMPT, "latents": _initial_latents(), **SHAPE},
        seed=9,
        guidance=1.0,
        embedded=True,
    ),
    "hunyuanvideo-1.5-tiles": Video(
        checkpoint="1.5",
        asked={
            "prompt": PLAIN,
            **SHORT,
            "height": 64,
            "width": 96,
            "num_inference_steps": 1,
        },
        seed=1,
        tiled=True,
    ),
    "hunyuanvideo-1.5-image": Video(
        checkpoint="small images",
        asked={"prompt": PROMPT, "image": upstream.picture(), **LENGTH},
    ),
    "hunyuanvideo-1.5-image-two-videos": Video(
        checkpoint="small images",
        asked={
            "prompt": [PLAIN, PROMPT],
            "image": upstream.picture((150, 90), seed=1),
            **LENGTH,
        },
        seed=(3, 4),
    ),
    "hunyuanvideo-1.5-step-distilled": Video(
        checkpoint="step-distilled",
        asked={
            "prompt": PROMPT,
            "image": upstream.picture(),
            **LENGTH,
            "num_inference_steps": 4,
        },
        seed=2,
        guidance=1.0,
    ),
    "hunyuanvideo-13b-guidance-6": Video(
        checkpoint="13b", asked={"prompt": PROMPT, "guidance_scale": 6.0, **SHAPE}
    ),
    "hunyuanvideo-13b-guidance-2": Video(
        checkpoint="13b", asked={"prompt": PROMPT, "guidance_scale": 2.0, **SHAPE}
    ),
    "hunyuanvideo-13b-true-guidance": Video(
        checkpoint="13b",
        asked={
            "prompt": [PROMPT, PLAIN],
            "negative_prompt": [NEGATIVE, NEGATIVE],
            "true_cfg_scale": 3.0,
            **SHORT,
        },
        seed=(7, 8),
    ),
}
