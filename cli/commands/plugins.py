"""``tpuport plugins``: where the models come from."""

from __future__ import annotations

from tpuport.cli.asked.options import Debug, Json
from tpuport.cli.shown.errors import reported
from tpuport.cli.shown.output import print_json
from tpuport.cli.shown.tables import columns
from tpuport.plugins import installed_plugins


def plugins(json: Json = False, debug: Debug = False) -> None:
    """List the installed plugins."""
    with reported(debug=debug):
        found = list(installed_plugins().values())
        if json:
            print_json(
                {
                    "plugins": [
                        {
                            "name": plugin.name,
                            "package": plugin.package,
                            "module": plugin.module,
                            "model": plugin.port.name,
                        }
                        for plugin in found
                    ]
                }
            )
            return
        rows = [("NAME", "PACKAGE", "MODULE", "MODEL")]
        rows += [(p.name, p.package, p.module, p.port.name) for p in found]
        print("\n".join(columns(rows)))
