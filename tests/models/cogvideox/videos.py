"""The requests whose videos are recorded, and how each pipeline makes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    CogVideoXImageToVideoPipeline,
    CogVideoXPipeline,
    CogVideoXVideoToVideoPipeline,
)
from PIL import Image

from tests.models.conftest import (
    IMAGE_FORMS,
    checkpoint_of,
    frames_and_latents,
    generators_of,
    pictures,
)
from tests.models.recorded import Record, made_from

PROMPT = "a fox runs through snow"
PROMPTS = [PROMPT, "a boat on a river at night"]
TOKENS = 20
#: Pixels of videos from a text or a video, and from an image.
SIZE: dict[str, Any] = {"height": 48, "width": 64}
IMAGE_SIZE: dict[str, Any] = {"height": 64, "width": 96}

#: Of values of frames. These are many and their records small.
EACH = 41

make_checkpoint = checkpoint_of


def images(video: np.ndarray) -> list[Any]:
    """Frames as upstream takes them."""
    return [Image.fromarray(frame) for frame in video]


@dataclass(frozen=True, kw_only=True)
class Video:
    """A request, of one video or more.

    Attributes:
        checkpoint: the form of the checkpoint.
        asked: arguments that upstream's pipelines and ``generate`` share; ``image`` is
            uint8 [N, Y, X, 3], ``video`` uint8 [F, Y, X, 3] and may have more frames
            than ``num_frames``.
        seed: one for all, or one for each video.
        dynamic: guidance that changes with the step.
        tokens: of the text.
    """

    checkpoint: str
    asked: Mapping[str, Any]
    seed: int | tuple[int, ...] = 7
    dynamic: bool = True
    tokens: int = TOKENS

    @property
    def seeds(self) -> int | list[int]:
        return self.seed if isinstance(self.seed, int) else list(self.seed)

    def source(self, folder: Path) -> dict[str, str]:
        """What its record must agree on."""
        return made_from(folder, asdict(self))

    def live(self, folder: Path) -> Record:
        """What upstream makes of it here and now."""
        asked = {"guidance_scale": 6.0, **self.asked}
        cls: Any = CogVideoXPipeline
        if "image" in asked:
            cls = CogVideoXImageToVideoPipeline
            asked["image"] = images(asked["image"])
        if "video" in asked:
            cls = CogVideoXVideoToVideoPipeline
            # Upstream takes the video as long as it is, and once for each prompt.
            video = images(asked["video"][: asked.pop("num_frames")])
            prompt = asked["prompt"]
            asked["video"] = video if isinstance(prompt, str) else [video] * len(prompt)
        pipe = cls.from_pretrained(folder)
        pipe.set_progress_bar_config(disable=True)
        made = frames_and_latents(
            pipe,
            **asked,
            use_dynamic_cfg=self.dynamic,
            generator=generators_of(self.seeds),
            max_sequence_length=self.tokens,
        )
        return Record.of(*made, each=EACH)

    def options(self) -> dict[str, Any]:
        """Arguments of ``generate`` for the same, with the defaults of the form."""
        options: dict[str, Any] = {**self.asked, "seed": self.seeds}
        if "image" in options and len(options["image"]) == 1:
            options["image"] = options["image"][0]
        elif "image" in options:
            options["image"] = list(options["image"])
        if self.tokens != TOKENS:
            options["max_sequence_length"] = self.tokens
        return options


def _draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def _text(form: str, steps: int, frames: int = 9, **changes: Any) -> Video:
    """Of a text: 48 x 64 pixels."""
    given = {k: changes.pop(k) for k in ("seed", "dynamic", "tokens") if k in changes}
    if "prompt_embeds" not in changes:
        changes = {"prompt": PROMPT, **changes}
    asked = {**SIZE, "num_frames": frames, "num_inference_steps": steps, **changes}
    return Video(checkpoint=form, asked=asked, **{"dynamic": form != "2b", **given})


def _image(form: str, steps: int, frames: int = 9, **changes: Any) -> Video:
    """Of an image: 64 x 96 pixels."""
    return _text(form, steps, frames, **{"image": pictures(1), **IMAGE_SIZE, **changes})


def _video(form: str, strength: float, steps: int, **changes: Any) -> Video:
    """Of a video of which the last frames are not used."""
    return _text(
        form, steps, **{"video": pictures(12), "strength": strength, **changes}
    )


def _unguided(form: str) -> Video:
    picture = pictures(1, 64, 96, seed=5)
    return _image(form, 3, seed=3, guidance_scale=1.0, image=picture)


def _two_images(form: str, seed: int | tuple[int, ...]) -> Video:
    return _image(form, 2, seed=seed, prompt=PROMPTS, image=pictures(2))


def _two_from_one_video(seed: int | tuple[int, ...]) -> Video:
    return _video("5b", 0.5, 4, seed=seed, prompt=PROMPTS, video=pictures(9))


def _named(videos: Mapping[str, Video]) -> dict[str, Video]:
    return {f"cogvideox-{name}": video for name, video in videos.items()}


#: DDIM and DPM. Of 4 steps, 0.3 leaves one; of 7, 0.5 leaves three.
DEFAULT_STRENGTHS = (("2b", 0.5, 7), ("5b", 0.5, 7), ("2b", 0.3, 4), ("5b", 1.0, 3))

#: By the name of their records.
VIDEOS = _named(
    {
        "2b": _text("2b", 3, negative_prompt="blur"),
        "5b": _text("5b", 3, negative_prompt="blur"),
        "1.5-5b": _text("1.5-5b", 3, 17, negative_prompt="blur"),
        "2b-17-frames": _text("2b", 2, 17, seed=3),
        "5b-no-guidance": _text("5b", 2, guidance_scale=1.0),
        "5b-constant-guidance": _text("5b", 3, dynamic=False),
        "5b-30-tokens": _text("5b", 2, tokens=30),
        "5b-1-steps": _text("5b", 1),
        "5b-two-videos-one-seed": _text("5b", 2, prompt=PROMPTS, seed=5),
        "5b-two-videos-two-seeds": _text("5b", 2, prompt=PROMPTS, seed=(5, 6)),
        "2b-embeddings": _text(
            "2b",
            3,
            seed=1,
            prompt_embeds=_draw(1, TOKENS, 32),
            negative_prompt_embeds=_draw(1, TOKENS, 32, seed=1),
            latents=_draw(1, 3, 4, 6, 8, seed=2),
        ),
        "2b-prompt-embeds": _text("2b", 2, prompt_embeds=_draw(1, TOKENS, 32)),
        # The second frame count of the first form is one that its learned positions
        # are not for; the second form pads 5 latent frames to 6, and 3 to 4.
        **{
            f"{form}-{frames}-frames": _image(form, 3, frames, negative_prompt="blur")
            for form in IMAGE_FORMS
            for frames in (9, 17)
        },
        # The image is sampled and the sampler draws from the seed all the same.
        "5b-i2v-latents": _image("5b-i2v", 3, seed=2, latents=_draw(1, 3, 4, 8, 12)),
        "1.5-5b-i2v-latents": _image(
            "1.5-5b-i2v", 3, seed=2, latents=_draw(1, 4, 4, 8, 12)
        ),
        "1.5-5b-i2v-no-guidance": _unguided("1.5-5b-i2v"),
        "1.5-5b-i2v-two-videos-two-seeds": _two_images("1.5-5b-i2v", (5, 6)),
        **{
            f"{form}-v2v-{strength}-of-{steps}": _video(form, strength, steps)
            for form, strength, steps in DEFAULT_STRENGTHS
        },
        "5b-v2v-two-chunks": _video(
            *("5b", 0.6, 4),
            frames=17,
            seed=3,
            guidance_scale=1.0,
            dynamic=False,
            video=pictures(17, 48, 64),
        ),
        "5b-v2v-two-videos-two-seeds": _two_from_one_video((5, 6)),
    }
)

#: Made live where they are tested, which is in a sweep.
SWEPT = _named(
    {
        "5b-7-steps": _text("5b", 7),
        "5b-i2v-no-guidance": _unguided("5b-i2v"),
        "5b-i2v-two-videos-two-seeds": _two_images("5b-i2v", (5, 6)),
        # One seed's draws for two videos are in ``test_conditioning.py`` too.
        **{f"{f}-two-videos-one-seed": _two_images(f, 5) for f in IMAGE_FORMS},
        "5b-v2v-two-videos-one-seed": _two_from_one_video(5),
        **{
            f"{form}-v2v-{strength}-of-{steps}": _video(form, strength, steps)
            for form in ("2b", "5b")
            for strength, steps in ((0.5, 4), (0.5, 7), (0.8, 5), (1.0, 3), (0.3, 4))
            if f"cogvideox-{form}-v2v-{strength}-of-{steps}" not in VIDEOS
        },
    }
)
ALL = VIDEOS | SWEPT


def asked_of(prefix: str) -> list[Any]:
    """Names of videos for tests to be run with, without ``cogvideox-``."""
    return [
        pytest.param(
            name.removeprefix("cogvideox-"), marks=[pytest.mark.sweep] * (name in SWEPT)
        )
        for name in ALL
        if prefix in name
    ]


def expected(name: str, folder: Path) -> Record:
    """What upstream makes of a video, by its record or live."""
    if name in SWEPT:
        return SWEPT[name].live(folder)
    return Record.read(name, VIDEOS[name].source(folder))


def check_video(name: str, session: Any, **more: Any) -> Any:
    """Hold what a session makes of a video to upstream's, and return what was made."""
    name = f"cogvideox-{name}"
    made = session.generate(**ALL[name].options() | more)
    expected(name, session.checkpoint.folder).check(made.frames, made.latents.numpy())
    return made
