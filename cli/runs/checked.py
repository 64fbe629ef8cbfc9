"""A pipeline built small, beside upstream's own code; and planned at its full size."""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
from PIL import Image

from tpuport import targets
from tpuport.cli.asked.environment import MESHES, cache_folder
from tpuport.cli.asked.settings import PROMPT, Settings
from tpuport.cli.runs.checks import upstreams_errors
from tpuport.cli.runs.planning import plan_run
from tpuport.cli.runs.variants import resolved
from tpuport.core.drive.compared import Compared, Pair
from tpuport.core.enums import Dtype, StageName, denoises
from tpuport.core.files.atomic import one_line, scratch_folder
from tpuport.core.files.folders import made_once
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import Topology
from tpuport.core.pipelines import small
from tpuport.core.pipelines.call_arguments import PARAMETERS, arguments_of, as_arrays
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.pipelines.stand_in import write_configs, write_random
from tpuport.core.plan.losses import Loss, losses
from tpuport.core.plan.plan import Plan
from tpuport.core.plan.source_scan import Finding, behind_the_door
from tpuport.core.reports import Reporter, bytes_text
from tpuport.core.seam.target import Target
from tpuport.core.spec import outside
from tpuport.core.spec.model_plugin import ModelPlugin
from tpuport.errors import TpuportError, UsageError
from tpuport.plugins import find_plugin, folder_of, plugin_for

#: What a small pipeline is asked for. A share of two steps could be none.
_SMALL = {"num_inference_steps": 2, "strength": 1.0}
_SIZE = {"height": 64, "width": 64, "num_frames": 9}
#: Classes that begin with an image or a video, where ``None`` is upstream's default.
_BEGINS_WITH = re.compile(r"(Image|Img|Video|I)(To|2)")
#: Parameters of videos that steer: a pipeline that has one is for one.
_CONTROLS = re.compile(r"^(control|conditioning)(s|_video|_frames)$")
#: Bytes of weights of a folder that is run as it is.
_FEW = 1 << 29
#: Bytes of weights of a small pipeline that runs in minutes.
_MANY = 256 << 20


