"""``tpuport generate``; ``encode``, ``denoise`` and ``decode``; and ``resume``."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import typer

from tpuport.cli.asked.environment import cache_folder, prepare, running
from tpuport.cli.asked.first import check_run
from tpuport.cli.asked.many_hosts import joined
from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.kept_runs import kept_run, look, out_of
from tpuport.cli.runs.variants import check_model, with_model
from tpuport.core.enums import StageName
from tpuport.core.files.run_record import RUN_FILE, run_file
from tpuport.core.mesh.hosts import here
from tpuport.core.spec.run_settings import Asked, defaults_of, settings_of
from tpuport.errors import UsageError


@command("generate")
def generate(settings: Settings) -> None:
    """Make videos from prompts.

    Upstream's pipeline drives, and its modules run on the mesh. Every prompt is made
    with every seed. What you leave out is the variant's or upstream's default.

    Example: tpuport generate --prompt "a panda" --variant 5b --out panda.mp4
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    with joined(settings) as own:
        _begin(own, started, "generate")


@command("encode")
def encode(settings: Settings) -> None:
    """Run a pipeline up to its first denoising step.

    Takes the settings of `generate` and keeps them in the run directory, where
    `denoise` and `decode` read them. Without --prompt, `encode` reads them there too.

    Example: tpuport encode --prompt "a panda" --run-dir run
    """
    started = _started(settings)
    assert settings.run_dir is not None
    with joined(settings) as own:
        assert own.run_dir is not None
        file = own.run_dir / RUN_FILE
        begun = bool(here().told(lambda: b"begun" if file.exists() else b""))
        if not own.prompt and begun:
            _check_says_nothing(own)
            _go_on(own, started, StageName.ENCODE)
        else:
            _begin(own, started, StageName.ENCODE)


def _begin(settings: Settings, started: float, command: str) -> None:
    check_run(settings)
    check_model(settings)
    settings = with_model(settings)
    with running(settings) as display:
        from tpuport.cli.runs.staged import begin_run

        begin_run(settings, started, command, display)


def _go_on(settings: Settings, started: float, stage: StageName | None) -> None:
    assert settings.run_dir is not None
    check_run(settings)
    if here().first:
        run_file(settings.run_dir)  # refused before torch is imported
    with running(settings) as display:
        from tpuport.cli.runs.staged import go_on_with_run

        go_on_with_run(settings, started, stage, display)


def _started(settings: Settings) -> float:
    """When the command began; refuses settings without a run directory."""
    prepare(debug=settings.debug)
    if settings.run_dir is None:
        raise UsageError("--run-dir is missing; name a folder, such as --run-dir fox")
    return time.perf_counter()


def _check_says_nothing(settings: Settings) -> None:
    """Refuse a flag that says what to make, where run.json says so."""
    defaults = defaults_of(Asked)
    for name, setting in settings_of(Asked).items():
        if name in defaults and getattr(settings, name) != defaults[name]:
            raise UsageError(
                f"{setting.flags[0]}: {settings.run_dir} has its own; leave the flag "
                "out, or give --prompt and all that the run was begun with"
            )


@command("denoise")
def denoise(settings: Settings) -> None:
    """Denoise a run that `encode` began.

    Example: tpuport denoise --run-dir run
    """
    started = _started(settings)
    with joined(settings) as own:
        _go_on(own, started, StageName.DENOISE)


@command("decode")
def decode(settings: Settings) -> None:
    """Decode a run that is denoised, and write its videos.

    Without --out the video becomes video.mp4 in the run directory.

    Example: tpuport decode --run-dir run --out panda.mp4
    """
    started = _started(settings)
    with joined(settings) as own:
        _go_on(own, started, StageName.DECODE)


@command(
    "resume",
    name=typer.Argument(
        metavar="RUN", help="A folder of --run-dir, or an ID of `tpuport runs`."
    ),
)
def resume(settings: Settings, name: str) -> None:
    """Finish a run that ended early, and write its videos.

    The run keeps its settings, and the videos go where the run was to write them; --out
    names another place. The folder of a run without --run-dir is removed afterwards.

    Example: tpuport resume fox --out fox.mp4
    """
    prepare(debug=settings.debug)
    started = time.perf_counter()
    with joined(settings) as own:
        found = _found(own, name) if here().first else replace(own, run_dir=Path(name))
        _go_on(found, started, None)


def _found(settings: Settings, name: str) -> Settings:
    """The settings of a run that ended early, where its folder is."""
    folder = Path(name).expanduser()
    if (folder / RUN_FILE).exists():
        kept = look(folder)
    elif folder.is_dir():
        raise UsageError(
            f"{folder}: holds no run (there is no {RUN_FILE}); name a folder of "
            "--run-dir, or an ID of `tpuport runs`"
        )
    else:
        kept = kept_run(cache_folder(settings.cache_dir), name)
    return out_of(kept, replace(settings, run_dir=kept.folder))
