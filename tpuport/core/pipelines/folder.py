"""A pipeline in the layout that ``save_pretrained`` writes.

The index names the class. The signature of the class says what a call takes. The inputs
of its blocks say so for a modular pipeline.
"""

from __future__ import annotations

import contextlib
import inspect
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import diffusers
import torch
import transformers

from tpuport.core.arrays import all_finite
from tpuport.core.enums import Tiling, denoises
from tpuport.core.files.atomic import one_line
from tpuport.core.files.stores import StorePath
from tpuport.core.pipelines.loras import Lora, fuse
from tpuport.core.reports import Reporter
from tpuport.core.spec import outside
from tpuport.core.spec.component import import_named
from tpuport.core.weights.absent_packages import absent_packages, needs_of
from tpuport.core.weights.checkpoint import SMALL_FILES, Checkpoint, patterns
from tpuport.core.weights.configs import building
from tpuport.core.weights.hub import INDEXES, fetch, local_folder
from tpuport.core.weights.stored_tensors import StoredTensor, read_whole, unread
from tpuport.errors import (
    UsageError,
    WeightsError,
    damaged,
    did_you_mean,
    quoted,
)

if TYPE_CHECKING:
    from tpuport.core.spec.model_plugin import ModelPlugin

#: What tpuport gives by itself.
_OWN = frozenset(
    ("self", "state", "output", "generator", "output_type", "return_dict", "latents")
) | {"kwargs"}


Media = Mapping[str, Sequence[str]]
"""An image or a video that a call is given: a field of Asked -> the parameters of
pipelines that stand for it."""

#: Autoencoders whose decode upstream has in tiles alone. No config asks for tiles.
_TILED = ("AutoencoderKLAllegro",)