@dataclass(kw_only=True)
class Checked:
    """What was found of a plugin or a folder.

    Attributes:
        pipeline: the class.
        weights: the small folder that ran.
        compared: beside upstream's code, by mesh.
        imports: of a plugin, behind :mod:`tpuport.plugin`.
        plan: at full size; ``None`` if there is none.
        unplanned: why there is no plan.
        refused: the plan was.
        losses: what the plan loses, the most first.
    """

    pipeline: str
    weights: Path
    compared: list[Compared] = field(default_factory=list)
    imports: list[Finding] = field(default_factory=list)
    plan: Plan | None = None
    unplanned: str = ""
    refused: bool = False
    losses: list[Loss] = field(default_factory=list)

    @property
    def good(self) -> bool:
        """Whether nothing differs, and nothing was refused."""
        equal = all(one.equal for one in self.compared)
        return equal and not self.imports and not self.refused

    def as_dict(self) -> dict[str, Any]:
        return {
            "pipeline": self.pipeline,
            "weights": str(self.weights),
            "good": self.good,
            "compared": [one.as_dict() for one in self.compared],
            "imports": [one.as_dict() for one in self.imports],
            "plan": self.plan.as_dict() if self.plan else None,
            "unplanned": self.unplanned,
            "losses": [asdict(one) for one in self.losses],
        }


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is checked: a plugin, or a folder of a pipeline.

    Attributes:
        plugin: ``None`` of a folder that was named.
        configs: of the pipeline.
        small: the configs are of a small pipeline already.
        folder: that of a pipeline with few weights, which runs as it is.
    """

    plugin: ModelPlugin | None
    configs: Mapping[str, Any]
    small: bool = False
    folder: Path | None = None

    @classmethod
    def find(cls, name: str, settings: Settings, reporter: Reporter) -> Subject:
        """The plugin or the folder of a name.

        Args:
            settings: their weights take the place of a plugin's variants.
        """
        known = find_plugin(name)
        plugin = None if known is None else known.model
        if plugin is None or settings.weights:
            source = settings.weights or name
            kept = cache_folder(settings.cache_dir), settings.cache_store
            found = PipelineFolder.find(source, reporter, *kept)
            return cls._of_folder(plugin, found, reporter)
        plugin.check()
        variants = [one for one in plugin.variants.values() if one.configs]
        if not variants:
            return cls(plugin=plugin, configs=small.of_class(plugin.first))
        built_in = [one for one in variants if not one.repo]
        configs = (built_in or variants)[0].read(folder_of(name))
        return cls(plugin=plugin, configs=configs, small=bool(built_in))

    @classmethod
    def _of_folder(
        cls,
        plugin: ModelPlugin | None,
        found: PipelineFolder,
        reporter: Reporter,
    ) -> Subject:
        folder = found.fetched(reporter, weights=False)
        configs = small.of_folder(folder.folder)
        few = 0 < _bytes_in(folder.folder) < _FEW
        return cls(
            plugin=plugin, configs=configs, folder=folder.folder if few else None
        )

    def as_small(self) -> Mapping[str, Any]:
        """The configs at a small size."""
        as_it_is = self.small or self.folder is not None
        return self.configs if as_it_is else small.small(self.configs)

    def made(
        self, settings: Settings, reporter: Reporter, *, weights: bool = True
    ) -> PipelineFolder:
        """The folder of the pipeline at a small size, with weights or without."""
        folder = self.folder
        if folder is None:
            name = outside.name_of(self.configs["model_index"]["_class_name"])
            try:
                made = self.as_small()
                mark = hashlib.sha256(json.dumps(made).encode()).hexdigest()[:8]
                write = write_random if weights else write_configs
                folder = cache_folder(settings.cache_dir) / write.__name__[6:]
                folder /= f"{name}-{mark}"
                what = f"making {name} small in {folder}"
                made_once(folder, lambda p: write(p, made), what, reporter.say)
            except TpuportError:
                raise
            except Exception as error:
                raise UsageError(
                    f"{name} cannot be made small by rule "
                    f"({one_line(error)}); give --weights SMALL_FOLDER, of a pipeline "
                    "with less than 512 MB of weights"
                ) from error
        if (size := _bytes_in(folder)) > _MANY:
            reporter.say(
                f"the small form has {bytes_text(size)} of weights and may take "
                "minutes; --weights SMALL_FOLDER names a smaller pipeline"
            )
        small.without_cleaning()
        return PipelineFolder.find(folder, reporter)


def _bytes_in(folder: Path) -> int:
    """Bytes of the weights below a folder."""
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors"))


def check(
    name: str,
    settings: Settings,
    topology: Topology | None,
    reporter: Reporter,
    tell: Callable[[Checked], None],
) -> Checked:
    """Check a plugin, or a pipeline's folder.

    Args:
        topology: of the plan; ``None`` for none.
        tell: called each time that more is known.
    """
    plugin = find_plugin(name)
    subject = Subject.find(name, settings, reporter)
    folder = subject.made(settings, reporter)
    found = Checked(pipeline=folder.class_name, weights=folder.folder)
    if plugin is not None:
        found.imports = behind_the_door(plugin.sources)
    tell(found)
    for one in compare(folder, settings, reporter):
        found.compared.append(one)
        tell(found)
    if topology is None:
        found.unplanned = "--no-plan"
        tell(found)
        return found
    try:
        full = _full(subject, name, settings)
        if full is not None:
            stages = [StageName.DENOISE]
            with made_up(folder, settings) as media:
                full = replace(full, **media)
                found.plan = plan_run(
                    full, topology, stages, budget=0, reporter=reporter
                )
            found.losses = losses(found.plan)
    except TpuportError as error:
        found.unplanned, found.refused = one_line(error), True
    if found.plan is None and not found.unplanned:
        found.unplanned = "no configs of a full size: add --weights FOLDER_OR_HUB_ID"
    tell(found)
    return found


def compare(
    folder: PipelineFolder, settings: Settings, reporter: Reporter
) -> Iterator[Compared]:
    """A small pipeline beside upstream's code: on one device, then on each mesh."""
    # Errors of the caller's loop are not upstream's.
    with upstreams_errors(folder.class_name):
        yield from _compared(folder, settings, reporter)


