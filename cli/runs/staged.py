"""Runs in folders: whole, a stage at a time, and gone on with."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.settings import Settings, read_again
from tpuport.cli.runs.kept_runs import going_on, is_kept, keep_asked, sweep, temporary
from tpuport.cli.runs.video_run import VideoRun, file_digest, find
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import say, show_results
from tpuport.core.enums import StageName
from tpuport.core.files.atomic import atomic_write_bytes
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.run_lock import holder, working_in
from tpuport.core.files.run_record import RUN_FILE, tapes_in, told_of
from tpuport.core.files.sealed_json import canonical
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import Asked
from tpuport.errors import ArtifactError, AttentionError, UsageError, WriteError

if TYPE_CHECKING:
    from tpuport.core.drive.pipeline_run import PipelineRun, Record
    from tpuport.core.files.outputs import Video
    from tpuport.core.pipelines.folder import PipelineFolder
    from tpuport.core.reports import Reporter, RunReport

#: How each stage of a run is run: by the flags of its command.
_OF_A_STAGE = (
    *("mesh", "attention", "backend", "on_host", "blocks", "sharding"),
    *("vae", "vae_tiling"),
)
#: Of the settings of a run, what its folder keeps beside what was asked for.
_HOW = (*_OF_A_STAGE, "dtype")


def generate_videos(settings: Settings, started: float) -> None:
    """Make videos, and tell of them as ``tpuport generate`` does.

    Raises:
        UsageError: a flag or an option that the pipeline has no use for.
        WeightsError: the checkpoint cannot be used.
        ArtifactError: the run in --run-dir is another one.
        TpuportError: the run failed.
    """
    with Display(signals.check) as display:
        run = VideoRun.prepared(settings, find(settings, display), display)
        name = f"{run.folder.class_name.removesuffix('Pipeline').lower()}{_seed(run)}"
        outputs = run.outputs(f"{name}.mp4")
        with _begun(run, outputs.asked) as kept:
            videos, report = run.make(outputs, started, kept)
    _show("generate", run, report, videos, run.settings.run_dir)


def encode_run(settings: Settings, started: float) -> None:
    """Run upstream's code up to the first call of a denoiser.

    Raises:
        TpuportError: as of :func:`generate_videos`.
    """
    assert settings.run_dir is not None
    with Display(signals.check) as display:
        run = VideoRun.prepared(settings, find(settings, display), display, partly=True)
        with _begun(run, "") as kept:
            _, report = run.make(None, started, kept, StageName.ENCODE)
    _show("encode", run, report, [], settings.run_dir)


def run_stage(settings: Settings, started: float, stage: StageName) -> None:
    """Run a stage of a run that was begun, as its folder says.

    Decode writes the videos.

    Raises:
        ArtifactError: the stage before is not finished, or the run cannot go on here.
        TpuportError: as of :func:`generate_videos`.
    """
    assert settings.run_dir is not None
    decodes = stage == StageName.DECODE
    with Display(signals.check) as display, _opened(settings, display) as (run, kept):
        if before := [*StageName][: [*StageName].index(stage)]:
            kept.check_finished(before[-1])
        outputs = run.outputs(str(settings.run_dir / "video.mp4")) if decodes else None
        until = None if decodes else stage
        videos, report = run.make(outputs, started, kept, until)
    _show(stage, run, report, videos, settings.run_dir)


def resume_run(settings: Settings, started: float) -> None:
    """Finish a run from where it is, and write its videos.

    Args:
        settings: with the run's folder, and where its videos go.

    Raises:
        ArtifactError: the run cannot go on here.
        TpuportError: as of :func:`generate_videos`.
    """
    assert settings.run_dir is not None
    with (
        Display(signals.check) as display,
        _opened(settings, display, resumes=True) as (run, kept),
    ):
        place = kept.record["out"] or str(settings.run_dir / "video.mp4")
        videos, report = run.make(run.outputs(place), started, kept)
    _show("resume", run, report, videos, settings.run_dir)


@contextlib.contextmanager
def _begun(run: VideoRun, out: str) -> Iterator[PipelineRun]:
    """The folder of a run: --run-dir, or one in the cache that goes with the run.

    The same command finds the same folder, and goes on.
    """
    from tpuport.core.drive.pipeline_run import PipelineRun

    record, given = _record(run, out), run.settings.run_dir
    with contextlib.ExitStack() as stack:
        if given is not None:
            folder = stack.enter_context(working_in(given))
        else:
            assert run.settings.cache_dir is not None
            sweep(run.settings.cache_dir)
            folder = _own_folder(run, record, stack)
            keep_asked(folder, run.settings, out)
        kept = PipelineRun.open_or_begin(folder, record)
        _keep_inputs(kept, run)
        _say_where(kept)
        stack.enter_context(going_on(folder))
        yield kept


def _say_where(kept: PipelineRun) -> None:
    """Say how far a run is that goes on."""
    if tapes := tapes_in(kept.path):
        done = ", ".join(told_of(tape) for tape in tapes)
        say(f"going on with the run in {kept.path}, after {done}")


def _own_folder(run: VideoRun, record: Record, stack: contextlib.ExitStack) -> Path:
    """A folder of the cache, named by what the run is of; held by ``stack``."""
    assert run.settings.cache_dir is not None
    about = {**record, "out": "", "source": ""}  # wherever they are
    digest = hashlib.sha256(canonical(about)).hexdigest()[:12]
    name = f"{run.folder.class_name.removesuffix('Pipeline').lower()}-{digest}"
    for number in itertools.count(1):
        own = name if number == 1 else f"{name}-{number}"
        folder = run.settings.cache_dir / "runs" / own
        if holder(folder) is None:  # else another process makes the same video
            try:
                return stack.enter_context(temporary(folder))
            except WriteError:
                raise
            except ArtifactError:  # which came first
                continue
    raise AssertionError


@contextlib.contextmanager
def _opened(
    settings: Settings, reporter: Reporter, *, resumes: bool = False
) -> Iterator[tuple[VideoRun, PipelineRun]]:
    """A run that was begun, as its folder says.

    Args:
        resumes: go on in the way of the run so far, and remove a folder of the cache
            when the videos are there. Else a stage begins, in the way of the flags.
    """
    from tpuport.core.drive.pipeline_run import PipelineRun

    path = settings.run_dir
    assert path is not None
    hold = temporary if resumes and is_kept(path) else working_in
    with hold(path):
        kept = PipelineRun.open(path)
        settings = _asked_again(kept, settings, resumes=resumes)
        folder = find(settings, reporter)
        run = VideoRun.prepared(settings, folder, reporter, partly=True)
        _check_same(kept, run)
        if resumes:
            _say_where(kept)
        with going_on(path):
            yield run, kept


def _check_same(kept: PipelineRun, run: VideoRun) -> None:
    """Refuse to go on with other weights, files or versions.

    Raises:
        ArtifactError: what differs.
    """
    now, then = _record(run), kept.record
    if sorted(now["inputs"].values()) != sorted(then["inputs"].values()):
        raise ArtifactError(
            f"{kept.path}: {', '.join(now['inputs'])} is not what the run was begun "
            "with; begin the run again in another folder"
        )
    # How a stage runs is the stage's own; within denoise, the tape holds it.
    same = {"asked": then["asked"], "inputs": then["inputs"]}
    kept.check({**now, **same})  # type: ignore[typeddict-item]


def _record(run: VideoRun, out: str = "") -> Record:
    checkpoint = run.folder.checkpoint
    there = [name for name in run.folder.components() if _has_weights(run.folder, name)]
    return {
        "pipeline": run.folder.class_name,
        "source": checkpoint.reference,
        "weights": checkpoint.fingerprints(there),
        "asked": _plain(run),
        "inputs": {_absolute(name): digest for name, digest in run.inputs.items()},
        "versions": versions(),
        "videos": len(run.together()),
        "out": out and str(Path(out).absolute()) + "/" * out.endswith("/"),
    }


def _has_weights(folder: PipelineFolder, name: str) -> bool:
    place = folder.folder / name
    files = [*place.glob("*.safetensors")]
    return bool(files) or not (place / "config.json").exists()


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())


def _keep_inputs(kept: PipelineRun, run: VideoRun) -> None:
    """Copy the images and videos that a run starts from into its folder.

    Raises:
        WriteError: a copy cannot be written.
    """
    for name in run.inputs:
        place = _copy_of(kept, _absolute(name))
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            atomic_write_bytes(place, Path(name).expanduser().read_bytes())


def _copy_of(kept: PipelineRun, name: str) -> Path:
    """Where a run's folder has its copy of a file."""
    digest = kept.record["inputs"][name]
    return kept.path / "inputs" / f"{digest[:16]}{Path(name).suffix}"


