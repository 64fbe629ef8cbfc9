"""What a run is looked at with: memory, a trace, or its ops one by one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tpuport.errors import UsageError

#: Calls of a stage in a trace: enough to see one after another, and still small.
PROFILED_CALLS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Inspection:
    """How a session looks at its stages. Without any of it, nothing is slower.

    Attributes:
        memory: note the bytes in use and their peak after each call.
        profile: folder for a trace of steady calls of each stage.
        profile_calls: how many calls of a stage are traced.
        no_jit: stages that run op by op.
    """

    memory: bool = False
    profile: Path | None = None
    profile_calls: int = PROFILED_CALLS
    no_jit: tuple[str, ...] = ()

    def check(self, stages: Sequence[str]) -> None:
        """Refuse what cannot be.

        Args:
            stages: those of the model.

        Raises:
            UsageError: no calls to trace, or a stage that there is not.
        """
        if self.profile_calls < 1:
            raise UsageError(
                f"{self.profile_calls} calls cannot be profiled; give at least 1"
            )
        for name in self.no_jit:
            if name not in stages:
                raise UsageError(
                    f"no stage is called {name!r}; there are {', '.join(stages)}"
                )
