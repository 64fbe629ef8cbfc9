"""What is checked of a run before weights are read."""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from tpuport import targets
from tpuport.cli.asked.settings import TABLE, Settings
from tpuport.cli.runs.size_class import token_side
from tpuport.core.arrays import torch_dtype
from tpuport.core.drive import rehearsal
from tpuport.core.drive.rehearsal import Rehearsal, without_weights
from tpuport.core.drive.step_caches import StepCacheError
from tpuport.core.enums import Backend, Dtype, Place, StageName, denoises
from tpuport.core.files.atomic import one_line
from tpuport.core.mesh.device_memory import host_memory
from tpuport.core.mesh.device_mesh import PlacedMesh, by_slice
from tpuport.core.mesh.mesh_spec import MeshSpec
from tpuport.core.mesh.slices import TOPOLOGY_NAMES, parse_topology
from tpuport.core.pipelines.call_arguments import PARAMETERS, default_of
from tpuport.core.pipelines.folder import PipelineFolder
from tpuport.core.plan.pipeline_plan import rehearsed
from tpuport.core.reports import Reporter, bytes_text
from tpuport.core.seam.ported import modules_of
from tpuport.core.seam.target import Target
from tpuport.core.spec.component import TORCHAX
from tpuport.core.weights.absent_packages import absent_of
from tpuport.errors import (
    MeshError,
    ShardingError,
    TpuportError,
    UsageError,
    did_you_mean,
)
from tpuport.plugins import plugin_for

#: Pipelines whose videos of one call are not those made alone: prompts of other lengths
#: change what is attended to, or noise is drawn from one seed for all.
MIXING = frozenset(
    (
        "Cosmos3OmniPipeline",
        "HeliosPyramidPipeline",
        "Kandinsky5T2VPipeline",
        "LTXPipeline",
        "LattePipeline",
    )
)


def check_attention_here(settings: Settings) -> None:
    """Refuse a kernel that does not run on this machine's devices; starts jax."""
    if settings.attention.name != "splash" or settings.backend == Backend.DIFFUSERS:
        return
    found = jax.devices()[0].platform
    if found != "tpu":
        raise UsageError(
            f"--attention splash is for TPU only; the platform here is {found!r}. Use "
            "auto, or blockwise or reference"
        )


def check_vae(settings: Settings, folder: PipelineFolder) -> None:
    """Refuse an autoencoder that the pipeline's plugin does not have."""
    if settings.vae == TORCHAX:
        return
    plugin = plugin_for(folder.claim)
    if plugin is None:
        raise UsageError(
            f"--vae {settings.vae}: is for a plugin, and {folder.class_name} has none"
        )
    plugin.check_forms({"vae": settings.vae})


def check_on_host(settings: Settings, folder: PipelineFolder) -> None:
    """Refuse a name for --on-host that is no component, or no torch module."""
    if not settings.on_host:
        return
    modules = folder.modules()
    for name in settings.on_host:
        if name in modules:
            continue
        if name in folder.components():
            raise UsageError(
                f"--on-host {name}: {name} is no module and runs on the host anyway; "
                f"leave the flag out, or name one of {', '.join(modules)}"
            )
        known = f"{folder.class_name} has {', '.join(modules)}"
        hint = did_you_mean(name, modules, known)
        raise UsageError(f"--on-host {name}: is no component; {hint}")


def wide(placed: PlacedMesh) -> bool:
    """Whether dp splits more than the pair of a guided step, so that rows divide."""
    return bool(placed.mesh.shape["dp"] > 2)


def prompts_of(settings: Settings, prompts: Sequence[str]) -> dict[str, Any]:
    """The texts of a call for as many videos as are made together; several in lists."""
    pairs = [prompt for prompt in prompts for _ in settings.seed]
    count = settings.batch_size or 1
    found = {"prompt": (pairs * count)[:count]}
    if settings.negative_prompt is not None:
        found["negative_prompt"] = [settings.negative_prompt] * count
    return {name: one if count > 1 else one[0] for name, one in found.items()}


