"""Videos of a pipeline, from prompts to files: upstream's code drives."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from tpuport import targets
from tpuport.cli.asked.environment import cache_folder
from tpuport.cli.asked.first import (
    check_backend,
    check_written,
    count_of,
    outputs_of,
)
from tpuport.cli.asked.noise import read_noise
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.checks import (
    PipelineCall,
    check_attention_here,
    check_on_host,
    check_vae,
    upstreams_errors,
    wide,
)
from tpuport.cli.runs.previewed import preview_file, previewed
from tpuport.cli.runs.size_class import sized
from tpuport.cli.runs.variants import NO_PROMPT
from tpuport.cli.shown.output import say
from tpuport.core.arrays import torch_dtype
from tpuport.core.drive.checkpoints import Checkpoints
from tpuport.core.drive.driving import called, merged, tape_of
from tpuport.core.drive.late_weights import LateWeights
from tpuport.core.drive.pipeline_run import PipelineRun
from tpuport.core.drive.run_in_store import RunInStore
from tpuport.core.drive.step_caches import StepCaches, standing, step_caches
from tpuport.core.enums import Blocks, StageName
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.frames import check_frames
from tpuport.core.files.outputs import Outputs, Video
from tpuport.core.files.stores import StorePath
from tpuport.core.files.video_file import SOUNDING, VideoWriter, check_length
from tpuport.core.mesh.device_mesh import PlacedMesh
from tpuport.core.mesh.hosts import here
from tpuport.core.mesh.mesh_arrays import own_devices
from tpuport.core.pipelines import sidecar
from tpuport.core.pipelines.call_arguments import (
    FPS,
    SCHEDULER,
    Made,
    arguments_of,
    as_arrays,
    default_of,
    made_of,
    media_of,
)
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.pipelines.loras import Lora
from tpuport.core.reports import (
    Reporter,
    RunReport,
    StageReport,
    peak_device_bytes,
    peak_host_bytes,
    plural,
)
from tpuport.core.run.inspection import Inspection
from tpuport.core.seam.journal import Journal
from tpuport.core.seam.ported import port_pipeline, seam_of, unport
from tpuport.core.seam.target import Target
from tpuport.core.spec.run_settings import PROFILED_CALLS
from tpuport.errors import UsageError
from tpuport.plugins import plugin_for

#: Of a request, what a sidecar keeps to ask again.
_FLAGS = (
    *("height", "width", "num_frames", "fps", "num_inference_steps"),
    *("guidance_scale", "image", "video", "strength", "latents", "step_cache"),
)


def find(settings: Settings, reporter: Reporter) -> PipelineFolder:
    """The pipeline's folder; the index alone is read."""
    assert settings.weights is not None
    cache = cache_folder(settings.cache_dir)
    store = settings.cache_store
    folder = PipelineFolder.find(settings.weights, reporter, cache, store)
    plugin = plugin_for(folder.claim)
    if plugin is not None and (given := media_of(settings)):
        folder = folder.taking(plugin, given, reporter)
    folder = replace(
        folder,
        guidance=settings.guidance_scale,
        tiling=settings.vae_tiling,
        loras=tuple(
            Lora.find(choice, reporter, cache, store) for choice in settings.lora
        ),
    )
    scheduler = settings.options.get(SCHEDULER)
    if scheduler is None or SCHEDULER in folder.parameters:
        return folder
    return folder.with_scheduler(str(scheduler))


@dataclass(frozen=True)
class Wanted:
    """A video that a call makes.

    Attributes:
        prompt, negative_prompt: ``None`` for upstream's own.
        request: the digest of a request of a batch; empty for none.
        plain: whether frames of one colour will do.
    """

    prompt: str | None
    negative_prompt: str | None
    seed: int
    request: str = ""


@dataclass(frozen=True)
class Again:
    """What a replay makes again: a video of a call.

    Attributes:
        video: which of the call is wanted.
        noise: which of the noises of ``--latents`` the first was made from.
        files: that a replay compares with.
    """

    video: int
    noise: int
    files: tuple[Path, ...] = ()


