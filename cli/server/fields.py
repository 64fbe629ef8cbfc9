"""From the fields of a request to values of settings: named, typed, within limits."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tpuport.cli.asked.settings import Settings
from tpuport.cli.server.messages import Refused
from tpuport.core.spec import kinds
from tpuport.core.spec.run_settings import read_value
from tpuport.errors import TpuportError, did_you_mean, in_one_line, quoted

#: Every field but the image, and its kind.
FIELDS: Mapping[str, kinds.Kind] = {
    "prompt": kinds.text,
    "model": kinds.text,
    "size": kinds.size,
    "seconds": kinds.number_over_0,
    "num_frames": kinds.positive,
    "fps": kinds.number_over_0,
    "seed": kinds.number_from_0,
    "n": kinds.positive,
    "num_inference_steps": kinds.positive,
    "guidance_scale": kinds.number,
    "negative_prompt": kinds.text,
    "flow_shift": kinds.number_over_0,
    "lora": kinds.texts,
    "extra": kinds.options,
}
IMAGE = "input_reference"
#: The option of ``extra`` that names another scheduler.
SCHEDULER = "scheduler"
#: What people may write for a field.
_MEANT = {
    "steps": "num_inference_steps",
    "frames": "num_frames",
    "cfg": "guidance_scale",
    "guidance": "guidance_scale",
    "image": IMAGE,
    "option": "extra",
}
#: In an error: a flag, and the folders of a file.
_FLAG = re.compile(r"(?<![\w-])--([a-z][a-z-]*[a-z])")
_FOLDERS = re.compile(r"(?<![\w.:/])/(?:[^\s/'\",;:]+/)+")
_TEXTS = ("prompt", "model", "size", "negative_prompt", "lora")
#: As ``generate`` has them.
_SAME = ("prompt", "negative_prompt", "fps", "num_inference_steps", "guidance_scale")

#: Limits of a request.
MOST_VIDEOS, MOST_TEXT, MOST_FPS, MOST_SEED = 8, 20_000, 240.0, 2**63 - 1 - 8
#: Of guidance and of a shift; of any number in ``extra``, and of how many it has.
MOST_SCALE, MOST_NUMBER, MOST_VALUES = 1000.0, 10_000.0, 10_000
#: The least frames per second.
_LEAST_FPS = 0.1
#: What lets a request have more steps.
_MORE_STEPS = "; a server that is started with a larger --max-steps takes more"
#: Options that programs are made for, or that are no client's.
_OF_THE_SERVER = (
    *("height", "width", "output_type", "latents", "generator", "return_dict"),
)
#: Options that say how much is made.
_COUNTS = re.compile(r".*(num_|(frames|length|tokens|segments)$)")
#: Options with a number for each step.
_LISTS = ("timesteps", "sigmas")
_OPTION = re.compile(r"[A-Za-z_]\w{0,63}", re.ASCII)
#: What a request may say of a scheduler's config: words, or the most of a number. Other
#: values make tables of any size, or take the noise that the model knows from it.
_TRUTH = ("true", "false")
_SCHEDULE: Mapping[str, tuple[str, ...] | float] = {
    "flow_shift": MOST_SCALE,
    "shift": MOST_SCALE,
    "timestep_spacing": ("linspace", "leading", "trailing"),
    "prediction_type": ("epsilon", "sample", "v_prediction", "flow_prediction"),
    "algorithm_type": ("dpmsolver", "dpmsolver++", "sde-dpmsolver", "sde-dpmsolver++"),
    "solver_order": ("1", "2", "3"),
    "solver_type": ("midpoint", "heun", "bh1", "bh2"),
    "rescale_betas_zero_snr": _TRUTH,
    "use_beta_sigmas": _TRUTH,
    "use_exponential_sigmas": _TRUTH,
    "use_flow_sigmas": _TRUTH,
    "use_karras_sigmas": _TRUTH,
}
#: Seconds that a clip may differ from what was asked for.
_NEAR = 0.5


@dataclass(frozen=True)
class Batch:
    """What it takes to make several videos in one call, as measured.

    Attributes:
        seconds, alone: of a step, of all videos and of one that is made alone.
    """

    videos: int
    seconds: float
    alone: float

    @property
    def pays(self) -> bool:
        """Whether a video is made faster than alone."""
        return self.seconds < self.videos * self.alone

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "videos": self.videos,
            "step_seconds": round(self.seconds, 6),
            "step_seconds_alone": round(self.alone, 6),
            "used": self.pays,
        }


@dataclass
class Shape:
    """A size and a number of frames that programs are made for.

    Attributes:
        width, height, num_frames: ``None`` where the pipeline has no such parameter.
        fps: of the files, where a request does not say.
        state: ``waiting``, ``compiling``, ``ready`` or ``failed``.
        frames: of the video: CogVideoX makes 8 where 5 are asked for; ``None`` until
            one is made.
        batches: that were measured.
    """

    width: int | None
    height: int | None
    num_frames: int | None
    fps: float = 0.0
    state: str = "waiting"
    frames: int | None = None
    batches: list[Batch] = field(default_factory=list)

    @property
    def size(self) -> str | None:
        """As a request has it."""
        return f"{self.width}x{self.height}" if self.width else None

    @property
    def length(self) -> int | None:
        """Frames of the video, as far as they are known."""
        return self.frames or self.num_frames

    @property
    def key(self) -> tuple[int | None, ...]:
        """What tells shapes apart."""
        return self.width, self.height, self.num_frames

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "size": self.size,
            "num_frames": self.num_frames,
            "fps": self.fps,
            "frames": self.frames,
            "seconds": seconds_text(self.length, self.fps),
            "state": self.state,
            "batches": [batch.as_dict() for batch in self.batches],
        }

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``480x720x49``: width, height and frames."""
        found = re.fullmatch(r"([0-9]{1,5})[xX×]([0-9]{1,5})[xX×]([0-9]{1,5})", text)
        if found is None or not all(map(int, found.groups())):
            raise ValueError("is no WIDTHxHEIGHTxFRAMES, such as 720x480x49")
        width, height, frames = map(int, found.groups())
        return cls(width, height, frames)