@dataclass(frozen=True)
class PipelineFolder:
    """A pipeline's folder, and its class.

    Attributes:
        folder: in the layout that ``save_pretrained`` writes.
        reference: what the user named.
        index: ``model_index.json``, or ``modular_model_index.json``.
        checkpoint: the folder, as far as weights and fingerprints go.
        guidance: the scale, for a pipeline whose guidance is a component.
        tiling: whether autoencoders work in tiles; ``None`` is as upstream has it.
        scheduler: a class in place of the checkpoint's scheduler, made from its config;
            empty for the checkpoint's own.
        scheduler_options: in place of values of that config.
        loras: fused into the weights as they are loaded.
        cache: the cache folder, for what is fetched from a store.
        store: keeps what is fetched from the hub.
        whole: components whose weights a load reads, because the host computes with
            them.
    """

    folder: Path
    reference: str
    index: Mapping[str, Any]
    checkpoint: Checkpoint
    guidance: float | None = None
    tiling: Tiling | None = None
    scheduler: str = ""
    scheduler_options: Mapping[str, Any] = field(default_factory=dict)
    loras: tuple[Lora, ...] = field(default=(), compare=False)
    cache: Path | None = None
    store: StorePath | None = None
    whole: Collection[str] = field(default=(), compare=False)

    @classmethod
    def find(
        cls,
        weights: str | Path,
        reporter: Reporter,
        cache: Path | None = None,
        store: StorePath | None = None,
    ) -> PipelineFolder:
        """The folder that ``weights`` names, or that is fetched to.

        Of a hub id or an address the index alone is fetched; :meth:`load` fetches the
        rest. Nothing but the index is read.

        Args:
            cache: the cache folder, for what is fetched from a store.
            store: keeps what is fetched from the hub.

        Raises:
            MissingWeightsError: there is no such folder.
            HubError: the hub cannot be reached, or has no such pipeline.
            StoreError: the store cannot be read, or has no such folder.
            WeightsError: there is no index, or it is no JSON object.
        """
        folder = local_folder(weights)
        if folder is None:
            folder = fetch(str(weights), INDEXES, reporter, cache=cache, store=store)
        checkpoint = Checkpoint(folder, str(weights))
        kept: Any = {"cache": cache, "store": store}
        return cls(folder, str(weights), checkpoint.index, checkpoint, **kept)

    def taking(
        self, plugin: ModelPlugin, given: Media, reporter: Reporter
    ) -> PipelineFolder:
        """The folder for the claimed class whose call takes an image or a video.

        Args:
            plugin: that claims the folder's class.
            given: what the call is given.
            reporter: told of another class than the index names.

        Raises:
            UsageError: the weights are for no such class.
        """
        if takes(self.pipeline_class, given):
            return self
        config = self.fetched(reporter, weights=False).checkpoint.config("transformer")
        found = class_taking(plugin, self.index, config, given)
        if found is None:
            flags = " and ".join(f"--{field}" for field in given)
            raise UsageError(
                f"{flags}: {self.class_name} takes none, and the weights of "
                f"{self.reference} are for no other class of {plugin.name} that does"
            )
        reporter.say(f"{self.class_name}: run as {found.__name__}")
        named = outside.entry_of(outside.claim_on(found))
        return replace(self, index={**self.index, "_class_name": named})

    def fetched(self, reporter: Reporter, *, weights: bool = True) -> PipelineFolder:
        """The folder with all files that are read, of a plan without ``weights``."""
        if local_folder(self.reference) is not None:
            return self
        names = [n for n in self.index if not n.startswith("_")]
        suffixes = (".safetensors", *SMALL_FILES) if weights else SMALL_FILES
        wanted = patterns(names, *suffixes)
        kept: Any = {"cache": self.cache, "store": self.store}
        folder = fetch(self.reference, wanted, reporter, **kept)
        return replace(
            self, folder=folder, checkpoint=Checkpoint(folder, self.reference)
        )

    @property
    def _index(self) -> str:
        return f"{self.reference}: {self.checkpoint.index_name}"

    @property
    def class_name(self) -> str:
        """The pipeline's class, as the index names it."""
        found = self.index.get("_class_name")
        if found is None:
            raise WeightsError(f"{self._index} names no pipeline (_class_name)")
        if isinstance(found, str):
            return found
        unknown = not outside.claimed(outside.claim_of(found))
        if unknown or (self.folder / f"{found[0]}.py").exists():
            raise WeightsError(
                f"{self._index} names the pipeline {quoted(found)}, which is code of "
                "its own; tpuport runs classes of diffusers, and those of installed "
                "packages that a plugin claims"
            )
        return outside.name_of(found)

    @property
    def claim(self) -> str:
        """The claim that is on the pipeline's class, if any is."""
        _ = self.class_name  # which refuses code of its own
        return outside.claim_of(self.index["_class_name"])

    @cached_property
    def pipeline_class(self) -> Any:
        """The class.

        Raises:
            WeightsError: the installed diffusers has no such class, the class is no
                pipeline, or it needs a package that is not installed.
        """
        name, version = self.class_name, diffusers.__version__
        found = getattr(diffusers, name, None)
        if outside.claimed(self.claim):
            found = import_named(self.claim)
        if found is None:
            known = [n for n in dir(diffusers) if n.endswith("Pipeline")]
            hint = did_you_mean(name, known, "install a diffusers that has the class")
            raise WeightsError(
                f"{self._index} names the pipeline {name}, which diffusers {version} "
                f"has not, and no plugin claims; {hint}"
            )
        self._check_there(needs_of(found))
        kinds = (diffusers.DiffusionPipeline, diffusers.ModularPipeline)
        concrete = inspect.isclass(found) and found not in kinds
        if not concrete or not issubclass(found, kinds):
            raise WeightsError(
                f"{self._index} names {name}, which is not a pipeline; name the "
                "folder of a whole pipeline"
            )
        return found

    @cached_property
    def blocks(self) -> Any:
        """What a modular pipeline is made of; ``None`` of a classic one.

        Raises:
            WeightsError: the blocks are code of their own.
        """
        if not issubclass(self.pipeline_class, diffusers.ModularPipeline):
            return None
        name = self.index.get("_blocks_class_name")
        if name is not None and not hasattr(diffusers, str(name)):
            raise WeightsError(
                f"{self._index} names the blocks {quoted(name)}, which diffusers has "
                "not; tpuport runs no code from a checkpoint"
            )
        return self.put_together({}).blocks

    @cached_property
    def all_parameters(self) -> Mapping[str, inspect.Parameter]:
        """What a call of the pipeline takes, by name."""
        if self.blocks is None:
            return inspect.signature(self.pipeline_class.__call__).parameters
        made = self.blocks.intermediate_output_names
        return {
            one.name: inspect.Parameter(
                one.name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty
                if one.required and one.default is None and one.name not in made
                else one.default,
                annotation=Any if one.type_hint is None else one.type_hint,
            )
            for one in self.blocks.inputs
            if one.name is not None
        }

    @cached_property
    def parameters(self) -> dict[str, inspect.Parameter]:
        """What a call of the pipeline takes and a user may give, by name."""
        return {
            name: parameter
            for name, parameter in self.all_parameters.items()
            if name not in _OWN and not name.startswith("callback")
        }

    @property
    def has_guider(self) -> bool:
        """Whether guidance is a component of the pipeline, with a scale of its own."""
        blocks = self.blocks
        return "guider" in (self.index if blocks is None else blocks.component_names)

    def check_packages(self, arguments: Mapping[str, Any]) -> None:
        """Refuse a call whose code uses a package that is not installed.

        Raises:
            WeightsError: which package.
        """
        classes = [self.pipeline_class]
        if self.blocks is not None:
            prompt = {"prompt": ""} if "prompt" in self.parameters else {}
            chosen = self.blocks.get_execution_blocks(**{**prompt, **arguments})
            classes = [type(block) for block in _all_blocks(chosen)]
        self._check_there(absent_packages(classes))

    def _check_there(self, missing: Sequence[str]) -> None:
        if missing:
            raise WeightsError(
                f"{self.class_name} needs a package that is not installed: pip install "
                + " ".join(missing)
            )

    def check_components(self, *, weights: bool = True) -> None:
        """Refuse what cannot be loaded; headers of weights are read, and no weights.

        Args:
            weights: of all components must be there.

        Raises:
            WeightsError: a component's class does not exist or is code of its own, a
                value of its config cannot be, or its weights are missing, cut or
                pickled.
        """
        self.check_parts()
        for name in self.components():
            if not self.checkpoint.has(name):
                raise WeightsError(
                    f"{self.reference}: folder {name}/ is missing; write the whole "
                    "pipeline with save_pretrained()"
                )
            found = self.component_class(name)
            is_module = is_a(found, torch.nn.Module)
            if is_module or hasattr(found, "load_config"):
                self.checkpoint.config(name)
            if weights and is_module:
                self.checkpoint.weight_files(name)

    def check_parts(self) -> None:
        """Refuse an index without a component that the class needs.

        Raises:
            WeightsError: which one.
        """
        if self.blocks is not None:
            return
        taken = inspect.signature(self.pipeline_class.__init__).parameters
        there, optional = self.components(), self.pipeline_class._optional_components
        denoisers = [name for name in taken if denoises(name)]
        null = [name for name in taken if self.index.get(name) == [None, None]]
        missing = [name for name in null if name not in optional]
        if denoisers and not any(name in there for name in denoisers):
            missing = denoisers  # of two experts each is optional, and one is needed
        if missing:
            has = "null for" if missing[0] in null else "no"
            raise WeightsError(
                f"{self._index} has {has} {missing[0]}, which {self.class_name} needs; "
                "write the whole pipeline with save_pretrained()"
            )

    def components(self) -> dict[str, list[str]]:
        """The library and the class of each component that is there, by name.

        Raises:
            WeightsError: an entry is no pair of a library and a class.
        """
        # Blocks have settings that are lists, such as the noise levels of few steps.
        known = self.index if self.blocks is None else self.blocks.component_names
        return {
            name: self.index[name]
            for name in known
            if not name.startswith("_")
            and isinstance(self.index.get(name), list)
            and None not in self.index[name]
            and self.checkpoint.class_name(name)
        }

    def modules(self) -> list[str]:
        """The names of the components that are torch modules.

        Raises:
            WeightsError: as of :meth:`component_class`.
        """
        parts = {name: self.component_class(name) for name in self.components()}
        return [name for name, kind in parts.items() if is_a(kind, torch.nn.Module)]

    def put_together(self, parts: Mapping[str, Any]) -> Any:
        """The pipeline with these components.

        Raises:
            WeightsError: the index does not build the class.
        """
        cls: Any = self.pipeline_class
        with building(self.class_name, self.checkpoint.index_name):
            if issubclass(cls, diffusers.ModularPipeline):
                made = cls(modular_config_dict=dict(self.index))
                made.update_components(**parts)
                for block in _all_blocks(made._blocks):
                    block._progress_bar_config = {"disable": True}
                return made
            names = (
                inspect.signature(cls.__init__).parameters.keys() & self.index.keys()
            )
            settings = {
                name: None if isinstance(self.index[name], list) else self.index[name]
                for name in names - parts.keys()
            }
            return cls(**settings, **parts)

    def component_class(self, name: str) -> Any:
        """The class of a component.

        Raises:
            WeightsError: there is none, or it is code of its own.
        """
        library, class_name = self.components()[name]
        if (self.folder / name / f"{library}.py").exists():
            raise WeightsError(
                f"{self.reference}: {name} is of {library}.py in the folder; tpuport "
                "runs no code from a checkpoint"
            )
        module = library_named(library)
        if module is None:
            raise WeightsError(
                f"{self._index} names {name} as {library}.{class_name}; tpuport runs "
                "classes of diffusers and transformers, and of modules that come with "
                "a pipeline that a plugin claims"
            )
        try:
            found = getattr(module, class_name)
            if missing := needs_of(found):
                raise ImportError(f"it needs pip install {' '.join(missing)}")
            return found
        except (ImportError, AttributeError) as error:
            raise WeightsError(
                f"{self._index} names {name} as {library}.{class_name}: "
                f"{one_line(error)}; install the version that the folder was made with"
            ) from None

    def load(self, dtype: torch.dtype, reporter: Reporter) -> Any:
        """The pipeline with its weights, which wait in their files until they are read.

        Autoencoders are read: what is called last is checked before all else runs.

        Raises:
            WeightsError: upstream cannot load it, or a weight that is read is NaN or
                infinite.
        """
        self.check_components()
        with reporter.timed(f"loading {self.class_name}"), self._loading("", dtype):
            pipeline = self._loaded(dtype)
        parts = pipeline.components.items()
        modules = {n: one for n, one in parts if isinstance(one, torch.nn.Module)}
        named = [one.file.name for one in self.loras]
        told = f"fusing {', '.join(named)}"
        with reporter.timed(told) if named else contextlib.nullcontext():
            fuse(self.loras, modules)
        for name, component in modules.items():
            self._check_tensors(name, component)
        return self.adjusted(pipeline)

    def adjusted(self, pipeline: Any) -> Any:
        """``pipeline`` with the scheduler, guidance and tiles that were asked for."""
        modular = isinstance(pipeline, diffusers.ModularPipeline)
        change = pipeline.update_components if modular else pipeline.register_modules
        for name, component in list(pipeline.components.items()):
            if name.startswith("guider") and self.guidance is not None:
                scaled = {**component.config, "guidance_scale": self.guidance}
                change(**{name: type(component)(**scaled)})
            if not hasattr(component, "enable_tiling"):
                continue
            needed = type(component).__name__ in _TILED
            if self.tiling == Tiling.ON or (needed and self.tiling is None):
                component.enable_tiling()
            elif self.tiling == Tiling.OFF:
                component.disable_tiling()
        if self.scheduler:
            config = pipeline.scheduler.config
            kind = getattr(diffusers, self.scheduler)
            made = kind.from_config(config, **self.scheduler_options)
            pipeline.register_modules(scheduler=made)
        return pipeline

    def with_scheduler(self, text: str) -> PipelineFolder:
        """The folder with another scheduler.

        Args:
            text: a class of diffusers, or a part of the name of a class that the
                pipeline is known to take, such as ``ddim``; ``checkpoint`` for its own.
                Values of the scheduler's config may follow: ``unipc:flow_shift=3``,
                where ``flow_shift`` is also what schedulers have as ``shift``.

        Raises:
            UsageError: there is no such scheduler, or no such value in its config.
        """
        name, colon, rest = text.partition(":")
        if not colon:
            return replace(self, scheduler=self._scheduler_class(name))
        found = self._scheduler_class(name)
        if not found:
            found = self.components().get("scheduler", ["", ""])[1]
        kind: Any = getattr(diffusers, found, None)
        known = (
            [] if kind is None else [*inspect.signature(kind.__init__).parameters][1:]
        )
        options: dict[str, Any] = {}
        for item in rest.split(","):
            key, equals, value = (part.strip() for part in item.partition("="))
            if key == "flow_shift" and key not in known and "shift" in known:
                key = "shift"
            if not equals or key not in known:
                hint = did_you_mean(key, known, f"it has {', '.join(known) or 'none'}")
                raise UsageError(
                    f"scheduler={text}: {quoted(item)} is no NAME=VALUE of {found}'s "
                    f"config; {hint}"
                )
            options[key] = _value(value)
        return replace(self, scheduler=found, scheduler_options=options)

    def _scheduler_class(self, name: str) -> str:
        """The class of a name; empty for the checkpoint's own."""
        if name == "checkpoint":
            return ""
        own = self.components().get("scheduler")
        hints: dict[str, Any] = {}
        if self.blocks is None:
            hints = self.pipeline_class._get_signature_types()
        taken = [one.__name__ for one in hints.get("scheduler", ())]
        if own is not None and hasattr(diffusers, own[1]):
            taken += getattr(getattr(diffusers, own[1]), "_compatibles", [])
        known = [one for one in dict.fromkeys(taken) if hasattr(diffusers, one)]
        kind = getattr(diffusers, name, None)
        found = [name] if hasattr(kind, "set_timesteps") else []
        found = found or [one for one in known if name.lower() in one.lower()]
        if not found:
            all_known = ", ".join(known) or "no other scheduler"
            takes = f"{self.class_name} takes {all_known}"
            hint = did_you_mean(name, known, takes)
            raise UsageError(f"scheduler={name}: there is no such scheduler; {hint}")
        return str(found[0])

    def load_component(self, name: str, dtype: torch.dtype) -> torch.nn.Module:
        """One component with its weights, as of :meth:`load`.

        Raises:
            WeightsError: as of :meth:`load`, or its weights are missing.
        """
        self.checkpoint.weight_files(name)
        with self._loading(name, dtype):
            found: torch.nn.Module = self.part(name, dtype)
        fuse(self.loras, {name: found})
        self._check_tensors(name, found)
        return found

    @contextlib.contextmanager
    def _loading(self, name: str, dtype: torch.dtype) -> Iterator[None]:
        try:
            with without_bars(), unread(self.reference):
                yield
        except Exception as error:
            raise WeightsError(
                f"{self.reference}: {name or self.class_name} does not load: "
                f"{type(error).__name__}: {one_line(error)}"
            ) from error

    def _check_tensors(self, name: str, component: torch.nn.Module) -> None:
        if name in self.whole or hasattr(component, "decode"):
            read_whole(component)
        for path, tensor in component.state_dict().items():
            if tensor.is_meta:
                raise self._no_weight(name, path, type(component))
            if isinstance(tensor, StoredTensor):
                continue  # checked when it is read
            if tensor.is_floating_point() and not all_finite(tensor):
                raise damaged(
                    f"{self.reference}: {name}: {path} holds NaN or infinite values",
                    "the folder",
                )

    def _no_weight(self, name: str, path: str, kind: type) -> WeightsError:
        return WeightsError(
            f"{self.reference}: {name}/ has no weight {path}, which {kind.__name__} "
            "needs"
        )

    def _loaded(self, dtype: torch.dtype) -> Any:
        libraries = [library for library, _ in self.components().values()]
        if self.blocks is not None or any(map(outside.module_named, libraries)):
            # Upstream's loader takes no component of another package.
            parts = {name: self.part(name, dtype) for name in self.components()}
            return self.put_together(parts)
        how: dict[str, Any] = {"torch_dtype": dtype, "use_safetensors": True}
        for name in self.components():
            found = self.component_class(name)
            if reads_otherwise(found, self.folder / name) or _of_transformers(found):
                how[name] = self.part(name, dtype)
        return self.pipeline_class.from_pretrained(
            self.folder, local_files_only=True, **how
        )

    def part(self, name: str, dtype: torch.dtype) -> Any:
        """One component as upstream reads it, with its weights if it has some."""
        found = self.component_class(name)
        is_module = is_a(found, torch.nn.Module)
        how = {"torch_dtype": dtype, "use_safetensors": True} if is_module else {}
        if reads_otherwise(found, self.folder / name):
            found = transformers.PreTrainedTokenizerFast
        place = self.folder / name
        if not _of_transformers(found):
            return found.from_pretrained(place, local_files_only=True, **how)
        # Transformers fills in a weight that is missing, with random numbers.
        made, told = found.from_pretrained(
            place, local_files_only=True, output_loading_info=True, **how
        )
        for missing in sorted(told["missing_keys"]):
            raise self._no_weight(name, missing, found)
        return made