@dataclass(kw_only=True)
class VideoRun(PipelineCall):
    """One pipeline, what it is asked for, and what it made.

    Attributes:
        placed: the mesh.
        inputs: the digests of images and videos that are read, by file.
        digests: of the frames of each video.
        patches: what became of each patch.
        calls: of modules, by name: of how many programs.
        blocks: those in place, which a plugin may have.
        again: what a replay makes again; ``None`` for what the settings ask for.
        wanted: the videos of one call, of a replay or of several requests; empty for
            every prompt of the settings with every seed.
        pipeline, journal, load, caches, inspection: while the pipeline is open: the
            pipeline, what is noted of its calls, what gives a component its weights
            before it is called, the step cache, and what looks at the calls.
        kept: the run's folder; ``None`` to keep nothing.
        in_store: its copy in a store; ``None`` for none.
        until: the stage to end with.
        previews: files for frames while steps run: one, or one for each video, which
            may share some; empty for none.
        request: the digest of a request of a batch; empty for none.
    """

    placed: PlacedMesh
    inputs: dict[str, str]
    digests: list[str] = field(default_factory=list)
    patches: list[dict[str, Any]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    blocks: Blocks = Blocks.UPSTREAM
    again: Again | None = None
    wanted: tuple[Wanted, ...] = ()
    pipeline: Any = field(init=False)
    journal: Journal = field(init=False)
    load: Callable[[str], None] = field(init=False)
    caches: StepCaches | None = None
    inspection: Inspection | None = None
    kept: PipelineRun | None = None
    in_store: RunInStore | None = None
    until: StageName | None = None
    previews: tuple[Path, ...] = ()
    request: str = ""
    plain: bool = False

    @classmethod
    def prepared(
        cls,
        settings: Settings,
        folder: PipelineFolder,
        reporter: Reporter,
        *,
        partly: bool = False,
        again: Again | None = None,
        wanted: tuple[Wanted, ...] = (),
    ) -> VideoRun:
        """Everything checked that needs no weights.

        Args:
            again, wanted: see :class:`VideoRun`.
            partly: some components are not called, and their weights may be missing.
        """
        settings = replace(settings, cache_dir=cache_folder(settings.cache_dir))
        check_backend(settings)
        _check_files(settings, folder, again)
        if "prompt" in folder.parameters and not settings.prompt:
            raise UsageError(NO_PROMPT)
        check_attention_here(settings)
        settings = sized(settings, folder, reporter)
        arguments = arguments_of(folder, settings)
        call = PipelineCall(
            settings=settings, folder=folder, reporter=reporter, arguments=arguments
        )
        call.settle_host()
        check_vae(call.settings, folder)
        check_on_host(call.settings, folder)
        folder.check_packages(arguments)
        ahead = settings.executables is not None
        call.folder = folder.fetched(reporter, weights=not ahead)
        call.folder.check_components(weights=not (partly or ahead))
        call.settle_mesh()
        placed = call.placed_here()
        if not call.by_upstream:
            call.target(placed, Reporter())  # refuses a layout that is none
        call.settle_dtype(placed)
        if ahead:  # weights take long to come, and programs are refused sooner
            call.check_executables(placed)
            call.folder = folder.fetched(reporter)
            call.folder.check_components(weights=not partly)
        call.match_loras()
        call.settle_batch(placed)
        call.check_host_memory()
        if not partly and again is None:
            call.check_inputs()
        call.check_mesh(placed)
        call.check_step_cache(placed)
        inputs = {name: file_digest(Path(name)) for name in _files(call.settings)}
        videos: dict[str, Any] = {"again": again, "wanted": wanted}
        return cls(**vars(call), placed=placed, inputs=inputs, **videos)

    @property
    def how(self) -> dict[str, Any]:
        """How the pipeline is run."""
        settings = self.settings
        return {
            "backend": settings.backend,
            "dtype": settings.dtype,
            "mesh": str(self.placed.spec),
            "attention": str(settings.attention),
            "on_host": list(settings.on_host),
            "blocks": settings.blocks,
            "sharding": settings.sharding,
            "vae": settings.vae,
            "vae_tiling": settings.vae_tiling,
        }

    @property
    def fps(self) -> float:
        """Of the files."""
        return float(self.settings.fps or default_of(self.folder, "fps") or FPS)

    def videos(self) -> list[Wanted]:
        """The videos in order."""
        if self.wanted:
            return list(self.wanted)
        asked = self.settings
        prompts, negative = asked.prompt or (None,), asked.negative_prompt
        return [
            Wanted(prompt, negative, seed, self.request)
            for prompt in prompts
            for seed in asked.seed
        ]

    def together(self) -> list[range]:
        """The numbers of the videos of each call."""
        count = len(self.videos())
        each = self.settings.batch_size or 1
        return [range(n, min(n + each, count)) for n in range(0, count, each)]

    def in_call(self, numbers: range) -> list[Wanted]:
        """The videos that a call makes; where rows must divide, a last one repeats."""
        videos = [self.videos()[number] for number in numbers]
        missing = (self.settings.batch_size or 1) - len(videos)
        return videos + videos[-1:] * (missing if wide(self.placed) else 0)

    def outputs(self, name: str) -> Outputs:
        """Where the videos go; creates nothing.

        Args:
            name: the place without --out.
        """
        count = 1 if self.again is not None else len(self.videos())
        return self.outputs_of(self.settings, count, name)

    def outputs_of(self, asked: Settings, count: int, name: str = "") -> Outputs:
        """Where ``count`` of the videos go, which settings say."""
        read = [Path(name).expanduser() for name in self.inputs]
        read += self.again.files if self.again else ()
        outputs = outputs_of(asked, name, count, read)
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
        self.kept, self.until = kept, until
        if self.settings.preview and until != StageName.ENCODE:
            assert kept is not None
            place = outputs.paths[0] if outputs else kept.path / "denoise"
            if isinstance(place, StorePath):
                place = kept.path / place.name
            self.previews = (preview_file(place),)
        self.reporter.say(self._in_words())
        if until is not None and kept is not None and kept.finished(until):
            self.reporter.say(f"{until}: finished in {kept.path}, reused")
            return [], self.report([], time.perf_counter() - started)
        late = until is not None or bool(kept and kept.begun)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.opened(late=late))
            return self.make_open([outputs] if outputs else [], started)

    def make_open(
        self, outputs: Sequence[Outputs], started: float
    ) -> tuple[list[Video], RunReport]:
        """:meth:`make` while the pipeline is open.

        Args:
            outputs: where the first videos go, the next ones, and so on.
        """
        with contextlib.ExitStack() as stack:
            writers: list[VideoWriter] = []
            for one in outputs:
                writers += stack.enter_context(one.writers(self.fps))
            stages: list[Any] = []
            count = len(self.videos())
            for call, numbers in enumerate(self.together()):
                with contextlib.ExitStack() as told:
                    if call:  # the stages were told with the first call
                        which = " and ".join(str(n + 1) for n in numbers)
                        what = f"video {which} of {count}"
                        told.enter_context(self.reporter.timed(what))
                        self.journal.reporter = Reporter()
                    made, reports = self.made(call)
                    stages += reports
                    if self.inspection is not None:
                        for line in self.inspection.lines(reports):
                            self.reporter.say(line)
                    if made is not None:
                        self._write(numbers, made, writers)
            report = self.report(stages, time.perf_counter() - started)
            videos: list[Video] = []
            for one in outputs:
                own = writers[len(videos) :][: len(one.wanted)]
                describe = functools.partial(self._sidecar, report, len(videos))
                videos += one.publish(own, describe)
            return videos, report

    @contextlib.contextmanager
    def opened(self, *, late: bool = False) -> Iterator[None]:
        """Load the pipeline with its weights; it is ported while the block lasts.

        Args:
            late: read the weights of a component when it is called.
        """
        settings, reporter = self.settings, self.reporter
        dtype = torch_dtype(str(settings.dtype))
        whole = self.folder.modules() if self.by_upstream else settings.on_host
        folder = replace(self.folder, whole=whole)
        if late:
            weights = LateWeights(folder, dtype, reporter)
            self.pipeline, self.load = weights.pipeline, weights.load
        else:
            self.pipeline = folder.load(dtype, reporter)
            self.load = lambda name: None
        self.pipeline.set_progress_bar_config(disable=True)
        target = None if self.by_upstream else self._target()
        self.journal, seam = Journal(reporter), None
        with contextlib.ExitStack() as stack:
            if settings.step_cache is not None:
                self.caches = step_caches(self.pipeline, settings.step_cache, target)
                stack.enter_context(standing(self.caches.modules.values()))
            if target is not None:
                port_pipeline(self.pipeline, target, settings.on_host, reporter)
                stack.callback(unport, self.pipeline)
                seam = seam_of(self.pipeline)
                self.journal = seam.journal
            self.inspection = self._inspection()
            yield
            if seam is not None:
                self.patches = seam.patches()
                self.calls = {name: len(e.programs) for name, e in seam.entries.items()}

    def _target(self) -> Target:
        name, settings, reporter = self.folder.class_name, self.settings, self.reporter
        claim = self.folder.claim
        target = targets.claimed_target(claim, self.placed, settings, reporter)
        self.blocks = target.blocks
        built = targets.executables_for(name, target, settings, reporter)
        return target.with_executables(built)

    def _inspection(self) -> Inspection | None:
        asked = self.settings
        if not (asked.memory_report or asked.profile or asked.no_jit):
            return None
        if self.by_upstream:
            say("--memory-report, --profile and --no-jit: not for upstream's code")
            return None
        return Inspection(
            self.journal,
            self.placed.mesh.devices.flat,
            memory=asked.memory_report,
            profile=asked.profile,
            calls=asked.profile_calls or PROFILED_CALLS,
            op_by_op=asked.no_jit,
        )

    def made(self, index: int) -> tuple[Made | None, list[StageReport]]:
        """What a call makes, and the reports of its stages; ``None`` before decode."""
        numbers = self.together()[index]
        given = {**self.arguments, **as_arrays(self.folder), **self._own(numbers)}
        torch.manual_seed(self.videos()[numbers[0]].seed)  # of pipelines that draw so
        output, reports = self.called(given, index)
        if self.until is not None:
            return None, reports
        made = made_of(output, self.pipeline)
        for number, frames in zip(numbers, made.frames, strict=False):
            check_frames(number, frames, plain=self.plain)
        return made, reports

    def called(
        self, given: dict[str, Any], index: int
    ) -> tuple[Any, list[StageReport]]:
        """What upstream returns, and the reports of the stages that were run.

        The tape of the call is in the run's folder, if there is one.
        """
        inspection, every = self.inspection, self.settings.checkpoint_every
        with contextlib.ExitStack() as stack:
            tape = checkpoints = None
            if self.kept is not None:
                folder = self.kept.tapes[index]
                before = folder.read()
                folder.begin(self.how, before)
                tape = tape_of(self.pipeline, given, before, self.until)
                if here().first:
                    put = (self.in_store.put,) if self.in_store else ()
                    checkpoints = stack.enter_context(
                        Checkpoints(tape, folder, every, self.reporter, *put)
                    )
            if self.previews:
                assert self.settings.cache_dir is not None
                showing = previewed(
                    *(self.pipeline, given, self.journal),
                    cache=self.settings.cache_dir,
                    files=self._shown(self.together()[index]),
                    reporter=self.reporter,
                    load=self.load,
                    tape=tape,
                )
                stack.enter_context(showing)
            try:
                with upstreams_errors(type(self.pipeline).__name__):
                    how: dict[str, Any] = {"caches": self.caches}
                    if inspection is not None:
                        how["around"] = inspection.around
                    backend = self.settings.backend
                    run = (self.pipeline, given, self.journal, backend, tape)
                    output, drive = called(*run, before_live=self.load, **how)
            except BaseException as error:
                if inspection is not None and (text := inspection.text()):
                    error.add_note(text)
                raise
            if checkpoints is not None and self.until is not None:
                checkpoints.finish()
        if inspection is None:
            return output, drive.reports
        return output, inspection.ended(drive.reports)

    def _shown(self, numbers: range) -> list[Path]:
        """The file of each video of a call for its frames."""
        if len(self.previews) == 1:
            return [*self.previews] * len(self.in_call(numbers))
        files = [self.previews[number] for number in numbers]
        return files + files[-1:] * (len(self.in_call(numbers)) - len(files))

    def _own(self, numbers: range) -> dict[str, Any]:
        """The keywords of a call that are its videos' own; several are in lists."""
        known = self.folder.all_parameters
        videos = self.in_call(numbers)
        found: dict[str, list[Any]] = {}
        for name in ("prompt", "negative_prompt"):
            if getattr(videos[0], name) is not None:
                found[name] = [getattr(video, name) for video in videos]
        if "generator" in known:
            found["generator"] = [
                torch.Generator("cpu").manual_seed(video.seed) for video in videos
            ]
        given: dict[str, Any] = {
            name: values if len(values) > 1 else values[0]
            for name, values in found.items()
        }
        noise = read_noise(self.settings.latents)
        if noise is not None:
            first = numbers[0] + (self.again.noise if self.again else 0)
            last = len(noise) - 1  # one serves all
            rows = [min(first + number, last) for number in range(len(videos))]
            given["latents"] = noise[rows]
        return given

    def _write(
        self, numbers: range, made: Made, writers: Sequence[VideoWriter]
    ) -> None:
        count = len(self.in_call(numbers))
        if len(made.frames) < count:
            raise UsageError(
                f"{self.folder.class_name} made {plural(len(made.frames), 'video')} of "
                f"{count} prompts: leave --batch-size out"
            )
        asked, found = self.settings.num_frames, len(made.frames[0])
        if asked is not None and asked != found and numbers[0] == 0:
            say(f"{self.folder.class_name} made {plural(found, 'frame')}, not {asked}")
        sound = made.sound
        kind = writers[0].kind if writers else SOUNDING[0]
        if sound is not None and kind not in SOUNDING:
            say(f"the sound is left out: .{kind} holds none")
            sound = None
        wanted = numbers if self.again is None else numbers[self.again.video :][:1]
        for number in wanted:
            frames = made.frames[number - numbers[0]]
            self.digests.append(sidecar.frames_digest(frames))
            if writers:
                place = number - wanted[0] * bool(self.again)
                writers[place].write(frames, sound, made.rate)

    def _sidecar(
        self, report: RunReport, first: int, index: int, output: Mapping[str, Any]
    ) -> dict[str, Any]:
        """What the sidecar of a video says: a :class:`sidecar.Sidecar`.

        Args:
            index: of the video, counted from the ``first`` that the outputs have.
        """
        settings, checkpoint = self.settings, self.folder.checkpoint
        flags = {n: getattr(settings, n) for n in _FLAGS}
        if settings.step_cache is not None:
            flags["step_cache"] = str(settings.step_cache)
        number = first + index + (self.again.video if self.again else 0)
        call = next(c for c in self.together() if number in c)
        videos = self.in_call(call)
        request = self.videos()[number].request
        return {
            "pipeline": self.folder.class_name,
            "weights": {
                "source": checkpoint.reference,
                "fingerprints": checkpoint.fingerprints(self.folder.components()),
                "loras": [lora.as_dict() for lora in self.folder.loras],
            },
            "request": {
                "prompts": [video.prompt for video in videos],
                "negative_prompts": [video.negative_prompt for video in videos],
                "seeds": [[video.seed for video in videos]],
                "flags": {n: v for n, v in flags.items() if v is not None},
                "options": dict(settings.options),
            },
            "video": number - call[0],
            "noise": call[0] + (self.again.noise if self.again else 0),
            **({"batch": request} if request else {}),
            "inputs": dict(self.inputs),
            # A tape's `how` has no weights_on: a run may go on with them elsewhere.
            "how": {**self.how, "weights_on": settings.weights_on},
            "versions": versions(),
            "platform": {"system": platform.platform(), "devices": report.devices},
            "output": dict(output),
            "frames_sha256": self.digests[first + index],
            "summary": {
                "total_seconds": round(report.total_seconds, 3),
                "peak_host_bytes": report.peak_host_bytes,
                "peak_device_bytes": report.peak_device_bytes,
            },
        }

    def report(self, stages: list[Any], seconds: float) -> RunReport:
        devices = list(self.placed.mesh.devices.flat)
        return RunReport(
            model=self.folder.class_name,
            weights=self.folder.checkpoint.reference,
            platform=str(devices[0].platform),
            mesh=str(self.placed.spec),
            devices=len(devices),
            dtype=str(self.settings.dtype),
            blocks=self.blocks,
            stages=tuple(merged(stages)),
            total_seconds=seconds,
            peak_host_bytes=peak_host_bytes(),
            peak_device_bytes=peak_device_bytes(own_devices(devices)),
        )

    def _in_words(self) -> str:
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


def _check_files(
    settings: Settings, folder: PipelineFolder, again: Again | None
) -> None:
    count = count_of(settings)
    noise = read_noise(settings.latents)
    if noise is not None:
        if "latents" not in folder.all_parameters:
            raise UsageError(f"--latents: {folder.class_name} takes none")
        if again is None and len(noise) not in (1, count):
            raise UsageError(
                f"--latents {settings.latents} holds the noise of {len(noise)} videos, "
                f"and {count} are asked for; give one, or {count}"
            )
    if again is None:
        check_written(settings, count)
    else:
        check_written(settings, 1, again.files)


def _files(settings: Settings) -> list[str]:
    named = [settings.image, settings.video, settings.latents]
    named += settings.options.values()
    texts = [text for text in named if isinstance(text, str)]
    return [t for t in texts if Path(t).expanduser().is_file()]


def file_digest(file: Path) -> str:
    """sha256 of a file."""
    return hashlib.sha256(file.expanduser().read_bytes()).hexdigest()
