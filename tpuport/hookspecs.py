"""The hooks a tpuport plugin may implement.

A plugin is a module named by an entry point of the group ``tpuport``. See
``docs/plugin-hooks.md`` and ``docs/port-a-model.md``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from tpuport.core.spec.model_plugin import ModelPlugin

GROUP = "tpuport"
"""Entry-point group and pluggy project name."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)


@hookspec
def tpuport_model() -> ModelPlugin:  # type: ignore[empty-body]
    """Hand over what the package knows of a model.

    Called once, when the plugins are loaded; it must import neither torch nor jax, so
    that ``tpuport --help`` and ``tpuport models`` stay quick. What needs them goes into
    modules that the plugin names.

    Returns:
        The plugin. Its ``name`` must not be taken by another plugin.
    """
