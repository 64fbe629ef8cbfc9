"""A pipeline without a plugin, from prompts to files: upstream's code drives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport import api, targets
from tpuport.cli.asked.cache_folder import cache_folder
from tpuport.cli.asked.sessions import check_attention_here, check_report, outputs_of
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.any_checks import (
    check_executables,
    check_mesh,
    check_on_host,
    refuse_flags,
    upstreams_errors,
    with_dtype,
)
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import say, show_results
from tpuport.core.enums import Backend, Blocks
from tpuport.core.files.outputs import Outputs, Video, VideoFiles
from tpuport.core.files.video_file import SOUNDING, check_length
from tpuport.core.reports import (
    Reporter,
    RunReport,
    peak_device_bytes,
    peak_host_bytes,
    plural,
)
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import DEMO
from tpuport.errors import UsageError
from tpuport.plugins import reader_of

if TYPE_CHECKING:
    from tpuport.core.pipelines.call_arguments import Made
    from tpuport.core.pipelines.folder import PipelineFolder

#: Of a request, what a sidecar keeps to ask again.
_FLAGS = (
    *("height", "width", "num_frames", "fps", "num_inference_steps"),
    *("guidance_scale", "image", "video", "strength"),
)


def with_model(settings: Settings) -> Settings:
    """The settings with the model whose plugin reads the pipeline; without, as given.

    Raises:
        WeightsError: the folder has no index.
        HubError: the hub cannot be reached.
    """
    if settings.model is not None or settings.weights in (None, "", DEMO):
        return _without_on_host(settings)
    with Display(signals.check) as display:
        folder = find(settings, display)
    model = reader_of(folder.class_name)
    if model is not None:
        say(f"{folder.class_name}: run by the plugin of {model}")
    return settings if model is None else _without_on_host(settings, model)


def _without_on_host(settings: Settings, model: str | None = None) -> Settings:
    if settings.on_host:
        raise UsageError(
            "--on-host: is for pipelines without a plugin; --encode-on host runs the "
            "text encoder of a model with one on the CPU"
        )
    return replace(settings, model=model or settings.model)


def is_any(settings: Settings) -> bool:
    """Whether no plugin reads the pipeline, so that upstream's code drives."""
    return settings.model is None and settings.weights not in (None, "", DEMO)


def find(settings: Settings, reporter: Reporter) -> PipelineFolder:
    """The pipeline's folder; the index alone is read."""
    cache_folder(settings.cache_dir)
    with signals.starting(before="\n"):
        api.import_libraries(reporter)
    from tpuport.core.pipelines.folder import PipelineFolder

    assert settings.weights is not None
    folder = PipelineFolder.find(settings.weights, reporter)
    return replace(folder, guidance=settings.guidance_scale)


def generate_any(settings: Settings, started: float) -> None:
    """Make videos, and tell of them as ``tpuport generate`` does.

    Raises:
        UsageError: a flag or an option that the pipeline has no use for.
        WeightsError: the checkpoint cannot be used.
        TpuportError: the run failed.
    """
    with Display(signals.check) as display:
        run = AnyRun.prepared(settings, find(settings, display), display)
        name = f"{run.folder.class_name.removesuffix('Pipeline').lower()}{_seed(run)}"
        outputs = run.outputs(f"{name}.mp4")
        videos, report = run.make(outputs, started)
    document = {
        "command": "generate",
        "pipeline": run.folder.class_name,
        "weights": run.folder.checkpoint.reference,
        "videos": [video.as_dict() for video in videos],
        **run.how,
        "report": report.as_dict(),
        "patches": run.patches,
        "calls": run.calls,
    }
    written = [video.path for video in videos]
    show_results(document, report, written, as_json=settings.json, file=settings.report)


