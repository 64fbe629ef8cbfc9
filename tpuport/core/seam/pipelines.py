"""A pipeline in the layout that ``save_pretrained`` writes, with no plugin for it.

``model_index.json`` names the class. The class's own signature says what it takes.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pydantic
import torch
import transformers
import yaml

from tpuport.core.files.atomic import one_line
from tpuport.core.files.sources import read_image, read_video, to_images
from tpuport.core.files.stage_tensors import all_finite
from tpuport.core.reports import Reporter
from tpuport.core.spec.run_settings import Asked
from tpuport.core.weights.checkpoint import (
    SMALL_FILES,
    Checkpoint,
    local_folder,
    patterns,
)
from tpuport.core.weights.hub import fetch
from tpuport.errors import UsageError, WeightsError, damaged, did_you_mean, quoted

INDEX, MODULAR_INDEX = "model_index.json", "modular_model_index.json"

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
#: What tpuport gives by itself.
_OWN = ("self", "generator", "output_type", "return_dict", "latents", "kwargs")
#: Frames a second of a file whose pipeline has no such parameter: what
#: ``diffusers.utils.export_to_video`` takes.
FPS = 10.0


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline's folder, and its class.

    Attributes:
        folder: in the layout that ``save_pretrained`` writes.
        reference: what the user named.
        index: ``model_index.json``.
        checkpoint: the folder, as far as weights and fingerprints go.
    """

    folder: Path
    reference: str
    index: Mapping[str, Any]
    checkpoint: Checkpoint

    @classmethod
    def find(cls, weights: str | Path, reporter: Reporter) -> PipelineFolder:
        """The folder that ``weights`` names, or that a hub id is fetched to.

        Of a hub id the index alone is fetched; :meth:`load` fetches the rest. Nothing
        but the index is read.

        Raises:
            MissingWeightsError: there is no such folder.
            HubError: the hub cannot be reached, or has no such pipeline.
            WeightsError: there is no index, or it is no JSON object.
        """
        folder = local_folder(weights)
        if folder is None:
            folder = fetch(str(weights), [INDEX], reporter)
        checkpoint = Checkpoint(folder, str(weights))
        return cls(folder, str(weights), checkpoint.index, checkpoint)

    def fetched(self, reporter: Reporter, *, weights: bool = True) -> PipelineFolder:
        """The folder with all files that are read, of a plan without ``weights``."""
        if local_folder(self.reference) is not None:
            return self
        names = [n for n in self.index if not n.startswith("_")]
        suffixes = (".safetensors", *SMALL_FILES) if weights else SMALL_FILES
        wanted = patterns(names, *suffixes)
        folder = fetch(self.reference, wanted, reporter)
        return replace(
            self, folder=folder, checkpoint=Checkpoint(folder, self.reference)
        )

    @property
    def class_name(self) -> str:
        """The pipeline's class, as the index names it."""
        found = self.index.get("_class_name")
        if not isinstance(found, str):
            raise WeightsError(
                f"{self.reference}: {INDEX} names the pipeline {quoted(found)}, which "
                "is code of its own; tpuport runs classes of diffusers alone"
            )
        return found

    @cached_property
    def pipeline_class(self) -> Any:
        """The class.

        Raises:
            WeightsError: the installed diffusers has no such class, the class is no
                pipeline, or it needs a package that is not installed.
        """
        name, version = self.class_name, diffusers.__version__
        found = getattr(diffusers, name, None)
        if found is None:
            known = [n for n in dir(diffusers) if n.endswith("Pipeline")]
            hint = did_you_mean(name, known, "install a diffusers that has the class")
            raise WeightsError(
                f"{self.reference}: {INDEX} names the pipeline {name}, which diffusers "
                f"{version} has not; {hint}"
            )
        missing = getattr(found, "_backends", None)
        if missing:
            raise WeightsError(
                f"{self.reference}: {name} needs a package that is not installed; it "
                f"needs {', '.join(missing)}: pip install {' '.join(missing)}"
            )
        if not issubclass(found, diffusers.DiffusionPipeline):
            raise WeightsError(
                f"{self.reference}: {INDEX} names {name}, which is not a pipeline; "
                "name the folder of a whole pipeline"
            )
        return found

    @cached_property
    def all_parameters(self) -> Mapping[str, inspect.Parameter]:
        """What a call of the pipeline takes, by name."""
        return inspect.signature(self.pipeline_class.__call__).parameters

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What a call of the pipeline takes and a user may give, by name."""
        return {
            name: parameter
            for name, parameter in self.all_parameters.items()
            if name not in _OWN and not name.startswith("callback")
        }

    def check_components(self) -> None:
        """Refuse what cannot be loaded; headers of weights are read, and no weights.

        Raises:
            WeightsError: a component's class does not exist, is code of its own, or its
                weights are missing, cut or pickled.
        """
        for name, entry in self.components().items():
            found = self.component_class(name, *entry)
            if inspect.isclass(found) and issubclass(found, torch.nn.Module):
                self.checkpoint.weight_files(name)

    def components(self) -> dict[str, list[str]]:
        """The library and the class of each component that is there, by name."""
        return {
            name: entry
            for name, entry in self.index.items()
            if not name.startswith("_")
            and isinstance(entry, list)
            and None not in entry
        }

    @property
    def init_parameters(self) -> Mapping[str, inspect.Parameter]:
        """What the pipeline's constructor takes."""
        return inspect.signature(self.pipeline_class.__init__).parameters

    def component_class(self, name: str, library: str, class_name: str) -> Any:
        """The class of a component.

        Raises:
            WeightsError: there is none, or it is code of its own.
        """
        if (self.folder / name / f"{library}.py").exists():
            raise WeightsError(
                f"{self.reference}: {name} is of {library}.py in the folder; tpuport "
                "runs no code from a checkpoint"
            )
        module = {"diffusers": diffusers, "transformers": transformers}.get(library)
        if module is None:
            module = getattr(diffusers.pipelines, library, None)
        if module is None:
            raise WeightsError(
                f"{self.reference}: {INDEX} names {name} as {library}.{class_name}; "
                "tpuport runs classes of diffusers and transformers alone"
            )
        try:
            return getattr(module, class_name)
        except (ImportError, AttributeError) as error:
            raise WeightsError(
                f"{self.reference}: {INDEX} names {name} as {library}.{class_name}: "
                f"{one_line(error)}; install the version that the folder was made with"
            ) from None

    def load(self, dtype: torch.dtype, reporter: Reporter) -> Any:
        """The pipeline with its weights, on the CPU.

        Raises:
            WeightsError: upstream cannot load it, or a weight is NaN or infinite.
        """
        self.check_components()
        try:
            with reporter.timed(f"loading {self.class_name}"), _without_bars():
                pipeline = self.pipeline_class.from_pretrained(
                    self.folder,
                    torch_dtype=dtype,
                    local_files_only=True,
                    use_safetensors=True,
                )
        except Exception as error:
            raise WeightsError(
                f"{self.reference}: {self.class_name} does not load: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from error
        for name, component in pipeline.components.items():
            if isinstance(component, torch.nn.Module):
                for path, tensor in component.state_dict().items():
                    if tensor.is_floating_point() and not all_finite(tensor):
                        raise damaged(
                            f"{self.reference}: {name}: {path} holds NaN or infinite "
                            "values",
                            "the folder",
                        )
        return pipeline

    # What a user asks for.

    def arguments(self, asked: Asked) -> dict[str, Any]:
        """The keywords of the pipeline's call; prompts and seeds are left out.

        Raises:
            UsageError: the pipeline does not take what was asked for, or needs what
                was not.
        """
        found: dict[str, Any] = {}
        for field, names in PARAMETERS.items():
            value = getattr(asked, field)
            if value is None or field == "prompt":
                continue
            name = next((n for n in names if n in self.parameters), None)
            if name is not None:
                found[name] = self._media(field, value)
            elif field != "fps":  # the file has one too
                raise UsageError(
                    f"--{field.replace('_', '-')}: {self.class_name} takes none; it "
                    f"takes {', '.join(self.parameters)}"
                )
        for name, value in asked.options.items():
            if name in found:
                raise UsageError(f"--option {name}: was given by a flag too")
            found[name] = self._option(name, value)
        if asked.prompt and "prompt" not in self.parameters:
            raise UsageError(f"--prompt: {self.class_name} takes none")
        for name, parameter in self.parameters.items():
            needed = parameter.default is inspect.Parameter.empty
            named = parameter.kind not in (
                inspect.Parameter.VAR_KEYWORD,
                inspect.Parameter.VAR_POSITIONAL,
            )
            if needed and named and name not in (*found, "prompt"):
                flags = [f"--{f}" for f, known in PARAMETERS.items() if name in known]
                flag = flags[0] if flags else f"--option {name}="
                raise UsageError(
                    f"{self.class_name} needs {name}; add {flag} with a value"
                )
        return found

    def default(self, field: str) -> Any:
        """Upstream's default of what a flag stands for; ``None`` without one."""
        for name in PARAMETERS[field]:
            parameter = self.parameters.get(name)
            if parameter is not None:
                empty = parameter.default is inspect.Parameter.empty
                return None if empty else parameter.default
        return None

    def _media(self, field: str, value: Any) -> Any:
        if field == "image":
            return to_images(read_image(value).pixels)[0]
        return to_images(read_video(value).pixels[0]) if field == "video" else value

    def _option(self, name: str, value: Any) -> Any:
        parameter = self.parameters.get(name)
        if parameter is None:
            hint = did_you_mean(
                name, self.parameters, f"it takes {', '.join(self.parameters)}"
            )
            raise UsageError(
                f"--option {name}: {self.class_name} has no such parameter; {hint}"
            )
        if isinstance(value, str):
            for field in ("image", "video"):
                if field in name and Path(value).expanduser().exists():
                    return self._media(field, value)
            value = yaml.safe_load(value)
        return _typed(name, value, parameter.annotation)


@contextlib.contextmanager
def _without_bars() -> Iterator[None]:
    """No bars of diffusers and transformers: a reporter tells what is under way."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    shown = [one for one in libraries if one.is_progress_bar_enabled()]
    for one in shown:
        one.disable_progress_bar()
    try:
        yield
    finally:
        for one in shown:
            one.enable_progress_bar()


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """``value``, found to be of the kind that a parameter's annotation says."""
    try:
        config = pydantic.ConfigDict(arbitrary_types_allowed=True)
        adapter = pydantic.TypeAdapter(annotation, config=config)
    except (pydantic.PydanticUserError, TypeError, NameError):
        return value  # no annotation, or one of upstream's that cannot be read
    try:
        adapter.validate_python(value)
    except pydantic.ValidationError as error:
        wanted = getattr(annotation, "__name__", str(annotation))
        raise UsageError(
            f"--option {name}: {quoted(value)} is no {wanted} "
            f"({error.errors()[0]['msg']})"
        ) from None
    return value


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
    found = getattr(output, "frames", None)
    if found is None:
        found = getattr(output, "videos", getattr(output, "video", None))
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
    sound = getattr(output, "audio", None)
    if sound is None:
        return Made(frames=frames.astype(np.float32))
    array = np.asarray(sound, dtype=np.float32).reshape(-1, np.shape(sound)[-1])[:2]
    return Made(frames=frames.astype(np.float32), sound=array, rate=_rate(pipeline))


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