def _value(text: str) -> Any:
    """A number, true, false or null; else the text."""
    try:
        return json.loads(text.lower())
    except ValueError:
        return text


def library_named(name: str) -> Any:
    """The module whose classes an index names; ``None`` if there is none."""
    known = {"diffusers": diffusers, "transformers": transformers}
    found = known.get(name) or outside.module_named(name)
    return found or getattr(diffusers.pipelines, name, None)


def is_a(found: Any, kind: type) -> bool:
    return inspect.isclass(found) and issubclass(found, kind)


def _of_transformers(found: Any) -> bool:
    return is_a(found, transformers.PreTrainedModel)


def takes(pipeline: Any, given: Media) -> bool:
    """Whether the call of a pipeline class takes all that is given."""
    known = inspect.signature(pipeline.__call__).parameters
    return all(any(n in known for n in names) for names in given.values())


def class_taking(
    plugin: ModelPlugin,
    index: Mapping[str, Any],
    config: Mapping[str, Any],
    given: Media,
) -> Any:
    """The claimed class that weights are for, and whose call takes what is given.

    Args:
        index: names the class that comes first, and the components that there are.
        config: of the transformer.

    Returns:
        ``None`` if there is no such class.
    """
    there = {n for n, one in index.items() if isinstance(one, list) and None not in one}
    first = outside.claim_of(index["_class_name"])
    for claim in dict.fromkeys((first, *plugin.claimed)):
        cls, name = import_named(claim), claim.partition(":")[2]
        known = {*cls._get_signature_keys(cls)[0]}
        whole = known - {*cls._optional_components} <= there
        whole = whole and not any(map(denoises, there - known))
        if whole and takes(cls, given) and plugin.suits(name, config):
            return cls
    return None


def reads_otherwise(found: Any, folder: Path) -> bool:
    """Whether a tokenizer's class splits text in another way than its file says.

    ``LlamaTokenizer`` of transformers 5 splits as SentencePiece whatever the file says.
    Of a file for bytes, as Llama 3 has it, it drops all spaces.
    https://github.com/huggingface/transformers/issues/45488
    """
    if found not in (transformers.LlamaTokenizer, transformers.LlamaTokenizerFast):
        return False
    file = folder / "tokenizer.json"
    return file.is_file() and '"ByteLevel"' in file.read_text("utf-8")


def _all_blocks(blocks: Any) -> Iterator[Any]:
    yield blocks
    for one in (getattr(blocks, "sub_blocks", None) or {}).values():
        yield from _all_blocks(one)


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """No bars of diffusers and transformers: a reporter tells what is under way."""
    libraries = (diffusers.utils.logging, transformers.utils.logging)
    shown = [one for one in libraries if one.is_progress_bar_enabled()]
    for one in shown:
        one.disable_progress_bar()
    try:
        yield
    finally:
        for one in shown:
            one.enable_progress_bar()
