"""tpuport: PyTorch video-diffusion pipelines on TPUs, exact, sharded and compiled.

>>> import tpuport
>>> pipe = tpuport.port(pipe)
>>> video = pipe("a panda plays a guitar").frames[0]
"""

from __future__ import annotations

TYPE_CHECKING = False  # of `typing`, which takes milliseconds to import
if TYPE_CHECKING:
    from typing import Any

    from tpuport.api import port, ported, preview, unport
    from tpuport.errors import TpuportError

__all__ = ["TpuportError", "__version__", "port", "ported", "preview", "unport"]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Importing tpuport must stay quick: each name comes with what it needs.
    if name == "TpuportError":
        from tpuport.errors import TpuportError

        return TpuportError
    if name in ("port", "ported", "preview", "unport"):
        from tpuport import api

        return getattr(api, name)
    raise AttributeError(f"module 'tpuport' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
