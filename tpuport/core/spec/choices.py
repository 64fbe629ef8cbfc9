"""Components that have more than one implementation, and which one is in place.

Every component runs upstream's class, traced through torchax. A port may offer another
one beside it, written in JAX alone: on the same weights, with the same stages and the
same files between them. A choice is put in place on the port, so that everything after
it reads one port and no flag.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tpuport.core.spec.component import TORCHAX, Component, Implementation
from tpuport.core.spec.model_port import ModelPort
from tpuport.core.spec.stage import Stage
from tpuport.errors import PluginError, UsageError

if TYPE_CHECKING:
    from tpuport.kernels.attention.choice import AttentionChoice


def names_of(component: Component) -> tuple[str, ...]:
    """The implementations of a component; the first one is the default."""
    return (TORCHAX, *component.implementations)


def chosen_of(port: ModelPort, component: str) -> str:
    """The name of the implementation in place."""
    return port.chosen.get(component, TORCHAX)


def attention_of(
    port: ModelPort, component: str, asked: AttentionChoice
) -> AttentionChoice:
    """The attention of a component: options are for what denoises."""
    return asked if component in port.denoisers else asked.plain


def dtype_of(port: ModelPort, component: str, asked: str) -> str:
    """The dtype of a component's weights: the component's own, or ``asked``."""
    return port.components[component].dtype or asked


def implementation_of(port: ModelPort, component: str) -> Implementation | None:
    """The implementation in place; ``None`` for upstream's class."""
    return port.components[component].implementation(chosen_of(port, component))


def choices(port: ModelPort, components: Iterable[str] | None = None) -> dict[str, str]:
    """What is in place of every component that has a choice.

    Args:
        components: of these alone.
    """
    names = port.components if components is None else components
    return {
        name: chosen_of(port, name)
        for name in names
        if port.components[name].implementations
    }


def check_chosen(port: ModelPort, asked: Mapping[str, str]) -> None:
    """Refuse what no form of a model has, before its checkpoint is looked for.

    Raises:
        UsageError: an implementation that there is not; the message has those there
            are.
    """
    for component, name in asked.items():
        found = [f.components.get(component) for f in port.all_forms]
        known = dict.fromkeys(n for c in found if c is not None for n in names_of(c))
        _check(port, component, name, tuple(known))


def with_chosen(port: ModelPort, asked: Mapping[str, str]) -> ModelPort:
    """This form of a model with the implementations asked for in place.

    Args:
        asked: component -> the name of an implementation.

    Raises:
        UsageError: the form has no such component or implementation, or another one is
            in place already.
        PluginError: an implementation leaves out a program.
    """
    for component, name in asked.items():
        found = port.components.get(component)
        _check(port, component, name, names_of(found) if found else ())
        before = chosen_of(port, component)
        if name == before:
            continue
        if before != TORCHAX:
            raise UsageError(f"{port.name} already has the {before} {component}")
        assert found is not None
        implementation = found.implementation(name)
        assert implementation is not None
        # What is cut, stacked and turned is of upstream's class.
        put = replace(found, split=None, stacked=(), native=None, transforms=())
        port = replace(
            port,
            components={**port.components, component: put},
            stages=tuple(
                _replaced(stage, component, name, implementation)
                for stage in port.stages
            ),
            chosen={**port.chosen, component: name},
        )
    return port


def _check(port: ModelPort, component: str, name: str, known: tuple[str, ...]) -> None:
    # Every component has upstream's class, also one that this model does not know.
    if name != TORCHAX and name not in known:
        has = ", ".join(known) or f"no {component}"
        raise UsageError(f"{component} {name!r}: {port.name} has {has}")


def _replaced(
    stage: Stage, component: str, name: str, implementation: Implementation
) -> Stage:
    own = {n for n, p in stage.programs.items() if p.component == component}
    given = dict(implementation.programs.get(stage.name, {}))
    wrong = own ^ given.keys() or {
        n for n, program in given.items() if program.component != component
    }
    if wrong:
        raise PluginError(
            f"the {name} {component} has other programs of the stage {stage.name} than "
            f"the component: {', '.join(sorted(wrong))}"
        )
    if not own:
        return stage
    return replace(stage, programs={**stage.programs, **given})
