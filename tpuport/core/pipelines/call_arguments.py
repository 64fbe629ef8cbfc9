"""What a user asks of a pipeline, as keywords of its call, and what the call made."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pydantic
import torch
import yaml

from tpuport.core.files.sources import read_image, read_video
from tpuport.core.pipelines.folder import Media, PipelineFolder
from tpuport.core.spec.run_settings import Asked
from tpuport.errors import UsageError, did_you_mean, quoted

#: A field of Asked -> the parameters of pipelines that stand for it, first come first.
PARAMETERS: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt",),
    "negative_prompt": ("negative_prompt",),
    "height": ("height",),
    "width": ("width",),
    "num_frames": ("num_frames", "video_length", "frames"),
    "fps": ("frame_rate", "fps", "target_fps"),
    "num_inference_steps": ("num_inference_steps",),
    "guidance_scale": ("guidance_scale",),
    "image": ("image", "images", "reference_images"),
    "video": ("video",),
    "strength": ("strength",),
}
#: The fields that are the size of a video.
_SIZE = ("num_frames", "height", "width")
#: An option with one of these words in its name takes a file.
_READ = {
    "image": read_image,
    **dict.fromkeys(("video", "frames", "controls"), read_video),
}
_FILES = tuple(_READ)
#: Frames a second of a file whose pipeline has no such parameter: what
#: ``diffusers.utils.export_to_video`` takes.
FPS = 10.0
#: The option that names another scheduler, where a pipeline has no such parameter.
SCHEDULER = "scheduler"
#: Parameters that tpuport sets, and what to use; names that are no parameters.
_SETS = {
    "generator": "use --seed",
    "latents": "use --latents",
    "output": "leave it out",
    "output_type": "leave it out; --out says what is written",
    "return_dict": "leave it out",
}
_NO_NAMES = frozenset(("self", "state", "kwargs"))
#: Characters of a list of parameters in an error.
_LISTED = 140
_REST = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
#: Outputs of pipelines, and of blocks.
FRAMES, SOUNDS, RATE = (
    ("frames", "videos", "video", "images"),
    ("audio", "sound"),
    "sampling_rate",
)


def arguments_of(folder: PipelineFolder, asked: Asked) -> dict[str, Any]:
    """The keywords of the pipeline's call; prompts and seeds are left out.

    Raises:
        UsageError: the pipeline does not take what was asked for, or needs what was
            not.
    """
    name, takes = folder.class_name, folder.parameters
    found: dict[str, Any] = {}
    for field, names in PARAMETERS.items():
        value = getattr(asked, field)
        if value is None or field == "prompt":
            continue
        known = next((n for n in names if n in takes), None)
        if known is not None:
            found[known] = _media(field, value)
        elif field == "guidance_scale" and folder.has_guider:
            continue  # the component has it: see PipelineFolder
        elif field != "fps":  # the file has one too
            raise UsageError(
                f"--{field.replace('_', '-')}: {name} takes none; "
                f"{_takes(field, folder)}"
            )
    for option, value in asked.options.items():
        if option == SCHEDULER and SCHEDULER not in takes:
            continue  # see PipelineFolder
        if option in found or option == "prompt":
            raise UsageError(f"--option {option}: was given by a flag too")
        found[option] = _option(folder, option, value)
        if option.endswith("_per_prompt") and found[option] != 1:
            raise UsageError(
                f"--option {option}: a file holds one video; make several with "
                "--seed 1,2"
            )
    if asked.prompt and "prompt" not in takes:
        raise UsageError(f"--prompt: {name} takes none")
    for needed, parameter in takes.items():
        if parameter.default is not parameter.empty or parameter.kind in _REST:
            continue
        if needed not in (*found, "prompt"):
            flags = [f"--{f}" for f, known in PARAMETERS.items() if needed in known]
            kind = "FILE" if any(f in needed for f in _FILES) else "VALUE"
            flag = f"{flags[0]} {kind}" if flags else f"--option {needed}={kind}"
            raise UsageError(f"{name} needs {needed}; add {flag}")
    return found


def size_of(given: Mapping[str, Any]) -> dict[str, int]:
    """``num_frames``, ``height`` and ``width`` of a call's keywords; those it has.

    Args:
        given: by the names of upstream's parameters.
    """
    return {
        field: given[name]
        for field in _SIZE
        for name in PARAMETERS[field]
        if isinstance(given.get(name), int)
    }


def media_of(asked: Asked) -> Media:
    """The image and the video that a call is given."""
    fields = [f for f in ("image", "video") if getattr(asked, f) is not None]
    return {field: PARAMETERS[field] for field in fields}


def as_arrays(folder: PipelineFolder) -> dict[str, Any]:
    """The keywords of a call that gives back arrays of frames, and the sound."""
    found: dict[str, Any] = {}
    if "output_type" in folder.all_parameters:
        found["output_type"] = "np"
    if folder.blocks is not None:
        known = folder.blocks.output_names
        found["output"] = [n for n in (*FRAMES, *SOUNDS, RATE) if n in known]
    return found


def default_of(folder: PipelineFolder, field: str) -> Any:
    """Upstream's default of what a flag stands for; ``None`` without one."""
    for name in PARAMETERS[field]:
        parameter = folder.parameters.get(name)
        if parameter is not None:
            empty = parameter.default is parameter.empty
            return None if empty else parameter.default
    return None