def seconds_text(frames: int | None, fps: float) -> str:
    """How long a clip is, as OpenAI's clients have it."""
    return f"{round((frames or 1) / fps, 3):g}" if fps else "0"


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the server was started with.

    Attributes:
        steps: the most of a video.
        loras: files by their names in requests.
    """

    steps: int
    loras: Mapping[str, Path]


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """A request, understood.

    Attributes:
        fields: as they were given, typed, and JSON-ready.
        shape: that is ready.
        seeds: of each video.
        values: of settings, by the keys of a line of a batch; without seed and image.
    """

    fields: dict[str, Any]
    shape: Shape
    seeds: list[int]
    values: dict[str, Any]


def plain(text: str) -> str:
    """An error of a run in a request's words, without places of this machine."""
    text = _FOLDERS.sub("", text)
    text = _FLAG.sub(lambda found: _field(found[1]), text)
    server = "a server that is started with --blocks upstream takes this"
    return text.replace("run with blocks='upstream'", server)


def _field(flag: str) -> str:
    """What a flag of ``generate`` is for a client."""
    name = _MEANT.get(flag, flag.replace("-", "_"))
    return name if name in (*FIELDS, IMAGE) else f"the server's --{flag}"


def of_text(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a form, in which numbers and objects are text."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        if name in FIELDS and name not in _TEXTS and isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                wanted = "a JSON object" if name == "extra" else "a number"
                message = f"{name}: {quoted(value)} is not {wanted}"
                raise Refused(400, message, name) from None
        found[name] = value
    return found


def understood(
    given: Mapping[str, Any],
    *,
    model: str,
    shapes: Sequence[Shape],
    limits: Limits,
    below: Settings,
) -> Wanted:
    """What a request asks for; nothing is opened.

    Args:
        given: its fields, without the image.
        model: the name that it may give.
        shapes: those of the server, the default first.
        below: what the flags of the server say.

    Raises:
        Refused: a field is unknown, of another kind, or beyond a limit.
    """
    typed = {name: _typed(name, value) for name, value in given.items()}
    typed = {name: value for name, value in typed.items() if value is not None}
    if not typed.get("prompt", "").strip():
        raise Refused(400, "prompt: is missing; say what to show", "prompt")
    if typed.get("model", model) != model:
        text = f"model: {quoted(typed['model'])} is not here; this server has {model}"
        raise Refused(400, text, "model")
    _check_limits(typed, limits)
    shape = _shape(typed, shapes)
    seed, count = typed.get("seed", below.seed[0]), typed.get("n", 1)
    values: dict[str, Any] = {name: typed[name] for name in _SAME if name in typed}
    if shape.size:
        values["size"] = shape.size
    if shape.num_frames:
        values["num_frames"] = shape.num_frames
    if "lora" in typed:
        values["lora"] = [_lora(text, limits.loras) for text in typed["lora"]]
    options = {**below.options, **typed.get("extra", {})}
    if "flow_shift" in typed:
        scheduler = str(options.get(SCHEDULER, "checkpoint"))
        join = "," if ":" in scheduler else ":"
        shift = f"flow_shift={typed['flow_shift']!r}"
        options[SCHEDULER] = f"{scheduler}{join}{shift}"
    if options:
        values["option"] = options
    # As resolved: another server, or this one later, may have other shapes.
    fields = {**typed, "seed": seed}
    if "seconds" in fields:
        del fields["seconds"]
        fields["num_frames"] = shape.num_frames
    if shape.size:
        fields["size"] = shape.size
    if "lora" in fields:
        fields["lora"] = list(fields["lora"])
    seeds = [seed + number for number in range(count)]
    return Wanted(fields=fields, shape=shape, seeds=seeds, values=values)


def _typed(name: str, value: Any) -> Any:
    kind = FIELDS.get(name)
    if kind is None:
        known = [*FIELDS, IMAGE]
        meant, listed = _MEANT.get(name, name), ", ".join(known)
        hint = did_you_mean(meant, known, f"there are {listed}")
        raise Refused(400, f"unknown field {quoted(name)}; {hint}", name[:100])
    if value is None:
        return None
    if name == "seconds" and isinstance(value, str):
        value = of_text({name: value})[name]
    try:
        typed = read_value(kind, value, name)
    except TpuportError as error:
        raise Refused(400, in_one_line(error), name) from error
    return typed


def too_many_steps(most: int) -> Refused:
    """What a request is told that has more steps than the server makes."""
    name = "num_inference_steps"
    message = f"{name}: is more than {most}, the most here{_MORE_STEPS}"
    return Refused(400, message, name)


def _check_limits(typed: Mapping[str, Any], limits: Limits) -> None:
    most: dict[str, float] = {
        "n": MOST_VIDEOS,
        "guidance_scale": MOST_SCALE,
        "flow_shift": MOST_SCALE,
        "fps": MOST_FPS,
        "seed": MOST_SEED,
    }
    for name, value in most.items():
        if typed.get(name, 0) > value:
            raise Refused(400, f"{name}: is more than {value:.0f}, the most here", name)
    if typed.get("num_inference_steps", 0) > limits.steps:
        raise too_many_steps(limits.steps)
    if typed.get("fps", _LEAST_FPS) < _LEAST_FPS:
        raise Refused(400, f"fps: is less than {_LEAST_FPS}, the least here", "fps")
    if typed.get("guidance_scale", 0) < -MOST_SCALE:
        message = f"guidance_scale: is less than {-MOST_SCALE:.0f}, the least here"
        raise Refused(400, message, "guidance_scale")
    for name in ("prompt", "negative_prompt"):
        if len(typed.get(name, "")) > MOST_TEXT:
            message = f"{name}: has more than {MOST_TEXT} characters"
            raise Refused(400, message, name)
    if {"seconds", "num_frames"} <= typed.keys():
        message = "seconds and num_frames exclude each other; give one"
        raise Refused(400, message, "seconds")
    if len(typed.get("lora", ())) > MOST_VIDEOS:
        raise Refused(400, f"lora: more than {MOST_VIDEOS}", "lora")
    for name, value in typed.get("extra", {}).items():
        _check_option(name, value)
        if name in _LISTS and isinstance(value, Sequence) and len(value) > limits.steps:
            message = f"extra: {name} has more than {limits.steps}, the most steps here"
            raise Refused(400, message + _MORE_STEPS, "extra")


def _check_option(name: str, value: Any) -> None:
    """Refuse an option that is of the server, makes more, or names a file."""
    where = f"extra: {quoted(name)}"
    if not _OPTION.fullmatch(name):
        raise Refused(400, f"{where} is no name of an option", "extra")
    if name in FIELDS:
        message = f"{where} is a field of the request; give it beside extra"
        raise Refused(400, message, "extra")
    wider = name in _OF_THE_SERVER or _COUNTS.match(name)
    if wider or "image" in name or "video" in name:
        raise Refused(400, f"{where} is not for a request; leave it out", "extra")
    if name == SCHEDULER:
        _check_scheduler(value)
    texts, left = [value], MOST_VALUES
    while texts:
        one, left = texts.pop(), left - 1
        if left < 0:
            message = f"{where} has more than {MOST_VALUES} values"
            raise Refused(400, message, "extra")
        if isinstance(one, dict):
            texts += [*one.keys(), *one.values()]
        elif isinstance(one, list):
            texts += one
        elif isinstance(one, str):
            if _names_a_file(_typed_text(one)):
                message = f"{where}: {quoted(one)} may name a file, which no request"
                raise Refused(400, f"{message} does", "extra")
            if (read := _read(one, where)) != one:
                texts.append(read)
        elif isinstance(one, int | float) and not abs(one) <= MOST_NUMBER:
            message = f"{where}: a number is not within {MOST_NUMBER:.0f} of 0"
            raise Refused(400, message, "extra")
        elif one is not None and not isinstance(one, int | float):
            message = f"{where}: {quoted(one)} is no text, number, list or object"
            raise Refused(400, message, "extra")


def _read(text: str, where: str) -> Any:
    """What a text becomes: `generate` reads YAML, and then numbers as Python does."""
    try:
        found = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise Refused(400, f"{where}: {quoted(text)} is no YAML", "extra") from None
    if isinstance(found, str):
        with contextlib.suppress(ValueError):
            return float(found)
    return found


def _check_scheduler(value: Any) -> None:
    """Refuse values of a scheduler's config but those that are harmless."""
    if not isinstance(value, str):
        raise Refused(400, "extra: 'scheduler' is no text, such as ddim", "extra")
    _, colon, rest = value.partition(":")
    for item in rest.split(",") if colon else ():
        key, _, given = (part.strip() for part in item.partition("="))
        allowed, what = _SCHEDULE.get(key), ""
        if allowed is None:
            what = f"is not for a request, which may say {', '.join(_SCHEDULE)}"
        elif isinstance(allowed, float):
            number = re.fullmatch(r"\d{1,4}(\.\d{1,20})?", given, re.ASCII)
            if number is None or not 0 < float(given) <= allowed:
                what = f"is no number above 0 and up to {allowed:.0f}"
        elif given not in allowed:
            what = f"is none of {', '.join(allowed)}"
        if what:
            raise Refused(400, f"extra: scheduler: {quoted(item)} {what}", "extra")


def _typed_text(text: str) -> str:
    try:
        return kinds.text(text)
    except ValueError as error:
        raise Refused(400, f"extra: {quoted(text)} {error}", "extra") from None


def _names_a_file(text: str) -> bool:
    if any(sign in text for sign in "/\\~\0") or len(text) > 200:
        return True
    return bool(text) and os.path.lexists(text)


def _lora(text: str, known: Mapping[str, Path]) -> str:
    name, colon, scale = text.rpartition(":")
    if not colon:
        name, scale = text, ""
    if name not in known:
        otherwise = f"there are {', '.join(known)}" if known else "there is none"
        message = f"lora: {quoted(name)} is not here; "
        message += did_you_mean(name, known, otherwise)
        raise Refused(400, message, "lora")
    if colon and not re.fullmatch(r"[-+]?\d{1,3}(\.\d{1,6})?", scale, re.ASCII):
        raise Refused(400, f"lora: {quoted(scale)} is no scale, such as 0.8", "lora")
    return f"{known[name]}{colon}{scale}"


def _shape(typed: Mapping[str, Any], shapes: Sequence[Shape]) -> Shape:
    """The shape of a request, which must be ready."""
    ready = [shape for shape in shapes if shape.state == "ready"]
    listed = ", ".join(f"{s.size or 'any size'} {s.num_frames} frames" for s in ready)
    wide, high = typed.get("size", (None, None))
    of_size = [s for s in ready if wide is None or (s.width, s.height) == (wide, high)]
    if not of_size:
        message = f"size: {wide}x{high} is not ready; these are: {listed}"
        raise Refused(400, message, "size")
    frames, found = typed.get("num_frames"), of_size
    if frames is not None:
        found = [shape for shape in of_size if shape.num_frames == frames]
        name, asked = "num_frames", f"{frames} frames are"
    elif "seconds" in typed:
        name, asked = "seconds", f"{typed['seconds']:g} seconds are"

        def away(shape: Shape) -> float:
            length = (shape.length or 1) / (typed.get("fps") or shape.fps)
            return abs(length - float(typed["seconds"]))

        found = sorted((s for s in of_size if away(s) <= _NEAR), key=away)
    if not found:
        raise Refused(400, f"{name}: {asked} not ready; these are: {listed}", name)
    return found[0]
