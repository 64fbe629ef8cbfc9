"""Text and image to video: each node asks a server, and shows how far the job is.

Written against https://docs.comfy.org/custom-nodes: ``INPUT_TYPES`` and what belongs
to it, IMAGE as float32 [B, H, W, 3] in [0, 1], VIDEO as ``VideoFromFile``,
``ProgressBar.update_absolute`` with a preview, ``send_progress_text``, and the
interrupt.
"""

from __future__ import annotations

import contextlib
import io
import json
import time
from typing import Any

import comfy.model_management
import comfy.utils
import numpy as np
from comfy_api.input_impl import VideoFromFile
from PIL import Image
from server import PromptServer

from .jobs import Server, ServerError, own_server

#: Seconds between two looks at a job, and pixels of a preview at most.
_POLL, _PREVIEW = 0.5, 512
#: What all nodes ask. 0, -1 and empty leave a field to the server.
_FIELDS: dict[str, Any] = {
    "server": ("STRING", {"default": own_server() or "http://127.0.0.1:8000"}),
    "prompt": ("STRING", {"default": "", "multiline": True}),
    "seed": ("INT", {"default": 0, "min": 0, "max": 2**31 - 1}),
    "steps": ("INT", {"default": 0, "min": 0, "max": 1000}),
}
_OTHERS: dict[str, Any] = {
    "negative_prompt": ("STRING", {"default": "", "multiline": True}),
    "size": ("STRING", {"default": "", "tooltip": "WIDTHxHEIGHT, one that is ready"}),
    "frames": ("INT", {"default": 0, "min": 0, "max": 10000}),
    "guidance_scale": ("FLOAT", {"default": -1.0, "min": -1.0, "max": 100.0}),
    "extra": ("STRING", {"default": "", "tooltip": "Options of the pipeline, as JSON"}),
}


class TextToVideo:
    """A video from a prompt, and the JSON that `tpuport replay` makes it again from."""

    CATEGORY = "tpuport"
    FUNCTION = "make"
    RETURN_TYPES = ("VIDEO", "STRING")
    RETURN_NAMES = ("video", "sidecar")
    DESCRIPTION = __doc__

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": dict(_FIELDS),
            "optional": dict(_OTHERS),
            "hidden": {"unique_id": "UNIQUE_ID"},
        }

    def make(self, **given: Any) -> tuple[Any, str]:
        """Wait for the video; an interrupt deletes the job."""
        shown = _Shown(str(given.pop("unique_id", "")))
        server = Server(given.pop("server"), shown.away)
        image = given.pop("image", None)
        job = server.create(_request(**given), None if image is None else _png(image))
        name = job["id"]
        try:
            while job["status"] in ("queued", "in_progress"):
                shown.see(job, server)
                time.sleep(_POLL)
                job = server.job(name)
        except comfy.model_management.InterruptProcessingException:
            with contextlib.suppress(ServerError):  # it may be away
                server.delete(name)
            raise
        if job["status"] == "failed":
            raise ServerError((job["error"] or {}).get("message", "the job failed"))
        shown.done()
        video = VideoFromFile(io.BytesIO(server.content(name, "video")))
        return video, server.content(name, "sidecar").decode()


class ImageToVideo(TextToVideo):
    """A video that starts from the first of the images."""

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        found = super().INPUT_TYPES()
        found["required"] = {"image": ("IMAGE",), **found["required"]}
        return found


class _Shown:
    """How far a job is: the bar and the picture of the node, and a line of text."""

    def __init__(self, node: str) -> None:
        self._node, self._bar, self._step = node, comfy.utils.ProgressBar(1), -1
        self._text = ""

    def see(self, job: dict[str, Any], server: Server) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        about = job["tpuport"]
        step, steps = about["step"], about["steps"]
        if job["status"] == "queued":
            self._say(f"Waiting, number {about['position']}")
        elif about["stage"] != "denoise":
            self._say(str(about["stage"] or "starting"))
        else:
            left = about["seconds_left"]
            self._say(
                f"Step {step} of {steps}" + (f", {left:.0f} s left" if left else "")
            )
        if job["status"] == "in_progress" and step != self._step:
            self._step = step
            picture = server.preview(job["id"]) if about["preview"] else None
            preview = None
            if picture is not None:
                preview = ("JPEG", Image.open(io.BytesIO(picture)), _PREVIEW)
            self._bar.update_absolute(step, max(steps, 1), preview)

    def away(self) -> None:
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._say("The server does not answer; trying again")

    def done(self) -> None:
        self._bar.update_absolute(1, 1)

    def _say(self, text: str) -> None:
        if text != self._text and self._node:
            self._text = text
            PromptServer.instance.send_progress_text(text, self._node)


def _request(
    prompt: str,
    seed: int,
    steps: int,
    negative_prompt: str = "",
    size: str = "",
    frames: int = 0,
    guidance_scale: float = -1.0,
    extra: str = "",
) -> dict[str, Any]:
    """The fields of docs/serve.md of what is given."""
    fields: dict[str, Any] = {"prompt": prompt, "seed": seed}
    fields |= {"num_inference_steps": steps} if steps else {}
    fields |= {"negative_prompt": negative_prompt} if negative_prompt else {}
    fields |= {"size": size} if size else {}
    fields |= {"num_frames": frames} if frames else {}
    fields |= {"guidance_scale": guidance_scale} if guidance_scale >= 0 else {}
    if extra.strip():
        try:
            fields["extra"] = json.loads(extra)
        except ValueError as error:
            raise ServerError(f"extra is no JSON: {error}") from None
    return fields


def _png(images: Any) -> bytes:
    """The first of images, float32 [B, H, W, C] in [0, 1]."""
    pixels = np.clip(images[0].cpu().numpy() * 255 + 0.5, 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[..., :3]).save(file, "png")
    return file.getvalue()
