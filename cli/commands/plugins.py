"""``tpuport plugins``: where the models come from."""

from __future__ import annotations

from tpuport.cli.asked.options import command
from tpuport.cli.asked.settings import Settings
from tpuport.cli.shown.output import print_json
from tpuport.cli.shown.tables import columns
from tpuport.plugins import installed_plugins


@command("plugins")
def plugins(settings: Settings) -> None:
    """List the installed plugins.

    Example: tpuport plugins
    """
    found = [
        (plugin.name, plugin.package, plugin.module, plugin.model.name)
        for plugin in installed_plugins().values()
    ]
    if settings.json:
        keys = ("name", "package", "module", "model")
        print_json({"plugins": [dict(zip(keys, row, strict=True)) for row in found]})
    else:
        print("\n".join(columns([("NAME", "PACKAGE", "MODULE", "MODEL"), *found])))
