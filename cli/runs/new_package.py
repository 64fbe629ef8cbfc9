"""A new plugin package, written for a pipeline class that is ported meanwhile."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from tpuport.cli.asked.settings import Settings
from tpuport.cli.runs.checked import Subject, arguments
from tpuport.cli.runs.checks import upstreams_errors
from tpuport.core.drive.changes_run import counting
from tpuport.core.drive.rehearsal import Rehearsal, rehearse, without_weights
from tpuport.core.enums import denoises
from tpuport.core.files.atomic import cannot_write, new_folder, one_line
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.pipelines import small
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.reports import Reporter
from tpuport.core.spec import outside
from tpuport.errors import TpuportError, UsageError
from tpuport.targets import general_target, place_for_port

#: Ends of weights' names that split over tp alike in every transformer of diffusers.
_SPLIT = {
    r"to_[qkv]\.weight": ("tp", None),
    r"to_[qkv]\.bias": ("tp",),
    r"to_out\.0\.weight": (None, "tp"),
    r"net\.0\.proj\.weight": ("tp", None),
    r"net\.0\.proj\.bias": ("tp",),
    r"net\.2\.weight": (None, "tp"),
    r"add_[qkv]_proj\.weight": ("tp", None),
    r"add_[qkv]_proj\.bias": ("tp",),
    r"to_add_out\.weight": (None, "tp"),
    r"norm_[qk]\.weight": ("tp",),
    r"norm_added_[qk]\.weight": ("tp",),
}

_PROJECT = """\
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "tpuport-{name}"
version = "0.1.0"
description = "{pipeline} on TPUs, for tpuport."
requires-python = ">=3.11"
dependencies = ["tpuport"]

[project.entry-points.tpuport]
{name} = "{package}.plugin"

[tool.setuptools]
packages = ["{package}"]
package-data = {{ {package} = ["*.json"] }}
"""

_PLUGIN = '''\
"""{pipeline} on TPUs: what the general port lacks."""

from tpuport.plugin import ModelPlugin, Module, Published, hookimpl

# FILL IN: how --mesh tp=N splits the weights. A pattern is the end of a name; weights
# of no pattern are whole. These match; `tpuport plan --verbose` shows where all go.
LAYOUT = {{
{layout}}}

# {pipeline} was built small and ported. These changes ran,
# and do so without a line here (`tpuport patches CHANGE` says all of one):
{changes}# FILL IN: what the model needs beside them, as patches= of the plugin.

PLUGIN = ModelPlugin(
    "{name}",
    claims="{claim}",
    # FILL IN: native="PACKAGE.native:FORM", a NativeForm, once `tpuport check` says
    # what loses time; docs/port-a-model.md shows one.
    modules={{{modules}}},
    variants={{
        "small": Published(configs="small.json"),
        # FILL IN: the hub id; and the checkpoint's configs in full.json, which has the
        # defaults of the classes and a small text encoder.
        "full": Published("{repo}", configs="full.json"),
    }},
)


@hookimpl
def tpuport_model() -> ModelPlugin:
    """Hand over the plugin."""
    return PLUGIN
'''

_TEST = '''\
"""The port makes upstream's video: on one device, and on a mesh."""

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1]


def test_the_port_is_exact() -> None:
    check = [sys.executable, "-m", "tpuport", "check", str(FOLDER), "--no-plan"]
    assert subprocess.run(check, check=False).returncode == 0