def _plain(run: VideoRun) -> dict[str, Any]:
    """What was asked for, as JSON; what was not given is left out."""
    settings = run.settings
    names = [f.name for f in fields(Asked)] + ["latents", "batch", *_HOW]
    known = {f.name for f in fields(Settings) if f.init and f.name in names}

    def plain(value: Any) -> Any:
        if isinstance(value, tuple | list):
            return [plain(one) for one in value]
        if isinstance(value, Mapping):
            return {key: plain(one) for key, one in value.items()}
        if value is None or isinstance(value, bool | int | float):
            return value
        return _absolute(str(value)) if str(value) in run.inputs else str(value)

    values = {name: getattr(settings, name) for name in known - {"mesh"}}
    asked = {n: plain(v) for n, v in values.items() if v not in (None, (), {})}
    return {**asked, "mesh": run.how["mesh"]}


def _asked_again(kept: PipelineRun, settings: Settings, *, resumes: bool) -> Settings:
    """What a run was asked for, with this command's flags.

    Args:
        resumes: also how the run was run so far.

    Raises:
        UsageError: a flag that the run settles is another one.
        ArtifactError: the run's own settings are not usable.
    """
    asked = dict(kept.record["asked"])
    dtype = asked.get("dtype")
    if settings.dtype not in (None, dtype):
        raise UsageError(
            f"--dtype {settings.dtype}: {kept.path} was begun with {dtype}; leave the "
            "flag out"
        )
    if resumes:
        asked |= kept.how
    else:
        asked = {name: v for name, v in asked.items() if name not in _OF_A_STAGE}
    try:
        given = read_again({n: _with_inputs(kept, v) for n, v in asked.items()})
    except (UsageError, AttentionError) as error:
        raise ArtifactError(
            f"{kept.path / RUN_FILE}: {error}; begin the run again in another folder"
        ) from error
    weights = settings.weights or kept.record["source"]
    return replace(settings, model=None, weights=weights, **given)


