"""A pipeline without a plugin, from prompts to files: upstream's code drives."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping
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
from tpuport.cli.runs.variants import of_plugin, resolved
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import say
from tpuport.core.enums import Backend, Blocks, StageName, denoises
from tpuport.core.files.outputs import Outputs, Video, VideoFiles
from tpuport.core.files.run_record import CheckpointEvery
from tpuport.core.files.video_file import SOUNDING, check_length
from tpuport.core.reports import (
    Reporter,
    RunReport,
    StageReport,
    peak_device_bytes,
    peak_host_bytes,
    plural,
)
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import DEMO
from tpuport.errors import UsageError
from tpuport.plugins import reader_of

if TYPE_CHECKING:
    from tpuport.core.drive.pipeline_run import PipelineRun
    from tpuport.core.pipelines.call_arguments import Made
    from tpuport.core.pipelines.folder import PipelineFolder
    from tpuport.core.seam.journal import Journal

#: Of a request, what a sidecar keeps to ask again.
_FLAGS = (
    *("height", "width", "num_frames", "fps", "num_inference_steps"),
    *("guidance_scale", "image", "video", "strength"),
)


def with_model(settings: Settings, *, weights: bool = True) -> Settings:
    """The settings with a model that has stages, or with the folder of a pipeline.

    Args:
        weights: of a plugin's variant are wanted; without, its configs are enough.

    Raises:
        WeightsError: the folder has no index.
        HubError: the hub cannot be reached.
        UnknownModelError: no plugin has the name, or the plugin no such variant.
    """
    plugin = of_plugin(settings)
    if plugin is not None:
        return resolved(settings, plugin, weights=weights)
    if settings.model is not None or settings.weights in (None, "", DEMO):
        return for_a_plugin(settings)
    with Display(signals.check) as display:
        folder = find(settings, display)
    model = reader_of(folder.class_name)
    if model is not None:
        say(f"{folder.class_name}: run by the plugin of {model}")
    return settings if model is None else for_a_plugin(settings, model)


def for_a_plugin(settings: Settings, model: str | None = None) -> Settings:
    """The settings of a model with a plugin.

    Raises:
        UsageError: a flag that only pipelines without a plugin have.
    """
    if settings.on_host:
        raise UsageError(
            "--on-host: is for pipelines without a plugin; --encode-on host runs the "
            "text encoder of a model with one on the CPU"
        )
    if settings.checkpoint_every != CheckpointEvery():
        raise UsageError(
            "--checkpoint-every: is for pipelines without a plugin; a model with one "
            "keeps its stages, see `tpuport runs`"
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
        cls,
        settings: Settings,
        folder: PipelineFolder,
        reporter: Reporter,
        *,
        partly: bool = False,
    ) -> AnyRun:
        """Everything checked that needs no weights.

        Args:
            partly: some components are not called, and their weights may be missing.

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
        folder.check_components(weights=not partly)
        check_mesh(settings, folder, placed, arguments, reporter)
        if settings.executables is not None:
            check_executables(settings, folder, placed, reporter)
        inputs = {name: file_digest(Path(name)) for name in _files(settings)}
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
        self,
        outputs: Outputs | None,
        started: float,
        kept: PipelineRun | None = None,
        until: StageName | None = None,
    ) -> tuple[list[Video], RunReport]:
        """Load the pipeline and make every video.

        Args:
            kept: the run's folder: what is in it is not done again.
            until: the stage to end with.
        """
        self.reporter.say(self._in_words())
        if until is not None and kept is not None and kept.finished(until):
            self.reporter.say(f"{until}: finished in {kept.path}, reused")
            return [], self.report([], time.perf_counter() - started)
        if until is not None and not any(map(denoises, self.folder.components())):
            raise UsageError(
                f"{self.folder.class_name} has no denoiser, and so no stages; use "
                "`tpuport generate`"
            )
        late = until is not None or bool(kept and kept.begun)
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(self.opened(late=late))
            files = None
            if outputs is not None:
                files = stack.enter_context(VideoFiles(outputs, self.fps, 0))
            stages: list[Any] = []
            count = len(self.videos())
            for index in range(count):
                with contextlib.ExitStack() as told:
                    if index:  # the stages were told with the first video
                        what = f"video {index + 1} of {count}"
                        told.enter_context(self.reporter.timed(what))
                        opened.journal.reporter = Reporter()
                    one = replace(opened, kept=kept, index=index, until=until)
                    made, reports = self.made(one)
                    stages += reports
                    if made is not None:
                        self._write(index, made, files)
            report = self.report(stages, time.perf_counter() - started)
            videos = [] if files is None else files.publish(self._describer(report))
        return videos, report

    def _pipeline(self, *, late: bool) -> tuple[Any, Callable[[str], None]]:
        """The pipeline, and what loads the weights of a component that is called."""
        from tpuport.core.arrays import torch_dtype
        from tpuport.core.drive.late_weights import LateWeights

        dtype = torch_dtype(str(self.settings.dtype))
        if not late:
            return self.folder.load(dtype, self.reporter), lambda name: None
        weights = LateWeights(self.folder, dtype, self.reporter)
        return weights.pipeline, weights.load

    @contextlib.contextmanager
    def opened(self, *, late: bool = False) -> Iterator[Taped]:
        """The pipeline with its weights, ported while the block lasts.

        Args:
            late: read the weights of a component when it is called.
        """
        pipeline, load = self._pipeline(late=late)
        pipeline.set_progress_bar_config(disable=True)
        with self._ported(pipeline) as journal:
            yield Taped(pipeline, journal, load)

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

    def made(self, one: Taped) -> tuple[Made | None, list[StageReport]]:
        """One video, and the reports of its stages; ``None`` for a stage before it.

        Raises:
            TpuportError: upstream fails, or a frame is NaN.
        """
        import torch

        from tpuport.core.files.frames import FrameChecks, measure
        from tpuport.core.pipelines.call_arguments import as_arrays, made_of

        prompt, seed = self.videos()[one.index]
        given = {**self.arguments, **as_arrays(self.folder)}
        if prompt is not None:
            given["prompt"] = prompt
        torch.manual_seed(seed)  # of pipelines that draw without a generator
        if "generator" in self.folder.all_parameters:
            given["generator"] = torch.Generator("cpu").manual_seed(seed)
        output, reports = one.called(given, self)
        if one.until is not None:
            return None, reports
        made = made_of(output, one.pipeline)
        checks = FrameChecks()
        checks.add(one.index, made.frames.shape, measure(made.frames))
        checks.check()
        return made, reports

    def _write(self, index: int, made: Made, files: VideoFiles | None) -> None:
        from tpuport.core.pipelines.sidecar import frames_digest

        self.digests.append(frames_digest(made.frames[0]))
        asked, found = self.settings.num_frames, len(made.frames[0])
        if asked is not None and asked != found and index == 0:
            say(f"{self.folder.class_name} made {plural(found, 'frame')}, not {asked}")
        if files is None:
            return
        files.take(index, made.frames[:1])
        if made.sound is not None and files.outputs.kind in SOUNDING:
            files.sound(index, made.sound, made.rate)
        elif made.sound is not None:
            say(f"the sound is left out: .{files.outputs.kind} holds none")

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

    def report(self, stages: list[Any], seconds: float) -> RunReport:
        from tpuport.core.drive.driving import merged

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

    @property
    def asked(self) -> dict[str, Any]:
        """Size, frames and steps; what was not given is upstream's default."""
        from tpuport.core.pipelines.call_arguments import default_of

        names = ("width", "height", "num_frames", "num_inference_steps")
        return {
            name: getattr(self.settings, name) or default_of(self.folder, name)
            for name in names
        }

    def _in_words(self) -> str:
        """What will be made."""
        settings = self.settings
        width, height, frames, steps = self.asked.values()
        parts = [
            f"{width}x{height}" if width and height else "",
            f"{plural(frames, 'frame')} at {self.fps:g} fps" if frames else "",
            plural(steps, "step") if steps else "",
            f"seed {', '.join(map(str, settings.seed))}",
        ]
        count = plural(len(self.videos()), "video")
        said = ", ".join(filter(None, parts))
        return f"making {count} by {self.folder.class_name}: {said}"