'''


def new_package(
    name: str,
    package: str,
    pipeline: str,
    out: Path,
    settings: Settings,
    reporter: Reporter,
) -> dict[str, Any]:
    """Write a package; the document of the command.

    Args:
        package: its name in Python.
        pipeline: the class in diffusers, or "package.module:Class".
        out: a folder that is empty, or is not there.
    """
    cls = small.pipeline_class(pipeline)
    if settings.weights:
        subject = Subject.find(pipeline, settings, reporter)
        found = outside.claim_of(subject.configs["model_index"].get("_class_name"))
        if found != (wanted := outside.claim_on(cls)):
            found, wanted = (one.removeprefix("diffusers:") for one in (found, wanted))
            raise UsageError(
                f"--weights {settings.weights} is of a {found}, not of {wanted}"
            )
    else:
        subject = Subject(plugin=None, configs=small.of_class(pipeline))
    subject, rehearsal, changes = _ported(subject, settings, reporter)
    configs = subject.configs
    modules = [part for part in configs if denoises(part)]
    layout = {k: v for k, v in _SPLIT.items() if _fits(k, rehearsal)}
    words = {
        "name": name,
        "package": package,
        "pipeline": cls.__name__,
        "claim": pipeline if ":" in pipeline else f"diffusers:{pipeline}",
        "repo": _repo(settings.weights),
        "layout": "".join(f'    r"{k}": {_tuple(v)},\n' for k, v in layout.items()),
        "modules": ", ".join(f'"{part}": Module(layout=LAYOUT)' for part in modules),
        "changes": "".join(f"{line}\n" for line in _comment(changes)),
    }
    files = {
        "pyproject.toml": _PROJECT.format(**words),
        f"{package}/__init__.py": f'"""{cls.__name__} on TPUs."""\n',
        f"{package}/plugin.py": _PLUGIN.format(**words),
        f"{package}/small.json": small.as_text(subject.as_small()),
        f"{package}/full.json": small.as_text(configs),
        f"tests/test_{package.removeprefix('tpuport_')}.py": _TEST.format(**words),
    }
    _write(out, files)
    return {"folder": str(out), "files": list(files), "changes": changes}


def _ported(
    subject: Subject, settings: Settings, reporter: Reporter
) -> tuple[Subject, Rehearsal, dict[str, str]]:
    """The pipeline ported at a small size, and the changes that ran with reasons.

    Of a class that begins with pictures, the channels that it joins are found by trial:
    the subject is with those.
    """
    tried = [subject]
    if not settings.weights:
        more = small.with_more_channels(subject.configs)
        tried += [replace(subject, configs=configs) for configs in more]
    failed: TpuportError | None = None
    for one in tried:
        folder = one.made(settings, reporter, weights=False)
        given = arguments(folder, settings)
        try:
            return (one, *_rehearsed(folder, given, settings, reporter))
        except TpuportError as error:
            failed = failed or error
        if not any(isinstance(value, Image | list) for value in given.values()):
            break
    assert failed is not None
    _check_upstream(subject, settings, reporter)
    raise failed


def _rehearsed(
    folder: PipelineFolder,
    given: Mapping[str, Any],
    settings: Settings,
    reporter: Reporter,
) -> tuple[Rehearsal, dict[str, str]]:
    """A pipeline's call ported without weights, and the changes that ran."""
    placed = place_for_port(MeshSpec())
    target, ran = counting(general_target(placed, replace(settings, cache_dir=None)))
    pipeline = without_weights(folder, torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    with (
        reporter.timed(f"porting {folder.class_name} at a small size"),
        upstreams_errors(folder.class_name),
    ):
        found = rehearse(pipeline, target, given, Reporter())
    known = {**{p.name: p.reason for p in target.patches}}
    known |= {one.name: one.reason for one in target.overrides}
    return found, {name: known[name] for name in known if ran[name]}


def _check_upstream(subject: Subject, settings: Settings, reporter: Reporter) -> None:
    """Refuse a small pipeline that upstream's own code does not run.

    A missing package is no fault of the configs.
    """
    folder = subject.made(settings, reporter)
    given = arguments(folder, settings)
    pipeline = replace(folder, whole=folder.modules()).load(torch.float32, reporter)
    pipeline.set_progress_bar_config(disable=True)
    try:
        with reporter.timed("running upstream's own code"):
            pipeline(**given)
    except (NameError, ImportError):
        return
    except Exception as error:
        whose = f"--weights {settings.weights}, made small,"
        if not settings.weights:
            whose = f"the class {folder.class_name}"
        raise UsageError(
            f"the configs of {whose} do not fit together ({type(error).__name__}: "
            f"{one_line(error)}); add --weights with the folder of a"
            f"{' small' if settings.weights else ''} pipeline that upstream runs"
        ) from error


def _fits(pattern: str, found: Rehearsal) -> bool:
    """Whether a denoiser has weights of a pattern, and no norm of each head alone."""
    matched = [
        (name, program.weights)
        for program in found.programs
        if denoises(program.component)
        for name in program.weights
        if re.fullmatch(rf"(?:.*\.)?{pattern}", name)
    ]
    return bool(matched) and not any(_of_a_head(*one) for one in matched)


def _of_a_head(name: str, weights: Mapping[str, Any]) -> bool:
    """Whether a weight is of a norm over one head, which tp does not split."""
    layer = re.sub(r"norm_([qk])\.weight$", r"to_\1.weight", name)
    layer = re.sub(r"norm_added_([qk])\.weight$", r"add_\1_proj.weight", layer)
    if layer == name:
        return False
    return layer not in weights or weights[name].shape[-1] < weights[layer].shape[-2]


def _tuple(spec: tuple[str | None, ...]) -> str:
    return repr(spec).replace("'", '"')


def _comment(changes: Mapping[str, str]) -> Iterator[str]:
    for name, reason in changes.items():
        yield f"#   {textwrap.shorten(f'{name}: {reason}', 83, placeholder=' ...')}"


def _repo(weights: str | Path | None) -> str:
    """A hub id; a folder is none."""
    given = str(weights or "")
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", given) and not Path(given).exists()
    return given if hub else "ORGANISATION/CHECKPOINT"


def _write(out: Path, files: Mapping[str, str]) -> None:
    """All files, or none."""
    try:
        with new_folder(out) as temporary:
            for name, text in files.items():
                (temporary / name).parent.mkdir(parents=True, exist_ok=True)
                (temporary / name).write_text(text, "utf-8")
    except OSError as error:
        raise cannot_write(out, error) from error