def _with_inputs(kept: PipelineRun, value: Any) -> Any:
    """A recorded value; of a file that has changed or is gone, the run's copy."""
    if isinstance(value, dict):
        return {key: _with_inputs(kept, one) for key, one in value.items()}
    digest = kept.record["inputs"].get(value) if isinstance(value, str) else None
    if digest is None:
        return value
    same = Path(value).is_file() and file_digest(Path(value)) == digest
    return value if same else str(_copy_of(kept, value))


def _show(
    command: str,
    run: VideoRun,
    report: RunReport,
    videos: list[Video],
    run_dir: Path | None,
) -> None:
    """The end of a command."""
    settings = run.settings
    document = {
        "command": command,
        "pipeline": run.folder.class_name,
        "weights": run.folder.checkpoint.reference,
        "videos": [video.as_dict() for video in videos],
        **run.how,
        "run_dir": run_dir and str(run_dir),
        "report": report.as_dict(),
        "patches": run.patches,
        "calls": run.calls,
    }
    written = [video.path for video in videos]
    if not videos and run_dir is not None:
        written = [run_dir]
    show_results(document, report, written, as_json=settings.json, file=settings.report)


def _seed(run: VideoRun) -> str:
    seeds = set(run.settings.seed)
    return f"-seed{next(iter(seeds))}" if len(seeds) == 1 else ""
