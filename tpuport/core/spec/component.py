"""One folder of a checkpoint as a model declares it: class, rules, blocks."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar, overload

from tpuport.core.spec.stage import Program
from tpuport.core.weights.sharding import ShardRule
from tpuport.errors import PluginError

if TYPE_CHECKING:
    from tpuport.core.tracing.block_stacks import StackedBlocks
    from tpuport.core.tracing.forward_split import ForwardSplit
    from tpuport.core.tracing.patching import Patch
    from tpuport.core.weights.jax_module import WeightMap
    from tpuport.core.weights.transforms import WeightTransform


TORCHAX = "torchax"
"""The implementation that every component has: upstream's own class, traced."""

T = TypeVar("T")


def import_named(path: str) -> Any:
    """The object that ``"package.module:name"`` names.

    Raises:
        PluginError: the module does not import, or has no such object.
    """
    try:
        return pkgutil.resolve_name(path)
    except Exception as error:
        # A plugin is foreign code: whatever its import raises is its own failure.
        raise PluginError(
            f"{path!r}, which a plugin names, cannot be imported: "
            f"{type(error).__name__}: {error}; fix or uninstall the plugin"
        ) from error


class Named(Generic[T]):
    """A field of a data class that takes an object or ``"package.module:name"``.

    A named object is imported when the field is first read, so that declaring it
    imports neither torch nor jax.

    Args:
        default: of the field; without one the field must be given.
    """

    def __init__(self, *default: T) -> None:
        self.default = default

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    @overload
    def __get__(self, instance: None, owner: type) -> T: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object | None, owner: type) -> T:
        if instance is None:  # how a data class asks for the default
            if not self.default:
                raise AttributeError(self.name)
            return self.default[0]
        value = vars(instance)[self.name]
        if isinstance(value, str):
            value = vars(instance)[self.name] = import_named(value)
        found: T = value
        return found

    def __set__(self, instance: object, value: T | str) -> None:
        vars(instance)[self.name] = value


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeForm:
    """A component whose blocks are written for the chip, with upstream's weights.

    Attributes:
        patches: on upstream's modules, in force with ``--blocks native``, where they
            take the place of the port's patches on the same targets.
        transforms: of the weights that these want in another order.
        split: takes the place of ``Component.split``; ``None`` to keep it.
        fits: whether these blocks know a module's config; one that they do not know
            runs as upstream's.
    """

    patches: tuple[Patch, ...]
    transforms: tuple[WeightTransform, ...] = ()
    split: ForwardSplit | None = None
    fits: Callable[[Mapping[str, Any]], bool] = lambda config: True


@dataclass(frozen=True, kw_only=True)
class Component:
    """One folder of a checkpoint with weights.

    ``native`` and implementations may be given as ``"package.module:name"``.

    Attributes:
        name: the folder, as ``model_index.json`` names it.
        class_path: ``"package:Class"``, the upstream class.
        sharding: rules that match every stored weight exactly once.
        layouts: other tables of such rules by name, for ``--sharding NAME``; a
            component without the name keeps ``sharding``.
        stored_prefix: what stored names may have in front of the class's own, where
            files were saved by a version of upstream with one more module around it.
        ignored: regexes of stored names that upstream's loader passes over as well.
        dtype: of its weights whatever the session's is; ``None`` for the session's.
        heads: the number of attention heads in a config, for mesh checks.
        split: where its forward can be cut for step caching; ``None`` if it cannot.
        stacked: dotted paths of its ``ModuleList`` s of identical blocks, which run
            under one scan on weights with a leading dim; sharding rules are written for
            the single blocks as ever. A ``StackedBlocks`` where not all are alike.
        native: the same computation written for the chip; ``None`` for upstream's own.
        transforms: of its weights as they are loaded; see :func:`with_blocks`.
        implementations: others than upstream's class, by name; see
            :mod:`tpuport.core.spec.choices`.
    """

    name: str
    class_path: str
    sharding: tuple[ShardRule, ...]
    layouts: Mapping[str, tuple[ShardRule, ...]] = field(default_factory=dict)
    stored_prefix: str = ""
    ignored: tuple[str, ...] = ()
    dtype: str | None = None
    heads: Callable[[Mapping[str, Any]], int] | None = None
    split: ForwardSplit | None = None
    stacked: tuple[str | StackedBlocks, ...] = ()
    native: Named[NativeForm | None] = Named(None)
    transforms: tuple[WeightTransform, ...] = ()
    implementations: Mapping[str, Implementation | str] = field(default_factory=dict)

    def implementation(self, name: str) -> Implementation | None:
        """The implementation of that name; ``None`` for upstream's class."""
        found = self.implementations.get(name)
        return import_named(found) if isinstance(found, str) else found


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """A component in JAX alone, on upstream's weights.

    Attributes:
        weights: its weights, from the component's config. Raises NotImplementedError
            for a config that it cannot run.
        programs: by stage, those that take the place of the component's own programs
            of the same names; what they get and give, apart from the carry, is theirs.
            Their model is a :class:`~tpuport.core.weights.jax_module.BoundJaxModule`.
        packages: what it is written with, whose versions are part of a program's key.
    """

    weights: Callable[[Mapping[str, Any]], WeightMap]
    programs: Mapping[str, Mapping[str, Program]]
    packages: tuple[str, ...] = ()