def _media(field: str, value: Any) -> Any:
    if field == "image":
        return read_image(value)
    return read_video(value) if field == "video" else value


def _option(folder: PipelineFolder, name: str, value: Any) -> Any:
    takes = folder.parameters
    if name in folder.all_parameters.keys() - _NO_NAMES:
        if name in _SETS:
            raise UsageError(
                f"--option {name}: tpuport sets {name} by itself; {_SETS[name]}"
            )
        what = ""
        if name not in takes:
            what = f"{name} cannot"
        elif _takes_tensors(name, takes[name]):
            what = f"{name} takes a tensor, which cannot"
        if what:
            raise UsageError(
                f"--option {name}: {what} be given on the command line; in Python "
                "hand it to the pipeline that tpuport.port() returns"
            )
    if name not in takes:
        known = [n for n, one in takes.items() if not _takes_tensors(n, one)]
        hint = did_you_mean(name, known, _takes(name, folder))
        raise UsageError(
            f"--option {name}: {folder.class_name} has no such parameter; {hint}"
        )
    if isinstance(value, str):
        for word, read in _READ.items():
            if word in name and Path(value).expanduser().exists():
                return read(value, f"--option {name}")
        value = yaml.safe_load(value)
    return _typed(name, value, takes[name].annotation)


def _takes(name: str, folder: PipelineFolder) -> str:
    """What a call takes, for an error: names most like ``name`` first, none cut."""
    found = [n for n, one in folder.parameters.items() if not _takes_tensors(n, one)]
    near = difflib.get_close_matches(name, found, len(found), 0) if found else []
    shown: list[str] = []
    for one in near:
        if len(", ".join((*shown, one))) <= _LISTED:
            shown.append(one)
    left = len(found) - len(shown)
    more = f" and {left} more" if left else ""
    return f"it takes {', '.join(shown) or 'nothing'}{more}"


def _takes_tensors(name: str, parameter: inspect.Parameter) -> bool:
    """Whether a parameter takes tensors alone, and is no image and no video."""
    if name.rpartition("_")[2].startswith(_FILES):
        return False
    return _is_tensor(parameter.annotation)


def _is_tensor(kind: Any) -> bool:
    inside = [one for one in typing.get_args(kind) if one is not type(None)]
    if inside and typing.get_origin(kind) in (types.UnionType, typing.Union, list):
        return all(map(_is_tensor, inside))
    # torch.FloatTensor is a class of another kind.
    return kind is torch.FloatTensor or (
        inspect.isclass(kind) and issubclass(kind, torch.Tensor)
    )


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """``value``, found to be of the kind that a parameter's annotation says."""
    try:
        config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        adapter = pydantic.TypeAdapter(annotation, config=config)
    except (pydantic.PydanticUserError, TypeError, NameError):
        return value  # no annotation, or one of upstream's that cannot be read
    try:
        return adapter.validate_python(value)
    except pydantic.ValidationError as error:
        wanted = getattr(annotation, "__name__", str(annotation))
        why = f"is no {wanted} ({error.errors()[0]['msg']})"
        if isinstance(value, str) and any(word in name for word in _FILES):
            why = "does not exist"
        raise UsageError(f"--option {name}: {quoted(value)} {why}") from None


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a pipeline made.

    Attributes:
        frames: float32 in [0, 1], [N, T, Y, X, 3].
        sound: [channels, samples] in [-1, 1]; ``None`` for a silent video.
        rate: samples a second of the sound.
    """

    frames: np.ndarray
    sound: np.ndarray | None = None
    rate: int = 0


def made_of(output: Any, pipeline: Any) -> Made:
    """The frames and the sound of a pipeline's output with ``output_type="np"``.

    Raises:
        UsageError: the pipeline made no video.
    """
    found = _named(output, *FRAMES)
    if found is None:
        raise UsageError(
            f"{type(pipeline).__name__} made no video: it returns a "
            f"{type(output).__name__}"
        )
    frames = np.asarray(found)
    if frames.ndim == 4:
        frames = frames[None]
    if frames.ndim != 5 or frames.shape[-1] != 3:
        raise UsageError(
            f"{type(pipeline).__name__} made an array {list(frames.shape)}, which is "
            "no video"
        )
    sound = _named(output, *SOUNDS)
    if sound is None:
        return Made(frames=frames.astype(np.float32))
    rate = int(_named(output, RATE) or _rate(pipeline))
    array = np.asarray(sound, dtype=np.float32).reshape(-1, np.shape(sound)[-1])[:2]
    return Made(frames=frames.astype(np.float32), sound=array, rate=rate)


def _named(output: Any, *names: str) -> Any:
    """The first output of these names that is there; of blocks, outputs are a dict."""
    values = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    return next((values[n] for n in names if values.get(n) is not None), None)


def _rate(pipeline: Any) -> int:
    """Samples a second of a pipeline's sound; its vocoder says."""
    for name in ("vocoder", "audio_vae"):
        config = getattr(getattr(pipeline, name, None), "config", {})
        for key in ("output_sampling_rate", "sampling_rate", "sample_rate"):
            if key in config:
                return int(config[key])
    raise UsageError(
        f"{type(pipeline).__name__} made sound and no component says at which rate"
    )
