"""Runs in folders: whole, a stage at a time, and gone on with."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import astuple, fields, replace
from pathlib import Path
from typing import Any

from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.kept_runs import going_on, is_kept, keep_asked, sweep, temporary
from tpuport.cli.runs.shared_run import copied_run, share_run
from tpuport.cli.runs.video_run import VideoRun, file_digest, find
from tpuport.cli.shown.output import say, show_results
from tpuport.core.drive.pipeline_run import PipelineRun, Record
from tpuport.core.enums import StageName, WeightsOn
from tpuport.core.files.atomic import atomic_write_bytes
from tpuport.core.files.fingerprint import versions
from tpuport.core.files.outputs import Video
from tpuport.core.files.run_lock import holder, working_in
from tpuport.core.files.run_record import RUN_FILE, tapes_in, told_of
from tpuport.core.files.sealed_json import canonical
from tpuport.core.files.stores import from_anywhere
from tpuport.core.mesh.hosts import here
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter, RunReport, plural
from tpuport.core.spec.run_settings import Asked, typed
from tpuport.errors import ArtifactError, AttentionError, UsageError, WriteError

#: How each stage of a run is run: by the flags of its command.
_OF_A_STAGE = (
    *("mesh", "attention", "backend", "on_host", "blocks", "sharding"),
    *("weights_on", "vae", "vae_tiling"),
)
#: Of the settings of a run, what its folder keeps beside what was asked for.
_HOW = (*_OF_A_STAGE, "dtype")


def begin_run(
    settings: Settings, started: float, command: str, reporter: Reporter
) -> None:
    """Begin a run, or go on with the same one; tell of it as ``command`` does.

    ``generate`` makes videos, and ``encode`` ends before the first call of a denoiser.
    """
    until = StageName.ENCODE if command == StageName.ENCODE else None
    folder = find(settings, reporter)
    run = VideoRun.prepared(settings, folder, reporter, partly=until is not None)
    here().same(alike(run))
    outputs = None
    if until is None and here().first:
        outputs = run.outputs(f"{_short_name(run)}{_seed(run)}.mp4")
    with begun(run, outputs.asked if outputs else "") as kept:
        videos, report = run.make(outputs, started, kept, until)
    _show(command, run, report, videos)


def go_on_with_run(
    settings: Settings, started: float, stage: StageName | None, reporter: Reporter
) -> None:
    """Run a stage of a run that was begun, as its folder says; or finish the run.

    Args:
        settings: with the run's folder, and where its videos go.
        stage: ``None`` for all that is left; it and decode write the videos.
    """
    resumes, stages = stage is None, [*StageName]
    with _opened(settings, reporter, resumes=resumes) as (run, kept):
        if stage is not None and stage != stages[0]:
            kept.check_finished(stages[stages.index(stage) - 1])
        place = kept.record["out"] if resumes else ""
        outputs, until = None, None if stage == StageName.DECODE else stage
        if until is None and here().first:
            outputs = run.outputs(place or str(kept.path / "video.mp4"))
        videos, report = run.make(outputs, started, kept, until)
    _show("resume" if stage is None else stage, run, report, videos)


@contextlib.contextmanager
def begun(run: VideoRun, out: str) -> Iterator[PipelineRun]:
    """The folder of a run: --run-dir, or one in the cache that goes with the run.

    The same command finds the same folder, and goes on.
    """
    record, given = _record(run, out), run.settings.run_dir
    if not here().first:
        with copied_run() as folder:
            yield PipelineRun.open(folder)
        return
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
        share_run(folder)
        yield kept


def _say_where(kept: PipelineRun) -> None:
    if tapes := tapes_in(kept.path):
        done = ", ".join(told_of(tape) for tape in tapes)
        say(f"going on with the run in {kept.path}, after {done}")


def _own_folder(run: VideoRun, record: Record, stack: contextlib.ExitStack) -> Path:
    """A folder of the cache, named by what the run is of; held by ``stack``."""
    assert run.settings.cache_dir is not None
    about = {**record, "out": "", "source": ""}  # wherever they are
    digest = hashlib.sha256(canonical(about)).hexdigest()[:12]
    name = f"{_short_name(run)}-{digest}"
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
    path = settings.run_dir
    assert path is not None
    hold = temporary if resumes and is_kept(path) else working_in
    with hold(path) if here().first else copied_run() as path:
        kept = PipelineRun.open(path)
        share_run(path)
        settings = _asked_again(kept, settings, resumes=resumes)
        folder = find(settings, reporter)
        run = VideoRun.prepared(settings, folder, reporter, partly=True)
        _check_same(kept, run)
        here().same(alike(run))
        if resumes:
            _say_where(kept)
        told = going_on(path) if here().first else contextlib.nullcontext()
        with told:
            yield run, kept


def _check_same(kept: PipelineRun, run: VideoRun) -> None:
    """Refuse to go on with other weights, files or versions."""
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
        "weights": {**checkpoint.fingerprints(there), **_loras(run)},
        "asked": _plain(run),
        "inputs": {_absolute(name): digest for name, digest in run.inputs.items()},
        "versions": versions(),
        "videos": len(run.together()),
        "out": out and from_anywhere(out),
    }


def alike(run: VideoRun) -> dict[str, str]:
    """What the processes of a run need alike, of what they have read."""
    if not here().several:
        return {}
    weights = _record(run)["weights"].items()
    found = {f"{name} by its fingerprint": value for name, value in weights}
    digests = enumerate(run.inputs.values(), 1)  # each process has its own paths
    return found | {f"sha256 of input {number}": digest for number, digest in digests}


def _loras(run: VideoRun) -> dict[str, str]:
    """What is fused into the weights, by its number: wherever the files are."""
    return {
        f"lora {number}": f"{lora.sha256}{lora.settings_sha256} scale "
        f"{lora.choice.scale!r} {lora.choice.component or ''}".rstrip()
        for number, lora in enumerate(run.folder.loras, 1)
    }


def _has_weights(folder: PipelineFolder, name: str) -> bool:
    place = folder.folder / name
    config = place / "config.json"
    return any(place.glob("*.safetensors")) or not config.exists()


def _absolute(name: str) -> str:
    return str(Path(name).expanduser().absolute())


def _keep_inputs(kept: PipelineRun, run: VideoRun) -> None:
    for name in run.inputs:
        place = _copy_of(kept, _absolute(name))
        if not place.exists():
            place.parent.mkdir(exist_ok=True)
            atomic_write_bytes(place, Path(name).expanduser().read_bytes())


def _copy_of(kept: PipelineRun, name: str) -> Path:
    digest = kept.record["inputs"][name]
    return kept.path / "inputs" / f"{digest[:16]}{Path(name).suffix}"


def _plain(run: VideoRun) -> dict[str, Any]:
    """What was asked for, as JSON; what was not given is left out."""
    settings = run.settings
    names = [f.name for f in fields(Asked)] + ["latents", "batch_size", *_HOW]
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
    if settings.weights_on == WeightsOn.AUTO:  # records have no field without need
        del asked["weights_on"]
    if run.folder.loras:
        asked["lora"] = [str(lora.choice) for lora in run.folder.loras]
    if run.wanted:
        asked["videos"] = [plain(astuple(video)) for video in run.wanted]
    return {**asked, "mesh": run.how["mesh"]}


def _asked_again(kept: PipelineRun, settings: Settings, *, resumes: bool) -> Settings:
    """What a run was asked for, with this command's flags.

    Args:
        resumes: also how the run was run so far.
    """
    asked = dict(kept.record["asked"])
    if "videos" in asked:
        raise UsageError(
            f"{kept.path}: is of several requests of a batch; run the same `tpuport "
            "batch` again"
        )
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
    if settings.lora:  # where the files are now; what they hold is compared
        if len(settings.lora) != len(asked.get("lora", ())):
            raise UsageError(
                f"--lora: {kept.path} was begun with "
                f"{plural(len(asked.get('lora', ())), 'LoRA')}; name as many"
            )
        asked["lora"] = list(settings.lora)
    try:
        given = typed(Settings, {n: _with_inputs(kept, v) for n, v in asked.items()})
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


def _show(command: str, run: VideoRun, report: RunReport, videos: list[Video]) -> None:
    settings = run.settings
    run_dir = settings.run_dir
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


def _short_name(run: VideoRun) -> str:
    return run.folder.class_name.removesuffix("Pipeline").lower()


def _seed(run: VideoRun) -> str:
    seeds = set(run.settings.seed)
    return f"-seed{next(iter(seeds))}" if len(seeds) == 1 else ""
