"""The video of a sidecar that a pipeline without a plugin made, made again."""

from __future__ import annotations

import textwrap
import time
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.any_pipeline import Again, AnyRun, find
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import say
from tpuport.core.run.progress import Display
from tpuport.core.spec import kinds
from tpuport.errors import ArtifactError, ReplayError, WeightsError

if TYPE_CHECKING:
    from tpuport.core.pipelines.sidecar import Sidecar


def replay_any(file: Path, asked: Settings) -> dict[str, Any]:
    """Make the video of a sidecar again; the document of ``tpuport replay``.

    Raises:
        ArtifactError: the sidecar, or a file that the video was made from, is not
            usable.
        WeightsError: the weights are others.
        ReplayError: the frames are others.
    """
    from tpuport.core.pipelines import sidecar

    started = time.perf_counter()
    recorded = sidecar.read(file)
    settings = _recorded(recorded, asked)
    prompt = textwrap.shorten(recorded["request"]["prompts"][0] or "", 80)
    say(f"replaying {file} ({recorded['pipeline']}, {prompt!r})")
    with Display(signals.check) as display:
        folder, again = find(settings, display), _again(recorded)
        run = AnyRun.prepared(settings, folder, display, again=again)
        _check_same(file, recorded, run)
        outputs = run.outputs("") if asked.out is not None else None
        videos, report = run.make(outputs, started)
    same = run.digests == [recorded["frames_sha256"]]
    for made in videos:
        say(f"wrote {made.path}")
    document = {
        "command": "replay",
        "sidecar": str(file),
        "same": same,
        "frames_sha256": run.digests[0],
        "videos": [video.as_dict() for video in videos],
        "settings": recorded["request"],
        "report": report.as_dict(),
    }
    if not same:
        raise ReplayError(
            f"{file}: the frames are not the recorded ones: recorded "
            f"{recorded['frames_sha256']}, now {run.digests[0]}"
        )
    return document


def _again(recorded: Sidecar) -> Again:
    """The call that made the recorded video."""
    request = recorded["request"]
    prompts, seeds = request["prompts"], request["seeds"][0]
    if len(prompts) != len(seeds) or not 0 <= recorded["video"] < len(prompts):
        raise ArtifactError(
            f"the sidecar names video {recorded['video']} of {len(prompts)} prompts "
            f"and {len(seeds)} seeds; it cannot be replayed"
        )
    return Again(
        videos=tuple(zip(prompts, seeds, strict=True)),
        video=recorded["video"],
        noise=recorded["noise"],
    )


def _recorded(recorded: Sidecar, asked: Settings) -> Settings:
    """The settings of a recorded run; where the user gave some, those."""
    from tpuport.core.spec.run_settings import RunSettings

    request, how = recorded["request"], recorded["how"]
    flags = request["flags"]
    known = {f.name for f in fields(RunSettings)} - {"on_host"}
    read = RunSettings.read({n: v for n, v in how.items() if n in known}, named=str)
    return replace(
        asked,
        model=None,
        weights=asked.weights or recorded["weights"]["source"],
        backend=read.backend,
        dtype=read.dtype,
        mesh=read.mesh,
        attention=read.attention,
        blocks=read.blocks,
        sharding=read.sharding,
        vae=read.vae,
        vae_tiling=read.vae_tiling,
        on_host=tuple(how["on_host"]),
        prompt=tuple(p for p in request["prompts"] if p is not None),
        negative_prompt=request["negative_prompts"][0],
        seed=tuple(request["seeds"][0])[:1],
        batch=len(request["prompts"]),
        options=request["options"],
        **{**flags, "step_cache": kinds.step_cache(flags.get("step_cache"))},
    )


def _check_same(file: Path, recorded: Sidecar, run: AnyRun) -> None:
    """Refuse other weights or other images than the recorded ones, before the work.

    Raises:
        WeightsError, ArtifactError: what differs.
    """
    if run.folder.class_name != recorded["pipeline"]:
        raise WeightsError(
            f"{run.folder.reference}: is of {run.folder.class_name}, and {file} was "
            f"made by {recorded['pipeline']}; name the same checkpoint with --weights"
        )
    for name, wanted in recorded["weights"]["fingerprints"].items():
        found = run.folder.checkpoint.fingerprints([name]).get(name, "none")
        if found != wanted:
            raise WeightsError(
                f"{run.folder.reference}: {name} is not what {file} was made with "
                f"(recorded {wanted[:16]}, found {found[:16]}); name the same "
                "checkpoint with --weights"
            )
    if run.inputs != recorded["inputs"]:
        differing = set(run.inputs.items()) ^ set(recorded["inputs"].items())
        raise ArtifactError(
            f"{sorted(differing)[0][0]}: is not the file that {file} records"
        )
