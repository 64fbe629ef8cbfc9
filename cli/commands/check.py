"""``tpuport check`` and ``scan``: what does not port; ``new-model``: what helps."""

from __future__ import annotations

import contextlib
import importlib.util
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from tpuport.cli.asked.environment import (
    import_libraries,
    looking,
    prepare,
    prepare_small_meshes,
    prepare_topology,
)
from tpuport.cli.asked.first import check_read
from tpuport.cli.asked.options import command, flag
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown import signals
from tpuport.cli.shown.output import give_out
from tpuport.core.enums import Blocks
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import parse_topology
from tpuport.core.plan.source_scan import (
    Finding,
    behind_the_door,
    by_kind,
    scan,
    sources_in,
)
from tpuport.core.reports import Reporter, bytes_text, plural, seconds_text
from tpuport.core.run.progress import Display
from tpuport.core.spec.run_settings import read_value
from tpuport.core.weights.hub import local_folder
from tpuport.errors import (
    MissingWeightsError,
    PluginError,
    TpuportError,
    UsageError,
    did_you_mean,
    quoted,
)
from tpuport.plugins import (
    find_plugin,
    model_plugins,
    plugin_of_folder,
    sources_of_folder,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tpuport.cli.runs.checked import Checked
    from tpuport.core.drive.compared import Compared

#: Losses that are told without --json.
_TOLD = 8


@command(
    "check",
    name=typer.Argument(
        metavar="NAME|FOLDER",
        help="A plugin, its package's folder, or a pipeline's folder or hub id.",
    ),
    topology=flag("--topology SLICE", "The TPU slice of the plan."),
    no_plan=flag("--no-plan", "Leave out the plan at full size."),
)
def check_(
    settings: Settings, name: str, topology: str = "v6e-8", no_plan: bool = False
) -> None:
    """Compare a port with upstream's code, and plan it for a TPU.

    The pipeline is built small and run on the CPU in float32. Each call of a component
    is compared with upstream's own; where they part, the smallest part of the module
    is named. Then the full size is planned, and what loses time there is listed with
    remedies. The exit code is 1 if something differs or is refused.

    Example: tpuport check ltx --topology v6e-8
    """
    found = None if no_plan else read_value(parse_topology, topology, "--topology")
    if not settings.json:
        _tell_imports(name)
    _check_name(name, settings)
    signals.keep_nothing()
    prepare_small_meshes()
    if found is not None:
        prepare_topology(found)
    prepare(debug=settings.debug)
    with contextlib.ExitStack() as stack, Display(signals.check) as display:
        import_libraries(display)
        from tpuport.cli.runs.checked import check

        name = _declared(name, stack)
        told = 0

        def tell(checked: Checked) -> None:
            nonlocal told
            lines = list(_text(checked))
            if not settings.json and lines[told:]:
                print(*lines[told:], sep="\n", flush=True)
            told = len(lines)

        checked = check(name, settings, found, display, tell)
        idle: list[str] = []
        try:
            idle = _idle(name, settings, display)
        except TpuportError as error:  # upstream's blocks of this model, say
            display.say(f"which patches ran is not known: {one_line(error)}")
        remarks = [
            f"remark: the patch {one} never ran in {checked.pipeline}; remove it, if "
            "it is for no other pipeline or variant"
            for one in idle
        ]
        if remarks and not settings.json:
            print(*remarks, sep="\n")
    document = {"command": "check", **checked.as_dict(), "never_run": idle}
    give_out(document, as_json=settings.json)
    if not checked.good:
        raise typer.Exit(1)


def _check_name(name: str, settings: Settings) -> None:
    """Refuse what is no plugin, no folder and no hub id, before imports."""
    place = Path(name).expanduser()
    if settings.weights:
        check_read(settings)
        return
    if find_plugin(name) is not None or (place / "pyproject.toml").is_file():
        return
    try:
        folder = local_folder(name)
    except MissingWeightsError:
        known = [plugin.name for plugin in model_plugins()]
        hint = did_you_mean(name, known, f"the plugins are {', '.join(known)}")
        raise UsageError(
            f"{quoted(name)} is no plugin, no folder and no hub id; {hint}"
        ) from None
    if folder is not None and not [*folder.glob("*model_index.json")]:
        raise UsageError(
            f"{place} has neither model_index.json, as a pipeline has, nor "
            "pyproject.toml, as a plugin's package has"
        )


def _tell_imports(name: str) -> None:
    """Tell what a package imports behind the door, before anything of it is loaded."""
    place = Path(name).expanduser()
    if (place / "pyproject.toml").is_file():
        files = sources_of_folder(place)
    else:
        known = find_plugin(name)
        files = known.sources if known else []
    for one in behind_the_door(files):
        print(_line(one), flush=True)


def _declared(name: str, stack: contextlib.ExitStack) -> str:
    """The name that a plugin is checked by; refuses what it declares and is not so.

    Args:
        stack: the plugin of a folder is found while this is open.

    Raises:
        PluginError: the first mistake; notes have the others.
    """
    from tpuport.targets import mistakes_of

    place, plugin = Path(name).expanduser(), find_plugin(name)
    if plugin is None and (place / "pyproject.toml").is_file():
        plugin = stack.enter_context(plugin_of_folder(place))
    if plugin is None:
        return name
    first, *others = [*mistakes_of(plugin.model), ""]
    if first:
        error = PluginError(first)
        for one in filter(None, others):
            error.add_note(f"  {one}")
        raise error
    return plugin.model.name


def _idle(name: str, settings: Settings, display: Display) -> list[str]:
    """The patches of a plugin that its small pipeline never runs, with any blocks."""
    plugin = find_plugin(name)
    if plugin is None:
        return []
    every = (Blocks.NATIVE, Blocks.UPSTREAM)
    idle = {p.name: p for blocks in every for p in plugin.model.patches_with(blocks)}
    if not idle:
        return []
    import torch

    from tpuport import targets
    from tpuport.cli.runs.checked import Subject, arguments
    from tpuport.cli.runs.checks import upstreams_errors
    from tpuport.core.drive.changes_run import never_run
    from tpuport.core.drive.rehearsal import without_weights

    folder = Subject.find(name, settings, Reporter()).made(settings, Reporter())
    given = arguments(folder, settings)
    placed = targets.place_for_port(MeshSpec())
    with display.timed("looking at the patches"), upstreams_errors(folder.class_name):
        for blocks in every:
            own = replace(settings, cache_dir=None, blocks=blocks)
            target = targets.claimed_target(folder.claim, placed, own, Reporter())
            pipeline = without_weights(folder, torch.float32)
            pipeline.set_progress_bar_config(disable=True)
            left = [*idle.values()]
            names = never_run(pipeline, target, given, left)
            idle = {one: idle[one] for one in names}
            if not idle:
                break
    return [*idle]


def _text(found: Checked) -> Iterator[str]:
    """All that is known so far.

    As more comes to be known, the lines must only ever append: those that were told
    are not told again.
    """
    yield f"{found.pipeline}, small, in float32 beside upstream's own code:"
    for one in found.compared:
        yield f"  {one.mesh}: {_verdict(one)}"
    plan = found.plan
    if plan is None:
        if found.unplanned:
            yield f"no plan: {found.unplanned}"
        return
    step = plan.seconds_per_step
    fits = "fits" if plan.fits else "does not fit"
    each = "no time" if step is None else f"{seconds_text(step)} a step"
    yield (
        f"planned for {plan.topology}, mesh {plan.mesh}, {_size(plan.settings)}: "
        f"{each}, {fits} with {bytes_text(plan.hbm_bytes)} a device"
    )
    for loss in found.losses[:_TOLD]:
        yield f"  {seconds_text(loss.seconds)} a step: {loss.what}"
        yield f"    {loss.remedy}; see {loss.example}"
    if left := found.losses[_TOLD:]:
        yield f"  and {plural(len(left), 'smaller loss')}: --json"


def _size(settings: Mapping[str, Any]) -> str:
    """Frames, height and width of a plan; upstream says not all before it runs."""
    names = {"num_frames": "frames", "height": "height", "width": "width"}
    told = {word: settings.get(name, "not known") for name, word in names.items()}
    return ", ".join(f"{word} {size}" for word, size in told.items())


def _verdict(one: Compared) -> str:
    if one.error:
        return f"refused: {one.error}"
    calls = sum(count for count, _ in one.calls.values())
    compared = f", {plural(calls, 'call')} compared" if calls else ""
    if one.tensors:
        compared += f", {plural(one.tensors, 'tensor')}"
    if one.whole:
        compared += f", {', '.join(one.whole)} as a whole"
    if one.unmeasured:
        compared += f", {', '.join(one.unmeasured)} to 1e-4 (not run in float64)"
    if one.empty:
        compared += f", nothing of {', '.join(one.empty)}"
    worst = "no result" if one.worst is None else f"{one.worst:.1e}"
    if one.equal:
        return f"equal, largest difference {worst}{compared}"
    if not one.first:
        return f"differs by {worst}, and no call by itself{compared}"
    apart = f"{one.apart:.1e} where rounding allows {one.allowed:.1e}"
    op = f", operator {one.op}" if one.op else ""
    return f"differs: first {one.first}, by {apart}, in {one.part}{op}{compared}"


@command(
    "scan", path=typer.Argument(metavar="PATH", help="A Python file, or a folder.")
)
def scan_(settings: Settings, path: str) -> None:
    """Say what in a source does not port: file, line, remedy.

    CUDA, kernels of its own, values that a forward reads, and the like. Nothing of the
    source is imported or run. If a patch of tpuport covers the function, the line names
    the patch. Host code between two modules is looked at for CUDA alone.

    Example: tpuport scan my_model/
    """
    prepare(debug=settings.debug)
    files = sources_in(Path(path).expanduser())
    with looking("looking at the patches"):
        patches = _patches()
    found = [finding for file in files for finding in scan(file, patches)]
    left = [one for one in found if not one.patch]
    document = {
        "files": len(files),
        "findings": [one.as_dict() for one in found],
        "kinds": by_kind(found),
        "covered": len(found) - len(left),
    }
    covered = f", {document['covered']} covered by a patch" if found else ""
    last = f"{plural(len(files), 'file')}: {plural(len(found), 'finding')}{covered}"
    give_out(document, as_json=settings.json, text=[*map(_line, found), last])


def _line(one: Finding) -> str:
    how = f"covered by the patch {one.patch}" if one.patch else one.remedy
    return f"{one.file}:{one.line}: {one.kind}: {one.code}\n    {how}"


def _patches() -> dict[str, str]:
    """The target of every patch that some model has -> the patch's name."""
    from tpuport.patches.standard import PATCHES

    found = {patch.target: patch.name for patch in PATCHES}
    for plugin in model_plugins():
        for blocks in reversed(Blocks):
            found |= {p.target: p.name for p in plugin.patches_with(blocks)}
    return found


@command(
    "new-model",
    name=typer.Argument(metavar="NAME", help="What --model takes."),
    pipeline=flag("--class CLASS", "Such as WanPipeline, or mypkg.pipeline:Mine."),
    out=flag("--out FOLDER", "A new folder. (default: NAME)"),
)
def new_model(
    settings: Settings,
    name: str,
    pipeline: str | None = None,
    out: str | None = None,
) -> None:
    """Write a package with a plugin for a pipeline class.

    The pipeline is built small and ported: the plugin says which changes to torchax
    and upstream ran. --weights names configs, where those of the class do not do.

    Example: tpuport new-model my-wan --class WanPipeline
    """
    signals.keep_nothing()
    prepare_small_meshes()
    prepare(debug=settings.debug)
    folder = Path(out or name).expanduser()
    package = _checked(name, folder)
    if pipeline is None:
        raise UsageError(
            "--class is missing; name a pipeline of diffusers, such as --class "
            "WanPipeline, or PACKAGE.MODULE:CLASS"
        )
    check_read(settings)
    with Display(signals.check) as display:
        import_libraries(display)
        from tpuport.cli.runs.new_package import new_package

        made = new_package(name, package, pipeline, folder, settings, display)
    text = [str(folder / file) for file in made["files"]]
    text.append(
        f"next: fill in what is marked FILL IN, and `tpuport check {folder}`; "
        f"`pip install -e {folder}` lets all commands find the plugin"
    )
    document = {"command": "new-model", **made}
    give_out(document, as_json=settings.json, text=text)


def _checked(name: str, out: Path) -> str:
    """The name of the package; refuses what can be refused before imports."""
    if not re.fullmatch(r"[a-z][a-z0-9_-]*", name):
        raise UsageError(
            f"a plugin may not be called {name!r}: begin with a small letter, and use "
            "small letters, digits, - and _"
        )
    package = f"tpuport_{name.replace('-', '_')}"
    known = find_plugin(name)
    if known is not None:
        raise UsageError(
            f"a plugin of {known.package} is called {name!r} already; take another name"
        )
    if importlib.util.find_spec(package) is not None:
        raise UsageError(f"a package {package} is installed; take another name")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UsageError(f"{out} is there and not empty; name another with --out")
    return package
