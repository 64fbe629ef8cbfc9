"""What a plugin says of upstream's classes: data, and no pipeline.

A plugin makes a pipeline faster, or lets a module trace that does not. What a plugin
leaves out comes from the general port. Importing this module, or building a plugin,
imports neither torch nor jax.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tpuport.core.enums import Blocks, denoises
from tpuport.core.mesh.mesh_spec import AXES
from tpuport.core.spec import outside
from tpuport.core.spec.component import (
    TORCHAX,
    Declared,
    Named,
    NativeForm,
    import_named,
)
from tpuport.core.spec.nearest_names import nearest
from tpuport.core.weights.sharding import (
    DEFAULT_LAYOUT,
    GATHERED,
    ShardingPlan,
    ShardRule,
    Spec,
    UndividedError,
    plan_sharding,
    spec_axes,
)
from tpuport.errors import (
    PluginError,
    ShardingError,
    UnknownModelError,
    UsageError,
    did_you_mean,
)

if TYPE_CHECKING:
    from tpuport.core.tracing.op_overrides import OpOverride
    from tpuport.core.tracing.patching import Patch

Layout = Mapping[str, Spec]
"""Pattern of a weight's name -> the mesh axes that split each dim.

A pattern matches a name, or the end of a name behind a dot. Weights of no pattern are
whole on every device, or in parts that are gathered where they do not fit.
"""

SPLITS = ("space",)
"""What ``Module.split`` takes."""


@dataclass(frozen=True, kw_only=True)
class Module(Declared):
    """What a plugin knows of one component of a pipeline. Every field is optional.

    Attributes:
        layout: how tensor parallelism splits the weights; see :data:`Layout`.
        layouts: other such tables by name, for ``--sharding NAME``.
        native: the same computation written for the chip: a :class:`NativeForm`, its
            ``"package.module:name"``, or a function that makes one. ``--blocks
            upstream`` turns the form off.
        forms: other such computations by name, for ``--vae NAME`` of an autoencoder.
            Their patches are on the parts that upstream's code calls.
        split: ``"space"`` gives each device a part of the pictures in every program of
            the component, an autoencoder that convolves them: rows, columns, and videos
            of a batch. What is not local in a picture is refused, so its operations
            must be those of :mod:`tpuport.patches`, or patched.

    Raises:
        ShardingError: a pattern is not a regex, or a spec not a tuple of mesh axes.
        PluginError: a layout has a name that tpuport gives itself, there is no such
            split, or a form is none.
    """

    layout: Layout = field(default_factory=dict)
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    native: Named[NativeForm | None] = Named(None, made=True, kind="NativeForm")
    forms: Mapping[str, NativeForm | str] = field(default_factory=dict)
    split: str | None = None

    def __post_init__(self) -> None:
        if self.split not in (None, *SPLITS):
            known = ", ".join(map(repr, SPLITS))
            raise PluginError(f"split={self.split!r}: a module has {known}, or None")
        for name in self.layouts:
            if name in (DEFAULT_LAYOUT, GATHERED):
                raise PluginError(f"a layout may not be called {name!r}")
        for name, form in self.forms.items():
            if not isinstance(form, NativeForm | str):
                raise PluginError(f"forms[{name!r}] is {form!r}, and no NativeForm")
        for layout in (self.layout, *self.layouts.values()):
            rules_of(layout)
            for pattern, spec in layout.items():
                for axis in (axis for entry in spec for axis in spec_axes(entry)):
                    if axis not in AXES:
                        raise ShardingError(
                            f"layout pattern {pattern!r}: a mesh has no axis {axis!r}, "
                            f"the axes are {', '.join(AXES)}"
                        )

    def form(self, blocks: Blocks, name: str = TORCHAX) -> NativeForm | None:
        """The form in place with some blocks, or the one of a name."""
        if name == TORCHAX:
            return self.native if blocks == Blocks.NATIVE else None
        found = self.forms[name]
        return import_named(found) if isinstance(found, str) else found

    def plan(
        self,
        name: str,
        layout: str,
        weights: Mapping[str, Any],
        mesh: Mapping[str, int],
    ) -> ShardingPlan:
        """Where the weights go.

        Args:
            name: of the component.
            layout: of ``layouts``; any other name is ``layout``.
            weights: name -> tensor.
            mesh: axis -> size.

        Raises:
            ShardingError: a pattern matches no weight, two match one, or a dim does not
                divide its axis.
        """
        table = self.layouts.get(layout, self.layout)
        rules = rules_of(table)
        for pattern, rule in zip(table, rules, strict=False):
            if not any(re.fullmatch(rule.pattern, one) for one in weights):
                near = nearest(pattern, weights)
                hint = f"did you mean {near}? Else remove" if near else "remove"
                raise ShardingError(
                    f"module {name}: layout pattern {pattern!r} matches no weight; "
                    f"{hint} it"
                )
        return plan_sharding(rules, weights, mesh, component=name)


def rules_of(layout: Layout) -> tuple[ShardRule, ...]:
    """A layout as rules, of which one matches each weight.

    Raises:
        ShardingError: a pattern is not a regex, or a spec not a tuple of axes.
    """
    named = [
        ShardRule(pattern=rf"(?:.*\.)?(?:{pattern})", spec=spec)
        for pattern, spec in layout.items()
    ]
    taken = "|".join(rule.pattern for rule in named)
    others = rf"(?!(?:{taken})$).*" if named else ".*"
    return (*named, ShardRule(pattern=others, spec=(), optional=True))


@dataclass(frozen=True)
class Published(Declared):
    """A published checkpoint.

    Attributes:
        repo: the hub id; empty for a small one that needs no hub.
        configs: a JSON file: ``model_index`` and the config of each component, as the
            checkpoint has them; without a hub id its weights are random. Or a folder
            in the layout of ``save_pretrained``, whose weights the package has. A
            relative name is of what lies beside the plugin's module. ``plan`` and
            ``compile`` need no network then.
        title: for people.
        defaults: keywords of upstream's call, such as ``num_frames``, which the
            checkpoint is published with and upstream's own defaults are not.
    """

    repo: str = ""
    configs: str | Path = ""
    title: str = ""
    defaults: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.repo and not self.configs:
            raise PluginError("a variant needs the hub id of a checkpoint, or configs")
        if not isinstance(self.configs, str | Path):
            raise PluginError(f"configs={self.configs!r} is not the name of a file")

    def read(self, beside: Path = Path()) -> Mapping[str, Mapping[str, Any]]:
        """The configs, by component.

        Args:
            beside: the folder of the plugin's module.

        Raises:
            PluginError: there is no such file, or it is no JSON object.
        """
        place = beside / self.configs
        if place.is_dir():
            files = {"model_index": place / "model_index.json"}
            for name in ("config.json", "scheduler_config.json"):
                files |= {file.parent.name: file for file in place.glob(f"*/{name}")}
            return {name: _object(file) for name, file in files.items()}
        found = _object(place)
        if "model_index" not in found:
            raise PluginError(f"{place} is no JSON object with a model_index")
        return found

    def folder(self, beside: Path) -> Path | None:
        """The folder with configs and weights, where the package has one."""
        place = beside / self.configs
        return place if self.configs and place.is_dir() else None


def _object(file: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise PluginError(f"{file}: {error}") from error
    if not isinstance(found, dict):
        raise PluginError(f"{file} is no JSON object with a model_index")
    return found


@dataclass(frozen=True)
class ModelPlugin(Declared):
    """Everything that a plugin hands over.

    Attributes:
        name: what ``--model`` takes.
        claims: the pipeline classes that the plugin is for, one or several: each the
            class, or ``"package:Class"``, which imports none.
        modules: what it knows of components, by name.
        patches: on upstream's code, while the pipeline's modules are traced; or the
            ``"package.module:name"`` of a tuple of them, or a function that makes one.
        overrides: of torch operators, beside the standard ones.
        variants: published checkpoints by name; the first is the default.
        title: for people.
        lora_names: the names that the model's original code has for the layers of its
            denoiser, ``{}`` for the number of a block -> those of diffusers; several
            for a layer that diffusers has in parts. Read where upstream's pipeline has
            no loader of LoRAs, or does not know the spelling.
        suits: ``suits(pipeline, config)``: whether a claimed class can run a
            transformer of a config. Of the classes that can, the one runs whose call
            takes the image or video that is given.

    Raises:
        PluginError: a name or a claim is not one, or a field has another type.
    """

    name: str
    claims: str | type | tuple[str | type, ...]
    modules: Mapping[str, Module] = field(default_factory=dict)
    patches: Named[tuple[Patch, ...]] = Named((), made=True, kind="Patch")
    overrides: Named[tuple[OpOverride, ...]] = Named((), made=True, kind="OpOverride")
    variants: Mapping[str, Published] = field(default_factory=dict)
    title: str = ""
    lora_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    suits: Callable[[str, Mapping[str, Any]], bool] = lambda pipeline, config: True

    def __post_init__(self) -> None:
        if not re.fullmatch(r"[a-z0-9][a-z0-9._-]*", self.name):
            raise PluginError(
                f"a plugin may not be called {self.name!r}: use small letters, digits, "
                "dots and dashes"
            )
        for claim in self.claimed:
            if not re.fullmatch(r"[\w.]+:\w+", str(claim)):
                raise PluginError(
                    f'plugin {self.name}: claim {claim!r} is not "package:Class"'
                )
        if not self.claimed:
            raise PluginError(f"plugin {self.name}: claims no pipeline class")
        for field_, kind in (("modules", Module), ("variants", Published)):
            named = getattr(self, field_)
            if not isinstance(named, Mapping):
                raise PluginError(f"plugin {self.name}: {field_} is no dict by name")
            for name, one in named.items():
                if not isinstance(one, kind):
                    raise PluginError(
                        f"plugin {self.name}: {field_}[{name!r}] is no {kind.__name__}"
                    )
        if not callable(self.suits):
            raise PluginError(f"plugin {self.name}: suits is no function")
        self._check_suits()

    def _check_suits(self) -> None:
        try:
            takes = inspect.signature(self.suits)
        except ValueError:
            return  # a built-in function, which does not say
        try:
            takes.bind("", {})
        except TypeError:
            raise PluginError(
                f"plugin {self.name}: suits takes {takes}, and is called with a "
                "pipeline's name and the config of its transformer"
            ) from None

    @property
    def claimed(self) -> tuple[str, ...]:
        """The claims, of diffusers' own classes always as ``"diffusers:Class"``."""
        given = self.claims if isinstance(self.claims, tuple | list) else (self.claims,)
        named = (
            f"{one.__module__}:{one.__qualname__}" if isinstance(one, type) else one
            for one in given
        )
        return tuple(
            outside.canonical(one) if isinstance(one, str) else one for one in named
        )

    @property
    def pipelines(self) -> tuple[str, ...]:
        return tuple(claim.partition(":")[2] for claim in self.claimed)

    @property
    def first(self) -> str:
        """The first claimed class: its name in diffusers, else the claim."""
        return self.claimed[0].removeprefix("diffusers:")

    @property
    def outside(self) -> tuple[str, ...]:
        """The claims on classes that are not of diffusers."""
        return tuple(one for one in self.claimed if not one.startswith("diffusers:"))

    @property
    def classes(self) -> list[Any]:
        """The pipeline classes that are claimed, imported."""
        return [import_named(claim) for claim in self.claimed]

    @property
    def layouts(self) -> tuple[str, ...]:
        """What ``--sharding`` takes."""
        own = [name for module in self.modules.values() for name in module.layouts]
        return (DEFAULT_LAYOUT, GATHERED, *dict.fromkeys(own))

    def forms_with(
        self, blocks: Blocks, chosen: Mapping[str, str] = MappingProxyType({})
    ) -> dict[str, NativeForm]:
        """The forms of modules that are in force.

        Args:
            blocks: of the run.
            chosen: module -> name of its form.
        """
        forms = {
            name: module.form(blocks, chosen.get(name, TORCHAX))
            for name, module in self.modules.items()
        }
        return {name: form for name, form in forms.items() if form is not None}

    def patches_with(
        self, blocks: Blocks, chosen: Mapping[str, str] = MappingProxyType({})
    ) -> tuple[Patch, ...]:
        """The patches in force; arguments as of :meth:`forms_with`."""
        forms = self.forms_with(blocks, chosen).values()
        added = [patch for form in forms for patch in form.patches]
        targets = {patch.target for patch in added}
        kept = [patch for patch in self.patches if patch.target not in targets]
        return (*kept, *dict.fromkeys(added))

    def check_forms(self, chosen: Mapping[str, str]) -> None:
        """Refuse a form that a module does not have.

        Raises:
            UsageError: which one.
        """
        for name, form in chosen.items():
            known = self.modules[name].forms if name in self.modules else {}
            if form not in (TORCHAX, *known):
                has = ", ".join((TORCHAX, *known))
                raise UsageError(f"--{name} {form}: {self.name} has {has}")

    def check_layout(self, layout: str) -> None:
        """Refuse a layout that no module has.

        Raises:
            UsageError: no module has the layout.
        """
        if layout not in self.layouts:
            known = ", ".join(self.layouts)
            raise UsageError(f"--sharding {layout!r}: {self.name} has {known}")

    def variant(self, name: str | None) -> tuple[str, Published]:
        """The variant of a name, by default the first, and its name.

        Raises:
            UnknownModelError: there is none.
        """
        if name is None and self.variants:
            name = next(iter(self.variants))
        if name is None or name not in self.variants:
            known = ", ".join(self.variants) or "none; use --weights"
            hint = did_you_mean(name or "", self.variants, f"it has {known}")
            raise UnknownModelError(
                f"model {self.name!r} has no variant {name}; {hint}"
            )
        return name, self.variants[name]

    def check(self) -> None:
        """Refuse claims and names of components that upstream has not, and splits
        in space of components without pictures.

        Raises:
            PluginError: which one.
        """
        self.check_claims()
        components = self._components()
        for name, module in self.modules.items():
            kinds = components.get(name, ())
            texts = [one for one in kinds if one.__module__.startswith("transformers.")]
            if module.split and kinds and (texts or denoises(name)):
                raise PluginError(
                    f"plugin {self.name}: modules[{name!r}]: split={module.split!r} is "
                    "for an autoencoder; a denoiser or text encoder has no pictures"
                )
        for name in self.modules.keys() - components.keys():
            known = sorted(components)
            raise PluginError(
                f"plugin {self.name}: modules[{name!r}] is no component of "
                f"{' or '.join(self.pipelines)}; "
                + did_you_mean(name, known, f"there are {', '.join(known)}")
            )

    def _components(self) -> dict[str, tuple[type, ...]]:
        """The classes of each component of the claimed pipelines."""
        found: dict[str, tuple[type, ...]] = {}
        for claim, pipeline in zip(self.claimed, self.classes, strict=True):
            if not hasattr(pipeline, "_get_signature_types"):
                raise PluginError(
                    f"plugin {self.name}: claims {claim!r}, which is no pipeline class"
                )
            for name, kinds in pipeline._get_signature_types().items():
                found[name] = (*found.get(name, ()), *kinds)
        return found

    def check_claims(self) -> None:
        """Refuse a claim on a class that does not exist; imports no pipeline.

        Raises:
            PluginError: which one.
        """
        for claim in self.claimed:
            package, _, name = claim.partition(":")
            known = dir(import_named(package))
            if name not in known:
                known = [one for one in known if one.endswith("Pipeline")]
                raise PluginError(
                    f"plugin {self.name}: claims {claim!r}, which does not exist; "
                    + did_you_mean(name, known, f"correct it, or update {package}")
                )

    def plan(
        self,
        name: str,
        layout: str,
        weights: Mapping[str, Any],
        mesh: Mapping[str, int],
    ) -> ShardingPlan:
        """Where the weights of a component go; arguments as of :meth:`Module.plan`.

        Raises:
            ShardingError: as of :meth:`Module.plan`; the message names the plugin.
        """
        try:
            return self.modules[name].plan(name, layout, weights, mesh)
        except UndividedError:
            raise  # the mesh is at fault, and not the plugin
        except ShardingError as error:
            raise ShardingError(f"plugin {self.name}: {error}") from None

    def component_of(self, kind: type) -> str | None:
        """The component that is of a class, or of one above, in a claimed pipeline."""
        for name, types in self._components().items():
            if name in self.modules and any(one in kind.__mro__ for one in types):
                return name
        return None
