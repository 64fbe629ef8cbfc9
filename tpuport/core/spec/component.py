"""Fields of a plugin that name their objects, and blocks written for the chip."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar, overload

from tpuport.errors import PluginError, did_you_mean

if TYPE_CHECKING:
    from tpuport.core.tracing.forward_split import ForwardSplit
    from tpuport.core.tracing.patching import Patch
    from tpuport.core.weights.transforms import WeightTransform


TORCHAX = "torchax"
"""The form that every component has: upstream's own class, traced."""

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


class Declared:
    """A data class that a plugin fills in: a field that it has not is told by name.

    Raises:
        PluginError: there is no such field; the nearest is named.
    """

    def __new__(cls, *_given: Any, **named: Any) -> Self:
        known = list(inspect.signature(cls.__init__).parameters)[1:]
        for name in named.keys() - {*known}:
            hint = did_you_mean(name, known, f"the fields are {', '.join(known)}")
            raise PluginError(f"{cls.__name__} has no field {name!r}; {hint}")
        return super().__new__(cls)


class Named(Generic[T]):
    """A field of a data class that takes an object or ``"package.module:name"``.

    A named object is imported when the field is first read, so that declaring it
    imports neither torch nor jax.

    Args:
        default: of the field; without one the field must be given.
        made: a function is called without arguments, for the object.
        kind: the name of the class of the object, or, where the default is a tuple, of
            each one in it. Any object will do without.

    Raises:
        PluginError: an object of another class; an object that was given by itself is
            looked at when the data class is made.
    """

    def __init__(self, *default: T, made: bool = False, kind: str = "") -> None:
        self.default, self.made, self.kind = default, made, kind

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
        declared = value = vars(instance)[self.name]
        if isinstance(value, str):
            value = import_named(value)
        if self.made and isinstance(value, FunctionType):
            value = _made(value)
        self._check(value, declared)
        vars(instance)[self.name] = value
        found: T = value
        return found

    def __set__(self, instance: object, value: T | str | Callable[[], T]) -> None:
        if not isinstance(value, str | FunctionType):
            self._check(value, value)
        vars(instance)[self.name] = value

    def _check(self, value: Any, declared: Any) -> None:
        if not self.kind or value in self.default:
            return
        several = isinstance(self.default[0], tuple)
        found = value if several else (value,)
        if not isinstance(found, tuple | list) or not all(map(self._is_one, found)):
            wanted = f"a tuple of {self.kind}" if several else f"a {self.kind}"
            raise PluginError(f"{self.name}={declared!r} is not {wanted}")

    def _is_one(self, value: Any) -> bool:
        return self.kind in (cls.__name__ for cls in type(value).__mro__)


def _made(function: Callable[[], Any]) -> Any:
    """What a plugin's function makes."""
    try:
        return function()
    except Exception as error:
        where = f"{function.__module__}:{function.__qualname__}"
        raise PluginError(
            f"{where!r}, which a plugin names, fails: {type(error).__name__}: {error}; "
            "fix or uninstall the plugin"
        ) from error


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeForm:
    """A component whose blocks are written for the chip, with upstream's weights.

    Attributes:
        patches: on upstream's modules, in force with ``--blocks native``, where they
            take the place of the plugin's patches on the same targets.
        transforms: of the weights that these want in another order.
        split: where forward splits for a step cache; ``None`` for what is found.
        fits: whether these blocks know a module's config; one that they do not know
            runs as upstream's.
    """

    patches: tuple[Patch, ...]
    transforms: tuple[WeightTransform, ...] = ()
    split: ForwardSplit | None = None
    fits: Callable[[Mapping[str, Any]], bool] = lambda config: True