def _compared(
    folder: PipelineFolder, settings: Settings, reporter: Reporter
) -> Iterator[Compared]:
    by_upstream = replace(folder, whole=folder.modules())
    pipelines = [f.load(torch.float32, reporter) for f in (folder, by_upstream)]
    for one in pipelines:
        one.set_progress_bar_config(disable=True)
    given = arguments(folder, settings)

    def call() -> dict[str, Any]:
        if "generator" not in folder.all_parameters:
            return given
        return {**given, "generator": torch.Generator("cpu").manual_seed(0)}

    plugin = plugin_for(folder.claim)
    laid_out = plugin is not None and any(m.layout for m in plugin.modules.values())
    ported: list[tuple[MeshSpec, Target]] = []
    for mesh in MESHES if laid_out else MESHES[:-1]:
        if mesh.size > len(jax.devices()):
            reporter.say(f"mesh {mesh}: not tried, this process has too few devices")
            continue
        placed = targets.place_for_port(mesh)
        own = replace(settings, dtype=Dtype.FLOAT32, mesh=mesh, cache_dir=None)
        told = Reporter() if ported else reporter
        target = targets.claimed_target(folder.claim, placed, own, told)
        ported.append((mesh, target))
    pair = Pair(ours=pipelines[0], theirs=pipelines[1], arguments=call)
    with reporter.timed("running upstream's own code"):
        expected = pair.expected()
    for mesh, target in ported:
        with reporter.timed(f"running {folder.class_name} on {mesh}"):
            found = pair.compare(target, expected, calls=target is ported[0][1])
        yield found


def arguments(folder: PipelineFolder, settings: Settings) -> dict[str, Any]:
    """The keywords of a small call, a made-up image or video with them.

    Args:
        settings: their options take the place of values of a small call.
    """
    with made_up(folder, settings) as media:
        offered: dict[str, Any] = {**_SMALL, **_size(folder), **media}
        names = folder.parameters.keys() - settings.options.keys()
        options = offered.pop("options")
        known = {k: v for k, v in offered.items() if {*PARAMETERS[k]} & names}
        asked = Settings(**known, options=options)
        found = {**arguments_of(folder, asked), **as_arrays(folder)}
    if "prompt" in folder.parameters:
        found["prompt"] = PROMPT
    return found


def _size(folder: PipelineFolder) -> dict[str, int]:
    """That of a small call; upstream's default where a denoiser learned its positions.

    Upstream's default of the frames is not that of the config.
    """
    for name in filter(denoises, folder.modules()):
        config = folder.checkpoint.config(name)
        if config.get(small.LEARNED):
            return {"num_frames": config["sample_frames"]}
    return _SIZE


@contextlib.contextmanager
def made_up(folder: PipelineFolder, settings: Settings) -> Iterator[dict[str, Any]]:
    """The image and the video that a call needs and no option names: their files."""
    takes, media, optional = folder.parameters, [], []
    wanted = [
        name
        for name, one in takes.items()
        if name not in settings.options
        and (_CONTROLS.search(name) or (one.default is one.empty and "video" in name))
        and name not in PARAMETERS["video"]
    ]
    for kind in ("image", "video"):
        name = next((n for n in PARAMETERS[kind] if n in takes), None)
        if name is None or name in settings.options:
            continue
        if takes[name].default is takes[name].empty:
            media.append(kind)
        elif takes[name].default is None:
            optional.append(kind)
    begins = "strength" in takes or "prompt" not in takes
    if begins or _BEGINS_WITH.search(folder.class_name):
        media = media or optional[:1]
    with scratch_folder() as place:
        pixels = np.random.default_rng(0).integers(0, 255, (9, 64, 64, 3), np.uint8)
        files = [place / f"{number}.png" for number in range(len(pixels))]
        for file, picture in zip(files, pixels, strict=True):
            if media or wanted:
                Image.fromarray(picture).save(file)
        names = {"image": str(files[0]), "video": str(place)}
        options = {**dict.fromkeys(wanted, str(place)), **settings.options}
        yield {**{kind: names[kind] for kind in media}, "options": options}


def _full(subject: Subject, name: str, settings: Settings) -> Settings | None:
    """The settings of a plan at full size; ``None`` without configs for one."""
    if settings.weights or subject.plugin is None:
        source = settings.weights or name
        return None if subject.folder else replace(settings, weights=source)
    published = subject.plugin.variants
    full = [key for key, one in published.items() if one.repo and one.configs]
    if not full:
        return None
    asked = replace(settings, model=name, variant=full[0])
    return resolved(asked, subject.plugin, weights=False)