@dataclass(kw_only=True)
class PipelineCall:
    """A call of a pipeline, before weights are read; of the folder, configs are read.

    Attributes:
        settings: what was asked for, and what is settled since.
        arguments: keywords of every call.
        streamed: components that do not fit the chips, whose weights wait on the host.
    """

    settings: Settings
    folder: PipelineFolder
    reporter: Reporter
    arguments: dict[str, Any]
    streamed: frozenset[str] = frozenset()

    @property
    def by_upstream(self) -> bool:
        """Whether plain upstream code runs."""
        return self.settings.backend == Backend.DIFFUSERS

    @property
    def rehearsed_with(self) -> dict[str, Any]:
        """The keywords of a call that is rehearsed, up to its latents."""
        given = dict(self.arguments)
        if "prompt" in self.folder.parameters and "prompt" not in given:
            given |= prompts_of(self.settings, self.settings.prompt)
        if self.folder.blocks is None and "output_type" in self.folder.all_parameters:
            given.setdefault("output_type", "latent")
        return given

    @property
    def asked(self) -> dict[str, Any]:
        """Size, frames and steps; what was not given is upstream's default."""
        names = ("width", "height", "num_frames", "num_inference_steps")
        return {
            name: getattr(self.settings, name) or default_of(self.folder, name)
            for name in names
        }

    def settle(self, **values: Any) -> None:
        """Put values in the place of settings."""
        self.settings = replace(self.settings, **values)

    def bare(self) -> Any:
        """The pipeline without weights."""
        return without_weights(self.folder, torch_dtype(str(self.settings.dtype)))

    def target(self, placed: PlacedMesh, reporter: Reporter) -> Target:
        """What programs are made for; none is kept.

        Args:
            reporter: told of a plugin whose patches are used.
        """
        own = replace(self.settings, cache_dir=None)
        found = targets.claimed_target(self.folder.claim, placed, own, reporter)
        return found.streaming(self.streamed)

    def rehearsed(
        self, placed: PlacedMesh, *, quiet: bool = False, first_step: bool = False
    ) -> Rehearsal:
        """The run as ``tpuport generate`` does it on a mesh; with a dtype.

        Args:
            quiet: leave out the line about a plugin whose patches are used.
            first_step: end after the first ``scheduler.step``.
        """
        target = self.target(placed, Reporter() if quiet else self.reporter)
        with upstreams_errors(self.folder.class_name):
            return rehearsed(
                self.folder,
                target,
                str(self.settings.dtype),
                self.rehearsed_with,
                self.reporter,
                on_host=self.settings.on_host,
                cache=self.settings.step_cache,
                first_step=first_step,
            )

    def default_mesh(self, devices: Sequence[jax.Device]) -> MeshSpec:
        """The mesh if none is asked for: the pair of a guided step over dp, else sp.

        The first step of a rehearsal tells whether each of the denoiser's programs has
        two rows, or is called twice. Of several slices each takes its share of the
        rows, and of an even share a pair.
        """
        slices = len(by_slice(devices))
        each = len(devices) // slices
        along = MeshSpec(dp=slices, sp=each)
        if each % 2:
            return along
        placed = targets.place(along, devices, None)
        own = replace(self, settings=self.settings)
        own.settle_dtype(placed)
        rows = [
            max(r.query[0] for r in made.attention)
            * (made.by_stage[StageName.DENOISE] if slices == 1 else 1)
            for made in own.rehearsed(placed, quiet=True, first_step=True).programs
            if denoises(made.component) and made.attention
        ]
        pairs = 2 * slices
        paired = bool(rows) and all(count % pairs == 0 for count in rows)
        return MeshSpec(dp=pairs, sp=each // 2) if paired else along

    def settle_mesh(self) -> None:
        """Take :meth:`default_mesh` on this machine's chips, if it has any."""
        devices = jax.devices()
        on_chips = devices[0].platform != "cpu" and not self.by_upstream
        if self.settings.mesh is None and on_chips:
            self.settle(mesh=self.default_mesh(devices))

    def settle_dtype(self, placed: PlacedMesh) -> None:
        """Take a dtype if none was given: float32 on CPUs, else bfloat16."""
        if self.settings.dtype is None:
            on_cpu = placed.mesh.devices.flat[0].platform == "cpu"
            self.settle(dtype=Dtype.FLOAT32 if on_cpu else Dtype.BFLOAT16)

    def settle_host(self) -> None:
        """Put the text encoders among ``on_host``, for --encode-on host."""
        if self.settings.encode_on == Place.HOST:
            encoders = [n for n in self.folder.components() if "text_encoder" in n]
            named = tuple(dict.fromkeys((*self.settings.on_host, *encoders)))
            self.settle(on_host=named, encode_on=Place.DEVICE)

    def settle_batch(self, placed: PlacedMesh) -> None:
        """Settle the number of videos of a call.

        Where :func:`wide` is so, the rows of a call divide; see :meth:`rows_of`.
        """
        settings, folder = self.settings, self.folder
        count = max(len(settings.prompt), 1) * len(settings.seed)
        takes = {"prompt", "generator"} <= folder.all_parameters.keys()
        sounds = any("audio" in name for name in folder.components())
        alone = settings.image or settings.video or folder.blocks is not None or sounds
        several = takes and not alone and folder.class_name not in MIXING
        whole = wide(placed) and several
        asked = settings.batch_size or (count if whole else 1)
        together = min(asked, self.rows_of(count, placed) if whole else count)
        if together > 1 and not several:
            raise UsageError(
                f"--batch-size {asked}: {folder.class_name} makes one video in a call "
                "here; leave the flag out"
            )
        self.settle(batch_size=together)

    def rows_of(self, count: int, placed: PlacedMesh) -> int:
        """``count`` videos, and as many more as let rows divide over ``dp``."""
        parts = placed.mesh.shape["dp"]
        return -(-count // parts) * parts

    def check_host_memory(self) -> None:
        """Refuse videos whose frames exceed the memory of the machine or its container.

        Upstream gives frames back as float32, those of a call at a time.
        """
        width, height, frames, _ = self.asked.values()
        room = host_memory()
        if not (height and width and frames and room):
            return
        frame = 4 * 3 * height * width * (self.settings.batch_size or 1)
        if frame * frames > room:
            raise UsageError(
                f"--frames {frames}: {frames} frames of {width}x{height} take "
                f"{bytes_text(frame * frames)}, and this machine has "
                f"{bytes_text(room)} of memory; about {room // frame} frames fit"
            )

    def check_inputs(self) -> None:
        """Let upstream refuse what was asked for, before weights are read.

        Upstream's ``check_inputs`` is called on the pipeline without weights. What it
        needs and a user does not give, such as a size that upstream chooses, leaves
        that to the run itself. A line says which prompts upstream cuts.
        """
        settings, folder = self.settings, self.folder
        if folder.blocks is not None:
            return
        given = {name: one.default for name, one in folder.all_parameters.items()}
        given |= self.arguments
        pipeline = self.bare()
        self._warn_of_long_prompts(pipeline, given)
        if settings.prompt:
            given |= prompts_of(settings, settings.prompt)
        self._check_steps(pipeline)
        check = getattr(pipeline, "check_inputs", None)
        takes = inspect.signature(check).parameters.values() if check else ()
        if any(p.name not in given and p.default is p.empty for p in takes):
            return
        sides = [given[name] for name in ("height", "width") if name in given]
        if check is None or not all(sides):
            return
        try:
            check(**{p.name: given[p.name] for p in takes if p.name in given})
        except ValueError as error:
            flags, remedy = self._of_flags(str(error))
            why = one_line(error).rstrip(".")
            raise UsageError(
                f"{flags}{folder.class_name} refuses this: {why}{remedy}"
            ) from error
        except Exception:
            return  # the state of a pipeline under way is looked at, which is not there

    def _of_flags(self, words: str) -> tuple[str, str]:
        """The flags of what upstream's words name, and what to give for a size."""
        named = [
            field
            for field, names in PARAMETERS.items()
            if any(re.search(rf"\b{name}\b", words) for name in names)
        ]
        width, height, *_ = self.asked.values()
        if not {"height", "width"} & set(named) or not (width and height):
            flags = ", ".join(TABLE[name].flags[0] for name in named)
            return f"{flags}: " * bool(flags), ""
        unit = token_side(self.folder)
        near = (max(round(side / unit), 1) * unit for side in (width, height))
        return f"--size {width}x{height}: ", "; try --size {}x{}".format(*near)

    def _check_steps(self, pipeline: Any) -> None:
        """Let the scheduler refuse a number of steps that it cannot make.

        A scheduler that refuses a single step too wants more than a number, which the
        pipeline gives.
        """
        scheduler: Any = getattr(pipeline, "scheduler", None)
        steps = self.settings.num_inference_steps
        if steps is None or not hasattr(scheduler, "set_timesteps"):
            return

        def told(count: int) -> str:
            try:
                copy.deepcopy(scheduler).set_timesteps(count)
            except Exception as error:
                return one_line(error)
            return ""

        if (why := told(steps)) and not told(1):
            name = type(scheduler).__name__
            raise UsageError(f"--steps {steps}: {name} refuses this: {why}")

    def _warn_of_long_prompts(self, pipeline: Any, given: Mapping[str, Any]) -> None:
        """Say which prompts upstream cuts; a template around one is not counted."""
        limit = given.get("max_sequence_length")
        tokenizer = pipeline.components.get("tokenizer")
        if not isinstance(limit, int) or tokenizer is None:
            return
        for prompt in self.settings.prompt:
            count = len(tokenizer(prompt)["input_ids"])
            if count > limit:
                self.reporter.say(
                    f"warning: a prompt has at least {count} tokens, and "
                    f"{type(pipeline).__name__} reads the first {limit}"
                )

    def match_loras(self) -> None:
        """Refuse a LoRA that does not fit the pipeline, before weights are read."""
        folder = self.folder
        if not folder.loras:
            return
        given = (folder.pipeline_class, modules_of(self.bare()), folder.loras)
        found = targets.matched_loras(*given, self.reporter)
        self.folder = replace(folder, loras=found)

    def placed_here(self) -> PlacedMesh:
        """The mesh asked for on this machine's devices."""
        try:
            return targets.place_for_port(self.settings.mesh, self.reporter)
        except MeshError as error:
            devices, spec = jax.devices(), self.settings.mesh
            assert spec is not None
            needed = math.prod(n for n in (spec.dp, spec.sp, spec.tp) if n > 0)
            if devices[0].platform != "cpu" or needed <= len(devices):
                raise
            slices = (parse_topology(n) for n in TOPOLOGY_NAMES if n.startswith("v6e-"))
            fits = next((s.name for s in slices if s.devices >= needed), None)
            planned = f"; tpuport plan --topology {fits} plans it" if fits else ""
            flag = f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
            raise MeshError(
                f"{error}. {flag} tries it on this machine{planned}"
            ) from None

    def check_mesh(self, placed: PlacedMesh) -> None:
        """Refuse a mesh with an axis that the run cannot use, before weights are read.

        Tokens are split among any number of devices. Rows and heads are known once the
        denoiser is traced, which a rehearsal does.
        """
        few = placed.mesh.shape["dp"] <= 2 and placed.mesh.shape["tp"] == 1
        if few or self.by_upstream:
            return
        try:
            self.rehearsed(placed, quiet=True)
        except (MeshError, ShardingError):
            raise
        except Exception:
            # Made-up values are not everywhere good enough; the run checks it too.
            name = self.folder.class_name
            self.reporter.say(f"the mesh is checked once {name} runs")

    def check_step_cache(self, placed: PlacedMesh) -> None:
        """Refuse a step cache that the pipeline cannot have; no weights are read."""
        cache, name = self.settings.step_cache, self.folder.class_name
        if cache is None:
            return
        target = self.target(placed, Reporter())
        try:
            with upstreams_errors(name):
                pipeline = self.bare()
                pipeline.set_progress_bar_config(disable=True)
                given = self.rehearsed_with
                rehearsal.check_step_cache(pipeline, target, given, cache)
        except StepCacheError:
            raise
        except Exception:
            # Made-up values are not everywhere good enough; the run checks it too.
            self.reporter.say(f"the step cache is checked once {name} runs")

    def check_executables(self, placed: PlacedMesh) -> None:
        """Refuse executables for something else before weights are fetched."""
        name = self.folder.class_name
        target = self.target(placed, Reporter())
        built = targets.executables_for(name, target, self.settings, self.reporter)
        assert built is not None
        with self.reporter.timed(f"building {name} without weights"):
            built.check_modules(self.bare().components)


@contextlib.contextmanager
def upstreams_errors(pipeline: str) -> Iterator[None]:
    """What upstream's code raises, as errors of one line."""
    # Blocks log a traceback of what they raise.
    blocks = logging.getLogger("diffusers.modular_pipelines.modular_pipeline")
    level = blocks.level
    blocks.setLevel(logging.CRITICAL)
    try:
        yield
    except TpuportError:
        raise
    except (NameError, ImportError) as error:
        package = absent_of(error)
        needed = f"; it needs a package: pip install {package}" if package else ""
        raise TpuportError(f"{pipeline} failed: {one_line(error)}{needed}") from error
    except (ValueError, TypeError) as error:
        raise UsageError(f"{pipeline} refuses this: {one_line(error)}") from error
    except Exception as error:
        raise TpuportError(
            f"{pipeline} failed: {type(error).__name__}: {one_line(error)}; --debug "
            "shows where"
        ) from error
    finally:
        blocks.setLevel(level)