@dataclass
class AnyRun:
    """One pipeline, what it is asked for, and what it made.

    Attributes:
        arguments: keywords of every call.
        inputs: the digests of images and videos that are read, by file.
        digests: of the frames of each video.
        patches: what became of each patch.
        calls: of modules, by name: of how many programs.
        blocks: those in place, which a plugin may have.
    """

    settings: Settings
    folder: PipelineFolder
    reporter: Reporter
    arguments: dict[str, Any]
    inputs: dict[str, str]
    digests: list[str]
    patches: list[dict[str, Any]]
    calls: dict[str, int]
    blocks: Blocks = Blocks.UPSTREAM

    @classmethod
    def prepared(
        cls, settings: Settings, folder: PipelineFolder, reporter: Reporter
    ) -> AnyRun:
        """Everything checked that needs no weights.

        Raises:
            UsageError, WeightsError, MeshError: what is wrong.
        """
        from tpuport.core.pipelines.call_arguments import arguments_of

        refuse_flags(settings, folder.class_name)
        if "prompt" in folder.parameters and not settings.prompt:
            raise UsageError('no prompt was given; add --prompt "..." or --prompt-file')
        if settings.report is not None:
            check_report(settings.report, settings.inputs())
        check_attention_here(settings)
        arguments = arguments_of(folder, settings)
        check_on_host(settings, folder)
        placed = targets.place_for_port(settings.mesh, reporter)
        settings = with_dtype(settings, placed)
        settings = replace(settings, cache_dir=cache_folder(settings.cache_dir))
        folder.check_packages(arguments)
        folder = folder.fetched(reporter)
        folder.check_components()
        check_mesh(settings, folder, placed, arguments, reporter)
        if settings.executables is not None:
            check_executables(settings, folder, placed, reporter)
        inputs = {name: _digest(Path(name)) for name in _files(settings)}
        return cls(settings, folder, reporter, arguments, inputs, [], [], {})

    @property
    def how(self) -> dict[str, Any]:
        """How the pipeline is run."""
        settings = self.settings
        return {
            "backend": settings.backend,
            "dtype": settings.dtype,
            "mesh": str(targets.place_for_port(settings.mesh).spec),
            "attention": str(settings.attention),
            "on_host": list(settings.on_host),
        }

    @property
    def fps(self) -> float:
        """Of the files."""
        from tpuport.core.pipelines.call_arguments import FPS, default_of

        return float(self.settings.fps or default_of(self.folder, "fps") or FPS)

    def videos(self) -> list[tuple[str | None, int]]:
        """Prompt and seed of each video."""
        prompts = self.settings.prompt or (None,)
        return [(prompt, seed) for prompt in prompts for seed in self.settings.seed]

    def outputs(self, name: str) -> Outputs:
        """Where the videos go; creates nothing."""
        from tpuport.core.pipelines.call_arguments import default_of

        outputs = outputs_of(self.settings, name, len(self.videos()))
        frames = self.settings.num_frames or default_of(self.folder, "num_frames") or 1
        for path in outputs.paths:
            check_length(path, outputs.kind, frames, self.fps)
        for remark in outputs.remarks():
            say(remark)
        return outputs

    def make(
        self, outputs: Outputs | None, started: float
    ) -> tuple[list[Video], RunReport]:
        """Load the pipeline and make every video."""
        from tpuport.core.arrays import torch_dtype

        settings = self.settings
        assert settings.dtype is not None
        self.reporter.say(self._in_words())
        pipeline = self.folder.load(torch_dtype(settings.dtype), self.reporter)
        pipeline.set_progress_bar_config(disable=True)
        with contextlib.ExitStack() as stack:
            journal = stack.enter_context(self._ported(pipeline))
            files = None
            if outputs is not None:
                files = stack.enter_context(VideoFiles(outputs, self.fps, 0))
            stages: list[Any] = []
            count = len(self.videos())
            for index, (prompt, seed) in enumerate(self.videos()):
                with contextlib.ExitStack() as told:
                    if index:  # the stages were told with the first video
                        what = f"video {index + 1} of {count}"
                        told.enter_context(self.reporter.timed(what))
                        journal.reporter = Reporter()
                    stages += self._one(pipeline, journal, files, index, prompt, seed)
            report = self._report(stages, time.perf_counter() - started)
            videos = [] if files is None else files.publish(self._describer(report))
        return videos, report

    @contextlib.contextmanager
    def _ported(self, pipeline: Any) -> Iterator[Any]:
        from tpuport.core.seam.journal import Journal
        from tpuport.core.seam.ported import port_pipeline, seam_of, unport

        settings = self.settings
        if settings.backend == Backend.DIFFUSERS:
            yield Journal(self.reporter)
            return
        placed = targets.place_for_port(settings.mesh)
        name = self.folder.class_name
        target = targets.claimed_target(name, placed, settings, self.reporter)
        built = targets.executables_for(name, placed, settings, self.reporter)
        self.blocks = target.blocks
        target = replace(target, built=built)
        port_pipeline(pipeline, target, settings.on_host, self.reporter)
        seam = seam_of(pipeline)
        try:
            yield seam.journal
            self.patches = seam.patches()
            self.calls = {name: len(e.programs) for name, e in seam.entries.items()}
        finally:
            unport(pipeline)

    def _one(
        self,
        pipeline: Any,
        journal: Any,
        files: VideoFiles | None,
        index: int,
        prompt: str | None,
        seed: int,
    ) -> list[Any]:
        import torch

        from tpuport.core.files.frames import FrameChecks, measure
        from tpuport.core.pipelines.call_arguments import as_arrays, made_of
        from tpuport.core.pipelines.sidecar import frames_digest
        from tpuport.core.seam.driving import driving

        given = {**self.arguments, **as_arrays(self.folder)}
        if prompt is not None:
            given["prompt"] = prompt
        if "generator" in self.folder.all_parameters:
            given["generator"] = torch.Generator("cpu").manual_seed(seed)
        with (
            driving(pipeline, journal, self.settings.backend) as drive,
            upstreams_errors(self.folder.class_name),
        ):
            output = pipeline(**given)
        made: Made = made_of(output, pipeline)
        checks = FrameChecks()
        checks.add(index, made.frames.shape, measure(made.frames))
        checks.check()
        self.digests.append(frames_digest(made.frames[0]))
        if files is not None:
            files.take(index, made.frames[:1])
            if made.sound is not None and files.outputs.kind in SOUNDING:
                files.sound(index, made.sound, made.rate)
            elif made.sound is not None:
                say(f"the sound is left out: .{files.outputs.kind} holds none")
        return drive.reports

    def _describer(self, report: RunReport) -> Any:
        from tpuport.core.pipelines import sidecar

        settings = self.settings
        flags = {n: getattr(settings, n) for n in _FLAGS}

        def describe(index: int, output: Mapping[str, Any]) -> dict[str, Any]:
            prompt, seed = self.videos()[index]
            request: sidecar.Request = {
                "prompts": [prompt],
                "negative_prompts": [settings.negative_prompt],
                "seeds": [[seed]],
                "flags": {n: v for n, v in flags.items() if v is not None},
                "options": dict(settings.options),
            }
            how: Any = self.how
            digest = self.digests[index]
            return sidecar.describe(
                self.folder, request, how, self.inputs, digest, report, output
            )

        return describe

    def _report(self, stages: list[Any], seconds: float) -> RunReport:
        from tpuport.core.seam.driving import merged

        placed = targets.place_for_port(self.settings.mesh)
        devices = list(placed.mesh.devices.flat)
        return RunReport(
            model=self.folder.class_name,
            variant="",
            weights=self.folder.checkpoint.reference,
            platform=str(devices[0].platform),
            mesh=str(placed.spec),
            devices=len(devices),
            dtype=str(self.settings.dtype),
            blocks=self.blocks,
            stages=tuple(merged(stages)),
            total_seconds=seconds,
            peak_host_bytes=peak_host_bytes(),
            peak_device_bytes=peak_device_bytes(devices),
        )

    def _in_words(self) -> str:
        """What will be made; what is not said is upstream's default."""
        from tpuport.core.pipelines.call_arguments import default_of

        settings = self.settings
        default = functools.partial(default_of, self.folder)
        width = settings.width or default("width")
        height = settings.height or default("height")
        frames = settings.num_frames or default("num_frames")
        steps = settings.num_inference_steps or default("num_inference_steps")
        parts = [
            f"{width}x{height}" if width and height else "",
            f"{plural(frames, 'frame')} at {self.fps:g} fps" if frames else "",
            plural(steps, "step") if steps else "",
            f"seed {', '.join(map(str, settings.seed))}",
        ]
        count = plural(len(self.videos()), "video")
        said = ", ".join(filter(None, parts))
        return f"making {count} by {self.folder.class_name}: {said}"


def _files(settings: Settings) -> list[str]:
    named = [settings.image, settings.video, *settings.options.values()]
    texts = [text for text in named if isinstance(text, str)]
    return [t for t in texts if Path(t).expanduser().is_file()]


def _digest(file: Path) -> str:
    return hashlib.sha256(file.expanduser().read_bytes()).hexdigest()


def _seed(run: AnyRun) -> str:
    seeds = set(run.settings.seed)
    return f"-seed{next(iter(seeds))}" if len(seeds) == 1 else ""