@dataclass(frozen=True)
class Taped:
    """One video of a run, and the tape of it in the run's folder.

    Attributes:
        load: gives a component its weights before it is called.
        kept: the run's folder; ``None`` to keep nothing.
        index: of the video.
        until: the stage to end with.
    """

    pipeline: Any
    journal: Journal
    load: Callable[[str], None]
    kept: PipelineRun | None = None
    index: int = 0
    until: StageName | None = None

    def called(
        self, given: dict[str, Any], run: AnyRun
    ) -> tuple[Any, list[StageReport]]:
        """What upstream returns, and the reports of the stages that were run.

        Raises:
            ArtifactError: the tape is of a run in another way.
        """
        from tpuport.core.drive.checkpoints import Checkpoints
        from tpuport.core.drive.taped import called, tape_of

        name, settings = run.folder.class_name, run.settings
        with contextlib.ExitStack() as stack:
            tape = checkpoints = None
            if self.kept is not None:
                folder = self.kept.tapes[self.index]
                before = folder.read()
                folder.begin(run.how, before)
                tape = tape_of(self.pipeline, given, before, self.until)
                checkpoints = stack.enter_context(
                    Checkpoints(tape, folder, settings.checkpoint_every, run.reporter)
                )
            with upstreams_errors(name):
                output, drive = called(
                    self.pipeline,
                    given,
                    self.journal,
                    settings.backend,
                    tape,
                    self.load,
                )
            if checkpoints is not None and self.until is not None:
                checkpoints.finish()
        return output, drive.reports


def _files(settings: Settings) -> list[str]:
    named = [settings.image, settings.video, *settings.options.values()]
    texts = [text for text in named if isinstance(text, str)]
    return [t for t in texts if Path(t).expanduser().is_file()]


def file_digest(file: Path) -> str:
    """sha256 of a file."""
    return hashlib.sha256(file.expanduser().read_bytes()).hexdigest()
